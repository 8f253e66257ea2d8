"""TensorBoard and W&B get the same metrics; completions are tables."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from tba.config.schema import Config, load
from tba.runs.folder import SAMPLES, SUMMARY, read, rewind
from tba.runs.journal import Journal
from tba.runs.metrics import PANELS, panel_values
from tba.setup.setup import check
from tba.tools.report.runs import OTHERS, Charts

ROOT = Path(__file__).parents[2]
METRICS = {
    "time": 2.0, "reward": 0.5, "rewards/format/mean": 0.25, "kl": 0.01,
    "sync/logp_gap": float("nan"), "loss": 1.0,
}  # fmt: skip
EVERY = {
    metric.name.replace("*", "format"): 0.25 + number / 4
    for number, metric in enumerate(metric for panel in PANELS for metric in panel.metrics)
}
"""A value for each metric of the first screen, of which a reward function has one as well."""


def config(*settings: str) -> Config:
    return load(None, ["log.report_to=[]", *settings])


def write(folder: Path, given: Config) -> None:
    """Log two steps, with two samples after the first, and a warning."""
    journal = Journal(folder, given)
    journal.row(1, METRICS)
    journal.sample(1, "train", "1+1=", "2", 1.0, 0, id="train-3", columns={"answer": 2})
    journal.sample(1, "eval", "1+2=", "<b>", None, 1)
    journal.row(5, METRICS)
    journal.sample(5, "train", "1+1=", "3", 0.0, 1)
    journal.warn(5, "reuse", "too few")
    journal.close()


def test_there_are_twelve_panels_of_metrics_that_have_one_place():
    assert len(PANELS) == 12
    metrics = [metric.name for panel in PANELS for metric in panel.metrics]
    labels = [metric.label for panel in PANELS for metric in panel.metrics]
    assert len(set(metrics)) == len(metrics) and len(set(labels)) == len(labels)
    labels = [(name, label) for name, label, _ in panel_values(METRICS)]
    assert labels == [("reward", "reward"), ("rewards/format/mean", "format"), ("kl", "kl")]


def test_the_report_has_the_panels_and_not_their_metrics_among_all_others():
    tables = [pd.DataFrame([EVERY])]
    charts = Charts(tables).panels()
    assert [chart["title"] for chart in charts] == [panel.title for panel in PANELS]
    assert [name for chart in charts for name in chart["metrics"]] == list(EVERY)
    assert OTHERS not in Charts(tables).sections()


class Recorder:
    """A service that keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def log(self, metrics: dict[str, Any]) -> None:
        self.calls.append(("log", metrics))

    def define_metric(self, name: str, step_metric: str) -> None:
        self.calls.append(("define", (name, step_metric)))

    def alert(self, title: str, text: str) -> None:
        self.calls.append(("alert", text))

    def finish(self) -> None:
        self.calls.append(("finish", None))

    def logged(self, name: str) -> list[dict[str, Any]]:
        return [given for kind, given in self.calls if kind == "log" and name in given]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> tuple[Recorder, dict[str, Any]]:
    """A stand-in in the place of the package, and what its run is opened with."""
    recorder, opened = Recorder(), {}
    module: Any = ModuleType("wandb")
    module.Table = lambda dataframe: dataframe.to_dict("records")
    module.init = lambda **options: opened.update(options) or recorder
    monkeypatch.setitem(sys.modules, "wandb", module)
    return recorder, opened


def test_wandb_gets_metrics_and_tables(wandb, tmp_path, monkeypatch):
    recorder, opened = wandb
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    write(tmp_path, config("log.report_to=wandb"))
    assert opened["name"] == tmp_path.name and opened["resume"] == "allow"
    assert opened["id"] == (tmp_path / "wandb_id").read_text()
    assert opened["project"] == "mine"
    first, second = recorder.logged("loss")
    assert (first["kl"], first["step"], second["step"]) == (0.01, 1, 5)
    tables = [given["completions"] for given in recorder.logged("completions")]
    assert [[row["completion"] for row in table] for table in tables] == [["2", "<b>"], ["3"]]
    assert tables[1][0]["lag"] == 3
    assert recorder.calls[0] == ("define", ("*", "step"))
    assert recorder.calls[-3][0] == "alert" and recorder.calls[-1] == ("finish", None)
    write(tmp_path, config("log.report_to=wandb"))
    assert opened["id"] == (tmp_path / "wandb_id").read_text()


def test_wandb_has_no_step_twice(wandb, tmp_path):
    """A run that repeats steps is a new one there, and has the steps before them."""
    recorder, opened = wandb
    write(tmp_path, config("log.report_to=wandb"))
    first = opened["id"]
    for step, is_new in ((5, False), (3, True)):
        recorder.calls.clear()
        rewind(tmp_path, step, evaluates=False)
        Journal(tmp_path, config("log.report_to=wandb"), step).row(step + 1, METRICS)
        assert (opened["id"] != first) == is_new
    rows = recorder.logged("loss")
    assert [row["step"] for row in rows] == [1, 4] and rows[0]["kl"] == 0.01
    assert (tmp_path / "wandb_id").read_text() == opened["id"]


def test_all_metrics_reach_each_service(wandb, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    journal = Journal(tmp_path, load(None, ["log.report_to=['tensorboard','wandb']"]))
    journal.row(1, EVERY)
    journal.close()
    (row,) = wandb[0].logged("reward")
    assert EVERY.items() <= row.items()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert EVERY.keys() <= {*events.Tags()["scalars"]}


def test_tensorboard_gets_completions_and_settings(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, load(None, ["trainer.learning_rate=0.003"]))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (first, second) = events.Tensors("completions/train/text_summary")
    assert (first.step, second.step) == (1, 5)
    text = second.tensor_proto.string_val[0].decode()
    assert "    1+1=" in text and "    3" in text and "reward 0.0" in text
    settings = events.summary_metadata["_hparams_/session_start_info"]
    assert b"trainer.learning_rate" in settings.plugin_data.content


def test_a_service_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"log\.report_to = wandb: .*wandb.*; pip install -e"):
        check(config("log.report_to=wandb"))


def test_weights_and_biases_without_a_key_is_one_sentence(monkeypatch):
    module: Any = ModuleType("wandb")
    module.__spec__ = SimpleNamespace()

    def refuse() -> None:
        raise RuntimeError("No API key configured.\nUse `wandb login` to log in.")

    module.login = refuse
    monkeypatch.setitem(sys.modules, "wandb", module)
    told = r"^log\.report_to = wandb: No API key configured\.; .*type `wandb login`, set"
    with pytest.raises(ValueError, match=told):
        check(config("log.report_to=wandb"))


SHORT = [
    "runtime.use=local", "run.steps=3", "task.train_size=40", "task.held_out_size=8",
    "eval.prompts=3", "eval.samples=2", "eval.k=[2]", "trainer.batch_size=16",
    "trainer.warmup_steps=0", "log.console=off", "log.report_to=[]", "log.sample_every=1",
]  # fmt: skip


def carry_out(environment: dict[str, str], *arguments: str) -> str:
    """Run Python in a process with these variables beside ours; return its output."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    own |= {"PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=own, capture_output=True, text=True, check=True).stdout


def test_wandb_keeps_a_run_without_a_network(tmp_path):
    """The package itself, where it is installed: its tables are files, its metrics a binary log."""
    pytest.importorskip("wandb", reason="an extra: pip install -e '.[wandb]'")
    folder, offline = tmp_path / "run", {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    train = ("-m", "tba.cli", "train", f"run.folder={folder}", "log.report_to=wandb", *SHORT)
    carry_out({**offline, "HOME": str(tmp_path)}, *train)
    files = folder.glob("wandb/offline-*/files/media/table/*.json")
    tables = [json.loads(file.read_text()) for file in files]
    kept = [dict(zip(t["columns"], row, strict=True)) for t in tables for row in t["data"]]
    samples = [row.items() for row in read(folder / SAMPLES)]
    assert samples and len(samples) == len(kept)
    assert all(any(row <= other.items() for other in kept) for row in samples)
    (log,) = folder.glob("wandb/offline-*/*.wandb")
    warning, *_ = json.loads((folder / SUMMARY).read_text())["warnings"]
    for text in ("kl/k3", "grad_norm", warning):
        assert text.encode() in log.read_bytes(), text

"""TensorBoard and W&B get the same panels; completions are tables."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from tba.config.schema import Config, load
from tba.report.runs import OTHERS, Charts
from tba.runs.journal import Journal
from tba.runs.log import SAMPLES, SUMMARY, read
from tba.runs.metrics import FIRST_SCREEN, PANELS, first_screen, tensorboard_layout
from tba.runs.setup import check

ROOT = Path(__file__).parents[2]
METRICS = {
    "time": 2.0,
    "reward": 0.5,
    "rewards/format/mean": 0.25,
    "kl": 0.01,
    "sync/logp_gap": float("nan"),
    "loss": 1.0,
}
EVERY = {
    metric.name.replace("*", "format"): 0.25 + number / 4
    for number, metric in enumerate(metric for panel in PANELS for metric in panel.metrics)
}
"""A value for each metric of the first screen, of which a reward function has one as well."""
SCREEN = {
    f"{FIRST_SCREEN}/01 reward": 0.5,
    f"{FIRST_SCREEN}/01 format": 0.25,
    f"{FIRST_SCREEN}/04 kl": 0.01,
}


def config(*settings: str) -> Config:
    return load(None, ["log.tensorboard=false", *settings])


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
    assert first_screen(METRICS) == SCREEN


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


def test_wandb_gets_metrics_panels_and_tables(wandb, tmp_path):
    recorder, opened = wandb
    write(tmp_path, config("log.wandb=true"))
    assert opened["name"] == tmp_path.name and opened["resume"] == "allow"
    assert opened["id"] == (tmp_path / "wandb_id").read_text()
    first, second = recorder.logged("loss")
    assert SCREEN.items() <= first.items() and (first["step"], second["step"]) == (1, 5)
    tables = [given["completions"] for given in recorder.logged("completions")]
    assert [[row["completion"] for row in table] for table in tables] == [["2", "<b>"], ["3"]]
    assert tables[1][0]["lag"] == 3
    assert recorder.calls[0] == ("define", ("*", "step"))
    assert recorder.calls[-3][0] == "alert" and recorder.calls[-1] == ("finish", None)
    write(tmp_path, config("log.wandb=true"))
    assert opened["id"] == (tmp_path / "wandb_id").read_text()


def test_all_twelve_panels_reach_each_service(wandb, tmp_path):
    """W&B as values by panel, and TensorBoard as charts of the metrics."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    journal = Journal(tmp_path, load(None, ["log.wandb=true"]))
    journal.row(1, EVERY)
    journal.close()
    screen = first_screen(EVERY)
    numbers = {name.removeprefix(f"{FIRST_SCREEN}/")[:2] for name in screen}
    assert numbers == {f"{number:02}" for number in range(1, 13)} and len(screen) == len(EVERY)
    (row,) = wandb[0].logged("reward")
    assert screen.items() | EVERY.items() <= row.items()
    layout = tensorboard_layout()[FIRST_SCREEN]
    charts = list(layout.values())
    assert len(charts) == 12
    patterns = [[re.compile(tag) for tag in tags] for _, tags in charts]
    for name in EVERY:
        assert sum(any(p.search(name) for p in own) for own in patterns) == 1, name
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert EVERY.keys() <= {*events.Tags()["scalars"]}
    (event,) = events.Tensors("custom_scalars__config__")
    (category,) = Layout.FromString(event.tensor_proto.string_val[0]).category
    assert [chart.title for chart in category.chart] == list(layout)
    assert list(category.chart[0].multiline.tag) == ["^reward$", "^rewards/.*/mean$"]


def test_a_service_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("tba.runs.journal.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"log\.wandb = true needs the package wandb: pip"):
        check(config("log.wandb=true"))


def test_weights_and_biases_without_a_key_is_one_sentence(monkeypatch):
    module: Any = ModuleType("wandb")
    module.__spec__ = SimpleNamespace()

    def refuse() -> None:
        raise RuntimeError("No API key configured.\nUse `wandb login` to log in.")

    module.login = refuse
    monkeypatch.setitem(sys.modules, "wandb", module)
    told = r"^log\.wandb = true, but .* refuses: No API key configured\.; type `wandb login`, set"
    with pytest.raises(ValueError, match=told):
        check(config("log.wandb=true"))


SHORT = [
    "runtime.use=local", "run.steps=3", "task.train_size=40", "task.held_out_size=8",
    "eval.prompts=3", "eval.samples=2", "eval.k=[2]", "trainer.batch_size=16",
    "trainer.warmup_steps=0", "log.console=off", "log.tensorboard=false", "log.sample_every=1",
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
    train = ("-m", "tba.cli", "train", f"run.folder={folder}", "log.wandb=true", *SHORT)
    carry_out({**offline, "HOME": str(tmp_path)}, *train)
    files = folder.glob("wandb/offline-*/files/media/table/*.json")
    tables = [json.loads(file.read_text()) for file in files]
    kept = [dict(zip(t["columns"], row, strict=True)) for t in tables for row in t["data"]]
    samples = [row.items() for row in read(folder / SAMPLES)]
    assert samples and len(samples) == len(kept)
    assert all(any(row <= other.items() for other in kept) for row in samples)
    (log,) = folder.glob("wandb/offline-*/*.wandb")
    warning, *_ = json.loads((folder / SUMMARY).read_text())["warnings"]
    for text in (f"{FIRST_SCREEN}/04 kl", "grad_norm", warning):
        assert text.encode() in log.read_bytes(), text

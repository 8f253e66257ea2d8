"""Sweeps: real runs in processes of their own, and scripted processes for what can go wrong."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from suite import until
from toy import Ones

from tba.child import Child
from tba.config.schema import Config
from tba.open import run
from tba.prompt import Answer, Prompt
from tba.runs.folder import locked, read
from tba.runtime.placement import available_cores
from tba.tools.study import FAILED, Study, check_study, read_ledger, read_study, write_results
from tba.tools.sweep import INTERRUPTED, as_left, prepare, sweep

STEPS = 40
BASE = """
[study]
folder = "{folder}"
parallel = 2
keep_checkpoints = false
[base]
task = "toy.Ones"
policy = {{ model = "{model}" }}
runtime = {{ use = "local" }}
run = {{ steps = 40 }}
sampling = {{ samples = 4, max_tokens = 3 }}
trainer = {{ batch_size = 8, group_size = 4, learning_rate = 1e-3 }}
eval = {{ prompts = 4, samples = 2, k = [1] }}
checkpoint = {{ every = 0 }}
reward = {{ isolate = "none" }}
"""
SEEDS = '[[grid]]\nname = "all"\n"run.seed" = {}\n'
REAL = """
[[grid]]
name = "all"
variants = [
    { label = "sound", "run.seed" = 0 },
]
"""


@dataclass(frozen=True)
class Placed(Ones):
    """Scoring fails, and the error says where it ran."""

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        alone = os.getsid(0) == os.getpid()
        threads, first = os.environ["OMP_NUM_THREADS"], sys.stdin.read(1)
        raise RuntimeError(
            f"{len(available_cores())} cores, {threads} threads, alone: {alone}, stdin: {first!r}"
        )


def write(folder: Path, model: Path, grids: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pairs.toml"
    path.write_text(BASE.format(folder=folder / "runs", model=model) + grids)
    return path


def statuses(study: Study) -> dict[str, str]:
    return {t.folder.partition("/")[2]: t.status for t in read_ledger(study.folder).runs}


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read(run / "metrics.jsonl") if "loss" in row]


@pytest.fixture(scope="module")
def carried_out(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A study with a run that finishes."""
    path = write(tmp_path_factory.mktemp("study"), tiny_model, REAL)
    assert sweep(path) == 0
    return path


def test_the_outcome_of_each_run_is_in_its_folder(carried_out):
    study = read_study(carried_out)
    assert statuses(study) == {"sound": "finished"}
    sound = study.folder / "all" / "sound"
    assert json.loads((sound / "summary.json").read_text())["steps"] == STEPS
    assert len(losses(sound)) == STEPS
    assert not (sound / "checkpoints").exists() and not (sound / "tensorboard").exists()


@pytest.mark.slow
def test_a_run_has_its_own_cores_and_session_and_nothing_to_read(tmp_path, tiny_model):
    placed = '{ label = "placed", "task.use" = "test_sweep.Placed" }'
    path = write(tmp_path, tiny_model, f'[[grid]]\nname = "all"\nvariants = [{placed}]\n')
    assert sweep(path) == 2
    error = json.loads((read_study(path).folder / "all/placed" / FAILED).read_text())
    cores = max(1, len(available_cores()) // 2)
    assert f"{cores} cores, {cores} threads, alone: True, stdin: ''" in error["error"]
    assert "Traceback" in error["traceback"]


def test_a_row_has_the_results_of_a_run(carried_out):
    study = read_study(carried_out)
    row = json.loads((study.folder / "results.json").read_text())[0]
    assert (row["grid"], row["objective"], row["seed"]) == ("all", "tb", 0)
    assert row["settings"] == {"run.seed": 0} and row["status"] == "finished"
    assert row["last"] == row["sampled_pass@1"] <= row["peak"]
    assert 0 <= row["drop"] <= row["peak"]
    assert row["steps"] == STEPS and row["samples_trained"] == 8 * STEPS and row["seconds"] > 0
    assert row["kl"] is not None and row["log_ratio"] is not None and row["lag_mean"] is not None


def test_a_run_of_another_config_is_not_taken_for_this_one(carried_out):
    problem = (
        r"all/sound holds a run with another config \(trainer.weight_decay = 0.0 there, 0.5 here"
    )
    with pytest.raises(ValueError, match=problem):
        sweep(carried_out, ["trainer.weight_decay=0.5"])
    assert sweep(carried_out, ["log.sample_every=7"]) == 0  # logging does not change a run


def test_a_study_with_epochs_and_any_path_is_continued(tmp_path, tiny_model, monkeypatch):
    """The file of the same data may be written in another way."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))  # the study adds to it
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}+1="}}\n' for i in range(6)))
    (tmp_path / "ones.py").write_text("def ones(completions):\n    return [1.0, 0.0] * 2\n")
    path = write(tmp_path, tiny_model, SEEDS.format([0]))
    options = 'data = "./rows.jsonl", reward = "./ones.py:ones", held_out_size = 0'
    text = path.read_text().replace('"toy.Ones"', f'{{ use = "custom", {options} }}')
    path.write_text(text.replace("steps = 40", "epochs = 1").replace("prompts = 4", "prompts = 0"))
    (config,) = check_study(read_study(path))
    assert run(config).steps == 3
    for data in ("./rows.jsonl", tmp_path / "rows.jsonl", "~/rows.jsonl"):
        study = read_study(path, [f"task.data={data}"])
        (config,) = check_study(study)
        assert as_left(study, study.trials[0], config).status == "finished"


@pytest.mark.fault
def test_a_killed_sweep_leaves_no_run_behind_and_the_next_one_continues_it(
    tmp_path, tiny_model, carried_out
):
    """The losses are those of a run that was not interrupted."""
    path = write(tmp_path, tiny_model, REAL)
    study = read_study(path)
    run = study.path(study.trials[0])
    code = "import sys; from tba.tools.sweep import sweep; from pathlib import Path;"
    code += "sweep(Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen([sys.executable, "-c", code, str(path)], env=environment) as process:
        until(lambda: len(losses(run)) >= 5, 120)
        process.kill()
    until(lambda: list(run.glob("checkpoints/step-*")), 120)
    assert 5 <= len(losses(run)) < STEPS
    assert sweep(path) == 0
    assert losses(run) == losses(read_study(carried_out).folder / "all" / "sound")


SCRIPT = """
import json, os, pathlib, signal, time

def work(folder, seed):
    run = pathlib.Path(folder)
    (run / "checkpoints" / "step-00000001").mkdir(parents=True, exist_ok=True)
    if seed == 1:
        os.kill(os.getpid(), 9)
    if seed == 3 and not (run.parent / "ready").exists():
        (run / "failed.json").write_text(json.dumps({"error": "RuntimeError: not ready"}))
    elif seed == 6:
        signal.signal(signal.SIGTERM, lambda *_: (run / "asked").open("a").write("x"))
        (run.parent / "waiting").touch()
        while not (run / "asked").exists():
            time.sleep(0.01)
    elif seed == 4:
        (run / "failed.json").write_text(json.dumps({"error": "NotFinite: step 2: loss nan"}))
    else:
        last = {"sampled_pass@1": 0.5, "step": 3.0}
        (run / "summary.json").write_text(json.dumps({
            "finished": True, "steps": 3, "seconds": 1.0, "samples_generated": 24,
            "samples_trained": 24, "eval/last": last,
        }))
"""


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return the list of processes started, which only write files; seeds 1, 3 and 4 go wrong."""
    started: list[str] = []
    (tmp_path / "scripted_run.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)

    def start(config: Config, resume: bool, cores: list[int], log: Path) -> Child:
        started.append(Path(config.run.folder).name + (" resumed" if resume else ""))
        return Child("scripted_run:work", config.run.folder, config.run.seed)

    monkeypatch.setattr("tba.tools.sweep.start_run", start)
    return started


def test_failures_stay_with_the_run_that_failed(tmp_path, tiny_model, scripted, capsys):
    path = write(tmp_path, tiny_model, SEEDS.format([0, 1, 2, 3, 4]))
    study = read_study(path)
    assert sweep(path) == 2
    ends = ["finished", "failed", "finished", "failed", "failed"]
    assert statuses(study) == {f"seed={seed}": end for seed, end in enumerate(ends)}
    assert "its process died (exit code -9)" in read_ledger(study.folder).runs[1].error
    assert scripted == [f"seed={seed}" for seed in range(5)]
    out = capsys.readouterr().out
    assert f"failed: {study.folder}/all/seed=1: its process died" in out
    assert f"failed: {study.folder}/all/seed=3: RuntimeError: not ready" in out
    assert f"`tba sweep {path} --retry-failed`" in out
    assert f"failed: {study.folder}/all/seed=4" not in out  # to diverge is a result
    assert not (study.folder / "all/seed=0/checkpoints").exists()

    scripted.clear()
    assert sweep(path) == 2 and not scripted
    assert "5 runs, 5 of them ended earlier" in capsys.readouterr().out
    (study.folder / "all" / "ready").touch()
    finished = study.folder / "all" / "seed=2"
    (finished / "failed.json").write_text(json.dumps({"error": "it was then finished by hand"}))
    assert sweep(path, retry_failed=True) == 2  # seed 1 dies whenever it runs
    assert (finished / "failed.json").exists()
    assert scripted == ["seed=1", "seed=3", "seed=4"]
    assert statuses(study)["seed=3"] == "finished"
    table = write_results(study.folder)
    assert list(table["status"]) == ["finished", "failed", "finished", "finished", "failed"]
    assert "NaN" not in (study.folder / "results.json").read_text()


def test_a_study_says_which_runs_of_its_folder_it_no_longer_has(
    tmp_path, tiny_model, scripted, capsys
):
    """They may be runs of another study."""
    for seeds, told in (([0, 2], False), ([0, 2], False), ([2], True)):
        assert sweep(write(tmp_path, tiny_model, SEEDS.format(seeds))) == 0
        text = "1 runs of study.json are not in"
        assert (
            f"{text} {tmp_path}/pairs.toml, such as all/seed=0" in capsys.readouterr().out
        ) == told
    assert scripted == ["seed=0", "seed=2"]


def test_a_signal_stops_each_run_once_and_the_sweep_with_its_status(
    tmp_path, tiny_model, scripted, capsys
):
    path = write(tmp_path, tiny_model, SEEDS.format([0, 6, 7]))
    study = read_study(path)

    def stop() -> None:
        until((study.folder / "all" / "waiting").exists, 120)
        until(lambda: statuses(study)["seed=7"] == "finished", 120)
        os.kill(os.getpid(), signal.SIGTERM)

    stopping = threading.Thread(target=stop)
    stopping.start()
    assert sweep(path) == INTERRUPTED
    stopping.join()
    assert capsys.readouterr().out.splitlines()[-1] == f"stopped; continue with `tba sweep {path}`"
    assert (study.folder / "all/seed=6/asked").read_text() == "x"
    assert statuses(study) == {"seed=0": "finished", "seed=6": "pending", "seed=7": "finished"}


def test_a_dry_run_lists_the_runs_and_starts_none(tmp_path, tiny_model, capsys):
    assert sweep(write(tmp_path, tiny_model, SEEDS.format([0, 1])), dry_run=True) == 0
    lines = capsys.readouterr().out.splitlines()
    folder = tmp_path / "runs"
    assert lines == ["all/seed=0", "all/seed=1", f"config OK (dry run): 2 runs in {folder}"]
    assert not folder.exists()


def test_two_sweeps_do_not_share_a_folder(tmp_path, tiny_model):
    path = write(tmp_path, tiny_model, SEEDS.format([0]))
    (tmp_path / "runs").mkdir()
    with locked(tmp_path / "runs"):
        problem = rf"in use by process {os.getpid()} on .*choose another folder with study\.folder="
        with pytest.raises(ValueError, match=problem):
            sweep(path)


def test_a_sweep_waits_for_a_run_that_another_one_has_left(tmp_path):
    """It saves before it ends: what it has written is resumed and not removed."""
    held = threading.Event()

    def end() -> None:
        with locked(tmp_path):
            held.set()
            time.sleep(0.3)
            (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)

    ending = threading.Thread(target=end)
    ending.start()
    held.wait(10)
    assert prepare(tmp_path)
    ending.join()

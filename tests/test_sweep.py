"""Studies: what a file says, and many runs carried out by real processes, whatever happens to them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from toy import Ones

from tba.runs.log import read
from tba.runtime.placement import available_cores
from tba.studies.results import FAILED, read_ledger, standing, write_failed, write_results
from tba.studies.study import Study, check_study, read_study
from tba.studies.sweep import INTERRUPTED, Sweep, as_left, sweep
from tba.studies.workers import start
from tba.types import Answer, Prompt

TBA = Path(sys.executable).with_name("tba")
BASE = """
[base]
task = "toy.Ones"
policy = {{ model = "{model}" }}
runtime = {{ use = "local" }}
run = {{ steps = 3 }}
sampling = {{ samples = 4, max_tokens = 3 }}
trainer = {{ batch_size = 8, group_size = 4, learning_rate = 1e-3 }}
eval = {{ prompts = 4, samples = 2, k = [1] }}
checkpoint = {{ every = 0 }}
[base.objective]
use = "tb"
beta = 0.1
"""
GRIDS = """
[[grid]]
name = "rates"
"objective.use" = ["tb", "rloo"]
"trainer.learning_rate" = [1e-3, 1e-2]
"run.seed" = [0]
[[grid]]
name = "often"
best = "rates"
objective.use = ["tb", "rloo"]
"runtime.publish_every" = [1, 2]
"run.seed" = 1
"""
LONG = '[[grid]]\nname = "long"\n"run.seed" = [0]\n'


@dataclass(frozen=True)
class Deadly(Ones):
    """Scoring ends the process, the first time or always."""

    marker: str = ""

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        if not self.marker or not Path(self.marker).exists():
            if self.marker:
                Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().score(prompt, answers)


@dataclass(frozen=True)
class Unready(Ones):
    """Scoring fails until there is a file."""

    marker: str = ""

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        if not Path(self.marker).exists():
            raise RuntimeError("not ready")
        return super().score(prompt, answers)


@dataclass(frozen=True)
class Placed(Ones):
    """Scoring tells where it is."""

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        raise RuntimeError(
            f"{available_cores()} threads: {os.environ['OMP_NUM_THREADS']}, ctrl-c blocked: {blocked}, alone: {os.getsid(0) == os.getpid()}"
        )


def write(folder: Path, model: Path, grids: str = GRIDS, table: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pairs.toml"
    path.write_text(
        f'[study]\nfolder = "{folder / "runs"}"\n{table}\n' + BASE.format(model=model) + grids
    )
    return path


def statuses(study: Study) -> dict[str, str]:
    return {
        r["folder"]: r["status"]
        for r in json.loads((study.folder / "study.json").read_text())["runs"]
    }


@pytest.fixture(scope="module")
def carried_out(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    path = write(
        tmp_path_factory.mktemp("study"), tiny_model, table="keep_checkpoints = false\nparallel = 2"
    )
    assert sweep(path) == 0
    return path


def test_every_run_is_a_plain_run_folder(carried_out):
    study = read_study(carried_out)
    assert statuses(study) == {
        **{
            f"rates/use={use},learning_rate={rate},seed=0": "finished"
            for use in ("tb", "rloo")
            for rate in ("0.001", "0.01")
        },
        **{
            f"often/use={use},publish_every={k}": "finished"
            for use in ("tb", "rloo")
            for k in (1, 2)
        },
    }
    for name in statuses(study):
        assert json.loads((study.folder / name / "summary.json").read_text())["steps"] == 3
        assert len(read(study.folder / name / "metrics.jsonl")) >= 3
        assert not (study.folder / name / "checkpoints").exists()
        assert not (study.folder / name / "tensorboard").exists()


def test_the_best_of_an_earlier_grid_is_inherited_by_what_is_alike(carried_out):
    study = read_study(carried_out)
    rows = {r["folder"]: r for r in write_results(study.folder)}
    choices = json.loads((study.folder / "study.json").read_text())["choices"]
    assert [c["matched"] for c in choices] == [{"objective.use": "tb"}, {"objective.use": "rloo"}]
    for use in ("tb", "rloo"):
        rates = {
            rate: rows[f"rates/use={use},learning_rate={rate},seed=0"]["sampled_pass@1"]
            for rate in (0.001, 0.01)
        }
        for k in (1, 2):
            config = json.loads(
                (study.folder / f"often/use={use},publish_every={k}" / "config.json").read_text()
            )
            assert config["trainer"]["learning_rate"] == max(rates, key=lambda rate: rates[rate])
            assert (
                config["objective"]["use"],
                config["runtime"]["publish_every"],
                config["run"]["seed"],
            ) == (use, k, 1)
            assert config["objective"]["beta"] == (
                0.1 if use == "tb" else 0.05
            )  # another objective drops the options of the one before


def test_what_is_finished_is_not_done_again(carried_out, capsys):
    study = read_study(carried_out)
    before = {p: p.stat().st_mtime_ns for p in study.folder.rglob("metrics.jsonl")}
    before_it = (study.folder / "study.json").read_text()
    assert sweep(carried_out) == 0
    assert "8 runs, 8 of them ended before" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in study.folder.rglob("metrics.jsonl")} == before
    assert (study.folder / "study.json").read_text() == before_it


def test_a_run_of_another_config_is_not_taken_for_this_one(carried_out):
    with pytest.raises(
        ValueError,
        match=r"rates/use=tb.* holds a run with another config \(trainer.weight_decay = 0.0 there, 0.5 here\); remove that folder",
    ):
        sweep(carried_out, ["trainer.weight_decay=0.5"])
    assert sweep(carried_out, ["log.sample_every=7"]) == 0  # what is logged makes no other run


def test_a_row_has_what_a_study_is_judged_by(carried_out):
    study = read_study(carried_out)
    row = json.loads((study.folder / "results.json").read_text())[0]
    assert (
        row["grid"] == "rates"
        and row["objective"] == "tb"
        and row["seed"] == 0
        and row["settings"]["trainer.learning_rate"] == 0.001
    )
    assert (
        row["last"] == row["sampled_pass@1"]
        and row["peak"] >= row["last"]
        and 0 <= row["drop"] <= row["peak"]
    )
    assert (
        row["steps"] == 3
        and row["samples_trained"] == 24
        and row["seconds"] > 0
        and row["status"] == "finished"
    )
    assert row["kl"] is not None and row["lag_mean"] is not None


def test_failures_stay_with_the_run_that_failed(tmp_path, tiny_model, capsys):
    once, ready = tmp_path / "once", tmp_path / "ready"
    variants = f"""
    [[grid]]
    name = "all"
    "run.seed" = [0]
    variants = [
        {{ label = "diverges", "trainer.learning_rate" = 1e36 }},
        {{ label = "dies", "task.use" = "test_sweep.Deadly" }},
        {{ label = "dies once", "task.use" = "test_sweep.Deadly", "task.marker" = "{once}" }},
        {{ label = "unready", "task.use" = "test_sweep.Unready", "task.marker" = "{ready}" }},
        {{ label = "sound" }},
    ]
    """
    path = write(tmp_path, tiny_model, variants, "parallel = 2")
    assert sweep(path) == 2
    study = read_study(path)
    ends = {
        "diverges": "failed",
        "dies": "failed",
        "dies-once": "finished",
        "unready": "failed",
        "sound": "finished",
    }
    assert statuses(study) == {f"all/{label},seed=0": status for label, status in ends.items()}
    errors = {
        label: json.loads((study.folder / f"all/{label},seed=0" / FAILED).read_text())["error"]
        for label in ("diverges", "dies", "unready")
    }
    assert errors["diverges"].startswith("NotFinite: step ")
    assert "its process died (exit code -9)" in errors["dies"]
    assert "not ready" in errors["unready"]
    out = capsys.readouterr().out
    assert (
        f"failed: {study.folder}/all/dies,seed=0" in out
        and f"tba sweep {path} --retry-failed" in out
    )
    assert f"failed: {study.folder}/all/diverges,seed=0" not in out  # to diverge is a result

    assert sweep(path) == 2
    assert "5 runs, 5 of them ended before" in capsys.readouterr().out
    ready.touch()
    write(
        tmp_path,
        tiny_model,
        "\n".join(line for line in variants.splitlines() if not re.search("dies|diverges", line)),
    )
    assert sweep(path, retry_failed=True) == 0
    assert statuses(study) == {"all/unready,seed=0": "finished", "all/sound,seed=0": "finished"}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> list[float]:
    """The losses of a run that nobody interrupted."""
    path = write(tmp_path_factory.mktemp("straight"), tiny_model, LONG)
    assert sweep(path, ["run.steps=80"]) == 0
    return [
        r["loss"]
        for r in read(path.parent / "runs" / "long" / "seed=0" / "metrics.jsonl")
        if "loss" in r
    ]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["asked to stop", "killed"])
def test_a_study_that_ended_early_goes_on_as_if_it_had_not(tmp_path, tiny_model, straight, how):
    path = write(tmp_path, tiny_model, LONG)
    metrics = tmp_path / "runs" / "long" / "seed=0" / "metrics.jsonl"
    command = [str(TBA), "sweep", str(path), "run.steps=80"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        deadline = time.monotonic() + 60
        while len(read(metrics)) < 5 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(how)
        out, err = process.communicate(timeout=60)
    while not list(metrics.parent.glob("checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.02)  # a run whose study was killed saves on its own
    if how == signal.SIGTERM:
        assert process.returncode == INTERRUPTED
        assert out.splitlines()[-1] == f"stopped; go on by `tba sweep {path} run.steps=80`"
        assert "Traceback" not in err
    assert 5 <= read(metrics)[-1]["step"] < 80
    assert sweep(path, ["run.steps=80"]) == 0
    losses = [r["loss"] for r in read(metrics) if "loss" in r]
    assert len(losses) == 80 and losses == straight


def test_a_run_that_dies_while_the_study_is_stopped_has_not_failed(tmp_path, tiny_model):
    path = write(tmp_path, tiny_model, LONG)
    study = read_study(path)
    (trial,) = study.trials()
    carried = Sweep(study, {trial.folder: trial}, {trial.folder: check_study(study)[0]})
    carried.end(trial, "its process died", asked=True)
    assert carried.trials == {trial.folder: trial} and not (study.path(trial) / FAILED).exists()


def test_a_run_begins_with_cores_of_its_own_and_deaf_to_ctrl_c(tmp_path, tiny_model):
    study = read_study(
        write(
            tmp_path,
            tiny_model,
            '[[grid]]\nname = "one"\n"task.use" = "test_sweep.Placed"\n"run.seed" = [0]\n',
        )
    )
    config, core = check_study(study)[0], available_cores()[0]
    process = start(config, None, [core], tmp_path / "log")
    process.join(60)
    run = Path(config.run.folder)
    assert process.exitcode == 0
    assert (
        f"[{core}] threads: 1, ctrl-c blocked: True, alone: True"
        in json.loads((run / FAILED).read_text())["error"]
    )
    assert not (run / "summary.json").exists() and standing(run)[0] == "failed"


def test_what_does_not_fit_the_best_is_told_at_once(tmp_path, tiny_model, capsys):
    grids = """
    [[grid]]
    name = "lengths"
    "run.steps" = [3, 2]
    [[grid]]
    name = "scheduled"
    best = "lengths"
    "trainer.schedule" = "warmup_stable_decay"
    "trainer.warmup_steps" = [0, 3]
    "trainer.decay_steps" = 0
    """
    path = write(tmp_path, tiny_model, grids)
    study = read_study(path)
    lengths, other, *_ = study.trials()
    for t in (lengths, other):
        study.path(t).mkdir(parents=True)
        scores = {"sampled_pass@1": 0.4 if t is lengths else 0.5, "step": 2.0}
        (study.path(t) / "summary.json").write_text(
            json.dumps({"finished": True, "seconds": 1.0, "eval/last": scores})
        )
    carried = Sweep(
        study,
        {t.folder: as_left(study, t, None) for t in study.trials()},
        dict(zip([lengths.folder, other.folder], check_study(study), strict=False)),
    )
    carried.trials[other.folder] = other
    carried.end(other, "", asked=False)
    assert (
        "failed: grid 'scheduled', warmup_steps=3: trainer.warmup_steps" in capsys.readouterr().out
    )
    assert [t.status for t in carried.trials.values()] == [
        "finished",
        "finished",
        "pending",
        "failed",
    ]
    assert sweep(path) == 2  # a study called again goes on with what can begin
    assert [t.status for t in read_ledger(study.folder).runs] == [
        "finished",
        "finished",
        "finished",
        "failed",
    ]


def test_a_setting_that_every_grid_overrides_is_refused(tmp_path, tiny_model):
    path = write(tmp_path, tiny_model)
    with pytest.raises(
        ValueError,
        match=r"'run.seed=7' would change nothing: every grid says what run.seed is; change it there",
    ):
        read_study(path, ["run.seed=7"])
    assert (
        read_study(path, ["trainer.learning_rate=1e-4"]).base["trainer"]["learning_rate"] == 1e-4
    )  # of the grid that does not vary it


def test_a_study_called_again_chooses_as_it_did(tmp_path, tiny_model):
    """A seed of b that failed, before this call, has inherited from a as its sibling has: together they are one setting, and not the best for c."""
    grids = """
    [[grid]]
    name = "a"
    "trainer.learning_rate" = [1e-3, 1e-2]
    [[grid]]
    name = "b"
    best = "a"
    "objective.beta" = [0.1, 0.2]
    "run.seed" = [0, 1]
    [[grid]]
    name = "c"
    best = "b"
    "run.seed" = 7
    """
    study = read_study(write(tmp_path, tiny_model, grids))
    *ended, c = study.trials()
    for t, score in zip(ended, (0.3, 0.4, 0.9, None, 0.5, 0.5), strict=True):
        study.path(t).mkdir(parents=True)
        if score is None:
            write_failed(study.path(t), "NotFinite: step 2: the loss")
        else:
            scores = {"sampled_pass@1": score, "step": 3.0}
            (study.path(t) / "summary.json").write_text(
                json.dumps({"finished": True, "seconds": 1.0, "eval/last": scores})
            )
    configs = dict(zip([t.folder for t in ended[:2]], check_study(study), strict=False))
    carried = Sweep(
        study, {t.folder: as_left(study, t, configs.get(t.folder)) for t in study.trials()}, configs
    )
    carried.inherit()
    assert not carried.refused
    assert [carried.trials[t.folder].settings.get("trainer.learning_rate") for t in ended[2:]] == [
        1e-2
    ] * 4
    assert [t.status for t in carried.trials.values()] == ["finished"] * 3 + ["failed"] + [
        "finished"
    ] * 2 + ["pending"]
    assert carried.trials[c.folder].settings == {
        "run.seed": 7,
        "objective.beta": 0.2,
        "trainer.learning_rate": 1e-2,
    }
    assert carried.choices[-1].of == 2


def test_a_dry_run_lists_the_runs_and_starts_none(tmp_path, tiny_model, capsys):
    assert sweep(write(tmp_path, tiny_model), dry_run=True) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0] == "rates/use=tb,learning_rate=0.001,seed=0"
        and lines[-2] == "often/use=rloo,publish_every=2  + the best of rates"
    )
    assert (
        lines[-1] == f"8 runs in {tmp_path / 'runs'}; nothing was started"
        and not (tmp_path / "runs").exists()
    )


def test_two_sweeps_do_not_share_a_folder(tmp_path, tiny_model):
    import fcntl

    path = write(tmp_path, tiny_model)
    (tmp_path / "runs").mkdir()
    with (tmp_path / "runs" / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(
            ValueError,
            match=r"another `tba sweep` is at work in .*name another folder by study.folder=",
        ):
            sweep(path)


def test_a_metric_that_no_run_has_is_told_after_the_first(tmp_path, tiny_model):
    with pytest.raises(
        ValueError,
        match=r"study.metric = 'reward': the runs have no such score; set study.metric to one of .*sampled_pass@1",
    ):
        sweep(
            write(tmp_path, tiny_model, '[[grid]]\nname = "one"\n"run.seed" = [0]\n'),
            ["study.metric=reward"],
        )


MISTAKES = {
    "an unknown key": (
        ('"run.seed" = 1', '"run.sed" = 1'),
        r"grid 'often', use=tb,publish_every=1: unknown key 'run.sed'; did you mean 'seed'\?",
    ),
    "an unknown option": (
        ('"run.seed" = 1', '"objective.bta" = 1'),
        r"grid 'often', use=tb,.*: objective.bta: 'tb' has no such option; did you mean 'beta'\?",
    ),
    "an unknown objective": (
        ('"rloo"', '"rlo"'),
        r"no objectives called 'rlo'; did you mean 'rloo'\?",
    ),
    "a value out of range": (
        ("1e-3, 1e-2", "1e-3, -1"),
        "grid 'rates', use=tb,learning_rate=-1,seed=0: trainer.learning_rate = -1: Input should be greater than 0",
    ),
    "a value that an option cannot have": (
        ('"runtime.publish_every" = [1, 2]', '"strategy.recent" = [0.5, 1.5]'),
        "grid 'often', use=tb,recent=1.5: .*1.5",
    ),
    "a name twice": (
        ('name = "often"', 'name = "rates"'),
        "two grids are called 'rates'; give each a name of its own",
    ),
    "no name": (('name = "often"', ""), 'grid name = None: write name = "..."'),
    "the best of none": (
        ('best = "rates"', 'best = "ratse"'),
        r"grid 'often': best = 'ratse' is no earlier grid; did you mean 'rates'\?",
    ),
    "the best of nothing alike": (
        ('"rloo"]\n"trainer', '"tb_learned_z"]\n"trainer'),
        "no run there has objective.use = 'rloo'; add it to 'objective.use' of grid 'rates'",
    ),
    "no values": (
        ('"run.seed" = [0]', '"run.seed" = []'),
        r"grid 'rates': 'run.seed' = \[\] has no values; write at least one",
    ),
    "a value twice": (
        ('"run.seed" = [0]', '"run.seed" = [0, 0]'),
        "grid 'rates', use=tb,learning_rate=0.001,seed=0: two runs are called so; leave out the value",
    ),
    "no setting": (
        ('"run.seed" = 1', "seed = 1"),
        """'seed' is no setting; write "table.key" = """,
    ),
    "a folder": (('"run.seed" = 1', '"run.folder" = "x"'), "leave out 'run.folder'"),
    "variants of which some have no name": (
        ('"run.seed" = 1', 'variants = [{ label = "x", "run.seed" = 2 }, { "run.seed" = 3 }]'),
        'give each of the variants a label = "...", or have all of them set the same keys',
    ),
    "a variant that repeats": (
        ('"run.seed" = 1', '"run.seed" = 1\nvariants = [{ "run.seed" = 2 }]'),
        "'run.seed' stands in the grid and in a variant",
    ),
    "an unknown table": (
        ('[[grid]]\nname = "often"', '[[grids]]\nname = "often"'),
        r"unknown table \[grids\]; a study has",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_before_anything_starts(tmp_path, tiny_model, mistake):
    (right, wrong), message = MISTAKES[mistake]
    assert right in GRIDS
    path = write(tmp_path, tiny_model, GRIDS.replace(right, wrong))
    with pytest.raises(ValueError, match=message) as caught:
        sweep(path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("setting", ["study.paralel=2", "study.parallel=0"])
def test_mistakes_in_the_study_table(tmp_path, tiny_model, setting):
    with pytest.raises(
        ValueError,
        match=r"unknown key 'study.paralel'; did you mean 'parallel'|study.parallel = 0: Input should be",
    ):
        read_study(write(tmp_path, tiny_model), [setting])


def test_no_grid_and_no_file(tmp_path, tiny_model):
    with pytest.raises(ValueError, match=r"a study needs a grid: write \[\[grid\]\]"):
        read_study(write(tmp_path, tiny_model, ""))
    with pytest.raises(ValueError, match=r"no such study file: .*nowhere.toml"):
        read_study(tmp_path / "nowhere.toml")


def test_a_base_file_below_the_base_table_below_the_command_line(tmp_path, tiny_model):
    (tmp_path / "base.toml").write_text(
        '[objective]\nuse = "rloo"\n[run]\nsteps = 7\nseed = 5\n[trainer]\nlearning_rate = 0.5\n'
    )
    path = write(tmp_path, tiny_model, '[[grid]]\nname = "one"\n', 'base = "base.toml"')
    study = read_study(path, ["run.seed=9", "study.folder=elsewhere"])
    (config,) = check_study(study)
    assert (config.run.steps, config.run.seed, config.trainer.learning_rate) == (3, 9, 1e-3)
    assert config.objective.use == "tb" and config.objective.options == {"beta": 0.1}
    assert (
        config.run.folder == "elsewhere/one/run"
        and config.log.console == "off"
        and not config.log.tensorboard
    )


def test_a_study_without_a_folder_is_called_after_its_file(tmp_path):
    for name, expected in (("lags.toml", "runs/lags"), ("study.toml", f"runs/{tmp_path.name}")):
        (tmp_path / name).write_text('[[grid]]\nname = "one"\n')
        assert read_study(tmp_path / name).folder == Path(expected)


def test_variants_are_bundles_and_lists_of_lists_are_lists(tmp_path):
    (tmp_path / "s.toml").write_text(
        """
        [[grid]]
        name = "schedules"
        "eval.k" = [[1, 2], [4]]
        variants = [
            { "objective.beta" = { start = 0.2, end = 0.1, steps = 9 }, label = "falling" },
            { "objective.use" = "rloo", "strategy.use" = "recent", label = "$ rloo" },
        ]
        [[grid]]
        name = "sizes"
        variants = [{ "trainer.group_size" = 2, "sampling.samples" = 4 }, { "trainer.group_size" = 4, "sampling.samples" = 4 }]
        """
    )
    first, second, third, _, *sizes = read_study(tmp_path / "s.toml").trials()
    assert [t.folder for t in (first, second, third)] == [
        "schedules/falling,k=1-2",
        "schedules/-rloo,k=1-2",
        "schedules/falling,k=4",
    ]
    assert first.settings == {
        "eval.k": [1, 2],
        "objective.beta": {"start": 0.2, "end": 0.1, "steps": 9},
    } and third.settings["eval.k"] == [4]
    assert (first.axes["variant"], second.label) == ("falling", "$ rloo, k [1, 2]")
    assert [t.folder for t in sizes] == [
        "sizes/group_size=2,samples=4",
        "sizes/group_size=4,samples=4",
    ]
    assert sizes[0].axes == {"trainer.group_size": 2, "sampling.samples": 4}


def test_what_was_inherited_is_handed_on(tmp_path):
    grid = '[[grid]]\nname = "{}"\n{}\n'
    text = grid.format(
        "a", '"trainer.learning_rate" = [0.1, 0.2]\n"run.seed" = [0, 1]'
    ) + grid.format("b", 'best = "a"\n"runtime.publish_every" = [1, 2]')
    (tmp_path / "s.toml").write_text(text + grid.format("c", 'best = "b"\n"run.seed" = [7]'))
    study = read_study(tmp_path / "s.toml")
    a, b, c = (list(study.grids[name].trials()) for name in "abc")
    b_best = study.inherit(b[1], study.candidates(b[1])[2])
    assert study.candidates(c[0]) == b and a[2].settings["trainer.learning_rate"] == 0.2
    assert study.inherit(c[0], b_best).settings == {
        "run.seed": 7,
        "runtime.publish_every": 2,
        "trainer.learning_rate": 0.2,
    }


def test_the_best_of_a_key_that_this_grid_fixes_is_that_of_its_value(tmp_path):
    (tmp_path / "s.toml").write_text(
        """
        [[grid]]
        name = "rates"
        "objective.use" = ["tb", "rloo"]
        "trainer.learning_rate" = [0.1, 0.2]
        [[grid]]
        name = "seeds"
        best = "rates"
        "objective.use" = "rloo"
        "run.seed" = [0, 1]
        """
    )
    study = read_study(tmp_path / "s.toml")
    assert {p.settings["objective.use"] for p in study.candidates(study.trials()[-1])} == {"rloo"}

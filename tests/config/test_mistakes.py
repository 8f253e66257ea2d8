"""A mistake on the command line ends in a sentence, and mostly before torch is imported."""

import json
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import tba
import tba.config.schema
from tba.cli import main
from tba.config.schema import Config
from tba.errors import RewardError
from tba.setup import checks

OWN = "policy.model=bundled:arithmetic task=custom task.data=rows.jsonl task.reward=score.py:f"

MISTAKES = {
    "train nowhere.toml": "no such config file: nowhere.toml in /",
    "train broken.toml": "broken.toml: ",
    "train runtime=slurm": "write `table.key=value`: `runtime.use=local` or `runtime.use=ray`",
    "train policy.lora.rank=8": "rank is policy.lora.r here",
    "train trainer.warmup_ratio=0.1": "is trainer.warmup_steps, as ratio x run.steps here",
    "train trainer.lr=1": "unknown key 'trainer.lr'",
    "train run.epochs=inf": "run.epochs = inf: Input should be a finite number",
    "train run.steps": "write `table.key=value`",
    "train learning_rate=1e-5": "`trainer.learning_rate=1e-5`",
    "train --run.steps=5": "type `run.steps=5`",
    "train --learning_rate 1e-5": "`trainer.learning_rate=1e-5`",
    "train --learning-rate=1e-5": "`trainer.learning_rate=1e-5`",
    "train --max_steps 5": "run.steps",
    "train --task.reward.api_key=abc": "api_key is a secret",
    "train --api-key abc": "api_key is a secret",
    "train --dryrun": "did you mean --dry-run?",
    "train --nodes 2": "no option --nodes",
    "train --gpus 4x80": "--gpus plans for other machines: add --dry-run",
    "train --dry-run --gpus 4": "--gpus 4: write number x GB of each, such as --gpus 4x80",
    "train --resume nowhere": "nowhere is not the folder of a run",
    "train --resume rows.jsonl": "rows.jsonl is not the folder of a run",
    "train --resume old": "old/config.json: unknown key 'warn.kl': it was removed",
    "export no_tokenizer out": "no_tokenizer is not the folder of a run: its config.json has",
    "train study.toml": "study.toml is a study; type `tba sweep study.toml`",
    "train --rescore": "need --resume RUN",
    "train run.folder=used": "holds a run",
    "train run.folder=\udce9": "its name is not UTF-8",
    "train run.folder=rows.jsonl": "rows.jsonl' cannot be used as a folder",
    "train policy.model=./nowhere": "no such folder in /",
    "train policy.model=bundled:sums": "no such bundled model",
    "train policy.model=no_tokenizer": "no tokenizer",
    "train objective=grop": "did you mean 'grpo'?",
    "train objective=TB": "did you mean 'tb'?",
    "train Run.steps=5": "steps is run.steps here",
    "train objective.beta=-1 objective=grpo": "greater than or equal to 0",
    "train task.train_size=-5": "task.train_size = -5: Input should be greater than",
    "train policy.model=bundled:arithmetic task=gsm8k task.train_size=-5": "greater than or equal",
    "train engine.dtype=fp16": "engine.dtype = 'fp16': Input should be 'auto'",
    "train policy.model=bundled:arithmetic task=custom task.reward=score.py:f": "task.data is",
    "train task=gsm8k task.data=./nowhere": "policy.model is missing",
    f"train {OWN} task.data=nowhere.jsonl": "No such file or directory: 'nowhere.jsonl' in /",
    f"train {OWN} task.data=score.py": "its suffix is '.py'",
    f"train {OWN} task.prompt_column=question": "no column 'question'",
    f"train {OWN} task.held_out_size=16": "has only 9 rows",
    f"train {OWN} task.reward=nowhere.py:f": "no such file: nowhere.py in /",
    f"train {OWN} task=agent task.rollout=score.py:g": "score.py has no function 'g'; known: f",
    f"train {OWN} task.reward=score.py:g": "score.py has no function 'g'",
    f"train {OWN} task.reward=score": "write package.module:function",
    f"train {OWN} task.reward=./score:f": "write package.module:function or file.py:function",
    f"train {OWN} task.reward=score.py:f:g": "write package.module:function or file.py:function",
    "sweep nowhere.toml": "no such study file: nowhere.toml",
    "sweep run.toml": "run.toml is the config of a run, not a study; type `tba train run.toml`",
    "sweep broken.toml": "broken.toml: ",
    "sweep broken.toml --trainer.batch_size=4": "type `trainer.batch_size=4`",
    "eval nowhere": "a model needs a config with [task]",
    "eval ./nowhere task=arithmetic": "no such folder",
    "eval used broken.toml": "leave out broken.toml",
    "report nowhere": "is not a run folder",
    "export nowhere out": "nowhere is not the folder of a run",
    "export used rows.jsonl": "FOLDER = ",
    "export used out --adapter": "leave out --adapter",
    "rollouts used rows.jsonl": "rows.jsonl exists",
    "rollouts used rows.jsonl/x": "cannot be used as a folder",
    "eval nowhere task=arithmetic": "nowhere",
    "list maths": "did you mean 'math'?",
}
"""Commands, and a part of the error of each."""
OF_TYPER = ("lisst", "train --resume", "eval", "export", "report")
"""Mistakes that typer tells itself, in a frame."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., Path]) -> Path:
    made = tmp_path_factory.mktemp("mistakes")
    rows = "".join(json.dumps({"prompt": f"{i}+1=", "answer": f"{i + 1}"}) + "\n" for i in range(9))
    (made / "rows.jsonl").write_text(rows)
    (made / "score.py").write_text("def f(completions, **columns): return [0.0] * len(completions)")
    (made / "broken.toml").write_text("run = [\n")
    (made / "run.toml").write_text("[run]\nsteps = 5\n")
    (made / "study.toml").write_text("[study]\nbase = 'run.toml'\n[[grid]]\nname = 'x'\n")
    (made / "no_tokenizer").mkdir()
    (made / "no_tokenizer" / "config.json").write_text("{}")
    (made / "old").mkdir()
    (made / "old" / "config.json").write_text('{"run": {}, "warn": {"kl": 1.0}}')
    (made / "used" / "checkpoints").mkdir(parents=True)
    (made / "used" / "config.json").write_text("{}")
    return made


def told(command: str, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> str:
    """Run a command in this process, which must end with status 2; return its standard error."""
    patch.setattr(sys, "argv", ["tba", *shlex.split(command)])
    patch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        main()
    err = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in err
    return err


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_sentence(command, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    before = set(folder.rglob("*"))
    err = told(command, capsys, monkeypatch)
    assert err.startswith("error: ") and MISTAKES[command] in err
    assert len(err.splitlines()) == 1 and len(err) < 500 and "abc" not in err
    assert {p for p in folder.rglob("*") if "__pycache__" not in str(p)} <= before


ENVIRONMENTS = {
    "TMPDIR=/tmp/" + "t" * 100: "bytes too long for sockets of Ray; set RAY_TMPDIR=/tmp",
    "RAY_TMPDIR=/tmp/" + "é" * 40: "RAY_TMPDIR = ",
    "TMPDIR=/proc": "TMPDIR = '/proc' cannot be written to",
    "TMPDIR=/dev/null/x": "TMPDIR = '/dev/null/x' cannot be written to: Not a directory",
}


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_a_temporary_folder_that_ray_cannot_use_is_named(environment, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv(*environment.split("="))
    err = told("train run.folder=x runtime.use=ray", capsys, monkeypatch)
    assert err.startswith("error: ") and ENVIRONMENTS[environment] in err
    assert len(err.splitlines()) == 1


def test_shared_memory_that_ray_cannot_use_is_named(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(checks, "SHARED", Path("/proc"))
    err = told("train run.folder=x runtime.use=ray", capsys, monkeypatch)
    assert err.startswith("error: shared memory for Ray, /proc, cannot be written to: ")


def test_a_locale_without_utf_8_changes_nothing(folder):
    own = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = subprocess.run(
        [sys.executable, "-m", "tba.cli", "train", "run.folder=é", "task=“sums”"], cwd=folder,
        capture_output=True, env={**os.environ, **own},
    )  # fmt: skip
    assert ended.returncode == 2
    assert "no tasks called '“sums”'" in ended.stderr.decode("utf-8")


@pytest.mark.parametrize("command", OF_TYPER)
def test_what_typer_refuses_has_no_traceback(command, capsys, monkeypatch):
    assert "Error" in told(command, capsys, monkeypatch)


def test_mistakes_are_told_without_torch(folder):
    code = (
        "import shlex, sys\n"
        "from tba.cli import main\n"
        "for command in sys.stdin:\n"
        "    sys.argv = ['tba', *shlex.split(command)]\n"
        "    try: main()\n"
        "    except SystemExit as ended: assert ended.code == 2, command\n"
        "    assert 'torch' not in sys.modules and 'transformers' not in sys.modules, command\n"
    )
    data = [f"train {OWN} {key}" for key in ("task.data", "task.prompt_column", "task.held_out")]
    late = ("eval nowhere task=arithmetic", "train objective.b", "train engine.dtype=fp16", *data)
    late += ("train --dry-run --gpus", "train trainer.lr", "train run.epochs", "train Run.steps")
    late += ("train task.train_size", "train policy.lora", "train trainer.warmup")
    commands = [command for command in MISTAKES if not command.startswith(late)]
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, input="\n".join(commands), text=True,
        errors="surrogateescape", capture_output=True, timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8:surrogateescape"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("error: ") == len(commands)


TOGETHER = {
    "train trainer.learning_rat=1 run.steps=x runtime.use=local runtime.fresh=0 task.siz=3": (
        "run.steps = 'x'", "'trainer.learning_rat'; did you mean 'learning_rate'", "task.siz: ",
        "runtime.use = local needs runtime.fresh=1",
    ),
    "train trainer.batch_size=7 eval.k=9 objective.bta=1 objective.beta=x selection=cyclik": (
        "trainer.batch_size = 7 needs", "eval.k = [9] needs", "objective.bta: ", "objective.beta =",
        "no selections called 'cyclik'",
    ),
    "train learning_rate=1 steps trainer.lr=3 runtime.lag=1 runtime.publish_every=2": (
        "`trainer.learning_rate=1`", "'steps': write", "unknown key 'trainer.lr'", "runtime.lag =",
    ),
    "train --learning_rate 1e-5 --run.steps=5 --batch-size=8": (
        "no option --learning_rate", "type `run.steps=5`", "no option --batch-size",
    ),
    "train task=custom task.reward=x.py:f policy.model=./no strategy.window=0 engine.dtype=fp8": (
        "no such folder", "task.data is missing", "strategy.window = 0: ", "engine.dtype = ",
    ),
}  # fmt: skip
"""Commands, and a part of each line of their errors, in any order."""


@pytest.mark.parametrize("command", TOGETHER)
def test_all_mistakes_are_told_at_once(command, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    lines = told(command, capsys, monkeypatch).removeprefix("error: ").splitlines()
    for expected in TOGETHER[command]:
        assert sum(expected in line for line in lines) == 1, lines
    assert len(lines) == len(TOGETHER[command])


@pytest.mark.parametrize("command", ["train", "list", "report used"])
def test_python_without_docstrings_is_named(command, folder, capsys, monkeypatch):
    """On the command line, and from Python."""
    monkeypatch.chdir(folder)
    flags = SimpleNamespace(optimize=2)
    monkeypatch.setattr(tba.config.schema, "sys", SimpleNamespace(flags=flags))
    said = "Python leaves out docstrings (PYTHONOPTIMIZE=2, or -OO)"
    err = told(command, capsys, monkeypatch)
    assert err.startswith(f"error: {said}") and len(err.splitlines()) == 1
    with pytest.raises(ValueError, match=re.escape(said)):
        tba.train({"run": {"steps": 1}})


ROWS = [{"prompt": f"What is {i} and one?"} for i in range(30)]
FROM_PYTHON: dict[str, tuple[Callable[[], object], str]] = {
    "a wrong key": (lambda: tba.train({"trainer": {"lr": 1}}), "lr is trainer.learning_rate"),
    "a wrong value": (
        lambda: tba.train({"run": {"steps": "x"}}),
        "Input should be a valid integer",
    ),
    "a dotted key": (lambda: tba.train({"run.steps": 5}), "write steps into its table, run"),
    "a table that is none": (lambda: Config(trainer=3), "write a table, \\[trainer\\]"),
    "sizes that do not fit": (
        lambda: Config(trainer={"batch_size": 7}),
        "to be a multiple of group_size = 20, such as 20",
    ),
    "no text": (
        lambda: Config(policy={"model": 7}),
        "policy.model = 7: Input should be a valid string",
    ),
    "settings as text": (lambda: tba.load(None, "run.steps=5"), "list"),
    "no config": (lambda: tba.train(7), "config is of type int"),  # type: ignore[arg-type]
    "a missing run": (lambda: tba.train(tba.load(), resume="nowhere"), "nowhere is not the folder"),
    "samples of no run": (lambda: tba.train({}, replay="rescore"), "with resume=RUN also"),
    "no result": (lambda: tba.result("nowhere"), "nowhere is not the folder of a run"),
    "rows without a model": (
        lambda: tba.train(tba.load(None, ["task.held_out_size=16"]), data=ROWS, reward=len),
        "policy.model is missing: name the model",
    ),
}


@pytest.mark.parametrize("case", FROM_PYTHON)
def test_a_mistake_from_python_is_a_value_error_of_ours(case, tmp_path, monkeypatch):
    call, message = FROM_PYTHON[case]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert type(raised.value) is ValueError and len(str(raised.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


HOSTILE = "\x1b]0;title\x07\x1b[31mred \x9b2J\u202eevil\rover\x08"


@pytest.mark.parametrize(
    "error", [ValueError(HOSTILE), RewardError(HOSTILE), OSError(2, HOSTILE, HOSTILE)]
)
def test_an_error_sends_no_escape_sequence_to_the_terminal(error, capsys, monkeypatch):
    def fail() -> None:
        logging.getLogger("tba").warning("a server sent %s", HOSTILE)
        raise error

    monkeypatch.setattr("tba.cli.app", fail)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with pytest.raises(SystemExit):
        main()
    told = capsys.readouterr().err
    assert told.count("evil") == 2 + isinstance(error, OSError)
    assert not {*told} & {"\x1b", "\x07", "\x9b", "\u202e", "\r", "\x08"}

"""The command line: what it prints, and the mistakes that it refuses before anything starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

import tba
from tba.cli import main
from tba.config.plugins import KINDS, names
from tba.config.schema import Config, load
from tba.config.tables import PolicyTable
from tba.models.pretrained import load_text
from tba.runs.console import FIRST_LINE
from tba.runs.setup import check

TBA = Path(sys.executable).with_name("tba")

CONFIG = """
[policy]
model = "{model}"
[task]
use = "custom"
data = "data.jsonl"
reward = "cli_rewards:length"
held_out_size = 2
[sampling]
samples = 4
max_tokens = 8
[trainer]
batch_size = 12
group_size = 4
[eval]
samples = 1
k = 1
[log]
tensorboard = false
"""

MISTAKES = {
    "no run to drop replayed data of": (["--drop-replay"], "needs --resume RUN"),
    "no model": (
        ["policy.model=./nowhere"],
        "policy.model = './nowhere': no such folder; give one that save_pretrained wrote",
    ),
    "no prompt column": (
        ["task.data=questions.jsonl"],
        "questions.jsonl' has no column 'prompt'; it has question",
    ),
    "long prompt": (
        ["task.data=long.jsonl"],
        "1 of 5 prompts do not fit the model's context of 32 tokens beside 8 of response"
        " (the longest is 'train-1'",
    ),
    "empty prompt": (["task.data=empty.jsonl"], "prompt 'train-1' is empty"),
    "no EOS": (
        ["policy.model=without_eos"],
        "without_eos' has no EOS token, so no response could end; set policy.eos_token=",
    ),
    "no reward": (
        ["task.reward=cli_rewards:lenght"],
        "task.reward = 'cli_rewards:lenght': cli_rewards has no function 'lenght'",
    ),
}


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    status: int
    out: str
    err: str


def run(folder: Path, arguments: list[str]) -> Ended:
    """Run the command in a process of its own."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [TBA, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, make_model: Callable[..., Path]
) -> Callable[[], Path]:
    """A function that makes a folder with a valid config, and files for invalid ones."""
    without_eos = make_model(eos=None)
    prompts = [{"prompt": f"{i}+{i}=", "answer": 2 * i} for i in range(5)]
    data = {
        "data": prompts,
        "questions": [{"question": "1+1="}] * 5,
        "long": [*prompts[:1], {"prompt": "1" * 25}, *prompts[2:]],
        "empty": [*prompts[:1], {"prompt": ""}, *prompts[2:]],
    }

    def make() -> Path:
        made = tmp_path_factory.mktemp("user")
        (made / "without_eos").symlink_to(without_eos)
        for name, rows in data.items():
            (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (made / "cli_rewards.py").write_text(
            "def length(completions):\n    return [float(len(c)) for c in completions]\n"
        )
        (made / "run.toml").write_text(CONFIG.format(model=tiny_model))
        return made

    return make


@pytest.fixture(scope="module")
def commands(folder: Callable[[], Path]) -> Iterator[dict[str, Future[Ended]]]:
    """The commands that run in a process, two at a time: most of each is the import of torch."""
    wanted = {
        "mistake": ["train", "run.toml", "trainer.grop_size=4"],
        "dry run": ["train", "run.toml", "--dry-run", "objective=rloo", "objective.beta=0.3"],
        "list": ["list"],
        "no such option": ["train", "--dryrun"],
    }
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, folder(), arguments) for name, arguments in wanted.items()}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_before_anything_starts(
    folder: Callable[[], Path],
    case: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings, message = MISTAKES[case]
    user = folder()
    before = set(user.iterdir())
    monkeypatch.chdir(user)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["tba", "train", "run.toml", *settings])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with pytest.raises(SystemExit) as exit_:
        main()
    out, err = capsys.readouterr()
    shown = "" if "--drop-replay" in settings else f"{FIRST_LINE}\n"  # the config is not read
    assert (exit_.value.code, out) == (2, shown)
    assert err.startswith("error: ") and message in err
    assert len(err.splitlines()) == 1
    assert set(user.iterdir()) == before  # no run folder


def test_the_command_prints_a_mistake_without_a_traceback(
    commands: dict[str, Future[Ended]],
) -> None:
    ended = commands["mistake"].result()
    message = "error: unknown key 'trainer.grop_size'; did you mean 'group_size'?"
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith(message) and len(ended.err.splitlines()) == 1


def test_a_tokenizer_without_pad_will_do(
    make_model: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Masks come from lengths, so that the pad token may be any, even EOS."""
    model = str(make_model(pad=None))
    capfd.readouterr()
    text = load_text(PolicyTable(model=model))
    assert text.eos_ids == {text.pad_id}
    small = [
        "sampling.samples=4",
        "sampling.max_tokens=8",
        "trainer.group_size=4",
        "trainer.batch_size=12",
        "eval.prompts=3",
        "task.train_size=9",
    ]
    quiet = [
        "runtime.use=local",
        "run.steps=2",
        f"run.folder={tmp_path / 'run'}",
        "log.console=off",
        "log.tensorboard=false",
    ]
    summary = tba.train(load(None, [f"policy.model={model}", *small, *quiet])).summary
    assert (summary.finished, summary.steps, summary.samples_trained) == (True, 2, 24)
    assert capfd.readouterr().err == ""  # no library draws progress bars across the console


def test_the_advice_about_eos_works(make_model: Callable[..., Path]) -> None:
    bare = str(make_model(eos=None))
    assert load_text(PolicyTable(model=bare, eos_token="<eos>")).eos_ids == {1}
    assert load_text(PolicyTable(model=bare, eos_token="<pad>")).eos_ids == {
        0
    }  # 0 is an id like any other
    with pytest.raises(
        ValueError, match=r"policy\.eos_token = '</s>' is not in the tokenizer's vocabulary"
    ):
        load_text(PolicyTable(model=bare, eos_token="</s>"))


def test_a_dry_run_prints_the_whole_config_and_starts_nothing(
    commands: dict[str, Future[Ended]],
) -> None:
    ended = commands["dry run"].result()
    assert ended.status == 0
    shown = ["first prompt, 4 tokens:", "0+0=", "reward of 'dummy answer': 12"]
    counts = "config OK (dry run): 3 training prompts, 2 held out"
    lines = ended.err.splitlines()
    assert [*lines[:3], lines[-1]] == [*shown, counts]
    config = Config(**json.loads(ended.out))
    assert config.objective.model_dump() == {
        "use": "rloo",
        "beta": 0.3,
        "importance": "none",
        "importance_cap": 2.0,
    }
    assert (config.trainer.batch_size, config.run.steps) == (12, Config().run.steps)


def test_the_embedded_default_is_sound() -> None:
    check(load())


def test_the_version_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tba", "--version"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as exit_:
        main()
    assert (exit_.value.code, capsys.readouterr().out) == (0, f"tba {tba.__version__}\n")


def test_list_tells_every_plugin_and_table(commands: dict[str, Future[Ended]]) -> None:
    ended = commands["list"].result()
    assert (ended.status, ended.err) == (0, "")
    lines = [line.split() for line in ended.out.splitlines()]
    shipped = [name for kind in KINDS for name in (kind, *names(kind))]
    assert [line[0] for line in lines[:-1] if line] == shipped
    assert "trainer," in lines[-1]


@pytest.mark.parametrize(
    ("name", "said"),
    [("tb", "beta = 0.05\n"), ("trainer", "batch_size = 160\n"), ("custom", "data = (required)\n")],
)
def test_list_tells_options_and_keys(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tba", "list", name])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as exit_:
        main()
    assert (exit_.value.code or 0, said in capsys.readouterr().out) == (0, True)


def test_the_help_says_when_completions_are_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tba", "eval", "--help"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit):
        main()
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Completions are written only with --completions FILE." in shown


def test_an_unknown_option_is_told(commands: dict[str, Future[Ended]]) -> None:
    ended = commands["no such option"].result()
    assert ended.status == 2 and "--dry-run" in ended.err and "Traceback" not in ended.err

"""The command line: what it prints, and the mistakes that it refuses before anything starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
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
    "no run to drop replayed data of": (["--drop-replay"], "need --resume RUN"),
    "two ways at once": (["--rescore", "--drop-replay", "--resume", "r"], "give one of the two"),
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

    status: int | str | None
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `tba` in this process; test_mistakes.py does so in a process of its own."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def carry_out(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["tba", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(ended.value.code, *capsys.readouterr())

    return carry_out


@pytest.fixture
def folder(
    tmp_path: Path,
    tiny_model: Path,
    make_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """The working folder, with a valid config, and files for invalid ones."""
    monkeypatch.chdir(tmp_path)
    prompts = [{"prompt": f"{i}+{i}=", "answer": 2 * i} for i in range(5)]
    data = {
        "data": prompts,
        "questions": [{"question": "1+1="}] * 5,
        "long": [*prompts[:1], {"prompt": "1" * 25}, *prompts[2:]],
        "empty": [*prompts[:1], {"prompt": ""}, *prompts[2:]],
    }
    Path("without_eos").symlink_to(make_model(eos=None))
    for name, rows in data.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("cli_rewards.py").write_text(
        "def length(completions):\n    return [float(len(c)) for c in completions]\n"
    )
    Path("run.toml").write_text(CONFIG.format(model=tiny_model))
    return tmp_path


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_before_anything_starts(
    case: str, folder: Path, command: Command
) -> None:
    settings, message = MISTAKES[case]
    before = set(folder.iterdir())
    ended = command("train", "run.toml", *settings)
    shown = "" if "--drop-replay" in settings else f"{FIRST_LINE}\n"  # the config is not read
    assert (ended.status, ended.out) == (2, shown)
    assert ended.err.startswith("error: ") and message in ended.err
    assert len(ended.err.splitlines()) == 1
    assert set(folder.iterdir()) == before  # no run folder


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
    folder: Path, command: Command
) -> None:
    before = set(folder.iterdir())
    ended = command("train", "run.toml", "--dry-run", "objective=rloo", "objective.beta=0.3")
    left = {file for file in folder.iterdir() if file.name != "__pycache__"}
    assert not ended.status and left == before
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


def test_the_version_is_printed(command: Command) -> None:
    assert command("--version").out == f"tba {tba.__version__}\n"


def test_list_tells_every_plugin_and_table(command: Command) -> None:
    lines = [line.split() for line in command("list").out.splitlines()]
    shipped = [name for kind in KINDS for name in (kind, *names(kind))]
    assert [line[0] for line in lines[:-1] if line] == shipped
    assert "trainer," in lines[-1]


@pytest.mark.parametrize(
    ("name", "said"),
    [("tb", "beta = 0.05\n"), ("trainer", "batch_size = 160\n"), ("custom", "data = (required)\n")],
)
def test_list_tells_options_and_keys(name: str, said: str, command: Command) -> None:
    assert said in command("list", name).out


def test_the_help_says_when_completions_are_written(command: Command) -> None:
    shown = " ".join(command("eval", "--help").out.replace("│", " ").split())
    assert "Completions are written only with --completions FILE." in shown

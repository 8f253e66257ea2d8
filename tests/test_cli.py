"""The command line: what it prints, and the mistakes that it refuses before anything starts."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from build import config

import tba
from tba.cli import main
from tba.config.plugins import KINDS, names
from tba.config.schema import Config
from tba.config.tables import PolicyTable
from tba.models.pretrained import load_text
from tba.runs.console import FIRST_LINE

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
report_to = []
"""

MISTAKES = {
    "task.data=long.jsonl": "1 of 5 prompts do not fit the model's context of 32 tokens with 8 of"
    " response (the longest is 'train-1'",
    "task.data=empty.jsonl": "prompt 'train-1' is empty",
    "policy.model=without_eos": "without_eos' has no EOS token that it can sample, so no"
    " response could end: None has number None",
}
"""Settings that need the tokenizer to be refused; config/test_mistakes.py has the others."""


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
        "long": [*prompts[:1], {"prompt": "1" * 25}, *prompts[2:]],
        "empty": [*prompts[:1], {"prompt": ""}, *prompts[2:]],
    }
    Path("without_eos").symlink_to(make_model(eos=None))
    for name, rows in data.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    function = "def length(completions):\n    return [float(len(c)) for c in completions]\n"
    Path("cli_rewards.py").write_text(function)
    Path("run.toml").write_text(CONFIG.format(model=tiny_model))
    return tmp_path


@pytest.mark.parametrize("setting", MISTAKES)
def test_a_mistake_is_one_line_before_anything_starts(setting, folder, command):
    before = set(folder.iterdir())
    ended = command("train", "run.toml", setting)
    assert ended.status == 2
    assert ended.out.removesuffix("reading the data\n") == f"{FIRST_LINE}\n"
    assert ended.err.startswith("error: ") and MISTAKES[setting] in ended.err
    assert len(ended.err.splitlines()) == 1
    assert set(folder.iterdir()) == before  # no run folder


def test_files_of_the_current_folder_hide_no_library_from_python_m(folder):
    """As from the command `tba`; `python -m` puts the folder first."""
    for name in ("ray", "torch", "transformers"):
        Path(f"{name}.py").write_text("raise ImportError('this is no library')")
    command = [sys.executable, "-m", "tba.cli", "check", "run.toml"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "config OK" in ended.stdout, ended.stderr


def test_a_tokenizer_without_pad_will_do(make_model, tmp_path, capfd):
    """Masks come from lengths, so that the pad token may be any, even EOS."""
    model = str(make_model(pad=None))
    capfd.readouterr()
    text = load_text(PolicyTable(model=model))
    assert text.eos_ids == {text.pad_id}
    assert tba.train(config(Path(model), tmp_path / "run", "run.steps=2")).summary.steps == 2
    assert capfd.readouterr().err == ""  # no library draws progress bars across the console


def test_the_advice_about_eos_works(make_model):
    bare = str(make_model(eos=None))
    assert load_text(PolicyTable(model=bare, eos_token="<eos>")).eos_ids == {1}
    zero = load_text(PolicyTable(model=bare, eos_token="<pad>"))
    assert zero.eos_ids == {0}  # an id like any other
    with pytest.raises(ValueError, match=r"'</s>' has number None, and it samples from 14"):
        load_text(PolicyTable(model=bare, eos_token="</s>"))


def test_a_dry_run_prints_the_whole_config_and_starts_nothing(folder, command):
    before = set(folder.iterdir())
    settings = ("run.toml", "objective=rloo", "objective.beta=0.3")
    ended = command("check", *settings, "--verbose")
    left = {file for file in folder.iterdir() if file.name != "__pycache__"}
    assert not ended.status and left == before
    counts = "config OK (dry run): 3 training prompts, evaluating 2 of 2 held-out prompts"
    assert ended.out.splitlines()[-1] == counts
    text = ended.out.partition("\n\n[run]")[2].partition("\n\nfirst prompt")[0]
    printed = Config(**tomllib.loads(f"[run]{text}"))
    assert "beta = 0.3\n" in text and 'importance = "none"  # default\n' in text
    alias = command("train", *settings, "--dry-run")
    assert "[run]" not in alias.out and alias.out.splitlines()[-1] == counts
    assert printed.objective.options == {"beta": 0.3, "importance": "none", "importance_cap": 2.0}
    assert (printed.trainer.batch_size, printed.run.steps) == (12, Config().run.steps)


def test_the_version_is_printed(command):
    assert command("--version").out == f"tba {tba.__version__}\n"


def test_list_tells_every_plugin_and_table(command):
    lines = [line.split() for line in command("list").out.splitlines()]
    shipped = [name for kind in KINDS for name in (kind, *names(kind))]
    assert [line[0] for line in lines[:-1] if line] == shipped
    assert "trainer," in lines[-1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tb", "beta = 0.05\n"),
        ("trainer", "batch_size = 160\n"),
        ("custom", "data = (required)\n"),
        ("objective", "  tb "),
        ("objective", "[objective]"),
    ],
)
def test_list_tells_options_and_keys(name, said, command):
    assert said in command("list", name).out

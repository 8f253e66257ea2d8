"""A run is resumed, evaluated and exported from another folder than it was started in."""

import json
import os
import sys
from pathlib import Path

import pytest

import tba
from tba.cli import _config, evaluate, export_command, train_command
from tba.config.schema import load
from tba.open import run
from tba.runs.folder import CONFIG, SUMMARY, flat
from tba.setup.checks import placed

CONFIG_TOML = """
[run]
folder = "runs/one"
steps = 1
[policy]
model = "model"
[task]
use = "custom"
data = "rows.jsonl"
reward = ["base_rewards:length", "more.py:half"]
held_out_size = 2
[sampling]
samples = 4
max_tokens = 4
[trainer]
batch_size = 8
group_size = 4
[runtime]
use = "local"
[eval]
samples = 1
k = []
[log]
console = "off"
report_to = []
"""


@pytest.fixture
def home(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config all of whose paths are relative; another one is the current one."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    rows = [{"prompt": f"{i}+{i}="} for i in range(6)]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    function = "def {}(completions):\n    return [len(c) / 2 for c in completions]\n"
    (here / "base_rewards.py").write_text(function.format("length"))
    (here / "more.py").write_text(function.format("half"))
    (here / "model").symlink_to(tiny_model)
    (here / "run.toml").write_text(CONFIG_TOML)
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the run adds to it
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "base_rewards", raising=False)
    return here


@pytest.fixture
def started(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run of one step, started in `home`, whose modules are forgotten again."""
    paths, elsewhere = list(sys.path), Path.cwd()
    monkeypatch.chdir(home)
    sys.path.append(str(home))
    run(load("run.toml"))
    sys.path[:] = paths
    del sys.modules["base_rewards"]
    monkeypatch.chdir(elsewhere)
    return home / "runs" / "one"


def test_a_run_is_resumed_from_another_folder(home, started):
    assert json.loads((started / CONFIG).read_text())["run"]["base"] == str(home)
    elsewhere, relative = Path.cwd(), Path(os.path.relpath(started))
    summary = run(_config(["run.steps=2"], relative), relative)
    assert (summary.finished, summary.steps) == (True, 2)
    assert json.loads((started / SUMMARY).read_text())["steps"] == 2
    assert json.loads((started / CONFIG).read_text())["run"]["base"] == str(home)
    assert Path.cwd() == elsewhere and not list(elsewhere.iterdir())
    result = tba.train(tba.load(started / CONFIG, ["run.steps=3"]), resume=str(relative))
    assert (result.summary.steps, result.folder) == (3, started)


def test_commands_on_a_run_work_from_another_folder(started, capsys):
    """New settings are of the current folder."""
    relative = Path(os.path.relpath(started))
    Path("other.jsonl").write_text('{"prompt": "7+7="}\n{"prompt": "8+8="}\n{"prompt": "9+1="}\n')
    evaluate(relative, ["task.held_out_data=other.jsonl", "task.held_out_size=3"])
    assert json.loads(capsys.readouterr().out)["prompts"] == 3
    export_command(relative, Path("out"))
    assert Path("out", "config.json").is_file()
    train_command(["run.steps=2"], dry_run=True, resume=relative)
    assert "\nlength: 2 steps " in capsys.readouterr().out


def test_a_module_of_the_current_folder_does_not_take_the_place_of_the_runs_own(started, capsys):
    other = "def length(completions):\n    return [99.0 for _ in completions]"
    Path("base_rewards.py").write_text(other)
    sys.path.append(str(Path.cwd()))  # as a command does
    evaluate(Path(os.path.relpath(started)), [])
    assert json.loads(capsys.readouterr().out)["sampled_reward"] < 99


def test_stored_paths_are_absolute(home, started):
    """Text that only looks like the name of a file stays."""
    config = json.loads((started / CONFIG).read_text())
    assert config["run"]["folder"] == str(started)
    assert config["policy"]["model"] == str(home / "model")
    assert config["task"]["data"] == str(home / "rows.jsonl")
    assert config["task"]["reward"] == ["base_rewards:length", f"{home / 'more.py'}:half"]
    assert config["task"]["prompt_column"] == "prompt"
    shown = flat(config)
    assert (shown["policy.model"], shown["run.folder"]) == ("model", "runs/one")


def test_a_file_that_a_moved_run_misses_is_named(home, started):
    (home / "rows.jsonl").rename(home / "moved.jsonl")
    with pytest.raises(ValueError, match=r"rows\.jsonl' cannot be read: .*No such file"):
        run(_config(["run.steps=2"], started), started)
    assert run(_config(["run.steps=2", f"task.data={home}/moved.jsonl"], started), started).finished


@pytest.mark.parametrize("is_dry", [True, False])
def test_what_is_further_is_not_resumed_and_nothing_loads(started, is_dry, monkeypatch):
    run(_config(["run.steps=2"], started), started)
    monkeypatch.setattr("tba.open.open_trainer", lambda *_: pytest.fail("the model has loaded"))
    with pytest.raises(ValueError, match=r"run\.steps = 1, but the run is at step 2"):
        train_command(["run.steps=1"], dry_run=is_dry, resume=started)


def test_texts_that_are_no_paths_stay_as_they_are(home, monkeypatch):
    """A full stop is a folder, too."""
    monkeypatch.chdir(home)
    texts = {"use": "more.half", "end": ".", "up": "..", "unit": "m/s", "rows": "./rows.jsonl"}
    settings = [f"task.reward.{name}={text}" for name, text in texts.items()]
    options = placed(load(None, [*settings, "task=custom", "task.system_prompt=."])).task.options
    assert options["system_prompt"] == "."
    assert options["reward"] == {**texts, "rows": str(home / "rows.jsonl")}
    (home / "judge").mkdir()  # a server's name for its model
    asked = {"use": "http", "url": "http://127.0.0.1:1", "model": "judge"}
    settings = [f"task.reward.{name}={text}" for name, text in asked.items()]
    assert placed(load(None, ["task=custom", *settings])).task.options["reward"] == asked
    made = placed(load(None, ["task=custom", "task.reward={use='more.py:half'}"])).task.options
    assert made["reward"] == {"use": f"{home / 'more.py'}:half"}

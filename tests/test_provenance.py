"""What a run records of how it was started, and the groups that it stores."""

from __future__ import annotations

import platform
from datetime import datetime
from pathlib import Path

import pytest
import torch
from toy import toy_config
from transformers import AutoModelForCausalLM

import tba.assemble
from tba.runs.log import SAMPLES, SESSIONS, read
from tba.runs.provenance import without_secrets

SETTINGS = (
    "engine=scripted", "engine.answers=['1', '1', '', '27', '1+1', '371']", "sampling.samples=12",
    "sampling.max_tokens=4", "trainer.batch_size=12", "trainer.group_size=12", "strategy=uniform",
)  # fmt: skip


def test_each_session_of_a_run_is_recorded(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is not in a git repository."""
    folder = tmp_path / "run"
    tba.assemble.run(toy_config(toy_model, folder, *SETTINGS, "run.steps=1"))
    monkeypatch.setattr("sys.argv", ["/bin/tba", "train", "--resume", "a b"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    tba.assemble.run(toy_config(toy_model, folder, *SETTINGS, "run.steps=2"), resume=folder)
    first, second = read(folder / SESSIONS)
    assert (first["step"], second["step"]) == (0, 1)
    assert second["command"] == "tba train --resume 'a b'" and second["commit"] is None
    assert datetime.fromisoformat(first["started"]) <= datetime.fromisoformat(second["started"])
    assert first["versions"]["python"] == platform.python_version()
    assert first["versions"]["torch"] == torch.__version__
    size = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(toy_model).parameters())
    assert first["parameters"] == first["trained_parameters"] == size


def test_a_stored_group_has_each_of_its_completions_once(toy_model: Path, tmp_path: Path) -> None:
    tba.assemble.run(toy_config(toy_model, tmp_path / "run", *SETTINGS, "run.steps=1"))
    rows = read(tmp_path / "run" / SAMPLES)
    assert {(row["step"], row["kind"], row["prompt"]) for row in rows} == {
        (1, "train", rows[0]["prompt"])
    }
    completions = [row["completion"] for row in rows]
    assert len(set(completions)) == len(completions) > 1


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("sampling.max_tokens=128", "sampling.max_tokens=128"),
        ("task.reward={use='http',api_key_env='KEY'}", "api_key_env='KEY'"),
        ("task.api_key=s3cret words", "api_key=***"),
        ("x={hf_token = 's3cret, s3cret', k = 1}", "hf_token = ***, k = 1"),
        ("url=http://user:s3cret@host/classify", "url=http://***@host/classify"),
        ("header=Authorization: Bearer s3cret", "Authorization: ***"),
        ("name=hf_s3cretS3cret", "name=hf_***"),
    ],
)
def test_secrets_on_the_command_line_are_not_recorded(argument: str, shown: str) -> None:
    command = without_secrets(["/home/me/bin/tba", "train", argument, "run.steps=3"])
    assert shown.replace("'", "") in command.replace("'", "").replace('"', "")
    assert "s3cret" not in command and "home" not in command
    assert command.startswith("tba train ") and command.endswith(" run.steps=3")
    told = without_secrets(["tba", "train", "--hf-token", "s3cret", "run.steps=3"])
    assert told == "tba train --hf-token '***' run.steps=3"

"""What a run records of how it was started, and the groups that it stores."""

import platform
from datetime import datetime

import torch
from exact import toy_config
from transformers import AutoModelForCausalLM

import tba.open
from tba.runs.folder import SAMPLES, SESSIONS, read

SETTINGS = (
    "engine=scripted", "engine.answers=['1', '1', '', '27', '1+1', '371']", "sampling.samples=12",
    "sampling.max_tokens=4", "trainer.batch_size=12", "trainer.group_size=12", "strategy=uniform",
)  # fmt: skip


def test_each_session_of_a_run_is_recorded(toy_model, tmp_path, monkeypatch):
    """The second is not in a git repository."""
    folder = tmp_path / "run"
    tba.open.run(toy_config(toy_model, folder, *SETTINGS, "run.steps=1"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    tba.open.run(toy_config(toy_model, folder, *SETTINGS, "run.steps=2"), resume=folder)
    first, second = read(folder / SESSIONS)
    assert (first["step"], second["step"]) == (0, 1)
    assert second["commit"] is None and second["config"]["run"]["steps"] == 2
    assert datetime.fromisoformat(first["started"]) <= datetime.fromisoformat(second["started"])
    assert first["versions"]["python"] == platform.python_version()
    assert first["versions"]["torch"] == torch.__version__
    size = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(toy_model).parameters())
    assert first["parameters"] == first["trained_parameters"] == size


def test_a_stored_group_has_each_of_its_completions_once(toy_model, tmp_path):
    tba.open.run(toy_config(toy_model, tmp_path / "run", *SETTINGS, "run.steps=1"))
    rows = read(tmp_path / "run" / SAMPLES)
    found = {(row["step"], row["kind"], row["prompt"]) for row in rows}
    assert found == {(1, "train", rows[0]["prompt"])}
    completions = [row["completion"] for row in rows]
    assert len(set(completions)) == len(completions) > 1

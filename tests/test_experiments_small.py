"""The experiments that are no form of one of the paper's pass a dry run, and none is left out."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import VOCABULARY

from tba.cli import train

ROOT = Path(__file__).parent.parent
NEEDS = {
    "chain_sum_smollm2": "reasoning_gym",
    "chain_sum_smollm2_lora": "reasoning_gym",
    "stories_sentiment": "vaderSentiment",
}
"""Experiments, and the library that each needs beside the package."""


@pytest.mark.parametrize("name", NEEDS)
def test_a_dry_run_goes_through(
    name: str,
    make_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip(NEEDS[name], reason="an extra: see pyproject.toml")
    monkeypatch.chdir(ROOT)
    letters = [*VOCABULARY, *string.ascii_letters, *" .,:;?!'\"-()\n"]
    model = make_model(vocabulary=letters, context=256)
    train([f"experiments/{name}.toml", f"policy.model={model}"], dry_run=True)
    told = capsys.readouterr()
    held_out = json.loads(told.out)["eval"]["prompts"]
    assert "config OK (dry run): " in told.err
    assert told.err.endswith(f" training prompts, {held_out} held out\n")


def test_every_experiment_has_a_dry_run() -> None:
    """The tests name each file, or what it adds to a common beginning."""
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*experiments*.py"))
    for path in (ROOT / "experiments").glob("*.toml"):
        names = {path.stem.removeprefix(start) for start in ("", "redteam_", "tldr_pythia")}
        assert any(f'"{name}"' in tests for name in names), path.name

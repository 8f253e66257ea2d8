"""Whole runs with each objective: resuming is exact, and a constant lag is constant."""

from pathlib import Path

import numpy as np
import pytest
from build import ROOT, config, newest_files, resumes_exactly
from safetensors.numpy import load as load_weights

from tba.cli import _config
from tba.config.plugins import resolved
from tba.config.schema import load
from tba.open import run
from tba.replay.buffer import ReplayBuffer
from tba.runs.checkpoint import newest
from tba.runs.folder import METRICS, read
from tba.runs.summary import Summary
from tba.setup.setup import check

HEADED = {"ppo", "tb_learned_z"}
PLAIN = ("eval.prompts=0", "log.sample_every=0")
HELD_BACK = (*PLAIN, "strategy=recent", "runtime.lag=2", "policy.reset_reference_every=4")
SLOW = ("asymre", "cispo", "gspo", "m2po", "topr", "vespo")
STATELESS = [pytest.param(name, marks=pytest.mark.slow) for name in SLOW]
OPTIONS = {"vineppo": ("objective.step_tokens=2", "objective.rollouts=2")}


def resumes(model: Path, folder: Path, objective: str, *settings: str) -> dict[str, bytes]:
    """Return the files of the uninterrupted run; those of the resumed one must be the same."""
    resumes_exactly(model, folder, f"objective={objective}", *OPTIONS.get(objective, ()), *settings)
    whole, part = newest_files(folder / "whole"), newest_files(folder / "part")
    # `resumes_exactly` compares the content of most of them; the config names the folder
    others = ("state.json", "manifest.json", "config.json", "replay/")
    names = [{name for name in files if not name.startswith(others)} for files in (whole, part)]
    assert names[0] == names[1]
    assert not [name for name in names[0] if whole[name] != part[name]]
    return whole


@pytest.mark.parametrize("objective", ["online_dpo", "ppo", "tb_learned_z", "vineppo"])
def test_a_run_that_holds_groups_back_resumes_exactly(objective, tiny_model, tmp_path):
    """Killed after step 5 of 8, with two batches held back and a reference reset at step 4.

    Objectives with a state of their own, and one without.
    """
    files = resumes(tiny_model, tmp_path, objective, *HELD_BACK)
    assert {"delayed.jsonl", "reference.safetensors", "search_weights.safetensors"} <= files.keys()
    assert ("head.safetensors" in files) == (objective in HEADED)
    if objective in HEADED:
        learned = load_weights(files["head.safetensors"]).values()
        assert all(weights.any() for weights in learned)
    lags = [row["off_policy/lag_mean"] for row in read(tmp_path / "part" / METRICS)]
    assert lags == [0, 1, 2, 2, 2, 2, 2, 2]


def test_a_head_resumes_exactly_without_a_lag(tiny_model, tmp_path):
    resumes(tiny_model, tmp_path, "ppo", "strategy=mixture", *PLAIN)


@pytest.mark.parametrize("objective", ["oapl", *STATELESS])
def test_an_objective_for_stale_data_resumes_exactly(objective, tiny_model, tmp_path):
    resumes(tiny_model, tmp_path, objective, *HELD_BACK)


def lines_of_the_page() -> list[tuple[str, list[str]]]:
    """Return the algorithms that docs/algorithms.md gives as settings."""
    page = (ROOT / "docs" / "algorithms.md").read_text()
    rows = page.partition("| algorithm | here | difference |")[2].partition("\n\n")[0]
    cells = [row.split("|") for row in rows.splitlines()[2:]]
    return [(cell[1].strip(), cell[2].strip(" `").split()) for cell in cells]


def test_the_lines_that_are_algorithms_can_be_typed():
    lines = lines_of_the_page()
    assert len(lines) == 8
    for _, line in lines:
        resolved(load(None, line))


def test_the_reference_of_gvpo_is_the_policy_that_sampled(tiny_model, tmp_path):
    (line,) = [line for name, line in lines_of_the_page() if name.startswith("GVPO")]
    run(config(tiny_model, tmp_path / "run", *line, *PLAIN))
    buffer = ReplayBuffer()
    buffer.load(newest(tmp_path / "run" / "checkpoints"))
    found = [t for group in buffer.groups() for t in group.trajectories]
    assert {t.version for t in found} == {0, 4, 8}
    for t in found:
        np.testing.assert_allclose(t.ref_logp, t.behavior_logp, atol=1e-5)


@pytest.mark.parametrize(
    ("alpha", "warns"),
    [("0.5", False), ("1.25", False), ("0.25", True), ("{start=1.0, end=2.0, steps=8}", True)],
)
def test_an_alpha_far_from_one_warns_before_a_run(alpha, warns, tiny_model, tmp_path, caplog):
    check(config(tiny_model, tmp_path / "run", f"objective.alpha={alpha}"))
    assert ("outside 0.5 to 1.25, a single response" in caplog.text) == warns


def test_another_objective_cannot_resume_a_head(tiny_model, tmp_path):
    """The head must be of the same kind, or absent in both."""
    for objective in ("tb", "ppo"):
        settings = (f"objective={objective}", "run.steps=1", *PLAIN)
        run(config(tiny_model, tmp_path / objective, *settings))
    response, prompt, none = "response", "prompt", "None"
    pairs = (
        ("ppo", "tb", none, response),
        ("tb", "ppo", response, none),
        ("tb", "tb_learned_z", prompt, none),
        ("ppo", "tb_learned_z", prompt, response),
    )
    for before, after, wanted, there in pairs:
        told = f"the head of objective.use = {wanted}, but the run has {there}; leave it"
        with pytest.raises(ValueError, match=told):
            resumed(tmp_path / before, after)
    assert resumed(tmp_path / "tb", "rloo").steps == 2


def resumed(folder: Path, objective: str) -> Summary:
    return run(_config([f"objective={objective}", "run.steps=2"], folder), folder)


@pytest.mark.parametrize("lag", [0, 3])
def test_the_lag_is_constant(lag, tiny_model, tmp_path):
    """Step v learns from all groups of version v - lag; on policy, every ratio pi / mu is 1."""
    settings = (f"runtime.lag={lag}", "strategy=recent", "run.steps=10", *PLAIN)
    run(config(tiny_model, tmp_path / "run", *settings))
    rows = read(tmp_path / "run" / METRICS)
    assert len(rows) == 10
    for step, row in enumerate(rows):
        assert row["off_policy/lag_mean"] == row["off_policy/lag_max"] == min(step, lag)
        if row["off_policy/lag_max"] == 0:
            assert row["off_policy/ess"] == pytest.approx(1, abs=1e-4)
            assert row["off_policy/log_ratio"] == pytest.approx(0, abs=1e-4)
        else:
            assert row["off_policy/ess"] < 1 - 1e-4

"""Resetting the reference while the replay buffer still holds groups of the reference before."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from build import config, newest_files, replayed
from exact import log_probs

from tba.cli import _config
from tba.errors import SearchError
from tba.learn import Trainer
from tba.open import open_run, run
from tba.runs.folder import METRICS, read
from tba.runtime.local import LocalSearchers
from tba.types import Group, collate

SETTINGS = (
    "task.size=6", "strategy=uniform", "policy.reset_reference_every=3", "run.steps=9",
    "eval.prompts=0", "log.sample_every=0",
)  # fmt: skip
"""Each step searches half of the prompts, so that every prompt is searched with each reference."""


def equal_rewards(groups: list[Group]) -> list[Group]:
    equal = []
    for group in groups:
        trajectories = tuple(replace(t, reward=1.0) for t in group.trajectories)
        equal.append(replace(group, trajectories=trajectories))
    return equal


def test_no_group_mixes_references(tiny_model, tmp_path, monkeypatch):
    """Reference log-probs of a sampled group are of the weights that the group names.

    With equal rewards, a policy that equals the reference has nothing to learn.
    """
    with open_run(config(tiny_model, tmp_path / "run", *SETTINGS)) as run:
        references = {0: deepcopy(run.trainer.policy)}
        sampled: list[Group] = []
        sample, reset = run.sample, run.reset_reference

        def kept_sample() -> list[Group]:
            groups = sample()
            sampled.extend(groups)
            return groups

        def kept_reset() -> None:
            reset()
            references[run.step] = deepcopy(run.trainer.policy)

        monkeypatch.setattr(run, "sample", kept_sample)
        monkeypatch.setattr(run, "reset_reference", kept_reset)
        assert run.train().finished
        assert {group.reference for group in sampled} == {0, 3, 6}
        for group in sampled:
            expected = log_probs(references[group.reference], group)
            torch.testing.assert_close(collate([group]).ref_logp[0], expected, atol=1e-5, rtol=0)
        assert run.buffer.counts["evicted_reference"] > 0
        groups = equal_rewards(run.buffer.groups())
        norms = {}
        for reference in (9, 6):
            same = [g for g in groups if g.reference == reference]
            smallest = min(len(g.trajectories) for g in same)
            batch = collate([replace(g, trajectories=g.trajectories[:smallest]) for g in same])
            norms[reference] = run.trainer.step(batch, 9)["grad_norm"]
        assert norms[9] < 1e-5
        assert norms[6] > 1e-3


def test_a_resumed_run_does_what_was_due_when_publishing_failed(tiny_model, tmp_path, monkeypatch):
    """Searchers fail at step 3: the run has the new reference and the evaluation all the same."""
    settings = ("policy.reset_reference_every=3", "eval.every=3", "run.steps=5")
    run(config(tiny_model, tmp_path / "whole", *settings))
    publish = LocalSearchers.publish

    def fail(self: LocalSearchers, trainer: Trainer, version: int) -> None:
        publish(self, trainer, version)
        if version == 3:
            raise SearchError("a searcher died")

    folder = tmp_path / "part"
    with monkeypatch.context() as patch, pytest.raises(SearchError, match="from step 3"):
        patch.setattr(LocalSearchers, "publish", fail)
        run(config(tiny_model, folder, *settings))
    assert run(_config([], folder), folder).finished
    whole, part = newest_files(tmp_path / "whole"), newest_files(folder)
    for name in ("model/model.safetensors", "optimizer.safetensors", "reference.safetensors"):
        assert whole[name] == part[name], name
    assert replayed(tmp_path / "whole") == replayed(folder)
    expected, evaluated = (evaluations(tmp_path / name) for name in ("whole", "part"))
    assert evaluated == expected and len(evaluated) == 3


def evaluations(folder: Path) -> list[tuple[float, ...]]:
    names = ("step", "requested", "eval/sampled_reward", "eval/sampled_log_ratio")
    rows = [row for row in read(folder / METRICS) if "requested" in row]
    return [tuple(row[name] for name in names) for row in rows]

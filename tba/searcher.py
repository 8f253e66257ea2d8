"""Search: prompts -> engine -> rewards and reference log-probs -> groups that any objective can learn from."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from tba.faults import FaultsTable, falsify
from tba.objective import Vine
from tba.policy import Policy
from tba.pretrained import Text
from tba.rewards import Guard, Rejected, Verdict
from tba.rollouts import Rollouts
from tba.types import Completion, Group, Prompt, Sampling, Trajectory, collate
from tba.weights import Weights


@runtime_checkable
class Engine(Protocol):
    """Answers prompts with some version of the policy's weights."""

    version: int

    def generate(self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int) -> list[list[Completion]]:
        """`sampling.samples` completions of each prompt's tokens; the same seed and weights give the same answers."""

    def adopt(self, weights: Weights) -> float | None:
        """Takes the weights whole or raises; returns mean |difference| of the probe's log-probs, None where there is nothing to compare."""


@dataclass(frozen=True)
class Findings:
    """What came of one task: the groups, and an account of the rest."""

    groups: list[Group]
    samples: int
    rejected: Counter[str] = field(default_factory=Counter)
    detail: str = ""
    """What the last rejected sample said, for the person who has to mend the reward."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds spent: `generate`, `reward`, `rollouts`, `reference`."""
    faulty: int = 0
    """Samples whose reward was made wrong, as `[faults]` says."""
    rollouts: int = 0
    """New endings sampled to estimate values from."""


@dataclass(frozen=True)
class Searcher:
    """Finishes trajectories. It holds the engine and the reference model, so that the trainer holds one model only."""

    engine: Engine
    reference: Policy
    text: Text
    guard: Guard
    sampling: Sampling
    token_budget: int
    faults: FaultsTable
    vine: Vine | None = None

    def search(self, prompts: Sequence[Prompt], seed: int) -> Findings:
        """S samples of each prompt, scored. A prompt whose samples were all rejected gives no group."""
        clock = [time.perf_counter()]
        tokens = [self.text.encode(p) for p in prompts]
        version = self.engine.version
        completions = self.engine.generate(tokens, self.sampling, seed)
        clock.append(time.perf_counter())
        flat = [(p, c) for p, cs in zip(prompts, completions, strict=True) for c in cs]
        verdicts = self.guard([p for p, _ in flat], [self.text.answer(c) for _, c in flat])
        verdicts, faulty = falsify(verdicts, self.faults, seed)
        clock.append(time.perf_counter())
        groups, remaining = [], iter(verdicts)
        for prompt, encoded, cs in zip(prompts, tokens, completions, strict=True):
            kept = [(c, r) for c, r in zip(cs, remaining, strict=False) if not isinstance(r, Rejected)]
            if kept:
                unscored = tuple(Trajectory(c.tokens, c.logp, np.zeros_like(c.logp), float(r), version, c.finished) for c, r in kept)
                groups.append(Group(prompt, encoded, unscored))
        endings: list[Verdict] = []
        if self.vine is not None:
            groups, endings = Rollouts(self.engine, self.text, self.guard, self.sampling, self.vine).estimate(groups, seed)
        clock.append(time.perf_counter())
        groups = self.referred(groups)
        clock.append(time.perf_counter())
        rejected = [v for v in (*verdicts, *endings) if isinstance(v, Rejected)]
        return Findings(
            groups,
            samples=len(flat),
            rejected=Counter(v.reason for v in rejected),
            detail=rejected[-1].detail if rejected else "",
            seconds=dict(zip(("generate", "reward", "rollouts", "reference"), np.diff(clock).tolist(), strict=True)),
            faulty=faulty,
            rollouts=len(endings),
        )

    @torch.inference_mode()
    def referred(self, groups: list[Group]) -> list[Group]:
        """Reference log-probs for all; groups that kept equally many samples run together."""
        found = []
        for size in sorted({len(g.trajectories) for g in groups}):
            same = [g for g in groups if len(g.trajectories) == size]
            batch = collate(same)
            logp = torch.cat([self.reference.logp(piece) for piece in batch.pieces(self.token_budget)], 1).float().cpu().numpy()
            for group, rows in zip(same, logp, strict=True):
                scored = (replace(t, ref_logp=row[: len(t.tokens)].copy()) for t, row in zip(group.trajectories, rows, strict=True))
                found.append(replace(group, trajectories=tuple(scored)))
        return found

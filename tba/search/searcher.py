"""Search: prompts -> engine -> rewards and reference log-probs -> groups that any objective can learn from."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tba.config.tables import EvalTable, FaultsTable
from tba.engines import Engine
from tba.learn.policy import Policy
from tba.models.pretrained import Text
from tba.objectives import ValueRollouts
from tba.search.evaluate import evaluate
from tba.search.faults import falsify
from tba.search.result import Evaluation, SearchResult, SearchStats
from tba.search.rewards import Guard, Rejected, Verdict
from tba.search.rollouts import Rollouts
from tba.types import Group, Prompt, Sampling, Trajectory, collate

STAGES = ("generate", "reward", "rollouts", "reference")
"""Stages of a search, whose seconds are counted."""


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
    value_rollouts: ValueRollouts | None = None
    held_out: Sequence[Prompt] = ()
    evaluation: EvalTable = EvalTable()

    def search(self, prompts: Sequence[Prompt], seed: int) -> SearchResult:
        """S samples of each prompt, scored. A prompt whose samples were all rejected gives no group."""
        clock = [time.perf_counter()]
        tokens = [self.text.encode(p) for p in prompts]
        completions = self.engine.generate(tokens, self.sampling, seed)
        clock.append(time.perf_counter())
        flat = [(p, c) for p, cs in zip(prompts, completions, strict=True) for c in cs]
        verdicts = self.guard([p for p, _ in flat], [self.text.answer(c) for _, c in flat])
        verdicts, faulty = falsify(verdicts, self.faults, seed)
        clock.append(time.perf_counter())
        groups, remaining = [], iter(verdicts)
        for prompt, encoded, cs in zip(prompts, tokens, completions, strict=True):
            kept = [
                (c, r) for c, r in zip(cs, remaining, strict=False) if not isinstance(r, Rejected)
            ]
            if kept:
                unscored = tuple(
                    Trajectory(
                        c.tokens, c.logp, np.zeros_like(c.logp), float(r), c.version, c.finished
                    )
                    for c, r in kept
                )
                groups.append(Group(prompt, encoded, unscored))
        endings: list[Verdict] = []
        if self.value_rollouts is not None:
            groups, endings = Rollouts(
                self.engine, self.text, self.guard, self.sampling, self.value_rollouts
            ).estimate(groups, seed)
        clock.append(time.perf_counter())
        groups = self.referred(groups)
        clock.append(time.perf_counter())
        rejected = [v for v in (*verdicts, *endings) if isinstance(v, Rejected)]
        stats = SearchStats(
            samples=len(flat),
            rollouts=len(endings),
            faulty=faulty,
            rejected=Counter(v.reason for v in rejected),
            last_rejection=rejected[-1].detail if rejected else "",
            seconds=defaultdict(float, zip(STAGES, np.diff(clock).tolist(), strict=True)),
        )
        return SearchResult(groups, stats)

    def evaluate(self) -> Evaluation:
        """Evaluate the engine's weights on the held-out prompts, as `[eval]` says."""
        same = self.evaluation.temperature == self.sampling.temperature
        reference = self.referred if same else None  # the reference has one temperature
        return evaluate(
            self.engine, self.text, self.guard, self.held_out, self.evaluation,
            self.sampling.max_tokens, reference,
        )  # fmt: skip

    @torch.inference_mode()
    def referred(self, groups: list[Group]) -> list[Group]:
        """Reference log-probs for all; groups that kept equally many samples run together."""
        found = []
        for size in sorted({len(g.trajectories) for g in groups}):
            same = [g for g in groups if len(g.trajectories) == size]
            batch = collate(same)
            logp = (
                torch.cat(
                    [self.reference.logp(piece) for piece in batch.pieces(self.token_budget)], 1
                )
                .float()
                .cpu()
                .numpy()
            )
            for group, rows in zip(same, logp, strict=True):
                scored = (
                    replace(t, ref_logp=row[: len(t.tokens)].copy())
                    for t, row in zip(group.trajectories, rows, strict=True)
                )
                found.append(replace(group, trajectories=tuple(scored)))
        return found

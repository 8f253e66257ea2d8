"""Searching in the trainer's own process, when it is asked to: synchronous and bit-reproducible."""

from __future__ import annotations

import time

from tba import build
from tba.build import Parts
from tba.evaluate import Evaluation
from tba.rewards import Tally
from tba.runtime import Account, SearchState, task_seed
from tba.searcher import Searcher
from tba.types import Group
from tba.weights import Weights, adopt


class LocalSearchers:
    """One searcher. It answers exactly as many prompts as the trainer waits for."""

    def __init__(self, parts: Parts, searcher: Searcher, resumed: SearchState | None):
        self.account = Account()
        self._parts, self._searcher = parts, searcher
        self._stream = build.prompt_stream(parts)
        self._tally = Tally(parts.config.reward.max_rejected)
        self._tasks = 0
        self._weights: Weights | None = None
        self._reference: Weights | None = None
        self._evaluations: list[Evaluation] = []
        if resumed is not None:
            self._stream.seek(resumed.cursor)
            self._tasks = resumed.tasks
            if resumed.weights is not None:
                self.publish(resumed.weights)
            if resumed.reference is not None:
                self.reset_reference(resumed.reference)

    def gather(self, at_least: int) -> list[Group]:
        groups: list[Group] = []
        c = self._parts.config
        deadline = time.monotonic() + c.runtime.gather_deadline * max(1.0, at_least / c.trainer.groups)
        while len(groups) < at_least:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(groups)} of {at_least} groups found within runtime.gather_deadline; raise it, or see what is slow")
            prompts = self._stream.take(min(c.runtime.prompts_per_task, at_least - len(groups)))
            findings = self._searcher.search(prompts, task_seed(c.run.seed, self._tasks))
            self._tasks += 1
            self._stream.done(prompts, findings.groups)
            self.account.add(findings)
            self._tally.add(findings.samples + findings.rollouts, findings.rejected, findings.detail)
            groups += findings.groups
        return groups

    def publish(self, weights: Weights) -> None:
        started = time.perf_counter()
        gap = self._searcher.engine.adopt(weights)
        self._weights = weights
        self.account.logp_gap = self.account.logp_gap if gap is None else gap
        self.account.seconds["adopt"] += time.perf_counter() - started

    def reset_reference(self, weights: Weights) -> None:
        adopt(self._searcher.reference.model, weights)
        self._reference = weights

    def evaluate(self) -> None:
        self._evaluations.append(build.evaluation(self._parts, self._searcher))

    def evaluations(self, finish: bool = False) -> list[Evaluation]:
        found, self._evaluations = self._evaluations, []
        return found

    def state(self) -> SearchState:
        return SearchState(self._stream.cursor(), self._tasks, self._weights, self._reference)

    def close(self) -> None:
        pass

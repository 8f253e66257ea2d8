"""A searcher in a process of its own."""

from __future__ import annotations

import os
import sys
import time

import ray
import torch

from tba.runtime.placement import Place
from tba.search.result import Evaluation, SearchResult
from tba.search.setup import SearchSetup
from tba.types import Prompt
from tba.weights import Weights


class SearcherActor:
    """A searcher in its own process. `publish` runs beside a search; what it leaves is adopted before the next one."""

    def __init__(
        self,
        setup: SearchSetup,
        place: Place,
        bf16: bool,
        path: list[str],
        newest: Weights | None,
        reference: Weights | None,
    ):
        sys.path[:] = path + [p for p in sys.path if p not in path]
        torch.set_grad_enabled(False)
        place.take()
        self.searcher = setup.build(place.device, bf16)
        self.newest = newest
        if reference is not None:
            self.reset_reference(reference)
        self.idle_since = time.perf_counter()

    @ray.method(concurrency_group="control")
    def pid(self) -> int:
        """This process; answered once it has started."""
        return os.getpid()

    @ray.method(concurrency_group="control")
    def publish(self, weights: Weights) -> None:
        self.newest = weights

    def reset_reference(self, weights: Weights) -> None:
        """In its turn: what was asked for before is searched with the reference of before."""
        self.searcher.reference.load_weights(weights)

    def search(self, prompts: list[Prompt], seed: int, weights: Weights | None) -> SearchResult:
        """Search with `weights`, or else with those last published, if they are newer."""
        started = time.perf_counter()
        idle = started - self.idle_since
        gap = self._load_newer(self.newest if weights is None else weights)
        loading = time.perf_counter() - started
        result = self.searcher.search(prompts, seed)
        result.stats.seconds["idle"] += idle
        result.stats.seconds["load_weights"] += loading
        if gap is not None:
            result.stats.logp_gap = gap
        self.idle_since = time.perf_counter()
        return result

    def evaluate(self, weights: Weights | None) -> Evaluation:
        self._load_newer(weights)
        evaluation = self.searcher.evaluate()
        self.idle_since = time.perf_counter()
        return evaluation

    def _load_newer(self, weights: Weights | None) -> float | None:
        newer = weights is not None and weights.version > self.searcher.engine.version
        return self.searcher.engine.load_weights(weights) if newer and weights is not None else None

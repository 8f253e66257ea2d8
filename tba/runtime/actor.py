"""Searcher in a process of its own."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch

from tba.runtime.placement import Place
from tba.runtime.pool import Launch
from tba.runtime.tasks import CONTROL, SEARCH
from tba.search.result import Evaluation, SearchResult, SearchStats
from tba.search.setup import SearchSetup
from tba.types import Prompt
from tba.weights import Sent, SharedLock, Transport


class SearcherActor:
    """Searcher that runs several searches at once, each in a thread of its own.

    Searches share a lock and newer weights may arrive under them. An evaluation holds it alone,
    because it needs the same weights to its end, and so does a change of the reference, which
    searches that have begun keep to their end.
    """

    def __init__(
        self,
        setup: SearchSetup,
        place: Place,
        bf16: bool,
        path: list[str],
        transport: Transport,
        newest: Sent | None,
    ):
        sys.path[:] = path + [p for p in sys.path if p not in path]
        self._place = place.assigned([str(gpu) for gpu in ray.get_gpu_ids()])
        self._place.take()
        self._searcher = setup.build(self._place.device, bf16)
        self._transport = transport
        self._searches = SharedLock()
        self._loading = threading.Lock()
        self._usage = Usage()
        self._load_newer(newest)

    def pid(self) -> int:
        """Return the process id, once the searcher has started."""
        return os.getpid()

    def publish(self, weights: Sent) -> None:
        """Load newer weights beside the searches that run."""
        self._enter()
        with self._searches.shared():
            self._load_newer(weights)

    def search(
        self, prompts: list[Prompt], seed: int, weights: Sent | None, reference: Sent | None
    ) -> SearchResult:
        """Search with the newest weights, or with `weights` if these are newer."""
        self._enter()
        with self._usage.working():
            self._load_newer_reference(reference)
            with self._searches.shared():
                self._load_newer(weights)
                result = self._searcher.search(prompts, seed)
        self._usage.report(result.stats)
        return result

    def evaluate(self, weights: Sent | None, reference: Sent | None) -> Evaluation:
        """Evaluate `weights`, or what is loaded if that is newer, when no search runs."""
        self._enter()
        with self._usage.working():
            self._load_newer_reference(reference)
            with self._searches.alone():
                self._load_newer(weights)
                return self._searcher.evaluate()

    def _enter(self) -> None:
        """Prepare the calling thread: cores and gradients are settings of a thread."""
        self._place.take()
        torch.set_grad_enabled(False)

    def _load_newer(self, weights: Sent | None) -> None:
        if weights is None:
            return
        with self._loading:
            if weights.version <= self._searcher.engine.version:
                return
            started = time.perf_counter()
            gap = self._searcher.engine.load_weights(self._transport.receive(weights))
            self._usage.loaded(time.perf_counter() - started, gap)

    def _load_newer_reference(self, weights: Sent | None) -> None:
        reference = self._searcher.reference
        if weights is None or weights.version <= reference.version:
            return
        with self._searches.alone():
            if weights.version > reference.version:
                reference.load_weights(self._transport.receive(weights))


def launcher(
    setup: SearchSetup, bf16: bool, transport: Transport, gpus: float, concurrent: int
) -> Launch:
    """Return a function that starts such searchers, each of which requests so many GPUs of Ray."""
    options: dict[str, Any] = {
        "num_cpus": 0,
        "num_gpus": gpus,
        "max_restarts": 0,
        "concurrency_groups": {CONTROL: 2, SEARCH: concurrent},
    }
    remote: Any = ray.remote(**options)(SearcherActor)
    return lambda place, newest: remote.remote(setup, place, bf16, sys.path, transport, newest)


class Usage:
    """Seconds that a searcher was idle or loaded weights, until a search reports them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._working = 0
        self._idle_since = time.perf_counter()
        self._stats = SearchStats()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Surround work: the searcher is idle while nothing is surrounded."""
        with self._lock:
            if self._working == 0:
                self._stats.seconds["idle"] += time.perf_counter() - self._idle_since
            self._working += 1
        try:
            yield
        finally:
            with self._lock:
                self._working -= 1
                self._idle_since = time.perf_counter()

    def loaded(self, seconds: float, gap: float | None) -> None:
        """Count a load of weights, and the gap that it measured."""
        with self._lock:
            self._stats.seconds["load_weights"] += seconds
            if gap is not None:
                self._stats.logp_gap = gap

    def report(self, stats: SearchStats) -> None:
        """Add everything since the last report to the statistics of a search."""
        with self._lock:
            stats.add(self._stats)
            self._stats = SearchStats()

"""Searcher in a process of its own."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from tba.runtime.placement import Place, reuse_memory
from tba.search.evaluate import evaluate_held_out
from tba.search.result import Evaluation, SearchResult, SearchStats
from tba.search.searcher import LogpGapError, SearchSetup
from tba.types import Prompt
from tba.weights import Sent, SharedLock, Transport


class SearcherActor:
    """Searcher that runs several searches at once, each in a thread of its own.

    Searches share a lock and newer weights may arrive under them. An evaluation holds it alone,
    because it needs the same weights to its end; so does a change of the reference.
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
        place.take()
        reuse_memory()
        self._place, self._transport = place, transport
        self._searcher = setup.build(place.device, bf16)
        self._searches = SharedLock()
        self._loading = threading.Lock()
        self._counting = threading.Lock()  # guards everything below
        self._unreported = SearchStats()
        self._working, self._idle_since = 0, time.perf_counter()
        self._wrong: LogpGapError | None = None  # every later call raises it
        with suppress(LogpGapError):  # raised by `pid`: it would be lost with the constructor
            self._load_newer(newest)

    def pid(self) -> int:
        """Return the process id, once the searcher has started."""
        self._refuse_wrong()
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
        with self._work(reference), self._searches.shared():
            self._load_newer(weights)
            result = self._searcher.search(prompts, seed)
        with self._counting:
            result.stats.add(self._unreported)
            self._unreported = SearchStats()
        return result

    def evaluate(self, weights: Sent | None, reference: Sent | None) -> Evaluation:
        """Evaluate `weights`, or what is loaded if that is newer, when no search runs."""
        with self._work(reference), self._searches.alone():
            self._load_newer(weights)
            return evaluate_held_out(self._searcher)

    def _enter(self) -> None:
        """Prepare the calling thread: cores and gradients are settings of a thread."""
        self._refuse_wrong()
        self._place.take()
        torch.set_grad_enabled(False)

    @contextmanager
    def _work(self, reference: Sent | None) -> Iterator[None]:
        """Surround work, with this reference or a newer one; between it the searcher is idle."""
        self._enter()
        with self._counting:
            if self._working == 0:
                self._unreported.seconds["idle"] += time.perf_counter() - self._idle_since
            self._working += 1
        try:
            self._load_newer_reference(reference)
            yield
            self._refuse_wrong()
        finally:
            with self._counting:
                self._working -= 1
                self._idle_since = time.perf_counter()

    def _load_newer(self, weights: Sent | None) -> None:
        if weights is None:
            return
        with self._loading:
            if weights.version <= self._searcher.engine.version:
                return
            started = time.perf_counter()
            gap = self._load(weights)
            with self._counting:
                self._unreported.seconds["load_weights"] += time.perf_counter() - started
                if gap is not None:
                    self._unreported.logp_gap = gap

    def _load(self, weights: Sent) -> float | None:
        try:
            return self._searcher.load_weights(self._transport.receive(weights))
        except LogpGapError as error:
            self._wrong = error
            raise

    def _refuse_wrong(self) -> None:
        """Raise the error of a failed weight update, also to searches that began before it."""
        if self._wrong is not None:
            raise self._wrong

    def _load_newer_reference(self, weights: Sent | None) -> None:
        reference = self._searcher.reference
        if weights is None or weights.version <= reference.version:
            return
        with self._searches.alone():
            if weights.version > reference.version:
                reference.load_weights(self._transport.receive(weights))

"""Searcher in a separate process."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import ray
import torch

from tba.engines._lock import SharedLock
from tba.errors import SearchError
from tba.prompt import Prompt
from tba.runtime.cluster import check_seen
from tba.runtime.placement import Place
from tba.search.evaluate import EvaluatedPiece, evaluate_piece
from tba.search.result import SearchResult, SearchStats
from tba.search.searcher import SearchSetup
from tba.weights import Publication, Weights


class SearcherActor:
    """Searcher that runs several searches at once, each in its own thread.

    Searches share `_searches`, and newer weights may be loaded while they run. A piece of an
    evaluation needs one version until it ends. If that is still the newest, the piece shares
    `_searches` and `_pinned`, for which newer weights wait. Otherwise it holds `_searches` alone,
    as a change of the reference does, and the next search reloads the newest weights.
    """

    def __init__(
        self,
        setup: SearchSetup,
        place: Place,
        bf16: bool,
        folders: Mapping[str, str],
        receive: Callable[[Publication], Weights],
        newest: Publication | None,
    ):
        place.begin()
        self._place = place
        self._receive = receive
        self._wrong: SearchError | None = None  # every later call raises it
        try:
            check_seen(folders)
        except ValueError as error:
            self._wrong = SearchError(str(error))
            return
        self._searcher = setup.build(place.device, bf16)
        self._searches = SharedLock()
        self._pinned = SharedLock()  # held shared while the version must not change
        self._loading = threading.Lock()
        self._newest: Publication | None = None  # of all weights sent; guarded by `_loading`
        self._counting = threading.Lock()  # guards everything below
        self._unreported = SearchStats()
        self._working = 0
        self._since = time.perf_counter()  # when `_working` last changed
        with suppress(SearchError):  # `machine` raises it: the constructor would lose it
            self._load_newest(newest)

    def machine(self) -> str:
        """Return Ray's id of this machine, once the searcher has started."""
        self._refuse_wrong()
        return str(ray.get_runtime_context().get_node_id())

    def load_weights(self, weights: Publication) -> None:
        """Load newer weights while searches run."""
        self._enter()
        # not while an evaluation or a change of the reference holds the lock exclusively
        with self._searches.shared():
            self._load_newest(weights)

    def search(
        self,
        prompts: list[Prompt],
        seed: int,
        weights: Publication | None,
        reference: Publication | None,
    ) -> SearchResult:
        """Search with the newest weights, or with `weights` if those are newer."""
        with self._work(reference), self._searches.shared():
            self._load_newest(weights)
            result = self._searcher.search(prompts, seed)
        with self._counting:
            result.stats.add(self._unreported)
            self._unreported = SearchStats()
        return result

    def evaluate(
        self, piece: int, weights: Publication, reference: Publication | None
    ) -> EvaluatedPiece:
        with self._work(reference):
            with self._searches.shared():
                self._load_newest(weights)
                with self._pinned.shared():  # these weights stay until the piece ends
                    if self._searcher.engine.version == weights.version:
                        return evaluate_piece(self._searcher, piece)
            with self._searches.alone():  # no search may run with older weights
                self._load(weights)
                return evaluate_piece(self._searcher, piece)

    def _enter(self) -> None:
        """Prepare the calling thread: cores and gradients are settings of a thread."""
        self._refuse_wrong()
        self._place.take()
        torch.set_grad_enabled(False)

    @contextmanager
    def _work(self, reference: Publication | None) -> Iterator[None]:
        """Wrap work that uses this reference or a newer one; its time counts as busy."""
        self._enter()
        self._count(1)
        try:
            own = self._searcher.reference
            if reference is not None and reference.version > own.version:
                with self._searches.alone():  # a search needs one reference until it ends
                    if reference.version > own.version:  # no other thread has loaded it meanwhile
                        own.load_weights(self._receive(reference))
            yield
            self._refuse_wrong()
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        """Count the time since the last change as busy if any task was running, else as waiting."""
        with self._counting:
            now = time.perf_counter()
            self._unreported.seconds["busy" if self._working else "waiting"] += now - self._since
            self._since = now
            self._working += change

    def _load_newest(self, weights: Publication | None) -> None:
        """Load the newest weights sent so far, including `weights`, unless they are loaded."""
        # locks are taken in this order: `_searches`, `_loading`, `_pinned`
        with self._loading:
            newest = self._newest
            if newest is None or (weights is not None and weights.version > newest.version):
                newest = self._newest = weights
            if newest is not None and newest.version != self._searcher.engine.version:
                with self._pinned.alone():  # waits for pieces of evaluations, not for searches
                    self._load(newest)

    def _load(self, weights: Publication) -> None:
        if weights.version == self._searcher.engine.version:
            return
        engine = self._searcher.engine
        started = time.perf_counter()
        drained_before = engine.drained
        try:
            gap = self._searcher.load_weights(self._receive(weights))
        except SearchError as error:
            self._wrong = error
            raise
        drained = engine.drained - drained_before
        with self._counting:
            self._unreported.seconds["drain"] += drained
            self._unreported.seconds["load_weights"] += time.perf_counter() - started - drained
            self._unreported.measured(gap)

    def _refuse_wrong(self) -> None:
        """Raise the error of a failed weight update, also in searches that began before it."""
        if self._wrong is not None:
            raise self._wrong

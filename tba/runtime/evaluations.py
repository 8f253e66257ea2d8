"""Evaluations in progress: pieces to hand out, and results to join."""

import logging
from collections import deque
from dataclasses import replace

from tba.search.evaluate import EvaluatedPiece, Piece, join, pieces
from tba.search.result import Evaluation
from tba.search.searcher import SearchSetup
from tba.weights import Sent

log = logging.getLogger(__name__)

UNDER_WAY = 2
"""Most evaluations that have begun and not ended; each keeps a copy of the weights."""


class Evaluations:
    """Divides evaluations into pieces, which may end in any order, and joins their results.

    One begins when all pieces of those before it have been handed out; until then, one may wait. A
    newer one replaces it: then it has ended, without scores.
    """

    def __init__(self, setup: SearchSetup):
        self._count = len(pieces(setup))
        self._pieces: deque[Piece] = deque()  # to hand out
        self._begun: list[Sent] = []  # weights of the evaluations that have not ended
        # weights of the evaluation that waits, and the step at which it was requested
        self._next: tuple[Sent, int] | None = None
        self._ended: list[Evaluation] = []
        self._done = 0  # pieces that have ended, of the evaluations that have not
        self.left_out = 0  # evaluations that were replaced

    @property
    def weights(self) -> list[Sent]:
        """Weights of all evaluations that have not ended."""
        return self._begun if self._next is None else [*self._begun, self._next[0]]

    @property
    def running(self) -> int:
        """Evaluations that have not ended."""
        return len(self.weights)

    def request(self, weights: Sent, step: int) -> None:
        if self._next is not None:
            replaced, requested = self._next
            self._ended.append(Evaluation(replaced.version, {}, [], requested))
            self.left_out += 1
            if self.left_out == 1:
                log.warning(
                    "searchers are slower than eval.every: an evaluation that has not begun is left"
                    " out when the next one is due"
                )
        self._next = weights, step
        self._begin()

    def _begin(self) -> None:
        """Begin the evaluation that waits, if it may."""
        if self._next is None or self._pieces or len(self._begun) == UNDER_WAY:
            return
        (weights, step) = self._next
        self._next = None
        results: dict[int, EvaluatedPiece] = {}
        self._pieces += [Piece(number, weights, step, results) for number in range(self._count)]
        self._begun.append(weights)

    def handed_out(self) -> bool:
        """Return whether searchers have, or have had, all pieces of what was requested."""
        return not self._pieces and self._next is None

    def percent(self) -> int:
        """Return how much of the evaluations that are running has been done."""
        return 100 * self._done // max(1, self.running * self._count)

    def take(self) -> Piece | None:
        """Return a piece to hand out, if there is one."""
        self._begin()
        return self._pieces.popleft() if self._pieces else None

    def put_back(self, piece: Piece) -> None:
        """Hand this piece out again, because its searcher was lost."""
        self._pieces.appendleft(piece)

    def done(self, piece: Piece, result: EvaluatedPiece) -> None:
        """Record the result of a piece; the last one ends its evaluation."""
        piece.results[piece.number] = result
        self._done += 1
        if len(piece.results) == self._count:
            in_order = [piece.results[number] for number in range(self._count)]
            evaluation = join(piece.weights.version, in_order)
            self._ended.append(replace(evaluation, requested=piece.step))
            self._begun.remove(piece.weights)
            self._done -= self._count

    def collect(self) -> list[Evaluation]:
        """Return the evaluations that have ended since the last call."""
        ended = self._ended
        self._ended = []
        return ended

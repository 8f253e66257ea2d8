"""Evaluations under way: the pieces to hand out, and the results to join."""

from collections import deque
from dataclasses import dataclass

from tba.search.evaluate import EvaluatedPiece, join, piece_count
from tba.search.result import Evaluation
from tba.search.searcher import SearchSetup
from tba.weights import Sent


@dataclass(eq=False)
class Requested:
    """Evaluation of one version of the weights, with the results that have arrived by piece."""

    weights: Sent
    results: dict[int, EvaluatedPiece]


@dataclass(frozen=True)
class Piece:
    """Piece of an evaluation, for any searcher."""

    of: Requested
    number: int

    @property
    def weights(self) -> Sent:
        return self.of.weights


class Evaluations:
    """Divides evaluations into pieces, which may end in any order, and joins their results."""

    def __init__(self, setup: SearchSetup):
        self._setup, self._count = setup, piece_count(setup)
        self._waiting: deque[Piece] = deque()
        self._ended: list[Evaluation] = []
        self.running = 0
        """Evaluations of which some piece has not ended."""

    def request(self, weights: Sent) -> None:
        """Queue an evaluation of these weights."""
        requested = Requested(weights, {})
        self._waiting += [Piece(requested, number) for number in range(self._count)]
        self.running += 1

    def take(self) -> Piece | None:
        """Hand out the next piece, if there is one."""
        return self._waiting.popleft() if self._waiting else None

    def put_back(self, piece: Piece) -> None:
        """Hand this piece out again, because its searcher was lost."""
        self._waiting.appendleft(piece)

    def done(self, piece: Piece, result: EvaluatedPiece) -> None:
        """Record the result of a piece; the last one ends its evaluation."""
        results = piece.of.results
        results[piece.number] = result
        if len(results) == self._count:
            in_order = [results[number] for number in range(self._count)]
            self._ended.append(join(self._setup, piece.weights.version, in_order))
            self.running -= 1

    def collect(self) -> list[Evaluation]:
        """Return the evaluations that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

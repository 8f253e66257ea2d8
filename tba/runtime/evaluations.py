"""Evaluations in progress: pieces to hand out, and results to join."""

from collections import deque
from collections.abc import Sequence

from tba.runtime.handle import Handle, Piece
from tba.search.evaluate import EvaluatedPiece, join, pieces
from tba.search.result import Evaluation
from tba.search.searcher import SearchSetup
from tba.weights import Sent


class Evaluations:
    """Divides evaluations into pieces, which may end in any order, and joins their results."""

    def __init__(self, setup: SearchSetup):
        self._count = len(pieces(setup))
        self._waiting: deque[Piece] = deque()
        self._ended: list[Evaluation] = []
        self.running = 0  # evaluations of which some piece has not ended
        self._done = 0  # their pieces that have ended

    def request(self, weights: Sent) -> None:
        results: dict[int, EvaluatedPiece] = {}
        self._waiting += [Piece(number, weights, results) for number in range(self._count)]
        self.running += 1

    def percent(self) -> int:
        """Return how much of the evaluations that are running has been done."""
        return 100 * self._done // max(1, self.running * self._count)

    def take(self) -> Piece | None:
        return self._waiting.popleft() if self._waiting else None

    def put_back(self, piece: Piece) -> None:
        """Hand this piece out again, because its searcher was lost."""
        self._waiting.appendleft(piece)

    def done(self, piece: Piece, result: EvaluatedPiece) -> None:
        """Record the result of a piece; the last one ends its evaluation."""
        piece.results[piece.number] = result
        self._done += 1
        if len(piece.results) == self._count:
            in_order = [piece.results[number] for number in range(self._count)]
            self._ended.append(join(piece.weights.version, in_order))
            self.running -= 1
            self._done -= self._count

    def collect(self) -> list[Evaluation]:
        """Return the evaluations that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended


def phase(handles: Sequence[Handle], evaluations: Evaluations, arrived: int, wanted: int) -> str:
    """Return in words what the trainer waits for: groups if any are `wanted`, or evaluations."""
    if all(handle.has("start") for handle in handles):
        return "starting the searchers, which load the model"
    phases = [f"generating {arrived}/{wanted} prompts"] if wanted else []
    phases += [f"evaluating {evaluations.percent()} %"] if evaluations.running else []
    return ", ".join(phases) or "waiting for the searchers"

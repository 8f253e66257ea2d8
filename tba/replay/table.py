"""Tables of the replay buffer: its rows, its prompts, and the orders in which both stand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tba.types import Group, Prompt

EMPTY = -1
"""Stamp of a row or prompt that is not in use."""
FIRST_SIZE = 64


class Line:
    """Numbers in order of arrival, each with the stamp of that arrival.

    An entry counts while its number still has this stamp in the owner's column of stamps. So
    removing a number from all lines means changing its stamp. Outdated entries are swept out
    when their share has grown, hence every operation takes constant time a number, amortized.
    """

    def __init__(self) -> None:
        self._numbers = np.empty(4, np.int32)
        self._stamps = np.empty(4, np.int64)
        self._start = self._end = 0

    @property
    def nbytes(self) -> int:
        return self._numbers.nbytes + self._stamps.nbytes

    def append(self, numbers: np.ndarray, stamps: np.ndarray, current: np.ndarray) -> None:
        """Add numbers at the end. `current` is the owner's column of stamps."""
        if self._end + len(numbers) > len(self._numbers):
            self._sweep(len(numbers), current)
        end = self._end + len(numbers)
        self._numbers[self._end : end] = numbers
        self._stamps[self._end : end] = stamps
        self._end = end

    def valid(self, count: int, current: np.ndarray) -> np.ndarray:
        """Return the numbers that count, the oldest first; there are `count` of them."""
        if self._end - self._start != count:
            self._sweep(0, current)
        return self._numbers[self._start : self._end]

    def take(self, count: int, current: np.ndarray) -> np.ndarray:
        """Remove the oldest `count` numbers that count, and return them."""
        taken = []
        while count > 0 and self._start < self._end:
            part = slice(self._start, min(self._start + count, self._end))
            numbers = self._numbers[part]
            numbers = numbers[current[numbers] == self._stamps[part]]
            taken.append(numbers)
            count -= len(numbers)
            self._start = part.stop
        return np.concatenate(taken)

    def _sweep(self, room: int, current: np.ndarray) -> None:
        """Drop outdated entries and make room for more."""
        used = slice(self._start, self._end)
        numbers, stamps = self._numbers[used], self._stamps[used]
        keep = current[numbers] == stamps
        count = int(np.count_nonzero(keep))
        if 2 * (count + room) > len(self._numbers) or 8 * (count + room) < len(self._numbers):
            size = max(4, (count + room) * 3 // 2)
            self._numbers = np.empty(size, np.int32)
            self._stamps = np.empty(size, np.int64)
        self._numbers[:count] = numbers[keep]
        self._stamps[:count] = stamps[keep]
        self._start, self._end = 0, count


@dataclass
class Rows:
    """One row for each distinct response in the buffer; the tokens lie in segments."""

    prompt: np.ndarray
    segment: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    version: np.ndarray
    arrived: np.ndarray
    count: np.ndarray
    arrived_count: np.ndarray
    reward: np.ndarray
    stamp: np.ndarray
    """Number of the arrival, ascending; EMPTY for a free row."""
    finished: np.ndarray
    valued: np.ndarray
    """True if there are value estimates."""

    @classmethod
    def empty(cls, size: int = FIRST_SIZE) -> Rows:
        """Return a table of `size` free rows."""
        columns: dict[str, np.ndarray] = {n: np.zeros(size, kind) for n, kind in KINDS.items()}
        columns["stamp"][:] = EMPTY
        columns["segment"][:] = EMPTY
        return cls(**columns)

    def __len__(self) -> int:
        return len(self.stamp)

    def columns(self) -> dict[str, np.ndarray]:
        """Return each column by its name."""
        return {name: getattr(self, name) for name in KINDS}

    def grow(self, size: int) -> None:
        """Make the table `size` rows long; new rows are free."""
        more = Rows.empty(size - len(self)).columns()
        for name, column in self.columns().items():
            setattr(self, name, np.concatenate([column, more[name]]))


KINDS = {
    "prompt": np.int32,
    "segment": np.int32,
    "offset": np.int32,
    "length": np.int32,
    "version": np.int32,
    "arrived": np.int32,
    "count": np.int32,
    "arrived_count": np.int32,
    "reward": np.float64,
    "stamp": np.int64,
    "finished": np.bool_,
    "valued": np.bool_,
}
"""Kind of number in each column of `Rows`."""


class FreeNumbers:
    """Numbers of a table's rows that are not in use."""

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers = numbers[::-1].astype(np.int32)
        self._count = len(numbers)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._numbers.nbytes

    def take(self, count: int) -> np.ndarray:
        """Return `count` free numbers, which are then in use."""
        taken = self._numbers[self._count - count : self._count][::-1].copy()
        self._count -= count
        return taken

    def put(self, numbers: np.ndarray) -> None:
        """Make these numbers free."""
        end = self._count + len(numbers)
        if end > len(self._numbers):
            more = np.empty(max(end, len(self._numbers) * 3 // 2), np.int32)
            more[: self._count] = self._numbers[: self._count]
            self._numbers = more
        self._numbers[self._count : end] = numbers
        self._count = end


class Prompts:
    """The prompts that have rows in the buffer, by number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.prompts: list[Prompt | None] = []
        self.tokens: list[np.ndarray] = []
        self.lines: list[Line] = []
        self.held = np.zeros(0, np.int64)
        """Rows of each prompt."""
        self.latest = np.zeros(0, np.int32)
        """Step of the latest arrival."""
        self.stamp = np.zeros(0, np.int64)
        """Stamp of the newest row; EMPTY for a free number."""
        self.reference: list[int] = []
        """Version of the reference that the rows' reference log-probs belong to."""
        self._free: list[int] = []
        self._order = Line()

    def __len__(self) -> int:
        return len(self.numbers)

    def number(self, group: Group) -> int:
        """Return the number of the group's prompt, which gets one if it has none."""
        number = self.numbers.get(group.prompt.id)
        if number is None:
            number = self._new()
            self.numbers[group.prompt.id] = number
            self.prompts[number] = group.prompt
            self.tokens[number] = np.array(group.prompt_tokens, np.int32)
            self.reference[number] = group.reference
        return number

    def by_arrival(self) -> np.ndarray:
        """Return the prompts' numbers by latest arrival, the stalest first."""
        return self._order.valid(len(self), self.stamp)

    def arrive(self, number: int, now: int, stamp: int) -> None:
        """Move a prompt to the end of the order."""
        self.latest[number] = now
        self.stamp[number] = stamp
        self._order.append(np.array([number]), np.array([stamp]), self.stamp)

    def group(self, number: int) -> Group:
        """Return the prompt as a group without trajectories."""
        prompt = self.prompts[number]
        assert prompt is not None
        return Group(prompt, self.tokens[number], (), self.reference[number])

    def release(self, numbers: np.ndarray) -> None:
        """Free those of the numbers that have no rows left."""
        for number in np.unique(numbers[self.held[numbers] == 0]).tolist():
            prompt = self.prompts[number]
            assert prompt is not None
            del self.numbers[prompt.id]
            self.prompts[number] = None
            self.stamp[number] = EMPTY
            self.lines[number] = Line()
            self._free.append(number)

    def _new(self) -> int:
        if self._free:
            return self._free.pop()
        number = len(self.prompts)
        if number == len(self.held):
            more = max(FIRST_SIZE, number // 2)
            self.held = np.concatenate([self.held, np.zeros(more, np.int64)])
            self.latest = np.concatenate([self.latest, np.zeros(more, np.int32)])
            self.stamp = np.concatenate([self.stamp, np.full(more, EMPTY, np.int64)])
        self.prompts.append(None)
        self.tokens.append(np.zeros(0, np.int32))
        self.reference.append(0)
        self.lines.append(Line())
        return number

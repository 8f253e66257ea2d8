"""Storage of distinct trajectories in columns, without a policy on what to keep."""

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import DTypeLike

from tba.replay.files import State
from tba.replay.segments import OPTIONAL, Segment, Segments
from tba.replay.table import EMPTY, Line, Table
from tba.types import Group, Trajectory

SHOWN = ("prompt", "reward", "version", "arrived", "count", "arrived_count", "length")
"""Columns that strategies see."""
SAVED = (*SHOWN, "segment", "offset", "finished", "valued", "masked")
KEY = np.dtype("V12")
ROW: dict[str, DTypeLike] = dict.fromkeys((*SHOWN, "segment", "offset"), np.int32)
ROW |= {"reward": np.float64, **dict.fromkeys(("finished", "valued", "masked"), bool)}
ROW |= {"key": KEY, "stamp": np.int64}
"""Columns of the distinct responses; see `segments.OPTIONAL` for `valued` and `masked`."""
PROMPT = {"latest": np.int32, "held": np.int32, "stamp": np.int64}
"""Columns of the prompts: the step of the latest arrival, and how many responses there are."""


class Store:
    """Distinct trajectories by row, the prompts they belong to, and the order of arrival."""

    def __init__(self) -> None:
        self.rows = Table(ROW)
        self.prompts = Table(PROMPT)
        self.segments = Segments(self.rows)
        self._order = Line(self.rows)
        self._prompt_order = Line(self.prompts)
        self.heads: dict[int, Group] = {}  # the prompts, as groups without trajectories
        self.earlier: dict[int, array[int]] = {}
        """By row: step and samples, in turn, of the arrivals of its response before the latest."""
        self._lines: dict[int, Line] = {}  # the rows of their responses
        self._numbers: dict[str, int] = {}
        self._index: dict[bytes, int] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._index)

    def prompts_by_arrival(self) -> np.ndarray:
        """Return the prompts' numbers by latest arrival, oldest first."""
        return self._prompt_order.rows(len(self.heads))

    def rows_of(self, prompt: int) -> np.ndarray:
        """Return the rows of a prompt, the oldest arrival first."""
        return self._lines[prompt].rows(self.prompts["held"].item(prompt))

    def evict(self, count: int, prompt: int | None = None) -> int:
        """Remove the oldest rows, of a prompt or of all; return how many these are."""
        line = self._order if prompt is None else self._lines[prompt]
        return self.remove(line.take(count))

    def number(self, group: Group) -> int:
        """Return the number of the group's prompt, which gets one if it has none.

        RuntimeError if it has other tokens than before: its responses would not belong together.
        """
        number = self._numbers.get(group.prompt.id)
        if number is None:
            number = self.prompts.take(1).item()
            self.prompts["stamp"][number] = self._arrivals
            tokens = np.array(group.prompt_tokens, np.int32)
            self.heads[number] = replace(group, prompt_tokens=tokens, trajectories=())
            self._lines[number] = Line(self.rows)
            self._numbers[group.prompt.id] = number
        elif not np.array_equal(self.heads[number].prompt_tokens, group.prompt_tokens):
            raise RuntimeError(
                f"prompt {group.prompt.id!r} has other tokens than in the replay buffer; with"
                " task.environment, its tools must stay as they are, and `reset` must return the"
                " same text for the same row"
            )
        return number

    def find(self, keys: Iterable[bytes]) -> np.ndarray:
        return np.array([self._index.get(key, EMPTY) for key in keys], np.int32)

    def arrived_since(self, rows: np.ndarray, since: int) -> np.ndarray:
        """Return the samples that were each row's response and arrived at this step or later."""
        samples = np.where(self.rows["arrived"][rows] >= since, self.rows["arrived_count"][rows], 0)
        for place, row in enumerate(rows.tolist()):
            if row in self.earlier:
                steps, counts = np.array(self.earlier[row]).reshape(-1, 2).T
                samples[place] += counts[np.searchsorted(steps, since) :].sum()
        return samples

    def take_arrivals(self, row: int) -> "array[int]":
        """Return all arrivals of a row that is about to be replaced, as in `earlier`."""
        arrivals = self.earlier.pop(row, array("i"))
        arrivals.extend(self.rows[name].item(row) for name in ("arrived", "arrived_count"))
        return arrivals

    def put(self, prompt: int, new: Mapping[bytes, Trajectory], now: int) -> np.ndarray:
        """Write trajectories with new keys to free rows, and return these. Counts are not set."""
        trajectories = list(new.values())
        rows = self.rows.take(len(new))
        table = self.rows
        table["segment"][rows], table["offset"][rows] = self.segments.append(trajectories)
        for name in ("reward", "version", "finished"):
            table[name][rows] = [getattr(t, name) for t in trajectories]
        table["length"][rows] = [len(t.tokens) for t in trajectories]
        for name, (column, _) in OPTIONAL.items():
            table[column][rows] = [getattr(t, name) is not None for t in trajectories]
        table["arrived"][rows] = now
        self._arrive(prompt, rows, list(new))
        return rows

    def remove(self, rows: np.ndarray) -> int:
        """Free rows and return their number; the orders skip them by their stamps."""
        table = self.rows
        for key in table["key"][rows].tolist():
            del self._index[key]
        for row in rows.tolist():
            self.earlier.pop(row, None)
        np.subtract.at(self.prompts["held"], table["prompt"][rows], 1)
        self.segments.forget(rows)
        self.rows.free(rows)
        return len(rows)

    def release_prompts(self) -> None:
        """Free the numbers of prompts that have no rows left."""
        prompts = self.prompts
        empty = np.flatnonzero((prompts["held"] == 0) & (prompts["stamp"] != EMPTY))
        for number in empty.tolist():
            del self._numbers[self.heads.pop(number).prompt.id], self._lines[number]
        self.prompts.free(empty)

    def groups(self, drawn: Sequence[np.ndarray]) -> list[Group]:
        """Return a group for each array of rows; a row that is repeated gives the same object."""
        rows = np.unique(np.concatenate([np.zeros(0, np.int32), *drawn]))
        trajectories = self.segments.trajectories(rows)
        by_row = dict(zip(rows.tolist(), trajectories, strict=True))
        groups = []
        for own in drawn:
            head = self.heads[self.rows["prompt"].item(own[0])]
            some = tuple([by_row[row] for row in own.tolist()])
            groups.append(replace(head, trajectories=some))
        return groups

    def state(self, counts: Mapping[str, int], saves: int) -> State:
        """Return a copy of the content, but for what never changes."""
        self.segments.close()
        numbers = np.array(list(self.segments.by_number), np.int32)
        prompts = self.prompts_by_arrival()
        rows = self._order.rows(len(self))
        columns = {name: self.rows[name][rows] for name in SAVED}
        columns["prompt"] = _positions(prompts, columns["prompt"])
        columns["segment"] = _positions(numbers, columns["segment"])
        heads = [self.heads[prompt] for prompt in prompts.tolist()]
        lists = {row: arrivals.tolist() for row, arrivals in self.earlier.items()}
        earlier = {str(i): lists[row] for i, row in enumerate(rows.tolist()) if row in lists}
        segments: list[Segment | None] = [*self.segments.by_number.values()]
        return State(columns, heads, segments, dict(counts), saves, earlier)

    def restore(self, state: State) -> None:
        """Fill an empty store, without the rows of damaged segments."""
        damaged = np.array([segment is None for segment in state.segments], bool)
        sound = ~damaged[state.columns["segment"]]
        rows = self.rows.take(int(sound.sum()))
        table = self.rows
        for name, column in state.columns.items():
            table[name][rows] = column[sound]
        for place, row in zip(np.flatnonzero(sound).tolist(), rows.tolist(), strict=True):
            if str(place) in state.earlier:
                self.earlier[row] = array("i", state.earlier[str(place)])
        live = np.bincount(table["segment"][rows], table["length"][rows], len(damaged))
        for number, segment in enumerate(state.segments):
            if segment is not None:
                segment.live = int(live[number])
                self.segments.by_number[number] = segment
        prompts = [self.number(head) for head in state.prompts]
        for part in np.split(rows, np.flatnonzero(np.diff(table["prompt"][rows])) + 1):
            if len(part):
                prompt = prompts[table["prompt"].item(part[0])]
                trajectories = self.segments.trajectories(part)
                self._arrive(prompt, part, [key_of(t, prompt) for t in trajectories])
        self.release_prompts()

    def _arrive(self, prompt: int, rows: np.ndarray, keys: Sequence[bytes]) -> None:
        """Make rows, which have been written, the newest ones of a prompt."""
        table, prompts = self.rows, self.prompts
        self._index.update(zip(keys, rows.tolist(), strict=True))
        table["key"][rows] = np.frombuffer(b"".join(keys), KEY)
        table["prompt"][rows] = prompt
        table["stamp"][rows] = np.arange(self._arrivals, self._arrivals + len(rows))
        self._arrivals += len(rows)
        self._order.append(rows)
        self._lines[prompt].append(rows)
        prompts["held"][prompt] += len(rows)
        prompts["latest"][prompt] = table["arrived"][rows[-1]]
        prompts["stamp"][prompt] = self._arrivals
        self._prompt_order.append(np.array([prompt]))


def key_of(response: Trajectory, prompt: int) -> bytes:
    """Return a digest: two of a million responses share these 96 bits with a chance below 1e-16."""
    salt, content = prompt.to_bytes(8, "little"), response.tokens.tobytes()
    if response.sampled is not None:
        content += response.sampled.tobytes()
    return hashlib.blake2b(content, digest_size=KEY.itemsize, salt=salt).digest()


def _positions(numbers: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Return the position in `numbers` of each entry of a column."""
    positions = np.zeros(numbers.max(initial=0) + 1, np.int32)
    positions[numbers] = np.arange(len(numbers))
    return positions[column]

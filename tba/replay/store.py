"""Storage of distinct trajectories in columns, without a policy on what to keep."""

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import DTypeLike

from tba.replay.files import KINDS, PLACE, Segment, State, columns_of, room
from tba.types import Group, Trajectory

EMPTY = -1  # stamp of a row that is not in use
SIZE = 2**18  # tokens in a segment; a longer response gets a segment of its own
SHOWN = ("prompt", "reward", "version", "arrived", "count", "arrived_count", "length")
"""Columns that strategies see."""
SAVED = tuple(dict.fromkeys((*SHOWN, "segment", *PLACE)))
KEY = np.dtype("V12")
ROW: dict[str, DTypeLike] = dict.fromkeys(SAVED, np.int32)
ROW |= dict.fromkeys(("finished", "valued", "masked", "switched"), bool)
ROW |= {"reward": np.float64, "key": KEY, "stamp": np.int64}
"""Columns of the distinct responses; see `files.OPTIONAL` for those that end in -ed."""
PROMPT = {"latest": np.int32, "held": np.int32, "stamp": np.int64}
"""Columns of the prompts: the step of the latest arrival, and how many responses there are."""


class Table:
    """Numbers in named columns, by row; `stamp` is that of the latest arrival, EMPTY if free."""

    def __init__(self, kinds: Mapping[str, DTypeLike]) -> None:
        self.columns = {name: np.zeros(0, kind) for name, kind in kinds.items()}
        self._free: list[int] = []

    def __getitem__(self, column: str) -> np.ndarray:
        return self.columns[column]

    def take(self, count: int) -> np.ndarray:
        """Return so many free rows. They are in use as soon as they have a stamp."""
        size = len(self["stamp"])
        missing = count - len(self._free)
        if missing > 0:
            more = max(missing, size // 4, 64)
            for name, column in self.columns.items():
                self.columns[name] = np.concatenate([column, np.zeros(more, column.dtype)])
            self["stamp"][size:] = EMPTY
            self._free = [*range(size + more - 1, size - 1, -1), *self._free]
        start = len(self._free) - count
        taken = self._free[start:]
        del self._free[start:]
        return np.array(taken[::-1], np.int32)

    def by_stamp(self, among: np.ndarray | bool = True) -> np.ndarray:
        """Return the rows in use, the oldest stamp first; with a mask, the rows among them."""
        stamp = self["stamp"]
        rows = np.flatnonzero((stamp != EMPTY) & among)
        return rows[np.argsort(stamp[rows])].astype(np.int32)

    def free(self, rows: np.ndarray) -> None:
        self["stamp"][rows] = EMPTY
        self._free += rows.tolist()


class Segments:
    """All segments of a buffer, by number. One of them can be open for more trajectories."""

    def __init__(self, table: Table) -> None:
        self.by_number: dict[int, Segment] = {}
        self._table = table
        self._open: int | None = None

    def append(self, trajectories: Sequence[Trajectory]) -> tuple[int, np.ndarray]:
        """Store trajectories in one segment; return its number and the offset of each."""
        lengths = [len(t.tokens) for t in trajectories]
        number = self._with_room(sum(lengths))
        segment = self.by_number[number]
        ends = segment.used + np.cumsum(lengths)
        segment.append(trajectories, int(ends[-1]))
        return number, ends - lengths

    def trajectories(self, rows: np.ndarray) -> Iterator[Trajectory]:
        """Yield the trajectories of these rows of the table."""
        numbers = self._table["segment"][rows].tolist()
        columns = [self._table[name][rows].tolist() for name in PLACE]
        for number, *row in zip(numbers, *columns, strict=True):
            yield self.by_number[number].trajectory(dict(zip(PLACE, row, strict=True)))

    def forget(self, rows: np.ndarray) -> None:
        """Count the tokens of these rows as no longer in use."""
        numbers = self._table["segment"][rows].tolist()
        lengths = self._table["length"][rows].tolist()
        for number, length in zip(numbers, lengths, strict=True):
            self.by_number[number].live -= length
        self._table["segment"][rows] = EMPTY

    def close(self) -> None:
        """Give up the room in the open segment, of which pages never written took no memory."""
        if self._open is not None:
            segment = self.by_number[self._open]
            segment.arrays = {n: array[: segment.used] for n, array in segment.arrays.items()}
            self._open = None

    def compact(self) -> None:
        """Release segments without rows; move rows of others if an eighth of all is not in use."""
        for number in [n for n, s in self.by_number.items() if s.live == 0 and n != self._open]:
            del self.by_number[number]
        waste = {n: s.used - s.live for n, s in self.by_number.items()}
        live = sum(segment.live for segment in self.by_number.values())
        while sum(waste.values()) > live / 8 + SIZE:
            worst = max(waste, key=waste.__getitem__)
            del waste[worst]
            self._move(worst)

    def _move(self, number: int) -> None:
        """Move what is in use in a segment to the open one, and release the segment."""
        if number == self._open:
            self.close()
        table = self._table
        moved = np.flatnonzero(table["segment"] == number)
        for start in range(0, len(moved), 1024):
            part = moved[start : start + 1024]
            place = self.append(list(self.trajectories(part)))
            table["segment"][part], table["offset"][part] = place
        del self.by_number[number]

    def _with_room(self, tokens: int) -> int:
        if self._open is not None:
            segment = self.by_number[self._open]
            if segment.used + tokens <= len(segment.arrays["tokens"]):
                return self._open
            self.close()
        self._open = max(self.by_number, default=-1) + 1
        size = max(SIZE, tokens)
        self.by_number[self._open] = Segment({n: room(size, kind) for n, kind in KINDS.items()})
        return self._open


class Store:
    """Distinct trajectories by row, the prompts they belong to, and the order of arrival."""

    def __init__(self) -> None:
        self.rows = Table(ROW)
        self.prompts = Table(PROMPT)
        self.segments = Segments(self.rows)
        self.heads: dict[int, Group] = {}  # the prompts, as groups without trajectories
        self.earlier: dict[int, array[int]] = {}
        """By row: step and samples, in turn, of the arrivals of its response before the latest."""
        self._numbers: dict[str, int] = {}
        self._index: dict[bytes, int] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._index)

    def prompts_by_arrival(self) -> np.ndarray:
        """Return the prompts' numbers by latest arrival, oldest first."""
        return self.prompts.by_stamp()

    def rows_of(self, prompt: int) -> np.ndarray:
        """Return the rows of a prompt, the oldest arrival first."""
        return self.rows.by_stamp(self.rows["prompt"] == prompt)

    def rows_by_prompt(self) -> list[np.ndarray]:
        """Return the rows of each prompt, by the prompts' latest arrival."""
        rows = self.rows.by_stamp()
        prompts = self.rows["prompt"][rows]
        order = np.argsort(self.prompts["stamp"][prompts], kind="stable")
        first = np.flatnonzero(np.diff(prompts[order])) + 1
        return [part for part in np.split(rows[order], first) if len(part)]

    def evict(self, count: int, prompt: int | None = None) -> int:
        """Remove the oldest rows, of a prompt or of all; return how many these are."""
        stamp = self.rows["stamp"]
        among = True if prompt is None else self.rows["prompt"] == prompt
        rows = np.flatnonzero((stamp != EMPTY) & among)
        return self.remove(rows[np.argpartition(stamp[rows], count - 1)[:count]])

    def number(self, group: Group) -> int:
        """Return the number of the group's prompt, which gets one if it has none."""
        number = self._numbers.get(group.prompt.id)
        if number is None:
            number = self.prompts.take(1).item()
            self.prompts["stamp"][number] = self._arrivals
            tokens = np.array(group.prompt_tokens, np.int32)
            self.heads[number] = replace(group, prompt_tokens=tokens, trajectories=())
            self._numbers[group.prompt.id] = number
        return number

    def arrived_since(self, rows: np.ndarray, since: int) -> np.ndarray:
        """Return the samples that were each row's response and arrived at this step or later."""
        samples = np.where(self.rows["arrived"][rows] >= since, self.rows["arrived_count"][rows], 0)
        for place, row in enumerate(rows.tolist()):
            if row in self.earlier:
                steps, counts = np.array(self.earlier[row]).reshape(-1, 2).T
                samples[place] += counts[np.searchsorted(steps, since) :].sum()
        return samples

    def put(
        self, prompt: int, new: Mapping[bytes, Trajectory], samples: np.ndarray, now: int
    ) -> int:
        """Write trajectories, each with its samples, over earlier copies or to free rows.

        Return the number of earlier copies, whose arrivals are kept.
        """
        table = self.rows
        rows = np.array([self._index.get(key, EMPTY) for key in new], np.int32)
        is_known = rows != EMPTY
        known = rows[is_known]
        added = table.take(len(new) - len(known))
        rows[~is_known] = added
        table["count"][added] = 0
        table["arrived_count"][added] = 0
        self.segments.forget(known)
        for row in known[table["arrived"][known] < now].tolist():
            latest = (table[name].item(row) for name in ("arrived", "arrived_count"))
            self.earlier.setdefault(row, array("i")).extend(latest)
            table["arrived_count"][row] = 0
        table["arrived_count"][rows] += samples
        table["count"][rows] += samples
        table["arrived"][rows] = now
        trajectories = list(new.values())
        table["segment"][rows], table["offset"][rows] = self.segments.append(trajectories)
        for name, values in columns_of(trajectories).items():
            table[name][rows] = values
        self.prompts["held"][prompt] -= len(known)
        self._arrive(prompt, rows, list(new))
        return len(known)

    def remove(self, rows: np.ndarray) -> int:
        """Free rows and return their number."""
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
            del self._numbers[self.heads.pop(number).prompt.id]
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

    def state(self, counts: Mapping[str, int]) -> State:
        """Return a copy of the content, but for what never changes."""
        self.segments.close()
        numbers = np.array(list(self.segments.by_number), np.int32)
        prompts = self.prompts_by_arrival()
        rows = self.rows.by_stamp()
        columns = {name: self.rows[name][rows] for name in SAVED}
        columns["prompt"] = _positions(prompts, columns["prompt"])
        columns["segment"] = _positions(numbers, columns["segment"])
        heads = [self.heads[prompt] for prompt in prompts.tolist()]
        lists = {row: arrivals.tolist() for row, arrivals in self.earlier.items()}
        earlier = {str(i): lists[row] for i, row in enumerate(rows.tolist()) if row in lists}
        return State(
            columns=columns,
            prompts=heads,
            segments=[*self.segments.by_number.values()],
            counts=dict(counts),
            earlier=earlier,
        )

    def restore(self, state: State) -> None:
        """Fill an empty store."""
        table = self.rows
        rows = table.take(len(state.columns["segment"]))
        for name, column in state.columns.items():
            table[name][rows] = column
        for place, arrivals in state.earlier.items():
            self.earlier[rows.item(int(place))] = array("i", arrivals)
        live = np.bincount(table["segment"][rows], table["length"][rows], len(state.segments))
        for number, segment in enumerate(state.segments):
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
        table = self.rows
        prompts = self.prompts
        self._index.update(zip(keys, rows.tolist(), strict=True))
        table["key"][rows] = np.frombuffer(b"".join(keys), KEY)
        table["prompt"][rows] = prompt
        table["stamp"][rows] = np.arange(self._arrivals, self._arrivals + len(rows))
        self._arrivals += len(rows)
        prompts["held"][prompt] += len(rows)
        prompts["latest"][prompt] = table["arrived"][rows[-1]]
        prompts["stamp"][prompt] = self._arrivals


def key_of(response: Trajectory, prompt: int) -> bytes:
    """Return a digest: two of a million responses share these 96 bits with a chance below 1e-16."""
    content = response.tokens.tobytes()
    if response.marks is not None:
        content += response.marks.tobytes()
    return hashlib.blake2b(
        content, digest_size=KEY.itemsize, salt=prompt.to_bytes(8, "little")
    ).digest()


def _positions(numbers: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Return the position in `numbers` of each entry of a column."""
    positions = np.zeros(numbers.max(initial=0) + 1, np.int32)
    positions[numbers] = np.arange(len(numbers))
    return positions[column]


def behind(trajectory: Trajectory, given: np.ndarray, restart: bool) -> Trajectory:
    """Return a trajectory behind given tokens, which begin a new context if `restart`."""
    if not len(given):
        return trajectory
    own = (
        np.ones(len(trajectory.tokens), bool) if trajectory.sampled is None else trajectory.sampled
    )
    value = trajectory.value
    moved = tuple((place + len(given), version) for place, version in trajectory.switches)
    restarts = tuple(place + len(given) for place in trajectory.restarts)
    zeros = np.zeros(len(given), np.float32)
    return replace(
        trajectory,
        tokens=np.concatenate([given, trajectory.tokens]),
        behavior_logp=np.concatenate([zeros, trajectory.behavior_logp]),
        ref_logp=np.concatenate([zeros, trajectory.ref_logp]),
        value=None if value is None else np.concatenate([zeros, value]),
        sampled=np.concatenate([np.zeros(len(given), bool), own]),
        switches=moved,
        restarts=(0, *restarts) if restart else restarts,
    )

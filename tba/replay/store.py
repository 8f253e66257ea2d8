"""Storage of distinct trajectories in columns, without a policy on what to keep."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from tba.replay.segments import Segment, Segments
from tba.replay.table import EMPTY, FreeNumbers, Line, Prompts, Rows
from tba.strategies import Columns
from tba.types import Group, Trajectory

SHOWN = ("prompt", "reward", "version", "arrived", "count", "arrived_count", "length")
"""Columns that strategies see."""


class Store:
    """Distinct trajectories by row, the prompts they belong to, and the order of arrival."""

    def __init__(self, rows: Rows | None = None) -> None:
        self.rows = Rows.empty() if rows is None else rows
        self.prompts = Prompts()
        self.segments = Segments()
        self.order = Line()
        """All rows in use."""
        self._free = FreeNumbers(np.flatnonzero(self.rows.stamp == EMPTY))
        self._index: dict[bytes, int] = {}
        self._keys: list[bytes] = [b""] * len(self.rows)
        self._arrivals = len(self.rows) - len(self._free)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes in arrays. The index of responses takes about 140 bytes for each on top."""
        lines = [self.order, *self.prompts.lines]
        tables = sum(column.nbytes for column in self.rows.columns().values())
        return self.segments.nbytes + tables + self._free.nbytes + sum(x.nbytes for x in lines)

    def by_arrival(self) -> np.ndarray:
        """Return all rows in use, the oldest arrival first."""
        return self.order.valid(len(self), self.rows.stamp)

    def rows_of(self, prompt: int) -> np.ndarray:
        """Return the rows of a prompt, the oldest arrival first."""
        held = int(self.prompts.held[prompt])
        return self.prompts.lines[prompt].valid(held, self.rows.stamp)

    def oldest(self, count: int, prompt: int | None = None) -> np.ndarray:
        """Take the oldest rows, of a prompt or of all, out of their order; remove them next."""
        line = self.order if prompt is None else self.prompts.lines[prompt]
        return line.take(count, self.rows.stamp)

    def find(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """Return the row of each key that is in use."""
        return {key: self._index[key] for key in keys if key in self._index}

    def put(self, prompt: int, new: Mapping[bytes, Trajectory], now: int) -> np.ndarray:
        """Write trajectories with new keys to free rows, and return these. Counts are not set."""
        trajectories = list(new.values())
        rows = self._take_rows(len(trajectories))
        for row, key in zip(rows.tolist(), new, strict=True):
            self._remember(row, key)
        table = self.rows
        table.segment[rows], table.offset[rows] = self.segments.append(trajectories)
        table.length[rows] = [len(t.tokens) for t in trajectories]
        table.version[rows] = [t.version for t in trajectories]
        table.reward[rows] = [t.reward for t in trajectories]
        table.finished[rows] = [t.finished for t in trajectories]
        table.valued[rows] = [t.value is not None for t in trajectories]
        table.arrived[rows] = now
        stamps = np.arange(self._arrivals, self._arrivals + len(rows))
        self._arrivals += len(rows)
        table.stamp[rows] = stamps
        self.order.append(rows, stamps, table.stamp)
        self._link(prompt, rows, stamps)
        return rows

    def remove(self, rows: np.ndarray) -> int:
        """Free rows and return how many; the orders find out by the stamps."""
        table = self.rows
        for row in rows.tolist():
            del self._index[self._keys[row]]
            self._keys[row] = b""
        np.subtract.at(self.prompts.held, table.prompt[rows], 1)
        self.segments.forget(table.segment[rows], table.length[rows])
        table.stamp[rows] = EMPTY
        table.segment[rows] = EMPTY
        self._free.put(rows)
        return len(rows)

    def groups(self, drawn: Sequence[np.ndarray]) -> list[Group]:
        """Return a group for each array of rows of one prompt.

        A row that is repeated gives the same object.
        """
        rows = np.unique(np.concatenate([np.zeros(0, np.int32), *drawn]))
        by_row = dict(zip(rows.tolist(), self._trajectories(rows), strict=True))
        groups = []
        for own in drawn:
            head = self.prompts.group(self.rows.prompt.item(own[0]))
            trajectories = tuple([by_row[row] for row in own.tolist()])
            groups.append(Group(head.prompt, head.prompt_tokens, trajectories, head.reference))
        return groups

    def columns(self) -> Columns:
        """Return the view for strategies; the next change of the store invalidates it."""
        columns = self.rows.columns()
        shown = {name: _read_only(columns[name]) for name in SHOWN}
        prompts, latest = self.prompts.by_arrival(), self.prompts.latest
        return Columns(
            prompts=_read_only(prompts),
            rows=lambda prompt: _read_only(self.rows_of(int(prompt))),
            latest=_read_only(latest),
            **shown,
        )

    def restore(self, prompts: Sequence[Group], segments: Sequence[Segment | None]) -> None:
        """Take over prompts and segments of a store that consists of a table alone.

        The table's rows are in order of arrival, and its columns `prompt` and `segment` hold
        positions in these lists. A damaged segment, None, has no rows.
        """
        self._restore_segments(segments)
        rows = self.rows
        order = np.argsort(rows.prompt, kind="stable")
        ends = np.cumsum(np.bincount(rows.prompt, minlength=len(prompts)))
        parts = np.split(order, ends[:-1]) if prompts else []
        by_arrival = sorted((part[-1], i) for i, part in enumerate(parts) if len(part))
        for _, i in by_arrival:
            prompt = self.prompts.number(prompts[i])
            self._link(prompt, parts[i], rows.stamp[parts[i]])
        self.order.append(np.arange(len(rows)), rows.stamp, rows.stamp)
        places = zip(
            rows.prompt.tolist(),
            rows.segment.tolist(),
            rows.offset.tolist(),
            rows.length.tolist(),
            strict=True,
        )
        for row, (prompt, segment, start, length) in enumerate(places):
            tokens = self.segments[segment].tokens[start : start + length]
            self._remember(row, key_of(tokens, salt_of(prompt)))

    def _restore_segments(self, segments: Sequence[Segment | None]) -> None:
        rows = self.rows
        live = np.bincount(rows.segment, rows.length, len(segments)).astype(np.int64)
        numbers = np.full(len(segments), EMPTY, np.int32)
        for i, segment in enumerate(segments):
            if segment is not None:
                numbers[i] = self.segments.insert(segment)
                self.segments.forget(numbers[[i]], segment.used - live[[i]])
        rows.segment = numbers[rows.segment]

    def _link(self, prompt: int, rows: np.ndarray, stamps: np.ndarray) -> None:
        """Make rows, which are in use, the newest ones of a prompt."""
        table, prompts = self.rows, self.prompts
        table.prompt[rows] = prompt
        prompts.lines[prompt].append(rows, stamps, table.stamp)
        prompts.held[prompt] += len(rows)
        prompts.arrive(prompt, table.arrived.item(rows[-1]), stamps.item(-1))

    def _remember(self, row: int, key: bytes) -> None:
        self._index[key] = row
        self._keys[row] = key

    def _take_rows(self, count: int) -> np.ndarray:
        if len(self._free) < count:
            size = max(len(self.rows) * 5 // 4, len(self.rows) + count)
            self._free.put(np.arange(len(self.rows), size)[::-1])
            self._keys += [b""] * (size - len(self.rows))
            self.rows.grow(size)
        return self._free.take(count)

    def _trajectories(self, rows: np.ndarray) -> list[Trajectory]:
        table = self.rows
        segments, starts = table.segment[rows].tolist(), table.offset[rows].tolist()
        lengths, valued = table.length[rows].tolist(), table.valued[rows].tolist()
        rewards, versions = table.reward[rows].tolist(), table.version[rows].tolist()
        finished = table.finished[rows].tolist()
        trajectories = []
        for i, number in enumerate(segments):
            segment = self.segments[number]
            part = slice(starts[i], starts[i] + lengths[i])
            value = segment.value[part] if segment.value is not None and valued[i] else None
            tokens = segment.tokens[part]
            logps = segment.behavior_logp[part], segment.ref_logp[part]
            one = Trajectory(tokens, *logps, rewards[i], versions[i], finished[i], value)
            trajectories.append(one)
        return trajectories


def salt_of(prompt: int) -> bytes:
    """Return what distinguishes the keys of one prompt's responses from those of another's."""
    return prompt.to_bytes(8, "little")


def key_of(tokens: np.ndarray, salt: bytes) -> bytes:
    """Return a digest of a response.

    At 96 bits, two of a million responses share one with a chance below 1e-16.
    """
    return hashlib.blake2b(tokens.tobytes(), digest_size=12, salt=salt).digest()


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view

"""Segments: flat arrays with the tokens of many trajectories, in memory and as files."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy
from numpy.typing import DTypeLike

from tba.replay.table import Rows
from tba.types import Trajectory

SIZE = 2**18
"""Tokens in a segment; a longer response gets a segment of its own."""
SUFFIX = ".safetensors"


@dataclass(frozen=True)
class SegmentFile:
    """Name of a segment's file and the sha256 of its content. The name follows from the content."""

    name: str
    sha256: str


@dataclass
class Segment:
    """Tokens of many trajectories, end to end. What has been written to it never changes."""

    tokens: np.ndarray
    behavior_logp: np.ndarray
    ref_logp: np.ndarray
    value: np.ndarray | None = None
    """Only if a trajectory has value estimates."""
    used: int = 0
    file: SegmentFile | None = None
    """The file that this segment was last written to or read from."""

    @classmethod
    def empty(cls, size: int) -> Segment:
        """Return a segment with room for `size` tokens."""
        return cls(_room(size, np.int32), _room(size, np.float32), _room(size, np.float32))

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Segment:
        """Return a complete segment of arrays by name."""
        tokens, value = arrays["tokens"], arrays.get("value")
        return cls(tokens, arrays["behavior_logp"], arrays["ref_logp"], value, len(tokens))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays().values())

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by name."""
        arrays = {
            "tokens": self.tokens,
            "behavior_logp": self.behavior_logp,
            "ref_logp": self.ref_logp,
        }
        if self.value is not None:
            arrays["value"] = self.value
        return arrays

    def trimmed(self) -> Segment:
        """Return the segment without room for more."""
        if self.used == len(self.tokens):
            return self
        arrays = {}
        for name, array in self.arrays().items():
            arrays[name] = _room(self.used, array.dtype)
            arrays[name][:] = array[: self.used]
        return Segment.of(arrays)

    def append(self, trajectories: Sequence[Trajectory]) -> None:
        """Add trajectories, for which there must be room."""
        lengths = [len(t.tokens) for t in trajectories]
        end = self.used + sum(lengths)
        part = slice(self.used, end)
        np.concatenate([t.tokens for t in trajectories], out=self.tokens[part])
        np.concatenate([t.behavior_logp for t in trajectories], out=self.behavior_logp[part])
        np.concatenate([t.ref_logp for t in trajectories], out=self.ref_logp[part])
        if any(t.value is not None for t in trajectories):
            if self.value is None:
                self.value = _room(len(self.tokens), np.float32)
            values = [np.zeros(len(t.tokens)) if t.value is None else t.value for t in trajectories]
            np.concatenate(values, out=self.value[part], casting="same_kind")
        self.used = end

    def write(self, folder: Path, older: Path | None) -> SegmentFile:
        """Link this segment's file from the folder `older`, or write it anew if that fails."""
        if self.file is not None and older is not None:
            try:
                os.link(older / self.file.name, folder / self.file.name)
            except OSError:
                pass  # not there, or on a file system without hard links: the content is here
            else:
                return self.file
        content = safetensors.numpy.save(self.arrays())
        digest = hashlib.sha256(content).hexdigest()
        self.file = SegmentFile(f"{digest[:20]}{SUFFIX}", digest)
        path = folder / self.file.name
        path.unlink(missing_ok=True)  # never write into a file that is linked elsewhere
        path.write_bytes(content)
        return self.file

    @classmethod
    def read(cls, folder: Path, file: SegmentFile) -> Segment | None:
        """Return the segment of a file; None if it is missing or not as it was written."""
        try:
            content = (folder / file.name).read_bytes()
        except OSError:
            return None
        if hashlib.sha256(content).hexdigest() != file.sha256:
            return None
        segment = cls.of(safetensors.numpy.load(content))
        segment.file = file
        return segment


class Segments:
    """All segments of a buffer, by number. The last one is open for more trajectories."""

    def __init__(self) -> None:
        self._segments: list[Segment | None] = []
        self._live = np.zeros(0, np.int64)
        self._used = np.zeros(0, np.int64)
        self._open: int | None = None

    def __getitem__(self, number: int) -> Segment:
        segment = self._segments[number]
        assert segment is not None
        return segment

    def __iter__(self) -> Iterator[int]:
        """Iterate over the numbers of the segments in use."""
        return (i for i, segment in enumerate(self._segments) if segment is not None)

    @property
    def nbytes(self) -> int:
        return sum(self[number].nbytes for number in self)

    def append(self, trajectories: Sequence[Trajectory]) -> tuple[int, np.ndarray]:
        """Store trajectories in one segment; return its number and the offset of each."""
        ends = np.cumsum([len(t.tokens) for t in trajectories])
        total = int(ends[-1])
        number = self._with_room(total)
        segment = self[number]
        offsets = segment.used + np.concatenate([[0], ends[:-1]])
        segment.append(trajectories)
        self._live[number] += total
        self._used[number] += total
        return number, offsets

    def insert(self, segment: Segment) -> int:
        """Add a complete segment whose tokens are all in use; return its number."""
        number = self._number_for(segment)
        self._live[number] = self._used[number] = segment.used
        return number

    def forget(self, numbers: np.ndarray, lengths: np.ndarray) -> None:
        """Count tokens of these segments as no longer in use."""
        np.subtract.at(self._live, numbers, lengths)

    def close(self) -> None:
        """Trim the open segment; trajectories added later go to a new one."""
        if self._open is not None:
            self._segments[self._open] = self[self._open].trimmed()
            self._open = None

    def compact(self, rows: Rows) -> None:
        """Release segments without rows, and others once an eighth of all memory is not in use.

        The rows of the segments with most waste move to new ones.
        """
        for number in np.flatnonzero((self._live == 0) & (self._used > 0)).tolist():
            if number != self._open:
                self._release(number)
        waste = self._used - self._live
        while waste.sum() > self._live.sum() / 8 + SIZE:
            self._move(int(waste.argmax()), rows)
            waste = self._used - self._live

    def merge(self, rows: Rows) -> None:
        """Move the rows of segments that are mostly empty to common ones."""
        self.close()
        for number in [n for n in self if self._live[n] < SIZE / 2]:
            self._move(number, rows)
        self.close()

    def _move(self, number: int, rows: Rows) -> None:
        """Move what is in use in a segment to the open one, and release the segment."""
        if number == self._open:
            self.close()
        segment = self[number]
        moved = np.flatnonzero(rows.segment == number)
        self._release(number)
        for start in range(0, len(moved), 1024):
            part = moved[start : start + 1024]
            pieces = [self._piece(segment, row, rows) for row in part.tolist()]
            rows.segment[part], rows.offset[part] = self.append(pieces)

    def _release(self, number: int) -> None:
        self._segments[number] = None
        self._live[number] = self._used[number] = 0

    def _piece(self, segment: Segment, row: int, rows: Rows) -> Trajectory:
        part = slice(int(rows.offset[row]), int(rows.offset[row] + rows.length[row]))
        value = segment.value[part] if segment.value is not None and rows.valued[row] else None
        tokens, behavior, ref = (
            array[part] for array in (segment.tokens, segment.behavior_logp, segment.ref_logp)
        )
        return Trajectory(tokens, behavior, ref, 0.0, 0, True, value)

    def _with_room(self, tokens: int) -> int:
        if self._open is not None:
            segment = self[self._open]
            if segment.used + tokens <= len(segment.tokens):
                return self._open
            self.close()
        self._open = self._number_for(Segment.empty(max(SIZE, tokens)))
        return self._open

    def _number_for(self, segment: Segment) -> int:
        for number, other in enumerate(self._segments):
            if other is None:
                self._segments[number] = segment
                return number
        self._segments.append(segment)
        self._live = np.append(self._live, 0)
        self._used = np.append(self._used, 0)
        return len(self._segments) - 1


def _room(size: int, kind: DTypeLike) -> np.ndarray:
    """Return zeros in pages of their own, which go back to the system as soon as they are freed.

    The heap would keep them, because small objects are allocated in between.
    """
    length = max(1, size * np.dtype(kind).itemsize)
    pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, kind, size)

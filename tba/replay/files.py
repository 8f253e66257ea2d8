"""Files of the replay buffer: segments, with the tokens of many trajectories, and its state."""

import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from safetensors.numpy import load_file, save_file

from tba.prompt import Prompt
from tba.types import RESTART, SAMPLED, Group, Trajectory, switches_of

FOLDER = "replay"
SEGMENTS = f"{FOLDER}/segments"
STATE = "state.json"
COLUMNS = "columns.safetensors"
PROMPTS = "prompts.jsonl"

KINDS = {"tokens": np.int32, "behavior_logp": np.float32, "ref_logp": np.float32}
OPTIONAL: dict[str, tuple[str, DTypeLike]] = {
    "value": ("valued", np.float32),
    "marks": ("masked", np.uint8),
    "versions": ("switched", np.int32),
}
"""Arrays that only some trajectories have, with the column of a row that says which do."""
PLACE = ("offset", "length", "reward", "version", "finished", "valued", "masked", "switched")
"""Columns of a row that its trajectory is read with."""


@dataclass
class Segment:
    """Tokens of many trajectories, end to end. What has been written to it never changes."""

    arrays: dict[str, np.ndarray]  # by field of a trajectory; OPTIONAL ones if one has them
    used: int = 0  # tokens written
    live: int = 0  # tokens of rows in use

    def append(self, trajectories: Sequence[Trajectory], end: int) -> None:
        """Add trajectories, which reach up to `end`."""
        for name, (_, kind) in OPTIONAL.items():
            missing = name not in self.arrays
            if missing and any(getattr(t, name) is not None for t in trajectories):
                self.arrays[name] = room(len(self.arrays["tokens"]), kind)
        for name, array in self.arrays.items():
            given = [(t, getattr(t, name)) for t in trajectories]
            # zeros of the least type for a trajectory that lacks this array
            parts = [np.zeros(len(t.tokens), bool) if x is None else x for t, x in given]
            np.concatenate(parts, out=array[self.used : end])
        self.live += end - self.used
        self.used = end

    def trajectory(self, row: Mapping[str, Any]) -> Trajectory:
        """Return the trajectory of a row, given its columns PLACE."""
        place = slice(row["offset"], row["offset"] + row["length"])
        part = {name: array[place] for name, array in self.arrays.items()}
        marks = part["marks"] if row["masked"] else None
        return Trajectory(
            tokens=part["tokens"],
            behavior_logp=part["behavior_logp"],
            ref_logp=part["ref_logp"],
            reward=row["reward"],
            version=row["version"],
            finished=row["finished"],
            value=part["value"] if row["valued"] else None,
            sampled=None if marks is None else marks == SAMPLED,
            switches=switches_of(part["versions"]) if row["switched"] else (),
            restarts=() if marks is None else tuple(np.flatnonzero(marks == RESTART).tolist()),
        )


@dataclass(frozen=True)
class State:
    """Everything that a buffer saves."""

    columns: Mapping[str, np.ndarray]
    """Columns of rows in order of arrival; `prompt` and `segment` are positions in these lists."""
    prompts: Sequence[Group]  # groups without trajectories
    segments: Sequence[Segment]
    counts: Mapping[str, int]
    earlier: Mapping[str, list[int]]  # arrivals before the latest, by position in the columns

    def write(self, folder: Path) -> None:
        """Write the state into a checkpoint's folder."""
        segments = folder / SEGMENTS
        segments.mkdir(parents=True)
        for number, segment in enumerate(self.segments):
            save_file(segment.arrays, segments / f"{number}.safetensors")
        path = folder / FOLDER
        save_file(dict(self.columns), path / COLUMNS)
        save_groups(self.prompts, path / PROMPTS)
        plain = {"counts": self.counts, "earlier": self.earlier}
        (path / STATE).write_text(json.dumps(plain), "utf-8")

    @classmethod
    def read(cls, folder: Path) -> "State":
        """Read what `write` wrote."""
        path = folder / FOLDER
        plain = json.loads((path / STATE).read_text("utf-8"))
        segments = []
        for file in sorted((folder / SEGMENTS).iterdir(), key=lambda file: int(file.stem)):
            arrays = load_file(file)
            segments.append(Segment(arrays, used=len(arrays["tokens"])))
        return cls(
            columns=load_file(path / COLUMNS),
            prompts=load_groups(path / PROMPTS),
            segments=segments,
            counts=plain["counts"],
            earlier=plain["earlier"],
        )


def columns_of(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """Return the columns PLACE of trajectories, except their offsets."""
    columns: dict[str, list[Any]] = {"length": [len(t.tokens) for t in trajectories]}
    for name in ("reward", "version", "finished"):
        columns[name] = [getattr(t, name) for t in trajectories]
    for name, (column, _) in OPTIONAL.items():
        columns[column] = [getattr(t, name) is not None for t in trajectories]
    return columns


def save_groups(groups: Sequence[Group], file: Path) -> None:
    """Write groups as JSON, one a line; every number is read back as it was."""
    with file.open("w", encoding="utf-8") as lines:
        for group in groups:
            lines.write(json.dumps(asdict(group), default=np.ndarray.tolist) + "\n")


def load_groups(file: Path) -> tuple[Group, ...]:
    """Return what `save_groups` wrote."""
    groups = []
    for line in file.read_text("utf-8").splitlines():
        plain = json.loads(line)
        group = Group(
            prompt=Prompt(**plain["prompt"]),
            prompt_tokens=np.array(plain["prompt_tokens"], np.int32),
            trajectories=tuple(map(_trajectory, plain["trajectories"])),
            reference=plain["reference"],
        )
        groups.append(group)
    return tuple(groups)


def _trajectory(plain: dict[str, Any]) -> Trajectory:
    for name, kind in (*KINDS.items(), ("value", np.float32), ("sampled", np.bool_)):
        if plain[name] is not None:
            plain[name] = np.array(plain[name], kind)
    plain["switches"] = tuple(map(tuple, plain["switches"]))
    plain["restarts"] = tuple(plain["restarts"])
    return Trajectory(**plain)


def room(size: int, kind: DTypeLike) -> np.ndarray:
    """Return zeros in pages of their own. Freed ones go back to the system; the heap keeps them."""
    length = max(1, size * np.dtype(kind).itemsize)
    pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, kind, size)

"""Files of the replay buffer: segments, with the tokens of many trajectories, and its state."""

import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tba.prompt import Prompt
from tba.types import Group, Trajectory, switches_of

FOLDER = "replay"
SEGMENTS = f"{FOLDER}/segments"
STATE = "state.json"
COLUMNS = "columns.safetensors"
PROMPTS = "prompts.safetensors"

KINDS = {"tokens": np.int32, "behavior_logp": np.float32, "ref_logp": np.float32}
OPTIONAL: dict[str, tuple[str, DTypeLike]] = {
    "value": ("valued", np.float32),
    "sampled": ("masked", np.bool_),
    "versions": ("switched", np.int32),
}
"""Arrays that only some trajectories have, with the column of a row that says which do."""
PLACE = ("offset", "length", "reward", "version", "finished", "valued", "masked", "switched")
"""Columns of a row that its trajectory is read with, in the order of `Segment.trajectory`."""


@dataclass
class Segment:
    """Tokens of many trajectories, end to end. What has been written to it never changes."""

    arrays: dict[str, np.ndarray]  # by field of a trajectory; OPTIONAL ones if one has them
    used: int = 0  # tokens written
    live: int = 0  # tokens of rows in use

    @classmethod
    def with_room(cls, tokens: int) -> "Segment":
        """Return an empty segment with room for so many tokens."""
        return cls({name: _room(tokens, kind) for name, kind in KINDS.items()})

    def append(self, trajectories: Sequence[Trajectory], end: int) -> None:
        """Add trajectories, which reach up to `end`."""
        for name, (_, kind) in OPTIONAL.items():
            missing = name not in self.arrays
            if missing and any(getattr(t, name) is not None for t in trajectories):
                self.arrays[name] = _room(len(self.arrays["tokens"]), kind)
        for name, array in self.arrays.items():
            given = [(t, getattr(t, name)) for t in trajectories]
            # zeros of the least type for a trajectory that lacks this array
            parts = [np.zeros(len(t.tokens), bool) if x is None else x for t, x in given]
            np.concatenate(parts, out=array[self.used : end])
        self.live += end - self.used
        self.used = end

    def trajectory(
        self,
        offset: int,
        length: int,
        reward: float,
        version: int,
        finished: bool,
        valued: bool,
        masked: bool,
        switched: bool,
    ) -> Trajectory:
        """Return the trajectory of a row, given its columns PLACE."""
        part = {name: array[offset : offset + length] for name, array in self.arrays.items()}
        return Trajectory(
            tokens=part["tokens"],
            behavior_logp=part["behavior_logp"],
            ref_logp=part["ref_logp"],
            reward=reward,
            version=version,
            finished=finished,
            value=part["value"] if valued else None,
            sampled=part["sampled"] if masked else None,
            switches=switches_of(part["versions"]) if switched else (),
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
    trajectories = [t for g in groups for t in g.trajectories]
    columns = columns_of(trajectories)
    tokens = sum(columns["length"])
    segment = Segment.with_room(tokens)
    if trajectories:
        segment.append(trajectories, tokens)
    arrays = {
        "prompt_tokens": np.concatenate(
            [np.zeros(0, np.int32), *(g.prompt_tokens for g in groups)]
        ),
        "prompt_lengths": np.array([len(g.prompt_tokens) for g in groups], np.int64),
        "references": np.array([g.reference for g in groups], np.int64),
        "sizes": np.array([len(g.trajectories) for g in groups], np.int64),
        **segment.arrays,
        **{name: np.array(values) for name, values in columns.items()},
    }
    save_file(arrays, file, {"prompts": json.dumps([asdict(g.prompt) for g in groups])})


def load_groups(file: Path) -> tuple[Group, ...]:
    with safe_open(file, "numpy") as file_of_groups:
        prompts = [Prompt(**p) for p in json.loads(file_of_groups.metadata()["prompts"])]
    arrays = load_file(file)
    arrays["offset"] = np.cumsum(arrays["length"]) - arrays["length"]
    rows = zip(*(arrays[name].tolist() for name in PLACE), strict=True)
    segment = Segment({name: arrays[name] for name in (*KINDS, *OPTIONAL) if name in arrays})
    trajectories = (segment.trajectory(*row) for row in rows)
    ends = np.cumsum(arrays["prompt_lengths"])
    groups = []
    for prompt, tokens, size, reference in zip(
        prompts,
        np.split(arrays["prompt_tokens"], ends)[:-1],
        arrays["sizes"].tolist(),
        arrays["references"].tolist(),
        strict=True,
    ):
        groups.append(Group(prompt, tokens, tuple(islice(trajectories, size)), reference))
    return tuple(groups)


def _room(size: int, kind: DTypeLike) -> np.ndarray:
    """Return zeros in pages of their own. Freed ones go back to the system; the heap keeps them."""
    length = max(1, size * np.dtype(kind).itemsize)
    pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, kind, size)

"""Files of the replay buffer: groups end to end, and the state that goes with the segments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tba.replay.segments import SegmentFile
from tba.replay.store import Store
from tba.types import Group, Prompt, Trajectory

FOLDER = "replay"
SEGMENTS = f"{FOLDER}/segments"
STATE, COLUMNS, PROMPTS = "state.json", "columns.safetensors", "prompts.safetensors"


@dataclass(frozen=True)
class State:
    """Everything that a saved buffer holds beside its segments."""

    columns: Mapping[str, np.ndarray]
    """Columns of the rows in use, in order of arrival; `prompt` and `segment` are positions
    in the lists below."""
    prompts: Sequence[Group]
    """Prompts, as groups without trajectories."""
    segments: Sequence[SegmentFile]
    counts: Mapping[str, int]
    saves: int

    def write(self, folder: Path) -> None:
        """Write the state into a generation's folder."""
        path = folder / FOLDER
        save_file(dict(self.columns), path / COLUMNS)
        save_groups(self.prompts, path / PROMPTS)
        plain = {
            "counts": dict(self.counts),
            "saves": self.saves,
            "segments": [asdict(segment) for segment in self.segments],
        }
        (path / STATE).write_text(json.dumps(plain))

    @classmethod
    def read(cls, folder: Path) -> State:
        """Return what `write` wrote."""
        path = folder / FOLDER
        plain = json.loads((path / STATE).read_text())
        return cls(
            columns=load_file(path / COLUMNS),
            prompts=load_groups(path / PROMPTS),
            segments=[SegmentFile(**segment) for segment in plain["segments"]],
            counts=plain["counts"],
            saves=plain["saves"],
        )


def snapshot(
    store: Store, counts: Mapping[str, int], saves: int, folder: Path, older: Path | None
) -> Callable[[], dict[str, str]]:
    """Return a function that writes the store as it is now; see `ReplayBuffer.save`."""
    store.segments.close()
    numbers = list(store.segments)
    segments = [store.segments[number] for number in numbers]
    rows, prompts = store.by_arrival(), store.prompts.by_arrival()
    columns = {name: column[rows] for name, column in store.rows.columns().items()}
    del columns["stamp"]  # the order says it
    columns["prompt"] = _positions(prompts, columns["prompt"])
    columns["segment"] = _positions(np.array(numbers, np.int32), columns["segment"])
    heads = [store.prompts.group(prompt) for prompt in prompts.tolist()]
    counts = dict(counts)

    def write() -> dict[str, str]:
        (folder / SEGMENTS).mkdir(parents=True, exist_ok=True)
        source = None if older is None else older / SEGMENTS
        files = [segment.write(folder / SEGMENTS, source) for segment in segments]
        State(columns, heads, files, counts, saves).write(folder)
        return {f"{SEGMENTS}/{file.name}": file.sha256 for file in files}

    return write


def is_segment(name: str) -> bool:
    """Return whether a file of a generation, by its relative name, is a segment of its buffer."""
    return name.startswith(f"{SEGMENTS}/")


def save_groups(groups: Sequence[Group], file: Path) -> None:
    """Write groups to a file, in their order."""
    prompts = json.dumps([asdict(g.prompt) for g in groups])
    trajectories = [t for g in groups for t in g.trajectories]
    arrays = _head_arrays(groups) | _trajectory_arrays(trajectories)
    save_file(arrays, file, {"prompts": prompts})


def load_groups(file: Path) -> tuple[Group, ...]:
    """Return the groups that `save_groups` wrote."""
    with safe_open(file, "numpy") as opened:
        prompts = [Prompt(**p) for p in json.loads(opened.metadata()["prompts"])]
    arrays = load_file(file)
    tokens = _parted(arrays["prompt_tokens"], arrays["prompt_lengths"])
    remaining = iter(_trajectories(arrays))
    groups = []
    for i, prompt in enumerate(prompts):
        own = tuple(islice(remaining, int(arrays["sizes"][i])))
        groups.append(Group(prompt, tokens[i], own, int(arrays["references"][i])))
    return tuple(groups)


def _head_arrays(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    lengths = [len(g.prompt_tokens) for g in groups]
    sizes = [len(g.trajectories) for g in groups]
    return {
        "prompt_tokens": _joined([g.prompt_tokens for g in groups], np.int32),
        "prompt_lengths": np.array(lengths, np.int64),
        "references": np.array([g.reference for g in groups], np.int64),
        "sizes": np.array(sizes, np.int64),
    }


def _trajectory_arrays(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    arrays = {}
    for name in ("tokens", "behavior_logp", "ref_logp"):
        kind = np.int32 if name == "tokens" else np.float32
        arrays[name] = _joined([getattr(t, name) for t in trajectories], kind)
    arrays["lengths"] = np.array([len(t.tokens) for t in trajectories], np.int64)
    arrays["value"] = _joined([t.value for t in trajectories if t.value is not None], np.float32)
    arrays["valued"] = np.array([t.value is not None for t in trajectories], np.bool_)
    arrays["reward"] = np.array([t.reward for t in trajectories], np.float64)
    arrays["version"] = np.array([t.version for t in trajectories], np.int64)
    arrays["finished"] = np.array([t.finished for t in trajectories], np.bool_)
    return arrays


def _trajectories(arrays: Mapping[str, np.ndarray]) -> list[Trajectory]:
    lengths, valued = arrays["lengths"], arrays["valued"]
    tokens = _parted(arrays["tokens"], lengths)
    behavior = _parted(arrays["behavior_logp"], lengths)
    ref = _parted(arrays["ref_logp"], lengths)
    values = _parted(arrays["value"], lengths * valued)
    rewards, versions = arrays["reward"].tolist(), arrays["version"].tolist()
    finished = arrays["finished"].tolist()
    trajectories = []
    for i, has_value in enumerate(valued.tolist()):
        value = values[i] if has_value else None
        logps = behavior[i], ref[i]
        one = Trajectory(tokens[i], *logps, rewards[i], versions[i], finished[i], value)
        trajectories.append(one)
    return trajectories


def _positions(numbers: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Return the position in `numbers` of each entry of a column."""
    positions = np.zeros(int(numbers.max(initial=0)) + 1, np.int32)
    positions[numbers] = np.arange(len(numbers))
    return positions[column]


def _joined(rows: Sequence[np.ndarray], kind: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, kind), *(row.astype(kind) for row in rows)])


def _parted(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    ends = np.cumsum(lengths).tolist()
    return [flat[end - n : end] for end, n in zip(ends, lengths.tolist(), strict=True)]

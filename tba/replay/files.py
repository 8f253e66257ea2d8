"""Files of the replay buffer: groups end to end, and the state that goes with the segments."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tba.prompt import Prompt
from tba.replay.segments import Segment, file_name
from tba.types import Group, Trajectory

FOLDER = "replay"
SEGMENTS = f"{FOLDER}/segments"
STATE, COLUMNS, PROMPTS = "state.json", "columns.safetensors", "prompts.safetensors"


@dataclass(frozen=True)
class State:
    """Everything that a buffer saves."""

    columns: Mapping[str, np.ndarray]
    """Columns of rows in order of arrival; `prompt` and `segment` are positions in these lists."""
    prompts: Sequence[Group]  # groups without trajectories
    segments: list[Segment | None]  # None for one whose file is damaged
    counts: Mapping[str, int]
    saves: int
    earlier: Mapping[str, list[int]]  # arrivals before the latest, by position in the columns

    def write(self, folder: Path, older: Path | None) -> dict[str, str]:
        """Write the state into a checkpoint's folder; see `ReplayBuffer.save`."""
        (folder / SEGMENTS).mkdir(parents=True, exist_ok=True)
        source = None if older is None else older / SEGMENTS
        sums = [s.write(folder / SEGMENTS, source) for s in self.segments if s is not None]
        path = folder / FOLDER
        save_file(dict(self.columns), path / COLUMNS)
        save_groups(self.prompts, path / PROMPTS)
        segments = [{"name": file_name(sha256), "sha256": sha256} for sha256 in sums]
        plain = {"counts": self.counts, "saves": self.saves, "segments": segments}
        plain["earlier"] = self.earlier
        (path / STATE).write_text(json.dumps(plain), "utf-8")
        return {f"{SEGMENTS}/{file_name(sha256)}": sha256 for sha256 in sums}

    @classmethod
    def read(cls, folder: Path) -> "State":
        path = folder / FOLDER
        plain = json.loads((path / STATE).read_text("utf-8"))
        sums = [file["sha256"] for file in plain["segments"]]
        return cls(
            columns=load_file(path / COLUMNS),
            prompts=load_groups(path / PROMPTS),
            segments=[Segment.read(folder / SEGMENTS, sha256) for sha256 in sums],
            counts=plain["counts"],
            saves=plain["saves"],
            earlier=plain.get("earlier", {}),
        )


def save_groups(groups: Sequence[Group], file: Path) -> None:
    prompts = json.dumps([asdict(g.prompt) for g in groups])
    trajectories = [t for g in groups for t in g.trajectories]
    valued = [t.value for t in trajectories if t.value is not None]
    masked = [t.sampled for t in trajectories if t.sampled is not None]
    arrays = {
        "prompt_tokens": _joined([g.prompt_tokens for g in groups], np.int32),
        "prompt_lengths": np.array([len(g.prompt_tokens) for g in groups], np.int64),
        "references": np.array([g.reference for g in groups], np.int64),
        "sizes": np.array([len(g.trajectories) for g in groups], np.int64),
        "tokens": _joined([t.tokens for t in trajectories], np.int32),
        "behavior_logp": _joined([t.behavior_logp for t in trajectories]),
        "ref_logp": _joined([t.ref_logp for t in trajectories]),
        "lengths": np.array([len(t.tokens) for t in trajectories], np.int64),
        "value": _joined(valued),
        "valued": np.array([t.value is not None for t in trajectories], np.bool_),
        "sampled": _joined(masked, np.bool_),
        "masked": np.array([t.sampled is not None for t in trajectories], np.bool_),
        "reward": np.array([t.reward for t in trajectories], np.float64),
        "version": np.array([t.version for t in trajectories], np.int64),
        "finished": np.array([t.finished for t in trajectories], np.bool_),
    }
    save_file(arrays, file, {"prompts": prompts})


def load_groups(file: Path) -> tuple[Group, ...]:
    with safe_open(file, "numpy") as opened:
        prompts = [Prompt(**p) for p in json.loads(opened.metadata()["prompts"])]
    arrays = load_file(file)
    lengths = arrays["lengths"]
    flat = [_parted(arrays[name], lengths) for name in ("tokens", "behavior_logp", "ref_logp")]
    plain = [arrays[name].tolist() for name in ("reward", "version", "finished")]
    optional = []
    for name, has in (("value", arrays["valued"]), ("sampled", arrays["masked"])):
        given = iter(_parted(arrays[name], lengths[has]))
        optional.append([next(given) if there else None for there in has.tolist()])
    trajectories = map(Trajectory, *flat, *plain, *optional)
    tokens = _parted(arrays["prompt_tokens"], arrays["prompt_lengths"])
    sizes = arrays["sizes"].tolist()
    owned = [tuple(islice(trajectories, size)) for size in sizes]
    return tuple(map(Group, prompts, tokens, owned, arrays["references"].tolist()))


def _joined(parts: Sequence[np.ndarray], kind: type = np.float32) -> np.ndarray:
    return np.concatenate([np.zeros(0, kind), *(part.astype(kind) for part in parts)])


def _parted(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(flat, np.cumsum(lengths))[:-1]

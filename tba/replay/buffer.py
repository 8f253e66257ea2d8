"""The replay buffer: distinct trajectories of each prompt, newest copy kept, oldest dropped."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tba.strategies import Strategy
from tba.types import Group, Prompt, Shelf, Stored, Trajectory

STATE, ARRAYS = "replay.json", "replay.safetensors"


@dataclass
class ReplayBuffer:
    """At most `per_prompt` distinct responses of each prompt and `capacity` in all. Every sample is accounted for:

    added == len(buffer) + duplicates + evicted_per_prompt + evicted_capacity, and what is not finite never gets in.
    """

    per_prompt: int = 100
    capacity: int = 100_000
    counts: Counter[str] = field(default_factory=Counter)
    _shelves: dict[str, Shelf] = field(default_factory=dict)  # by latest arrival, the stalest first
    _order: dict[tuple[str, bytes], None] = field(
        default_factory=dict
    )  # every response by arrival, oldest first

    def __len__(self) -> int:
        return len(self._order)

    @property
    def prompts(self) -> int:
        return len(self._shelves)

    @property
    def shelves(self) -> list[Shelf]:
        return list(self._shelves.values())

    def add(self, groups: Iterable[Group], now: int) -> None:
        """Stores what arrived at step `now`; a response already held is replaced by its newest copy."""
        for group in groups:
            for response in _distinct(group.trajectories):
                if (
                    not math.isfinite(response.trajectory.reward)
                    or not np.isfinite(response.trajectory.ref_logp).all()
                ):
                    self.counts["not_finite"] += response.count
                    continue
                self.counts["added"] += response.count
                self.counts["duplicates"] += response.count - 1
                self._store(group, Stored(response.trajectory, response.count, now))
        while len(self) > self.capacity:
            self._drop(*next(iter(self._order)), "evicted_capacity")

    def sample(
        self, groups: int, size: int, strategy: Strategy, now: int, rng: np.random.Generator
    ) -> list[Group]:
        """`groups` groups of `size` trajectories each. A prompt with fewer samples repeats some, and is counted in `short_groups`."""
        if not self._shelves:
            raise ValueError("the replay buffer is empty: nothing has been found yet")
        drawn = strategy.draw(self.shelves, groups, size, now, rng)
        sizes = [len(g.trajectories) for g in drawn]
        if sizes != [size] * groups:
            raise ValueError(
                f"strategy {type(strategy).__name__} drew groups of {sizes} trajectories; it must draw {groups} groups of {size}"
            )
        held = (sum(s.count for s in self._shelves[g.prompt.id].stored.values()) for g in drawn)
        self.counts["short_groups"] += sum(samples < size for samples in held)
        return drawn

    def save(self, folder: Path) -> None:
        """Writes `replay.json` and `replay.safetensors` (arrays of all responses end to end)."""
        held = [(p, self._shelves[p].stored[key]) for p, key in self._order]
        number = {p: i for i, p in enumerate(self._shelves)}
        own = {
            "prompt_tokens": _joined([s.prompt_tokens for s in self.shelves], np.int32),
            "prompt_lengths": np.array([len(s.prompt_tokens) for s in self.shelves], np.int64),
            "prompt": np.array([number[p] for p, _ in held], np.int64),
            "count": np.array([s.count for _, s in held], np.int64),
            "arrived": np.array([s.arrived for _, s in held], np.int64),
        }
        save_file(own | _arrays([s.trajectory for _, s in held]), folder / ARRAYS)
        state = {"counts": dict(self.counts), "prompts": [asdict(s.prompt) for s in self.shelves]}
        (folder / STATE).write_text(json.dumps(state))

    def load(self, folder: Path) -> None:
        """Replaces the content by what `save` wrote; the order of arrival is the same."""
        state, a = json.loads((folder / STATE).read_text()), load_file(folder / ARRAYS)
        prompt_tokens = _parted(a["prompt_tokens"], a["prompt_lengths"])
        prompts = [Prompt(**p) for p in state["prompts"]]
        self.counts = Counter(state["counts"])
        self._order = {}
        self._shelves = {p.id: Shelf(p, t, {}) for p, t in zip(prompts, prompt_tokens, strict=True)}
        for i, (prompt, trajectory) in enumerate(zip(a["prompt"], _trajectories(a), strict=True)):
            key = trajectory.tokens.tobytes()
            self._shelves[prompts[prompt].id].stored[key] = Stored(
                trajectory, int(a["count"][i]), int(a["arrived"][i])
            )
            self._order[prompts[prompt].id, key] = None

    def _store(self, group: Group, new: Stored) -> None:
        shelf = self._shelves.pop(group.prompt.id, None) or Shelf(
            group.prompt, group.prompt_tokens, {}
        )
        self._shelves[group.prompt.id] = shelf  # to the end: the newest arrival
        key = new.trajectory.tokens.tobytes()
        if shelf.stored.pop(key, None):
            self.counts["duplicates"] += 1
            del self._order[group.prompt.id, key]
        shelf.stored[key] = new
        self._order[group.prompt.id, key] = None
        while (
            len(shelf.stored) > self.per_prompt
        ):  # by more than one if a resumed run is to keep fewer
            self._drop(group.prompt.id, next(iter(shelf.stored)), "evicted_per_prompt")

    def _drop(self, prompt: str, key: bytes, reason: str) -> None:
        del self._order[prompt, key]
        del self._shelves[prompt].stored[key]
        if not self._shelves[prompt].stored:
            del self._shelves[prompt]
        self.counts[reason] += 1


def _distinct(trajectories: Iterable[Trajectory]) -> list[Stored]:
    """Equal responses of one arrival as one, with their count; `arrived` is not known yet."""
    found: dict[bytes, list[Trajectory]] = {}
    for t in trajectories:
        found.setdefault(t.tokens.tobytes(), []).append(t)
    return [Stored(same[-1], len(same), -1) for same in found.values()]


def save_groups(groups: Sequence[Group], file: Path) -> None:
    """Groups that are on their way, in their order."""
    own = {
        "prompt_tokens": _joined([g.prompt_tokens for g in groups], np.int32),
        "prompt_lengths": np.array([len(g.prompt_tokens) for g in groups], np.int64),
        "sizes": np.array([len(g.trajectories) for g in groups], np.int64),
    }
    save_file(
        own | _arrays([t for g in groups for t in g.trajectories]),
        file,
        {"prompts": json.dumps([asdict(g.prompt) for g in groups])},
    )


def load_groups(file: Path) -> tuple[Group, ...]:
    with safe_open(file, "numpy") as opened:
        prompts = [Prompt(**p) for p in json.loads(opened.metadata()["prompts"])]
    a = load_file(file)
    remaining = iter(_trajectories(a))
    parts = zip(prompts, _parted(a["prompt_tokens"], a["prompt_lengths"]), a["sizes"], strict=True)
    return tuple(
        Group(prompt, tokens, tuple(islice(remaining, int(size)))) for prompt, tokens, size in parts
    )


def _arrays(ts: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """Trajectories end to end."""
    return {
        "lengths": np.array([len(t.tokens) for t in ts], np.int64),
        "tokens": _joined([t.tokens for t in ts], np.int32),
        "behavior_logp": _joined([t.behavior_logp for t in ts], np.float32),
        "ref_logp": _joined([t.ref_logp for t in ts], np.float32),
        "value": _joined(
            [np.zeros(0, np.float32) if t.value is None else t.value for t in ts], np.float32
        ),
        "valued": np.array([t.value is not None for t in ts], np.bool_),
        "reward": np.array([t.reward for t in ts], np.float64),
        "version": np.array([t.version for t in ts], np.int64),
        "finished": np.array([t.finished for t in ts], np.bool_),
    }


def _trajectories(a: Mapping[str, np.ndarray]) -> list[Trajectory]:
    tokens, behavior, ref = (
        _parted(a[n], a["lengths"]) for n in ("tokens", "behavior_logp", "ref_logp")
    )
    values = _parted(a["value"], a["lengths"] * a["valued"])
    return [
        Trajectory(
            tokens[i],
            behavior[i],
            ref[i],
            float(a["reward"][i]),
            int(a["version"][i]),
            bool(a["finished"][i]),
            values[i] if a["valued"][i] else None,
        )
        for i in range(len(tokens))
    ]


def _joined(rows: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(r.astype(dtype) for r in rows)])


def _parted(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []

"""The replay buffer: distinct trajectories of each prompt, newest copy kept, oldest dropped."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tba.replay.files import SEGMENTS, State, snapshot
from tba.replay.segments import Segment
from tba.replay.store import Store, key_of, salt_of
from tba.replay.table import EMPTY, Rows
from tba.strategies import Columns, Strategy
from tba.types import Group, Trajectory

REWRITE_EVERY = 10
"""Saves from one that rewrites all segments to the next. Others link the segments they can."""

log = logging.getLogger(__name__)


@dataclass
class ReplayBuffer:
    """At most `per_prompt` distinct responses of each prompt, and `capacity` in all.

    A response that arrives again replaces its earlier copy, and their samples add up. All of a
    prompt's reference log-probs are of one reference, the newest. Every sample is accounted for:
    added == len(buffer) + duplicates + evicted_per_prompt + evicted_capacity + evicted_reference
    + dropped_damaged. A trajectory with a number that is not finite is not added, and counted in
    not_finite.
    """

    per_prompt: int = 100
    capacity: int = 100_000
    counts: Counter[str] = field(default_factory=Counter)
    _store: Store = field(default_factory=Store, init=False, repr=False)
    _saves: int = field(default=0, init=False, repr=False)

    def __len__(self) -> int:
        return len(self._store)

    @property
    def prompts(self) -> int:
        return len(self._store.prompts)

    @property
    def nbytes(self) -> int:
        """Bytes in arrays. The index of responses takes about 140 bytes for each on top."""
        return self._store.nbytes

    def add(self, groups: Iterable[Group], now: int) -> None:
        """Store what arrived at step `now`, and drop the oldest responses beyond the limits."""
        for group in groups:
            self._add(group, now)
        excess = len(self) - self.capacity
        if excess > 0:
            self._drop(self._store.oldest(excess), "evicted_capacity")
        self._store.segments.compact(self._store.rows)

    def sample(
        self, groups: int, size: int, strategy: Strategy, now: int, rng: np.random.Generator
    ) -> list[Group]:
        """Return `groups` groups of `size` trajectories each.

        If the set that a strategy draws a group from has fewer than `size` samples, some are
        repeated and the group is counted in `short_groups`.
        """
        if not len(self):
            raise ValueError(
                "the replay buffer is empty: wait for the first groups before drawing from it"
            )
        drawn = strategy.draw(self.columns(), groups, size, now, rng)
        _check(drawn, (groups, size), self._store.rows, type(strategy).__name__)
        self.counts["short_groups"] += int((drawn < 0).any(axis=1).sum())
        filled = []
        for rows in drawn:
            chosen = rows[rows >= 0]
            filled.append(chosen if len(chosen) == size else np.resize(chosen, size))
        return self._store.groups(filled)

    def columns(self) -> Columns:
        """Return the view of the buffer that strategies draw from; adding invalidates it."""
        return self._store.columns()

    def groups(self) -> list[Group]:
        """Return everything that the buffer holds: a group for each prompt, by latest arrival."""
        prompts = self._store.prompts.by_arrival().tolist()
        return self._store.groups([self._store.rows_of(prompt) for prompt in prompts])

    def save(self, folder: Path, older: Path | None = None) -> Callable[[], dict[str, str]]:
        """Prepare to write the buffer into a checkpoint's folder, and return what writes it.

        That function may run in another thread while the buffer is in use, one save at a time. It
        returns the sha256 of each segment by its name in the folder. A manifest must take them
        from there: reading a linked file again would list a damaged one as sound. Segments that
        are in the checkpoint `older` are linked from there, except in every tenth save.
        """
        if self._saves % REWRITE_EVERY == 0:
            older = None
            self._store.segments.merge(self._store.rows)
        self._saves += 1
        return snapshot(self._store, self.counts, self._saves, folder, older)

    def load(self, folder: Path, drop_damaged: bool = False) -> None:
        """Replace the content by a saved one; it goes on as the saved buffer would have.

        ValueError if a segment is damaged. With `drop_damaged`, the trajectories of damaged
        segments are dropped instead, and counted in `dropped_damaged`.
        """
        state = State.read(folder)
        segments = [Segment.read(folder / SEGMENTS, file) for file in state.segments]
        damaged = np.array([segment is None for segment in segments], bool)
        if damaged.any() and not drop_damaged:
            raise ValueError(
                f"{damaged.sum()} of {len(damaged)} segments of the replay buffer in {folder}"
                " are damaged; to go on without their trajectories, type"
                " `tba train --resume RUN --drop-damaged-replay`"
            )
        sound = ~damaged[state.columns["segment"]]
        columns = {name: column[sound] for name, column in state.columns.items()}
        columns["stamp"] = np.arange(sound.sum(), dtype=np.int64)
        self._store = Store(Rows(**columns))
        self._store.restore(state.prompts, segments)
        self._saves = state.saves
        self.counts = Counter(state.counts)
        if damaged.any():
            lost = len(sound) - len(self)
            self.counts["dropped_damaged"] += lost
            log.warning(
                "%d of %d segments of the replay buffer are damaged: dropped %d of its %d"
                " trajectories", damaged.sum(), len(damaged), lost, len(sound),
            )  # fmt: skip

    def _add(self, group: Group, now: int) -> None:
        finite = _finite(group.trajectories)
        self.counts["not_finite"] += len(group.trajectories) - len(finite)
        if not finite:
            return
        self.counts["added"] += len(finite)
        prompt = self._store.prompts.number(group)
        if not self._has_newest_reference(prompt, group.reference):
            self.counts["evicted_reference"] += len(finite)
            return
        new: dict[bytes, Trajectory] = {}
        samples: Counter[bytes] = Counter()
        salt = salt_of(prompt)
        for trajectory in finite:
            key = key_of(trajectory.tokens, salt)
            new[key] = trajectory
            samples[key] += 1
        self.counts["duplicates"] += len(finite) - len(new)
        arrived = list(samples.values())
        earlier = self._replace(list(new))
        rows = self._store.put(prompt, new, now)
        self._store.rows.arrived_count[rows] = arrived
        self._store.rows.count[rows] = np.add(arrived, earlier)
        excess = int(self._store.prompts.held[prompt]) - self.per_prompt
        if excess > 0:
            self._drop(self._store.oldest(excess, prompt), "evicted_per_prompt")

    def _has_newest_reference(self, prompt: int, reference: int) -> bool:
        """Return whether a group has the prompt's newest reference; drop what has an older one."""
        known = self._store.prompts.reference
        if reference > known[prompt]:
            known[prompt] = reference
            self.counts["evicted_reference"] += self._store.remove(self._store.rows_of(prompt))
        return reference == known[prompt]

    def _replace(self, keys: Sequence[bytes]) -> list[int]:
        """Remove the responses with these keys; return how many samples each stood for."""
        held = self._store.find(keys)
        if not held:
            return [0] * len(keys)
        count = self._store.rows.count
        earlier = [count.item(held[key]) if key in held else 0 for key in keys]
        self.counts["duplicates"] += self._store.remove(np.array(list(held.values())))
        return earlier

    def _drop(self, rows: np.ndarray, reason: str) -> None:
        prompts = self._store.rows.prompt[rows]
        self.counts[reason] += self._store.remove(rows)
        self._store.prompts.release(prompts)


def _check(drawn: np.ndarray, shape: tuple[int, int], rows: Rows, name: str) -> None:
    """Raise ValueError unless the draw of the strategy `name` keeps the contract."""
    if not isinstance(drawn, np.ndarray) or drawn.dtype.kind != "i" or drawn.shape != shape:
        form = f"{drawn.dtype} {drawn.shape}" if isinstance(drawn, np.ndarray) else type(drawn)
        raise ValueError(
            f"strategy {name} drew {form}; it must draw a numpy array of integers {shape},"
            " which are rows of the buffer"
        )
    chosen = drawn >= 0
    used = drawn[chosen]
    if used.max(initial=EMPTY) >= len(rows) or (rows.stamp[used] == EMPTY).any():
        raise ValueError(
            f"strategy {name} drew rows that are empty; take them from columns.rows(prompt)"
        )
    if not chosen.any(axis=1).all():
        raise ValueError(
            f"strategy {name} drew a group without a response; draw at least one for each group"
        )
    prompts = np.where(chosen, rows.prompt[drawn], EMPTY)
    if (chosen & (prompts != prompts.max(axis=1, keepdims=True))).any():
        raise ValueError(
            f"strategy {name} drew a group from several prompts; take the rows of a group"
            " from columns.rows(prompt) of one prompt"
        )


def _finite(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the trajectories all of whose numbers are finite."""
    if _are_finite(trajectories):
        return list(trajectories)
    return [t for t in trajectories if _are_finite([t])]


def _are_finite(trajectories: Sequence[Trajectory]) -> bool:
    numbers = [np.array([t.reward for t in trajectories])]
    for t in trajectories:
        numbers += [t.behavior_logp, t.ref_logp]
        if t.value is not None:
            numbers.append(t.value)
    return bool(np.isfinite(np.concatenate(numbers)).all())

"""Replay buffer: distinct trajectories of each prompt; newest copies kept, oldest dropped."""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from tba.replay.store import EMPTY, SHOWN, State, Store, key_of
from tba.strategies import Columns, Strategy
from tba.types import GIVEN, RESTART, Group, Trajectory, marks_of

STEPS = 50
"""Maximum number of steps over which `Pace` compares samples."""


@dataclass
class ReplayBuffer:
    """Up to `per_prompt` distinct responses to each prompt, and `capacity` in total.

    A response that arrives again replaces its earlier copy, and their counts add up. All of a
    prompt's reference log-probs are from one reference, the newest. Every sample is accounted for:
    added == len(buffer) + duplicates + evicted_per_prompt + evicted_capacity + evicted_reference
    + dropped; not_finite counts samples that are not added.
    """

    per_prompt: int = 100
    capacity: int = 100_000
    counts: Counter[str] = field(default_factory=Counter)
    _store: Store = field(default_factory=Store, init=False, repr=False)

    def __len__(self) -> int:
        return len(self._store)

    @property
    def prompts(self) -> int:
        return len(self._store.heads)

    def add(self, groups: Iterable[Group], now: int) -> None:
        """Store groups that arrived at step `now`; drop the oldest responses beyond the limits."""
        store = self._store
        for group in groups:
            finite = []
            for t in group.trajectories:
                value = () if t.value is None else t.value
                numbers = np.concatenate([[t.reward], t.behavior_logp, t.ref_logp, value])
                if np.isfinite(numbers).all():
                    finite.append(t)
            self.counts["not_finite"] += len(group.trajectories) - len(finite)
            if not finite:
                continue
            total = sum(t.count for t in finite)
            self.counts["added"] += total
            prompt = store.number(group)
            head = store.heads[prompt]
            if group.reference < head.reference:
                self.counts["evicted_reference"] += total
                continue
            if group.reference > head.reference:
                self.counts["evicted_reference"] += store.remove(store.rows_of(prompt))
                store.heads[prompt] = replace(head, reference=group.reference)
            finite = [behind_prompt(t, group.prompt_tokens, head.prompt_tokens) for t in finite]
            keys = [key_of(t, prompt) for t in finite]
            new = dict(zip(keys, finite, strict=True))
            samples = dict.fromkeys(keys, 0)
            for key, t in zip(keys, finite, strict=True):
                samples[key] += t.count
            known = store.put(prompt, new, np.array(list(samples.values())), now)
            self.counts["duplicates"] += total - len(new) + known
            excess = store.prompts["held"].item(prompt) - self.per_prompt
            if excess > 0:
                self.counts["evicted_per_prompt"] += store.evict(excess, prompt)
        excess = len(self) - self.capacity
        if excess > 0:
            self.counts["evicted_capacity"] += store.evict(excess)
            store.release_prompts()

    def sample(
        self, groups: int, size: int, strategy: Strategy, now: int, rng: np.random.Generator
    ) -> list[Group]:
        """Return groups of `size` trajectories; `short_groups` counts groups with repeated ones."""
        if not len(self):
            raise ValueError("the replay buffer is empty: wait for the first groups")
        drawn = np.asarray(strategy.draw(self.columns(), groups, size, now, rng))
        rows = self._store.rows
        shape = (groups, size)
        is_valid = (
            drawn.dtype.kind == "i" and drawn.shape == shape and drawn.max() < len(rows["stamp"])
        )
        if is_valid:
            chosen = drawn >= 0
            prompts = np.where(chosen, rows["prompt"][drawn], EMPTY)
            of_one = ~chosen | (prompts == prompts.max(axis=1, keepdims=True))
            in_use = (rows["stamp"][drawn[chosen]] != EMPTY).all()
            is_valid = chosen.any(axis=1).all() and of_one.all() and in_use
        if not is_valid:
            raise ValueError(
                f"strategy {type(strategy).__name__} drew {drawn.dtype} {drawn.shape}; it must draw"
                f" integers {shape}: for each group, at least one row of columns.rows(prompt), all"
                " of one prompt"
            )
        self.counts["short_groups"] += int((drawn < 0).any(axis=1).sum())
        return self._store.groups([np.resize(own[own >= 0], size) for own in drawn])

    def columns(self) -> Columns:
        """Return the view of the buffer that strategies draw from; adding invalidates it."""
        store = self._store
        return Columns(
            prompts=_read_only(store.prompts.by_stamp()),
            rows=lambda prompt: _read_only(store.rows_of(int(prompt))),
            latest=_read_only(store.prompts["latest"]),
            arrived_since=store.arrived_since,
            **{name: _read_only(store.rows[name]) for name in SHOWN},
        )

    def groups(self) -> list[Group]:
        """Return the whole content: a group for each prompt, by latest arrival."""
        return self._store.groups(self._store.rows_by_prompt())

    def save(self, folder: Path) -> Callable[[], None]:
        """Copy the state and return the function that writes it into a checkpoint's folder.

        The function may run in another thread while the buffer is in use.
        """
        return partial(self._store.state(self.counts).write, folder)

    def load(self, folder: Path) -> None:
        """Replace the content with a saved one."""
        state = State.read(folder)
        self._store = Store()
        self.counts = Counter(state.counts)
        self._store.restore(state)

    def rescore(self, score: Callable[[Sequence[Group]], Sequence[Sequence[float]]]) -> None:
        """Replace the rewards with the results of `score`, for each group as it arrived.

        Skips groups whose responses have all arrived again; drops responses with only NaN rewards.
        """
        store = self._store
        arrivals = []
        rewards = np.full(len(store.rows["reward"]), np.nan)
        for rows in store.rows_by_prompt():
            at = {step: list[int]() for step in store.rows["arrived"][rows].tolist()}
            for row in rows.tolist():
                latest = [store.rows[name].item(row) for name in ("arrived", "arrived_count")]
                every = [*store.earlier.get(row, ()), *latest]
                for step, samples in zip(every[::2], every[1::2], strict=True):
                    if step in at:
                        at[step] += [row] * samples
            arrivals += [np.array(together) for together in at.values()]
        for rows, own in zip(arrivals, score(store.groups(arrivals)), strict=True):
            finite = np.isfinite(own)
            rewards[rows[finite]] = np.asarray(own)[finite]
        rejected = np.flatnonzero(np.isnan(rewards) & (store.rows["stamp"] != EMPTY))
        self.counts["dropped"] += store.remove(rejected)
        store.rows["reward"][:] = rewards
        state = store.state(self.counts)
        self._store = Store()
        self._store.restore(state)  # reorders the prompts by their remaining rows

    def clear(self) -> None:
        """Drop everything."""
        self.counts["dropped"] += len(self)
        self._store = Store()


class Pace:
    """Limit on how often a sample is trained on: `max_reuse` times, on average over `steps`.

    Including the next step, samples trained on <= max_reuse x samples that entered the buffer, both
    over the last `steps` and over the last `STEPS`. `marks` are the totals of both after each of
    the latest draws; a new run starts with 0.
    """

    def __init__(self, max_reuse: float, marks: Iterable[Sequence[int]], steps: int = STEPS):
        self._max_reuse = max_reuse
        self._windows = (steps, STEPS)
        self.marks = deque(marks, maxlen=STEPS)

    def missing(self, batch: int, entered: int) -> int:
        """Return how many samples must still enter before a step on `batch` samples."""
        total, _ = self.marks[-1]
        missing = 0
        for steps in self._windows:
            trained, before = self.marks[-min(steps, len(self.marks))]
            needed = math.ceil((total - trained + batch) / self._max_reuse)
            missing = max(missing, needed - (entered - before))
        return missing

    def drew(self, batch: int, entered: int) -> None:
        """Record a step's draw."""
        self.marks.append((self.marks[-1][0] + batch, entered))


def behind_prompt(t: Trajectory, own: np.ndarray, stored: np.ndarray) -> Trajectory:
    """Return a trajectory with its own prompt as a trajectory of the stored prompt.

    Sessions of an agent may begin differently. Tokens after the stored prompt are marked as given;
    if the prompts differ before that, the trajectory begins with a new context.
    """
    begins_alike = np.array_equal(own[: len(stored)], stored)
    given = own[len(stored) :] if begins_alike else own
    if begins_alike and not len(given):
        return t
    # sessions whose first tokens differ have an empty prompt, and begin with given tokens
    marks = np.concatenate([np.full(len(given), GIVEN, np.uint8), marks_of(t)])
    marks[0] = GIVEN if begins_alike else RESTART
    zeros = np.zeros(len(given), np.float32)
    return replace(
        t,
        tokens=np.concatenate([given, t.tokens]),
        behavior_logp=np.concatenate([zeros, t.behavior_logp]),
        ref_logp=np.concatenate([zeros, t.ref_logp]),
        value=None if t.value is None else np.concatenate([zeros, t.value]),
        switches=tuple((place + len(given), version) for place, version in t.switches),
        marks=marks,
    )


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view

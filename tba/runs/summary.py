"""Per-step metrics and the final summary of a run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean

from tba.replay.buffer import ReplayBuffer
from tba.search.result import SearchStats
from tba.types import Group


@dataclass(frozen=True)
class Summary:
    """The summary of a run.

    In `summary.json`, `first` and `last` are `eval/first` and `eval/last`.
    """

    finished: bool
    steps: int
    seconds: float
    """Seconds in the train loop over all sessions of the run, the first fill included."""
    samples_generated: int
    samples_trained: int
    trainer_wait_fraction: float
    """Share of the loop's time after the first fill that the trainer waited for groups."""
    searcher_wait_fraction: float
    """Share of the searchers' time without a task."""
    lag_mean: float
    """Mean number of steps between the weights that sampled a trajectory and those it trained."""
    lag_max: float
    searcher_restarts: int
    rejected: dict[str, int]
    """Samples without a reward, by reason."""
    first: dict[str, float]
    """Scores before training."""
    last: dict[str, float]
    """Scores after training."""


class Tracker:
    """Totals over all steps and all sessions of a run, and its clocks."""

    def __init__(self) -> None:
        self._sum: defaultdict[str, float] = defaultdict(float)
        self._earlier_seconds = 0.0
        self._lag_max = 0.0
        self._evaluations: list[tuple[int, dict[str, float]]] = []
        self._started: float | None = None
        self._stopped: float | None = None
        self._before: Mapping[str, float] = {}
        self._last = time.perf_counter()
        self._waited = self._synced = self._idle = 0.0
        self._published = 0

    @property
    def seconds(self) -> float:
        """Seconds of the train loop so far, over all sessions."""
        if self._started is None:
            return self._earlier_seconds
        return self._earlier_seconds + (self._stopped or time.perf_counter()) - self._started

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Time the train loop."""
        self._started = self._last = time.perf_counter()
        try:
            yield
        finally:
            self._stopped = time.perf_counter()

    @contextmanager
    def first_fill(self) -> Iterator[None]:
        """Time the wait before the first step, which the other shares of time exclude."""
        with _timed() as seconds:
            yield
        self._sum["first_fill"] += seconds()
        self._last = time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time the trainer's wait for groups."""
        with _timed() as seconds:
            yield
        self._waited = seconds()
        self._sum["waited"] += self._waited

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """Time a publication of the weights."""
        with _timed() as seconds:
            yield
        self._synced = seconds()

    def published(self, size: int) -> None:
        """Count the bytes of a publication."""
        self._published = size

    def step(
        self, step: int, groups: Sequence[Group], buffer: ReplayBuffer, stats: SearchStats
    ) -> dict[str, float]:
        """Return the metrics of a step, except the trainer's. Call it at the end of the step."""
        now = time.perf_counter()
        trajectories = [t for g in groups for t in g.trajectories]
        lags = [step - t.version for t in trajectories]
        self._sum["steps"] += 1
        self._sum["samples_trained"] += len(trajectories)
        self._sum["lag"] += fmean(lags)
        self._lag_max = float(max(self._lag_max, *lags))
        self._add_searching(dict(stats.seconds))
        distinct = [len({id(t) for t in g.trajectories}) for g in groups]
        metrics: dict[str, float] = {
            "time": self.seconds,
            "samples_generated": stats.samples,
            "samples_trained": self._sum["samples_trained"],
            "off_policy/lag_mean": fmean(lags),
            "off_policy/lag_max": max(lags),
            "buffer/size": len(buffer),
            "buffer/prompts": buffer.prompts,
            "buffer/distinct_per_group": fmean(distinct),
            **{f"buffer/{name}": count for name, count in buffer.counts.items()},
            "wait/trainer": self._waited / max(1e-9, now - self._last),
            "wait/searchers": self._idle,
            "sync/seconds": self._synced,
            "sync/bytes": self._published,
            "sync/logp_gap": stats.logp_gap,
            "searchers/restarts": stats.restarts,
            "searchers/rejected": stats.rejected.total(),
        }
        if stats.faulty:
            metrics["reward/faulty"] = stats.faulty
        if stats.rollouts:
            metrics["rollouts_generated"] = stats.rollouts
        self._last, self._synced, self._published = now, 0.0, 0
        return metrics

    def _add_searching(self, seconds: Mapping[str, float]) -> None:
        """Add the searchers' seconds since the last step; a task reports at its end."""
        spent = {name: total - self._before.get(name, 0.0) for name, total in seconds.items()}
        self._before = seconds
        idle, total = spent.get("idle", 0.0), sum(spent.values())
        self._sum["idle"] += idle
        self._sum["searching"] += total
        if total:
            self._idle = idle / total

    def evaluation(self, version: int, scores: dict[str, float]) -> None:
        """Record the scores of an evaluation."""
        self._evaluations.append((version, scores))

    def counts(self) -> dict[str, float]:
        """Return the state for a checkpoint: plain numbers by name."""
        return {**self._sum, "lag_max": self._lag_max, "seconds": self.seconds}

    def resume(
        self,
        counts: Mapping[str, float],
        stats: SearchStats,
        evaluations: list[tuple[int, dict[str, float]]],
    ) -> None:
        """Continue from earlier `counts` and the searchers' earlier statistics."""
        self._sum.update(counts)
        self._lag_max = self._sum.pop("lag_max")
        self._earlier_seconds = self._sum.pop("seconds")
        self._before = dict(stats.seconds)
        self._evaluations = evaluations

    def summary(self, steps: int, stats: SearchStats, finished: bool) -> Summary:
        """Return the summary of a run after `steps` steps."""
        training = self.seconds - self._sum["first_fill"]
        scores = []
        for version, values in sorted(self._evaluations, key=lambda e: e[0]):
            plain = {name.removeprefix("eval/"): value for name, value in values.items()}
            plain["step"] = float(version)
            plain["stderr"] = plain.get("sampled_stderr", plain["sampled_reward_stderr"])
            scores.append(plain)
        return Summary(
            finished=finished,
            steps=steps,
            seconds=self.seconds,
            samples_generated=stats.samples,
            samples_trained=int(self._sum["samples_trained"]),
            trainer_wait_fraction=self._sum["waited"] / training if training > 0 else 0.0,
            searcher_wait_fraction=self._sum["idle"] / max(1e-9, self._sum["searching"]),
            lag_mean=self._sum["lag"] / max(1.0, self._sum["steps"]),
            lag_max=self._lag_max,
            searcher_restarts=stats.restarts,
            rejected=dict(stats.rejected),
            first=scores[0] if scores else {},
            last=scores[-1] if scores else {},
        )


@contextmanager
def _timed() -> Iterator[Callable[[], float]]:
    started = time.perf_counter()
    yield lambda: time.perf_counter() - started

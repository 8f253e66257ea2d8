"""Per-step metrics and the final summary of a run."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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
        self._spent: defaultdict[str, float] = defaultdict(float)  # since the last step
        self._earlier_seconds = 0.0
        self._lag_max = 0.0
        self._evaluations: list[tuple[int, dict[str, float]]] = []
        self._started: float | None = None
        self._stopped: float | None = None
        self._searched: Mapping[str, float] = {}
        self._last = time.perf_counter()
        self._idle = 0.0
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
        with self._timed("first_fill"):
            yield
        self._last = time.perf_counter()

    def waiting(self) -> AbstractContextManager[None]:
        """Time the trainer's wait for groups."""
        return self._timed("waited")

    def syncing(self) -> AbstractContextManager[None]:
        """Time a publication of the weights."""
        return self._timed("synced")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._spent[name] = time.perf_counter() - started
        self._sum[name] += self._spent[name]

    def published(self, size: int) -> None:
        """Count the bytes of a publication."""
        self._published = size

    def step(
        self, step: int, groups: Sequence[Group], buffer: ReplayBuffer, stats: SearchStats
    ) -> dict[str, float]:
        """Return the metrics of a step, except the trainer's. Call it at the end of the step."""
        now = time.perf_counter()
        lags = [step - t.version for g in groups for t in g.trajectories]
        lag = fmean(lags)
        self._sum["steps"] += 1
        self._sum["samples_trained"] += len(lags)
        self._sum["lag"] += lag
        self._lag_max = float(max(self._lag_max, *lags))
        distinct = [len({id(t) for t in g.trajectories}) for g in groups]
        metrics: dict[str, float] = {
            "time": self.seconds,
            "samples_generated": stats.samples,
            "samples_trained": self._sum["samples_trained"],
            "off_policy/lag_mean": lag,
            "off_policy/lag_max": max(lags),
            "buffer/size": len(buffer),
            "buffer/prompts": buffer.prompts,
            "buffer/distinct_per_group": fmean(distinct),
            **{f"buffer/{name}": count for name, count in buffer.counts.items()},
            "wait/trainer": self._spent["waited"] / max(1e-9, now - self._last),
            "wait/searchers": self._searchers_idle(dict(stats.seconds)),
            "sync/seconds": self._spent["synced"],
            "sync/bytes": self._published,
            "sync/logp_gap": stats.logp_gap,
            "searchers/restarts": stats.restarts,
            "searchers/rejected": stats.rejected.total(),
        }
        if stats.faulty:
            metrics["reward/faulty"] = stats.faulty
        if stats.rollouts:
            metrics["rollouts_generated"] = stats.rollouts
        self._last, self._published = now, 0
        self._spent.clear()
        return metrics

    def _searchers_idle(self, seconds: Mapping[str, float]) -> float:
        """Return the idle share of the searchers' seconds in the tasks that ended since a step."""
        spent = {name: total - self._searched.get(name, 0.0) for name, total in seconds.items()}
        self._searched = seconds
        if any(spent.values()):  # otherwise no task has ended, and the share stays
            self._idle = _idle_share(spent)
        return self._idle

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
        self._searched = dict(stats.seconds)
        self._evaluations = evaluations

    def summary(self, steps: int, stats: SearchStats, finished: bool) -> Summary:
        """Return the summary of a run after `steps` steps."""
        training = self.seconds - self._sum["first_fill"]
        evaluations = sorted(self._evaluations, key=lambda evaluation: evaluation[0])
        return Summary(
            finished=finished,
            steps=steps,
            seconds=self.seconds,
            samples_generated=stats.samples,
            samples_trained=int(self._sum["samples_trained"]),
            trainer_wait_fraction=self._sum["waited"] / training if training > 0 else 0.0,
            searcher_wait_fraction=_idle_share(stats.seconds),
            lag_mean=self._sum["lag"] / max(1.0, self._sum["steps"]),
            lag_max=self._lag_max,
            searcher_restarts=stats.restarts,
            rejected=dict(stats.rejected),
            first=_plain(*evaluations[0]) if evaluations else {},
            last=_plain(*evaluations[-1]) if evaluations else {},
        )


def _idle_share(seconds: Mapping[str, float]) -> float:
    return seconds.get("idle", 0.0) / max(1e-9, sum(seconds.values()))


def _plain(version: int, scores: Mapping[str, float]) -> dict[str, float]:
    plain = {name.removeprefix("eval/"): value for name, value in scores.items()}
    plain["step"] = float(version)
    plain["stderr"] = plain.get("sampled_stderr", plain["sampled_reward_stderr"])
    return plain

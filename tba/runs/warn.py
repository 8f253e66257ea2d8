"""Warnings of a run: signs that something is wrong, with advice on what to change."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median

from tba.config.schema import Config
from tba.replay.buffer import STEPS

WINDOW = 10
"""Steps over which a metric is averaged before the comparison; all steps of a shorter run."""
FIRST = 50
"""First steps, whose median KL is the usual value."""
SMALL_KL = 0.01
"""KL in nats per token that is small whatever the usual value."""
KL = "kl/k3"  # in every training step, and in no evaluation
GRADED = "tb/graded"  # a metric of steps with objective.shift
ACCEPTED = "raft/accepted"  # a metric of steps with objective=raft

MOST_EQUAL = 0.5
"""Largest fraction of the groups that may have equal rewards."""
MOST_EQUAL_LEARNT = 0.9
"""The same for objectives that learn from such groups."""
MOST_CUT_OFF = 0.2
"""Largest fraction of the responses that may reach `sampling.max_tokens`."""
LEAST_ESS = 0.5
"""Smallest effective sample size, as a fraction of the group."""
MOST_WAITING = 0.05
"""Largest fraction of the time that the trainer may wait for new samples."""
MOST_KL = 10.0
"""Largest ratio of the KL to its usual value."""

LOST = "lost ranks"
"""Prefix of the key of a warning that the run was restarted."""

RunWarning = tuple[str, str]
"""Key of a warning, and its text."""


class Warnings:
    """Compares the metrics of a run with thresholds; each warning is given once.

    A resumed run passes the `rows` of its metrics so far, and the warnings already `given`, by key.
    `learns_from_equal`: whether groups of equal rewards have a gradient.
    """

    def __init__(
        self,
        config: Config,
        rows: Sequence[Mapping[str, float | None]] = (),
        given: Mapping[str, str] | None = None,
        learns_from_equal: bool = False,
    ):
        self._given = dict(given or {})
        self._learns_from_equal = learns_from_equal
        self._config = config
        self._steps = deque[Mapping[str, float | None]](maxlen=STEPS + 1)
        self._first_kl: list[float] = []
        for row in rows:
            self._read(row)

    @property
    def texts(self) -> list[str]:
        """The warnings so far."""
        return list(self._given.values())

    def start(self, evaluates_others_since: int | None = None) -> list[RunWarning]:
        """Return the warnings that do not depend on metrics."""
        trainer = self._config.trainer
        signs = []
        if (step := evaluates_others_since) is not None:
            text = (
                f"since step {step}, evaluations have other held-out prompts or settings: earlier"
                " scores cannot be compared with new ones, but count for eval.patience and --step"
                " best"
            )
            signs.append((f"evaluated since {step}", text))
        if trainer.learning_rate > 1e-2:
            rate = f"trainer.learning_rate = {trainer.learning_rate:g} is high for AdamW"
            signs.append(("rate", f"{rate}, and can damage a pretrained model; set 1e-5 or so"))
        if trainer.warmup_steps == 0 and self._config.run.steps > 1:
            text = (
                "trainer.warmup_steps = 0: the first steps use the full learning rate,"
                f" {trainer.learning_rate:g}, before AdamW has seen many gradients, and can damage"
                " a pretrained model; remove it, for the default of 10 steps"
            )
            signs.append(("warmup", text))
        return self._new(signs)

    @property
    def restarts(self) -> int:
        """Number of restarts of the run after the loss of trainer ranks."""
        return sum(key.startswith(LOST) for key in self._given)

    def restarted(self, texts: Sequence[str]) -> list[RunWarning]:
        """Return a warning for each restart, with these texts."""
        first = self.restarts + 1
        return self._new((f"{LOST} {n}", text) for n, text in enumerate(texts, first))

    def rejected(self, errors: Mapping[str, str]) -> list[RunWarning]:
        """Return a warning for each reason why samples were rejected, with its first error."""
        return self._new(
            (f"rejected {reason}", f"samples are rejected ({reason}); the first error:\n{error}")
            for reason, error in errors.items()
        )

    def step(self, metrics: Mapping[str, float | None]) -> list[RunWarning]:
        """Return the warnings that the metrics of a step trigger for the first time."""
        if not self._read(metrics) or len(self._steps) < WINDOW:
            return []
        return self._new(self._signs())

    def end(self) -> list[RunWarning]:
        """Return the warnings that a short run had too few steps to trigger."""
        return self._new(self._signs(ended=True)) if self._steps else []

    def _read(self, metrics: Mapping[str, float | None]) -> bool:
        """Store the metrics of a training step; return False for metrics of an evaluation."""
        if KL not in metrics:
            return False
        self._steps.append(metrics)
        if len(self._first_kl) < FIRST:
            self._first_kl.append(metrics[KL] or 0.0)
        return True

    def _new(self, signs: Iterable[RunWarning]) -> list[RunWarning]:
        new = {key: text for key, text in signs if key not in self._given}
        self._given |= new
        return list(new.items())

    def _signs(self, ended: bool = False) -> Iterator[RunWarning]:
        """Yield the signs of trouble in the latest steps."""
        recent = list(self._steps)[-WINDOW:]
        yield from self._signs_of_rewards(recent)
        cut_off, ess = (
            fmean(row[name] or 0.0 for row in recent)
            for name in ("completions/clipped_ratio", "off_policy/ess")
        )
        if cut_off > MOST_CUT_OFF:
            yield (
                "cut_off",
                f"{cut_off:.0%} of the responses are cut off at sampling.max_tokens ="
                f" {self._config.sampling.max_tokens} (more than"
                f" {MOST_CUT_OFF:.0%}); raise it, or ask for shorter responses",
            )
        if ess < LEAST_ESS:
            yield (
                "ess",
                f"the effective sample size is {ess:.0%} of a group (less than"
                f" {LEAST_ESS:.0%}): the policy has moved away from the one that sampled the data;"
                " lower trainer.learning_rate, or train on newer data",
            )
        # skips the first step, whose time includes the first fill
        seconds = waited = 0.0
        for before, row in pairwise(self._steps):
            passed = (row["time"] or 0.0) - (before["time"] or 0.0)
            seconds += passed
            waited += passed * (row["wait/trainer"] or 0.0)
        full = ended or len(self._steps) == STEPS + 1
        if full and self._config.asynchronous and waited > MOST_WAITING * seconds:
            runtime = self._config.runtime
            why = f"it may train on a sample only runtime.max_reuse = {runtime.max_reuse:g} times"
            if runtime.fresh:
                why = f"each step needs runtime.fresh = {runtime.fresh} new groups"
            yield (
                "reuse",
                f"the trainer waited for new samples for {waited / seconds:.0%} of the time"
                f" of the last {len(self._steps) - 1} steps (more than {MOST_WAITING:.0%}), because"
                f" {why}; raise runtime.searchers, runtime.concurrent_searches,"
                " runtime.publish_every or trainer.batch_size",
            )
        usual = median(self._first_kl)
        kl = median(row[KL] or 0.0 for row in recent)
        if len(self._first_kl) == FIRST and kl > max(MOST_KL * usual, SMALL_KL):
            yield (
                "kl",
                f"kl/k3 is {kl:.2g} nats per token, more than {MOST_KL:g} times its"
                f" median over the first {FIRST} steps, {usual:.2g}: the policy drifts from the"
                " reference; lower trainer.learning_rate, or raise objective.beta",
            )

    def _signs_of_rewards(
        self, recent: Sequence[Mapping[str, float | None]]
    ) -> Iterator[RunWarning]:
        """Yield the signs that the rewards teach nothing, or the wrong thing."""
        equal = fmean(row["frac_reward_zero_std"] or 0.0 for row in recent)
        most_equal = MOST_EQUAL_LEARNT if self._learns_from_equal else MOST_EQUAL
        if equal > most_equal:
            solved = "choose harder prompts, or selection=difficulty"
            if self._learns_from_equal:
                use = self._config.objective.use
                solved = f"leave it: objective.use = {use} learns from such groups, too"
            yield (
                "equal_rewards",
                f"{equal:.0%} of the groups (more than {most_equal:.0%}) have equal rewards, which"
                " do not tell better responses from worse: read some completions; if nothing is"
                " solved yet, choose easier prompts, reward partial answers, or raise"
                f" sampling.samples; if everything is, {solved}",
            )
        if graded := fmean(row.get(GRADED) or 0.0 for row in recent):
            yield (
                "graded",
                f"{graded:.0%} of the rewards are neither 0 nor 1: objective.shift is made for"
                " these two, and with others it can favour bad responses; set objective.shift=0",
            )
        if all(row.get(ACCEPTED) == 0 for row in recent):
            yield (
                "accepted",
                "objective=raft has accepted no response and learned nothing: no reward reached"
                " objective.threshold; set it lower if the rewards have another scale",
            )

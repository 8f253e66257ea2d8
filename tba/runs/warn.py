"""Warnings of a run: signs that something is wrong, in words and with what to do about it."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median

from tba.config.schema import Config
from tba.replay.buffer import STEPS

WINDOW = 10
"""Steps over which a metric is averaged before it is compared; a shorter run is compared whole."""
FIRST = 50
"""Steps whose median KL is the usual one."""
SMALL_KL = 0.01
"""KL in nats per token that is small, whatever it was at first."""
EQUAL, CUT_OFF, ESS, KL = AVERAGED = (
    "frac_reward_zero_std", "completions/clipped_ratio", "off_policy/ess", "kl/k3",
)  # fmt: skip
LOWEST, HIGHEST = "equal_rewards/min", "equal_rewards/max"

LEAST_ESS = 0.5
"""Share of a group below which the effective sample size is too small."""
MOST_WAITING = 0.05
"""Share of the time that the trainer may wait for new samples."""
MOST_KL = 10.0
"""Most times its usual value that the KL may be."""

RunWarning = tuple[str, str]
"""A short name of a warning, and its text."""


class Warnings:
    """Compares the metrics of a run with thresholds; each warns once.

    `pass_reward` is the least reward of a correct answer, if there is one.
    A resumed run has the `rows` of its metrics so far, and the warnings that were `given`, by key.
    """

    def __init__(
        self,
        config: Config,
        pass_reward: float | None = None,
        rows: Sequence[Mapping[str, float | None]] = (),
        given: Mapping[str, str] | None = None,
    ):
        self._given = dict(given or {})
        self._config = config
        self._pass_reward = pass_reward
        self._recent = {name: deque[float](maxlen=WINDOW) for name in AVERAGED}
        self._equal = deque[tuple[float, ...]](maxlen=WINDOW)
        self._first_kl: list[float] = []
        self._usual_kl: float | None = None
        self._seconds, self._waits = (deque[float](maxlen=STEPS) for _ in range(2))
        self._newest: Mapping[str, float | None] = {}
        for row in rows:
            self._read(row)

    @property
    def texts(self) -> list[str]:
        """The warnings so far."""
        return list(self._given.values())

    def start(self) -> list[RunWarning]:
        """Return the warnings that need no metrics."""
        trainer = self._config.trainer
        signs = []
        if not trainer.warmup_steps:
            text = (
                "trainer.warmup_steps = 0: the first steps have the whole learning rate,"
                f" {trainer.learning_rate:g}, when AdamW has seen few gradients, and can damage a"
                " pretrained model; set trainer.warmup_steps=20 or more"
            )
            signs.append(("warmup", text))
        return self._new(signs)

    def step(self, metrics: Mapping[str, float | None]) -> list[RunWarning]:
        """Return the warnings that the metrics of a step give for the first time."""
        if not self._read(metrics):
            return []
        full = len(self._recent[KL]) == WINDOW
        return self._new(self._signs() if full else ())

    def end(self) -> list[RunWarning]:
        """Return the warnings of a run that had too few steps for them."""
        return self._new(self._signs(ended=True)) if self._recent[KL] else []

    def _read(self, metrics: Mapping[str, float | None]) -> bool:
        """Keep the metrics of a step; return whether they are of a step, not of an evaluation."""
        if KL not in metrics:
            return False
        for name, values in self._recent.items():
            values.append(metrics[name] or 0.0)
        self._equal.append(tuple(metrics[n] or 0.0 for n in (LOWEST, HIGHEST) if n in metrics))
        if self._usual_kl is None:
            self._first_kl.append(self._recent[KL][-1])
            if len(self._first_kl) == FIRST:
                self._usual_kl = median(self._first_kl)
        if self._newest:  # the time of the first step has the first fill
            self._seconds.append((metrics["time"] or 0.0) - (self._newest["time"] or 0.0))
            self._waits.append(self._seconds[-1] * (metrics["wait/trainer"] or 0.0))
        self._newest = metrics
        return True

    def _new(self, signs: Iterable[RunWarning]) -> list[RunWarning]:
        new = {key: text for key, text in signs if key not in self._given}
        self._given |= new
        return list(new.items())

    def _signs(self, ended: bool = False) -> Iterator[RunWarning]:
        """Yield the signs of trouble in the latest steps."""
        w, mean = self._config.warn, {name: fmean(own) for name, own in self._recent.items()}
        if mean[EQUAL] > w.equal_rewards:
            value, cause = self._equal_value()
            yield (
                "equal_rewards",
                f"{mean[EQUAL]:.0%} of the groups have equal rewards{value}, which do not tell"
                " better responses from worse (more than warn.equal_rewards ="
                f" {w.equal_rewards:g}): {cause}",
            )
        if mean[CUT_OFF] > w.cut_off:
            yield (
                "cut_off",
                f"{mean[CUT_OFF]:.0%} of the responses are cut off at sampling.max_tokens ="
                f" {self._config.sampling.max_tokens} (more than warn.cut_off = {w.cut_off:g});"
                " raise it, or ask for shorter responses",
            )
        if mean[ESS] < LEAST_ESS:
            yield (
                "ess",
                f"the effective sample size is {mean[ESS]:.0%} of a group (less than"
                f" {LEAST_ESS:.0%}): the policy has moved away from the one that sampled the data;"
                " lower trainer.learning_rate, or train on newer data",
            )
        seconds, waited = (sum(own) for own in (self._seconds, self._waits))
        full = ended or len(self._waits) == STEPS
        if full and self._config.asynchronous and waited > MOST_WAITING * seconds:
            yield (
                "reuse",
                f"the trainer waited for new samples in {waited / seconds:.0%} of the last {STEPS}"
                f" steps' time (more than {MOST_WAITING:.0%}), because it may train on one"
                f" runtime.max_reuse = {self._config.runtime.max_reuse:g} times; raise"
                " runtime.searchers, runtime.concurrent_searches, runtime.publish_every or"
                " trainer.batch_size",
            )
        usual, kl = self._usual_kl, median(self._recent[KL])
        if usual is not None and kl > max(MOST_KL * usual, SMALL_KL):
            yield (
                "kl",
                f"kl/k3 is {kl:.2g} nats per token, more than {MOST_KL:g} times its"
                f" median over the first {FIRST} steps, {usual:.2g}: the policy runs away from the"
                " reference; lower trainer.learning_rate, or raise objective.beta",
            )

    def _equal_value(self) -> tuple[str, str]:
        """Return which reward the groups of equal rewards have, if all the same, and the cause."""
        values = {value for pair in self._equal for value in pair}
        cause = (
            "the prompts are too easy by now, or too hard, or the reward function is at fault;"
            " choose other prompts, or set strategy.filter_equal=true"
        )
        if len(values) != 1:
            return "", cause
        (value,) = values
        solved = {0.0: False, 1.0: True}.get(value)
        if self._pass_reward is not None:
            solved = value >= self._pass_reward
        if solved:
            cause = "everything is solved; choose harder prompts, or selection=difficulty"
        elif solved is False:
            cause = (
                "nothing is solved yet; read some completions, and choose easier prompts, reward"
                " partial answers, or raise sampling.samples"
            )
        return f", all of them {value:g}", cause

"""The reference run to 100 steps: the whole curve, and where each side ends.

    taskset -c 0 python benchmarks/whole_run.py --search trl            # hours on one core
    taskset -c 1 python benchmarks/whole_run.py --search synchronous    # an hour on another
    python benchmarks/whole_run.py --search asynchronous                # both cores, idle
    python benchmarks/whole_run.py                                      # all seeds, idle

All sides have the same search, with a seed of its own: rates with linear decay, a constant rate at
the best rate and the next lower one, and two other betas at the best of these. Where the best one
is at the edge of those tried, the next one follows. Settings are compared by where they end, the
mean of the last five evaluations. What the synchronous side and TRL learn does not depend on their
speed, so their search has one core each, and its seconds are used nowhere. TRL's settings are those
that are best for its algorithm in our synchronous loop, whose steps are three times as fast.

Then all sides run with each seed, one after the other on both cores. Finished runs are lines of
`runs/whole_run.jsonl`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import _measure
import _thresholds
from _runs import BASE, SIDES, Sums
from _sums import PendingReply, Side
from _thresholds import SEARCH_SEED, WHOLE, Run, end
from reference_run import fastest_known

STEPS = 100
LAST = (80, 85, 90, 95, 100)
IN_SEARCH = (5, *range(10, 80, 10), *LAST)
IN_TABLE = (*range(1, 11), *range(15, 80, 5), *LAST)
"""Steps after which the weights are evaluated."""
RATES = (2.5e-6, 5e-6, 1e-5, 2e-5, 4e-5, 8e-5)
FIRST_RATES = (1e-5, 2e-5, 4e-5)
BETAS: dict[Side, tuple[float, ...]] = {
    "asynchronous": (0.002, 0.006, 0.02, 0.06, 0.2),
    "synchronous": (0.002, 0.006, 0.02, 0.06, 0.2),
    "trl": (0.0, 0.002, 0.02),
}
FIRST_BETA: dict[Side, float] = {"asynchronous": 0.02, "synchronous": 0.02, "trl": 0.0}
AS_TRL = (
    "objective=dr_grpo", "strategy=recent", "strategy.filter_equal=false",
    "trainer.max_grad_norm=8",  # TRL divides the loss by the 8 tokens of a response
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What is searched, on all sides."""

    rate: float
    schedule: str
    beta: float

    def options(self, side: Side) -> tuple[str, ...]:
        """Return the options of a side that make the setting."""
        if side == "trl":
            name = "linear" if self.schedule == "linear" else "constant_with_warmup"
            return (f'lr_scheduler_type="{name}"', f"beta={self.beta}")
        schedule = f"trainer.schedule={self.schedule}"
        return (f"run.steps={STEPS}", schedule, f"objective.beta={self.beta}")

    @property
    def text(self) -> str:
        return f"rate {self.rate:g}, {self.schedule}, beta {self.beta:g}"

    @classmethod
    def of(cls, run: Run) -> Setting:
        options = dict(option.split("=", 1) for option in run["options"])
        trl = run["side"] == "trl"
        schedule = options["lr_scheduler_type" if trl else "trainer.schedule"]
        beta = options["beta" if trl else "objective.beta"]
        return cls(run["rate"], "linear" if "linear" in schedule else "constant", float(beta))


def main() -> None:
    parser = _measure.arguments(__doc__)
    parser.add_argument("--search", nargs="*", choices=SIDES, help="only search, for these sides")
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--draw", action="store_true", help="only write rows and figure again")
    options = parser.parse_args()
    if not options.draw:
        lab = Sums(options, WHOLE)
        best = {side: search(lab, side) for side in options.search or SIDES}
        for seed in () if options.search else options.seeds:
            for side, setting in best.items():
                lab.run(job_of(lab, side, setting, seed))
    if options.tiny:
        print("a tiny run: nothing is kept")
        return
    _measure.record(__file__, rows(), options)
    _thresholds.write()


def rows() -> list[_measure.Row]:
    """Return the rows of times to a score, where all sides have run."""
    found = []
    for compared in _thresholds.whole_comparisons():
        ours, peer = (Setting.of(runs[0]) for runs in (compared.ours, compared.peer))
        seeds = "one seed" if len(compared.ours) == 1 else f"{len(compared.ours)} seeds"
        note = f"{ours.text}; {compared.peer_is}: {peer.text}; {seeds}"
        name = "reference run to 100 steps, full, asynchronous: time to a score"
        goal = f"ratio >= {4 if compared.peer_is == 'TRL' else 1.5}"
        found.append(_thresholds.row(name, compared, note, goal))
    return found


def job_of(lab: Sums, side: Side, setting: Setting, seed: int) -> PendingReply:
    """Return a job of 100 steps."""
    own = fastest_known(lora=False) if side == "trl" else BASE[side]
    if side == "trl" and seed == SEARCH_SEED:
        side, own = "synchronous", AS_TRL
    job = lab.job(side, False, setting.rate, seed, options=(*own, *setting.options(side)))
    job = replace(job, threads=len(os.sched_getaffinity(0)))
    if lab.options.tiny:
        return replace(job, at=(1, 2))
    at = IN_SEARCH if seed == SEARCH_SEED else IN_TABLE
    return replace(job, steps=STEPS, seconds=7200.0, at=at)


def search(lab: Sums, side: Side) -> Setting:
    """Return the setting that ends highest."""
    ends: dict[Setting, float] = {}

    def measure(*settings: Setting) -> Setting:
        for setting in settings:
            if setting not in ends:
                ends[setting] = end(lab.run(job_of(lab, side, setting, SEARCH_SEED)))
                print(f"{side}, {setting}: ends at {ends[setting]:.3f}", file=sys.stderr)
        return max(ends, key=ends.__getitem__)

    first = FIRST_BETA[side]
    if lab.options.tiny:
        return measure(Setting(FIRST_RATES[1], "linear", first))
    best = measure(*(Setting(rate, "linear", first) for rate in FIRST_RATES))
    best = widen(measure, best, "rate", RATES)
    lower = RATES[max(0, RATES.index(best.rate) - 1)]
    constant = replace(best, schedule="constant")
    best = measure(constant, replace(constant, rate=lower))
    best = widen(measure, best, "beta", BETAS[side])
    return widen(measure, best, "rate", RATES)


def widen(
    measure: Callable[..., Setting], best: Setting, name: str, series: Sequence[float]
) -> Setting:
    """Return the best setting along a series: both neighbours of it have been tried."""
    while True:
        place = series.index(getattr(best, name))
        beside = series[max(0, place - 1) : place + 2]
        further = measure(*(replace(best, **{name: value}) for value in beside))
        if further == best:
            return best
        best = further


if __name__ == "__main__":
    main()

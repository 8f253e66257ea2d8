"""Plan of a run: how many searchers keep its trainer busy, at given, measured or assumed rates.

A closed-form model: search and training are two flows, and the slower one determines the step time.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import ceil, inf
from pathlib import Path
from statistics import fmean

from tba.config.plugins import with_defaults
from tba.config.schema import Config
from tba.runs.folder import METRICS, read, read_config
from tba.runs.summary import Summary
from tba.setup.machine import Machine
from tba.setup.memory import MemoryEstimate
from tba.weights import PUBLICATIONS

INTAKE = 2000.0
"""Groups per second that the process of the train loop can store."""
FLOPS = {True: 150e12, False: 0.4e12}
"""Assumed useful FLOP/s of a trainer device, keyed by whether it is a GPU."""
FAR = (64, 1024)
"""Numbers of searchers to which the plan is extrapolated."""


@dataclass(frozen=True)
class Rates:
    """Rates of a run's processes."""

    decode: float
    """Response tokens per second of a busy searcher, over all of its concurrent searches."""
    train: float
    """Response tokens per second of the trainer, over all of its devices."""
    prompt: float
    """Length of the longest prompt, in tokens."""
    response: float
    """Mean length of a response, in tokens."""
    judge: float
    """Seconds that a search waits for its rewards, while other searches generate."""
    network: float
    """Bandwidth for published weights, in GB/s."""


def rates_of(
    needs: MemoryEstimate, given: Mapping[str, float], run: Path | None
) -> tuple[Rates, dict[str, str]]:
    """Return the rates and their origins: given, else measured in a finished run, else assumed.

    Raises ValueError for a rate that is not positive, or a run that has not ended.
    """
    for name, value in given.items():
        if not 0 <= value < inf or (value == 0 and name != "judge"):
            raise ValueError(f"--{name} {value:g}: give a positive number")
    c = needs.config
    z = needs.sizes
    passes = 8 if c.policy.gradient_checkpointing else 6
    speed = FLOPS[needs.machine.gpus > 0] * c.trainer.devices / (passes * z.parameters)
    assumed = Rates(
        decode=2000.0, train=speed, prompt=needs.prompt, response=c.sampling.max_tokens,
        judge=0.0, network=1.0,
    )  # fmt: skip
    measured = {} if run is None else _measured(run)
    origin = dict.fromkeys(asdict(assumed), "assumed")
    origin |= dict.fromkeys(measured, "measured") | dict.fromkeys(given, "given")
    return Rates(**asdict(assumed) | measured | dict(given)), origin


def _measured(run: Path) -> dict[str, float]:
    """Return the rates of a finished run; `decode` includes time for rewards and the reference."""
    summary = Summary.read(run)
    before = read_config(run)
    rows = [row for row in read(run / METRICS) if "step_time" in row]
    if not rows or summary.samples_generated == 0:
        what = "searched" if rows else "trained"
        raise ValueError(f"{run} has {what} nothing; name another run, or leave out --run")
    response = fmean(row["completions/mean_length"] for row in rows)
    busy = summary.seconds * before.runtime.most_searchers * (1 - summary.searcher_wait_fraction)
    step = fmean(row["step_time"] for row in rows[len(rows) // 4 :])
    return {
        "decode": summary.samples_generated * response / busy,
        "train": before.trainer.batch_size * response / step,
        "response": response,
        "judge": 0.0,
    }


@dataclass(frozen=True)
class Forecast:
    """Expected figures of a run with a given number of searchers."""

    searchers: int
    step: float
    """Seconds per step."""
    trainer_waits: float
    """Fraction of the time."""
    searchers_wait: float
    """Fraction of the time."""
    lag: float
    """Steps between the weights that sample and the weights that are trained; replay adds to it."""
    found: float
    """Groups per second that all searchers together can produce."""
    bottleneck: str


def forecast(config: Config, rates: Rates, published: float, searchers: int) -> Forecast:
    """Return the expected figures; `published` is the size of a publication in bytes."""
    c = config
    r = c.runtime
    at_once = r.concurrent_searches if r.use == "ray" else 1
    generating = r.prompts_per_task * c.sampling.samples * rates.response / rates.decode
    each = min(1 / generating, at_once / (generating + rates.judge))  # searches a second
    found = searchers * each * r.prompts_per_task
    training = c.trainer.batch_size * rates.response / rates.train
    needed = groups_a_step(c)
    searching = needed / found
    step = max(training, searching)
    if r.use == "local" or r.lag is not None:  # search and training alternate
        rounds = ceil(needed / r.prompts_per_task / (searchers * at_once))
        searching = rounds * at_once / each
        step = training + searching
    sent = published / (rates.network * 1e9) + searchers / PUBLICATIONS
    lag = at_once / each / step + (r.publish_every - 1) / 2 + sent / step + 0.5
    waits = 1 - needed / (found * step)
    bottleneck = "search" if searching > training else "training"
    if found > INTAKE:
        bottleneck = "intake of the driver"
    elif r.use == "ray" and sent > r.publish_every * step:
        bottleneck = "publication"
    return Forecast(
        searchers=searchers,
        step=step,
        trainer_waits=1 - training / step,
        searchers_wait=0.0 if c.asynchronous else waits,
        lag=float(r.lag) if r.lag is not None else lag,
        found=found,
        bottleneck=bottleneck,
    )


def groups_a_step(config: Config) -> float:
    """Return the mean number of new groups that each step waits for."""
    t = config.trainer
    reused = t.batch_size / (config.max_reuse * config.sampling.samples)
    return max(config.fresh, reused)


def plan(
    config: Config, machine: Machine, given: Mapping[str, float], run: Path | None
) -> list[str]:
    """Return lines with the rates, the forecasts, and the memory of each process."""
    if config.runtime.searchers == 0:
        raise ValueError("runtime.searchers = 0: a plan is for runs that search; set a number")
    config = with_defaults(config)
    needs = MemoryEstimate.of(config, machine, int(given.get("prompt", 512)))
    rates, origin = rates_of(needs, given, run)
    published = needs.trainer_sizes.published_bytes
    own = forecast(config, rates, published, needs.searchers)
    one = forecast(config, rates, published, 1)
    training = own.step * (1 - own.trainer_waits)
    lines = [f"{name} = {value:,.4g} ({origin[name]})" for name, value in asdict(rates).items()]
    if config.runtime.use == "local" or config.runtime.lag is not None:
        at_once = config.runtime.prompts_per_task * config.runtime.concurrent_searches
        busy = ceil(groups_a_step(config) / at_once)
        what = "search and training take turns; searchers that find a batch in one round"
    else:
        busy = ceil(groups_a_step(config) / (one.found * training))
        what = "searchers that keep the trainer busy"
    busy = max(1, busy)  # without a limit on reuse, one is always enough
    lines.append(f"a step trains for {training:,.3g} s; {what}: {busy}")
    for count in sorted({busy, own.searchers, *FAR}):
        f = forecast(config, rates, published, count)
        devices = config.trainer.devices + count * needs.each
        hours = f", {devices * f.step * config.run.steps / 3600:,.3g} device-hours"
        if config.run.epochs is not None:  # the steps depend on the data, which are not read
            hours = ""
        far = " (extrapolated)" if count in FAR else ""
        lines.append(
            f"searchers = {count:,}{far}: {f.step:,.3g} s a step, trainer waits"
            f" {f.trainer_waits:.0%}, searchers wait {f.searchers_wait:.0%}, lag {f.lag:.1f} steps,"
            f" up to {f.found:,.3g} groups/s{hours}; limited by {f.bottleneck}"
        )
    return [*lines, *needs.lines()]

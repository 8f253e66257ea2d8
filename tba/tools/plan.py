"""Plan of a run: how many searchers keep its trainer busy, at given, measured or assumed rates.

A closed-form model: search and training are two flows, and the slower one determines the step time.
"""

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from math import ceil, inf
from pathlib import Path
from statistics import fmean

import numpy as np

from tba.config.plugins import resolve
from tba.config.schema import Config
from tba.models.pretrained import computes_in_bf16
from tba.runs.folder import METRICS, read, read_config
from tba.runs.summary import Summary
from tba.runtime.placement import available_cores, device_here
from tba.setup.machine import Machine, this_machine
from tba.setup.setup import RunSetup, check
from tba.types import collate_tokens
from tba.weights import PUBLICATIONS

FLOPS = {True: 150e12, False: 0.4e12}
"""Assumed useful FLOP/s of a trainer device, keyed by whether it is a GPU."""
LONG_PASS = 0.3
"""Seconds of a pass from which the rate of the trainer is measured."""
FEW = 32
"""Maximum length, in tokens, of the responses with which an engine's rate is measured."""


@dataclass(frozen=True)
class Rates:
    """Rates of a run's processes."""

    decode: float
    """Response tokens per second of a busy searcher, over all of its concurrent searches."""
    train: float
    """Response tokens per second of the trainer, over all of its devices."""
    response: float
    """Mean length of a response, in tokens."""
    judge: float
    """Seconds that a search waits for its rewards, while other searches generate."""
    network: float
    """Bandwidth for published weights, in GB/s."""


def rates_of(
    setup: RunSetup, machine: Machine, measured: Mapping[str, float], given: Mapping[str, float]
) -> tuple[Rates, dict[str, str]]:
    """Return the rates and their origins: given, else measured, else assumed."""
    c = setup.config
    needs = setup.needs(machine)
    passes = 8 if c.policy.gradient_checkpointing else 6
    speed = FLOPS[machine.gpus > 0] * c.trainer.devices / (passes * needs.sizes.parameters)
    own = c.sampling.max_tokens * c.trainer.group_size
    read = fmean(map(len, setup.first_prompts))
    read *= 1 if c.policy.share_prompt else c.trainer.group_size
    assumed = {
        "decode": 2000.0, "train": speed * own / (own + read), "response": c.sampling.max_tokens,
        "judge": 0.0, "network": 1.0,
    }  # fmt: skip
    origin = dict.fromkeys(assumed, "assumed")
    origin |= dict.fromkeys(measured, "measured") | dict.fromkeys(given, "given")
    return Rates(**assumed | dict(measured) | dict(given)), origin


def measured_in(run: Path) -> dict[str, float]:
    """Return the rates of a finished run; `decode` includes time for rewards and the reference."""
    summary = Summary.read(run)
    before = read_config(run)
    rows = [row for row in read(run / METRICS) if "step_time" in row]
    if not rows or summary.samples_generated == 0:
        what = "searched" if rows else "trained"
        raise ValueError(f"{run} has not {what}; name another run, or leave out --run")
    response = fmean(row["completions/mean_length"] for row in rows)
    busy = summary.seconds * before.runtime.most_searchers * (1 - summary.searcher_wait_fraction)
    step = fmean(row["step_time"] for row in rows[len(rows) // 4 :])
    return {
        "decode": summary.samples_generated * response / busy,
        "train": before.trainer.batch_size * response / step,
        "response": response,
        "judge": 0.0,
    }


def measured_training(setup: RunSetup) -> dict[str, float]:
    """Return the rate of a trainer in this process, from a pass with responses of maximum length.

    The pass has a group, or as many groups as in a step while it takes less than `LONG_PASS`.
    Loading the trainer checks the log-probs of the policy at the length of the longest sequence.
    """
    trainer = setup.trainer(device := device_here())
    t = setup.config.trainer
    length = setup.config.sampling.max_tokens
    prompt = round(fmean(map(len, setup.first_prompts)))
    tokens = prompt + t.group_size * (length - 1)  # of a group; the last token predicts nothing
    responses = max(1, min(t.group_size, t.pass_tokens * t.group_size // tokens))
    rng = np.random.default_rng(0)
    vocabulary = trainer.policy.model.config.get_text_config().vocab_size
    rows = list(rng.integers(vocabulary, size=(responses, max(2, length)), dtype=np.int32))
    first = rng.integers(vocabulary, size=prompt)
    groups, most = 1, max(1, min(t.groups, t.pass_tokens // tokens))
    while True:
        batch = collate_tokens([first] * groups, [rows] * groups)
        took = 0.0
        for _ in range(2):  # the first pass of each size is slow
            began = time.perf_counter()
            loss = trainer.policy.logp(batch).sum()
            loss.backward()
            loss.item()  # waits for a GPU
            took = time.perf_counter() - began
        if took > LONG_PASS or groups == most:
            break
        groups = min(most, 2 * groups)
    ranks = 1 if device == "cpu" else t.devices
    return {"train": ranks * groups * responses * length / took}


def measured_search(setup: RunSetup) -> dict[str, float]:
    """Return the rate of an engine in this process, from the first tokens of a search."""
    c = setup.config
    device = device_here()
    sampling = setup.search_setup().sampling
    plugin = resolve("engines", "engine", c.engine.use, c.engine.options)
    engine = plugin.build(
        c.policy, setup.text, device, computes_in_bf16(c.policy, device), sampling
    )
    at_once = c.runtime.concurrent_searches if setup.engine.joins_batches else 1
    prompts = list(islice(cycle(setup.first_prompts), c.runtime.prompts_per_task * at_once))
    tokens = min(sampling.max_tokens, FEW)
    took = 0.0
    with closing(engine):
        for length in (1, tokens):  # the first call in a process is slow
            began = time.perf_counter()
            engine.generate(prompts, replace(sampling, max_tokens=length), c.run.seed)
            took = time.perf_counter() - began
    return {"decode": len(prompts) * sampling.samples * tokens / took}


def time_of(config: Config, rates: Rates, origin: Mapping[str, str]) -> str:
    """Return a line with the seconds for which a step trains."""
    seconds = config.trainer.batch_size * rates.response / rates.train
    shown = f"{seconds:.2g}" if seconds < 10 else f"{seconds:,.0f}"
    return (
        f"time: about {shown} s a step ({origin['train']}), without search, if responses"
        f" have {rates.response:,.4g} tokens"
    )


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
    if r.use == "ray" and sent > r.publish_every * step:
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
    config: Config, planned: Machine | None, given: Mapping[str, float], run: Path | None
) -> list[str]:
    """Return lines with the rates, the forecasts, and the memory of each process.

    Without `planned`, this machine is meant, and rates are measured here unless a `run` has them.
    Raises ValueError for a rate that is not positive, or a run that has not ended.
    """
    if config.runtime.searchers == 0:
        raise ValueError("runtime.searchers = 0: a plan is for runs that search; set a number")
    for name, value in given.items():
        if not 0 <= value < inf or (value == 0 and name != "judge"):
            raise ValueError(f"--{name} {value:g}: give a positive number")
    measured = {} if run is None else measured_in(run)
    setup = check(config, planned=planned)
    c = setup.config
    machine = planned or this_machine()
    needs = setup.needs(machine)
    if planned is None and run is None and not needs.advice():
        measured = measured_search(setup) | measured_training(setup)
    rates, origin = rates_of(setup, machine, measured, given)
    published = needs.trainer_sizes.published_bytes
    own = forecast(c, rates, published, needs.searchers)
    # searchers that together find, while a step is trained, the groups that it needs
    busy = ceil(groups_a_step(c) * own.searchers / (own.found * own.step * (1 - own.trainer_waits)))
    busy = max(1, busy)  # without a limit on reuse, one is always enough
    # searchers for which the machine has GPUs, or else cores
    room = needs.searchers
    if c.runtime.use != "local" and c.runtime.address is None:  # a cluster is not known here
        free = (machine.gpus - c.trainer.devices) // needs.each
        room = max(1, free if machine.gpus else len(available_cores()) - 1)
    more = f", but the machine has room for {room}" if busy > room else ""
    lines = [f"{name} = {value:,.4g} ({origin[name]})" for name, value in asdict(rates).items()]
    lines += [time_of(c, rates, origin), f"searchers that keep the trainer busy: {busy:,}{more}"]
    for count in sorted({own.searchers, min(busy, room), room if machine.gpus else 1}):
        f = forecast(c, rates, published, count)
        hours = (c.trainer.devices + count * needs.each) * f.step * c.run.steps / 3600
        lines.append(
            f"searchers = {count:,}: {f.step:,.3g} s a step, trainer waits"
            f" {f.trainer_waits:.0%}, searchers wait {f.searchers_wait:.0%}, lag {f.lag:.1f} steps,"
            f" up to {f.found:,.3g} groups/s, {hours:,.3g} device-hours; limited by {f.bottleneck}"
        )
    return [*lines, *needs.lines()]

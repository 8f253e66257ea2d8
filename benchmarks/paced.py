"""A paced engine: decoding takes 3 times as long as a training step, with a long tail.

    python benchmarks/paced.py    # 5 minutes on two idle cores

The `scripted` engine waits as long as a GPU would decode, and computes nothing. The asynchronous
side has 4 searchers. The synchronous side decodes a batch in one call, which takes as long as one
call of a searcher: the best that a synchronous loop could do. Both generate as many samples in a
step, and both train the same random model with the same number of threads. Its steps take most of
a second, so that the bookkeeping of the searchers, who share the two cores with the trainer, counts
as little as beside a real model. At best, the asynchronous loop is limited by its training steps
alone: the synchronous one then takes 1 + 3 = 4 times as long.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import _measure
from _models import SMALL, save_random

GROUPS = 32
SAMPLES = 16
SEARCHERS = 4
SLOWER = 3
"""Seconds of decoding for each second of a training step."""
TAIL = 0.5
"""Standard deviation of the logarithm of the decoding time."""
NAME = f"scripted engine, decoding {SLOWER} times as long as a training step, {SEARCHERS} searchers"
WARMUP = 5
STEPS = 50
CALIBRATION = 15
PARTS = 5


def main() -> None:
    parser = _measure.arguments(__doc__)
    parser.add_argument("--one", choices=("calibrate", "asynchronous", "synchronous"))
    parser.add_argument("--latency", type=float, default=0.0, help="mean seconds of decoding")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    steps = 10 if options.tiny else options.steps
    if options.one:
        print(json.dumps(measure(options.one, options.model, options.latency, steps)))
        return
    with tempfile.TemporaryDirectory() as folder:
        save_random(Path(folder), SMALL)
        compare(folder, steps, options)


def compare(model: str, steps: int, options: argparse.Namespace) -> None:
    """Measure a training step, then both sides with decoding that takes three times as long."""
    command = [sys.executable, __file__, "--model", model, "--steps", str(steps), "--one"]
    latency = 0.0
    for steps_taken in (steps, CALIBRATION):  # a step that follows a pause takes longer
        calibrate = [*command, "calibrate", "--latency", str(latency), "--steps", str(steps_taken)]
        latency = SLOWER * median(_measure.run_json(calibrate, 900)["step_times"])
    print(f"a training step takes {latency / SLOWER:.3f} s; decoding {latency:.3f} s on average")
    deadline = 600 + 10 * steps * latency
    sides = {}
    for side in ("asynchronous", "synchronous"):
        full = [*command, side, "--latency", str(latency)]
        sides[side] = _measure.run_json(full, deadline)
        _measure.progress(side, 1, 1, sides[side]["seconds"])
    _measure.record(__file__, rows_of(sides["asynchronous"], sides["synchronous"]), options)


def rows_of(ours: dict, peer: dict) -> list[_measure.Row]:
    note = (
        f"training steps alone took {median(ours['step_times']):.3f} and"
        f" {median(peer['step_times']):.3f} s; samples generated in a step:"
        f" {ours['samples_a_step']:.0f} and {peer['samples_a_step']:.0f}"
    )
    few = len(ours["parts"]) < 5
    return [
        _measure.row(
            f"{NAME}: seconds a step", ours["parts"], "s", peer["parts"],
            peer_is="ours, synchronous", goal="ratio >= 3.5", limit=1 + SLOWER, note=note,
            fewer=few,
        ),
        _measure.row(
            f"{NAME}: share of the time in which the trainer waits",
            ours["waited"], "of the time", goal="value <= 0.01",
        ),
    ]  # fmt: skip


def measure(side: str, model: str, latency: float, steps: int) -> dict:
    """Run one side, and return the seconds of its steps in parts of the run."""
    import torch

    from tba.open import open_run
    from tba.run import train

    torch.set_num_threads(1)
    samples = []
    times = []
    generated = []
    with (
        tempfile.TemporaryDirectory() as folder,
        open_run(config(side, model, latency, folder)) as opened,
    ):
        log = opened.log_step

        def recorded(metrics: dict[str, float], groups: list) -> None:
            log(metrics, groups)
            samples.append(time.perf_counter())
            times.append(metrics["step_time"])
            generated.append(opened.searchers.stats.counts["samples_generated"])
            if len(times) == WARMUP + steps:
                opened.stop.requested = True

        opened.log_step = recorded
        with opened.tracker.clock():
            train(opened)
        waited = opened.tracker._total["waited"] / (samples[-1] - samples[0])
    size = max(1, steps // PARTS)
    marks = [samples[WARMUP - 1 + i * size] for i in range(steps // size + 1)]
    return {
        "seconds": samples[-1] - samples[WARMUP - 1],
        "parts": [(b - a) / size for a, b in pairwise(marks)],
        "step_times": times[WARMUP:],
        "samples_a_step": (generated[-1] - generated[WARMUP - 1]) / steps,
        "waited": waited,
    }


def config(side: str, model: str, latency: float, folder: str):
    from tba.config.schema import load

    # the mean of exp(tail * normal) is exp(tail^2 / 2): `latency` shall be the mean of the pauses
    scale = latency / math.exp(TAIL**2 / 2)
    asynchronous = side == "asynchronous"
    settings = [
        f"run.folder={Path(folder) / 'run'}", "run.steps=100000",
        "task.use=arithmetic", f"policy.model={model}", "sampling.max_tokens=6",
        f"sampling.samples={SAMPLES}",
        f"trainer.batch_size={GROUPS * SAMPLES}", f"trainer.group_size={SAMPLES}",
        "trainer.learning_rate=1e-6", "strategy.use=recent",
        "engine.use=scripted", "engine.own_reference=true", f"engine.latency={scale}",
        f"engine.tail={TAIL}", f"engine.answers={[str(n) for n in range(100, 164)]}",
        f"runtime.use={'ray' if asynchronous else 'local'}", "runtime.cores=share",
        "runtime.max_reuse=inf",  # asynchronous: neither side waits for the other
        "eval.prompts=0", "checkpoint.every=0",
        "log.console=off", "log.report_to=[]", "log.sample_every=0",
    ]  # fmt: skip
    if asynchronous:
        # in the time of a step, 4 searchers finish 4 / 3 tasks: of 24 prompts, as many as a batch
        each = GROUPS * SLOWER // SEARCHERS
        settings += [f"runtime.searchers={SEARCHERS}", f"runtime.prompts_per_task={each}",
                     "runtime.concurrent_searches=1"]  # fmt: skip
    else:
        settings.append(f"runtime.prompts_per_task={GROUPS}")
    return load(None, settings)


if __name__ == "__main__":
    main()

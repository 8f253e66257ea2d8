"""Time to a score on the reference run, at every score: asynchronous, synchronous, and TRL.

    python benchmarks/reference_run.py --parts full    # two hours on two idle cores
    python benchmarks/reference_run.py --parts lora    # continues; finished runs are kept
    python benchmarks/reference_run.py --steps 15      # only the seconds of a step: 3 minutes

Each side's learning rate comes from the same grid, on seed 0. A run of the search ends when it has
taken longer than the best one so far took to the goal. A best rate at the grid's edge is refused:
the grid is extended. TRL's faster options (attention, micro-batches) are found first, by the
seconds of a step. Then come two more seeds; the row compares the medians of three.

The clock runs from the first search or generation, when all models are loaded. Copies of the
weights, which stop the clock for a tenth of a second, are evaluated after the run by the same code
for all sides, so that no evaluation is timed. Every finished run is a line of `runs/*.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from math import inf
from statistics import median

import _measure
import _thresholds
from _runs import (
    BASE,
    HERE,
    SIDES,
    Best,
    Sums,
    best_of,
    read_runs,
    reference_runs,
    rounded,
    search_table,
    time_to_goal,
    with_speeds,
)
from _sums import PendingReply, Side

GRID = {False: (2e-5, 1e-5, 4e-5), True: (3e-4, 6e-4, 1.5e-4)}
"""Learning rates, without and with LoRA, the middle one first."""
SPEED = HERE / "runs" / "trl_speed.jsonl"
STEPS = HERE / "runs" / "reference_steps.jsonl"
NEVER = 1e6
SPEEDS = (
    (("attn_implementation=eager",), ("attn_implementation=sdpa",)),
    ((), ("per_device_train_batch_size=32", "gradient_accumulation_steps=4")),
    ((), ("memory=kept",)),
)
"""TRL's options that change the time of a step only; the best of each line stays for the next."""
USUAL = (
    "attn_implementation=eager", "per_device_train_batch_size=32", "gradient_accumulation_steps=4",
)  # fmt: skip
"""TRL's options where none are searched."""
EDGES = 2
"""Times that a grid may be extended."""
PATIENCE = 2.5
"""Length of the runs with other seeds, in times to the goal of the first."""


def main() -> None:
    parser = _measure.arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=("full", "lora"), default=["full"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", nargs="+", type=float, help="only these: no search")
    parser.add_argument("--seconds", type=float, default=inf, help="end each run after so many")
    parser.add_argument("--steps", type=int, help="measure so many steps of ours, asynchronous")
    parser.add_argument("--draw", action="store_true", help="only write rows and figure again")
    options = parser.parse_args()
    if not options.draw:
        lab = Sums(options)
        if options.steps:
            measure_steps(lab, options)
        else:
            for part in options.parts:
                compare(lab, part == "lora", options)
    if options.tiny:
        print("a tiny run: nothing is kept")
        return
    keep(options)


def compare(lab: Sums, lora: bool, options: argparse.Namespace) -> None:
    """Find each side's best rate, and run it with the other seeds."""
    for side in options.sides or (("asynchronous", "trl") if lora else SIDES):
        best, seconds = search(lab, side, lora)
        for seed in range(1, 1 if options.tiny else options.seeds):
            job = lab.job(side, lora, best.rate, seed, options=best.options)
            longest = min(job.seconds, options.seconds, PATIENCE * seconds)
            lab.run(replace(job, seconds=longest))


def measure_steps(lab: Sums, options: argparse.Namespace) -> None:
    """Run our asynchronous side for some steps with each seed, without evaluations."""
    best = best_of(reference_runs(read_runs(), "asynchronous", lora=False))
    STEPS.unlink(missing_ok=True)
    for seed in range(options.seeds):
        job = lab.job("asynchronous", False, best.rate, seed, options=best.options)
        result = lab.carry_out(replace(job, every=0.0, seconds=600.0, steps=options.steps))
        kept = {"seed": seed, "points": result["points"], "gflops": _measure.matmul_speed()}
        with STEPS.open("a") as file:
            file.write(json.dumps(rounded(kept)) + "\n")


def search(lab: Sums, side: Side, lora: bool) -> tuple[Best, float]:
    """Return the rate that reaches the goal first, not at the grid's edge, and its seconds."""
    fixed = lab.options.tiny or bool(lab.options.rates)
    fast = BASE[side]
    if side == "trl":
        fast = fastest_known(lora) if fixed else fastest_options(lab, lora)
    times: dict[float, float] = {}

    def measure(rate: float) -> float:
        job = lab.job(side, lora, rate, 0, options=fast)
        longest = min(job.seconds, lab.options.seconds)
        seconds = min([longest, *(t + job.every for t in times.values())])
        return time_to_goal(lab.run(replace(job, seconds=seconds)))

    for rate in lab.options.rates or (GRID[lora][:1] if lab.options.tiny else GRID[lora]):
        times[rate] = measure(rate)
    for _ in range(EDGES):
        best = min(times, key=times.__getitem__)
        lowest = min(times)
        highest = max(times)
        if fixed or lowest < best < highest:
            break
        further = best / 2 if best == lowest else best * 2
        times[further] = measure(further)
    rate = min(times, key=times.__getitem__)
    return Best(rate, fast), times[rate]


def fastest_options(lab: Sums, lora: bool) -> tuple[str, ...]:
    """Return those of TRL's options that change the time of a step only, at their best."""
    known = {tuple(r["options"]): r["s_a_step"] for r in read_runs(SPEED) if r["lora"] == lora}
    best: tuple[str, ...] = ()
    for choices in SPEEDS:
        times = {}
        for choice in choices:
            options = (*best, *choice)
            if options not in known:
                job = lab.job("trl", lora, GRID[lora][0], 0, options=options)
                known[options] = speed(lab, job)
            times[options] = known[options]
            print(f"  TRL, {' '.join(options)}: {times[options]:.1f} s a step", file=sys.stderr)
        best = min(times, key=times.__getitem__)
    return best


def fastest_known(lora: bool) -> tuple[str, ...]:
    """Return those of TRL's options that were the fastest so far, or the usual ones."""
    tried = [row for row in read_runs(SPEED) if row["lora"] == lora]
    return tuple(min(tried, key=lambda row: row["s_a_step"])["options"]) if tried else USUAL


def speed(lab: Sums, job: PendingReply) -> float:
    """Return the seconds of a step, and keep them; infinity if the options do not work here."""
    try:
        seconds = lab.seconds_a_step(job)
    except RuntimeError as error:
        print(f"  {' '.join(job.options)}: {error}", file=sys.stderr)
        seconds = inf
    SPEED.parent.mkdir(exist_ok=True)
    with SPEED.open("a") as file:
        row = {"lora": job.lora, "options": job.options, "s_a_step": min(seconds, NEVER)}
        file.write(json.dumps(row) + "\n")
    return seconds


def keep(options: argparse.Namespace) -> None:
    """Write the rows, the search and the figure from the runs that are kept."""
    runs = read_runs()
    rows = [row for lora in (False, True) for row in rows_of(runs, lora)]
    _measure.record(__file__, rows, options)
    print(search_table(runs))
    _thresholds.write()


def rows_of(runs: list[dict], lora: bool) -> list[_measure.Row]:
    """Return the rows of full fine-tuning or LoRA, for the sides that have been run."""
    own = {side: reference_runs(runs, side, lora) for side in SIDES}
    if not own["trl"]:
        return []
    best = {side: best_of(each) for side, each in own.items() if each}
    chosen = {side: [run for run in own[side] if best[side].is_of(run)] for side in best}
    rows = []
    for side in SIDES[:2]:
        if side not in chosen:
            continue
        compared = _thresholds.Comparison(chosen[side], chosen["trl"])
        if not compared.reached:
            print(f"there is no score that {side} and TRL reach: no row")
            continue
        note = f"rate {best[side].rate:g}, TRL's {best['trl'].rate:g}; {len(chosen[side])} seeds"
        for each in (side, "trl"):
            tried = [run["rate"] for run in own[each]]
            if best[each].rate in (min(tried), max(tried)):
                note += f"; {each}: the rate is at the edge of those tried"
        name = f"reference run, {'LoRA' if lora else 'full'}, {side}: time to a score"
        goal = "ratio >= 4" if side == "asynchronous" else None
        rows.append(_thresholds.row(name, compared, note, goal))
        if (side, lora) == ("asynchronous", False):
            rows.append(step_row(chosen[side]))
    return rows


def step_row(runs: list[dict]) -> _measure.Row:
    """Return the row of the trainer's part of a step, without the first two, which fill memory.

    It is of the runs with `--steps`, if there are any.
    """
    runs = read_runs(STEPS) or runs
    steps = [median(point["step_time"] for point in run["points"][2:]) for run in runs]
    told = with_speeds(f"the median of each of {len(runs)} runs, while a searcher runs", runs, runs)
    name = "reference run, full, asynchronous: a training step on one core"
    return _measure.row(name, steps, "s", goal="value <= 3", fewer=True, **told)


if __name__ == "__main__":
    main()

"""Reward latency of 0 / .3 / 1 / 3 s per answer: asynchronous, synchronous, and TRL.

    python benchmarks/reward_latency.py                  # 35 minutes on two idle cores
    python benchmarks/reward_latency.py --score 1        # time to sampled .50: 20 minutes
    python benchmarks/reward_latency.py --newest --latencies 3
    python benchmarks/reward_latency.py --newest --latencies 3 --searches 3
    python benchmarks/reward_latency.py --newest --latencies 3 --compiled

Both sides call the same `async` judge, which awaits all completions of its call at once. Measured
is the time in which N samples are generated, scored and trained on, each counted once however often
replay draws it: windows of 256 samples, after a first one that is not counted. With `--score`, the
runs go on to held-out sampled .50, at the rates that `reference_run.py` has found. These draw a
tenth of the groups from all of replay, where they may have been trained on; with `--newest`, all
groups are recent. With `--searches`, our asynchronous side has another number of searches that wait
side by side. With `--compiled`, torch.compile compiles the model of each side. A row has the
fastest of a side's runs.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import _measure
import _thresholds
from _runs import (
    BASE,
    HERE,
    SECONDS,
    SIDES,
    Best,
    Sums,
    best_of,
    read_runs,
    reference_runs,
    rounded,
    with_speeds,
)
from _sums import RECIPES, Side

RATES = HERE / "runs" / "reward_latency.jsonl"
NEWEST = HERE / "runs" / "reward_latency_newest.jsonl"
LATENCIES = (0.0, 0.3, 1.0, 3.0)
WINDOW = 2 * RECIPES["sums"].batch
WINDOWS = 5
GOALS = {1.0: "ratio >= 2", 3.0: "ratio >= 4"}
PEERS: dict[Side, str] = {"trl": "TRL", "synchronous": "ours, synchronous"}
WAITING: dict[Side, tuple[str, ...]] = {
    "asynchronous": ("reward.concurrency=64",),
    "synchronous": ("reward.concurrency=64",),
    "trl": (),
}
"""Settings where rewards take time, beside those that the reference run has found."""
SEARCHES = {0.0: 1, 0.3: 2, 1.0: 3, 3.0: 2}
"""Our concurrent searches, by latency, unless `--searches` is given."""
EVERY_GROUP = "strategy.filter_equal=false"
"""Setting of ours with which samples are counted: those that are filtered out would not count."""
ONLY_RECENT = "strategy.recent=1.0"
COMPILED: dict[Side, str] = {
    "asynchronous": "trainer.compile=true",
    "synchronous": "trainer.compile=true",
    "trl": "torch_compile=true",
}


def main() -> None:
    parser = _measure.arguments(__doc__)
    parser.add_argument("--latencies", nargs="+", type=float, default=LATENCIES)
    parser.add_argument("--score", nargs="+", type=float, help="latencies of runs to .50")
    parser.add_argument("--newest", action="store_true", help="draw recent groups only")
    parser.add_argument("--searches", type=int, help="our concurrent searches")
    parser.add_argument("--compiled", action="store_true", help="compile the model of each side")
    parser.add_argument("--draw", action="store_true", help="only write rows and figure again")
    options = parser.parse_args()
    if not options.draw:
        lab = Sums(options)
        if options.score:
            to_the_goal(lab, options.score)
        else:
            windows(lab, options.latencies[:1] if options.tiny else options.latencies)
    if options.tiny:
        print("a tiny run: nothing is kept")
        return
    rows = [*rate_rows(RATES), *rate_rows(NEWEST, ", recent groups only"), *score_rows()]
    _measure.record(__file__, rows, options)
    _thresholds.write()


def windows(lab: Sums, latencies: list[float]) -> None:
    """Measure the windows of each side at each latency that has not been measured."""
    newest = lab.options.newest
    searches = lab.options.searches
    path = lab.scratch / "rates.jsonl" if lab.options.tiny else (NEWEST if newest else RATES)
    path.parent.mkdir(exist_ok=True)
    for latency in latencies:
        for side in SIDES if searches is None else ("asynchronous",):
            kind = side, latency, lab.options.compiled, searches
            if any(kind_of(run) == kind for run in read_runs(path)):
                continue
            best = chosen(side)
            own = (*waiting(side, latency, searches), *(() if side == "trl" else (EVERY_GROUP,)))
            if newest and side == "asynchronous":
                own = (*own, ONLY_RECENT)
            if lab.options.compiled:
                own = (*own, COMPILED[side])
            job = lab.job(side, False, best.rate, 0, latency, (*best.options, *own))
            steps = 2 * (WINDOWS + 1)
            if side == "asynchronous":
                steps *= 2  # where replay draws samples again, a step counts for less
            result = lab.carry_out(replace(job, every=0.0, seconds=1800.0, steps=steps))
            seconds = times_of(result["points"])
            kept = {
                "side": side, "latency": latency, "windows": seconds, "points": result["points"],
                "searchers": result.get("searchers"), "versions": _measure.versions(),
                "gflops": _measure.matmul_speed(),
                "dtype": "bf16" if _measure.in_bf16() else "fp32",
            }  # fmt: skip
            if lab.options.compiled:
                kept["compiled"] = True
            if searches is not None:
                kept["at_once"] = searches
            with path.open("a") as file:
                file.write(json.dumps(rounded(kept)) + "\n")
            print(f"{side}, {latency:g} s: {median(seconds):.1f} s for {WINDOW} samples")


def kind_of(run: dict[str, Any]) -> tuple[Side, float, bool, int | None]:
    """Return what was measured in a run."""
    return run["side"], run["latency"], "compiled" in run, run.get("at_once")


def at_once(run: dict[str, Any]) -> int:
    """Return the number of concurrent searches in an asynchronous run."""
    return run.get("at_once", SEARCHES[run["latency"]])


def waiting(side: Side, latency: float, searches: int | None = None) -> tuple[str, ...]:
    """Return a side's settings for rewards that take so many seconds."""
    number = f"runtime.concurrent_searches={searches or SEARCHES[latency]}"
    return (*WAITING[side], number) if side == "asynchronous" else WAITING[side]


def chosen(side: Side) -> Best:
    """Return rate and options that the reference run has found; before it has run, usual ones."""
    runs = reference_runs(read_runs(), side, lora=False)
    if not any(run["seed"] == 0 for run in runs):
        return Best(1e-5, BASE[side])
    return best_of(runs)


def times_of(points: list[dict[str, Any]]) -> list[float]:
    """Return the seconds of each window of 256 samples but the first, interpolated in a step."""
    marks = []
    done = {"samples": 0.0, "seconds": 0.0}
    for point in points:
        while point["samples"] >= (len(marks) + 1) * WINDOW:
            wanted = (len(marks) + 1) * WINDOW - done["samples"]
            part = wanted / (point["samples"] - done["samples"])
            marks.append(done["seconds"] + part * (point["seconds"] - done["seconds"]))
        if point["samples"] > done["samples"]:
            done = point
    seconds = [b - a for a, b in pairwise(marks)]
    return seconds[:WINDOWS]


def to_the_goal(lab: Sums, latencies: list[float]) -> None:
    """Run each side to the goal at these latencies."""
    for latency in latencies:
        for side in SIDES:
            best = chosen(side)
            job = lab.job(
                side, False, best.rate, 0, latency, (*best.options, *waiting(side, latency))
            )
            longer = 1 + latency / {"asynchronous": 10, "synchronous": 6, "trl": 15}[side]
            lab.run(replace(job, seconds=SECONDS[side] * longer))


def rate_rows(path: Path, kind: str = "") -> list[_measure.Row]:
    """Return the rows of windows, whose names end with `kind`."""
    slowest_first = sorted(read_runs(path), key=lambda run: -median(run["windows"]))
    measured = {(run["latency"], run["side"]): run for run in slowest_first}
    rows = []
    for latency in LATENCIES:
        for peer, peer_is in PEERS.items():
            if not {(latency, "asynchronous"), (latency, peer)} <= measured.keys():
                continue
            name = f"{latency:g} s of reward latency: {WINDOW} samples"
            name += f" generated, scored, trained on{kind}"
            ours = measured[latency, "asynchronous"]
            other = measured[latency, peer]
            goal = GOALS.get(latency) if peer == "trl" else None
            note = f"{WINDOWS} windows of one run"
            for side, run in (("ours", ours), (peer_is, other)):
                note += f"; compiled: {side}" if "compiled" in run else ""
            tried = {
                at_once(run) for run in read_runs(path) if kind_of(run)[:2] == kind_of(ours)[:2]
            }
            if len(tried) > 1:
                numbers = ", ".join(map(str, sorted(tried)))
                note += f"; {at_once(ours)} concurrent searches, of {numbers} tried"
            told = with_speeds(note, [ours], [other])
            row = _measure.row(
                name, ours["windows"], "s", other["windows"], peer_is=peer_is, goal=goal, **told
            )
            rows.append(row)
    return rows


def score_rows() -> list[_measure.Row]:
    runs = read_runs()
    rows = []
    for latency in LATENCIES:
        own = {}
        for side in SIDES:
            for run in reference_runs(runs, side, lora=False, latency=latency):
                own[side] = run
        for peer, peer_is in PEERS.items():
            if {"asynchronous", peer} <= own.keys():
                name = f"{latency:g} s of reward latency: time to a score"
                compared = _thresholds.Comparison([own["asynchronous"]], [own[peer]], peer_is)
                rows.append(_thresholds.row(name, compared, "one seed"))
    return rows


if __name__ == "__main__":
    main()

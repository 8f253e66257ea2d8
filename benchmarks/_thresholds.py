"""Time to a score, at every score: the seconds of two sides, and the range of their ratio.

    python benchmarks/_thresholds.py

writes the section of benchmarks/README.md and the figure again, from the runs that are kept, and
prints the ranges that README.md quotes. A time is that of the first crossing, linear between
evaluations, and the median over seeds. A side has no time to a score if its median run stays below
it, or if another run ended below it sooner: that run might have been faster. One score says little,
because scores swing by their standard error: ranges are over all scores that both sides reach, the
smallest ratio first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from statistics import fmean, median, stdev
from typing import Any

import _measure
from _runs import (
    HERE,
    RUNS,
    SIDES,
    best_of,
    read_runs,
    reference_runs,
    steps_of,
    time_or_length,
    time_to_goal,
    with_speeds,
)
from _sums import Side

BEGIN = "<!-- The section is written by benchmarks/_thresholds.py. -->"
END = "<!-- End of the section. -->"
PURE = HERE / "runs" / "pure_compute.jsonl"
WHOLE = HERE / "runs" / "whole_run.jsonl"
FIGURE = HERE.parent / "docs" / "reference_run.png"
SCORES = tuple(i / 100 for i in range(30, 51))
"""Scores of the reference run."""
PURE_SCORES = tuple(i / 100 for i in range(50, 91))
"""Scores of pure compute, whose runs of the search end soon after .90."""
SHOWN = 5
"""Every so many scores have a row in the table."""
LOWEST = 35
"""Lowest score in % of runs of 100 steps; the highest one is the lower of two sides' ends."""
ENDS = 5
"""Evaluations whose mean is the end of a run."""
SEARCH_SEED = 100
"""Seed of the search of `whole_run.py`."""
SEEDS = 3
NAMES = {"asynchronous": "asynchronous", "synchronous": "synchronous", "trl": "TRL 1.16"}
COLORS = {"asynchronous": "#1f77b4", "synchronous": "#2ca02c", "trl": "#d62728"}
Run = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """Median seconds to a score, of ours and of the peer; inf where it is not reached."""

    score: float
    ours: float
    peer: float

    @property
    def ratio(self) -> float:
        return self.peer / self.ours


@dataclass(frozen=True)
class Comparison:
    """Our runs and those of a peer, one for each seed, at every score."""

    ours: Sequence[Run]
    peer: Sequence[Run]
    peer_is: str = "TRL"
    scores: Sequence[float] = SCORES

    @property
    def points(self) -> list[Point]:
        points = []
        for score in self.scores:
            points.append(Point(score, time_to(score, self.ours), time_to(score, self.peer)))
        return points

    @property
    def reached(self) -> list[Point]:
        """Return the points at scores that both sides reach."""
        return [p for p in self.points if max(p.ours, p.peer) < inf]

    @property
    def least(self) -> Point:
        """Return the point with the smallest ratio."""
        return min(self.reached, key=lambda p: p.ratio)

    @property
    def range(self) -> str:
        """Return the smallest and the largest ratio, and the scores that they are from."""
        largest = max(p.ratio for p in self.reached)
        first, last = self.reached[0].score, self.reached[-1].score
        ratios = f"{factor(self.least.ratio)} to {factor(largest)} times"
        return f"{ratios} at any score from {show(first)} to {show(last)}"

    @property
    def by_pair(self) -> str:
        """Return the smallest and the largest ratio of two runs that both reach the score."""
        times = [
            (time_to_goal(ours, point.score), time_to_goal(peer, point.score))
            for ours, peer in product(self.ours, self.peer)
            for point in self.reached
        ]
        ratios = [peer / ours for ours, peer in times if max(ours, peer) < inf]
        return f"{factor(min(ratios))} to {factor(max(ratios))} times for pairs of runs"

    @property
    def missed(self) -> str:
        """Return the scores that a side does not reach, as a sentence; empty if it reaches all."""
        told = []
        for side, times in (
            ("us", [(p.score, p.ours) for p in self.points]),
            (self.peer_is, [(p.score, p.peer) for p in self.points]),
        ):
            never = [show(score) for score, seconds in times if seconds == inf]
            if never:
                told.append(f"not reached by {side} in the time of its runs: {', '.join(never)}")
        return "; ".join(told)


def time_to(score: float, runs: Sequence[Run]) -> float:
    """Return the median seconds to a score; inf if it is not known."""
    times = [time_to_goal(run, score) for run in runs]
    ends = [r["curve"][-1]["seconds"] for r, time in zip(runs, times, strict=True) if time == inf]
    typical = median(times)
    return typical if typical <= min(ends, default=inf) else inf


def show(score: float, digits: int = 2) -> str:
    return f"{score:.{digits}f}".removeprefix("0")


def factor(ratio: float) -> str:
    """Return a ratio with one digit, or two if one would hide that it is below 1."""
    return f".{int(100 * ratio)}" if 0.95 <= ratio < 1 else show(ratio, 1)


def chosen(side: Side, lora: bool = False, latency: float | None = None) -> list[Run]:
    """Return a side's runs of the reference run at its best rate, if there are any."""
    own = reference_runs(read_runs(RUNS), side, lora, latency)
    if not any(run["seed"] == 0 for run in own):
        return []
    best = best_of(own)
    return [run for run in own if best.is_of(run)]


def seeded() -> dict[tuple[str, str], list[Run]]:
    """Return the runs of pure compute that have all seeds, by side and objective."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in read_runs(PURE):
        groups.setdefault((run["side"], str(run["rate"]), *run["options"]), []).append(run)
    found = {}
    for runs in groups.values():
        if len(runs) >= SEEDS:
            objective = "dr_grpo" if "objective=dr_grpo" in runs[0]["options"] else "tb"
            found[runs[0]["side"], objective] = runs
    return found


def end(run: Run) -> float:
    """Return the mean score of the last evaluations."""
    return fmean(point["score"] for point in run["curve"][-ENDS:])


def whole() -> dict[str, list[Run]]:
    """Return the runs of 100 steps by side, without those of the search."""
    runs = [run for run in read_runs(WHOLE) if run["seed"] != SEARCH_SEED]
    return {side: own for side in SIDES if (own := [r for r in runs if r["side"] == side])}


def whole_comparisons() -> list[Comparison]:
    """Return comparisons of our asynchronous runs of 100 steps with the other sides."""
    by_side = whole()
    ours = by_side.pop("asynchronous", [])
    found = []
    for side in ("trl", "synchronous"):
        if ours and (peer := by_side.get(side)):
            highest = min(fmean(map(end, runs)) for runs in (ours, peer))
            scores = tuple(i / 100 for i in range(LOWEST, int(100 * highest) + 1))
            found.append(Comparison(ours, peer, "TRL" if side == "trl" else side, scores))
    return found


def ends_table() -> str:
    """Return where the runs of 100 steps end, as a table."""
    lines = ["| 100 steps, all weights | end | by seed | s a step |", "| --- | --- | --- | --- |"]
    for side, runs in whole().items():
        ends = [end(run) for run in sorted(runs, key=lambda run: run["seed"])]
        error = f" ± {show(stdev(ends) / len(ends) ** 0.5, 3)}" if len(ends) > 1 else ""
        by_seed = ", ".join(show(value, 3) for value in ends)
        seconds = median(s for run in runs for s in steps_of(run))
        mean = show(fmean(ends), 3)
        lines.append(f"| {NAMES[side]} | {mean}{error} | {by_seed} | {seconds:.1f} |")
    return "\n".join(lines)


def comparisons() -> dict[str, list[Comparison]]:
    """Return all comparisons, by what was run: with TRL, and with our synchronous side."""
    found: dict[str, list[Comparison]] = {}
    for title, lora, latency in (
        ("All weights", False, None),
        ("All weights, rewards of 1 s", False, 1.0),
        ("LoRA", True, None),
    ):
        ours = chosen("asynchronous", lora, latency)
        pairs = [
            Comparison(ours, chosen("trl", lora, latency)),
            Comparison(ours, chosen("synchronous", lora, latency), "synchronous"),
        ]
        found[title] = [c for c in pairs if c.ours and c.peer]
    pure = seeded()
    ours = pure.get(("asynchronous", "tb"), [])
    pairs = [
        Comparison(ours, pure.get(("trl", "tb"), []), "TRL", PURE_SCORES),
        Comparison(ours, pure.get(("synchronous", "tb"), []), "synchronous", PURE_SCORES),
    ]
    found["Pure compute"] = [c for c in pairs if c.ours and c.peer]
    found["All weights, 100 steps"] = whole_comparisons()
    return {title: pairs for title, pairs in found.items() if pairs}


def samples_a_second(runs: Sequence[Run]) -> float:
    """Return the different samples that are trained on in a second, the median over runs."""
    speeds = []
    for run in runs:
        first, last = run["points"][0], run["points"][-1]
        samples = last["samples"] - first["samples"]
        speeds.append(samples / (last["seconds"] - first["seconds"]))
    return median(speeds)


def row(name: str, compared: Comparison, note: str, goal: str | None = None) -> _measure.Row:
    """Return the row of a comparison, at the score with the smallest ratio."""
    score = compared.least.score
    ours = [time_or_length(run, score) for run in compared.ours]
    peer = [time_or_length(run, score) for run in compared.peer]
    more = f"; to {show(score)}, the least favourable: {compared.range}"
    if compared.missed:
        more += f", {compared.missed}"
    told = with_speeds(note + more, compared.ours, compared.peer)
    peer_is = compared.peer_is
    return _measure.row(name, ours, "s", peer, peer_is=peer_is, goal=goal, fewer=True, **told)


def section() -> str:
    """Return the section of benchmarks/README.md: a table for each setting, and its ranges."""
    parts = []
    for title, pairs in comparisons().items():
        shown = pairs[0].points[::SHOWN]
        seeds = len(pairs[0].ours)
        head = [title, *(show(p.score) for p in shown)]
        rows = [head, ["---", *["---:"] * len(shown)]]
        rows.append(["asynchronous, s", *(seconds(p.ours) for p in shown)])
        told = ["One seed." if seeds == 1 else f"Medians of {seeds} seeds."]
        for pair in pairs:
            shown = pair.points[::SHOWN]
            ratios = [factor(p.ratio) if p.ratio < inf else "" for p in shown]
            rows.append([f"{pair.peer_is}, s", *(seconds(p.peer) for p in shown)])
            rows.append([f"{pair.peer_is} / asynchronous", *ratios])
            told.append(
                f"{pair.peer_is[0].upper()}{pair.peer_is[1:]} / asynchronous: {pair.range},"
            )
            told.append(f"the smallest at {show(pair.least.score)}")
            told[-1] += f"; {pair.by_pair}." if seeds > 1 else "."
            if pair.missed:
                told.append(f"{pair.missed[0].upper()}{pair.missed[1:]}.")
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        parts.append(f"{table}\n\n{' '.join(told)}")
    return "\n\n".join([*parts, ends_table()] if whole() else parts)


def seconds(value: float) -> str:
    return "not reached" if value == inf else f"{value:.1f}"


def page_with(text: str) -> str:
    """Return benchmarks/README.md with its section replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{section()}\n\n{END}{after}"


def draw() -> None:
    """Draw the curves of each side: runs of 100 steps, and those of its best rate with 1 s."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = comparisons()
    delayed = {side: chosen(side, latency=1.0) for side in SIDES}
    panels = {
        "rewards at once, 100 steps": (whole(), found["All weights, 100 steps"]),
        "1 s of latency for each reward": (delayed, found["All weights, rewards of 1 s"]),
    }
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(1.5 + 4 * len(panels), 3.6), sharey=True, layout="constrained"
    )
    for axis, (title, (by_side, (with_trl, *_))) in zip(axes, panels.items(), strict=True):
        for side, runs in by_side.items():
            for i, run in enumerate(runs):
                times = [point["seconds"] for point in run["curve"]]
                scores = [point["score"] for point in run["curve"]]
                label = NAMES[side] if i == 0 else None
                axis.plot(times, scores, color=COLORS[side], label=label, marker=".", lw=1.3)
        axis.set_title(f"{title}\nTRL / asynchronous: {with_trl.range}", fontsize=9)
        axis.set(xlabel="seconds of training")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out sampled accuracy")
    axes[0].legend(loc="lower right")
    figure.savefig(FIGURE, dpi=130)
    pyplot.close(figure)


def write() -> None:
    """Write section and figure again, and print the ranges."""
    _measure.PAGE.write_text(page_with(_measure.PAGE.read_text()))
    draw()
    for title, pairs in comparisons().items():
        for pair in pairs:
            told = f"{title}: {pair.peer_is} / asynchronous: {pair.range}"
            print("; ".join(filter(None, (told, pair.missed))))
    for side in SIDES:
        print(f"{side}: {samples_a_second(chosen(side)):.0f} samples a second")


if __name__ == "__main__":
    write()

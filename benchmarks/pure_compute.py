"""Pure compute: time to a held-out sampled pass@1 on the embedded task, at every score, beside TRL.

    python benchmarks/pure_compute.py    # 40 minutes on two idle cores

The bundled character-level model learns to carry, in fp32, 16 prompts x 16 answers a step. Rewards
take no time, but a model this small makes little use of a second core: with a process on each,
the asynchronous side takes 15 steps a second, the synchronous one 5. Each side's learning rate
comes from the same grid, on seed 0; a best rate at the grid's edge is refused and the grid
extended. A run of the search ends when it has taken longer than the best so far. Some options of
`tb` and of TRL are tried at the best rate; none are for our other sides. As in `reference_run.py`,
weights are copied during the run and evaluated after it. Finished runs are lines of
`runs/pure_compute.jsonl`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import _measure
import _thresholds
from _runs import HERE, Best, Laboratory, read_runs, time_to_goal
from _sums import RECIPES, PendingReply, Side

RUNS = HERE / "runs" / "pure_compute.jsonl"
GOAL = RECIPES["arithmetic"].goal
GRID = (1e-4, 2e-4, 5e-5)
EDGES = 2
EVERY = 2.0
"""Seconds between evaluations."""
MARGIN = 4.0
"""Seconds that a run of the search may take more than the best one so far took to the goal."""
SEEDS = 3
SECONDS: dict[Side, float] = {"asynchronous": 60.0, "synchronous": 60.0, "trl": 90.0}
TB = ("objective=tb", "objective.beta=0.05", "objective.taper=residual")
RECENT = ("strategy.recent=0.9", "strategy.reward=0.0", "runtime.concurrent_searches=1")
CASES: dict[str, tuple[Side, tuple[str, ...]]] = {
    "tb": ("asynchronous", (*TB, *RECENT)),
    "tb, synchronous": ("synchronous", (*TB, "strategy=recent")),
    "dr_grpo": (
        "asynchronous",
        ("objective=dr_grpo", *RECENT),
    ),
    "TRL": ("trl", ("attn_implementation=eager",)),
}
VARIANTS = {
    "tb": (
        ("objective.taper=none",),
        ("objective.beta=0.02",),
        ("strategy.recent=1.0",),
    ),
    "TRL": (("memory=kept",), ('scale_rewards="group"',), ("num_iterations=2",)),
}
"""Options that are tried at the best rate, one at a time; each that is faster stays.

As many for `tb` as for TRL: the more are tried, the better the best one looks.
"""


def main() -> None:
    parser = _measure.arguments(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    lab = Arithmetic(options)
    best = {case: search(lab, case) for case in options.cases}
    if options.tiny:
        print("a tiny run: nothing is kept")
        return
    for case, chosen in best.items():
        for seed in range(1, SEEDS):
            lab.run(lab.job_of(case, chosen.rate, seed, chosen.options))
    _measure.record(__file__, rows_of(lab, best), options)
    _thresholds.write()
    print(table(lab))


class Arithmetic(Laboratory):
    """Runs of the embedded task."""

    def __init__(self, options):
        super().__init__(options, RUNS)
        self.tiny = options.tiny
        from tba.models import model_path

        self.model = model_path("bundled:arithmetic")
        self.rows = self.scratch / "rows"
        write_sums(self.rows)

    def job_of(self, case: str, rate: float, seed: int, options: tuple[str, ...]) -> PendingReply:
        side = CASES[case][0]
        job = PendingReply(
            "arithmetic", side, self.model, str(self.rows), str(self.scratch / "run"), rate, seed,
            seconds=SECONDS[side], every=EVERY, options=options,
        )  # fmt: skip
        return replace(job, steps=2, every=0.1) if self.tiny else job


def write_sums(folder: Path) -> None:
    """Write the embedded task as rows, for TRL and for the evaluation."""
    from tba.tasks.arithmetic import Arithmetic as Task

    folder.mkdir(parents=True)
    task = Task()
    for name, prompts in (("train", task.prompts()), ("test", task.held_out())):
        rows = [{"prompt": p.text, "answer": p.columns["answer"], "latency": 0.0} for p in prompts]
        lines = [json.dumps(row) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def search(lab: Arithmetic, case: str) -> Best:
    """Return the rate and the options with which seed 0 is at the goal first."""
    options = CASES[case][1]
    times = {}

    def measure(rate: float, options: tuple[str, ...] = options) -> float:
        job = lab.job_of(case, rate, 0, options)
        seconds = min([job.seconds, *(t + MARGIN for t in times.values())])
        return time_to_goal(lab.run(replace(job, seconds=seconds)), GOAL)

    for rate in GRID[:1] if lab.tiny else GRID:
        times[rate] = measure(rate)
    for _ in range(0 if lab.tiny else EDGES):
        best = min(times, key=times.__getitem__)
        if min(times) < best < max(times):
            break
        further = best / 2 if best == min(times) else best * 2
        times[further] = measure(further)
    best = min(times, key=times.__getitem__)
    for variant in () if lab.tiny else VARIANTS.get(case, ()):
        seconds = measure(best, (*options, *variant))
        if seconds < times[best]:
            options = (*options, *variant)
            times[best] = seconds
    return Best(best, options)


def rows_of(lab: Arithmetic, best: dict[str, Best]) -> list[_measure.Row]:
    runs = read_runs(lab.path)
    chosen = {}
    for case, one in best.items():
        own = [run for run in runs if run["side"] == CASES[case][0] and one.is_of(run)]
        chosen[case] = own
    if "TRL" not in chosen:
        return []
    rows = []
    for case, own in chosen.items():
        if case == "TRL":
            continue
        compared = _thresholds.Comparison(own, chosen["TRL"], scores=_thresholds.PURE_SCORES)
        if not compared.reached:
            print(f"there is no score that {case} and TRL reach: no row")
            continue
        note = f"rate {best[case].rate:g}, TRL's {best['TRL'].rate:g}; {len(own)} seeds;"
        note += f" evaluated every {EVERY:g} s"
        if case not in VARIANTS:
            note += "; rate searched, but no options"
        name = f"pure compute, embedded task, {case}: time to a sampled pass@1"
        goal = "ratio >= 1.5" if case == "tb" else None
        rows.append(_thresholds.row(name, compared, note, goal))
    return rows


def table(lab: Arithmetic) -> str:
    """Return every run as a table."""
    lines = ["| side | rate | options | seed | s to .90 | best score |", "|" + " --- |" * 6]
    for run in read_runs(lab.path):
        best = max(point["score"] for point in run["curve"])
        seconds = f"{time_to_goal(run, GOAL):.1f}"
        cells = [run["side"], f"{run['rate']:g}", " ".join(run["options"]), str(run["seed"])]
        lines.append(f"| {' | '.join(cells)} | {seconds} | {best:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

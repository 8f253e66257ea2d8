"""The study of coverage: which objectives keep many right answers likely, at which reward.

    python -m studies.coverage.study            # `make study-coverage`; runs what rows/ lacks
    python -m studies.coverage.study raft tb    # only objectives whose names begin so
    python -m studies.coverage.study --part longer    # seven objectives with 1,000 steps
    python -m studies.coverage.study --part mixed     # half of each batch from the first weights
    python -m studies.coverage.study --count    # only the number of runs, and the time
    python -m studies.coverage.study --tables   # only the tables and the figure, from the rows

pairs.py has the task, and measure.py what is measured: the exact probabilities of all right
answers at every evaluation. Each objective is searched at each lag as experiment.py says, with
linear decay alone: rates with its first beta, betas at the best rate, and rates again with a better
beta. It is searched by the pass rate, and by E r - beta KL at a beta of .1; each has rows of other
seeds, the table. At lag 256, all 200 batches come from the first weights. The other parts compare
by E r - beta KL only: `longer` asks where runs end after 1,000 steps, and `mixed` what happens if
half of each batch comes from the first weights, and half is on policy (mixed.py).
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from studies.coverage.measure import BETA, UNLIKELY, Exact, curve, grammar, right
from studies.off_policy.experiment import Condition, Experiment, Row, Setting, some, with_error
from tba.runs.folder import read_optional, write_json

HERE = Path(__file__).parent
FIGURE = HERE.parent.parent / "docs" / "coverage.png"
MEASURED = "coverage.json"
FOUND_BY = {"pass": "pass rate", "regularised": "E r - beta KL"}
"""Numbers by which settings are compared, and their names."""
SHOWN = {"pass": 3, "effective": 2, "distinct": 1, "tv": 2}
"""What a cell of a table shows, and with how many digits."""

OBJECTIVES: dict[str, dict[str, str | float]] = {
    **{
        f"tb {taper}": {"objective.use": "tb", "objective.taper": taper, "objective.beta": 0.1}
        for taper in ("reward", "residual", "none")
    },
    "tb shift": {
        "objective.use": "tb",
        "objective.taper": "reward",
        "objective.shift": 0.5,
        "objective.beta": 0.1,
    },
    "tb_learned_z": {"objective.use": "tb_learned_z", "objective.beta": 0.1},
    "tb_learned_z residual": {
        "objective.use": "tb_learned_z",
        "objective.taper": "residual",
        "objective.beta": 0.1,
    },
    "tba_prime": {"objective.use": "tba_prime", "objective.beta": 0.1},
    "rloo": {"objective.use": "rloo", "objective.beta": 0.1},
    "grpo": {"objective.use": "grpo", "objective.beta": 0.0},
    "dr_grpo": {"objective.use": "dr_grpo", "objective.beta": 0.0},
    "cispo": {"objective.use": "cispo"},
    "topr": {"objective.use": "topr"},
    "raft": {"objective.use": "raft"},
    "oapl": {"objective.use": "oapl", "objective.beta": 0.001},
}


@dataclass(frozen=True)
class Coverage(Experiment):
    """Objectives at lags, each searched once by each of `numbers` (keys of `FOUND_BY`)."""

    folder: Path = HERE / "rows"
    numbers: Sequence[str] = tuple(FOUND_BY)
    base_objective: str = "tb shift"
    """Objective that the others are compared with, by seed."""

    @property
    def rows(self) -> Path:
        return self.folder / f"{self.name}.json"

    def carry_out(self) -> None:
        """Run what the rows lack, one cell after the other."""
        for name, lag in self.cells():
            for number in self.numbers:
                objectives = {name: self.objectives[name]}
                conditions = {lag: self.conditions[lag]}
                one = replace(
                    self, objectives=objectives, conditions=conditions, compared_by=number
                )
                Experiment.carry_out(one)

    def row(self, folder: Path, result: Row, stage: str, setting: Setting, seed: int) -> Row:
        """Return the row of a run, with what its checkpoints know; they are removed."""
        row = super().row(folder, result, stage, setting, seed)
        steps = measured(folder / result["folder"]) if row["status"] == "finished" else {}
        ended = {"pass": 0.0, "regularised": 0.0} if not steps else steps[max(steps, key=int)]
        return {**row, **ended, "coverage": steps}

    def tables(self) -> str:
        """Return a table for each way to search: objective x lag."""
        tables = {n: replace(self, compared_by=n).table() for n in self.numbers}
        texts = [f"Searched by {FOUND_BY[n]}:\n\n{table}" for n, table in tables.items()]
        return "\n\n".join(texts)

    def differences(self) -> str:
        """Return by how much each objective is behind `base_objective` at each lag, by seed.

        For each of `numbers`, both have the settings that were found by it. Lags without a
        difference are left out.
        """
        found = {n: replace(self, compared_by=n).in_table() for n in self.numbers}
        cells = {}
        for name, lag in self.cells():
            pairs = [(n, own.get((name, lag)), own.get((self.base_objective, lag)))
                     for n, own in found.items()]  # fmt: skip
            if name != self.base_objective and all(own and base for _, own, base in pairs):
                cells[name, lag] = " / ".join(behind(*each) for each in pairs)
        return self.grid(cells, "no table yet")

    def in_table(self) -> dict[tuple[str, Condition], list[Row]]:
        """Return the rows of each cell whose best setting has rows of the table; none failed."""
        final = ((name, lag, rows) for name, lag, rows in self.final() if rows)
        return {
            (name, lag): rows
            for name, lag, rows in final
            if rows[0]["stage"] == "table" and all(row["coverage"] for row in rows)
        }

    def cell(self, own: Sequence[Row]) -> str:
        found = [row for row in own if row["coverage"]]
        return "failed" if own and not found else super().cell(found)

    def described(self, own: Sequence[Row], best: Setting) -> tuple[str, str]:
        """Return means over seeds ± standard error of the first; beta and rate."""
        means = [f"{fmean(row[n] for row in own):.{digits}f}" for n, digits in SHOWN.items()]
        means[0] = with_error([row["pass"] for row in own], SHOWN["pass"])
        has_beta = "objective.beta" in self.objectives[best.objective]
        beta = f"beta {self.beta_of(best):g} " if has_beta else ""
        return " / ".join(means), f"{beta}{best.rate:g}"

    def count(self) -> str:
        times = len(self.numbers)
        more = "" if times == 1 else f"; for {times} numbers at most {times} times that"
        return f"{super().count()}{more}"


COVERAGE = Coverage(
    name="coverage",
    condition="lag",
    objectives=OBJECTIVES,
    conditions={lag: {"runtime.lag": lag} for lag in (0, 16, 64, 256)},
    seconds=45,
    base="../coverage/base.toml",
    rates=(3e-5, 1e-4, 3e-4),
    schedules=("linear",),
    betas=(0.01, 0.03, 0.1, 0.3, 1.0),
    search_seeds=(100,),
    seeds=(0, 1, 2),
    keep_checkpoints=True,
)
LONGER = replace(
    COVERAGE,
    name="longer",
    numbers=("regularised",),
    base_objective="tb residual",
    objectives={
        **some(OBJECTIVES, "tb residual", "tb shift", "tb_learned_z", "tb_learned_z residual"),
        **some(OBJECTIVES, "raft", "topr"),
        "dr_grpo": {**OBJECTIVES["dr_grpo"], "objective.beta": BETA},
    },
    conditions={lag: COVERAGE.conditions[lag] for lag in (0, 16, 64)},
    seconds=180,
    betas=(0.03, 0.3),
    wider=1,
    given={"run.steps": 1000, "eval.every": 200, "checkpoint.every": 200, "checkpoint.keep": 5},
)
MIXED = replace(
    COVERAGE,
    name="mixed",
    numbers=("regularised",),
    condition="batch",
    objectives=some(OBJECTIVES, "tb residual", "tb shift", "dr_grpo", "cispo", "topr", "raft"),
    conditions={
        "half from the first weights": {
            "runtime.lag": 0,
            "engine.use": "studies.coverage.mixed.HalfFirst",
        }
    },
)
PARTS = {part.name: part for part in (COVERAGE, LONGER, MIXED)}


def behind(number: str, own: Sequence[Row], base: Sequence[Row]) -> str:
    """Return how far rows are behind others in a number: mean over seeds ± standard error."""
    others = {row["seed"]: row[number] for row in base}
    by_seed = [others[row["seed"]] - row[number] for row in own if row["seed"] in others]
    return with_error(by_seed, 3)


@cache
def reference() -> Tensor:
    return grammar(HERE / "model", torch.ones_like(right()), least=UNLIKELY)


def measured(run: Path) -> dict[str, Exact]:
    """Return what the checkpoints of a run know, by step; it is kept, and they are removed."""
    found: dict[str, Exact] | None = read_optional(run / MEASURED)
    if found is None:
        models = {
            int(folder.name.rpartition("-")[2]): folder / "model"
            for folder in sorted((run / "checkpoints").iterdir())
        }
        found = json.loads(json.dumps(curve(models, reference())))
        write_json(run / MEASURED, found)
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    return found


def frontier(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Return the (pass rate, distinct answers) that no other row exceeds in both, by pass rate."""
    ends = sorted(((row["pass"], row["distinct"]) for row in rows), reverse=True)
    kept: list[tuple[float, float]] = []
    for passed, distinct in ends:
        if not kept or distinct > kept[-1][1]:
            kept.append((passed, distinct))
    return kept[::-1]


def draw(study: Coverage) -> None:
    """Draw reward against spread at the end of every run, and each objective's frontier, by lag.

    Objectives that were not searched at a lag are left out there.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    known = [row for row in study.known() if row["coverage"]]
    cells = {(row["objective"], row["condition"]) for row in known if row["stage"] == "table"}
    names = [name for name in study.objectives if any(name == own for own, _ in cells)]
    lags = [lag for lag in study.conditions if any(lag == own for _, own in cells)]
    figure, axes = pyplot.subplots(
        1, len(lags), figsize=(3.4 * len(lags), 3.4), sharey=True, layout="constrained"
    )
    lines = {}
    for axis, lag in zip(axes, lags, strict=True):
        for name, color in zip(names, pyplot.get_cmap("tab10").colors, strict=False):
            own = [row for row in known if (row["objective"], row["condition"]) == (name, lag)]
            if (name, lag) in cells:
                ends = [(row["pass"], row["distinct"]) for row in own]
                axis.scatter(*zip(*ends, strict=True), s=8, color=color, alpha=0.35)
                (lines[name],) = axis.plot(*zip(*frontier(own), strict=True), color=color)
        offline = ", offline" if lag == max(study.conditions) else ""
        axis.set(xlim=(0.75, 1), ylim=(0, 25), xlabel="pass rate", title=f"lag {lag}{offline}")
    axes[-1].legend(lines.values(), lines, fontsize=8, loc="lower left")  # the emptiest corner
    axes[0].set_ylabel("distinct right answers in 64 samples")
    figure.savefig(FIGURE, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("objectives", nargs="*", help="beginnings of names; default: all")
    parser.add_argument("--lags", type=int, nargs="*", help="only these lags")
    parser.add_argument("--part", choices=PARTS, default=COVERAGE.name)
    parser.add_argument("--count", action="store_true", help="print the number of runs only")
    parser.add_argument("--tables", action="store_true", help="print the tables from the rows")
    options = parser.parse_args()
    beginnings = tuple(options.objectives) or ("",)
    whole = PARTS[options.part]
    study = replace(
        whole,
        objectives={n: each for n, each in whole.objectives.items() if n.startswith(beginnings)},
        conditions={
            lag: settings
            for lag, settings in whole.conditions.items()
            if options.lags is None or lag in options.lags
        },
    )
    if options.count:
        print(study.count())
        return
    if not options.tables:
        study.carry_out()
    print(f"{study.tables()}\n\n{study.differences()}")
    if whole is COVERAGE:
        draw(study)


if __name__ == "__main__":
    main()

"""The study of coverage: which objectives keep many right answers likely, at which reward.

    python -m studies.coverage.study            # `make study-coverage`; runs what rows/ lacks
    python -m studies.coverage.study raft tb    # only objectives whose names begin so
    python -m studies.coverage.study --count    # only the number of runs, and the time
    python -m studies.coverage.study --tables   # only the tables, from the rows

pairs.py has the task, and measure.py what is measured: the exact probabilities of all right
answers at every evaluation. Each objective is searched at each lag, by turns: rates with its first
beta, betas at the best rate, and rates again with the best beta. It is searched by the pass rate,
and by E r - beta KL at a beta of .1; each has rows of other seeds, the table. At lag 256, all 200
batches come from the first weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from studies.coverage.measure import UNLIKELY, Exact, curve, grammar, right
from studies.off_policy.experiment import SERIES, Condition, Experiment, Row, Setting, key_of
from tba.runs.folder import read_optional, write_json

HERE = Path(__file__).parent
MEASURED = "coverage.json"
BETAS = (0.01, 0.03, 0.1, 0.3, 1.0)
FOUND_BY = {"pass": "pass rate", "regularised": "E r - beta KL"}
"""Numbers by which settings are compared, and their names."""
SHOWN = {"pass": 3, "effective": 2, "distinct": 1, "tv": 2}
"""What a cell of a table shows, and with how many digits."""


@dataclass(frozen=True)
class Searched:
    """An objective, and the betas that are tried of it; the first one is tried at all rates."""

    settings: Mapping[str, Any]
    betas: Sequence[float] = ()


OBJECTIVES = {
    **{
        f"tb {taper}": Searched({"objective.use": "tb", "objective.taper": taper}, (0.1, *BETAS))
        for taper in ("reward", "residual", "none")
    },
    "tb_learned_z": Searched({"objective.use": "tb_learned_z"}, (0.1, *BETAS)),
    "tba_prime": Searched({"objective.use": "tba_prime"}, (0.1, *BETAS)),
    "rloo": Searched({"objective.use": "rloo"}, (0.1, *BETAS)),
    "grpo": Searched({"objective.use": "grpo"}, (0.04, 0.0, *BETAS)),
    "dr_grpo": Searched({"objective.use": "dr_grpo"}, (0.0, *BETAS)),
    "cispo": Searched({"objective.use": "cispo"}),
    "topr": Searched({"objective.use": "topr"}),
    "raft": Searched({"objective.use": "raft"}),
    "oapl": Searched({"objective.use": "oapl"}, (0.001, *BETAS)),
}


@dataclass(frozen=True)
class Coverage(Experiment):
    """Objectives at lags; the search is by turns, and by `compared_by`."""

    searched: Mapping[str, Searched] = field(default_factory=dict)
    folder: Path = HERE / "rows"

    @property
    def rows(self) -> Path:
        return self.folder / f"{self.name}.json"

    def carry_out(self) -> None:
        """Run what the rows lack, one cell after the other."""
        for lag in self.conditions:
            for name in self.searched:
                for number in FOUND_BY:
                    of = replace(self, compared_by=number)
                    best = of.best(of.by_turns(name, lag))
                    of.only(best).run("table", [best], self.seeds)

    def by_turns(self, name: str, lag: Condition) -> list[Row]:
        """Run the search of an objective at a lag; return its rows."""
        betas = self.searched[name].betas
        first = [Setting(labelled(name, betas[:1]), lag, rate, "linear") for rate in self.rates]
        rows = self.only(first[0]).search("search", first)
        if not betas:
            return rows
        best = self.best(rows)
        for beta in sorted({*betas[1:]} - {*betas[:1]}):
            other = replace(best, objective=labelled(name, [beta]))
            rows += self.only(other).run("search", [other], self.search_seeds)
        best = self.best(rows)
        place = SERIES.index(best.rate)
        again = [replace(best, rate=rate) for rate in SERIES[max(0, place - 1) : place + 2]]
        return rows + self.only(best).search("search", again)

    def only(self, setting: Setting) -> Coverage:
        """Return the experiment with the cell of a setting alone."""
        objectives = {setting.objective: self.objectives[setting.objective]}
        return replace(self, objectives=objectives, conditions=self.conditions_of(setting))

    def conditions_of(self, setting: Setting) -> dict[Condition, Mapping[str, Any]]:
        return {setting.condition: self.conditions[setting.condition]}

    def best(self, rows: Sequence[Row]) -> Setting:
        """Return the setting with the best mean over seeds; of equals the first one."""
        scores: dict[tuple[Any, ...], list[float]] = {}
        for row in rows:
            scores.setdefault(key_of(row), []).append(row[self.compared_by])
        return Setting(*max(scores, key=lambda key: fmean(scores[key])))

    def row(self, folder: Path, result: Row, stage: str, setting: Setting, seed: int) -> Row:
        """Return the row of a run, with what its checkpoints know; they are removed."""
        row = super().row(folder, result, stage, setting, seed)
        steps = measured(folder / result["folder"]) if row["status"] == "finished" else {}
        ended = {"pass": 0.0, "regularised": 0.0} if not steps else steps[max(steps, key=int)]
        return {**row, **ended, "coverage": steps}

    def tables(self) -> str:
        """Return a table for each way to search: objective x lag."""
        texts = [self.table_by(number) for number in FOUND_BY]
        return "\n\n".join(texts)

    def table_by(self, number: str) -> str:
        of = replace(self, compared_by=number)
        heads = " | ".join(f"lag {lag}" for lag in self.conditions)
        lines = [f"Searched by {FOUND_BY[number]}:", "", f"| objective | {heads} |"]
        lines.append("| --- |" + " --- |" * len(self.conditions))
        for name in self.searched:
            cells = " | ".join(of.shown(name, lag) for lag in self.conditions)
            lines.append(f"| {name} | {cells} |")
        return "\n".join(lines)

    def shown(self, name: str, lag: Condition) -> str:
        """Return a cell: means over seeds ± standard error of the first, beta and rate."""
        labels = {labelled(name, [beta]) for beta in self.searched[name].betas} or {name}
        own = [r for r in self.known() if r["objective"] in labels and r["condition"] == lag]
        tried = [row for row in own if row["stage"] == "search"]
        if not tried:
            return "not run"
        best = self.best(tried)
        rows = [row for row in own if row["stage"] == "table" and Setting(*key_of(row)) == best]
        found = [row for row in rows or tried if Setting(*key_of(row)) == best and row["coverage"]]
        if not found:
            return "failed"
        means = [f"{fmean(row[n] for row in found):.{digits}f}" for n, digits in SHOWN.items()]
        if len(found) > 1:
            means[0] += f" ± {stdev(row['pass'] for row in found) / len(found) ** 0.5:.3f}"
        mark = "" if rows else " †"
        beta = best.objective.removeprefix(name).removeprefix(", ")
        return f"{' / '.join(means)}{mark}<br><small>{beta} {best.rate:g}</small>"

    def count(self) -> str:
        """Return the number of runs, without wider grids, and the hours that they take."""
        cells = len(self.conditions) * len(FOUND_BY)
        betas = sum(len({*each.betas}) - 1 for each in self.searched.values() if each.betas)
        again = sum(2 for each in self.searched.values() if each.betas)
        first = len(self.searched) * len(self.rates) * len(self.conditions)
        tried = (first + (betas + again) * cells) * len(self.search_seeds)
        table = len(self.searched) * cells * len(self.seeds)
        hours = (tried + table) * self.seconds / 2 / 3600
        return (
            f"{self.name}: at most {tried} runs to search and {table} for the table, about"
            f" {hours:.1f} hours on two cores; more where the best rate is at an edge"
        )


def labelled(name: str, betas: Sequence[float]) -> str:
    """Return what rows call an objective with a beta, if it has one."""
    return ", beta ".join([name, *(f"{beta:g}" for beta in betas[:1])])


def settings() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each objective with each of its betas, by its label."""
    for name, each in OBJECTIVES.items():
        for beta in each.betas:
            yield labelled(name, [beta]), {**each.settings, "objective.beta": beta}
        if not each.betas:
            yield name, each.settings


COVERAGE = Coverage(
    name="coverage",
    condition="lag",
    objectives=dict(settings()),
    searched=OBJECTIVES,
    conditions={lag: {"runtime.lag": lag} for lag in (0, 16, 64, 256)},
    seconds=45,
    base="../coverage/base.toml",
    rates=(3e-5, 1e-4, 3e-4),
    search_seeds=(100,),
    seeds=(0, 1, 2),
    keep_checkpoints=True,
)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("objectives", nargs="*", help="beginnings of names; default: all")
    parser.add_argument("--lags", type=int, nargs="*", help="only these lags")
    parser.add_argument("--count", action="store_true", help="print the number of runs only")
    parser.add_argument("--tables", action="store_true", help="print the tables from the rows")
    options = parser.parse_args()
    beginnings = tuple(options.objectives) or ("",)
    study = replace(
        COVERAGE,
        searched={n: each for n, each in OBJECTIVES.items() if n.startswith(beginnings)},
        conditions={
            lag: settings
            for lag, settings in COVERAGE.conditions.items()
            if options.lags is None or lag in options.lags
        },
    )
    if options.count:
        print(study.count())
        return
    if not options.tables:
        study.carry_out()
    print(study.tables())


if __name__ == "__main__":
    main()

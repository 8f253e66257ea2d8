"""An experiment: objectives under several conditions, each at its own best rate and schedule.

Stages:

1. rates: learning rates for each objective under each condition, with seeds of their own, at full
   length. Where the best one is at the edge of those tried, the next one is tried too, at most
   `wider` times.
2. schedules: the best two rates of each again, with linear decay. Here, too, a best one at the edge
   of those tried is followed by the next: with decay, higher rates are best. An experiment with one
   schedule has no such stage.
3. betas: the best of each that has a beta, again with other betas; where another is best, the rates
   next to its own follow with that beta, and the other schedule.
4. table: the best settings of each, with other seeds, and prompts that the search has not seen.

The score of a run is the mean of its last three evaluations; a run that failed has 0. The rows of
an objective under a condition are written to rows/NAME.json as soon as its runs have ended, or when
the study is interrupted; runs that have a row are not run again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tba.runs.folder import write_whole
from tba.tools.study import curve, read_ledger, read_metrics, write_results
from tba.tools.sweep import sweep

HERE = Path(__file__).parent
ROWS = HERE / "rows"
RUNS = Path("runs/off_policy")
RATES = (3e-6, 1e-5, 3e-5, 1e-4, 3e-4)
SERIES = (1e-7, 3e-7, 1e-6, *RATES, 1e-3, 3e-3, 1e-2)
BETAS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
ALONG = {"rate": SERIES, "beta": BETAS}
"""Values to widen a grid with."""
EVALUATIONS = 3
SEARCHED = "†"
"""Mark of a score from the seeds of the search, where those of the table have not run."""
CORES = 2
PARALLEL = 3
"""Runs at a time: no core waits for the last of the three or five runs of a cell."""
KEPT = ("status", "error", "ess", "lag_mean", "samples_generated", "samples_trained", "seconds")
Row = dict[str, Any]
Settings = Mapping[str, Any]
Condition = int | str


@dataclass(frozen=True)
class Setting:
    """What is run: an objective under a condition, with a rate, a schedule and a beta."""

    objective: str
    condition: Condition
    rate: float
    schedule: str = "constant"
    beta: float | None = None
    """None for that of the objective's settings."""

    @property
    def cell(self) -> tuple[str, Condition]:
        return self.objective, self.condition

    @property
    def label(self) -> str:
        beta = "" if self.beta is None else f", beta {self.beta:g}"
        return f"{self.objective}{beta}, {self.condition}, {self.rate:g}, {self.schedule}"


@dataclass(frozen=True)
class Experiment:
    """Objectives and conditions, each by its name and its settings."""

    name: str
    condition: str
    """What the conditions are: "lag"."""
    objectives: Mapping[str, Settings]
    conditions: Mapping[Condition, Settings]
    seconds: float
    """A run on one core with another beside it, with its start."""
    base: str = "base.toml"
    """File with the settings that all runs share."""
    rates: Sequence[float] = RATES
    search_seeds: Sequence[int] = (100, 101)
    seeds: Sequence[int] = (0, 1, 2, 3, 4)
    schedules: Sequence[str] = ("constant", "linear")
    """The first is tried at all rates, others at the best two."""
    betas: Sequence[float] = ()
    """Betas that are tried of objectives whose settings have one."""
    wider: int = 2
    new_prompts: bool = False
    """Whether each run of the table draws its own prompts, by its seed (`task.seed`)."""
    given: Settings | None = None
    """More settings that all runs share."""
    details: Sequence[str] = ("ess", "drop")
    """What the table says of each cell below its score."""
    compared_by: str = "score"
    """Number of a row by which settings are compared."""
    keep_checkpoints: bool = False

    @property
    def rows(self) -> Path:
        return ROWS / f"{self.name}.json"

    def cells(self) -> list[tuple[str, Condition]]:
        return [(objective, c) for c in self.conditions for objective in self.objectives]

    def carry_out(self) -> None:
        """Run what the rows lack of all stages."""
        first, *others = self.schedules
        rates = [Setting(*cell, rate, first) for cell in self.cells() for rate in self.rates]
        tried = self.search("rates", rates)
        if others:
            second = [
                replace(setting, schedule=schedule)
                for cell in self.cells()
                for setting in self.ranked(tried, *cell)[:2]
                for schedule in others
            ]
            tried += self.search("schedules", second)
        tried += self.by_turns(tried)
        best = [self.ranked(tried, *cell)[0] for cell in self.cells()]
        self.run("table", best, self.seeds)

    def by_turns(self, known: Sequence[Row]) -> list[Row]:
        """Search beta at the best rate and schedule, and then both at a better beta."""
        cells = [c for c in self.cells() if "objective.beta" in self.objectives[c[0]]]
        best = [self.ranked(known, *cell)[0] for cell in cells]
        betas = [replace(s, beta=b) for s in best for b in self.betas if b != self.beta_of(s)]
        rows = self.search("betas", betas, "beta", known)
        better = [self.ranked([*known, *rows], *cell)[0] for cell in cells]
        near = [
            replace(setting, rate=rate, schedule=schedule)
            for setting in better
            if setting.beta is not None
            for rate in (*beside(setting.rate, SERIES), setting.rate)
            for schedule in self.schedules
        ]
        near = [setting for setting in near if setting not in better]
        return rows + self.search("betas", near, "rate", [*known, *rows])

    def beta_of(self, setting: Setting) -> float:
        own: float = self.objectives[setting.objective].get("objective.beta", 0.0)
        return own if setting.beta is None else setting.beta

    def search(
        self,
        stage: str,
        settings: Sequence[Setting],
        along: str = "rate",
        known: Sequence[Row] = (),
    ) -> list[Row]:
        """Run settings in a stage, and what is beyond the edge; return the rows.

        A grid goes along rates or betas, and has what is `known` of the same objective, too.
        """
        tried = list(settings)
        rows = self.run(stage, tried, self.search_seeds)
        cells = [cell for cell in self.cells() if cell in {s.cell for s in settings}]
        for _ in range(self.wider):
            further = self.beyond([*known, *rows], along, cells)
            if not further:
                break
            tried += further
            rows = self.run(stage, tried, self.search_seeds)
        for setting in self.beyond([*known, *rows], along, cells):
            print(f"{setting.label}: the best {along} is still at the edge of those tried")
        return rows

    def run(self, stage: str, settings: Sequence[Setting], seeds: Sequence[int]) -> list[Row]:
        """Return the rows of settings in a stage; what is missing is run, a cell at a time."""
        rows = self.known()
        has = {(row["stage"], key_of(row), row["seed"]) for row in rows}
        for cell in self.cells():
            runs = product((s for s in settings if s.cell == cell), seeds)
            missing = [(s, seed) for s, seed in runs if (stage, key_of(asdict(s)), seed) not in has]
            if missing:
                made = self.made(stage, missing)
                rows += made
                self.keep(rows)
                if len(made) < len(missing):
                    left = len(missing) - len(made)
                    raise SystemExit(f"{left} runs have not ended; the rows of the others are kept")
        asked = {key_of(asdict(setting)) for setting in settings}
        return [row for row in rows if row["stage"] == stage and key_of(row) in asked]

    def made(self, stage: str, runs: Sequence[tuple[Setting, int]]) -> list[Row]:
        """Run settings of one cell, each with a seed; return the rows of runs that ended."""
        first = runs[0][0]
        print(f"{self.name}, {stage}: {first.objective}, {self.condition} {first.condition}")
        place = f"{self.name}-{stage}-{first.objective}-{first.condition}"
        folder = RUNS / re.sub(r"\W+", "_", place)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "study.toml"
        path.write_text(self.text(stage, folder, runs), encoding="utf-8")
        sweep(path)
        by_label = {label_of(*run): run for run in runs}
        results = write_results(folder).to_dict("records")
        return [
            self.row(folder, result, stage, *by_label[trial.axes["variant"]])
            for trial, result in zip(read_ledger(folder).runs, results, strict=True)
            if trial.has_result
        ]

    def row(self, folder: Path, result: Row, stage: str, setting: Setting, seed: int) -> Row:
        """Return the row of a run, from its result in a study."""
        by_step = curve(read_metrics(folder / result["folder"]), result["metric"])["score"]
        ended = result["status"] == "finished"
        return {
            "stage": stage,
            **asdict(setting),
            "seed": seed,
            **{name: result.get(name) for name in (*KEPT, *self.details)},
            "score": float(by_step.tail(EVALUATIONS).mean()) if ended else 0.0,
            "drop": result["drop"] if ended else None,
            "log_ratio": result.get("sampled_log_ratio") if ended else None,
            "curve": {int(step): round(score, 5) for step, score in by_step.items()},
        }

    def text(self, stage: str, folder: Path, runs: Sequence[tuple[Setting, int]]) -> str:
        """Return settings, each with a seed, as a study in TOML."""
        lines = ["[study]", f'folder = "{folder}"', f"parallel = {PARALLEL}"]
        kept = json.dumps(self.keep_checkpoints)
        lines += [f"keep_checkpoints = {kept}", f'base = "{HERE / self.base}"', ""]
        lines += ["[[grid]]", f'name = "{stage}"', "variants = ["]
        for setting, seed in runs:
            given = {
                "label": label_of(setting, seed),
                "run.seed": seed,
                **({"task.seed": seed} if stage == "table" and self.new_prompts else {}),
                **(self.given or {}),
                **self.objectives[setting.objective],
                **self.conditions[setting.condition],
                "trainer.learning_rate": setting.rate,
                "trainer.schedule": setting.schedule,
                **({} if setting.beta is None else {"objective.beta": setting.beta}),
            }
            pairs = ", ".join(f'"{key}" = {json.dumps(value)}' for key, value in given.items())
            lines.append(f"    {{ {pairs} }},")
        return "\n".join([*lines, "]", ""])

    def means(
        self, rows: Sequence[Row], objective: str, condition: Condition
    ) -> dict[Setting, float]:
        """Return the mean score of what was tried in a cell, over seeds."""
        scores: dict[Setting, list[float]] = {}
        for row in rows:
            if (row["objective"], row["condition"]) == (objective, condition):
                scores.setdefault(Setting(*key_of(row)), []).append(row[self.compared_by])
        return {setting: fmean(values) for setting, values in scores.items()}

    def ranked(self, rows: Sequence[Row], objective: str, condition: Condition) -> list[Setting]:
        """Return what was tried in a cell, the best first; of equals the lowest rate."""
        found = self.means(rows, objective, condition)
        return sorted(found, key=lambda s: (-found[s], s.rate, s.schedule, self.beta_of(s)))

    def beyond(
        self, rows: Sequence[Row], along: str, cells: Sequence[tuple[str, Condition]]
    ) -> list[Setting]:
        """Return the next rates, or betas, of cells whose best is at the edge of those tried."""
        further = []
        for cell in cells:
            best, *others = self.ranked(rows, *cell)
            line = [s for s in others if replace(s, **{along: 0}) == replace(best, **{along: 0})]
            tried = [self.value(setting, along) for setting in line]
            place = self.value(best, along)
            for value in beside(place, ALONG[along]):
                if not any((other < place) == (value < place) for other in tried):
                    further.append(replace(best, **{along: value}))
        return further

    def value(self, setting: Setting, along: str) -> float:
        return self.beta_of(setting) if along == "beta" else setting.rate

    def known(self) -> list[Row]:
        """Return the rows that are there; empty before the first run."""
        return json.loads(self.rows.read_text()) if self.rows.is_file() else []

    def keep(self, rows: Sequence[Row]) -> None:
        self.rows.parent.mkdir(exist_ok=True)
        lines = ",\n".join(json.dumps({k: rounded(v) for k, v in row.items()}) for row in rows)
        write_whole(self.rows, f"[\n{lines}\n]\n")

    def final(self) -> Iterator[tuple[str, Condition, list[Row]]]:
        """Yield each cell with its rows of the table, or else the best ones of the search."""
        known = self.known()
        for objective, condition in self.cells():
            own = [r for r in known if (r["objective"], r["condition"]) == (objective, condition)]
            tried = [row for row in own if row["stage"] != "table"]
            if tried:
                best = key_of(asdict(self.ranked(tried, objective, condition)[0]))
                own = [row for row in own if key_of(row) == best]
            yield objective, condition, [row for row in own if row["stage"] == "table"] or own

    def table(self) -> str:
        """Return objective x condition, without those that have no rows; before all, a sentence."""
        cells = {(objective, c): rows for objective, c, rows in self.final() if rows}
        if not cells:
            return "Not run yet: `make study-long`."
        return self.grid({cell: self.cell(rows) for cell, rows in cells.items()}, self.cell([]))

    def grid(self, texts: Mapping[tuple[str, Condition], str], missing: str) -> str:
        """Return the texts of cells as a table; objectives and conditions without any are left out.

        A cell without a text has that of `missing`.
        """
        objectives = [name for name in self.objectives if any(name == n for n, _ in texts)]
        conditions = [c for c in self.conditions if any(c == own for _, own in texts)]
        heads = [c if isinstance(c, str) else f"{self.condition} {c}" for c in conditions]
        lines = [f"| objective | {' | '.join(heads)} |", "| --- |" + " --- |" * len(heads)]
        for objective in objectives:
            row = [texts.get((objective, c), missing) for c in conditions]
            lines.append(f"| {objective} | {' | '.join(row)} |")
        return "\n".join(lines)

    def cell(self, own: Sequence[Row]) -> str:
        """Return the numbers of a cell, and below them its setting."""
        if not own:
            return "not run"
        mark = "" if own[0]["stage"] == "table" else f" {SEARCHED}"
        numbers, details = self.described(own, Setting(*key_of(own[0])))
        return f"{numbers}{mark}<br><small>{details}</small>"

    def described(self, own: Sequence[Row], best: Setting) -> tuple[str, str]:
        """Return mean ± standard error over seeds in %; rate, schedule, details, last score."""
        details = [f"{best.rate:g} {best.schedule}"]
        details += [] if best.beta is None else [f"beta {best.beta:g}"]
        for name in self.details:
            known = [row[name] for row in own if row.get(name) is not None]
            details += [f"{name} {fmean(known):.2f}"] if known else []
        ends = [max(row["curve"].items(), key=lambda point: int(point[0]))[1] for row in own]
        details.append(f"last {100 * fmean(ends):.1f}")
        return with_error([100 * row["score"] for row in own], 1), ", ".join(details)

    def count(self) -> str:
        """Return the number of runs of each stage, and the hours that they take."""
        number = len(self.cells())
        with_beta = sum("objective.beta" in self.objectives[name] for name, _ in self.cells())
        tuned = with_beta if self.betas else 0
        tried = {
            "for rates": number * len(self.rates),
            "for schedules": number * 2 * (len(self.schedules) - 1),
            "for betas": tuned * (len(self.betas) + 3 * len(self.schedules) - 1),
        }
        runs = {stage: n * len(self.search_seeds) for stage, n in tried.items() if n}
        runs["for the table"] = number * len(self.seeds)
        total = sum(runs.values())
        grids = number * len(self.schedules) + 2 * tuned
        most = total + grids * self.wider * len(self.search_seeds)
        hours, longest = (n * self.seconds / CORES / 3600 for n in (total, most))
        stages = ", ".join(f"{n} {stage}" for stage, n in runs.items())
        return (
            f"{self.name}: {total} runs ({stages}), about {hours:.1f} hours on two cores; {most}"
            f" runs and {longest:.1f} hours if every grid is widened {self.wider} times"
        )


def some(objectives: Mapping[str, Settings], *names: str) -> dict[str, Settings]:
    """Return the objectives with these names."""
    return {name: objectives[name] for name in names}


def beside(value: float, series: Sequence[float]) -> list[float]:
    """Return the next value below and the next one above, where there are any."""
    lower = [other for other in series if other < value]
    return [*lower[-1:], *[other for other in series if other > value][:1]]


def with_error(values: Sequence[float], digits: int) -> str:
    """Return the mean over seeds ± its standard error, which one value does not have."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{error}"


def label_of(setting: Setting, seed: int) -> str:
    return f"{setting.label}, seed {seed}"


def key_of(row: Row) -> tuple[Any, ...]:
    """Return the values of a setting; rows from before the search of beta have none."""
    names = [each.name for each in fields(Setting)]
    return tuple(row.get(name) for name in names)


def rounded(value: Any) -> Any:
    """Return a number with six digits; one that is not a number is None."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if value == value else None
    return value

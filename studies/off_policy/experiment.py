"""An experiment: objectives under several conditions, each at its own best rate and schedule.

Stages:

1. rates: learning rates for each objective under each condition, with seeds of their own, at full
   length. Where the best one is at the edge of those tried, the next one is tried too, at most
   `wider` times.
2. schedules: the best two rates of each again, with linear decay. Here, too, a best one at the edge
   of those tried is followed by the next: with decay, higher rates are best.
3. table: the best rate and schedule of each, with other seeds, and prompts that the search has not
   seen.

The score of a run is the mean of its last three evaluations; a run that failed has 0. The rows of
an objective under a condition are written to rows/NAME.json as soon as its runs have ended, and are
not run again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tba.runs.folder import write_whole
from tba.tools.study import curve, read_metrics, write_results
from tba.tools.sweep import sweep

HERE = Path(__file__).parent
ROWS = HERE / "rows"
RUNS = Path("runs/off_policy")
RATES = (3e-6, 1e-5, 3e-5, 1e-4, 3e-4)
SERIES = (1e-7, 3e-7, 1e-6, *RATES, 1e-3, 3e-3, 1e-2)
"""Rates to widen a grid with."""
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
    """What is run: an objective under a condition, with a rate and a schedule."""

    objective: str
    condition: Condition
    rate: float
    schedule: str = "constant"

    @property
    def label(self) -> str:
        return f"{self.objective}, {self.condition}, {self.rate:g}, {self.schedule}"


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
    schedules: bool = True
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
        rates = [Setting(*cell, rate) for cell in self.cells() for rate in self.rates]
        tried = self.search("rates", rates)
        if self.schedules:
            second = [
                replace(setting, schedule="linear")
                for cell in self.cells()
                for setting in self.ranked(tried, *cell)[:2]
            ]
            tried += self.search("schedules", second)
        best = [self.ranked(tried, *cell)[0] for cell in self.cells()]
        self.run("table", best, self.seeds)

    def search(self, stage: str, settings: Sequence[Setting]) -> list[Row]:
        """Run settings in a stage, and what is beyond the edge; return the rows."""
        tried = list(settings)
        rows = self.run(stage, tried, self.search_seeds)
        for _ in range(self.wider):
            further = self.beyond(rows)
            if not further:
                break
            tried += further
            rows = self.run(stage, tried, self.search_seeds)
        for setting in self.beyond(rows):
            print(f"{setting.label}: the best rate is still at the edge of those tried")
        return rows

    def run(self, stage: str, settings: Sequence[Setting], seeds: Sequence[int]) -> list[Row]:
        """Return the rows of settings in a stage; what is missing is run, a cell at a time."""
        rows = self.known()
        has = {(row["stage"], key_of(row), row["seed"]) for row in rows}
        for cell in self.cells():
            own = [s for s in settings if (s.objective, s.condition) == cell]
            missing = [
                s for s in own if any((stage, key_of(asdict(s)), n) not in has for n in seeds)
            ]
            if missing:
                made = self.made(stage, missing, seeds)
                rows += [row for row in made if (stage, key_of(row), row["seed"]) not in has]
                self.keep(rows)
        asked = {key_of(asdict(setting)) for setting in settings}
        return [row for row in rows if row["stage"] == stage and key_of(row) in asked]

    def made(self, stage: str, settings: Sequence[Setting], seeds: Sequence[int]) -> list[Row]:
        """Run settings of one objective under one condition, and return their rows."""
        first = settings[0]
        print(f"{self.name}, {stage}: {first.objective}, {self.condition} {first.condition}")
        place = f"{self.name}-{stage}-{first.objective}-{first.condition}"
        folder = RUNS / re.sub(r"\W+", "_", place)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "study.toml"
        path.write_text(self.text(stage, folder, settings, seeds), encoding="utf-8")
        status = sweep(path)
        if status:
            raise SystemExit(status)
        runs = {label_of(setting, seed): (setting, seed) for setting in settings for seed in seeds}
        return [
            self.row(folder, result, stage, *runs[result["axes"]["variant"]])
            for result in write_results(folder).to_dict("records")
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

    def text(
        self, stage: str, folder: Path, settings: Sequence[Setting], seeds: Sequence[int]
    ) -> str:
        """Return settings as a study, in TOML."""
        lines = ["[study]", f'folder = "{folder}"', f"parallel = {PARALLEL}"]
        kept = json.dumps(self.keep_checkpoints)
        lines += [f"keep_checkpoints = {kept}", f'base = "{HERE / self.base}"', ""]
        lines += ["[[grid]]", f'name = "{stage}"', "variants = ["]
        for setting, seed in product(settings, seeds):
            given = {
                "label": label_of(setting, seed),
                "run.seed": seed,
                **({"task.seed": seed} if stage == "table" and self.new_prompts else {}),
                **(self.given or {}),
                **self.objectives[setting.objective],
                **self.conditions[setting.condition],
                "trainer.learning_rate": setting.rate,
                "trainer.schedule": setting.schedule,
            }
            pairs = ", ".join(f'"{key}" = {json.dumps(value)}' for key, value in given.items())
            lines.append(f"    {{ {pairs} }},")
        return "\n".join([*lines, "]", ""])

    def means(
        self, rows: Sequence[Row], objective: str, condition: Condition
    ) -> dict[tuple[float, str], float]:
        """Return the mean score of each rate and schedule that was tried, over seeds."""
        scores: dict[tuple[float, str], list[float]] = {}
        for row in rows:
            if (row["objective"], row["condition"]) == (objective, condition):
                scores.setdefault((row["rate"], row["schedule"]), []).append(row[self.compared_by])
        return {key: fmean(values) for key, values in scores.items()}

    def ranked(self, rows: Sequence[Row], objective: str, condition: Condition) -> list[Setting]:
        """Return what was tried in a cell, the best first; of equals the lowest rate."""
        found = self.means(rows, objective, condition)
        order = sorted(found, key=lambda key: (-found[key], key))
        return [Setting(objective, condition, rate, schedule) for rate, schedule in order]

    def beyond(self, rows: Sequence[Row]) -> list[Setting]:
        """Return the next rates of cells whose best rate is at the edge of those tried."""
        further = []
        for objective, condition in self.cells():
            best = self.ranked(rows, objective, condition)[0]
            tried = [rate for rate, _ in self.means(rows, objective, condition)]
            place = SERIES.index(best.rate)
            if best.rate == min(tried) and place > 0:
                further.append(replace(best, rate=SERIES[place - 1]))
            if best.rate == max(tried) and place < len(SERIES) - 1:
                further.append(replace(best, rate=SERIES[place + 1]))
        return further

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
        """Return objective x condition; one sentence before the first run."""
        if not self.known():
            return "Not run yet: `make study-long`."
        cells = {(objective, c): rows for objective, c, rows in self.final()}
        heads = [c if isinstance(c, str) else f"{self.condition} {c}" for c in self.conditions]
        lines = [f"| objective | {' | '.join(heads)} |", "| --- |" + " --- |" * len(heads)]
        for objective in self.objectives:
            texts = [self.cell(cells[objective, c]) for c in self.conditions]
            lines.append(f"| {objective} | {' | '.join(texts)} |")
        return "\n".join(lines)

    def cell(self, own: Sequence[Row]) -> str:
        """Return mean ± standard error over seeds in %, rate, schedule, details, last score."""
        if not own:
            return "not run"
        scores = [100 * row["score"] for row in own]
        error = f" ± {stdev(scores) / len(scores) ** 0.5:.1f}" if len(scores) > 1 else ""
        mark = "" if own[0]["stage"] == "table" else f" {SEARCHED}"
        details = [f"{own[0]['rate']:g} {own[0]['schedule']}"]
        for name in self.details:
            known = [row[name] for row in own if row.get(name) is not None]
            details += [f"{name} {fmean(known):.2f}"] if known else []
        ends = [max(row["curve"].items(), key=lambda point: int(point[0]))[1] for row in own]
        details.append(f"last {100 * fmean(ends):.1f}")
        return f"{fmean(scores):.1f}{error}{mark}<br><small>{', '.join(details)}</small>"

    def count(self) -> str:
        """Return the number of runs of each stage, and the hours that they take."""
        number = len(self.cells())
        rates = number * len(self.rates) * len(self.search_seeds)
        schedules = number * 2 * len(self.search_seeds) if self.schedules else 0
        total = rates + schedules + number * len(self.seeds)
        widened = self.wider * (1 + self.schedules)
        most = total + number * widened * len(self.search_seeds)
        hours, longest = (runs * self.seconds / CORES / 3600 for runs in (total, most))
        return (
            f"{self.name}: {rates} runs for rates, {schedules} for schedules,"
            f" {number * len(self.seeds)} for the table: {total} runs, about {hours:.1f} hours on"
            f" two cores; {most} runs and {longest:.1f} hours if every grid is widened"
            f" {self.wider} times"
        )


def label_of(setting: Setting, seed: int) -> str:
    return f"{setting.label}, seed {seed}"


def key_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("objective", "condition", "rate", "schedule"))


def rounded(value: Any) -> Any:
    """Return a number with six digits; one that is not a number is None."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if value == value else None
    return value

"""The study of stale data: each objective at each lag, at its own best rate and schedule.

    python studies/off_policy/stages.py            # `make study`; runs what staleness.json lacks
    python studies/off_policy/stages.py --count    # only the number of runs, and the time
    python studies/off_policy/stages.py --draw     # only the figures and the table, from the rows

Stages; each objective at each lag is a study of its own below runs/off_policy:

1. rates: five learning rates at each lag, with two seeds, at full length. Where the best one is at
   the edge of those tried, the next one is tried too, at most `WIDER` times.
2. schedules: the best two rates of each objective at each lag again, with linear decay.
3. table: the best rate and schedule of each, with five other seeds.

The score of a run is the mean of its last three evaluations; a run that failed has 0. Lag 256 is
the offline case: all 200 batches come from the first weights. The rows of an objective at a lag
are written to staleness.json as soon as its runs have ended.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tba.studies.results import curve, read_metrics, write_results
from tba.studies.sweep import sweep

HERE = Path(__file__).parent
ROWS = HERE / "staleness.json"
RUNS = Path("runs/off_policy")
DOCS = HERE.parent.parent / "docs"
OBJECTIVES: dict[str, dict[str, Any]] = {
    "tb": {"objective.use": "tb", "objective.beta": 0.1},
    "tb tapered": {"objective.use": "tb", "objective.beta": 0.1, "objective.tapered": True},
    "tba_prime": {"objective.use": "tba_prime", "objective.beta": 0.1},
    "rloo": {"objective.use": "rloo", "objective.beta": 0.1},
    "grpo": {"objective.use": "grpo", "objective.beta": 0.04},
    "dr_grpo": {"objective.use": "dr_grpo"},
    "ppo": {"objective.use": "ppo", "objective.beta": 0.1, "objective.whiten": True},
    "oapl": {"objective.use": "oapl"},
    "m2po": {"objective.use": "m2po"},
    "cispo": {"objective.use": "cispo"},
}
LAGS = (0, 4, 16, 64, 256)
RATES = (3e-6, 1e-5, 3e-5, 1e-4, 3e-4)
SERIES = (1e-7, 3e-7, 1e-6, *RATES, 1e-3, 3e-3, 1e-2)
"""Rates to widen the grid with."""
WIDER = 2
SEARCH_SEEDS = (100, 101)
SEEDS = (0, 1, 2, 3, 4)
EVALUATIONS = 3
SECONDS = 32.0
"""A run on one core with another beside it, with its start."""
PARALLEL = 2
Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What is run: an objective at a lag, with a rate and a schedule."""

    objective: str
    lag: int
    rate: float
    schedule: str = "constant"

    @property
    def label(self) -> str:
        return f"{self.objective}, lag {self.lag}, {self.rate:g}, {self.schedule}"


def text_of(stage: str, folder: Path, settings: Sequence[Setting], seeds: Sequence[int]) -> str:
    """Return settings of a stage as a study, in TOML."""
    lines = ["[study]", f'folder = "{folder}"', f"parallel = {PARALLEL}"]
    lines += ["keep_checkpoints = false", f'base = "{HERE / "base.toml"}"', "", "[[grid]]"]
    lines += [f'name = "{stage}"', f'"run.seed" = {json.dumps(seeds)}', "variants = ["]
    for setting in settings:
        given = {
            "label": setting.label,
            **OBJECTIVES[setting.objective],
            "runtime.lag": setting.lag,
            "trainer.learning_rate": setting.rate,
            "trainer.schedule": setting.schedule,
        }
        pairs = ", ".join(f'"{key}" = {json.dumps(value)}' for key, value in given.items())
        lines.append(f"    {{ {pairs} }},")
    return "\n".join([*lines, "]", ""])


def run(stage: str, settings: Sequence[Setting], seeds: Sequence[int]) -> list[Row]:
    """Return the rows of a stage; runs that staleness.json lacks are made, a cell at a time."""
    kept = known()
    has = {(row["stage"], key_of(row), row["seed"]) for row in kept}
    for objective, lag in cells():
        own = [s for s in settings if (s.objective, s.lag) == (objective, lag)]
        missing = [s for s in own if any((stage, key_of(asdict(s)), n) not in has for n in seeds)]
        if missing:
            kept += carry_out(stage, missing, seeds)
            keep(kept)
    asked = {key_of(asdict(setting)) for setting in settings}
    return [row for row in kept if row["stage"] == stage and key_of(row) in asked]


def key_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("objective", "lag", "rate", "schedule"))


def carry_out(stage: str, settings: Sequence[Setting], seeds: Sequence[int]) -> list[Row]:
    """Run settings of one objective at one lag, and return their rows."""
    name = f"{stage}, {settings[0].objective}, lag {settings[0].lag}"
    folder = RUNS / name.replace(", ", "-").replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "study.toml"
    path.write_text(text_of(stage, folder, settings, seeds))
    print(name, flush=True)
    status = sweep(path)
    if status:
        raise SystemExit(status)
    by_label = {setting.label: setting for setting in settings}
    rows = []
    for kept in write_results(folder).to_dict("records"):
        if kept["axes"]["variant"] not in by_label:
            continue
        by_step = curve(read_metrics(folder / kept["folder"]), kept["metric"])["score"]
        ended = kept["status"] == "finished"
        row = {
            "stage": stage,
            **asdict(by_label[kept["axes"]["variant"]]),
            "seed": int(kept["axes"]["run.seed"]),
        }
        row |= {name: kept.get(name) for name in ("status", "error", "ess", "lag_mean", "seconds")}
        row["score"] = float(by_step.tail(EVALUATIONS).mean()) if ended else 0.0
        row["drop"] = kept["drop"] if ended else None
        row["log_ratio"] = kept.get("sampled_log_ratio") if ended else None
        row["curve"] = {int(step): round(score, 5) for step, score in by_step.items()}
        rows.append(row)
    return rows


def means(rows: Sequence[Row], objective: str, lag: int) -> dict[tuple[float, str], float]:
    """Return the mean score of each rate and schedule that was tried, over seeds."""
    scores: dict[tuple[float, str], list[float]] = {}
    for row in rows:
        if (row["objective"], row["lag"]) == (objective, lag):
            scores.setdefault((row["rate"], row["schedule"]), []).append(row["score"])
    return {key: fmean(values) for key, values in scores.items()}


def ranked(rows: Sequence[Row], objective: str, lag: int) -> list[Setting]:
    """Return what was tried of an objective at a lag, the best first; of equals the lowest rate."""
    found = means(rows, objective, lag)
    order = sorted(found, key=lambda key: (-found[key], key))
    return [Setting(objective, lag, rate, schedule) for rate, schedule in order]


def cells() -> list[tuple[str, int]]:
    return [(objective, lag) for lag in LAGS for objective in OBJECTIVES]


def wider(rows: Sequence[Row]) -> list[Setting]:
    """Return the next rates of objectives and lags whose best one is at the edge of the grid."""
    further = []
    for objective, lag in cells():
        best = ranked(rows, objective, lag)[0]
        tried = [rate for rate, _ in means(rows, objective, lag)]
        place = SERIES.index(best.rate)
        if best.rate == min(tried) and place > 0:
            further.append(replace(best, rate=SERIES[place - 1]))
        if best.rate == max(tried) and place < len(SERIES) - 1:
            further.append(replace(best, rate=SERIES[place + 1]))
    return further


def search() -> list[Row]:
    """Run the first stage, and return its rows."""
    settings = [Setting(*cell, rate) for cell in cells() for rate in RATES]
    rows = run("rates", settings, SEARCH_SEEDS)
    for _ in range(WIDER):
        further = wider(rows)
        if not further:
            break
        settings += further
        rows = run("rates", settings, SEARCH_SEEDS)
    for setting in wider(rows):
        print(f"{setting.label}: the best rate is still at the edge of those tried")
    return rows


def study() -> None:
    """Run all stages."""
    rates = search()
    second = [
        replace(setting, schedule="linear") for c in cells() for setting in ranked(rates, *c)[:2]
    ]
    schedules = run("schedules", second, SEARCH_SEEDS)
    run("table", [ranked([*rates, *schedules], *cell)[0] for cell in cells()], SEEDS)


def known() -> list[Row]:
    """Return the rows that are there; empty before the first run."""
    return json.loads(ROWS.read_text()) if ROWS.is_file() else []


def keep(rows: Sequence[Row]) -> None:
    lines = ",\n".join(json.dumps({k: rounded(v) for k, v in row.items()}) for row in rows)
    ROWS.with_suffix(".new").write_text(f"[\n{lines}\n]\n")
    ROWS.with_suffix(".new").replace(ROWS)


def rounded(value: Any) -> Any:
    """Return a number with six digits; one that is not a number is None."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if value == value else None
    return value


def table(rows: Sequence[Row]) -> str:
    """Return objective x lag: score ± standard error, rate, schedule, ESS and drop."""
    lines = [f"| objective |{''.join(f' lag {lag} |' for lag in LAGS)}"]
    lines.append("| --- |" + " --- |" * len(LAGS))
    for objective in OBJECTIVES:
        texts = []
        for lag in LAGS:
            own = [
                r
                for r in rows
                if (r["stage"], r["objective"], r["lag"]) == ("table", objective, lag)
            ]
            texts.append(cell(own))
        lines.append(f"| {objective} | {' | '.join(texts)} |")
    return "\n".join(lines)


def cell(own: Sequence[Row]) -> str:
    scores = [100 * row["score"] for row in own]
    error = stdev(scores) / len(scores) ** 0.5
    details = [f"{own[0]['rate']:g} {own[0]['schedule']}"]
    for name in ("ess", "drop"):
        known = [row[name] for row in own if row[name] is not None]
        details += [f"{name} {fmean(known):.2f}"] if known else []
    return f"{fmean(scores):.1f} ± {error:.1f}<br><small>{', '.join(details)}</small>"


def draw(rows: Sequence[Row]) -> None:
    """Draw score against lag, each at its best rate, and score against rate at each lag."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = dict(zip(OBJECTIVES, pyplot.get_cmap("tab10").colors, strict=False))
    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for objective, color in colors.items():
        own = [r for r in rows if (r["stage"], r["objective"]) == ("table", objective)]
        scores = [[r["score"] for r in own if r["lag"] == lag] for lag in LAGS]
        axis.plot([fmean(s) for s in scores], marker="o", color=color, label=objective)
        low, high = ([limit(s) for s in scores] for limit in (min, max))
        axis.fill_between(range(len(LAGS)), low, high, color=color, alpha=0.1)
    axis.set_xticks(range(len(LAGS)), [str(lag) for lag in LAGS])
    axis.set(xlabel="lag (steps)", ylabel="sampled pass@1 at its own best rate")
    axis.legend(fontsize=8)
    figure.savefig(DOCS / "staleness.png", dpi=130)
    figure, axes = pyplot.subplots(
        1, len(LAGS), figsize=(3 * len(LAGS), 3.4), sharey=True, layout="constrained"
    )
    for axis, lag in zip(axes, LAGS, strict=True):
        for objective, color in colors.items():
            found = means([r for r in rows if r["stage"] == "rates"], objective, lag)
            points = sorted((rate, score) for (rate, _), score in found.items())
            axis.plot(*zip(*points, strict=True), marker=".", color=color, label=objective)
        axis.set(xscale="log", xlabel="learning rate", title=f"lag {lag}")
    axes[0].set_ylabel("sampled pass@1")
    axes[0].legend(fontsize=7)
    figure.savefig(DOCS / "staleness_rates.png", dpi=130)


def count() -> str:
    """Return the number of runs of each stage, and the hours that they take."""
    number = len(cells())
    rates = number * len(RATES) * len(SEARCH_SEEDS)
    schedules = number * 2 * len(SEARCH_SEEDS)
    last = number * len(SEEDS)
    total = rates + schedules + last
    most = total + number * WIDER * len(SEARCH_SEEDS)
    hours, longest = (runs * SECONDS / PARALLEL / 3600 for runs in (total, most))
    return (
        f"{rates} runs for rates, {schedules} for schedules, {last} for the table: {total} runs,"
        f" about {hours:.1f} hours on two cores; {most} and {longest:.1f} hours if every grid is"
        f" widened {WIDER} times"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", action="store_true", help="print the number of runs only")
    parser.add_argument("--draw", action="store_true", help="draw from the rows that are kept")
    options = parser.parse_args()
    if options.count:
        print(count())
        return
    if not options.draw:
        study()
    rows = known()
    draw(rows)
    print(table(rows))


if __name__ == "__main__":
    main()

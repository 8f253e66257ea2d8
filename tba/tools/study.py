"""Study: grids of runs that share a base config, read from TOML, and their results as rows.

`docs/studies.md` describes the file. `study.json` lists the runs; `results.json` has a row for
each. Only `check_study` imports torch, so mistakes in the file are reported at once.
"""

import itertools
import json
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from math import ceil, nan
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import ConfigDict, Field, TypeAdapter

from tba.config.mistakes import about, masked
from tba.config.schema import Config, Tables, assign_all, by_key, override_all, read_toml
from tba.config.tables import PLUGGED, Positive, Table
from tba.display import printable
from tba.runs.folder import (
    CONFIG,
    METRICS,
    SUMMARY,
    Row,
    read,
    read_digests,
    read_optional,
    write_json,
)
from tba.setup.checks import LONGEST_NAME, placed
from tba.tasks._digests import changed

log = logging.getLogger(__name__)

STUDY = "study.json"
RESULTS = "results.json"
FAILED = "failed.json"
DEFAULT_METRICS = ("sampled_pass@1", "sampled_reward")
SEED = "run.seed"
ESS = "off_policy/ess"
LAG = "off_policy/lag_mean"
TOTALS = ["samples_generated", "samples_trained", "seconds", "steps"]
LAST_TENTH = ("kl", "log_ratio")
"""Metrics that a row averages over the last tenth of the steps."""

Settings = Mapping[str, Any]
Status = Literal["pending", "finished", "failed"]


@dataclass(frozen=True)
class Trial:
    """One run of a study: its settings and status. `folder` is relative to the study folder."""

    grid: str
    folder: str
    label: str
    settings: Settings
    axes: Settings  # settings that differ between runs of the grid; a labelled variant is one axis
    status: Status = "pending"
    error: str | None = None

    @property
    def has_result(self) -> bool:
        """Return whether the run finished, or was ended by a value that is not finite."""
        return self.status == "finished" or str(self.error).startswith("NotFinite")


@dataclass(frozen=True)
class Ledger:
    """Contents of `study.json`."""

    name: str
    metric: str | None
    runs: Sequence[Trial]

    def write(self, folder: Path) -> None:
        write_json(folder / STUDY, asdict(self))


class StudyTable(Table):
    """Table [study] of the file; `docs/studies.md` describes each key."""

    folder: str = ""
    parallel: Positive = 1
    keep_checkpoints: bool = True
    metric: str | None = None
    base: str | None = None


class VariantTable(Table):
    """Settings of a grid that are changed together, with an optional name."""

    model_config = ConfigDict(extra="allow")
    label: str | None = None


class GridTable(Table):
    """Table [[grid]]. Its other keys are settings; settings with a list as value are axes."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
    variants: list[VariantTable] = Field([VariantTable()], min_length=1)


class StudyFile(Tables):
    study: StudyTable = StudyTable()
    base: dict[str, Any] = Field(default_factory=dict)
    grid: Annotated[list[GridTable], Field(min_length=1)]


@dataclass(frozen=True)
class Study:
    name: str
    table: StudyTable
    base: Mapping[str, Any]
    trials: Sequence[Trial]  # the runs of all grids, in the order of the file

    @property
    def folder(self) -> Path:
        return Path(self.table.folder or f"runs/{self.name}").expanduser()

    def path(self, trial: Trial) -> Path:
        return self.folder / trial.folder

    def tables(self, trial: Trial) -> dict[str, Any]:
        """Return the tables of the trial's run: the base, overridden by the grid's settings."""
        tables = deepcopy(dict(self.base))
        with about(_where(trial)):
            assign_all(tables, {**trial.settings, "run.folder": str(self.path(trial))})
        return tables

    def config(self, trial: Trial) -> Config:
        """Return the config of the trial's run; ValueError as one line with the trial's name."""
        tables = self.tables(trial)
        try:
            return Config(**tables)
        except ValueError as error:
            lines = "; ".join(str(error).splitlines())
            raise ValueError(f"{_where(trial)}: {lines}") from error


def read_study(path: Path, settings: Sequence[str] = ()) -> Study:
    """Read a study. Settings `study.key=value` override [study]; all others override [base]."""
    of_study = [s for s in settings if s.startswith("study.")]
    of_base = [s for s in settings if not s.startswith("study.")]
    tables = read_toml(path, "study")
    override_all(tables, of_study)
    file = StudyFile(**tables)
    table = file.study
    merged: dict[str, Any] = {"log": {"console": "off", "report_to": []}}
    if table.base is not None:
        below = read_toml(path.parent / table.base, "config")
        assign_all(merged, _by_key(below, table.base))
    assign_all(merged, _by_key(file.base, "[base]"))
    override_all(merged, of_base)
    trials = [trial for grid in file.grid for trial in _grid(grid)]
    repeated, count = Counter(grid.name for grid in file.grid).most_common(1)[0]
    if count > 1:
        raise ValueError(f"two grids are called {repeated!r}; rename one of them")
    folders = Counter(trial.folder for trial in trials)
    for trial in trials:
        if max(map(len, trial.folder.encode().split(b"/"))) > LONGEST_NAME:
            raise ValueError(
                f"{_where(trial)}: this name is too long for a folder; write the values as"
                " variants, each with a label"
            )
        if folders[trial.folder] > 1:
            raise ValueError(
                f"{_where(trial)}: two runs have this name; remove the repeated value, or write"
                " both values as variants, each with a label"
            )
    name = path.resolve().parent.name if path.stem == "study" else path.stem
    study = Study(name, table, merged, trials)
    _check_settings(study, of_base, _by_key(file.base, "[base]"))
    return study


def _check_settings(study: Study, settings: Sequence[str], base: Iterable[str]) -> None:
    """Raise ValueError for a setting that no run uses; warn about one that only some runs use.

    Also warn about a key of [base] that no run uses because every grid names another plug-in.
    """
    runs = [study.tables(trial) for trial in study.trials]
    for key in base:
        given = _value(study.base, key)
        if given is not None and all(_value(run, key) is None for run in runs):
            log.warning("no run has [base] %s: every grid names another plug-in", key)
    for setting in settings:
        key = setting.partition("=")[0].strip()
        key = f"{key}.use" if key in PLUGGED else key
        count = [_value(run, key) for run in runs].count(_value(study.base, key))
        if count == 0:
            cause = "study.folder" if key == "run.folder" else "the grids"
            raise ValueError(
                f"{setting!r} would change nothing: no run has it, because of {cause};"
                " change it there"
            )
        if count < len(runs):
            log.warning(
                "%r applies to only %d of %d runs: grids override or drop it",
                setting,
                count,
                len(runs),
            )


def _value(tables: Any, key: str) -> Any:
    """Return the value of `table.key`, or None."""
    for name in key.split("."):
        tables = tables.get(name) if isinstance(tables, Mapping) else None
    return tables


def check_study(study: Study) -> list[Config]:
    """Check all runs, and return the config that each will store.

    Data that several runs share are read once, and runs that differ only in the seed are checked
    once.
    """
    from tba.setup.setup import READ, check

    configs = [placed(study.config(trial)) for trial in study.trials]
    by_data: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, config in enumerate(configs):
        tables = config.nested()
        tables["run"] |= {"folder": "", "seed": 0}
        read = json.dumps([tables[name] for name in READ], sort_keys=True)
        by_data[read][json.dumps(tables, sort_keys=True)].append(place)
    for alike in by_data.values():
        data = None
        for places in alike.values():
            with about(_where(study.trials[places[0]])):
                data = check(configs[places[0]], data=data)
            for place in places:
                run = study.path(study.trials[place])
                if finished_summary(run) and (names := changed(data.digests, read_digests(run))):
                    raise ValueError(
                        f"{run} has finished, and since then these have changed:"
                        f" {', '.join(names)}; remove that folder to run it again, or undo the"
                        " change"
                    )
                configs[place] = configs[place].within_epochs(len(data.prompts))
    return configs


def _where(trial: Trial) -> str:
    return f"grid {trial.grid!r}, {trial.folder.partition('/')[2]}"


def _grid(grid: GridTable) -> Iterator[Trial]:
    """Yield a trial for each combination of axis values and variants."""
    where = f"grid {grid.name!r}"
    settings = _by_key(grid.model_extra or {}, where)
    variants = [(each.label, _by_key(each.model_extra or {}, where)) for each in grid.variants]
    if len({frozenset(bundle) if label is None else None for label, bundle in variants}) > 1:
        raise ValueError(
            f'{where}: give each variant a label = "...", or have all of them set the same keys'
        )
    bundled = {key for _, bundle in variants for key in bundle}
    if "run.folder" in {*settings, *bundled}:
        raise ValueError(f"{where}: remove 'run.folder'; runs are written into study.folder")
    for key, value in settings.items():
        if value == []:
            raise ValueError(f"{where}: {key!r} = [] has no values; write one, or remove the key")
        if key in bundled:
            raise ValueError(f"{where}: {key!r} is in the grid and in a variant; remove one")
    axes = {key: value for key, value in settings.items() if isinstance(value, list)}
    for *values, (label, bundle) in itertools.product(*axes.values(), variants):
        varied = dict(zip(axes, values, strict=True))
        named = {**varied, **bundle} if label is None else varied
        count = Counter(key.rpartition(".")[2] for key in named)
        words = [] if label is None else [label]
        slug = [_safe(word) for word in words]
        for key, value in named.items():
            last = key.rpartition(".")[2]
            slug.append(f"{last if count[last] == 1 else key}={_safe(value)}")
            if key != SEED:
                words.append(phrase(key, value))
        yield Trial(
            grid=grid.name,
            folder=f"{grid.name}/{','.join(slug) or 'run'}",
            label=", ".join(words) or grid.name,
            settings={**settings, **varied, **bundle},
            axes=named if label is None else {**named, "variant": label},
        )


def _by_key(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Flatten a table to `table.key`, quoted in TOML or not; `objective` means `objective.use`."""
    keys: dict[str, Any] = {}
    for key, value in table.items():
        own = {key: value} if "." in key else by_key(key, value)
        if own is None:
            raise ValueError(f'{where}: {key!r} is not a setting; write "table.key" = [values]')
        keys |= own
    return keys


def _safe(value: Any) -> str:
    """Return text for a file name that needs no quoting in a shell."""
    text = value if isinstance(value, str) else json.dumps(value)
    safe = re.sub(r"[^A-Za-z0-9._+-]+", "-", text.strip("{}[]/ "))
    return safe if safe.strip(".") else "-"  # "." and ".." are other folders


def read_ledger(folder: Path) -> Ledger:
    study = read_optional(folder / STUDY)
    if study is None:
        raise ValueError(
            f"{folder} is not the folder of a study: it has no {STUDY};"
            " run a study with `tba sweep STUDY.toml`"
        )
    return TypeAdapter(Ledger).validate_python(study)


def standing(run: Path) -> tuple[Status, str | None]:
    """Return the status of a run from the files in its folder, and the error if it failed."""
    if finished_summary(run) is not None:
        return "finished", None
    failed = read_optional(run / FAILED)
    return ("pending", None) if failed is None else ("failed", printable(failed["error"]))


def write_failed(run: Path, error: str, traceback: str = "") -> None:
    run.mkdir(parents=True, exist_ok=True)
    write_json(run / FAILED, {"error": masked(error), "traceback": masked(traceback)})


def finished_summary(run: Path) -> Row | None:
    """Return the summary of a finished run, else None."""
    summary: Row | None = read_optional(run / SUMMARY)
    return summary if summary is not None and summary["finished"] else None


def scores(run: Path) -> dict[str, float]:
    """Return the last scores of a finished run; empty if it has no held-out prompts."""
    summary = finished_summary(run)
    last = {} if summary is None else summary["eval/last"]
    return {name: v for name, v in last.items() if name not in ("step", "stderr", "seconds")}


def metric_of(known: Mapping[str, float], metric: str | None) -> str:
    """Return the score that runs are compared by: a default one if the runs lack `metric`."""
    if metric is not None and (not known or metric in known):
        return metric
    return next((m for m in DEFAULT_METRICS if m in known), DEFAULT_METRICS[0])


def phrase(key: str, value: Any) -> str:
    """Return a short name of a setting: `tb` for objective.use, `lag 4` for runtime.lag."""
    last = key.rpartition(".")[2]
    text = value if isinstance(value, str) else json.dumps(value)
    if isinstance(value, float):
        text = f"{value:g}"
    return text if last in ("use", "variant") else f"{last} {text}"


def read_metrics(run: Path, *columns: str) -> pd.DataFrame:
    """Return `metrics.jsonl` as a table of floats; missing `columns` are filled with NaN."""
    table = pd.DataFrame(read(run / METRICS), dtype=float)
    return table.assign(**{name: nan for name in columns if name not in table})


def curve(metrics: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return `score` and `samples_trained` by evaluated step; of repeated steps, the last.

    Evaluations in which no answer could be scored are left out.
    """
    name = f"eval/{metric}"
    scored = metrics[metrics.get("eval/sampled_rejected", pd.Series(0.0, metrics.index)) != 1]
    by_step = scored.reindex(columns=["step", name, "samples_trained"]).groupby("step").last()
    if 0 in by_step.index:
        by_step.loc[0, "samples_trained"] = 0
    return by_step.rename(columns={name: "score"}).dropna()


def write_results(folder: Path) -> pd.DataFrame:
    """Return a row per run, in the order of the study, and write them without `axes` as JSON."""
    ledger = read_ledger(folder)
    known: dict[str, float] = {}
    for trial in ledger.runs:
        known |= scores(folder / trial.folder)
    metric = metric_of(known, ledger.metric)
    if ledger.metric not in (None, metric):
        log.warning(
            "study.metric = %r: the runs have no such score, and are compared by %s; set"
            " study.metric to one of %s, and type `tba sweep` again", ledger.metric, metric,
            ", ".join(known),
        )  # fmt: skip
    rows = [_row(folder / t.folder, t, metric) for t in ledger.runs]
    table = pd.DataFrame(rows, dtype=object).drop(columns="axes").replace({nan: None})
    write_json(folder / RESULTS, table.to_dict("records"))
    return pd.DataFrame(rows)


def _row(run: Path, trial: Trial, metric: str) -> Row:
    """Return the row of a run."""
    config = read_optional(run / CONFIG)
    last = scores(run)
    metrics = read_metrics(run, "step", "time", *TOTALS[:2], *LAST_TENTH, ESS, LAG)
    by_step = curve(metrics, metric)["score"]
    peak = by_step.max()
    at = nan if by_step.empty else int(by_step.idxmax())
    steps = metrics.dropna(subset="samples_trained")
    newest = steps.rename(columns={"step": "steps", "time": "seconds"})[TOTALS].max()
    totals = finished_summary(run) or newest
    tenth = steps.tail(ceil(len(steps) / 10))
    return asdict(trial) | {
        "objective": config and config["objective"]["use"],
        "seed": config and config["run"]["seed"],
        "metric": metric,
        **last,
        "last": nan if last.get("sampled_rejected") == 1 else last.get(metric, nan),
        "peak": peak,
        "peak_step": at,
        "drop": peak - by_step[by_step.index >= at].min(),
        **{name: tenth[name].mean() for name in LAST_TENTH},
        "ess": steps[ESS].mean(),
        "lag_mean": steps[LAG].mean(),
        **{name: totals[name] for name in TOTALS},
    }

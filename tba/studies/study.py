"""A study: grids of runs that share a base config, read from TOML; see `docs/studies.md`.

Only `check_study` imports torch, so that mistakes in the file are reported at once.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from tba.config.errors import about
from tba.config.plugins import resolve_all
from tba.config.schema import Config, Tables, assign_all, override_all, read_toml
from tba.config.tables import PLUGGED, Positive, Table
from tba.studies.results import SEED, Trial, phrase

READ = ("policy", "task", "engine", "sampling", "eval", "selection")
"""Tables that decide which models and data are read from disk, and how prompts are chosen."""


class StudyTable(Table):
    """Table [study] of the file; `docs/studies.md` describes each key."""

    folder: str = ""
    parallel: Positive = 1
    keep_checkpoints: bool = True
    metric: str | None = None
    base: str | None = None


class VariantTable(Table):
    """Settings of a grid that are changed together, and their name, if they have one."""

    model_config = ConfigDict(extra="allow")
    label: str | None = None


class GridTable(Table):
    """Table [[grid]]. Its other keys are settings; those whose value is a list are axes."""

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

    def config(self, trial: Trial) -> Config:
        """Return the config of the trial's run; ValueError in one line, with the trial's name."""
        tables = deepcopy(dict(self.base))
        try:
            assign_all(tables, {**trial.settings, "run.folder": str(self.path(trial))})
            return Config(**tables)
        except ValueError as error:
            lines = "; ".join(str(error).splitlines())
            raise ValueError(f"{_where(trial)}: {lines}") from error


def read_study(path: Path, settings: Sequence[str] = ()) -> Study:
    """Read a study. Settings `study.key=value` override [study], all others override [base]."""
    of_study = [s for s in settings if s.startswith("study.")]
    of_base = [s for s in settings if not s.startswith("study.")]
    tables = read_toml(path, "study")
    override_all(tables, of_study)
    file = StudyFile(**tables)
    table = file.study
    merged: dict[str, Any] = {"log": {"console": "off", "tensorboard": False}}
    if table.base is not None:
        below = read_toml(path.parent / table.base, "config")
        assign_all(merged, _by_key(below, table.base))
    assign_all(merged, _by_key(file.base, "[base]"))
    override_all(merged, of_base)
    trials = _read_grids(file.grid)
    for setting in of_base:
        key = setting.partition("=")[0].strip()
        key = f"{key}.use" if key in PLUGGED else key
        if all(key in trial.settings for trial in trials):
            raise ValueError(
                f"{setting!r} would change nothing: every grid sets {key}; change it in the grids"
            )
    name = path.resolve().parent.name if path.stem == "study" else path.stem
    return Study(name, table, merged, trials)


def check_study(study: Study) -> list[Config]:
    """Return the config of every trial, after all checks; models and data are read once."""
    from tba.runs.setup import check

    configs = [study.config(trial) for trial in study.trials]
    checked = set()
    for trial, config in zip(study.trials, configs, strict=True):
        tables = config.nested()
        read = json.dumps([tables[name] for name in READ], sort_keys=True)
        with about(_where(trial)):
            plugins = resolve_all(config)
            plugins.objective.at(0)
            plugins.strategy.build()
            if read not in checked:
                check(config)
        checked.add(read)
    return configs


def _where(trial: Trial) -> str:
    return f"grid {trial.grid!r}, {trial.folder.partition('/')[2]}"


def _read_grids(grids: Sequence[GridTable]) -> list[Trial]:
    trials = [trial for grid in grids for trial in _grid(grid)]
    name, count = Counter(grid.name for grid in grids).most_common(1)[0]
    if count > 1:
        raise ValueError(f"two grids are called {name!r}; rename one of them")
    folders = Counter(trial.folder for trial in trials)
    for trial in trials:
        if folders[trial.folder] > 1:
            raise ValueError(f"{_where(trial)}: two runs have this name; remove the repeated value")
    return trials


def _grid(grid: GridTable) -> Iterator[Trial]:
    """Yield a trial for each combination of the values of each axis, and of the variants."""
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
    """Return the values by `table.key`, with or without quotes; `objective` is `objective.use`."""
    keys: dict[str, Any] = {}
    for key, value in table.items():
        if "." in key:
            keys[key] = value
        elif isinstance(value, dict):
            keys |= {f"{key}.{inner}": v for inner, v in value.items()}
        elif key in PLUGGED:
            keys[f"{key}.use"] = value
        else:
            raise ValueError(f'{where}: {key!r} is no setting; write "table.key" = [values]')
    return keys


def _safe(value: Any) -> str:
    """Return text for a file's name that needs no quotes in a shell."""
    text = value if isinstance(value, str) else json.dumps(value)
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text.strip("{}[]/ ")) or "-"

"""A study: grids of runs that share a base config, read from TOML; see `docs/studies.md`.

Only `check_study` imports torch, so that mistakes in the file are reported at once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from tba.config.loading import assign_all, override_all, parse, parse_as, read_toml
from tba.config.schema import PLUGGED, Config
from tba.config.table import Positive, Table
from tba.studies.grid import Grid, read_grids, setting_keys
from tba.studies.results import Trial

READ = ("policy", "task", "engine", "sampling", "eval", "selection")
"""Tables that decide which models and data are read from disk, and how prompts are chosen."""


class StudyTable(Table):
    folder: str = Field(
        "",
        description="folder of the runs; default: runs/<name of the file, or of its folder if the"
        " file is study.toml>",
    )
    parallel: Positive = Field(1, description="runs at the same time, each on its own cores")
    keep_checkpoints: bool = Field(
        True, description="false: a finished run keeps only its metrics, samples and summary"
    )
    metric: str | None = Field(
        None,
        description="metric that selects the best run, one of eval/last; default:"
        " sampled_pass@1, or sampled_reward without it",
    )
    base: str | None = Field(
        None, description="a config file, relative to this one; [base] overrides it"
    )


class StudyFile(Table):
    """Table [study] of the file; [base] and [[grid]] are read separately."""

    study: StudyTable = StudyTable()


@dataclass(frozen=True)
class Study:
    name: str
    table: StudyTable
    base: Mapping[str, Any]
    grids: Mapping[str, Grid]

    @property
    def folder(self) -> Path:
        return Path(self.table.folder or f"runs/{self.name}").expanduser()

    def path(self, trial: Trial) -> Path:
        return self.folder / trial.folder

    def trials(self) -> list[Trial]:
        return [trial for grid in self.grids.values() for trial in grid.trials()]

    def config(self, trial: Trial) -> Config:
        """Return the config of the trial's run; ValueError in one line, with the trial's name."""
        tables = deepcopy(dict(self.base))
        try:
            assign_all(tables, {**trial.settings, "run.folder": str(self.path(trial))})
            return parse(tables)
        except ValueError as error:
            lines = "; ".join(str(error).splitlines())
            raise ValueError(f"{_where(trial)}: {lines}") from error


def read_study(path: Path, settings: Sequence[str] = ()) -> Study:
    """Read a study. Settings `study.key=value` override [study], all others override [base].

    ValueError says what to write instead.
    """
    tables = read_toml(path, "study")
    study, base = tables.pop("study", {}), tables.pop("base", {})
    grids = tables.pop("grid", [])
    if tables:
        raise ValueError(
            f"{path}: unknown table [{next(iter(tables))}];"
            " a study has [study], [base] and one or more [[grid]]"
        )
    if not (isinstance(study, dict) and isinstance(base, dict) and isinstance(grids, list)):
        raise ValueError(
            f"{path}: write [study] and [base] once, with single brackets, and each grid as"
            " [[grid]]"
        )
    of_study = [s for s in settings if s.startswith("study.")]
    of_base = [s for s in settings if not s.startswith("study.")]
    file = {"study": study}
    override_all(file, of_study)
    table = parse_as(StudyFile, file).study
    merged: dict[str, Any] = {"log": {"console": "off", "tensorboard": False}}
    if table.base is not None:
        below = read_toml(path.parent / table.base, "config")
        assign_all(merged, setting_keys(below, table.base))
    assign_all(merged, setting_keys(base, "[base]"))
    override_all(merged, of_base)
    name = path.resolve().parent.name if path.stem == "study" else path.stem
    result = Study(name, table, merged, read_grids(grids))
    for setting in of_base:
        _check_effect(setting, result)
    return result


def check_study(study: Study) -> list[Config]:
    """Return the config of every trial, after all checks that need no run."""
    trials = study.trials()
    count = Counter(t.folder for t in trials)
    for trial in trials:
        if count[trial.folder] > 1:
            raise ValueError(
                f"{_where(trial)}: two runs have this name; remove the repeated value,"
                " or give each variant a label"
            )
        if len(trial.folder.partition("/")[2]) > 200:
            raise ValueError(
                f"{_where(trial)}: the name is too long for a folder; give each variant a label"
            )
    configs = [study.config(t) for t in trials]
    checked: set[str] = set()
    for trial, config in zip(trials, configs, strict=True):
        try:
            _check(config, checked)
        except ValueError as error:
            raise ValueError(f"{_where(trial)}: {error}") from error
    return configs


def _check(config: Config, checked: set[str]) -> None:
    """Check what no earlier config had: reading models and data takes long."""
    from tba.config.plugins import resolve_all
    from tba.runs.parts import check

    tables = config.nested()
    read = json.dumps([tables[name] for name in READ], sort_keys=True)
    plugged = json.dumps([tables[name] for name in PLUGGED], sort_keys=True)
    if read not in checked:
        check(config)
    elif plugged not in checked:
        plugins = resolve_all(config)
        plugins.objective.at(0)
        plugins.strategy.build()
    checked |= {read, plugged}


def _check_effect(setting: str, study: Study) -> None:
    key = setting.partition("=")[0].strip()
    key = f"{key}.use" if key in PLUGGED else key
    if all(key in grid.keys for grid in study.grids.values()):
        raise ValueError(
            f"{setting!r} would change nothing: every grid sets {key}; change it in the grids"
        )


def _where(trial: Trial) -> str:
    return f"grid {trial.grid!r}, {trial.folder.partition('/')[2]}"

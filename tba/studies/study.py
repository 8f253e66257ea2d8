"""A study: grids of runs that share a base config, read from TOML. `docs/studies.md` shows the format.

This module imports no torch but to check a study, so that its mistakes and its results are told at once.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from tba.config.loading import assign_all, override_all, parse, parse_as, read_toml
from tba.config.plugins import nearest
from tba.config.schema import PLUGGED, Config
from tba.config.table import Positive, Table
from tba.studies.results import SEED, Settings, Trial, phrase

READ = ("policy", "task", "engine", "sampling", "eval", "selection")
"""Tables that say what is read from disk, and how prompts are chosen from it."""


class StudyTable(Table):
    folder: str = Field(
        "",
        description="where the runs are written; empty: runs/<name of the file, or of its folder for a study.toml>",
    )
    parallel: Positive = Field(1, description="runs at once, each on cores of its own")
    keep_checkpoints: bool = Field(
        True, description="false: a finished run keeps its metrics, samples and summary only"
    )
    metric: str | None = Field(
        None,
        description="what the best is known by: a score of eval/last; default sampled_pass@1, or else sampled_reward",
    )
    base: str | None = Field(
        None, description="a config file, relative to this one; [base] goes on top of it"
    )


class StudyFile(Table):
    """What stands in [study]; grids and [base] are read apart."""

    study: StudyTable = StudyTable()


@dataclass(frozen=True)
class Grid:
    """All combinations of what is varied. A variant is a bundle of settings that go together; all variants are one more axis."""

    name: str
    fixed: Settings
    axes: Mapping[str, Sequence[Any]]
    variants: Sequence[tuple[str | None, Settings]] = ((None, {}),)
    """Each with its label; where there are none, each key is an axis of its own."""
    best: str | None = None

    @property
    def varied(self) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys([*self.axes, *(key for _, bundle in self.variants for key in bundle)])
        )

    def trials(self) -> Iterator[Trial]:
        last_parts = Counter(key.rpartition(".")[2] for key in self.varied)
        for *values, (label, bundle) in itertools.product(*self.axes.values(), self.variants):
            axes = dict(zip(self.axes, values, strict=True))
            settings = {**self.fixed, **axes, **bundle}
            if label is None:
                axes |= bundle
            short = {
                key: last if last_parts[last := key.rpartition(".")[2]] == 1 else key
                for key in axes
            }
            labels = [] if label is None else [label]
            slug = (
                ",".join(
                    [
                        *map(_safe, labels),
                        *(f"{short[key]}={_safe(value)}" for key, value in axes.items()),
                    ]
                )
                or "run"
            )
            name = (
                ", ".join(
                    [*labels, *(phrase(key, value) for key, value in axes.items() if key != SEED)]
                )
                or self.name
            )
            yield Trial(
                self.name,
                f"{self.name}/{slug}",
                name,
                settings,
                axes if label is None else {**axes, "variant": label},
            )


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

    def best_of(self, trial: Trial) -> str | None:
        """The grid that it inherits from."""
        return self.grids[trial.grid].best

    def config(self, trial: Trial) -> Config:
        """Of the trial's run; ValueError in one line, with the trial's name."""
        tables = deepcopy(dict(self.base))
        try:
            assign_all(tables, {**trial.settings, "run.folder": str(self.path(trial))})
            return parse(tables)
        except ValueError as error:
            raise ValueError(f"{_where(trial)}: " + "; ".join(str(error).splitlines())) from error

    def candidates(self, trial: Trial) -> list[Trial]:
        """Those of the grid that `best` names which are like this one: they agree in what both grids vary, seeds aside.

        In what only the other varies and this grid fixes they agree too, if the other has that value at all.
        """
        grid = self.grids[trial.grid]
        assert grid.best is not None
        source = self.grids[grid.best]
        left = list(source.trials())
        for key in source.varied:
            if key == SEED or key not in trial.settings:
                continue
            value, there = trial.settings[key], [t.settings[key] for t in left if key in t.settings]
            if value in there:
                left = [t for t in left if t.settings.get(key) == value]
            elif key in grid.varied and any(
                other != there[0] for other in there
            ):  # of a single value there is nothing to be alike in
                raise ValueError(
                    f"grid {grid.name!r}: best = {grid.best!r}, but no run there has {key} = {value!r}; add it to {key!r} of grid {grid.best!r}"
                )
        return left

    def inherit(self, trial: Trial, source: Trial) -> Trial:
        """With the settings of `source` that its grid varies, or has inherited itself, and that this grid does not mention."""
        handed_on = {
            k: v
            for k, v in source.settings.items()
            if k != SEED and k not in self.grids[source.grid].fixed
        }
        return replace(trial, settings={**handed_on, **trial.settings})


def read_study(path: Path, settings: Sequence[str] = ()) -> Study:
    """Reads a study; settings `study.key=value` go on top of [study], all others on top of [base]. ValueError tells what to type instead."""
    tables = read_toml(path, "study")
    study: dict[str, Any] = {"study": tables.pop("study", {})}
    base, grids = tables.pop("base", {}), tables.pop("grid", [])
    if tables:
        raise ValueError(
            f"{path}: unknown table [{next(iter(tables))}]; a study has [study], [base] and one or more [[grid]]"
        )
    if (
        not isinstance(base, dict)
        or not isinstance(study["study"], dict)
        or not isinstance(grids, list)
    ):
        raise ValueError(
            f"{path}: write [study] and [base] once, with single brackets, and each grid as [[grid]]"
        )
    override_all(study, [s for s in settings if s.startswith("study.")])
    table = parse_as(StudyFile, study).study
    merged: dict[str, Any] = {"log": {"console": "off", "tensorboard": False}}
    if table.base is not None:
        assign_all(merged, _keys(read_toml(path.parent / table.base, "config"), table.base))
    assign_all(merged, _keys(base, "[base]"))
    override_all(merged, [s for s in settings if not s.startswith("study.")])
    name = path.resolve().parent.name if path.stem == "study" else path.stem
    study_of_grids = _grids(grids)
    for setting in settings:
        key = setting.partition("=")[0].strip()
        key = f"{key}.use" if key in PLUGGED else key
        if all(key in grid.fixed or key in grid.varied for grid in study_of_grids.values()):
            raise ValueError(
                f"{setting!r} would change nothing: every grid says what {key} is; change it there"
            )
    return Study(name, table, merged, study_of_grids)


def check_study(study: Study) -> list[Config]:
    """The config of every trial, after all checks that need no run; those that wait for the best of another grid have a value that may come."""
    from tba.config.plugins import resolve_all
    from tba.runs.parts import check

    trials = study.trials()
    folders = Counter(t.folder for t in trials)
    for trial in trials:
        slug = trial.folder.partition("/")[2]
        if folders[trial.folder] > 1:
            raise ValueError(
                f"{_where(trial)}: two runs are called so; leave out the value that is there twice, or give variants a label each"
            )
        if len(slug) > 200:
            raise ValueError(
                f"{_where(trial)}: the name is too long for a folder; give variants a label each"
            )
    stand_ins: dict[str, Trial] = {}
    for t in trials:  # in the order of the file: what a trial inherits from is there before it
        stand_ins[t.folder] = (
            t
            if study.best_of(t) is None
            else study.inherit(t, stand_ins[study.candidates(t)[0].folder])
        )
    configs = [study.config(t) for t in stand_ins.values()]
    checked: set[str] = set()
    for trial, config in zip(trials, configs, strict=True):
        tables = config.nested()
        read, plugged = (
            json.dumps([tables[name] for name in names], sort_keys=True)
            for names in (READ, PLUGGED)
        )
        try:
            if read not in checked:
                check(config)
            elif plugged not in checked:
                resolve_all(config)
        except ValueError as error:
            raise ValueError(f"{_where(trial)}: {error}") from error
        checked |= {read, plugged}
    return configs


def _where(trial: Trial) -> str:
    return f"grid {trial.grid!r}, {trial.folder.partition('/')[2]}"


def _grids(tables: Sequence[Any]) -> dict[str, Grid]:
    if not tables:
        raise ValueError(
            'a study needs a grid: write [[grid]] with name = "..." and lists of values to vary, such as "run.seed" = [0, 1]'
        )
    grids: dict[str, Grid] = {}
    for table in tables:
        grid = _grid(dict(table))
        if grid.name in grids:
            raise ValueError(f"two grids are called {grid.name!r}; give each a name of its own")
        if grid.best is not None and grid.best not in grids:
            earlier = f"one of {', '.join(grids)}" if grids else "write that grid above this one"
            raise ValueError(
                f"grid {grid.name!r}: best = {grid.best!r} is no earlier grid{nearest(str(grid.best), grids)}; {earlier}"
            )
        grids[grid.name] = grid
    return grids


def _grid(table: dict[str, Any]) -> Grid:
    name, best, bundles = (
        table.pop("name", None),
        table.pop("best", None),
        table.pop("variants", [{}]),
    )
    if (
        not isinstance(name, str)
        or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name)
        or name == "report"
    ):
        raise ValueError(
            f'grid name = {name!r}: write name = "..." of letters, digits, dots, _ and -, and not "report"; it names a folder'
        )
    where = f"grid {name!r}"
    if (
        not isinstance(bundles, list)
        or not bundles
        or not all(isinstance(b, dict) for b in bundles)
    ):
        raise ValueError(
            f'{where}: variants = {bundles!r}: write a list of tables, such as [{{ "run.steps" = 10, "sampling.samples" = 4 }}]'
        )
    settings = _keys(table, where)
    variants = [
        (
            str(b["label"]) if "label" in b else None,
            _keys({k: v for k, v in b.items() if k != "label"}, where),
        )
        for b in bundles
    ]
    labels, keys = [label for label, _ in variants], [bundle.keys() for _, bundle in variants]
    if None in labels and (any(labels) or any(k != keys[0] for k in keys)):
        raise ValueError(
            f'{where}: give each of the variants a label = "...", or have all of them set the same keys'
        )
    if "run.folder" in {*settings, *itertools.chain(*keys)}:
        raise ValueError(
            f"{where}: leave out 'run.folder'; each run has a folder of its own in study.folder"
        )
    if twice := [key for key in itertools.chain(*keys) if key in settings]:
        raise ValueError(
            f"{where}: {twice[0]!r} stands in the grid and in a variant; leave one of them out"
        )
    if [] in settings.values():
        key = next(key for key, value in settings.items() if value == [])
        raise ValueError(
            f"{where}: {key!r} = [] has no values; write at least one, or leave the key out"
        )
    axes = {key: value for key, value in settings.items() if isinstance(value, list)}
    return Grid(name, {k: v for k, v in settings.items() if k not in axes}, axes, variants, best)


def _keys(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`table.key` of all there is, whether or not it was written in quotes; `objective` is short for `objective.use`."""
    keys: dict[str, Any] = {}
    for key, value in table.items():
        if "." in key:
            keys[key] = value
        elif isinstance(value, dict):
            keys |= {f"{key}.{inner}": v for inner, v in value.items()}
        elif key in PLUGGED:
            keys[f"{key}.use"] = value
        else:
            raise ValueError(
                f'{where}: {key!r} is no setting; write "table.key" = [values], for example "trainer.learning_rate" = [1e-4, 3e-4]'
            )
    return keys


def _safe(value: Any) -> str:
    """As part of a file's name that no shell minds."""
    text = value if isinstance(value, str) else json.dumps(value)
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text.strip("{}[]/ ")) or "-"

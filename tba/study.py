"""A study: grids of runs that share a base config, read from TOML. `docs/studies.md` shows the format.

This module imports no torch but to check a study, so that its mistakes and its results are told at once.
"""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from tba.config import PLUGGED, Config, override, override_all, parse
from tba.plugins import nearest
from tba.table import Positive, Table

SEED = "run.seed"
Settings = Mapping[str, Any]


class StudyTable(Table):
    folder: str = Field("", description="where the runs are written; empty: runs/<name of the study>")
    parallel: Positive = Field(1, description="runs at once, each on cores of its own")
    keep_checkpoints: bool = Field(True, description="false: a finished run keeps its metrics, samples and summary only")
    metric: str | None = Field(None, description="what the best is known by: a score of eval/last; default sampled_pass@1, or else sampled_reward")
    base: str | None = Field(None, description="a config file, relative to this one; [base] goes on top of it")


@dataclass(frozen=True)
class Point:
    """One run of a grid. `settings` are all that its grid says, and those that came from the best of another."""

    grid: str
    slug: str
    label: str
    settings: Settings
    varied: tuple[str, ...]
    axes: Settings
    """What tells it from the others of its grid: the values of what is varied, and which variant it is."""
    inherited: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grid:
    """All combinations of what is varied. A variant is a bundle of settings that go together; all variants are one more axis."""

    name: str
    fixed: Settings
    axes: Mapping[str, Sequence[Any]]
    variants: Sequence[Settings] = ({},)
    labels: Sequence[str | None] = (None,)
    best: str | None = None

    @property
    def varied(self) -> tuple[str, ...]:
        return (*self.axes, *dict.fromkeys(key for variant in self.variants for key in variant if key not in self.axes))

    @property
    def alike(self) -> bool:
        """Whether the variants set the same keys and have no names, so that each key can be an axis of its own."""
        return all(label is None and variant.keys() == self.variants[0].keys() for variant, label in zip(self.variants, self.labels, strict=True))

    def points(self) -> Iterator[Point]:
        for *values, (variant, label) in itertools.product(*self.axes.values(), list(zip(self.variants, self.labels, strict=True))):
            own = {**dict(zip(self.axes, values, strict=True)), **variant}
            shown = {key: value for key, value in own.items() if label is None or key not in variant}
            parts = [f"{self.short(key)}={_safe(value)}" for key, value in shown.items()]
            named = [_told(self.short(key), value) for key, value in shown.items() if key != SEED]
            if label is not None:
                parts, named = [_safe(label), *parts], [*named, label]
            axes = (
                own
                if self.alike
                else {**dict(zip(self.axes, values, strict=True)), "variant": label or ", ".join(_told(self.short(k), variant[k]) for k in variant)}
            )
            yield Point(self.name, ",".join(parts) or "run", ", ".join(named) or self.name, {**self.fixed, **own}, tuple(own), axes)

    def short(self, key: str) -> str:
        """The key's last part, where no other has the same."""
        last = key.rpartition(".")[2]
        return last if [k.rpartition(".")[2] for k in self.varied].count(last) == 1 else key


@dataclass(frozen=True)
class Study:
    name: str
    table: StudyTable
    base: Mapping[str, Any]
    grids: Mapping[str, Grid]

    @property
    def folder(self) -> Path:
        return Path(self.table.folder or f"runs/{self.name}").expanduser()

    def path(self, point: Point) -> Path:
        return self.folder / point.grid / point.slug

    def points(self) -> list[Point]:
        return [point for grid in self.grids.values() for point in grid.points()]

    def config(self, point: Point) -> Config:
        """Of the point's run; ValueError in one line, with the point's name."""
        tables = deepcopy(dict(self.base))
        try:
            override_all(tables, [f"{key}={toml(value)}" for key, value in point.settings.items()])
            tables.setdefault("run", {})["folder"] = str(self.path(point))
            return parse(tables)
        except ValueError as error:
            raise ValueError(f"grid {point.grid!r}, {point.slug}: " + "; ".join(str(error).splitlines())) from error

    def candidates(self, point: Point) -> list[Point]:
        """The runs of the grid that `best` names which are like this one: they agree in what both grids vary, seeds aside.

        In what only the other varies and this grid fixes they agree too, if the other has that value at all.
        """
        grid = self.grids[point.grid]
        assert grid.best is not None
        found, other = list(self.grids[grid.best].points()), self.grids[grid.best]
        for key in other.varied:
            if key == SEED or key not in point.settings or len({toml(p.settings[key]) for p in found if key in p.settings}) == 1:
                continue  # of a single value there is nothing to be alike in
            alike = [p for p in found if p.settings.get(key) == point.settings[key]]
            if key in grid.varied and not alike:
                raise ValueError(
                    f"grid {grid.name!r}: best = {grid.best!r}, but no run there has {key} = {point.settings[key]!r}; add it to {key!r} of grid {grid.best!r}"
                )
            found = alike or found
        return found

    def inherit(self, point: Point, source: Point) -> Point:
        """With the settings of `source` that its grid varies, or has inherited itself, and that this grid does not mention."""
        keys = [k for k in (*source.varied, *source.inherited) if k != SEED and k not in point.settings]
        return replace(point, settings={**point.settings, **{k: source.settings[k] for k in keys}}, inherited=tuple(keys))


def read_study(path: Path, settings: Sequence[str] = ()) -> Study:
    """Reads a study; settings `study.key=value` go on top of [study], all others on top of [base]. ValueError tells what to type instead."""
    tables = _read(path, "study")
    study: dict[str, Any] = {"study": tables.pop("study", {})}
    base, grids = tables.pop("base", {}), tables.pop("grid", [])
    if tables:
        raise ValueError(f"{path}: unknown table [{next(iter(tables))}]; a study has [study], [base] and one or more [[grid]]")
    if not isinstance(base, dict) or not isinstance(study["study"], dict) or not isinstance(grids, list):
        raise ValueError(f"{path}: write [study] and [base] once, with single brackets, and each grid as [[grid]]")
    for setting in settings:
        if setting.startswith("study."):
            override(study, setting)
    table = _study_table(study["study"])
    merged = _read(path.parent / table.base, "config") if table.base is not None else {}
    override_all(merged, [f"{name}.{key}={toml(v)}" for name, t in base.items() if isinstance(t, dict) for key, v in t.items()])
    override_all(merged, [f"{name}={toml(t)}" for name, t in base.items() if not isinstance(t, dict)])
    override_all(merged, [s for s in settings if not s.startswith("study.")])
    merged["log"] = {"console": "off", "tensorboard": False, **merged.get("log", {})}
    name = path.resolve().parent.name if path.stem == "study" else path.stem
    return Study(name, table, merged, _grids(grids))


def check_study(study: Study) -> list[Config]:
    """The config of every point, after all checks that need no run; those that wait for the best of another grid have a value that may come."""
    from tba import build

    points = study.points()
    paths = Counter(study.path(p) for p in points)
    for point in points:
        if paths[study.path(point)] > 1:
            raise ValueError(f"grid {point.grid!r}: two runs are called {point.slug!r}; leave out the value that is there twice, or give variants a label each")
        if len(point.slug) > 200:
            raise ValueError(f"grid {point.grid!r}: the name {point.slug!r} is too long for a folder; give variants a label each")
    stand_ins: dict[tuple[str, str], Point] = {}
    for p in points:  # in the order of the file: what a point inherits from is there before it
        first = study.candidates(p)[0] if study.grids[p.grid].best is not None else None
        stand_ins[p.grid, p.slug] = p if first is None else study.inherit(p, stand_ins[first.grid, first.slug])
    configs = [study.config(p) for p in stand_ins.values()]
    seen: set[str] = set()
    for point, config in zip(points, configs, strict=True):
        plugged = json.dumps([config.nested()[name] for name in PLUGGED], sort_keys=True)
        try:
            if not seen:
                build.check(config)
            elif plugged not in seen:
                build.plugins(config)
        except ValueError as error:
            raise ValueError(f"grid {point.grid!r}, {point.slug}: {error}") from error
        seen.add(plugged)
    return configs


def toml(value: Any) -> str:
    """As TOML reads it, on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml(v) for v in value) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)  # inf is TOML, and JSON's Infinity is not


def _read(path: Path, what: str) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"no such {what} file: {path}")
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error


def _study_table(table: Mapping[str, Any]) -> StudyTable:
    for key in table:
        if key not in StudyTable.model_fields:
            known = StudyTable.model_fields
            raise ValueError(f"unknown key 'study.{key}'{nearest(key, known)}; known: {', '.join(known)}")
    try:
        return StudyTable.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"study.{first['loc'][0]} = {first['input']!r}: {first['msg']}") from error


def _grids(tables: Sequence[Any]) -> dict[str, Grid]:
    if not tables:
        raise ValueError('a study needs a grid: write [[grid]] with name = "..." and lists of values to vary, such as "run.seed" = [0, 1]')
    grids: dict[str, Grid] = {}
    for table in tables:
        grid = _grid(dict(table))
        if grid.name in grids:
            raise ValueError(f"two grids are called {grid.name!r}; give each a name of its own")
        if grid.best is not None and grid.best not in grids:
            earlier = f"one of {', '.join(grids)}" if grids else "write that grid above this one"
            raise ValueError(f"grid {grid.name!r}: best = {grid.best!r} is no earlier grid{nearest(str(grid.best), grids)}; {earlier}")
        grids[grid.name] = grid
    return grids


def _grid(table: dict[str, Any]) -> Grid:
    name, best, variants = table.pop("name", None), table.pop("best", None), table.pop("variants", [{}])
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name) or name == "report":
        raise ValueError(f'grid name = {name!r}: write name = "..." of letters, digits, dots, _ and -, and not "report"; it names a folder')
    where = f"grid {name!r}"
    if not isinstance(variants, list) or not variants or not all(isinstance(v, dict) for v in variants):
        raise ValueError(f'{where}: variants = {variants!r}: write a list of tables, such as [{{ "run.steps" = 10, "sampling.samples" = 4 }}]')
    labels = [v.get("label") for v in variants]
    settings, bundles = _keys(table, where), [_keys({k: value for k, value in v.items() if k != "label"}, where) for v in variants]
    for key in (key for bundle in bundles for key in bundle):
        if key in settings:
            raise ValueError(f"{where}: {key!r} stands in the grid and in a variant; leave one of them out")
    for key, value in settings.items():
        if value == []:
            raise ValueError(f"{where}: {key!r} = [] has no values; write at least one, or leave the key out")
    axes = {key: value for key, value in settings.items() if isinstance(value, list)}
    return Grid(name, {k: v for k, v in settings.items() if k not in axes}, axes, bundles, [None if n is None else str(n) for n in labels], best)


def _keys(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Dotted keys, whether or not they stand in quotes; `objective` is short for `objective.use`."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if "." not in key and isinstance(value, dict):
            flat |= {f"{key}.{inner}": v for inner, v in value.items()}
        else:
            flat[f"{key}.use" if key in PLUGGED else key] = value
    for key in flat:
        if "." not in key or "=" in key:
            raise ValueError(f'{where}: {key!r} is no setting; write "table.key" = [values], for example "trainer.learning_rate" = [1e-4, 3e-4]')
        if key == "run.folder":
            raise ValueError(f"{where}: leave out 'run.folder'; each run has a folder of its own in study.folder")
    return flat


def _safe(value: Any) -> str:
    """As part of a file's name that no shell minds."""
    text = value if isinstance(value, str) else toml(value)
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text.strip("{}[]/ ")) or "-"


def _told(key: str, value: Any) -> str:
    text = value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else toml(value)
    return text if key.rpartition(".")[2] == "use" else f"{key} {text}"

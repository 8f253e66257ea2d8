"""Grids of a study: all combinations of the settings in a [[grid]] table."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tba.config.schema import PLUGGED
from tba.studies.results import SEED, Settings, Trial, phrase

NO_GRID = (
    'a study needs a grid: write [[grid]] with name = "..." and lists of values to vary,'
    ' such as "run.seed" = [0, 1]'
)
NO_NAME = (
    'grid name = {!r}: write name = "..." of letters, digits, dots, _ and -, and not "report";'
    " it names a folder"
)
NO_VARIANTS = (
    "{}: variants = {!r}: write a list of tables,"
    ' such as [{{ "run.steps" = 10, "sampling.samples" = 4 }}]'
)
NO_SETTING = (
    '{}: {!r} is no setting; write "table.key" = [values],'
    ' for example "trainer.learning_rate" = [1e-4, 3e-4]'
)


@dataclass(frozen=True)
class Variant:
    """Settings that are changed together."""

    label: str | None
    settings: Settings


@dataclass(frozen=True)
class Grid:
    """All combinations of the values of each axis, and of the variants."""

    name: str
    fixed: Settings
    axes: Mapping[str, Sequence[Any]]
    variants: Sequence[Variant]

    @property
    def keys(self) -> set[str]:
        """Return every key that the grid sets."""
        of_variants = [v.settings for v in self.variants]
        return {*self.fixed, *self.axes}.union(*of_variants)

    def trials(self) -> Iterator[Trial]:
        """Yield a trial for each combination; variants without a label are an axis for each key."""
        for *values, variant in itertools.product(*self.axes.values(), self.variants):
            axes = dict(zip(self.axes, values, strict=True))
            settings = {**self.fixed, **axes, **variant.settings}
            if variant.label is None:
                axes |= variant.settings
            yield self._trial(axes, settings, variant.label)

    def _trial(self, axes: Settings, settings: Settings, label: str | None) -> Trial:
        count = Counter(_last(key) for key in axes)
        names = [_last(key) if count[_last(key)] == 1 else key for key in axes]
        slug = [f"{n}={_safe(v)}" for n, v in zip(names, axes.values(), strict=True)]
        words = [phrase(key, value) for key, value in axes.items() if key != SEED]
        if label is not None:
            slug.insert(0, _safe(label))
            words.insert(0, label)
            axes = {**axes, "variant": label}
        folder = f"{self.name}/{','.join(slug) or 'run'}"
        return Trial(self.name, folder, ", ".join(words) or self.name, settings, axes)


def read_grids(tables: Sequence[Any]) -> dict[str, Grid]:
    """Return the grids by name. ValueError says what to write instead."""
    if not tables:
        raise ValueError(NO_GRID)
    grids: dict[str, Grid] = {}
    for table in tables:
        grid = _grid(dict(table))
        if grid.name in grids:
            raise ValueError(f"two grids are called {grid.name!r}; rename one of them")
        grids[grid.name] = grid
    return grids


def setting_keys(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the values by `table.key`, whether or not the keys were quoted.

    `objective` is short for `objective.use`.
    """
    keys: dict[str, Any] = {}
    for key, value in table.items():
        if "." in key:
            keys[key] = value
        elif isinstance(value, dict):
            keys |= {f"{key}.{inner}": v for inner, v in value.items()}
        elif key in PLUGGED:
            keys[f"{key}.use"] = value
        else:
            raise ValueError(NO_SETTING.format(where, key))
    return keys


def _grid(table: dict[str, Any]) -> Grid:
    name, bundles = table.pop("name", None), table.pop("variants", [{}])
    valid = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name)
    if not valid or name == "report":
        raise ValueError(NO_NAME.format(name))
    where = f"grid {name!r}"
    settings = setting_keys(table, where)
    variants = _variants(bundles, where)
    for key in itertools.chain(settings, *(v.settings for v in variants)):
        if key == "run.folder":
            raise ValueError(
                f"{where}: remove 'run.folder'; each run has a folder of its own in study.folder"
            )
        if settings.get(key) == []:
            raise ValueError(f"{where}: {key!r} = [] has no values; write one, or remove the key")
    for variant in variants:
        if twice := settings.keys() & variant.settings.keys():
            key = min(twice)
            raise ValueError(f"{where}: {key!r} is in the grid and in a variant; remove one")
    axes = {key: value for key, value in settings.items() if isinstance(value, list)}
    fixed = {key: value for key, value in settings.items() if key not in axes}
    return Grid(name, fixed, axes, variants)


def _variants(bundles: Any, where: str) -> list[Variant]:
    well_formed = isinstance(bundles, list) and all(isinstance(b, dict) for b in bundles)
    if not bundles or not well_formed:
        raise ValueError(NO_VARIANTS.format(where, bundles))
    variants = []
    for bundle in bundles:
        settings = dict(bundle)
        label = settings.pop("label", None)
        settings = setting_keys(settings, where)
        variants.append(Variant(None if label is None else str(label), settings))
    labelled = [v.label is not None for v in variants]
    same_keys = all(v.settings.keys() == variants[0].settings.keys() for v in variants)
    if any(labelled) != all(labelled) or not (any(labelled) or same_keys):
        raise ValueError(
            f'{where}: give each variant a label = "...", or have all of them set the same keys'
        )
    return variants


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _safe(value: Any) -> str:
    """Return text for a file's name that needs no quotes in a shell."""
    text = value if isinstance(value, str) else json.dumps(value)
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text.strip("{}[]/ ")) or "-"

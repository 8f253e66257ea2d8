"""Reading a config: TOML and `table.key=value` overrides become one `Config`, or a clear error."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from tba.config.plugins import nearest
from tba.config.schema import PLUGGED, Config
from tba.config.table import Table

Parsed = TypeVar("Parsed", bound=Table)

DEFAULT = Path(__file__).parent / "default.toml"
"""The embedded default: three-digit addition on the CPU."""


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, or the config.json of a run, and apply `table.key=value` settings.

    A ValueError names the key and says what to write instead.
    """
    tables = {} if path is None else _read(Path(path))
    override_all(tables, overrides)
    return parse(tables)


def _read(path: Path) -> dict[str, Any]:
    if path.suffix == ".json" and path.is_file():
        tables: dict[str, Any] = json.loads(path.read_text())
        return tables
    return read_toml(path, "config")


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """ValueError if there is no such file, or no TOML in it."""
    if not path.is_file():
        raise ValueError(f"no such {what} file: {path}")
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error


def parse(tables: Mapping[str, Any]) -> Config:
    return parse_as(Config, tables)


def parse_as(model: type[Parsed], tables: Mapping[str, Any]) -> Parsed:
    """The tables as a `model`, whose fields are tables; ValueError with a line for each mistake."""
    try:
        return model.model_validate(tables)
    except ValidationError as error:
        raise ValueError("\n".join(_explain(model, dict(e)) for e in error.errors())) from error


NAMES_PLUGIN = {f"{table}.use" for table in PLUGGED}


def override_all(tables: dict[str, Any], settings: Sequence[str]) -> None:
    """Applies each `table.key=value`; a value is read as TOML, or else as text. `objective=rloo` is short for `objective.use=rloo`."""
    values = {}
    for setting in settings:
        key, equals, text = (part.strip() for part in setting.partition("="))
        if not equals or ("." not in key and key not in PLUGGED):
            raise ValueError(
                f"{setting!r}: write `table.key=value`, such as `trainer.learning_rate=1e-4`; a config file comes first, and ends in .toml"
            )
        values[f"{key}.use" if key in PLUGGED else key] = _value(text)
    assign_all(tables, values)


def assign_all(tables: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Sets each `table.key`. Those that name a plug-in go first, so that they drop the options of the one before and none that are given beside them."""
    for key in sorted(values, key=lambda key: key not in NAMES_PLUGIN):
        *path, last = key.split(".")
        table = tables
        for name in path:
            inner = table.setdefault(name, {})
            table[name] = table = {"use": inner} if isinstance(inner, str) else inner
            if not isinstance(table, dict):
                raise ValueError(f"{key} = {values[key]!r}: {name} is a value, not a table")
        if (
            key in NAMES_PLUGIN
            and table.get("use", Config.model_fields[path[0]].default.use) != values[key]
        ):
            table.clear()  # another plug-in: the options of the one before are not its own
        table[last] = values[key]


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(model: type[Table], error: dict[str, Any]) -> str:
    where = ".".join(str(p) for p in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        table = model
        for name in error["loc"][:-1]:
            table = table.model_fields[name].annotation  # type: ignore[assignment]
        return f"unknown key {where!r}{nearest(str(error['loc'][-1]), table.model_fields)}; known: {', '.join(table.model_fields)}"
    if error["type"] == "value_error":
        return message
    if error["type"] == "model_type":
        content = (
            "a plug-in's name, or a table, [{}], with `use` and its options"
            if where in PLUGGED
            else "a table, [{}], with keys of its own"
        )
        return f"{where} = {error['input']!r}: write {content.format(where)}"
    return (
        f"{where} is missing"
        if error["type"] == "missing"
        else f"{where} = {error['input']!r}: {message}"
    )

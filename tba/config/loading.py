"""Reading a config: TOML and `table.key=value` settings become one `Config`, or a clear error."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from tba.config.plugins import nearest
from tba.config.schema import PLUGGED, Config
from tba.config.table import Table, problem

Parsed = TypeVar("Parsed", bound=Table)

DEFAULT = Path(__file__).parent / "default.toml"
"""The embedded default: three-digit addition on the CPU."""

NAMES_PLUGIN = {f"{table}.use" for table in PLUGGED}
"""The keys that name a plug-in."""


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, or the `config.json` of a run, and apply `table.key=value` settings to it.

    Raises:
        ValueError: If a key or a value is wrong. The message names the key and what to type.
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
    """Read a TOML file; ValueError if there is none, or if it is not TOML."""
    if not path.is_file():
        raise ValueError(f"no such {what} file: {path}")
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error


def parse(tables: Mapping[str, Any]) -> Config:
    """Validate plain tables as a config; ValueError with one line per mistake."""
    return parse_as(Config, tables)


def parse_as(model: type[Parsed], tables: Mapping[str, Any]) -> Parsed:
    """Validate plain tables as a `model`, whose fields are tables."""
    try:
        return model.model_validate(tables)
    except ValidationError as error:
        mistakes = [_explain(model, dict(each)) for each in error.errors()]
        raise ValueError("\n".join(mistakes)) from error


def override_all(tables: dict[str, Any], settings: Sequence[str]) -> None:
    """Apply each `table.key=value` to `tables`. Values that are not TOML are text.

    `objective=rloo` is short for `objective.use=rloo`.
    """
    values = {}
    for setting in settings:
        key, equals, text = (part.strip() for part in setting.partition("="))
        if not equals or ("." not in key and key not in PLUGGED):
            raise ValueError(
                f"{setting!r}: write `table.key=value`, such as `trainer.learning_rate=1e-4`;"
                " a config file comes first and ends in .toml"
            )
        values[f"{key}.use" if key in PLUGGED else key] = _value(text)
    assign_all(tables, values)


def assign_all(tables: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set each `table.key`.

    A key that names another plug-in drops the options of the previous one. Such keys go first,
    so that options given beside them stay.
    """
    for key in sorted(values, key=lambda key: key not in NAMES_PLUGIN):
        *path, last = key.split(".")
        table = tables
        for name in path:
            table = _inner(table, name)
            if not isinstance(table, dict):
                raise ValueError(f"{key} = {values[key]!r}: {name} is a value, not a table")
        if key in NAMES_PLUGIN:
            previous = table.get("use", Config.default_use(path[0]))
            if previous != values[key]:
                table.clear()
        table[last] = values[key]


def _inner(table: dict[str, Any], name: str) -> Any:
    """Return the table called `name`, made if absent; `objective = "tb"` becomes a table."""
    inner = table.setdefault(name, {})
    if isinstance(inner, str):
        inner = table[name] = {"use": inner}
    return inner


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(model: type[Table], error: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    match error["type"]:
        case "extra_forbidden":
            return _unknown(model, error["loc"])
        case "missing":
            return f"{where} is missing"
        case "value_error":
            return problem(error)
        case "model_type" if where in PLUGGED:
            hint = f"write the name of a plug-in, or a table, [{where}], with `use` and options"
        case "model_type":
            hint = f"write a table, [{where}], with its keys"
        case _:
            hint = problem(error)
    return f"{where} = {error['input']!r}: {hint}"


def _unknown(model: type[Table], path: Sequence[str | int]) -> str:
    table = model
    for name in path[:-1]:
        table = table.model_fields[str(name)].annotation  # type: ignore[assignment]
    known, where = table.model_fields, ".".join(map(str, path))
    return f"unknown key {where!r}{nearest(str(path[-1]), known)}; known: {', '.join(known)}"

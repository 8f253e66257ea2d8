"""Reading a config: TOML and `table.key=value` settings become one `Config`, or a clear error."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tba.config.schema import PLUGGED, Config
from tba.config.table import Table, choices, explain, reason

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
    tables: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        is_json = file.suffix == ".json" and file.is_file()
        tables = json.loads(file.read_text()) if is_json else read_toml(file, "config")
    override_all(tables, overrides)
    return parse(tables)


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
        mistakes = [_explain(model, each) for each in error.errors()]
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
            inner = table.setdefault(name, {})
            if name in PLUGGED and isinstance(inner, str):  # objective = "tb"
                inner = table[name] = {"use": inner}
            if not isinstance(inner, dict):
                raise ValueError(f"{key} = {values[key]!r}: {name} is a value, not a table")
            table = inner
        if key in NAMES_PLUGIN and table.get("use", Config.default_use(path[0])) != values[key]:
            table.clear()
        table[last] = values[key]


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(model: type[Table], error: ErrorDetails) -> str:
    path = [str(part) for part in error["loc"]]
    where = ".".join(path)
    match error["type"]:
        case "extra_forbidden":
            table: Any = model
            for name in path[:-1]:
                table = table.model_fields[name].annotation
            return f"unknown key {where!r}{choices(path[-1], table.model_fields)}"
        case "value_error":
            return reason(error)
        case "model_type":
            hint = f"write a table, [{where}], with its keys"
            if where in PLUGGED:
                hint = f"write the name of a plug-in, or a table, [{where}], with `use` and options"
            return f"{where} = {error['input']!r}: {hint}"
        case _:
            return explain(where, error)

"""Write docs/keys.md, a page of the site: all keys of the config and all options of plug-ins.

The page is not in git: `make docs` and `make configuration` write it.

    python scripts/write_configuration.py
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AllowInfNan
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tba.config.hints import inner_table
from tba.config.plugins import JUDGES, Option, find, meanings_of, names, options_of
from tba.config.schema import Config
from tba.config.tables import PLUGGED, Table

PAGE = Path(__file__).parent.parent / "docs" / "keys.md"
HEAD = """# All keys

Every key of the config, and every option of the plug-ins that ship.
[Configuration](configuration.md) says how a config is written. On the command line, `tba list NAME`
prints the same for one table or plug-in.
"""
PLAIN: dict[Any, str] = {int: "integer", float: "number", str: "text", bool: "true or false"}


def page() -> str:
    """Return the whole page."""
    tables = [name for name in Config.model_fields if name not in PLUGGED]
    sections = [_table(name, Config.model_fields[name]) for name in tables]
    sections += [_plugins(name) for name in PLUGGED]
    return "\n".join([HEAD, *sections, _judges()])


def _table(name: str, holder: FieldInfo) -> str:
    """Return the section of a table, followed by the sections of the tables in it."""
    table = inner_table(holder)
    assert table is not None
    rows = [_row(field.alias or key, field) for key, field in table.model_fields.items()]
    section = _section(f"## [{name}]", ("key", "type", "default", "meaning"), rows)
    return "\n".join([section, *_inner(name, table)])


def _inner(name: str, table: type[Table]) -> Iterator[str]:
    """Yield the sections of the tables in a table."""
    for key, field in table.model_fields.items():
        if inner_table(field) is not None:
            named = ".NAME" if get_origin(field.annotation) is dict else ""
            yield _table(f"{name}.{key}{named}", field)


def _row(key: str, field: FieldInfo) -> tuple[str, ...]:
    assert field.description, f"{key} has no description in tba/config"
    return (
        f"`{key}`",
        _type(field.annotation, field.metadata),
        "(required)" if field.is_required() else _value(field.default),
        field.description,
    )


def _plugins(table: str) -> str:
    """Return the section of a table that names a plug-in, with a part for each that ships."""
    default = Config.model_fields[table].default.use
    about = f'## [{table}]\n\n`use = "{default}"` is the default.'
    declared = type(Config.model_fields[table].default)
    common = [_row(key, field) for key, field in declared.model_fields.items() if key != "use"]
    if common:
        header = ("key", "type", "default", "meaning")
        about = _section(f"{about} Every plug-in has:", header, common) + "\n"
    parts = [f"{about} What ships:\n".replace("\n ", "\n")]
    parts += [_plugin(PLUGGED[table], table, name) for name in names(PLUGGED[table])]
    return "\n".join([*parts, *_inner(table, declared)])


def _judges() -> str:
    """Return the section of the judges, which are tables in `task.reward`."""
    about = "## Judges\n\nTables in `task.reward`: see [rewards.md](rewards.md#judges).\n"
    return "\n".join([about, *(_plugin(JUDGES, "task.reward", name) for name in names(JUDGES))])


def _plugin(kind: str, table: str, name: str) -> str:
    """Return the section of a plug-in, with its options."""
    cls = find(kind, name)
    meanings = meanings_of(cls)
    header = ("option", "type", "default", "meaning")
    rows = []
    for option, described in options_of(cls).items():
        assert option in meanings, f"{kind}.{name}.{option} has no docstring"
        rows.append((*_option(option, described), meanings[option]))
    about = f'### {table}.use = "{name}"\n\n{inspect.getdoc(cls)}'
    return _section(about, header, rows) if rows else f"{about}\n\nNo options.\n"


def _option(name: str, option: Option) -> tuple[str, str, str]:
    default = "(required)" if option.required else _value(option.default)
    return f"`{name}`", _type(option.kind), default


def _section(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [
        header,
        ("---",) * len(header),
        *(tuple(_escaped(cell) for cell in row) for row in rows),
    ]
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("<", "&lt;")


def _type(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """Return a type in words: `integer, at least 1`."""
    origin = get_origin(annotation)
    inner = get_args(annotation)
    if origin is Annotated:
        constraints = []
        for extra in inner[1:]:
            if isinstance(extra, FieldInfo):
                constraints.extend(extra.metadata)
        return _type(inner[0], constraints)
    if origin is Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join("none" if kind is type(None) else _type(kind) for kind in inner)
    if origin in (tuple, list):
        every = [kind for kind in inner if kind is not Ellipsis]
        if origin is list or Ellipsis in inner:
            return f"list of {_type(every[0])}"
        return f"[{', '.join(_type(kind) for kind in every)}]"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, Table)):
        return "table"
    return ", ".join([PLAIN.get(annotation, f"`{annotation}`"), *(_bound(m) for m in metadata)])


def _bound(constraint: Any) -> str:
    match constraint:
        case Ge(ge=least):
            return f"at least {least}"
        case Gt(gt=least):
            return f"above {least}"
        case Le(le=most):
            return f"at most {most}"
        case Lt(lt=limit):
            return f"below {limit}"
        case MinLen(min_length=1):
            return "not empty"
        case AllowInfNan():
            return "finite"
    raise ValueError(f"no words for {constraint}: add it here")


def _value(default: Any) -> str:
    assert default is not PydanticUndefined
    return "none" if default is None else f"`{json.dumps(default)}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

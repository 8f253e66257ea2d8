"""Hints on where to write a setting that is not a key of its table, such as a name of TRL."""

import difflib
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import get_args

from pydantic.fields import FieldInfo

from tba.config.tables import PLUGGED, ConfigTables, RuntimeTable, Table

_OTHERS = tomllib.loads(Path(__file__).with_name("trl.toml").read_text("utf-8"))
"""Names of settings in other packages, as in docs/from_trl.md."""
NEAREST: dict[str, str] = _OTHERS["nearest"]
"""Settings to type for objectives of other packages, by the names of the objectives."""
PLACES: dict[str, list[str]] = _OTHERS["places"]
"""Names of settings in other packages, by the place of the setting here."""
GONE: dict[str, str] = _OTHERS["gone"]
"""Replacements for keys and tables of earlier versions."""
NONE = "none"
"""Beginning of the place of a setting without counterpart; the reason may follow."""


def inner_table(field: FieldInfo) -> type[Table] | None:
    """Return the table that a field holds, which may be optional; None if it holds a value."""
    for kind in get_args(field.annotation) or (field.annotation,):
        if isinstance(kind, type) and issubclass(kind, Table):
            return kind
    return None


def counterpart(name: str) -> str | None:
    """Return the place here of a setting of other packages; None if the name is unknown."""
    for place, names in PLACES.items():
        if name in names:
            return place
    return NONE if name.startswith(tuple(_OTHERS["groups"])) else None


def elsewhere(where: str, options: Collection[str] | None = None) -> str:
    """Return a hint on where to write a key that is not in its table; "" if that is unknown.

    `options` are the options of the plug-in that the table names.
    """
    table, _, name = where.rpartition(".")
    if instead := GONE.get(where) or GONE.get(table):
        return f"it was removed; {instead}"
    place = counterpart(name)
    if place is None:
        place = " or ".join(_places().get(name, ()))
    if place.startswith(NONE):
        why = place.removeprefix(NONE)
        return f"{name} has no counterpart here{why}; docs/from_trl.md says more"
    if place == where and options is None:
        return f"write {name} into its table, {table}"
    own = place.removeprefix(f"{table}.")
    of_other_plugin = own != place and own.isidentifier() and own not in (options or ())
    if not place or (table in PLUGGED and of_other_plugin):
        return ""
    return f"{name} is {place} here"


def without_table(name: str, text: str) -> str:
    """Return a hint on what to write for `name=text` without a table; "" if that is unknown."""
    if uses := uses_of(name):
        return uses
    places = _places()
    if name not in places and (words := elsewhere(name)):
        return words
    close = difflib.get_close_matches(name, places, n=1)
    meant = [f"`{place}={text}`" for place in places[close[0]]] if close else []
    return f"did you mean {' or '.join(meant)}?" if meant else ""


def uses_of(name: str) -> str:
    """Return the settings of `runtime.use`, for a text in place of the table; "" for others."""
    uses = get_args(RuntimeTable.model_fields["use"].annotation) if name == "runtime" else ()
    return " or ".join(f"`{name}.use={use}`" for use in uses)


def _places() -> dict[str, list[str]]:
    """Return the places of each key of the config, as `table.key`."""
    places: dict[str, list[str]] = {}
    for table, holder in ConfigTables.model_fields.items():
        inner = inner_table(holder)
        for key in inner.model_fields if inner else ():
            if key != "use":
                places.setdefault(key, []).append(f"{table}.{key}")
    return places

"""Error messages about a config: what is wrong in it, and what to write instead."""

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence

from pydantic_core import ErrorDetails

from tba.config.counterparts import NONE, counterpart
from tba.config.keys import PLUGGED, Table, inner_table
from tba.config.messages import choices, explain, no_null, reason

FROM_TRL = "docs/from_trl.md"
KEYS = "docs/configuration.md"


def explain_mistake(model: type[Table], error: ErrorDetails) -> str:
    """Return an error message, from pydantic's error about a `model`, whose fields are tables."""
    path = [str(part) for part in error["loc"]]
    where = ".".join(path)
    if error["type"] == "extra_forbidden":
        keys = [".".join(key) for key in _keys(path, error["input"]) if counterpart(key[-1])]
        told = [f"unknown key {key!r}: {elsewhere(model, key)}" for key in keys]
        return "\n".join(told) or _unknown_key(model, path)
    if error["input"] is None:
        return _null(model, path, error)
    if error["type"] == "value_error":
        return reason(error)
    if error["type"] == "model_type":
        hint = f"write a table, [{where}], with its keys"
        if where in PLUGGED:
            hint = f"write the name of a plug-in, or a table, [{where}], with `use` and options"
        return f"{where} = {error['input']!r}: {hint}"
    return explain(where, error)


def elsewhere(model: type[Table], where: str, options: Collection[str] = ()) -> str:
    """Return in words what a key that is not in its table is called; "" if that is not known.

    `options` are those of the plug-in that the table names.
    """
    table, _, name = where.rpartition(".")
    place = counterpart(name)
    if place is not None and place.startswith(NONE):
        return f"{name} has no counterpart here{place.removeprefix(NONE)}; {FROM_TRL} says more"
    if place is None:
        place = " or ".join(_places(model).get(name, ()))
    own = place.removeprefix(f"{table}.")
    of_other_plugin = own != place and own.isidentifier() and own not in options
    if not place or (table in PLUGGED and of_other_plugin):
        return ""
    return f"{name} is {place} here"


def without_table(model: type[Table], name: str, text: str) -> str:
    """Return what to write for `name=text`, which names no table; "" if that is not known."""
    places = _places(model)
    if name not in places and (words := elsewhere(model, name)):
        return words
    close = difflib.get_close_matches(name, places, n=1)
    meant = [f"`{place}={text}`" for place in places[close[0]]] if close else []
    return f"did you mean {' or '.join(meant)}?" if meant else ""


def _places(model: type[Table]) -> dict[str, list[str]]:
    """Return where each key is, as `table.key`."""
    places: dict[str, list[str]] = {}
    for table, holder in model.model_fields.items():
        inner = inner_table(holder)
        for key in inner.model_fields if inner else ():
            if key != "use":
                places.setdefault(key, []).append(f"{table}.{key}")
    return places


def _keys(path: Sequence[str], value: object) -> Iterator[Sequence[str]]:
    """Yield the path of each key in a table, or the path itself if the value is none."""
    if not isinstance(value, Mapping) or not value:
        yield path
        return
    for name, inner in value.items():
        yield from _keys([*path, str(name)], inner)


def _unknown_key(model: type[Table], path: Sequence[str]) -> str:
    """Return an error message with what the key is called, or with the nearest ones."""
    *tables, name = path
    table = model
    for each in tables:
        table = inner_table(table.model_fields[each]) or table
    where = ".".join(path)
    if place := elsewhere(model, where):
        return f"unknown key {where!r}: {place}"
    known = [field.alias or key for key, field in table.model_fields.items()]
    what = f"the keys of [{'.'.join(tables)}]" if tables else "all tables and keys"
    return f"unknown key {where!r}{choices(name, known, f'{KEYS} lists {what}')}"


def _null(model: type[Table], path: Sequence[str], error: ErrorDetails) -> str:
    """Return an error message for null as the value of a key that is not optional."""
    where, table = ".".join(path), model
    if path[1:] == ["use"] and path[0] in PLUGGED:
        return no_null(path[0], model.model_fields[path[0]].default.use)
    for each in path[:-1]:
        field = table.model_fields.get(each)
        inner = field and inner_table(field)
        if inner is None:
            return explain(where, error)
        table = inner
    by_name = {field.alias or key: field for key, field in table.model_fields.items()}
    field = by_name.get(path[-1])
    if field is None or field.is_required():  # a value in a list has no field
        return explain(where, error)
    default = field.get_default(call_default_factory=True)
    if isinstance(default, Table):
        return f"{where} cannot be null; leave the table out for its defaults"
    return no_null(where, default)

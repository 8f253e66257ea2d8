"""Error messages about a config, and the secrets that no message or file may have."""

import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic_core import ErrorDetails

from tba.config.tables import PLUGGED, Table, inner_table

_OTHERS = tomllib.loads(Path(__file__).with_name("trl.toml").read_text("utf-8"))
"""Names of settings in other packages, as docs/from_trl.md has them."""
NEAREST: dict[str, str] = _OTHERS["nearest"]
"""What to type for objectives of other packages, by their names."""
PLACES: dict[str, list[str]] = _OTHERS["places"]
"""Names of settings in other packages, by the place of the same setting here."""
NONE = "none"
"""Beginning of the place of a setting without counterpart, before the reason if there is one."""
FROM_TRL = "docs/from_trl.md"
KEYS = "docs/configuration.md"
EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
}
"""Expected kind of value, by the type of pydantic's error."""
GIVEN = {bool: "a boolean", int: "an integer", float: "a decimal number", str: "text"}
GIVEN |= {list: "a list", dict: "a table", type(None): "null"}

WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
SECRET = re.compile(r"(api)?key|token|secrets?|password|passwd|credentials?|authorization")
OF_TEXTS = re.compile(r"(bos|eos|pad|unk|sep|cls|mask|stop)[_-]?token", re.IGNORECASE)
"""Names of options that are tokens of a tokenizer, and no secrets."""

KNOWN: set[str] = set()
"""Secrets that this process has read."""

FEW = 6
"""Most names that a message lists."""


def printable(text: str) -> str:
    """Return text that others may have written, with nothing that a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def explain(name: str, *errors: ErrorDetails) -> str:
    """Return an error message for a value, from pydantic's error, or its errors for a union."""
    value = errors[0]["input"]
    first = errors[0]["type"]
    given = "null" if value is None else repr(value)
    if first == "missing":
        return f"{name} is missing"
    if first in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown key {name!r}"
    expected = []
    for error in errors:
        literal = error["type"] == "literal_error"
        kind = error["ctx"]["expected"] if literal else EXPECTED.get(error["type"])
        if kind is None:
            return f"{name} = {given}: {reason(error)}"
        expected.append(kind)
    message = f"{name} = {given}: expected {' or '.join(expected)}"
    if first == "literal_error" and isinstance(value, str):
        return message
    return f"{message}, got {GIVEN.get(type(value), type(value).__name__)}"


def reason(error: ErrorDetails) -> str:
    """Return pydantic's own message, or that of the ValueError that a validator raised."""
    return error["msg"].removeprefix("Value error, ")


def choices(name: str, known: Iterable[str], all_of_them: str | None = None) -> str:
    """Return the end of an error message about an unknown name: the nearest one, and all.

    If there are more than a few, `all_of_them` says where they are listed, after the nearest ones.
    """
    known = list(known)
    is_long = all_of_them is not None and len(known) > FEW
    close = difflib.get_close_matches(name, known, n=3 if is_long else 1)
    close = close or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    nearest = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    full = all_of_them if is_long else f"known: {', '.join(known) or 'none'}"
    return f"{nearest}; {full}"


@contextmanager
def about(place: str) -> Iterator[None]:
    """Begin the message of a ValueError within the block with the place that it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {masked(str(error))}") from error


def size(number: float) -> str:
    """Return a number of bytes in GB or MB."""
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"


def counterpart(name: str) -> str | None:
    """Return what a setting of other packages is called here; None if the name is unknown."""
    for place, names in PLACES.items():
        if name in names:
            return place
    return NONE if name.startswith(tuple(_OTHERS["groups"])) else None


def explain_mistake(model: type[Table], error: ErrorDetails) -> str:
    """Return an error message, from pydantic's error about a `model`, whose fields are tables."""
    path = [str(part) for part in error["loc"]]
    where = ".".join(path)
    if error["type"] == "extra_forbidden":
        keys = [".".join(key) for key in _keys(path, error["input"]) if counterpart(key[-1])]
        told = [f"unknown key {key!r}: {elsewhere(model, key)}" for key in keys]
        return "\n".join(told) or _unknown_key(model, path)
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


def is_secret(name: object) -> bool:
    """Return whether the last word of a name, such as `apiKey`, says that its value is secret."""
    words = WORDS.findall(str(name))
    named = bool(words) and SECRET.fullmatch(words[-1].lower()) is not None
    return named and not OF_TEXTS.fullmatch(str(name))


def check_secrets(name: str, value: Any) -> None:
    """Raise ValueError, without quoting it, for a secret that stands in options itself."""
    _replaced(name, value, is_secret(name.rpartition(".")[2]), _check)


def read_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with their secrets; ValueError if one's variable is not set."""
    return _replaced("", options, False, _read)


def masked(text: str) -> str:
    """Return text, such as an error of a user's function, without the secrets that were read."""
    for secret in KNOWN:
        text = text.replace(secret, "***")
    return text


def _check(place: str, text: str) -> str:
    if text and not re.fullmatch(r"env:\w+", text):
        raise ValueError(
            f"{place} is a secret, and the config is written to files; put it into an environment"
            " variable, and give its name instead: env:NAME"
        )
    return text


def _read(place: str, text: str) -> str:
    secret = os.environ.get(variable := text.removeprefix("env:"), "")
    if text and not secret:
        raise ValueError(
            f"{place}: the environment variable {variable!r} is not set; export it where tba is"
            " started, and on every machine with searchers"
        )
    KNOWN.update({secret} if len(secret) >= 4 else ())
    return secret


def _replaced(place: str, value: Any, secret: bool, give: Callable[[str, str], str]) -> Any:
    """Return a value in which `give` has replaced each text that is secret."""

    def inner(key: object, each: Any) -> Any:
        own = secret or is_secret(key)
        return _replaced(f"{place}.{key}".lstrip("."), each, own, give)

    match value:
        case str():
            return give(place, value) if secret else value
        case Mapping():
            return {key: inner(key, each) for key, each in value.items()}
        case list() | tuple():
            return type(value)([inner(i, each) for i, each in enumerate(value)])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        changed = {name: inner(name, getattr(value, name)) for name in fields}
        return dataclasses.replace(value, **changed)
    return value

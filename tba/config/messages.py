"""Messages for wrong names and values in a config."""

import difflib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from pydantic_core import ErrorDetails

from tba.config.secrets import masked

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

DEEPEST = 64
"""Most levels of lists and tables in a config or a data set."""


FEW = 6
"""Most names that a message lists."""


def printable(text: str) -> str:
    """Return text that others may have written, with nothing that a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def explain(name: str, *errors: ErrorDetails) -> str:
    """Return an error message for a value, from pydantic's error, or its errors for a union."""
    value, first = errors[0]["input"], errors[0]["type"]
    given = "null" if value is None else repr(value)
    if first == "missing":
        return f"{name} is missing"
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
    message += f", got {GIVEN.get(type(value), type(value).__name__)}"
    return f"{message}: remove the quotes" if _is_quoted(value) else message


def reason(error: ErrorDetails) -> str:
    """Return pydantic's own message, or that of the ValueError that a validator raised."""
    return error["msg"].removeprefix("Value error, ")


def no_null(key: str, default: Any) -> str:
    """Return an error message for null as the value of a key that is not optional."""
    typed = default if isinstance(default, str) and default else json.dumps(default)
    return f"{key} cannot be null; leave it out, or type {key}={typed}, which is its default"


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


def _is_quoted(value: object) -> bool:
    """Return whether a value is text that would be another kind of value without quotes."""
    try:
        return isinstance(value, str) and json.loads(value) is not None
    except (ValueError, RecursionError):
        return False


@contextmanager
def about(place: str) -> Iterator[None]:
    """Begin the message of a ValueError within the block with the place that it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {masked(str(error))}") from error


def check_depth(what: str, value: object, levels: int = DEEPEST) -> None:
    """Raise ValueError, which begins with `what`, if lists and tables are nested too deeply.

    What walks through them, such as a copy or an encoder, needs several calls for each level.
    """
    if not isinstance(value, dict | list | tuple):
        return
    if levels == 0:  # at the latest for a list that holds itself
        raise ValueError(f"{what} is nested more than {DEEPEST} levels deep; flatten it")
    for inner in value.values() if isinstance(value, dict) else value:
        check_depth(what, inner, levels - 1)


def size(number: float) -> str:
    """Return a number of bytes in GB or MB."""
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"

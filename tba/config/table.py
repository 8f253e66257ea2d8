"""The base of all tables of a config, the types of their values, and messages for wrong values."""

import difflib
import json
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import ErrorDetails

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]


class Table(BaseModel):
    """A frozen table without unknown keys. Values are not converted, except integers to floats."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)


def key(default: Any, meaning: str) -> Any:
    """Return a field with a default and its line in the documentation."""
    return Field(default, description=meaning)


EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table",
}
"""The kind of value that was expected, by the type of pydantic's error."""

GIVEN = {
    bool: "a boolean",
    int: "an integer",
    float: "a decimal number",
    str: "text",
    list: "a list",
    dict: "a table",
}
"""The words for a value's type."""


def explain(name: str, *errors: ErrorDetails) -> str:
    """Return what is wrong with a value, from pydantic's error, or its errors for a union."""
    value = errors[0]["input"]
    if errors[0]["type"] == "missing":
        return f"{name} is missing"
    expected = []
    for error in errors:
        if error["type"] == "literal_error":
            expected.append(error["ctx"]["expected"])
        elif error["type"] in EXPECTED:
            expected.append(EXPECTED[error["type"]])
        else:
            return f"{name} = {value!r}: {reason(error)}"
    message = f"{name} = {value!r}: expected {' or '.join(expected)}"
    if errors[0]["type"] == "literal_error" and isinstance(value, str):
        return message
    message += f", got {GIVEN.get(type(value), type(value).__name__)}"
    if isinstance(value, str) and _is_json(value):
        message += ": remove the quotes"
    return message


def reason(error: ErrorDetails) -> str:
    """Return pydantic's own message, or that of the ValueError that a validator raised."""
    return error["msg"].removeprefix("Value error, ")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean ...?`, or nothing if no known name is similar."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def choices(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest one, and all."""
    known = list(known)
    return f"{nearest(name, known)}; known: {', '.join(known) or 'none'}"

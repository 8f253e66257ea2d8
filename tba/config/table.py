"""The base of all tables of a config, the number types in them, and messages for wrong values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Table(BaseModel):
    """A frozen table without unknown keys. Values are not converted, except integers to floats."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)


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

KINDS = {
    bool: "a boolean",
    int: "an integer",
    float: "a decimal number",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "a table",
}
"""The words for a value's type."""


def problem(*errors: Mapping[str, Any]) -> str:
    """Return what is wrong with a value, from pydantic's error, or its errors for a union."""
    expected = []
    for error in errors:
        if error["type"] == "literal_error":
            expected.append(error["ctx"]["expected"])
        elif error["type"] in EXPECTED:
            expected.append(EXPECTED[error["type"]])
        else:
            return error["msg"].removeprefix("Value error, ")
    value, message = errors[0]["input"], f"expected {' or '.join(expected)}"
    if errors[0]["type"] == "literal_error" and isinstance(value, str):
        return message
    message += f", got {KINDS.get(type(value), type(value).__name__)}"
    if isinstance(value, str) and _is_json(value):
        message += ": remove the quotes"
    return message


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True

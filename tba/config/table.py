"""What every table of a config is, and the numbers in it."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def plain_numbers(cls, value: Any, info: Any) -> Any:
        return plain_number(value, cls.model_fields[info.field_name].annotation)


def plain_number(value: Any, kind: Any) -> Any:
    """The value; PydanticCustomError for a truth or a text that would be turned into the number, or the truth, that `kind` asks for."""
    kinds = set(_plain(kind))
    if isinstance(value, bool) and bool not in kinds and kinds != {Any}:
        raise PydanticCustomError("truth", "true and false are for switches; write a value")
    if isinstance(value, str) and kinds <= {int, float, bool, type(None)}:
        raise PydanticCustomError(
            "text", "this is text; write a number, or true or false, without quotes"
        )
    return value


def _plain(kind: Any) -> list[Any]:
    """The types of which the value of a union may be."""
    if get_origin(kind) is Annotated:
        return _plain(get_args(kind)[0])
    return (
        [k for arg in get_args(kind) for k in _plain(arg)]
        if get_origin(kind) in (Union, UnionType)
        else [kind]
    )

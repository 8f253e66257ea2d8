"""What every table of a config is, and the numbers in it."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def truth_is_no_number(cls, value: Any, info: Any) -> Any:
        return truth_is_no_number(value, cls.model_fields[info.field_name].annotation)


def truth_is_no_number(value: Any, kind: Any) -> Any:
    """The value; PydanticCustomError for a true or false that would count as 1 or 0."""
    if isinstance(value, bool) and bool not in (kind, *get_args(kind)) and kind is not Any:
        raise PydanticCustomError("truth", "true and false are for switches; write a value")
    return value

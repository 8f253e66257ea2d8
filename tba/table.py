"""What every table of a config is, and the numbers in it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, validate_default=True)

"""Building blocks of config tables: types of values, documented keys, plug-ins by name."""

from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from tba.config.secrets import check_secrets

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Finite = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], Field(strict=False)]  # strict would refuse lists
Range = Annotated[tuple[Finite, Finite], Field(strict=False)]


PLUGGED = {
    "task": "tasks",
    "engine": "engines",
    "objective": "objectives",
    "strategy": "strategies",
    "selection": "selections",
}
"""The tables that name a plug-in, and the folder of each."""


def _single(value: Any) -> Any:
    return (value,) if isinstance(value, int | str) else value


OneOrMore = Annotated[tuple[Positive, ...], BeforeValidator(_single), Field(strict=False)]
Word = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Word, ...], BeforeValidator(_single), Field(strict=False)]


class Table(BaseModel):
    """A frozen table without unknown keys. Values are not converted, except integers to floats."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        validate_default=True,
        hide_input_in_errors=True,  # it may be a secret
    )


def inner_table(field: FieldInfo) -> type[Table] | None:
    """Return the table that a field holds, which may be optional; None if it holds a value."""
    for kind in get_args(field.annotation) or (field.annotation,):
        if isinstance(kind, type) and issubclass(kind, Table):
            return kind
    return None


def key(default: Any, meaning: str) -> Any:
    """Return a field with a default and a description for docs/configuration.md."""
    return Field(default, description=meaning)


class Use(Table):
    """A plug-in by name, with its options."""

    model_config = ConfigDict(frozen=True, extra="allow")
    use: str

    @model_validator(mode="before")
    @classmethod
    def without_secrets(cls, plain: Any) -> Any:
        check_secrets("", plain)
        return plain

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})

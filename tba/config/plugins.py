"""The registry of plug-ins: resolves the names in a config and checks the options.

A name is a file of this package with one public dataclass, or `package.module.Class` on the path.
"""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import (
    Any,
    ClassVar,
    Generic,
    NotRequired,
    Required,
    TypeVar,
    get_args,
    get_type_hints,
)

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic_core import ErrorDetails, to_json
from typing_extensions import TypedDict

from tba.config.hints import GONE, NEAREST, elsewhere, inner_table, uses_of
from tba.config.mistakes import about, choices, explain, reason, together
from tba.config.secrets import check_secrets, read_secrets
from tba.config.tables import FILLED_IN, PLUGGED, ConfigTables, PluginTable, Positive, Table

JUDGES = "tasks.judges"
NAMES = "`tba list` lists all"
KINDS = (*PLUGGED.values(), JUDGES)
MEMBERS = {
    "objectives": ("__call__", "head"),
    "engines": ("generate", "defaults"),
    "strategies": ("draw",),
    "selections": ("choose", "restore"),
}
"""Members, own or inherited, that identify the plug-ins of a kind."""


AnyConfig = TypeVar("AnyConfig", bound=ConfigTables)
Number = TypeVar("Number", bound=float)
"""Type of an option, such as `PositiveFloat`."""


@dataclass(frozen=True)
class Schedule(Generic[Number]):
    """An option of an objective that changes linearly from `start` to `end` over `steps` steps.

    From step `cut_step` on, counted from 0, it is `cut_to`, if given. The paper's code uses .012
    to .004 over 500 steps for GSM8K, and 1.0 to .05 over 128, cut to .05 at the 32nd, for TL;DR.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    start: Number
    end: Number
    steps: Positive
    cut_step: int | None = None
    cut_to: Number | None = None

    def __post_init__(self) -> None:
        if (self.cut_step is None) != (self.cut_to is None):
            raise ValueError("a schedule with a cut needs both cut_step and cut_to")

    def at(self, step: int) -> float:
        if self.cut_step is not None and self.cut_to is not None and step >= self.cut_step:
            return self.cut_to
        return self.start + (self.end - self.start) * min(1.0, step / self.steps)


@dataclass(frozen=True)
class Plugin:
    """A class that a config names, and its options. An option may be a schedule."""

    cls: type
    options: Mapping[str, Any]

    def at(self, step: int) -> Any:
        """Return the instance for a step, with each schedule replaced by its value at that step."""
        scheduled = {n: v.at(step) for n, v in self.options.items() if isinstance(v, Schedule)}
        return dataclasses.replace(self._first, **scheduled) if scheduled else self._first

    @cached_property
    def _first(self) -> Any:
        """The instance with the first value of each schedule, built once: it may read secrets."""
        given = read_secrets(self.options).items()
        return self.cls(**{n: v.at(0) if isinstance(v, Schedule) else v for n, v in given})

    def __getstate__(self) -> dict[str, Any]:
        """Return the options as they are written: no secret is in a message to another process."""
        return {"cls": self.cls, "options": self.options}

    def build(self, *positional: Any) -> Any:
        """Return an instance. The fields that the run fills in are positional."""
        return self.cls(*positional, **read_secrets(self.options))


@dataclass(frozen=True)
class Option:
    """A field of a plug-in that a config may set."""

    kind: Any
    default: Any
    """`dataclasses.MISSING` if the option is required."""

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING


def names(kind: str) -> list[str]:
    """Return the plug-ins of a kind that this package ships."""
    folder = Path(__file__).parents[1].joinpath(*kind.split("."))
    modules = pkgutil.iter_modules([str(folder)])
    return sorted(m.name for m in modules if not (m.ispkg or m.name.startswith("_")))


def find(kind: str, name: str) -> type:
    """Return the class called `name`; ValueError, with the nearest name, if it is unknown."""
    if "." in name:
        hint = "write `package.module.Class`, with @dataclass above the class"
        module_name, _, class_name = name.rpartition(".")
        try:
            value: Any = vars(importlib.import_module(module_name)).get(class_name)
        except (ModuleNotFoundError, ValueError) as error:
            raise ValueError(f"{name!r}: {error}; {hint}") from error
        if not is_plugin(value):
            raise ValueError(f"{name!r}: {module_name} has no such dataclass; {hint}")
        for member in MEMBERS.get(kind, ()):
            if member not in dir(value):
                raise ValueError(
                    f"{name!r} is not one of the {kind}: it has no {member}; see its base class"
                    " and its contract in docs/extending.md"
                )
        cls: type = value
        return cls
    known = names(kind)
    if kind == "objectives" and name in NEAREST:
        raise ValueError(f"no objective called {name!r}; the nearest is `{NEAREST[name]}`")
    if name not in known:
        raise ValueError(
            f"no {kind.removeprefix('tasks.')} called {name!r}{choices(name, known, NAMES)};"
            " or write `package.module.Class`"
        )
    module = importlib.import_module(f"tba.{kind}.{name}")
    own = [v for v in vars(module).values() if is_plugin(v) and v.__module__ == module.__name__]
    return own[0]


def is_plugin(value: Any) -> bool:
    """Return whether a value is a public dataclass."""
    return inspect.isclass(value) and dataclasses.is_dataclass(value) and value.__name__[0] != "_"


def options_of(factory: Callable[..., Any]) -> dict[str, Option]:
    """Return the options of a plug-in by name, or the arguments of another factory, of any type."""
    if not dataclasses.is_dataclass(factory):
        parameters = inspect.signature(factory).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        required = dataclasses.MISSING
        return {p.name: Option(Any, required if p.default is p.empty else p.default) for p in named}
    hints = get_type_hints(factory, include_extras=True)
    options = {}
    for field in dataclasses.fields(factory):
        default = field.default
        make = field.default_factory
        if make is not dataclasses.MISSING:
            default = make()
        try:
            check_secrets(field.name, default)
        except ValueError:
            default = None  # the config that a run writes contains all defaults
        if field.init and field.metadata != FILLED_IN:
            options[field.name] = Option(hints[field.name], default)
    return options


def meanings_of(cls: type) -> dict[str, str]:
    """Return the meanings of a plug-in's fields by name: the docstrings below them."""
    meanings = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        (definition,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in pairwise(definition.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(text))
                ):
                    meanings[name] = " ".join(text.split())
    return meanings


def resolve(kind: str, table: str, use: str, options: Mapping[str, Any]) -> Plugin:
    """Find a class and check the options of `[table]`; numbers of objectives may be schedules."""
    cls = find(kind, use)
    return Plugin(cls, check_options(cls, table, use, options, scheduled=kind == "objectives"))


def check_options(
    factory: Callable[..., Any],
    table: str,
    use: str,
    options: Mapping[str, Any],
    scheduled: bool = False,
) -> dict[str, Any]:
    """Return the options of `[table]` for the factory called `use`; ValueError if one is wrong."""
    known = options_of(factory)
    kinds: dict[str, Any] = {}
    schedule_of: Any = Schedule  # of a type that type checkers do not see
    for name, option in known.items():
        is_number = option.kind is float or get_args(option.kind)[:1] == (float,)
        is_schedule = scheduled and is_number and isinstance(options.get(name), Mapping)
        kind = schedule_of[option.kind] if is_schedule else option.kind
        kinds[name] = Required[kind] if option.required else NotRequired[kind]
    for name, value in options.items():
        try:
            to_json(value)
        except ValueError as error:
            raise ValueError(
                f"{table}.{name} = {value!r}: {error}; write a number, a string, a list or a table"
            ) from error
    make: Any = TypedDict  # `Any`, because type checkers cannot see its keys
    type_of_options = with_config(ConfigDict(extra="forbid"))(make("options", kinds))
    adapter: TypeAdapter[dict[str, Any]] = TypeAdapter(type_of_options)
    try:
        # as JSON, because strict validation of Python values would refuse lists for tuples
        return adapter.validate_json(to_json(options, inf_nan_mode="constants"), strict=True)
    except ValidationError as error:
        raise ValueError(_mistakes(table, use, options, error.errors(), known)) from error


def _mistakes(
    table: str, use: str, options: Mapping[str, Any], errors: Sequence[ErrorDetails],
    known: Collection[str],
) -> str:  # fmt: skip
    """Return a message with a line for each wrong option, from pydantic's errors."""
    errors = sorted(errors, key=lambda error: error["type"] != "extra_forbidden")
    places = [_place(options, error) for error in errors]
    lines = []
    for name in dict.fromkeys(place[0] for place in places):
        # a union has errors for each member: the deepest are from the member that fits best
        deepest = max((place for place in places if place[0] == name), key=len)
        own = [error for place, error in zip(places, errors, strict=True) if place == deepest]
        message = explain(".".join([table, *deepest]), *own)
        if name not in known:
            where = f"{table if table in PLUGGED else use}.{name}"
            place = elsewhere(where, known) if table in PLUGGED or where in GONE else ""
            listed = f"`tba list {use}` lists all options: {', '.join(known)}"
            nearest = choices(name, known, None if "." in use else listed)
            hint = f": {place}" if place else f"{nearest}; or remove it"
            message = f"{table}.{name}: {use!r} has no such option{hint}"
        lines.append(message if name in options else f"{message}: {use!r} needs it")
    return "\n".join(lines)


def _place(value: Any, error: ErrorDetails) -> tuple[str, ...]:
    """Return the path of keys to an error, whose own location also names members of unions."""
    keys: list[str] = []
    for part in error["loc"]:
        is_key = isinstance(value, Mapping) and part in value
        if is_key or (isinstance(value, list | tuple) and isinstance(part, int)):
            keys.append(str(part))
            value = value[part]
    if error["type"] == "missing":
        keys.append(str(error["loc"][-1]))
    return tuple(keys)


def resolved(config: ConfigTables, tables: Collection[str] = tuple(PLUGGED)) -> list[Plugin]:
    """Return the plug-ins that these tables name, in the order of `PLUGGED`.

    ValueError if one is unknown, or has a wrong option.
    """

    def of_table(table: str) -> Plugin:
        given: PluginTable = getattr(config, table)
        with about(table):
            read_secrets(given.options)  # raises ValueError here, not where the plug-in is built
        return resolve(PLUGGED[table], table, given.use, given.options)

    return together(*(partial(of_table, each) for each in PLUGGED if each in tables))


def mistakes_in(
    model: type[Table], plain: Mapping[str, Any], errors: Sequence[ErrorDetails]
) -> list[str]:
    """Return the mistakes in tables: these errors, and others that do not depend on wrong keys."""
    told = [_explained(model, each) for each in errors]
    wrong = [each["loc"][:2] for each in errors]
    # () is the place of keys that contradict each other
    if not issubclass(model, ConfigTables) or () in wrong:
        return told
    rest = {name: table for name, table in plain.items() if (name,) not in wrong}
    for name, table in rest.items():
        if isinstance(table, Mapping):
            rest[name] = {key: v for key, v in table.items() if (name, key) not in wrong}
    try:
        left = model(**rest)
        resolved(left, left.model_fields_set)
    except ValueError as error:
        keys = {place[-1] for place in wrong}
        lines = str(error).splitlines()
        told += [line for line in lines if keys.isdisjoint(re.findall(r"\w+", line))]
    return told


def _explained(model: type[Table], error: ErrorDetails) -> str:
    """Return an error message, from pydantic's error about a `model`, whose fields are tables."""
    path = [str(part) for part in error["loc"]]
    where = ".".join(path)
    if error["type"] == "extra_forbidden":
        places = {key: elsewhere(key) for key in _keys(where, error["input"])}
        known = [f"unknown key {key!r}: {place}" for key, place in places.items() if place]
        if known:
            return "\n".join(known)
        *outer, name = path
        table = model
        for each in outer:
            table = inner_table(table.model_fields[each]) or table
        keys = [field.alias or key for key, field in table.model_fields.items()]
        every = f"`tba list {outer[0]}` lists all keys" if outer else "`tba list` lists all tables"
        return f"unknown key {where!r}{choices(name, keys, every)}"
    if error["type"] == "value_error":
        return reason(error)
    if error["type"] == "model_type":
        hint = f"write {uses_of(where) or f'a table, [{where}], with its keys'}"
        if where in PLUGGED:
            hint = f"write the name of a plug-in, or a table, [{where}], with `use` and options"
        return f"{where} = {error['input']!r}: {hint}"
    return explain(where, error)


def _keys(where: str, value: object) -> Iterator[str]:
    """Yield `where` followed by each key of a table; only `where` if it has none, or was a key."""
    if not isinstance(value, Mapping) or not value or (where in GONE and "." in where):
        yield where
        return
    for name, inner in value.items():
        yield from _keys(f"{where}.{name}", inner)


def with_defaults(config: AnyConfig) -> AnyConfig:
    """Return the config with all options of its plug-ins, because defaults may change later.

    The engine also has defaults for `[runtime]`.
    """
    tables: dict[str, Any] = {}
    engine: Any = find("engines", config.engine.use)
    for table, kind in PLUGGED.items():
        given: PluginTable = getattr(config, table)
        options = given.options
        if table == "engine":
            options = {**engine.chosen(config), **options}
        for name, option in options_of(find(kind, given.use)).items():
            if not option.required and option.default is not None:
                options.setdefault(name, option.default)
        tables[table] = type(given)(**given.model_dump() | options)
    runtime = dict(engine.defaults(config))
    for key in config.runtime.model_fields_set:
        runtime.pop(key, None)
    tables["runtime"] = config.runtime.model_copy(update=runtime)
    return config.model_copy(update=tables)

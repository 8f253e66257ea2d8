"""Finds what a config names: a file of this package (`use = "tb"`), or any class on the path (`use = "mylab.huber_tb.HuberTB"`).

The folder is the registry, and a class's fields are its options: `tba/objectives/tb.py` holds one public dataclass.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_origin, get_type_hints

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from tba.config.schedule import Schedule
from tba.config.schema import PLUGGED, Config, Use
from tba.config.table import plain_number

GIVEN = {"given": True}
"""Metadata of a plug-in's field that the run fills in; the others are its options."""

KINDS = ("objectives", "strategies", "engines", "tasks", "selections")


@dataclass(frozen=True)
class Plugin:
    """A class that a config names, and the options given to it. An option may be a schedule: a number for each step."""

    cls: type
    options: Mapping[str, Any]

    def at(self, step: int) -> Any:
        """The instance for this step: every schedule replaced by its value there."""
        return self.cls(
            **{k: v.at(step) if isinstance(v, Schedule) else v for k, v in self.options.items()}
        )

    def build(self, *positional: Any) -> Any:
        return self.cls(*positional, **self.options)


def names(kind: str) -> list[str]:
    """What this package ships of a kind."""
    package = importlib.import_module(f"tba.{kind}")
    return sorted(
        m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")
    )


def find(kind: str, name: str) -> type:
    """The class called `name`; ValueError with the nearest name where there is none."""
    if "." in name:
        module_name, _, class_name = name.rpartition(".")
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"{name!r}: write `package.module.Class`")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{name!r}: no module {error.name!r} on the path; write `package.module.Class`"
            ) from error
        if class_name not in vars(module):
            raise ValueError(
                f"{name!r}: {module_name} has no {class_name!r}{nearest(class_name, vars(module))}"
            )
        found = vars(module)[class_name]
        if not (inspect.isclass(found) and dataclasses.is_dataclass(found)):
            raise ValueError(
                f"{name!r} is not a dataclass, so that it has no options; write @dataclass above it"
            )
        return found
    if name not in names(kind):
        raise ValueError(
            f"no {kind} called {name!r}{nearest(name, names(kind))}; there are {', '.join(names(kind))}, or write `package.module.Class`"
        )
    module = importlib.import_module(f"tba.{kind}.{name}")
    return next(
        c
        for c in vars(module).values()
        if inspect.isclass(c) and c.__module__ == module.__name__ and is_plugin(c)
    )


def is_plugin(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) and not cls.__name__.startswith("_")


def options_of(cls: type) -> dict[str, tuple[Any, Any]]:
    """Each option of a plug-in: its type, and its default (`dataclasses.MISSING` where it must be given)."""
    hints = get_type_hints(cls)
    own = [f for f in dataclasses.fields(cls) if f.init and f.metadata != GIVEN]
    return {
        f.name: (
            hints[f.name],
            f.default if f.default_factory is dataclasses.MISSING else f.default_factory(),
        )
        for f in own
    }


def resolve(
    kind: str, table: str, use: str, options: Mapping[str, Any], scheduled: bool = False
) -> Plugin:
    """Checks the options of `[table]` against the fields of the class it names; ValueError tells what to write instead."""
    cls = find(kind, use)
    known = options_of(cls)
    checked: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            raise ValueError(
                f"{table}.{name}: {use!r} has no such option{nearest(name, known)}; it has {', '.join(known) or 'none'}"
            )
        checked[name] = _checked(f"{table}.{name}", value, known[name][0], scheduled)
    if missing := [
        n
        for n, (_, default) in known.items()
        if default is dataclasses.MISSING and n not in checked
    ]:
        raise ValueError(f"{table}.{missing[0]} is missing: {use!r} needs it")
    return Plugin(cls, checked)


def nearest(name: str, known: Any) -> str:
    """`; did you mean ...?` where a known name is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _checked(name: str, value: Any, kind: Any, scheduled: bool) -> Any:
    if scheduled and kind is float and isinstance(value, Mapping):
        kind, known = Schedule, [f.name for f in dataclasses.fields(Schedule)]
        if unknown := [key for key in value if key not in known]:
            raise ValueError(
                f"{name}.{unknown[0]}: a schedule has no such key{nearest(unknown[0], known)}; it has {', '.join(known)}"
            )
    config = None if dataclasses.is_dataclass(kind) else ConfigDict(extra="forbid")
    try:
        return TypeAdapter(
            Annotated[kind, BeforeValidator(lambda v: plain_number(v, kind))], config=config
        ).validate_python(value)
    except ValidationError as error:
        errors = error.errors()
        if get_origin(kind) in (Union, UnionType):  # one for each kind that it might have been of
            what = " or ".join(e["msg"][:1].lower() + e["msg"][1:] for e in errors)
            raise ValueError(f"{name} = {value!r}: {what}") from error
        where, message = (
            ".".join([name, *(str(p) for p in errors[0]["loc"])]),
            errors[0]["msg"].removeprefix("Value error, "),
        )
        raise ValueError(
            f"{where} is missing"
            if errors[0]["type"] == "missing"
            else f"{where} = {errors[0]['input']!r}: {message}"
        ) from error


@dataclass(frozen=True)
class Plugins:
    """The five plug-ins that a config names, with checked options."""

    task: Plugin
    engine: Plugin
    objective: Plugin
    strategy: Plugin
    selection: Plugin


def resolve_all(config: Config) -> Plugins:
    """Find the five plug-ins and check their options; ValueError says what to write instead."""
    return Plugins(
        task=resolve("tasks", "task", config.task.use, config.task.options),
        engine=resolve("engines", "engine", config.engine.use, config.engine.options),
        objective=resolve(
            "objectives",
            "objective",
            config.objective.use,
            config.objective.options,
            scheduled=True,
        ),
        strategy=resolve("strategies", "strategy", config.strategy.use, config.strategy.options),
        selection=resolve(
            "selections", "selection", config.selection.use, config.selection.options
        ),
    )


def with_defaults(config: Config) -> Config:
    """Write out every option of the plug-ins, so that a stored config does not depend on later defaults."""
    plugins, tables = resolve_all(config), {}
    for table in PLUGGED:
        given: Use = getattr(config, table)
        options = {}
        for name, (_, default) in options_of(getattr(plugins, table).cls).items():
            if default is not dataclasses.MISSING and default is not None:
                options[name] = default
        tables[table] = Use(use=given.use, **(options | given.options))
    return config.model_copy(update=tables)

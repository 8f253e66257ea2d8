"""Tools in TRL's convention: the public methods of an environment, for the policy to call."""

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any

from tba.prompt import Prompt

AT_ONCE = 64
"""Calls that run at one time."""


@dataclass(frozen=True)
class Tools:
    """The tools of an environment; each dialogue has its own instance."""

    make: Callable[[], Any]
    """Returns a new instance."""
    max_turns: int
    """Most turns of the policy in a dialogue."""
    deadline: float
    """Seconds for a call of a tool, and for making and resetting an instance."""
    schemas: Mapping[str, Mapping[str, Any]]
    """What chat templates show of each tool: a JSON schema, from its signature and docstring."""
    judged: bool = True
    """Whether rewards see the instances."""

    def open(self, prompt: Prompt) -> tuple[Any, str]:
        """Return a new instance, and the text with which it begins. May raise anything."""
        instance = self.make()
        row = {**prompt.columns, "prompt": prompt.text}
        observation = _awaited(call(instance.reset, row))
        if not isinstance(observation, str | None):
            kind = type(observation).__name__
            raise TypeError(f"reset returned {kind}; it must return text, or None")
        return instance, whole(observation or "")

    def call(self, instance: Any, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the result of a tool as text. May raise anything."""
        return str(_awaited(getattr(instance, name)(**arguments)))


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function with the arguments that it names; with all of them if it has `**columns`."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return function(**arguments)
    names = {p.name for p in parameters}
    return function(**{name: value for name, value in arguments.items() if name in names})


def whole(text: str) -> str:
    """Return the text with `?` for each half of a character, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def describe(
    name: str, make: Callable[[], Any], max_turns: int, deadline: float, judged: bool = True
) -> Tools:
    """Return the tools of an environment, which the config calls `name`; ValueError if it has none.

    An instance is made, because `make` may be a function.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    origin = f"task.environment = {name!r}"
    try:
        instance = make()
    except Exception as error:  # untrusted
        raise ValueError(f"{origin}: calling it raised {error!r}") from error
    methods = dict(inspect.getmembers(type(instance), inspect.isfunction))
    if "reset" not in methods:
        raise ValueError(
            f"{origin}: {type(instance).__name__} has no method `reset`; write `def reset(self,"
            " **row)`, which returns None, or a text to append to the prompt"
        )
    schemas = {}
    for tool in methods:
        if tool.startswith("_") or tool == "reset":
            continue
        try:
            schemas[tool] = get_json_schema(getattr(instance, tool))
        except Exception as error:  # of several classes that transformers does not export
            raise ValueError(
                f"{origin}: {error}; give {tool!r} type hints, and a docstring with a line for each"
                " argument below `Args:`"
            ) from error
    if not schemas:
        raise ValueError(f"{origin}: {type(instance).__name__} has no other public method, no tool")
    return Tools(make, max_turns, deadline, schemas, judged)


def within(seconds: float, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return what each call returns or raises, or None if it does not return in time.

    They run side by side in daemon threads, which are left behind if they hang.
    """
    outcomes: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        try:
            outcomes[place] = calls[place]()
        except BaseException as error:  # untrusted: even SystemExit must give a result
            outcomes[place] = error

    for start in range(0, len(calls), AT_ONCE):
        places = range(start, min(start + AT_ONCE, len(calls)))
        until = time.monotonic() + seconds
        threads = [Thread(target=run, args=[p], daemon=True, name="tool") for p in places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
    return list(outcomes)  # a copy: late results do not count


def _awaited(value: Any) -> Any:
    """Return a value, or what an async function ends with, in an event loop of its own."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value

"""Calls of users' functions, and the scores and texts that they return."""

import asyncio
import inspect
import reprlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from math import frexp, isfinite
from threading import Thread
from typing import Any

MAX_CONCURRENT_CALLS = 64
"""Maximum number of tool calls that run at once."""

BITS = {"bfloat16": 8, "float16": 11, "float32": 24}
"""Significant bits of number formats below float64."""


class WrongLength(ValueError):
    """A reward function did not return a list with one reward for each completion."""


def listed(scores: Any) -> list[Any]:
    """Return the rewards of a group as a list, with one item for each index of the first axis.

    Raises WrongLength for values without an order and for text.
    """
    plain = _plain(scores)
    if isinstance(plain, int | float) and plain is not scores:
        return [plain]  # an array without axes, for one completion
    wrong = isinstance(plain, Mapping | Set | str | bytes | bytearray)
    if wrong or not isinstance(plain, Iterable):
        raise WrongLength(
            f"the scoring function returned a {type(scores).__name__}, {reprlib.repr(scores)};"
            " return a list with one number for each completion"
        )
    scores = []
    for score in plain:
        score = _plain(score)
        while isinstance(score, list | tuple) and len(score) == 1:  # a row of shape [1]
            score = _plain(score[0])
        scores.append(score)
    return scores


def number(score: Any) -> float | None:
    """Return a score as a float; None if it is not a number."""
    if isinstance(score, str | bytes | bytearray):  # float() would parse some
        return None
    try:
        return float(score)
    except Exception:  # untrusted: two numbers raise RuntimeError, 10**400 OverflowError
        return None


def _shortest(value: Any, bits: int) -> Any:
    """Return the shortest decimals for numbers with `bits`: 0.9, not 0.8999999761581421."""
    if isinstance(value, list):
        return [_shortest(each, bits) for each in value]
    if not isfinite(value):
        return value
    mantissa, exponent = frexp(value)
    # half the distance to the next number, which is smaller below a power of 2
    half = 2.0 ** (exponent - bits - 1 - (abs(mantissa) == 0.5))
    decimals = (float(f"{value:.{digits}g}") for digits in range(1, 18))
    return next(each for each in decimals if abs(each - value) < half)


def _plain(value: Any) -> Any:
    """Convert an array or a scalar of any library to a list or a number; return others unchanged.

    numpy, PyTorch, JAX and pandas have `tolist`, other libraries `__array__` or `__dlpack__`.
    """
    if callable(tolist := getattr(value, "tolist", None)):
        plain = tolist()
        bits = BITS.get(str(getattr(value, "dtype", "")).rpartition(".")[2])
        return plain if bits is None else _shortest(plain, bits)
    has_array = hasattr(value, "__array__")
    if not has_array and not hasattr(value, "__dlpack__"):
        return value
    import numpy as np  # here, because most scoring processes do not need it

    return (np.asarray(value) if has_array else np.from_dlpack(value)).tolist()


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function with the arguments that it names, or with all if it has `**columns`.

    A column `self` is not passed to methods.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        if not inspect.isfunction(function):
            arguments = {n: x for n, x in arguments.items() if n not in ("self", "cls")}
        return function(**arguments)
    names = {p.name for p in parameters}
    return function(**{name: value for name, value in arguments.items() if name in names})


def without_surrogates(text: str) -> str:
    """Return the text with `?` for each lone surrogate, which tokenizers do not accept."""
    return text.encode("utf-8", "replace").decode("utf-8")


def within(seconds: float, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the result or exception of each call, or None if it does not return in time.

    Calls run in parallel in daemon threads, which are abandoned if they hang.
    """
    outcomes: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        try:
            outcomes[place] = calls[place]()
        except BaseException as error:  # untrusted: even SystemExit must become a result
            outcomes[place] = error

    for start in range(0, len(calls), MAX_CONCURRENT_CALLS):
        places = range(start, min(start + MAX_CONCURRENT_CALLS, len(calls)))
        until = time.monotonic() + seconds
        threads = [Thread(target=run, args=[p], daemon=True, name="tool") for p in places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
    return list(outcomes)  # a copy: late results do not count


def awaited(value: Any) -> Any:
    """Return a value, or the result of a coroutine, which runs in a new event loop."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value

"""Prose of error messages about a config: what is wrong, and what to type instead."""

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic_core import ErrorDetails

KNOWN: set[str] = set()
"""Secrets that this process has read."""

FEW = 6
"""Maximum number of names that a message lists."""


def explain(name: str, *errors: ErrorDetails) -> str:
    """Return an error message for a value, from pydantic's error, or errors in case of a union."""
    first = errors[0]["type"]
    if first == "missing":
        return f"{name} is missing"
    if first in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown key {name!r}"
    reasons = " or ".join(dict.fromkeys(map(reason, errors)))
    told = reasons.replace(" or Input should be ", " or ")
    return f"{name} = {errors[0]['input']!r}: {told}"


def reason(error: ErrorDetails) -> str:
    """Return pydantic's message, or the message of a validator's ValueError."""
    return error["msg"].removeprefix("Value error, ")


def choices(name: str, known: Iterable[str], all_of_them: str | None = None) -> str:
    """Return the end of an error message about an unknown name: the nearest and all known names.

    If there are more than `FEW`, `all_of_them` says where they are listed.
    """
    known = list(known)
    by_lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    if all_of_them is None or len(known) <= FEW:
        all_of_them = f"known: {', '.join(known) or 'none'}"
    return f"; did you mean {by_lower[close[0]]!r}? {all_of_them}" if close else f"; {all_of_them}"


def relative_to(path: str | Path) -> str:
    """Return, for a message, the folder that a path is relative to; "" if it is absolute."""
    return "" if Path(path).expanduser().is_absolute() else f" in {Path.cwd()}"


def refuse(mistakes: Iterable[str]) -> None:
    """Raise ValueError with a line for each mistake; do nothing without any."""
    if lines := "\n".join(dict.fromkeys(mistakes)):
        raise ValueError(lines)


def together(*checks: Callable[[], Any]) -> list[Any]:
    """Run all checks, and return their results; ValueError with the mistakes of all of them."""
    results = []
    mistakes: list[str] = []
    for check in checks:
        try:
            results.append(check())
        except ValueError as error:
            mistakes += str(error).splitlines()
    refuse(mistakes)
    return results


def masked(text: str) -> str:
    """Return text, such as an error of a user's function, with known secrets masked."""
    for secret in KNOWN:
        text = text.replace(secret, "***")
    return text


@contextmanager
def about(place: str) -> Iterator[None]:
    """Prefix the message of a ValueError raised in the block with a place."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {masked(str(error))}") from error

"""A reward function for TRL and for this package."""

from typing import Any


def right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Return 1 for each completion that is the right answer, else 0."""
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]

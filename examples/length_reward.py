# examples/length_reward.py
"""A reward function in TRL's convention: one number for each completion, None where it does not apply."""

from typing import Any


def near_length(
    completions: list[str], characters: list[int], **columns: Any
) -> list[float | None]:
    """1 for exactly as many characters as the data set's column `characters` asks for, falling to 0 at twice or none of it."""
    return [
        max(0.0, 1 - abs(len(text.strip()) - wanted) / wanted) if wanted else None
        for text, wanted in zip(completions, characters, strict=True)
    ]

# examples/length_reward.py
"""A reward function in TRL's convention: one number for each completion, or None."""

from typing import Any


def near_length(
    completions: list[str], characters: list[int], **columns: Any
) -> list[float | None]:
    """Return 1 for a completion with as many characters as the column `characters` asks for.

    The reward falls to 0 at none or twice as many. None: this row asks for no length.
    """
    rewards: list[float | None] = []
    for text, wanted in zip(completions, characters, strict=True):
        distance = abs(len(text.strip()) - wanted)
        rewards.append(max(0.0, 1 - distance / wanted) if wanted else None)
    return rewards

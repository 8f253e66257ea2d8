"""An environment that follows TRL's convention, and a reward for its dialogues."""

from typing import Any


class Calculator:
    """Multiplies. Each dialogue has a separate instance."""

    def reset(self, **row: Any) -> None:
        """Begin a dialogue about a row of the data set."""
        self.calls = 0

    def multiply(self, a: int, b: int) -> int:
        """Multiply two integers.

        Args:
            a: The first factor.
            b: The second factor.
        """
        product = int(a) * int(b)
        self.calls += 1
        return product


def right(
    completions: list[list[dict[str, Any]]],
    environments: list[Calculator],
    answer: list[str],
    **columns: Any,
) -> list[float]:
    """Return 0.5 for a dialogue in which the calculator was used, and 0.5 for the right answer."""
    rewards = []
    for messages, calculator, wanted in zip(completions, environments, answer, strict=True):
        said = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
        rewards.append(0.5 * (calculator.calls > 0) + 0.5 * (wanted in said))
    return rewards

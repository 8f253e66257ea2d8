"""Prompts and answers as text, as tasks see them, and rewards. Does not import torch."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
"""One chat message: `{"role": ..., "content": ...}`."""


@dataclass(frozen=True)
class Prompt:
    """A question to the policy: plain text, or chat messages for the tokenizer's chat template.

    `columns` are the other columns of the data set's row; reward functions receive them by name.
    """

    id: str
    text: str | Sequence[Message]
    columns: Mapping[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """Return a copy of the columns and the prompt, which user code may change."""
        return deepcopy({**self.columns, "prompt": self.text})


@dataclass(frozen=True)
class Answer:
    """A completion as text, up to a stop string; `finished` is False if the token limit cut it.

    A dialogue also has `messages`, from the policy's first turn on (for a program's session: those
    of its last request, and the reply), and its `environment` if a reward asks for it: the
    instance, or in the searcher a handle to it. It is unfinished if it exceeds the limit of tokens
    or turns.
    """

    text: str
    finished: bool
    messages: Sequence[Message] | None = None
    environment: Any = None
    tokens: Sequence[int] = field(default=(), compare=False, repr=False)
    """Token ids as sampled, EOS included."""
    version: int = field(default=0, compare=False)
    """Version of the weights that sampled its first token."""
    steps: int = field(default=0, compare=False)
    """`run.steps`, for rewards that depend on the progress of training."""


def passes(reward: Any, least: Any) -> Any:
    """Return whether a reward, or each of several, is at least `least`, up to rounding."""
    return reward >= least - 1e-13 * abs(least) - 1e-10  # 0.7 + 0.2 + 0.1 is less than 1

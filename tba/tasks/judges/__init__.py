"""Judges score completions with a model. This file defines the interface, the others one judge."""

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from itertools import takewhile
from typing import Any

from tba.models.template import text_of
from tba.prompt import Message
from tba.tasks import Scores

Text = str | Sequence[Message]
"""A prompt or a completion: text, or chat messages."""


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A reward function, plain or `async`, that asks a model, with TRL's signature.

    Its fields are its options. A pickled judge contains only its options, not loaded models.
    """

    template: str | None = None
    """Input of the model, with `{prompt}` and `{completion}`; default: the chat template."""

    def __post_init__(self) -> None:
        if self.template is not None and "{completion}" not in self.template:
            raise ValueError("template must contain {completion}, where the completion goes")

    def check(self) -> None:
        """Raise ValueError if the judge cannot work. Runs before any process starts, in seconds."""

    def load(self, device: str) -> None:
        """Load models to the device. Runs in each scoring process before its first score."""

    def __call__(
        self, prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
    ) -> Sequence[float] | Awaitable[Sequence[float]]:
        """Return a score for each pair of prompt and completion."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


def conversation(prompt: Text, completion: Text) -> list[Message]:
    """Return a prompt and its completion as chat messages.

    A completion that continues the last message of the prompt is merged with it.
    """
    messages, completed = _both(prompt, completion)
    for message in completed:
        if messages and messages[-1]["role"] == message["role"] == "assistant":
            message["content"] = messages.pop()["content"] + message["content"]
        messages.append(message)
    return list(messages)


def _both(prompt: Text, completion: Text) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the messages of a prompt and of its completion.

    The session of a program is a whole chat: messages before its first reply form the prompt.
    """
    completed = _messages("assistant", completion)
    asked = list(takewhile(lambda message: message["role"] != "assistant", completed))
    return asked or _messages("user", prompt), completed[len(asked) :]


def _messages(role: str, text: Text) -> list[dict[str, Any]]:
    messages = [{"role": role, "content": text}] if isinstance(text, str) else text
    return [{**message, "content": text_of(message.get("content"))} for message in messages]


def filled(template: str, prompt: Text, completion: Text) -> str:
    """Fill a template with the texts of a prompt and its completion; messages become paragraphs."""
    texts = {}
    for mark, messages in zip(("{prompt}", "{completion}"), _both(prompt, completion), strict=True):
        texts[mark] = "\n\n".join(message["content"] for message in messages)
    # in one pass, because a prompt may itself contain "{completion}"
    return re.sub(r"\{prompt\}|\{completion\}", lambda mark: texts[mark[0]], template)


def then(scores: Any, finish: Callable[[Any], Scores]) -> Scores | Awaitable[Scores]:
    """Apply a function to the scores of a reward function, awaiting them first if necessary."""
    if not isawaitable(scores):
        return finish(scores)

    async def finished() -> Scores:
        return finish(await scores)

    return finished()

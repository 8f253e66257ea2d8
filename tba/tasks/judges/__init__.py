"""Judges score completions by a model. This is their contract; each other file is one judge."""

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
    """A reward function that asks a model, plain or `async`, in TRL's convention.

    Its fields are its options. A pickled judge is its options, without what it has loaded.
    """

    template: str | None = None
    """Text with `{prompt}` and `{completion}` to read; default: the chat template."""

    def __post_init__(self) -> None:
        if self.template is not None and "{completion}" not in self.template:
            raise ValueError("template must contain {completion}, where the completion goes")

    def check(self) -> None:
        """ValueError if it cannot work. Called before any process starts; takes seconds at most."""

    def load(self, device: str) -> None:
        """Load models to the device, in a process that scores, before its first score."""

    def __call__(
        self, prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
    ) -> Sequence[float] | Awaitable[Sequence[float]]:
        """Return a score for each prompt with its completion."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


def conversation(prompt: Text, completion: Text) -> list[Message]:
    """Return a prompt and its completion as chat messages.

    A completion that goes on with the last message of the prompt is one message with it.
    """
    messages, completed = _both(prompt, completion)
    for message in completed:
        if messages and messages[-1]["role"] == message["role"] == "assistant":
            message["content"] = messages.pop()["content"] + message["content"]
        messages.append(message)
    return list(messages)


def _both(prompt: Text, completion: Text) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the messages of a prompt and of its completion.

    A session of a program is a whole chat: what stands before its first reply is the prompt.
    """
    completed = _messages("assistant", completion)
    asked = list(takewhile(lambda message: message["role"] != "assistant", completed))
    return asked or _messages("user", prompt), completed[len(asked) :]


def _messages(role: str, text: Text) -> list[dict[str, Any]]:
    messages = [{"role": role, "content": text}] if isinstance(text, str) else text
    return [{**message, "content": text_of(message.get("content"))} for message in messages]


def fill(template: str, prompt: Text, completion: Text) -> str:
    """Return a template with the text of a prompt and its completion; messages are paragraphs."""
    texts = {}
    for mark, messages in zip(("{prompt}", "{completion}"), _both(prompt, completion), strict=True):
        texts[mark] = "\n\n".join(message["content"] for message in messages)
    # in one pass, because a prompt may itself have "{completion}" in it
    return re.sub(r"\{prompt\}|\{completion\}", lambda mark: texts[mark[0]], template)


def then(scores: Any, finish: Callable[[Any], Scores]) -> Scores | Awaitable[Scores]:
    """Apply a function to the scores of a reward function, awaited first if need be."""
    if not isawaitable(scores):
        return finish(scores)

    async def finished() -> Scores:
        return finish(await scores)

    return finished()

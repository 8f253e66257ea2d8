"""Chats as text: what a tokenizer's chat template makes of messages."""

import faulthandler
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any

SECONDS = 20
"""Longest time that one chat may take, after which the process ends."""
ALONE = Lock()
"""Of the thread that uses a chat template: a process has one limit of time."""
AS_CODE = re.compile(r"""['"]text['"]: ?['"]""")
"""A list of parts that a template has shown as Python or JSON writes it."""


def text_of(content: Any) -> str:
    """Return the content of a message as text. ValueError for a part that is no text."""
    if not isinstance(content, list):
        return str(content or "")
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise ValueError(f"a part of a message is no text: {reprlib.repr(part)}; remove it")
    return "".join(part["text"] for part in content)


def render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> str:
    """Return a chat as text, up to where the policy begins its turn, or goes on with it.

    It goes on with a last message of its own. Content is given to the chat template as it is, a
    text or a list of parts, unless the template shows only the other. ValueError if it cannot
    show the chat at all.
    """
    for message in messages:
        match message:
            case {"role": "assistant"} | {"role": str(), "content": str() | list()}:
                continue
        told = reprlib.repr(message)
        raise ValueError(f"a message is no table with `role` and `content` as text: {told}")
    if messages[-1] == {"role": "assistant", "content": ""}:  # a turn that is not begun
        messages = messages[:-1]
    plain = not any(isinstance(m.get("content"), list) for m in messages)
    texts = list(map(_as_text, messages))
    parts = list(map(_as_parts, messages))
    contents = [m.get("content") or [] for m in (parts[-1:] if plain else parts)]
    for chat in (messages, parts):
        with suppress(Exception):  # the template is code from outside
            rendered = _rendered(tokenizer, chat, options)
            as_code = AS_CODE.search(rendered) and not (plain and chat is messages)
            shown = all(p["text"].strip() in rendered for content in contents for p in content)
            if shown and not as_code:
                return rendered
    try:
        return _rendered(tokenizer, texts, options)
    except Exception as error:  # such as a system message where there is no such role
        why = str(error).partition("\n")[0]
        raise ValueError(f"the tokenizer's chat template refuses it: {why}") from error


@contextmanager
def limited() -> Iterator[None]:
    """End the process, with a traceback that shows the template's line, if the block takes long.

    A template is code from outside, and nothing else can interrupt one long operation in it.
    """
    with ALONE:
        faulthandler.dump_traceback_later(SECONDS, exit=True, file=2)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def _rendered(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> str:
    goes_on = messages[-1].get("role") == "assistant" and not messages[-1].get("tool_calls")
    with limited():
        chat: str = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            **options,
        )
    return chat


def _as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its parts joined."""
    content = message.get("content")
    return {**message, "content": text_of(content)} if isinstance(content, list) else message


def _as_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its text as a list of one part."""
    content = message.get("content")
    parts = [{"type": "text", "text": content}]
    return {**message, "content": parts} if isinstance(content, str) else message

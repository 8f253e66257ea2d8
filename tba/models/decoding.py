"""Responses as text: the one place where tokens of the policy become text."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Text of a number without a token, which padded embeddings have, and of a part of a character."""
BYTE = re.compile("<0x([0-9A-F]{2})>")
"""A token of one byte, where tokenizers have no token for a character."""


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return all tokens as text, special tokens included; no space is cleaned up."""
    shown = tokenizer.convert_tokens_to_string
    runs = groupby(tokenizer.convert_ids_to_tokens(ids), lambda token: token is None)
    return "".join(INCOMPLETE * len([*run]) if lost else shown(_whole(run)) for lost, run in runs)


def _whole(tokens: Iterable[Any]) -> list[Any]:
    """Return tokens with INCOMPLETE for bytes of no character, which would spoil others nearby."""
    whole: list[Any] = []
    for is_byte, run in groupby(tokens, lambda token: BYTE.fullmatch(str(token)) is not None):
        if is_byte:
            text = bytes(int(token[3:5], 16) for token in run).decode(errors="replace")
            run = iter([f"<0x{byte:02X}>" for byte in text.encode()])
        whole += run
    return whole


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the first stop string in it."""
    places = [text.find(each) for each in stop if each in text]
    return text[: min(places, default=len(text))]

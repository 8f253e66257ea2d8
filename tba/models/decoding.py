"""Responses as text: the only place where tokens of the policy become text."""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Text of an id without a token, as in padded embeddings, and of an incomplete character."""
BYTE = re.compile("<0x([0-9A-F]{2})>")
"""A token of one byte, which tokenizers use for characters without a token."""


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return all tokens as text, special tokens included; spaces are not cleaned up.

    Invalid bytes are replaced by INCOMPLETE, because they would spoil adjacent tokens.
    """
    whole: list[Any] = []
    for is_byte, run in groupby(
        tokenizer.convert_ids_to_tokens(ids), lambda token: bool(BYTE.fullmatch(str(token)))
    ):
        if is_byte:
            text = bytes(int(token[3:5], 16) for token in run).decode(errors="replace")
            run = iter([f"<0x{byte:02X}>" for byte in text.encode()])
        whole += run
    shown = tokenizer.convert_tokens_to_string
    runs = groupby(whole, lambda token: token is None)
    return "".join(INCOMPLETE * len([*run]) if lost else shown([*run]) for lost, run in runs)


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the first stop string in it."""
    places = [text.find(each) for each in stop if each in text]
    return text[: min(places, default=len(text))]

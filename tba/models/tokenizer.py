"""Tokenizer of a policy: the only place where its tokens become text."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from tba.config.mistakes import about
from tba.models.template import Roles, arguments_in, render
from tba.prompt import Answer, Message, Prompt

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Text of an id without a token, as in padded embeddings, and of an incomplete character."""
BYTE = re.compile("<0x([0-9A-F]{2})>")
"""A token of one byte, which tokenizers use for characters without a token."""

Encode = Callable[[Prompt], np.ndarray]
"""Returns the tokens of a prompt."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, the tokens that end a response, and the one that pads."""

    tokenizer: Any
    eos_id: int  # token that ends a given text: `policy.eos_token`, or the tokenizer's
    eos_ids: frozenset[int]
    pad_id: int
    context: int  # maximum number of tokens of a prompt and its response together
    vocabulary: int  # tokens that the model has embeddings for
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template: `policy.chat_template_kwargs`."""
    ends: Mapping[str, Sequence[int]] = field(default_factory=dict)  # `eos_ids` by their source
    stop_strings: Sequence[str] = ()  # of generation_config.json

    def encode(self, prompt: Prompt, checked: Roles = None) -> np.ndarray:
        """Return the tokens of a prompt; chat messages go through the chat template."""
        if isinstance(prompt.text, str):
            ids = self.tokenizer(prompt.text)["input_ids"]
            if ids[:2] == [self.tokenizer.bos_token_id] * 2:  # the text has a BOS already
                ids = ids[1:]
            if ids and ids[-1] in self.eos_ids:  # some tokenizers append an EOS
                own = self.tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
                while ids and ids[-1] in self.eos_ids and ids[-len(own) :] != own:
                    ids = ids[:-1]
        elif self.tokenizer.chat_template is None:
            raise ValueError(
                f"prompt {prompt.id!r} is chat messages, but the tokenizer has no chat template;"
                " use text, or a model that has a template"
            )
        else:
            with about(f"prompt {prompt.id!r}"):
                template = self.tokenizer.chat_template
                own = arguments_in(prompt.columns, template) if checked is None else {}
                rendered = self.render(prompt.text, own, checked) if prompt.text else ""
                ids = self.tokens(rendered).tolist()
        if not ids or not prompt.text:
            raise ValueError(
                f"prompt {prompt.id!r} is empty, without a token; remove the row, or add text"
            )
        return np.asarray(ids, np.int32)

    def loses(self, prompt: Prompt, tokens: np.ndarray) -> bool:
        """Return whether a prompt has an unknown token or a pad token that nobody wrote."""
        own = self.tokenizer
        lost = {own.unk_token_id, own.pad_token_id} - {None, own.bos_token_id, *self.eos_ids}
        names = own.convert_ids_to_tokens([each for each in lost if each in tokens])
        return any(name not in f"{prompt.text}{own.chat_template}" for name in names)

    def check_known(self, tokens: np.ndarray, what: str) -> None:
        """Raise ValueError if the model has no embedding for a token; `what` names its source."""
        worst = int(np.max(tokens, initial=0))
        if worst >= self.vocabulary:
            raise ValueError(
                f"{what} has the token {self.tokenizer.convert_ids_to_tokens(worst)!r}, number"
                f" {worst}, but the model has embeddings for {self.vocabulary} only; remove it from"
                " the text, or resize the embeddings"
            )

    def tokens(self, rendered: str) -> np.ndarray:
        """Return the tokens of a rendered chat, which contains its special tokens as text."""
        ids = self.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        tokens = np.asarray(ids, np.int32)
        self.check_known(tokens, "the chat")
        return tokens

    def render(self, messages: Sequence[Message], own: Mapping[str, Any], checked: Roles) -> str:
        """Return a chat as text, as `template.render` does."""
        return render(self.tokenizer, messages, {**self.template_kwargs, **own}, checked)

    def decode(self, tokens: np.ndarray) -> str:
        """Return a response as text: all of its tokens except the EOS that ends it."""
        ended = len(tokens) > 0 and int(tokens[-1]) in self.eos_ids
        return decode(self.tokenizer, tokens[: len(tokens) - ended].tolist())

    def prompt(self, tokens: np.ndarray) -> str:
        """Return a prompt as readable text: with the markers of a chat's turns, without BOS."""
        begun = tokens[:1].tolist() == [self.tokenizer.bos_token_id]
        return decode(self.tokenizer, tokens[begun:].tolist())

    def answer(
        self, tokens: np.ndarray, finished: bool, stop: Sequence[str], version: int = 0
    ) -> Answer:
        """Return a response as text, up to the first stop string, which finishes it."""
        text = self.decode(tokens)
        ids = tuple(tokens.tolist())
        shown = before_stop(text, stop)
        return Answer(shown, finished or shown != text, tokens=ids, version=version)

    def within(self, tokens: int | None) -> "Tokenizer":
        """Return a tokenizer with the context limited to `tokens`, an engine's limit or None."""
        return self if tokens is None else replace(self, context=min(tokens, self.context))

    def encode_all(
        self, prompts: Sequence[Prompt], max_tokens: int, encode: Encode, cut: bool = False
    ) -> list[np.ndarray]:
        """Return the tokens of all prompts of a run, which must leave room for `max_tokens`.

        With `cut`, longer ones are truncated: a program reads the row, and writes its own prompt.
        """
        room = self.context - max_tokens
        tokens = [ids[: max(1, room)] if cut else ids for ids in map(encode, prompts)]
        lengths = {}
        for prompt, ids in zip(prompts, tokens, strict=True):
            self.check_known(ids, f"prompt {prompt.id!r}")
            lengths[prompt.id] = len(ids)
        if len(lengths) != len(prompts):
            raise ValueError("two prompts have the same id; ids must be unique")
        long = {name: length for name, length in lengths.items() if length > room}
        if long:
            worst = max(long, key=long.__getitem__)
            raise ValueError(
                f"{len(long)} of {len(prompts)} prompts do not fit the model's context of"
                f" {self.context} tokens with {max_tokens} of response"
                f" (the longest is {worst!r} with {long[worst]}); lower sampling.max_tokens,"
                " or raise engine.max_model_len if that is lower than the model's"
            )
        return tokens


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

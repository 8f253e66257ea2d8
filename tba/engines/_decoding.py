"""Decoding: the forward passes over a cache, the choice of next tokens, and stop strings."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tba.models.cache import EVERYONE, NOBODY, attention_mask, positions, takes_masks
from tba.models.pretrained import Tokenizer
from tba.types import Sampling

IDLE = -3
"""A slot without a response."""
SHARED = 16
"""Tokens of all responses, as a multiple of the prompt's, up to which they share it."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Text of a token that has a part of a character, as tokens of bytes may."""


def run_prompts(
    model: Any, ids: Int[Tensor, "B P"], real: Int[Tensor, "B P"]
) -> tuple[Float[Tensor, "B D"], Any]:
    """Return the last hidden state of each prompt, padded on the left, and the cache of all."""
    out = model.base_model(
        input_ids=ids, attention_mask=real, position_ids=positions(real), use_cache=True
    )
    return out.last_hidden_state[:, -1], out.past_key_values


def decoder(
    model: Any, cache: Any, real: Int[Tensor, "B P"], samples: int, limit: int
) -> "Copied | Shared":
    """Return the decoder of `samples` responses of up to `limit` tokens to each prompt.

    Sharing the prompt in the cache costs attention over all responses to it. Responses that have
    more than SHARED times the prompt's tokens in all get a copy of the prompt each.
    """
    short = samples * limit <= SHARED * real.shape[1]
    if samples > 1 and short and takes_masks(model):
        return Shared(model, cache, real, samples)
    return Copied(model, cache, real, samples)


class Copied:
    """Responses with a copy of their prompt's keys and values each."""

    def __init__(self, model: Any, cache: Any, real: Int[Tensor, "B P"], samples: int):
        self.model = model
        self.cache = cache
        self.cache.batch_repeat_interleave(samples)
        self.real = real.repeat_interleave(samples, 0)

    def keep(self, kept: Int[Tensor, " M"]) -> None:
        """Drop all responses but these, by their place among those that are left."""
        self.real = self.real[kept]
        self.cache.batch_select_indices(kept)

    def run(self, tokens: Int[Tensor, " N"]) -> Float[Tensor, "N D"]:
        """Return the last hidden state of each response after its newest token."""
        self.real = torch.cat([self.real, torch.ones_like(self.real[:, :1])], 1)
        out = self.model.base_model(
            input_ids=tokens[:, None],
            attention_mask=self.real,
            position_ids=positions(self.real)[:, -1:],
            past_key_values=self.cache,
            use_cache=True,
        )
        return out.last_hidden_state[:, -1]


class Shared:
    """Responses in one row with their prompt: each sees the prompt and its own tokens only.

    A row has a slot for each of its responses that has not ended; where it has fewer than other
    rows, slots are idle. Each step adds a column for every slot to the cache.
    """

    def __init__(self, model: Any, cache: Any, real: Int[Tensor, "B P"], samples: int):
        self.model = model
        self.cache = cache
        self.sees: Int[Tensor, "B C"] = torch.where(real.bool(), EVERYONE, NOBODY)
        self.length = real.sum(1, keepdim=True)
        everyone = torch.arange(len(real) * samples, device=real.device)
        self.prompt = everyone // samples
        self.sample = everyone % samples
        self._place()

    def keep(self, kept: Int[Tensor, " M"]) -> None:
        left, self.prompt = self.prompt[kept].unique(return_inverse=True)
        self.sample = self.sample[kept]
        self.sees = self.sees[left]
        self.length = self.length[left]
        self.cache.batch_select_indices(left)
        self._place()

    def _place(self) -> None:
        """Give each response a slot of its prompt's row; responses are in the prompts' order."""
        counts = self.prompt.bincount(minlength=len(self.sees))
        first = counts.cumsum(0) - counts
        slot = torch.arange(len(self.prompt), device=first.device) - first[self.prompt]
        self.place = self.prompt, slot
        self.slots = self.prompt.new_full((len(self.sees), int(counts.max())), IDLE)
        self.slots[self.place] = self.sample

    def run(self, tokens: Int[Tensor, " N"]) -> Float[Tensor, "N D"]:
        ids = torch.zeros_like(self.slots)
        ids[self.place] = tokens
        self.sees = torch.cat([self.sees, self.slots], 1)
        mask = attention_mask(self.model, self.slots, self.sees)
        out = self.model.base_model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=self.length.expand_as(ids),
            past_key_values=self.cache,
            use_cache=True,
        )
        self.length = self.length + 1
        return out.last_hidden_state[self.place]


def choose(
    logits: Float[Tensor, "N V"],
    uniform: Float[Tensor, "N R"],
    sampling: Sampling,
) -> tuple[Int[Tensor, "N R"], Float[Tensor, "N R"]]:
    """Return R tokens of each distribution and their log-probs, which `sampling` does not change.

    The log-probs are those before `explore`, top-k and top-p, in this order. The tokens are found
    by inverse transform sampling: for a number u in (0, 1], the first one whose cumulative
    probability is at least u. Temperature 0 is greedy.
    """
    scaled = logits.float() / (sampling.temperature or 1.0)
    total = scaled.logsumexp(-1, keepdim=True)
    if sampling.temperature == 0:
        tokens = scaled.argmax(-1, keepdim=True).expand(uniform.shape)
    else:
        if sampling.explore is None:
            p = (scaled - total).exp_()
        else:
            p = (scaled * (sampling.temperature / sampling.explore)).softmax(-1)
        cumulative = _without_unlikely(p, sampling).cumsum(-1)
        tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:])
    return tokens, scaled.gather(1, tokens) - total


def _without_unlikely(p: Float[Tensor, "N V"], sampling: Sampling) -> Float[Tensor, "N V"]:
    """Return probabilities, which need not sum to 1, with 0 for the tokens that are left out.

    vLLM has the same order.
    """
    if 0 < sampling.top_k < p.shape[-1]:
        least = p.topk(sampling.top_k).values[:, -1:]
        p = p.masked_fill(p < least, 0.0)
    if sampling.top_p < 1:
        p = _nucleus(p, sampling.top_p)
    return p


def _nucleus(p: Float[Tensor, "N V"], top_p: float) -> Float[Tensor, "N V"]:
    """Return 0 outside the smallest set of tokens that have this share of the probability."""
    ordered, order = p.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    outside = before >= top_p * p.sum(-1, keepdim=True)
    return p.scatter(1, order, ordered.masked_fill(outside, 0.0))


class StopStrings:
    """Finds the responses whose newest token completes a stop string.

    Few tokens of a vocabulary can be the last one of a stop string: those in `possible`. Only for
    these, `completed` searches the text of the newest tokens.
    """

    possible: Bool[Tensor, " V"]

    def __init__(self, text: Tokenizer, stop: Sequence[str], device: str):
        self.stop = tuple(stop)
        self._decode = text.tokenizer.decode
        last = {each[-1] for each in stop} | {INCOMPLETE}
        possible = np.zeros(text.vocabulary, bool)
        self._silent = np.zeros(text.vocabulary, bool)
        for token in range(min(text.vocabulary, len(text.tokenizer))):
            # twice: some decoders drop a space at the beginning
            shown = self._decode([token, token], skip_special_tokens=True)
            possible[token] = not last.isdisjoint(shown)
            self._silent[token] = not shown
        self.possible = torch.from_numpy(possible).to(device)
        self._reach = 1 + max(len(each.encode()) for each in stop)

    def completed(self, tokens: np.ndarray) -> bool:
        """Return whether there is a stop string at the end of a response that had none before."""
        spoken = tokens[~self._silent[tokens]]
        tail = spoken[-self._reach :]  # every token has a byte at least
        text = self._decode(tail.tolist(), skip_special_tokens=True)
        return any(each in text for each in self.stop)


def length_to_stop(text: Tokenizer, tokens: np.ndarray, stop: Sequence[str]) -> int | None:
    """Return the number of tokens up to the one that completes a stop string, if there is one."""
    if not stop:
        return None
    for length in range(1, len(tokens) + 1):
        if text.answer(tokens[:length], False, stop).finished:
            return length
    return None

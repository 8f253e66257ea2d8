"""Decoding several responses to each prompt, over a cache that has the prompts already."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tba.models.cache import EVERYONE, NOBODY, positions, takes_masks, visible

IDLE = -3
"""A slot without a response."""
SHARED = 16
"""Tokens of all responses, as a multiple of the prompt's, up to which they share it."""


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
    """Return what decodes `samples` responses of up to `limit` tokens to each prompt.

    Responses share the prompt in the cache where they have at most SHARED times its tokens in all.
    Attention compares each with the tokens of all the others then; beyond, copies cost less.
    """
    short = samples * limit <= SHARED * real.shape[1]
    if samples > 1 and short and takes_masks(model):
        return Shared(model, cache, real, samples)
    return Copied(model, cache, real, samples)


class Copied:
    """Responses with a copy of their prompt's keys and values each."""

    def __init__(self, model: Any, cache: Any, real: Int[Tensor, "B P"], samples: int):
        self.model, self.cache = model, cache
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
            input_ids=tokens[:, None], attention_mask=self.real,
            position_ids=positions(self.real)[:, -1:], past_key_values=self.cache,
            use_cache=True,
        )  # fmt: skip
        return out.last_hidden_state[:, -1]


class Shared:
    """Responses in one row with their prompt: each sees the prompt and its own tokens only.

    A row has a slot for each of its responses that has not ended; where it has fewer than other
    rows, slots are idle. Each step adds a column for every slot to the cache.
    """

    def __init__(self, model: Any, cache: Any, real: Int[Tensor, "B P"], samples: int):
        self.model, self.cache = model, cache
        self.sees: Int[Tensor, "B C"] = torch.where(real.bool(), EVERYONE, NOBODY)
        self.length = real.sum(1, keepdim=True)
        everyone = torch.arange(len(real) * samples, device=real.device)
        self.prompt, self.sample = everyone // samples, everyone % samples
        self._place()

    def keep(self, kept: Int[Tensor, " M"]) -> None:
        left, self.prompt = self.prompt[kept].unique(return_inverse=True)
        self.sample = self.sample[kept]
        self.sees, self.length = self.sees[left], self.length[left]
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
        mask = visible(self.model, self.slots, self.sees)
        out = self.model.base_model(
            input_ids=ids, attention_mask=mask, position_ids=self.length.expand_as(ids),
            past_key_values=self.cache, use_cache=True,
        )  # fmt: skip
        self.length = self.length + 1
        return out.last_hidden_state[self.place]

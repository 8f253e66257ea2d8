"""Decoding several responses to each prompt, over a cache that has the prompts already."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tba.models.pretrained import positions

EVERYONE, NOBODY = -1, -2
"""Who sees the column of a real prompt token, and of padding."""
IDLE = -3
"""A slot without a response."""


def run_prompts(
    model: Any, ids: Int[Tensor, "B P"], visible: Int[Tensor, "B P"]
) -> tuple[Float[Tensor, "B D"], Any]:
    """Return the last hidden state of each prompt, padded on the left, and the cache of all."""
    out = model.base_model(
        input_ids=ids, attention_mask=visible, position_ids=positions(visible), use_cache=True
    )
    return out.last_hidden_state[:, -1], out.past_key_values


def decoder(
    model: Any, cache: Any, visible: Int[Tensor, "B P"], samples: int, limit: int
) -> "Copied | Shared":
    """Return what decodes `samples` responses of up to `limit` tokens to each prompt.

    Responses share the prompt in the cache where they are shorter than it. Each is then compared
    with the tokens of all others of its prompt, in vain; for longer ones, copies cost less.
    """
    attention = model.config.get_text_config()._attn_implementation
    whole = not any(cache.is_sliding) and attention in ("eager", "sdpa")
    if samples > 1 and limit <= visible.shape[1] and whole:
        return Shared(model, cache, visible, samples)
    return Copied(model, cache, visible, samples)


class Copied:
    """Responses with a copy of their prompt's keys and values each."""

    def __init__(self, model: Any, cache: Any, visible: Int[Tensor, "B P"], samples: int):
        self.model, self.cache = model, cache
        self.cache.batch_repeat_interleave(samples)
        self.visible = visible.repeat_interleave(samples, 0)

    def keep(self, kept: Int[Tensor, " M"]) -> None:
        """Drop all responses but these, by their place among those that are left."""
        self.visible = self.visible[kept]
        self.cache.batch_select_indices(kept)

    def run(self, tokens: Int[Tensor, " N"]) -> Float[Tensor, "N D"]:
        """Return the last hidden state of each response after its newest token."""
        self.visible = torch.cat([self.visible, torch.ones_like(self.visible[:, :1])], 1)
        out = self.model.base_model(
            input_ids=tokens[:, None], attention_mask=self.visible,
            position_ids=positions(self.visible)[:, -1:], past_key_values=self.cache,
            use_cache=True,
        )  # fmt: skip
        return out.last_hidden_state[:, -1]


class Shared:
    """Responses in one row with their prompt: each sees the prompt and its own tokens only.

    A row has a slot for each of its responses that has not ended; where it has fewer than other
    rows, slots are idle. Each step adds a column for every slot to the cache.
    """

    def __init__(self, model: Any, cache: Any, visible: Int[Tensor, "B P"], samples: int):
        self.model, self.cache = model, cache
        self.sees: Int[Tensor, "B C"] = torch.where(visible.bool(), EVERYONE, NOBODY)
        self.length = visible.sum(1, keepdim=True)
        everyone = torch.arange(len(visible) * samples, device=visible.device)
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
        out = self.model.base_model(
            input_ids=ids, attention_mask=self._mask(), position_ids=self.length.expand_as(ids),
            past_key_values=self.cache, use_cache=True,
        )  # fmt: skip
        self.length = self.length + 1
        return out.last_hidden_state[self.place]

    def _mask(self) -> Tensor:
        """Return which columns each slot sees, as the model's attention wants it."""
        sees = self.sees[:, None, None]
        mask: Bool[Tensor, "B 1 S C"] = (sees == EVERYONE) | (sees == self.slots[:, None, :, None])
        if self.model.config.get_text_config()._attn_implementation == "sdpa":
            return mask
        dtype = self.model.dtype
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)

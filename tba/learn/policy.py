"""A Hugging Face causal LM as a policy: the one place where logits become log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tba.objectives import Head
from tba.types import TokenBatch

LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**27}
"""Logits (numbers, not bytes) that exist at one time: the head runs over the response in chunks of so many. On a CPU few,
or the system spends as long on handing out and clearing that memory as on computing."""


@dataclass(frozen=True)
class Output:
    """What a policy says of a batch. `head` is that of the objective's own head, if it has one: [B K T] or [B]."""

    logp: Float[Tensor, "B K T"]
    entropy: Float[Tensor, "B K T"]
    """Detached, as logp 0 where there is padding."""
    head: Tensor | None


class Policy:
    """log pi(token | prompt, tokens before) of the distribution at one sampling temperature; and what a head makes of its hidden states."""

    def __init__(
        self,
        model: Any,
        temperature: float,
        autocast: bool = False,
        share_prompt: bool = True,
        head: Head | None = None,
    ):
        self.model = model
        self.head = head
        self.temperature = temperature
        self.autocast = autocast
        self.share_prompt = share_prompt
        self.device = next(model.parameters()).device
        self.readout = (
            None
            if head is None
            else _readout(model.get_output_embeddings().weight.shape[1], self.device)
        )
        self._refuse_processed_logits()

    def logp(self, batch: TokenBatch) -> Float[Tensor, "B K T"]:
        """Log-probabilities of the response tokens; 0 where there is padding."""
        return self(batch).logp

    def __call__(self, batch: TokenBatch) -> Output:
        """Log-probability and entropy at each response token, and the head's output."""
        where = (
            batch.mask.flatten().nonzero().squeeze(1).to(self.device)
        )  # from the CPU's mask: no wait for the GPU
        on_device = batch.to(self.device)
        with self._autocast():
            prompt, states = (
                self._shared(on_device) if self.share_prompt else self._plain(on_device)
            )
            found = self._chunked(states.flatten(0, 2)[where], on_device.tokens.flatten()[where])
        zeros = torch.zeros(batch.mask.numel(), device=self.device)
        logp, entropy = (
            zeros.index_put((where,), values).view(batch.mask.shape) for values in found
        )
        return Output(logp, entropy, self._read(prompt, states, on_device))

    def _read(
        self, prompt: Float[Tensor, "B P D"], states: Float[Tensor, "B K T D"], batch: TokenBatch
    ) -> Tensor | None:
        """The head's output; its input is divided by sqrt(D), so that a learning rate means much the same at any width."""
        if self.head is None or self.readout is None:
            return None
        scale = states.shape[-1] ** 0.5
        if self.head.on == "response":
            return self.readout(states.float() / scale).squeeze(-1) * batch.mask
        mask = batch.prompt_mask[..., None]
        mean = (prompt.detach().float() * mask).sum(1) / mask.sum(1)
        return self.readout(mean / scale).squeeze(-1)

    def _shared(self, batch: TokenBatch) -> tuple[Float[Tensor, "B P D"], Float[Tensor, "B K T D"]]:
        """Hidden states of the prompt, and those that predict the response; each prompt runs once and its keys and values serve all K responses."""
        b, k, t = batch.tokens.shape
        lengths = batch.prompt_mask.sum(1)
        seen = self.model.base_model(
            input_ids=batch.prompt_tokens,
            attention_mask=batch.prompt_mask.long(),
            position_ids=_positions(batch.prompt_mask),
            use_cache=True,
        )
        first = seen.last_hidden_state[:, None, -1:].expand(b, k, 1, -1)
        if t == 1:
            return seen.last_hidden_state, first
        cache = seen.past_key_values
        cache.batch_repeat_interleave(k)
        visible = torch.cat(
            [batch.prompt_mask.repeat_interleave(k, 0), batch.mask[:, :, :-1].flatten(0, 1)], 1
        )
        rest = self.model.base_model(
            input_ids=batch.tokens[:, :, :-1].flatten(0, 1),
            attention_mask=visible.long(),
            position_ids=lengths.repeat_interleave(k)[:, None]
            + torch.arange(t - 1, device=self.device),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return seen.last_hidden_state, torch.cat([first, rest.unflatten(0, (b, k))], 2)

    def _plain(self, batch: TokenBatch) -> tuple[Float[Tensor, "B P D"], Float[Tensor, "B K T D"]]:
        """The same with every prompt run K times: for gradient checkpointing, and models without such a cache."""
        b, k, t = batch.tokens.shape
        repeated = (
            batch.prompt_tokens.repeat_interleave(k, 0),
            batch.prompt_mask.repeat_interleave(k, 0),
        )
        visible = torch.cat([repeated[1], batch.mask.flatten(0, 1)], 1)
        out = self.model.base_model(
            input_ids=torch.cat([repeated[0], batch.tokens.flatten(0, 1)], 1),
            attention_mask=visible.long(),
            position_ids=_positions(visible),
            use_cache=False,
        )
        hidden = out.last_hidden_state.unflatten(0, (b, k))
        return hidden[:, 0, :-t], hidden[:, :, -t - 1 : -1]

    def _chunked(
        self, hidden: Float[Tensor, "M D"], tokens: Int[Tensor, " M"]
    ) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
        """Through the head a chunk at a time; with several, the backward pass makes each chunk's logits again."""
        size = max(
            1,
            LOGITS_AT_ONCE[self.device.type] // self.model.get_output_embeddings().weight.shape[0],
        )
        if len(hidden) <= size:
            return self._head(hidden, tokens)
        parts = [
            checkpoint(self._head, h, y, use_reentrant=False)
            for h, y in zip(hidden.split(size), tokens.split(size), strict=True)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _head(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        every = torch.log_softmax(
            self.model.get_output_embeddings()(hidden).float() / self.temperature, -1
        )
        entropy = torch.special.entr(every.detach().exp()).sum(-1)
        return every.gather(1, tokens[:, None]).squeeze(1), entropy

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            yield

    @torch.no_grad()
    def _refuse_processed_logits(self) -> None:
        """Some models cap or scale their logits after the head; ours would silently differ from what they sample."""
        ids = torch.arange(1, 5, device=self.device)[
            None
        ]  # not 0, which may be a pad token with an embedding of zeros
        ours = self.model.get_output_embeddings()(
            self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        )
        if not torch.allclose(
            ours.float(),
            self.model(input_ids=ids, use_cache=False).logits.float(),
            atol=1e-4,
            rtol=1e-3,
        ):
            raise ValueError(
                f"{type(self.model).__name__} changes its logits after the head (soft-capping or scaling), which is not supported; use another model"
            )


def _readout(width: int, device: torch.device) -> torch.nn.Linear:
    """One number of a hidden state, 0 at first; the process's random state is left alone."""
    made = torch.nn.utils.skip_init(torch.nn.Linear, width, 1, device=device)
    for parameter in made.parameters():
        torch.nn.init.zeros_(parameter)
    return made


def _positions(mask: Tensor) -> Tensor:
    """Position of each token counted from the first real one; padding gets 0."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)

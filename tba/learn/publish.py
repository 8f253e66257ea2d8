"""Publication of a trainer's weights, with a probe that shows whether an engine has loaded them."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from tba.errors import NotFinite
from tba.learn.policy import Policy
from tba.models.lora import rounded
from tba.types import Batch, TokenBatch, collate_tokens
from tba.weights import Probe, Publication, Transport, published, trained

PROMPT = 16  # tokens of a probe's prompt; it is longer for engines that cache prompts
RESPONSE = 16


def prompt_length(block: int) -> int:
    """Return the tokens of a probe's prompt: more than a cache block (0 without a cache)."""
    return max(PROMPT, block + 1)


def probe_tokens(sequences: Sequence[np.ndarray], context: int, length: int = PROMPT) -> TokenBatch:
    """Return the tokens of a probe: the last of these sequences, repeated if there are too few.

    The prompt has `length` tokens, or fewer if the context is too short.
    """
    backwards = np.concatenate(sequences)[::-1]
    tokens = np.resize(backwards, min(length + RESPONSE, context))[::-1]
    end = max(1, len(tokens) - RESPONSE)
    return collate_tokens([tokens[:end]], [[tokens[end:]]])


def sequences_of(batch: Batch) -> list[np.ndarray]:
    """Return each group's prompt with its longest response, sorted by length of response."""
    lengths = batch.present.sum(-1)
    longest = lengths.argmax(1)
    sequences = []
    for b in lengths.amax(1).argsort(stable=True).tolist():
        k = longest[b]
        prompt = batch.prompt_tokens[b][batch.prompt_mask[b]]
        response = batch.tokens[b, k][batch.present[b, k]]
        sequences.append(torch.cat([prompt, response]).numpy())
    return sequences


@torch.no_grad()
def answer(policy: Policy, tokens: TokenBatch, version: int) -> Probe:
    """Return a probe of these tokens and the policy's log-probs; NotFinite if one is not finite."""
    logp = policy.logp(tokens)[0, 0].float().cpu().numpy()
    if not np.isfinite(logp).all():
        raise NotFinite(version=version)
    return Probe(
        prompt_tokens=tokens.prompt_tokens[0].int().numpy(),
        tokens=tokens.tokens[0, 0].int().numpy(),
        logp=logp,
        temperature=policy.temperature,
    )


class Copy:
    """Copy of the trainer's policy, which shares its frozen weights.

    Only `fill` reads the trainer's other weights; the rest may run in another thread. If the policy
    computes in bf16 and is sent in bf16, the copy's linear layers are in bf16, too.
    """

    def __init__(self, policy: Policy, bf16: bool):
        own: dict[int, Any] = {id(p): p for p in policy.parameters() if not p.requires_grad}
        if bf16 and policy.autocast:
            own |= rounded(policy.model)
        self._policy = deepcopy(policy, own)
        self._bf16 = bf16
        on_gpu = policy.device.type == "cuda"
        self._stream = torch.cuda.Stream(policy.device) if on_gpu else None

    @torch.no_grad()
    def fill(self, policy: Policy) -> None:
        """Copy the weights of the trainer's policy."""
        for own, newest in zip(self._policy.parameters(), policy.parameters(), strict=True):
            if newest.requires_grad:
                own.copy_(newest)
        if self._stream is not None:  # `send` uses another stream
            torch.cuda.current_stream(policy.device).synchronize()

    def send(
        self, version: int, asked: TokenBatch, transport: Transport, free: "list[Copy]"
    ) -> Publication:
        """Send the weights with their probe, and add this copy to `free`."""
        with torch.cuda.stream(self._stream):  # no effect if it is None
            probe = answer(self._policy, asked, version)
            tensors = published(trained(self._policy.model), self._bf16)
            sent = transport.send(version, tensors, probe)
        free.append(self)  # to reuse its memory
        return sent

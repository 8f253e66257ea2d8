"""The probe of a weight update: tokens for which an engine must compute the trainer's log-probs."""

from collections.abc import Sequence

import numpy as np
import torch

from tba.learn.policy import Policy
from tba.types import Batch, TokenBatch, collate_tokens
from tba.weights import Probe

PROMPT = 16  # tokens of a probe's prompt; it is longer for engines that cache prompts
RESPONSE = 16


def prompt_length(block: int) -> int:
    """Return the tokens of a probe's prompt: more than a block, which is 0 without a cache."""
    return max(PROMPT, block + 1)


def probe_tokens(sequences: Sequence[np.ndarray], context: int, length: int = PROMPT) -> TokenBatch:
    """Return the tokens of a probe: the last ones of these sequences, which repeat if they are few.

    The prompt has `length` tokens, or fewer if the context is short.
    """
    backwards = np.concatenate(sequences)[::-1]
    tokens = np.resize(backwards, min(length + RESPONSE, context))[::-1]
    end = max(1, len(tokens) - RESPONSE)
    return collate_tokens([tokens[:end]], [[tokens[end:]]])


def sequences_of(batch: Batch) -> list[np.ndarray]:
    """Return the longest response of each group behind its prompt, the longest of all last."""
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
def answer(policy: Policy, tokens: TokenBatch) -> Probe:
    """Return the probe of these tokens, with the policy's log-probs."""
    logp = policy.logp(tokens)[0, 0].float().cpu().numpy()
    return Probe(
        prompt_tokens=tokens.prompt_tokens[0].int().numpy(),
        tokens=tokens.tokens[0, 0].int().numpy(),
        logp=logp,
        temperature=policy.temperature,
    )

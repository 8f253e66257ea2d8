"""The probe of a weight update: tokens for which an engine must compute the trainer's log-probs."""

from collections.abc import Sequence

import numpy as np
import torch

from tba.learn.policy import Policy
from tba.types import Batch, TokenBatch, collate_tokens
from tba.weights import Probe

PROMPT, RESPONSE = 16, 16  # tokens of a probe; prompts are longer for engines that cache them


def prompt_length(block: int) -> int:
    """Return the tokens of a probe's prompt: more than a block, which is 0 without a cache."""
    return max(PROMPT, block + 1)


def probe_tokens(batch: Batch, context: int, length: int = PROMPT) -> TokenBatch:
    """Return the tokens of a probe: a prompt of this length and a response, cut to the context.

    The response is the beginning of the longest one of the batch. Where even that is short, other
    responses follow: the mean over a few tokens would say little about an engine. Its prompt
    follows other prompts and responses of the batch, repeated in order until there are enough.
    """
    lengths = batch.present.sum(-1)
    group, longest = divmod(int(lengths.argmax()), lengths.shape[1])
    own_prompt, own_response = _row(batch, group, longest)
    others: list[np.ndarray] = []
    for other in [g for g in range(len(batch)) if g != group] or [group]:
        others += _row(batch, other, -1)
    kept = min(RESPONSE, max(len(own_response), context - PROMPT))
    response = np.concatenate([own_response, np.resize(np.concatenate(others[1::2]), kept)])[:kept]
    room = min(length, context - len(response))
    missing = max(0, room - len(own_prompt))
    repeated = np.resize(np.concatenate(others), missing)
    prompt = np.concatenate([repeated, own_prompt])[-room:]
    return collate_tokens([prompt], [[response]])


def first_probe(prompts: Sequence[np.ndarray], context: int, length: int = PROMPT) -> TokenBatch:
    """Return the tokens of a probe before there is a batch: prompts, repeated in order."""
    tokens = np.resize(np.concatenate(prompts), min(length + RESPONSE, context))
    end = max(1, len(tokens) - RESPONSE)
    return collate_tokens([tokens[:end]], [[tokens[end:]]])


@torch.no_grad()
def answer(policy: Policy, tokens: TokenBatch) -> Probe:
    """Return the probe of these tokens, with the policy's log-probs."""
    logp = policy.logp(tokens)[0, 0].float().cpu().numpy()
    prompt, response = tokens.prompt_tokens[0].int().numpy(), tokens.tokens[0, 0].int().numpy()
    return Probe(prompt, response, logp, policy.temperature)


def _row(batch: Batch, group: int, sample: int) -> tuple[np.ndarray, np.ndarray]:
    prompt = batch.prompt_tokens[group][batch.prompt_mask[group]]
    response = batch.tokens[group, sample][batch.present[group, sample]]
    return prompt.numpy(), response.numpy()

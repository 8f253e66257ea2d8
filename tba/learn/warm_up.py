"""Compilation of a policy's layers before the first step."""

from typing import Any

import numpy as np
import torch

from tba.config.tables import LOGP_NOISE_BF16, LOGP_NOISE_FP32
from tba.learn.plan import Layout
from tba.learn.policy import Policy
from tba.models.cache import takes_masks
from tba.types import TokenBatch, collate_tokens

PROMPT, SHORTER, RESPONSES, TOKENS = 11, 7, 11, {"cpu": 8, "cuda": 128}
"""Tokens of prompts, responses to each, and their tokens."""


def warm_up(policy: Policy, context: int) -> None:
    """Compile all programs of the layers; ValueError if they cannot be compiled.

    A program adds up numbers in an order that depends on the sizes it was compiled for, and a
    resumed run would meet others first. Therefore the sizes are always the same, and no program is
    added later: what none of them covers, such as a pass over a single prompt, runs without.
    """
    layouts: tuple[Layout, ...] = ("packed", "cached") if takes_masks(policy.model) else ("cached",)
    torch.compiler.set_stance("default")
    shapes: Any = torch.fx.experimental._config
    equal_by_chance = shapes.patch(use_duck_shape=False)  # sizes that are stay apart
    try:
        with torch._dynamo.config.patch(recompile_limit=64), equal_by_chance:
            for shorter in (PROMPT, SHORTER):  # without padding, some attention takes no mask
                for layout in layouts if policy.share_prompt else ("plain",):
                    _compare(policy, _batch(policy, context, shorter), layout)
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"trainer.compile = true: {type(policy.model).__name__} cannot be compiled ({reason});"
            " set trainer.compile=false"
        ) from error
    torch.compiler.set_stance("eager_on_recompile")
    policy.zero_grad(set_to_none=True)


def _compare(policy: Policy, batch: TokenBatch, layout: Layout) -> None:
    """Run forward and back; RuntimeError if log-probs differ from those without compilation."""
    compiled = policy(batch, layout).logp
    compiled.sum().backward()
    with torch.no_grad():  # layers are compiled for passes with gradients only
        gap = float((policy(batch, layout).logp - compiled).abs().sum() / batch.mask.sum())
    if not gap <= (LOGP_NOISE_BF16 if policy.autocast else LOGP_NOISE_FP32):
        raise RuntimeError(f"log-probs differ by {gap:.3g} nats on average")


def _batch(policy: Policy, context: int, shorter: int) -> TokenBatch:
    """Return random responses to two prompts, always the same."""
    vocabulary = policy.model.config.get_text_config().vocab_size
    tokens = min(TOKENS[policy.device.type], context - PROMPT)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(vocabulary, size=n, dtype=np.int32) for n in (PROMPT, shorter)]
    responses = rng.integers(vocabulary, size=(2, RESPONSES, tokens), dtype=np.int32)
    return collate_tokens(prompts, [list(group) for group in responses])

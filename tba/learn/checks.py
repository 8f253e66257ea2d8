"""Checks of a policy before its first step; warm-up of compiled layers."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from tba.config.tables import LOGP_NOISE_BF16, LOGP_NOISE_FP32
from tba.learn.layouts import Layout
from tba.learn.policy import Policy, token_logp
from tba.models.forward import check_logits, takes_masks
from tba.types import collate_tokens

SHORT = 16
"""Tokens of a short prompt or response."""

PROMPT = 11
SHORTER = 7
SAMPLES = 11
RESPONSE = {"cpu": 8, "cuda": 128}
"""Warm-up: tokens of the two prompts, responses to each, and tokens of a response by device."""


@torch.no_grad()
def check_lengths(
    policy: Policy, prompts: Sequence[np.ndarray], max_tokens: int, samples: bool
) -> None:
    """Raise ValueError if log-probs in a batch differ from those of single, unpadded sequences.

    `prompts` are the shortest and the longest of a run. They reveal positions that depend on the
    length of a sequence or of others in its batch. An engine that `samples` with the same model
    shares prompts even if the policy does not, so its layout is checked, too.
    """
    limit = LOGP_NOISE_BF16 if policy.autocast else LOGP_NOISE_FP32
    ends = [prompt[-SHORT:] for prompt in prompts]  # short rows may be packed
    layouts: dict[Layout | None, str] = {None: "use another model, or lower sampling.max_tokens"}
    if policy.share_prompt:
        layouts[None] = f"set policy.share_prompt=false, {layouts[None]}"
    elif samples:
        layouts["cached"] = "engine=transformers would sample wrongly; use another model or engine"
    for layout, advice in layouts.items():
        for own, tokens in ((ends, min(SHORT, max_tokens)), (prompts, max_tokens)):
            gap = _gap(policy, own, tokens, layout)
            if not gap <= limit:
                raise ValueError(
                    f"policy.model: log-probs in a batch differ by {gap:.3g} nats a token from"
                    f" those of each sequence alone, with prompts of {len(own[0])} and"
                    f" {len(own[1])} tokens and up to {tokens} of response: they depend on the"
                    f" whole batch; {advice}"
                )
    with policy.precision():  # on ranks, weights were not loaded before
        check_logits(policy.model)


def _gap(
    policy: Policy, prompts: Sequence[np.ndarray], tokens: int, layout: Layout | None
) -> float:
    """Return the mean difference of log-probs in a batch from those alone, for the worse sequence.

    Alone, they are computed as transformers does for one sequence.
    """
    longer = np.resize(np.concatenate(prompts), tokens)
    responses = [longer, longer[: min(SHORT, (tokens + 1) // 2)]]
    logp = policy(collate_tokens(prompts, [responses, responses[::-1]]), layout).logp[:, 1]
    gaps = []
    for prompt, response, row in zip(prompts, responses[::-1], logp, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response])).long().to(policy.device)
        with policy.precision():
            output = policy.model.base_model(input_ids=ids[None], use_cache=False)
            states = output.last_hidden_state[0, len(prompt) - 1 : -1]
            alone, _ = token_logp(policy.model, states, ids[len(prompt) :], policy.temperature)
        gaps.append(float((row[: len(alone)] - alone).abs().mean()))
    return float(np.max(gaps))  # NaN if either is


def warm_up(policy: Policy, context: int) -> None:
    """Compile a policy's layers; ValueError if they cannot be compiled.

    The order of sums in a compiled graph depends on the sizes it was compiled for, and a resumed
    run would see other sizes first. Therefore layers are compiled for fixed sizes, and never again:
    inputs that no graph covers, such as a single prompt, run without compilation.
    """
    layouts: tuple[Layout, ...] = ("plain",)
    if policy.share_prompt:
        layouts = ("packed", "cached") if takes_masks(policy.model) else ("cached",)
    limit = LOGP_NOISE_BF16 if policy.autocast else LOGP_NOISE_FP32
    vocabulary = policy.model.config.get_text_config().vocab_size
    size = SAMPLES, min(RESPONSE[policy.device.type], context - PROMPT)
    torch.compiler.set_stance("default")
    shapes: Any = torch.fx.experimental._config
    equal_by_chance = shapes.patch(use_duck_shape=False)  # equal sizes are not assumed equal
    try:
        with torch._dynamo.config.patch(recompile_limit=64), equal_by_chance:
            # prompts of equal length need no padding, and some attention then takes no mask
            for shorter, layout in product((PROMPT, SHORTER), layouts):
                rng = np.random.default_rng(0)
                prompts = [
                    rng.integers(vocabulary, size=n, dtype=np.int32) for n in (PROMPT, shorter)
                ]
                responses = rng.integers(vocabulary, size=(2, *size), dtype=np.int32)
                batch = collate_tokens(prompts, [list(group) for group in responses])
                compiled = policy(batch, layout).logp
                compiled.sum().backward()
                with torch.no_grad():  # layers are compiled for passes with gradients only
                    gap = (policy(batch, layout).logp - compiled).abs().sum() / batch.mask.sum()
                if not gap <= limit:
                    raise RuntimeError(f"log-probs differ by {float(gap):.3g} nats on average")
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"trainer.compile = true: {type(policy.model).__name__} cannot be compiled ({reason});"
            " set trainer.compile=false"
        ) from error
    torch.compiler.set_stance("eager_on_recompile")
    policy.zero_grad(set_to_none=True)

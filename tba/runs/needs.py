"""What a run needs: steps and epochs, memory, and the seconds of a step."""

import time

import numpy as np
from torch import nn

from tba.config.errors import size
from tba.learn.trainer import SingleTrainer
from tba.runs.checkpoint import checkpoint_size
from tba.runs.parts import RunSetup
from tba.types import collate_tokens
from tba.weights import trained


def kept(
    layers: int, hidden: int, inner: int, heads: int, tokens: float, keys: float, scores: float,
    matrices: int = 0, bf16: bool = True,
) -> float:  # fmt: skip
    """Return the bytes that a pass keeps; `inner` is the width of the MLP."""
    if bf16:  # autocast, with a copy of the matrices
        token, key, score = 30 * hidden + 8 * inner, 4 * hidden, 6 * heads
        copies = 2 * matrices
    else:
        token, key, score = 32 * hidden + 16 * inner, 8 * hidden, 4 * heads
        copies = 0
    return layers * (tokens * token + keys * key + scores * score) + copies


def group(prompt: int, responses: int, length: int) -> tuple[int, int, int]:
    """Return tokens, keys and scores of a prompt with responses of equal length."""
    own = length - 1  # the last token of a response predicts nothing
    tokens = prompt + responses * own
    if tokens <= 256:  # packed into one row
        return tokens, tokens, tokens**2
    seen = prompt + own
    return tokens, prompt + responses * seen, prompt**2 + responses * own * seen


def needs(parts: RunSetup, trainer: SingleTrainer, prompt: int) -> list[str]:
    """Return in words how long and how large a run is, whose prompts have so many tokens."""
    c, t, length = parts.config, parts.config.trainer, parts.config.sampling.max_tokens
    epochs = c.run.steps * t.groups / len(parts.prompts)
    tokens, _, _ = group(prompt, t.group_size, length)
    responses = max(1, min(t.group_size, t.token_budget * t.group_size // tokens))
    seconds = _pass(trainer, prompt, responses, length) * t.batch_size / responses
    own = sum(p.nbytes for p in trained(trainer.policy.model).values())
    frozen = sum(p.nbytes for p in trainer.policy.model.parameters()) - own
    fixed = (4 + (c.runtime.use == "ray")) * own + frozen
    return [
        f"length: {c.run.steps:,} steps of {t.groups} prompts x {t.group_size} samples;"
        f" {epochs:.3g} epochs of {len(parts.prompts):,} prompts, if each group is used once",
        f"memory of the trainer: {size(fixed)} for weights, gradients, moments and copies, up to"
        f" {_activations(parts, trainer, prompt)} for activations (docs/memory.md); a checkpoint"
        f" has {size(checkpoint_size(parts.config, trainer))}",
        f"time: about {seconds:.2g} s a step on {trainer.policy.device}, without search, if all"
        f" responses have {length} tokens",
    ]


def _pass(trainer: SingleTrainer, prompt: int, responses: int, length: int) -> float:
    """Return the seconds of a forward and backward pass over random responses to a prompt."""
    rng, seconds = np.random.default_rng(0), 0.0
    vocabulary = trainer.policy.model.config.get_text_config().vocab_size
    for tokens in (2, length):  # the first pass of a process is slow
        rows = rng.integers(vocabulary, size=(responses, max(2, tokens)), dtype=np.int32)
        batch = collate_tokens([rng.integers(vocabulary, size=prompt)], [list(rows)])
        began = time.perf_counter()
        trainer.policy.logp(batch).sum().backward()
        seconds = time.perf_counter() - began
    return seconds


def _activations(parts: RunSetup, trainer: SingleTrainer, prompt: int) -> str:
    """Return in words what the largest pass keeps for its backward pass."""
    c, model = parts.config, trainer.policy.model
    t, length, shape = c.trainer, c.sampling.max_tokens, model.config.get_text_config()
    tokens, keys, scores = group(prompt, t.group_size, length)
    groups = min(t.groups, t.token_budget / tokens)  # below 1: a group runs in pieces
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    eager = model.config._attn_implementation == "eager"
    try:
        layers, hidden, inner = shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size
        heads = shape.num_attention_heads
    except AttributeError:  # not of the Llama family
        return "an unknown amount"
    sizes = hidden, inner, heads, groups * tokens, groups * keys, groups * scores * eager
    if not c.policy.gradient_checkpointing:
        return size(kept(layers, *sizes, matrices, trainer.policy.autocast))
    one = kept(1, *sizes, matrices, trainer.policy.autocast)
    return size(one + 4 * hidden * layers * groups * tokens)

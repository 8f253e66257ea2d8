"""Sizes of a model, and what a pass keeps of it, from its config.json alone."""

from dataclasses import dataclass

from tba.config.tables import PolicyTable
from tba.models.forward import layers_of, takes_masks
from tba.models.lora import empty_adapted, frozen_bytes
from tba.models.pretrained import load_config, load_empty_model
from tba.weights import trained


@dataclass(frozen=True)
class ModelSizes:
    """Parameter counts of a model, and the dimensions that determine its activation memory."""

    parameters: int
    base: int
    """Parameters without adapters."""
    trained: int
    largest: int
    """Number of elements of the largest trained tensor."""
    pinned: int
    """`trained` with each tensor rounded up to a power of two, as PyTorch rounds pinned memory."""
    frozen: float
    """Bytes of the frozen weights in the trainer and in the reference."""
    layer: int
    """Parameters of the largest layer."""
    root: int
    """Parameters outside the layers: embeddings, norm and LM head."""
    layers: int
    hidden: int
    inner: int
    """Width of the MLP."""
    heads: int
    keys: int
    """Width of a token's keys in one layer."""
    vocabulary: int
    has_sdpa: bool
    masks: int
    """Number of attention masks that a pass keeps with SDPA: 1, or one in each layer."""


def sizes_of(policy: PolicyTable, bf16: bool) -> ModelSizes:
    """Return the sizes of a model whose trainer computes in bf16 or fp32."""
    base = load_empty_model(policy)
    model = base if policy.lora is None else empty_adapted(policy, bf16)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in layers_of(model)]
    every = sum(p.numel() for p in model.parameters())
    own = [p.numel() for p in trained(model).values()]
    text = load_config(policy).get_text_config()
    plain = text.to_dict()
    hidden = text.hidden_size
    heads = text.num_attention_heads
    return ModelSizes(
        parameters=every,
        base=sum(p.numel() for p in base.parameters()),
        trained=sum(own),
        largest=max(own),
        pinned=sum(1 << (n - 1).bit_length() for n in own),
        frozen=frozen_bytes(policy, model),
        layer=max(layers),
        root=every - sum(layers),
        layers=text.num_hidden_layers,
        hidden=hidden,
        inner=plain.get("intermediate_size") or plain.get("n_inner") or 4 * hidden,
        heads=heads,
        keys=(plain.get("head_dim") or hidden // heads)
        * (plain.get("num_key_value_heads") or heads),
        vocabulary=text.vocab_size,
        has_sdpa=model._supports_sdpa,
        masks=1 if takes_masks(model) else text.num_hidden_layers,
    )


def kept(
    layers: int, hidden: int, inner: int, heads: int, tokens: float, keys: float, scores: float,
    matrices: int = 0, bf16: bool = True,
) -> float:  # fmt: skip
    """Return the bytes that a pass keeps; `inner` is the width of the MLP."""
    if bf16:  # autocast, with a copy of the matrices
        layer = tokens * (30 * hidden + 8 * inner) + keys * 4 * hidden + scores * 6 * heads
        return layers * layer + 2 * matrices
    layer = tokens * (32 * hidden + 16 * inner) + keys * 8 * hidden + scores * 4 * heads
    return layers * layer


def group(prompt: int, responses: int, length: int, packed: int = 256) -> tuple[int, int, int]:
    """Return the numbers of tokens, keys and scores for a prompt with responses of equal length."""
    own = length - 1  # the last token of a response predicts nothing
    tokens = prompt + responses * own
    if tokens <= packed:  # into one row
        return tokens, tokens, tokens**2
    seen = prompt + own
    return tokens, prompt + responses * seen, prompt**2 + responses * own * seen

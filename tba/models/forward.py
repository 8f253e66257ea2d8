"""Sizes and positions in a forward pass."""

from typing import Any

from torch import Tensor

LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**27}
"""Logits in a chunk of the LM head, by device: few on a CPU, where clearing memory is slow."""


def states_at_once(model: Any) -> int:
    """Return the number of hidden states over which the LM head may run at one time."""
    vocabulary = model.config.get_text_config().vocab_size
    return max(1, LOGITS_AT_ONCE[model.device.type] // vocabulary)


def positions(mask: Tensor) -> Tensor:
    """Return the position of each token, counted from the first real one; padding gets 0."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)

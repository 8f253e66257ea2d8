"""Decoding over the keys and values of prompts: shared by their responses, or copied for each."""

from __future__ import annotations

import pytest
import torch
from test_policy import FAMILIES, make

from tba.engines._prompt_cache import Copied, Shared, decoder, run_prompts

VISIBLE = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
SAMPLES = 3
KEPT = [[0, 1, 2, 4, 6, 8], [0, 1, 3, 5], [1, 3]]
"""After the second step, the third prompt has one response left; then none."""


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_shared_prompts_give_the_states_of_copied_ones(family: str, attention: str) -> None:
    """Prompts are padded, and responses end at different steps, so that some slots are idle."""
    model = make(family)
    model.set_attn_implementation(attention)
    ids = torch.arange(15).view(3, 5) % 13 + 1
    decoders = []
    for kind in (Shared, Copied):
        _, cache = run_prompts(model, ids, VISIBLE)
        decoders.append(kind(model, cache, VISIBLE, SAMPLES))
    rows = len(VISIBLE) * SAMPLES
    for step, kept in enumerate([list(range(rows)), *KEPT]):
        if step:
            for one in decoders:
                one.keep(torch.tensor(kept))
        shared, copied = (d.run((torch.arange(len(kept)) * 5 + step) % 14) for d in decoders)
        torch.testing.assert_close(shared, copied, atol=1e-5, rtol=0)


def test_prompts_are_shared_where_that_costs_less() -> None:
    model = make("llama")
    _, cache = run_prompts(model, torch.ones(3, 5, dtype=torch.long), VISIBLE)
    assert isinstance(decoder(model, cache, VISIBLE, SAMPLES, 5), Shared)
    assert isinstance(decoder(model, cache, VISIBLE, SAMPLES, 6), Copied)
    assert isinstance(decoder(model, cache, VISIBLE, 1, 5), Copied)

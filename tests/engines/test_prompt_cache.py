"""Decoding over the keys and values of prompts: shared by their responses, or copied for each."""

import pytest
import torch
from build import FAMILIES, make
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from tba.engines.transformers import CopiedCache, SharedCache, decoder, run_prompts
from tba.models.forward import takes_masks

VISIBLE = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
KEPT = [[0, 1, 2, 4, 6, 8], [0, 1, 3, 5], [1, 3]]
"""After the second step, the third prompt has one response left; then none."""


@pytest.mark.parametrize("counts, kept", [((3, 3, 3), KEPT), ((2, 3, 1), [[0, 2, 3, 5]])])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_shared_prompts_give_the_states_of_copied_ones(family, attention, counts, kept):
    """Prompts are padded, and responses end at different steps, so that some slots are idle."""
    model = make(family)
    model.set_attn_implementation(attention)
    ids = torch.arange(15).view(3, 5) % 13 + 1
    decoders = []
    for kind in (SharedCache, CopiedCache):
        _, cache = run_prompts(model, ids, VISIBLE)
        decoders.append(kind(model, cache, VISIBLE, torch.tensor(counts)))
    for step, rows in enumerate([list(range(sum(counts))), *kept]):
        if step:
            for one in decoders:
                one.keep(torch.tensor(rows))
        shared, copied = (d.run((torch.arange(len(rows)) * 5 + step) % 14) for d in decoders)
        torch.testing.assert_close(shared, copied, atol=1e-5, rtol=0)


def test_prompts_are_shared_where_that_costs_less():
    model = make("llama")

    def kind(*counts: int, limit: int) -> type[SharedCache | CopiedCache]:
        _, cache = run_prompts(model, torch.ones(3, 5, dtype=torch.long), VISIBLE)
        return type(decoder(model, cache, VISIBLE, torch.tensor(counts), limit))

    assert kind(16, 16, 16, limit=5) is SharedCache
    assert kind(16, 16, 16, limit=6) is CopiedCache
    assert kind(64, 64, 64, limit=5) is CopiedCache
    assert kind(1, 1, 1, limit=5) is CopiedCache
    assert kind(16, 4, 4, limit=5) is SharedCache
    assert kind(16, 4, 3, limit=5) is CopiedCache


def test_masks_decide_unless_layers_have_windows_or_rules_of_their_own():
    for family in FAMILIES:
        assert takes_masks(make(family))
    sizes = {"vocab_size": 14, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    assert takes_masks(MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=None)))
    mistral = MistralConfig(**sizes, **heads, sliding_window=8)
    gemma = Gemma2Config(**sizes, **heads, head_dim=8)
    neo = {"vocab_size": 14, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    neo |= {"attention_types": [[["global", "local"], 1]]}
    refused = [MistralForCausalLM(mistral), Gemma2ForCausalLM(gemma)]
    for model in (*refused, GPTNeoForCausalLM(GPTNeoConfig(**neo))):
        assert not takes_masks(model)

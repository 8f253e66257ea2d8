"""Log-probabilities of a policy, however they are computed, and its one forward."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from build import FAMILIES, WIDE, make
from transformers import AutoConfig, AutoModelForCausalLM

import tba.learn.policy
import tba.models.forward
from tba.learn import layouts
from tba.learn.policy import Policy, TokenLogp
from tba.models.forward import enable_gradient_checkpointing
from tba.objectives import Head
from tba.types import Batch, collate_tokens


@pytest.fixture(autouse=True, params=["packed", "cached"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How prompts are shared: short rows are packed, longer ones have a cache."""
    if request.param == "cached":
        monkeypatch.setattr(layouts, "PACKED_TOKENS", 0)
    return str(request.param)


def gradients(policy: Policy, batch: Batch) -> dict[str, torch.Tensor]:
    policy.model.zero_grad()
    factors = torch.arange(1.0, batch.mask.numel() + 1).view(batch.mask.shape)
    (policy.logp(batch) * factors).sum().backward()
    return {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return the relative distance of two gradients: |a - b| / |b|, over all parameters."""
    assert a.keys() == b.keys()
    squared = [((a[name] - b[name]).square().sum(), b[name].square().sum()) for name in b]
    apart, length = map(sum, zip(*squared, strict=True))
    return float((apart / length).sqrt())


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prompts_change_nothing(family, batch):
    """In fp32: log-probs and gradients are those of the plain path within 1e-5."""
    model = make(family)
    shared, plain = Policy(model, 0.7), Policy(model, 0.7, share_prompt=False)
    torch.testing.assert_close(shared.logp(batch), plain.logp(batch), atol=1e-5, rtol=1e-5)
    assert distance(gradients(shared, batch), gradients(plain, batch)) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_models_own_logits(family, batch):
    """One response at a time, no padding, straight from the model."""
    model = make(family)
    logp, entropy, *_ = Policy(model, 0.7)(batch)
    for b, k in np.ndindex(*logp.shape[:2]):
        prompt = batch.prompt_tokens[b][batch.prompt_mask[b]]
        answer = batch.tokens[b, k][batch.mask[b, k]]
        logits = model(input_ids=torch.cat([prompt, answer])[None]).logits
        every = torch.log_softmax(logits[0, len(prompt) - 1 : -1] / 0.7, -1)
        n = len(answer)
        found = logp[b, k, :n], entropy[b, k, :n]
        own = every.gather(1, answer[:, None])[:, 0], -(every.exp() * every).sum(-1)
        torch.testing.assert_close(found, own, atol=1e-5, rtol=1e-5)
        assert not logp[b, k, n:].any()


@pytest.mark.parametrize("blocks", [14 * 3, 14 * 7, 2**20], ids=["one", "two", "all"])
def test_chunked_head_changes_nothing(blocks, batch, monkeypatch):
    """Three tokens at a time, with as many chunks in a block of gradients as `blocks` allows."""
    expected = by_autograd(Policy(make("llama"), 0.7), batch)
    monkeypatch.setitem(tba.models.forward.LOGITS_AT_ONCE, "cpu", 14 * 3)
    monkeypatch.setattr(tba.learn.policy, "SLOPES_AT_ONCE", blocks)
    monkeypatch.setattr(tba.learn.policy, "ROWS_AT_ONCE", 5)
    policy = Policy(make("llama"), 0.7)
    given = (policy(batch).logp, policy(batch).entropy, gradients(policy, batch))
    torch.testing.assert_close(given, expected, atol=1e-4, rtol=1e-4)
    assert not policy(batch).entropy.requires_grad


def by_autograd(policy: Policy, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return log-probs, entropies and gradients by way of the head's own forward."""
    policy.model.lm_head.register_forward_hook(lambda *_: None)
    output = policy(batch)
    return output.logp, output.entropy, gradients(policy, batch)


@pytest.mark.parametrize("logit", [0.0, 12.0])
def test_the_gradient_of_a_likely_token_survives_bf16(logit):
    """Where p rounds to 1, its gradient p - 1 does not round to 0."""
    weight = torch.zeros(5, 3)
    weight[2, 0] = logit
    hidden = torch.tensor([[1.0, 0.0, 0.0]], requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        logp, _ = TokenLogp.apply(hidden, weight, torch.tensor([2]), 1.0, 8)
    logp.sum().backward()
    p = torch.softmax(weight[:, 0], 0)[2]
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad[0, 0], logit * (1 - p), rtol=0.02, atol=1e-9)


@pytest.mark.parametrize("share_prompt", [True, False], ids=["shared", "plain"])
def test_gradient_checkpointing_changes_nothing_and_drops_nothing(share_prompt, batch):
    """GPT-2 has dropout; checkpointing needs training mode, and must not bring it in."""
    plain = gradients(Policy(make("gpt2"), 1.0), batch)
    model = make("gpt2")
    enable_gradient_checkpointing(model)
    policy = Policy(model, 1.0, share_prompt=share_prompt)
    torch.testing.assert_close(policy.logp(batch), policy.logp(batch), atol=0, rtol=0)
    for a, b in zip(gradients(policy, batch).values(), plain.values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("way", ["cached"], indirect=True)
@pytest.mark.parametrize("family", FAMILIES)
def test_passes_over_similar_lengths_change_nothing(family, batch, monkeypatch):
    """One pass over all responses, and one for each of their lengths."""
    policy = Policy(make(family), 0.7)
    for tokens in (1000, 0):
        monkeypatch.setattr(layouts, "PASS_COST", tokens)
        lengths = {int(n) for n in batch.mask.sum(-1).flatten() if n > 1}
        assert len(layouts.plan_of(batch, True, "none").passes) == (1 if tokens else len(lengths))
        results = policy(batch), gradients(policy, batch)
        if tokens:
            whole = results
    torch.testing.assert_close(whole[0][:2], results[0][:2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole[1], results[1], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
def test_all_layers_keep_the_same_mask(batch, autocast, share_prompt):
    """SDPA would keep a mask for each layer if it had to make them from a boolean one."""
    own = Policy(make("llama"), 0.7, autocast, share_prompt)
    layers = own.model.base_model.layers
    assert own.model.config._attn_implementation == "sdpa" and len(layers) > 1
    masks: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    for layer in layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, __, named: masks.append(named["attention_mask"]), with_kwargs=True
        )

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.extend([tensor] if any(tensor.shape == mask.shape for mask in masks) else [])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        own(batch)
    given = {mask.data_ptr() for mask in masks}
    assert len(masks) == len(layers) * len(given)
    assert {mask.data_ptr() for mask in kept} == given


def test_gradient_checkpointing_keeps_the_inputs_of_layers_only(batch):
    def kept(checkpointing: bool) -> int:
        model = make("llama")
        if checkpointing:
            enable_gradient_checkpointing(model)
        sizes: dict[int, int] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            output = Policy(model, 1.0)(batch)
        del output
        return sum(sizes.values())

    assert kept(True) < kept(False) / 2


def test_padding_tokens_have_no_influence(batch):
    policy = Policy(make("llama"), 1.0)
    before = policy.logp(batch)
    batch.tokens[~batch.mask] = 9
    batch.prompt_tokens[~batch.prompt_mask] = 9
    torch.testing.assert_close(policy.logp(batch), before, atol=1e-6, rtol=0)


def test_one_token_responses(batch):
    one = batch.groups([0]).slice(slice(1, 2)).groups([0])
    assert one.tokens.shape == (1, 1, 1)
    policy = Policy(make("llama"), 1.0)
    expected = policy.logp(batch)[:1, 1:2, :1]
    torch.testing.assert_close(policy.logp(one), expected, atol=1e-6, rtol=0)


CHANGED_LOGITS = {
    "gemma2": {"final_logit_softcapping": 0.5},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.25},
}


def changed(name: str, **settings: Any) -> Any:
    sizes = {**WIDE, "head_dim": 8, "num_key_value_heads": 2, "initializer_range": 0.3}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes, **settings)).eval()


@pytest.mark.parametrize("name", CHANGED_LOGITS)
def test_logits_that_a_model_scales_or_caps_are_its_own(name):
    """The log-probs and their gradients are computed from the model's own logits."""
    model = changed(name, **CHANGED_LOGITS[name])
    prompt, response = np.arange(1, 4, dtype=np.int32), np.arange(2, 7, dtype=np.int32)
    logp = Policy(model, 0.7).logp(collate_tokens([prompt], [[response]]))[0, 0]
    logp.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    ids = torch.from_numpy(np.concatenate([prompt, response])).long()
    every = torch.log_softmax(model(ids[None]).logits[0, 2:-1] / 0.7, -1)
    own = every.gather(1, ids[3:, None]).squeeze(1)
    own.sum().backward()
    torch.testing.assert_close(logp, own, atol=1e-6, rtol=0)
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len(expected)
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-5, rtol=1e-4)


MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 2, "num_experts_per_tok": 1,
    "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "index_head_dim": 16,
    "index_n_heads": 2,
}  # fmt: skip
CACHES = {
    "gemma4_text": {
        "head_dim": 8, "global_head_dim": 8, "num_key_value_heads": 2, "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 14, "sliding_window": 4,
    },
    "deepseek_v32": MLA,
}  # fmt: skip
"""Models whose layers keep the keys of other layers, or keys beside those of attention."""


@pytest.mark.parametrize("name", CACHES)
def test_prompts_are_shared_whatever_their_layers_keep(name, batch):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**WIDE, **CACHES[name]}, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config).eval()
    shared, plain = Policy(model, 0.7), Policy(model, 0.7, share_prompt=False)
    torch.testing.assert_close(shared.logp(batch), plain.logp(batch), atol=1e-5, rtol=1e-5)
    assert distance(gradients(shared, batch), gradients(plain, batch)) <= 1e-4


def test_another_change_of_the_logits_is_refused():
    """HyperCLOVA X multiplies by the key by which Granite divides."""
    with pytest.raises(ValueError, match="changes its logits after the head"):
        Policy(changed("hyperclovax", logits_scaling=3.0), 1.0)


def test_bf16_autocast_is_close(batch):
    model = make("llama")
    close, exact = (Policy(model, 1.0, autocast=bf16).logp(batch) for bf16 in (True, False))
    torch.testing.assert_close(close, exact, atol=0.05, rtol=0.05)


def test_every_part_runs_inside_the_one_forward(batch):
    """Hooks on the policy run once for each call, and around every other module that computes."""
    policy = Policy(make("llama"), 1.0, head=Head("response", 0.01))
    events: list[str] = []

    def record(name: str) -> Callable[..., None]:
        return lambda *_: events.append(name)

    policy.register_forward_pre_hook(record("begin"))
    for name, module in policy.named_modules():
        if not list(module.children()):
            module.register_forward_hook(record(name))
    policy.register_forward_hook(record("end"))
    policy(batch)
    policy.logp(batch)
    second = events.index("begin", 1)
    for call in (events[:second], events[second:]):
        assert (call[0], call[-1]) == ("begin", "end")
        assert (call.count("begin"), call.count("end")) == (1, 1)
        assert {"model.lm_head", "model.model.embed_tokens", "readout"} <= set(call)


@pytest.mark.parametrize("share_prompt", [True, False], ids=["shared", "plain"])
def test_responses_of_a_group_that_are_alike_run_once(share_prompt, monkeypatch):
    """Log-probs, entropies, head and gradients are those of a batch in which each one runs."""
    groups = [[[4, 5], [6], [4, 5], [4, 5, 7], [4, 0]], [[8], [8], [8], [8], [8]]]
    responses = [[np.array(tokens, np.int32) for tokens in group] for group in groups]
    batch = collate_tokens([np.array([2, 3], np.int32), np.array([9], np.int32)], responses)
    assert layouts.first_alike(batch).tolist() == [[0, 1, 0, 3, 4], [0] * 5]
    model = make("llama")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = Policy(model, 0.7, share_prompt=share_prompt, head=Head("response", 0.01))
    results, heads = [], []
    head = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda _, args: heads.append(len(args[0])))
    for every in (False, True):
        if every:
            each = torch.arange(5).expand(2, 5)
            monkeypatch.setattr(layouts, "first_alike", lambda _, each=each: each)
        results.append((policy(batch)[:3], gradients(policy, batch)))
    assert heads == [9, 9, 15, 15]  # tokens of distinct responses, then of all
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("way", ["packed"], indirect=True)
def test_rows_are_packed_where_little_of_them_is_padding():
    """One group with long responses would make the rows of all others as long."""
    policy = Policy(make("llama"), 1.0)
    passes: list[int] = []
    policy.model.base_model.register_forward_pre_hook(lambda *_: passes.append(1))
    for lengths, packed in (([4, 4, 4, 4], True), ([2, 2, 2, 12], False)):
        responses = [[np.ones(n, np.int32)] * 3 for n in lengths]
        batch = collate_tokens([np.ones(3, np.int32)] * 4, responses)
        policy(batch)
        assert (len(passes) == 1) is packed
        passes.clear()


def test_padding_is_counted_as_it_is_run(batch, way):
    """Packed rows are padded to the longest row; the fixture's last response tokens do not run."""
    policy = Policy(make("llama"), 1.0)
    sizes: list[int] = []
    inner = policy.model.base_model
    inner.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    output = policy(batch)
    assert output.tokens == sum(sizes) and len(sizes) == (1 if way == "packed" else 2)
    real = batch.prompt_mask.sum() + (batch.mask.sum(-1) - 1).sum()
    assert output.tokens - output.padding == int(real)


def test_the_heads_gradient_loses_no_block_in_bf16(monkeypatch):
    """512 blocks of one token each: a sum in bf16 would be 1 / 256 of its parts at best."""
    monkeypatch.setattr(tba.learn.policy, "SLOPES_AT_ONCE", 1)
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 5, generator=rng).bfloat16()
    hidden = torch.randn(1, 5, generator=rng).bfloat16().expand(512, 5)
    tokens = torch.zeros(512, dtype=torch.long)
    found = []
    for one in (weight, weight.float()):
        one.requires_grad_()
        logp, _ = TokenLogp.apply(hidden.to(one.dtype), one, tokens, 1.0, 1)
        logp.sum().backward()
        found.append(one.grad.double())
    assert one.grad is not None
    assert (found[0] - found[1]).norm() < 0.005 * found[1].norm()

"""LoRA: only adapters are trained, published and saved; the model without them is the base."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from build import LORA, RANK, config, first_policy, make, run_and_keep, small
from exact import BETA, completed, enumerate_answers, toy_config
from safetensors.torch import load_file
from transformers import AutoConfig, FalconConfig, FalconForCausalLM

from tba.cli import _config
from tba.config.schema import Config
from tba.config.tables import PolicyTable
from tba.learn.policy import Policy, PolicyOutput
from tba.learn.trainer import SingleTrainer
from tba.models.forward import enable_gradient_checkpointing
from tba.models.lora import (
    ADAPTER,
    SETTINGS,
    check_adapter,
    load_adapted,
    read_adapter,
    reference_weights,
    round_linear,
    save_adapter,
)
from tba.models.pretrained import load_model
from tba.objectives import Head
from tba.offline.eval import evaluate_run, export
from tba.open import open_run, run
from tba.runs.checkpoint import newest
from tba.search.searcher import Searcher
from tba.setup.setup import check
from tba.types import Batch, Sampling, collate
from tba.weights import as_tensor, trained


def policy_table(model: Path, **lora: Any) -> PolicyTable:
    return PolicyTable.model_validate({"model": str(model), "lora": lora})


def stepped(model: Path, folder: Path, *settings: str) -> tuple[SingleTrainer, Searcher, Batch]:
    """Return a trainer after two steps, a searcher before any update, and a batch."""
    run_parts = check(small(model, folder, *settings))
    trainer, searcher = run_parts.trainer("cpu"), run_parts.search_setup().build("cpu", False)
    batch = collate(searcher.search(run_parts.prompts[:3], seed=0).groups)
    for step in range(2):
        trainer.step(batch, step)
    return trainer, searcher, batch


@pytest.fixture(scope="module")
def adapter(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a PEFT adapter of the toy, as published after two steps."""
    folder = tmp_path_factory.mktemp("adapter")
    trainer, _, _ = stepped(toy_model, folder)
    model = trainer.policy.model
    save_adapter(model, trained(model), folder / "adapter")
    return folder / "adapter"


def test_only_adapters_are_trained_published_and_saved(toy_model, tmp_path):
    trainer, _, _ = stepped(toy_model, tmp_path)
    sizes = {"q_proj": 128, "k_proj": 128, "v_proj": 128, "o_proj": 128}
    sizes |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), 64 + 128)
    count = 2 * RANK * sum(sizes.values())  # two layers; an adapter has r (in + out) numbers
    arrays = trainer.send(version=2).payload.arrays
    assert sum(array.nbytes for array in arrays.values()) == 4 * count
    optimized = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert sum(p.numel() for p in optimized) == count
    trainer.save(tmp_path / "saved")()
    files = {path.name for path in (tmp_path / "saved" / "model").iterdir()}
    assert files == {ADAPTER, SETTINGS}
    saved = read_adapter(tmp_path / "saved" / "model")
    assert saved.keys() == arrays.keys()
    assert all(np.array_equal(saved[name], array) for name, array in arrays.items())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_disabled_adapters_leave_the_model_exactly(family, bf16, batch, tmp_path):
    """Also where the frozen layers are stored in bf16, which autocast would make of them."""
    make(family).save_pretrained(tmp_path)
    table = policy_table(tmp_path, r=RANK)
    base = Policy(load_model(table, torch.float32), 0.7, bf16)
    adapted = Policy(load_adapted(table, bf16), 0.7, bf16)
    with torch.no_grad():
        expected = base.logp(batch)
        assert torch.equal(adapted.logp(batch), expected)  # they add 0 at first
        for parameter in trained(adapted.model).values():
            parameter += 0.1
        assert not torch.allclose(adapted.logp(batch), expected, atol=1e-2)
        with reference_weights(adapted.model):
            assert torch.equal(adapted.logp(batch), expected)
        assert not torch.allclose(adapted.logp(batch), expected, atol=1e-2)


def test_layers_in_bf16_change_nothing(batch):
    """Falcon's layers add their bias without autocast, so that they stay in fp32."""
    sizes = {"vocab_size": 14, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = FalconForCausalLM(FalconConfig(**sizes, bias=True, alibi=True)).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    with torch.no_grad():
        expected = Policy(model, 0.7, autocast=True).logp(batch)
        round_linear(model)
        assert torch.equal(Policy(model, 0.7, autocast=True).logp(batch), expected)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("path", ["shared prompt", "plain", "gradient checkpointing"])
def test_gradients_of_adapters_follow_from_those_of_the_weights(family, path, batch, tmp_path):
    """W + s B A has the gradient G: that of B is s G A', and that of A is s B' G. With a head."""
    make(family).save_pretrained(tmp_path)
    table = policy_table(tmp_path, r=RANK, alpha=8)
    adapted, whole = load_adapted(table, bf16=False), load_model(table, torch.float32)
    if path == "gradient checkpointing":
        enable_gradient_checkpointing(adapted)
    scale, transposed = 8 / RANK, family == "gpt2"
    generator = torch.Generator().manual_seed(1)
    pairs = {}
    for name, _ in adapted.named_modules():
        if name.endswith(".lora_B"):
            a, b = (adapted.get_parameter(f"{name[:-1]}{x}.default.weight") for x in "AB")
            b.data.normal_(0, 0.1, generator=generator)
            weight = whole.get_parameter(f"{name.removesuffix('.lora_B')}.weight")
            change = scale * (b @ a).detach()
            weight.data += change.T if transposed else change
            pairs[weight] = a, b
    assert pairs
    outputs = []
    for model, shared in ((adapted, path != "plain"), (whole, False)):
        policy = Policy(model, 0.7, share_prompt=shared, head=Head("response", 0.01))
        assert policy.readout is not None
        policy.readout.weight.data.fill_(0.1)
        output: PolicyOutput = policy(batch)
        assert output.head is not None
        outputs.append((output.logp.detach(), output.head.detach()))
        ((output.logp + output.head) * batch.reward[..., None]).sum().backward()
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)
    for weight, (a, b) in pairs.items():
        assert weight.grad is not None
        gradient = scale * (weight.grad.T if transposed else weight.grad)
        torch.testing.assert_close(a.grad, b.detach().T @ gradient, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(b.grad, gradient @ a.detach().T, atol=1e-5, rtol=1e-4)


def test_engine_and_reference_share_a_model(toy_model, tmp_path):
    """After an update the engine computes as the trainer does, and the reference as before."""
    trainer, searcher, batch = stepped(toy_model, tmp_path)
    assert searcher.engine.model is searcher.reference.policy.model  # type: ignore[attr-defined]
    moved = trainer.policy.logp(batch).detach()
    assert (moved - batch.ref_logp).abs().max() > 0.1
    newest = trainer.send(version=2).payload
    stale = replace(newest, arrays={name: 0 * array for name, array in newest.arrays.items()})
    gaps = [searcher.engine.load_weights(weights) for weights in (stale, newest)]
    assert gaps[0] is not None and gaps[0] > 0.1
    assert gaps[1] is not None and gaps[1] < 1e-5
    torch.testing.assert_close(searcher.reference.policy.logp(batch), moved)
    prompts = [batch.prompt_tokens[b][batch.prompt_mask[b]].int().numpy() for b in range(3)]
    responses = []
    for tokens, mask in zip(batch.tokens, batch.mask, strict=True):
        responses.append(completed(*(t[m].tolist() for t, m in zip(tokens, mask, strict=True))))
    logp, version = searcher.reference.logp(prompts, responses)
    assert version == 0
    rows = [torch.from_numpy(row) for group in logp for row in group]
    expected = batch.ref_logp.flatten(0, 1)
    for row, whole in zip(rows, expected, strict=True):
        torch.testing.assert_close(row, whole[: len(row)], atol=0, rtol=0)


def test_no_search_sees_a_disabled_adapter(toy_model, tmp_path):
    """Generation, reference and updates in three threads give what each gives alone."""
    trainer, searcher, _ = stepped(toy_model, tmp_path)
    weights = trainer.send(version=2).payload
    searcher.engine.load_weights(weights)
    prompts = [np.array(p, np.int32) for p in ([3, 4], [5], [6, 7, 2])]
    responses = [completed([2, 3], [4, 1])] * 3
    sampling = Sampling(8, 1.0, 2)

    def generated(seed: int) -> list[list[tuple[bytes, bytes]]]:
        completions = searcher.engine.generate(prompts, sampling, seed)
        return [[(c.tokens.tobytes(), c.logp.tobytes()) for c in group] for group in completions]

    def scored() -> list[bytes]:
        logp, _ = searcher.reference.logp(prompts, responses)
        return [row.tobytes() for group in logp for row in group]

    alone, reference = [generated(seed) for seed in range(8)], scored()
    with ThreadPoolExecutor(3) as threads:
        generating = threads.submit(lambda: [generated(seed) for seed in range(8)])
        scoring = threads.submit(lambda: [scored() for _ in range(8)])
        loading = threads.submit(lambda: [searcher.engine.load_weights(weights) for _ in range(8)])
        assert generating.result(60) == alone
        assert scoring.result(60) == [reference] * 8
        assert max(loading.result(60)) < 1e-5  # type: ignore[type-var]


@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_adapters_learn(runtime, shallow_toy_model, tmp_path):
    """The expected reward rises from 0; the best answer has .6."""
    settings = (
        f"runtime.use={runtime}", f"objective.beta={BETA}", "strategy=recent",
        "trainer.learning_rate=2e-2", "run.steps=20", "log.sample_every=0",
    )  # fmt: skip
    small = ("sampling.samples=16", "trainer.batch_size=48", "trainer.group_size=16")
    config = toy_config(shallow_toy_model, tmp_path / "run", *LORA, *small, *settings)
    done = run_and_keep(config)
    answers = enumerate_answers(done.trainer.policy, first_policy(config), done.parts.text)
    before = fmean((one.reference * one.reward).sum().item() for one in answers)
    assert before < 0.05
    assert fmean(one.expected_reward for one in answers) > before + 0.15


WHOLE = ('policy.lora.modules_to_save=["lm_head", "embed_tokens", "norm"]',)
"""A head, embeddings, and all norms whose names end so: `input_layernorm`, too."""


RESUMED = [(), WHOLE, ("trainer.weights=bf16",)]


@pytest.mark.parametrize("extra", RESUMED)
def test_a_resumed_run_equals_the_uninterrupted_one(toy_model, tmp_path, extra):
    reset = ("policy.reset_reference_every=3", "trainer.schedule=constant", "run.steps=6")
    run(small(toy_model, tmp_path / "whole", *reset, *extra, "checkpoint.every=4"))
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    shutil.rmtree(newest(tmp_path / "part" / "checkpoints"))  # as if killed after step 4
    run(_config([], tmp_path / "part"), tmp_path / "part")
    ends = [newest(tmp_path / name / "checkpoints") for name in ("whole", "part")]
    for file in (f"model/{ADAPTER}", "optimizer.safetensors", "reference.safetensors"):
        first, second = (load_file(end / file) for end in ends)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("extra", [(), WHOLE])
def test_a_reset_reference_is_a_second_adapter(toy_model, tmp_path, extra):
    steps = ("policy.reset_reference_every=2", "run.steps=3")
    config = small(toy_model, tmp_path / "run", *steps, *extra)
    with open_run(config) as opened:
        run_logp: list[torch.Tensor] = []
        reset = opened.reset_reference

        def kept() -> None:
            reset()
            run_logp.append(opened.trainer.policy.logp(probe).detach())

        opened.reset_reference = kept  # type: ignore[method-assign]
        groups = opened.searchers.gather(3)
        probe = collate(groups)
        opened.train()
        searcher = opened.searchers._searcher  # type: ignore[attr-defined]
        with torch.no_grad(), reference_weights(searcher.reference.policy.model):
            again = searcher.reference.policy.logp(probe)
        torch.testing.assert_close(again, run_logp[0], atol=1e-5, rtol=0)
        assert searcher.reference.version == 2


def test_an_adapter_to_start_from_is_the_reference(toy_model, adapter, tmp_path):
    config = small(toy_model, tmp_path / "next", f"policy.lora.from={adapter}", "run.steps=2")
    run_parts = check(config)
    trainer, searcher = run_parts.trainer("cpu"), run_parts.search_setup().build("cpu", False)
    groups = searcher.search(run_parts.prompts[:3], seed=0).groups
    batch = collate(groups)
    for logp in (trainer.policy.logp(batch).detach(), batch.behavior_logp):
        torch.testing.assert_close(logp, batch.ref_logp, atol=1e-5, rtol=0)
    weights = trainer.send(version=1).payload
    moved = {name: array + np.float32(0.1) for name, array in weights.arrays.items()}
    searcher.engine.load_weights(replace(weights, arrays=moved))
    again = searcher.search([g.prompt for g in groups], seed=0).groups
    assert (collate(again).behavior_logp - collate(again).ref_logp).abs().max() > 0.01
    assert run(config).finished
    assert load_file(tmp_path / "next" / "checkpoints" / "step-00000002" / "model" / ADAPTER)


WRONG = {
    "policy.lora.r=8": r"the adapter has r = 4; set r and alpha",
    "policy.lora.alpha=9": r"the adapter has lora_alpha = 8; set",
    'policy.lora.target_modules=["q_proj"]': r"is of a different model .*down_proj",
    'policy.lora.modules_to_save=["norm"]': r"is of a different model .*modules_to_save",
    "policy.lora.from=nowhere": r"cannot be read: .*adapter_config\.json",
}


@pytest.mark.parametrize("setting", WRONG)
def test_an_adapter_that_does_not_fit_is_refused_first(setting, toy_model, adapter, tmp_path):
    config = small(toy_model, tmp_path / "run", f"policy.lora.from={adapter}", setting)
    with pytest.raises(ValueError, match=WRONG[setting]):
        check(config)


def test_an_adapter_of_a_mixture_of_experts_fits(tmp_path, batch):
    """PEFT trains both projections of an expert as one matrix, with a scale of its own."""
    make("mixtral").save_pretrained(tmp_path / "model")
    trained_model = load_adapted(policy_table(tmp_path / "model", r=RANK), bf16=False)
    for parameter in trained(trained_model).values():
        parameter.data += 0.1
    save_adapter(trained_model, trained(trained_model), tmp_path / "start")
    table = policy_table(tmp_path / "model", r=RANK, **{"from": str(tmp_path / "start")})
    check_adapter(table)
    with torch.no_grad():
        logp = Policy(load_adapted(table, bf16=False), 0.7).logp(batch)
        assert torch.equal(logp, Policy(trained_model, 0.7).logp(batch))


def test_an_adapter_that_computes_something_else_is_refused(toy_model, adapter, tmp_path):
    start = shutil.copytree(adapter, tmp_path / "start")
    settings = json.loads((start / SETTINGS).read_text())
    for change in ({"use_dora": True}, {"use_rslora": True}, {"init_lora_weights": "pissa"}):
        (start / SETTINGS).write_text(json.dumps({**settings, **change}))
        (name,) = change
        with pytest.raises(ValueError, match=f"the adapter has {name} = .*a plain LoRA adapter"):
            check_adapter(policy_table(toy_model, r=RANK, alpha=8, **{"from": str(start)}))


def test_what_cannot_work_is_refused_first(toy_model, tmp_path, monkeypatch):
    setting = 'policy.lora.target_modules=["q_proj", "w_proj"]'
    with pytest.raises(ValueError, match="no linear layer is called 'w_proj'; did you mean"):
        check(small(toy_model, tmp_path, setting))
    with pytest.raises(ValueError, match="no linear layer is called 'lm_head'"):
        check(small(toy_model, tmp_path, "policy.lora.target_modules=lm_head"))
    check(small(toy_model, tmp_path, "policy.lora.target_modules=0.self_attn.q_proj"))
    with pytest.raises(ValueError, match=r"engine\.dtype = 'fp32': .* remove engine\.dtype"):
        check(small(toy_model, tmp_path, "engine.dtype=fp32"))
    monkeypatch.setattr("tba.models.lora.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"policy\.lora needs PEFT: pip install peft"):
        check(small(toy_model, tmp_path))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # in PEFT
@pytest.mark.parametrize("extra", [(), WHOLE])
def test_both_exports_compute_what_the_trainer_does(toy_model, tmp_path, extra):
    from peft import PeftModel

    folder = tmp_path / "run"
    config = small(toy_model, folder, "eval.prompts=1", *extra)
    with open_run(config) as opened:
        opened.train()
        batch = collate(opened.buffer.groups()[:1])
        expected = opened.trainer.policy.logp(batch).detach()
    whole = export(folder, tmp_path / "whole")
    merged = load_model(PolicyTable(model=str(whole)), torch.float32)
    adapter = export(folder, tmp_path / "adapter", adapter=True)
    base = load_model(PolicyTable(model=str(toy_model)), torch.float32)
    with_peft = PeftModel.from_pretrained(base, str(adapter)).get_base_model()
    for model in (merged, with_peft):
        logp = Policy(model, config.sampling.temperature).logp(batch)
        torch.testing.assert_close(logp, expected, atol=1e-5, rtol=0)
    assert (Policy(base, 1.0).logp(batch) - expected).abs().max() < 1e-5  # PEFT changed it in place
    scores = evaluate_run(folder, [], reference=False)
    assert abs(scores["sampled_log_ratio"]) > 1e-3
    assert abs(evaluate_run(folder, [], reference=True)["sampled_log_ratio"]) < 1e-5
    with pytest.raises(ValueError, match="leave out --adapter"):
        plain = tmp_path / "plain"
        run(replace_lora(small(toy_model, plain, "run.steps=1")))
        export(plain, tmp_path / "none", adapter=True)


@pytest.mark.parametrize("bf16", [False, True])
def test_modules_trained_whole_are_published_and_not_in_the_reference(toy_model, tmp_path, bf16):
    autocast = f"policy.autocast={'bf16' if bf16 else 'off'}"
    trainer, _, batch = stepped(toy_model, tmp_path, *WHOLE, autocast)
    setup = check(small(toy_model, tmp_path, *WHOLE, autocast)).search_setup()
    searcher = setup.build("cpu", bf16)
    weights = trainer.send(version=2).payload
    whole = {n for n in weights.arrays if ".lora_" not in n}
    assert {"lm_head", "model.embed_tokens", "model.norm"} <= {n.split(".mod")[0] for n in whole}
    base = load_model(PolicyTable(model=str(toy_model)), torch.float32)
    before = base.state_dict()
    for name in whole:
        plain = name.replace(".modules_to_save.default", "")
        assert not torch.equal(as_tensor(weights.arrays[name]).float(), before[plain])
    gap = searcher.load_weights(weights)
    assert gap is not None and gap < (0.05 if bf16 else 1e-5)
    with torch.no_grad(), reference_weights(searcher.reference.policy.model):
        ref = searcher.reference.policy.logp(batch)
    expected = Policy(base, trainer.policy.temperature, bf16).logp(batch)
    torch.testing.assert_close(ref, expected, atol=0.05 if bf16 else 1e-5, rtol=0)
    trainer.save(tmp_path / "saved")()
    saved = read_adapter(tmp_path / "saved" / "model")
    assert saved.keys() == weights.arrays.keys()
    assert all(torch.equal(saved[n], p) for n, p in trained(trainer.policy.model).items())


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("nrom", "no untied module without submodules is called 'nrom'; did you mean 'norm'"),
        ("mlp", "no untied module without submodules is called 'mlp'"),
        ("lm_head", "no untied module without submodules is called 'lm_head'"),
    ],
)
def test_a_module_that_cannot_be_trained_whole_is_refused(toy_model, tmp_path, names, told):
    tied = AutoConfig.from_pretrained(toy_model, tie_word_embeddings=True)
    tied.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=told):
        check_adapter(policy_table(tmp_path, r=RANK, modules_to_save=[names]))


@pytest.mark.parametrize(
    ("family", "adapted", "left"),
    [
        ("llama", "down_proj, gate_proj, k_proj, o_proj", "embed_tokens.weight"),
        ("gpt2", "c_attn, c_fc, c_proj", "wpe.weight, wte.weight"),
        ("gpt_oss", "k_proj, o_proj, q_proj, v_proj;", "experts.down_proj, .*router.weight"),
    ],
)
def test_what_is_adapted_and_what_is_not_is_told(tmp_path, family, adapted, left):
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "vocab_size": 14, "head_dim": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16}
    if family == "gpt_oss":
        sizes |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = AutoConfig.for_model(family, **sizes)
    config.save_pretrained(tmp_path)
    told = check_adapter(policy_table(tmp_path, r=RANK))
    assert re.fullmatch(rf"LoRA adapts {adapted}.* unchanged: .*{left}.*", told)


def replace_lora(config: Config) -> Config:
    policy = config.policy.model_copy(update={"lora": None})
    return config.model_copy(update={"policy": policy})


def test_the_trainer_lends_its_model_to_the_reference(tiny_model, tmp_path):
    """If the engine lends none, as vLLM; without its adapter, it is what a model of its own is."""
    settings = ("runtime.use=local", "engine=scripted", 'engine.answers=["1", "2"]', *LORA)
    with open_run(config(tiny_model, tmp_path / "run", "run.steps=3", *settings)) as opened:
        opened.train()
        searcher = opened.searchers._searcher
        lent = searcher.reference
        assert lent.policy.model is opened.trainer.policy.model
        alone = searcher.setup.reference("cpu", bf16=False)
        prompts = [np.array([3, 4], np.int32)]
        responses = [completed([2, 3, 1], [4])]
        (one,), (other,) = (each.logp(prompts, responses)[0] for each in (lent, alone))
        for mine, its in zip(one, other, strict=True):
            np.testing.assert_array_equal(mine, its)
        assert any(p.any() for n, p in trained(lent.policy.model).items() if ".lora_B." in n)

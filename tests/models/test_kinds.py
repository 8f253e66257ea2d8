"""Models that cannot be trained, or whose files lack weights: one sentence before the start."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tba import load
from tba.config.tables import PolicyTable
from tba.learn.policy import Policy
from tba.models.lora import load_placed
from tba.models.pretrained import check_files, check_model, load_model, load_text
from tba.prompt import Prompt
from tba.setup.setup import RunSetup, check
from tba.types import collate

Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
LAYER = "model.layers.0.mlp.up_proj.weight"


def variant(model: Path, folder: Path, change: Change | None = None, **config: Any) -> str:
    """Return a copy of a model with other weights in its file, or another config.json."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    if change is not None:
        tensors = change(load_file(folder / "model.safetensors"))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    written = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(written))
    return str(folder)


def refusal(model: str) -> str:
    """Return why the checks before a run refuse a model; loading it must be refused as well."""
    policy = PolicyTable(model=model)
    with pytest.raises(ValueError, match=r"policy\.model = ") as checked:
        load_text(policy)
        check_model(policy)
    assert "\n" not in str(checked.value)
    return str(checked.value)


def prefixed(prefix: str) -> Change:
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def untied(make_model: Callable[..., Path]) -> Path:
    return make_model(tied=False)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: {n: x for n, x in t.items() if n != "lm_head.weight"}, r"missing: lm_head\.wei"),
        (lambda t: {n: x for n, x in t.items() if n != LAYER}, rf"missing: {LAYER}\)"),
        (lambda t: {n: x for n, x in t.items() if "layers" not in n}, r"missing: .* and \d more"),
        (prefixed("module."), r"unexpected: module\..* without a wrapper"),
        (lambda t: {**t, "v_head.weight": torch.zeros(1, 32)}, r"\(unexpected: v_head\.weight\)"),
        (
            lambda t: {**t, LAYER: torch.zeros(48, 16)},
            r"another shape: .*up_proj.weight \[48, 16\]",
        ),
    ],
)
def test_weights_that_are_not_the_models_are_named(untied, tmp_path, change, told):
    broken = variant(untied, tmp_path, change)
    with pytest.raises(ValueError, match=told) as loaded:
        load_model(PolicyTable(model=broken), torch.float32)
    assert refusal(broken) == str(loaded.value)


def test_constants_and_tied_heads_in_files_do_no_harm(tiny_model, tmp_path):
    def older(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        head = tensors["model.embed_tokens.weight"].clone()
        frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
        further = {"mtp.layers.0.weight": torch.zeros(2), "h.0.attn.masked_bias": torch.zeros(1)}
        return {**tensors, **frequencies, **further, "lm_head.weight": head}

    model = variant(tiny_model, tmp_path, older)
    check_model(PolicyTable(model=model))
    expected = load_model(PolicyTable(model=str(tiny_model)), torch.float32).state_dict()
    for name, tensor in load_model(PolicyTable(model=model), torch.float32).state_dict().items():
        assert torch.equal(tensor, expected[name])


def test_a_shard_that_is_missing_or_not_listed_is_told(untied, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(untied)
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    AutoTokenizer.from_pretrained(untied).save_pretrained(tmp_path)
    check_model(PolicyTable(model=str(tmp_path)))
    next(tmp_path.glob("model-00002-of-*")).unlink()
    assert "No such file or directory" in refusal(str(tmp_path))
    index = tmp_path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    files = {n: f for n, f in listed["weight_map"].items() if "-00002-" not in f}
    index.write_text(json.dumps({**listed, "weight_map": files}))
    assert "missing: " in refusal(str(tmp_path))


def test_an_adapter_is_no_model(tiny_model, tmp_path):
    """Transformers would load it into the model, which would then train nothing else."""
    model = variant(tiny_model, tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "is an adapter: give its base" in refusal(model)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"hidden_size": 64}, "of another shape: "),
        ({"num_hidden_layers": 2}, "missing: model.layers.1"),
        ({"hidden_size": "wide"}, "cannot be loaded"),
        ({"num_attention_heads": 0}, "cannot be loaded"),
        ({"model_type": "brandnew"}, "cannot be loaded"),
        ({"model_type": "dbrx"}, "cannot be loaded"),
        ({"num_hidden_layers": 64, "hidden_size": 10**6}, "of another shape: "),
        ({"vocab_size": 10**13}, "of another shape: "),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantised \(gptq\)"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\)"),
        ({"quantization_config": {"load_in_4bit": True}}, r"quantised \(bitsandbytes\)"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, r"\(compressed-tensors\)"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tiny_model, tmp_path, config, told):
    assert re.search(told, refusal(variant(tiny_model, tmp_path, **config)))


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_generation_config_that_cannot_be_read_is_told(tiny_model, tmp_path, content):
    model = variant(tiny_model, tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    assert refusal(model).startswith("generation_config.json of policy.model = ")
    for plain in ('{"eos_token_id": [-1, 1]}', '{"do_sample": true}'):
        (tmp_path / "generation_config.json").write_text(plain)
        assert load_text(PolicyTable(model=model)).eos_ids == {1}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": [1, 3]}))
    assert load_text(PolicyTable(model=model)).eos_ids == {1, 3}  # both configs count
    del config["eos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_text(PolicyTable(model=model)).eos_ids == {1}  # and not what a class has by default


@pytest.mark.parametrize(
    "name",
    ["t5", "bart", "bert", "xlm-roberta", "gemma3", "llava", "qwen2_vl", "qwen3_next", "vit"],
)
def test_another_kind_of_model_is_told_from_its_config(tiny_model, tmp_path, name):
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    AutoConfig.for_model(name).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert load_text(PolicyTable(model=str(tmp_path))).eos_id  # a run reads it first
    assert "give a causal language model with attention alone" in refusal(str(tmp_path))


def test_a_classifier_without_its_head_is_refused(tiny_model):
    auto = transformers.AutoModelForSequenceClassification
    with pytest.raises(ValueError, match=r"model = .*missing: score\.weight"):
        check_files(auto, str(tiny_model), "model")


@pytest.fixture
def larger(make_model: Callable[..., Path], tmp_path: Path) -> Callable[..., str]:
    """Return a model whose tokenizer has two tokens more than there are embeddings."""

    def make(**special: str) -> str:
        folder = tmp_path / "larger"
        shutil.copytree(make_model(), folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<a>", "<b>"], **special})
        tokenizer.save_pretrained(folder)
        return str(folder)

    return make


def test_a_prompt_with_a_token_beyond_the_embeddings_is_named(larger):
    text = load_text(PolicyTable(model=larger()))
    told = r"prompt 'b' has the token '<b>', number 15, but .* 14 on"
    with pytest.raises(ValueError, match=told):
        text.encode_all([Prompt("a", "1+1="), Prompt("b", "1<b>=")], 4, text.encode)


def test_an_eos_that_cannot_be_sampled_is_refused(larger):
    model = larger(eos_token="<b>")
    with pytest.raises(ValueError, match=r"'<b>' has number 14, and it samples from 14 tokens"):
        load_text(PolicyTable(model=model))
    assert load_text(PolicyTable(model=model, eos_token="<eos>")).eos_id == 1


def test_padding_needs_no_embedding_of_its_own(larger):
    text = load_text(PolicyTable(model=larger(pad_token="<a>")))
    assert text.pad_id == text.eos_id == 1


@pytest.mark.parametrize(
    ("appended", "written", "expected"),
    [
        ("$A <eos>", "1+2=", "1+2="),
        ("<pad> $A <eos>", "1+2=", "<pad>1+2="),
        ("$A <eos> <eos>", "1+2=", "1+2="),
        ("$A <eos>", "1<eos>", "1<eos>"),
        ("$A", "1<eos>", "1<eos>"),
    ],
)
def test_prompts_end_as_they_are_written(make_model, appended, written, expected):
    """A tokenizer may append EOS; a text may have one of its own."""
    model = make_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<pad>", "<eos>")]
    template = TemplateProcessing(single=appended, special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.save_pretrained(model)
    text = load_text(PolicyTable(model=str(model)))
    assert text.tokenizer.decode(text.encode(Prompt("a", written)).tolist()) == expected


ROPE = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 14}
LONG = {**ROPE, "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
TYPES = {
    "longrope": LONG,
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {**ROPE, "rope_type": "yarn"},
    "llama3": {**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def toy_run(model: str, max_tokens: int) -> RunSetup:
    settings = ["task=toy.Ones", f"sampling.max_tokens={max_tokens}", f"policy.model={model}"]
    return check(load(None, [*settings, "runtime.use=local", "reward.isolate=none"]))


@pytest.mark.parametrize("kind", TYPES)
def test_positions_agree_with_single_sequences_at_the_lengths_of_a_run(tiny_model, tmp_path, kind):
    """Prompts have 4 to 6 tokens, so that the sequences have at most 14."""
    parts = toy_run(variant(tiny_model, tmp_path, rope_parameters=TYPES[kind]), 8)
    trainer, searcher = parts.trainer("cpu"), parts.search_setup().build("cpu", False)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    groups = searcher.search(parts.prompts[:3], seed=0).groups
    with torch.no_grad():
        logp = trainer.policy.logp(collate(groups))
        for group, rows in zip(groups, logp, strict=True):
            for t, row in zip(group.trajectories, rows, strict=True):
                ids = torch.tensor([*group.prompt_tokens, *t.tokens])
                logits = plain(input_ids=ids[None]).logits[0, -len(t.tokens) - 1 : -1]
                every = logits.log_softmax(-1)
                expected = every.gather(1, ids[-len(t.tokens) :, None]).squeeze(1)
                for found in (row[: len(t.tokens)], t.behavior_logp, t.ref_logp):
                    torch.testing.assert_close(torch.as_tensor(found), expected, atol=1e-5, rtol=0)


def test_rotary_embeddings_that_change_within_a_run_are_refused(tiny_model, tmp_path):
    model = variant(tiny_model, tmp_path, rope_parameters=LONG)
    with pytest.raises(ValueError, match=r"longrope\) in sequences of more than 14 .* 5 to 15"):
        toy_run(model, 9)


def test_the_first_probe_is_as_long_as_the_longest_sequence(make_model):
    first = toy_run(str(make_model(context=128)), 100).trainer("cpu").send(version=0).payload.probe
    assert first is not None and len(first.prompt_tokens) + len(first.tokens) == 6 + 100


def test_a_model_that_cannot_run_is_told(tiny_model, tmp_path):
    sizes = {"num_attention_heads": 4, "head_dim": 16, "num_key_value_heads": 3}
    config = AutoConfig.from_pretrained(tiny_model, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_model(PolicyTable(model=str(tmp_path)), torch.float32)
    with pytest.raises(ValueError, match=r"policy\.model: LlamaForCausalLM cannot run with this"):
        Policy(model, 1.0)


@pytest.mark.parametrize("name", ["openai-gpt", "bert-generation"])
def test_a_model_without_a_cache_is_told(name):
    """The second one is an encoder, too, and has a cache only as a decoder."""
    sizes = {"vocab_size": 14, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes)).eval()
    with pytest.raises(ValueError, match=r"has no cache of keys and values: .*; use another model"):
        Policy(model, 1.0)


def test_another_device_is_refused_in_one_sentence(tiny_model):
    with pytest.raises(ValueError, match=r"run only on cpu and cuda, not on 'mps'"):
        load_placed(PolicyTable(model=str(tiny_model)), "mps", bf16=False)

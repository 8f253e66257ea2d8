"""Memory of each process, from a config and a config.json; the dry run for GPUs of elsewhere."""

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import module_at
from transformers import Gemma2Config, Qwen2Config

from tba.cli import main
from tba.config.plugins import with_defaults
from tba.config.schema import load
from tba.models.pretrained import load_empty_model
from tba.runtime.placement import share
from tba.setup import setup
from tba.setup.machine import Machine, planned_machine
from tba.setup.memory import MemoryEstimate
from tba.setup.sizes import group

ROOT = Path(__file__).parents[2]
MATH = ROOT / "experiments" / "math_qwen7b_tba_prime.toml"
QWEN = Qwen2Config(
    vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28,
    num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
)  # fmt: skip
WINDOWS = {
    "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0, "layer_types": None,
}  # fmt: skip
NUMBERS = 7_615_616_512
"""Parameters of that model."""
BEFORE = ["trainer.devices=", "engine.gpu_memory_utilization="]
"""Settings of the file that are taken out again, so that it plans one GPU for the trainer."""


@pytest.fixture(scope="module")
def qwen(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and the config.json of Qwen2.5-7B, without weights."""
    folder = tmp_path_factory.mktemp("models") / "qwen"
    ignored = shutil.ignore_patterns("*.safetensors", "config.json")
    shutil.copytree(tiny_model, folder, ignore=ignored)
    QWEN.save_pretrained(folder)
    return folder


def needs(model: Path, *settings: str, gpus: str = "4x80", prompt: int = 300) -> MemoryEstimate:
    given = [f"policy.model={model}", "trainer.token_budget=8192", *settings]
    return MemoryEstimate.of(with_defaults(load(MATH, given)), planned_machine(gpus), prompt)


def test_scores_of_a_model_without_sdpa_are_counted_on_a_gpu(qwen, tmp_path):
    shutil.copytree(qwen, tmp_path, dirs_exist_ok=True)
    Gemma2Config(num_hidden_layers=2).save_pretrained(tmp_path)
    for model, is_eager in ((tmp_path, True), (qwen, False)):
        both = [needs(model, f"policy.attention={name}") for name in ("auto", "eager")]
        by_default, eager = (each._activations() for each in both)
        assert (by_default == eager) == is_eager


@pytest.mark.parametrize(("length", "attention"), [(20, "eager"), (21, "sdpa")])
def test_scores_on_a_cpu_are_those_of_the_attention_that_a_run_chooses(qwen, length, attention):
    """Up to 320 tokens of prompt and response, it is eager attention."""
    found = []
    for name in ("auto", attention):
        own = [f"sampling.max_tokens={length}", f"policy.attention={name}"]
        config = load(None, [f"policy.model={qwen}", *own])
        found.append(MemoryEstimate.of(config, Machine(0, 0, 1e12), prompt=300)._activations())
    assert found[0] == found[1]


def planned(
    settings: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Return status, output and errors of `tba train --dry-run` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["tba", "train", *settings])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    return ended.value.code or 0, out, err


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    """Settings with problems of the run and of its evaluation, in the tokens of the model."""
    for name, first in (("train", 0), ("test", 50)):
        rows = [{"problem": f"{i}+1=", "answer": str(i + 1)} for i in range(first, first + 5)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"data": "train", "held_out_data": "test"}
    named = [f"task.{key}={tmp_path / name}.jsonl" for key, name in files.items()]
    return [*named, "task.prompt={problem}", "eval.prompts=5"]


def test_the_dry_run_plans_for_other_gpus_without_weights(qwen, data, monkeypatch, capsys):
    pytest.importorskip("math_verify")
    own = [str(MATH), "--dry-run", "--gpus", "4x80", f"policy.model={qwen}", *data]
    status, out, _ = planned(own, monkeypatch, capsys)
    assert status == 0
    used = r"7\d\.\d GB of 80\.0 GB\n "
    assert re.search(rf"^GPUs 0, 1: {used} rank of the trainer: .*weights 15\.2 GB", out, re.M)
    assert re.search(rf"^GPUs 2, 3: {used} searcher: .*engine 15\.2 GB", out, re.M)
    assert re.search(r"^host: \d+\.\d GB\n  all processes: ", out, re.M)
    assert re.search(r"^the memory suffices\ntime: about \S+ s a step \(assumed\)", out, re.M)
    assert "\nnot checked, because the run is planned" in out
    status, out, _ = planned([*own, *BEFORE, "runtime.searchers=3"], monkeypatch, capsys)
    assert status == 0
    assert re.search(
        r"warning: GPU 0 needs 1\d\d\.\d GB but has 80\.0 GB: set trainer\.devices", out
    )


def test_gpus_are_written_as_number_times_gb(qwen, monkeypatch, capsys):
    assert planned_machine("4x80") == Machine(4, 80e9, float("inf"))
    assert planned_machine("1x24.5").card == 24.5e9
    for wrong in ("4", "80x", "0x80", "4x0", "4*80", "-1x80", "4x80GB", "4x1e3", "four"):
        with pytest.raises(ValueError, match=r"write number x GB of each, such as --gpus 4x80"):
            planned_machine(wrong)
    given = [str(MATH), f"policy.model={qwen}", "--gpus", "4x80"]
    status, _, err = planned(given, monkeypatch, capsys)
    assert (status, err) == (2, "error: --gpus plans for other machines: add --dry-run\n")


def test_ranks_that_lack_the_memory_are_refused(tiny_model, tmp_path, monkeypatch):
    """Before a process starts, also on resuming with another number of ranks."""
    settings = ["trainer.devices=2", "trainer.batch_size=160", "sampling.max_tokens=4"]
    settings.append("task.train_size=200")
    config = load(None, [f"policy.model={tiny_model}", "task=arithmetic", *settings])
    numbers = sum(p.numel() for p in load_empty_model(config.policy).parameters())
    enough = 16 * numbers
    monkeypatch.setattr(setup, "this_machine", lambda: Machine(0, 0, enough))
    setup.check(config)
    monkeypatch.setattr(setup, "this_machine", lambda: Machine(0, 0, enough - 2))
    words = r"trainer\.devices = 2 needs .* for weights, gradients and moments in each rank: "
    with pytest.raises(ValueError, match=words):
        setup.check(config)
    monkeypatch.setattr(setup, "this_machine", lambda: Machine(3, enough / 2 - 2, 1e12))
    with pytest.raises(ValueError, match=words):
        setup.check(config)


AUTO = ("trainer.token_budget=auto", "trainer.devices=1", "runtime.lag=", "runtime.searchers=1")


def budget(model: Path, *settings: str, gpus: str = "2x80", prompt: int = 100) -> int:
    return needs(model, *AUTO, *settings, gpus=gpus, prompt=prompt).config.trainer.pass_tokens


def test_an_automatic_token_budget_holds_whole_groups(tiny_model):
    """In a small model, they fit: groups of 100 + 8 x (50 or 150) tokens, up to 16,384 tokens."""
    groups = ("trainer.group_size=8", "sampling.samples=8", "sampling.max_tokens=50")
    step = (*groups, "trainer.batch_size=800")
    assert budget(tiny_model, *step) == 32 * 500
    assert budget(tiny_model, *step, "policy.share_prompt=false") == 12 * (100 + 8 * 150)
    assert budget(tiny_model, *step, "sampling.max_tokens=3000") == 100 + 8 * 3000
    assert budget(tiny_model, *groups, "trainer.batch_size=32") == 16_384  # a step has less
    assert budget(tiny_model, *step, "trainer.devices=4", gpus="5x80") == 16_384  # 25 each
    # vLLM's share leaves nothing on the searcher's GPU, which no budget changes
    assert budget(tiny_model, *step, "engine.gpu_memory_utilization=0.95", gpus="2x80") == 32 * 500


def test_an_automatic_token_budget_falls_until_it_fits_the_gpus(qwen):
    """A group of the paper's run has 300 + 16 x 3,072 tokens."""
    run = ("trainer.devices=4", "trainer.batch_size=512", "trainer.group_size=16")
    run = (*run, "sampling.samples=16", "sampling.max_tokens=3072")
    pieces = [300 + k * 3072 for k in range(1, 17)]
    found = {card: budget(qwen, *run, gpus=f"8x{card}", prompt=300) for card in (72, 80, 120)}
    assert found[72] < found[80] == found[120] == pieces[-1] == 300 + 16 * 3072
    for card, own in found.items():
        for size in pieces[: pieces.index(own) + 2]:
            tried = needs(qwen, *AUTO, *run, f"trainer.token_budget={size}", gpus=f"8x{card}")
            cards = [n for gpu, n in tried.needed().items() if gpu is not None]
            assert (max(cards) <= 0.95 * card * 1e9) == (size <= own)
    assert budget(qwen, *run, gpus="8x24", prompt=300) == pieces[0]  # nothing fits
    two = budget(qwen, *run, "trainer.devices=2", gpus="4x80", prompt=300)
    assert two == 300 + 3 * 3072  # a group runs forward twice


def test_a_pass_of_the_reference_is_no_larger_than_is_fast(qwen):
    """It would otherwise bound the trainer's budget: a reference needs no whole group at once."""
    for given, own in ((8192, 8192), (49_664, 16_384)):
        planned = needs(qwen, f"trainer.token_budget={given}")
        beside = planned.processes[-2].parts["a pass of the reference"]
        # a layer of the reference, and 1.4 GB for the LM head
        assert beside == own * (34 * 3584 + 8 * 18_944) + 1.4e9


def test_an_automatic_token_budget_is_fixed_where_no_gpu_is_known(qwen):
    config = with_defaults(load(MATH, [f"policy.model={qwen}", *AUTO]))
    assert MemoryEstimate.of(config, Machine(0, 0, 1e12), 100).config.trainer.token_budget == 16_384
    assert budget(qwen, "runtime.address=auto") == 16_384
    assert budget(qwen, "trainer.token_budget=777") == 777


def test_a_run_has_the_automatic_budget_of_its_machine(tiny_model, pretend):
    given = ["task=arithmetic", "trainer.batch_size=2000", "trainer.group_size=4"]
    given += ["sampling.samples=4", "sampling.max_tokens=8", "eval.prompts=0"]
    config = load(None, [f"policy.model={tiny_model}", *given])
    found = setup.check(config)
    group_tokens = len(found.extremes[1]) + 4 * 8
    assert config.trainer.token_budget == "auto"
    assert found.config.trainer.token_budget == 16_384 // group_tokens * group_tokens


def test_processes_share_gpus_as_ray_lets_them(qwen):
    for gpus, ranks, searchers in ((4, 1, 3), (4, 2, 3), (8, 3, 9), (1, 1, 2)):
        settings = [f"trainer.devices={ranks}", f"runtime.searchers={searchers}"]
        found = needs(qwen, *settings, gpus=f"{gpus}x80").processes
        _, part = share("GPU", gpus, ranks, searchers)
        cards = Counter(p.card for p in found if p.name == "searcher")
        assert sum(cards.values()) == searchers and max(cards.values()) * part <= 1
        assert [p.card for p in found[:ranks]] == [*range(ranks)]
        assert min(cards) == (ranks if gpus > ranks else 0)
    ranged = ("runtime.lag=", "runtime.address=auto", "runtime.searchers=[1,9]")
    assert needs(qwen, *ranged, gpus="8x80").searchers == 6
    divided = needs(qwen, "engine.tensor_parallel_size=2", "trainer.devices=2", gpus="8x80")
    engines = [p for p in divided.processes if p.name == "searcher"]
    assert [p.card for p in engines] == [2, 3, 4, 5]
    assert [sum("reference" in part for part in p.parts) > 0 for p in engines] == [True, False] * 2


def test_what_lowers_the_memory(qwen):
    """Each setting that docs/memory.md names lowers what it is said to lower."""
    one = needs(qwen, "trainer.devices=1").processes[0].parts
    two = needs(qwen, "trainer.devices=2").processes[0].parts
    kept = needs(qwen, "trainer.devices=2", "trainer.reshard_after_forward=false").processes[0]
    assert kept.parts["gathered layers"] == 2 * NUMBERS > two["gathered layers"]
    for name in ("weights", "gradients", "moments"):
        assert two[name] == one[name] / 2
    budget = needs(qwen, "trainer.devices=1", "trainer.token_budget=4096").processes[0].parts
    assert budget["activations"] < 0.7 * one["activations"]
    whole = needs(qwen, "trainer.devices=1", "policy.gradient_checkpointing=false").processes[0]
    assert whole.parts["activations"] > 5 * one["activations"]
    small = ("trainer.devices=1", "trainer.weights=bf16", "trainer.optimizer=adamw_8bit")
    rounded = needs(qwen, *small).processes
    state = sum(rounded[0].parts[name] for name in ("weights", "gradients", "moments"))
    assert state == pytest.approx(8.03 * NUMBERS, rel=0.001)
    assert rounded[0].parts["matrices in bf16"] == 0
    assert rounded[1].parts["reference"] == rounded[0].parts["copy for publishing"] == 2 * NUMBERS


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_what_is_held_in_turns_counts_once(qwen, weights):
    """All of a step but weights and moments, and all of vLLM but its graphs.

    The host holds the weights of the engine while it sleeps.
    """
    one = ("trainer.devices=1", "runtime.searchers=1", "runtime.use=local", "runtime.lag=")
    one = (*one, f"trainer.weights={weights}")
    trainer, searcher, _ = needs(qwen, *one, gpus="1x80").processes
    asleep = needs(qwen, *one, "runtime.colocate=sleep", gpus="1x80")
    between = ("CUDA", "weights", "moments")
    held = sum(size for part, size in trainer.parts.items() if part not in between)
    engine = sum(searcher.parts[p] for p in ("engine", "its activations and graphs", "KV cache"))
    assert (held > engine) == (weights == "fp32")
    total = trainer.total + searcher.total
    assert asleep.excess()[0] == pytest.approx(total - min(held, engine - 1e9))
    awake = needs(qwen, *one, gpus="1x80").needed()[None]
    assert asleep.needed()[None] - awake == 2 * NUMBERS  # the sleeping engine's weights


def test_pinned_memory_is_counted_in_powers_of_two(qwen):
    """The copy for a checkpoint, and the rows of ranks; on a CPU, nothing is pinned."""
    layer = 2 * (3584**2 + 3584 * 512) + 3 * 3584 * 18_944 + 3584 + 2 * 512 + 2 * 3584
    assert 28 * layer + 2 * 152_064 * 3584 + 3584 == NUMBERS
    layer = 2 * (2**24 + 2**21) + 3 * 2**27 + 2**12 + 2 * 2**9 + 2 * 2**12
    rounded = 28 * layer + 2 * 2**30 + 2**12
    of = needs(qwen, gpus="8x80")
    parts = of.processes[-1].parts
    assert parts["copy for a checkpoint"] == pytest.approx(12 * rounded)
    assert parts["weights in transit"] == pytest.approx(2 * (4 * NUMBERS + 2 * rounded))
    on_cpu = replace(of, machine=Machine(0, 0, 1e12))
    assert on_cpu.processes[-1].parts["copy for a checkpoint"] == 12 * NUMBERS


def test_one_card_holds_the_frozen_model_of_lora_twice(qwen):
    """In trainer and vLLM; on Ray, searchers have a reference of their own."""
    lora = ("policy.lora.r=16", "runtime.searchers=1", "trainer.devices=1", "runtime.lag=")
    local = needs(qwen, *lora, "runtime.use=local", gpus="1x80").processes[1].parts
    apart = needs(qwen, *lora, gpus="2x80").processes[1].parts
    assert "reference" not in local and apart["reference"] > 2 * NUMBERS
    assert local["engine"] == 2 * NUMBERS  # without adapters
    assert local["engine"] + local["KV cache"] + 2e9 == pytest.approx(0.65 * 80e9)


def test_a_step_in_parts_of_memory(qwen):
    """The head's gradient beside the sum of others, and in bf16 one weight at a time in fp32."""
    head = QWEN.vocab_size * QWEN.hidden_size
    one = ("trainer.devices=1", "trainer.token_budget=64", "sampling.max_tokens=64")
    parts = needs(qwen, *one).processes[0].parts
    assert parts["gradient of the LM head"] == 4 * head
    assert "gradient of the LM head" not in needs(qwen, *one, "policy.lora.r=4").processes[0].parts
    parts = needs(qwen, *one, "trainer.weights=bf16").processes[0].parts
    assert parts["update of a weight"] == 18 * head and "activations" not in parts


def test_a_pass_keeps_one_attention_mask_or_one_in_each_layer(qwen, tmp_path):
    windows = tmp_path / "windows"
    shutil.copytree(qwen, windows)
    Qwen2Config(**QWEN.to_dict() | WINDOWS).save_pretrained(windows)
    kept = {}
    for model in (qwen, windows):
        given = ("policy.autocast=off", "policy.gradient_checkpointing=false")
        kept[model] = needs(model, "policy.attention=sdpa", *given, gpus="1x80")._activations()
    scores = group(300, 2, 3072)[2]  # of the two responses that fit the budget
    assert kept[windows] - kept[qwen] == 27 * 4 * scores


def test_flex_attention_keeps_no_mask_and_shares_the_prompts_keys(qwen):
    """Its rows are packed, at any length; with SDPA, each response has its own keys and mask."""
    both = [
        ("policy.gradient_checkpointing=false", f"policy.attention={a}") for a in ("flex", "sdpa")
    ]
    flex, sdpa = (needs(qwen, *settings)._activations() for settings in both)
    prompt, response = 300, 3072 - 1
    tokens = prompt + 2 * response  # of the two responses that fit the budget
    assert flex == 28 * tokens * (34 * 3584 + 8 * 18_944)
    keys, mask = 2 * prompt, prompt**2 + 2 * response * (prompt + response)
    assert sdpa - flex == 28 * keys * 4 * 3584 + 2 * mask


def test_advice_leaves_out_what_is_set(qwen):
    one = ("trainer.devices=1", "runtime.searchers=1", "runtime.use=local", "runtime.lag=")
    told = needs(qwen, *one, "policy.lora.r=16", gpus="1x24").advice()
    assert "policy.lora" not in told and "gradient_checkpointing" not in told
    assert "devices" not in told and "runtime.colocate=sleep, or a lower" in told


def test_the_smoke_run_says_what_it_needs(tmp_path):
    """The table in its file is that of the formula."""
    script = module_at(ROOT / "scripts" / "write_memory.py")
    file = ROOT / "experiments" / "gpu_smoke.toml"
    small, large = "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-7B"
    for name in (small, large):
        script.MODELS[name].save_pretrained(tmp_path / name)
    variants = {
        "1.5B, LoRA": ("1x24", small, []),
        "7B, LoRA": ("1x80", large, []),
        "1.5B, all weights": ("1x80", small, ["policy.lora=", "trainer.learning_rate=1e-6"]),
    }
    for name, (gpus, model, more) in variants.items():
        config = with_defaults(load(file, [f"policy.model={tmp_path / model}", *more]))
        need = MemoryEstimate.of(config, planned_machine(gpus), 200)
        total, cache = need.needed()[0] / 1e9, need._engine()["KV cache"] / 1e9
        row = rf"^#   {re.escape(name)} +{total:.1f} of {gpus[2:]} +{cache:.1f}$"
        assert re.search(row, file.read_text(), re.M), (name, total, cache)


def test_the_table_of_experiments_is_that_of_the_page():
    script = module_at(ROOT / "scripts" / "write_memory.py")
    page = (ROOT / "docs" / "scaling.md").read_text()
    assert script.page(page) == page, "type python scripts/write_memory.py"


def test_what_is_said_about_the_math_run_is_in_the_table():
    page = (ROOT / "docs" / "scaling.md").read_text()
    (row,) = re.findall(rf"^\| `{MATH.name}` \| (.+?) \|$", page, re.M)
    group_tokens, _, _, four, eight, _ = row.split(" | ")
    budgets, sizes = [], []
    for cell in (four, eight):
        budget, both = cell.removeprefix("all, ").split(": ")
        budgets.append(budget)
        sizes.append([f"{float(gb):.0f}" for gb in both.split(" / ")])
    assert budgets[1] == group_tokens
    text = " ".join((ROOT / "docs" / "performance.md").read_text().split())
    assert f"a group has {group_tokens} tokens" in text and f"has {budgets[0]} tokens" in text
    (one, other), (rank, searcher) = sizes
    for file in MATH.parent.glob("math_qwen7b_*.toml"):
        text = file.read_text()
        assert f"two ranks of the trainer need {one} GB each, two searchers {other} GB." in text
        assert f" run a whole group in one pass: {rank} and {searcher} GB.\n" in text

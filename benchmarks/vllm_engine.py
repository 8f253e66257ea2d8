"""Measure the vLLM engine beside vLLM itself and beside the `transformers` engine.

    .venv-vllm/bin/python benchmarks/vllm_engine.py --model FOLDER

`make test-vllm` makes the environment. Four claims: our engine against `LLM.generate` with the
same sampling parameters; whole searches, with reward and reference, against the `transformers`
engine; log-probs after an update against the trainer's; and the time for which weight updates wait
for running responses, as a share of the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from _measure import Row, alternate, arguments, in_bf16, need_model, record, row, skip
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.config.schema import load
from tba.config.tables import PolicyTable
from tba.engines.vllm import ENVIRONMENT, VLLM
from tba.learn.policy import Policy
from tba.learn.publish import answer
from tba.models.lora import load_adapted
from tba.models.pretrained import load_model, load_text
from tba.prompt import Prompt
from tba.search.searcher import Searcher
from tba.setup.setup import check
from tba.types import Sampling, collate_tokens
from tba.weights import Direct, published, trained

PARTS = ("raw", "search", "gap", "drain")
REWARD = "def length(completions, **columns):\n    return [len(c) / 100 for c in completions]\n"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rows-of", default=__file__, help="name under which the rows are kept")
    options = parser.parse_args()
    if find_spec("vllm") is None:
        skip("vLLM is not installed here; run this with .venv-vllm/bin/python")
    model = need_model(options)
    device = options.device
    tiny = options.tiny
    os.environ.update(ENVIRONMENT)
    if "raw" in options.parts:
        rows = beside_raw(model, device, 8 if tiny else 64, 8 if tiny else 64, options.repeats)
        record(options.rows_of, rows, options, part=True)
    if "search" in options.parts:
        rows = [beside_transformers(model, device, 8 if tiny else 32, options.repeats)]
        record(options.rows_of, rows, options, part=True)
    if "gap" in options.parts:
        record(options.rows_of, gaps(model, device), options, part=True)
    if "drain" in options.parts:
        for every in (1, 10):
            rows = [drained(model, every, steps=2 if tiny else max(12, 3 * every))]
            record(options.rows_of, rows, options, part=True)


def beside_raw(model: str, device: str, prompts: int, tokens: int, repeats: int) -> list[Row]:
    """Both sides generate as many tokens after new random prompts of 100 tokens."""
    policy = PolicyTable(model=model)
    text = load_text(policy)
    endless = replace(text, eos_ids=frozenset())
    share = 0.35  # of a GPU's memory, for each side
    bf16 = in_bf16()
    ours = VLLM(
        policy, endless, device, bf16, Sampling(1, 1.0, tokens),
        max_num_seqs=64, kv_cache_gib=1, gpu_memory_utilization=share,
    )  # fmt: skip
    from vllm import LLM, SamplingParams

    # with prompts in pieces, vLLM 0.32 fails on a CPU where requests have seeds
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(2048, text.context)}
    raw = LLM(
        model=model, dtype="bfloat16" if bf16 else "float32", max_num_seqs=64,
        kv_cache_memory_bytes=2**30, enforce_eager=device == "cpu", generation_config="vllm",
        logprobs_mode="processed_logprobs", max_model_len=text.context,
        gpu_memory_utilization=share, **(whole if device == "cpu" else {}),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    seeds = iter(range(10**9))

    def new_prompts() -> list[np.ndarray]:
        ids = rng.integers(100, len(text.tokenizer) - 100, (prompts, 100))
        return list(ids.astype(np.int32))

    def generate_raw(same: bool) -> None:
        own = {"logprobs": 0, "detokenize": False} if same else {}
        parameters = []
        for _ in range(prompts):
            seed = next(seeds) if same else None
            parameters.append(
                SamplingParams(
                    temperature=1.0, max_tokens=tokens, ignore_eos=True, seed=seed, **own
                )
            )
        inputs = [{"prompt_token_ids": ids.tolist()} for ids in new_prompts()]
        raw.generate(inputs, parameters, use_tqdm=False)

    sides: dict[str, Callable[[], object]] = {
        "ours": lambda: ours.generate(new_prompts(), Sampling(1, 1.0, tokens), next(seeds)),
        "LLM.generate": lambda: generate_raw(True),
        "LLM.generate, plain": lambda: generate_raw(False),
    }
    seconds = alternate(sides, repeats)
    ours.close()
    raw.llm_engine.engine_core.shutdown()  # now, not in the middle of the next part
    where = "" if device == "cpu" else f" on {torch.cuda.get_device_name()}"
    name = f"vLLM engine, {prompts} x (100 + {tokens} tokens){where}"
    rows = []
    same = f"the engine has our settings: {'no chunked prefill, ' if device == 'cpu' else ''}"
    same += f"processed log-probs, {'bf16' if bf16 else 'fp32'}"
    for peer, note, goal in (
        ("LLM.generate", "the same seeds and log-probs", "ratio >= 0.95"),
        ("LLM.generate, plain", "the peer has no seeds and no log-probs, and makes text", None),
    ):
        note = f"{note}; {same}"
        rows.append(
            row(name, seconds["ours"], "s", seconds[peer], peer_is=peer, note=note, goal=goal)
        )
    return rows


def searcher(model: str, engine: str, device: str, folder: Path, tokens: int) -> Searcher:
    """Return a searcher of prompts of about 100 tokens, with a reward that costs nothing."""
    (folder / "length.py").write_text(REWARD)
    words = ["once", "upon", "a", "time", "there", "was", "little", "cat", "who", "lived", "near"]
    rng = np.random.default_rng(0)
    lines = [json.dumps({"prompt": " ".join(rng.choice(words, 90))}) for _ in range(72)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    settings = [
        f"policy.model={model}", f"engine={engine}", "task=custom", f"task.data={folder}",
        "task.held_out_size=8", f"task.reward={folder}/length.py:length", "eval.prompts=0",
        "sampling.samples=16", "trainer.group_size=16", "trainer.batch_size=64",
        f"sampling.max_tokens={tokens}",
    ]  # fmt: skip
    return check(load(None, settings)).search_setup().build(device, in_bf16())


def beside_transformers(model: str, device: str, tokens: int, repeats: int) -> Row:
    """Search 8 prompts with 16 responses each, in two tasks at once."""
    with tempfile.TemporaryDirectory() as folder:
        engines = ("vllm", "transformers")
        place = Path(folder)
        both = {engine: searcher(model, engine, device, place, tokens) for engine in engines}
        prompts = check_prompts(Path(folder))
        seeds = iter(range(10**9))

        def search(engine: str) -> None:
            """Search all prompts in two tasks at once, as an actor's threads do."""
            tasks = [prompts[:4], prompts[4:]]
            with ThreadPoolExecutor(len(tasks)) as threads:
                for task in [threads.submit(both[engine].search, t, next(seeds)) for t in tasks]:
                    task.result()

        sides: dict[str, Callable[[], object]] = {
            engine: partial(search, engine) for engine in engines
        }
        seconds = alternate(sides, repeats)
        for each in both.values():
            each.close()
    name = f"search with reference, 8 x 16 x {tokens} tokens, prompts of 100: vllm"
    peer = seconds["transformers"]
    note = "bf16" if in_bf16() else "fp32"
    return row(
        name, seconds["vllm"], "s", peer, peer_is="transformers", goal="ratio >= 1.6", note=note
    )


def check_prompts(folder: Path) -> list[Prompt]:
    lines = (folder / "train.jsonl").read_text().splitlines()
    return [Prompt(str(i), json.loads(line)["prompt"]) for i, line in enumerate(lines[:8])]


def gaps(model: str, device: str) -> list[Row]:
    """Update engines in fp32 to other weights than theirs, and compare log-probs after it."""
    with tempfile.TemporaryDirectory() as folder:
        policies = {
            "tied": PolicyTable(model=model),
            "untied": PolicyTable(model=untied(model, folder)),
            "LoRA": PolicyTable(model=model, lora={"r": 16, "alpha": 32}),
        }
        return [gap(kind, policy, device) for kind, policy in policies.items()]


def untied(model: str, folder: str) -> str:
    """Write the model with a head of its own, twice the embedding, and return the folder."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded.config.tie_word_embeddings = False
    loaded.lm_head.weight = torch.nn.Parameter(2 * loaded.get_input_embeddings().weight.detach())
    loaded.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def gap(kind: str, table: PolicyTable, device: str) -> Row:
    """Return the row of the mean |difference| of the probe, and of 2 x 8 generated responses."""
    text = load_text(table)
    rng = np.random.default_rng(0)
    lora = table.lora is not None
    moved = load_adapted(table, bf16=False) if lora else load_model(table, torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trained(moved).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
    policy = Policy(moved, 0.7)
    prompts = [rng.integers(100, len(text.tokenizer) - 100, n).astype(np.int32) for n in (129, 90)]
    sampling = Sampling(8, 0.7, 16)
    engine = VLLM(table, text, device, False, sampling, kv_cache_gib=1, gpu_memory_utilization=0.35)
    probe = answer(policy, collate_tokens(prompts[:1], [[rng.integers(100, 9000, 16)]]))
    weights = Direct().send(1, published(trained(moved), bf16=False), probe).payload
    started = time.perf_counter()
    of_probe = engine.load_weights(weights)
    took = time.perf_counter() - started
    groups = engine.generate(prompts, sampling, seed=3)
    engine.close()
    differences = []
    for prompt, group in zip(prompts, groups, strict=True):
        with torch.no_grad():
            logp = policy.logp(collate_tokens([prompt], [[c.tokens for c in group]]))[0]
        for own, c in zip(logp, group, strict=True):
            differences.append(np.abs(own[: len(c.tokens)].numpy() - c.logp).mean())
    note = f"for 16 responses; for the probe, also from the prefix cache: {of_probe:.1e}"
    note += f"; the update and its verification took {took:.2f} s"
    return row(
        f"vLLM engine, fp32: mean log-prob gap after an update, {kind}",
        float(np.mean(differences)), "nats", goal="value <= 1e-4", note=note,
    )  # fmt: skip


def drained(model: str, every: int, steps: int) -> Row:
    """Train asynchronously; return the share of the run for which updates waited in searchers."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "length.py").write_text(REWARD)
        lines = [json.dumps({"prompt": f"Tell me a story about {i} cats."}) for i in range(500)]
        (Path(folder) / "train.jsonl").write_text("\n".join(lines) + "\n")
        run = Path(folder) / "run"
        settings = [
            f"policy.model={model}", "engine=vllm", "task=custom", f"task.data={folder}",
            f"task.reward={folder}/length.py:length", "eval.prompts=0", "sampling.samples=8",
            "trainer.group_size=8", "trainer.batch_size=32", "sampling.max_tokens=64",
            f"run.steps={steps}", f"run.folder={run}", f"runtime.publish_every={every}",
            "checkpoint.every=0", "runtime.max_reuse=inf",  # publications at the trainer's own pace
        ]  # fmt: skip
        subprocess.run([sys.executable, "-m", "tba.cli", "train", *settings], check=True)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [r for r in rows if "loss" in r]
    share = sum(r["sync/drain"] for r in rows) / rows[-1]["time"]
    note = f"updates waited for running responses; of the seconds of a run of {steps} steps"
    return row(f"sync/drain at publish_every={every}", share, "share of the run", note=note)


if __name__ == "__main__":
    main()

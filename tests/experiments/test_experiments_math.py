"""The experiments on GSM8K and MATH: their settings are the paper's, and the small ones run."""

import json
import math
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tba
from tba.cli import train_command
from tba.config.schema import load
from tba.setup.setup import check

EXPERIMENTS = Path(__file__).parents[2] / "experiments"

MATH: dict[str, dict[str, Any]] = {
    "run": {"steps": 400},
    "policy": {"model": "Qwen/Qwen2.5-7B"},
    "task": {"use": "math", "held_out_data": "HuggingFaceH4/MATH-500"},
    "sampling": {"samples": 16, "temperature": 1.0, "max_tokens": 3072},
    "strategy": {"use": "recent"},  # no replay
    "trainer": {
        "batch_size": 32 * 16, "group_size": 16, "learning_rate": 1e-6, "schedule": "constant",
        "warmup_steps": 0, "betas": [0.9, 0.99], "weight_decay": 0.01, "max_grad_norm": 1.0,
    },
    "runtime": {"lag": 2},
    "eval": {"prompts": 500},
}  # fmt: skip
GSM8K: dict[str, dict[str, Any]] = {
    "run": {"steps": 1000},
    "policy": {"model": "realtreetune/rho-1b-sft-GSM8K"},
    "task": {
        "use": "gsm8k", "prompt": "[MATH_TASK] Problem:\n{question}\n\nSolution:", "chat": "off",
        "shots": 0, "format_weight": 0.0,
    },
    "sampling": {"samples": 24, "temperature": 0.7, "max_tokens": 512},
    "objective": {"use": "tb", "beta": {"start": 0.012, "end": 0.004, "steps": 500}},
    # what is not recent is drawn uniformly
    "strategy": {"use": "mixture", "recent": 0.95, "reward": 0.0, "window": 2},
    "replay": {"per_prompt": 100, "first_fill": round(500 / 24)},
    "trainer": {
        "batch_size": 7 * 20, "group_size": 20, "learning_rate": 1e-5, "warmup_steps": 50,
        "schedule": "warmup_stable_decay", "decay_steps": 500, "betas": [0.9, 0.999],
        "weight_decay": 0.0, "max_grad_norm": math.inf,
    },
    "runtime": {"publish_every": 2, "max_reuse": math.inf},
    "eval": {"prompts": 1319},
}  # fmt: skip
TBA_PRIME = {"use": "tba_prime", "beta": 0.005, "log_ratio_clamp": 10.0}
TBA_PRIME |= {"importance": "token", "importance_cap": 8.0}
PAPER: dict[str, dict[str, dict[str, Any]]] = {
    "gsm8k_rho1b": GSM8K,
    "math_qwen7b_tba_prime": {
        **MATH,
        "objective": TBA_PRIME,
        "policy": {**MATH["policy"], "reset_reference_every": 50},
    },
    "math_qwen7b_dr_grpo": {**MATH, "objective": {"use": "dr_grpo", "beta": 0.0, "clip": 0.2}},
}
"""The paper's settings (arXiv 2503.18929), by table."""

OVERRIDDEN = ("model", "held_out_data", "prompts")
SMALL = ("gsm8k_smollm2", "math_small")


@pytest.fixture(scope="module")
def fakes(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings that name a small model with a chat template, and a few problems."""
    characters = [*string.printable.replace("\n", ""), "\n"]
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    vocabulary = ["<pad>", "<eos>", *characters]
    model = make_model(vocabulary=vocabulary, context=8192, template=template)
    data = tmp_path_factory.mktemp("data")
    rows = []
    for i in range(40):
        asked = f"{i} + {i}?"
        rows.append({"question": asked, "problem": asked, "answer": str(2 * i)})
    for split, own in (("train", rows[:24]), ("test", rows[24:])):
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    # the tokenizer has no token for two line ends
    return [f"policy.model={model}", f"task.data={data}", "eval.prompts=16", "task.allow_loss=1"]


def settings_of(name: str, fakes: list[str]) -> list[str]:
    """Return the stand-ins for an experiment; vLLM, if it names that, may not be installed."""
    given = load(EXPERIMENTS / f"{name}.toml")
    both = given.task.options.get("held_out_data") is not None
    folder = fakes[1].partition("=")[2]
    more = [f"task.held_out_data={folder}"] if both else []
    return [*fakes, *more, *(["engine=transformers"] if given.engine.use == "vllm" else [])]


@pytest.mark.parametrize("name", [*PAPER, *SMALL])
def test_a_dry_run_accepts_it(name, fakes, capsys):
    """And what it would run has the paper's settings, defaults included."""
    train_command([str(EXPERIMENTS / f"{name}.toml"), *settings_of(name, fakes)], dry_run=True)
    out = capsys.readouterr().out
    assert "config OK (dry run): 24 training prompts, evaluating 16 of 16 held-out prompts" in out
    checked = check(load(EXPERIMENTS / f"{name}.toml", settings_of(name, fakes))).config.nested()
    for table, options in PAPER.get(name, {}).items():
        own = {key: value for key, value in options.items() if key not in OVERRIDDEN}
        assert {key: checked[table].get(key) for key in own} == own


@pytest.mark.parametrize("name", PAPER)
def test_hub_names_and_held_out_prompts_are_the_papers(name):
    given = load(EXPERIMENTS / f"{name}.toml")
    assert given.policy.model == PAPER[name]["policy"]["model"]
    assert given.task.options.get("held_out_data") == PAPER[name]["task"].get("held_out_data")
    assert given.eval.prompts == PAPER[name]["eval"]["prompts"]


@pytest.mark.parametrize("name", SMALL)
def test_a_small_one_runs(name, fakes, tmp_path):
    """All of its steps, in this process, with answers that are graded."""
    more = [f"run.folder={tmp_path / 'run'}", "runtime.use=local", "sampling.max_tokens=8"]
    more += ["log.console=off", "log.report_to=[]"]
    config = load(EXPERIMENTS / f"{name}.toml", [*settings_of(name, fakes), *more])
    result = tba.train(config)
    assert (result.summary.finished, result.summary.steps) == (True, config.run.steps)
    assert not result.summary.rejected
    last, n = result.summary.last, config.eval.samples
    assert {"greedy_pass@1", f"avg@{n}", f"avg@{n}_stderr"} <= last.keys()
    assert last[f"avg@{n}"] == last["sampled_pass@1"]

"""TRL's own reward functions, by dotted name: a run in the environment of the benchmarks."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from build import environment, python_with_trl
from conftest import CONTENTS, VOCABULARY

from tba.runs.folder import METRICS, SAMPLES, read

CHAT = [
    {"prompt": [{"role": "user", "content": f"{i}: what is 1/3?"}], "solution": r"$\frac{1}{3}$"}
    for i in range(8)
]
SAID = [
    r"<think>One divided by three.</think> \boxed{\frac{1}{3}}",
    r"<think>What is one divided by two?</think> \boxed{\frac{1}{2}}",
    r"\boxed{\frac{1}{3}}",
    "I do not know, and I have thought about it for a long time.",
]
CHARACTERS = [*VOCABULARY, *sorted({*"".join(SAID), *"what is?:"} - {*VOCABULARY})]
TRL_RUN = """
run = {{ folder = "run", steps = 4 }}
policy = {{ model = "{model}" }}
engine = {{ use = "scripted", answers = {answers} }}
runtime = {{ use = "local", prompts_per_task = 3 }}
sampling = {{ samples = 32, max_tokens = 80 }}
trainer = {{ batch_size = 8, group_size = 4 }}
eval = {{ prompts = 2, samples = 2, k = [2] }}
log = {{ console = "off", report_to = [], sample_every = 1 }}

[task]
use = "custom"
data = "rows.jsonl"
held_out_size = 2
reward = [
    "trl.rewards:think_format_reward",
    "trl.rewards:accuracy_reward",
    {{ use = "trl.rewards:get_soft_overlong_punishment", {options} }},
]
reward_weights = [0.5, 2.0, 1.0]
"""
OPTIONS = "max_completion_len=60, soft_punish_cache=16"
BY_HAND = f"""
import json, sys
from trl.rewards import accuracy_reward, get_soft_overlong_punishment, think_format_reward

texts, solution, lengths = json.load(sys.stdin)
completions = [[{{"role": "assistant", "content": text}}] for text in texts]
overlong = get_soft_overlong_punishment({OPTIONS})
print(json.dumps({{
    "think_format_reward": think_format_reward(completions),
    "accuracy_reward": accuracy_reward(completions, [solution] * len(texts)),
    "soft_overlong_punishment_reward": overlong([[0] * length for length in lengths]),
}}))
"""


@pytest.fixture(scope="module")
def run_with_trl(
    tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., Path]
) -> tuple[Path, dict[str, list[float]]]:
    """A run with three functions of TRL, and what they return for SAID when called by hand."""
    folder = tmp_path_factory.mktemp("trl")
    model = make_model(vocabulary=CHARACTERS, context=128, template=CONTENTS)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHAT))
    given = {"model": model, "answers": json.dumps(SAID), "options": OPTIONS}
    (folder / "run.toml").write_text(TRL_RUN.format(**given))

    def output(*arguments: str, given: str = "") -> str:
        command = [python_with_trl(), *arguments]
        done = subprocess.run(
            command, input=given, cwd=folder, env=environment(folder), stdout=subprocess.PIPE,
            text=True, check=True, timeout=240,
        )  # fmt: skip
        return done.stdout

    output("-m", "tba.cli", "train", "run.toml")
    lengths = [len(text) + 1 for text in SAID]  # characters and EOS
    by_hand = output("-c", BY_HAND, given=json.dumps([SAID, CHAT[0]["solution"], lengths]))
    return folder / "run", json.loads(by_hand)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trls_functions_give_the_same_numbers_as_called_by_hand(run_with_trl):
    """By dotted name and with conversational prompts, in a run."""
    folder, by_hand = run_with_trl
    assert by_hand == {
        "think_format_reward": [1.0, 1.0, 0.0, 0.0],
        "accuracy_reward": [1.0, 0.0, 1.0, 0.0],
        "soft_overlong_punishment_reward": [-0.8125, -1.0, 0.0, -1.0],
    }
    rewards = [0.5 * f + 2.0 * a + p for f, a, p in zip(*by_hand.values(), strict=True)]
    samples = read(folder / SAMPLES)
    assert {row["completion"] for row in samples if row["kind"] == "train"} == {*SAID}
    for row in samples:
        assert row["reward"] == rewards[SAID.index(row["completion"])]
    evaluated = [row for row in samples if row["kind"] == "eval"]
    assert evaluated
    for row in evaluated:
        place = SAID.index(row["completion"])
        items = {f"rewards/{name}": values[place] for name, values in by_hand.items()}
        assert items.items() <= row["notes"].items()
        assert row["notes"]["gold_parsed"].startswith("[1/3")
    for row in read(folder / METRICS):
        if "loss" in row:
            assert {f"rewards/{name}/mean" for name in by_hand} <= row.keys()

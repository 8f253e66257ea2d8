"""A real model says the same to a program over HTTP as to an environment in the searcher."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tba.config.schema import load
from tba.models.pretrained import Tokenizer
from tba.runs.setup import check
from tba.search.result import SearchResult
from tba.types import Group, Trajectory

ROOT = Path(__file__).parents[2]
SIDES = ROOT / "benchmarks" / "_agents.py"
MODELS = Path(os.environ.get("TBA_MODELS", Path.home() / ".cache" / "tba-models"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (MODELS / "smollm2").is_dir(), reason="needs $TBA_MODELS/smollm2"),
]


def test_a_program_samples_what_an_environment_would(tmp_path):
    """32 sessions over HTTP with calls: tokens, masks and log-probs of dialogues in the searcher.

    A dialogue may end earlier, because its limit counts the tool's tokens, too.
    """
    pytest.importorskip("openai")
    rows = [{"a": 12, "b": 34}, *({"a": 21 + 7 * n, "b": 89 - 6 * n} for n in range(6))]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shot = '<tool_call>{"name": "multiply", "arguments": {"a": {a}, "b": {b}}}</tool_call>'
    dialogues = [
        "task=custom", "task.chat=on", "task.prompt=What is {a} * {b}?", "task.shots=1",
        f"task.shot_response={json.dumps(shot)}", "task.max_turns=2",
        f"task.environment={SIDES}:Calculator", f"task.reward={SIDES}:nothing",
    ]  # fmt: skip
    sessions = ["task=agent", f"task.rollout={ROOT}/recipes/calculator.py:with_tool"]
    text, by_tool = searched(tmp_path, data, dialogues, 0)
    _, by_program = searched(tmp_path, data, sessions, 1)
    assert by_tool.stats.counts["tools/calls"] >= 8
    whole = 0
    tokens = 0
    for a, b in zip(by_tool.groups, by_program.groups, strict=True):
        for t, u in zip(a.trajectories, b.trajectories, strict=True):
            own, ids, logp = spoken(a, t)
            same, as_ids, as_logp = spoken(b, u)
            end = min(len(own), len(same))
            if "Error: " in text.decode(t.tokens):  # programs word it in another way
                end = len(a.prompt_tokens) + int(t.sampled.argmin())
            unlike = np.flatnonzero(ids[:end] != as_ids[:end])
            whole += not len(unlike)
            end = int(unlike[0]) if len(unlike) else end
            assert np.array_equal(own[:end], same[:end])
            np.testing.assert_allclose(logp[:end], as_logp[:end], atol=1e-4)
            tokens += int(own[:end].sum())
    print(f"{whole} of 32 sessions, {tokens} sampled tokens are the same")
    assert whole >= 28  # in others, a token was between two that rounding tells apart


def searched(
    folder: Path, data: Path, settings: list[str], first: int
) -> tuple[Tokenizer, SearchResult]:
    """Search for four prompts, from the `first` on, with 8 samples of each."""
    config = load(
        None,
        [
            f"policy.model={MODELS / 'smollm2'}", "policy.autocast=off", "engine.dtype=fp32",
            f"run.folder={folder}/run", "runtime.use=local", f"task.data={data}",
            "task.held_out_size=1", "sampling.samples=8", "sampling.max_tokens=96",
            "eval.prompts=0", "trainer.group_size=8", "trainer.batch_size=8",
            *settings,
        ],
    )  # fmt: skip
    parts = check(config)
    searcher = parts.search_setup().build("cpu", False)
    try:
        return searcher.text, searcher.search(parts.prompts[first : first + 4], seed=0)
    finally:
        searcher.close()


def spoken(group: Group, t: Trajectory) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mask, the tokens and the log-probs of a response with its prompt."""
    head = np.zeros(len(group.prompt_tokens), np.float32)
    own = np.ones(len(t.tokens), bool) if t.sampled is None else t.sampled
    return (
        np.concatenate([head.astype(bool), own]),
        np.concatenate([group.prompt_tokens, t.tokens]),
        np.concatenate([head, t.behavior_logp]),
    )

"""A real model says the same to a program over HTTP as to an environment in the searcher."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tba.config.schema import load
from tba.search.result import SearchResult
from tba.search.searcher import Searcher
from tba.setup.setup import check
from tba.streams import Use, seed_of
from tba.types import Group, Trajectory

ROOT = Path(__file__).parents[2]
SIDES = ROOT / "benchmarks" / "_agents.py"
MODELS = Path(os.environ.get("TBA_MODELS", Path.home() / ".cache" / "tba-models"))
PROMPTS = 5
SAMPLES = 8

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (MODELS / "smollm2").is_dir(), reason="needs $TBA_MODELS/smollm2"),
]


def test_a_program_samples_what_an_environment_would(tmp_path):
    """Sessions over HTTP with calls: tokens, masks and log-probs of dialogues in the searcher.

    A dialogue may end earlier, because its limit counts the tool's tokens, too. Where a session is
    another one, its random number was between two tokens that the rounding of a batch tells apart.
    """
    pytest.importorskip("openai")
    rows = [{"a": 12, "b": 34}, *({"a": 21 + 7 * n, "b": 89 - 6 * n} for n in range(PROMPTS + 2))]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shot = '<tool_call>{"name": "multiply", "arguments": {"a": {a}, "b": {b}}}</tool_call>'
    dialogues = [
        "task=custom", "task.chat=on", "task.prompt=What is {a} * {b}?", "task.shots=1",
        f"task.shot_response={json.dumps(shot)}", "task.max_turns=2",
        f"task.environment={SIDES}:Calculator", f"task.reward={SIDES}:nothing",
    ]  # fmt: skip
    sessions = ["task=agent", f"task.rollout={ROOT}/recipes/calculator.py:with_tool"]
    searcher, by_tool = searched(tmp_path, data, dialogues, 0)
    _, by_program = searched(tmp_path, data, sessions, 1)
    assert by_tool.stats.counts["tools/calls"] >= 8
    whole = 0
    tokens = 0
    for i, (a, b) in enumerate(zip(by_tool.groups, by_program.groups, strict=True)):
        for k, (t, u) in enumerate(zip(a.trajectories, b.trajectories, strict=True)):
            own, ids, logp = spoken(a, t)
            same, as_ids, as_logp = spoken(b, u)
            end = min(len(own), len(same))
            if "Error: " in searcher.text.decode(t.tokens):  # programs word it in another way
                end = len(a.prompt_tokens) + int(t.sampled.argmin())
            unlike = np.flatnonzero(ids[:end] != as_ids[:end])
            whole += not len(unlike)
            if len(unlike):
                end = int(unlike[0])
                both = [int(ids[end]), int(as_ids[end])]
                told = margin(searcher, SAMPLES * i + k, own[: end + 1], ids[:end], both)
                print(f"session {SAMPLES * i + k} at token {end}: {told}")
            assert np.array_equal(own[:end], same[:end])
            np.testing.assert_allclose(logp[:end], as_logp[:end], atol=1e-4)
            tokens += int(own[:end].sum())
    print(f"{whole} of {PROMPTS * SAMPLES} sessions, {tokens} sampled tokens are the same")
    assert whole >= 32


def margin(
    searcher: Searcher, sample: int, own: np.ndarray, ids: np.ndarray, both: list[int]
) -> str:
    """Return how near the random number behind `ids` was to both of these next tokens.

    They are neighbours in the cumulative distribution, up to rounding.
    """
    starts = np.flatnonzero(own & ~np.append(False, own[:-1]))
    turn, place = len(starts) - 1, len(ids) - int(starts[-1])
    rng = np.random.default_rng(seed_of(0, Use.TURN, sample, turn))
    number = 1 - float(rng.random(place + 1, np.float32)[place])
    with torch.inference_mode():
        logits = searcher.engine.model(torch.from_numpy(ids).long()[None]).logits[0, -1].double()
    cumulative = logits.softmax(-1).cumsum(-1)
    gaps = []
    for token in both:
        above = number - float(cumulative[token])
        below = float(cumulative[token - 1]) - number if token else -number
        gaps.append(max(0.0, above, below))
    assert max(gaps) < 1e-5, gaps
    logp = logits.log_softmax(-1)[both].tolist()
    return f"tokens {both} with log-probs {logp}, {max(gaps):.1e} beside their boundary"


def searched(
    folder: Path, data: Path, settings: list[str], first: int
) -> tuple[Searcher, SearchResult]:
    """Search for PROMPTS prompts, from the `first` on, with SAMPLES samples of each."""
    config = load(
        None,
        [
            f"policy.model={MODELS / 'smollm2'}", "policy.autocast=off", "engine.dtype=fp32",
            f"run.folder={folder}/run", "runtime.use=local", f"task.data={data}",
            "task.held_out_size=1", f"sampling.samples={SAMPLES}", "sampling.max_tokens=96",
            "eval.prompts=0", f"trainer.group_size={SAMPLES}", f"trainer.batch_size={SAMPLES}",
            *settings,
        ],
    )  # fmt: skip
    parts = check(config)
    searcher = parts.search_setup().build("cpu", False)
    try:
        return searcher, searcher.search(parts.prompts[first : first + PROMPTS], seed=0)
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

"""Top-k and top-p; what becomes of responses that the token limit cuts off."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from build import config
from exact import toy_config
from torch import Tensor

from tba.config.schema import load
from tba.engines._choice import choose_tokens
from tba.engines.transformers import Transformers
from tba.engines.vllm import check_sampling
from tba.errors import NotFinite
from tba.open import run
from tba.runtime import TRUNCATED_AT_MOST, WINDOW, RejectionMonitor
from tba.search.evaluate import evaluate_held_out
from tba.search.result import SearchStats
from tba.search.searcher import Searcher
from tba.setup.setup import check
from tba.types import Sampling, Trajectory, Turn

LOGITS = torch.tensor([[1.0, -0.5, 0.0, 2.0, 1.5], [0.5, 0.4, -1.0, -torch.inf, 0.3]])
CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.5},
    "exploration": {"temperature": 0.7, "explore": 1.9},
    "top-k": {"top_k": 2},
    "top-k of all": {"top_k": 9},
    "top-p": {"top_p": 0.6},
    "both and temperature": {"top_k": 3, "top_p": 0.8, "temperature": 0.5},
    "both and exploration": {"top_k": 3, "top_p": 0.8, "explore": 1.7},
}


def by_hand(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities of one distribution, token by token."""
    p = logits.div(sampling.explore or sampling.temperature).softmax(0).tolist()
    ranked = sorted(range(len(p)), key=lambda token: -p[token])
    kept = ranked[: sampling.top_k or None]
    total, nucleus, before = sum(p[token] for token in kept), [], 0.0
    for token in kept:
        if before < sampling.top_p * total:
            nucleus.append(token)
        before += p[token]
    left = torch.tensor([p[token] if token in nucleus else 0.0 for token in range(len(p))])
    return left / left.sum()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_no_token_and_end_the_search(
    wrong, temperature, tiny_model, tmp_path
):
    """They name the version of the weights; no number is used as an index behind the tokens."""
    sampling = Sampling(1, temperature, 4)
    tokens, _ = choose_tokens(torch.full((2, 5), wrong), torch.ones(2, 3), sampling)
    assert tokens.min() >= 0 and tokens.max() < 5
    parts = check(config(tiny_model, tmp_path))
    engine = Transformers(parts.config.policy, parts.text, "cpu", False, sampling)
    engine.version = 7
    engine.model.lm_head.weight.data[3] = wrong
    with pytest.raises(NotFinite, match="the policy of version 7 gives logits"):
        engine.generate([np.array([2, 3], np.int32)], sampling, seed=0)


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_chosen_as_asked_and_log_probs_stay(case):
    """Evenly spaced numbers meet each token as often as its probability says."""
    sampling = Sampling(**{"samples": 1, "temperature": 1.0, "max_tokens": 1, **CASES[case]})
    uniform = (torch.arange(10_000) + 1).div(10_000).expand(2, -1)
    chosen, logp = choose_tokens(LOGITS, uniform, sampling)
    whole = (LOGITS / sampling.temperature).log_softmax(-1)
    torch.testing.assert_close(logp, whole.gather(1, chosen))
    counted = torch.stack([(chosen == token).float().mean(1) for token in range(5)], 1)
    expected = torch.stack([by_hand(row, sampling) for row in LOGITS])
    torch.testing.assert_close(counted, expected, atol=2e-4, rtol=0)


SETTINGS = {"top_k": "5", "top_p": "0.9"}


@pytest.mark.parametrize("objective", ["objective=grpo", "objective.importance_cap=2.0"])
@pytest.mark.parametrize("name", SETTINGS)
def test_objectives_that_compare_with_the_sampling_policy_refuse_them(
    name, objective, tiny_model, tmp_path
):
    setting = f"sampling.{name}={SETTINGS[name]}"
    parts = check(toy_config(tiny_model, tmp_path, setting))  # tb does not
    assert str(vars(parts.search_setup().sampling)[name]) == SETTINGS[name]
    with pytest.raises(ValueError, match=rf"sampling\.{name} does not work with objective"):
        check(toy_config(tiny_model, tmp_path, setting, objective))


def test_a_shift_refuses_samples_of_other_policies(toy_model, tmp_path):
    """Whatever adds them or changes how they are drawn, while the shift is not 0."""
    foreign = {
        "sampling.top_p=0.9": "sampling.top_p",
        "sampling.explore=[0.5, 2.0]": "sampling.explore",
        "replay.rollouts=rollouts.jsonl": "replay.rollouts",
        "strategy=reward": "replay by reward",
        "strategy=mixture": "replay by reward",
    }
    falling = "objective.shift={start=0.5, end=0.0, steps=9}"
    for setting, name in foreign.items():
        for shift in ("objective.shift=0.5", falling):
            told = rf"{name}.* does not work with objective\.use = 'tb' and these options"
            with pytest.raises(ValueError, match=told):
                check(toy_config(toy_model, tmp_path, "strategy=recent", setting, shift))
    for strategy in (["strategy=recent"], ["strategy=mixture", "strategy.reward=0.0"]):
        check(toy_config(toy_model, tmp_path, *strategy, falling))


@pytest.mark.parametrize("name", SETTINGS)
def test_vllm_needs_temperature_1(name):
    setting = f"sampling.{name}={SETTINGS[name]}"
    check_sampling(load(None, ["engine=vllm", setting]).sampling)
    with pytest.raises(ValueError, match=rf"{name} = .* 0\.7: .*set sampling\.temperature=1, or"):
        check_sampling(load(None, ["engine=vllm", setting, "sampling.temperature=0.7"]).sampling)


def searcher(model: Path, folder: Path, truncated: str) -> Searcher:
    """A searcher of the toy, about half of whose responses are cut off after two tokens."""
    settings = f"sampling.truncated={truncated}", "eval.prompts=1"
    return check(toy_config(model, folder, *settings)).search_setup().build("cpu", False)


def test_turns_that_run_together_are_as_they_are_alone(toy_model, tmp_path):
    """Some share a context with more turns than others do, and each has a limit of its own."""
    one = searcher(toy_model, tmp_path, "keep")
    contexts = [one.text.encode(p) for p in check(toy_config(toy_model, tmp_path)).prompts[:3]]
    limits = [replace(one.setup.sampling, max_tokens=1 + n % 3) for n in range(7)]
    chosen = zip([0, 1, 0, 2, 0, 0, 1], limits, strict=True)
    turns = [Turn(contexts[i], sampling, seed) for seed, (i, sampling) in enumerate(chosen)]
    together = one.engine.complete(turns)
    for turn, completion in zip(turns, together, strict=True):
        (alone,) = one.engine.complete([turn])
        assert completion.tokens.tolist() == alone.tokens.tolist()
        assert completion.finished == alone.finished
        np.testing.assert_allclose(completion.logp, alone.logp, atol=1e-5)
    assert len({completion.tokens.tobytes() for completion in together}) > 3
    one.close()


def kept(group: Sequence[Trajectory]) -> list[tuple[bytes, bool, float]]:
    return [(t.tokens.tobytes(), t.finished, t.reward) for t in group]


def test_responses_that_are_cut_off_are_kept_rejected_or_given_a_reward(toy_model, tmp_path):
    """Nothing else changes: not their group, and not the evaluations."""
    results, scores = {}, {}
    for truncated in ("keep", "reject", "-1.5"):
        one = searcher(toy_model, tmp_path, truncated)
        prompts = check(toy_config(toy_model, tmp_path)).prompts[:3]
        results[truncated] = one.search(prompts, seed=1)
        scores[truncated] = evaluate_held_out(one).scores
        one.close()
    groups = {name: [kept(g.trajectories) for g in r.groups] for name, r in results.items()}
    cut = sum(not finished for group in groups["keep"] for _, finished, _ in group)
    assert 0 < cut < 3 * 64
    assert groups["reject"] == [[t for t in group if t[1]] for group in groups["keep"]]
    for group, given in zip(groups["keep"], groups["-1.5"], strict=True):
        assert given == [t if t[1] else (t[0], False, -1.5) for t in group]
    rejected = {name: dict(r.stats.rejected) for name, r in results.items()}
    assert rejected == {"keep": {}, "reject": {"truncated": cut}, "-1.5": {}}
    assert {r.stats.counts["samples_generated"] for r in results.values()} == {3 * 64}
    for each in scores.values():
        del each["seconds"]
    assert scores["keep"] == scores["reject"] == scores["-1.5"]


def test_a_run_counts_what_it_rejects(toy_model, tmp_path):
    """The samples are those trained on and those in the summary, also where K is not reached."""
    folder = tmp_path / "run"
    summary = run(toy_config(toy_model, folder, "run.steps=2", "sampling.truncated=reject"))
    assert summary.finished and set(summary.rejected) == {"truncated"}
    assert 0 < summary.rejected["truncated"] < summary.samples_generated


def searched(kept: int, truncated: int) -> SearchStats:
    counts = Counter(samples_generated=kept + truncated)
    return SearchStats(counts, rejected=Counter(truncated=truncated))


def test_the_run_stops_when_all_are_cut_off_and_not_for_a_large_share():
    monitor, size = RejectionMonitor(0.5), WINDOW
    for _ in range(20):
        monitor.add(searched(kept=1, truncated=size))
    for _ in range(TRUNCATED_AT_MOST // size - 1):
        monitor.add(searched(kept=0, truncated=size))
    monitor.add(searched(kept=1, truncated=size))
    for _ in range(TRUNCATED_AT_MOST // size - 1):
        monitor.add(searched(kept=0, truncated=size))
    with pytest.raises(RuntimeError, match=r"the last 256 samples were all cut off .* raise samp"):
        monitor.add(searched(kept=0, truncated=size))

"""Top-k, min-p and repetition penalty; what becomes of responses that the token limit cuts off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from toy import toy_config

from tba.config.schema import Config, load
from tba.config.tables import PolicyTable
from tba.engines._choose import choose, seen_in
from tba.engines._vllm_checks import check_sampling
from tba.engines.transformers import Transformers
from tba.learn.policy import Policy
from tba.models.pretrained import load_text
from tba.run import run
from tba.runs.parts import check
from tba.search.evaluate import evaluate_held_out
from tba.search.rejections import TRUNCATED_AT_MOST, WINDOW, RejectionMonitor
from tba.search.result import SearchStats
from tba.search.searcher import Searcher
from tba.types import Completion, Prompt, Sampling, Trajectory, collate_tokens

LOGITS = torch.tensor([[1.0, -0.5, 0.0, 2.0, 1.5], [0.5, 0.4, -1.0, -2.0, 0.3]])
SEEN = torch.tensor([[True, True, False, False, False], [False, False, True, False, True]])
CASES: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 2},
    "top-k of all": {"top_k": 9},
    "min-p": {"min_p": 0.5},
    "penalty": {"repetition_penalty": 2.0},
    "bonus": {"repetition_penalty": 0.5},
    "penalty and temperature": {"repetition_penalty": 2.0, "temperature": 0.5},
    "all of them": {"repetition_penalty": 1.5, "min_p": 0.3, "top_k": 3, "top_p": 0.8},
}


def by_hand(logits: Tensor, seen: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities of one distribution, token by token."""
    own = logits.tolist()
    for token in seen.nonzero()[:, 0].tolist():
        penalty = sampling.repetition_penalty
        own[token] = own[token] / penalty if own[token] > 0 else own[token] * penalty
    p = torch.tensor(own).div(sampling.temperature).softmax(0).tolist()
    ranked = sorted(range(len(p)), key=lambda token: -p[token])
    kept = [token for token in ranked if p[token] >= sampling.min_p * max(p)]
    kept = kept[: sampling.top_k or None]
    total, nucleus, before = sum(p[token] for token in kept), [], 0.0
    for token in kept:
        if before < sampling.top_p * total:
            nucleus.append(token)
        before += p[token]
    left = torch.tensor([p[token] if token in nucleus else 0.0 for token in range(len(p))])
    return left / left.sum()


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_chosen_as_asked_and_log_probs_stay(case: str) -> None:
    """Evenly spaced numbers meet each token as often as its probability says."""
    sampling = Sampling(**{"samples": 1, "temperature": 1.0, "max_tokens": 1, **CASES[case]})
    uniform = (torch.arange(10_000) + 1).div(10_000).expand(2, -1)
    seen = SEEN if sampling.repetition_penalty != 1 else None
    chosen, logp = choose(LOGITS, uniform, sampling, seen)
    whole = (LOGITS / sampling.temperature).log_softmax(-1)
    torch.testing.assert_close(logp, whole.gather(1, chosen))
    counted = torch.stack([(chosen == token).float().mean(1) for token in range(5)], 1)
    own = torch.zeros_like(SEEN) if seen is None else seen
    expected = torch.stack([by_hand(*row, sampling) for row in zip(LOGITS, own, strict=True)])
    torch.testing.assert_close(counted, expected, atol=2e-4, rtol=0)


def test_padding_is_not_seen() -> None:
    prompts, visible = torch.tensor([[0, 0, 3], [1, 0, 3]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    assert seen_in(prompts, visible, 4).int().tolist() == [[0, 0, 0, 1], [1, 1, 0, 1]]


@pytest.mark.parametrize("batch_size", [2, 256])
def test_the_engine_penalises_what_prompt_and_response_have(
    wide_model: Path, batch_size: int
) -> None:
    """With k = 1, the tokens are those of a loop over the model; log-probs are the policy's."""
    policy = PolicyTable(model=str(wide_model))
    text = load_text(policy)
    engine = Transformers(policy, text, "cpu", False, batch_size=batch_size)
    prompts = [text.encode(Prompt(t, t)) for t in ("1+", "23=45", "7")]
    sampling = Sampling(3, 0.8, 6, top_k=1, repetition_penalty=100.0)
    plain = engine.generate(prompts, Sampling(3, 0.8, 6, top_k=1), seed=0)
    groups, model = engine.generate(prompts, sampling, seed=0), Policy(engine.model, 0.8)
    for prompt, group in zip(prompts, groups, strict=True):
        expected = penalised(engine.model, prompt, 6, 100.0, text.eos_ids)
        assert [c.tokens.tolist() for c in group] == [expected] * 3
        logp = model.logp(collate_tokens([prompt], [[c.tokens for c in group]]))[0]
        for row, c in zip(logp, group, strict=True):
            np.testing.assert_allclose(c.logp, row[: len(c.logp)].detach(), atol=1e-5)
    assert [tokens(g) for g in plain] != [tokens(g) for g in groups]


def tokens(group: Sequence[Completion]) -> list[list[int]]:
    return [c.tokens.tolist() for c in group]


@torch.inference_mode()
def penalised(
    model: Any, prompt: np.ndarray, limit: int, penalty: float, eos: frozenset[int]
) -> list[int]:
    """Return the likeliest token after each, with a penalty for those that are there already."""
    ids = prompt.tolist()
    while len(ids) < len(prompt) + limit and (len(ids) == len(prompt) or ids[-1] not in eos):
        logits = model(torch.tensor([ids])).logits[0, -1].clone()
        seen = torch.tensor(sorted(set(ids)))
        own = logits[seen]
        logits[seen] = torch.where(own > 0, own / penalty, own * penalty)
        ids.append(int(logits.argmax()))
    return [int(token) for token in ids[len(prompt) :]]


SETTINGS = {"top_k": "5", "min_p": "0.1", "repetition_penalty": "1.2"}


@pytest.mark.parametrize("name", SETTINGS)
def test_objectives_that_compare_with_the_sampling_policy_refuse_them(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    setting = f"sampling.{name}={SETTINGS[name]}"
    parts = check(toy_config(tiny_model, tmp_path, setting))  # tb does not
    assert str(vars(parts.search_setup().sampling)[name]) == SETTINGS[name]
    with pytest.raises(ValueError, match=rf"{name} = .* without it; set sampling\.{name}="):
        check(toy_config(tiny_model, tmp_path, setting, "objective=grpo"))


def test_vllm_needs_raw_log_probs_and_temperature_1() -> None:
    def config(*settings: str) -> Config:
        return load(None, ["engine=vllm", *settings])

    raw = "engine.raw_logprobs=true"
    for name, value in {**SETTINGS, "top_p": "0.9"}.items():
        setting = f"sampling.{name}={value}"
        check_sampling(config(setting, raw))
        with pytest.raises(ValueError, match=rf"{name} = .*engine\.raw_logprobs=true with"):
            check_sampling(config(setting))
        with pytest.raises(ValueError, match=r"raw_logprobs = true: .* temperature 1"):
            check_sampling(config(setting, raw, "sampling.temperature=0.7"))
    check_sampling(config())


def searcher(model: Path, folder: Path, truncated: str) -> Searcher:
    """A searcher of the toy, about half of whose responses are cut off after two tokens."""
    settings = f"sampling.truncated={truncated}", "eval.prompts=1"
    return check(toy_config(model, folder, *settings)).search_setup().build("cpu", False)


def kept(group: Sequence[Trajectory]) -> list[tuple[bytes, bool, float]]:
    return [(t.tokens.tobytes(), t.finished, t.reward) for t in group]


def test_responses_that_are_cut_off_are_kept_rejected_or_given_a_reward(
    toy_model: Path, tmp_path: Path
) -> None:
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
    assert {r.stats.samples for r in results.values()} == {3 * 64}
    for each in scores.values():
        del each["seconds"]
    assert scores["keep"] == scores["reject"] == scores["-1.5"]


def test_a_run_counts_what_it_rejects(toy_model: Path, tmp_path: Path) -> None:
    """The samples are those trained on and those in the summary, also where K is not reached."""
    folder = tmp_path / "run"
    summary = run(toy_config(toy_model, folder, "run.steps=2", "sampling.truncated=reject"))
    assert summary.finished and set(summary.rejected) == {"truncated"}
    assert 0 < summary.rejected["truncated"] < summary.samples_generated


def searched(kept: int, truncated: int) -> SearchStats:
    return SearchStats(samples=kept + truncated, rejected=Counter(truncated=truncated))


def test_the_run_stops_when_all_are_cut_off_and_not_for_a_large_share() -> None:
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

"""Evaluation on held-out prompts: reward, pass@1 and pass@k, with standard errors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import fmean, stdev

import numpy as np

from tba.config.tables import EvalTable
from tba.engines import Engine
from tba.models.pretrained import Text
from tba.search.reference import Reference
from tba.search.result import Evaluation, Example
from tba.search.rewards import Guard, Rejected, Verdict
from tba.types import Completion, Prompt, Sampling

EXAMPLES = 8
"""Prompts that are kept with an answer, for a person to read."""


@dataclass(frozen=True)
class Answered:
    """Completions of every prompt, and the verdict on each."""

    completions: list[list[Completion]]
    verdicts: list[list[Verdict]]


def evaluate(
    engine: Engine,
    text: Text,
    guard: Guard,
    prompts: Sequence[Prompt],
    settings: EvalTable,
    max_tokens: int,
    reference: Reference | None,
) -> Evaluation:
    """Score greedy and sampled answers to every prompt.

    With a reference, `sampled_kl` is the KL to it of the sampled answers, in nats a response. A
    standard error is over prompts, because samples of one prompt are not independent. Samples
    that the task cannot score count as wrong and as reward 0; `rejected` is their share.
    """
    started = time.perf_counter()
    tokens = [text.encode(p) for p in prompts]

    def answered(sampling: Sampling) -> Answered:
        completions = engine.generate(tokens, sampling, settings.seed)
        answers = [[text.answer(c) for c in group] for group in completions]
        return Answered(completions, guard(prompts, answers))

    pass_reward = guard.task.pass_reward
    greedy = answered(Sampling(1, 0.0, max_tokens))
    sampled = answered(Sampling(settings.samples, settings.temperature, max_tokens))
    scores: dict[str, float] = {}
    for name, one in (("greedy", greedy), ("sampled", sampled)):
        for key, value in _summary(one, pass_reward).items():
            scores[f"{name}_{key}"] = value
    if reference is not None:
        scores["sampled_kl"] = _kl(tokens, sampled.completions, reference)
    if pass_reward is not None:
        scores |= _pass_at_each_k(sampled.verdicts, pass_reward, settings)
    examples = _examples(prompts, greedy, text)
    scores["seconds"] = time.perf_counter() - started
    return Evaluation(engine.version, scores, examples)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return an unbiased estimate, from n answers, of the probability that one of k is correct.

    Equation 1 of arXiv 2107.03374.
    """
    return 1.0 - comb(n - correct, k) / comb(n, k)


def stderr(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 for a single value, whose spread is unknown."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0


def _summary(answered: Answered, pass_reward: float | None) -> dict[str, float]:
    completions = [c for group in answered.completions for c in group]
    verdicts = [v for group in answered.verdicts for v in group]
    reward = [fmean(map(_reward, group)) for group in answered.verdicts]
    scores = {
        "reward": fmean(reward),
        "reward_stderr": stderr(reward),
        "rejected": fmean(isinstance(v, Rejected) for v in verdicts),
    }
    if pass_reward is not None:
        correct = [_correct(g, pass_reward) / len(g) for g in answered.verdicts]
        scores |= {"pass@1": fmean(correct), "stderr": stderr(correct)}
    scores["length"] = fmean(len(c.tokens) for c in completions)
    scores["finished"] = fmean(c.finished for c in completions)
    return scores


def _pass_at_each_k(
    verdicts: Sequence[Sequence[Verdict]], pass_reward: float, settings: EvalTable
) -> dict[str, float]:
    scores = {}
    correct = [_correct(group, pass_reward) for group in verdicts]
    for k in settings.k:
        passed = [pass_at_k(settings.samples, c, k) for c in correct]
        scores[f"pass@{k}"] = fmean(passed)
        scores[f"pass@{k}_stderr"] = stderr(passed)
    return scores


def _kl(
    prompts: Sequence[np.ndarray], completions: Sequence[Sequence[Completion]], reference: Reference
) -> float:
    """Return the mean of log(pi / ref) over samples of pi: an unbiased estimate of KL(pi, ref)."""
    logp, _ = reference.logp(prompts, [[c.tokens for c in group] for group in completions])
    ratios = []
    for group, rows in zip(completions, logp, strict=True):
        for completion, ref_logp in zip(group, rows, strict=True):
            ratios.append(float((completion.logp - ref_logp).sum()))
    return fmean(ratios)


def _examples(prompts: Sequence[Prompt], greedy: Answered, text: Text) -> list[Example]:
    examples = []
    for i, prompt in enumerate(prompts[:EXAMPLES]):
        verdict = greedy.verdicts[i][0]
        reward = None if isinstance(verdict, Rejected) else verdict
        completion = text.decode(greedy.completions[i][0].tokens)
        examples.append(Example(_shown(prompt), completion, reward))
    return examples


def _reward(verdict: Verdict) -> float:
    return 0.0 if isinstance(verdict, Rejected) else verdict


def _correct(verdicts: Sequence[Verdict], pass_reward: float) -> int:
    """Return how many answers have at least the reward of a correct one."""
    return sum(not isinstance(v, Rejected) and v >= pass_reward for v in verdicts)


def _shown(prompt: Prompt) -> str:
    if isinstance(prompt.text, str):
        return prompt.text
    return "\n".join(f"{m['role']}: {m['content']}" for m in prompt.text)

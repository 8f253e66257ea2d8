"""Evaluation on held-out prompts: reward, pass@1 and pass@k, with standard errors."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import comb, isnan, nan, sqrt
from statistics import fmean, stdev

import numpy as np
from jaxtyping import Float64

from tba.config.tables import EvalTable
from tba.engines import Engine
from tba.models.pretrained import Text
from tba.search.reference import Reference
from tba.search.result import Evaluation, Example, Rejected, Verdict
from tba.search.rewards import Guard
from tba.search.searcher import Searcher
from tba.types import Completion, Prompt, Sampling

EXAMPLES = 8
"""Prompts that are kept with an answer, for a person to read."""


@dataclass(frozen=True)
class Answered:
    """Completions of every prompt, and their rewards: NaN for an answer that was rejected."""

    completions: list[list[Completion]]
    rewards: Float64[np.ndarray, "P S"]


def evaluate_held_out(searcher: Searcher) -> Evaluation:
    """Evaluate the weights of a searcher's engine on its held-out prompts, as `[eval]` says."""
    s, settings = searcher, searcher.evaluation
    same = settings.temperature == s.sampling.temperature
    reference = s.reference if same else None  # the reference has one temperature
    tokens = s.sampling.max_tokens
    return evaluate(s.engine, s.text, s.guard, s.held_out, settings, tokens, reference)


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
        rewards = [list(map(_number, group)) for group in guard(prompts, answers)]
        return Answered(completions, np.array(rewards))

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
        correct = (sampled.rewards >= pass_reward).sum(1).tolist()
        for k in settings.k:
            passed = [pass_at_k(settings.samples, c, k) for c in correct]
            scores[f"pass@{k}"] = fmean(passed)
            scores[f"pass@{k}_stderr"] = stderr(passed)
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
    rejected = np.isnan(answered.rewards)
    reward = np.where(rejected, 0.0, answered.rewards).mean(1).tolist()
    completions = [c for group in answered.completions for c in group]
    scores = {
        "reward": fmean(reward),
        "reward_stderr": stderr(reward),
        "rejected": float(rejected.mean()),
    }
    if pass_reward is not None:
        correct = (answered.rewards >= pass_reward).mean(1).tolist()
        scores |= {"pass@1": fmean(correct), "stderr": stderr(correct)}
    scores["length"] = fmean(len(c.tokens) for c in completions)
    scores["finished"] = fmean(c.finished for c in completions)
    return scores


def _kl(
    prompts: Sequence[np.ndarray], completions: Sequence[Sequence[Completion]], reference: Reference
) -> float:
    """Return the mean of log(pi / ref) over samples of pi: an unbiased estimate of KL(pi, ref)."""
    logp, _ = reference.logp(prompts, [[c.tokens for c in group] for group in completions])
    pairs = zip(chain(*completions), chain(*logp), strict=True)
    return fmean(float((completion.logp - ref_logp).sum()) for completion, ref_logp in pairs)


def _examples(prompts: Sequence[Prompt], greedy: Answered, text: Text) -> list[Example]:
    examples = []
    for i, prompt in enumerate(prompts[:EXAMPLES]):
        shown = prompt.text
        if not isinstance(shown, str):
            shown = "\n".join(f"{m['role']}: {m['content']}" for m in shown)
        reward = float(greedy.rewards[i, 0])
        completion = text.decode(greedy.completions[i][0].tokens)
        examples.append(Example(shown, completion, None if isnan(reward) else reward))
    return examples


def _number(verdict: Verdict) -> float:
    return nan if isinstance(verdict, Rejected) else verdict

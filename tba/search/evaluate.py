"""Evaluation on held-out prompts: reward, pass@1 and pass@k, with standard errors."""

import time
from collections.abc import Sequence
from itertools import chain, islice
from math import comb, isnan, nan, sqrt
from statistics import fmean, stdev

import numpy as np

from tba.search.reference import Reference
from tba.search.result import Evaluation, Example, Rejected
from tba.search.searcher import Searcher
from tba.types import Completion, Sampling

EXAMPLES = 8
"""Prompts that are kept with an answer, for a person to read."""

Completions = list[list[Completion]]


def evaluate_held_out(searcher: Searcher) -> Evaluation:
    """Score greedy and sampled answers to a searcher's held-out prompts, as `[eval]` says.

    `sampled_kl` is the KL of the sampled answers to the reference, in nats a response, if both
    have the same temperature. A standard error is over prompts, because samples of one prompt are
    not independent. Samples that the task cannot score count as wrong and as reward 0; `rejected`
    is their share.
    """
    started = time.perf_counter()
    setup, text, prompts = searcher.setup, searcher.text, searcher.setup.held_out
    settings, tokens = setup.evaluation, [text.encode(p) for p in prompts]

    def answered(samples: int, temperature: float) -> tuple[Completions, np.ndarray]:
        """Return completions of every prompt, and their rewards: NaN if rejected."""
        stop = setup.sampling.stop
        sampling = Sampling(samples, temperature, setup.sampling.max_tokens, stop=stop)
        completions = searcher.engine.generate(tokens, sampling, settings.seed)
        answers = [[text.answer(c.tokens, c.finished, stop) for c in g] for g in completions]
        rewards = []
        for verdicts in searcher.guard(prompts, answers):
            rewards.append([nan if isinstance(v, Rejected) else v for v in verdicts])
        return completions, np.array(rewards)

    pass_reward = searcher.guard.task.pass_reward
    greedy, greedy_rewards = answered(1, 0.0)
    sampled, rewards = answered(settings.samples, settings.temperature)
    scores = _summary("greedy", greedy, greedy_rewards, pass_reward)
    scores |= _summary("sampled", sampled, rewards, pass_reward)
    if settings.temperature == setup.sampling.temperature:  # that of the reference
        scores["sampled_kl"] = _kl(tokens, sampled, searcher.reference)
    if pass_reward is not None:
        correct = (rewards >= pass_reward).sum(1).tolist()
        for k in settings.k:
            passed = [pass_at_k(settings.samples, c, k) for c in correct]
            scores[f"pass@{k}"] = fmean(passed)
            scores[f"pass@{k}_stderr"] = stderr(passed)
    examples = []
    answers = zip(prompts, greedy, greedy_rewards.tolist(), strict=True)
    for prompt, (completion,), (reward,) in islice(answers, EXAMPLES):
        shown, value = prompt.text, None if isnan(reward) else reward
        if not isinstance(shown, str):
            shown = "\n".join(f"{m['role']}: {m['content']}" for m in shown)
        answer = text.answer(completion.tokens, completion.finished, setup.sampling.stop)
        examples.append(Example(shown, answer.text, value))
    scores["seconds"] = time.perf_counter() - started
    return Evaluation(searcher.engine.version, scores, examples)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Estimate from n answers the chance that one of k is correct (arXiv 2107.03374, eq. 1)."""
    return 1.0 - comb(n - correct, k) / comb(n, k)


def stderr(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 for a single value, whose spread is unknown."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0


def _summary(
    name: str, completions: Completions, rewards: np.ndarray, pass_reward: float | None
) -> dict[str, float]:
    rejected, every = np.isnan(rewards), list(chain(*completions))
    reward = np.where(rejected, 0.0, rewards).mean(1).tolist()
    scores = {"reward": fmean(reward), "reward_stderr": stderr(reward)}
    scores["rejected"] = float(rejected.mean())
    if pass_reward is not None:
        correct = (rewards >= pass_reward).mean(1).tolist()
        scores |= {"pass@1": fmean(correct), "stderr": stderr(correct)}
    scores["length"] = fmean(len(c.tokens) for c in every)
    scores["finished"] = fmean(c.finished for c in every)
    return {f"{name}_{key}": value for key, value in scores.items()}


def _kl(prompts: Sequence[np.ndarray], completions: Completions, reference: Reference) -> float:
    """Return the mean of log(pi / ref) over samples of pi: an unbiased estimate of KL(pi, ref)."""
    logp, _ = reference.logp(prompts, [[c.tokens for c in group] for group in completions])
    pairs = zip(chain(*completions), chain(*logp), strict=True)
    return fmean(float((completion.logp - ref_logp).sum()) for completion, ref_logp in pairs)

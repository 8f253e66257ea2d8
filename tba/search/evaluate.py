"""How good an engine is on held-out prompts: reward, pass@1 and pass@k, with standard errors and fixed seeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import comb, sqrt
from statistics import fmean, stdev

import numpy as np

from tba.config.tables import EvalTable
from tba.engines import Engine
from tba.models.pretrained import Text
from tba.search.result import Evaluation, Example
from tba.search.rewards import AT_ONCE, Guard, Rejected, Verdict
from tba.types import Completion, Group, Prompt, Sampling, Trajectory

Reference = Callable[[list[Group]], list[Group]]
"""Groups with the reference's log-probs filled in."""


def evaluate(
    engine: Engine,
    text: Text,
    guard: Guard,
    prompts: Sequence[Prompt],
    settings: EvalTable,
    max_tokens: int,
    reference: Reference | None,
) -> Evaluation:
    """Greedy and sampled answers to every prompt, and, given a reference, the KL to it of the sampled ones in nats a response.

    A standard error is over prompts, whose samples are not independent.

    Samples that the task cannot score count as wrong and as reward 0, and their share is told as `rejected`.
    """
    started = time.perf_counter()
    tokens = [text.encode(p) for p in prompts]
    scores: dict[str, float] = {}
    verdicts: list[list[Verdict]] = []
    for name, sampling in (
        ("greedy", Sampling(1, 0.0, max_tokens)),
        ("sampled", Sampling(settings.samples, settings.temperature, max_tokens)),
    ):
        completions = engine.generate(tokens, sampling, settings.seed)
        n = sampling.samples
        flat = guard.in_parts(
            [p for p in prompts for _ in range(n)],
            [text.answer(c) for cs in completions for c in cs],
        )
        verdicts = [flat[i : i + n] for i in range(0, len(flat), n)]
        scores |= {f"{name}_{k}": v for k, v in _summary(verdicts, guard.task.pass_reward).items()}
        scores[f"{name}_length"] = fmean(len(c.tokens) for cs in completions for c in cs)
        scores[f"{name}_finished"] = fmean(c.finished for cs in completions for c in cs)
    if reference is not None:
        scores["sampled_kl"] = _kl(prompts, tokens, completions, reference)
    if guard.task.pass_reward is not None:
        right = [sum(_right(v, guard.task.pass_reward) for v in vs) for vs in verdicts]
        for k in settings.k:
            passed = [pass_at_k(settings.samples, c, k) for c in right]
            scores |= {f"pass@{k}": fmean(passed), f"pass@{k}_stderr": stderr(passed)}
    examples = [
        Example(
            _shown(p), text.decode(cs[0].tokens), None if isinstance(vs[0], Rejected) else vs[0]
        )
        for p, cs, vs in list(zip(prompts, completions, verdicts, strict=True))[:8]
    ]
    scores["seconds"] = time.perf_counter() - started
    return Evaluation(engine.version, scores, examples)


def _kl(
    prompts: Sequence[Prompt],
    tokens: Sequence[np.ndarray],
    completions: list[list[Completion]],
    reference: Reference,
) -> float:
    """Mean of log(pi / ref) over samples of pi itself: an unbiased estimate of KL(pi, ref)."""
    found = []
    for start in range(0, len(prompts), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        groups = [
            Group(
                p,
                t,
                tuple(
                    Trajectory(c.tokens, c.logp, np.zeros_like(c.logp), 0.0, 0, c.finished)
                    for c in cs
                ),
            )
            for p, t, cs in zip(prompts[part], tokens[part], completions[part], strict=True)
        ]
        found += [
            float((t.behavior_logp - t.ref_logp).sum())
            for g in reference(groups)
            for t in g.trajectories
        ]
    return fmean(found)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that one of k answers is right, unbiased from n answers (arXiv 2107.03374, equation 1)."""
    return 1.0 - comb(n - correct, k) / comb(n, k)


def _summary(verdicts: list[list[Verdict]], pass_reward: float | None) -> dict[str, float]:
    reward = [fmean(_reward(v) for v in vs) for vs in verdicts]
    found = {
        "reward": fmean(reward),
        "reward_stderr": stderr(reward),
        "rejected": fmean(isinstance(v, Rejected) for vs in verdicts for v in vs),
    }
    if pass_reward is not None:
        right = [fmean(_right(v, pass_reward) for v in vs) for vs in verdicts]
        found |= {"pass@1": fmean(right), "stderr": stderr(right)}
    return found


def stderr(values: Sequence[float]) -> float:
    """Standard error of the mean; 0 for a single value, which says nothing of its spread."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0


def _reward(verdict: Verdict) -> float:
    return 0.0 if isinstance(verdict, Rejected) else verdict


def _right(verdict: Verdict, pass_reward: float) -> bool:
    return not isinstance(verdict, Rejected) and verdict >= pass_reward


def _shown(prompt: Prompt) -> str:
    return (
        prompt.text
        if isinstance(prompt.text, str)
        else "\n".join(f"{m['role']}: {m['content']}" for m in prompt.text)
    )

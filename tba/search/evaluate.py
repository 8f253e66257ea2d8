"""Evaluation on held-out prompts: reward, pass@1 and pass@k, with standard errors.

An evaluation is divided into pieces, of `eval.prompts_per_task` prompts each. Its scores do not
depend on which searchers do them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import comb, isnan, nan, sqrt
from statistics import fmean, stdev

import numpy as np
from jaxtyping import Bool, Float, Int

from tba.search.reference import Reference
from tba.search.result import Evaluation, Example, Rejected
from tba.search.searcher import Searcher, SearchSetup, task_seed
from tba.types import Completion, Prompt, Sampling

EXAMPLES = 8
"""Prompts that are kept with an answer, for a person to read."""


@dataclass(frozen=True)
class Answered:
    """S answers to each of P held-out prompts; the reward of a rejected one is NaN."""

    reward: Float[np.ndarray, "P S"]
    length: Int[np.ndarray, "P S"]
    finished: Bool[np.ndarray, "P S"]


@dataclass(frozen=True)
class EvaluatedPiece:
    """Answers to the prompts of one piece of an evaluation."""

    greedy: Answered
    sampled: Answered
    kl: Float[np.ndarray, "P S"] | None
    """log(pi / ref) of the sampled answers, if both have the same temperature."""
    reference: int
    """Version of the reference."""
    examples: list[Example]
    pass_reward: float | None
    seconds: float


def piece_count(setup: SearchSetup) -> int:
    """Return the number of pieces of an evaluation."""
    return -(-len(setup.held_out) // setup.evaluation.prompts_per_task)


def evaluate_held_out(searcher: Searcher) -> Evaluation:
    """Evaluate the weights that a searcher has."""
    pieces = [evaluate_piece(searcher, i) for i in range(piece_count(searcher.setup))]
    return join(searcher.setup, searcher.engine.version, pieces)


def evaluate_piece(searcher: Searcher, number: int) -> EvaluatedPiece:
    """Answer the held-out prompts of one piece, greedily and by sampling, as `[eval]` says.

    The random numbers of a piece depend on `eval.seed` and its number only.
    """
    started = time.perf_counter()
    setup, settings = searcher.setup, searcher.setup.evaluation
    first, size = number * settings.prompts_per_task, settings.prompts_per_task
    prompts, seed = setup.held_out[first : first + size], task_seed(settings.seed, number)
    tokens = [searcher.text.encode(p) for p in prompts]
    limit, stop = setup.sampling.max_tokens, setup.sampling.stop
    one = Sampling(1, 0.0, limit, stop=stop)
    greedy, greedy_answered = _answer(searcher, prompts, tokens, one, seed)
    several = Sampling(settings.samples, settings.temperature, limit, stop=stop)
    sampled, sampled_answered = _answer(searcher, prompts, tokens, several, seed)
    kl, version = None, searcher.reference.version
    if settings.temperature == setup.sampling.temperature:  # that of the reference
        kl, version = _log_ratios(tokens, sampled, searcher.reference)
    shown = range(max(0, min(len(prompts), EXAMPLES - first)))
    rewards = greedy_answered.reward[:, 0].tolist()
    examples = [_example(searcher, prompts[i], greedy[i][0], rewards[i]) for i in shown]
    pass_reward, seconds = searcher.guard.task.pass_reward, time.perf_counter() - started
    return EvaluatedPiece(
        greedy_answered, sampled_answered, kl, version, examples, pass_reward, seconds
    )


def join(setup: SearchSetup, version: int, pieces: Sequence[EvaluatedPiece]) -> Evaluation:
    """Return the scores of all pieces together.

    `sampled_kl` is the KL of the sampled answers to the reference, in nats a response. It is left
    out if the reference was reset between two pieces. A standard error is over prompts, because
    samples of one prompt are not independent. Samples that the task cannot score count as wrong
    and as reward 0; `rejected` is their share. `seconds` are those of all pieces.
    """
    pass_reward = pieces[0].pass_reward
    sampled = _joined([p.sampled for p in pieces])
    scores = _summary("greedy", _joined([p.greedy for p in pieces]), pass_reward)
    scores |= _summary("sampled", sampled, pass_reward)
    kl = [p.kl for p in pieces if p.kl is not None]
    if kl and len({p.reference for p in pieces}) == 1:
        scores["sampled_kl"] = fmean(np.concatenate(kl).ravel().tolist())
    if pass_reward is not None:
        samples = setup.evaluation.samples
        correct = (sampled.reward >= pass_reward).sum(1).tolist()
        for k in setup.evaluation.k:
            passed = [pass_at_k(samples, c, k) for c in correct]
            scores[f"pass@{k}"] = fmean(passed)
            scores[f"pass@{k}_stderr"] = stderr(passed)
    scores["seconds"] = sum(p.seconds for p in pieces)
    return Evaluation(version, scores, list(chain(*(p.examples for p in pieces))))


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Estimate from n answers the chance that one of k is correct (arXiv 2107.03374, eq. 1)."""
    return 1.0 - comb(n - correct, k) / comb(n, k)


def stderr(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 for a single value, whose spread is unknown."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0


def _answer(
    searcher: Searcher,
    prompts: Sequence[Prompt],
    tokens: Sequence[np.ndarray],
    sampling: Sampling,
    seed: int,
) -> tuple[list[list[Completion]], Answered]:
    """Return completions of every prompt, which has these tokens, and their rewards."""
    text = searcher.text
    completions = searcher.engine.generate(tokens, sampling, seed)
    answers = []
    for group in completions:
        answers.append([text.answer(c.tokens, c.finished, sampling.stop) for c in group])
    rewards = []
    for verdicts in searcher.guard(prompts, answers):
        rewards.append([nan if isinstance(v, Rejected) else v for v in verdicts])
    lengths = [[len(c.tokens) for c in group] for group in completions]
    finished = [[c.finished for c in group] for group in completions]
    return completions, Answered(np.array(rewards), np.array(lengths), np.array(finished))


def _log_ratios(
    prompts: Sequence[np.ndarray], completions: list[list[Completion]], reference: Reference
) -> tuple[Float[np.ndarray, "P S"], int]:
    """Return log(pi / ref) of each sample of pi, and the version of the reference.

    Their mean is an unbiased estimate of KL(pi, ref).
    """
    logp, version = reference.logp(prompts, [[c.tokens for c in group] for group in completions])
    ratios = []
    for group, rows in zip(completions, logp, strict=True):
        pairs = zip(group, rows, strict=True)
        ratios.append([float((c.logp - ref_logp).sum()) for c, ref_logp in pairs])
    return np.array(ratios), version


def _example(searcher: Searcher, prompt: Prompt, completion: Completion, reward: float) -> Example:
    shown, stop = prompt.text, searcher.setup.sampling.stop
    if not isinstance(shown, str):
        shown = "\n".join(f"{m['role']}: {m['content']}" for m in shown)
    answer = searcher.text.answer(completion.tokens, completion.finished, stop)
    return Example(shown, answer.text, None if isnan(reward) else reward)


def _joined(parts: Sequence[Answered]) -> Answered:
    rewards, lengths = [p.reward for p in parts], [p.length for p in parts]
    finished = np.concatenate([p.finished for p in parts])
    return Answered(np.concatenate(rewards), np.concatenate(lengths), finished)


def _summary(name: str, answered: Answered, pass_reward: float | None) -> dict[str, float]:
    rejected = np.isnan(answered.reward)
    reward = np.where(rejected, 0.0, answered.reward).mean(1).tolist()
    scores = {"reward": fmean(reward), "reward_stderr": stderr(reward)}
    scores["rejected"] = float(rejected.mean())
    if pass_reward is not None:
        correct = (answered.reward >= pass_reward).mean(1).tolist()
        scores |= {"pass@1": fmean(correct), "stderr": stderr(correct)}
    scores["length"] = float(answered.length.mean())
    scores["finished"] = float(answered.finished.mean())
    return {f"{name}_{key}": value for key, value in scores.items()}

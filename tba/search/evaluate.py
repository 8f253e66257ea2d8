"""Evaluation on held-out prompts: reward, pass@1, avg@n, pass@k, perplexity, task measures.

An evaluation is divided into pieces, of `eval.prompts_per_task` prompts each. Its scores do not
depend on which searchers do them. Beside the held-out prompts there may be further sets, and a task
may have parts: each has scores of its own.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import comb, exp, nan, sqrt
from statistics import fmean, stdev
from typing import Any

import numpy as np
from jaxtyping import Float

from tba.prompt import Prompt
from tba.search.dialogue import Responses
from tba.search.reference import Reference
from tba.search.result import Evaluation, Example, Rejected, Verdict
from tba.search.scored import Keep, scored
from tba.search.searcher import Searcher, SearchSetup
from tba.streams import Use, seed_of
from tba.tasks import Itemized
from tba.types import Completion, Sampling

EXAMPLES = 8
"""Prompts that are kept with an answer, for a person to read."""

MODES = ("greedy", "sampled")
OF_REFERENCE = ("_log_ratio", "_nats", "_with_prompt")
"""Ends of the names of scores that depend on the reference."""
PLAIN = ("_rejected", "_length", "_finished", "_log_ratio", "_nats")
"""Ends of the names of scores without a standard error."""


@dataclass(frozen=True)
class EvaluatedPiece:
    """Scores of the P prompts of one piece of an evaluation, all of one set."""

    set: str
    """Name of the further set; "" for the held-out prompts."""
    parts: list[str]
    """Part of its task that each prompt belongs to; "" where there are no parts."""
    scores: dict[str, Float[np.ndarray, " P"]]
    """By name, as in `Evaluation`; each is a mean over the answers to the prompt, or NaN where
    its task does not tell right answers from wrong ones."""
    reference: int
    """Version of the reference."""
    examples: list[Example]
    seconds: float


def pieces(setup: SearchSetup) -> list[tuple[str, int, tuple[Prompt, ...]]]:
    """Return the set of each piece of an evaluation, its place in the set, and its prompts."""
    size, divided = setup.evaluation.prompts_per_task, []
    sets = {"": setup.held_out} | {name: one.prompts for name, one in setup.sets.items()}
    for name, prompts in sets.items():
        for first in range(0, len(prompts), size):
            divided.append((name, first, prompts[first : first + size]))
    return divided


def evaluate_held_out(
    searcher: Searcher, keep: Keep | None = None, tell: Callable[[str], None] | None = None
) -> Evaluation:
    """Evaluate the weights that a searcher has.

    `keep` receives every answer, and `tell` is told how far it is before each piece.
    """
    done: list[EvaluatedPiece] = []
    count = len(pieces(searcher.setup))
    for number in range(count):
        if tell is not None:
            tell(f"evaluating {100 * number // count} %")
        done.append(evaluate_piece(searcher, number, keep))
    return join(searcher.engine.version, done)


def evaluate_piece(searcher: Searcher, number: int, keep: Keep | None = None) -> EvaluatedPiece:
    """Answer the prompts of one piece, greedily and by sampling, as `[eval]` says.

    The random numbers of a piece depend on `eval.seed` and its number only.
    """
    started = time.perf_counter()
    setup, settings = searcher.setup, searcher.setup.evaluation
    name, first, prompts = pieces(setup)[number]
    seed = seed_of(settings.seed, Use.EVALUATION, number)
    limit, stop = setup.sampling.max_tokens, setup.sampling.stop
    one = Sampling(1, 0.0, limit, stop=stop)
    greedy, greedy_judged, verdicts = _answer(searcher, name, prompts, one, seed)
    several = Sampling(settings.samples, settings.temperature, limit, stop=stop)
    sampled, judged, _ = _answer(searcher, name, prompts, several, seed)
    answers = scored(searcher.text, stop, (name, "greedy"), prompts, greedy, greedy_judged)
    if keep is not None:
        keep(answers)
        keep(scored(searcher.text, stop, (name, "sampled"), prompts, sampled, judged))
    task = searcher.guard.tasks[name]
    parts, tasks = zip(*(task.part(p) for p in prompts), strict=True)
    least = np.array([nan if t.pass_reward is None else t.pass_reward for t in tasks])
    scores = _scores("greedy", greedy.completions, greedy_judged, least)
    scores |= _scores("sampled", sampled.completions, judged, least)
    version = searcher.reference.version
    if settings.temperature == setup.sampling.temperature:  # that of the reference
        scores["sampled_log_ratio"], version = _log_ratio(sampled, searcher.reference)
    if settings.perplexity:
        for mode, responses in zip(MODES, (greedy, sampled), strict=True):
            likelihood, version = _likelihood(responses, searcher.reference)
            scores |= {f"{mode}_{name}": values for name, values in likelihood.items()}
    scores[f"avg@{settings.samples}"] = scores["sampled_pass@1"]
    correct = (judged["reward"] >= least[:, None]).sum(1).tolist()
    for k in settings.k:
        chances = np.array([pass_at_k(settings.samples, c, k) for c in correct])
        scores[f"pass@{k}"] = np.where(np.isnan(least), nan, chances)
    examples = [
        Example(a.prompt, a.completion, a.reward, _notes(verdict), prompt.id, prompt.columns)
        for a, (verdict,), prompt in zip(answers, verdicts, prompts, strict=True)
    ][: max(0, EXAMPLES - first)]
    seconds = time.perf_counter() - started
    return EvaluatedPiece(name, list(parts), scores, version, examples, seconds)


def join(version: int, pieces: Sequence[EvaluatedPiece]) -> Evaluation:
    """Return the scores of all pieces together; `SET/` or `PART/` begins the name of a subset's.

    `sampled_log_ratio` is the mean log(pi / ref) of the sampled answers, in nats per response: an
    unbiased estimate of KL(pi, ref), which may be negative. Perplexities are those of the answers
    under the reference: of the whole set by its tokens, and see `_likelihood`. All are left out if
    the reference was reset between two pieces. A standard error is over prompts, because samples of
    one prompt are not independent. Samples that the task cannot score count as wrong, and not in
    the mean reward, which is 0 if none is scored; `rejected` is their share. A measure that scores
    none has no score, and neither have greedy answers of which none is scored: the task may compare
    answers, of which there is one. `seconds` are those of all pieces.
    """
    one_reference = len({p.reference for p in pieces}) == 1
    scores: dict[str, float] = {}
    for name in dict.fromkeys(p.set for p in pieces):
        own = [p for p in pieces if p.set == name]
        values = {key: np.concatenate([p.scores[key] for p in own]) for key in own[0].scores}
        if not one_reference:
            values = {k: v for k, v in values.items() if not k.endswith(OF_REFERENCE)}
        parts = np.concatenate([p.parts for p in own])
        scores |= _means([name], values)
        for part in dict.fromkeys(parts[parts != ""].tolist()):
            scores |= _means([name, part], {key: v[parts == part] for key, v in values.items()})
    scores["seconds"] = sum(p.seconds for p in pieces)
    return Evaluation(version, scores, list(chain(*(p.examples for p in pieces))))


def _means(path: Sequence[str], values: Mapping[str, Float[np.ndarray, " P"]]) -> dict[str, float]:
    """Return the mean of each score, and the standard errors, named after the set and the part."""
    scores: dict[str, float] = {}
    for name, of_prompts in values.items():
        if _unscored(name, values):
            continue
        if name.endswith("_reward"):  # NaN for a prompt without an answer that was scored
            scored = ~np.isnan(of_prompts)
            of_prompts = of_prompts[scored] if scored.any() else np.zeros(1)
        # pass@1 and the like are NaN where answers are not right or wrong
        if np.isnan(of_prompts).any():
            continue
        scores[name] = fmean(of_prompts.tolist())
        if not name.endswith(PLAIN):
            # the errors of `greedy_pass@1` and `sampled_pass@1` have short names
            scores[f"{name}_stderr".replace("_pass@1_", "_")] = stderr(of_prompts.tolist())
    for mode in MODES:
        nats = scores.pop(f"{mode}_nats", None)
        if nats is not None:
            scores[f"{mode}_perplexity"] = exp(nats / scores[f"{mode}_length"])
    prefix = "".join(f"{name}/" for name in path if name)
    return {prefix + name: value for name, value in scores.items()}


def _unscored(name: str, values: Mapping[str, Float[np.ndarray, " P"]]) -> bool:
    """Return whether a score is a measure, or of greedy answers, that were all rejected."""
    rejected = values.get(f"{name.removesuffix('_reward')}_rejected")
    may_lack = name.startswith("greedy_") or not name.endswith("_reward")
    return may_lack and rejected is not None and bool((rejected == 1).all())


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Estimate from n answers the chance that one of k is correct (arXiv 2107.03374, eq. 1)."""
    return 1.0 - comb(n - correct, k) / comb(n, k)


def stderr(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 for a single value, whose spread is unknown."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0


def _answer(
    searcher: Searcher, task: str, prompts: Sequence[Prompt], sampling: Sampling, seed: int
) -> tuple[Responses, dict[str, Float[np.ndarray, "P S"]], list[list[Verdict]]]:
    """Return responses to every prompt, what they are worth, and the verdicts on them.

    They are worth `reward` and what the task measures, by name; NaN where it was rejected. `task`
    is the name of the set, "" for that of the run.
    """
    guard = searcher.guard
    responses = searcher.answer(guard.tasks[task], prompts, sampling, seed)
    measures: list[str | None] = [None, *guard.measures(task)]
    verdicts = {m: guard(prompts, responses.answers, (task, m)) for m in measures}
    judged = {}
    for measure, rows in verdicts.items():
        values = [[nan if isinstance(v, Rejected) else float(v) for v in row] for row in rows]
        judged[measure or "reward"] = np.array(values)
    return responses, judged, verdicts[None]


def _scores(
    mode: str,
    completions: Sequence[Sequence[Completion]],
    judged: Mapping[str, Float[np.ndarray, "P S"]],
    least: Float[np.ndarray, " P"],
) -> dict[str, Float[np.ndarray, " P"]]:
    """Return the scores of each prompt; `least` is the reward of a right answer, NaN if none is."""
    scores = {}
    for name, values in judged.items():
        rejected = np.isnan(values)
        if name == "reward":  # of answers that were scored: 0 may be better than any reward
            scores[name] = np.ma.masked_array(values, rejected).mean(1).filled(nan)
        else:
            scores[name] = np.where(rejected, 0.0, values).mean(1)
        scores["rejected" if name == "reward" else f"{name}_rejected"] = rejected.mean(1)
    passed = (judged["reward"] >= least[:, None]).mean(1)
    scores["pass@1"] = np.where(np.isnan(least), nan, passed)
    scores["length"] = np.mean([[c.length for c in group] for group in completions], 1)
    scores["finished"] = np.mean([[c.finished for c in group] for group in completions], 1)
    return {f"{mode}_{name}": values for name, values in scores.items()}


def _log_ratio(responses: Responses, reference: Reference) -> tuple[Float[np.ndarray, " P"], int]:
    """Return the mean log(pi / ref) of the answers to each prompt, and the reference's version."""
    logp, version = reference.logp(responses.prompts, responses.completions)
    estimates = []
    for group, rows in zip(responses.completions, logp, strict=True):
        pairs = zip(group, rows, strict=True)
        estimates.append(fmean(float((c.logp - ref_logp).sum()) for c, ref_logp in pairs))
    return np.array(estimates), version


def _likelihood(
    responses: Responses, reference: Reference
) -> tuple[dict[str, Float[np.ndarray, " P"]], int]:
    """Return for each prompt how likely its answers are under the reference at temperature 1.

    `nats` is the mean of -log ref(y | x), from which `join` computes the perplexity. The other one,
    `perplexity_with_prompt`, divides it by the tokens of prompt and response but one, as the
    published numbers for TL;DR do (arXiv 2410.18252, 2503.18929). Second, the reference's version.
    """
    prompts, completions = responses.prompts, responses.completions
    logp, version = reference.logp(prompts, completions, temperature=1.0)
    nats, with_prompt = [], []
    for prompt, group, rows in zip(prompts, completions, logp, strict=True):
        lengths = [len(prompt) + c.length - 1 for c in group]
        each = [(-float(row.sum()), length) for row, length in zip(rows, lengths, strict=True)]
        nats.append(fmean(own for own, _ in each))
        with_prompt.append(fmean(exp(own / length) for own, length in each))
    return {"nats": np.array(nats), "perplexity_with_prompt": np.array(with_prompt)}, version


def _notes(verdict: Verdict) -> dict[str, Any]:
    """Return what reward functions gave and logged."""
    return {**verdict.items, **verdict.notes} if isinstance(verdict, Itemized) else {}

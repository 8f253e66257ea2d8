"""Evaluation on held-out prompts: reward, pass@1, avg@n, pass@k, perplexity, task measures.

An evaluation is divided into pieces, of `eval.prompts_per_task` prompts each. Its scores do not
depend on which searchers do them. Beside the held-out prompts there may be further sets, and a task
may have parts: each has scores of its own.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import comb, exp, isnan, nan, sqrt
from statistics import fmean, stdev
from typing import Any

import numpy as np
from jaxtyping import Float

from tba.models.pretrained import Tokenizer
from tba.prompt import Prompt
from tba.search.chat import shown
from tba.search.reference import Reference
from tba.search.responses import Responses
from tba.search.result import EvaluatedAnswer, Evaluation, Mode
from tba.search.searcher import Searcher, SearchSetup
from tba.search.verdicts import Rejected, Verdict
from tba.streams import Use, seed_of
from tba.tasks import Itemized
from tba.types import Sampling

EXAMPLES = 8
"""Prompts that are kept with an answer, for a person to read."""

Keep = Callable[[Sequence[EvaluatedAnswer]], None]
"""Receives the answers to the prompts of a piece, of one mode."""


@dataclass(frozen=True)
class Score:
    """Name of a score, as in `Evaluation`, and how its mean over prompts is reported."""

    name: str
    error: str = ""
    """Name of the standard error of the mean; "" if it is not reported."""
    of_reference: bool = False
    """True if it depends on the weights of the reference."""
    rejected: str = ""
    """Name of the score that has the share of rejected answers, if that matters."""
    if_rejected: float | None = None
    """Mean if every answer was rejected; None to leave the score out."""


Scores = dict[Score, Float[np.ndarray, " P"]]
"""Scores of P prompts, each a mean over the answers to a prompt; NaN where there is none."""


@dataclass(frozen=True)
class EvaluatedPiece:
    """Scores of the P prompts of one piece of an evaluation, all of one set."""

    set: str
    """Name of the further set; "" for the held-out prompts."""
    parts: list[str]
    """Part of its task that each prompt belongs to; "" where there are no parts."""
    scores: Scores
    reference: int
    """Version of the reference."""
    examples: list[EvaluatedAnswer]
    seconds: float


@dataclass(frozen=True)
class Answers:
    """Responses to the prompts of a piece, and what they are worth."""

    mode: Mode
    responses: Responses
    values: Mapping[str, Float[np.ndarray, "P S"]]
    """`reward` and the task's measures by name; NaN where an answer was rejected."""
    verdicts: list[list[Verdict]]
    """Verdicts of the reward."""


def pieces(setup: SearchSetup) -> list[tuple[str, int, tuple[Prompt, ...]]]:
    """Return the set of each piece of an evaluation, its place in the set, and its prompts."""
    size = setup.config.eval.prompts_per_task
    divided = []
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
    setup = searcher.setup
    settings = setup.config.eval
    name, first, prompts = pieces(setup)[number]
    seed = seed_of(settings.seed, Use.EVALUATION, number)
    limit = setup.sampling.max_tokens
    stop = setup.sampling.stop
    one = Sampling(1, 0.0, limit, stop=stop)
    several = Sampling(settings.samples, settings.temperature, limit, stop=stop)
    greedy = _answer(searcher, name, "greedy", prompts, one, seed)
    sampled = _answer(searcher, name, "sampled", prompts, several, seed)
    shown = _as_text(searcher.text, stop, name, prompts, greedy)
    if keep is not None:
        keep(shown)
        keep(_as_text(searcher.text, stop, name, prompts, sampled))
    parts = [searcher.scoring.tasks[name].part(prompt) for prompt in prompts]
    least = np.array([nan if t.pass_reward is None else t.pass_reward for _, t in parts])
    scores = _scores(greedy, least) | _scores(sampled, least)
    version = searcher.reference.version
    if settings.temperature == setup.sampling.temperature:  # that of the reference
        log_ratio, version = _log_ratio(sampled.responses, searcher.reference)
        scores[Score("sampled_log_ratio", of_reference=True)] = log_ratio
    if settings.perplexity:
        for answers in (greedy, sampled):
            likelihood, version = _likelihood(answers, searcher.reference)
            scores |= likelihood
    average = f"avg@{settings.samples}"
    scores[Score(average, f"{average}_stderr")] = _passed(sampled, least)
    correct = (sampled.values["reward"] >= least[:, None]).sum(1).tolist()
    for k in settings.k:
        chances = np.array([pass_at_k(settings.samples, c, k) for c in correct])
        score = Score(f"pass@{k}", f"pass@{k}_stderr")
        scores[score] = np.where(np.isnan(least), nan, chances)
    examples = shown[: max(0, EXAMPLES - first)]
    seconds = time.perf_counter() - started
    return EvaluatedPiece(name, [part for part, _ in parts], scores, version, examples, seconds)


def join(version: int, pieces: Sequence[EvaluatedPiece]) -> Evaluation:
    """Return the scores of all pieces together; `SET/` or `PART/` begins the name of a subset's.

    `sampled_log_ratio` is the mean log(pi / ref) of the sampled answers, in nats per response: an
    unbiased estimate of KL(pi, ref), which may be negative. Perplexities are those of the answers
    under the reference: of the whole set by its tokens, and see `_likelihood`. All are left out if
    the reference was reset between two pieces. A standard error is over prompts, because samples of
    one prompt are not independent. Samples that the task cannot score count as wrong, and not in
    the mean reward, which is 0 if none is scored; `rejected` is their share. If the task rejects
    all answers, as a measure, or all greedy answers, as a pairwise judge does, these scores are
    left out. `seconds` are those of all pieces.
    """
    one_reference = len({p.reference for p in pieces}) == 1
    scores: dict[str, float] = {}
    for name in dict.fromkeys(p.set for p in pieces):
        of_set = [p for p in pieces if p.set == name]
        values: Scores = {}
        for score in of_set[0].scores:
            if one_reference or not score.of_reference:
                values[score] = np.concatenate([p.scores[score] for p in of_set])
        parts = np.concatenate([p.parts for p in of_set])
        scores |= _means([name], values)
        for part in dict.fromkeys(parts[parts != ""].tolist()):
            of_part = {score: column[parts == part] for score, column in values.items()}
            scores |= _means([name, part], of_part)
    scores["seconds"] = sum(p.seconds for p in pieces)
    return Evaluation(version, scores, list(chain(*(p.examples for p in pieces))))


def _means(path: Sequence[str], values: Scores) -> dict[str, float]:
    """Return the mean of each score, and the standard errors, named after the set and the part."""
    means: dict[str, float] = {}
    for score, of_prompts in values.items():
        if score.rejected and (values[Score(score.rejected)] == 1).all():
            of_prompts = np.array([score.if_rejected], float)  # None becomes NaN
        elif score.rejected:
            of_prompts = of_prompts[~np.isnan(of_prompts)]
        if np.isnan(of_prompts).any():
            continue
        means[score.name] = fmean(of_prompts.tolist())
        if score.error:
            means[score.error] = stderr(of_prompts.tolist())
    for mode in ("greedy", "sampled"):
        nats = means.pop(f"{mode}_nats", None)
        if nats is not None:
            means[f"{mode}_perplexity"] = exp(nats / means[f"{mode}_length"])
    prefix = "".join(f"{name}/" for name in path if name)
    return {prefix + name: value for name, value in means.items()}


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Estimate from n answers the chance that one of k is correct (arXiv 2107.03374, eq. 1)."""
    return 1.0 - comb(n - correct, k) / comb(n, k)


def stderr(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 for a single value, whose spread is unknown."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0


def _answer(
    searcher: Searcher,
    task: str,
    mode: Mode,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    seed: int,
) -> Answers:
    """Answer every prompt, and score the answers; `task` is the name of the set."""
    scoring = searcher.scoring
    responses = searcher.answer(task, prompts, sampling, seed)
    verdicts = responses.rewarded(scoring(prompts, responses.answers, (task, None)))
    values = {"reward": _as_table(verdicts)}
    for measure in scoring.tasks[task].measures():
        values[measure] = _as_table(scoring(prompts, responses.answers, (task, measure)))
    return Answers(mode, responses, values, verdicts)


def _as_table(verdicts: Sequence[Sequence[Verdict]]) -> Float[np.ndarray, "P S"]:
    """Return rewards as numbers, NaN where an answer was rejected."""
    rows = [[nan if isinstance(v, Rejected) else float(v) for v in row] for row in verdicts]
    return np.array(rows)


def _as_text(
    text: Tokenizer, stop: Sequence[str], of_set: str, prompts: Sequence[Prompt], answers: Answers
) -> list[EvaluatedAnswer]:
    """Return the answers to the prompts of a set, for a person to read."""
    rows = []
    for i, prompt in enumerate(prompts):
        asked = answers.responses.prompt_text(text, prompt, i)
        for j, completion in enumerate(answers.responses.completions[i]):
            values = {name: float(table[i, j]) for name, table in answers.values.items()}
            scores = {name: None if isnan(value) else value for name, value in values.items()}
            verdict = answers.verdicts[i][j]
            notes: dict[str, Any] = {}
            if isinstance(verdict, Itemized):
                notes = {**verdict.items, **verdict.notes}
            row = EvaluatedAnswer(
                prompt=asked,
                completion=shown(text, completion, stop),
                reward=scores.pop("reward"),
                measures=scores,
                notes=notes,
                set=of_set,
                mode=answers.mode,
                tokens=completion.length,
                finished=completion.finished,
                id=prompt.id,
                columns=prompt.columns,
            )
            rows.append(row)
    return rows


def _scores(answers: Answers, least: Float[np.ndarray, " P"]) -> Scores:
    """Return the scores of each prompt; `least` is the reward of a right answer, NaN if none is."""
    mode = answers.mode
    scores = {}
    for name, values in answers.values.items():
        missing = np.isnan(values)
        is_reward = name == "reward"
        rejected = f"{mode}_rejected" if is_reward else f"{mode}_{name}_rejected"
        means = np.where(missing, 0.0, values).mean(1)
        if is_reward:  # of answers that were scored: 0 may be better than any reward
            means = np.ma.masked_array(values, missing).mean(1).filled(nan)
        if_rejected = 0.0 if is_reward and mode == "sampled" else None
        error = f"{mode}_{name}_stderr"
        score = Score(f"{mode}_{name}", error, rejected=rejected, if_rejected=if_rejected)
        scores[score] = means
        scores[Score(rejected)] = missing.mean(1)
    scores[Score(f"{mode}_pass@1", f"{mode}_stderr")] = _passed(answers, least)
    groups = answers.responses.completions
    scores[Score(f"{mode}_length")] = np.mean([[c.length for c in group] for group in groups], 1)
    finished = [[c.finished for c in group] for group in groups]
    scores[Score(f"{mode}_finished")] = np.mean(finished, 1)
    return scores


def _passed(answers: Answers, least: Float[np.ndarray, " P"]) -> Float[np.ndarray, " P"]:
    """Return the share of right answers to each prompt; NaN if answers are not right or wrong."""
    passed = (answers.values["reward"] >= least[:, None]).mean(1)
    return np.where(np.isnan(least), nan, passed)


def _log_ratio(responses: Responses, reference: Reference) -> tuple[Float[np.ndarray, " P"], int]:
    """Return the mean log(pi / ref) of the answers to each prompt, and the reference's version."""
    logp, version = reference.logp(responses.prompts, responses.completions)
    estimates = []
    for group, rows in zip(responses.completions, logp, strict=True):
        pairs = zip(group, rows, strict=True)
        estimates.append(fmean(float((c.logp - ref_logp).sum()) for c, ref_logp in pairs))
    return np.array(estimates), version


def _likelihood(answers: Answers, reference: Reference) -> tuple[Scores, int]:
    """Return how likely the answers are under the reference at temperature 1, and its version.

    `nats` is the mean of -log ref(y | x), from which `join` computes the perplexity. The other one,
    `perplexity_with_prompt`, divides it by the tokens of prompt and response but one, as the
    published numbers for TL;DR do (arXiv 2410.18252, 2503.18929).
    """
    prompts = answers.responses.prompts
    completions = answers.responses.completions
    logp, version = reference.logp(prompts, completions, temperature=1.0)
    nats = []
    with_prompt = []
    for prompt, group, rows in zip(prompts, completions, logp, strict=True):
        surprises = [-float(row.sum()) for row in rows]
        lengths = [len(prompt) + c.length - 1 for c in group]
        pairs = zip(surprises, lengths, strict=True)
        nats.append(fmean(surprises))
        with_prompt.append(fmean(exp(surprise / length) for surprise, length in pairs))
    published = f"{answers.mode}_perplexity_with_prompt"
    scores = {
        Score(f"{answers.mode}_nats", of_reference=True): np.array(nats),
        Score(published, f"{published}_stderr", of_reference=True): np.array(with_prompt),
    }
    return scores, version

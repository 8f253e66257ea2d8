"""Evaluation on held-out prompts: reward, pass@1, avg@n, pass@k, perplexity, task measures.

An evaluation is divided into pieces of `eval.prompts_per_task` prompts. Its scores do not depend on
which searcher evaluates which piece. Each source has separate scores, whether the run trains on it
or only evaluates it.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import comb, exp, isnan, nan, sqrt
from statistics import fmean, stdev
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from tba.agents.chat import authors, response_text
from tba.models.tokenizer import Tokenizer
from tba.prompt import Prompt, passes
from tba.scoring.verdicts import Rejection, Responses, Verdict
from tba.search.reference import Reference
from tba.search.result import EvaluatedAnswer, Evaluation, Mode
from tba.search.searcher import MOST_OF_TASK, Searcher, SearchSetup
from tba.streams import Use, seed_of
from tba.tasks import ItemizedReward
from tba.types import Sampling

SEED = 1234
"""Seed of every evaluation: all runs sample with the same random numbers."""
EXAMPLES = 8
"""Number of prompts that are kept with an answer, for display."""

Keep = Callable[[Sequence[EvaluatedAnswer]], None]
"""Callback for the answers to a piece's prompts in one mode."""

REFERENCE = ("log_ratio", "nats")
"""Values that depend on the weights of the reference."""
NO_MEASURES = ("passed", "length", "tokens", "finished", "logp", *REFERENCE)

Table = dict[str, Float[np.ndarray, "P S"]]
"""Values of S answers to each of P prompts: the reward, the task's measures, and NO_MEASURES.

A value is NaN if the answer was rejected, if nothing was sampled because a program did not call the
policy, and for `passed` also if answers are neither right nor wrong. `nats` is -log ref(y | x) at
temperature 1, and `tokens` is the length of prompt and response minus one.
"""


@dataclass(frozen=True)
class EvaluatedPiece:
    """Values of the answers to one piece of an evaluation, whose prompts are from one set."""

    set: str
    """Name of the source that is only evaluated; "" for the held-out prompts of the task."""
    prompts: list[str]
    """Digest of each prompt."""
    sources: list[str]
    """Source of each prompt within a mixture; "" in other tasks."""
    tables: Mapping[Mode, Table]
    k: Sequence[int]
    """k of each pass@k."""
    reference: int
    """Version of the reference."""
    examples: list[EvaluatedAnswer]
    seconds: float


@dataclass(frozen=True)
class Answers:
    """Responses to the prompts of a piece, and their values."""

    mode: Mode
    responses: Responses
    table: Table
    verdicts: list[list[Verdict]]
    """Verdicts of the reward."""


def pieces_of(setup: SearchSetup) -> list[tuple[str, int, tuple[Prompt, ...]]]:
    """Return the set, the offset in the set, and the prompts of each piece of an evaluation."""
    size = setup.config.eval.prompts_per_task
    divided = []
    for name, prompts in {"": setup.held_out, **setup.evaluated}.items():
        for first in range(0, len(prompts), size):
            divided.append((name, first, prompts[first : first + size]))
    return divided


def evaluate_held_out(
    searcher: Searcher, keep: Keep | None = None, tell: Callable[[str], None] | None = None
) -> Evaluation:
    """Evaluate the weights that a searcher has loaded.

    `keep` receives every answer, and `tell` a progress message before each piece.
    """
    done: list[EvaluatedPiece] = []
    count = len(pieces_of(searcher.setup))
    for number in range(count):
        if tell is not None:
            tell(f"evaluating {100 * number // count} %")
        done.append(evaluate_piece(searcher, number, keep))
    return join(searcher.engine.version, done)


def evaluate_piece(searcher: Searcher, number: int, keep: Keep | None = None) -> EvaluatedPiece:
    """Answer the prompts of one piece, greedily and by sampling, as configured in `[eval]`.

    The random numbers of a piece depend only on `SEED` and its number.
    """
    started = time.perf_counter()
    setup = searcher.setup
    settings = setup.config.eval
    name, first, prompts = pieces_of(setup)[number]
    seed = seed_of(SEED, Use.EVALUATION, number)
    limit = setup.sampling.max_tokens
    stop = setup.sampling.stop
    one = Sampling(1, 0.0, limit, stop=stop)
    several = Sampling(settings.samples, settings.temperature, limit, stop=stop)
    greedy = _answer(searcher, name, "greedy", prompts, one, seed)
    sampled = _answer(searcher, name, "sampled", prompts, several, seed)
    examples = max(0, EXAMPLES - first)
    shown = prompts[:examples] if keep is None else prompts
    readable = _as_text(searcher.text, stop, name, shown, greedy)
    if keep is not None:
        keep(readable)
        keep(_as_text(searcher.text, stop, name, prompts, sampled))
    version = searcher.reference.version
    if settings.temperature == setup.sampling.temperature:  # the reference's temperature
        nats, version = _nats(sampled.responses, searcher.reference)
        sampled.table["log_ratio"] = sampled.table["logp"] + nats
    if searcher.scoring.tasks[name].reports_perplexity:
        for answers in (greedy, sampled):
            nats, version = _nats(answers.responses, searcher.reference, temperature=1.0)
            answers.table["nats"] = nats
    return EvaluatedPiece(
        set=name,
        prompts=[hashlib.sha256(repr(prompt).encode()).hexdigest() for prompt in prompts],
        sources=[searcher.scoring.tasks[name].source(prompt)[0] for prompt in prompts],
        tables={answers.mode: answers.table for answers in (greedy, sampled)},
        k=settings.k,
        reference=version,
        examples=readable[:examples],
        seconds=time.perf_counter() - started,
    )


def join(version: int, pieces: Sequence[EvaluatedPiece]) -> Evaluation:
    """Combine the scores of all pieces. The names of a source's scores begin with `SOURCE/`.

    Scores that depend on the reference are left out if it was reset between two pieces. `seconds`
    is the sum over all pieces.
    """
    left_out = REFERENCE if len({p.reference for p in pieces}) > 1 else ()
    scores: dict[str, float] = {}
    for name in dict.fromkeys(p.set for p in pieces):
        of_set = [p for p in pieces if p.set == name]
        sources = np.concatenate([p.sources for p in of_set])
        scores |= _of_subset(name, of_set, np.full(len(sources), True), left_out)
        for source in dict.fromkeys(sources[sources != ""].tolist()):
            scores |= _of_subset(source, of_set, sources == source, left_out)
    scores["seconds"] = sum(p.seconds for p in pieces)
    held_out = [p for p in pieces if p.set == ""]
    digests = "".join(chain(*(p.prompts for p in held_out)))
    digest = hashlib.sha256(digests.encode()).hexdigest()[:16]
    tables = [p.tables["sampled"] for p in held_out]
    undefined = any(np.isnan(table["passed"]).any() for table in tables)
    by_prompt: list[float | None] = []
    for table in tables:
        values = table["reward" if undefined else "passed"]
        by_prompt += np.ma.masked_invalid(values).mean(1).tolist()  # None where all are masked
    examples = list(chain(*(p.examples for p in pieces)))
    return Evaluation(version, scores, examples, by_prompt=by_prompt, prompts=digest)


def _of_subset(
    source: str,
    pieces: Sequence[EvaluatedPiece],
    chosen: Bool[np.ndarray, " P"],
    left_out: Sequence[str],
) -> dict[str, float]:
    """Return the scores of the chosen prompts of a set, with the source as their prefix."""
    prefix = f"{source}/" if source else ""
    scores: dict[str, float] = {}
    for mode, columns in pieces[0].tables.items():
        table = {}
        for column in columns:
            if column not in left_out:
                every = np.concatenate([p.tables[mode][column] for p in pieces])
                table[column] = every[chosen]
        own = _scores(mode, table, pieces[0].k)
        scores |= {prefix + name: value for name, value in own.items()}
    return scores


def _scores(mode: Mode, table: Table, k: Sequence[int]) -> dict[str, float]:
    """Return the scores of a set or a source in it, and their standard errors.

    Standard errors are over prompts, because samples of one prompt are not independent. Samples
    that the task cannot score count as wrong, but are excluded from the mean reward, which is 0 if
    no sample is scored; `rejected` is their share. If a measure rejects all answers, or all greedy
    answers are rejected, as by a pairwise judge, these scores are left out. `sampled_log_ratio` is
    the mean log(pi / ref) of the sampled answers, in nats per response: an unbiased estimate of
    KL(pi, ref), which may be negative. Perplexities are under the reference at temperature 1:
    `perplexity` of all answers per response token, and `perplexity_with_prompt` of each answer per
    token of prompt and response, as in the published numbers for TL;DR (arXiv 2410.18252,
    2503.18929).
    """
    scores: dict[str, float] = {}
    for name, values in table.items():
        if name in NO_MEASURES:
            continue
        missing = np.isnan(values)
        rejected = f"{mode}_rejected" if name == "reward" else f"{mode}_{name}_rejected"
        scores[rejected] = float(missing.mean())
        if name == "reward":  # only of scored answers: 0 may be better than any reward
            by_prompt = np.ma.masked_array(values, missing).mean(1).compressed()
        else:
            by_prompt = np.where(missing, 0.0, values).mean(1)
        if not missing.all():
            scores |= _with_error(f"{mode}_{name}", f"{mode}_{name}_stderr", by_prompt)
        elif (mode, name) == ("sampled", "reward"):
            scores |= {"sampled_reward": 0.0, "sampled_reward_stderr": 0.0}
    passed = table["passed"]
    if not np.isnan(passed).any():
        scores |= _with_error(f"{mode}_pass@1", f"{mode}_stderr", passed.mean(1))
        if mode == "sampled":
            n = passed.shape[1]
            scores |= _with_error(f"avg@{n}", f"avg@{n}_stderr", passed.mean(1))
            for each in k:
                chances = np.array([pass_at_k(n, int(correct), each) for correct in passed.sum(1)])
                scores |= _with_error(f"pass@{each}", f"pass@{each}_stderr", chances)
    if np.isnan(table["length"]).all():
        return scores
    for name in ("length", "finished", "log_ratio"):
        if name in table:
            scores[f"{mode}_{name}"] = float(np.nanmean(table[name]))
    if "nats" in table:
        scores[f"{mode}_perplexity"] = exp(np.nansum(table["nats"]) / np.nansum(table["length"]))
        of_each = np.exp(table["nats"] / table["tokens"])
        unsampled = np.isnan(table["length"])
        with_prompt = np.ma.masked_array(of_each, unsampled).mean(1).compressed()
        name = f"{mode}_perplexity_with_prompt"
        scores |= _with_error(name, f"{name}_stderr", with_prompt)
    return scores


def _with_error(name: str, error: str, by_prompt: Float[np.ndarray, " P"]) -> dict[str, float]:
    """Return the mean over prompts, and its standard error."""
    values = by_prompt.tolist()
    return {name: fmean(values), error: stderr(values)}


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Estimate from n answers the chance that any of k is correct (arXiv 2107.03374, eq. 1)."""
    return 1.0 - comb(n - correct, k) / comb(n, k)


def stderr(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 for a single value, as its spread is unknown."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0


def _answer(
    searcher: Searcher,
    task: str,
    mode: Mode,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    seed: int,
) -> Answers:
    """Answer every prompt and score the answers; `task` is the name of the set."""
    scoring = searcher.scoring
    responses = searcher.answer(task, prompts, sampling, seed, MOST_OF_TASK / 2)
    answers = responses.answers
    verdicts = responses.rewarded(scoring(prompts, answers, (task, None)), answers)
    table = {"reward": _as_table(verdicts)}
    for measure in scoring.tasks[task].measures():
        table[measure] = _as_table(scoring(prompts, answers, (task, measure)))
    levels = [scoring.tasks[task].source(prompt)[1].pass_reward for prompt in prompts]
    least = np.array([[nan if level is None else level] for level in levels])
    groups = responses.completions
    length = np.array([[c.length or nan for c in group] for group in groups], float)
    finished = [[c.finished for c in group] for group in groups]
    logp = [[float(c.logp.sum()) for c in group] for group in groups]
    before = np.array([[len(prompt) - 1] for prompt in responses.prompts])
    table |= {
        "passed": np.where(np.isnan(least), nan, passes(table["reward"], least)),
        "length": length,
        "tokens": before + length,
        "finished": np.where(np.isnan(length), nan, finished),
        "logp": np.where(np.isnan(length), nan, logp),
    }
    return Answers(mode, responses, table, verdicts)


def _as_table(verdicts: Sequence[Sequence[Verdict]]) -> Float[np.ndarray, "P S"]:
    """Return rewards as numbers; NaN for rejected answers."""
    rows = [[nan if isinstance(v, Rejection) else float(v) for v in row] for row in verdicts]
    return np.array(rows)


def _as_text(
    text: Tokenizer, stop: Sequence[str], of_set: str, prompts: Sequence[Prompt], answers: Answers
) -> list[EvaluatedAnswer]:
    """Return the answers to the prompts of a set in readable form."""
    rows = []
    for i, prompt in enumerate(prompts):
        asked = text.prompt(answers.responses.prompts[i])  # as the policy reads it
        for j, completion in enumerate(answers.responses.completions[i]):
            scores = {}
            for name, values in answers.table.items():
                if name not in NO_MEASURES:
                    value = float(values[i, j])
                    scores[name] = None if isnan(value) else value
            verdict = answers.verdicts[i][j]
            notes: dict[str, Any] = {}
            if isinstance(verdict, ItemizedReward):
                notes = {**verdict.items, **verdict.notes}
            row = EvaluatedAnswer(
                prompt=asked,
                completion=response_text(text, completion, stop),
                reward=scores.pop("reward"),
                measures=scores,
                notes=notes,
                set=of_set,
                mode=answers.mode,
                tokens=completion.length,
                finished=completion.finished,
                authors=authors(text, completion),
                id=prompt.id,
                columns=prompt.columns,
            )
            rows.append(row)
    return rows


def _nats(
    responses: Responses, reference: Reference, temperature: float | None = None
) -> tuple[Float[np.ndarray, "P S"], int]:
    """Return -log ref(y | x) of each response, and the reference's version."""
    logp, version = reference.logp(responses.prompts, responses.completions, temperature)
    return np.array([[-float(row.sum()) for row in rows] for rows in logp]), version

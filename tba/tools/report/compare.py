"""Comparison of runs: whether one is better than another, by its scores on held-out prompts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot, isnan, nan, sqrt

import numpy as np
import pandas as pd

from tba.runs.folder import Row
from tba.tools.report.page import names, ranked, with_stderr

CLEAR = 2.0
"""Number of standard errors above which a difference is marked."""
STAR = "\N{NO-BREAK SPACE}★"


@dataclass(frozen=True)
class EvaluatedRun:
    """Held-out scores of a run by step, and of each prompt where the run stored them."""

    name: str
    task: Row
    setting: str
    """The settings except seed and folder: runs that share them differ only in the seed."""
    table: pd.DataFrame
    """Evaluations, indexed by step."""
    by_prompt: Mapping[int, Row]
    """Rows of `scores.jsonl` by step."""


def compare(runs: Sequence[EvaluatedRun], measure: str) -> tuple[pd.DataFrame, list[str]]:
    """Return the differences of all later runs from the first one, and what limits them."""
    first, *others = runs
    rows = []
    notes = []
    for other in others:
        if other.task != first.task:
            tasks = f"{first.task['use']} and {other.task['use']}"
            notes.append(f"{first.name} and {other.name} have different tasks ({tasks}).")
            continue
        row = {"run": f"{other.name} − {first.name}"}
        at = {"same step": _last_common(first, other), "best step": _best(first, other, measure)}
        for label, steps in at.items():
            row[label] = "–" if steps is None else _difference(first, other, steps, measure)
        rows.append(row)
    seeds = Counter(run.setting for run in runs)
    if max(seeds.values()) == 1:
        notes.append(
            "One seed of each setting: ± is over held-out prompts, not over training seeds."
        )
    else:
        text = ", ".join(map(str, seeds.values()))
        notes.append(f"Seeds of the {len(seeds)} settings: {text}. ± is over held-out prompts.")
    return pd.DataFrame(rows), notes


def _last_common(first: EvaluatedRun, other: EvaluatedRun) -> tuple[int, int] | None:
    common = first.table.index.intersection(other.table.index)
    return None if common.empty else (int(common.max()),) * 2


def _best(first: EvaluatedRun, other: EvaluatedRun, measure: str) -> tuple[int, int] | None:
    scores = [ranked(run.table[run.table.index > 0], measure) for run in (first, other)]
    if any(each.empty for each in scores):
        return None
    return int(scores[0].idxmax()), int(scores[1].idxmax())


def _difference(
    first: EvaluatedRun, other: EvaluatedRun, steps: tuple[int, int], measure: str
) -> str:
    """Return the difference ± standard error as text; ★ if it is more than two of these."""
    value, error, how = nan, nan, ""
    pairs = list(zip((first, other), steps, strict=True))
    if all(_measure_by_prompt(run, step) == measure for run, step in pairs):
        value, error, how = _paired(first, other, steps)
    if isnan(value):
        column, stderr = names(measure, "sampled")
        ends = [run.table.loc[step] for run, step in pairs]
        value = ends[1].get(column, nan) - ends[0].get(column, nan)
        error = hypot(*(end.get(stderr, nan) for end in ends))
        how = "not paired"
    form = "{:+.1%}" if measure == "pass@1" else "{:+.3f}"
    text = with_stderr(value, error, form).replace("±\N{NO-BREAK SPACE}+", "±\N{NO-BREAK SPACE}")
    better = other.name if value > 0 else first.name
    told = f"{STAR} {better} is better" if abs(value) > CLEAR * error > 0 else ", not clear"
    at = f"step {steps[0]}" if steps[0] == steps[1] else f"step {steps[1]} against {steps[0]}"
    return f"{text}{told} ({at}, {how})"


def _measure_by_prompt(run: EvaluatedRun, step: int) -> str:
    """Return the score of single prompts in `scores.jsonl`: pass@1 where it is defined."""
    passed = run.table.loc[step].get(names("pass@1", "sampled")[0], nan)
    return "reward" if isnan(passed) else "pass@1"


def _paired(
    first: EvaluatedRun, other: EvaluatedRun, steps: tuple[int, int]
) -> tuple[float, float, str]:
    """Return mean and standard error of the differences by prompt; NaN if prompts differ."""
    rows = [run.by_prompt.get(step) for run, step in zip((first, other), steps, strict=True)]
    if None in rows or rows[0]["prompts"] != rows[1]["prompts"]:  # type: ignore[index]
        return nan, nan, ""
    scores = [np.array(row["scores"], np.float64) for row in rows]  # type: ignore[index]
    differences = scores[1] - scores[0]
    known = differences[~np.isnan(differences)]
    if len(known) < 2:
        return nan, nan, ""
    error = float(known.std(ddof=1)) / sqrt(len(known))
    return float(known.mean()), error, f"paired over {len(known)} prompts"

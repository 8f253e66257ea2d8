"""Held-out scores in tables of evaluations: of all held-out prompts, and of subsets.

A subset is an evaluation set or a part of a mixture; "" is the held-out set.
"""

from collections.abc import Sequence
from math import nan

import pandas as pd

from tba.report.page import with_stderr
from tba.studies.results import Row

MODES = ("sampled", "greedy")


def names(measure: str, mode: str, subset: str = "") -> tuple[str, str]:
    """Return the columns of a score, `pass@1` or `reward`, and of its standard error."""
    stderr = "stderr" if measure == "pass@1" else "reward_stderr"
    start = f"eval/{subset}/{mode}" if subset else f"eval/{mode}"
    return f"{start}_{measure}", f"{start}_{stderr}"


def score(evaluation: Row, measure: str, mode: str, subset: str = "") -> str:
    value, stderr = (evaluation.get(name, nan) for name in names(measure, mode, subset))
    return with_stderr(value, stderr, "{:.1%}" if measure == "pass@1" else "{:.3f}")


def measures_of(runs: Sequence[pd.DataFrame]) -> dict[str, str]:
    """Return the score to show of each subset: pass@1 if all evaluations of it have that."""
    end, found = "/sampled_reward", {"": list(runs)}
    for evaluations in runs:
        for column in evaluations:
            name = column.removeprefix("eval/").removesuffix(end)
            if column == f"eval/{name}{end}":
                found.setdefault(name, []).append(evaluations)
    measures = {}
    for subset, tables in found.items():
        column, _ = names("pass@1", "sampled", subset)
        passes = pd.concat(table.reindex(columns=[column]) for table in tables)
        graded = len(passes) and passes.notna().all(axis=None)
        measures[subset] = "pass@1" if graded else "reward"
    return measures

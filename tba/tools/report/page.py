"""Functions shared by all pages: format numbers and held-out scores, and write the HTML file.

Each score belongs to a source, or to "", the held-out prompts of the task.
"""

import re
from collections.abc import Mapping, Sequence
from math import isnan, nan
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tba.runs.folder import Row, own_folder, write_whole

MODES = ("sampled", "greedy")
REWARD = re.compile("eval/(?:(.+)/)?sampled_reward")
"""Metric name of the reward of a subset."""
TEMPLATES = Path(__file__).parent / "templates"


class NotBegun(ValueError):
    """There is nothing to report yet."""


def fitted(value: float, form: str) -> str:
    """Format a number that may be missing (NaN); large numbers get few digits."""
    if isnan(value):
        return "–"
    return f"{value:.4g}" if abs(value) >= 1e5 else form.format(value)


def with_stderr(mean: float, stderr: float, form: str) -> str:
    """Format a mean and its standard error; either may be missing (NaN)."""
    error = "" if isnan(stderr) else f" ± {fitted(stderr, form)}"
    return fitted(mean, form) + error.replace(" ", "\N{NO-BREAK SPACE}")


def script(*names: str) -> Markup:
    """Return the script of a page, concatenated from template files."""
    return Markup("\n".join((TEMPLATES / name).read_text("utf-8") for name in names))


def write_page(folder: Path, template: str, values: Mapping[str, Any], reload: float = 0) -> Path:
    """Write `index.html` from a template. Text in `values` is always escaped.

    With `reload`, an open page loads itself again after that many seconds.
    """
    own_folder(folder).mkdir(parents=True, exist_ok=True)
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    page = folder / "index.html"
    text = environment.get_template(template).render({**values, "reload": reload})
    write_whole(page, text, errors="xmlcharrefreplace")  # for unpaired surrogates
    return page


def names(measure: str, mode: str, subset: str = "") -> tuple[str, str]:
    """Return the metric names of a score, such as `pass@1` or `reward`, and its standard error."""
    stderr = "stderr" if measure == "pass@1" else f"{measure}_stderr"
    start = f"eval/{subset}/{mode}" if subset else f"eval/{mode}"
    return f"{start}_{measure}", f"{start}_{stderr}"


def ranked(evaluations: pd.DataFrame, measure: str) -> pd.Series:
    """Return the scores that rank evaluations, as `checkpoint.score_of` does, by index."""
    column, _ = names(measure, "sampled")
    table = evaluations.reindex(columns=[column, "eval/sampled_rejected"])
    scores = table[column].where(table["eval/sampled_rejected"] != 1).dropna()
    return scores.map(lambda score: float(f"{score:.9g}"))


def score(evaluation: Row, measure: str, mode: str, subset: str = "") -> str:
    value, stderr = (evaluation.get(name, nan) for name in names(measure, mode, subset))
    return with_stderr(value, stderr, "{:.1%}" if measure == "pass@1" else "{:.3f}")


def measures_of(runs: Sequence[pd.DataFrame]) -> dict[str, str]:
    """Return the score to show for each subset: pass@1 if all of its evaluations have it."""
    table = pd.concat(runs)
    measures = {"": "reward"}
    for column in table:
        if match := REWARD.fullmatch(column):
            subset = match[1] or ""
            name, _ = names("pass@1", "sampled", subset)
            passes = table.reindex(columns=[name])[table[column].notna()]
            measures[subset] = "pass@1" if passes.notna().all(axis=None) else "reward"
    return measures

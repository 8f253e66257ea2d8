"""Write the tables of docs/results.md again, from the rows that are kept beside the study.

    python studies/off_policy/tables.py

A table stands in the page between `<!-- name -->` and `<!-- end -->`. stages.py and long.py write
the rows and draw the figures; gradient_variance.py measures the noise of gradients.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from long import EXPERIMENTS, savings
from stages import LAGS

from studies.coverage.study import PARTS

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "results.md"


def variances(rows: pd.DataFrame, axis: str, key: str) -> str:
    """Return noise / signal of gradients ± standard error: objective x K, or x length."""
    own = rows[rows["axis"] == axis]
    columns = own[key].unique()
    heads = " | ".join(f"{axis} {column}" for column in columns)
    lines = [f"| objective | {heads} |", "| --- |" + " ---: |" * len(columns)]
    for name, of_objective in own.groupby("objective", sort=False):
        at = of_objective.set_index(key).loc[columns]
        ratios = zip(at["ratio"], at["ratio_stderr"], strict=True)
        lines.append(f"| {name} | {' | '.join(f'{r:.1f} ± {error:.1f}' for r, error in ratios)} |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """Return each table by its name."""
    noise = pd.DataFrame(json.loads((HERE / "gradient_variance.json").read_text()))
    return {
        **{experiment.name: experiment.table() for experiment in (LAGS, *EXPERIMENTS.values())},
        "savings": savings(),
        **{name: part.tables() for name, part in PARTS.items()},
        **{f"{name}_differences": part.differences() for name, part in PARTS.items()},
        "noise_k": variances(noise, "K", "k"),
        "noise_length": variances(noise, "length", "length"),
    }


def written(page: str, texts: Mapping[str, str]) -> str:
    """Return the page with the tables in their places."""
    for name, text in texts.items():
        place = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        page = re.sub(place, lambda m, text=text: f"{m[1]}{text}\n{m[2]}", page, flags=re.DOTALL)
    return page


def main() -> None:
    PAGE.write_text(written(PAGE.read_text(), tables()))


if __name__ == "__main__":
    main()

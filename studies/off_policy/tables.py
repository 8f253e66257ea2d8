"""The tables of docs/results.md, from the rows of results.json.

    python studies/off_policy/tables.py [RATES RUNS]

copies the results from the folders of both studies, by default runs/off_policy_rates and
runs/off_policy, and writes the tables again. A table stands in the page between `<!-- name -->`
and `<!-- end -->`. Each number is a mean over seeds, ± its standard error.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "results.md"
KEPT = (
    "grid", "label", "objective", "seed", "status", "error", "last", "peak", "peak_step", "drop",
    "sampled_pass@1", "greedy_pass@1", "pass@4", "sampled_log_ratio", "kl", "log_ratio", "ess",
    "lag_mean", "samples_generated", "samples_trained", "steps", "seconds", "settings",
)  # fmt: skip
PICTURES = ("gradient_variance.png",)
"""The others are pictures of figures of the study's page: scripts/screenshots.py takes such."""
Form = Callable[[float], str]
Row = Mapping[str, Any]


def share(value: float) -> str:
    return f"{100 * value:.1f}"


def nats(value: float) -> str:
    return f"{value:.2f}"


def mean(values: pd.Series, form: Form) -> str:
    """Return the mean over the runs that have a value, ± its standard error."""
    if values.count() == 0:
        return "–"
    text = form(values.mean())
    if values.count() > 1:
        text += f" ± {form(values.sem())}"
    failed = int(values.isna().sum())
    return f"{text} ({failed} failed)" if failed else text


def table(
    rows: pd.DataFrame, down: str, across: str, name: str = "last", form: Form = share,
    best: bool = False,
) -> str:  # fmt: skip
    """Return a table with a row for each value of `down`; `best`: the best of each row is bold."""
    columns = rows[across].unique()
    lines = [markdown([title(down), *(f"{title(across)} {c}" for c in columns)])]
    lines.append("| --- |" + " ---: |" * len(columns))
    for value, own in rows.groupby(down, sort=False):
        cells = [own.loc[own[across] == c, name] for c in columns]
        texts = [mean(cell, form) for cell in cells]
        if best:
            means = [cell.fillna(0).mean() for cell in cells]
            at = means.index(max(means))
            texts[at] = f"**{texts[at]}**"
        lines.append(markdown([str(value), *texts]))
    return "\n".join(lines)


def listed(rows: pd.DataFrame, key: str) -> str:
    """Return a table with pass@1 at the end, the worst drop and log(pi / ref) of each value."""
    heads = [title(key), "pass@1", "worst drop", "log(pi / ref)"]
    lines = [markdown(heads), "| --- | ---: | ---: | ---: |"]
    for value, own in rows.groupby(key, sort=False):
        scores = [mean(own["last"], share), mean(own["drop"], share)]
        lines.append(markdown([str(value), *scores, mean(own["sampled_log_ratio"], nats)]))
    return "\n".join(lines)


def variances(rows: pd.DataFrame, axis: str, key: str) -> str:
    own = rows[rows["axis"] == axis]
    columns = own[key].unique()
    lines = [markdown(["objective", *(f"{axis} {c}" for c in columns)])]
    lines.append("| --- |" + " ---: |" * len(columns))
    for name, of_objective in own.groupby("objective", sort=False):
        at = of_objective.set_index(key).loc[columns]
        ratios = zip(at["ratio"], at["ratio_stderr"], strict=True)
        lines.append(markdown([str(name), *(f"{r:.1f} ± {error:.1f}" for r, error in ratios)]))
    return "\n".join(lines)


def title(key: str) -> str:
    return key.removesuffix(".use").rpartition(".")[2]


def markdown(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def tables(rows: Sequence[Row], gradients: Sequence[Row]) -> dict[str, str]:
    def grid(*names: str) -> pd.DataFrame:
        own = [r for r in rows if r["grid"] in names]
        return pd.DataFrame([{**r, **r["settings"]} for r in own])

    lag = "runtime.lag"
    use = "objective.use"
    noise = pd.DataFrame(gradients)
    compared = grid("lags", "correction").query("grid != 'lags' or objective in ('tb', 'rloo')")
    compared["label"] = compared["label"].str.split(", lag").str[0]
    faults = grid("faults")
    faults["label"] = faults["label"].str.split(", reward").str[0]
    return {
        "rates": table(grid("rates"), use, "trainer.learning_rate", best=True),
        "lags": table(grid("lags"), use, lag),
        "drops": table(grid("lags"), use, lag, "drop"),
        "log_ratio": table(grid("lags"), use, lag, "sampled_log_ratio", nats),
        "ess": table(grid("lags"), use, lag, "ess", nats),
        "same_rate": table(grid("same_rate"), use, lag),
        "replayed": table(grid("replayed"), use, "strategy.recent"),
        "correction": table(compared, "label", lag),
        "m_and_k": table(grid("m_and_k"), "strategy.recent", "runtime.publish_every"),
        "group_size": listed(grid("group_size"), "trainer.group_size"),
        "beta": listed(grid("beta"), "objective.beta"),
        "replay": listed(grid("replay"), "strategy.reward"),
        "faults": table(faults, "label", "strategy.reward"),
        "selection": listed(grid("selection"), "selection.use"),
        "noise_k": variances(noise, "K", "k"),
        "noise_length": variances(noise, "length", "length"),
    }


def written(page: str, texts: Mapping[str, str]) -> str:
    """Return the page with the tables in their places."""
    for name, text in texts.items():
        place = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        page = re.sub(place, lambda m, text=text: f"{m[1]}{text}\n{m[2]}", page, flags=re.DOTALL)
    return page


def load() -> tuple[list[Row], list[Row]]:
    rows = json.loads((HERE / "results.json").read_text())
    return rows, json.loads((HERE / "gradient_variance.json").read_text())


def take_over(rates: Path, runs: Path) -> None:
    """Copy the rows of both studies, with the settings of each, and the figures of the page."""
    lines = []
    for folder in (rates, runs):
        for row in json.loads((folder / "results.json").read_text()):
            lines.append(json.dumps({key: rounded(row.get(key)) for key in KEPT}))
    (HERE / "results.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")
    for name in ("gradient_variance.json", *PICTURES):
        shutil.copy(runs / name, HERE)


def rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def main() -> None:
    folders = sys.argv[1:] or ["runs/off_policy_rates", "runs/off_policy"]
    take_over(*(Path(folder) for folder in folders))
    PAGE.write_text(written(PAGE.read_text(), tables(*load())))


if __name__ == "__main__":
    main()

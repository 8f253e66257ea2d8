"""The tables of docs/results.md, from the rows of results.json.

    python studies/off_policy/tables.py [RUNS]     takes the results over from RUNS (runs/off_policy) and writes the tables anew

A table stands in the page between `<!-- name -->` and `<!-- end -->`. Each number is a mean over seeds, ± its standard error.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tba.studies.results import stderr

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "results.md"
KEPT = (
    "grid", "label", "objective", "seed", "status", "error", "last", "peak", "peak_step", "drop", "sampled_pass@1", "greedy_pass@1", "pass@4", "sampled_kl",
    "kl", "ess", "lag_mean", "samples_generated", "samples_trained", "steps", "seconds", "settings",
)  # fmt: skip
Row = Mapping[str, Any]


def told(rows: Sequence[Row], name: str, form: Callable[[float], str]) -> str:
    values = [r[name] for r in rows if r[name] is not None]
    if not values:
        return "–"
    error = stderr(values)
    spread = "" if error is None else f" ± {form(error)}"
    return (
        form(fmean(values))
        + spread
        + (f" ({len(rows) - len(values)} failed)" if len(values) < len(rows) else "")
    )


def share(value: float) -> str:
    return f"{100 * value:.1f}"


def nats(value: float) -> str:
    return f"{value:.2f}"


def table(
    rows: Sequence[Row],
    down: str,
    across: str,
    name: str = "last",
    form: Callable[[float], str] = share,
    best: bool = False,
) -> str:
    """`down` and `across` are keys of the settings, or `label`; with `best` the highest mean of each row is bold."""

    def value(row: Row, key: str) -> Any:
        return row["label"] if key == "label" else row["settings"].get(key)

    lines, columns = (list(dict.fromkeys(value(r, key) for r in rows)) for key in (down, across))
    head = [
        down.removesuffix(".use").rpartition(".")[2],
        *(f"{across.rpartition('.')[2]} {c}" for c in columns),
    ]
    text = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * len(columns)]
    for line in lines:
        cells = [
            [r for r in rows if value(r, down) == line and value(r, across) == c] for c in columns
        ]
        shown = [told(cell, name, form) for cell in cells]
        if best:
            means = [fmean(r[name] or 0.0 for r in cell) for cell in cells]
            shown = [
                f"**{s}**" if m == max(means) else s for s, m in zip(shown, means, strict=True)
            ]
        text.append("| " + " | ".join([str(line), *shown]) + " |")
    return "\n".join(text)


def listed(rows: Sequence[Row], key: str) -> str:
    """A line for each value of `key`: pass@1 at the end, its worst drop after the peak, and the KL."""
    text = [
        f"| {key.removesuffix('.use').rpartition('.')[2]} | pass@1 | worst drop | KL |",
        "| --- | ---: | ---: | ---: |",
    ]
    for v in dict.fromkeys(r["settings"].get(key) for r in rows):
        own = [r for r in rows if r["settings"].get(key) == v]
        text.append(
            f"| {v} | {told(own, 'last', share)} | {told(own, 'drop', share)} | {told(own, 'sampled_kl', nats)} |"
        )
    return "\n".join(text)


def variances(found: Sequence[Row], axis: str, key: str) -> str:
    own = [r for r in found if r["axis"] == axis]
    columns = list(dict.fromkeys(r[key] for r in own))
    text = [
        "| objective | " + " | ".join(f"{axis} {c}" for c in columns) + " |",
        "| --- |" + " ---: |" * len(columns),
    ]
    for name in dict.fromkeys(r["objective"] for r in own):
        text.append(
            f"| {name} | "
            + " | ".join(
                f"{r['ratio']:.1f} ± {r['ratio_stderr']:.1f}"
                for c in columns
                for r in own
                if r["objective"] == name and r[key] == c
            )
            + " |"
        )
    return "\n".join(text)


def tables(rows: Sequence[Row], gradients: Sequence[Row]) -> dict[str, str]:
    def grid(name: str) -> list[Row]:
        return [r for r in rows if r["grid"] == name]

    lag, use = "runtime.lag", "objective.use"
    compared = [r for r in grid("lags") if r["objective"] in ("tb", "rloo")] + grid("correction")
    return {
        "rates": table(grid("rates"), use, "trainer.learning_rate", best=True),
        "lags": table(grid("lags"), use, lag),
        "drops": table(grid("lags"), use, lag, "drop"),
        "kl": table(grid("lags"), use, lag, "sampled_kl", nats),
        "ess": table(grid("lags"), use, lag, "ess", nats),
        "same_rate": table(grid("same_rate"), use, lag),
        "replayed": table(grid("replayed"), use, "strategy.recent"),
        "correction": table(
            [{**r, "label": r["label"].split(", lag")[0]} for r in compared], "label", lag
        ),
        "m_and_k": table(grid("m_and_k"), "strategy.recent", "runtime.publish_every"),
        "group_size": listed(grid("group_size"), "trainer.group_size"),
        "beta": listed(grid("beta"), "objective.beta"),
        "replay": listed(grid("replay"), "strategy.reward"),
        "faults": table(
            [{**r, "label": fault(r)} for r in grid("faults")], "label", "strategy.reward"
        ),
        "selection": listed(grid("selection"), "selection.use"),
        "noise_k": variances(gradients, "K", "k"),
        "noise_length": variances(gradients, "length", "length"),
    }


def fault(row: Row) -> str:
    kind, percent = row["settings"]["faults.kind"], round(100 * row["settings"]["faults.share"])
    return f"{percent} % {({'flip': 'flipped', 'plant': 'planted'})[kind]}" if percent else "none"


def written(page: str, found: Mapping[str, str]) -> str:
    """The page with the tables in their places."""
    for name, text in found.items():
        page = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)",
            lambda m, text=text: f"{m[1]}{text}\n{m[2]}",
            page,
            flags=re.DOTALL,
        )
    return page


def load() -> tuple[list[Row], list[Row]]:
    return json.loads((HERE / "results.json").read_text()), json.loads(
        (HERE / "gradient_variance.json").read_text()
    )


def take_over(runs: Path) -> None:
    """The rows of the runs, with the settings of each, and the pictures that the page shows."""
    rows = json.loads((runs / "results.json").read_text())
    lines = (json.dumps({key: rounded(row.get(key)) for key in KEPT}) for row in rows)
    (HERE / "results.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")
    for name in (
        "gradient_variance.json",
        "gradient_variance.png",
        "report/lags_against.png",
        "report/lags_curves.png",
        "report/replayed_curves.png",
    ):
        shutil.copy(runs / name, HERE)


def rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def main() -> None:
    take_over(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/off_policy"))
    PAGE.write_text(written(PAGE.read_text(), tables(*load())))


if __name__ == "__main__":
    main()

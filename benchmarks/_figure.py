"""The README's figure: held-out score of the reference run against wall-clock time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _runs import SIDES, best_of, reference_runs

FIGURE = Path(__file__).parent.parent / "docs" / "reference_run.png"
NAMES = {"asynchronous": "asynchronous", "synchronous": "synchronous", "trl": "TRL 1.16"}
COLORS = {"asynchronous": "#1f77b4", "synchronous": "#2ca02c", "trl": "#d62728"}


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the curves of each side's best rate, without latency and, if there are any, with 1 s."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = {run["latency"] for run in runs}
    titles = {None: "rewards at once", 1.0: "1 s of latency for each reward"}
    panels = {latency: title for latency, title in titles.items() if latency in measured}
    figure, grid = pyplot.subplots(
        1, len(panels), figsize=(1.5 + 4 * len(panels), 3.4), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    axes = grid[0]
    for axis, (latency, title) in zip(axes, panels.items(), strict=True):
        for side in SIDES:
            curves = reference_runs(runs, side, lora=False, latency=latency)
            if latency is None and curves:
                best = best_of(curves)
                curves = [run for run in curves if best.is_of(run)]
            for i, run in enumerate(curves):
                seconds = [point["seconds"] for point in run["curve"]]
                scores = [point["score"] for point in run["curve"]]
                label = NAMES[side] if i == 0 else None
                axis.plot(seconds, scores, color=COLORS[side], label=label, marker=".", lw=1.3)
        axis.axhline(0.5, color="gray", lw=0.8, ls=":")
        axis.set(title=title, xlabel="seconds of training")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out sampled accuracy")
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend(loc="lower right")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)

"""Parts that all figures of a study share: colours, axes, and the page that contains them."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tba.report import page

# after Okabe and Ito, for colour-blind readers
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#c2578f", "#e69f00", "#4ba6dc", "#6b4fa0",
    "#22262d", "#8c5a3c", "#7f8c1f", "#e8a0bf", "#17a2a2",
)  # fmt: skip
GREY, RULE = "#5b6472", "#e4e8ee"
Figures = dict[str, Figure]


def dress(axes: Axes, title: str, below: str) -> None:
    """Set title, label, grid and colours of the axes."""
    shown = title if len(title) <= 52 else f"{title[:51]}…"
    axes.set_title(plain(shown), loc="left", fontsize=10.5)
    axes.set_xlabel(below, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8bec8")
    axes.tick_params(which="both", length=0, labelcolor=GREY)
    axes.grid(color=RULE)
    axes.set_axisbelow(True)


def plain(text: str) -> str:
    """Escape dollars, which begin a formula, and a leading `_`, which hides a legend's entry."""
    return text.lstrip("_").replace("$", r"\$")


def short(value: float, _: float) -> str:
    """Format a tick: 20k, 0.5, 1e-4."""
    size = abs(value)
    if 0 < size < 1e-3:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    if size >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if size >= 1e3 else f"{value:g}"


def write_page(folder: Path, template: str, values: Mapping[str, Any], figures: Figures) -> Path:
    """Write `index.html`, which contains the figures, and each figure as `NAME.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {}
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=150)
        pictures[name] = base64.b64encode(path.read_bytes()).decode()
    return page.write_page(folder, template, {**values, "pictures": pictures})

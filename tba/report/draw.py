"""Parts that all reports share: colours, axes, numbers, pictures and the HTML page."""

import base64
from collections.abc import Mapping
from math import isnan
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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


def number(value: float, form: str) -> str:
    """Format a number that may be missing (NaN)."""
    return "–" if isnan(value) else form.format(value)


def with_stderr(mean: float, stderr: float, form: str) -> str:
    """Format a mean and its standard error, each of which may be missing (NaN)."""
    error = "" if isnan(stderr) else f" ± {form.format(stderr)}"
    return number(mean, form) + error.replace(" ", "\N{NO-BREAK SPACE}")


def write_page(folder: Path, template: str, values: Mapping[str, Any], figures: Figures) -> Path:
    """Write `index.html`, which contains the figures, and each figure as `NAME.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {}
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=150)
        pictures[name] = base64.b64encode(path.read_bytes()).decode()
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    text = environment.get_template(template).render(**values, pictures=pictures)
    page = folder / "index.html"
    page.write_text(text, encoding="utf-8", errors="xmlcharrefreplace")  # for half surrogate pairs
    return page

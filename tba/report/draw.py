"""What all reports share: colours, axes, numbers, pictures and the page around them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#c2578f", "#e69f00", "#4ba6dc", "#6b4fa0",  # after Okabe and Ito: colour-blind readers tell them apart too
    "#22262d", "#8c5a3c", "#7f8c1f", "#e8a0bf", "#17a2a2",
)  # fmt: skip
GREY, RULE = "#5b6472", "#e4e8ee"
TEMPLATES = Path(__file__).parent / "templates"


def dress(axes: Axes, title: str, below: str) -> None:
    axes.set_title(
        plain(title if len(title) <= 52 else f"{title[:51]}…"), loc="left", fontsize=10.5
    )
    axes.set_xlabel(below, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8bec8")
    axes.tick_params(which="both", length=0, labelcolor=GREY)
    axes.grid(color=RULE)
    axes.set_axisbelow(True)


def plain(text: str) -> str:
    """Matplotlib reads formulas between dollars, and hides a legend's text that begins with an underscore."""
    return text.lstrip("_").replace("$", r"\$")


def short(value: float, _: int | None = None) -> str:
    """A tick: 20k, 0.5, 1e-4."""
    if 0 < abs(value) < 1e-3:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    return (
        f"{value / 1e6:g}M"
        if abs(value) >= 1e6
        else f"{value / 1e3:g}k"
        if abs(value) >= 1e3
        else f"{value:g}"
    )


def number(value: float | None, share: bool = False) -> str:
    """In a table: 0.123 or 12.3%."""
    return "–" if value is None else f"{value:.1%}" if share else f"{value:.3f}"


def png(figure: Figure, path: Path) -> str:
    """Saves the figure; returns it as the page holds it."""
    image = BytesIO()
    figure.savefig(image, format="png", dpi=150)
    path.write_bytes(image.getvalue())
    return base64.b64encode(image.getvalue()).decode()


def write_page(folder: Path, template: str, values: Mapping[str, Any]) -> Path:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = folder / "index.html"
    page.write_text(
        environment.get_template(template).render(values),
        encoding="utf-8",
        errors="xmlcharrefreplace",
    )  # half a surrogate pair may be there
    return page

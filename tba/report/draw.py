"""What all reports share: colours, axes, pictures and the page around them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#c2578f", "#e69f00", "#4ba6dc", "#6b4fa0")  # after Okabe and Ito: colour-blind readers tell them apart too
GREY, RULE = "#5b6472", "#e4e8ee"
TEMPLATES = Path(__file__).parent.parent / "templates"


def dress(axes: Axes, title: str, below: str) -> None:
    title = title if len(title) <= 52 else f"{title[:51]}…"
    axes.set_title(title.replace("$", r"\$"), loc="left", fontsize=10.5)
    axes.set_xlabel(below, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8bec8")
    axes.tick_params(which="both", length=0, labelcolor=GREY)
    axes.grid(color=RULE)
    axes.set_axisbelow(True)


def short(value: float, _: int | None = None) -> str:
    return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1e3:g}k" if abs(value) >= 1e3 else f"{value:g}"


def tick(value: float, _: int | None = None) -> str:
    """As `short`, and 1e-4 for what is small."""
    return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-") if 0 < abs(value) < 1e-3 else short(value)


def png(figure: Figure, path: Path) -> str:
    """Saves the figure; returns it as the page holds it."""
    image = BytesIO()
    figure.savefig(image, format="png", dpi=150)
    path.write_bytes(image.getvalue())
    return base64.b64encode(image.getvalue()).decode()


def write_page(folder: Path, template: str, values: Mapping[str, Any]) -> Path:
    loader = FileSystemLoader(TEMPLATES)
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).get_template(template)
    page = folder / "index.html"
    page.write_text(found.render(values), encoding="utf-8", errors="xmlcharrefreplace")  # a completion may hold half a surrogate pair
    return page

"""Parts that all pages share: numbers as text, and the HTML file."""

from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from math import isnan
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"


def number(value: float, form: str) -> str:
    """Format a number that may be missing (NaN)."""
    return "–" if isnan(value) else form.format(value)


def with_stderr(mean: float, stderr: float, form: str) -> str:
    """Format a mean and its standard error, each of which may be missing (NaN)."""
    error = "" if isnan(stderr) else f" ± {form.format(stderr)}"
    return number(mean, form) + error.replace(" ", "\N{NO-BREAK SPACE}")


def script(*names: str) -> dict[str, str]:
    """Return the script of a page, from files, and its hash: the page's policy allows no other."""
    text = "\n".join((TEMPLATES / name).read_text() for name in names)
    digest = b64encode(sha256(text.encode()).digest()).decode()
    return {"script": Markup(text), "script_hash": f"sha256-{digest}"}


def write_page(folder: Path, template: str, values: Mapping[str, Any]) -> Path:
    """Write `index.html` from a template. Text in `values` never becomes markup."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    page = folder / "index.html"
    text = environment.get_template(template).render(values)
    page.write_text(text, encoding="utf-8", errors="xmlcharrefreplace")  # for half surrogate pairs
    return page

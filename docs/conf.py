"""Settings of Sphinx, which writes the pages as a site: `make docs`."""

import re
from pathlib import Path
from typing import Any

project = html_title = "tba"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "benchmarks/README.md", "experiments/README.md"]
exclude_patterns = [".*", "build", "runs", "SECURITY.md"]
html_theme = "furo"
highlight_language = "text"
myst_heading_anchors = 4

GROUP = re.compile(r"^- ", re.MULTILINE)
LINK = re.compile(r"\]\(((?:\w+/)?\w+)\.md\)")


def setup(app: Any) -> None:
    app.connect("source-read", add_navigation)


def add_navigation(app: Any, page: str, source: list[str]) -> None:
    """List the pages beside each page, in the groups of the README's section on documentation.

    The page of all keys, which `make docs` writes, comes last in the reference.
    """
    if page == root_doc:
        section = source[0].partition("\n## Documentation\n")[2].partition("\n## ")[0]
        for group in GROUP.split(section)[1:]:
            name, _, text = group.partition(":")
            pages = LINK.findall(text)
            if name == "Reference":
                pages += ["docs/keys"] * (Path(__file__).parent / "keys.md").is_file()
            head = ["\n```{toctree}", ":hidden:", f":caption: {name}", ""]
            source[0] += "\n".join([*head, *pages, "```\n"])

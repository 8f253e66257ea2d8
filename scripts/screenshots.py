"""Take the pictures of reports in docs/, most of them in light and in dark colours.

    python scripts/screenshots.py wide=PAGE narrow=PAGE completions=PAGE running=PAGE two=PAGE \\
        study=PAGE crashed=PAGE six=PAGE agents=PAGE

A digest of the templates is written beside the pictures; a test fails if the templates have changed
since. Each PAGE is the `index.html` of a report, or its folder; PAGE#ID takes one figure of a
study. Needs Playwright (`pip install playwright`) and a Chromium of the system.
"""

import hashlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from PIL import Image

DOCS = Path(__file__).parent.parent / "docs"
SIZES = {
    "narrow": (375, 1250), "running": (1200, 1000), "two": (1200, 1480), "study": (1200, 1790),
    "crashed": (1200, 830), "six": (1200, 1500), "agents": (1200, 1480),
}  # fmt: skip
OTHER = (1600, 1180)
LIGHT = ("crashed", "six", "agents")
"""Pictures in light colours only."""
PARTS = {"completions": "Completions", "agents": "Completions"}
"""The heading at which a picture begins."""
COLOURS = 256
TEMPLATES = DOCS.parent / "tba" / "tools" / "report" / "templates"
DIGEST = DOCS / "report_pictures.sha256"


def digest() -> str:
    """Return a digest of the templates from which the pages in the pictures are made."""
    contents = [path.read_bytes() for path in sorted(TEMPLATES.iterdir())]
    return hashlib.sha256(b"".join(contents)).hexdigest()


def take(browser: Any, name: str, page_file: Path, part: str, scheme: str) -> None:
    """Write the picture of a page, of a part of it, or of the element with this id."""
    width, height = SIZES.get(name, OTHER)
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto(page_file.resolve().as_uri())
    page.wait_for_selector("canvas")
    out = DOCS / f"report_{name}_{scheme}.png"
    if name in PARTS:
        page.locator("h2", has_text=PARTS[name]).evaluate("head => head.scrollIntoView()")
    page.wait_for_timeout(1000)  # charts are drawn when they have a size
    if part:
        page.locator(f"[id='{part}']").screenshot(path=out)
    else:
        page.screenshot(path=out)
    page.close()
    Image.open(out).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(
        out, optimize=True
    )


def main(arguments: list[str]) -> None:
    from playwright.sync_api import sync_playwright  # the test of the digest does without it

    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        for argument in arguments:
            name, _, place = argument.partition("=")
            file, _, part = place.partition("#")
            path = Path(file) / "index.html" if Path(file).is_dir() else Path(file)
            for scheme in ("light",) if name in LIGHT else ("light", "dark"):
                take(browser, name, path, part, scheme)
        browser.close()
    DIGEST.write_text(digest() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

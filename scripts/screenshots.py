"""Take the pictures of a report in docs/: wide and narrow, light and dark.

    python scripts/screenshots.py runs/demo/report/index.html

Needs Playwright (`pip install playwright`) and a Chromium of the system.
"""

import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parent.parent / "docs"
SIZES = {"wide": (1200, 1120), "narrow": (390, 1250)}


def main(page_file: Path) -> None:
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        for size, (width, height) in SIZES.items():
            for scheme in ("light", "dark"):
                viewport = {"width": width, "height": height}
                page = browser.new_page(viewport=viewport, color_scheme=scheme)
                page.goto(page_file.resolve().as_uri())
                page.wait_for_selector(".panels canvas")
                page.screenshot(path=DOCS / f"report_{size}_{scheme}.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

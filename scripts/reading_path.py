"""Sum the lines of the files that docs/architecture.md lists under "Read these first".

python scripts/reading_path.py
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
FILE = re.compile(r"^\d+\. \[`(tba/[\w/]+\.py)`\]", re.MULTILINE)


def files() -> list[str]:
    """Return the files in the order in which the page lists them."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("\n## Read these first\n")
    return FILE.findall(rest.partition("\n## ")[0])


def main() -> None:
    total = 0
    for name in files():
        lines = len((ROOT / name).read_text(encoding="utf-8").splitlines())
        total += lines
        print(f"{lines:6,}  {name}")
    print(f"{total:6,}  lines in {len(files())} files")


if __name__ == "__main__":
    main()

"""Write the table of benchmarks/README.md from results.json: `python benchmarks/_report.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _measure import read

PAGE = Path(__file__).parent.parent / "benchmarks" / "README.md"
BEGIN = "<!-- The table is written by benchmarks/_report.py from benchmarks/results.json. -->"
END = "<!-- End of the table. -->"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| measure | ours | peer | peer / ours | goal | met | n | GFLOP/s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        peer = "" if row["peer"] is None else f"{number(row['peer'])} ({row['peer_is']})"
        ratio = "" if row["ratio"] is None else number(row["ratio"])
        if row["ratio_is"] == "ours / peer":
            better = "more" if row["unit"].endswith("/s") else "less"
            ratio += f" (ours / peer; {better} is better)"
        met = {True: "yes", False: "**no**", None: ""}[row["met"]]
        goal = row["goal"] or ""
        if row["limit"] is not None:
            goal += f" (limit {number(row['limit'])})"
        name = row["name"] + (f"<br><small>{row['note']}</small>" if row["note"] else "")
        ours = f"{number(row['value'])} {row['unit']}"
        speed = "" if row["gflops"] is None else number(row["gflops"])
        cells = (name, ours, peer, ratio, goal, met, row["count"], speed)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def number(value: float) -> str:
    """Return a number with three significant digits, and without an exponent where it is short."""
    if value == 0 or 0.001 <= abs(value) < 999.5:
        return f"{value:.3g}"
    if 999.5 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.2g}"


def page_with(text: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the page with its table replaced."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE} has no table; it is between the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{after}"


def write_page() -> None:
    PAGE.write_text(page_with(PAGE.read_text(), read()))


if __name__ == "__main__":
    write_page()

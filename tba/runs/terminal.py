"""Console of a run on a terminal: a table of steps above a progress line."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console as Screen
from rich.live import Live
from rich.text import Text

from tba.display import duration
from tba.runs.console import Console
from tba.runs.folder import ranked_score

if TYPE_CHECKING:
    from tba.runs.summary import Summary
    from tba.search.result import Evaluation

SEPARATOR = "  "
ROWS = 20
"""Number of rows after which the table heading is repeated."""
NUMBER = "{:.3f}"
SHARE = "{:.1%}"
STEPS = "{:,.1f}"
TOKENS = "{:,.0f}"
COLUMNS = {
    "reward": ("reward", 7, NUMBER),
    "kl": ("kl", 7, NUMBER),
    "entropy": ("entropy", 7, NUMBER),
    "completions/mean_length": ("length", 6, TOKENS),
    "completions/clipped_ratio": ("cut off", 7, SHARE),
    "off_policy/lag_mean": ("lag", 7, STEPS),
}
"""Heading, width and format of each metric in the table; step and score are separate columns."""

STEP = 7
SCORE = 13


def _shown(value: float, form: str) -> str:
    """Return a number in at most 7 characters; "" if it is not finite."""
    if not isfinite(value):
        return ""
    return f"{value:.1e}" if form == NUMBER and abs(value) >= 1000 else form.format(value)


class Terminal(Console):
    """Table rows, at most 78 columns wide, above a progress line that is redrawn.

    A row is printed every few seconds and when an evaluation ends. The line shows the step, seconds
    per step, the remaining time, samples per second, lag and waits; or the phase, if it takes long.
    """

    REDRAWN = 4
    """Refreshes of the line per second."""

    def __init__(self, steps: int, write: Callable[[str], None], screen: Screen):
        super().__init__(steps, write)
        self._rows = 0
        self._metrics: Mapping[str, float] = {}
        self._times: deque[tuple[int, float]] = deque(maxlen=20)
        self._live = Live(
            console=screen,
            get_renderable=self._line,
            refresh_per_second=self.REDRAWN,
            transient=True,
        )
        self._live.start()
        screen.show_cursor(True)  # else a killed process leaves it hidden

    def close(self) -> None:
        self._live.stop()

    def phase(self, text: str) -> None:
        self._begins(text)
        self._phase = text

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        self._metrics = metrics
        self._times.append((step, now))
        if step in (1, self.steps) or now - self._last_line >= self.EVERY:
            self._last_line = now
            self._row(step, "", metrics)

    def evaluation(self, evaluation: "Evaluation") -> None:
        for name, scores in evaluation.by_set().items():
            kind, value, stderr = ranked_score(scores)
            score = f"{value:.3f} ± {stderr:.3f}"
            if name:
                self.note(f"{name}: {kind} {score}")
            else:
                self._row(evaluation.version, score, {})

    def sample(self, prompt: str, completion: str, reward: float) -> None:
        """Do nothing: samples are in the report."""

    def end(self, s: "Summary", folder: Path, best: tuple[int, float] | None = None) -> None:
        super().end(s, folder, best)
        self._times.clear()  # the steps are over
        self.phase("ending searchers")

    def _row(self, step: int, score: str, metrics: Mapping[str, float]) -> None:
        if self._rows % ROWS == 0:
            titles = [(title, width) for title, width, _ in COLUMNS.values()]
            heading = [("step", STEP), titles[0], ("held out ± se", SCORE), *titles[1:]]
            self.note(SEPARATOR.join(title.rjust(width) for title, width in heading))
        self._rows += 1
        cells = []
        for name, (_, width, form) in COLUMNS.items():
            cells.append(_shown(metrics.get(name, nan), form).rjust(width))
        row = [f"{step:,}".rjust(STEP), cells[0], score.rjust(SCORE), *cells[1:]]
        self.note(SEPARATOR.join(row).rstrip())

    def _line(self) -> Text:
        """Return the progress line."""
        now = time.monotonic()
        phase = [f"{self._phase} …", duration(now - self._since)] if self._phase else []
        if not self._times:
            return _fitting(phase)
        (first, began), (last, ended) = self._times[0], self._times[-1]
        parts = [f"step {last:,}/{self.steps:,}"]
        if last > first:
            each = (ended - began) / (last - first)
            parts += [f"{each:.2g} s/step", f"ETA {duration(each * (self.steps - last))}"]
        for name, label, form in (
            ("samples_per_second", "samples/s", TOKENS),
            ("off_policy/lag_mean", "lag", STEPS),
            ("wait/trainer", "waits", SHARE),
        ):
            if text := _shown(self._metrics.get(name, nan), form):
                parts.append(f"{label} {text}")
        is_long = now - max(ended, self._since) > 2 or last == self.steps
        if self._phase != "training" and is_long:
            parts = [parts[0], *phase]
        return _fitting(parts)


def _fitting(parts: list[str]) -> Text:
    """Return the parts as one line, which the terminal truncates to its width."""
    line = SEPARATOR.join(part for part in parts if part)
    return Text(line, style="bold", no_wrap=True, overflow="ellipsis")

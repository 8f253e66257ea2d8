"""What a person sees while a run goes on: a live panel on a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from rich.console import Console as Terminal
from rich.console import Group as Stack
from rich.live import Live as RichLive
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from tba.config.schema import Config
from tba.runs.summary import Summary

SHOWN = (
    ("reward", "reward", "{:.3f}"),
    ("kl", "kl (nats)", "{:.2f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("grad_norm", "gradient norm", "{:.3f}"),
    ("buffer/size", "buffer", "{:,.0f}"),
    ("samples_generated", "samples found", "{:,.0f}"),
    ("off_policy/lag_mean", "lag (steps)", "{:.1f}"),
    ("wait/trainer", "trainer waits", "{:.1%}"),
    ("wait/searchers", "searchers wait", "{:.1%}"),
    ("step_time", "step (s)", "{:.2f}"),
)


say = partial(print, flush=True)


def open_console(config: Config) -> Console:
    kind = config.log.console
    if kind == "auto":
        kind = "live" if sys.stdout.isatty() else "plain"
    steps = config.run.steps
    return (
        LiveConsole(steps)
        if kind == "live"
        else Console(steps)
        if kind == "plain"
        else Console(steps, say=lambda text: None)
    )


class Console:
    """Plain lines: one at each of the first steps, and then one every few seconds. `say` is given each."""

    EVERY = 5.0

    def __init__(self, steps: int, say: Callable[[str], None] = say):
        self._steps, self._say = steps, say
        self._told = 0.0

    def note(self, text: str) -> None:
        self._say(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > 2 and step < self._steps and time.monotonic() - self._told < self.EVERY:
            return
        self._told = time.monotonic()
        shown = "  ".join(f"{label} {form.format(metrics[name])}" for name, label, form in SHOWN)
        self._say(f"step {step}/{self._steps}  {metrics['time']:.0f} s  {shown}")

    def evaluation(self, version: int, scores: Mapping[str, float]) -> None:
        self._say(f"evaluation at step {version}: {told(scores)}")

    def sample(self, prompt: str, completion: str, reward: float) -> None:
        self._say(f"sample: {_short(prompt)!r} -> {_short(completion)!r}  reward {reward:g}")

    def end(self, summary: Summary, folder: Path) -> None:
        self.close()
        self._say("\n".join(closing(summary, folder)))

    def close(self) -> None:
        """Leaves the terminal as it was."""


class LiveConsole(Console):
    """Progress and time left, the last step's numbers, the evaluations so far, and a sample now and then."""

    def __init__(self, steps: int):
        super().__init__(steps)
        self._progress = Progress(
            TextColumn("step"),
            BarColumn(None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task("steps", total=steps)
        self._metrics: Mapping[str, float] = {}
        self._evaluations: list[str] = []
        self._sample = ""
        self._live = RichLive(self._view(), console=Terminal(), refresh_per_second=4)
        self._live.start()

    def note(self, text: str) -> None:
        self._live.console.print(Text(text))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics = metrics
        self._progress.update(self._task, completed=step)
        self._live.update(self._view())

    def evaluation(self, version: int, scores: Mapping[str, float]) -> None:
        self._evaluations = [*self._evaluations, f"step {version:>6}  {told(scores)}"][-6:]
        self._live.update(self._view())

    def sample(self, prompt: str, completion: str, reward: float) -> None:
        self._sample = f"{_short(prompt)} -> {_short(completion)}   (reward {reward:g})"

    def close(self) -> None:
        self._live.stop()

    def _view(self) -> Panel:
        grid = Table.grid(padding=(0, 3))
        pairs = [
            (Text(label, style="dim"), form.format(self._metrics[name]))
            for name, label, form in SHOWN
            if name in self._metrics
        ]
        for left, right in zip(pairs[::2], pairs[1::2], strict=True):
            grid.add_row(*left, *right)
        texts = [
            Text("\n".join(self._evaluations)),
            Text(self._sample, style="italic", overflow="ellipsis"),
        ]
        return Panel(
            Stack(self._progress, grid, *(t for t in texts if t.plain)),
            title="tba",
            title_align="left",
        )


def told(scores: Mapping[str, float]) -> str:
    """An evaluation in a line: pass@1 where the task has it, else the reward."""
    s = {k.removeprefix("eval/"): v for k, v in scores.items()}
    rejected = f"  rejected {s['sampled_rejected']:.1%}" if s.get("sampled_rejected") else ""
    if "sampled_pass@1" in s:
        rest = "".join(
            f"  {k} {v:.3f}"
            for k, v in s.items()
            if k.startswith("pass@") and not k.endswith("stderr")
        )
        return f"pass@1 sampled {s['sampled_pass@1']:.3f} ± {s['sampled_stderr']:.3f}  greedy {s['greedy_pass@1']:.3f} ± {s['greedy_stderr']:.3f}{rest}{rejected}"
    return f"reward sampled {s['sampled_reward']:.3f} ± {s['sampled_reward_stderr']:.3f}  greedy {s['greedy_reward']:.3f}{rejected}"


def closing(summary: Summary, folder: Path) -> list[str]:
    """The last lines of a run."""
    rejected = ", ".join(f"{n} {reason}" for reason, n in summary.rejected.items()) or "none"
    lines = [
        "",
        f"{'finished' if summary.finished else 'stopped'} after {summary.steps} steps in {summary.seconds:.0f} s",
        f"  samples            {summary.samples_generated:,} found, {summary.samples_trained:,} trained on; rejected: {rejected}",
        f"  lag                mean {summary.lag_mean:.1f}, at most {summary.lag_max:.0f} steps",
        f"  trainer waited     {summary.trainer_wait_fraction:.2%} of the time after the first fill",
        f"  searchers replaced {summary.searcher_restarts}",
    ]
    lines += (
        [
            f"  before             {told(summary.first)}",
            f"  after              {told(summary.last)}",
        ]
        if summary.last
        else []
    )
    go_on = [] if summary.finished else [f"  go on              tba train --resume {folder}"]
    return [
        *lines,
        *go_on,
        f"  summary            {folder / 'summary.json'}",
        f"  report             tba report {folder}",
    ]


def _short(text: str, width: int = 100) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"

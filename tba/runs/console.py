"""Console output of a run: a live panel on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from rich import live, progress
from rich.columns import Columns
from rich.console import Console as Terminal
from rich.console import Group as Stack
from rich.panel import Panel
from rich.text import Text

from tba.config.schema import Config
from tba.runs.log import SUMMARY
from tba.runs.summary import Summary
from tba.search.result import Evaluation

SHOWN = (  # metric, label, format
    ("reward", "reward", "{:.3f}"),
    ("kl", "kl (nats)", "{:.2f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("grad_norm", "gradient norm", "{:.3f}"),
    ("buffer/size", "buffer", "{:,.0f}"),
    ("samples_generated", "samples generated", "{:,.0f}"),
    ("off_policy/lag_mean", "lag (steps)", "{:.1f}"),
    ("wait/trainer", "trainer waits", "{:.1%}"),
    ("wait/searchers", "searchers wait", "{:.1%}"),
    ("step_time", "step (s)", "{:.2f}"),
)
"""The metrics that are displayed."""

REWARD = "reward sampled {sampled_reward:.3f} ± {sampled_reward_stderr:.3f}"
GREEDY = "  greedy {greedy_reward:.3f}"
PASS = "pass@1 sampled {sampled_pass@1:.3f} ± {sampled_stderr:.3f}"
PASS += "  greedy {greedy_pass@1:.3f} ± {greedy_stderr:.3f}"


def open_console(config: Config, write: Callable[[str], None]) -> "Console":
    """Return the console that `log.console` names; `write` prints a line."""
    kind, steps = config.log.console, config.run.steps
    if kind == "live" or (kind == "auto" and sys.stdout.isatty()):
        return LiveConsole(steps)
    return Console(steps, (lambda line: None) if kind == "off" else write)


class Console:
    """Plain lines: one for each of the first steps, then one every few seconds."""

    EVERY = 5.0

    def __init__(self, steps: int, write: Callable[[str], None]):
        self._steps = steps
        self.note = write
        self._last_line = 0.0
        self._followed: str | None = None  # held-out prompt whose answers are shown

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        if 2 < step < self._steps and now - self._last_line < self.EVERY:
            return
        self._last_line = now
        values = "  ".join(f"{label} {value}" for label, value in _formatted(metrics))
        self.note(f"step {step}/{self._steps}  {metrics['time']:.0f} s  {values}")

    def evaluation(self, evaluation: Evaluation) -> None:
        """Show the scores, and the answer to the prompt that had the lowest reward at first."""
        for name, scores in evaluation.by_set().items():
            self.scores(evaluation.version, f"{name}  {in_a_line(scores)}".lstrip())
        rewards = {x.prompt: x.reward for x in evaluation.examples if x.reward is not None}
        if self._followed is None and rewards:
            self._followed = min(rewards, key=rewards.__getitem__)
        for x in evaluation.examples:
            if x.prompt == self._followed and x.reward is not None:
                self.sample(x.prompt, x.completion, x.reward)

    def scores(self, version: int, line: str) -> None:
        self.note(f"evaluation at step {version}: {line}")

    def sample(self, prompt: str, completion: str, reward: float) -> None:
        self.note(f"sample: {_short(prompt)!r} -> {_short(completion)!r}  reward {reward:g}")

    def end(self, s: Summary, folder: Path) -> None:
        self.close()
        rejected = ", ".join(f"{n} {reason}" for reason, n in s.rejected.items()) or "none"
        samples = f"{s.samples_generated:,} generated, {s.samples_trained:,} trained on"
        rows = {
            "samples": f"{samples}; rejected: {rejected}",
            "lag": f"mean {s.lag_mean:.1f}, at most {s.lag_max:.0f} steps",
            "trainer waited": f"{s.trainer_wait_fraction:.2%} of the time after the first fill",
            "searchers restarted": str(s.searcher_restarts),
        }
        if s.last:
            rows["before"], rows["after"] = in_a_line(s.first), in_a_line(s.last)
        if not s.finished:
            rows["resume"] = f"tba train --resume {folder}"
        rows["summary"] = str(folder / SUMMARY)
        rows["report"] = f"tba report {folder}"
        lines = [f"  {label:<20} {text}" for label, text in rows.items()]
        outcome = "finished" if s.finished else "stopped"
        heading = f"{outcome} after {s.steps} steps in {s.seconds:.0f} s"
        self.note("\n".join(["", heading, *lines]))

    def close(self) -> None:
        """Restore the terminal."""


class LiveConsole(Console):
    """A panel with progress, the metrics of the last step, evaluations and a sample."""

    def __init__(self, steps: int):
        super().__init__(steps, partial(print, flush=True))
        clocks = (progress.TimeElapsedColumn(), "left", progress.TimeRemainingColumn())
        columns = ("step", progress.BarColumn(None), progress.MofNCompleteColumn(), *clocks)
        self._progress = progress.Progress(*columns)
        self._task = self._progress.add_task("steps", total=steps)
        self._metrics: Mapping[str, float] = {}
        self._evaluations: list[str] = []
        self._sample = ""
        self._live = live.Live(get_renderable=self._view, console=Terminal())
        self._live.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics = metrics
        self._progress.update(self._task, completed=step)

    def scores(self, version: int, line: str) -> None:
        self._evaluations = [*self._evaluations, f"step {version:>6}  {line}"][-6:]

    def sample(self, prompt: str, completion: str, reward: float) -> None:
        self._sample = f"{_short(prompt)} -> {_short(completion)}   (reward {reward:g})"

    def close(self) -> None:
        self._live.stop()

    def _view(self) -> Panel:
        metrics = _formatted(self._metrics)
        cells = [Text.from_markup(f"[dim]{label}[/dim]  {value}") for label, value in metrics]
        evaluations = Text("\n".join(self._evaluations))
        sample = Text(self._sample, style="italic", overflow="ellipsis")
        texts = [text for text in (evaluations, sample) if text.plain]
        grid = Columns(cells, padding=(0, 3), equal=True)
        return Panel(Stack(self._progress, grid, *texts), title="tba", title_align="left")


def _formatted(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the label and the text of each metric that is displayed."""
    shown = [row for row in SHOWN if row[0] in metrics]
    return [(label, form.format(metrics[name])) for name, label, form in shown]


def in_a_line(scores: Mapping[str, float]) -> str:
    """Return one line for an evaluation: pass@1 or else the reward, and the task's measures."""
    reward = REWARD + (GREEDY if "greedy_reward" in scores else "")
    parts = [(PASS if "sampled_pass@1" in scores else reward).format_map(scores)]
    for name, value in scores.items():
        if name.startswith("pass@") and not name.endswith("stderr"):
            parts.append(f"{name} {value:.3f}")
    for name, share in scores.items():
        if name.startswith("sampled_") and name.endswith("_rejected"):
            measure = name.removesuffix("_rejected")
            if measure in scores:
                mean, error = scores[measure], scores[f"{measure}_stderr"]
                label = measure.removeprefix("sampled_").replace("_", " ")
                parts.append(f"{label} {mean:.3f} ± {error:.3f}")
            if share:
                parts.append(f"rejected {share:.1%}")
    return "  ".join(parts)


def _short(text: str, width: int = 100) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"

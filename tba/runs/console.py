"""Console of a run that prints lines."""

import re
import time
from collections.abc import Callable, Mapping
from math import isfinite, nan
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from tba.config.schema import Config
from tba.runs.folder import SUMMARY, ranked_score, resumes
from tba.runs.metrics import EACH_REWARD, panel_values

if TYPE_CHECKING:  # these import PyTorch, and the first line is printed before that
    from tba.runs.summary import Summary
    from tba.search.result import Evaluation

REWARD = "reward sampled {sampled_reward:.3f} ± {sampled_reward_stderr:.3f}"
GREEDY = "  greedy {greedy_reward:.3f}"
PASS = "pass@1 sampled {sampled_pass@1:.3f} ± {sampled_stderr:.3f}"
PASS += "  greedy {greedy_pass@1:.3f} ± {greedy_stderr:.3f}"
FIRST_LINE = "loading PyTorch, the tokenizer and the data"
WIDTH = 100
"""Maximum number of characters of a text in a line."""


def announce(config: Config) -> None:
    """Print the first line of a run. Call it before PyTorch is imported, which takes seconds."""
    if config.log.console != "off":
        print(FIRST_LINE, flush=True)


class Console:
    """Console that prints a line for each of the first steps, then one every few seconds."""

    EVERY = 5.0
    SILENCE = 30.0
    """Seconds between two lines of steps; seconds after which an unchanged phase is repeated."""

    def __init__(self, steps: int, write: Callable[[str], None]):
        self.steps = steps
        self.note = write
        self._last_line = self._last_phase = 0.0  # times
        self._phase = ""
        self._kind = ""
        self._since = 0.0
        self._stepped = False
        self._held_out: dict[str, float] = {}  # scores of the latest evaluation

    def phase(self, text: str) -> None:
        """Show the current phase of the run; repeated calls may differ in their numbers.

        Before the first step, a new phase is shown at once, later only after some silence.
        """
        is_new = self._begins(text)
        now = time.monotonic()
        wait = self.SILENCE if text == self._phase else 2 * self.EVERY
        if is_new and not self._stepped:
            wait = 0.0
        if now - max(self._last_line, self._last_phase) >= wait:
            self._last_phase = now
            self._phase = text
            self.note(text if is_new else f"{text}, for {now - self._since:.0f} s")

    def _begins(self, text: str) -> bool:
        """Return whether a phase differs in more than its numbers; if so, note when it began."""
        kind = re.sub(r"\d+", "", text)
        if kind == self._kind:
            return False
        self._kind = kind
        self._since = time.monotonic()
        return True

    def warn(self, text: str) -> None:
        self.note(f"warning: {text}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        self._stepped = True
        if 2 < step < self.steps and now - self._last_line < self.EVERY:
            return
        self._last_line = now
        latest = {**self._held_out, **metrics}
        values = []
        for name, label, text in panel_values(latest):
            function = EACH_REWARD.fullmatch(name)
            std = latest.get(f"rewards/{function[1]}/std", nan) if function else nan
            spread = f" (std {std:.3f})" if isfinite(std) else ""
            values.append(f"{label} {text}{spread}")
        seconds = f"{metrics['time']:.0f} s"
        self.note("  ".join([f"step {step}/{self.steps}", seconds, *values]))

    def evaluation(self, evaluation: "Evaluation") -> None:
        """Show the scores, and one answer to the first held-out prompt."""
        self._held_out = {f"eval/{name}": value for name, value in evaluation.scores.items()}
        for name, scores in evaluation.by_set().items():
            line = f"{name}  {in_a_line(scores)}".lstrip()
            self.note(f"evaluation at step {evaluation.version}: {line}")
        for x in evaluation.examples[:1]:
            if x.reward is not None:
                self.sample(x.prompt, x.completion, x.reward)

    def sample(self, prompt: str, completion: str, reward: float) -> None:
        end = _short(prompt[::-1])[::-1]  # the question is at the end of a prompt
        self.note(f"sample: {end!r} -> {_short(completion)!r}  reward {reward:g}")

    def end(self, s: "Summary", folder: Path, best: tuple[int, float] | None = None) -> None:
        """Show the scores, the totals of the run, and the next commands.

        `best` is the step and the score of the best evaluation, unless that is the last one.
        """
        outcome = "finished" if s.finished else "stopped"
        results = [f"{outcome} after {s.steps} steps in {s.seconds:.0f} s"]
        for scores in {each["step"]: each for each in (s.first, s.last) if each}.values():
            label = f"step {scores['step']:,.0f}"
            results.append(f"  {label:<12}{in_a_line(scores)}")
        if best is not None:
            results.append(f"  {'best':<12}{best[1]:.3f} at step {best[0]:,}")
        if s.ended:
            results.append(f"  ended by {s.ended}; --step best selects the best checkpoint")
        rejected = ", ".join(f"{n} {reason}" for reason, n in s.rejected.items()) or "none"
        samples = f"{s.samples_generated:,} generated, {s.samples_trained:,} trained on"
        rows = {
            "samples": f"{samples}; rejected: {rejected}",
            "lag": f"mean {s.lag_mean:.1f}, at most {s.lag_max:.0f} steps",
            "trainer waited": f"{s.trainer_wait_fraction:.2%} of the time after the first fill",
            "searchers restarted": str(s.searcher_restarts),
        }
        if s.trainer_restarts:
            rows["trainer restarted"] = str(s.trainer_restarts)
        if s.quarantined:
            rows["prompts quarantined"] = str(s.quarantined)
        rows["summary"] = str(folder / SUMMARY)
        run = quote(str(folder))
        rows["report"] = f"tba report {run}"
        if s.finished:
            rows["export"] = f"tba export {run} FOLDER"
        else:
            rows["resume"] = resumes(folder)
        warnings = [f"  {'warning':<20} {text}" for text in s.warnings]
        details = [f"  {label:<20} {text}" for label, text in rows.items()]
        self.note("\n".join(["", *results, *warnings, *details]))


def silent(line: str) -> None:
    """Do not write a line: for `log.console=off`."""


def in_a_line(scores: Mapping[str, float]) -> str:
    """Return an evaluation as one line: pass@1 or else the reward, and the task's own metrics."""
    reward = REWARD + (GREEDY if "greedy_reward" in scores else "")
    kind, _, _ = ranked_score(scores)
    parts = [(PASS if kind == "pass@1" else reward).format_map(scores)]
    for name, value in scores.items():
        if name.startswith("pass@") and not name.endswith("stderr"):
            parts.append(f"{name} {value:.3f}")
    for name, share in scores.items():
        if name.startswith("sampled_") and name.endswith("_rejected"):
            measure = name.removesuffix("_rejected")
            if measure in scores:
                mean = scores[measure]
                error = scores[f"{measure}_stderr"]
                label = measure.removeprefix("sampled_").replace("_", " ")
                parts.append(f"{label} {mean:.3f} ± {error:.3f}")
            if share:
                parts.append(f"rejected {share:.1%}")
    return "  ".join(parts)


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= WIDTH else flat[: WIDTH - 1] + "…"

"""What becomes of the replay buffer of a run that is resumed."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from tba.replay.buffer import ReplayBuffer
from tba.runs.checkpoint import STATE, Progress, newest
from tba.runs.checks import check_resumed, config_of
from tba.runs.console import Console
from tba.runs.log import CHECKPOINTS, Replay
from tba.runs.setup import RunSetup
from tba.runs.stop import Stop
from tba.runtime import SearchState
from tba.search.rescore import rescore
from tba.tasks._source import RewardSource

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stored:
    """The checkpoint that a run goes on from, and what becomes of the samples in it."""

    generation: Path
    replay: Replay
    changed: list[str]
    """What decides rewards, and has changed since those of the samples were computed."""

    @property
    def note(self) -> str:
        """What has become of the samples, in words; empty if they are kept."""
        if self.replay == "keep":
            return ""
        what = "scored again" if self.replay == "rescore" else "dropped"
        after = f" after a change of {', '.join(self.changed)}" if self.changed else ""
        return f"stored samples {what}{after}"

    def renew(
        self, progress: Progress, search: SearchState, buffer: ReplayBuffer, parts: RunSetup,
        device: str, console: Console, stop: Stop,
    ) -> tuple[Progress, SearchState]:  # fmt: skip
        """Drop the samples or score them again; return the states with what that changes in them.

        ValueError, before a file is changed, if that does not succeed.
        """

        def tell(text: str) -> None:
            if stop.requested:
                raise ValueError("--rescore was interrupted; the run is as it was")
            console.phase(text)

        console.note(f"resumed from {self.generation.name}")
        held = search.held
        c = parts.config
        first = 0
        if self.replay == "drop":
            buffer.clear()
            held = ()
        elif self.replay == "rescore":
            held = rescore(buffer, held, parts.search_setup(), parts.text, device, tell)
        if self.replay != "keep" and not len(buffer):
            first = c.first_fill
        new = c.trainer.groups + len(held) if c.asynchronous else 0  # no step on old data
        progress = replace(progress, missing=max(progress.missing, first, new))
        return progress, replace(search, held=held)


def choose_stored(parts: RunSetup, run: Path, replay: Replay) -> Stored:
    """Choose the checkpoint to resume; ValueError for a change that its samples do not allow."""
    check_resumed(parts.config, config_of(run))
    generation = newest(run / CHECKPOINTS, drop_replay=replay == "drop")
    before = json.loads((generation / STATE).read_text("utf-8"))["progress"].get("rewards")
    if before is None:
        told = "%s does not say what has decided its rewards: a change of that is not noticed"
        log.warning(told, generation)
    changed = [] if before is None else parts.rewards.changed(RewardSource(**before))
    lost = ""
    if parts.task.tools is not None or parts.config.task.use == "redteam":
        lost = "the environment or the victim of the stored samples is gone"
    elif parts.objective.at(0).value_rollouts is not None:
        lost = "the stored samples have value estimates"
    if replay == "rescore" and lost:
        raise ValueError(f"--rescore: {lost}; use --drop-replay, which starts an empty buffer")
    if changed and replay == "keep":
        again = "" if lost else "--rescore to score the stored samples again, or "
        raise ValueError(
            f"{', '.join(changed)}: changed since the rewards in the replay buffer were computed;"
            f" undo that, or add {again}--drop-replay to start with an empty buffer"
        )
    return Stored(generation, replay, changed)

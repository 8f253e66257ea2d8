"""Free space that a run needs on disk: checked before its searchers start."""

import logging
import shutil
from pathlib import Path

from tba.config.errors import size
from tba.learn.trainer import SingleTrainer
from tba.runs.generations import generations
from tba.runs.log import CHECKPOINTS
from tba.runs.parts import RunSetup
from tba.weights import trained

TOKEN, RESPONSE = 12, 100
"""Bytes of a token and of a response in the replay buffer: docs/architecture.md."""

log = logging.getLogger(__name__)


def check_space(parts: RunSetup, folder: Path, trainer: SingleTrainer) -> None:
    """Raise ValueError if the disk of a run's folder has no room for a checkpoint.

    Warn if it may have no room for all checkpoints that the run keeps.
    """
    c, saved = parts.config, generations(folder / CHECKPOINTS)
    least, free = checkpoint_size(parts, trainer), shutil.disk_usage(folder).free
    if free < least:
        raise ValueError(
            f"{folder} has {size(free)} of free space, but a checkpoint takes {size(least)}: the"
            " weights, and AdamW's two moments of them; free some, or choose a folder on another"
            " disk with run.folder=…"
        )
    written = 1 + c.checkpoint.keep + c.checkpoint.keep_best - len(saved)  # one before it prunes
    responses = min(c.replay.capacity, c.replay.per_prompt * len(parts.prompts))
    most = written * least + 2 * responses * (c.sampling.max_tokens * TOKEN + RESPONSE)
    if free < most:
        log.warning(
            "%s has %s of free space, and the run may need up to %s for %d checkpoints; when the"
            " disk is full, it ends",
            folder,
            size(free),
            size(most),
            written,
        )


def checkpoint_size(parts: RunSetup, trainer: SingleTrainer) -> int:
    """Return the bytes of a checkpoint without the replay buffer."""
    own = sum(p.nbytes for p in trained(trainer.policy.model).values())
    searcher = trainer.published_bytes if parts.config.runtime.use == "local" else 0
    reference = own if parts.config.policy.reset_reference_every else 0
    return 3 * own + searcher + reference

"""A full disk: a run waits until there is space again, or ends. This module needs no torch."""

import errno
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk that is full, and of a quota or a limit of file sizes that is reached."""
LONGEST = 60.0
"""Most seconds between two attempts to write."""

Done = TypeVar("Done")

log = logging.getLogger(__name__)


@dataclass
class Disk:
    """Writes what has no room, again and again, unless `on_full` is `stop` or the run is stopping.

    Two threads may write at the same time.
    """

    on_full: Literal["pause", "stop"] = "stop"
    stopping: Callable[[], bool] = lambda: False
    _waiting: set[str] = field(default_factory=set, init=False)

    @property
    def is_waiting(self) -> bool:
        """True while something waits for space."""
        return len(self._waiting) > 0

    def write(
        self, what: str, write: Callable[[], Done], undo: Callable[[], None] = lambda: None
    ) -> Done:
        """Return what `write` returns. After an attempt that found the disk full, call `undo`.

        The last attempt's error is raised, also if it is another one.
        """
        pause = 1.0
        try:
            while True:
                try:
                    written = write()
                    break
                except Exception as error:
                    if not is_full(error):
                        raise
                    undo()
                    if self.on_full == "stop" or self.stopping():
                        raise
                    self._tell(what, error)
                self._rest(pause)
                pause = min(2 * pause, LONGEST)
            if what in self._waiting:
                log.warning("there is space again: %s was written", what)
            return written
        finally:
            self._waiting.discard(what)

    def _tell(self, what: str, error: Exception) -> None:
        if what not in self._waiting:
            self._waiting.add(what)
            log.warning(
                "THE DISK IS FULL: %s could not be written (%s). The run waits until there is"
                " space: free some, or end the run with Ctrl-C or SIGTERM",
                what,
                error,
            )

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stopping():
            time.sleep(0.1)


def is_full(error: BaseException) -> bool:
    """Return whether an error says that the disk is full.

    Those of safetensors and tokenizers, which are written in Rust, say it in their text only.
    """
    if isinstance(error, OSError):
        return error.errno in FULL
    return any(f"(os error {number})" in str(error) for number in FULL)


def clear(folder: Path) -> None:
    """Empty a folder, so that a full disk has room for other files."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

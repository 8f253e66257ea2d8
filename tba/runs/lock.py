"""The lock of a folder: one process at a time writes to it."""

import errno
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from tba.runs.files import write_whole

LOCK = ".lock"
HOLDER = ".lock_holder"
"""File that names the process which has the lock."""

PATIENCE = 0.5
"""Seconds that a lock may be taken without a refusal: a check has it for a moment."""

log = logging.getLogger(__name__)


@contextmanager
def locked(folder: Path, key: str = "run.folder", wait: float = 0.0) -> Iterator[None]:
    """Create the folder if needed, and keep other processes out of it.

    ValueError, which names the holder, if another process has it and keeps it for `wait` seconds;
    also if nothing can be written there. The kernel releases the lock when the process ends,
    however it ends.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _acquired(folder, key, wait)
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        write_whole(folder / HOLDER, f"{holder} since {datetime.now():%Y-%m-%d %H:%M:%S}")
    except OSError as error:
        raise _unusable(folder, key, error) from error
    try:
        yield
    finally:
        (folder / HOLDER).unlink(missing_ok=True)
        lock.release()


def check_usable(folder: Path, key: str = "run.folder") -> None:
    """Raise ValueError if `locked` would refuse the folder now. Nothing is created or written."""
    try:
        if str(folder).encode(errors="replace").decode() != str(folder):
            raise OSError(errno.EILSEQ, "its name is not UTF-8")
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        if not nearest.is_dir():
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        if (folder / LOCK).exists():
            _acquired(folder, key, 0.0).release()
    except OSError as error:
        raise _unusable(folder, key, error) from error


def _acquired(folder: Path, key: str, wait: float) -> FileLock:
    """Return the lock of the folder, which this process has then; warn if there are no locks."""
    lock = FileLock(folder / LOCK, thread_local=False)
    try:
        lock.acquire(timeout=wait + PATIENCE, poll_interval=0.02)
    except Timeout as error:
        named = (folder / HOLDER).is_file()
        holder = (folder / HOLDER).read_text("utf-8") if named else "another process"
        raise ValueError(
            f"{folder} is in use by {holder}; wait until it ends, stop it, or choose another folder"
            f" with {key}=…"
        ) from error
    except OSError as error:
        if error.errno != errno.ENOLCK:  # NFS without a lock server
            raise
        log.warning("%s cannot be locked (%s); make sure that no second run uses it", folder, error)
    return lock


def _unusable(folder: Path, key: str, error: OSError) -> ValueError:
    why = error.strerror or error
    return ValueError(
        f"{key} = {str(folder)!r} cannot be used as a folder: {why}; choose another one"
    )

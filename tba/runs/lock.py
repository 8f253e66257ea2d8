"""The lock of a folder: one process at a time writes to it."""

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO

from tba.runs.files import own

LOCK = ".lock"

UNNAMED = 0.5
"""Seconds that a lock without the name of its holder may last: it is being taken or released."""

log = logging.getLogger(__name__)


@contextmanager
def locked(folder: Path, key: str = "run.folder", wait: float = 0.0) -> Iterator[None]:
    """Create the folder if needed, and keep other processes out of it.

    ValueError, which names the holder, if another process has it and keeps it for `wait` seconds;
    also if nothing can be written there. The kernel releases the lock when the process ends,
    however it ends.
    """
    with _opened(folder, key) as file:
        _take_within(wait, fcntl.LOCK_EX, file, folder, key)
        try:
            _name_holder(file, folder, key)
            yield
        finally:
            file.truncate(0)


def _name_holder(file: IO[str], folder: Path, key: str) -> None:
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    try:
        file.truncate(0)
        # not through its buffer, which would be written again on closing
        os.write(file.fileno(), f"{holder} since {datetime.now():%Y-%m-%d %H:%M:%S}\n".encode())
    except OSError as error:  # such as a full disk
        raise _unusable(folder, key, error) from error


def check_usable(folder: Path, key: str = "run.folder") -> None:
    """Raise ValueError if `locked` would refuse the folder now. Nothing is created or written."""
    lock = folder / LOCK
    try:
        if str(folder).encode(errors="replace").decode() != str(folder):
            raise OSError(errno.EILSEQ, "its name is not UTF-8")
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        if not nearest.is_dir():
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        if not lock.exists():
            return
        with open(lock, "r+", encoding="utf-8", errors="replace", opener=own) as file:
            # shared and for a moment, as two checks are no reason to refuse one of them
            _take_within(0.0, fcntl.LOCK_SH, file, folder, key)
    except OSError as error:
        raise _unusable(folder, key, error) from error


def _opened(folder: Path, key: str) -> IO[str]:
    """Open the lock file of a folder; ValueError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # not "w": it names the holder
        return open(folder / LOCK, "a+", encoding="utf-8", errors="replace", opener=own)
    except OSError as error:
        raise _unusable(folder, key, error) from error


def _take_within(seconds: float, kind: int, file: IO[str], folder: Path, key: str) -> None:
    """Lock the file; ValueError, which names the holder, if that takes longer.

    A holder has no name, or that of one before it, for a moment: before it writes its own, after it
    has removed it, and in a check.
    """
    deadline = time.monotonic() + seconds
    while not _take(file, folder, kind):
        file.seek(0)
        holder = file.read().strip()
        if time.monotonic() >= deadline + UNNAMED:
            raise ValueError(
                f"{folder} is in use by {holder or 'another process'}; wait until it ends, stop it,"
                f" or choose another folder with {key}=…"
            )
        time.sleep(0.02)


def _unusable(folder: Path, key: str, error: OSError) -> ValueError:
    why = error.strerror or error
    return ValueError(
        f"{key} = {str(folder)!r} cannot be used as a folder: {why}; choose another one"
    )


def _take(file: IO[str], folder: Path, kind: int) -> bool:
    """Lock the file, unless another process has; warn on a file system without locks.

    The kind is `LOCK_EX`, or `LOCK_SH`, which several processes may have.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # such as NFS without a lock server
        log.warning("%s cannot be locked (%s); make sure that no second run uses it", folder, error)
    return True

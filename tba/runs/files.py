"""Files of a run and the lock of its folder. Nothing is ever written through a planted link."""

import errno
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk that is full, and of a quota or a limit of file sizes that is reached."""
LOCK = ".lock"
HOLDER = ".lock_holder"
"""File that names the process which has the lock."""
PATIENCE = 0.5
"""Seconds that a lock may be taken without a refusal: a check has it for a moment."""

log = logging.getLogger(__name__)


def open_plain(path: str, flags: int) -> int:
    """Open a file to append to it, as an `opener`; ValueError if another file would change."""
    file = Path(path)
    is_plain = file.is_file() and not file.is_symlink() and file.stat().st_nlink == 1
    if not is_plain and os.path.lexists(file):
        raise ValueError(
            f"{path} is a link or a pipe, or has a second name, so that nothing is"
            " written to it; remove it, or replace it by a copy"
        )
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def own_folder(folder: Path) -> Path:
    """Return the folder, which need not exist; ValueError if it is a link."""
    if folder.is_symlink():
        raise ValueError(f"{folder} is a link, so that nothing is written there; remove it")
    return folder


def write_whole(path: Path, text: str, errors: str = "strict") -> None:
    """Write a file atomically: a reader sees the old content or the new one."""
    aside = path.with_name(f".{path.name}")
    aside.unlink(missing_ok=True)
    with aside.open("x", encoding="utf-8", errors=errors) as file:
        file.write(text)
    aside.rename(path)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")


def is_full(error: BaseException) -> bool:
    """Return whether an error says that the disk is full.

    Errors of safetensors and tokenizers, which are written in Rust, say it in their text only.
    """
    return any(os.strerror(number) in str(error) for number in FULL)


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
        raise _unusable(folder, key, error.strerror or str(error)) from error
    try:
        yield
    finally:
        (folder / HOLDER).unlink(missing_ok=True)
        lock.release()


def check_usable(folder: Path, key: str = "run.folder") -> None:
    """Raise ValueError if `locked` would refuse the folder now. Nothing is created or written."""
    if str(folder).encode(errors="replace").decode() != str(folder):
        raise _unusable(folder, key, "its name is not UTF-8")
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise _unusable(folder, key, os.strerror(errno.ENOTDIR))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise _unusable(folder, key, os.strerror(errno.EACCES))
    if (folder / LOCK).exists():
        _acquired(folder, key, 0.0).release()


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


def _unusable(folder: Path, key: str, why: str) -> ValueError:
    return ValueError(
        f"{key} = {str(folder)!r} cannot be used as a folder: {why}; choose another one"
    )

"""Files of a run. What is written to its folder never goes through a link that stands there."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk that is full, and of a quota or a limit of file sizes that is reached."""


def open_plain(path: str, flags: int) -> int:
    """Open a file to append to it, as an `opener`; ValueError if another file would change."""
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)  # no wait for a pipe
    except OSError:
        status = Path(path).lstat() if Path(path).is_symlink() or Path(path).is_fifo() else None
        if status is None:
            raise
    else:
        status = os.fstat(handle)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            return handle
        os.close(handle)
    raise ValueError(
        f"{path} is a link or a pipe, or has a second name, so that nothing is written to it;"
        " remove it, or replace it by a copy"
    )


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
    """Return whether an error, or its cause, says that the disk is full.

    Errors of safetensors and tokenizers, which are written in Rust, say it in their text only.
    """
    if isinstance(error, OSError):
        return error.errno in FULL
    if error.__cause__ is not None:
        return is_full(error.__cause__)
    return any(f"(os error {number})" in str(error) for number in FULL)

"""Generations of checkpoints on disk: which are complete and undamaged. Does not import torch.

A generation is written as `.step-N`, and renamed to `step-N` once it is complete.
"""

import fcntl
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shlex import quote
from typing import IO

from tba.config.schema import read_json
from tba.runs.folder import CHECKPOINTS, continues, own_folder

MANIFEST = "manifest.json"
NAME = re.compile(r"\.?step-\d{8,}")
"""Names of the folders that a save creates; other folders are left alone."""

READ = re.compile(
    r"(optimizer.*|head|reference|search_weights)\.safetensors|delayed\.jsonl"
    r"|model/(adapter_\w+\.(json|safetensors)|model\.safetensors\.index\.json)"
)
"""Names of optional files that are read when present."""
TRIES = 100
"""Attempts to lock a checkpoint before its run removes it."""

log = logging.getLogger(__name__)


def path_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step, which may not exist."""
    return folder / f"step-{step:08d}"


def step_of(generation: Path) -> int:
    return int(generation.name.rpartition("-")[2])


def generations(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    complete = (path for path in saved(folder) if not path.name.startswith("."))
    return sorted(complete, key=step_of)


def how_to_resume(run: Path, wrong: int = 0, setting: str = "") -> str:
    """Return how to continue a run: from its newest checkpoint, or the last before step `wrong`."""
    saved = generations(run / CHECKPOINTS)
    later = [quote(str(each)) for each in saved if 0 < wrong <= step_of(each)]
    if len(later) == len(saved):
        when = "from before that" if later else "yet"
        again = f"remove its folder (`rm -r {quote(str(run))}`), and start it again"
        return f"It has no checkpoint {when}: {again}"
    first = f"After `rm -r {' '.join(later)}`, " if later else ""
    return f"{first}{continues(run, setting)} step {step_of(saved[-1 - len(later)])}"


@contextmanager
def locked_generations(folder: Path) -> Iterator[list[Path]]:
    """Lock the complete checkpoints, so that a training run does not remove them; yield them."""
    with ExitStack() as locks:
        for _ in range(TRIES):  # all of them may be removed between the listing and the locks
            complete = [each for each in generations(folder) if _lock(each, locks)]
            if complete or not generations(folder):
                break
        yield complete


def _lock(generation: Path, locks: ExitStack) -> bool:
    """Lock a checkpoint until `locks` closes; return False if it is being removed."""
    manifest = generation / MANIFEST
    if not manifest.is_file():
        return generation.is_dir()
    try:
        file = locks.enter_context(manifest.open("rb"))
        free = try_lock(file, fcntl.LOCK_SH)  # `remove` needs it alone
        # between open and lock, the name may have gone to another file
        return free and os.path.samestat(os.fstat(file.fileno()), manifest.stat())
    except OSError:  # gone
        return generation.is_dir()


def try_lock(file: IO[bytes], kind: int) -> bool:
    """Lock a file; return False if another process holds it. Without file locks, return True."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def saved(folder: Path) -> set[Path]:
    """Return the folders of all saves, complete or not."""
    return {p for p in folder.glob("*step-*") if NAME.fullmatch(p.name) and p.is_dir()}


def recover(folder: Path) -> None:
    """Finish saves that were interrupted before the final rename, and remove incomplete ones.

    Only the process that writes checkpoints to this folder may call it.
    """
    for path in saved(own_folder(folder)) - {*generations(folder)}:
        target = path_of(folder, step_of(path))
        if path.is_symlink() or damage(path) or (target.exists() and not damage(target)):
            remove(path)
        else:
            put(path, target)


def put(complete: Path, target: Path) -> None:
    """Rename a complete generation to its target, replacing an existing one."""
    if target.is_symlink():
        target.unlink()
    elif target.exists():  # a resumed run saves a step again; a folder cannot be replaced
        shutil.rmtree(target)
    complete.rename(target)


def remove(generation: Path) -> None:
    """Remove a generation, or log why it could not be removed.

    Another process may remove it at the same time, and NFS keeps open files.
    """
    path = generation
    try:
        if path.is_symlink():
            return path.unlink()
        if path.name.startswith("step-") and (path / MANIFEST).is_file():
            with (path / MANIFEST).open("rb") as file:
                if not try_lock(file, fcntl.LOCK_EX):  # it is being read: the next save removes it
                    return None
                path = path.rename(path.with_name(f".{path.name}"))  # so no reader sees a part
        shutil.rmtree(path)
    except OSError as error:
        if path.exists():
            log.warning("%s could not be removed (%s); the next save tries again", path, error)


def damage(generation: Path) -> dict[str, str]:
    """Return the problem of each file that does not match the manifest, by file name.

    If there is a symlink, no file is opened.
    """
    try:
        links = [path for path in (generation, *generation.rglob("*")) if path.is_symlink()]
        if links:
            return {path.name: "is a link" for path in links}
        files = files_of(generation)
        digests = read_json(generation / MANIFEST)
    except (OSError, ValueError, RecursionError) as error:
        return {MANIFEST: f"cannot be read ({error})"}
    others = sorted(files.keys() - {MANIFEST} - digests.keys())
    is_read = {name: bool(READ.fullmatch(name)) for name in others}
    problems = {name: "is not listed" for name in others if is_read[name]}
    if left := [name for name in others if not is_read[name]]:
        text = "%s: %d files are not in its manifest, and not read: %s"
        log.warning(text, generation.name, len(left), ", ".join(left[:3]))
    for name, digest in digests.items():
        if name not in files:
            problems[name] = "is missing"
        elif sha256_of(files[name]) != digest:
            problems[name] = "differs from what was written"
    return problems


def files_of(folder: Path) -> dict[str, Path]:
    """Return the files under the folder, and symlinks to folders, by relative path."""
    paths = [path for path in folder.rglob("*") if path.is_file() or path.is_symlink()]
    return {str(path.relative_to(folder)): path for path in sorted(paths)}


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

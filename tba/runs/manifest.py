"""Folders that are written whole or not at all, with a manifest of the sha256 of each file."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

MANIFEST = "manifest.json"


def commit(aside: Path, target: Path, known: Mapping[str, str]) -> None:
    """Add the manifest to the folder `aside`, flush everything to disk, and rename it to `target`.

    `known` has the sha256 of files that need not be read again.
    """
    manifest = {}
    for path in sorted(p for p in aside.rglob("*") if p.is_file()):
        name = str(path.relative_to(aside))
        manifest[name] = known[name] if name in known else _sha256(path)
    (aside / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in [*aside.rglob("*"), aside]:
        _sync(path)
    if target.exists():
        replaced = target.with_name(f".replaced-{target.name}")
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    aside.rename(target)
    _sync(target.parent)


def damage(folder: Path) -> dict[str, str]:
    """Return the problem of each file that is not as the manifest says, by its name."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        listed = {str(name): str(digest) for name, digest in manifest.items()}
    except (OSError, ValueError, AttributeError) as error:
        return {MANIFEST: f"cannot be read ({error})"}
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    present = files - {MANIFEST}
    problems = dict.fromkeys(present - listed.keys(), "is not listed")
    for name, digest in listed.items():
        if name not in present:
            problems[name] = "is missing"
        elif _sha256(folder / name) != digest:
            problems[name] = "differs from what was written"
    return problems


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

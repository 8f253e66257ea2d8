"""Rows of a data set: a local JSONL or Parquet file, a folder of them, or a name on the hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def rows(key: str, source: str, split: str, subset: str | None = None, required: Sequence[str] = ()) -> list[dict[str, Any]]:
    """All rows of a split. A file is one split; a folder holds `<split>.jsonl` and so on. ValueError names the config key `key`."""
    import datasets

    path = Path(source).expanduser()
    datasets.disable_progress_bars()
    try:
        if path.is_dir():
            path = _split_file(key, path, split)
        if path.is_file():
            found = datasets.load_dataset(_reader(key, path), data_files=str(path), split="train", keep_in_memory=True)
        elif source.startswith((".", "/", "~")) or source.endswith(tuple(READERS)):
            raise ValueError(f"{key} = {source!r}: no such file or folder")
        else:
            found = datasets.load_dataset(source, subset, split=split)
    except (OSError, datasets.exceptions.DatasetGenerationError, datasets.exceptions.DatasetNotFoundError) as error:
        raise ValueError(f"{key} = {source!r} cannot be read: {str(error).splitlines()[0]}; give a .jsonl or .parquet file, a folder of them, or a hub name") from error
    if missing := [c for c in required if c not in found.column_names]:
        raise ValueError(f"{key} = {source!r} has no column {missing[0]!r}; it has {', '.join(found.column_names)}. Rename one to {missing[0]!r}")
    listed: list[dict[str, Any]] = found.to_list()
    if not listed:
        raise ValueError(f"{key} = {source!r} has no rows")
    try:
        json.dumps(listed[0])
    except TypeError as error:
        raise ValueError(f"{key} = {source!r}: {error}; keep only columns of text, numbers, lists and tables") from error
    return listed


def _reader(key: str, path: Path) -> str:
    if path.suffix not in READERS:
        raise ValueError(f"{key} = {str(path)!r}: {path.suffix or 'no suffix'} is not one of {', '.join(READERS)}")
    return READERS[path.suffix]


def _split_file(key: str, folder: Path, split: str) -> Path:
    for suffix in READERS:
        if (folder / f"{split}{suffix}").is_file():
            return folder / f"{split}{suffix}"
    raise ValueError(f"{key} = {str(folder)!r} has no {split}.jsonl (or {', '.join(s for s in READERS if s != '.jsonl')}); it has {', '.join(sorted(p.name for p in folder.iterdir())) or 'nothing'}")

"""Rows of a data set: a local JSONL or Parquet file, a folder of them, or a name on the hub."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba.config.messages import check_depth

Rows = list[dict[str, Any]]

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


def rows(
    key: str,
    source: str,
    split: str,
    subset: str | None = None,
    required: Sequence[str] = (),
    columns: Sequence[str] | None = None,
) -> Rows:
    """Return all rows of a split; a ValueError names the config key `key`.

    A file is one split; a folder holds `<split>.jsonl` and so on. Of a hub data set, only these
    `columns` are taken, if given: others may be large, such as tokens.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        path = _split_file(key, path, split)
    elif not path.is_file() and (source.startswith((".", "/", "~")) or source.endswith(SUFFIXES)):
        raise ValueError(f"{key} = {source!r}: no such file or folder")
    if path.is_file() and path.suffix not in SUFFIXES:
        suffix = path.suffix or "no suffix"
        raise ValueError(f"{key} = {str(path)!r}: {suffix} is not one of {', '.join(SUFFIXES)}")
    try:
        table = _from_file(path) if path.is_file() else _from_hub(source, subset, split, columns)
    except (OSError, ValueError, RecursionError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(
            f"{key} = {source!r} cannot be read: {why};"
            f" give a file ({', '.join(SUFFIXES)}), a folder of them, or a hub name"
        ) from error
    return checked(f"{key} = {source!r}", table, required)


def checked(origin: str, table: Rows, required: Sequence[str] = ()) -> Rows:
    """Return the rows as plain JSON with the same columns in each, None where there is no value.

    ValueError, which starts with `origin`, if that is impossible or a required column is missing.
    """
    if not table:
        raise ValueError(f"{origin} has no rows")
    check_depth(origin, table)
    try:
        text = json.dumps(table, default=_plain, ensure_ascii=False)
        text.encode()  # raises for a lone surrogate, half a character, which no tokenizer takes
        table = json.loads(text)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{origin}: {error}; keep only columns of text, numbers, lists and tables"
        ) from error
    columns = list(dict.fromkeys(name for row in table for name in row))
    table = [{name: row.get(name) for name in columns} for row in table]
    require(origin, table, required)
    return table


def require(origin: str, table: Rows, columns: Sequence[str]) -> None:
    """ValueError, which starts with `origin`, if one of the columns is missing."""
    for name in columns:
        if name not in table[0]:
            option = ", or set task.prompt_column" if name == "prompt" else ""
            raise ValueError(
                f"{origin} has no column {name!r}; it has {', '.join(table[0])}."
                f" Rename one to {name!r}{option}"
            )


def _plain(value: Any) -> Any:
    """Return a number or array of numpy as Python's."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def _split_file(key: str, folder: Path, split: str) -> Path:
    present = sorted(p.name for p in folder.iterdir())
    for suffix in SUFFIXES:
        if f"{split}{suffix}" in present:
            return folder / f"{split}{suffix}"
    raise ValueError(
        f"{key} = {str(folder)!r} has no {split}.jsonl (or {', '.join(SUFFIXES[1:])});"
        f" it has {', '.join(present) or 'nothing'}"
    )


def _from_file(path: Path) -> Rows:
    """Read a file without `datasets`, which would keep a copy of it in the user's cache."""
    from pyarrow import csv, parquet

    if path.suffix in (".parquet", ".csv"):
        read = parquet.read_table if path.suffix == ".parquet" else csv.read_csv
        return list(read(path).to_pylist())
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        table = json.loads(text)
    else:  # not splitlines(): JSON strings may hold U+2028 and the like
        lines = enumerate(text.split("\n"), 1)
        table = [_parsed(number, line) for number, line in lines if line.strip()]
    if not all(isinstance(row, dict) for row in table):
        raise ValueError("every row must be a table, {column: value, ...}")
    return list(table)


def _parsed(number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number}: {error}") from error


def _from_hub(name: str, subset: str | None, split: str, columns: Sequence[str] | None) -> Rows:
    import datasets

    datasets.disable_progress_bars()
    try:
        table = datasets.load_dataset(name, subset, split=split)
        if columns is not None:
            table = table.select_columns([c for c in table.column_names if c in columns])
        return list(table.to_list())
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(str(error.__cause__ or error)) from error

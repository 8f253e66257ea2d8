"""Rows of a data set: a local file, a folder of files, or a name on the hub."""

import codecs
import csv
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from tba.config.errors import DEEPEST, about

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
    elif not path.is_file() and is_path(source):
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
    table = checked(f"{key} = {source!r}", table, required)
    require(f"{key} = {source!r}", table, [c for c in columns or () if c in table[0]])
    return table


def is_path(source: str) -> bool:
    """Return whether a source is a file or a folder, or is written like one; not a hub name."""
    written = source.startswith((".", "/", "~")) or source.endswith(SUFFIXES)
    return written or Path(source).expanduser().exists()


def checked(origin: str, table: Rows, required: Sequence[str] = ()) -> Rows:
    """Return the rows as plain JSON with the same columns in each, None where there is no value.

    A column with a value that JSON cannot hold has an error in each row: prompts go to other
    processes, and into checkpoints. ValueError, which starts with `origin`, if there are no rows,
    or a required column is missing or has errors.
    """
    names = {name: str(name) for row in table for name in row}
    if not names:
        raise ValueError(f"{origin} has no rows")
    with about(origin):
        check_names(list(names.values()))
    columns = {name: _column([row.get(key) for row in table]) for key, name in names.items()}
    table = _rows(columns)
    require(origin, table, required)
    return table


def _rows(columns: Mapping[str, Sequence[Any]]) -> Rows:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def check_names(columns: Sequence[str]) -> None:
    """ValueError if two columns have the same name."""
    for name, count in Counter(columns).items():
        if count > 1:
            raise ValueError(f"{count} columns are called {name!r}; rename all but one")


def without_errors(origin: str, table: Rows, used: Collection[str]) -> Rows:
    """Return the rows without the columns that have errors; ValueError if one of them is `used`."""
    require(origin, table, [name for name in table[0] if name in used])
    kept = [name for name, value in table[0].items() if not isinstance(value, ValueError)]
    for name in table[0].keys() - kept:
        told = "%s: the column %r is left out: %s"
        logging.getLogger(__name__).warning(told, origin, name, table[0][name])
    return [{name: row[name] for name in kept} for row in table]


def require(origin: str, table: Rows, columns: Sequence[str]) -> None:
    """ValueError, which starts with `origin`, if one of the columns is missing or has errors."""
    for name in columns:
        if name not in table[0]:
            option = ", or set task.prompt_column" if name == "prompt" else ""
            raise ValueError(
                f"{origin} has no column {name!r}; it has {', '.join(table[0])}."
                f" Rename one to {name!r}{option}"
            )
        if isinstance(table[0][name], ValueError):
            raise ValueError(f"{origin}: column {name!r}, {table[0][name]}; convert it to text")


def _column(values: Sequence[Any]) -> list[Any]:
    """Return values as plain JSON, or an error in place of each, which names the first row."""
    plain: list[Any] = []
    try:
        for value in values:
            plain.append(_plain(value))
    except ValueError as error:
        return [ValueError(f"row {len(plain)}: {error}")] * len(values)
    return plain


def _plain(value: Any, levels: int = DEEPEST) -> Any:
    """Return a value as JSON has it, none of it changed; ValueError if it cannot."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and value.bit_length() < 14_000:  # or Python does not write it
        return int(value)
    if isinstance(value, str):
        value.encode()  # raises for half a character, a lone surrogate, which no tokenizer takes
        return str.__str__(value)
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufUO" and levels > 0:
        return _plain(value.tolist(), levels - 1)  # a date would become a number
    if isinstance(value, float):
        return float(value)
    if isinstance(value, dict | list | tuple) and levels < 1:  # such as a list that holds itself
        raise ValueError(f"nested more than {DEEPEST} levels deep")
    if isinstance(value, list | tuple):
        return [_plain(inner, levels - 1) for inner in value]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {_plain(name): _plain(inner, levels - 1) for name, inner in value.items()}
    if isinstance(value, Exception):  # of `by_column`
        raise ValueError(str(value))
    raise ValueError(f"{type(value).__name__} is not text, a number, a list, or a table with names")


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
    from pyarrow import parquet

    if path.suffix == ".parquet":
        table = parquet.ParquetFile(path).read()
        return by_column(table, lambda name: table.select([name]).to_pylist())
    content = path.read_bytes()
    wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = content.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(f"line {line} is not UTF-8 ({error.reason}); save it as UTF-8") from error
    if path.suffix == ".csv":
        return _from_csv(text)
    if text.lstrip().startswith("["):
        rows = json.loads(text)
    else:  # not splitlines(): JSON strings may hold U+2028 and the like
        lines = enumerate(text.split("\n"), 1)
        rows = [_parsed(number, line) for number, line in lines if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("every row must be a table, {column: value, ...}")
    return list(rows)


def by_column(table: Any, read: Callable[[str], Rows]) -> Rows:
    """Return rows that are read column by column: one that Python cannot hold has its error."""
    check_names(table.column_names)
    columns: dict[str, list[Any]] = {}
    for name in table.column_names:
        try:
            columns[name] = [row[name] for row in read(name)]
        except (ValueError, OverflowError, ImportError) as error:  # such as a date after year 9999
            columns[name] = [error] * table.num_rows
    return _rows(columns)


def _from_csv(text: str) -> Rows:
    """Read CSV as Python's `csv` does: values are text. The header shows what separates them."""
    csv.field_size_limit(sys.maxsize)  # else a value has at most 131,072 characters

    def reader(separator: str, strict: bool) -> Any:
        return csv.reader(StringIO(text, newline=""), delimiter=separator, strict=strict)

    headers: dict[str, list[str]] = {
        s: next(filter(None, reader(s, strict=False)), []) for s in ",;\t"
    }
    lines = reader(next((s for s, names in headers.items() if len(names) > 1), ","), strict=True)
    rows: Iterator[list[str]] = filter(None, lines)  # without empty lines
    table: Rows = []
    try:
        header = next(rows, [])
        check_names([name for name in header if name])  # pandas writes its index without a name
        for values in rows:
            if len(values) != len(header):
                raise csv.Error(f"{len(values)} values for {len(header)} columns")
            table.append({name: x for name, x in zip(header, values, strict=True) if name})
    except csv.Error as error:
        where = f"row {len(table)}, up to line {lines.line_num}"
        raise ValueError(f"{where}: {error}") from error
    return table


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
        return by_column(table, lambda name: table.select_columns([name]).to_list())
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(str(error.__cause__ or error)) from error

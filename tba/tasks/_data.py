"""Reads the rows of a data set: a local file, a folder of files, or a name on the Hub."""

import csv
import json
import logging
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from tba.config.mistakes import about, choices, relative_to
from tba.models.template import JSON, check_names

Rows = list[dict[str, Any]]

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
SPLITS = re.compile(r"(?:^|\+)\s*([\w.-]+)")
"""The name of a split in text such as `train[:100]+test`."""


def rows(
    key: str,
    source: str,
    split: str,
    subset: str | None = None,
    required: Sequence[str] = (),
    columns: Sequence[str] | None = None,
) -> Rows:
    """Return all rows of a split; a ValueError names the config key `key`.

    A file is one split; a folder contains `<split>.jsonl` etc. If `columns` are given, only these
    are read from a Hub data set: others, such as tokens, may be large.
    """
    try:
        if is_local(source):
            table = _from_local(Path(source).expanduser(), split)
        else:
            import datasets

            datasets.disable_progress_bars()
            try:
                stored = datasets.load_dataset(source, subset, split=split)
                if columns is not None:
                    kept = [name for name in stored.column_names if name in columns]
                    stored = stored.select_columns(kept)
                table = from_arrow(stored.with_format("arrow")[:])
            except datasets.exceptions.DatasetGenerationError as error:
                raise ValueError(str(error.__cause__ or error)) from error
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        why = str(error).partition("\n")[0]
        if is_local(source) and not Path(source).expanduser().exists():
            why += relative_to(source)
        raise ValueError(
            f"{key} = {source!r} cannot be read: {why};"
            f" give a file ({', '.join(SUFFIXES)}), a folder of them, or a hub name"
        ) from error
    return checked(f"{key} = {source!r}", table, required)


def is_local(source: str) -> bool:
    """Return whether `source` is a file or folder, which need not exist, rather than a Hub name."""
    named = source.startswith((".", "/", "~")) or source.endswith(SUFFIXES)
    return named or Path(source).expanduser().exists()


def split_of(source: str, given: str | None, default: str) -> str:
    """Return the split to read; ValueError for any but the default split of a file."""
    if Path(source).expanduser().is_file() and {*SPLITS.findall(given or "")} - {"train", default}:
        told = f"the file {source!r} has no split {given!r}; remove it, or give a part of the file"
        raise ValueError(f"{told}, such as train[:100]")
    return given or default


def checked(origin: str, table: Rows, required: Sequence[str] = ()) -> Rows:
    """Return the rows as plain JSON, all with the same columns; missing values become None.

    A column with a value that JSON cannot represent is dropped with a warning: prompts are sent to
    other processes and stored in checkpoints. Raises ValueError, starting with `origin`, if there
    are no rows or a required column is missing.
    """
    names = {name: str(name) for row in table for name in row}
    with about(origin):
        check_names(list(names.values()))
    encode = json.JSONEncoder(ensure_ascii=False, default=_of_numpy).encode
    columns: dict[str, list[Any]] = {}
    for key, name in names.items():
        column: list[Any] = []
        try:
            for row in table:
                text = encode(row.get(key))
                text.encode()  # raises for an unpaired surrogate, which tokenizers reject
                column.append(json.loads(text))
            columns[name] = column
        except (TypeError, ValueError, RecursionError) as error:
            told = "%s: the column %r is left out: row %d: %s; convert it to text"
            logging.getLogger(__name__).warning(told, origin, name, len(column), error)
    rows = [{name: columns[name][i] for name in columns} for i in range(len(table))]
    if not rows:
        raise ValueError(f"{origin} has no rows")
    require(origin, rows, required)
    return rows


def require(origin: str, table: Rows, columns: Sequence[str], setting: str = "") -> None:
    """Raise ValueError, starting with `origin`, if a column is missing, which `setting` names."""
    for name in columns:
        if name in table[0]:
            continue
        if setting and name != "prompt":
            raise ValueError(
                f"{origin} has no column {name!r}, which {setting} names{choices(name, table[0])}"
            )
        option = ", or set task.prompt_column" if name == "prompt" else ""
        raise ValueError(
            f"{origin} has no column {name!r}; it has {', '.join(table[0]) or 'no columns'}."
            f" Rename one to {name!r}{option}"
        )


def _of_numpy(value: Any) -> Any:
    """Return a NumPy scalar or array as plain values; TypeError for any other object."""
    is_numpy = isinstance(value, np.generic | np.ndarray)
    if is_numpy and value.dtype in (np.float16, np.float32):  # 0.1, not 0.10000000149011612
        value = value.astype(str).astype(float)
    if is_numpy and value.dtype.kind in "biufUO":  # a date would become a number
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not text, a number, a list, or a table with names")


def _from_local(path: Path, split: str) -> Rows:
    """Return the rows of a split, or of slices such as `train[:50%]` (syntax of `datasets`)."""
    tables = {}
    for name in SPLITS.findall(split):
        file = path
        if path.is_dir():
            present = sorted(each.name for each in path.iterdir())
            files = [each for each in present if each in [f"{name}{suffix}" for suffix in SUFFIXES]]
            if not files:
                raise ValueError(f"it has no {name}.jsonl, but {', '.join(present) or 'nothing'}")
            if files[1:]:
                raise ValueError(f"it has {' and '.join(files)}; name one, or remove the others")
            file = path / files[0]
        tables[name] = _from_file(file)
    if split.isidentifier():
        return tables[split]
    from datasets import ReadInstruction

    sizes = {name: len(table) for name, table in tables.items()}
    parts = ReadInstruction.from_spec(split).to_absolute(sizes)
    return [row for part in parts for row in tables[part.splitname][part.from_ : part.to]]


def _from_file(path: Path) -> Rows:
    """Read a file without `datasets`, which would copy it to the user's cache."""
    from pyarrow import parquet

    if path.suffix == ".parquet":
        return from_arrow(parquet.ParquetFile(path).read())
    text = path.read_bytes().decode("utf-8-sig")  # not read_text, which converts line endings
    if path.suffix == ".csv":
        return _from_csv(text)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"its suffix is {path.suffix!r}")
    rows: Rows = JSON.decode(text) if text.lstrip().startswith("[") else _from_lines(text)
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("every row must be a table, {column: value, ...}")
    return rows


def _from_lines(text: str) -> Rows:
    rows: Rows = []
    start = text.lstrip()
    keys: list[str] = []
    with suppress(ValueError, AttributeError):  # invalid lines are reported below
        first, end = JSON.raw_decode(start)
        is_alone = not start[end:].strip() and '"role"' not in start
        is_nested = is_alone and {*map(type, first.values())} <= {dict, list}
        keys = list(first) if is_nested or "\n" in start[:end] else []
    if keys:
        told = f"its JSON is an object with the keys {', '.join(keys)}"
        raise ValueError(f"{told}; give a list of rows, or one row in each line")
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines(): texts may have U+2028
        if line.strip():
            with about(f"line {number}"):
                rows.append(JSON.decode(line))
    return rows


def from_arrow(table: Any) -> Rows:
    """Return the rows of an Arrow table, without decoding images or similar values."""
    check_names(table.column_names)
    columns = [map(_value, column) for column in table.columns]
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _value(scalar: Any) -> Any:
    """Return an Arrow scalar as a Python value, or unchanged, such as a date in the year 10000.

    An unchanged value has no JSON form, so its column is dropped, or is an error if it is required.
    """
    try:
        return _shortest(scalar.as_py(), scalar.type)
    except (ValueError, ArithmeticError):
        return scalar


def _shortest(value: Any, kind: Any) -> Any:
    """Convert 32- and 16-bit floats to the shortest decimal: 0.1, not 0.10000000149011612."""
    if "float" not in str(kind):  # Arrow calls 64 bits "double"
        return value
    inner = [kind.field(place).type for place in range(kind.num_fields)]
    match value:
        case float():
            exact = kind if str(kind) in ("float", "halffloat") else kind.value_type
            return float(str(exact.to_pandas_dtype()(value)))
        case dict():
            return dict(zip(value, map(_shortest, value.values(), inner), strict=True))
        case tuple():  # an item of a map
            return tuple(map(_shortest, value, inner))
        case list():
            return [_shortest(each, inner[0]) for each in value]
    return value


def _from_csv(text: str) -> Rows:
    """Read CSV with Python's `csv`: values are text. The delimiter is detected in the header."""
    csv.field_size_limit(sys.maxsize)  # the default limit is 131,072 characters per value
    text = text.lstrip("\r\n")
    unquoted = re.sub(r'"[^"]*"', "", text[: 2**16])
    header = re.split("[\r\n]", unquoted, maxsplit=1)[0]
    separator = next((mark for mark in ",;\t" if mark in header), ",")
    lines = csv.DictReader(StringIO(text, newline=""), delimiter=separator, strict=True)
    rows: Rows = []
    try:
        names = lines.fieldnames or []
        check_names([name for name in names if name])
        for row in lines:
            if None in row or None in row.values():
                raise csv.Error(f"row {len(rows)} needs {len(names)} values, one for each column")
            rows.append({name: value for name, value in row.items() if name})  # pandas' index
    except csv.Error as error:
        raise ValueError(f"up to line {lines.reader.line_num}: {error}") from error
    return rows

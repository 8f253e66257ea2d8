"""Rows are read as written; an error names the config key of the data."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from tba.tasks._data import rows

ROWS: list[dict[str, Any]] = [
    {"prompt": "2+2=", "level": 1, "tags": ["short", "a\u2028b"]},
    {"prompt": "3+9=", "level": 2, "tags": []},
    {"prompt": "ü+1=", "level": 3, "tags": ["odd"]},
]


def write(path: Path, found: list[dict[str, Any]]) -> str:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(found), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(found, indent=1))
    else:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found))
    return str(path)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_a_file_is_one_split(tmp_path: Path, suffix: str) -> None:
    assert (
        rows(
            "task.data",
            write(tmp_path / f"any.{suffix}", ROWS),
            "train",
            required=("prompt", "level"),
        )
        == ROWS
    )


def test_a_csv_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,level\n2+2=,1\n3+9=,2\n")
    assert rows("task.data", str(tmp_path / "a.csv"), "train") == [
        {"prompt": "2+2=", "level": 1},
        {"prompt": "3+9=", "level": 2},
    ]


def test_a_folder_holds_a_file_for_each_split(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS[:2])
    write(tmp_path / "test.parquet", ROWS[2:])
    assert [rows("task.data", str(tmp_path), split) for split in ("train", "test")] == [
        ROWS[:2],
        ROWS[2:],
    ]
    with pytest.raises(
        ValueError,
        match=r"task\.data = .* has no dev\.jsonl \(or \.json, \.parquet, \.csv\);"
        r" it has test\.parquet, train\.jsonl",
    ):
        rows("task.data", str(tmp_path), "dev")


def test_a_value_that_a_row_lacks_is_none(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"prompt": "1"}, {"prompt": "2", "level": 5}])
    assert rows("task.data", source, "train") == [
        {"prompt": "1", "level": None},
        {"prompt": "2", "level": 5},
    ]


def test_messages_stay_as_they_are(tmp_path: Path) -> None:
    chat = [
        {"prompt": [{"role": "user", "content": "2+2"}]},
        {
            "prompt": [
                {"role": "system", "content": "Add."},
                {"role": "user", "content": "1", "name": "a"},
            ]
        },
    ]
    assert rows("task.data", write(tmp_path / "a.jsonl", chat), "train") == chat


WRONG = {
    "column": (
        "a.jsonl",
        '{"question": "1", "answer": "2"}',
        "has no column 'prompt'; it has question, answer. Rename one to 'prompt'",
    ),
    "empty": ("a.jsonl", "", "has no rows"),
    "blank": ("a.jsonl", "\n\n", "has no rows"),
    "empty list": ("a.json", "[]", "has no rows"),
    "broken JSON": (
        "a.jsonl",
        '{"prompt": "1"}\n{"prompt": \n',
        "cannot be read: line 2: Expecting value",
    ),
    "not rows": ("a.jsonl", '"prompt"\n', "every row must be a table"),
    "not UTF-8": ("a.jsonl", b"\xff\xfe", "cannot be read: 'utf-8' codec can't decode"),
    "broken Parquet": (
        "a.parquet",
        "prompt",
        "Parquet file size is 6 bytes, smaller than the minimum",
    ),
    "suffix": ("a.txt", "prompt", ".txt is not one of .jsonl, .json, .parquet, .csv"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_cannot_be_read_is_told(
    tmp_path: Path, case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    name, content, told = WRONG[case]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as error:
        rows("task.data", str(tmp_path / name), "train", required=("prompt",))
    assert str(error.value).startswith(f"task.data = {str(tmp_path / name)!r}")
    assert told in str(error.value)
    assert capfd.readouterr() == ("", "")  # nothing but the error


def test_parquet_without_rows(tmp_path: Path) -> None:
    parquet.write_table(
        pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), tmp_path / "a.parquet"
    )
    with pytest.raises(ValueError, match="has no rows"):
        rows("task.data", str(tmp_path / "a.parquet"), "train", required=("prompt",))


def test_a_column_that_is_not_json_is_told(tmp_path: Path) -> None:
    source = write(tmp_path / "a.parquet", [{"prompt": "1", "when": datetime(2025, 3, 25)}])
    with pytest.raises(
        ValueError,
        match="datetime is not JSON serializable;"
        " keep only columns of text, numbers, lists and tables",
    ):
        rows("task.data", source, "train")
    (tmp_path / "late.csv").write_text("prompt,when\n1,\n2,2024-01-02\n")
    with pytest.raises(ValueError, match="date is not JSON serializable"):
        rows("task.data", str(tmp_path / "late.csv"), "train")


@pytest.mark.parametrize(
    "source", ["nowhere.jsonl", "./nowhere", "/nowhere/at/all", "~/nowhere.parquet"]
)
def test_a_missing_file_is_told(source: str) -> None:
    with pytest.raises(ValueError, match=f"task.data = {source!r}: no such file or folder"):
        rows("task.data", source, "train")


def test_a_hub_name_that_cannot_be_reached_is_told() -> None:
    with pytest.raises(
        ValueError,
        match=r"task\.data = 'nobody/nothing' cannot be read: .* give a file"
        r" \(\.jsonl, \.json, \.parquet, \.csv\), a folder of them, or a hub name",
    ):
        rows("task.data", "nobody/nothing", "train")

"""Rows are read as written; an error names the config key of the data."""

import csv
import json
import re
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from tba.tasks._data import rows
from tba.tasks._memory import to_rows
from tba.tasks.custom import Custom

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
def test_a_file_is_one_split(tmp_path, suffix):
    source = write(tmp_path / f"any.{suffix}", ROWS)
    assert rows("task.data", source, "train", required=("prompt", "level")) == ROWS


def write_text(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


VALUES = [
    "", "007", "0.50", "1e5", "1_000", "true", "NA", "null", "NaN", "1945-05-08", "12:30",
    "9" * 30, " spaced ", 'a "quoted" word', "a,b;c\td", "two\nlines", "two\r\nlines", "é\u2028",
    "x" * 200_000,
]  # fmt: skip
"""Texts that readers of CSV are known to change."""


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    table=st.lists(
        st.lists(st.sampled_from(VALUES), min_size=3, max_size=3), min_size=1, max_size=6
    ),
    separator=st.sampled_from([",", ";", "\t"]),
    ending=st.sampled_from(["\n", "\r\n"]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig"]),
)
def test_csv_is_read_as_it_was_written(tmp_path, table, separator, ending, encoding):
    """Whatever separates the values, ends the lines, or stands at the beginning of the file."""
    header = ["prompt", "answer", "note"]
    with (tmp_path / "a.csv").open("w", newline="", encoding=encoding) as file:
        writer = csv.writer(file, delimiter=separator, lineterminator=ending)
        writer.writerows([header, *table])
    wanted = [dict(zip(header, row, strict=True)) for row in table]
    assert rows("task.data", str(tmp_path / "a.csv"), "train") == wanted


def test_csv_with_an_index_and_empty_lines(tmp_path):
    """pandas writes an index without a name; nobody can ask for it."""
    source = write_text(tmp_path / "a.csv", "\n,prompt\n0,a\n\n1,b\n\n")
    assert rows("task.data", source, "train") == [{"prompt": "a"}, {"prompt": "b"}]


def test_the_header_shows_the_separator_outside_of_quotes(tmp_path):
    for text in ('"prompt,\n long";answer\na,b;c\n', '"prompt,\n long";answer\ra,b;c\r'):
        source = write_text(tmp_path / "a.csv", text)
        assert rows("task.data", source, "train") == [{"prompt,\n long": "a,b", "answer": "c"}]


CSV = {
    "names": ('"prompt"x,answer\na,b\n', "up to line 1: ',' expected after '\"'"),
    "too few": ("prompt,answer\na,b\nc\n", "up to line 3: row 1 needs 2 values"),
    "too many": ("prompt,answer\na,b,c\n", "up to line 2: row 0 needs 2 values"),
    "equal": ("prompt,answer,answer\na,b,c\n", "2 columns are called 'answer'; rename"),
    "open": ('prompt,answer\na,b\n"c,d\ne,f\n', "up to line 4: unexpected end of data"),
    "after": ('prompt,answer\n"a"b,c\n', "up to line 2: ',' expected after '\"'"),
    "latin-1": ("prompt\na\né\n".encode("latin-1"), "'utf-8' codec can't decode byte 0xe9"),
    "empty": ("\n\n", "has no rows"),
    "header": ("prompt,answer\n", "has no rows"),
}


@pytest.mark.parametrize("case", CSV)
def test_csv_that_is_not_sound_is_refused(tmp_path, case):
    content, told = CSV[case]
    with pytest.raises(ValueError, match=re.escape(told)):
        rows("task.data", write_text(tmp_path / "a.csv", content), "train")


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    write(path, ROWS)
    path.write_bytes(path.read_text().encode("utf-8-sig"))
    assert rows("task.data", str(path), "train") == ROWS


def test_a_folder_holds_a_file_for_each_split(tmp_path):
    write(tmp_path / "train.jsonl", ROWS[:2])
    write(tmp_path / "test.parquet", ROWS[2:])
    read = [rows("task.data", str(tmp_path), split) for split in ("train", "test")]
    assert read == [ROWS[:2], ROWS[2:]]
    told = r"has no dev\.jsonl, but test\.parquet, train\.jsonl; give"
    with pytest.raises(ValueError, match=rf"task\.data = .* {told}"):
        rows("task.data", str(tmp_path), "dev")


def test_a_folder_with_two_files_of_a_split_is_refused(tmp_path):
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "train.parquet", ROWS)
    with pytest.raises(ValueError, match=r"it has train\.jsonl and train\.parquet; name one"):
        rows("task.data", str(tmp_path), "train")


SPLITS: dict[str, tuple[dict[str, str], list[str], list[str]]] = {
    "slice": ({"split": "train[:3]"}, ["0", "1"], ["2"]),
    "share": ({"split": "train[50%:]"}, ["4", "5", "6"], ["7"]),
    "slices": ({"split": "train[:2]+train[-2:]"}, ["0", "1", "6"], ["7"]),
    "both": ({"split": "train[:2]", "held_out_split": "train[2:]"}, ["0", "1"], ["2"]),
    "other data": ({"held_out_data": "", "held_out_split": "test[3:]"}, [*"01234567"], ["3"]),
}


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("case", SPLITS)
def test_splits_are_those_of_load_dataset(case, folder, tmp_path):
    settings, train, held_out = SPLITS[case]
    for name in ("train", "test"):
        write(tmp_path / f"{name}.jsonl", [{"prompt": str(i)} for i in range(8)])
    source = str(tmp_path if folder else tmp_path / "train.jsonl")
    settings = {name: value or source for name, value in settings.items()}
    task = Custom(data=source, passed=(len,), held_out_size=1, **settings)
    assert [p.text for p in task.prompts()] == train
    assert [p.text for p in task.held_out()] == held_out


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"split": "validation"}, r"the file '.*' has no split 'validation'; remove it, or give a"),
        ({"held_out_split": "dev[:2]"}, r"the file '.*' has no split 'dev\[:2\]'; remove it"),
        ({"split": "train[x]"}, r"task\.data = '.*' cannot be read: .*train\[x\]"),
        ({"subset": "main"}, r"task\.subset = 'main' is for hub data sets only; remove it"),
    ],
)
def test_settings_that_a_file_cannot_obey_are_refused(settings, told, tmp_path):
    source = write(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ValueError, match=told):
        Custom(data=source, passed=(len,), held_out_size=1, **settings).prompts()


def test_a_value_that_a_row_lacks_is_none(tmp_path):
    source = write(tmp_path / "a.jsonl", [{"prompt": "1"}, {"prompt": "2", "level": 5}])
    first, second = rows("task.data", source, "train")
    assert (first, second) == ({"prompt": "1", "level": None}, {"prompt": "2", "level": 5})


DEEP = f'{{"prompt": "1", "x": {"[" * 5000}{"]" * 5000}}}\n'
WRONG = {
    "column": ("a.jsonl", '{"question": "1", "answer": "2"}',
        "has no column 'prompt'; it has question, answer. Rename one to 'prompt'"),
    "empty": ("a.jsonl", "", "has no rows"),
    "blank": ("a.jsonl", "\n\n", "has no rows"),
    "empty list": ("a.json", "[]", "has no rows"),
    "broken": ("a.jsonl", '{"prompt": "1"}\n{"prompt": \n', "be read: line 2: Expecting value"),
    "nested too deeply": ("a.jsonl", DEEP, "cannot be read: maximum recursion depth"),
    "not rows": ("a.jsonl", '"prompt"\n', "every row must be a table"),
    "names": ("a.jsonl", '{"prompt": "1", "prompt": "2"}', "line 1: 2 columns are called 'prom"),
    "not UTF-8": ("a.jsonl", b"\xfc", "'utf-8' codec can't decode byte 0xfc"),
    "broken Parquet": ("a.parquet", "prompt", "Parquet file size is 6 bytes, smaller than the"),
    "suffix": ("a.txt", "prompt", "its suffix is '.txt'; give a file (.jsonl, .json,"),
    "object": ("a.json", '{\n "data": [{"prompt": "1"}]}', "an object with the keys data; give"),
    "one line": ("a.jsonl", '{"data": [{"prompt": "1"}]}', "an object with the keys data; give"),
    "columns": ("a.json", '{"prompt": {"0": "1"}, "a": {}}', "object with the keys prompt, a;"),
    "one row": ("a.json", '\n{"prompt": "1",\n"a": "2"}', "object with the keys prompt, a; give"),
    "long rows": ("a.jsonl", '{"prompt":\n"1"}\n{"prompt":\n"1"}', "the keys prompt; give a list"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_cannot_be_read_is_told(tmp_path, case, capfd):
    name, content, told = WRONG[case]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as error:
        rows("task.data", str(tmp_path / name), "train", required=("prompt",))
    assert str(error.value).startswith(f"task.data = {str(tmp_path / name)!r}")
    assert told in str(error.value)
    assert capfd.readouterr() == ("", "")  # nothing but the error


def test_parquet_without_rows(tmp_path):
    empty = pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
    parquet.write_table(empty, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="has no rows"):
        rows("task.data", str(tmp_path / "a.parquet"), "train", required=("prompt",))


def arrow(values: list[Any], kind: pyarrow.DataType) -> pyarrow.Table:
    return pyarrow.table({"prompt": ["a", "b"], "odd": pyarrow.array(values, kind)})


ODD: dict[str, tuple[pyarrow.Table, str]] = {
    "timestamp": (arrow([None, datetime(2025, 3, 25)], pyarrow.timestamp("us")), "datetime"),
    "date": (arrow([None, date(2025, 3, 25)], pyarrow.date32()), "date"),
    "bytes": (arrow([None, b"x"], pyarrow.binary()), "bytes"),
    "decimal": (arrow([None, Decimal("0.50")], pyarrow.decimal128(5, 2)), "Decimal"),
    "duration": (arrow([1, 2], pyarrow.duration("ns")), "timedelta|Timedelta"),
    "far timestamp": (arrow([None, 10**15], pyarrow.timestamp("ms")), "TimestampScalar"),
    "nested": (arrow([[{"x": b"y"}], []], pyarrow.list_(pyarrow.struct({"x": pyarrow.binary()}))),
               "bytes"),
}  # fmt: skip


F16, F32 = pyarrow.float16(), pyarrow.float32()
FLOATS: dict[str, tuple[pyarrow.DataType, Any]] = {
    "float32": (F32, 0.1), "float16": (F16, 0.1), "large": (F32, 1e20), "none": (F32, None),
    "list": (pyarrow.list_(F32), [0.1, None]), "fixed": (pyarrow.list_(F32, 1), [0.1]),
    "table": (pyarrow.struct({"a": F16, "b": pyarrow.list_(F32)}), {"a": 0.2, "b": [0.3]}),
    "map": (pyarrow.map_(pyarrow.string(), F32), [("a", 0.1)]),
    "dictionary": (pyarrow.dictionary(pyarrow.int8(), F32), 0.1),
    "float64": (pyarrow.struct({"a": pyarrow.float64(), "b": F32}), {"a": 1 / 3, "b": 0.7}),
}  # fmt: skip


@pytest.mark.parametrize("kind", FLOATS)
def test_floats_of_few_bits_are_their_shortest_decimals(kind, tmp_path):
    """Not 0.10000000149011612, which a grader would take for the right answer."""
    of_arrow, value = FLOATS[kind]
    column = pyarrow.array([value], of_arrow)
    if kind == "dictionary":
        column = pyarrow.array([value], F32).dictionary_encode()
    parquet.write_table(pyarrow.table({"x": column}), tmp_path / "a.parquet")
    expected = json.loads(json.dumps([{"x": value}]))
    assert rows("task.data", str(tmp_path / "a.parquet"), "train") == expected


@pytest.mark.parametrize("kind", ["float32", "float16", "Float32", "float[pyarrow]"])
def test_floats_of_few_bits_in_memory(kind):
    numbers = np.array([0.1, 0.3], "float16" if kind == "float16" else "float32")
    frame = pandas.DataFrame({"x": pandas.Series(numbers).astype(kind), "y": [numbers, "z"]})
    expected = [{"x": 0.1, "y": [0.1, 0.3]}, {"x": 0.3, "y": "z"}]
    assert to_rows("data", frame) == expected
    assert to_rows("data", [{"x": numbers[0], "y": numbers}, {"x": 0.3, "y": "z"}]) == expected
    frame.loc[0, "x"] = None
    assert to_rows("data", frame)[0]["x"] is None
    data = datasets.Dataset.from_dict({"x": numbers}).cast_column("x", datasets.Value("float32"))
    if kind == "float32":
        assert to_rows("data", data) == to_rows("data", data.with_format("numpy"))
        assert to_rows("data", data) == [{"x": 0.1}, {"x": 0.3}]


@pytest.mark.parametrize("kind", ODD)
def test_a_column_that_json_cannot_hold_is_left_out(tmp_path, kind, caplog):
    """A warning names its first such row; if the task needs it, the run is refused."""
    table, told = ODD[kind]
    parquet.write_table(table, tmp_path / "a.parquet")
    source = str(tmp_path / "a.parquet")
    reward = write_text(tmp_path / "f.py", "def f(completions, **columns): ...")
    task = Custom(data=source, reward=f"{reward}:f", held_out_size=1)
    prompts = [(p.text, p.columns) for p in (*task.prompts(), *task.held_out())]
    assert prompts == [("a", {}), ("b", {})]
    (message,) = caplog.messages
    assert re.search(rf"column 'odd' is left out: row [01]: .*({told}).*; convert it to", message)
    for name, value in (("prompt", "{odd}"), ("prompt_column", "odd"), ("answer_column", "odd")):
        with pytest.raises(ValueError, match=rf"no column 'odd', which task.{name} names"):
            Custom(data=source, reward=f"{reward}:f", **{name: value}).prompts()


MEMORY: dict[str, list[Any]] = {
    "NaN": [float("nan"), 1.0], "image": [b"png", object()], "set": [{1}, 2],
    "numpy": [np.array([1, 2]), np.float32(0.5)], "dates": [np.datetime64("2025-03-25", "ns"), 1],
    "half a character": ["\ud800", "x"], "digits": [10**5000, 1], "type": [str, int],
}  # fmt: skip


@pytest.mark.parametrize("kind", MEMORY)
def test_rows_in_memory_may_hold_anything(kind):
    table = [{"prompt": p, "odd": v} for p, v in zip("ab", MEMORY[kind], strict=True)]
    frame = pandas.DataFrame(table, dtype=object)
    for checked in (to_rows("data", table), to_rows("data", frame)):
        values = [row.get("odd") for row in checked]
        if kind == "numpy":
            assert values == [[1, 2], 0.5]
        elif kind == "NaN":  # pandas has no other word for "no value"
            assert values[1] == 1.0 and (values[0] is None or values[0] != values[0])
        else:
            assert checked == [{"prompt": "a"}, {"prompt": "b"}]


def test_images_of_a_data_set_are_not_even_decoded():
    table = {"prompt": ["a"], "image": [{"bytes": b"no image", "path": None}]}
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    images = datasets.Dataset.from_dict(table, features=features)
    assert to_rows("data", images) == [{"prompt": "a"}]


def test_a_data_set_is_read_as_it_shows_itself():
    plain = datasets.Dataset.from_list([{"prompt": text, "level": len(text)} for text in "abc"])

    def chats(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"prompt": [[{"role": "user", "content": text}] for text in batch["prompt"]]}

    for data in (
        plain, plain.map(chats, batched=True), plain.shuffle(seed=1), plain.select([2, 0]),
        plain.with_format("numpy"), plain.with_transform(chats),
    ):  # fmt: skip
        assert to_rows("data", data) == list(data)


def test_equal_names_of_columns_are_refused():
    frame = pandas.DataFrame([["a", 1, 2]], columns=["prompt", "x", "x"])
    for data in (frame, [{"prompt": "a", 1: 2, "1": 3}]):
        with pytest.raises(ValueError, match=r"data=: 2 columns are called '.'; rename"):
            to_rows("data", data)


@pytest.mark.parametrize(
    "source", ["nowhere.jsonl", "./nowhere", "/nowhere/at/all", "~/nowhere.parquet"]
)
def test_a_missing_file_is_told(source):
    with pytest.raises(ValueError, match=f"task.data = {source!r} cannot be read: .*No such file"):
        rows("task.data", source, "train")


def test_a_hub_name_that_cannot_be_reached_is_told():
    told = r"'nobody/nothing' cannot be read: .* give a file .*, a folder of them, or a hub name"
    with pytest.raises(ValueError, match=told):
        rows("task.data", "nobody/nothing", "train")

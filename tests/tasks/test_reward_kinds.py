"""What a reward function may return, and what may be a reward function."""

from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from math import inf
from typing import Any

import numpy as np
import pandas
import pyarrow
import pytest
import torch

from tba.prompt import Answer, Prompt
from tba.scoring.scoring import Scoring
from tba.scoring.verdicts import Rejection, parse_score
from tba.tasks import ItemizedReward
from tba.tasks._calls import WrongLength, listed
from tba.tasks.custom import Custom, reward_function


class OnlyDlpack:
    def __init__(self, array: Any):
        self._array = array

    def __dlpack__(self, **how: Any) -> Any:
        return self._array.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


class OnlyArray:
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array([0.5, 2.0])


def generated() -> Iterator[float]:
    yield 0.5
    yield 2.0


TWO: dict[str, Callable[[], Any]] = {
    "tuple": lambda: (0.5, 2),
    "generator": generated,
    "values of a dict": lambda: {"a": 0.5, "b": 2.0}.values(),
    "numpy": lambda: np.array([0.5, 2.0], np.float16),
    "numpy, a column": lambda: np.array([[0.5], [2.0]]),
    "numpy, objects": lambda: np.array([Decimal("0.5"), Fraction(2)], object),
    "torch": lambda: torch.tensor([0.5, 2.0], requires_grad=True),
    "torch, bf16, a column": lambda: torch.tensor([[0.5], [2.0]], dtype=torch.bfloat16),
    "scalars of torch": lambda: list(torch.tensor([0.5, 2.0], requires_grad=True)),
    "rows of one number": lambda: [[0.5], (2.0,)],
    "arrays of one number": lambda: [np.array([0.5]), torch.tensor([[2.0]])],
    "scalars of numpy": lambda: [np.float32(0.5), np.int64(2)],
    "pandas": lambda: pandas.Series([0.5, 2.0], index=[7, 3]),
    "pandas, a table": lambda: pandas.DataFrame({"reward": [0.5, 2.0]}),
    "pandas, nullable": lambda: pandas.Series([0.5, 2.0], dtype="Float64"),
    "pyarrow": lambda: pyarrow.array([0.5, 2.0]),
    "pyarrow, chunks": lambda: pyarrow.chunked_array([[0.5], [2.0]]),
    "array": OnlyArray,
    "dlpack": lambda: OnlyDlpack(torch.tensor([0.5, 2.0])),
    "scalars of dlpack": lambda: [OnlyDlpack(np.array(0.5)), OnlyDlpack(np.array([2.0]))],
    "scalars of arrays": lambda: [np.array(0.5), memoryview(np.array(2.0))],
    "memoryview": lambda: memoryview(np.array([0.5, 2.0])),
    "exact": lambda: [Decimal("0.5"), Fraction(4, 2)],
}
"""Half and two, in everything that means one number for each of two completions."""


@pytest.mark.parametrize(
    "scores",
    [
        np.array([0.9, 0.1], np.float32),
        torch.tensor([[0.9], [0.1]]),
        list(map(np.float32, (0.9, 0.1))),
        pandas.Series([0.9, 0.1], dtype="float32"),
        np.array([0.9, 0.1], np.float16),
        torch.tensor([0.9, 0.1], dtype=torch.bfloat16),
    ],
)
def test_numbers_of_few_bits_are_their_shortest_decimals(scores):
    assert listed(scores) == [0.9, 0.1]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
def test_a_shortest_decimal_is_the_same_number_of_few_bits(kind):
    powers = torch.logspace(-4, 4, 200, dtype=torch.float64) * torch.tensor([1.0, -1.0]).repeat(100)
    values = torch.cat([powers, 2.0 ** torch.arange(-9, 9), torch.tensor([0, inf, -inf])]).to(kind)
    shortest = listed(values)
    assert torch.equal(torch.tensor(shortest, dtype=torch.float64).to(kind), values)


@pytest.mark.parametrize("kind", TWO)
def test_anything_with_a_number_for_each_completion_is_a_list_of_rewards(kind):
    assert [parse_score(score) for score in listed(TWO[kind]())] == [0.5, 2.0]


def test_an_array_without_an_axis_is_the_reward_of_one_completion():
    task = Custom(data="", reward="", passed=(lambda completions: torch.ones(1, 1).squeeze(),))
    (one, two) = Scoring({"": task})(
        [Prompt("0", "?"), Prompt("1", "?")], [[Answer("a", True)], [Answer("a", True)] * 2]
    )
    assert one == [1.0]
    assert [v.reason for v in two if isinstance(v, Rejection)] == ["wrong_length"] * 2


def test_an_item_that_is_not_finite_is_left_out():
    """Else the mean of its metric would never be finite again."""
    reward = ItemizedReward(1.0, {"a": 0.5, "b": float("nan"), "c": float("inf")}, {})
    assert reward.items == {"a": 0.5}


def test_true_is_one_and_none_stays_none():
    for scores in (np.array([True, False]), [np.bool_(True), False], torch.tensor([True, False])):
        assert [parse_score(score) for score in listed(scores)] == [1.0, 0.0]
    assert listed(np.ma.array([1.0, 2.0], mask=[True, False])) == [None, 2.0]


WRONG: dict[str, Any] = {
    "text": ["0.5", "2"],
    "text of numpy": np.array(["0.5", "2"]),
    "bytes": [b"1", bytearray(b"2")],
    "complex": np.array([1 + 0j, 2j]),
    "complex scalars": [np.complex128(1), torch.tensor(1 + 1j)],
    "two columns": np.ones((2, 2)),
    "rows of two": [[1.0, 2.0], [3.0, 4.0]],
    "empty rows": [[], []],
    "tables": [{"reward": 1.0}, {}],
    "durations": np.array([1, 2], "timedelta64[s]"),
    "too large for a float": [10**400, Fraction(10**400)],
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_not_one_number_is_none(kind):
    verdicts = [parse_score(score) for score in listed(WRONG[kind])]
    assert [v.reason for v in verdicts if isinstance(v, Rejection)] == ["not_a_number"] * 2
    task = Custom(data="", reward="", passed=(lambda completions: WRONG[kind],))
    answers = [Answer("a", True), Answer("b", True)]
    (verdicts,) = Scoring({"": task})([Prompt("0", "?")], [answers])
    assert [v.reason for v in verdicts if isinstance(v, Rejection)] == ["not_a_number"] * 2


@pytest.mark.parametrize(
    "whole", ["12", b"12", bytearray(b"12"), {"a": 1}, {1, 2}, 0.5, None, np.array("12")]
)
def test_what_has_no_order_is_refused_as_a_whole(whole):
    with pytest.raises(WrongLength, match="return a list with one number for each completion"):
        listed(whole)


BROKEN = {
    "import sys; sys.exit(4)": "SystemExit: 4",
    "quit()": "SystemExit: None",
    "def f(:": "SyntaxError: invalid syntax (bad.py, line 2)",
    "import a_package_that_nobody_has": "ModuleNotFoundError: No module named 'a_package_that_nob",
    "from math import nothing": "ImportError: cannot import name 'nothing'",
    "1 / 0": "ZeroDivisionError: division by zero",
    "int('x')": "invalid literal for int()",
    "open('nowhere')": "FileNotFoundError: ",
}


@pytest.mark.parametrize("code", BROKEN)
def test_a_file_that_cannot_be_imported_is_an_error_with_its_line(code, tmp_path, monkeypatch):
    file = tmp_path / "bad.py"
    file.write_text(f"\n{code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in (f"{file}:f", "bad:f"):
        with pytest.raises(ValueError) as error:
            reward_function("task.reward", name)
        told = str(error.value)
        assert told.startswith(f"task.reward = {name!r}: {BROKEN[code]}")
        assert "SyntaxError" in told or told.endswith(f"({file}, line 2)")


def test_a_member_of_a_class_can_be_named(tmp_path):
    code = "class Judge:\n    @staticmethod\n    def score(completions):\n        return [1.0]\n"
    (tmp_path / "judging.py").write_text(code)
    assert reward_function("task.reward", f"{tmp_path}/judging.py:Judge.score")(["a"]) == [1.0]


RAISES = """
def helper(c):
    return 1 / 0

def f(completions):
    return [helper(c) for c in completions]

async def g(completions):
    return f(completions)
"""


@pytest.mark.parametrize("name", ["f", "g"])
def test_a_traceback_begins_in_the_users_file(name, tmp_path):
    (tmp_path / "raising.py").write_text(RAISES)
    task = Custom(data="", reward=f"{tmp_path}/raising.py:{name}")
    ((verdict,),) = Scoring({"": task})([Prompt("0", "?")], [[Answer("a", True)]])
    assert isinstance(verdict, Rejection)
    lines = verdict.detail.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and "raising.py" in lines[1]
    assert "tba/tasks" not in verdict.detail and "tba/search" not in verdict.detail

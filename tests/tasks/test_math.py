"""Boxed answers are graded in time, in the main thread of a process; test_pairs.py has grades."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tba.config.plugins import resolve
from tba.prompt import Answer, Prompt
from tba.scoring.scoring import Scoring, ScoringProcess
from tba.scoring.verdicts import Rejection
from tba.tasks.math import Math, last_boxed

HANGS = r"9^{9^{9^{9}}}"
"""A number that is never computed."""


def prompt(gold: str | None) -> Prompt:
    return Prompt("0", "How many?", {"answer": gold})


def boxed(text: str) -> Answer:
    return Answer(f"So it is $\\boxed{{{text}}}$.", finished=True)


def graded(gold: str | None, *texts: str, **options: Any) -> list[float | None]:
    return Math(**options).score(prompt(gold), [Answer(text, finished=True) for text in texts])


@pytest.mark.slow
def test_what_cannot_be_compared_in_time_has_no_reward():
    """By math-verify's own limit, in the main thread of the scoring process, which goes on."""
    guard = Scoring({"": Math()}, ScoringProcess({"": Math}, max_memory=4.0), 10.0)
    answers = [boxed(text) for text in ("\\frac{14}{2}", HANGS, "8", "10000000!")]
    (verdicts,) = guard([prompt("7")], [answers])
    guard.close()
    told = [v.reason if isinstance(v, Rejection) else v for v in verdicts]
    assert told == [1.0, "none", 0.0, "none"]


def test_outside_of_a_main_thread_it_is_refused():
    """There math-verify would hang, or find everything wrong."""
    with ThreadPoolExecutor(1) as threads:
        scored = threads.submit(graded, "7", "\\boxed{6 + 0}")
        with pytest.raises(RuntimeError, match=r"main thread of a process; set reward\.isolate"):
            scored.result()


def test_the_last_box_counts():
    assert last_boxed(r"\boxed{1}, no, \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{\left\{ 1, \{2\} \right.} and \fbox {3}") == "3"
    assert last_boxed(r"\boxed{ \left\{ x \right. }") == r"\left\{ x \right."
    assert last_boxed("\\boxed{\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}}") is not None
    for text in (r"\boxed{1} and \boxed{2", "no box: {1}", r"\boxed 1", ""):
        assert last_boxed(text) is None
    texts = (r"\boxed{7} or \boxed{8}", r"\boxed{8} or \boxed{7}", "7", r"\boxed{}")
    assert graded("7", *texts) == [0.0, 1.0, 0.0, 0.0]


def test_an_answer_in_the_format_has_its_weight():
    texts = (r"\boxed{7}", r"\boxed{8}", "7")
    answers = [Answer(text, finished) for text in texts for finished in (True, False)]
    scores = Math(format_weight=0.25).score(prompt("7"), answers)
    assert scores == [1.25, 1.0, 0.25, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"task\.format_weight = 1\.0: Input should be less than"):
        resolve("tasks", "task", "math", {"format_weight": 1.0})


def test_a_problem_without_an_answer_has_no_reward():
    assert graded(None, r"\boxed{7}", "8") == [None, None]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_right_answer_is_a_column_or_the_box_of_the_solution(tmp_path):
    rows = [
        {"problem": "1+1?", "answer": 2, "solution": r"\boxed{3}"},
        {"problem": "2+2?", "answer": r"\boxed{4}"},
        {"problem": "3+3?", "solution": r"Add: $\boxed{5}$, no, $\boxed{6}$."},
        {"problem": "4+4?"},
        {"problem": "4-4?", "answer": " "},
        {"problem": "5+5?", "solution": r"Add: $\boxed 9$, no, $\boxed 10$."},
        {"problem": "6+6?", "solution": r"\[ x = \boxed 12. \] So it is twelve, $12$."},
        {"problem": "7+7?", "solution": r"\(\boxed \frac{28}{2}\) as $y>0$"},
    ]
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "test.jsonl", [{"problem": "5+5?", "solution": r"\boxed{10}"}])
    write(tmp_path / "other.jsonl", [{"problem": "6+6?", "answer": "12"}])
    task = Math(data=str(tmp_path))
    right = [p.columns["answer"] for p in task.prompts()]
    assert right == ["2", "4", "6", None, None, "10", "12", r"\frac{28}{2}"]
    asked = "Please reason step by step, and put your final answer within \\boxed{}."
    assert task.prompts()[0].text == f"1+1?\n\n{asked}"
    assert [p.columns["answer"] for p in task.held_out()] == ["10"]
    other = Math(data=str(tmp_path), held_out_data=str(tmp_path / "other.jsonl"))
    assert [p.columns["answer"] for p in other.held_out()] == ["12"]
    one_shot = Math(data=str(tmp_path), shots=1).held_out()[0]
    assert str(one_shot.text).startswith(f"1+1?\n\n{asked} \\boxed{{3}}\n\n5+5?")
    write(tmp_path / "test.jsonl", [{"problem": "5+5?", "final": "10"}])
    with pytest.raises(ValueError, match="has neither a column 'answer' nor 'solution'"):
        task.held_out()


def test_a_list_has_the_parts_of_an_answer(tmp_path):
    golds = [["5"], [r"\frac{1}{2}", "3"], [1, 2]]
    write(tmp_path / "train.jsonl", [{"problem": "?", "answer": gold} for gold in golds])
    own = [p.columns["answer"] for p in Math(data=str(tmp_path)).prompts()]
    assert own == ["5", r"\frac{1}{2}, 3", "1, 2"]


@pytest.mark.parametrize(
    "answer",
    ["none", "N/A", "3 or 7", r"\boxed{3 or 7}", "3.0.0", "1..5", "3 7", "[[1], [2]]", "{'x': 5}"],
)
def test_an_answer_that_is_none_or_several_is_refused(tmp_path, answer):
    """In MATH, such words stand in `\\text`."""
    real = [r"\text{None}", r"-2 \text{ or } -12", r"\text{neither}", "D"]
    write(tmp_path / "train.jsonl", [{"problem": "?", "answer": gold} for gold in real])
    rows = [{"problem": "1?", "answer": "1"}, {"problem": "2?", "answer": answer}]
    write(tmp_path / "test.jsonl", rows)
    task = Math(data=str(tmp_path))
    assert [p.columns["answer"] for p in task.prompts()] == real
    with pytest.raises(ValueError, match=r"row 1 has the answer .*; give one answer, or write"):
        task.held_out()

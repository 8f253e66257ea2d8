"""Boxed answers are graded by math-verify, in time, in the main thread of a process."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tba.config.plugins import resolve
from tba.prompt import Answer, Prompt
from tba.search.scoring import Scoring, ScoringProcess
from tba.search.verdicts import Rejected
from tba.tasks.math import Math, last_boxed

PAIRS: dict[str, list[tuple[str, str, bool]]] = {
    "fractions": [
        (r"\frac{1}{2}", r"\dfrac{1}{2}", True),
        (r"\frac{1}{2}", r"\tfrac12", True),
        (r"\frac{1}{2}", r"1/2", True),
        (r"\frac{1}{2}", r"\frac{2}{4}", True),
        (r"\frac{1}{2}", r"0.5", True),
        (r"\frac{1}{2}", r".5", True),
        (r"\frac{1}{3}", r"0.33", False),
        (r"-\frac{7}{3}", r"\frac{-7}{3}", True),
        (r"-\frac{7}{3}", r"\frac{7}{3}", False),
        (r"\frac{22}{7}", r"\pi", False),
        (r"\frac{\sqrt{3}}{2}", r"\frac{3}{2\sqrt{3}}", True),
        (r"\frac{\sqrt{3}}{2}", r"\frac{\sqrt{2}}{2}", False),
        (r"\frac{3}{56}", r"\frac{3}{65}", False),
    ],
    "numbers": [
        (r"12", r"12.0", True),
        (r"12", r"-12", False),
        (r"1000", r"1,000", True),
        (r"10{,}000", r"10000", True),
        (r"1024", r"2^{10}", True),
        (r"100", r"1000", False),
        (r"1.5", r"\frac32", True),
        (r"3.14", r"\pi", False),
        (r"120", r"5!", True),
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        (r"3\sqrt{2}", r"4.2", False),
        (r"\frac{9}{4}\pi", r"2.25\pi", True),
        (r"3+4i", r"4i+3", True),
        (r"3+4i", r"3-4i", False),
    ],
    "algebra": [
        (r"x^2+2x+1", r"(x+1)^2", True),
        (r"x^2-1", r"(x-1)(x+1)", True),
        (r"x^2-1", r"(x+1)^2", False),
        (r"2-2p", r"2(1-p)", True),
        (r"3x+2", r"3y+2", False),
        (r"y=2x+3", r"y=3+2x", True),
        (r"5", r"x=5", True),
        (r"x=5", r"5", True),
        (r"x=5", r"x=6", False),
        (r"\sin^2(x)", r"1-\cos^2(x)", True),
        (r"\frac{x+2}{7}", r"\frac{x}{7}+\frac{2}{7}", True),
        (r"e^{x}", r"e^{-x}", False),
    ],
    "sets": [
        (r"\{1,2,3\}", r"\{3,2,1\}", True),
        (r"\{1,2,3\}", r"\{1,2\}", False),
        (r"\{1,2,3\}", r"\left\{1, 2, 3\right\}", True),
        (r"-2,1", r"1,-2", True),
        (r"-2,1", r"-2", False),
        (r"1,2,3", r"1,2,4", False),
        (r"\{1\pm\sqrt{5},-2\}", r"\{-2,1+\sqrt{5},1-\sqrt{5}\}", True),
        (r"3\pm2\sqrt{2}", r"3+2\sqrt{2},3-2\sqrt{2}", True),
        (r"3\pm2\sqrt{2}", r"3+2\sqrt{2}", False),
        (r"\{-1\}\cup[0,7)", r"[0,7)\cup\{-1\}", True),
    ],
    "tuples and matrices": [
        (r"(3,4)", r"(4,3)", False),
        (r"(1,\frac{9}{2})", r"(1,4.5)", True),
        (r"\left(3,\frac{\pi}{2}\right)", r"(3,\pi/2)", True),
        (r"(6,31,-1)", r"(6, 31, -1)", True),
        (r"(6,31,-1)", r"(6,31,1)", False),
        (
            r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
            r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}",
            True,
        ),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", False),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", False),
    ],
    "intervals": [
        (r"[0,1)", r"\left[0,1\right)", True),
        (r"[0,1)", r"(0,1)", False),
        (r"[0,1)", r"[0,1]", False),
        (r"[0,9)", r"[0,1)", False),
        (r"(-\infty,2)", r"(-\infty, 2)", True),
        (r"(-\infty,2)", r"(-\infty,2]", False),
        (r"(-\infty,0)\cup(1,\infty)", r"(1,\infty)\cup(-\infty,0)", True),
        (r"(-\infty,0)\cup(1,\infty)", r"(0,1)", False),
        (r"[-1,-\frac{1}{2})\cup(0,1)", r"[-1,-0.5)\cup(0,1)", True),
        (r"x\in[1,5]", r"[1,5]", True),
        (r"1\le x\le 5", r"[1,5]", True),
        (r"x<3", r"3>x", True),
        (r"x<3", r"x>3", False),
        (r"x\ge 5", r"x\geq 5", True),
    ],
    "units": [
        (r"15\text{ cm}", r"15", True),
        (r"15", r"15\text{ cm}", True),
        (r"15\mbox{ cm}^2", r"15\text{ cm}^2", True),
        (r"125\text{ miles}", r"120\text{ miles}", False),
        (r"\$18.90", r"18.90", True),
        (r"18.9", r"\$18.90", True),
        (r"\$5", r"\$6", False),
        (r"3\text{ hours}", r"3\mathrm{ hours}", True),
    ],
    "percent": [
        (r"28\%", r"28", True),
        (r"28", r"28\%", True),
        (r"12.5", r"12.5\%", True),
        (r"28\%", r"82\%", False),
        (r"12.5\%", r"12.5", True),
        (r"12.5\%", r"12\%", False),
        (r"0.28", r"28", False),
    ],
    "degrees": [
        (r"90^\circ", r"90", True),
        (r"90", r"90^\circ", True),
        (r"90^\circ", r"90^{\circ}", True),
        (r"90^\circ", r"45^\circ", False),
        (r"90", r"90\text{ degrees}", True),
    ],
    "text": [
        (r"\text{Evelyn}", r"\text{Evelyn}", True),
        (r"\text{Evelyn}", r"Evelyn", True),
        (r"\text{Evelyn}", r"\text{Carla}", False),
        (r"\text{even}", r"\text{odd}", False),
        (r"\text{Yes}", r"\text{No}", False),
        (r"\text{(C)}", r"C", True),
        (r"C", r"D", False),
        (r"204_5", r"204_5", True),
        (r"204_5", r"203_5", False),
    ],
}
"""The right answer, what is in the box, and whether it is right."""

HANGS = r"9^{9^{9^{9}}}"
"""A number that is never computed."""


def prompt(gold: str | None) -> Prompt:
    return Prompt("0", "How many?", {"answer": gold})


def boxed(text: str) -> Answer:
    return Answer(f"So it is $\\boxed{{{text}}}$.", finished=True)


def graded(gold: str | None, *texts: str, **options: Any) -> list[float | None]:
    return Math(**options).score(prompt(gold), [Answer(text, finished=True) for text in texts])


def misjudged(pairs: list[tuple[str, str, bool]]) -> list[tuple[str, str, bool]]:
    """Return the pairs that get another reward than listed."""
    task = Math()
    scores = [task.score(prompt(gold), [boxed(answer)])[0] for gold, answer, _ in pairs]
    return [pair for pair, score in zip(pairs, scores, strict=True) if score != float(pair[2])]


def test_a_hundred_pairs_are_graded_as_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba.tasks.math.SECONDS", 60)  # on a machine however busy
    pairs = list(itertools.chain(*PAIRS.values()))
    assert len(pairs) == 100
    assert misjudged(pairs) == []


@pytest.mark.slow
def test_what_cannot_be_compared_in_time_has_no_reward() -> None:
    """By math-verify's own limit, in the main thread of the scoring process, which goes on."""
    guard = Scoring({"": Math()}, ScoringProcess({"": Math}, max_memory=4.0), 10.0)
    answers = [boxed(text) for text in ("\\frac{14}{2}", HANGS, "8", "10000000!")]
    (verdicts,) = guard([prompt("7")], [answers])
    guard.close()
    told = [v.reason if isinstance(v, Rejected) else v for v in verdicts]
    assert told == [1.0, "none", 0.0, "none"]


def test_outside_of_a_main_thread_it_is_refused() -> None:
    """There math-verify would hang, or find everything wrong."""
    with ThreadPoolExecutor(1) as threads:
        scored = threads.submit(graded, "7", "\\boxed{6 + 0}")
        with pytest.raises(RuntimeError, match=r"main thread of a process; set reward\.isolate"):
            scored.result()


def test_the_last_box_counts() -> None:
    assert last_boxed(r"\boxed{1}, no, \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{\left\{ 1, \{2\} \right.} and \fbox {3}") == "3"
    assert last_boxed(r"\boxed{ \left\{ x \right. }") == r"\left\{ x \right."
    assert last_boxed("\\boxed{\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}}") is not None
    for text in (r"\boxed{1} and \boxed{2", "no box: {1}", r"\boxed 1", ""):
        assert last_boxed(text) is None
    assert graded("7", r"\boxed{7} or \boxed{8}", r"\boxed{8} or \boxed{7}", "7", r"\boxed{}") == [
        0.0, 1.0, 0.0, 0.0,
    ]  # fmt: skip


def test_an_answer_in_the_format_has_its_weight() -> None:
    answers = [
        Answer(text, finished)
        for text in (r"\boxed{7}", r"\boxed{8}", "7")
        for finished in (True, False)
    ]
    scores = Math(format_weight=0.25).score(prompt("7"), answers)
    assert scores == [1.25, 1.0, 0.25, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"task\.format_weight = 1\.0: Input should be less than"):
        resolve("tasks", "task", "math", {"format_weight": 1.0})


def test_a_problem_without_an_answer_has_no_reward() -> None:
    assert graded(None, r"\boxed{7}", "8") == [None, None]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_right_answer_is_a_column_or_the_box_of_the_solution(tmp_path: Path) -> None:
    write(
        tmp_path / "train.jsonl",
        [
            {"problem": "1+1?", "answer": 2, "solution": r"\boxed{3}"},
            {"problem": "2+2?", "answer": r"\boxed{4}"},
            {"problem": "3+3?", "solution": r"Add: $\boxed{5}$, no, $\boxed{6}$."},
            {"problem": "4+4?"},
            {"problem": "4-4?", "answer": " "},
            {"problem": "5+5?", "solution": r"Add: $\boxed 9$, no, $\boxed 10$."},
            {"problem": "6+6?", "solution": r"\[ x = \boxed 12. \] So it is twelve, $12$."},
            {"problem": "7+7?", "solution": r"\(\boxed \frac{28}{2}\) as $y>0$"},
        ],
    )
    write(tmp_path / "test.jsonl", [{"problem": "5+5?", "solution": r"\boxed{10}"}])
    write(tmp_path / "other.jsonl", [{"problem": "6+6?", "answer": "12"}])
    task = Math(data=str(tmp_path))
    assert [p.columns["answer"] for p in task.prompts()] == [
        "2",
        "4",
        "6",
        None,
        None,
        "10",
        "12",
        r"\frac{28}{2}",
    ]
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


@pytest.mark.parametrize(
    "answer", ["none", "N/A", "3 or 7", r"\boxed{3 or 7}", "3.0.0", "1..5", "3 7"]
)
def test_an_answer_that_is_none_or_several_is_refused(tmp_path: Path, answer: str) -> None:
    """In MATH, such words stand in `\\text`."""
    real = [r"\text{None}", r"-2 \text{ or } -12", r"\text{neither}", "D"]
    write(tmp_path / "train.jsonl", [{"problem": "?", "answer": gold} for gold in real])
    write(
        tmp_path / "test.jsonl",
        [{"problem": "1?", "answer": "1"}, {"problem": "2?", "answer": answer}],
    )
    task = Math(data=str(tmp_path))
    assert [p.columns["answer"] for p in task.prompts()] == real
    with pytest.raises(ValueError, match=r"row 1 has the answer .*; give one answer, or write"):
        task.held_out()

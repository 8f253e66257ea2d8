"""Scoring that raises, hangs or returns nonsense costs the samples it was asked about, and is counted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tba.config.tables import EvalTable, PolicyTable
from tba.engines.scripted import Scripted
from tba.models.pretrained import load_text
from tba.search.evaluate import evaluate
from tba.search.result import SearchStats
from tba.search.rewards import Guard, Rejected, RejectionMonitor, Verdict
from tba.types import Answer, Prompt

ANSWERS = ("one", "two", "three", "four", "five")
DEADLINE = 0.2


@dataclass(frozen=True)
class Scored:
    """A task whose scoring is the given function of all answers' texts."""

    function: Callable[[list[str]], Any]
    pass_reward: float | None = None

    def prompts(self) -> Sequence[Prompt]:
        return [Prompt("0", "count")]

    def held_out(self) -> Sequence[Prompt]:
        return []

    def score(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> Any:
        return self.function([a.text for a in answers])


@pytest.fixture
def hang() -> Iterator[Callable[[], float]]:
    """A call that does not return while the test runs."""
    released = threading.Event()
    yield lambda: released.wait(60) and 0.0
    released.set()


def judge(function: Callable[[list[str]], Any], answers: Sequence[str] = ANSWERS) -> list[Verdict]:
    prompts = [Prompt(str(i), "count") for i in range(len(answers))]
    return Guard(Scored(function), DEADLINE)(prompts, [Answer(a, finished=True) for a in answers])


def reasons(verdicts: Sequence[Verdict]) -> list[str | float]:
    return [v.reason if isinstance(v, Rejected) else v for v in verdicts]


def each(score: Callable[[str], Any]) -> Callable[[list[str]], Any]:
    return lambda texts: [score(t) for t in texts]


def length_except(text: str, otherwise: Callable[[], Any]) -> Callable[[list[str]], Any]:
    return each(lambda t: otherwise() if t == text else len(t))


def test_lengths() -> None:
    assert judge(each(len)) == [3.0, 3.0, 5.0, 4.0, 4.0]


def test_what_raises_for_one_sample_costs_that_sample() -> None:
    verdicts = judge(length_except("three", lambda: 1 / 0))
    assert reasons(verdicts) == [3.0, 3.0, "raised", 4.0, 4.0]
    assert isinstance(verdicts[2], Rejected)
    assert (
        "ZeroDivisionError: division by zero" in verdicts[2].detail
        and "test_rewards.py" in verdicts[2].detail
    )  # the traceback


def test_what_raises_always_costs_all() -> None:
    assert reasons(judge(each(lambda _: 1 / 0))) == ["raised"] * 5
    assert reasons(judge(each(lambda _: exit()))) == ["raised"] * 5  # not the searcher


def test_what_hangs_for_one_sample_costs_that_sample(hang: Callable[[], float]) -> None:
    verdicts = judge(length_except("four", hang))
    assert reasons(verdicts) == [3.0, 3.0, 5.0, "timeout", 4.0]
    assert (
        isinstance(verdicts[3], Rejected)
        and verdicts[3].detail == "scoring did not return within reward.deadline = 0.2 s"
    )


def test_after_two_hangs_the_rest_is_not_tried(hang: Callable[[], float]) -> None:
    calls: list[list[str]] = []
    verdicts = judge(lambda texts: calls.append(texts) or hang())
    assert reasons(verdicts) == ["timeout"] * 5
    assert calls == [list(ANSWERS), ["one"], ["two"]]


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (float("nan"), "not_finite"),
        (float("inf"), "not_finite"),
        (float("-inf"), "not_finite"),
        (None, "none"),
        ("good", "not_a_number"),
        ([0.5, 0.5], "not_a_number"),
        (torch.tensor([0.5, 0.5]), "not_a_number"),
        (10**400, "not_a_number"),
    ],
    ids=str,
)
def test_a_reward_that_is_none_costs_that_sample(score: Any, reason: str) -> None:
    assert reasons(judge(length_except("two", lambda: score))) == [3.0, reason, 5.0, 4.0, 4.0]


def test_numbers_of_any_library_are_rewards() -> None:
    assert judge(lambda texts: torch.tensor([len(t) / 4 for t in texts])) == [
        0.75,
        0.75,
        1.25,
        1.0,
        1.0,
    ]
    assert judge(each(lambda t: len(t) > 3)) == [0.0, 0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("returned", [[], [1.0] * 4, [1.0] * 6])
def test_another_number_of_rewards_costs_all(returned: list[float]) -> None:
    verdicts = judge(lambda _: returned)
    assert reasons(verdicts) == ["wrong_length"] * 5
    assert (
        isinstance(verdicts[0], Rejected)
        and verdicts[0].detail == f"{len(returned)} rewards for 5 answers"
    )


def test_no_answers_have_no_verdicts() -> None:
    assert judge(each(len), answers=[]) == []


def test_a_run_is_stopped_with_the_traceback_when_rejections_are_the_rule() -> None:
    monitor, bad = RejectionMonitor(max_share=0.5), Counter(raised=5, timeout=1)
    for _ in range(7):
        monitor.add(
            SearchStats(8, rejected=bad, last_rejection="Traceback: division by zero")
        )  # 56 samples: too few to judge
    with pytest.raises(
        RuntimeError,
        match=r"48 of the last 64 samples .*\(raised: 40, timeout: 8\).*reward\.max_rejected = 0\.5(.|\n)*division by zero",
    ):
        monitor.add(
            SearchStats(8, rejected=bad)
        )  # what the last rejected sample said is remembered


def test_rare_rejections_do_not_stop_the_run() -> None:
    monitor = RejectionMonitor(max_share=0.5)
    for report in range(1000):  # half of any 64
        monitor.add(SearchStats(8, rejected=Counter(none=8 if report % 2 else 0)))


def test_only_the_last_samples_count() -> None:
    """A scoring that worked for long and then breaks is noticed within 64 samples."""
    monitor = RejectionMonitor(max_share=0.5)
    for _ in range(500):
        monitor.add(SearchStats(16))
    for _ in range(2):  # 32 of 64: no more than half
        monitor.add(SearchStats(16, rejected=Counter(raised=16)))
    with pytest.raises(RuntimeError, match="48 of the last 64 samples"):
        monitor.add(SearchStats(16, rejected=Counter(raised=16)))


def test_what_cannot_be_scored_is_not_right_however_low_the_bar(tiny_model: Path) -> None:
    """Of the scripted answers -1, 0 and "?", at a bar of -1, those two that have a number are right."""
    policy = PolicyTable(model=str(tiny_model))
    text = load_text(policy)
    engine = Scripted(policy, text, "cpu", False, answers=("?", "-1", "0"))
    guard = Guard(Scored(each(float), pass_reward=-1.0), DEADLINE)
    scores = evaluate(
        engine,
        text,
        guard,
        [Prompt(str(i), "1+1=") for i in range(40)],
        EvalTable(samples=4, k=(4,)),
        4,
        None,
    ).scores
    assert scores["greedy_pass@1"] == 0.0 and scores["greedy_rejected"] == 1.0
    assert (
        scores["sampled_pass@1"]
        == pytest.approx(1 - scores["sampled_rejected"])
        == pytest.approx(2 / 3, abs=0.15)
    )
    assert scores["pass@4"] > scores["sampled_pass@1"]

"""Scoring that raises, hangs or returns nonsense costs the samples it was asked about."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from build import Asynchronous, Score, Scored, config, judge_all, without_clock
from build import rewards_judge as judge
from build import rewards_reasons as reasons

import tba
from tba.prompt import Prompt
from tba.runs.folder import METRICS, read
from tba.runtime import RejectionMonitor
from tba.scoring.scoring import Scoring
from tba.scoring.verdicts import Rejection
from tba.search.evaluate import evaluate_held_out
from tba.search.result import SearchStats
from tba.setup.setup import check


def each(score: Callable[[str], Any]) -> Score:
    return lambda texts: [score(t) for t in texts]


def length_except(text: str, otherwise: Callable[[], Any]) -> Score:
    return each(lambda t: otherwise() if t == text else len(t))


@pytest.fixture(params=[Scored, Asynchronous], ids=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> type[Scored]:
    return request.param


def test_a_task_scores_whole_groups(kind):
    """One call has the answers to one prompt, so that a reward may compare them."""
    calls: list[list[str]] = []

    def rank(texts: list[str]) -> list[int]:
        calls.append(texts)
        return [sorted(texts).index(t) for t in texts]

    groups = [["b", "a"], ["c"], [], ["z", "y", "x"]]
    assert judge_all(kind(rank), groups) == [[1.0, 0.0], [0.0], [], [2.0, 1.0, 0.0]]
    assert sorted(calls) == sorted(g for g in groups if g)


def test_what_raises_for_one_sample_costs_that_sample(kind):
    verdicts = judge(length_except("three", lambda: 1 / 0), kind=kind)
    assert reasons(verdicts) == [3.0, 3.0, "raised", 4.0, 4.0]
    assert isinstance(verdicts[2], Rejection)
    assert "ZeroDivisionError: division by zero" in verdicts[2].detail
    assert "test_rewards.py" in verdicts[2].detail  # the traceback


def test_a_group_that_cannot_be_compared_keeps_its_error(kind):
    """A function that compares answers raises for one that is too long, and has none for one."""

    def compare(texts: list[str]) -> list[float | None]:
        if len(texts) < 2:
            return [None]
        raise ValueError("one is too long")

    verdicts = judge(compare, kind=kind)
    assert reasons(verdicts) == ["raised"] * 5
    assert all("one is too long" in v.detail for v in verdicts if isinstance(v, Rejection))


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
def test_a_reward_that_is_none_costs_that_sample(score, reason, kind):
    verdicts = judge(length_except("two", lambda: score), kind=kind)
    assert reasons(verdicts) == [3.0, reason, 5.0, 4.0, 4.0]


@pytest.mark.parametrize("returned", [[], [1.0] * 4, [1.0] * 6])
def test_another_number_of_rewards_costs_all(returned, kind):
    verdicts = judge(lambda _: returned, kind=kind)
    assert verdicts == [Rejection("wrong_length", f"{len(returned)} rewards for 5 answers")] * 5


def searched(samples: int, rejected: Counter[str] | None = None, told: str = "") -> SearchStats:
    """Return the statistics of a search."""
    counts = Counter(samples_generated=samples)
    return SearchStats(counts, rejected or Counter(), last_rejection=told)


def test_a_run_is_stopped_with_the_traceback_when_rejections_are_the_rule():
    monitor, bad = RejectionMonitor(max_share=0.5), Counter(raised=5, timeout=1)
    for _ in range(7):
        # 56 samples: too few to judge
        monitor.add(searched(8, bad, "Traceback: division by zero"))
    told = r"48 of the last 64 samples .*\(raised: 40, timeout: 8\).*max_rejected = 0\.5"
    with pytest.raises(RuntimeError, match=rf"{told}(.|\n)*division by zero"):
        monitor.add(searched(8, bad))  # the message of an earlier search is kept


def test_rare_rejections_do_not_stop_the_run():
    monitor = RejectionMonitor(max_share=0.5)
    for report in range(1000):  # half of any 64
        monitor.add(searched(8, Counter(none=8 if report % 2 else 0)))


def test_answers_that_are_cut_off_are_no_faults_of_the_reward():
    """Of 60 of every 64 samples that are cut off, and 4 that raise, the 4 count."""
    monitor = RejectionMonitor(max_share=0.5)
    for _ in range(15):
        monitor.add(searched(64, Counter(truncated=60, raised=4)))
    with pytest.raises(RuntimeError, match=r"64 of the last 64 samples .*\(raised: 64\)"):
        monitor.add(searched(64, Counter(truncated=60, raised=4)))


def test_only_the_last_samples_count():
    """A scoring that worked for long and then breaks is noticed within 64 samples."""
    monitor = RejectionMonitor(max_share=0.5)
    for _ in range(500):
        monitor.add(searched(16))
    for _ in range(2):  # 32 of 64: no more than half
        monitor.add(searched(16, Counter(raised=16)))
    with pytest.raises(RuntimeError, match="48 of the last 64 samples"):
        monitor.add(searched(16, Counter(raised=16)))


def test_what_cannot_be_scored_is_not_right_however_low_the_bar(tiny_model, tmp_path):
    """Of the answers 1, 0 and "?", at a bar of -1, the two that have a number are correct."""
    settings = ("engine=scripted", "engine.answers=['?', '1', '0']", "eval.k=[4]")
    parts = check(config(tiny_model, tmp_path, *settings, "eval.samples=4"))
    searcher = parts.search_setup().build("cpu", False)
    guard = Scoring({"": Scored(each(float), pass_reward=-1.0)})
    prompts = [Prompt(str(i), "1+1=") for i in range(40)]
    setup = replace(searcher.setup, held_out=tuple(prompts))
    scores = evaluate_held_out(replace(searcher, scoring=guard, setup=setup)).scores
    assert scores["greedy_pass@1"] == 0.0 and scores["greedy_rejected"] == 1.0
    assert scores["sampled_pass@1"] == pytest.approx(1 - scores["sampled_rejected"])
    assert scores["sampled_pass@1"] == pytest.approx(2 / 3, abs=0.15)
    assert scores["pass@4"] > scores["sampled_pass@1"]


def test_a_run_with_an_async_task_equals_that_with_a_sync_one(tiny_model, tmp_path):
    rows = []
    for task in ("Ones", "AsyncOnes"):
        tba.train(config(tiny_model, tmp_path / task, f"task=toy.{task}"))
        rows.append(without_clock(read(tmp_path / task / METRICS)))
    assert rows[0] == rows[1]
    assert {row.get("eval/greedy_rejected", 0.0) for row in rows[1]} == {0.0}

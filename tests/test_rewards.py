"""Scoring that raises, hangs or returns nonsense costs the samples it was asked about."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loop import config, without_clock

import tba
from tba.prompt import Answer, Prompt
from tba.runs.log import METRICS, read
from tba.runs.setup import check
from tba.search.evaluate import evaluate_held_out
from tba.search.rejections import RejectionMonitor
from tba.search.result import Rejected, SearchStats, Verdict
from tba.search.rewards import Guard
from tba.tasks import NEAR_DUPLICATE, Task

ANSWERS = ("one", "two", "three", "four", "five")
DEADLINE = 0.2
"""Seconds for each answer."""

Score = Callable[[list[str]], Any]
"""Rewards of a group, from its texts."""


@dataclass(frozen=True)
class Scored(Task):
    """A task whose scoring is the given function of a group's texts."""

    function: Score
    pass_reward: float | None = None

    def prompts(self) -> Sequence[Prompt]:
        return [Prompt("0", "count")]

    def held_out(self) -> Sequence[Prompt]:
        return []

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> Any:
        return self.function([a.text for a in answers])


class Asynchronous(Scored):
    """The same with `async def`; the function may return an awaitable."""

    async def score(self, prompt: Prompt, answers: Sequence[Answer]) -> Any:
        await asyncio.sleep(0)
        scores = self.function([a.text for a in answers])
        return await scores if isinstance(scores, Awaitable) else scores


@pytest.fixture
def hang() -> Iterator[Callable[[], float]]:
    """A call that does not return while the test runs."""
    released = threading.Event()
    yield lambda: released.wait(60) and 0.0
    released.set()


@pytest.fixture(params=[Scored, Asynchronous], ids=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> type[Scored]:
    return request.param


def judge_all(
    task: Scored, groups: Sequence[Sequence[str]], deadline: float = DEADLINE, concurrency: int = 8
) -> list[list[Verdict]]:
    prompts = [Prompt(str(i), "count") for i in range(len(groups))]
    answers = [[Answer(a, finished=True) for a in group] for group in groups]
    return Guard({"": task}, deadline, concurrency)(prompts, answers)


def judge(
    function: Score, answers: Sequence[str] = ANSWERS, kind: type[Scored] = Scored
) -> list[Verdict]:
    (verdicts,) = judge_all(kind(function), [answers])
    return verdicts


def reasons(verdicts: Sequence[Verdict]) -> list[str | float]:
    return [v.reason if isinstance(v, Rejected) else v for v in verdicts]


def each(score: Callable[[str], Any]) -> Score:
    return lambda texts: [score(t) for t in texts]


def length_except(text: str, otherwise: Callable[[], Any]) -> Score:
    return each(lambda t: otherwise() if t == text else len(t))


def hangs_for(text: str, kind: type[Scored], hang: Callable[[], float]) -> Score:
    """The lengths, but a call with this text does not return."""
    if kind is Scored:
        return length_except(text, hang)

    async def score(texts: list[str]) -> list[int]:
        if text in texts:
            await asyncio.sleep(60)
        return [len(t) for t in texts]

    return score


def test_lengths(kind: type[Scored]) -> None:
    assert judge(each(len), kind=kind) == [3.0, 3.0, 5.0, 4.0, 4.0]


def test_a_task_scores_whole_groups(kind: type[Scored]) -> None:
    """One call has the answers to one prompt, so that a reward may compare them."""
    calls: list[list[str]] = []

    def rank(texts: list[str]) -> list[int]:
        calls.append(texts)
        return [sorted(texts).index(t) for t in texts]

    groups = [["b", "a"], ["c"], [], ["z", "y", "x"]]
    assert judge_all(kind(rank), groups) == [[1.0, 0.0], [0.0], [], [2.0, 1.0, 0.0]]
    assert sorted(calls) == sorted(g for g in groups if g)


class Overlaps:
    """Counts the calls that run at the same time."""

    def __init__(self) -> None:
        self.most = 0
        self._inside = 0
        self._lock = threading.Lock()

    def __call__(self, texts: list[str]) -> list[float]:
        with self._lock:
            self._inside += 1
            self.most = max(self.most, self._inside)
        time.sleep(0.01)
        with self._lock:
            self._inside -= 1
        return [0.0] * len(texts)


def at_once(guard: Guard, searches: Sequence[Sequence[str]]) -> list[list[str | float]]:
    """Score one group for each search, all searches in threads of their own."""

    def search(texts: Sequence[str]) -> list[str | float]:
        (verdicts,) = guard([Prompt("0", "count")], [[Answer(t, True) for t in texts]])
        return reasons(verdicts)

    with ThreadPoolExecutor(len(searches)) as threads:
        return list(threads.map(search, searches))


def test_a_sync_function_has_one_group_at_a_time() -> None:
    overlaps = Overlaps()
    judge_all(Scored(overlaps), [ANSWERS] * 5)
    assert overlaps.most == 1


def test_a_sync_function_is_never_called_by_two_searches_at_once() -> None:
    overlaps = Overlaps()
    at_once(Guard({"": Scored(overlaps)}, DEADLINE), [ANSWERS] * 5)
    assert overlaps.most == 1


def test_the_time_that_a_search_waits_for_another_does_not_count() -> None:
    """Five calls of 0.2 s in a row, each with a deadline of 0.6 s."""

    def score(texts: list[str]) -> list[float]:
        time.sleep(0.2)
        return [1.0]

    assert at_once(Guard({"": Scored(score)}, 0.6), [["one"]] * 5) == [[1.0]] * 5


def test_a_call_that_hangs_delays_other_searches_by_its_deadline(hang: Callable[[], float]) -> None:
    guard = Guard({"": Scored(length_except("?", hang))}, DEADLINE)
    results = at_once(guard, [["?"], ["one"], ["?"], ["three"]])
    assert results == [["timeout"], [3.0], ["timeout"], [5.0]]


def test_all_searches_have_one_event_loop() -> None:
    """An async client, or this semaphore, may be kept from call to call."""
    one_at_a_time = asyncio.Semaphore(1)

    async def score(texts: list[str]) -> list[int]:
        async with one_at_a_time:
            await asyncio.sleep(0.01)
        return [len(t) for t in texts]

    guard = Guard({"": Asynchronous(score)}, 10.0)
    for _ in range(2):
        assert at_once(guard, [["one"], ["three"]]) == [[3.0], [5.0]]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_an_async_function_has_several_groups_at_once(concurrency: int) -> None:
    inside, most = 0, 0

    async def score(texts: list[str]) -> list[float]:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.01)
        inside -= 1
        return [0.0] * len(texts)

    judge_all(Asynchronous(score), [ANSWERS] * 7, concurrency=concurrency)
    assert most == concurrency


def test_a_call_has_the_deadline_for_each_of_its_answers(kind: type[Scored]) -> None:
    """Slower than the deadline of one answer, faster than that of five; then the reverse."""

    def score(texts: list[str]) -> Any:
        seconds = 2 * DEADLINE
        if kind is Scored:
            time.sleep(seconds)
            return [1.0] * len(texts)
        return asyncio.sleep(seconds, [1.0] * len(texts))

    assert reasons(judge(score, kind=kind)) == [1.0] * 5
    assert reasons(judge(score, ["one"], kind=kind)) == ["timeout"]


def test_a_call_has_a_longest_time_however_many_answers_it_has(
    kind: type[Scored], hang: Callable[[], float]
) -> None:
    """Of 128 answers with 10 s each, all but 0.3 s."""
    guard = Guard({"": kind(hangs_for("?", kind, hang))}, 10.0, longest=0.3)
    began = time.monotonic()
    (verdicts,) = guard([Prompt("0", "count")], [[Answer("?", True)] * 128])
    assert time.monotonic() - began < 5
    assert isinstance(verdicts[0], Rejected)
    assert verdicts[0].detail == (
        "scoring of 128 answers did not return within 0.3 s (reward.deadline = 10 s for each,"
        " at most a quarter of runtime.task_deadline)"
    )


def test_what_raises_for_one_sample_costs_that_sample(kind: type[Scored]) -> None:
    verdicts = judge(length_except("three", lambda: 1 / 0), kind=kind)
    assert reasons(verdicts) == [3.0, 3.0, "raised", 4.0, 4.0]
    assert isinstance(verdicts[2], Rejected)
    assert "ZeroDivisionError: division by zero" in verdicts[2].detail
    assert "test_rewards.py" in verdicts[2].detail  # the traceback


def test_what_raises_always_costs_all(kind: type[Scored]) -> None:
    assert reasons(judge(each(lambda _: 1 / 0), kind=kind)) == ["raised"] * 5
    assert reasons(judge(each(lambda _: exit()), kind=kind)) == ["raised"] * 5  # not the searcher


def test_a_group_that_cannot_be_compared_keeps_its_error(kind: type[Scored]) -> None:
    """A function that compares answers raises for one that is too long, and has none for one."""

    def compare(texts: list[str]) -> list[float | None]:
        if len(texts) < 2:
            return [None]
        raise ValueError("one is too long")

    verdicts = judge(compare, kind=kind)
    assert reasons(verdicts) == ["raised"] * 5
    assert all("one is too long" in v.detail for v in verdicts if isinstance(v, Rejected))


def test_a_call_that_times_out_costs_its_group_and_is_not_repeated(
    kind: type[Scored], hang: Callable[[], float]
) -> None:
    calls: list[list[str]] = []
    score = hangs_for("four", kind, hang)

    def counted(texts: list[str]) -> Any:
        calls.append(texts)
        return score(texts)

    groups = [["one", "two"], ["three", "four", "five"], ["six"]]
    verdicts = judge_all(kind(counted), groups)
    assert [reasons(v) for v in verdicts] == [[3.0, 3.0], ["timeout"] * 3, [3.0]]
    assert sorted(calls) == sorted(groups)
    assert isinstance(verdicts[1][0], Rejected)
    assert verdicts[1][0].detail == (
        "scoring of 3 answers did not return within 0.6 s (reward.deadline = 0.2 s for each)"
    )


def test_an_answer_that_hangs_after_the_group_has_raised_costs_itself(
    hang: Callable[[], float],
) -> None:
    def score(texts: list[str]) -> list[float]:
        if len(texts) > 1:
            raise RuntimeError("one at a time")
        return [hang() if texts == ["two"] else 1.0]

    assert reasons(judge(score)) == [1.0, "timeout", 1.0, 1.0, 1.0]


def test_after_two_timeouts_in_a_row_the_rest_is_not_tried(
    kind: type[Scored], hang: Callable[[], float]
) -> None:
    calls: list[list[str]] = []

    def score(texts: list[str]) -> Any:
        calls.append(texts)
        return hang() if kind is Scored else asyncio.sleep(60)

    groups = [[str(i)] for i in range(7)]
    verdicts = judge_all(kind(score), groups, concurrency=2)
    assert [reasons(v) for v in verdicts] == [["timeout"]] * 7
    assert len(calls) == 2 if kind is Scored else len(calls) <= 3  # one began in between
    assert isinstance(verdicts[6][0], Rejected) and verdicts[6][0].detail.startswith("not tried")


def test_timeouts_among_calls_that_work_do_not_end_the_scoring(
    kind: type[Scored], hang: Callable[[], float]
) -> None:
    score = hangs_for("?", kind, hang)
    groups = [["?"], ["one"], ["?"], ["two"], ["?"], ["three"], ["four"]]
    verdicts = judge_all(kind(score), groups, concurrency=2)
    expected = ["timeout", 3.0, "timeout", 3.0, "timeout", 5.0, 4.0]
    assert [reasons(v)[0] for v in verdicts] == expected


def test_an_async_function_that_blocks_the_event_loop_does_not_hang_the_search(
    hang: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later searches score on another event loop."""
    monkeypatch.setattr("tba.search.rewards.GRACE", 0.1)
    guard = Guard({"": Asynchronous(length_except("?", hang))}, DEADLINE)
    answers = [[Answer("?", True)], [Answer("one", True)]]
    verdicts = guard([Prompt("0", "count"), Prompt("1", "count")], answers)
    rejected = verdicts[0][0]
    assert isinstance(rejected, Rejected) and rejected.reason == "timeout"
    assert "blocked the event loop" in rejected.detail
    assert at_once(guard, [["one"], ["three"]]) == [[3.0], [5.0]]


def test_the_event_loop_ends_with_its_searcher() -> None:
    before = set(threading.enumerate())
    guard = Guard({"": Asynchronous(each(len))}, DEADLINE)
    assert at_once(guard, [["one"]]) == [[3.0]]
    (thread,) = [t for t in set(threading.enumerate()) - before if t.name == "scoring"]
    del guard
    thread.join(10)
    assert not thread.is_alive()


def test_an_async_function_that_ignores_its_cancellation_does_not_hang_the_search() -> None:
    released = threading.Event()

    async def score(texts: list[str]) -> list[float]:
        while not released.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return [1.0] * len(texts)

    assert reasons(judge(score, ["one"], kind=Asynchronous)) == ["timeout"]
    released.set()


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
def test_a_reward_that_is_none_costs_that_sample(
    score: Any, reason: str, kind: type[Scored]
) -> None:
    verdicts = judge(length_except("two", lambda: score), kind=kind)
    assert reasons(verdicts) == [3.0, reason, 5.0, 4.0, 4.0]


def test_numbers_of_any_library_are_rewards() -> None:
    quarters = judge(lambda texts: torch.tensor([len(t) / 4 for t in texts]))
    assert quarters == [0.75, 0.75, 1.25, 1.0, 1.0]
    assert judge(each(lambda t: len(t) > 3)) == [0.0, 0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("returned", [[], [1.0] * 4, [1.0] * 6])
def test_another_number_of_rewards_costs_all(returned: list[float], kind: type[Scored]) -> None:
    verdicts = judge(lambda _: returned, kind=kind)
    assert verdicts == [Rejected("wrong_length", f"{len(returned)} rewards for 5 answers")] * 5


def test_a_run_is_stopped_with_the_traceback_when_rejections_are_the_rule() -> None:
    monitor, bad = RejectionMonitor(max_share=0.5), Counter(raised=5, timeout=1)
    for _ in range(7):
        # 56 samples: too few to judge
        monitor.add(SearchStats(8, rejected=bad, last_rejection="Traceback: division by zero"))
    counts = r"48 of the last 64 samples .*\(raised: 40, timeout: 8\)"
    with pytest.raises(
        RuntimeError, match=counts + r".*max_rejected = 0\.5(.|\n)*division by zero"
    ):
        monitor.add(SearchStats(8, rejected=bad))  # the message of an earlier search is kept


def test_rare_rejections_do_not_stop_the_run() -> None:
    monitor = RejectionMonitor(max_share=0.5)
    for report in range(1000):  # half of any 64
        monitor.add(SearchStats(8, rejected=Counter(none=8 if report % 2 else 0)))


def test_answers_that_are_left_out_on_purpose_are_no_faults() -> None:
    """Of 60 of every 64 samples that are near-duplicates, and 4 that raise, the 4 count."""
    verdicts = judge(lambda texts: [NEAR_DUPLICATE, None], ["a", "b"])
    assert reasons(verdicts) == ["near_duplicate", "none"]
    monitor = RejectionMonitor(max_share=0.5)
    for _ in range(100):
        monitor.add(SearchStats(64, rejected=Counter(near_duplicate=64)))
    for _ in range(15):
        monitor.add(SearchStats(64, rejected=Counter(near_duplicate=60, raised=4)))
    with pytest.raises(RuntimeError, match=r"64 of the last 64 samples .*\(raised: 64\)"):
        monitor.add(SearchStats(64, rejected=Counter(near_duplicate=60, raised=4)))


def test_only_the_last_samples_count() -> None:
    """A scoring that worked for long and then breaks is noticed within 64 samples."""
    monitor = RejectionMonitor(max_share=0.5)
    for _ in range(500):
        monitor.add(SearchStats(16))
    for _ in range(2):  # 32 of 64: no more than half
        monitor.add(SearchStats(16, rejected=Counter(raised=16)))
    with pytest.raises(RuntimeError, match="48 of the last 64 samples"):
        monitor.add(SearchStats(16, rejected=Counter(raised=16)))


def test_what_cannot_be_scored_is_not_right_however_low_the_bar(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Of the answers -1, 0 and "?", at a bar of -1, the two that have a number are correct."""
    settings = (
        "engine=scripted",
        "engine.answers=['?', '-1', '0']",
        "eval.samples=4",
        "eval.k=[4]",
    )
    searcher = check(config(tiny_model, tmp_path, *settings)).search_setup().build("cpu", False)
    guard = Guard({"": Scored(each(float), pass_reward=-1.0)}, DEADLINE)
    prompts = [Prompt(str(i), "1+1=") for i in range(40)]
    setup = replace(searcher.setup, held_out=tuple(prompts))
    scores = evaluate_held_out(replace(searcher, guard=guard, setup=setup)).scores
    assert scores["greedy_pass@1"] == 0.0 and scores["greedy_rejected"] == 1.0
    assert scores["sampled_pass@1"] == pytest.approx(1 - scores["sampled_rejected"])
    assert scores["sampled_pass@1"] == pytest.approx(2 / 3, abs=0.15)
    assert scores["pass@4"] > scores["sampled_pass@1"]


def test_a_run_with_an_async_task_equals_that_with_a_sync_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    rows = []
    for task in ("Ones", "AsyncOnes"):
        tba.train(config(tiny_model, tmp_path / task, f"task=toy.{task}"))
        rows.append(without_clock(read(tmp_path / task / METRICS)))
    assert rows[0] == rows[1]
    assert {row.get("eval/greedy_rejected", 0.0) for row in rows[1]} == {0.0}

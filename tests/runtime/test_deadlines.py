"""A call's deadline begins when the searcher could begin the call."""

from __future__ import annotations

import time
from typing import Any

from tba.prompt import Prompt
from tba.runtime.deadline import Calls
from tba.runtime.placement import Place
from tba.runtime.pool import PUBLICATIONS, Handle, Kind, Task
from tba.weights import Sent


def handle(*tasks: Task) -> Handle:
    return Handle(Place("cpu"), None, 0, list(tasks), Calls(1.0))


def task(kind: Kind, name: Any, reference: Sent | None = None) -> Task:
    return Task(kind, name, (Prompt("id", "?"),), reference=reference)


def begun(one: Handle, concurrent: int) -> list[Any]:
    one.begin(concurrent)
    return [t.ref for t in one.tasks if t.began is not None]


def test_as_many_searches_begin_as_run_at_once() -> None:
    searches = [task("search", i) for i in range(3)]
    assert begun(handle(*searches), concurrent=1) == [0]
    assert begun(handle(*searches), concurrent=2) == [0, 1]


def test_a_deadline_begins_once_and_results_may_come_in_any_order() -> None:
    first, second, third = (task("search", i) for i in range(3))
    one = handle(first, second, third)
    one.begin(2)
    before = first.began
    one.tasks.remove(second)
    assert begun(one, concurrent=2) == [0, 2]
    assert first.began == before


def test_tasks_of_another_kind_may_wait_for_those_before() -> None:
    start, evaluation = task("start", "start"), task("evaluate", "evaluate")
    search, later = task("search", "search"), task("search", "later")
    one = handle(start, search, evaluation, later)
    assert begun(one, concurrent=2) == ["start"]
    one.tasks.remove(start)
    assert begun(one, concurrent=2) == ["search"]
    one.tasks.remove(search)
    assert begun(one, concurrent=2) == ["evaluate"]
    one.tasks.remove(evaluation)
    assert begun(one, concurrent=2) == ["later"]


def test_a_search_with_a_newer_reference_waits_for_those_before() -> None:
    old, new = task("search", "old"), task("search", "new", reference=Sent(5, None))
    one = handle(old, new)
    assert begun(one, concurrent=2) == ["old"]
    one.tasks.remove(old)
    assert begun(one, concurrent=2) == ["new"]


def test_weights_are_sent_one_at_a_time_and_after_a_start() -> None:
    publication = task("publish", "publish")
    one = handle(task("search", 0), publication)
    assert begun(one, concurrent=1) == [0, "publish"]
    assert not one.accepts_weights(1)
    one.tasks.remove(publication)
    assert one.accepts_weights(1)
    assert not handle(task("start", 0)).accepts_weights(1)
    assert handle(task("search", 0), task("evaluate", 1)).accepts_weights(1)


def test_many_searchers_get_no_more_publications_a_second_than_few() -> None:
    one = handle(task("search", 0))
    one.sent = time.monotonic()
    many = 3600 * PUBLICATIONS  # an hour's worth
    assert not one.accepts_weights(many)
    one.sent -= 3601
    assert one.accepts_weights(many)

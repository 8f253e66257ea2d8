"""A call's deadline begins when the searcher could begin the call."""

import time
from typing import Any

from tba.prompt import Prompt
from tba.runtime.deadline import Calls
from tba.runtime.placement import Place
from tba.runtime.pool import PUBLICATIONS, Kind, SearcherHandle, SearcherTask
from tba.weights import Publication


def handle(*tasks: SearcherTask) -> SearcherHandle:
    return SearcherHandle(Place("cpu"), None, 0, list(tasks), Calls(1.0))


def task(kind: Kind, name: Any, reference: Publication | None = None) -> SearcherTask:
    return SearcherTask(kind, name, (Prompt("id", "?"),), reference=reference)


def in_turn(*tasks: SearcherTask, concurrent: int = 2) -> list[list[Any]]:
    """Return the tasks that have begun before the first one ends, the next one, and so on."""
    one = handle(*tasks)
    begun = []
    while one.tasks:
        one.begin(concurrent)
        begun.append([t.ref for t in one.tasks if t.began is not None])
        one.tasks.pop(0)
    return begun


def test_as_many_searches_begin_as_run_at_once():
    assert in_turn(*(task("search", i) for i in range(3)), concurrent=1) == [[0], [1], [2]]
    assert in_turn(*(task("search", i) for i in range(3))) == [[0, 1], [1, 2], [2]]


def test_a_deadline_begins_once_and_results_may_come_in_any_order():
    first, second, third = (task("search", i) for i in range(3))
    one = handle(first, second, third)
    one.begin(2)
    before = first.began
    one.tasks.remove(second)
    one.begin(2)
    assert third.began is not None and first.began == before


def test_other_kinds_and_searches_with_a_newer_reference_wait_for_those_before():
    kinds: tuple[Kind, ...] = ("start", "search", "evaluate", "search")
    tasks = [task(kind, number) for number, kind in enumerate(kinds)]
    assert in_turn(*tasks) == [[0], [1], [2], [3]]
    tasks = [task("search", "old"), task("search", "new", reference=Publication(5, None))]
    assert in_turn(*tasks) == [["old"], ["new"]]


def test_weights_are_sent_one_at_a_time_and_after_a_start():
    publication = task("publish", "publish")
    one = handle(task("search", 0), task("search", 1), publication)
    one.begin(1)
    assert [t.ref for t in one.tasks if t.began is not None] == [0, "publish"]
    assert not one.accepts_weights(1)
    one.tasks.remove(publication)
    assert one.accepts_weights(1)
    assert not handle(task("start", 0)).accepts_weights(1)


def test_many_searchers_get_no_more_publications_a_second_than_few():
    one = handle(task("search", 0))
    one.sent = time.monotonic()
    many = 3600 * PUBLICATIONS  # an hour's worth
    assert not one.accepts_weights(many)
    one.sent -= 3601
    assert one.accepts_weights(many)

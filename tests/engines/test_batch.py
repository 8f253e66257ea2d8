"""Continuous batching: calls of several threads share a batch, and updates wait for it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import suite
from build import Steps, requests

from tba.engines._batch import RunningBatch
from tba.errors import EngineError

until = partial(suite.until, seconds=30, every=0.001)


def test_calls_of_several_threads_share_the_slots():
    engine = Steps()
    batch = RunningBatch(lambda: engine, slots=4, in_flight=False, deadline=30.0)
    with ThreadPoolExecutor(3) as threads:
        counts = [2, 9, 5]
        calls = [threads.submit(batch.run, requests(*range(1, n + 1))) for n in counts]
        assert [len(call.result(30)) for call in calls] == counts
    assert engine.most == 4


@pytest.mark.parametrize("in_flight", [False, True])
def test_an_update_waits_for_what_runs_unless_it_is_in_flight(in_flight):
    engine = Steps()
    batch = RunningBatch(lambda: engine, slots=2, in_flight=in_flight, deadline=30.0)
    engine.allowed.clear()
    running: list[int] = []
    with ThreadPoolExecutor(2) as threads:
        call = threads.submit(batch.run, requests(3, 5, 1))
        until(lambda: len(engine.left) == 2)  # the third waits for a slot
        update = threads.submit(batch.update, lambda: running.append(len(engine.left)), 7)
        until(lambda: batch._updates)
        engine.allowed.set()
        waited, outputs = update.result(30)
        versions = [version for _, version in call.result(30)]
    assert running == [2 if in_flight else 0]
    assert versions == [0, 0, 7]
    assert waited > 0 and outputs == [] and batch.version == 7


@pytest.mark.parametrize("in_flight", [False, True])
def test_nothing_begins_while_an_update_is_verified(in_flight):
    """The first check is also answered before the change; responses that run go on."""
    engine = Steps()
    batch = RunningBatch(lambda: engine, slots=1, in_flight=in_flight, deadline=30.0)
    seen: list[set[str]] = []
    engine.allowed.clear()
    with ThreadPoolExecutor(2) as threads:
        search = threads.submit(batch.run, requests(4, 1))
        until(lambda: engine.left)

        def apply() -> None:
            seen.append(set(engine.left))
            seen.append(set(engine.added))

        update = threads.submit(batch.update, apply, 7, requests(1, 2))
        until(lambda: batch._updates)
        engine.allowed.set()
        outputs = update.result(30)[1]
        versions = [version for _, version in search.result(30)]
    assert len(outputs) == 2 and versions == [0, 7]
    assert seen == [{"0"} if in_flight else set(), {"0", "check 0"}]
    assert engine.added == ["0", "check 0", "check 0", "check 1", "1"]


def test_a_missed_deadline_ends_the_engine_and_no_update_is_applied():
    engine, applied = Steps(), []
    batch = RunningBatch(lambda: engine, slots=2, in_flight=False, deadline=0.5)
    engine.allowed.clear()
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(batch.run, requests(3))
        until(lambda: engine.left)
        with pytest.raises(EngineError, match=r"no answer within 0.5 s"):
            batch.update(lambda: applied.append(7), 7)
        with pytest.raises(EngineError, match=r"no answer within 0.5 s"):
            call.result(30)
        engine.allowed.set()  # only now, or the call may still succeed on a busy machine
    until(lambda: engine.closed == 1)
    with pytest.raises(EngineError, match=r"no answer within 0.5 s"):
        batch.run(requests(2))
    assert (applied, batch.version) == ([], 0)


def test_a_closed_engine_ends_every_call():
    engine = Steps()
    batch = RunningBatch(lambda: engine, slots=2, in_flight=False, deadline=30.0)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(batch.run, requests(10**9))
        until(lambda: engine.left)
        batch.close()
        with pytest.raises(EngineError, match="it was closed"):
            call.result(30)
    batch.close()
    assert engine.closed == 1 and not batch._thread.is_alive()
    with pytest.raises(EngineError, match="it was closed"):
        batch.run(requests(1))


def test_a_request_that_is_not_accepted_ends_its_own_call_only():
    engine = Steps()
    batch = RunningBatch(lambda: engine, slots=4, in_flight=False, deadline=30.0)
    engine.allowed.clear()
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(batch.run, requests(3, 3))
        until(lambda: len(engine.left) == 2)
        empty = replace(requests(1)[0], prompt=[])
        refused = threads.submit(batch.run, [*requests(9), empty, *requests(9, 9)])
        until(lambda: len(batch._waiting) == 4)
        engine.allowed.set()
        with pytest.raises(ValueError, match="a prompt is empty"):
            refused.result(30)
        assert len(other.result(30)) == 2
    assert len(batch.run(requests(2))) == 1


def test_every_caller_learns_why_the_engine_failed():
    engine = Steps()
    batch = RunningBatch(lambda: engine, slots=2, in_flight=False, deadline=30.0)
    engine.failing = True
    for _ in range(2):
        with pytest.raises(EngineError, match="out of memory"):
            batch.run(requests(2))
    until(lambda: engine.closed == 1)


def test_an_engine_that_cannot_start_says_why():
    def start() -> Steps:
        raise ValueError("no such device")

    with pytest.raises(RuntimeError, match="no such device"):
        RunningBatch(start, slots=2, in_flight=False, deadline=30.0)

"""Calls to Ray may hang: whoever waits for one is told in time, and still hears signals."""

import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from suite import until

from tba.errors import ClusterLostError
from tba.runtime.deadline import Calls

SECONDS = 20.0
"""Deadline of every wait in these tests."""


@pytest.fixture
def never() -> Iterator[Callable[[], bool]]:
    """A call that does not return before the test has ended."""
    end = threading.Event()
    yield lambda: end.wait(60)
    end.set()


def test_a_late_call_is_abandoned_and_ends_all_others(never):
    calls = Calls(deadline=0.05)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(calls.within, SECONDS, "return a result", never)
        late = r"Ray is lost: it did not take weights within 0\.05 s"
        with pytest.raises(ClusterLostError, match=late):
            calls("take weights", never)
        with pytest.raises(ClusterLostError, match=late):
            other.result(SECONDS)
    made: list[int] = []
    with pytest.raises(ClusterLostError, match=late):
        calls("take weights", made.append, 1)
    assert made == []
    assert calls.attempt(SECONDS, lambda: made.append(2)) and made == [2]
    assert not calls.attempt(0.05, never)
    calls.close()


def test_results_and_errors_come_from_one_thread_that_keeps_neither():
    calls = Calls(SECONDS)

    class Large:
        """Stands for weights."""

    assert calls("add", lambda a, b: a + b, 1, 2) == 3
    with pytest.raises(ZeroDivisionError):
        calls("divide", lambda: 1 // 0)
    kept = weakref.ref(calls("make", Large))
    until(lambda: kept() is None, SECONDS, 0.001)
    assert threading.get_ident() != calls("run", threading.get_ident)
    calls.close()


def test_an_error_is_diagnosed():
    """Calls fail when Ray dies, in many ways: the reason is what counts."""
    calls = Calls(SECONDS)
    ended = psutil.Popen([sys.executable, "-c", ""])
    ended.wait(SECONDS)
    assert calls("succeed", lambda: 1) == 1
    calls.watch({"raylet": ended})
    with pytest.raises(ClusterLostError, match=rf"its raylet \(process {ended.pid}\) has died"):
        calls("fail", lambda: 1 // 0)
    calls.lose("another reason")
    with pytest.raises(ClusterLostError, match="raylet"):
        calls.check()
    calls.close()


class RequestContext(Exception):
    """Raised by the handler of a signal."""


def test_a_signal_is_heard_while_a_call_hangs(never):
    def ask(number: int, frame: object) -> None:
        raise RequestContext

    calls = Calls(SECONDS)
    before = signal.signal(signal.SIGUSR1, ask)
    sender = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGUSR1])
    try:
        sender.start()
        with pytest.raises(RequestContext):
            calls("take weights", never)
    finally:
        sender.join(SECONDS)
        signal.signal(signal.SIGUSR1, before)
        calls.close()

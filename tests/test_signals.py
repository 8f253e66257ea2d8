"""Signals: the first asks to save and stop, the second ends the process, whatever it is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tba.runs.stop import LEAVE, Stop

SCHEDULED = 4.0
"""Seconds in which a process of a busy machine notices that it should end; fewer than `LEAVE`."""

IN_A_LONG_CALL = """
import hashlib, sys
from tba.runs.stop import Stop
with Stop():
    print("here", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)
"""
"""A call of many minutes outside of Python, in which no handler of a signal runs."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_asks_and_the_second_interrupts(number: int) -> None:
    before = signal.getsignal(number)
    with Stop() as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_hangup_that_is_ignored_stays_so() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.fault
@pytest.mark.parametrize("times", [2, 3])
def test_a_process_in_a_long_call_ends_all_the_same(times: int) -> None:
    """Soon after the second signal, and at the third."""
    command = [sys.executable, "-c", IN_A_LONG_CALL]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"here\n"
        used, deadline = psutil.Process(process.pid).cpu_times().user + 0.2, time.monotonic() + 60
        while psutil.Process(process.pid).cpu_times().user < used:  # until the call has begun
            assert time.monotonic() < deadline
            time.sleep(0.01)
        began = time.monotonic()
        for number in [signal.SIGTERM, signal.SIGINT, signal.SIGHUP][:times]:
            os.kill(process.pid, number)
        assert process.wait(timeout=60) == 128 + signal.SIGINT
        at_once = LEAVE if times == 2 else 0.0
        assert at_once <= time.monotonic() - began < at_once + SCHEDULED
    finally:
        process.kill()
        process.communicate()

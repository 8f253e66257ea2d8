"""Signals: the first asks to save and stop, the second ends the process, whatever it is doing."""

import io
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

import tba.stop
from tba.stop import Stop

SCHEDULED = 4.0
"""Seconds in which a process of a busy machine notices that it should end."""

IN_A_LONG_CALL = """
import hashlib, sys
from tba.stop import Stop
with Stop() as stop:
    print("here", flush=True)
    while not stop.requested:
        pass
    print("asked", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)
"""
"""A call of many minutes outside of Python, in which no handler of a signal runs."""


class Repeats(io.StringIO):
    """A standard error that sends a signal again whenever a line is printed to it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        signal.raise_signal(self.number)
        return super().write(text)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_asks_also_if_it_comes_twice_at_once(number, monkeypatch):
    """`timeout` sends it to its child, and then to the group."""
    monkeypatch.setattr(tba.stop, "TWICE", 0.01)
    monkeypatch.setattr(sys, "stderr", Repeats(number))
    before = signal.getsignal(number)
    with Stop() as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested and signal.getsignal(number) is signal.SIG_DFL
    assert signal.getsignal(number) is before
    assert "interrupt again" in sys.stderr.getvalue()


def test_a_hangup_that_is_ignored_stays_so():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_ends_a_process_in_a_long_call(number):
    command = [sys.executable, "-c", IN_A_LONG_CALL]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"here\n"
        os.kill(process.pid, signal.SIGTERM)
        assert process.stdout.readline() == b"asked\n"
        used, deadline = psutil.Process(process.pid).cpu_times().user + 0.2, time.monotonic() + 60
        while psutil.Process(process.pid).cpu_times().user < used:  # until the call has begun
            assert time.monotonic() < deadline
            time.sleep(0.01)
        began = time.monotonic()
        os.kill(process.pid, number)
        assert process.wait(timeout=60) == -number
        assert time.monotonic() - began < SCHEDULED
    finally:
        process.kill()
        process.communicate()

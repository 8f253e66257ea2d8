"""The reaper ends the processes of its run, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tba.runtime.reaper import Reaper, family, left, sessions

SECONDS = 20.0
"""Deadline of every wait in these tests."""

SLEEP = "import time; time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait(timeout=SECONDS)


def python(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", *arguments])


def test_a_zombie_does_not_blind_it_and_strangers_are_spared(
    started: list[subprocess.Popen[bytes]],
) -> None:
    session = Path("/x/session_1")
    zombie = python("pass")
    ours, reader, stranger = (
        python(PARENT, f"--session={session}"),
        python(SLEEP, str(session / "log")),  # a file of it is no option
        python(SLEEP),
    )
    started += [zombie, ours, reader, stranger]
    deadline = time.monotonic() + SECONDS
    while len(found := family(os.getpid(), [session])) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        assert len(found) == 2  # the process and its child
        assert ours.pid in {p.pid for p in found}
        assert left(set(), [session], 0) == found
        assert left(found, [], 0) == found
    finally:
        for process in found:
            process.kill()


def test_what_writes_to_a_log_of_the_session_is_left_of_it(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    """Ray's agents do not name the session. The driver writes there too, and a reader may look."""
    log = tmp_path / "session_1" / "logs" / "agent.log"
    log.parent.mkdir(parents=True)
    log.touch()
    opened = "import sys; file = open(sys.argv[1], sys.argv[2]); print(flush=True); " + SLEEP
    for mode in ("a", "a", "r"):
        command = [sys.executable, "-c", opened, str(log), mode]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
    for process in started:
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline()  # it has opened the file
    agent, driver, _ = started
    session = log.parent.parent
    assert left(set(), [session], driver.pid) == {psutil.Process(agent.pid)}


def test_only_sessions_of_the_driver_since_it_began_are_its_own(tmp_path: Path) -> None:
    since = "2026-01-02_03-04-05_000006"
    own = tmp_path / "session_2026-01-02_03-04-05_000007_42"
    for name in (
        own.name,
        "session_2026-01-02_03-04-05_000005_42",
        "session_2026-01-02_03-04-05_000007_142",
        "session_latest_42",
    ):
        (tmp_path / name).mkdir()
    assert sessions(42, tmp_path, since) == [own]


def test_what_is_left_of_a_session_is_removed(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    """A watcher that was killed is replaced, and knows the session."""
    session = tmp_path / "session_1"
    (session / "logs").mkdir(parents=True)
    started += [python(SLEEP, f"--session={session}"), python(SLEEP)]
    reaper = Reaper(tmp_path)
    reaper.follow(str(session))
    watcher = reaper._process
    watcher.kill()
    watcher.wait(timeout=SECONDS)
    reaper.keep()
    assert reaper._process is not watcher
    reaper.finish()
    assert started[0].wait(timeout=SECONDS) != 0 and started[1].poll() is None
    assert not session.exists()

"""A child process ends with its parent, and with all that it has started."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tba.child import MARK, STOPS, Child, clean_up, wait_for_parent
from tba.scoring.worker import kill_with_parent

SECONDS = 20.0
"""Deadline of every wait in these tests."""

SLEEP = "import time; time.sleep(60)"


def waits(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SECONDS
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


def hang(file: str, kernel: bool) -> None:
    """Start a process in a session of its own, write its number to the file, and work on."""
    started = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    Path(file).write_text(f"{os.getpid()} {started.pid}")
    if kernel:
        kill_with_parent()
    else:
        threading.Thread(target=lambda: (wait_for_parent(), os._exit(3)), daemon=True).start()
    time.sleep(60)


def parent(file: str, kernel: bool) -> None:
    Child("test_child:hang", file, kernel)
    time.sleep(60)


def numbers(file: Path) -> list[int]:
    assert waits(lambda: file.exists() and len(file.read_text().split()) == 2)
    return [int(word) for word in file.read_text().split()]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("kernel", [False, True])
def test_a_child_ends_with_a_parent_that_is_killed(tmp_path, kernel):
    file = tmp_path / "pids"
    middle = Child("test_child:parent", str(file), kernel)
    pid, started = numbers(file)
    time.sleep(0.5)  # until it waits
    os.kill(middle.process.pid, signal.SIGKILL)
    assert waits(lambda: gone(pid))
    middle.kill()
    os.kill(started, signal.SIGKILL)


def test_a_kill_ends_what_the_child_has_started(tmp_path):
    child = Child("test_child:hang", str(tmp_path / "pids"), True)
    pids = numbers(tmp_path / "pids")
    child.kill()
    assert child.status == -signal.SIGKILL and waits(lambda: all(map(gone, pids)))


def test_the_end_of_the_link_is_waited_for(tmp_path):
    child = Child("test_child:hang", str(tmp_path / "pids"), False)
    pids = numbers(tmp_path / "pids")
    child.end(SECONDS)
    assert child.status == 3 and waits(lambda: all(map(gone, pids)))


def test_a_cleanup_spares_strangers(tmp_path):
    """A process without the mark belongs to it if it writes to the folder, and not if it reads."""
    folder = tmp_path / "session"
    folder.mkdir()
    (folder / "log").touch()
    hold = "import sys; file = open(sys.argv[1], sys.argv[2]); print(flush=True); " + SLEEP
    processes = []
    for mark, mode in (("m", "r"), ("other", "a"), ("other", "r")):
        command = [sys.executable, "-c", hold, str(folder / "log"), mode]
        marked = {**os.environ, MARK: mark}
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=marked))
    for process in processes:
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline()  # it has opened the file
    with (folder / "log").open("a"):  # this process writes there too
        clean_up("m", folder, spared=os.getpid())
    assert not folder.exists()
    marked, writer, reader = processes
    assert marked.wait(SECONDS) and writer.wait(SECONDS) and reader.poll() is None
    reader.kill()
    reader.wait(SECONDS)


def bear(file: str) -> None:
    """Get all signals that ask it to end, then write how processes that it starts end by them."""
    for number in STOPS:
        os.kill(os.getpid(), number)
    program = subprocess.run(
        [sys.executable, "-c", "import os; os.kill(os.getpid(), 15)"], check=False
    )
    if (pid := os.fork()) == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    forked = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    Path(file).write_text(f"{program.returncode} {forked}")


@pytest.mark.parametrize("ignored", [STOPS, ()])
def test_a_child_outlives_a_signal_to_all_processes_of_a_job(tmp_path, ignored):
    """Its parent ends it. The processes that it starts are as without it."""
    file = tmp_path / "codes"
    child = Child("test_child:bear", str(file), ignored=ignored)
    assert waits(lambda: child.status is not None)
    child.kill()
    assert file.exists() is bool(ignored)
    assert not ignored or file.read_text() == "-15 -15"

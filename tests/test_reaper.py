"""The reaper ends the processes of its run, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tba.runtime.reaper import family

SLEEP = "import time; time.sleep(60)"


def test_a_zombie_does_not_blind_it_and_strangers_are_spared() -> None:
    zombie = subprocess.Popen([sys.executable, "-c", "pass"])
    time.sleep(0.5)  # ended, and not waited for
    stranger = subprocess.Popen([sys.executable, "-c", SLEEP])
    ours = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])",
            "--session=/x/session_1",
        ]
    )
    try:
        deadline = time.monotonic() + 10
        while len(found := family(os.getpid(), "/x/session_1")) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert ours.pid in {p.pid for p in found}
        assert len(found) == 2  # the process and its child
        assert stranger.pid not in {p.pid for p in found}
    finally:
        for process in [*found, stranger]:
            process.kill()
        for popen in (zombie, stranger, ours):
            popen.wait(timeout=10)

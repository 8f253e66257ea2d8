"""Processes that carry out one run after another, each on cores of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Literal

from tba.config import Config

End = Literal["finished", "stopped", "failed", "died"]


@dataclass(frozen=True)
class Order:
    """A run to carry out, or to go on with."""

    config: Config
    resume: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run has ended. `error` is the error's last line."""

    end: End
    error: str | None = None
    traceback: str | None = None


@dataclass
class Worker:
    """A process of its own for runs, one at a time. A process that dies takes only its own run with it, and is replaced at the next order.

    Its output goes to the file `log`: the terminal is the study's.
    """

    cores: tuple[int, ...]
    log: Path
    _process: multiprocessing.process.BaseProcess | None = field(default=None, init=False)
    _pipe: Connection | None = field(default=None, init=False)
    busy: bool = field(default=False, init=False)

    def start(self, order: Order) -> None:
        assert not self.busy
        if self._process is None or not self._process.is_alive():
            self._begin()
        assert self._pipe is not None
        self._pipe.send(order)
        self.busy = True

    def ended(self) -> Outcome | None:
        """The outcome of the order, once there is one."""
        assert self.busy and self._pipe is not None and self._process is not None
        if not self._pipe.poll():
            return None
        self.busy = False
        try:
            outcome: Outcome = self._pipe.recv()
        except EOFError:
            self._process.join()
            return Outcome("died", f"its process died (exit code {self._process.exitcode}); see {self.log}")
        return outcome

    def stop(self) -> None:
        """Asks the run to save and to end; asked twice, it ends at once."""
        if self.busy and self._process is not None:
            self._process.terminate()

    def close(self) -> None:
        """Ends the process. A run under way is to save first, in half a minute."""
        if self._process is None or self._pipe is None:
            return
        self.stop()
        self._pipe.close()
        self._process.join(timeout=30.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _begin(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_work, args=(theirs, self.cores, self.log), name=f"tba-{self.log.stem}")
        self._process.start()
        theirs.close()  # so that the pipe ends when the process does


def wait_for(workers: Sequence[Worker], seconds: float) -> list[tuple[Worker, Outcome]]:
    """Those whose order has ended; returns as soon as there is one, or after so long."""
    pipes = [w._pipe for w in workers if w.busy and w._pipe is not None]
    wait(pipes, timeout=seconds)
    return [(w, outcome) for w in workers if w.busy and (outcome := w.ended()) is not None]


def _work(pipe: Connection, cores: Sequence[int], log: Path) -> None:
    """In the process: before torch is imported, what it reads from the environment."""
    os.setsid()  # Ctrl-C on the terminal is for the study, which then asks each run to stop, once
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with log.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    if cores:
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(len(cores))
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    from tba.runtime.placement import Place

    Place("cpu", tuple(cores)).take()
    while True:
        try:
            order: Order = pipe.recv()
        except EOFError:
            return
        outcome = _carry_out(order)
        try:
            pipe.send(outcome)
        except OSError:  # nobody listens any more
            return


def _carry_out(order: Order) -> Outcome:
    signal.signal(signal.SIGTERM, _interrupt)  # until the run has its own way to stop
    try:
        from tba.loop import run

        return Outcome("finished" if run(order.config, order.resume).finished else "stopped")
    except KeyboardInterrupt:
        return Outcome("stopped")
    except Exception as error:
        last = " ".join(traceback.format_exception_only(error)[-1].split())
        return Outcome("failed", last.removeprefix(f"{type(error).__module__}."), traceback.format_exc())
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _leave_with_parent() -> None:
    """A study that was killed leaves no runs behind: they save and end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)

"""Hostile reward functions, by the `kind` of a row. Only a scoring process may load this file."""

import asyncio
import builtins
import ctypes
import gc
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Mute:
    """A reward that raises whatever is done with it."""

    def __float__(self) -> float:
        raise ValueError("no number")

    def __repr__(self) -> str:
        raise ValueError("no text")


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("no message")


def throw(error: BaseException) -> Any:
    raise error


def deep(level: int) -> int:
    return deep(level + 1)


def forget_exits() -> None:
    for number in (signal.SIGTERM, signal.SIGIO, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(60)


def leave_a_child() -> None:
    if os.fork() == 0:
        time.sleep(60)


def to_every_file(text: bytes) -> None:
    for number in range(3, 64):
        with suppress(OSError):
            os.write(number, text)


def threads(count: int) -> None:
    for _ in range(count):
        threading.Thread(target=time.sleep, args=[60], daemon=True).start()


def endless() -> Any:
    while True:
        yield 1.0


DEEDS: dict[str, Callable[[], Any]] = {
    "holds the interpreter lock": lambda: re.match(r"(a+)+$", "a" * 40 + "b"),
    "sleeps": lambda: time.sleep(60),
    "waits for nothing": lambda: threading.Event().wait(60),
    "exits well": lambda: os._exit(0),
    "exits badly": lambda: os._exit(3),
    "aborts": os.abort,
    "kills itself": lambda: os.kill(os.getpid(), signal.SIGKILL),
    # in this thread: a signal to the process can arrive when the rewards have been sent
    "stops itself": lambda: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP),
    "kills its group": lambda: os.killpg(0, signal.SIGKILL),
    "reads address 0": lambda: ctypes.string_at(0),
    "takes all memory": lambda: [bytes(10**8) for _ in range(100)],
    "calls itself": lambda: deep(0),
    "is interrupted": lambda: throw(KeyboardInterrupt()),
    "leaves": lambda: throw(SystemExit(1)),
    "ends a generator": lambda: throw(GeneratorExit()),
    "has no message": lambda: throw(Speechless()),
    "has a long message": lambda: throw(ValueError("x" * 10**7)),
    "prints": lambda: print("x" * 10**7),
    "closes standard output": lambda: (sys.stdout.close(), os.close(1)),
    "closes every file": lambda: os.closerange(0, 256),
    "writes to every file": lambda: to_every_file(b"[0, \n{}\n\xff"),
    "ignores signals": forget_exits,
    "leaves a child": leave_a_child,
    "leaves a program": lambda: subprocess.Popen(["sleep", "60"]),
    "leaves a program in a session of its own": lambda: subprocess.Popen(
        ["sleep", "60"], start_new_session=True
    ),
    "leaves threads": lambda: threads(50),
    "clears the environment": os.environ.clear,
    "goes elsewhere": lambda: os.chdir("/"),
    "forbids files": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0)),
    "forbids recursion": lambda: sys.setrecursionlimit(100),
    "breaks JSON": lambda: setattr(json, "dumps", None),
    "breaks print": lambda: setattr(builtins, "print", None),
    "breaks sockets": lambda: socket.setdefaulttimeout(0.001),
    "collects no garbage": gc.disable,
}

RETURNS: dict[str, Callable[[int], Any]] = {
    "returns a table": lambda size: dict.fromkeys(range(size), 1.0),
    "returns text": lambda size: "1" * size,
    "returns too many": lambda size: [1.0] * (size + 1),
    "returns no end": lambda size: endless(),
    "returns NaN": lambda size: [float("nan")] * size,
    "returns infinity": lambda size: [-float("inf")] * size,
    "returns large numbers": lambda size: [10**400] * size,
    "returns mute objects": lambda size: [Mute()] * size,
    "returns nothing": lambda size: None,
    "returns a class": lambda size: float,
}
KINDS = (*DEEDS, *RETURNS)


def score(completions: list[str], kind: list[str], **columns: Any) -> Any:
    """Return the lengths, after a hostile deed or in a hostile way."""
    if kind[0] in RETURNS:
        return RETURNS[kind[0]](len(completions))
    if kind[0]:
        DEEDS[kind[0]]()
    return [float(len(c)) for c in completions]


async def score_later(completions: list[str], kind: list[str], **columns: Any) -> Any:
    """Return the same from an async function, which blocks the event loop."""
    await asyncio.sleep(0)
    return score(completions, kind, **columns)

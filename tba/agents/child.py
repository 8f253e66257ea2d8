"""Main program of an agent process: it calls the user's program once for each session.

Any Python from 3.11 on can run it, because it imports only the standard library. Sessions arrive
through a socket as lines of JSON: a number, and an object, or null to end the session. Results are
sent as lines with the number, a kind and a value; number 0 is the start. Async functions run in one
event loop, sync functions in one thread each.
"""

import asyncio
import fcntl
import importlib
import importlib.util
import inspect
import json
import os
import resource
import signal
import socket
import ssl
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

LONGEST = 10_000
"""Longest error message, in characters."""
LONGEST_LINE = 2**30
"""Most bytes of a row."""
THREADS = 10_000
"""Most sync functions at once, including functions that hang."""


def run_sessions(end: int, rollout: str, max_memory: float | None) -> None:
    """Run sessions for the searcher at the other end of a socket, until the socket is closed."""
    _die_with_parent()
    nothing = os.open(os.devnull, os.O_RDWR)
    os.set_inheritable(end, False)  # a process that inherits it would hide the end of this one
    os.register_at_fork(after_in_child=lambda: os.dup2(nothing, end))
    connection = socket.socket(fileno=end)
    try:
        function = _load(rollout)
        target_of = _targets(function)
        data = resource.getrlimit(resource.RLIMIT_DATA)[1]
        if max_memory is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (int(max_memory * 1e9), data))
    except BaseException:
        connection.sendall(_line(0, "failed", traceback.format_exc()[-LONGEST:]))
        return
    connection.sendall(_line(0, "started"))
    asyncio.run(_serve(connection, function, target_of))


async def _serve(
    connection: socket.socket, function: Callable[..., Any], target_of: Callable[[str], Any]
) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(THREADS))
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=LONGEST_LINE)
    tasks: dict[int, asyncio.Task[None]] = {}
    while line := await reader.readline():
        number, asked = json.loads(line)
        if asked is not None:
            target = target_of(asked["base_url"])
            held = _hold(writer, function, number, target, asked["row"])
            tasks[number] = loop.create_task(held)
        else:
            writer.write(_line(number, "ending"))
            if number in tasks:
                tasks.pop(number).cancel()
        tasks = {n: task for n, task in tasks.items() if not task.done()}
    os._exit(0)  # with threads that hang


def _targets(function: Callable[..., Any]) -> Callable[[str], Any]:
    """Return a function that makes the program's first argument of a URL: itself, or a client."""
    if next(iter(inspect.signature(function).parameters), "") != "client":
        return str
    import openai

    secure = ssl.create_default_context()  # it takes longer than the rest of a client

    def client(base_url: str) -> Any:
        connections = openai.DefaultAsyncHttpxClient(verify=secure)
        return openai.AsyncOpenAI(base_url=base_url, api_key="none", http_client=connections)

    return client


async def _hold(
    writer: asyncio.StreamWriter,
    function: Callable[..., Any],
    number: int,
    target: Any,
    row: dict[str, Any],
) -> None:
    """Run the program once, and send its result or error."""
    try:
        if inspect.iscoroutinefunction(function):
            returned = await function(target, row)
        else:
            returned = await asyncio.to_thread(_call, function, target, row)
            if inspect.isawaitable(returned):  # an async function in a decorator
                returned = await returned
        line = _line(number, "returned", _as_json(returned))
    except asyncio.CancelledError:
        line = _line(number, "raised", "cancelled")
    except BaseException as error:
        told = traceback.format_exception(type(error), error, _users(error.__traceback__))
        line = _line(number, "raised", "".join(told)[-LONGEST:])
    writer.write(line)


def _call(function: Callable[..., Any], target: Any, row: dict[str, Any]) -> Any:
    try:
        return function(target, row)
    except StopIteration as error:  # a future cannot hold it
        raise RuntimeError(repr(error)) from error


def _as_json(returned: Any) -> float | dict[str, float] | None:
    """Return a reward, rewards by name, or None. Raises TypeError for anything else."""
    if isinstance(returned, dict):
        return {str(name): _number(value, returned) for name, value in returned.items()}
    return None if returned is None else _number(returned, returned)


def _number(value: Any, returned: Any) -> float:
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError):
        pass
    told = f"rollout returned {returned!r:.200}"
    raise TypeError(f"{told}; it must return a number, a dict of numbers, or None")


def _load(rollout: str) -> Callable[..., Any]:
    """Return the function, or the method `rollout` of an instance of the class."""
    where, _, name = rollout.rpartition(":")
    path = Path(where).resolve()
    is_file = where.endswith(".py")
    # last, as for reward functions, so that its files do not shadow Python's or a library's modules
    sys.path.append(str(path.parent if is_file else Path.cwd()))
    if is_file:
        stem = path.stem.replace(".", "_")
        spec = None if stem == "__main__" else importlib.util.find_spec(stem)
        if spec is None or spec.origin != str(path):  # another module has this name
            spec = importlib.util.spec_from_file_location(f"rollout_{stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    function: Any = getattr(module, name)
    instance: Any = function() if inspect.isclass(function) else None
    loaded: Callable[..., Any] = function if instance is None else instance.rollout
    return loaded


def _users(trace: TracebackType | None) -> TracebackType | None:
    """Return the user's part of a traceback: the frames after the last one of this file."""
    users = trace
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == __file__:
            users = trace.tb_next
        trace = trace.tb_next
    return users


def _line(number: int, kind: str, value: Any = None) -> bytes:
    return json.dumps([number, kind, value]).encode() + b"\n"


def _die_with_parent() -> None:
    """Let the kernel kill the group when standard input, the link to the parent, closes."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    link = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    fcntl.fcntl(link, fcntl.F_SETOWN, -os.getpgrp())
    if sys.platform == "linux":
        fcntl.fcntl(link, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(link, fcntl.F_SETFL, os.O_ASYNC)


if __name__ == "__main__":
    run_sessions(*globals()["ARGUMENTS"])

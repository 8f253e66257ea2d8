"""Main program of an agent process: it runs the user's program, a call for each session.

Any Python from 3.11 on can run it: it imports the standard library only, and nothing of this
package. Sessions arrive through a socket as lines of JSON, and results leave so. Async functions
run in one event loop, plain ones in a thread each.
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
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

LONGEST = 10_000
"""Longest error message, in characters."""


def main(end: int, rollout: str, max_memory: float | None) -> None:
    """Hold sessions for the searcher at the other end of a socket, until that is closed."""
    _die_with_parent()
    connection = socket.socket(fileno=end)
    try:
        function = _load(rollout)
        target_of = _targets(function)
        data = resource.getrlimit(resource.RLIMIT_DATA)[1]
        if max_memory is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (int(max_memory * 1e9), data))
    except BaseException:
        _send(connection, {"failed": traceback.format_exc()[-LONGEST:]})
        return
    _send(connection, {"started": os.getpid()})
    asyncio.run(_serve(connection, function, target_of))


async def _serve(
    connection: socket.socket, function: Callable[..., Any], target_of: Callable[[str], Any]
) -> None:
    loop = asyncio.get_running_loop()
    arriving: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    threading.Thread(target=_read, args=[connection, loop, arriving], daemon=True).start()
    tasks: dict[int, asyncio.Task[None]] = {}
    while (message := await arriving.get()) is not None:
        number = message["session"]
        if "row" in message:
            target = target_of(message["base_url"])
            held = _hold(connection, function, number, target, message["row"])
            tasks[number] = loop.create_task(held)
        elif number in tasks:
            tasks.pop(number).cancel()
        tasks = {n: task for n, task in tasks.items() if not task.done()}
    os._exit(0)  # with threads that hang


def _targets(function: Callable[..., Any]) -> Callable[[str], Any]:
    """Return what makes a program's first argument: a session's address, or a client for it."""
    if next(iter(inspect.signature(function).parameters), "") != "client":
        return str
    import openai

    secure = ssl.create_default_context()  # it takes longer than all else of a client

    def client(base_url: str) -> Any:
        connections = openai.DefaultAsyncHttpxClient(verify=secure)
        return openai.AsyncOpenAI(base_url=base_url, api_key="none", http_client=connections)

    return client


def _read(
    connection: socket.socket,
    loop: asyncio.AbstractEventLoop,
    arriving: "asyncio.Queue[dict[str, Any] | None]",
) -> None:
    with connection.makefile("r", encoding="utf-8") as lines:
        for line in lines:
            loop.call_soon_threadsafe(arriving.put_nowait, json.loads(line))
    loop.call_soon_threadsafe(arriving.put_nowait, None)


async def _hold(
    connection: socket.socket,
    function: Callable[..., Any],
    number: int,
    target: Any,
    row: dict[str, Any],
) -> None:
    """Run the program once, and send what it returns or raises."""
    result: dict[str, Any] = {"session": number}
    try:
        if inspect.iscoroutinefunction(function):
            returned = await function(target, row)
        else:
            returned = await _in_thread(function, target, row)
        result["returned"] = _as_json(returned)
    except asyncio.CancelledError:
        result["raised"] = "cancelled"
    except BaseException as error:
        lines = traceback.format_exception(type(error), error, _users(error.__traceback__))
        result["raised"] = "".join(lines)[-LONGEST:]
    _send(connection, result)


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a plain function in a daemon thread, which is left behind if it hangs."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(setter: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            setter(value)

    def run() -> None:
        try:
            returned = function(*arguments)
        except BaseException as error:
            loop.call_soon_threadsafe(settle, future.set_exception, _as_exception(error))
        else:
            loop.call_soon_threadsafe(settle, future.set_result, returned)

    threading.Thread(target=run, daemon=True).start()
    return await future


def _as_exception(error: BaseException) -> Exception:
    """Return an error that a future can hold."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)


def _as_json(returned: Any) -> str | dict[str, str] | None:
    """Return a reward, rewards by name, or None. TypeError for anything else."""
    if returned is None:
        return None
    if isinstance(returned, dict):
        return {str(name): _number(value) for name, value in returned.items()}
    return _number(returned)


def _number(value: Any) -> str:
    if isinstance(value, str | bytes):
        raise TypeError(f"rollout returned {value!r}; it must return a number, a dict, or None")
    try:
        return repr(float(value))  # as text: JSON has no NaN
    except (TypeError, ValueError) as error:
        kind = type(value).__name__
        raise TypeError(
            f"rollout returned {kind}; it must return a number, a dict, or None"
        ) from error


def _load(rollout: str) -> Callable[..., Any]:
    """Return the function, or the method of an instance that is made once."""
    where, _, name = rollout.rpartition(":")
    if where.endswith(".py"):
        path = Path(where).resolve()
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, str(Path.cwd()))
        module = importlib.import_module(where)
    function: Any = getattr(module, name)
    loaded: Callable[..., Any] = function
    if inspect.isclass(function):
        instance: Any = function()
        loaded = instance.rollout
    return loaded


def _users(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that is the user's."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _die_with_parent() -> None:
    """Let the kernel end the group when standard input, the link to the parent, closes."""
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
    main(*globals()["ARGUMENTS"])

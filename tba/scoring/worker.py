"""Main program of a child that answers calls: it scores answers, or runs a user's program.

Any Python from 3.11 on can run it, because it imports only the standard library. Calls and replies
are lines of JSON, sent through a socket:

    [number, seconds, request]      a call, and its deadline
    [number, "returned", value]     its reply; or "raised" with a traceback, or "late"
    [number, "awaits", seconds]     an async function runs: its reply follows within `seconds`

The first line names what answers the calls. The reply to it has the number STARTED and the kind
"started" or "failed". Sync functions run in one thread, async functions in an event loop in another
thread. The main thread runs reward functions (some graders set alarms) or the event loop of a
program.
"""

import asyncio
import fcntl
import importlib
import importlib.util
import inspect
import json
import math
import os
import pkgutil
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

STARTED = 0
"""Number of the first reply."""
SLICE = 0.1
"""Maximum number of seconds that count against a deadline while the event loop is blocked."""
THREADS = 10_000
"""Maximum number of sync functions that an event loop runs at once, including those that hang."""
PACKAGE = str(Path(__file__).parents[1])


def serve(end: int) -> None:
    """Answer calls from the other end of a socket, until it is closed."""
    kill_with_parent()
    nothing = os.open(os.devnull, os.O_RDWR)
    os.set_inheritable(end, False)  # a process that inherits it would hide the end of this one
    os.register_at_fork(after_in_child=lambda: os.dup2(nothing, end))
    _limit(resource.RLIMIT_CORE, 0)
    with suppress(OSError):  # when memory runs out, Linux kills this process instead of the trainer
        Path("/proc/self/oom_score_adj").write_text("1000", "utf-8")
    Server(socket.socket(fileno=end)).serve()


def kill_with_parent() -> None:
    """Let the kernel end the whole process group when the parent ends.

    When the parent's end of standard input closes, the kernel sends the group a signal, which ends
    it even while a function holds the GIL. On Linux it is SIGKILL, which cannot be ignored.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # mask and ignored signals are inherited
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    link = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # also for processes started later
    os.close(nothing)
    fcntl.fcntl(link, fcntl.F_SETOWN, -os.getpgrp())  # negative: the whole group
    if sys.platform == "linux":
        fcntl.fcntl(link, fcntl.F_SETSIG, signal.SIGKILL)
    # last: the signal may arrive as soon as this is set
    fcntl.fcntl(link, fcntl.F_SETFL, os.O_ASYNC)


def _limit(kind: int, most: float) -> None:
    """Limit a resource of this process; keep the system's limit if it is lower."""
    _, hard = resource.getrlimit(kind)
    if math.isfinite(most):
        wanted = math.ceil(most)
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (soft, hard))


class Server:
    """Connection to the caller, and the threads that answer its calls."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._calls = connection.makefile("rb")
        self._sending = threading.Lock()  # both threads reply, and lines must not mix
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(THREADS))

    def serve(self) -> None:
        """Build the function that answers calls, and answer them until the caller has ended."""
        member, argument, max_memory = json.loads(self._calls.readline())
        try:
            build = sessions_of if member is None else pkgutil.resolve_name(member)
            answer = build(argument)
        except BaseException as error:
            self._reply(STARTED, "failed", raised(error))
            return
        # limit written memory, not address space, of which torch and CUDA reserve much more; set
        # the limit only now, because a judge of billions of parameters is loaded to the CPU first
        in_use = 0
        with suppress(OSError):
            pages = Path("/proc/self/statm").read_text("utf-8").split()[5]
            in_use = int(pages) * resource.getpagesize()
        _limit(resource.RLIMIT_DATA, in_use + max_memory * 1e9)
        self._reply(STARTED, "started")
        if member is None:
            threading.Thread(target=self._answer_calls, args=[answer], daemon=True).start()
            self._run_loop()
        else:
            threading.Thread(target=self._run_loop, daemon=True).start()
            self._answer_calls(answer)

    def _run_loop(self) -> None:
        while True:  # what a function raises ends `run_forever`, and is also stored in its task
            with suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()

    def _answer_calls(self, answer: Callable[[Any], Any]) -> None:
        try:
            for line in self._calls:
                number, seconds, request = json.loads(line)
                until = time.monotonic() + seconds
                try:
                    value = answer(request)
                except BaseException as error:  # untrusted: only the caller may end this process
                    self._reply(number, "raised", raised(error))
                    continue
                if inspect.isawaitable(value):
                    left = until - time.monotonic()
                    self._reply(number, "awaits", left)  # first: the result must not overtake it
                    asyncio.run_coroutine_threadsafe(self._await(number, value, left), self._loop)
                else:
                    self._reply(number, "returned", value)
        except OSError:  # the caller has ended
            pass
        except BaseException:
            traceback.print_exc()
        finally:  # even if a user's function has broken something above
            os.killpg(0, signal.SIGKILL)  # with threads that hang

    async def _await(self, number: int, value: Awaitable[Any], left: float) -> None:
        """Send an awaited value. The deadline pauses while another call blocks the event loop."""
        call = asyncio.ensure_future(_outcome(value))
        while left > 0 and not call.done():
            began = time.monotonic()
            most = min(left, SLICE)
            await asyncio.wait([call], timeout=most)
            left -= min(time.monotonic() - began, most)
        if call.done():
            self._reply(number, *call.result())
        else:
            call.cancel()
            self._reply(number, "late")

    def _reply(self, number: int, kind: str, value: Any = None) -> None:
        # a user's function has forked, and both processes return; or it has closed standard output,
        # and later functions could not print
        if os.getpid() != self._pid or sys.stdout.closed:
            os._exit(1)
        line = json.dumps([number, kind, value]) + "\n"
        with self._sending:
            self._connection.sendall(line.encode())


async def _outcome(value: Awaitable[Any]) -> tuple[str, Any]:
    """Return the kind and the value of the reply to an async call."""
    try:
        return "returned", await value
    except BaseException as error:  # untrusted: even SystemExit must not end the event loop
        return "raised", raised(error)


def raised(error: BaseException) -> str:
    """Return an error with the user's traceback, without the package's calls before it."""
    trace = each = error.__traceback__
    while each is not None:
        if each.tb_frame.f_code.co_filename == __file__:
            trace = each.tb_next
        each = each.tb_next
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(PACKAGE):
        trace = trace.tb_next
    trace = trace or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, trace))


# Programs


def sessions_of(rollout: str) -> Callable[[Any], Any]:
    """Load a program, and return the function that runs a session, given a URL and a row."""
    function = _load(rollout)
    target_of = _targets(function)

    async def session(request: tuple[str, dict[str, Any]]) -> float | dict[str, float] | None:
        base_url, row = request
        target = target_of(base_url)
        if inspect.iscoroutinefunction(function):
            returned = await function(target, row)
        else:
            returned = await asyncio.to_thread(_call, function, target, row)
            if inspect.isawaitable(returned):  # an async function in a decorator
                returned = await returned
        return _as_json(returned)

    return session


def _targets(function: Callable[..., Any]) -> Callable[[str], Any]:
    """Return a function that turns a URL into the program's first argument: the URL or a client."""
    if next(iter(inspect.signature(function).parameters), "") != "client":
        return str
    import ssl

    import openai

    secure = ssl.create_default_context()  # takes longer than building the rest of a client

    def client(base_url: str) -> Any:
        connections = openai.DefaultAsyncHttpxClient(verify=secure)
        return openai.AsyncOpenAI(base_url=base_url, api_key="none", http_client=connections)

    return client


def _call(function: Callable[..., Any], target: Any, row: dict[str, Any]) -> Any:
    try:
        return function(target, row)
    except StopIteration as error:  # a future cannot store it
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


if __name__ == "__main__":
    serve(*globals()["ARGUMENTS"])

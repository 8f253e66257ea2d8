"""Waits in the source of the package, found by their calls, and what limits each.

`with lock` is not listed. In the trainer's process, a lock is held for work in memory, and for
calls to Ray, which have `runtime.cluster_deadline`. In a searcher it may be held as long as a
search, and in a scoring process until a reply has been read: calls to them have
`runtime.task_deadline` and `reward.deadline`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from suite import source_nodes

WAITING = {
    "join", "wait", "wait_for", "result", "select", "recv", "recv_into", "communicate", "acquire",
    "readline", "accept", "get_nowait", "check_output", "check_call", "sleep", "run_forever",
    "sendall",
}  # fmt: skip
"""Methods that wait.

`get` counts where it is that of Ray or has no argument, and `read` where it is that of `os`, has no
argument, or a number.
"""
LIMITS = {"timeout", "seconds", "deadline"}

UNLIMITED: dict[str, str] = {
    "tba/engines/_batch.py: self._changed.wait_for(self._has_work)":
        "the engine's own thread, which has nothing to do; callers have `engine.deadline`",
    "tba/run.py: self.checkpoints.wait()": "`checkpoint.deadline`, inside",
    "tba/runs/checkpoint.py: self.wait()": "`checkpoint.deadline`, inside",
    "tba/runtime/cluster.py: ray.init('local', _system_config=inline, **own, **QUIET)":
        "in a thread that is abandoned after `runtime.start_deadline`",
    "tba/runtime/cluster.py: ray.nodes()":
        "in a thread that is abandoned after twice `runtime.start_deadline`",
    "tba/runtime/cluster.py: ray.put(weights)":
        "in a thread that is abandoned after `runtime.cluster_deadline`",
    "tba/runtime/deadline.py: calls.get()": "a thread that waits for work; nobody waits for it",
    "tba/runtime/deadline.py: future.result()": "has ended, which is asked before",
    "tba/runtime/deadline.py: self._lost.result()": "has ended, which is asked before",
    "tba/runtime/handle.py: ray.get(ref)":
        "in a thread that is abandoned after `runtime.cluster_deadline`",
    "tba/runs/lock.py: file.read()": "a file of one line",
    "tba/runs/stop.py: signals.read(1)":
        "a thread that waits for signals; it ends with the context, and nobody waits for it",
    "tba/runtime/reaper.py: self._process.communicate()": "has ended, which is asked before",
    "tba/runtime/reaper.py: os.read(sys.stdin.fileno(), 4096)":
        "has something to read, which is asked before",
    "tba/tasks/_tools.py: future.result()": "has ended, which is asked before",
    "tba/search/isolation.py: started.result()": "has ended, which is asked before",
    "tba/search/isolation.py: reader.readline()":
        "the event loop, not a caller; calls have `reward.deadline`",
    "tba/search/rewards.py: self._events.ready.result()": "`runtime.start_deadline`, inside",
    "tba/search/child.py: self._connection.sendall(line.encode())":
        "read by the searcher's event loop, or the searcher ends, and this process with it",
    "tba/search/rewards.py: async with self.events.slots":
        "held by as many groups as are scored at once, each of which has `reward.deadline`",
    "tba/search/rewards.py: async with self.events.turn":
        "held by one call, which has `reward.deadline`, and `runtime.start_deadline` for a new"
        " process",
    "tba/search/rewards.py: group.result()": "has ended, which is asked before",
    "tba/search/child.py: call.result()": "has ended, which is asked before",
    "tba/search/verdicts.py: task.result()": "has ended, which is asked before",
    "tba/search/verdicts.py: loop.run_forever()":
        "a thread of its own, until the event loop is stopped; calls have `reward.deadline`",
    "tba/studies/sweep.py: sys.stdin.readline()":
        "a line that the sweep has written before it starts the process",
    "tba/studies/sweep.py: process.communicate()": "has ended, which is asked before",
    "tba/studies/sweep.py: os.read(pipe, 1)":
        "a thread that waits for the end of the sweep; nobody waits for it",
    "tba/tasks/judges/_server.py: async with connection.slots":
        "held by requests that have the judge's `deadline`; the call has `reward.deadline`",
    "tba/tasks/judges/_server.py: asyncio.sleep(math.inf)":
        "a task of an event loop, which cancels it at its end; nobody waits for it",
    "tba/weights.py: self._changed.wait_for(lambda: self._sharing == 0)":
        "in a searcher, whose calls have `runtime.task_deadline`, or three times that for new"
        " weights",
}  # fmt: skip
"""Waits that have no limit where they stand, with the reason why they end."""


LIMITED: dict[str, str] = {
    "tba/engines/scripted.py: time.sleep(self.latency * math.exp(self.tail * rng.normal()))":
        "`engine.latency`, which stands for the time of a model",
    "tba/engines/_batch.py: self._changed.wait_for(over, self._deadline)": "`engine.deadline`",
    "tba/engines/_batch.py: self._thread.join(deadline)": "10 s",
    "tba/runs/checkpoint.py: self._thread.join(min(0.5, self._deadline))":
        "0.5 s, again and again, until `checkpoint.deadline`",
    "tba/runs/disk.py: time.sleep(0.1)":
        "0.1 s, again and again, up to a minute between two attempts to write; with"
        " `checkpoint.on_full = pause` there are attempts until there is space, or a signal",
    "tba/runs/lock.py: time.sleep(0.02)":
        "0.02 s, again and again: half a second, and in a sweep 60 s for a run of the sweep before",
    "tba/runs/stop.py: select.select([signals], [], [], LEAVE)": "5 s",
    "tba/runtime/deadline.py: wait(either, min(left, SLICE), FIRST_COMPLETED)":
        "`runtime.cluster_deadline`, or that of the call",
    "tba/runtime/deadline.py: wait([future], seconds)": "that of the caller",
    "tba/runtime/handle.py: ray.wait(others, num_returns=len(others), timeout=0)": "0 s",
    "tba/runtime/handle.py: ray.wait(refs, timeout=POLL)": "0.2 s, again and again",
    "tba/runtime/health.py: self._closing.wait(EVERY)": "a moment, again and again",
    "tba/runtime/health.py: self._thread.join(10)": "10 s",
    "tba/runtime/ray.py: self._changed.wait(POLL)": "0.2 s, again and again",
    "tba/runs/provenance.py: subprocess.run(command, capture_output=True, text=True, timeout=5)":
        "5 s",
    "tba/runtime/cluster.py: ray.get(reference, timeout=self.deadline)": "`runtime.task_deadline`",
    "tba/runtime/cluster.py: ray.get(reservation.gpus.remote(), timeout=settings.start_deadline)":
        "`runtime.start_deadline`",
    "tba/runtime/publisher.py: self._changed.wait(1.0)": "1 s, again and again",
    "tba/runtime/publisher.py: self._changed.wait_for(self._idle, min(SLICE, self._deadline))":
        "1 s, again and again, until `runtime.task_deadline`",
    "tba/runtime/publisher.py: self._thread.join(timeout=10)": "10 s",
    "tba/runtime/ray.py: self._changed.wait(0.2)":
        "0.2 s, until `runtime.gather_deadline` or `eval.deadline`",
    "tba/runtime/ray.py: self._collector.join(timeout=10)": "10 s",
    "tba/runtime/reaper.py: select.select([sys.stdin], [], [], EVERY)": "5 s, again and again",
    "tba/runtime/reaper.py: self._process.communicate(timeout=30)": "30 s",
    "tba/runtime/reaper.py: time.sleep(0.05)": "0.05 s, again and again, until 5 s",
    "tba/runtime/reaper.py: time.sleep(1.0)": "1 s, in the watcher, for which nobody waits then",
    "tba/tasks/_tools.py: wait(futures, seconds)": "`task.tool_deadline`",
    "tba/search/child.py: asyncio.wait([call], timeout=most)":
        "0.1 s, again and again, until the `reward.deadline` of the call",
    "tba/search/isolation.py: asyncio.wait([started], timeout=self._start_deadline)":
        "`runtime.start_deadline`",
    "tba/search/isolation.py: self._process.wait(10)": "10 s",
    "tba/search/rewards.py: self._events.thread.join(10)": "10 s",
    "tba/search/rewards.py: wait([sign_of_life], longest + GRACE)":
        "`reward.deadline` of the longest call, and 1 s",
    "tba/search/rewards.py: wait(scoring, GRACE)":
        "1 s, again and again, while the event loop answers",
    "tba/search/rewards.py: asyncio.sleep(0)":
        "0 s, which shows that the event loop is not blocked",
    "tba/search/verdicts.py: asyncio.sleep(0)": "0 s, for the callbacks of what was cancelled",
    "tba/search/verdicts.py: asyncio.wait([task], timeout=max(0.0, seconds))":
        "`reward.deadline`, or the time that it has left",
    "tba/studies/sweep.py: process.communicate(timeout=max(0.0, deadline - time.monotonic()))":
        "30 s for all runs",
    "tba/studies/sweep.py: process.wait(5)": "5 s",
    "tba/studies/sweep.py: time.sleep(0.1)":
        "0.1 s, again and again, until the last run of the sweep has ended",
    "tba/tasks/judges/_server.py: asyncio.sleep(asked + jittered)":
        "a pause before a retry, within the judge's `patience`",
}  # fmt: skip
"""What limits each of the other waits."""


def listed() -> dict[str, str]:
    """Return every wait in the source, with its limit or the reason why it ends."""
    every = {**LIMITED, **UNLIMITED}
    return {call: every[call] for call, _ in waits()}


def waits() -> Iterator[tuple[str, bool]]:
    """Yield each call and `async with` that may wait, with its file, and whether it has a limit."""
    for file, node in source_nodes():
        for wait, limited in waits_at(node):
            yield f"{file}: {wait}", limited


def waits_at(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield what may wait at a node of a syntax tree, and whether it has a limit."""
    if isinstance(node, ast.Call) and may_wait(node):
        limited = bool(LIMITS & {k.arg for k in node.keywords}) or has_limit(node)
        yield ast.unparse(node), limited
    if isinstance(node, ast.AsyncWith):
        entered = [ast.unparse(item.context_expr) for item in node.items]
        # the limit of an `asyncio.timeout` begins when those before it have been entered
        limited = entered[0].startswith("asyncio.timeout(")
        for name in entered:
            if not name.startswith("asyncio.timeout("):
                yield f"async with {name}", limited


def may_wait(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name):
        return call.func.id in ("wait", "as_completed")
    if not isinstance(call.func, ast.Attribute):
        return False
    name, owner = call.func.attr, ast.unparse(call.func.value)
    if name == "join":  # of a text, of a path, or of a thread
        text = isinstance(call.func.value, ast.Constant | ast.JoinedStr)
        return not text and not owner.startswith(("os.path", "shlex"))
    if name == "get":
        return owner == "ray" or not (call.args or call.keywords)
    if owner == "ray" and name in ("put", "kill", "init", "shutdown", "nodes"):
        return True
    if name == "read":
        numbers = all(isinstance(argument, ast.Constant) for argument in call.args)
        return owner == "os" or (numbers and not call.keywords)
    if name == "run":
        return owner == "subprocess"
    return name in WAITING and owner != "difflib"


def has_limit(call: ast.Call) -> bool:
    """Whether a positional argument limits the wait."""
    given = len(call.args)
    name = call.func.attr if isinstance(call.func, ast.Attribute) else "wait"
    if name == "select":
        return given == 4
    if name == "sleep":
        return given == 1 and ast.unparse(call.args[0]) != "math.inf"
    if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in ("asyncio", "ray"):
        return False  # theirs are named
    if name == "wait_for" or isinstance(call.func, ast.Name):  # what is waited for comes first
        return given > 1
    return name in ("join", "wait", "result", "acquire") and given == 1

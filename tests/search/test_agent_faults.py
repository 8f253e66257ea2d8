"""64 sessions at once, in which everything happens that a program can do wrong."""

import asyncio
import socket
import time
from collections import Counter
from itertools import cycle, islice

import psutil
import pytest
from talk import agent_config, dialogue_config, dialogue_model

from tba.runs.setup import check
from tba.search.agents import Endpoint
from tba.search.result import SearchResult

__all__ = ["agent_config", "dialogue_config", "dialogue_model"]  # fixtures

pytest.importorskip("starlette", reason="needs tba[agents]")
pytest.importorskip("uvicorn", reason="needs tba[agents]")
pytestmark = pytest.mark.slow

REASONS = {
    "sound": None, "leaves": None, "vanishes": None, "long": None, "large": None, "many": None,
    "late": None, "silent": "no_call", "raises": "raised", "nan": "not_finite", "none": "none",
    "hangs": "timeout",
}  # fmt: skip
"""What a session does, and why it is rejected, if so."""
PROMPTS = 32
OURS = {"Endpoint._chat", "Endpoint._sampled", "Agents._hold", "AgentProcess.run"}
"""What must not run when the sessions have ended."""


def outcome(result: SearchResult) -> tuple[int, dict[str, int]]:
    """Return the number of trajectories, and the rejections by reason."""
    trajectories = sum(len(group.trajectories) for group in result.groups)
    return trajectories, {name: n for name, n in result.stats.rejected.items() if n}


def running(endpoint: Endpoint) -> set[str]:
    """Return the names of what runs in the endpoint's loop."""

    async def names() -> set[str]:
        return {str(task.get_coro().__qualname__) for task in asyncio.all_tasks()}

    return asyncio.run_coroutine_threadsafe(names(), endpoint.loop).result(30)


def test_each_session_ends_as_a_trajectory_or_as_a_named_rejection(agent):
    """And no task, connection, process or port is left, also if the program's process dies."""
    kinds = [*islice(cycle(REASONS), PROMPTS), "dies", *["sound"] * (2 * PROMPTS + 1)]
    rows = [{"prompt": f"Say {i}", "kind": kind} for i, kind in enumerate(kinds)]
    settings = ["engine.latency=0.01"]
    config = agent("mishaps", "1", "2", rows=rows, settings=settings, deadline=30.0, max_calls=10)
    parts = check(config)
    searcher = parts.search_setup().build("cpu", False)
    (agents,) = searcher.agents.values()
    endpoint = agents._endpoint
    searches = [searcher.search(parts.prompts[i : i + PROMPTS], i) for i in (0, 32, 64)]
    reasons = Counter(REASONS[kind] for kind in kinds[:PROMPTS])
    wanted = {reason: 2 * count for reason, count in reasons.items() if reason is not None}
    assert outcome(searches[0]) == (2 * reasons[None], wanted)
    assert searches[0].stats.counts["agents/late"] >= kinds[:PROMPTS].count("late")
    trajectories, rejected = outcome(searches[1])
    assert trajectories + sum(rejected.values()) == 2 * PROMPTS and set(rejected) == {"died"}
    assert outcome(searches[2]) == (2 * PROMPTS, {})
    ended = time.monotonic() + 30
    while left := running(endpoint) & OURS:
        assert time.monotonic() < ended, left
        time.sleep(0.1)
    assert not endpoint._sessions and not endpoint.turns.waiting
    with socket.create_connection(("127.0.0.1", endpoint.port), 5):
        pass
    searcher.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", endpoint.port), 5)
    assert not psutil.Process().children()

"""64 sessions at once, in which everything happens that a program can do wrong; and runs with
sessions that are killed, or whose engine fails."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
from build import ENVIRONMENT, as_settings, children, conserved, run_and_keep, steps
from fakes import count
from suite import alive, until
from talk import Script, agent_config, dialogue_config, dialogue_model

from tba.agents import endpoint as endpoint_module
from tba.agents.endpoint import Endpoint
from tba.cli import _config
from tba.config.schema import Config
from tba.errors import EngineError
from tba.run import Run
from tba.search.result import SearchResult
from tba.setup.setup import check
from tba.types import Completion, Sampling, Turn

__all__ = ["agent_config", "dialogue_config", "dialogue_model"]  # fixtures

pytest.importorskip("starlette", reason="needs tba[agents]")
pytest.importorskip("uvicorn", reason="needs tba[agents]")
pytestmark = pytest.mark.slow

REASONS = {
    "sound": None, "leaves": None, "vanishes": None, "long": None, "many": None,
    "late": None, "silent": "no_call", "raises": "raised", "nan": "not_finite", "none": "none",
    "hangs": "timeout",
}  # fmt: skip
"""What a session does, and why it is rejected, if so."""
PROMPTS = 32
OURS = {"Endpoint._chat", "Endpoint._sampled", "Agents._run_session", "AgentProcess.run"}
"""What must not run when the sessions have ended."""


def outcome(result: SearchResult) -> tuple[int, dict[str, int]]:
    """Return the number of trajectories, and the rejections by reason."""
    trajectories = sum(len(group.trajectories) for group in result.groups)
    return trajectories, {name: n for name, n in result.stats.rejected.items() if n}


def running(endpoint: Endpoint) -> set[str]:
    """Return the names of what runs in the endpoint's loop."""

    async def names() -> set[str]:
        return {str(task.get_coro().__qualname__) for task in asyncio.all_tasks()}

    return endpoint.loop.begin(names()).result(30)


def test_each_session_ends_as_a_trajectory_or_as_a_named_rejection(agent, monkeypatch):
    """And no task, connection, process or port is left, also if the program's process dies.

    Clients of an endpoint that is full come again.
    """
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
    assert outcome(searches[1]) == (2 * PROMPTS - 2, {"died": 2})  # the others are held again
    assert outcome(searches[2]) == (2 * PROMPTS, {})
    assert searches[2].stats.counts["agents/refused"] == 0
    complete = endpoint.turns._run

    def after_a_refusal(turns: Sequence[Turn]) -> list[Completion]:
        until(lambda: endpoint.counts["agents/refused"] > 0, 10)
        return complete(turns)

    monkeypatch.setattr(endpoint_module, "WAITING", 0)
    monkeypatch.setattr(endpoint.turns, "_run", after_a_refusal)
    full = searcher.search(parts.prompts[64:96], 96)
    assert outcome(full) == (2 * PROMPTS, {})
    assert full.stats.counts["agents/refused"] > 0  # 503, each with the seconds to wait
    until(lambda: not running(endpoint) & OURS, 30)
    assert not endpoint._sessions and not endpoint.turns.waiting
    with socket.create_connection(("127.0.0.1", endpoint.port), 5):
        pass
    searcher.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", endpoint.port), 5)
    assert not psutil.Process().children()


# Runs


@dataclass
class FailsOnce(Script):
    """Engine that fails once after some calls, in whichever process."""

    folder: str = ""

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        failed = Path(self.folder, "failed")
        if count(Path(self.folder)) >= 20 and not failed.exists():
            failed.touch()
            raise EngineError("out of memory")
        return super().generate(prompts, sampling, seed)


def told_setting(folder: Path) -> str:
    return f"task.env={{TOLD={json.dumps(str(folder))}}}"


def run_config(agent: Callable[..., Config], folder: Path, *settings: str) -> Config:
    """A run with sessions of three calls each, which tell the address of their endpoint."""
    rows = [{"prompt": f"Say {i}"} for i in range(2000)]
    common = (
        told_setting(folder), "checkpoint.every=1", "eval.prompts=0", "runtime.searchers=1",
        "runtime.fresh=1",
    )  # fmt: skip
    return agent("lingers", "1", "2", rows=rows, settings=[*common, *settings])


def check_sessions(run: Run) -> None:
    """All sessions in the buffer are whole, and each prompt was answered once, or is out."""
    assert conserved(run.buffer)
    groups = run.buffer.groups()
    for t in (t for group in groups for t in group.trajectories):
        assert t.sampled is not None and t.sampled.sum() == 6 and t.finished  # 1 2 2, each with EOS
    cursor = run.searchers.state().cursor
    assert len(groups) + len(cursor["outstanding"]) == cursor["state"]["chosen"]


def is_open(address: str) -> bool:
    port = urlsplit(address).port
    assert port is not None
    try:
        with socket.create_connection(("127.0.0.1", port), 5):
            return True
    except OSError:
        return False


@pytest.mark.fault
@pytest.mark.timeout(600)
@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_a_run_that_is_killed_leaves_no_port_process_or_half_session(runtime, agent, tmp_path):
    """It is killed while sessions run, and goes on from its checkpoint."""
    config = run_config(agent, tmp_path, f"runtime.use={runtime}", "run.steps=1000000")
    folder = tmp_path / "run"
    given = [*as_settings(config), told_setting(tmp_path)]
    command = [sys.executable, "-m", "tba.cli", "train", *given]
    with (tmp_path / "errors").open("wb") as errors:
        process = subprocess.Popen(command, stderr=errors, env=ENVIRONMENT)
    try:
        until(lambda: len(steps(folder)) >= 3 or process.poll() is not None, 300)
        assert process.poll() is None, (tmp_path / "errors").read_text()[-2000:]
        begun = len((tmp_path / "told").read_text().split())
        until(lambda: len((tmp_path / "told").read_text().split()) > begun, 60)
        processes = children(process.pid)
        addresses = (tmp_path / "told").read_text().split()
        assert processes and is_open(addresses[-1])
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    until(lambda: not alive(processes) and not is_open(addresses[-1]), 10)
    newest = steps(folder)[-1]
    alone = ("runtime.use=local", f"run.steps={newest + 2}")
    run = run_and_keep(_config(alone, folder), folder)
    check_sessions(run)
    assert {*range(1, newest + 3)} - {*steps(folder)} <= {newest}


@pytest.mark.fault
@pytest.mark.timeout(600)
def test_an_engine_that_fails_ends_the_sessions_of_its_searcher_which_are_held_again(
    agent, tmp_path, caplog
):
    own = ("engine=test_agent_faults.FailsOnce", f"engine.folder={tmp_path}/calls")
    config = run_config(agent, tmp_path, *own, "runtime.use=ray", "run.steps=12")
    addresses = tmp_path / "told"
    run = run_and_keep(config)
    check_sessions(run)
    assert run.searchers.stats.counts["searchers/restarts"] == 1
    assert "out of memory" in caplog.text and "its tasks are issued again" in caplog.text
    every = addresses.read_text().split()
    ports = [urlsplit(address).port for address in every]
    assert len(set(ports)) == 2  # before and after the restart
    assert len(every) > 2 * len(run.buffer.groups())  # some were held again
    assert not any(map(is_open, {f"http://127.0.0.1:{port}" for port in ports}))


@pytest.mark.fault
def test_an_engine_that_fails_in_this_process_ends_the_run_with_a_checkpoint(agent, tmp_path):
    own = ("engine=test_agent_faults.FailsOnce", f"engine.folder={tmp_path}/calls")
    config = run_config(agent, tmp_path, *own, "runtime.use=local", "run.steps=12")
    with pytest.raises(EngineError, match="out of memory"):
        run_and_keep(config)
    assert not psutil.Process().children()
    check_sessions(run_and_keep(_config([], tmp_path / "run"), tmp_path / "run"))


def test_whoever_knows_no_session_gets_no_room_for_a_body():
    """Other users of the machine reach the port, but do not know the path of a session."""
    engine = SimpleNamespace(complete=None, joins_batches=False, explores=True, sampling=None)
    endpoint = Endpoint(engine, None)
    guessed = SimpleNamespace(path_params={"session": "guessed"}, stream=None)
    reply = asyncio.run(endpoint._chat(guessed))
    endpoint.close()
    assert reply.status_code == 410

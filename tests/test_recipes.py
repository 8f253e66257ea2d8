"""Recipes: programs that users begin with, each with its config."""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from conftest import module_at
from talk import agent_config, call, dialogue_config, dialogue_model, held_sessions

from tba.config.schema import load
from tba.open import run
from tba.runs.folder import METRICS, read
from tba.setup.setup import check

__all__ = ["agent_config", "dialogue_config", "dialogue_model", "held_sessions"]  # fixtures

RECIPES = Path(__file__).parents[1] / "recipes"
MODELS = Path(os.environ.get("TBA_MODELS", Path.home() / ".cache" / "tba-models"))
PROGRAMS = sorted(path.with_suffix(".py") for path in RECIPES.glob("*.toml"))


@pytest.fixture
def run_code() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("run_code", RECIPES / "run_code.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


def test_the_algorithm_in_one_file_learns():
    """From a score of .32 to more than .7 in eight of its 100 steps."""
    recipe = module_at(RECIPES / "minimal_loop.py")
    assert recipe.main(steps=8) > 0.7


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_a_recipe_is_short_and_its_config_is_sound(program, model, monkeypatch):
    assert len(program.read_text("utf-8").splitlines()) <= 80
    monkeypatch.chdir(RECIPES.parent)
    settings = [f"policy.model={model}", "task.python=" + json.dumps(sys.executable)]
    check(load(program.with_suffix(".toml"), settings))


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_code_runs_without_a_network_and_with_limits(run_code, tmp_path, monkeypatch):
    heard = socket.create_server(("127.0.0.1", 0))
    network = f"import socket\nsocket.create_connection(('127.0.0.1', {heard.getsockname()[1]}), 2)"
    with socket.create_connection(heard.getsockname(), 2):  # it can be reached from here
        pass
    monkeypatch.setattr(run_code, "SECONDS", 5.0)
    programs = {
        "assert 1 + 1 == 2": True,
        "assert 1 + 1 == 3": False,
        "raise SystemExit(0)\nassert 1 + 1 == 3": False,
        "x = 'a' * 10**9": False,
        network: False,
        "open('big', 'w').write('x' * 2 * 10**6)": False,
        "while True: pass": False,
        "import os\nassert 'SOME' not in os.environ": True,
    }
    monkeypatch.setenv("SOME", "1")
    for source, passes in programs.items():
        assert run_code.run_alone(source) is passes, source
    heard.close()


def test_code_is_refused_where_it_would_run_unprotected(run_code, monkeypatch):
    monkeypatch.setattr(run_code, "ALONE", ["unshare", "--no-such-option"])
    with pytest.raises(RuntimeError, match="cannot run without a network"):
        run_code.run_alone("pass")


@pytest.mark.parametrize(
    "program, turns",
    [
        ("with_tool", ["", call("multiply", a=3, b=4), "It is 12."]),
        ("with_tool", ["", call("multiply", a="three"), "It is 12."]),
        ("with_text", ["", "", "CALC: 3 * 4", "It is 12."]),
    ],
)
def test_a_calculator_answers_once_and_the_last_message_decides(program, turns, agent, held):
    pytest.importorskip("openai")
    pytest.importorskip("starlette", reason="needs tba[agents]")
    rows = [{"a": 3, "b": 4, "number": number} for number in range(4)]
    _, result = held(agent(f"{RECIPES}/calculator.py:{program}", *turns, rows=rows))
    (group,) = result.groups
    assert [t.reward for t in group.trajectories] == [1.0, 1.0]
    assert result.stats.counts["agents/calls"] == 4
    assert result.stats.counts["agents/forks"] == 0


@contextmanager
def mcp_server(python: str) -> Iterator[str]:
    """Yield the setting that says how the server is started."""
    yield f"task.env={{SERVER={json.dumps(f'{python} recipes/mcp_tools.py')}}}"


@contextmanager
def openenv_server(python: str) -> Iterator[str]:
    """Serve the environment; yield the setting that says where."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([python, "recipes/openenv_env.py", str(port)])
    try:
        ended = time.monotonic() + 120
        while True:
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None and time.monotonic() < ended
            time.sleep(0.2)
        yield f'task.env={{OPENENV="http://127.0.0.1:{port}"}}'
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name, served, variable, packages",
    [
        ("mcp_tools", mcp_server, "TBA_MCP", "'mcp>=2.3,<3' openai"),
        ("openenv_env", openenv_server, "TBA_OPENENV", "'openenv>=0.10,<0.11' openai"),
    ],
)
def test_a_run_with_a_recipe_has_no_false_forks(
    name, served, variable, packages, tmp_path,
    monkeypatch
):  # fmt: skip
    """Five steps with a real model, and a program in a Python environment of its own."""
    python = os.environ.get(variable)
    if python is None or not (MODELS / "smollm2").is_dir():
        pytest.skip(
            f"needs $TBA_MODELS/smollm2, and {variable}=python after pip install {packages}"
        )
    monkeypatch.chdir(RECIPES.parent)
    with served(python) as setting:
        small = [
            f"policy.model={MODELS / 'smollm2'}", f"task.python={python}", setting,
            "runtime.use=local", "runtime.prompts_per_task=2", f"run.folder={tmp_path}/run",
            "run.steps=5", "trainer.batch_size=16", "eval.prompts=0", "checkpoint.every=0",
            "log.console=off",
        ]  # fmt: skip
        summary = run(load(RECIPES / f"{name}.toml", small))
    assert summary is not None and summary.steps == 5 and not summary.rejected
    counted = [row for row in read(tmp_path / "run" / METRICS) if "agents/calls" in row]
    assert counted[-1]["agents/calls"] > summary.samples_generated
    assert counted[-1].get("agents/forks", 0) == 0
    print(f"{name}: {counted[-1]['agents/calls']} calls of {summary.samples_generated} sessions")

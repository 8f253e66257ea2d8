"""Recipes: programs that users begin with, each with its config."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from talk import dialogue_model

from tba.config.schema import load
from tba.runs.setup import check

__all__ = ["dialogue_model"]  # a fixture

RECIPES = Path(__file__).parents[1] / "recipes"
PROGRAMS = sorted(RECIPES.glob("*.py"))


@pytest.fixture
def run_code() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("run_code", RECIPES / "run_code.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_a_recipe_is_short_and_its_config_is_sound(
    program: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(program.read_text("utf-8").splitlines()) <= 80
    monkeypatch.chdir(RECIPES.parent)
    settings = [f"policy.model={model}", "task.python=" + json.dumps(sys.executable)]
    check(load(program.with_suffix(".toml"), settings))


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_code_runs_without_a_network_and_with_limits(
    run_code: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = socket.create_server(("127.0.0.1", 0))
    network = f"import socket\nsocket.create_connection(('127.0.0.1', {heard.getsockname()[1]}), 2)"
    with socket.create_connection(heard.getsockname(), 2):  # it can be reached from here
        pass
    monkeypatch.setattr(run_code, "SECONDS", 5.0)
    programs = {
        "assert 1 + 1 == 2": True,
        "assert 1 + 1 == 3": False,
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


def test_code_is_refused_where_it_would_run_unprotected(
    run_code: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_code, "ALONE", ["unshare", "--no-such-option"])
    with pytest.raises(RuntimeError, match="cannot run without a network"):
        run_code.run_alone("pass")

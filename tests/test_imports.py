"""Imports point down only; what is heavy is imported by one file, and never by `import tba`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tba"
LEVELS = [
    {"types", "objective", "schedule", "plugins", "table", "faults", "config"},
    {"pretrained", "weights", "log", "data", "policy", "objectives", "strategies", "engines", "tasks", "selections", "rewards"},
    {"replay", "prompts", "rollouts", "searcher", "trainer", "evaluate", "build"},
    {"runtime", "summary", "runfolder", "console", "stop", "study", "results", "report"},
    {"checkpoint", "loop", "offline", "workers", "sweep"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
FOLDERS = {"objectives", "strategies", "engines", "tasks", "selections"}
HEAVY = {
    "ray": {"runtime/ray.py", "runtime/actor.py"},
    "wandb": {"log.py"},
    "matplotlib": {"report/draw.py", "report/run.py", "report/figures.py"},
    "vllm": set(),
}

FILES = sorted(PACKAGE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{a.name}" for a in node.names} if node.module == "tba" else {node.module}
    return names


def part(path: Path) -> str:
    """`types` for tba/types.py, `tasks` for tba/tasks/gsm8k.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", [p for p in FILES if part(p) != "__init__"], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    own = part(path)
    for module in imported(path):
        if module.startswith("tba.") and (other := module.split(".")[1]) != own:
            assert LEVEL[other] <= LEVEL[own], f"{path.name} imports {module}, which stands above it"
            assert not (own in FOLDERS and other in FOLDERS), f"{path.name} imports {module}: these folders do not know each other"


@pytest.mark.parametrize("library", HEAVY)
def test_heavy_libraries_have_one_home(library: str) -> None:
    homes = {str(p.relative_to(PACKAGE)) for p in FILES if any(m.split(".")[0] == library for m in imported(p))}
    assert homes <= HEAVY[library]


def test_import_tba_is_light() -> None:
    code = "import tba, sys; print(*(m for m in ('torch', 'ray', 'wandb', 'matplotlib', 'transformers', 'datasets') if m in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300

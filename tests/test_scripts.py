"""Scripts, studies, examples and benchmarks import names that exist. None of them is run here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("scripts", "studies", "examples", "benchmarks")
SCRIPTS = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def source_of(module: str, beside: Path) -> Path | None:
    """Return the file of a module of this project: in the package, or beside a script."""
    for base in (ROOT, beside):
        path = base.joinpath(*module.split("."))
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file.is_file():
                return file
    return None


@cache
def names_in(file: Path) -> set[str]:
    """Return what can be imported from a file: the names that it binds, and its submodules."""
    names = set()
    if file.name == "__init__.py":
        names = {path.stem for path in file.parent.iterdir() if path.suffix in ("", ".py")}
    todo: list[ast.AST] = list(ast.parse(file.read_text(encoding="utf-8")).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            todo += ast.iter_child_nodes(node)
    return names


def missing_in(text: str, beside: Path) -> Iterator[str]:
    """Yield the modules and names of this project that a text imports and that do not exist."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported = {alias.name: set[str]() for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported = {node.module: {alias.name for alias in node.names}}
        else:
            continue
        for module, names in imported.items():
            file = source_of(module, beside)
            if file is not None:
                yield from (f"{module}.{name}" for name in sorted(names - names_in(file)))
            elif module.partition(".")[0] == "tba":
                yield module


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_imports_what_exists(script: Path) -> None:
    assert list(missing_in(script.read_text(encoding="utf-8"), script.parent)) == []


def test_what_does_not_exist_is_found() -> None:
    text = "import tba.gone, json\nfrom tba import train, learn\n"
    text += "def f():\n    from tba.tasks.arithmetic import held_out, is_held_out\n"
    text += "    from _measure import nothing, row\n"
    missing = {"tba.gone", "tba.tasks.arithmetic.held_out", "_measure.nothing"}
    assert set(missing_in(text, ROOT / "benchmarks")) == missing

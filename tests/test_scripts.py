"""Scripts, studies, examples and benchmarks import names that exist. None of them is run here."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import pytest

from tba.runtime.deadline import bind_ray

ROOT = Path(__file__).parent.parent
FOLDERS = ("scripts", "studies", "examples", "benchmarks")
SCRIPTS = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def exists(module: str, name: str, beside: Path) -> bool:
    """Return whether a module of the package, or one beside a script, has a name."""
    neighbour = beside / f"{module}.py"
    if neighbour.is_file():
        binds = rf"^(?:def |class )?{name}\b"
        return re.search(binds, neighbour.read_text("utf-8"), re.MULTILINE) is not None
    if module.partition(".")[0] != "tba":
        return True
    bind_ray(None)
    try:
        resolve_name(f"{module}.{name}")
    except (ImportError, AttributeError):
        return False
    return True


def missing_in(text: str, beside: Path) -> Iterator[str]:
    """Yield the names of this project that a text imports and that do not exist."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            for alias in node.names:
                parent, _, name = alias.name.rpartition(".")
                if not exists(module or parent, name, beside):
                    yield f"{module or parent}.{name}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_imports_what_exists(script):
    assert list(missing_in(script.read_text(encoding="utf-8"), script.parent)) == []


def test_what_does_not_exist_is_found():
    text = "import tba.gone, json\nfrom tba import train, learn\n"
    text += "def f():\n    from tba.tasks.arithmetic import held_out, is_held_out\n"
    text += "    from _measure import nothing, row\n"
    missing = {"tba.gone", "tba.tasks.arithmetic.held_out", "_measure.nothing"}
    assert set(missing_in(text, ROOT / "benchmarks")) == missing

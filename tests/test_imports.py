"""The shape of the package: imports point down, heavy ones have one home, files are short."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "tba"
LEVELS = [
    {"types", "prompt", "weights", "errors", "display", "config", "streams", "child", "stop"},
    {"objectives", "strategies", "engines", "tasks", "selections", "models"},
    {"learn", "replay"},
    {"scoring"},
    {"agents"},
    {"search"},
    {"runtime"},
    {"runs"},
    {"setup"},
    {"run"},
    {"offline"},
    {"open"},
    {"tools"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
PLUGINS = {"objectives", "strategies", "engines", "tasks", "selections"}
RAY = ("ray", "actor", "pool", "cluster", "ranks")
HEAVY = {
    "ray": {f"runtime/{name}.py" for name in RAY},
    "wandb": {"runs/journal.py"},
    "peft": {"models/lora.py"},
    "math_verify": {"tasks/math.py"},
    "vllm": {"engines/_vllm_api.py"},
    "reasoning_gym": {"tasks/reasoning_gym.py"},
}

FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> set[str]:
    """Return the modules that a file imports, also in functions, but not for type checkers."""
    names: set[str] = set()
    todo: list[ast.AST] = list(syntax_tree(path).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            own = {f"{node.module}.{a.name}" for a in node.names}
            names |= own if node.module == "tba" else {node.module}
        else:
            todo.extend(ast.iter_child_nodes(node))
    return names


def part(path: Path) -> str:
    """Return `types` for tba/types.py, `tasks` for tba/tasks/gsm8k.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_point_down():
    for path in FILES:
        own = part(path)
        if own == "__init__":
            continue
        for module in imported(path):
            if module.startswith("tba.") and (other := module.split(".")[1]) != own:
                assert LEVEL[other] <= LEVEL[own], f"{path} imports {module}, which is above it"
                assert not {own, other} <= PLUGINS, f"{path} imports {module}: plug-ins are apart"


def test_only_the_command_line_imports_the_tools():
    for path in FILES:
        uses = any(module.startswith("tba.tools") for module in imported(path))
        assert not uses or part(path) in ("tools", "cli", "__init__"), path


def test_heavy_libraries_have_one_home():
    for path in FILES:
        for library in {module.split(".")[0] for module in imported(path)} & HEAVY.keys():
            assert str(path.relative_to(PACKAGE)) in HEAVY[library]


def test_import_tba_is_light():
    heavy = ("torch", "ray", "transformers", "datasets", "pandas", "peft", "wandb")
    assert not imported_by("tba; tba.Config").intersection(heavy)


def test_a_child_imports_the_standard_library_only():
    libraries = imported_by("tba.scoring.worker") - imported_by("sys") - {"tba"}
    assert libraries <= sys.stdlib_module_names


def imported_by(text: str) -> set[str]:
    """Return the packages that are imported after `import text` in a new process."""
    code = f"import {text}\nimport sys; print(*(name.partition('.')[0] for name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(found.stdout.split())


def test_files_functions_and_lines_are_short():
    for path in FILES:
        lines = path.read_text().splitlines()
        assert len(lines) <= 450, path
        assert [n for n, line in enumerate(lines, 1) if len(line) > 100] == [], path
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno + 1 <= 70, (path, node.name)


def names_no_encoding(call: ast.Call) -> bool:
    """Whether a call opens, reads or writes a text file in the encoding of the locale."""
    named = {keyword.arg for keyword in call.keywords}
    match call.func:
        case ast.Attribute(value=ast.Name(id="os")):
            return False
        case ast.Attribute(attr="read_text" | "write_text" as verb):
            return len(call.args) <= (verb == "write_text") and "encoding" not in named
        case ast.Attribute(attr="open") | ast.Name(id="open"):
            modes = [a.value for a in call.args if isinstance(a, ast.Constant)]
            return "encoding" not in named and not any("b" in str(mode) for mode in modes)
    return any(k.arg == "text" and ast.unparse(k.value) == "True" for k in call.keywords)


def test_no_file_depends_on_the_locale():
    for path in FILES:
        calls = [n for n in ast.walk(syntax_tree(path)) if isinstance(n, ast.Call)]
        assert [ast.unparse(call) for call in calls if names_no_encoding(call)] == [], path


def test_files_of_tests_have_names_of_their_own():
    """Else pytest takes one for the other."""
    names = [path.name for path in PACKAGE.with_name("tests").rglob("test_*.py")]
    assert sorted(names) == sorted({*names})

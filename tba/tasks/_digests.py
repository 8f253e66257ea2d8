"""Digests of what determines the rewards of a run: options, and the code that they name.

Moving a file, or editing its comments or layout, does not change its digest. Files that a function
reads, installed packages that it imports, and models on servers and the Hub are not included.
"""

import ast
import contextlib
import dis
import json
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache, partial
from glob import glob
from hashlib import file_digest, sha256
from importlib.util import find_spec
from itertools import accumulate, product
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tba.config.tables import PluginTable, TaskTable
from tba.tasks._memory import Functions

UNUSED = {
    *("data", "split", "subset", "prompt_column", "answer_column", "train_size", "size", "seed"),
    *("held_out_data", "held_out_split", "held_out_size", "pass_reward", "gold", "chat"),
    *("prompt", "system_prompt", "shots", "shot_response", "max_turns"),
    *("max_prompt_tokens", "drop_duplicates"),
    *("deadline", "retries", "concurrency", "cache_size", "token_budget", "api_key"),
}
"""Options of built-in tasks and judges that do not affect the reward of an answer to a prompt."""
WEIGHTS = "weights of policy.model"
PLACES, BYTES = 256, 4096
"""Places in a file of weights that are compared, and bytes at each."""
OURS = {"tba", *sys.stdlib_module_names}
"""Packages that are compared by name, like installed ones."""
VALUES = {
    *("builtins", "collections", "datetime", "decimal", "enum", "fractions", "functools"),
    *("itertools", "operator", "pathlib", "types"),
}
"""Standard library modules whose objects are values, or consist of other objects."""
WRAPPERS = (classmethod, staticmethod, type(lru_cache(len)))
IMPORT = re.compile(r"^ *(?:from (\.*)([\w.]*) )?import (.+)", re.MULTILINE)


@runtime_checkable
class Array(Protocol):
    """An array or a tensor."""

    def __array__(self) -> np.ndarray: ...


def digests_of(task: PluginTable, functions: Functions | None) -> dict[str, str]:
    """Return a digest of each option that affects the rewards of a task, by key."""
    tables = {"task": task}
    if isinstance(task, TaskTable):
        tables |= {f"task.sources.{name}": task.source(name) for name in task.weights}
    digests: dict[str, str] = {}
    for key, table in tables.items():
        digests |= _digests(key, {"use": table.use, **table.options}, True)
    if functions is not None:
        digests["task.reward"] = digest(_meaning(functions, {}))
    return digests


def changed(now: Mapping[str, str], before: Mapping[str, str] | None) -> list[str]:
    """Return the names of the digests that differ; none if the earlier ones are unknown."""
    known = now if before is None else before
    unknown = {WEIGHTS} - known.keys()  # runs of 0.3 have no digest of the weights
    return sorted({name for name, _ in now.items() ^ known.items()} - unknown)


def digest(value: Any) -> str:
    """Return a digest of a JSON value."""
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def weights_in(folder: Path) -> list[Any]:
    """Return the size and a sample of each file of weights; reading all may take minutes."""
    found: list[Any] = []
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        sample = sha256()
        with path.open("rb") as file:
            for place in range(0, size, 1 + size // PLACES):
                file.seek(place)
                sample.update(file.read(BYTES))
        found.append([path.name, size, sample.hexdigest()])
    return found


def _digests(key: str, value: Any, is_ours: bool) -> Iterator[tuple[str, str]]:
    """Yield the key and the digest of each option in a table, list or value."""
    if isinstance(value, Mapping):
        if "use" in value:
            is_ours = str(value["use"]).isidentifier()
        for name, inner in value.items():
            if not (is_ours and name in UNUSED):
                yield from _digests(f"{key}.{name}", inner, is_ours)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _digests(f"{key}.{i}", inner, is_ours)
    else:
        yield key, digest(_meant(value) if isinstance(value, str) else value)


def _meant(text: str) -> Any:
    """Return a string value, with the content of the file, model or module that it names."""
    where, _, name = text.rpartition(":")
    with contextlib.suppress(OSError, RuntimeError):  # if the text is not a valid path
        path = Path(where if where.endswith(".py") else text).expanduser()
        if path.is_file():
            return [name if where.endswith(".py") else "", _content(path)]
        if text and any(path.glob("*config*.json")):
            # `Path.rglob` does not follow links to folders
            names = sorted(glob("**", root_dir=path, recursive=True))  # noqa: PTH207
            files = [n for n in names if not n.endswith((".md", ".pyc")) and (path / n).is_file()]
            return [[name, _bytes(path / name)] for name in files]
    return [text, *map(_module, (where, text.rpartition(".")[0], text))]


def _meaning(value: Any, seen: dict[int, tuple[int, Any]]) -> Any:
    """Return, as JSON, everything that affects the results of a function or object from Python.

    That is the file of its module, or, in a script, its code and the globals that the code uses.
    Objects that were visited before become a number.
    """
    inner = partial(_meaning, seen=seen)
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str):
        return repr(value)
    if id(value) in seen:
        return seen[id(value)][0]
    seen[id(value)] = len(seen), value  # kept alive, so that no other object gets its id
    if kind is bytes:
        return sha256(value).hexdigest()
    if kind in (list, tuple, deque):
        return [*map(inner, value)]
    if kind in (dict, MappingProxyType, set, frozenset):
        items = value.items() if isinstance(value, Mapping) else sorted(value, key=repr)
        return sorted(map(inner, items), key=repr)
    if kind is CodeType:
        return inner((value.co_code, value.co_names, value.co_varnames, value.co_consts))
    if kind is re.Pattern:
        return inner((value.pattern, value.flags))
    if kind is property:
        return inner((value.fget, value.fset, value.fdel))
    if kind in WRAPPERS:
        return inner(value.__wrapped__)
    if isinstance(value, ModuleType):
        return [value.__name__, _module(value.__name__)]
    if not isinstance(value, type | FunctionType):
        return inner(_parts(value))
    content = _module(str(value.__module__))
    held: list[Any] = []
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        held = [value.__defaults__, value.__kwdefaults__, cells, vars(value)]
        if content is None:
            names = _names(value.__code__, "LOAD_GLOBAL")
            used = {n: x for n, x in value.__globals__.items() if n in names}
            imported = sorted(_names(value.__code__, "IMPORT_NAME"))
            held += [value.__code__, used, [*map(_imported, imported)]]
    elif content is None:
        own = vars(value).items()
        members = {n: x for n, x in own if isinstance(x, FunctionType) or n[:2] != "__"}
        held = [type(value), value.__bases__, members]
    return [value.__qualname__, content, inner(held)]


def _parts(value: Any) -> list[Any]:
    """Return the class and the state of an object, as `copy` would use them.

    For objects of libraries, only the class counts, except arrays and objects from `VALUES`.
    """
    kind = type(value)
    with contextlib.suppress(Exception):  # some cannot be copied, such as locks
        if issubclass(kind, Array):
            array = np.asarray(value)
            plain = array.tolist() if array.dtype == object else array.tobytes()
            return [kind, str(array.dtype), array.shape, plain]
        if kind.__module__.lstrip("_") in VALUES or _module(kind.__module__) != kind.__module__:
            state = value.__reduce_ex__(4)
            return [kind, state, value.__module__ if isinstance(state, str) else ""]
    return [kind]


def _names(code: CodeType, operation: str) -> set[str]:
    """Return the global names that code loads, or the modules that it imports."""
    own = {each.argval for each in dis.get_instructions(code) if each.opname == operation}
    inner = (_names(each, operation) for each in code.co_consts if isinstance(each, CodeType))
    return own.union(*inner)


def _imported(name: str) -> Any:
    """Return the content of a module that code imports at call time."""
    with contextlib.suppress(ImportError, ValueError):
        spec = find_spec(name.partition(".")[0])
        if name not in sys.modules and spec is not None and spec.has_location:
            return _of_file(name, Path(spec.origin or ""))
    return _module(name)


def _module(name: str) -> Any:
    """Return the content of a loaded module, the name of a library module, or None for a script.

    A script contains more than the reward.
    """
    loaded = None if name == "__main__" else sys.modules.get(name)
    return _of_file(name, Path((loaded and vars(loaded).get("__file__")) or ""))


def _of_file(name: str, file: Path) -> Any:
    if name.partition(".")[0] in OURS or any(map(_is_of_packages, file.parents)):
        return name
    return _content(file) if file.is_file() else None  # in an archive


def _bytes(file: Path) -> str:
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


@cache
def _is_of_packages(folder: Path) -> bool:
    """Return whether pip installs into a folder: `site-packages`, or a `--target`."""
    if str(folder) in sys.path and folder != Path.cwd():
        return any(folder.glob("*.dist-info"))
    return folder.name in ("site-packages", "dist-packages")


def _content(file: Path) -> Any:
    """Return a digest of a file; for Python, its code and the code of local files it imports."""
    if file.suffix != ".py":
        return _bytes(file)
    texts: dict[Path, str] = {}
    left = [file.resolve()]
    for path in left:  # the list grows during the loop
        source = path.read_bytes()
        try:  # without comments and layout
            texts[path] = ast.unparse(ast.parse(source))
        except (SyntaxError, ValueError, RecursionError):  # the last: expressions of 1,000 terms
            texts[path] = source.decode(errors="replace")
        for dots, start, names in IMPORT.findall(texts[path]):
            for name in names.split(", "):
                parts = f"{start}.{name.split()[0]}".strip(".").split(".")
                stems = accumulate([] if parts[0] in OURS else parts, "{}/{}".format)
                ends = product(path.parents[max(0, len(dots) - 1) :], stems, ("", "/__init__"))
                near = (folder / f"{stem}{end}.py" for folder, stem, end in ends)
                left += [each for each in near if each.is_file() and each not in left]
    return [*texts.values()]

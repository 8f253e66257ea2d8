"""Sources of the rewards of a run: options and the code that they name, by digests.

Moving a file is no change, nor is another comment or layout in it. Files that a function reads,
installed packages that it imports, and models on servers and on the hub are not seen.
"""

import ast
import contextlib
import dis
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from hashlib import file_digest, sha256
from itertools import accumulate, product
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from tba.config.schema import Config
from tba.tasks._memory import Functions

UNUSED = {
    *("data", "split", "subset", "prompt_column", "answer_column", "train_size", "size", "seed"),
    *("held_out_data", "held_out_split", "held_out_size", "pass_reward", "gold", "weight", "chat"),
    *("prompt", "system_prompt", "shots", "shot_response", "max_turns"),
    *("max_prompt_tokens", "drop_duplicates"),
    *("deadline", "retries", "concurrency", "cache_size", "token_budget", "api_key"),
}
"""Options of our tasks and judges that change no reward of a given answer to a given prompt."""
OURS = {"tba", *sys.stdlib_module_names}
"""Packages that are compared by name, as installed ones are."""
IMPORT = re.compile(r"^ *(?:from (\.*)([\w.]*) )?import (.+)", re.MULTILINE)


def sources_of(config: Config, functions: Functions | None) -> dict[str, str]:
    """Return a digest of each option that decides the rewards of a run, by its key."""
    sources = dict(_digests("task", config.task.model_dump(), True))
    sources["sampling.truncated"] = digest(config.sampling.truncated)
    if functions is not None:
        sources["task.reward"] = digest(_meaning(functions, {}))
    return sources


def changed(now: Mapping[str, str], before: Mapping[str, str] | None) -> list[str]:
    """Return the names of the digests that differ; none if those before are not known."""
    return sorted({name for name, _ in now.items() ^ (now if before is None else before).items()})


def digest(value: Any) -> str:
    """Return a digest of plain JSON."""
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _digests(key: str, value: Any, is_ours: bool) -> Iterator[tuple[str, str]]:
    """Yield the digest of each option in a table, a list or a value."""
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
    """Return what a text stands for, with the content of the file, model or module it names."""
    where, _, name = text.rpartition(":")
    with contextlib.suppress(OSError, RuntimeError):  # of a text that cannot be a path
        path = Path(where if where.endswith(".py") else text).expanduser()
        if path.is_file():
            return [name if where.endswith(".py") else "", _content(path)]
        if (path / "config.json").is_file():
            return [[file.name, _content(file)] for file in sorted(path.glob("[!.]*.*"))]
    return [text, *map(_module, (where, text.rpartition(".")[0], text))]


def _meaning(value: Any, seen: dict[int, Any]) -> Any:
    """Return as JSON what decides the results of a function or an object from Python.

    It is the file of its module; in a script, its code, with what that uses of the script. Objects
    of other classes than the user's count by their class alone.
    """
    inner = partial(_meaning, seen=seen)
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, list | tuple):
        return [*map(inner, value)]
    if isinstance(value, dict | set | frozenset):
        return sorted(map(inner, value.items() if isinstance(value, dict) else value), key=repr)
    if isinstance(value, CodeType):
        return inner((value.co_code, value.co_names, value.co_varnames, value.co_consts))
    if isinstance(value, re.Pattern):
        return inner((value.pattern, value.flags))
    if isinstance(value, partial | MethodType):
        return inner(value.__reduce__())
    value = value if isinstance(value, FunctionType) else inspect.unwrap(value)  # of a cache
    if id(value) in seen:
        return "seen"
    seen[id(value)] = value  # it stays, so that no other object gets its id
    if isinstance(value, ModuleType):
        return [value.__name__, _module(value.__name__)]
    defined = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
    content = _module(str(defined.__module__))
    if defined is not value and content != defined.__module__:
        return inner((defined, value.__getstate__()))
    held: list[Any] = []
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        held = [value.__defaults__, value.__kwdefaults__, cells]
        if content is None:
            used = {n: x for n, x in value.__globals__.items() if n in _names(value.__code__)}
            held += [value.__code__, used]
    elif isinstance(value, type) and content is None:
        own = vars(value).items()
        members = {n: x for n, x in own if isinstance(x, FunctionType) or n[:2] != "__"}
        held = [value.__bases__, members]
    return [defined.__qualname__, content, inner(held)]


def _names(code: CodeType) -> set[str]:
    """Return the global names that code uses."""
    own = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    return own.union(*(_names(each) for each in code.co_consts if isinstance(each, CodeType)))


def _module(name: str) -> Any:
    """Return the content of a loaded module, the name of one of a library, and None for a script.

    A script has other things than a reward.
    """
    loaded = None if name == "__main__" else sys.modules.get(name)
    file = Path((loaded and vars(loaded).get("__file__")) or "")
    if name.partition(".")[0] in OURS or {"site-packages", "dist-packages"} & {*file.parts}:
        return name
    return _content(file) if file.name else None


def _content(file: Path) -> Any:
    """Return what a file says: of Python without its layout, with files near it that it imports."""
    if file.suffix != ".py":
        with file.open("rb") as opened:
            return file_digest(opened, "sha256").hexdigest()
    texts: dict[Path, str] = {}
    left = [file.resolve()]
    for path in left:  # it grows
        texts[path] = ast.unparse(ast.parse(path.read_bytes()))
        for dots, start, names in IMPORT.findall(texts[path]):
            for name in names.split(", "):
                parts = f"{start}.{name.split()[0]}".strip(".").split(".")
                stems = accumulate([] if parts[0] in OURS else parts, "{}/{}".format)
                ends = product(path.parents[max(0, len(dots) - 1) :], stems, ("", "/__init__"))
                near = (folder / f"{stem}{end}.py" for folder, stem, end in ends)
                left += [each for each in near if each.is_file() and each not in left]
    return [*texts.values()]

"""Sources of the rewards of a run: options and the code that they name, by digests.

Moving a file is no change, nor is another comment or layout in it. Files that a function reads,
modules that it imports and the weights of a model are not seen.
"""

import ast
import contextlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
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


def sources_of(config: Config, functions: Functions | None) -> dict[str, str]:
    """Return a digest of each option that decides the rewards of a run, by its key."""
    sources = dict(_digests("task", config.task.model_dump(), True))
    sources["sampling.truncated"] = _digest(config.sampling.truncated)
    if functions is not None:
        sources["task.reward"] = _digest([_source_of(each) for each in functions])
    return sources


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
        yield key, _digest(_meant(value) if isinstance(value, str) else value)


def _meant(text: str) -> Any:
    """Return what a text stands for, with the contents of the file or module that it names."""
    where, _, name = text.rpartition(":")
    with contextlib.suppress(OSError, RuntimeError):  # of a text that cannot be a path
        if where.endswith(".py") and Path(where).expanduser().is_file():
            return [name, _content(Path(where).expanduser())]
        if Path(text).expanduser().is_file():
            return _content(Path(text).expanduser())
    return [text, *map(_module, (where, text.rpartition(".")[0], text))]


def _source_of(function: Any) -> Any:
    """Return the source of a function from Python, or of the class of an object.

    Of a script, it is the function alone; of another module, the whole file. What the function uses
    and what the object holds do not count.
    """
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    defined = function if inspect.isroutine(function) else type(function)
    source = _module(defined.__module__)
    if source is None:
        with contextlib.suppress(OSError, TypeError):  # typed at a prompt, or written in C
            source = "".join(inspect.getsource(defined).split())
    return [defined.__qualname__, source]


def _module(name: str) -> str | None:
    """Return the content of a loaded module's file.

    None for a script, which has other things, and for what comes with Python or with this package.
    """
    package = name.partition(".")[0]
    if name not in sys.modules or package in {"__main__", "tba", *sys.stdlib_module_names}:
        return None
    file = vars(sys.modules[name]).get("__file__")
    return None if file is None else _content(Path(file))


def _content(file: Path) -> str:
    content = file.read_bytes()
    return ast.unparse(ast.parse(content)) if file.suffix == ".py" else sha256(content).hexdigest()


def _digest(value: Any) -> str:
    return sha256(json.dumps(value).encode()).hexdigest()[:16]

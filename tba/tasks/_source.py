"""Sources of the rewards of a run: code and options, by digests.

Moving a file is no change, nor is another comment or layout. Files that a function reads, modules
that it imports and the weights of a model are not seen.
"""

import ast
import contextlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import sha256
from importlib.metadata import version
from numbers import Number
from pathlib import Path, PurePath
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from tba.config.schema import Config
from tba.tasks._memory import Functions

UNUSED = {
    *("data", "split", "subset", "prompt_column", "answer_column", "train_size", "size", "seed"),
    *("held_out_data", "held_out_split", "held_out_size", "pass_reward", "gold", "weight", "chat"),
    *("prompt", "system_prompt", "shots", "shot_response", "max_turns"),
    *("max_prompt_tokens", "drop_duplicates"),
    *("deadline", "retries", "concurrency", "cache_size", "token_budget", "api_key_env"),
}
"""Options of our tasks and judges that change no reward of a given answer to a given prompt."""
WRAPPERS: Any = (type(cache(len)), staticmethod, classmethod)


@dataclass(frozen=True)
class RewardSource:
    """Code and options that decide rewards."""

    options: dict[str, str] = field(default_factory=dict)
    """Digest of each option, by its key."""
    files: dict[str, str] = field(default_factory=dict)
    """Name of each file with code, by its digest."""

    def changed(self, before: "RewardSource") -> list[str]:
        """Return the keys of the options and the names of the files that differ."""
        keys = {key for key, _ in self.options.items() ^ before.options.items()}
        names = {**before.files, **self.files}
        return sorted(keys) + sorted({names[d] for d in self.files.keys() ^ before.files.keys()})

    def add(self, key: str, value: Any) -> None:
        """Add an option: a table, a value, or the name of a function, a class, a file, a model."""
        if isinstance(value, Mapping):
            use = value.get("use", "")
            is_ours = use.isidentifier()
            if is_ours and use not in ("custom", "mixture"):  # which leave scoring to others
                self.options["the version of tba"] = version("tba")
            for name, inner in value.items():
                if name not in UNUSED or not (is_ours or key == "task"):
                    self.add(f"{key}.{name}", inner)
        elif isinstance(value, list):
            for i, inner in enumerate(value):
                self.add(f"{key}.{i}" if len(value) > 1 else key, inner)
        else:
            self.options[key] = _digest(self._meant(value) if isinstance(value, str) else value)

    def add_memory(self, key: str, functions: Any) -> None:
        """Add functions that were passed from Python."""
        self.options[key] = _digest(self._used(functions, {}))

    def _meant(self, text: str) -> str:
        """Return what a text stands for, and add the file of the code that it names."""
        where, _, name = text.rpartition(":")
        with contextlib.suppress(OSError, RuntimeError):  # of a text that cannot be a path
            if where.endswith(".py") and Path(where).expanduser().is_file():
                self._add_code(Path(where).expanduser())
                return name
            if Path(text).expanduser().is_file():
                return sha256(Path(text).expanduser().read_bytes()).hexdigest()
        for module in (where, text.rpartition(".")[0], text):
            self._add_module(module)
        return text

    def _add_module(self, name: str) -> None:
        """Add the file of a loaded module, but not of a script, which has other things in it."""
        if name in sys.modules and name != "__main__" and not name.startswith("tba."):
            file = vars(sys.modules[name]).get("__file__")
            if file is not None:
                self._add_code(Path(file))

    def _add_code(self, path: Path) -> None:
        code = path.read_bytes()
        is_text = path.suffix == ".py"  # else an extension in C
        self.files[_digest(ast.unparse(ast.parse(code)) if is_text else repr(code))] = path.name

    def _used(self, value: Any, seen: dict[int, Any]) -> Any:
        """Return as JSON the code of a function from Python and what it uses; add its file.

        Of an object, its class and what it holds count; of an object of a library, its class.
        """
        if isinstance(value, str | bytes | None | Number | range | PurePath | re.Pattern):
            return repr(value)
        if id(value) in seen:
            return "seen"
        seen[id(value)] = value
        if isinstance(value, list | tuple):
            return [self._used(each, seen) for each in value]
        if isinstance(value, dict | set | frozenset):
            items = value.items() if isinstance(value, dict) else value
            return sorted(json.dumps(self._used(item, seen)) for item in items)
        if isinstance(value, partial):
            return self._used([value.func, value.args, value.keywords], seen)
        if isinstance(value, MethodType):
            return self._used([value.__func__, value.__self__], seen)
        if isinstance(value, WRAPPERS):
            return self._used(value.__wrapped__, seen)
        if isinstance(value, CodeType):
            return self._used([value.co_code, value.co_names, value.co_consts], seen)
        if isinstance(value, ModuleType):
            return value.__name__
        if not isinstance(value, FunctionType):
            kind = value if isinstance(value, type) else type(value)
            used: list[Any] = [kind.__qualname__]
            if kind.__module__ != "__main__":
                self._add_module(kind.__module__)
                return used
            own = [vars(each) for each in kind.__mro__ if each.__module__ == "__main__"]
            used += [(n, v) for of in own for n, v in of.items() if n[:2] != "__" or callable(v)]
            if value is not kind and kind.__dictoffset__:
                used.append(vars(value))
            return self._used(used, seen)
        closure = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        parts: list[Any] = [value.__name__, value.__defaults__, value.__kwdefaults__, closure]
        if value.__module__ == "__main__":
            names = sorted(_names(value.__code__))
            parts += [value.__code__, [value.__globals__.get(name) for name in names]]
        self._add_module(value.__module__)
        return self._used(parts, seen)


def source_of(config: Config, functions: Functions | None) -> RewardSource:
    """Return what decides the rewards of a run."""
    source = RewardSource()
    source.add("task", config.task.model_dump())
    source.add("sampling.truncated", config.sampling.truncated)
    if functions is not None:
        source.add_memory("task.reward", functions)
    return source


def _names(code: CodeType) -> set[str]:
    """Return the names that code uses, with the code of functions within it."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _digest(value: Any) -> str:
    return sha256(json.dumps(value).encode()).hexdigest()[:16]

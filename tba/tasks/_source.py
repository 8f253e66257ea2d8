"""Sources of the rewards of a run: code and options, by digests.

Moving a file is no change, nor is another comment or layout. Files that a function reads, packages
that it imports and the weights of a model are not seen.
"""

import ast
import contextlib
import json
import re
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import sha256
from importlib.metadata import version
from modulefinder import ModuleFinder
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
LIBRARY = Path(sysconfig.get_path("stdlib"))
PACKAGE = Path(__file__).parents[1]


class _LocalModules(ModuleFinder):
    """Finder that passes over packages without `__init__.py`, which `ModuleFinder` cannot read."""

    def find_module(self, name: str, path: Any, parent: Any = None) -> Any:
        try:
            return super().find_module(name, path, parent)
        except AttributeError as error:
            raise ImportError(f"{name} has no __init__.py") from error


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

    def _meant(self, text: str) -> Any:
        """Return what a text stands for, and add the code that it names."""
        where, _, name = text.rpartition(":")
        with contextlib.suppress(OSError, RuntimeError):  # of a text that cannot be a path
            if where.endswith(".py") and Path(where).expanduser().is_file():
                self._add_code(Path(where).expanduser())
                return name
            if Path(text).expanduser().is_file():
                return sha256(Path(text).expanduser().read_bytes()).hexdigest()
        for module in (where, text.rpartition(".")[0], text):
            if module in sys.modules and self._add_module(module):
                return text[len(module) :]
        return text

    def _add_module(self, name: str) -> bool:
        """Add the file of a loaded module; return False, and add nothing, for a library."""
        file = vars(sys.modules[name]).get("__file__")
        if file is None or _is_library(Path(file)):
            return False
        self._add_code(Path(file), name)
        return True

    def _add_code(self, path: Path, name: str = "") -> None:
        """Add a file, as a module of this name if any, and the user's modules that it imports."""
        top = path.resolve().parents[name.count(".") + (path.stem == "__init__")]
        folders = [str(top), *(folder for folder in sys.path if not _is_library(Path(folder)))]
        finder: Any = _LocalModules(folders, excludes=["tba"])
        with contextlib.suppress(ImportError):  # of a package without __init__.py: the file alone
            finder.import_hook(name) if "." in name else finder.run_script(str(path))
        files = {module.__file__ for module in finder.modules.values() if module.__file__}
        for file in map(Path, {str(path), *files}):
            code = file.read_bytes()
            is_text = file.suffix == ".py"  # else an extension in C
            self.files[_digest(ast.unparse(ast.parse(code)) if is_text else repr(code))] = file.name

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
        named = value if isinstance(value, FunctionType | type | ModuleType) else type(value)
        module = named.__name__ if isinstance(named, ModuleType) else named.__module__
        has_file = module != "__main__" and module in sys.modules
        is_library = has_file and not self._add_module(module)
        if isinstance(value, ModuleType):
            return value.__name__
        if not isinstance(value, FunctionType):
            kind = value if isinstance(value, type) else type(value)
            own = [vars(each) for each in kind.__mro__ if each.__module__ == "__main__"]
            used: list[Any] = [kind.__name__]
            used += [
                (n, v) for each in own for n, v in each.items() if n[:2] != "__" or callable(v)
            ]
            if not is_library and value is not kind and kind.__dictoffset__:
                used.append(vars(value))
            return self._used(used, seen)
        closure = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        parts: list[Any] = [value.__name__, value.__defaults__, value.__kwdefaults__, closure]
        if not has_file:
            names = sorted(_names(value.__code__))
            parts += [value.__code__, [value.__globals__.get(name) for name in names]]
        return self._used(parts, seen)


def source_of(config: Config, functions: Functions | None) -> RewardSource:
    """Return what decides the rewards of a run."""
    source = RewardSource()
    source.add("task", config.task.model_dump())
    source.add("sampling.truncated", config.sampling.truncated)
    if functions is not None:
        source.add_memory("task.reward", functions)
    return source


def _is_library(path: Path) -> bool:
    """Return whether a file or a folder is Python's own, this package's, or installed by pip."""
    installed = [Path(each) for each in sys.path if next(Path(each).glob("*.dist-info"), None)]
    folders = (PACKAGE, LIBRARY, *installed)
    return any(path.resolve().is_relative_to(folder.resolve()) for folder in folders)


def _names(code: CodeType) -> set[str]:
    """Return the names that code uses, with the code of functions within it."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _digest(value: Any) -> str:
    return sha256(json.dumps(value).encode()).hexdigest()[:16]

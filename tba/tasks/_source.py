"""What decides the rewards of a run: code, options and models, by digests of their contents.

Moving a file is no change, nor is another comment or layout. Files that a function reads and the
packages that it imports are not seen.
"""

import ast
import importlib.util
import inspect
import json
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from tba.config.schema import Config
from tba.tasks._memory import InMemory

UNUSED = {
    *("data", "split", "subset", "prompt_column", "answer_column", "train_size", "size", "seed"),
    *("held_out_data", "held_out_split", "held_out_size", "pass_reward", "gold", "weight", "chat"),
    *("prompt", "system_prompt", "shots", "shots_data", "shot_response", "max_turns"),
    *("max_prompt_tokens", "drop_duplicates"),
    *("deadline", "retries", "concurrency", "token_budget", "api_key_env"),
}
"""Options of our tasks and judges that change no reward of a given answer to a given prompt."""
OURS, LIBRARY = Path(__file__).parents[1], sysconfig.get_path("stdlib")
BLOCK, BLOCKS = 2**20, 64
"""Bytes of a block, and about how many blocks are read of a larger file."""


@dataclass(frozen=True)
class RewardSource:
    """What decides rewards."""

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
            ours = use.isidentifier()
            if ours and use not in ("custom", "mixture"):  # which leave scoring to others
                self.options["the version of tba"] = version("tba")
            for name, inner in value.items():
                if name not in UNUSED or not (ours or key == "task"):
                    self.add(f"{key}.{name}", inner)
        elif isinstance(value, list):
            for i, inner in enumerate(value):
                self.add(f"{key}.{i}" if len(value) > 1 else key, inner)
        else:
            self.options[key] = _digest(self._meant(value) if isinstance(value, str) else value)

    def add_memory(self, key: str, functions: Any) -> None:
        """Add functions that were passed from Python."""
        self.options[key] = _digest(self._held(functions, {}))

    def _meant(self, text: str) -> Any:
        """Return what a text stands for, and add the code that it names."""
        where, _, name = text.rpartition(":")
        if where.endswith(".py") and Path(where).expanduser().is_file():
            self._add_file(Path(where).expanduser())
            return name
        path = Path(text).expanduser()
        if text and path.is_file():
            return _of_file(path)
        if text and (path / "config.json").is_file():  # a model
            return sorted([file.name, _of_file(file)] for file in path.iterdir() if file.is_file())
        for module in (where, text.rpartition(".")[0], text):
            if module in sys.modules and self._add_module(module):
                return text[len(module) :]
        return text

    def _add_module(self, name: str) -> bool:
        """Add the file of a module, unless it is of a library; for our own, the version.

        Return whether there is a file to add.
        """
        try:
            top, spec = (importlib.util.find_spec(n) for n in (name.partition(".")[0], name))
        except (ImportError, ValueError, AttributeError):  # such as a name within a module
            return False
        if top is None or spec is None or not (top.has_location and top.origin and spec.origin):
            return False
        path = Path(top.origin).resolve()
        if path.is_relative_to(OURS):
            self.options["the version of tba"] = version("tba")
        elif not (path.is_relative_to(LIBRARY) or "site-packages" in path.parts):
            self._add_file(Path(spec.origin), spec.parent or "")
            return True
        return False

    def _add_file(self, path: Path, package: str = "") -> None:
        """Add a file with code, and the local modules that it imports."""
        tree = ast.parse(path.read_bytes())
        digest = _digest(ast.unparse(tree))
        if digest in self.files:
            return
        self.files[digest] = path.name
        for node in ast.walk(tree):
            origin = ""
            if isinstance(node, ast.ImportFrom):
                origin = node.module or ""
                if node.level and package:
                    origin = importlib.util.resolve_name("." * node.level + origin, package)
                self._add_module(origin)
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    self._add_module(f"{origin}.{alias.name}".lstrip("."))

    def _held(self, value: Any, seen: dict[int, Any]) -> Any:
        """Return as JSON what an object from Python does and holds; add the files with its code."""
        again = partial(self._held, seen=seen)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor) and not value.is_sparse:
            value = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        if isinstance(value, bytes):
            return sha256(value).hexdigest()
        if isinstance(value, int | float | str | None):
            return repr(value)
        if id(value) in seen:
            return "seen"
        seen[id(value)] = value
        if isinstance(value, list | tuple):
            return [again(each) for each in value]
        if isinstance(value, Mapping | set | frozenset):
            inner = value.items() if isinstance(value, Mapping) else value
            return sorted(json.dumps(again(each)) for each in inner)
        if isinstance(value, CodeType):
            return again([value.co_code, value.co_names, value.co_consts])
        if isinstance(value, FunctionType | ModuleType | type):
            name = value.__name__ if isinstance(value, ModuleType) else value.__module__
            has_file = name != "__main__" and name in sys.modules
            if has_file:
                self._add_module(name)
            parts: list[Any] = [value.__name__]
            if isinstance(value, FunctionType):
                cells = [c.cell_contents for c in value.__closure__ or () if c != CellType()]
                parts += [value.__defaults__, value.__kwdefaults__, cells]
                if not has_file:
                    used = {n: value.__globals__.get(n) for n in _names(value.__code__)}
                    parts += [value.__code__, used]
            elif isinstance(value, type) and not has_file:
                parts += [{n: v for n, v in vars(value).items() if n != "__firstlineno__"}]
                parts += value.__bases__
            return again(parts)
        try:  # the object's own code decides what is raised
            wrapped = inspect.unwrap(value)  # of functools.cache
            return again(value.__reduce_ex__(4) if wrapped is value else wrapped)
        except Exception:
            return repr(type(value))


def source_of(config: Config, memory: InMemory | None) -> RewardSource:
    """Return what decides the rewards of a run."""
    source = RewardSource()
    source.add("task", config.task.model_dump())
    source.add("sampling.truncated", config.sampling.truncated)
    if memory is not None and memory.reward is not None:
        source.add_memory("task.reward", memory.reward)
    return source


def _names(code: CodeType) -> set[str]:
    """Return the names that code uses, with the code of functions within it."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _of_file(path: Path) -> str:
    """Return a digest of a file; of a large one, of blocks from all over it."""
    size = path.stat().st_size
    digest = sha256(str(size).encode())
    with path.open("rb") as file:
        for start in range(0, size, max(BLOCK, size // BLOCKS)):
            file.seek(start)
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def _digest(value: Any) -> str:
    return sha256(json.dumps(value).encode()).hexdigest()[:16]

"""`Config`, the frozen and validated config of a run, and `load`, which reads one.

`[task]`, `[engine]`, `[objective]`, `[strategy]` and `[selection]` name a plug-in by `use`; their
other keys are its options. `tba list` lists all keys. This module does not import torch, so that
mistakes are reported at once.
"""

import json
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain
from math import ceil, inf
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from tba.config.hints import without_table
from tba.config.mistakes import refuse, relative_to, together
from tba.config.plugins import mistakes_in, resolved
from tba.config.rules import broken, rules_of_processes, rules_of_sizes, rules_of_sources
from tba.config.secrets import check_secrets
from tba.config.tables import PLUGGED, ConfigTables, Table

DEFAULT = Path(__file__).parent / "default.toml"  # three-digit addition on the CPU
NAMES_PLUGIN = {f"{table}.use" for table in PLUGGED}  # the keys that name a plug-in


def check_docstrings() -> None:
    """Raise ValueError if Python strips docstrings."""
    if sys.flags.optimize > 1:
        raise ValueError(
            "Python leaves out docstrings (PYTHONOPTIMIZE=2, or -OO), which transformers needs to"
            " load models; unset PYTHONOPTIMIZE, or set it to 1"
        )


class Tables(Table):
    """All tables of a TOML file. ValueError with one line for each mistake."""

    def __init__(self, /, **plain: Any):  # a file may have a table called `self`
        check_docstrings()
        check_secrets("", plain)
        try:
            super().__init__(**plain)
        except ValidationError as error:
            refuse(mistakes_in(type(self), plain, error.errors()))


class Config(Tables, ConfigTables):
    """The config of a whole run.

    Read one with `load`, or build it from tables:
    `Config(task="gsm8k", objective={"use": "tb", "beta": 0.01})`.
    """

    @model_validator(mode="before")
    @classmethod
    def with_defaults(cls, plain: Any) -> Any:
        """Accept `objective = "rloo"`, and `[objective] beta = 0.02` for the default objective.

        The default of `checkpoint.keep_best` depends on `eval.patience`, and the default of
        `policy.autocast` on `trainer.weights`.
        """
        if not isinstance(plain, Mapping):
            return plain
        complete = dict(plain)
        for name in PLUGGED:
            match complete.get(name):
                case str(use):
                    complete[name] = {"use": use}
                case Mapping() as table if name != "task":
                    complete[name] = {"use": cls.model_fields[name].default.use, **table}
        match complete.get("eval"), complete.get("checkpoint", {}):
            case {"patience": int()}, Mapping() as table:
                complete["checkpoint"] = {"keep_best": True, **table}
        match complete.get("trainer"), complete.get("policy", {}):
            case {"weights": "bf16"}, Mapping() as table:
                complete["policy"] = {"autocast": "bf16", **table}
        return complete

    @model_validator(mode="after")
    def fits_together(self) -> "Config":
        """Raise ValueError for settings that contradict each other."""
        rules = (rules_of_sizes(self), rules_of_processes(self), rules_of_sources(self.task))
        mistakes = broken(chain(*rules))
        if mistakes:
            together(partial(refuse, mistakes), partial(resolved, self, self.model_fields_set))
        return self

    @property
    def asynchronous(self) -> bool:
        """Return whether searchers run independently, and no step waits for a whole new batch."""
        r = self.runtime
        return r.use == "ray" and r.lag is None and (r.fresh or 0) < self.trainer.groups

    @property
    def fresh(self) -> int:
        """New groups that each step waits for; without `runtime.fresh`, 0 or a whole batch."""
        if self.runtime.searchers == 0:
            return 0
        if self.runtime.fresh is not None:
            return self.runtime.fresh
        return 0 if self.asynchronous else self.trainer.groups

    @property
    def first_fill(self) -> int:
        """Groups to wait for before the first step."""
        if self.runtime.searchers == 0:
            return 0
        return self.replay.first_fill or self.trainer.groups

    @property
    def max_reuse(self) -> float:
        """Maximum mean number of times that a sample is trained on; inf with a lag, or offline."""
        if self.runtime.searchers == 0 or self.runtime.lag is not None:
            return inf
        return self.runtime.max_reuse

    @property
    def reuse_window(self) -> int:
        """Number of steps over which `runtime.max_reuse` is averaged.

        With a long window, the trainer could use up its allowance on a few samples while an
        evaluation holds the searchers. The window covers two searches of each searcher, which may
        arrive at once: at least 20 steps, at most 50.
        """
        searches = 2 * self.runtime.most_searchers * self.runtime.prompts_per_task
        batches = searches * self.sampling.samples / self.trainer.batch_size
        return ceil(min(50, max(20, self.runtime.max_reuse * batches)))

    def nested(self) -> dict[str, Any]:
        """Return the config as plain tables, without keys that are None: TOML has no null."""
        tables = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        if self.run.epochs is not None:
            del tables["run"]["steps"]
        if "prompts" not in self.eval.model_fields_set:  # the default depends on the data
            del tables["eval"]["prompts"]
        return tables

    def within_epochs(self, prompts: int) -> "Config":
        """Return the config with `run.epochs` over `prompts` prompts converted to `run.steps`."""
        if self.run.epochs is None:
            return self
        steps = ceil(self.run.epochs * prompts / self.trainer.groups - 1e-9)
        tables = self.nested()
        run = self.run.model_copy(update={"steps": steps, "epochs": None})
        tables["run"] = {"steps": steps, "seed": run.seed}  # without a folder, as before the start
        return Config(**tables).model_copy(update={"run": run})


def load(
    path: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> Config:
    """Read a TOML file, or the config in a run's folder; apply `table.key=value` settings to it.

    `path` may also be a dict of tables. ValueError if keys or values are wrong: it names each of
    them and what to type.
    """
    if isinstance(overrides, str):
        raise ValueError(f"{overrides!r} is not a list of settings; write [{overrides!r}]")
    plain = read_tables({} if path is None else path)

    def override() -> None:
        override_all(plain, overrides)
        given = {setting.partition("=")[0].strip() for setting in overrides}
        held_out = plain.get("task", {}).get("held_out_size")
        if path == DEFAULT and "eval.prompts" not in given and isinstance(held_out, int):
            plain["eval"]["prompts"] = min(plain["eval"]["prompts"], held_out)

    config: Config
    _, config = together(override, lambda: Config(**plain))  # with the mistakes of both
    return config


def read_tables(path: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a TOML file or of the config in a run's folder, or a copy of a dict."""
    if not isinstance(path, str | Path | Mapping):
        raise ValueError(f"config is of type {type(path).__name__}; pass a dict or a path")
    if isinstance(path, Mapping):
        return deepcopy(dict(path))
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    is_json = file.suffix == ".json" and file.is_file()
    plain = read_json(file) if is_json else read_toml(file, "config")
    if "grid" in plain:
        raise ValueError(f"{file} is a study; type `tba sweep {file}`")
    return plain


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Read a TOML file; ValueError if it is missing, not TOML, or a config instead of a study."""
    if not path.is_file():
        raise ValueError(f"no such {what} file: {path}{relative_to(path)}")
    try:
        plain = tomllib.loads(path.read_text("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if what == "study" and "grid" not in plain and plain.keys() & ConfigTables.model_fields:
        raise ValueError(f"{path} is the config of a run, not a study; type `tba train {path}`")
    return plain


def read_json(path: Path) -> dict[str, Any]:
    """Read a table from a JSON file; ValueError, with the file's name, if it is damaged."""
    try:
        plain = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(plain, dict):
        raise ValueError(f"{path} is damaged: it does not hold a table")
    return plain


def override_all(plain: dict[str, Any], settings: Sequence[str]) -> None:
    """Apply each `table.key=value`, or `objective=rloo` for its `use`; non-TOML values are text.

    An empty value, `table.key=`, removes the key, so that its default applies.
    """
    values: dict[str, Any] = {}

    def read(setting: str) -> None:
        key, equals, text = (part.strip() for part in setting.partition("="))
        value: Any = text or None
        try:
            value = tomllib.loads(f"v = {text}")["v"] if text else None
        except tomllib.TOMLDecodeError:
            if re.match(r"[\[{\s]*{\s*[\w\"'-]+\s*=", text):  # it may hold a secret: not quoted
                raise ValueError(
                    "a table is written {use='f.py:make',x=1}; check its quotes and braces"
                ) from None
        check_secrets(key, value)  # first, so that no error quotes a secret
        if not equals or ("." not in key and key not in PLUGGED):
            hint = without_table(key, text) if equals else ""
            example = "`trainer.learning_rate=1e-4`; a config file comes first and ends in .toml"
            raise ValueError(f"{setting!r}: write `table.key=value`: {hint or example}")
        values[f"{key}.use" if key in PLUGGED else key] = value

    together(*(partial(read, each) for each in settings), partial(assign_all, plain, values))


def by_key(name: str, table: Any) -> dict[str, Any] | None:
    """Return the values of a table by `table.key`; None if it is not a table.

    A text in place of a plug-in's table is its `use`.
    """
    if isinstance(table, Mapping):
        return {f"{name}.{key}": value for key, value in table.items()}
    return {f"{name}.use": table} if name in PLUGGED else None


def assign_all(plain: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set each `table.key`; the value None removes a key.

    A key that names another plug-in drops the options of the previous one. Setting `run.steps`
    removes `run.epochs`, and vice versa.
    """
    others = {"run.steps": "run.epochs", "run.epochs": "run.steps"}
    taken_out = {others[name]: None for name in others if values.get(name) is not None}
    values = {**taken_out, **values}
    # Keys that name a plug-in come first, so that options given with them are kept.
    for key in sorted(values, key=lambda key: key not in NAMES_PLUGIN):
        *path, last = key.split(".")
        table = plain
        for name in path:
            inner = {} if table.get(name) is None else table[name]
            if name in PLUGGED and isinstance(inner, str):  # objective = "tb"
                inner = {"use": inner}
            if not isinstance(inner, dict):
                raise ValueError(f"{key} = {values[key]!r}: {name} is a value, not a table")
            table[name] = inner
            table = inner
        if key in NAMES_PLUGIN:
            own = Config.model_fields[path[0]].default
            before = Path(table.get("use", own.use))  # a name, or a function of a file
            if before.absolute() != Path(str(values[key])).absolute():
                for option in table.keys() - type(own).model_fields.keys():
                    del table[option]
        if values[key] is None:
            table.pop(last, None)
        else:
            table[last] = values[key]

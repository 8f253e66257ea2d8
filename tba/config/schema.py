"""`Config`, the frozen and validated config of a run, and `load`, which reads one.

`[task]`, `[engine]`, `[objective]`, `[strategy]` and `[selection]` name a plug-in by `use`; their
other keys are its options. `tba list` lists all keys. This module does not import
torch, so that a mistake is reported at once.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from math import ceil, inf
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError, model_validator
from pydantic.fields import FieldInfo

from tba.config import tables
from tba.config.errors import (
    check_docstrings,
    check_secrets,
    refuse,
    together,
)
from tba.config.tables import PLUGGED, Table, Use

DEFAULT = Path(__file__).parent / "default.toml"  # three-digit addition on the CPU
NAMES_PLUGIN = {f"{table}.use" for table in PLUGGED}  # the keys that name a plug-in

_OTHERS = tomllib.loads(Path(__file__).with_name("trl.toml").read_text("utf-8"))
"""Names of settings in other packages, as docs/from_trl.md has them."""
NEAREST: dict[str, str] = _OTHERS["nearest"]
"""What to type for objectives of other packages, by their names."""
PLACES: dict[str, list[str]] = _OTHERS["places"]
"""Names of settings in other packages, by the place of the same setting here."""
GONE: dict[str, str] = _OTHERS["gone"]
"""What to use instead of keys and tables of earlier versions."""
NONE = "none"
"""Beginning of the place of a setting without counterpart, before the reason if there is one."""
Rule = tuple[bool, str, str]
"""Whether a config breaks the rule, a setting, and what that setting needs."""


def inner_table(field: FieldInfo) -> type[Table] | None:
    """Return the table that a field holds, which may be optional; None if it holds a value."""
    for kind in get_args(field.annotation) or (field.annotation,):
        if isinstance(kind, type) and issubclass(kind, Table):
            return kind
    return None


class Tables(Table):
    """All tables of a TOML file. ValueError with one line for each mistake."""

    def __init__(self, **plain: Any):
        check_docstrings()
        check_secrets("", plain)
        try:
            super().__init__(**plain)
        except ValidationError as error:
            from tba.config.plugins import mistakes

            refuse(mistakes(type(self), plain, error.errors()))


class Config(Tables):
    """The config of a whole run.

    Read one with `load`, or build it from tables:
    `Config(task="gsm8k", objective={"use": "tb", "beta": 0.01})`.
    """

    run: tables.RunTable = tables.RunTable()
    policy: tables.PolicyTable = tables.PolicyTable()
    task: tables.TaskTable = tables.TaskTable()
    engine: tables.EngineTable = tables.EngineTable(use="transformers")
    sampling: tables.SamplingTable = tables.SamplingTable()
    objective: Use = Use(use="tb")
    strategy: Use = Use(use="mixture")
    selection: Use = Use(use="cyclic")
    replay: tables.ReplayTable = tables.ReplayTable()
    trainer: tables.TrainerTable = tables.TrainerTable()
    runtime: tables.RuntimeTable = tables.RuntimeTable()
    reward: tables.RewardTable = tables.RewardTable()
    eval: tables.EvalTable = tables.EvalTable()
    checkpoint: tables.CheckpointTable = tables.CheckpointTable()
    log: tables.LogTable = tables.LogTable()

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
        """Raise ValueError for settings that lack what they need of others."""
        rules = (*self._needs_of_sizes(), *self._needs_of_processes())
        broken = [f"{setting} needs {what}" for is_broken, setting, what in rules if is_broken]
        if broken:
            from tba.config.plugins import resolved

            refused = partial(refuse, [f"{e}: set that, or change the former" for e in broken])
            together(refused, partial(resolved, self, self.model_fields_set))
        return self

    def _needs_of_sizes(self) -> Iterator[Rule]:
        e = self.eval
        t = self.trainer
        k = t.group_size
        steps = self.run.steps
        epochs = self.run.epochs
        both_lengths = epochs is not None and "steps" in self.run.model_fields_set
        yield both_lengths, f"run.epochs = {epochs}", "run.steps unset"
        near = max(k, round(t.batch_size / k) * k)
        size = f"trainer.batch_size = {t.batch_size}"
        yield t.batch_size % k > 0, size, f"a multiple of group_size = {k}, such as {near}"
        samples = {
            "sampling.samples": self.sampling.samples,
            "replay.per_prompt": self.replay.per_prompt,
            "replay.capacity": self.replay.capacity,
        }
        for name, number in samples.items():
            yield number < k, f"trainer.group_size = {k}", f"{name}={k} or more"
        decay = t.decay(steps)
        decays = t.schedule == "warmup_stable_decay" and epochs is None
        both = f"trainer.warmup_steps = {t.warmup_steps} with decay_steps = {decay}"
        least = t.warmup_steps + decay
        yield decays and least > steps, both, f"run.steps={least} or more"
        most = max(e.k, default=1)
        yield most > e.samples, f"eval.k = {list(e.k)}", f"eval.samples={most} or more"
        yield e.patience is not None and not e.every, "eval.patience", "eval.every=50 or so"
        if self.checkpoint.keep_best and e.every:
            often = {
                "checkpoint.every": self.checkpoint.every,
                "runtime.publish_every": self.runtime.publish_every,
            }
            for name, every in often.items():
                fits = every > 0 and e.every % every == 0
                yield not fits, "checkpoint.keep_best", f"{name}={e.every}, or a divisor of it"

    def _needs_of_processes(self) -> Iterator[Rule]:
        r = self.runtime
        t = self.trainer
        is_local = r.use == "local"
        count = f"runtime.searchers = {r.searchers}"
        yield is_local and r.fresh == 0, "runtime.use = local", "runtime.fresh=1 or more"
        yield is_local and r.searchers not in (0, 1), count, "runtime.use=ray"
        yield r.searchers == 0 and not is_local, count, "runtime.use=local"
        yield r.searchers == 0 and not self.replay.rollouts, count, "replay.rollouts=FILE.jsonl"
        sleeps = r.colocate == "sleep"
        yield sleeps and not is_local, "runtime.colocate = sleep", "runtime.use=local"
        is_range = not isinstance(r.searchers, int)
        yield is_range and r.address is None, "a range of runtime.searchers", "runtime.address"
        yield is_range and r.lag is not None, "a range of runtime.searchers", "runtime.lag unset"
        lag = f"runtime.lag = {r.lag}"
        own_pace = r.fresh not in (None, t.groups)
        yield r.lag is not None and own_pace, lag, "runtime.fresh unset"
        yield r.lag is not None and r.publish_every != 1, lag, "runtime.publish_every=1"

        several = t.devices > 1
        ranks = f"trainer.devices = {t.devices}"
        yield several and is_local, ranks, "runtime.use=ray"
        yield several and t.optimizer != "adamw", ranks, "trainer.optimizer=adamw"
        yield several and t.compile, ranks, "trainer.compile=false"
        lora = self.policy.lora
        in_4_bits = lora is not None and lora.load_in_4bit
        yield in_4_bits and several, "policy.lora.load_in_4bit", "trainer.devices=1"
        yield in_4_bits and t.compile, "policy.lora.load_in_4bit", "trainer.compile=false"
        mixed = self.policy.autocast != "bf16"
        yield t.weights == "bf16" and mixed, "trainer.weights = bf16", "policy.autocast=bf16"
        whole = f"a group for each, so trainer.batch_size={t.devices * t.group_size} or more"
        yield several and t.devices > t.groups, ranks, whole
        yield t.fsdp is not None and not several, "trainer.fsdp", "trainer.devices above 1"

    @property
    def asynchronous(self) -> bool:
        """Return whether searchers run on their own, and no step waits for a whole new batch."""
        r = self.runtime
        return r.use == "ray" and r.lag is None and (r.fresh or 0) < self.trainer.groups

    @property
    def fresh(self) -> int:
        """New groups to wait for at each step; 0 when searchers run on their own, or none does."""
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
        """Most times that a sample is trained on, on average; no limit in lockstep or offline."""
        if self.runtime.searchers == 0 or self.runtime.lag is not None:
            return inf
        return self.runtime.max_reuse

    @property
    def reuse_window(self) -> int:
        """Steps over which `runtime.max_reuse` is an average.

        A long window would let the trainer use up its allowance on a few samples while an
        evaluation holds the searchers. It is as long as two searches of each searcher last, which
        may arrive at once: at least 20 steps, at most 50.
        """
        searches = 2 * self.runtime.most_searchers * self.runtime.prompts_per_task
        batches = searches * self.sampling.samples / self.trainer.batch_size
        return ceil(min(50, max(20, self.runtime.max_reuse * batches)))

    def nested(self) -> dict[str, Any]:
        """Return the config as plain tables, without keys that are None: TOML has no such value."""
        tables = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        if self.run.epochs is not None:
            del tables["run"]["steps"]
        return tables

    def within_epochs(self, prompts: int) -> "Config":
        """Return the config with `run.steps` for `run.epochs` over so many training prompts."""
        if self.run.epochs is None:
            return self
        steps = ceil(self.run.epochs * prompts / self.trainer.groups - 1e-9)
        tables = self.nested()
        del tables["run"]["epochs"]
        return Config(**{**tables, "run": {**tables["run"], "steps": steps}})


def load(
    path: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> Config:
    """Read a TOML file, or the config in a run's folder; apply `table.key=value` settings to it.

    A dict of tables takes the place of a file. ValueError if keys or values are wrong: it names
    each of them and what to type.
    """
    if isinstance(overrides, str):
        raise ValueError(f"{overrides!r} is not a list of settings; write [{overrides!r}]")
    plain = read_tables({} if path is None else path)
    config: Config = together(partial(override_all, plain, overrides), lambda: Config(**plain))[1]
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
    """Read a TOML file; ValueError if it does not exist or is not TOML."""
    if not path.is_file():
        raise ValueError(f"no such {what} file: {path}")
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a table from a JSON file; ValueError, which names the file, if it holds none."""
    try:
        plain = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(plain, dict):
        raise ValueError(f"{path} is damaged: it holds no table")
    return plain


def override_all(plain: dict[str, Any], settings: Sequence[str]) -> None:
    """Apply each `table.key=value`, or `objective=rloo` for its `use`; what is not TOML is text.

    An empty value, `table.key=`, takes the key out, so that its default holds.
    """
    values: dict[str, Any] = {}
    read = [partial(_read_setting, each, values) for each in settings]
    together(*read, partial(assign_all, plain, values))


def _read_setting(setting: str, values: dict[str, Any]) -> None:
    """Add the value of `table.key=value` to the values by `table.key`."""
    key, equals, text = (part.strip() for part in setting.partition("="))
    value = _value(text)
    check_secrets(key, value)  # first: no error quotes one
    if not equals or ("." not in key and key not in PLUGGED):
        hint = without_table(key, text) if equals else ""
        example = (
            "such as `trainer.learning_rate=1e-4`; a config file comes first and ends in .toml"
        )
        raise ValueError(f"{setting!r}: write `table.key=value`, {hint or example}")
    values[f"{key}.use" if key in PLUGGED else key] = value


def assign_all(plain: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set each `table.key`; the value None takes a key out.

    A key that names another plug-in drops the options of the previous one.
    Of `run.steps` and `run.epochs`, one that is set takes the place of the other.
    """
    others = {"run.steps": "run.epochs", "run.epochs": "run.steps"}
    taken_out = {others[name]: None for name in others if values.get(name) is not None}
    values = {**taken_out, **values}
    # Keys that name a plug-in go first, so that options given beside them stay.
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


def _value(text: str) -> Any:
    if not text:
        return None
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        if re.match(r"[\[{\s]*{\s*[\w\"'-]+\s*=", text):  # it may hold a secret: not quoted
            raise ValueError(
                "a table is written {use='f.py:make',x=1}; check its quotes and braces"
            ) from None
        return text


def counterpart(name: str) -> str | None:
    """Return what a setting of other packages is called here; None if the name is unknown."""
    for place, names in PLACES.items():
        if name in names:
            return place
    return NONE if name.startswith(tuple(_OTHERS["groups"])) else None


def elsewhere(where: str, options: Collection[str] | None = None) -> str:
    """Return in words what a key that is not in its table is called; "" if that is not known.

    `options` are those of the plug-in that the table names.
    """
    table, _, name = where.rpartition(".")
    if instead := GONE.get(where) or GONE.get(table):
        return f"it is gone; {instead}"
    place = counterpart(name)
    if place is None:
        place = " or ".join(_places().get(name, ()))
    if place.startswith(NONE):
        why = place.removeprefix(NONE)
        return f"{name} has no counterpart here{why}; docs/from_trl.md says more"
    if place == where and options is None:
        return f"write {name} into its table, {table}"
    own = place.removeprefix(f"{table}.")
    of_other_plugin = own != place and own.isidentifier() and own not in (options or ())
    if not place or (table in PLUGGED and of_other_plugin):
        return ""
    return f"{name} is {place} here"


def without_table(name: str, text: str) -> str:
    """Return what to write for `name=text`, which names no table; "" if that is not known."""
    places = _places()
    if name not in places and (words := elsewhere(name)):
        return words
    close = difflib.get_close_matches(name, places, n=1)
    meant = [f"`{place}={text}`" for place in places[close[0]]] if close else []
    return f"did you mean {' or '.join(meant)}?" if meant else ""


def _places() -> dict[str, list[str]]:
    """Return where each key of the config is, as `table.key`."""
    places: dict[str, list[str]] = {}
    for table, holder in Config.model_fields.items():
        inner = inner_table(holder)
        for key in inner.model_fields if inner else ():
            if key != "use":
                places.setdefault(key, []).append(f"{table}.{key}")
    return places

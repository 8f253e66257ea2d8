"""Checks of a command that need no PyTorch (its import takes seconds), and the config of a run."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tba.config.mistakes import together
from tba.config.plugins import resolved
from tba.config.schema import Config, assign_all, by_key, override_all, read_tables
from tba.config.tables import PLUGGED, PolicyTable
from tba.models import model_path
from tba.runs.folder import (
    SUMMARY,
    check_unused,
    check_usable,
    read_config,
    read_optional,
    resumes,
)
from tba.tasks._memory import InMemoryData, build_task

SHARED = Path("/dev/shm")
"""Folder of shared memory."""
SOCKET = "/tba-12345678/ray/session_2026-01-01_00-00-00_000000_/sockets/plasma_store"
"""Socket of a private Ray under the temporary folder, without the process id at the end."""
LONGEST = 107
"""Maximum length of a socket path in bytes."""
LONGEST_NAME = 255
"""Maximum length of a file name in bytes."""
VOCABULARY = re.compile("token|vocab|merges|piece")
"""Part of the name of a tokenizer file."""
VALUES = "objective.step_tokens"


def placed(config: Config) -> Config:
    """Return the config with absolute paths, the run folder, and the folder of its start.

    Also adds the start folder to `sys.path`, before the current folder.
    """
    start = config.run.base or str(Path.cwd())
    if start not in sys.path:  # before the current folder, whose modules may have the same names
        here = ("", str(Path.cwd()))
        place = next((i for i, each in enumerate(sys.path) if each in here), len(sys.path))
        sys.path.insert(place, start)
    tables = config.model_dump(exclude_unset=True, by_alias=True)
    for name in tables.keys() & {"policy", "replay", *PLUGGED}:
        tables[name] = _absolute(name, tables[name])
    default = f"runs/{config.task.use}-{config.objective.use}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = Path(config.run.folder or default).expanduser().absolute()
    tables["run"] = {**tables.get("run", {}), "folder": str(folder), "base": start}
    return Config(**tables)


def _absolute(key: str, value: Any) -> Any:
    """Return a config value with existing paths made absolute."""
    if isinstance(value, Mapping):
        remote = {"model"} if "url" in value else set()  # the server's name for the model
        return {n: v if n in remote else _absolute(str(n), v) for n, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_absolute(key, inner) for inner in value])
    if not isinstance(value, str):
        return value
    file, colon, function = value.rpartition(":")
    if not file.endswith(".py"):
        if key == "use":  # the name of a plug-in
            return value
        file = value
        colon = function = ""
    is_written = re.search(r"\w[/.]|[/.]\w", file) or key.endswith(("model", "data", "from"))
    if not is_written or len(file.encode()) > LONGEST_NAME:
        return value
    path = Path(file).expanduser()
    return f"{path.absolute()}{colon}{function}" if path.exists() else value


def check_start(config: Config, resume: Path | None, passed: InMemoryData | None = None) -> None:
    """Raise ValueError if a run cannot start, before PyTorch is imported."""
    folder = Path(config.run.folder) if resume is None else resume
    if resume is not None:
        read_config(resume)
    check_usable(folder)
    if resume is None:
        check_unused(folder)
    if config.runtime.use == "ray" and config.runtime.address is None:
        name = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR"
        temporary = Path(os.environ.get(name) or "/tmp").absolute()
        advice = "set RAY_TMPDIR=/tmp in the environment, or runtime.use=local"
        excess = len(os.fsencode(f"{temporary}{SOCKET}{os.getpid()}")) - LONGEST
        if excess > 0:
            raise ValueError(
                f"{name} = {str(temporary)!r} is {excess} bytes too long for sockets of Ray;"
                f" {advice}"
            )
        _check_writable(temporary, f"{name} = {str(temporary)!r}", advice)
        if SHARED.exists():  # otherwise Ray uses its folder
            advice = "mount a tmpfs there, or set runtime.use=local"
            _check_writable(SHARED, f"shared memory for Ray, {SHARED},", advice)
    check_config(config, passed, folder)


def tell_finished(run: Path, config: Config) -> bool:
    """Return whether the run to resume has already done all of its steps; if so, print a line."""
    summary = read_optional(run / SUMMARY) or {}
    before = read_config(run).run
    is_longer = (config.run.steps, config.run.epochs) != (before.steps, before.epochs)
    if is_longer or not summary.get("finished") or summary.get("ended"):
        return False
    more = resumes(run, f"run.steps={2 * summary['steps']}")
    print(f"{run} has finished all of its {summary['steps']} steps; for more, type `{more}`")
    return True


def check_config(config: Config, passed: InMemoryData | None = None, folder: Path = Path()) -> None:
    """Raise ValueError for an invalid model, plug-in, option or reward function."""
    if passed is not None:
        config = passed.named_in(config, folder)
    functions = None if passed is None else passed.functions
    together(
        partial(_check_model, config),
        partial(resolved, config, config.model_fields_set),
        partial(build_task, config.task, functions),
    )


def check_evaluated(model: str, config: Config) -> None:
    """Raise ValueError if a model (not a run folder) cannot be evaluated with this config."""
    if "task" not in config.model_fields_set:
        raise ValueError(
            f"{model} is not the folder of a run, and a model needs a config with [task]:"
            f" type `tba eval {model} run.toml`"
        )
    if (Path(model).expanduser() / "adapter_config.json").is_file():
        raise ValueError(
            f"{model} is an adapter; evaluate the whole model, which `tba export RUN FOLDER` writes"
        )
    policy = config.policy.model_copy(update={"model": model})
    check_config(config.model_copy(update={"policy": policy}))


def check_export(run: Path, out: Path, adapter: bool) -> PolicyTable:
    """Return the run's policy table; ValueError if the model cannot be exported to `out`."""
    check_usable(out, key="FOLDER")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; choose a new folder")
    policy = read_config(run).policy
    if policy.lora is None and adapter:
        raise ValueError(f"{run} was trained without policy.lora; leave out --adapter")
    return policy


def check_new_file(run: Path, out: Path) -> None:
    """Raise ValueError unless `run` is a run folder, and `out` can be created as a new file."""
    read_config(run)
    check_usable(out.parent, key="the folder of the file")
    if out.exists():
        raise ValueError(f"{out} exists; choose a new file, such as responses.jsonl")


def _check_writable(folder: Path, named: str, advice: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder):
            pass
    except OSError as error:
        why = error.strerror or error
        raise ValueError(f"{named} cannot be written to: {why}; {advice}") from error


def _check_model(config: Config) -> None:
    """Raise ValueError if no model is named, or its folder contains no tokenizer."""
    if "model" not in config.policy.model_fields_set and config.task.use != "arithmetic":
        raise ValueError(
            f"policy.model is missing: name the model to train on task.use = {config.task.use!r},"
            " such as policy.model=HuggingFaceTB/SmolLM2-135M-Instruct; the default,"
            " bundled:arithmetic, can only add"
        )
    folder = Path(model_path(config.policy.model))
    if folder.is_dir() and not any(VOCABULARY.search(file.name) for file in folder.iterdir()):
        raise ValueError(
            f"policy.model = {str(folder)!r}: the folder has a model, but no tokenizer; save it"
            " there with tokenizer.save_pretrained"
        )


def stored_config(
    run: Path,
    settings: Sequence[str] = (),
    given: Config | Mapping[str, Any] | str | Path | None = None,
) -> Config:
    """Return the config of a run, overridden by the `given` tables and then by the settings.

    Their paths are relative to the current folder. A given config that sets all tables, such as one
    loaded from a run, replaces the stored config. Paths of the run folder, and of rows passed from
    Python in it, are updated to where the run is now.
    """
    stored = read_config(run)
    tables = stored.nested()
    if stored.eval.patience is None and not stored.checkpoint.keep_best:
        del tables["checkpoint"]["keep_best"]  # its default depends on eval.patience
    if not isinstance(given, Config):
        _lay_over(tables, read_tables({} if given is None else given))
    elif given.model_fields_set < Config.model_fields.keys():
        changes = given.model_dump(exclude_unset=True, by_alias=True)
        for name in PLUGGED.keys() & changes.keys():
            default = Config.model_fields[name].default.use
            if changes[name]["use"] == default != tables[name]["use"]:
                raise ValueError(
                    f"{name}.use is {default!r} in this Config, maybe by default, and"
                    f" {tables[name]['use']!r} in the run; pass a dict of the tables to change"
                )
        _lay_over(tables, changes)
    else:
        tables = given.nested()
    override_all(tables, settings)
    here = {"run.folder": str(run.resolve())}
    for option in ("data", "held_out_data"):
        file = f"{option}.jsonl"
        if tables["task"].get(option) == str(Path(stored.run.folder).resolve() / file):
            here[f"task.{option}"] = str(run.resolve() / file)
    assign_all(tables, here)
    return placed(Config(**tables))


def _lay_over(plain: dict[str, Any], tables: Mapping[str, Any]) -> None:
    """Set each key of these tables, like `assign_all`."""
    values: dict[str, Any] = {}
    for name, table in tables.items():
        own = by_key(name, table)
        if own is None:
            raise ValueError(f"{name} = {table!r}: write a table")
        values |= own
    lora = values.pop("policy.lora", None)
    if isinstance(lora, Mapping):
        values |= {f"policy.lora.{key}": value for key, value in lora.items()}
    elif lora is not None:
        values["policy.lora"] = lora
    assign_all(plain, values)


def check_resumed(config: Config, before: Config) -> None:
    """Raise ValueError for a change that invalidates the replay buffer or the optimizer state."""
    then = _decisive(before)
    changes = []
    for key, value in _decisive(config).items():
        is_unused = key in (VALUES, "replay.rollouts") and value is None
        if value != then[key] and not is_unused:
            changes.append(f"{key} = {value}, but the run has {then[key]}")
    if changes:
        raise ValueError(f"{'; '.join(changes)}; leave it unchanged, or start a new run")


def _decisive(config: Config) -> dict[str, Any]:
    """Return the settings that determine the contents of the replay buffer and optimizer state."""
    objective = resolved(config, ["objective"])[0].at(0)
    lora = config.policy.lora
    return {
        "sampling.stop": sorted(set(config.sampling.stop)),
        "sampling.temperature": config.sampling.temperature,
        "policy.eos_token": config.policy.eos_token,
        "policy.lora": lora and lora.model_dump(by_alias=True, exclude_none=True),
        "policy.chat_template_kwargs": config.policy.chat_template_kwargs,
        "the head of objective.use": objective.head and objective.head.on,
        "trainer.optimizer": config.trainer.optimizer,
        "trainer.weights": config.trainer.weights,
        "replay.rollouts": config.replay.rollouts,
        VALUES: objective.value_rollouts and objective.value_rollouts.step_tokens,
    }


def check_step(step: int, config: Config) -> None:
    """Raise ValueError if the run is past `run.steps`."""
    steps = config.run.steps
    if step > steps:
        raise ValueError(
            f"run.steps = {steps}, but the run is at step {step}; set run.steps={step} or more"
        )

"""Checks of a command that need no PyTorch, whose import takes seconds."""

import os
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from tba.config.plugins import check_unimported, resolve
from tba.config.schema import Config
from tba.config.tables import PLUGGED, LogTable, PolicyTable, Use
from tba.models import model_path
from tba.runs.journal import check_wandb
from tba.runs.lock import check_usable
from tba.runs.log import check_unused, folder_of
from tba.runs.resumed import config_of
from tba.tasks._data import is_path
from tba.tasks._memory import InMemory, build_task, with_memory

SMALL = 20e6
"""Most bytes of data that are read twice, to find mistakes in them early."""
IMPORT_TORCH = ("objectives", "engines")
SOCKET = "/tba-12345678/ray/session_2026-01-01_00-00-00_000000_/sockets/plasma_store"
"""Socket of a private Ray below the temporary folder, without the process id at its end."""
LONGEST = 107
"""Bytes of the longest path of a socket."""
VOCABULARIES = ("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model")


def check_start(config: Config, resume: Path | None, memory: InMemory | None = None) -> None:
    """Raise ValueError for a mistake in what a run needs, before PyTorch is imported."""
    if resume is None:
        check_usable(folder := folder_of(config))
        check_unused(folder)
    else:
        config_of(resume)
        check_usable(resume)
    check_log(config.log)
    if config.runtime.use == "ray" and config.runtime.address is None:
        _check_temporary_folder()
    check_config(config, memory)


def check_config(config: Config, memory: InMemory | None = None) -> None:
    """Check models, plug-ins and their options, reward functions, and data of moderate size."""
    named = "model" in config.policy.model_fields_set
    config = with_memory(config, memory)
    _check_folder(model_path(config.policy.model))
    for table, kind in PLUGGED.items():
        given: Use = getattr(config, table)
        if kind in IMPORT_TORCH:
            check_unimported(kind, table, given.use, given.options)
        else:
            resolve(kind, table, given.use, given.options)
    if not named and config.task.use != "arithmetic":
        raise ValueError(
            f"policy.model is missing: name the model to train on task.use = {config.task.use!r},"
            " such as policy.model=HuggingFaceTB/SmolLM2-135M-Instruct; the default,"
            " bundled:arithmetic, can only add"
        )
    task = build_task(resolve("tasks", "task", config.task.use, config.task.options), memory)
    sources = [config.task.options.get(key) for key in ("data", "held_out_data")]
    if any(sources) and all(_is_small(source) for source in sources if source is not None):
        task.prompts()
        task.held_out()


def check_evaluated(model: str, config: Config) -> None:
    """Raise ValueError if a model, which is no run, cannot be evaluated by this config."""
    if "task" not in config.model_fields_set:
        raise ValueError(
            f"{model} is not the folder of a run, and a model needs a config with [task]:"
            f" type `tba eval {model} run.toml`"
        )
    if not (Path(model).expanduser() / "adapter_config.json").is_file():
        policy = config.policy.model_copy(update={"model": model})
        check_config(config.model_copy(update={"policy": policy}))


def check_export(
    run: Path, out: Path | None, adapter: bool, name: str | None = None, private: bool = False
) -> PolicyTable:
    """Return the run's policy; ValueError if it cannot be written there, or uploaded as `name`."""
    if name is None and out is None:
        raise ValueError(f"give a new folder, `tba export {run} FOLDER`, or --push-to-hub NAME")
    if name is None and private:
        raise ValueError("--private is for --push-to-hub NAME")
    if out is not None:
        check_usable(out, key="FOLDER")
        if out.exists() and any(out.iterdir()):
            raise ValueError(f"{out} is not empty; choose a new folder")
    policy = config_of(run).policy
    if policy.lora is None and adapter:
        raise ValueError(f"{run} was trained without policy.lora; leave out --adapter")
    return policy


def check_responses(run: Path, out: Path) -> None:
    """Raise ValueError unless the folder is one of a run, and a new file can be written there."""
    config_of(run)
    check_usable(out.parent, key="the folder of the file")
    if out.exists():
        raise ValueError(f"{out} exists; choose a new file, such as responses.jsonl")


def check_log(table: LogTable) -> None:
    """Raise ValueError for a service that is not installed, or that refuses."""
    for name, wanted in (("wandb", table.wandb), ("trackio", table.trackio)):
        if wanted and find_spec(name) is None:
            advice = f"pip install -e '.[{name}]', or set log.{name}=false"
            raise ValueError(f"log.{name} = true needs the package {name}: {advice}")
    if table.wandb:
        check_wandb()


def _check_temporary_folder() -> None:
    """Raise ValueError if Ray cannot make its folder or its sockets there."""
    name = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR"
    folder = Path(os.environ.get(name) or "/tmp").absolute()
    advice = "set RAY_TMPDIR=/tmp in the environment, or runtime.use=local"
    longest = len(os.fsencode(f"{folder}{SOCKET}{os.getpid()}"))
    if longest > LONGEST:
        raise ValueError(
            f"{name} = {str(folder)!r} is {longest - LONGEST} bytes too long for sockets of Ray;"
            f" {advice}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder):
            pass
    except OSError as error:
        why = error.strerror or error
        raise ValueError(
            f"{name} = {str(folder)!r} cannot be written to: {why}; {advice}"
        ) from error


def _check_folder(path: str) -> None:
    """Raise ValueError if a folder has a model, but no tokenizer."""
    folder = Path(path)
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else {"tokenizer.json"}
    if not any("token" in name or name in VOCABULARIES for name in names):
        raise ValueError(
            f"policy.model = {path!r}: the folder has a model, but no tokenizer; save it there with"
            " tokenizer.save_pretrained"
        )


def _is_small(source: str) -> bool:
    """Return whether a data set is in files that are quick to read, or a path that is wrong."""
    path = Path(source).expanduser()
    files = path.iterdir() if path.is_dir() else [path]
    return is_path(source) and sum(f.stat().st_size for f in files if f.is_file()) < SMALL

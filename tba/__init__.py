"""Post-training of language models with Trajectory Balance with Asynchrony (arXiv 2503.18929)."""

from __future__ import annotations

import os

# Set before torch is imported: on a CPU, OpenMP threads that spin while they wait slow other
# processes down 30 to 50 times.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import TypeAlias

    from datasets import Dataset
    from pandas import DataFrame

    from tba.config.schema import Config, load
    from tba.offline.eval import Result
    from tba.run import Run
    from tba.runs.folder import Replay
    from tba.tasks._memory import InMemoryData

    Data: TypeAlias = Sequence[dict[str, Any]] | Dataset | DataFrame
    Reward: TypeAlias = Callable[..., Any]

__version__ = "0.4.0"
__all__ = ["Config", "load", "open_run", "result", "train"]


def __getattr__(name: str) -> Any:
    """Import `Config` and `load` at first use: child processes start without them, in .1 s."""
    if name not in ("Config", "load"):
        raise AttributeError(f"module 'tba' has no attribute {name!r}")
    from tba.config import schema

    return getattr(schema, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def train(
    config: Config | Mapping[str, Any] | str | Path,
    resume: str | Path | None = None,
    *,
    data: Data | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    held_out_data: Data | None = None,
    replay: Replay = "keep",
) -> Result:
    """Train as `tba train` does, and return the result of the run.

    `config` is a `Config`, its tables as a dict, or the path of a TOML file. `resume` is the folder
    of a run to resume; the tables then override its stored config. `data` and `held_out_data` are
    rows with a `prompt` column, and `reward` is one function or several with TRL's signature; they
    replace the options of the same names in `[task]`, which the config may then omit. `replay` says
    what a resumed run does with its stored samples: "keep", "rescore" (`tba train --rescore`) or
    "drop" (`--drop-replay`). Raises ValueError before any process starts if the run cannot work.
    """
    from tba.offline.eval import Result
    from tba.setup.checks import tell_finished

    settings, folder, passed = _checked(config, resume, data, reward, held_out_data, replay)
    if folder is None or not tell_finished(folder, settings):
        from tba.open import run

        run(settings, folder, replay, passed)
    return Result(Path(settings.run.folder) if folder is None else folder.resolve())


def open_run(
    config: Config | Mapping[str, Any] | str | Path,
    resume: str | Path | None = None,
    *,
    data: Data | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    held_out_data: Data | None = None,
    replay: Replay = "keep",
) -> AbstractContextManager[Run]:
    """Open a run: `with tba.open_run(config) as run:`. Takes the same arguments as `train`.

    The run has a `trainer`, a `buffer` and `searchers`. `run.train()` trains to the end and returns
    the summary; it raises `TrainerLost` where `train` would restart the run. Leaving the block ends
    all processes.
    """
    settings, folder, passed = _checked(config, resume, data, reward, held_out_data, replay)
    from tba.open import open_run as opened

    return opened(settings, folder, passed, replay)


def _checked(
    config: Config | Mapping[str, Any] | str | Path, resume: str | Path | None,
    data: Data | None, reward: Reward | Sequence[Reward] | None,
    held_out_data: Data | None, replay: Replay,
) -> tuple[Config, Path | None, InMemoryData | None]:  # fmt: skip
    """Return the config, the run to resume and the data passed; ValueError for a mistake."""
    if replay not in ("keep", "rescore", "drop") or (replay != "keep" and resume is None):
        raise ValueError(
            f'replay = {replay!r}: give "keep", or with resume=RUN also "rescore" or "drop"'
        )
    from tba.config.schema import Config, load
    from tba.runs.console import announce
    from tba.setup.checks import check_start, placed, stored_config
    from tba.tasks._memory import passed_from_python

    folder = None if resume is None else Path(resume)
    if folder is not None:
        settings = stored_config(folder, given=config)
    else:
        settings = placed(config if isinstance(config, Config) else load(config))
    announce(settings)
    passed = passed_from_python(data, held_out_data, reward)
    check_start(settings, folder, passed)
    return settings, folder, passed


def result(folder: str | Path) -> Result:
    """Return the result of the run in a folder; ValueError if the folder holds no run."""
    from tba.offline.eval import Result
    from tba.runs.folder import read_config

    read_config(Path(folder))
    return Result(Path(folder))

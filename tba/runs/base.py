"""The folder that the relative paths of a run's config start from: `run.base`."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path

from tba.runs.resumed import config_of


def base_of(run: Path) -> str:
    """Return the base of a run; empty if its folder does not have one."""
    try:
        return config_of(run).run.base
    except ValueError:  # no run, or a damaged one: whoever needs its config says so
        return ""


@contextmanager
def working_in(base: str) -> Iterator[None]:
    """Work in this folder, if it is another one, and import plug-ins from there as well."""
    folder = Path(base).expanduser()
    if not base or folder.resolve() == Path.cwd():
        yield
    elif not folder.is_dir():
        told = "run.base = %s does not exist here: relative paths start from the current folder"
        logging.getLogger(__name__).warning(told, base)
        yield
    else:
        sys.path.append(str(folder.resolve()))
        with chdir(folder):
            yield


def from_here(base: str, settings: Sequence[str]) -> list[str]:
    """Return settings that mean the same in the folder `base`: existing paths are absolute."""
    if not base or Path(base).expanduser().resolve() == Path.cwd():
        return list(settings)
    moved = []
    for setting in settings:
        key, equals, value = setting.partition("=")
        path, colon, function = value.strip().partition(":")  # file.py:function
        if path and Path(path).expanduser().exists():
            value = f"{Path(path).expanduser().absolute()}{colon}{function}"
        moved.append(f"{key}{equals}{value}")
    return moved

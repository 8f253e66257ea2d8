"""Post-training of language models with Trajectory Balance with Asynchrony (arXiv 2503.18929)."""

import os

# Set before torch is imported: on a CPU, threads that spin while they wait slow other processes
# down 30 to 50 times.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from typing import TYPE_CHECKING, Any

from tba.config.loading import load
from tba.config.schema import Config

if TYPE_CHECKING:
    from tba.run import open_run, train

__version__ = "0.2.0"
__all__ = ["Config", "load", "open_run", "train"]


def __getattr__(name: str) -> Any:
    """Import `train` and `open_run` when they are first used: they need PyTorch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tba import run

    return vars(run)[name]

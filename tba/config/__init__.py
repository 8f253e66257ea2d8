"""The config of a run: `load` reads one, `Config` is its schema."""

from tba.config.loading import load
from tba.config.schema import Config

__all__ = ["Config", "load"]

"""The environment in which both sides run: one Python, the same threads, the same allocator."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from _measure import skip

ROOT = Path(__file__).parent.parent
BENCH = ROOT / ".venv-bench" / "bin" / "python"


@cache
def bench_python() -> str:
    """Return a Python that has TRL beside this package; skip the script if there is none."""
    candidates = [python for python in (sys.executable, str(BENCH)) if Path(python).is_file()]
    able = [python for python in candidates if _imports(python, "trl", "tba")]
    if not able:
        skip("TRL is not installed; `make bench` installs it into .venv-bench")
    return able[0]


def _imports(python: str, *modules: str) -> bool:
    code = f"import importlib.util as u; assert all(u.find_spec(m) for m in {modules!r})"
    return subprocess.run([python, "-c", code], env=common_variables()).returncode == 0


def common_variables(**more: str) -> dict[str, str]:
    """Return the environment variables of a measured process."""
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_WAIT_POLICY": "PASSIVE",  # two pools that spin on the same cores starve each other
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
        **more,
    }

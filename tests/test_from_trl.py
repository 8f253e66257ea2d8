"""The script of docs/from_trl.md and its counterpart: both run, with the same reward functions."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from statistics import fmean

import pytest

from tba.runs.log import METRICS, read

ROOT = Path(__file__).parent.parent
BENCH = ROOT / ".venv-bench" / "bin" / "python"
NAMES = ("right", "soft_overlong_punishment_reward")


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
        "HF_HOME": str(folder / "hub"),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }


def python_with_trl() -> str:
    if not BENCH.is_file():
        pytest.skip(f"{BENCH} does not exist: make .venv-bench/installed")
    return str(BENCH)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_and_its_counterpart_train_on_the_same_rewards(tmp_path: Path) -> None:
    python = python_with_trl()
    for name in ("examples", "tba"):  # where the paths of both lead; runs/ is a folder of the test
        (tmp_path / name).symlink_to(ROOT / name)
    trl = [python, "examples/from_trl.py"]
    ours = [python, "-m", "tba.cli", "train", "examples/from_trl.toml", "log.console=off"]
    for command in (trl, ours):
        subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), check=True, timeout=420)
    state = tmp_path / "runs" / "from_trl_by_trl" / "checkpoint-100" / "trainer_state.json"
    theirs = [row for row in json.loads(state.read_text())["log_history"] if "reward" in row]
    own = [row for row in read(tmp_path / "runs" / "from_trl" / METRICS) if "loss" in row]
    assert len(theirs) == len(own) == 100
    for rows in (theirs, own):
        for name in NAMES:
            scored = [row for row in rows if f"rewards/{name}/mean" in row]
            assert all(f"rewards/{name}/std" in row for row in scored)
        right = [row["rewards/right/mean"] for row in rows if "rewards/right/mean" in row]
        assert fmean(right[-20:]) > fmean(right[:20])
    for row in theirs:
        right, overlong = (row[f"rewards/{name}/mean"] for name in NAMES)
        assert row["reward"] == pytest.approx(right + 0.5 * overlong, abs=1e-5)

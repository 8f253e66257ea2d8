"""Batch files for Slurm: what they say, and what they start, with stand-ins for Slurm."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tba.runs.folder import check_unused, locked
from tba.tools.launch import batch_file

SRUN = """#!/bin/bash
case "$*" in
*hostname*) echo 10.0.0.7 10.0.0.8 ;;
*) printf '%s\\n' "$@" ;;
esac
"""
ODD = "a b'c$(touch made)`id`"
"""Name that a shell would divide, and take for commands."""


def started(text: str, folder: Path) -> list[str]:
    """Run a batch file as Slurm would on the first of two machines; return what `srun` is given."""
    (folder / "srun").write_text(SRUN)
    (folder / "scontrol").write_text("#!/bin/bash\necho one\necho two\n")
    for name in ("srun", "scontrol"):
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "one,two", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "70123"}
    environment = {**os.environ, **job, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash"], input=text, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_the_file_of_several_machines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "run.toml"
    config.write_text('[run]\nfolder = "runs/first"\n')
    text = batch_file(Path("run.toml"), ["trainer.learning_rate=1e-4"], nodes=2, gpus=8)
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8"} <= {*text.splitlines()}
    assert f"cd -- {tmp_path}\nexport PATH={Path(sys.executable).parent}:" in text
    assert "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    shown = started(text, tmp_path)
    assert shown[:3] == ["--nodes=2", "--ntasks=2", "--kill-on-bad-exit=0"]
    ray, run = shown[3 : shown.index("--")], shown[shown.index("--") + 1 :]
    assert ray[:4] == ["ray", "symmetric-run", "--address", "10.0.0.7:20123"]
    assert ray[4:] == ["--min-nodes", "2", "--num-gpus", "8"]
    assert run[3:] == [
        "tba", "train", str(config), "run.folder=runs/first", "trainer.learning_rate=1e-4",
        "runtime.address=10.0.0.7:20123",
    ]  # fmt: skip


@pytest.mark.parametrize("is_new", [True, False])
def test_one_machine_with_names_that_a_shell_would_read(is_new, tmp_path, monkeypatch):
    """No Ray is started for it. A folder with a checkpoint is resumed."""
    here = tmp_path / ODD
    here.mkdir()
    monkeypatch.chdir(here)
    config = here / f"{ODD}.toml"
    config.write_text("")
    if not is_new:
        (here / ODD / "checkpoints" / "step-00000050").mkdir(parents=True)
    text = batch_file(config, [f"run.folder={ODD}", f"task.data={ODD}"], nodes=1, gpus=None)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    run = [str(config), f"run.folder={ODD}"] if is_new else ["--resume", ODD]
    wanted = ["timeout", "--signal=TERM", "0", "tba", "train", *run, f"task.data={ODD}"]
    assert started(text, tmp_path) == ["--nodes=1", "--ntasks=1", *wanted]
    assert not list(tmp_path.rglob("made"))


def test_a_folder_at_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run" / "checkpoints" / "step-00000050").mkdir(parents=True)
    config = tmp_path / "run.toml"
    config.write_text("[run]\nfolder = '~/run'\n")
    resumed = ["tba", "train", "--resume", str(tmp_path / "run")]
    assert started(batch_file(config, [], nodes=1, gpus=None), tmp_path)[-4:] == resumed


@pytest.mark.parametrize("written", ["metrics.jsonl", "checkpoints/.step-00000050"])
@pytest.mark.parametrize("is_training", [False, True])
def test_a_run_that_ended_before_its_first_checkpoint_begins_anew(is_training, written, tmp_path):
    """What it has written is moved aside, unless the run is in use: then it stays."""
    folder = tmp_path / ODD
    (folder / written).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"holds a run already; it has no checkpoint: remove it"):
        check_unused(folder)
    config = tmp_path / "run.toml"
    config.write_text("")
    text = batch_file(config, [f"run.folder={folder}"], nodes=1, gpus=None)
    with locked(folder) if is_training else nullcontext():
        new = ["tba", "train", str(config), f"run.folder={folder}"]
        assert started(text, tmp_path)[-4:] == new
    kept = folder if is_training else next(tmp_path.glob("*.lost-*"))
    assert (kept / written).exists()
    assert folder.exists() == is_training


@pytest.mark.parametrize(
    ("settings", "nodes", "error"),
    [
        (["run.folder=r"], 0, "--nodes 0"),
        ([], 2, "run.folder is missing"),
        (["run.folder=r", "runtime.use=local"], 1, "runtime.use=local is one process"),
        (["run.folder=r", "trainer.steps=3"], 1, "unknown key"),
    ],
)
def test_what_cannot_be_launched_is_one_sentence(settings, nodes, error, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text("")
    with pytest.raises(ValueError, match=error):
        batch_file(config, settings, nodes, None)

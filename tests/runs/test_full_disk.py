"""A full disk ends a run in words; what has no room is refused before anything starts."""

import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from build import ENVIRONMENT, as_settings, config

from tba.cli import main
from tba.learn import checkpoint_size
from tba.open import run
from tba.runs.checkpoint import newest
from tba.runs.folder import METRICS, read
from tba.runs.generations import files_of
from tba.setup.setup import check

pytestmark = pytest.mark.timeout(900)

PATIENCE = 240.0
"""Most seconds for each thing that a run does, however busy the machine is."""
LIMITED = ENVIRONMENT | {"PYTHONDONTWRITEBYTECODE": "1"}
"""Python would leave half a file in its cache where a file has a limit."""


def command(model: Path, folder: Path, *settings: str) -> list[str]:
    chosen = config(model, folder, "eval.prompts=0", *settings)
    return [sys.executable, "-m", "tba.cli", "train", *as_settings(chosen)]


def limited(size: int, *arguments: str) -> list[str]:
    """Run a command whose files may have so many bytes; return what it says as it fails."""
    limits = (size, resource.RLIM_INFINITY)
    done = subprocess.run(
        arguments, env=LIMITED, capture_output=True, text=True, timeout=PATIENCE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits),
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    return done.stderr.splitlines()


def test_a_disk_that_is_full_at_the_start_is_an_error_in_words(
    tiny_model, tmp_path, monkeypatch, capsys
):
    """A limit of file sizes stands for it: the lock has room, and the config has none."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", command(tiny_model, tmp_path / "run")[2:])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    with pytest.raises(SystemExit) as ended:
        main()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert told.startswith("error: the disk is full: [Errno 27] File too large")


@pytest.mark.slow
def test_a_limit_of_file_sizes_ends_a_run_in_words(tiny_model, tmp_path):
    """AdamW's file is larger than the limit; safetensors has an error of its own for that."""
    settings = ("run.steps=4", "checkpoint.every=2")
    *_, told = limited(60_000, *command(tiny_model, tmp_path / "run", *settings))
    assert told.startswith("error: the disk is full: ")
    assert "the checkpoint of step 2 was not written: Error while serializing" in told
    assert f"`tba train --resume {tmp_path}/run` continues from its newest checkpoint" in told


def test_a_disk_without_room_for_a_checkpoint_is_told_before_the_start(
    tiny_model, tmp_path, monkeypatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**5))
    told = r"/run has 0\.1 MB of free space, but a checkpoint takes(.|\n)*choose .* run\.folder="
    with pytest.raises(ValueError, match=told):
        run(config(tiny_model, tmp_path / "run"))
    assert read(tmp_path / "run" / METRICS) == []


@pytest.mark.parametrize(
    "settings",
    [(), ("runtime.use=ray",), ("policy.reset_reference_every=1",), ("policy.lora.r=2",)],
    ids=["local", "ray", "reference", "lora"],
)
def test_the_size_of_a_checkpoint_is_known_before_the_start(tiny_model, tmp_path, settings):
    """But for the tokenizer, the buffer and small files."""
    if "policy.lora.r=2" in settings:
        pytest.importorskip("peft")
    chosen = config(tiny_model, tmp_path / "run", "eval.prompts=0", "run.steps=2", *settings)
    parts = check(chosen)
    size = checkpoint_size(chosen, parts.trainer("cpu").sizes)
    if chosen.runtime.use == "local":
        run(chosen)
        files = files_of(newest(tmp_path / "run" / "checkpoints"))
        weights = ("model/adapter_model", "model/model", "optimizer", "reference", "search_weights")
        sizes = [path.stat().st_size for name, path in files.items() if name.startswith(weights)]
        assert size <= sum(sizes) < 1.1 * size + 20_000
    else:
        local = config(tiny_model, tmp_path / "run", "eval.prompts=0")
        assert size < checkpoint_size(local, parts.trainer("cpu").sizes)

"""A full disk ends a run in words; what has no room is refused before anything starts."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from build import ENVIRONMENT, as_settings, config, wait_until

from tba.assemble import run
from tba.cli import _config
from tba.runs.checkpoint import checkpoint_size, newest
from tba.runs.generations import files_of
from tba.runs.log import METRICS, read
from tba.runs.setup import check

pytestmark = pytest.mark.timeout(900)

PATIENCE = 240.0
"""Most seconds for each thing that a run does, however busy the machine is."""
LIMITED = ENVIRONMENT | {"PYTHONDONTWRITEBYTECODE": "1"}
"""Python would leave half a file in its cache where a file has a limit."""
MOUNTED = """
mount -t tmpfs -o size="$0" none "$1" || exit 77
disk="$1"; shift
"$@"; status=$?
cp -r "$disk/run" "$disk-copy"; exit $status
"""
"""Runs a command on a small disk of its own, and copies the run from there."""


def command(model: Path, folder: Path, *settings: str) -> list[str]:
    chosen = config(model, folder, "eval.prompts=0", *settings)
    return [sys.executable, "-m", "tba.cli", "train", *as_settings(chosen)]


def test_a_disk_that_is_full_at_the_start_is_an_error_in_words(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A limit of file sizes stands for it: the lock has room, and the config has none."""
    limits = (200, resource.RLIM_INFINITY)
    done = subprocess.run(
        command(tiny_model, tmp_path / "run"),
        env=LIMITED, capture_output=True, text=True, timeout=PATIENCE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits),
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("error: the disk is full: [Errno 27] File too large")
    assert "Traceback" not in done.stderr


class Disk:
    """A disk of so many bytes for a process, which is in a mount namespace of its own."""

    def __init__(self, folder: Path, size: int):
        self.folder, self.size, self.log = folder / "disk", size, folder / "log"
        self.folder.mkdir()

    @contextmanager
    def running(self, arguments: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command whose files are on this disk."""
        mounted = ["unshare", "--mount", "sh", "-c", MOUNTED, str(self.size), str(self.folder)]
        with self.log.open("wb") as log:
            shell = subprocess.Popen([*mounted, *arguments], env=ENVIRONMENT, stderr=log)
        try:
            yield shell
        finally:
            if shell.poll() is None:
                family = psutil.Process(shell.pid).children(recursive=True)
                shell.kill()
                for process in family:
                    process.kill()
            shell.wait(10)

    def inside(self, shell: subprocess.Popen[bytes]) -> Path:
        """Return the path of the disk as seen from outside."""
        return Path(f"/proc/{shell.pid}/root{self.folder}")

    def told(self) -> str:
        return self.log.read_text()


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    """A disk of 24 MB; skips the test where nothing can be mounted."""
    tried = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(tried, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system, which root has")
    return Disk(tmp_path, 24 * 2**20)


def fill(folder: Path) -> None:
    """Leave no space on a disk."""
    try:
        with (folder / "ballast").open("ab", buffering=0) as ballast:
            while ballast.write(bytes(4096)):
                pass
    except OSError:
        pass


def fills_up(disk: Disk, shell: subprocess.Popen[bytes]) -> bool:
    """Fill the disk after the first checkpoint, until a run has noticed it."""
    inside = disk.inside(shell)
    assert wait_until(lambda: len(list(inside.glob("run/checkpoints/step-*"))) > 0, PATIENCE)

    def noticed() -> bool:
        fill(inside)  # again and again: the run removes an older checkpoint
        return shell.poll() is not None

    return wait_until(noticed, PATIENCE)


def is_whole(folder: Path) -> bool:
    """Return whether the metrics have one row for each step."""
    steps = [row["step"] for row in read(folder / METRICS)]
    return steps == list(range(1, len(steps) + 1))


ENDLESS = ("run.steps=100000", "checkpoint.every=2", "checkpoint.keep=1")


@pytest.mark.fault
def test_a_run_that_ends_on_a_full_disk_keeps_its_newest_checkpoint(
    tiny_model: Path, tmp_path: Path, disk: Disk
) -> None:
    with disk.running(command(tiny_model, disk.folder / "run", *ENDLESS)) as shell:
        assert fills_up(disk, shell), disk.told()
        assert shell.wait(PATIENCE) == 1
    told = disk.told().splitlines()[-1]
    assert told.startswith("error: the disk is full: ") and "No space left on device" in told
    assert f"`tba train --resume {disk.folder}/run` continues" in told
    assert "Traceback" not in disk.told()
    copy = Path(f"{disk.folder}-copy")
    assert is_whole(copy)
    last = read(copy / METRICS)[-1]["step"]
    assert run(_config([f"run.steps={last + 1}"], copy), copy).finished


@pytest.mark.slow
def test_a_limit_of_file_sizes_ends_a_run_in_words(tiny_model: Path, tmp_path: Path) -> None:
    """AdamW's file is larger than the limit; safetensors has an error of its own for that.

    The same limit meets smaller files in the first test of this file.
    """
    limits = (60_000, resource.RLIM_INFINITY)
    done = subprocess.run(
        command(tiny_model, tmp_path / "run", "run.steps=4", "checkpoint.every=2"),
        env=LIMITED, capture_output=True, text=True, timeout=PATIENCE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits),
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    told = done.stderr.splitlines()[-1]
    assert told.startswith("error: the disk is full: ")
    assert "the checkpoint of step 2 was not written: Error while serializing" in told


def test_a_disk_without_room_for_a_checkpoint_is_told_before_the_start(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_the_size_of_a_checkpoint_is_known_before_the_start(
    tiny_model: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
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

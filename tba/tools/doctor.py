"""The doctor: describes a machine, and compares a short run on it with expected figures.

Checks are independent: a failing one is reported, and the others still run. The text is meant for
bug reports. It contains no environment variables, prompts or responses.
"""

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from tba.config.plugins import find, with_defaults
from tba.config.schema import Config, assign_all
from tba.display import printable, size
from tba.engines import Engine, logp_gap_limit
from tba.learn import checkpoint_size
from tba.open import open_run
from tba.runs.folder import CHECKPOINTS, is_full
from tba.runs.generations import files_of
from tba.runs.summary import installed
from tba.setup.checks import SHARED, check_start
from tba.types import collate

SHARED_ADVICE = "Ray and NCCL need it; mount a tmpfs there (with Docker: --shm-size=8g)"
LEAST_SHARED = 2**28  # Docker's default is 2**26
DISK_ADVICE = "free some space, or choose another disk with run.folder=…"
WRITTEN = 2**24  # bytes
SLOW = 100e6  # bytes per second: another machine waits 10 s for weights of 1 GB
DRIVER = Path("/proc/driver/nvidia/version")
LEFT_OUT = ("replay", "strategy", "selection", "eval", "checkpoint", "log")
"""Tables for which the short run uses defaults."""
SMALL: dict[str, Any] = {
    "run.steps": 2, "runtime.lag": 0, "runtime.publish_every": 1, "runtime.fresh": None,
    "runtime.searchers": 1, "engine.in_flight": None, "policy.reset_reference_every": 0,
    "sampling.truncated": "keep", "trainer.schedule": "constant", "trainer.warmup_steps": 0,
    "trainer.decay_steps": 0,
    "eval.prompts": 0, "log.console": "off", "log.report_to": [], "log.sample_every": 0,
}  # fmt: skip
"""Settings of the short run; None removes one. Search and training take turns."""
RESPONSES = 4  # maximum per prompt
TOKENS = 64  # maximum per response


@dataclass(frozen=True)
class Finding:
    """A line of the text; `off` describes a problem, or is empty."""

    name: str
    value: str
    off: str = ""


def examine(
    config: Config, tell: Callable[[str], None] = print, shared: Path = SHARED
) -> list[str]:
    """Run all checks, pass their lines to `tell`, and return a sentence for each problem.

    `shared` is the folder of shared memory.
    """
    folder = Path(config.run.folder)
    folder = next(path for path in (folder, *folder.parents) if path.is_dir())
    temporary = Path(os.environ.get("TMPDIR") or "/tmp")
    checks = {
        "versions": _versions(config),
        "GPUs": _gpus(),
        "shared memory": _writing(shared, SHARED_ADVICE, LEAST_SHARED),
        "disk of the run": _writing(folder, DISK_ADVICE),
        "temporary files": _writing(temporary, "set TMPDIR to a folder on another disk"),
        "network": _network(config),
        "a short run": _short_run(config, folder),
    }
    off: dict[str, None] = {}  # in order, each once
    for title, check in checks.items():
        tell(title)
        try:
            for finding in check:
                tell(f"  {finding.name:<18} {finding.value}")
                off |= dict.fromkeys([finding.off] if finding.off else [])
        except Exception as error:  # whatever it is, run the other checks
            is_sentence = isinstance(error, ValueError | RuntimeError | OSError)
            kind = "" if is_sentence else f"{title} failed: {type(error).__name__} "
            text = kind + printable(str(error))
            tell(f"  failed             {text}")
            off[text.partition("\n")[0]] = None
    tell("\n".join([f"\nproblems: {len(off) or 'none'}", *(f"- {sentence}" for sentence in off)]))
    return list(off)


def _versions(config: Config) -> Iterator[Finding]:
    """Yield the versions; ValueError if the engine of the config cannot work with them."""
    versions = ", ".join(f"{name} {version}" for name, version in installed().items())
    yield Finding("packages", f"{versions}, CUDA {torch.version.cuda or 'none'}")
    yield Finding("system", platform.platform())
    engine: type[Engine] = find("engines", config.engine.use)
    engine.check_here(with_defaults(config))


def _gpus() -> Iterator[Finding]:
    count = torch.cuda.device_count()
    hidden = "PyTorch sees no GPU, but there is an NVIDIA driver; install a PyTorch for its CUDA"
    yield Finding("GPUs", str(count), hidden if count == 0 and DRIVER.is_file() else "")
    for gpu in range(count):
        free, total = torch.cuda.mem_get_info(gpu)
        name = f"cuda:{gpu}"
        torch.ones(2, device=name).sum().item()
        value = f"{torch.cuda.get_device_name(gpu)}, {size(free)} of {size(total)} free"
        taken = f"{name} has {size(free)} of {size(total)} free; end what uses it (`nvidia-smi`)"
        yield Finding(name, value, taken if free < total / 2 else "")
    if count > 1:
        pairs = [*combinations(range(count), 2)]
        direct = sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
        others = "" if direct == len(pairs) else "; the others use the host's memory"
        yield Finding("direct access", f"in {direct} of {len(pairs)} pairs of GPUs{others}")
    has_nccl = count > 0 and torch.distributed.is_nccl_available()
    yield Finding("NCCL", ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none")


def _writing(folder: Path, advice: str, least: int = 0) -> Iterator[Finding]:
    """Write to a folder; `advice` says what to do if that fails, or space is short."""
    free = 0
    try:
        free = shutil.disk_usage(folder).free
        began = time.perf_counter()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(WRITTEN))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        why = "is full" if is_full(error) else f"cannot be written to ({error.strerror or error})"
        yield Finding(str(folder), f"{why}, {size(free)} free", f"{folder} {why}: {advice}")
        return
    rate = WRITTEN / (time.perf_counter() - began)
    few = f"{folder} has {size(free)} free, less than {size(least)}: {advice}"
    yield Finding(str(folder), f"{size(free)} free, {size(rate)}/s", few if free < least else "")


def _network(config: Config) -> Iterator[Finding]:
    """Yield what each machine of the cluster has, and how fast it receives data."""
    if config.runtime.address is None:
        yield Finding("machines", "1, because runtime.address is not set")
        return
    from tba.runtime.deadline import bind_ray

    bind_ray(config.runtime.address)
    from tba.runtime.cluster import look_at_nodes

    for node in look_at_nodes(config.runtime):
        slow = f"{node.name} receives {size(node.rate)}/s: weights arrive late; look at its network"
        value = f"{node.gpus} GPUs, {node.packages}; receives {size(node.rate)}/s"
        yield Finding(node.name, value, slow if node.rate < SLOW else "")


def small(config: Config, folder: Path) -> Config:
    """Return the config of a short run in this folder: one prompt per device, few tokens."""
    k = min(config.trainer.group_size, RESPONSES)
    tables = {name: table for name, table in config.nested().items() if name not in LEFT_OUT}
    sizes = {
        "run.folder": str(folder),
        "trainer.group_size": k,
        "trainer.batch_size": k * config.trainer.devices,
        "sampling.samples": k,
        "sampling.max_tokens": min(config.sampling.max_tokens, TOKENS),
    }
    assign_all(tables, {**SMALL, **sizes})
    return Config(**tables)


def _short_run(config: Config, folder: Path) -> Iterator[Finding]:
    """Search, take a step, publish, search with the new weights, and save, as a run does.

    The size of the whole run's checkpoints is compared with the free space in `folder`.
    """
    last = time.perf_counter()

    def lap(name: str, most: float) -> Finding:
        nonlocal last
        seconds = time.perf_counter() - last
        last += seconds
        return Finding(name, f"{seconds:.2f} s (at most {most:g} s)")

    with tempfile.TemporaryDirectory(prefix="tba-doctor-") as temporary:
        chosen = small(config, Path(temporary) / "run")
        check_start(chosen, None)
        with open_run(chosen) as run:
            c = run.config
            bf16 = run.trainer.computes_in_bf16
            sizes = run.trainer.sizes
            yield lap("start", c.runtime.start_deadline)
            kind = "bf16" if bf16 else "fp32"
            yield Finding(
                "trained", f"{sizes.trained:,} of {sizes.parameters:,} weights, in {kind}"
            )
            run.collect("first_fill")
            yield lap("first search", c.runtime.task_deadline)
            run.trainer.step(collate(run.sample()), run.step)
            run.step += 1
            yield lap("training step", c.trainer.deadline)
            run.publish()
            run.collect()
            yield lap("search after it", c.runtime.task_deadline)
            stats = run.searchers.stats
            sent = f"{size(stats.counts['sync/bytes'])} (expected: {size(sizes.published_bytes)})"
            yield Finding("published", sent)
            limit = logp_gap_limit(c.engine, bf16)
            yield Finding("log-prob gap", f"{stats.largest_gap:.2g} nats (at most {limit:g})")
            run.save()
            run.checkpoints.wait()
            yield lap("checkpoint", c.trainer.deadline)
            files = files_of(run.folder / CHECKPOINTS).values()
            written = sum(file.stat().st_size for file in files)
            value = f"{size(written)} (expected: {size(checkpoint_size(c, run.trainer.sizes))})"
            needed = written * (config.checkpoint.keep + 1)  # plus the one being written
            free = shutil.disk_usage(folder).free
            few = f"{folder} has {size(free)} free, and checkpoints take {size(needed)}"
            yield Finding("its size", value, f"{few}: {DISK_ADVICE}" if free < needed else "")

"""Parts of `benchmarks/gpu.sh` about a trainer that is divided: one device, several, a lost one."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import _measure
from _fit import Skipped

if TYPE_CHECKING:
    from _gpu import Bench, Part

SCRIPTED = (
    "runtime.use=ray", "runtime.lag=0", "engine=scripted", "engine.answers=['1']",
    "engine.own_reference=true", "trainer.devices=",
)  # fmt: skip
"""Settings of a run whose searchers do not use their device. The last one is completed."""


def parts(bench: Bench) -> list[Part]:
    """Return the parts; those that need more than the machine has raise Skipped."""
    first = bench.shapes[0]
    every: list[Part] = [
        (f"step through FSDP2 on one device, {first}", (), partial(one_device, bench, first))
    ]
    for n in (2, 4):
        every.append((f"step on {n} devices, {first}", ("ray",), partial(devices, bench, first, n)))
    return [*every, ("LoRA step of a 7B shape", ("peft",), partial(large, bench))]


def batch_of(bench: Bench) -> Any:
    """Return a batch of full-length random answers."""
    from _synthetic import random_groups

    from tba.types import collate

    tokens = (16, 16) if bench.tiny else (128, 256)
    return collate(random_groups(8, 4 if bench.tiny else 16, *tokens))


def passes(config: Any) -> str:
    """Return the note of a row on the token budget of a step."""
    again = ", with recomputation" if config.policy.gradient_checkpointing else ""
    return f"{config.trainer.pass_tokens} tokens a pass{again}"


def divided(bench: Bench, shape: str, count: int) -> Callable[..., Any]:
    """Return what makes the config of a run with several ranks."""
    *others, devices = SCRIPTED
    longest = f"sampling.max_tokens={16 if bench.tiny else 256}"
    return partial(bench.config, shape, *others, f"{devices}{count}", longest)


def one_device(bench: Bench, shape: str) -> list[_measure.Row]:
    """Compare the first gradient, step time and peak memory with the undivided trainer's."""
    from torch import cuda, distributed

    from tba.setup.setup import check

    own = ("runtime.use=local", f"sampling.max_tokens={16 if bench.tiny else 256}")
    parts = check(bench.fitted("step", partial(bench.config, shape, *own))).trainer_setup()
    batch = batch_of(bench)
    on_gpu = bench.device != "cpu"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    backend = "nccl" if on_gpu else "gloo"
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group(backend, init_method=address, rank=0, world_size=1)
    seconds: dict[str, list[float]] = {}
    norms = {}
    peaks = {}
    try:
        for side, rank in (("undivided", None), ("FSDP2", 0)):
            trainer = parts.build(bench.device, rank)
            if on_gpu:
                cuda.reset_peak_memory_stats()
            norms[side] = trainer.step(batch, 0)["grad_norm"]
            steps = iter(range(1, 100))
            step = {"step": lambda t=trainer, n=steps: t.step(batch, next(n))}
            seconds[side] = _measure.alternate(step, bench.repeats, warmup=1)["step"]
            peaks[side] = cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0
            del trainer, step
    finally:
        distributed.destroy_process_group()
    name = f"full training step through FSDP2 on one {bench.card}, Qwen2.5-{shape} shape"
    off = abs(norms["FSDP2"] / norms["undivided"] - 1)
    given = (seconds["FSDP2"], "s", seconds["undivided"])
    rows = [
        _measure.row(name, *given, peer_is="undivided"),
        _measure.row(f"{name}: relative difference of the first gradient's norm", off, ""),
    ]
    if on_gpu:
        both = (peaks["FSDP2"], "GB", peaks["undivided"])
        rows.append(_measure.row(f"{name}: peak memory", *both, peer_is="undivided"))
    return rows


def devices(bench: Bench, shape: str, count: int) -> list[_measure.Row]:
    """Measure steps and publications of several ranks, and how soon a killed one is noticed."""
    import psutil
    import torch

    from tba.errors import TrainerLost
    from tba.open import open_run

    has, needed = 2, count
    if bench.device != "cpu":
        has, needed = torch.cuda.device_count(), count + 1  # Ray gives the searcher a GPU
    if has < needed:
        raise Skipped(f"it needs {needed} devices, and there are {has}")
    config = bench.fitted("step", divided(bench, shape, count))
    bench.needed = None  # the ranks have the memory, not this process
    batch = batch_of(bench)
    name = f"full training step on {count} x {bench.card}, Qwen2.5-{shape} shape"
    with open_run(config) as run:
        steps = iter(range(100))
        calls = {
            "step": lambda: run.trainer.step(batch, next(steps)),
            "publish": lambda: run.publish(),
        }
        seconds = _measure.alternate(calls, bench.repeats, warmup=2)
        ranks = [p for p in psutil.Process().children(True) if "RankActor" in " ".join(p.cmdline())]
        ranks[-1].kill()
        began = time.perf_counter()
        try:
            run.trainer.step(batch, next(steps))
        except TrainerLost:
            noticed = time.perf_counter() - began
        else:
            raise RuntimeError("the death of a rank went unnoticed")
    tokens = batch.mask.numel()
    speeds = [tokens / s for s in seconds["step"]]
    rows = [_measure.row(name, speeds, "answer tokens/s", note=passes(config))]
    rows.append(_measure.row(f"{name}: publication", seconds["publish"], "s"))
    return [*rows, _measure.row(f"{name}: a killed rank is noticed", noticed, "s")]


def large(bench: Bench) -> list[_measure.Row]:
    """Measure a LoRA step of a model with the shape of Qwen2.5-7B."""
    if bench.device == "cpu":
        raise Skipped("it needs a GPU")
    return bench.training("7B", "LoRA")

"""64 searchers, each 64 times slower than a single one: does the trainer notice them?

    python benchmarks/searchers.py    # 5 minutes on two idle cores

All searchers together generate as much as the single one. The `scripted` engine waits and computes
nothing, so that what 64 processes cost the trainer is the bookkeeping. Where 64 do not fit into
the memory, as many as fit are measured. Both sides run the same steps of the bundled model; the row
compares the 95th percentiles of the training step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import _measure
import numpy as np
import psutil

GROUPS = 8
SAMPLES = 16
LATENCY = 0.25
"""Seconds that the single searcher takes for a task."""
WARMUP = 20
STEPS = 200
MOST = 64
ACTOR_MB = 300
RESERVE_MB = 4000
"""Memory that a searcher needs of its own, and that everything else needs."""


def main() -> None:
    parser = _measure.arguments(__doc__)
    parser.add_argument("--most", type=int, default=MOST)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--one", type=int, help="measure this number of searchers, print JSON")
    options = parser.parse_args()
    steps = 10 if options.tiny else options.steps
    if options.one:
        print(json.dumps(measure(options.one, steps)))
        return
    most = 2 if options.tiny else fitting(options.most)
    results = {}
    for count in (1, most):
        command = [sys.executable, __file__, "--steps", str(steps), "--one", str(count)]
        results[count] = _measure.run_json(command, 1800)
        _measure.progress(f"{count} searchers", 1, 1, results[count]["seconds"])
    _measure.record(__file__, rows_of(results[most], results[1], most, options), options)


def fitting(most: int) -> int:
    """Return the number of searchers that the free memory has room for, at most `most`."""
    free = psutil.virtual_memory().available / 1e6 - RESERVE_MB
    return max(2, min(most, int(free / ACTOR_MB)))


def rows_of(many: dict, one: dict, count: int, options: argparse.Namespace) -> list[_measure.Row]:
    asked = "" if count == options.most else f"; {options.most} do not fit into the memory"
    note = f"lost {many['lost']}, doubled {many['doubled']}{asked}"
    name = f"{count} searchers instead of one, each {count} times slower"
    return [
        _measure.row(
            f"{name}: 95th percentile of the training step", many["p95"], "s", one["p95"],
            peer_is="one searcher", ratio_is="ours / peer", goal="ratio <= 1.1", note=note,
        ),
        _measure.row(
            f"{name}: samples lost or doubled", many["lost"] + many["doubled"], "samples",
            goal="value == 0",
        ),
        _measure.row(
            f"{name}: CPU of the driver", many["cpu"], "cores", one["cpu"],
            peer_is="one searcher", ratio_is="ours / peer",
        ),
        _measure.row(f"{name}: unshared memory of a searcher (USS)", many["uss"], "MB",
                     one["uss"], peer_is="one searcher", ratio_is="ours / peer"),
        _measure.row(f"{name}: memory of a searcher, shared parts in equal shares (PSS)",
                     many["pss"], "MB", one["pss"], peer_is="one searcher",
                     ratio_is="ours / peer"),
    ]  # fmt: skip


def measure(count: int, steps: int) -> dict:
    """Run with so many searchers, and return what the trainer and the driver needed."""
    import torch

    from tba.open import open_run
    from tba.run import train

    torch.set_num_threads(1)
    times: list[float] = []
    arrived: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, open_run(config(count, folder)) as opened:
        wait_for_all(opened, count)
        log = opened.log_step
        add = opened.buffer.add
        process = psutil.Process()
        started = {}

        def recorded(metrics: dict[str, float], groups: list) -> None:
            log(metrics, groups)
            times.append(metrics["step_time"])
            if len(times) == WARMUP:
                started.update(cpu=sum(process.cpu_times()[:2]), at=time.perf_counter())
            if len(times) == WARMUP + steps:
                opened.stop.requested = True

        def counted(groups: list, now: int) -> None:
            for group in groups:
                arrived[group.prompt.id] += len(group.trajectories)
            add(groups, now)

        opened.log_step = recorded
        opened.buffer.add = counted
        with opened.tracker.clock():
            train(opened)
        seconds = time.perf_counter() - started["at"]
        cpu = (sum(process.cpu_times()[:2]) - started["cpu"]) / seconds
        uss, pss = memory_of_actors()
        lost, doubled = account(opened, arrived)
    return {
        "p95": float(np.percentile(times[WARMUP:], 95)), "seconds": seconds, "cpu": cpu,
        "uss": uss, "pss": pss, "lost": lost, "doubled": doubled,
    }  # fmt: skip


def account(opened, arrived: Counter[str]) -> tuple[int, int]:
    """Return how many samples were lost and doubled: each prompt was handed out once at most."""
    stats = opened.searchers.stats
    cursor = opened.searchers.state().cursor
    handed_out = cursor["state"]["chosen"] - len(cursor["outstanding"])
    lost = max(0, handed_out * SAMPLES - sum(arrived.values()))
    doubled = sum(max(0, n - SAMPLES) for n in arrived.values())
    return lost + abs(stats.counts["samples_generated"] - sum(arrived.values())), doubled


def wait_for_all(opened, count: int) -> None:
    """Wait until every searcher has started, which takes minutes for many."""
    deadline = time.monotonic() + 900
    while any(handle.has("start") for handle in opened.searchers._pool.handles):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{count} searchers did not start within 900 s")
        time.sleep(0.2)


def memory_of_actors() -> tuple[float, float]:
    """Return the median memory in MB of the searcher processes: their own, and with shares."""
    uss = []
    pss = []
    for process in psutil.Process().children(recursive=True):
        if "SearcherActor" in " ".join(process.cmdline()):
            memory = process.memory_full_info()
            uss.append(memory.uss / 1e6)
            pss.append(memory.pss / 1e6)
    return median(uss), median(pss)


def config(count: int, folder: str):
    from tba.config.schema import load

    return load(
        None,
        [
            f"run.folder={Path(folder) / 'run'}", "run.steps=100000",
            "task.use=arithmetic", "policy.model=bundled:arithmetic",
            "sampling.max_tokens=6", f"sampling.samples={SAMPLES}",
            f"trainer.batch_size={GROUPS * SAMPLES}", f"trainer.group_size={SAMPLES}",
            "trainer.learning_rate=1e-6", "strategy.use=recent",
            "engine.use=scripted", "engine.own_reference=true",
            f"engine.latency={LATENCY * count}",
            f"engine.answers={[str(n) for n in range(100, 164)]}",
            "runtime.use=ray", f"runtime.searchers={count}", "runtime.cores=divide",
            "runtime.max_reuse=inf",  # the trainer must not wait: searchers are measured
            "runtime.start_deadline=900.0", "runtime.concurrent_searches=1",
            f"runtime.prompts_per_task={GROUPS}",
            "eval.prompts=0", "checkpoint.every=0",
            "log.console=off", "log.report_to=[]", "log.sample_every=0",
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()

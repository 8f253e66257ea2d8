"""Measure the replay buffer: sampling, adding, memory and saving, by its size.

    python benchmarks/replay.py                      # every shape; two minutes, 3 GB of memory
    python benchmarks/replay.py --shapes 10000x100   # one shape: prompts x responses of each

Each shape runs in a process of its own. The limits are those that the buffer is built for, with
responses of 64 tokens: sampling 32 groups of 16 by MOP takes at most 50 ms, adding reaches 10,000
trajectories a second, and memory is at most 1.5 times the payload of 12 bytes a token and 40 bytes
a trajectory.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
import psutil
from _measure import Row, arguments, record, row, run_json

from tba.prompt import Prompt
from tba.replay.buffer import ReplayBuffer
from tba.strategies.mixture import Mixture
from tba.types import Group, Trajectory

SHAPES = ("10x100", "100x100", "1000x100", "10000x100", "1x150000", "200000x1")
DEADLINE = 600.0
"""Seconds that one shape may take."""
TOKENS = 64
GROUPS = 32
SIZE = 16
LIMITS = {
    "sample ms": ("sampling 32 groups of 16", "ms", "value <= 50"),
    "adds/s": ("trajectories added", "1/s", "value >= 10000"),
    "adds/s full": ("trajectories added to a full buffer", "1/s", "value >= 10000"),
    "memory/payload": ("memory, as a multiple of the payload", "times", "value <= 1.5"),
}
"""Name, unit and goal of the measures that have one."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="prompts x responses of each")
    parser.add_argument("--folder", type=Path, help="where saves are written; default: a temporary")
    parser.add_argument("--one", action="store_true", help="measure one shape, print JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.shapes[0], options.folder)))
        return
    measured = []
    for shape in SHAPES[:1] if options.tiny else options.shapes:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            command = [sys.executable, __file__, "--one", "--shapes", shape, "--folder", folder]
            measured.append(run_json(command, DEADLINE))
    print_table(measured)
    record(__file__, judged(measured), options)


def measure(shape: str, folder: Path) -> dict[str, str | float]:
    """Return every measure of a buffer that is filled to a shape."""
    prompts, responses = map(int, shape.split("x"))
    total = prompts * responses
    rng = np.random.default_rng(0)
    adding = 0.0
    # Warm up, so that imports and the first use of numpy's functions are no part of memory.
    warm = ReplayBuffer()
    warm.add(next(arrivals(rng, 20, 50, 1000)), 0)
    warm.sample(GROUPS, SIZE, Mixture(reward=1.0), 0, rng)
    del warm
    before = psutil.Process().memory_info().rss
    buffer = ReplayBuffer(per_prompt=responses, capacity=total)
    now = 0
    for now, groups in enumerate(arrivals(rng, prompts, responses, total)):
        started = time.perf_counter()
        buffer.add(groups, now)
        adding += time.perf_counter() - started
        del groups
    memory = psutil.Process().memory_info().rss - before
    assert len(buffer) == total, (len(buffer), total)
    payload = total * (12 * TOKENS + 40)
    sample = sampling(buffer, now, rng)
    when_full = adding_to_full(buffer, prompts, responses, now + 1, rng)
    memory = max(memory, psutil.Process().memory_info().rss - before)
    return {
        "shape": shape,
        "sample ms": 1000 * sample,
        "adds/s": total / adding,
        "adds/s full": when_full,
        "MB": memory / 1e6,
        "memory/payload": memory / payload,
        **saving(buffer, folder),
    }


def arrivals(
    rng: np.random.Generator, prompts: int, responses: int, total: int
) -> Iterator[list[Group]]:
    """Yield groups of new responses, up to 1,000 trajectories at a time, prompt after prompt."""
    some = [Prompt(str(p), str(p)) for p in range(prompts)]
    heads = [np.array([p], np.int32) for p in range(prompts)]
    size = min(20, responses)
    groups = []
    for i in range(total // size):
        p = i % prompts
        groups.append(Group(some[p], heads[p], tuple(trajectories(rng, size))))
        if len(groups) * size >= 1000:
            yield groups
            groups = []
    yield groups


def trajectories(rng: np.random.Generator, size: int) -> list[Trajectory]:
    tokens = rng.integers(50_000, size=(size, TOKENS), dtype=np.int32)
    logp = rng.standard_normal((2, size, TOKENS), np.float32)
    rewards = rng.normal(size=size).tolist()
    made = []
    for i, reward in enumerate(rewards):
        own = tokens[i].copy(), logp[0, i].copy(), logp[1, i].copy()  # as searchers return them
        made.append(Trajectory(*own, reward, version=0, finished=True))
    return made


def sampling(buffer: ReplayBuffer, now: int, rng: np.random.Generator) -> float:
    """Return the median seconds of drawing a batch: half of its groups are recent, half by reward.

    Before each draw, one group arrives, as during training.
    """
    strategy = Mixture(recent=0.5, reward=1.0)
    seconds = []
    for _ in range(51):
        more = tuple(trajectories(rng, SIZE))
        buffer.add([Group(Prompt("0", "0"), np.zeros(1, np.int32), more)], now)
        started = time.perf_counter()
        buffer.sample(GROUPS, SIZE, strategy, now, rng)
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def adding_to_full(
    buffer: ReplayBuffer, prompts: int, responses: int, now: int, rng: np.random.Generator
) -> float:
    """Return the trajectories added in a second where each evicts another."""
    total = min(200_000, prompts * responses)
    seconds = 0.0
    for step, groups in enumerate(arrivals(rng, prompts, responses, total)):
        started = time.perf_counter()
        buffer.add(groups, now + step)
        seconds += time.perf_counter() - started
    return total / seconds


def saving(buffer: ReplayBuffer, folder: Path) -> dict[str, float]:
    """Return the seconds of a save, and of a load.

    `blocked` is the part during which the buffer cannot be used; the files are written without it.
    """
    seconds = {}
    started = time.perf_counter()
    write = buffer.save(folder)
    seconds["save blocked"] = time.perf_counter() - started
    write()
    seconds["save"] = time.perf_counter() - started
    started = time.perf_counter()
    ReplayBuffer(buffer.per_prompt, buffer.capacity).load(folder)
    seconds["load"] = time.perf_counter() - started
    return seconds


def print_table(rows: list[dict[str, str | float]]) -> None:
    names = list(rows[0])
    print(" | ".join(names))
    print(" | ".join("---" for _ in names))
    for measured in rows:
        shown = []
        for name in names:
            value = measured[name]
            digits = 0 if name.startswith("adds") or name == "MB" else 2
            shown.append(value if isinstance(value, str) else f"{value:,.{digits}f}")
        print(" | ".join(shown))


def judged(measured: list[dict[str, str | float]]) -> list[Row]:
    """Return each measure that has a limit, for the shapes that the limits are stated for."""
    rows = []
    for one in measured:
        if one["shape"] not in ("10000x100", "1x150000"):
            continue
        for name, (what, unit, goal) in LIMITS.items():
            where = f"replay buffer of {one['shape']}"
            rows.append(row(f"{where}: {what}", float(one[name]), unit, goal=goal))
    return rows


if __name__ == "__main__":
    main()

"""Measure what scoring in a process of its own costs, beside scoring in a thread.

    python benchmarks/rewards.py             # half a minute
    python benchmarks/rewards.py --tiny      # in seconds

A step scores 128 answers, 8 groups of 16, by a cheap sync function, so that what is measured is the
way there and back: with answers of 4 characters, and of 4,000.
"""

from __future__ import annotations

import time
from statistics import median

from _measure import arguments, progress, record, row

from tba.prompt import Answer, Prompt
from tba.search.isolation import InProcess
from tba.search.rewards import Guard
from tba.tasks.arithmetic import Arithmetic

GROUPS, SIZE = 8, 16
STEPS = 100
"""Steps of one measurement, which is their median."""


def main() -> None:
    options = arguments(__doc__).parse_args()
    steps = 5 if options.tiny else STEPS
    starting, process = start_several(options.repeats)
    guards = {"process": process, "thread": Guard({"": Arithmetic()}, 10.0)}
    rows = []
    for characters in (4, 4000):
        measured = [medians(guards, steps, characters) for _ in range(1 + options.repeats)][1:]
        ours, peer = ([1000 * one[name] for one in measured] for name in guards)
        extra = [own - other for own, other in zip(ours, peer, strict=True)]
        what = f"scoring 128 answers of {characters:,} characters in a process"
        rows += [
            row(what, ours, "ms", peer, peer_is="in a thread"),
            row(f"{what}: extra time beside a thread", extra, "ms", goal="value <= 2",
                note="negative: faster; 2 ms are 2 % of a step of a tenth of a second"),
        ]  # fmt: skip
    rows.append(row("first scoring by a new process", starting, "s", note="models load meanwhile"))
    for guard in guards.values():
        guard.close()
    record(__file__, rows, options)


def start_several(count: int) -> tuple[list[float], Guard]:
    """Return the seconds until each of several new processes has scored, and the last one."""
    seconds: list[float] = []
    while True:
        started = time.perf_counter()
        guard = Guard({"": Arithmetic()}, 10.0, process=InProcess({"": Arithmetic}, 8.0))
        medians({"": guard}, 1, 1)
        seconds.append(time.perf_counter() - started)
        progress("start", len(seconds), count, seconds[-1])
        if len(seconds) == count:
            return seconds, guard
        guard.close()


def medians(guards: dict[str, Guard], steps: int, characters: int) -> dict[str, float]:
    """Return the median seconds of a step of each; they take turns, step by step."""
    prompts, answers = [], []
    for i in range(GROUPS):
        right = "1" * characters
        prompts.append(Prompt(str(i), f"{i}=", {"answer": right}))
        # objects of their own, as decoding returns them: pickle writes the same object once
        answers.append([Answer(right.encode().decode(), True) for _ in range(SIZE)])
    seconds: dict[str, list[float]] = {name: [] for name in guards}
    for _ in range(steps):
        for name, guard in guards.items():
            started = time.perf_counter()
            assert guard(prompts, answers) == [[1.0] * SIZE] * GROUPS
            seconds[name].append(time.perf_counter() - started)
    return {name: median(own) for name, own in seconds.items()}


if __name__ == "__main__":
    main()

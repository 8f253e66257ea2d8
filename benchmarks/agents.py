"""Measure sessions over the endpoint beside dialogues with an environment.

    python benchmarks/agents.py --model FOLDER --before CHECKOUT

Both sides multiply with a calculator, in two turns: `recipes/calculator.py` through the endpoint,
and an environment with the same tool, whose dialogues take turns together. The sides are processes
that take turns, and each of their searches holds the same number of sessions. A further row has a
program that pauses for half a second on average before each call. `--before` is a checkout of an
earlier commit, 1c9a7b78 or later, whose own `_agents.py` holds its dialogues with an environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from statistics import median

from _measure import ROOT, Row, arguments, need_model, progress, record, row

PROMPTS = 6
SAMPLES = 4
WARMUP = 2


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--before", help="checkout of an earlier commit, to compare with")
    options = parser.parse_args()
    model = need_model(options)
    folders = {"endpoint": str(ROOT), "environment": str(ROOT), "pausing": str(ROOT)}
    if options.before:
        folders["before"] = options.before
    sides = {name: Side(name, folder, model) for name, folder in folders.items()}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(WARMUP + options.repeats):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            seconds, tokens = sides[name].search(turn)
            progress(name, turn - WARMUP + 1, options.repeats, seconds)
            rates[name].append(tokens / seconds)
    for side in sides.values():
        side.close()
    rates = {name: own[WARMUP:] for name, own in rates.items()}
    for name, own in rates.items():
        print(f"{name}: {median(own):.1f} tokens/s, {min(own):.1f} to {max(own):.1f}")
    record(__file__, rows(rates), options)


def rows(rates: dict[str, list[float]]) -> list[Row]:
    """Return what is compared: with dialogues of the earlier commit, if they were measured."""
    peer = "before" if "before" in rates else "environment"
    dialogues = "with an environment"
    if peer == "before":
        dialogues += ", an earlier commit"
    count = PROMPTS * SAMPLES
    ready = f"{count} sessions of a program, all ready"
    pausing = f"{count} sessions of a program that pauses"
    note = "SmolLM2-135M-Instruct, a calculator, 2 turns"
    found = [
        row(
            ready, rates["endpoint"], "tokens/s", rates[peer], peer_is=dialogues,
            ratio_is="ours / peer", goal="ratio >= 0.85", note=note,
        ),
        row(
            pausing, rates["pausing"], "tokens/s", rates["endpoint"], peer_is="all ready",
            ratio_is="ours / peer", note=f"{note}; half a second on average before each call",
        ),
    ]  # fmt: skip
    if peer == "before":
        found.append(
            row(
                f"{count} dialogues with an environment", rates["environment"], "tokens/s",
                rates[peer], peer_is=dialogues, ratio_is="ours / peer", goal="ratio >= 0.95",
                note=note,
            )
        )  # fmt: skip
    return found


class Side:
    """A process that holds sessions when it is told to."""

    def __init__(self, name: str, folder: str, model: str) -> None:
        script = f"{folder}/benchmarks/_agents.py"
        side = "environment" if name == "before" else name
        self._process = subprocess.Popen(
            [sys.executable, script, side, model, str(PROMPTS), str(SAMPLES)],
            env={**os.environ, "PYTHONPATH": folder}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def search(self, seed: int) -> tuple[float, int]:
        """Return the seconds of a search, and the tokens that were sampled."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(seed, file=self._process.stdin, flush=True)
        seconds, tokens = json.loads(self._process.stdout.readline())
        return seconds, tokens

    def close(self) -> None:
        self._process.communicate()


if __name__ == "__main__":
    main()

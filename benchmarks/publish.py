"""Measure a publication of weights: how long it blocks the trainer, and until it is adopted.

    python benchmarks/publish.py            # a model in SmolLM2-135M's shape; two minutes, 6 GB
    python benchmarks/publish.py --ranks 2  # the trainer is divided over two processes (gloo)
    python benchmarks/publish.py --tiny     # a tiny one, in seconds

A trainer with random weights publishes to one idle searcher process with the transformers engine,
in fp32 and, if the CPU has it, in bf16. The peer is publishing without a background: computing the
probe's log-probs, converting and sending block the trainer.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from _measure import Row, arguments, in_bf16, machine, progress, record, row
from _models import SMOLLM2_135M, TINY, save_random

from tba.config.schema import Config, load
from tba.open import open_run
from tba.prompt import Prompt
from tba.run import Run
from tba.runtime.deadline import bind_ray
from tba.types import Group, Trajectory, collate

SECONDS = 60.0
"""Deadline of every wait."""


@dataclass
class Measured:
    """Seconds of every publication in one precision."""

    megabytes: float = 0.0
    blocked: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    adopted: list[float] = field(default_factory=list)
    synchronous: list[float] = field(default_factory=list)

    def rows(self, name: str, ranks: int) -> list[Row]:
        name = f"publish {self.megabytes:.0f} MB {name}{f', {ranks} ranks' if ranks > 1 else ''}"
        loaded = [a - s for a, s in zip(self.adopted, self.sent, strict=True)]
        return [
            row(
                f"{name}: trainer blocked", self.blocked, "s", self.synchronous,
                peer_is="without a background", goal="value <= 0.1",
            ),
            row(f"{name}: from publication until adopted by an idle searcher", self.adopted, "s",
                goal="value <= 0.5", note="with the probe's log-probs on the trainer's side"),
            row(f"{name}: part of this, received and loaded by the searcher", loaded, "s",
                note="with the check of the log-probs"),
        ]  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=1, help="processes of the trainer")
    options = parser.parse_args()
    machine()  # before a run pins this process to the cores of its trainer
    bind_ray(None)  # before `no_searches` imports Ray
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save_random(model, TINY if options.tiny else SMOLLM2_135M)
        for name, autocast in (("fp32", "off"), ("bf16", "bf16"))[: 1 + in_bf16()]:
            given = config(model, Path(folder) / name, autocast, options.ranks)
            with no_searches(), open_run(given) as run:
                rows += measure(run, options.repeats).rows(name, options.ranks)
    record(__file__, rows, options, part=True)  # the rows for another number of ranks stay


def config(model: Path, folder: Path, autocast: str, ranks: int) -> Config:
    settings = [f"policy.model={model}", f"run.folder={folder}", f"policy.autocast={autocast}"]
    settings += ["task=arithmetic", "eval.prompts=0", "runtime.use=ray", "sampling.max_tokens=16"]
    settings += ["sampling.samples=2", "trainer.batch_size=4", "trainer.group_size=2"]
    settings += [f"trainer.devices={ranks}"]
    return load(None, [*settings, "log.console=off", "log.report_to=[]"])


class no_searches:
    """Let the searchers of a run be idle."""

    def __enter__(self) -> None:
        from tba.runtime.ray import RaySearchers

        self._hand_out = RaySearchers._hand_out_searches
        RaySearchers._hand_out_searches = lambda _: None  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        from tba.runtime.ray import RaySearchers

        RaySearchers._hand_out_searches = self._hand_out  # type: ignore[method-assign]


def measure(run: Run, repeats: int) -> Measured:
    """Take one step, which makes a probe, and publish: first once to warm up, then to measure."""
    run.trainer.step(collate(groups()), 1)  # step 0 compares log-probs, which no model has given
    measured = Measured()
    for turn in range(-1, repeats):
        blocked, sent, adopted = publish(run, version=turn + 2)
        started = time.perf_counter()
        measured.megabytes = run.trainer.send(version=0).nbytes / 1e6  # nobody keeps its memory
        synchronous = time.perf_counter() - started
        progress("blocked", turn + 1, repeats, blocked)
        progress("adopted", turn + 1, repeats, adopted)
        if turn >= 0:
            measured.blocked.append(blocked)
            measured.sent.append(sent)
            measured.adopted.append(adopted)
            measured.synchronous.append(synchronous)
    return measured


def publish(run: Run, version: int) -> tuple[float, float, float]:
    """Return the seconds for which the trainer was blocked, until sent, and until adopted."""
    searchers = run.searchers
    before = searchers.stats
    started = time.perf_counter()
    searchers.publish(run.trainer, version)
    blocked = time.perf_counter() - started
    until(lambda: searchers.stats.counts["sync/bytes"] > before.counts["sync/bytes"])
    sent = searchers.stats.publish_seconds - before.publish_seconds
    known = before.latest.get("sync/adopted")
    until(lambda: searchers.stats.latest.get("sync/adopted") != known)
    return blocked, sent, searchers.stats.latest["sync/adopted"]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError("a publication did not arrive")
        time.sleep(0.002)


def groups() -> list[Group]:
    """Return two groups of two responses: enough for a step."""
    rng = np.random.default_rng(0)
    made = []
    for b in range(2):
        tokens = [rng.integers(2, 14, 16).astype(np.int32) for _ in range(3)]
        logp = np.full(16, -2.0, np.float32)
        pair = tuple(Trajectory(t, logp, logp, float(b), 0, True) for t in tokens[1:])
        made.append(Group(Prompt(str(b), "?"), tokens[0], pair))
    return made


if __name__ == "__main__":
    main()

"""List the files of the package through which one prompt passes, into the buffer and into a step.

    python scripts/prompt_path.py

One local run of the bundled model: 2 prompts with 4 answers each are searched, scored and stored,
then drawn for a training step. A file counts if one of its functions is called for this work, in
any thread of this process; the scoring process has others. The first search and step are not
counted: they also fill caches.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import tba
from tba.types import collate

ROOT = Path(tba.__file__).parent
SETTINGS = [
    "run.steps=3",
    "runtime.use=local",
    "sampling.samples=4",
    "trainer.batch_size=8",
    "trainer.group_size=4",
    "log.console=off",
]


def show(title: str, calls: Counter[str]) -> None:
    """Print the files with the number of calls, and forget the calls."""
    print(f"\n{title}: {len(calls)} files, {calls.total():,} calls")
    for name, count in calls.most_common():
        print(f"{count:6,}  {name}")
    calls.clear()


def main() -> None:
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{ROOT}/"):
            calls[f"tba/{code.co_filename.removeprefix(f'{ROOT}/')}"] += 1

    threading.setprofile(profile)  # threads that search begin while the run opens
    with tempfile.TemporaryDirectory() as folder:
        config = tba.load(ROOT / "config" / "default.toml", [*SETTINGS, f"run.folder={folder}/run"])
        with tba.open_run(config) as run:
            run.collect("first_fill")
            run.trainer.step(collate(run.sample()), 0)
            calls.clear()
            sys.setprofile(profile)
            run.collect()
            show("from 2 prompts x 4 answers to the buffer", calls)
            batch = collate(run.sample())
            run.trainer.step(batch, 1)
            show("from the buffer through a step", calls)
            sys.setprofile(None)


if __name__ == "__main__":
    main()

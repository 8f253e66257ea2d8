"""Cases of the suite of faults: numbered and seeded, with figures, and in processes of their own.

`make faults` runs a fifth of the cases of each entry, and `make faults FULL=1` all of them. The id
of a case has its entry and its number, from which its random numbers follow: `-k 03-017` repeats
it. A few cases of most entries are part of `make test`.
"""

import ast
import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

ROOT = Path(__file__).parent.parent
FULL = os.environ.get("FULL") == "1"
SHARE = 5
"""Without FULL, one case of so many runs."""
RECORDS = Path(os.environ["FAULTS"]) if os.environ.get("FAULTS") else None
"""File that gets a line for each case; the lines of `make faults FULL=1` are remembered."""

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tba.open", "transformers.models.llama.modeling_llama"])


def source_nodes() -> Iterator[tuple[str, ast.AST]]:
    """Yield every node of the package's syntax trees, after its file."""
    for path in sorted((ROOT / "tba").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            yield str(path.relative_to(ROOT)), node


@dataclass
class Case:
    """One of the cases of an entry, and its figures."""

    entry: int
    index: int
    tried: int = 0
    survived: int = 0
    seconds: float | None = None
    """Longest time until a fault was noticed."""
    leftovers: int | None = None
    """Processes and files that were left behind; None if nothing was looked for."""
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.entry, self.index])

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Count a fault as tried, and as survived if the block ends well."""
        self.tried += 1
        yield
        self.survived += 1

    def noticed(self, seconds: float) -> float:
        """Record the time until a fault was noticed."""
        self.seconds = max(seconds, self.seconds or 0.0)
        return seconds

    def left(self, count: int) -> int:
        """Record how many processes and files were left behind."""
        self.leftovers = count + (self.leftovers or 0)
        return count

    def pick(self, items: Sequence[Any]) -> Any:
        return items[int(self.rng.integers(len(items)))]


def cases(
    entry: int, full: int, quick: int = 0, part: int | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for each of `full` cases, of which `quick` are part of `make test`.

    Without FULL, every fifth runs, or `part` of them.
    """
    every = -(-full // (part or -(-full // SHARE)))
    chosen = range(full) if FULL else sorted({*range(quick), *range(0, full, every)})
    numbered = [
        pytest.param(
            (entry, i), id=f"{entry:02d}-{i:03d}", marks=() if i < quick else pytest.mark.fault
        )
        for i in chosen
    ]
    return pytest.mark.parametrize("case", numbered, indirect=True)


BEFORE = "passed before"
CASE = pytest.StashKey[Case]()


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    """The case of this test, unless it has passed in a part of `make faults FULL=1` before."""
    one = Case(*request.param)
    if request.node.nodeid in remembered():
        pytest.skip(BEFORE)
    request.node.stash[CASE] = one
    return one


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, Any]:
    """Record what became of a case."""
    report = yield
    marks = item.iter_markers("parametrize")
    if not any(m.args[0] == "case" and m.kwargs.get("indirect") for m in marks):
        return report
    own = item.stash.get(CASE, None) or Case(*item.callspec.params["case"])
    reason = str(report.longrepr[2]) if report.skipped else ""
    if BEFORE not in reason and (report.when == "call" or not report.passed):
        record(item.nodeid, own, report.outcome, report.duration, reason)
    return report


def record(node: str, case: Case, outcome: str, wall: float, reason: str = "") -> None:
    """Write down what became of a case, by the id of its test."""
    if RECORDS is None:
        return
    tried = max(1, case.tried)
    survived = case.survived if case.tried else int(outcome == "passed")
    test, _, identity = node.partition("[")
    line = {
        "test": test,
        "id": identity.removesuffix("]"),
        "entry": case.entry,
        "index": case.index,
        "outcome": outcome,
        "tried": tried,
        "survived": survived if outcome == "passed" else min(survived, tried - 1),
        "seconds": case.seconds,
        "leftovers": case.leftovers,
        "wall": round(wall, 2),
        "reason": reason,
        "full": FULL,
        "source": source(test.partition("::")[0]),
    }
    RECORDS.parent.mkdir(parents=True, exist_ok=True)
    with RECORDS.open("a") as file:
        file.write(json.dumps(line) + "\n")


@cache
def remembered() -> set[str]:
    """Return the ids of what has passed before, with the same code of package and test."""
    if not FULL or RECORDS is None or not RECORDS.exists():
        return set()
    lines = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    sound = [x for x in lines if x["source"] == source(x["test"].partition("::")[0])]
    return {f"{x['test']}[{x['id']}]" for x in sound if x["outcome"] == "passed"}


@cache
def source(test: str) -> str:
    """Return a digest of the package, of a file of tests and of what that imports from tests/."""
    names = ("suite.py", "conftest.py", "exact.py", "fakes.py", "toy.py")
    common = [ROOT / "tests" / name for name in names]
    package = (ROOT / "tba").rglob("*.py")
    digest = hashlib.sha256()
    for path in sorted({*package, *common, *imported(ROOT / test)}):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def imported(file: Path) -> set[Path]:
    """Return a file of tests and every file of tests/ that it imports, also by another one."""
    files, todo = set[Path](), [file]
    while todo:
        path = todo.pop()
        if path in files or not path.exists():
            continue
        files.add(path)
        for name in modules_in(path):
            todo += [folder / f"{name}.py" for folder in (ROOT / "tests", path.parent)]
    return files


def modules_in(file: Path) -> set[str]:
    """Return the names of the modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@contextmanager
def forked(target: Callable[..., None], *arguments: Any) -> Iterator[BaseProcess]:
    """Run a function in a process that has imported the package; it is killed at the end."""
    process = FORKS.Process(target=target, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(10)


def carry_out(settings: Sequence[str], resume: Path | None = None) -> None:
    """Carry out or resume a run in this process, which does nothing else."""
    import torch

    from tba.cli import _config
    from tba.open import run

    torch.set_num_threads(1)
    torch.manual_seed(0)  # its state is saved
    run(_config(list(settings), resume), resume)


def until(true: Callable[[], bool], seconds: float, every: float = 0.01) -> float:
    """Wait until something is true, and return the seconds that this took."""
    started = time.monotonic()
    while not true():
        assert time.monotonic() - started < seconds, f"not within {seconds:g} s"
        time.sleep(every)
    return time.monotonic() - started


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that run; zombies do not."""
    return [process for process in processes if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # it ends between the two questions
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def command_of(process: psutil.Process) -> list[str]:
    """Return the command of a process, which is empty if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []

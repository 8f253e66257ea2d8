"""Run the benchmarks one after another, and write the table of benchmarks/README.md.

    make bench                        # at most 40 minutes on two idle cores
    make bench ONLY="publish lora"    # some of them
    make bench-long                   # the reference run, reward latency and more: hours

A script that fails does not stop the others. A script that cannot run here says why and is skipped:
those that need a real model look for it in BENCH_MODEL (a folder of SmolLM2-135M-Instruct), those
that need data in BENCH_DATA (a folder of two_number_sums.{train,test}.jsonl).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from _measure import ROOT, SKIPPED, common_variables, write_page

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Script:
    """A script with its usual minutes on two idle cores."""

    name: str
    minutes: float
    arguments: tuple[str, ...] = ()
    environment: str = ".venv-bench"
    long: bool = False


SCRIPTS = (
    Script("generation", 3),
    Script("training_step", 11),
    Script("publish", 2),
    Script("lora", 3),
    Script("vllm_engine", 8, ("--parts", "raw", "search", "gap"), environment=".venv-vllm"),
    Script("paced", 5),
    Script("searchers", 5),
    Script("replay", 2),
    Script("vllm_engine", 5, ("--parts", "drain"), environment=".venv-vllm", long=True),
    Script("agents", 6, long=True),
    Script("publish", 3, ("--ranks", "2"), long=True),
    Script("reference_run", 130, ("--parts", "full"), long=True),
    Script("whole_run", 300, long=True),
    Script("reward_latency", 35, long=True),
    Script("reward_latency", 20, ("--score", "1"), long=True),
    Script("pure_compute", 40, long=True),
    Script("reference_run", 100, ("--parts", "lora"), long=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="*", help="names of scripts; default: all of them")
    parser.add_argument("--long", action="store_true", help="run those that take hours")
    parser.add_argument("--list", action="store_true", help="print the scripts, and stop")
    options = parser.parse_args()
    unknown = set(options.only) - {script.name for script in SCRIPTS}
    if unknown:
        known = ", ".join(sorted({script.name for script in SCRIPTS}))
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are: {known}")
    scripts = [s for s in SCRIPTS if s.long == options.long or s.name in options.only]
    if options.only:
        scripts = [s for s in scripts if s.name in options.only]
    if options.list:
        for script in scripts:
            print(f"{script.name} {' '.join(script.arguments)}: {script.minutes:g} minutes")
        return
    print(f"{len(scripts)} benchmarks, about {sum(s.minutes for s in scripts):.0f} minutes")
    outcomes = [(script, run(script)) for script in scripts]
    write_page()
    print()
    for script, outcome in outcomes:
        print(f"{script.name:<16} {outcome}")
    if any(outcome.startswith("FAILED") for _, outcome in outcomes):
        raise SystemExit(1)


def run(script: Script) -> str:
    """Run a script, and return in words how it ended."""
    python = interpreter(script)
    if python is None:
        return f"skipped: there is no {script.environment}; `make test-vllm` builds it"
    print(f"\n{script.name}: about {script.minutes:g} minutes", flush=True)
    started = time.perf_counter()
    command = [str(python), str(HERE / f"{script.name}.py"), *script.arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=common_variables()
    )
    assert process.stdout is not None
    reason = "no reason given"
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.startswith("skipped: "):
            reason = line.removeprefix("skipped: ").strip()
    status = process.wait()
    minutes = (time.perf_counter() - started) / 60
    if status == SKIPPED:
        return f"skipped: {reason}"
    return f"done in {minutes:.1f} minutes" if status == 0 else f"FAILED with {status}"


def interpreter(script: Script) -> Path | None:
    """Return the Python of the script's environment, or this one if it is not vLLM's."""
    own = ROOT / script.environment / "bin" / "python"
    if own.exists():
        return own
    return None if script.environment == ".venv-vllm" else Path(sys.executable)


if __name__ == "__main__":
    main()

"""Runs of the reference run: carried out once, evaluated, and kept as lines of JSON."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import _measure
from _measure import bench_python, common_variables
from _sums import RECIPES, PendingReply, Side, write_rows

HERE = Path(__file__).parent
RUNS = HERE / "runs" / "reference_run.jsonl"
SIDES: tuple[Side, ...] = ("asynchronous", "synchronous", "trl")
STEPS: dict[Side, int] = {"asynchronous": 30, "synchronous": 25, "trl": 25}
"""Steps of a run, about twice as many as it usually needs."""
SECONDS: dict[Side, float] = {"asynchronous": 600.0, "synchronous": 600.0, "trl": 1200.0}
"""Seconds after which a run stops, even on a slow machine."""
EVERY: dict[Side, float] = {"asynchronous": 2.5, "synchronous": 2.5, "trl": 5.0}
"""Seconds between evaluations, or a step, whichever is longer: every step or every second one."""
OURS = ("objective=tb", "objective.beta=0.02")
BASE: dict[Side, tuple[str, ...]] = {
    "asynchronous": (
        *OURS,
        "strategy.recent=0.9",
        "strategy.reward=0.0",
        "runtime.concurrent_searches=1",
    ),
    "synchronous": (*OURS, "objective.taper=none", "strategy=recent"),
    "trl": (),
}
FULL = ("objective.taper=residual", "runtime.prompts_per_task=4")
"""Further settings of the asynchronous side without LoRA: fewer prompts in a task, less lag."""
LORA = ("policy.lora.r=16", "policy.lora.alpha=32", "objective.taper=residual")
SPEED_ONLY = (
    "attn_implementation", "per_device_train_batch_size", "gradient_accumulation_steps", "memory",
)  # fmt: skip
SAME_SPEED = 1.2
"""Largest ratio of the machine's speeds at which runs are compared without a remark."""
RENAMED = {
    "objective.tapered=true": "objective.taper=residual",
    "objective.tapered=false": "objective.taper=none",
}
"""Options of earlier runs, by the names that they had."""
IDENTITY = ("side", "rate", "seed", "lora", "latency", "options")


@dataclass(frozen=True)
class Best:
    """The rate and the options with which a side reached the goal first."""

    rate: float
    options: tuple[str, ...]

    def is_of(self, run: dict[str, Any]) -> bool:
        """Return whether a run has this rate and these options, those of speed aside."""
        same = learning_options(run["options"]) == learning_options(self.options)
        return run["rate"] == self.rate and same


def learning_options(options: Sequence[str]) -> tuple[str, ...]:
    """Return the options without those that change the time of a step only."""
    return tuple(o for o in options if o.partition("=")[0] not in SPEED_ONLY)


class Laboratory:
    """Runs jobs, or finds them among those that have been run."""

    def __init__(self, options: argparse.Namespace, path: Path):
        self.options = options
        self.python = bench_python()
        self.scratch = Path(tempfile.mkdtemp(prefix="tba-bench-"))
        self.path = self.scratch / "runs.jsonl" if options.tiny else path

    def run(self, job: PendingReply) -> dict[str, Any]:
        """Return the run of this job with its scores; it is carried out if it is not kept."""
        identity = json.loads(json.dumps(identity_of(job)))
        for known in read_runs(self.path):
            same = all(known[name] == value for name, value in identity.items())
            if same and (known.get("limit", job.seconds) >= job.seconds):
                return known
        gflops = _measure.matmul_speed()
        result = self.carry_out(job)
        scores = evaluate(job, self.python, result["snapshots"])
        shutil.rmtree(job.folder, ignore_errors=True)
        curve = []
        for row, (score, error) in zip(result["snapshots"], scores, strict=True):
            at = {"seconds": row["seconds"], "step": row["step"]}
            curve.append({**at, "score": score, "stderr": error})
        known = {
            **identity, "curve": curve, "points": result["points"],
            "searchers": result.get("searchers"), "versions": _measure.versions(), "gflops": gflops,
            "dtype": "bf16" if _measure.in_bf16() else "fp32", "limit": job.seconds,
        }  # fmt: skip
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(rounded(known)) + "\n")
        return known

    def carry_out(self, job: PendingReply) -> dict[str, Any]:
        """Run a job in a process of its own, and return what it prints."""
        print(f"  running {describe(job)}", file=sys.stderr, flush=True)
        script = "_peer_trl.py" if job.side == "trl" else "_ours.py"
        command = [self.python, str(HERE / script), job.dump()]
        deadline = 600 + 3 * job.seconds
        return _measure.run_json(command, deadline, common_variables(), show_errors=True)

    def seconds_a_step(self, job: PendingReply) -> float:
        """Return the median seconds of a step, without the first, in a short run."""
        short = replace(job, steps=4, every=0.0, seconds=150.0)
        return median(steps_of(self.carry_out(short)))


class Sums(Laboratory):
    """Runs of the reference run, which need its model and data."""

    def __init__(self, options: argparse.Namespace, path: Path = RUNS):
        model = _measure.need_model(options)
        self.data = _measure.need_data(options)
        super().__init__(options, path)
        if options.tiny:
            from _models import TINY, save_random  # with torch

            save_random(self.scratch / "model", TINY, Path(model))
            model = str(self.scratch / "model")
        self.model = model

    def job(
        self, side: Side, lora: bool, rate: float, seed: int, latency: float | None = None,
        options: tuple[str, ...] = (),
    ) -> PendingReply:  # fmt: skip
        """Return a job of a side, with its usual length."""
        rows = write_rows(self.data, self.scratch / f"rows-{latency or 0.0:g}", latency)
        if lora and side != "trl":
            options = (*options, *LORA)
        elif side == "asynchronous":
            options = tuple(dict.fromkeys((*options, *FULL)))
        job = PendingReply(
            "sums", side, self.model, str(rows), str(self.scratch / "run"), rate, seed, lora,
            SECONDS[side], STEPS[side], EVERY[side], latency=latency, options=options,
        )  # fmt: skip
        return replace(job, steps=2, every=1.0) if self.options.tiny else job


def identity_of(job: PendingReply) -> dict[str, Any]:
    plain = asdict(job)
    return {name: plain[name] for name in IDENTITY}


def describe(job: PendingReply) -> str:
    parts = [f"{job.side}, rate {job.rate:g}, seed {job.seed}", *job.options]
    if job.latency is not None:
        parts.append(f"{job.latency:g} s of latency")
    return f"{', '.join(parts)}: up to {job.steps} steps or {job.seconds:.0f} s"


def evaluate(
    job: PendingReply, python: str, snapshots: Sequence[dict[str, Any]]
) -> list[tuple[float, float]]:
    """Return score and standard error of each snapshot."""
    if not snapshots:
        return []
    command = [python, str(HERE / "_evaluate.py"), job.dump()]
    done = subprocess.run(
        command, input=json.dumps(snapshots), stdout=subprocess.PIPE, text=True, check=True,
        timeout=300 + 120 * len(snapshots), env=common_variables(),
    )  # fmt: skip
    scores: list[tuple[float, float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return scores


def read_runs(path: Path = RUNS) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    for run in runs:
        run["options"] = [RENAMED.get(option, option) for option in run["options"]]
    return runs


def reference_runs(
    runs: Sequence[dict[str, Any]], side: Side, lora: bool, latency: float | None = None
) -> list[dict[str, Any]]:
    """Return the runs of a side."""
    wanted = {"side": side, "lora": lora, "latency": latency}
    return [r for r in runs if all(r[name] == value for name, value in wanted.items())]


def best_of(runs: Sequence[dict[str, Any]]) -> Best:
    """Return rate and options of the run of seed 0 that reached the goal first, or came closest."""

    def how_good(run: dict[str, Any]) -> tuple[float, float]:
        return time_to_goal(run), -max(point["score"] for point in run["curve"])

    first = min((r for r in runs if r["seed"] == 0), key=how_good)
    return Best(first["rate"], tuple(first["options"]))


def time_to_goal(run: dict[str, Any], goal: float = RECIPES["sums"].goal) -> float:
    """Return the seconds to the goal, interpolated between two evaluations; inf if not reached."""
    before: dict[str, float] | None = None
    for point in run["curve"]:
        if point["score"] >= goal:
            if before is None:
                return point["seconds"]
            part = (goal - before["score"]) / (point["score"] - before["score"])
            return before["seconds"] + part * (point["seconds"] - before["seconds"])
        before = point
    return float("inf")


def time_or_length(run: dict[str, Any], goal: float = RECIPES["sums"].goal) -> float:
    """Return the seconds to the goal, or how long the run was: then they would be more."""
    return min(time_to_goal(run, goal), run["points"][-1]["seconds"])


def steps_of(run: dict[str, Any]) -> list[float]:
    """Return the seconds of each step but the first."""
    seconds = [point["seconds"] for point in run["points"]]
    return [b - a for a, b in pairwise(seconds)]


def with_speeds(
    note: str, ours: Sequence[dict[str, Any]], peers: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return `note` and `gflops` of a row: the machine's speed during our runs.

    The note has a remark if the machine was faster for one side, or if they ran in fp32.
    """
    own, other = (median(run["gflops"] for run in runs) for runs in (ours, peers))
    remarks = [note]
    if max(own, other) > SAME_SPEED * min(own, other):
        remarks.append(f"{own:.0f} GFLOP/s during our runs, {other:.0f} during the peer's")
    if any(run.get("dtype") == "fp32" for run in (*ours, *peers)):
        remarks.append(_measure.IN_FP32)
    return {"note": "; ".join(filter(None, remarks)), "gflops": round(own)}


def search_table(runs: Sequence[dict[str, Any]]) -> str:
    """Return all runs without latency as a table: the search for rates, and the seeds."""
    lines = [
        "| side | LoRA | rate | options | seed | s to .50 | best score | s a step |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in sorted(runs, key=lambda r: (r["lora"], SIDES.index(r["side"]), r["rate"])):
        if run["latency"] is not None:
            continue
        to_goal = time_to_goal(run)
        own = [o for o in run["options"] if o not in (*BASE[run["side"]], *LORA)]
        cells = [
            run["side"], "yes" if run["lora"] else "no", f"{run['rate']:g}", " ".join(own),
            str(run["seed"]), "not reached" if to_goal == float("inf") else f"{to_goal:.0f}",
            f"{max(point['score'] for point in run['curve']):.3f}", f"{median(steps_of(run)):.1f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rounded(value: Any) -> Any:
    """Round numbers to six digits: the files are committed."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list | tuple) else value

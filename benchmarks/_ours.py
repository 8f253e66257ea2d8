"""Run one job of the reference run with this package: `python _ours.py JOB`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from _models import Snapshots
from _sums import PendingReply

from tba.config.schema import Config, load
from tba.open import open_run
from tba.run import Run, train
from tba.types import Group

HERE = Path(__file__).parent


class Enough(Exception):
    """The job has trained long enough."""


def main() -> None:
    job = PendingReply.parse(sys.argv[1])
    torch.set_num_threads(job.threads)
    result = run(job)
    print(json.dumps(result), flush=True)
    sys.stdout.flush()


def run(job: PendingReply) -> dict:
    with open_run(config(job)) as opened:
        wait_for_searchers(opened)
        recorder = Recorder(job, opened)
        opened.log_step = recorder.step  # called at the end of each step
        try:
            with opened.tracker.clock():
                train(opened)
        except Enough:
            pass
        stats = opened.searchers.stats
        result = recorder.result()
        result["searchers"] = dict(stats.seconds)
    recorder.snapshots.write()
    return result


def config(job: PendingReply) -> Config:
    reward = "exact" if job.latency is None else "judged"
    r = job.recipe
    ends = () if job.recipe_name == "arithmetic" else (r'sampling.stop=["\n"]',)
    settings = [
        f"run.folder={job.folder}/run", f"run.seed={job.seed}", "run.steps=100000",
        f"policy.model={job.model}",
        "task=custom", f"task.data={job.data}/train.jsonl",
        f"task.held_out_data={job.data}/test.jsonl", f"task.held_out_size={r.held_out}",
        f"task.reward={HERE / '_sums.py'}:{reward}", "task.pass_reward=1.0",
        f"sampling.samples={r.samples}", f"sampling.max_tokens={r.tokens}",
        f"trainer.batch_size={r.batch}", f"trainer.group_size={r.samples}",
        f"trainer.learning_rate={job.rate}", f"trainer.warmup_steps={r.warmup}",
        f"runtime.use={'ray' if job.side == 'asynchronous' else 'local'}",
        f"runtime.prompts_per_task={r.prompts}",
        "runtime.max_reuse=inf",  # the two sides never wait for each other
        "eval.prompts=0", "checkpoint.every=0",
        "log.console=off", "log.report_to=[]", "log.sample_every=0",
        *ends,
        *job.options,
    ]  # fmt: skip
    return load(None, settings)


def wait_for_searchers(opened: Run) -> None:
    """Wait until searcher processes have loaded their models: loading is not timed."""
    if opened.config.runtime.use == "local":
        return
    deadline = time.monotonic() + 300
    while any(handle.has("start") for handle in opened.searchers._pool.handles):
        if time.monotonic() > deadline:
            raise TimeoutError("the searchers did not start within 300 s")
        time.sleep(0.02)


class Recorder:
    """Takes the place of `Run.log`: snapshots, step times, and the count of samples.

    A sample counts once, when it has been generated, scored and trained on. A group may be drawn
    again: then the draws of its prompt are more than its samples, and only these count.
    """

    def __init__(self, job: PendingReply, opened: Run):
        self.job = job
        self.opened = opened
        self.snapshots = Snapshots(Path(job.folder), job.every, job.bf16, job.at)
        self.drawn: Counter[str] = Counter()
        self.arrived: Counter[str] = Counter()
        self.points: list[dict[str, float]] = []
        add = opened.buffer.add

        def counted(groups: list[Group], now: int) -> None:
            for group in groups:
                self.arrived[group.prompt.id] += len(group.trajectories)
            add(groups, now)

        opened.buffer.add = counted

    def step(self, metrics: dict[str, float], groups: list[Group]) -> None:
        opened = self.opened
        totals = opened.tracker.step(opened.step - 1, groups, opened.buffer, opened.searchers.stats)
        for group in groups:
            self.drawn[group.prompt.id] += len(group.trajectories)
        seconds = self.snapshots.seconds()
        point = {
            "step": opened.step,
            "seconds": seconds,
            "samples": sum(min(n, self.arrived[p]) for p, n in self.drawn.items()),
            "generated": totals["samples_generated"],
            "step_time": metrics["step_time"],
            "reward": metrics["reward"],
            "lag": totals["off_policy/lag_mean"],
            "waited": totals["wait/trainer"],
            "searchers_idle": totals["wait/searchers"],
        }
        self.points.append(point)
        report(self.job.side, point)
        self.snapshots.take(lambda: named_weights(opened), opened.step)
        if seconds >= self.job.seconds or opened.step >= self.job.steps:
            raise Enough

    def result(self) -> dict:
        return {"points": self.points, "snapshots": self.snapshots.rows}


def named_weights(opened: Run) -> dict[str, torch.Tensor]:
    """Return the parameters that are trained, by name."""
    model = opened.trainer.policy.model
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def report(side: str, point: dict[str, float]) -> None:
    step = int(point["step"])
    seconds = point["seconds"]
    text = f"    {side} step {step}: {seconds:.1f} s, reward {point['reward']:.2f}"
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""Noise of the gradient against the group size K and the length of responses.

    python studies/off_policy/gradient_variance.py [OUT] [BATCHES]

The bundled model answers sums, on policy and before any training. Each batch has 64 responses:
64 / K prompts of K. Over many batches, noise is the trace of the gradient's covariance, and signal
the squared norm of its mean, less what noise adds to it. Noise / signal is the number of batches
to average until the noise is as small as the signal.

For the length n, answers are cut off after n tokens, and a beginning of the right answer is right.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, pstdev
from tempfile import TemporaryDirectory

import pandas as pd
import torch

from tba.config.schema import load
from tba.learn.policy import Policy
from tba.objectives import Objective
from tba.prompt import Answer, Prompt
from tba.setup.setup import RunSetup, check
from tba.tasks.arithmetic import Arithmetic
from tba.types import Batch, collate

Row = dict[str, float | str]

RESPONSES = 64
FOLDS = 10
KS = (2, 4, 8, 16, 32)
LENGTHS = (1, 2, 3, 4, 5)
OBJECTIVES = {
    "tb": ".beta=0.1",
    "rloo": ".beta=0.1",
    "tba_prime": ".beta=0.1",
    "grpo": ".beta=0.04",
    "dr_grpo": ".beta=0.0",
    "online_dpo": ".beta=0.1",
    "raft": "",
}


@dataclass(frozen=True)
class RightSoFar(Arithmetic):
    """Sums with reward 1 for the right answer or a beginning of it."""

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        right = str(prompt.columns["answer"])
        return [float(a.text == right if a.finished else right.startswith(a.text)) for a in answers]


def parts_for(objective: str, k: int, max_tokens: int) -> RunSetup:
    settings = [
        f"objective={objective}",
        "runtime.use=local",
        "task=gradient_variance.RightSoFar",
        f"sampling.samples={k}",
        f"trainer.group_size={k}",
        f"trainer.batch_size={RESPONSES}",
        f"sampling.max_tokens={max_tokens}",
    ]
    if OBJECTIVES[objective]:
        settings.append(f"objective{OBJECTIVES[objective]}")
    with TemporaryDirectory() as folder:
        return check(load(None, [*settings, f"run.folder={folder}/run"]))


def batches(parts: RunSetup, count: int) -> Iterator[Batch]:
    searcher = parts.search_setup().build("cpu", False)
    stream = parts.prompt_stream()
    for seed in range(count):
        yield collate(searcher.search(stream.take(parts.config.trainer.groups), seed).groups)


def noise_and_signal(
    policy: Policy, objective: Objective, batches: Sequence[Batch]
) -> tuple[float, float, float]:
    """Return unbiased estimates of noise and signal, and the standard error of their ratio.

    The signal is the mean product of the mean gradients of two folds of the batches. The error is a
    jackknife over the folds.
    """
    parameters = list(policy.model.parameters())
    totals = [[torch.zeros_like(p) for p in parameters] for _ in range(FOLDS)]
    squares = [0.0] * FOLDS
    weight = FOLDS / len(batches)
    for i, batch in enumerate(batches):
        loss, _ = objective(policy.logp(batch), batch)
        grads = torch.autograd.grad(loss.mean(), parameters)
        squares[i % FOLDS] += sum(float(g.square().sum()) for g in grads) * weight
        for total, grad in zip(totals[i % FOLDS], grads, strict=True):
            total += grad * weight
    products = {
        (a, b): sum(float((x * y).sum()) for x, y in zip(totals[a], totals[b], strict=True))
        for a, b in combinations(range(FOLDS), 2)
    }

    def estimate(folds: Sequence[int]) -> tuple[float, float]:
        signal = fmean(products[pair] for pair in combinations(folds, 2))
        return fmean(squares[f] for f in folds) - signal, signal

    ratios = []
    for left_out in range(FOLDS):
        noise, signal = estimate([f for f in range(FOLDS) if f != left_out])
        ratios.append(noise / signal)
    return *estimate(range(FOLDS)), pstdev(ratios) * (FOLDS - 1) ** 0.5


def measure(count: int) -> list[Row]:
    rows: list[Row] = []
    cases = [("K", k, 6) for k in KS] + [("length", 8, n) for n in LENGTHS]
    for axis, k, length in cases:
        parts = parts_for("tb", k, length)
        sampled = list(batches(parts, count))
        policy = parts.trainer("cpu").policy
        for name in OBJECTIVES:
            objective = parts_for(name, k, length).objective.at(0)
            noise, signal, error = noise_and_signal(policy, objective, sampled)
            row: Row = {"axis": axis, "objective": name, "k": k, "length": length}
            row |= {"noise": noise, "signal": signal}
            row |= {"ratio": noise / signal, "ratio_stderr": error}
            rows.append(row)
            print(f"{axis:<7} K {k:<3} length {length}  {name:<11}", end="  ")
            print(f"noise {noise:9.3g}  signal {signal:9.3g}", end="  ")
            print(f"noise / signal {noise / signal:6.2f} ± {error:.2f}", flush=True)
    return rows


def draw(rows: Sequence[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    table = pd.DataFrame(rows)
    figure = Figure(figsize=(11, 4), layout="constrained")
    labels = {"K": "K, responses of a group (64 in all)", "length": "maximal tokens of a response"}
    for axes, (axis, label) in zip(figure.subplots(1, 2), labels.items(), strict=True):
        of_axis = table[table["axis"] == axis]
        for name, own in of_axis.groupby("objective", sort=False):
            x = own[axis.lower()]
            axes.errorbar(x, own["ratio"], own["ratio_stderr"], marker="o", capsize=3, label=name)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(label)
        axes.set_ylabel("noise / signal of the gradient")
        axes.grid(color="#e4e8ee")
    figure.axes[0].set_xscale("log", base=2)
    figure.axes[1].set_xticks(LENGTHS)
    figure.axes[1].legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/off_policy")
    rows = measure(int(sys.argv[2]) if len(sys.argv) > 2 else 200)
    out.mkdir(parents=True, exist_ok=True)
    (out / "gradient_variance.json").write_text(json.dumps(rows, indent=1) + "\n")
    draw(rows, out / "gradient_variance.png")
    print(out / "gradient_variance.json")


if __name__ == "__main__":
    main()

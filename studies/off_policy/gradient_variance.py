"""How noisy is the gradient, against the group size K and against the length of responses?

The bundled model answers sums, on policy and before any training. Each batch has 64 responses: 64 / K prompts of K. Over many
batches, noise = trace of the gradient's covariance, signal = squared norm of its mean (less what noise adds to it). Printed and drawn
is noise / signal: how many batches must be averaged until the noise is as small as the signal.

For a response of n tokens the model is cut off after n, and right is what agrees with the right answer so far.

    python studies/off_policy/gradient_variance.py [OUT] [BATCHES]
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

import torch

from tba.config.loading import load
from tba.learn.policy import Policy
from tba.objectives import Objective
from tba.runs.parts import Parts, check
from tba.tasks.arithmetic import Arithmetic
from tba.types import Answer, Batch, Prompt, collate

RESPONSES, FOLDS = 64, 10
KS, LENGTHS = (2, 4, 8, 16, 32), (1, 2, 3, 4, 5)
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
    """Reward 1 for the right answer or a beginning of it."""

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        right = str(prompt.columns["answer"])
        return [float(a.text == right if a.finished else right.startswith(a.text)) for a in answers]


def parts_for(objective: str, k: int, max_tokens: int) -> Parts:
    with TemporaryDirectory() as folder:
        settings = [
            f"run.folder={folder}/run",
            f"objective={objective}",
            "runtime.use=local",
            "task=gradient_variance.RightSoFar",
        ]
        settings += [
            f"sampling.samples={k}",
            f"trainer.group_size={k}",
            f"trainer.batch_size={RESPONSES}",
            f"sampling.max_tokens={max_tokens}",
        ]
        return check(
            load(
                None,
                settings + ([f"objective{OBJECTIVES[objective]}"] if OBJECTIVES[objective] else []),
            )
        )


def batches(parts: Parts, count: int) -> Iterator[Batch]:
    searcher = parts.search_setup().build("cpu", False)
    stream = parts.prompt_stream()
    for seed in range(count):
        yield collate(searcher.search(stream.take(parts.config.trainer.groups), seed).groups)


def noise_and_signal(
    policy: Policy, objective: Objective, found: Sequence[Batch]
) -> tuple[float, float, float]:
    """Trace of the covariance of the gradient of one batch, the squared norm of its mean, both unbiased, and the standard error of their ratio.

    The signal is the mean product of the mean gradients of two folds of the batches; the error is a jackknife over the folds.
    """
    parameters = list(policy.model.parameters())
    totals = [[torch.zeros_like(p) for p in parameters] for _ in range(FOLDS)]
    squares = [0.0] * FOLDS
    for i, batch in enumerate(found):
        loss, _ = objective(policy.logp(batch), batch)
        grads = torch.autograd.grad(loss.mean(), parameters)
        squares[i % FOLDS] += sum(float(g.square().sum()) for g in grads) * FOLDS / len(found)
        for t, g in zip(totals[i % FOLDS], grads, strict=True):
            t += g * FOLDS / len(found)
    products = {
        (a, b): sum(float((x * y).sum()) for x, y in zip(totals[a], totals[b], strict=True))
        for a, b in combinations(range(FOLDS), 2)
    }

    def estimate(folds: Sequence[int]) -> tuple[float, float]:
        signal = fmean(products[pair] for pair in combinations(folds, 2))
        return fmean(squares[f] for f in folds) - signal, signal

    noise, signal = estimate(range(FOLDS))
    ratios = [
        noise / signal
        for noise, signal in (
            estimate([f for f in range(FOLDS) if f != left_out]) for left_out in range(FOLDS)
        )
    ]
    return noise, signal, pstdev(ratios) * (FOLDS - 1) ** 0.5


def measure(count: int) -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    cases = [("K", k, 6) for k in KS] + [("length", 8, n) for n in LENGTHS]
    for axis, k, length in cases:
        parts = parts_for("tb", k, length)
        found = list(batches(parts, count))
        policy = parts.trainer("cpu").policy
        for name in OBJECTIVES:
            noise, signal, error = noise_and_signal(
                policy, parts_for(name, k, length).objective.at(0), found
            )
            spread = {"ratio": noise / signal, "ratio_stderr": error}
            rows.append(
                {
                    "axis": axis,
                    "objective": name,
                    "k": k,
                    "length": length,
                    "noise": noise,
                    "signal": signal,
                    **spread,
                }
            )
            told = f"noise {noise:9.3g}  signal {signal:9.3g}  noise / signal {noise / signal:6.2f} ± {error:.2f}"
            print(f"{axis:<7} K {k:<3} length {length}  {name:<11} {told}", flush=True)
    return rows


def draw(rows: Sequence[dict[str, float | str]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, (axis, key, label) in zip(
        figure.subplots(1, 2),
        (
            ("K", "k", "K, responses of a group (64 in all)"),
            ("length", "length", "tokens of a response, at most"),
        ),
        strict=True,
    ):
        for name in OBJECTIVES:
            own = [r for r in rows if r["axis"] == axis and r["objective"] == name]
            axes.errorbar(
                [r[key] for r in own],
                [r["ratio"] for r in own],
                [r["ratio_stderr"] for r in own],
                marker="o",
                capsize=3,
                label=name,
            )
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

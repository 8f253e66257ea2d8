"""Evaluate snapshots of a reference run: `python _evaluate.py JOB SAMPLES`.

The snapshots are those that the run's own output lists, on standard input. Both sides are evaluated
by this code: the same 256 held-out questions, the same samples of each at temperature 1, the same
seed, in bf16, with the `transformers` engine. Standard errors are over questions.
"""

from __future__ import annotations

import json
import sys
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import _sums
import numpy as np
import torch
from _sums import HELD_OUT, TOKENS, Job
from safetensors.torch import load_file

from tba.config.tables import PolicyTable
from tba.engines.transformers import Transformers
from tba.models.pretrained import load_text
from tba.types import Prompt, Sampling

SEED = 1234


def main() -> None:
    job, samples = Job.parse(sys.argv[1]), int(sys.argv[2])
    snapshots = json.loads(sys.stdin.read())
    rows = _sums.read_rows(Path(job.data) / "test.jsonl")[:HELD_OUT]
    policy = PolicyTable(model=job.model, eos_token="Ċ")
    text = load_text(policy)
    engine = Transformers(policy, text, "cpu", bf16=True)
    prompts = [text.encode(Prompt(str(i), row["prompt"])) for i, row in enumerate(rows)]
    answers = [row["answer"] for row in rows]
    scores = []
    for snapshot in snapshots:
        load(engine.model, Path(snapshot["path"]))
        scores.append(evaluate(engine, text, prompts, answers, samples))
        print(f"    step {snapshot['step']}: {scores[-1][0]:.3f}", file=sys.stderr, flush=True)
    print(json.dumps(scores), flush=True)


@torch.no_grad()
def load(model: Any, path: Path) -> None:
    """Replace the weights by those of a snapshot; an adapter is added to the base model."""
    own, given = model.state_dict(), load_file(str(path))
    missing = {name for name, _ in model.named_parameters()} - given.keys()
    if missing or given.keys() - own.keys():
        raise ValueError(f"{path} is of another model: {sorted(missing | given.keys())[:3]}")
    for name, tensor in given.items():
        own[name].copy_(tensor)


def evaluate(
    engine: Transformers, text: Any, prompts: list[np.ndarray], answers: list[str], samples: int
) -> tuple[float, float]:
    """Return the share of right answers, and its standard error."""
    groups = engine.generate(prompts, Sampling(samples, 1.0, TOKENS), SEED)
    shares = []
    for group, wanted in zip(groups, answers, strict=True):
        right = [_sums.is_right(text.decode(c.tokens), wanted) for c in group]
        shares.append(fmean(right))
    return fmean(shares), stdev(shares) / sqrt(len(shares))


if __name__ == "__main__":
    main()

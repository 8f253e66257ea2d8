"""Evaluate snapshots of a reference run: `python _evaluate.py JOB`.

The snapshots are those that the run's own output lists, on standard input. Both sides are evaluated
by this code: the same held-out questions, the same samples of each at temperature 1, the same
seed, with the `transformers` engine. Standard errors are over questions.
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
from _sums import PendingReply
from safetensors.torch import load_file

from tba.config.tables import LoraTable, PolicyTable
from tba.engines.transformers import Transformers
from tba.models.pretrained import load_text
from tba.prompt import Prompt
from tba.types import Sampling

SEED = 1234
PEFT_PREFIX = "base_model.model."
"""Beginning of the names in a PeftModel, which TRL trains."""


def main() -> None:
    job = PendingReply.parse(sys.argv[1])
    snapshots = json.loads(sys.stdin.read())
    rows = _sums.read_rows(Path(job.data) / "test.jsonl")[: job.recipe.held_out]
    eos = "Ċ" if job.recipe_name == "sums" else None  # saves time: the score reads the first line
    lora = LoraTable(r=16, alpha=32) if job.lora else None
    policy = PolicyTable(model=job.model, eos_token=eos, lora=lora)
    text = load_text(policy)
    prompts = [text.encode(Prompt(str(i), row["prompt"])) for i, row in enumerate(rows)]
    answers = [row["answer"] for row in rows]
    sampling = Sampling(job.recipe.answers, 1.0, job.recipe.tokens)
    engine = Transformers(policy, text, "cpu", job.bf16, sampling)
    scores = []
    for snapshot in snapshots:
        load(engine.model, Path(snapshot["path"]))
        scores.append(evaluate(engine, text, prompts, answers, sampling))
        print(f"    step {snapshot['step']}: {scores[-1][0]:.3f}", file=sys.stderr, flush=True)
    print(json.dumps(scores), flush=True)


@torch.no_grad()
def load(model: Any, path: Path) -> None:
    """Replace the weights, or those of the adapter, by the ones of a snapshot."""
    own = model.state_dict()
    given = {}
    for name, tensor in load_file(str(path)).items():
        given[name.removeprefix(PEFT_PREFIX)] = tensor
    names = {name for name, _ in model.named_parameters()}
    adapters = {name for name in names if ".lora_" in name}
    missing = (adapters or names) - given.keys()
    if missing or given.keys() - own.keys():
        raise ValueError(f"{path} is of another model: {sorted(missing | given.keys())[:3]}")
    for name, tensor in given.items():
        own[name].copy_(tensor)


def evaluate(
    engine: Transformers,
    text: Any,
    prompts: list[np.ndarray],
    answers: list[str],
    sampling: Sampling,
) -> tuple[float, float]:
    """Return the share of right answers, and its standard error."""
    groups = engine.generate(prompts, sampling, SEED)
    shares = []
    for group, wanted in zip(groups, answers, strict=True):
        right = [_sums.is_right(text.decode(c.tokens), wanted) for c in group]
        shares.append(fmean(right))
    return fmean(shares), stdev(shares) / sqrt(len(shares))


if __name__ == "__main__":
    main()

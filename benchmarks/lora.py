"""Measure a training step with LoRA beside full fine-tuning: seconds, memory, published bytes.

    python benchmarks/lora.py --model FOLDER

A step is 4 prompts of 100 tokens x 16 responses of 64. Both sides take turns in one process for
the seconds; each has a process of its own for the peak memory. LoRA publishes its adapters alone.
"""

from __future__ import annotations

import argparse
import json
import sys

import _measure
import torch
from _models import PROMPTS, RESPONSE, SAMPLES, model_of, random_batch

from tba.config.schema import load
from tba.learn.trainer import SingleTrainer
from tba.models.lora import reference_weights
from tba.setup.setup import check
from tba.weights import trained

PARTS = ("step", "memory", "bytes", "exact")
FULL = "full fine-tuning"
LORA = "LoRA"
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = _measure.arguments(__doc__)
    parser.add_argument("--alone", choices=(FULL, LORA), help="print the peak memory of one side")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    options = parser.parse_args()
    model = model_of(options)
    if options.alone:
        print(json.dumps(alone(model, options.alone, options.rank)))
        return
    rows = {"step": steps, "memory": memory, "bytes": published, "exact": without_adapters}
    for part in options.parts:
        _measure.record(__file__, [rows[part](model, options)], options, part=True)


def steps(model: str, options: argparse.Namespace) -> _measure.Row:
    """Return the row of the seconds of a step."""
    trainers = {side: trainer(model, side, options.rank) for side in (LORA, FULL)}
    batch = random_batch(model)
    sides = {side: lambda t=t: t.step(batch, 0) for side, t in trainers.items()}
    seconds = _measure.alternate(sides, options.repeats)
    note = shape(options)
    return _measure.row("LoRA step", seconds[LORA], "s", seconds[FULL], peer_is=FULL, note=note)


def shape(options: argparse.Namespace) -> str:
    return (
        f"r {options.rank}, all linear layers; {PROMPTS} x {SAMPLES} x {RESPONSE} tokens,"
        f" {PROMPTS * SAMPLES} responses in a pass"
    )


def memory(model: str, options: argparse.Namespace) -> _measure.Row:
    """Return the row of the peak memory of a process that takes two steps."""
    peaks = {}
    for side in (LORA, FULL):
        command = [sys.executable, __file__, "--model", model, "--alone", side]
        peaks[side] = _measure.run_json([*command, "--rank", str(options.rank)], 900)["bytes"]
    ours, peer = (peaks[side] / 1e9 for side in (LORA, FULL))
    note = "of the whole process" if DEVICE == "cpu" else "of the GPU"
    note += f"; {PROMPTS * SAMPLES} responses in a pass"
    return _measure.row("LoRA peak memory", ours, "GB", peer, peer_is=FULL, note=note)


def published(model: str, options: argparse.Namespace) -> _measure.Row:
    """Return the row of the bytes of a publication beside those of the adapters."""
    trainers = {side: trainer(model, side, options.rank) for side in (LORA, FULL)}
    own = trainers[LORA].send(version=1).payload
    size = 2 if trainers[LORA].bf16_weights else 4
    adapters = size * sum(p.numel() for p in trained(trainers[LORA].policy.model).values())
    whole = trainers[FULL].send(version=1).payload.nbytes
    note = f"{shape(options)}; full fine-tuning publishes {whole:,} bytes"
    return _measure.row(
        "LoRA published bytes", own.nbytes, "bytes", adapters, peer_is="adapters",
        goal="ratio == 1", note=note,
    )  # fmt: skip


@torch.no_grad()
def without_adapters(model: str, options: argparse.Namespace) -> _measure.Row:
    """Return the row of log-probs with adapters disabled, compared with the model's."""
    adapted = trainer(model, LORA, options.rank).policy
    batch = random_batch(model)
    for parameter in trained(adapted.model).values():
        parameter.add_(0.1)
    base = trainer(model, FULL, options.rank).policy
    with reference_weights(adapted.model):
        gap = (adapted.logp(batch) - base.logp(batch)).abs().max()
    name = "LoRA: largest difference between log-probs with adapters disabled and the model's"
    return _measure.row(name, float(gap), "nats", goal="value == 0")


def alone(model: str, side: str, rank: int) -> dict[str, int]:
    """Take two steps and return the peak memory of this process, or of its GPU."""
    own = trainer(model, side, rank)
    batch = random_batch(model)
    for step in range(2):
        own.step(batch, step)
    if DEVICE != "cpu":
        return {"bytes": torch.cuda.max_memory_allocated()}
    return {"bytes": _measure.peak_memory()}


def trainer(model: str, side: str, rank: int) -> SingleTrainer:
    settings = [f"policy.model={model}"]
    if side == LORA:
        settings += [f"policy.lora.r={rank}", f"policy.lora.alpha={2 * rank}"]
    return check(load(None, settings)).trainer(DEVICE)


if __name__ == "__main__":
    main()

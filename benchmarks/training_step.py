"""Measure a training step beside the optimisation phase of TRL's GRPOTrainer.

    python benchmarks/training_step.py --model FOLDER

Both sides learn from the same 4 x 16 responses of 64 tokens to prompts of 100, in fp32 weights with
bf16 autocast (fp32 where the CPU has no bf16), clip gradients and take a step of the fused AdamW.
Each side is a process of its own (peak memory), one after the other, with 32 responses in a
micro-batch. TRL runs with eager attention, which is its fastest on a CPU.
The gradients are compared in fp32 with those of the plain path: each prompt run with each response,
no chunks of the head. Our step is also measured with layers that are compiled.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import _measure
import _models
import torch
from _measure import bench_python, common_variables
from _models import PROMPT, PROMPTS, RESPONSE, SAMPLES, random_batch

OURS: dict[str, tuple[str, ...]] = {
    "ours": (),
    "compiled": ("trainer.compile=true",),
}
"""Our side: without further settings, and with some."""

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
MICRO = 2 * SAMPLES
"""Responses in a micro-batch, on both sides: two groups. All four need more than 23 GB with TRL."""
STEPS = 6
"""Steps of a process; the first is warm-up."""


def main() -> None:
    parser = _measure.arguments(__doc__)
    parser.add_argument("--alone", choices=(*OURS, "trl", "gradients"), help="measure one side")
    options = parser.parse_args()
    model = _models.model_of(options)
    if options.alone == "gradients":
        print(json.dumps(gradient_difference(model)))
    elif options.alone:
        print(json.dumps(alone(options.alone, model)))
    else:
        compare(model, options)


def compare(model: str, options: Any) -> None:
    """Measure each side in a process of its own, one after the other, and record the rows."""
    python = bench_python()
    seconds = {}
    start = {}
    peak = {}
    for side in (*OURS, "trl"):
        command = [python, __file__, "--model", model, "--alone", side]
        result = _measure.run_json(command, 1800, common_variables())
        seconds[side] = result["seconds"]
        start[side] = result["start"]
        peak[side] = result["bytes"] / 1e9
        _measure.progress(side, 1, 1, sum(result["seconds"]))

    shape = (
        f"{PROMPTS} x {SAMPLES} x {RESPONSE} tokens, prompts of {PROMPT},"
        f" {'bf16' if _measure.in_bf16() else 'fp32'}, {DEVICE}; {MICRO} responses in a pass"
    )
    command = [python, __file__, "--model", model, "--alone", "gradients"]
    difference = _measure.run_json(command, 900, common_variables())
    rows = [
        _measure.row(
            "training step", seconds["ours"], "s", seconds["trl"],
            peer_is="TRL's optimisation phase", goal="ratio >= 2", note=shape,
        ),
        _measure.row(
            "training step, peak memory", peak["ours"], "GB", peak["trl"],
            peer_is="TRL", ratio_is="ours / peer", goal="ratio <= 0.6",
            note="of the whole process" if DEVICE == "cpu" else "of the GPU",
        ),
        _measure.row(
            "gradients compared with the plain path, fp32", difference["whole"], "relative",
            goal="value <= 1e-5",
            note="one group of 4 responses; norm of the difference / norm of the gradient, over all"
            f" parameters; for the worst one {difference['worst']:.2g}",
        ),
    ]  # fmt: skip
    later = start["compiled"] - start["ours"]
    rows += [
        _measure.row(
            "training step, compiled layers", seconds["compiled"], "s", seconds["ours"],
            peer_is="ours without", note=f"the start takes {later:.0f} s longer",
        ),
        _measure.row(
            "training step, compiled layers, peak memory", peak["compiled"], "GB", peak["ours"],
            peer_is="ours without", ratio_is="ours / peer",
        ),
    ]  # fmt: skip
    _measure.record(__file__, rows, options)


def alone(side: str, model: str) -> dict[str, Any]:
    """Take steps; return the seconds of each but the first, those of the start, and peak memory."""
    started = time.perf_counter()
    step = trl(model) if side == "trl" else ours(model, OURS[side])
    start = time.perf_counter() - started
    seconds = []
    for _ in range(STEPS):
        started = time.perf_counter()
        step()
        if DEVICE != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = _measure.peak_memory() if DEVICE == "cpu" else torch.cuda.max_memory_allocated()
    return {"seconds": seconds[1:], "start": start, "bytes": peak}


def ours(model: str, further: tuple[str, ...]) -> Callable[[], None]:
    from tba.config.schema import load
    from tba.runtime.placement import reuse_memory
    from tba.setup.setup import check

    reuse_memory()
    settings = [
        f"policy.model={model}", f"policy.autocast={'bf16' if _measure.in_bf16() else 'off'}",
        f"sampling.max_tokens={RESPONSE}",
        f"trainer.group_size={SAMPLES}", f"trainer.batch_size={PROMPTS * SAMPLES}",
        f"trainer.token_budget={MICRO // SAMPLES * PROMPT + MICRO * RESPONSE}",
        "trainer.learning_rate=1e-6", "objective=dr_grpo", *further,
    ]  # fmt: skip
    trainer = check(load(None, settings)).trainer(DEVICE)
    batch = random_batch(model)
    return lambda: _discard(trainer.step(batch, 0))


def _discard(value: Any) -> None:
    """Ignore a value."""


def trl(model: str) -> Callable[[], None]:
    """Return the part of GRPOTrainer's step that follows generation and scoring."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from tba.runtime.placement import reuse_memory

    if DEVICE == "cpu":
        reuse_memory()  # as ours does
    attention = "eager" if DEVICE == "cpu" else "sdpa"
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation=attention
    )
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-"), learning_rate=1e-6, optim="adamw_torch_fused",
        per_device_train_batch_size=MICRO, gradient_accumulation_steps=PROMPTS * SAMPLES // MICRO,
        num_generations=SAMPLES,
        max_completion_length=RESPONSE, loss_type="dr_grpo", scale_rewards="none", beta=0.0,
        bf16=_measure.in_bf16(), gradient_checkpointing=False, use_cpu=DEVICE == "cpu",
        max_steps=10,
        report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        loaded,
        lambda completions, **_: [0.0] * len(completions),
        arguments,
        train_dataset=Dataset.from_list([{"prompt": "1"}] * 64),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.create_optimizer_and_scheduler(10)
    wrapped, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    wrapped.train()
    trainer.current_gradient_accumulation_steps = PROMPTS * SAMPLES // MICRO
    inputs = trl_inputs(model)

    def step() -> None:
        for start in range(0, PROMPTS * SAMPLES, MICRO):
            part = {n: t[start : start + MICRO] if t.ndim else t for n, t in inputs.items()}
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(wrapped, part)
            trainer.accelerator.backward(loss)
        trainer.accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def trl_inputs(model: str) -> dict[str, torch.Tensor]:
    """Return the same batch as GRPOTrainer has it after generation."""
    batch = random_batch(model)
    advantages = batch.reward - batch.reward.mean(1, keepdim=True)
    inputs = {
        "prompt_ids": batch.prompt_tokens.repeat_interleave(SAMPLES, 0),
        "prompt_mask": batch.prompt_mask.long().repeat_interleave(SAMPLES, 0),
        "completion_ids": batch.tokens.flatten(0, 1),
        "completion_mask": batch.mask.long().flatten(0, 1),
        "advantages": advantages.flatten(),
        "num_items_in_batch": batch.mask.sum(),
    }
    return {name: tensor.to(DEVICE) for name, tensor in inputs.items()}


def gradient_difference(model: str) -> dict[str, float]:
    """Return the relative difference from the plain path's gradient: whole, and worst parameter."""
    from tba.config.tables import PolicyTable
    from tba.learn.policy import Policy
    from tba.models.lora import load_placed

    table = PolicyTable(model=model)
    loaded = load_placed(table, DEVICE, bf16=False)
    batch = random_batch(model).groups([0]).slice(slice(0, 4))
    slope = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(1))
    gradients = []
    for path in (Policy(loaded, 1.0), Policy(loaded, 1.0, share_prompt=False)):
        if not path.share_prompt:
            loaded.get_output_embeddings().register_forward_hook(_ignore)
        loaded.zero_grad()
        (path.logp(batch) * slope.to(DEVICE)).sum().backward()
        gradients.append({n: p.grad.clone() for n, p in loaded.named_parameters()})
    ours, plain = gradients
    size = {n: float(plain[n].norm()) for n in plain}
    apart = {n: float((ours[n] - plain[n]).norm()) for n in plain}
    return {
        "whole": math.hypot(*apart.values()) / math.hypot(*size.values()),
        "worst": max(apart[n] / size[n] for n in plain),
    }


def _ignore(*_: Any) -> None:
    """Make the head run as a module, whose gradient autograd computes."""


if __name__ == "__main__":
    sys.exit(main())

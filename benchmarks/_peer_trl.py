"""Run one job of the reference run with TRL's GRPOTrainer: `python _peer_trl.py JOB`.

TRL at its best on a CPU: bf16 autocast (fp32 where the CPU has no bf16), no gradient checkpointing,
eager attention (which is faster here than SDPA), no KL term and so no reference model, the fused
AdamW.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import _sums
import torch
from _models import Snapshots
from _sums import PendingReply
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tba.runtime.placement import reuse_memory


def main() -> None:
    job = PendingReply.parse(sys.argv[1])
    torch.set_num_threads(job.threads)
    options = dict(option.split("=", 1) for option in job.options)
    attention = options.pop("attn_implementation", "eager")
    if options.pop("memory", "") == "kept":
        reuse_memory()  # as this package does
    dtype = torch.bfloat16 if job.lora and job.bf16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=dtype, attn_implementation=attention
    )
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    ends = [*_sums.newline_tokens(tokenizer), tokenizer.eos_token_id]
    model.generation_config.eos_token_id = ends  # TRL ends a completion at each of these
    rows = [dict(row) for row in _sums.read_rows(Path(job.data) / "train.jsonl")]
    recorder = Recorder(job)
    trainer = GRPOTrainer(
        model,
        _sums.exact if job.latency is None else _sums.judged,
        arguments(job, options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[recorder],
        peft_config=adapter() if job.lora else None,
    )
    trainer.train()
    recorder.snapshots.write()
    result = {"points": recorder.points, "snapshots": recorder.snapshots.rows}
    print(json.dumps(result), flush=True)


def arguments(job: PendingReply, options: dict[str, str]) -> GRPOConfig:
    fields: dict[str, Any] = {
        "output_dir": f"{job.folder}/run",
        "learning_rate": job.rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": job.recipe.warmup,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "per_device_train_batch_size": job.recipe.batch,
        "num_generations": job.recipe.samples,
        "max_completion_length": job.recipe.tokens,
        "temperature": 1.0,
        "top_k": 0,
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "beta": 0.0,
        "bf16": job.bf16,
        "gradient_checkpointing": False,
        "use_cpu": not torch.cuda.is_available(),
        "max_steps": min(job.steps, 100_000),
        "seed": job.seed,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    for name, text in options.items():
        fields[name] = tomllib.loads(f"v = {text}")["v"]
    return GRPOConfig(**fields)


def adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


class Recorder(TrainerCallback):
    """Takes snapshots and the time of each step, and ends the training."""

    def __init__(self, job: PendingReply):
        self.job = job
        self.snapshots = self.start_clock()
        self.points: list[dict[str, float]] = []

    def start_clock(self):
        job = self.job
        return Snapshots(Path(job.folder), job.every, job.bf16, job.at)

    def on_train_begin(self, args, state, control, **kwargs):
        self.snapshots = self.start_clock()  # loading is not timed

    def on_step_end(self, args, state, control, model=None, **kwargs):
        seconds = self.snapshots.seconds()
        step = state.global_step
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
        samples = step * per_step / args.num_iterations
        self.points.append({"step": step, "seconds": seconds, "samples": samples})
        self.snapshots.take(lambda: trained(model), step)
        if seconds >= self.job.seconds or step >= self.job.steps:
            control.should_training_stop = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.points and "reward" in logs:
            self.points[-1] |= {"reward": logs["reward"], "step_time": logs["step_time"]}
            text = f"    trl step {state.global_step}: {self.points[-1]['seconds']:.1f} s"
            print(f"{text}, reward {logs['reward']:.2f}", file=sys.stderr, flush=True)


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


if __name__ == "__main__":
    main()

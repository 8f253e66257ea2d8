"""AdamW in the precisions of `trainer.optimizer` and `trainer.weights`, and its learning rate."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch.optim.adamw import adamw
from torch.optim.lr_scheduler import LambdaLR

from tba.config.tables import PolicyTable, TrainerTable
from tba.learn.policy import Policy
from tba.weights import trained

MOMENTS = {"adamw": 8.0, "adamw_8bit": 2 + 8 / 256}
"""Bytes of the moments of a parameter, by `trainer.optimizer`."""


class RoundedAdamW(torch.optim.AdamW):
    """AdamW for weights in bf16: moments and each step are in fp32, and the result is rounded.

    A change below half of the distance between two numbers of bf16, 1/512 to 1/256 of a weight, is
    lost. One parameter at a time is in fp32.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["step"] = torch.zeros((), device=weight.device)
                    state["exp_avg"] = torch.zeros_like(weight, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(weight, dtype=torch.float32)
                exact = weight.float()
                adamw(
                    [exact], [weight.grad.float()], [state["exp_avg"]], [state["exp_avg_sq"]], [],
                    [state["step"]], fused=True, amsgrad=False, maximize=False,
                    beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
                    weight_decay=group["weight_decay"], eps=group["eps"],
                )  # fmt: skip
                weight.copy_(exact)


def build_optimizer(policy: Policy, settings: TrainerTable) -> torch.optim.Optimizer:
    """Return the optimizer of all that is trained; an objective's head has a rate of its own."""
    groups: list[dict[str, Any]] = [{"params": list(trained(policy.model).values())}]
    if policy.head is not None and policy.readout is not None:
        rate = policy.head.learning_rate
        groups.append({"params": list(policy.readout.parameters()), "lr": rate})
    rate = settings.learning_rate
    betas = settings.betas
    decay = settings.weight_decay
    if settings.optimizer == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, rate, betas=betas, weight_decay=decay)
    if settings.weights == "bf16":
        return RoundedAdamW(groups, rate, betas=betas, weight_decay=decay)
    return torch.optim.AdamW(groups, rate, betas=betas, weight_decay=decay, fused=True)


def check_precision(policy: PolicyTable, settings: TrainerTable) -> None:
    """Raise ValueError for precisions that do not work together, or without bitsandbytes."""
    in_bf16 = settings.weights == "bf16"
    if in_bf16 and policy.autocast != "bf16":
        raise ValueError(
            f"policy.autocast = {policy.autocast!r} with trainer.weights=bf16, which computes in"
            " bf16: set policy.autocast=bf16, or trainer.weights=fp32"
        )
    if in_bf16 and policy.lora is not None:
        raise ValueError(
            "trainer.weights=bf16 is for training all weights, and policy.lora trains adapters in"
            " fp32: remove one of them; policy.autocast=bf16 has frozen layers in bf16"
        )
    in_4_bits = policy.lora is not None and policy.lora.load_in_4bit
    if in_4_bits and (settings.devices > 1 or settings.compile):
        raise ValueError(
            "policy.lora.load_in_4bit works with one device and without compiled layers: set"
            " trainer.devices=1 and trainer.compile=false"
        )
    if in_4_bits and find_spec("bitsandbytes") is None:
        raise ValueError(
            "policy.lora.load_in_4bit needs bitsandbytes: pip install 'tba[quantised]', or set"
            " policy.lora.load_in_4bit=false"
        )
    if settings.optimizer == "adamw_8bit" and find_spec("bitsandbytes") is None:
        raise ValueError(
            "trainer.optimizer = 'adamw_8bit' needs bitsandbytes: pip install 'tba[quantised]', or"
            " set trainer.optimizer=adamw"
        )


def learning_rate(optimizer: torch.optim.Optimizer, settings: TrainerTable, steps: int) -> Any:
    """Return the schedule of transformers that `settings` names, whose warm-up begins at 0."""
    from transformers import get_scheduler

    ratio = settings.min_lr_ratio
    warmup = settings.warmup_steps
    stable = {"min_lr_ratio": ratio, "num_decay_steps": settings.decay(steps)}
    extra: dict[str, dict[str, Any]] = {
        "cosine_with_min_lr": {"min_lr_rate": ratio},
        "warmup_stable_decay": stable,
    }
    names = {"cosine": "cosine_with_min_lr", "constant": "constant_with_warmup"}
    name = names.get(settings.schedule, settings.schedule)
    schedule: Any = get_scheduler(name, optimizer, warmup, steps, extra.get(name))
    if name != "warmup_stable_decay":
        return schedule
    later = schedule.lr_lambdas[0]  # its own warm-up begins at `min_lr_ratio`
    return LambdaLR(optimizer, lambda step: step / warmup if step < warmup else later(step))

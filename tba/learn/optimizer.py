"""AdamW for `trainer.optimizer` and `trainer.weights`, and its learning-rate schedule."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tba.config.tables import TrainerTable
from tba.learn.policy import Policy
from tba.weights import trained

REST = "rest"
"""Key in the optimizer's state of the low 16 bits of an fp32 weight, which bf16 drops."""


class Split(Optimizer):
    """Optimizer for bf16 weights that loses no update: its state holds their low 16 bits.

    Together they are an fp32 weight, to which the bf16 weight is nearest. Each step is taken by the
    other base class, with one parameter at a time in fp32. The low bits are initialised at random:
    the mean change of bf16 weights then equals that in fp32. If all weights started at bf16
    numbers, none would change before its updates added up to half the distance to the next one.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        for group in groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state.pop(weight, {})
                exact = weight  # an objective's head is in fp32
                if weight.dtype == torch.bfloat16:
                    rest = state.pop(REST) if REST in state else _random_rest(weight)
                    exact = nn.Parameter(_joined(weight, rest))
                    exact.grad = weight.grad.float()
                self.state[exact] = state
                self.param_groups = [{**group, "params": [exact]}]
                super().step()
                self.state[weight] = state = self.state.pop(exact)
                if exact is not weight:
                    state[REST] = _divide(exact, weight)
        self.param_groups = groups


class SplitAdamW(Split, torch.optim.AdamW):
    """AdamW for weights in bf16, with moments in fp32."""


def _random_rest(weight: Tensor) -> Tensor:
    """Return random low bits: all fp32 numbers that round to a weight are equally likely."""
    from torch.distributed.tensor import DTensor  # slow to import (.5 s), and only trainers need it

    rest = torch.zeros_like(weight, dtype=torch.int16)
    own = rest.to_local() if isinstance(rest, DTensor) else rest
    own.random_(-0x8000, 0x8000)
    return rest * (weight != 0)  # 0 with negative low bits would be NaN


def _joined(weight: Tensor, rest: Tensor) -> Tensor:
    """Return the fp32 weight with this bf16 part and these low bits."""
    bits = weight.view(torch.int16).int()
    return bits.bitwise_left_shift_(16).add_(rest).view(torch.float32)


def _divide(exact: Tensor, weight: Tensor) -> Tensor:
    """Round `exact` to the bf16 `weight`, ties away from 0, and return the low bits."""
    bits = exact.view(torch.int32)
    high = (bits + 0x8000).bitwise_right_shift_(16)  # `>>` has no effect on a DTensor
    weight.copy_(high.short().view(torch.bfloat16))
    return (bits - high.bitwise_left_shift_(16)).short()


class Sums:
    """Gradients summed over micro-batches with 8 bits more than bf16, which loses small ones.

    A hook adds the gradient of each bf16 weight as soon as it is complete.
    """

    def __init__(self, weights: Iterable[Tensor]):
        self.parts: dict[Tensor, tuple[Tensor, Tensor]] = {}  # bf16 sum, and the next 8 bits
        for weight in weights:
            if weight.dtype == torch.bfloat16:
                weight.register_post_accumulate_grad_hook(self._add)

    def _add(self, weight: Tensor) -> None:
        exact = self._exact(weight)
        high = exact.bfloat16()
        rest = exact.view(torch.int32) - high.float().view(torch.int32)
        self.parts[weight] = high, rest.div(256).round_().clamp_(-128, 127).to(torch.int8)
        weight.grad = None

    def _exact(self, weight: Tensor) -> Tensor:
        new: Any = 0.0 if weight.grad is None else weight.grad.float()
        if weight not in self.parts:
            return new
        high, low = self.parts[weight]
        return (high.float().view(torch.int32) + low.int() * 256).view(torch.float32) + new

    def clip(self, weights: Iterable[Tensor], limit: float) -> float:
        """Fill `grad`, clipped to a total norm of `limit`; return the norm before clipping."""
        weights = list(weights)
        if not self.parts:
            return torch.nn.utils.clip_grad_norm_(weights, limit).item()
        own = [weight for weight in weights if weight in self.parts or weight.grad is not None]
        norm = torch.stack([torch.linalg.vector_norm(self._exact(w)) for w in own]).norm()
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        for weight in own:
            weight.grad = (self._exact(weight) * scale).to(weight.dtype)
            self.parts.pop(weight, None)
        return norm.item()


def build_optimizer(policy: Policy, settings: TrainerTable) -> Optimizer:
    """Return the optimizer of all trained parameters; an objective's head has its own rate."""
    groups: list[dict[str, Any]] = [{"params": list(trained(policy.model).values())}]
    if policy.head is not None and policy.readout is not None:
        rate = policy.head.learning_rate
        groups.append({"params": list(policy.readout.parameters()), "lr": rate})
    rate = settings.learning_rate
    betas = settings.betas
    decay = settings.weight_decay
    if settings.optimizer == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        class SplitAdamW8bit(Split, AdamW8bit):
            """AdamW for weights in bf16, with moments in 8 bits."""

        kind: Any = SplitAdamW8bit if settings.weights == "bf16" else AdamW8bit
        return kind(groups, rate, betas=betas, weight_decay=decay)
    if settings.weights == "bf16":
        return SplitAdamW(groups, rate, betas=betas, weight_decay=decay, fused=True)
    return torch.optim.AdamW(groups, rate, betas=betas, weight_decay=decay, fused=True)


def learning_rate(optimizer: Optimizer, settings: TrainerTable, steps: int) -> Any:
    """Return the transformers schedule that `settings` names; its warm-up begins at 0."""
    from transformers import get_scheduler

    name = "constant_with_warmup" if settings.schedule == "constant" else settings.schedule
    decay = {"num_decay_steps": settings.decay(steps)} if name == "warmup_stable_decay" else None
    return get_scheduler(name, optimizer, settings.warmup(steps), steps, decay)

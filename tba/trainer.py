"""Learning: a batch of groups -> one optimizer step, the same whatever the micro-batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tba.config import TrainerTable
from tba.plugins import Plugin
from tba.policy import Policy
from tba.types import Batch, Loss
from tba.weights import Probe, Weights, pack

Objective = Callable[[Float[Tensor, "B K T"], Batch], Loss]
"""One loss per group, which looks at that group only, and metrics per group."""

PROBE_TOKENS = 64


class NotFinite(RuntimeError):
    """A loss or gradient is not finite; no weight has been touched."""


@dataclass
class Trainer:
    """Owns the policy's master weights (fp32) and the optimizer. It never holds a reference model."""

    policy: Policy
    objective: Plugin
    settings: TrainerTable
    steps: int
    bf16_weights: bool
    optimizer: torch.optim.AdamW = field(init=False)
    schedule: Any = field(init=False)
    _probe: Batch | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        s = self.settings
        parameters = list(self.policy.model.parameters())
        self.optimizer = torch.optim.AdamW(parameters, s.learning_rate, betas=s.betas, weight_decay=s.weight_decay)
        self.schedule = learning_rate(self.optimizer, s, self.steps)

    def step(self, batch: Batch, step: int) -> dict[str, float]:
        """One optimizer step on the mean of the groups' losses. NotFinite before anything has moved."""
        started = time.perf_counter()
        objective = self.objective.at(step)
        if not (torch.isfinite(batch.reward).all() and torch.isfinite(batch.ref_logp).all()):
            raise NotFinite(f"step {step}: a reward or reference log-prob of the batch is not finite")
        self.optimizer.zero_grad(set_to_none=True)
        parts = [self._backward(part, objective, len(batch)) for part in batch.chunks(self.settings.token_budget)]
        metrics = _mean(parts)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), self.settings.max_grad_norm)
        if not (torch.isfinite(norm) and all(torch.isfinite(torch.tensor(v)) for v in metrics.values())):
            raise NotFinite(f"step {step}: loss {metrics['loss']}, gradient norm {norm.item()}; lower trainer.learning_rate or raise objective.beta")
        metrics |= {"grad_norm": norm.item(), "learning_rate": self.schedule.get_last_lr()[0]}
        self.optimizer.step()
        self.schedule.step()
        self._probe = batch.groups([0]).slice(slice(0, 1))
        return metrics | {"step_time": time.perf_counter() - started}

    def weights(self, version: int) -> Weights:
        """A copy for the searchers, with a probe by which they can tell whether it arrived."""
        return pack(self.policy.model, version, self.bf16_weights, self._probed())

    def _backward(self, part: Batch, objective: Objective, groups: int) -> dict[str, Tensor]:
        """Gradients of sum(loss) / groups. A part too large for the budget (one long group) goes in two passes over its pieces."""
        pieces = list(part.pieces(self.settings.token_budget))
        if len(pieces) == 1:
            logp, entropy = self.policy(part)
        else:
            with torch.no_grad():
                found = [self.policy(piece) for piece in pieces]
            logp, entropy = (torch.cat([f[i] for f in found], 1) for i in (0, 1))
            logp.requires_grad_()
        on_device = part.to(logp.device)
        loss, extras = objective(logp, on_device)
        (loss.sum() / groups).backward()  # not loss.mean(): the last part may be smaller
        if len(pieces) > 1:
            assert logp.grad is not None
            for piece, grad in zip(pieces, logp.grad.split([p.samples for p in pieces], 1), strict=True):
                self.policy.logp(piece).backward(grad)
        return {"loss": loss.detach(), **extras, **_account(logp.detach(), entropy, on_device)}

    @torch.no_grad()
    def _probed(self) -> Probe | None:
        if self._probe is None:
            return None
        mask = self._probe.mask[0, 0]
        length = min(PROBE_TOKENS, int(mask.sum()))
        logp = self.policy.logp(self._probe)[0, 0, :length].float().cpu().numpy()
        tokens = self._probe.tokens[0, 0, :length].int().numpy()
        prompt = self._probe.prompt_tokens[0][self._probe.prompt_mask[0]].int().numpy()
        return Probe(prompt, tokens, logp, self.policy.temperature)


def learning_rate(optimizer: torch.optim.Optimizer, settings: TrainerTable, steps: int) -> Any:
    """Transformers' schedule of that name, from 0 after `warmup_steps` and down to `min_lr_ratio`."""
    from transformers import get_scheduler

    names = {"linear": "linear", "cosine": "cosine_with_min_lr", "warmup_stable_decay": "warmup_stable_decay", "constant": "constant_with_warmup"}
    extra: dict[str, Any] = {}
    if settings.schedule == "cosine":
        extra = {"min_lr_rate": settings.min_lr_ratio}
    if settings.schedule == "warmup_stable_decay":
        decay = settings.decay_steps or max(1, steps // 10)
        extra = {"num_decay_steps": decay, "min_lr_ratio": settings.min_lr_ratio}
    return get_scheduler(names[settings.schedule], optimizer, settings.warmup_steps, steps, extra or None)


def _account(logp: Tensor, entropy: Tensor, batch: Batch) -> dict[str, Tensor]:
    """What a group was like, each [B]: names as in TRL. `kl` is the mean log(pi / ref) of a response, in nats."""
    length = batch.mask.sum(-1).float()
    return {
        "reward": batch.reward.mean(1),
        "reward_std": batch.reward.std(1),
        "kl": ((logp - batch.ref_logp) * batch.mask).sum(-1).mean(1),
        "entropy": (entropy.sum(-1) / length).mean(1),
        "completions/mean_length": length.mean(1),
        "off_policy/log_ratio": ((logp - batch.behavior_logp) * batch.mask).sum(-1).abs().mean(1),
    }


def _mean(parts: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Over all groups, however they were divided."""
    return {name: torch.cat([p[name].float() for p in parts]).mean().item() for name in parts[0]}

"""Learning: a batch of groups -> one optimizer step, the same whatever the micro-batches."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tba.config.plugins import Plugin
from tba.config.tables import PolicyTable, TrainerTable
from tba.learn.policy import Output, Policy
from tba.models.pretrained import computes_in_bf16, enable_gradient_checkpointing, load_model
from tba.objectives import HasHead, Loss, Objective, head_of
from tba.types import Batch
from tba.weights import Probe, Weights, pack

PROBE_TOKENS = 64


def build_trainer(
    policy: PolicyTable,
    settings: TrainerTable,
    objective: Plugin,
    temperature: float,
    steps: int,
    device: str,
) -> Trainer:
    """Load the model in fp32 and return its trainer."""
    model = load_model(policy, torch.float32).to(device)
    if policy.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    autocast = computes_in_bf16(policy, device)
    share_prompt = not policy.gradient_checkpointing
    head = head_of(objective.at(0))
    return Trainer(
        Policy(model, temperature, autocast, share_prompt, head),
        objective,
        settings,
        steps,
        autocast,
    )


class NotFinite(RuntimeError):
    """A loss or gradient is not finite; no weight has been touched."""


@dataclass
class Trainer:
    """Owns the policy's master weights (fp32), the objective's head if it has one, and the optimizer. It never holds a reference model."""

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
        owned: list[dict[str, Any]] = [{"params": list(self.policy.model.parameters())}]
        if self.policy.head is not None and self.policy.readout is not None:
            owned.append(
                {
                    "params": list(self.policy.readout.parameters()),
                    "lr": self.policy.head.learning_rate,
                }
            )
        self.optimizer = torch.optim.AdamW(
            owned, s.learning_rate, betas=s.betas, weight_decay=s.weight_decay
        )
        self.schedule = learning_rate(self.optimizer, s, self.steps)

    def restore(
        self, state: Mapping[int, Mapping[str, Tensor]], schedule: Mapping[str, Any]
    ) -> None:
        """Goes on from AdamW's `state` and from where the schedule was, with this run's settings: they may have been changed on resuming."""
        rates = [
            base * factor(schedule["last_epoch"])
            for base, factor in zip(self.schedule.base_lrs, self.schedule.lr_lambdas, strict=True)
        ]
        self.schedule.load_state_dict(
            {**schedule, "base_lrs": self.schedule.base_lrs, "_last_lr": rates}
        )
        self.optimizer.load_state_dict(
            {"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]}
        )
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def step(self, batch: Batch, step: int) -> dict[str, float]:
        """One optimizer step on the mean of the groups' losses. NotFinite before anything has moved."""
        started = time.perf_counter()
        objective = self.objective.at(step)
        if not (torch.isfinite(batch.reward).all() and torch.isfinite(batch.ref_logp).all()):
            raise NotFinite(
                f"step {step}: a reward or reference log-prob of the batch is not finite"
            )
        self.optimizer.zero_grad(set_to_none=True)
        parts = [
            self._backward(part, objective, len(batch))
            for part in batch.chunks(self.settings.token_budget)
        ]
        metrics = _mean(parts)
        norm, *others = (
            torch.nn.utils.clip_grad_norm_(g["params"], self.settings.max_grad_norm)
            for g in self.optimizer.param_groups
        )
        if not (
            torch.isfinite(torch.stack([norm, *others])).all()
            and all(torch.isfinite(torch.tensor(v)) for v in metrics.values())
        ):
            raise NotFinite(
                f"step {step}: loss {metrics['loss']}, gradient norm {norm.item()}; lower trainer.learning_rate or raise objective.beta"
            )
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
            out = self.policy(part)
        else:
            with torch.no_grad():
                out = _joined([self.policy(piece) for piece in pieces])
            for tensor in _live(out):
                tensor.requires_grad_()
        on_device = part.to(out.logp.device)
        loss, extras = _loss(objective, out, on_device)
        (loss.sum() / groups).backward()  # not loss.mean(): the last part may be smaller
        if len(pieces) > 1:
            sizes = [p.samples for p in pieces]
            grads = [_divided(t.grad, sizes) for t in _live(out)]
            for piece, own in zip(pieces, zip(*grads, strict=True), strict=True):
                torch.autograd.backward(_live(self.policy(piece)), own)
        return {
            "loss": loss.detach(),
            **extras,
            **_account(out.logp.detach(), out.entropy, on_device),
        }

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


def _loss(objective: Objective | HasHead, out: Output, batch: Batch) -> Loss:
    """ValueError unless there is one loss for each group, and one number of each metric: anything else would be averaged wrongly."""
    if isinstance(objective, HasHead):
        assert out.head is not None
        given = objective(out.logp, batch, out.head)
    else:
        given = objective(out.logp, batch)
    name, groups = type(objective).__name__, len(batch)
    if not (isinstance(given, tuple) and len(given) == 2):
        raise ValueError(
            f"objective {name} returned {type(given).__name__}; it must return (loss, metrics)"
        )
    for what, value in (("loss", given[0]), *given[1].items()):
        if value.shape != (groups,):
            raise ValueError(
                f"objective {name}: {what} has shape {tuple(value.shape)}; it must be ({groups},), a number for each group"
            )
    return given


def _live(out: Output) -> list[Tensor]:
    """What a loss may depend on."""
    return [out.logp] if out.head is None else [out.logp, out.head]


def _joined(found: Sequence[Output]) -> Output:
    """Pieces along K as one; a head on the prompt said the same for each of them."""
    logp, entropy = torch.cat([f.logp for f in found], 1), torch.cat([f.entropy for f in found], 1)
    heads = [f.head for f in found if f.head is not None]
    return Output(
        logp,
        entropy,
        None if not heads else heads[0] if heads[0].ndim == 1 else torch.cat(heads, 1),
    )


def _divided(grad: Tensor | None, sizes: Sequence[int]) -> Sequence[Tensor]:
    """The gradient of each piece; that of a head on the prompt goes through the first piece alone."""
    assert grad is not None
    if grad.ndim == 1:
        return [grad, *(torch.zeros_like(grad) for _ in sizes[1:])]
    return grad.split(list(sizes), 1)


def learning_rate(optimizer: torch.optim.Optimizer, settings: TrainerTable, steps: int) -> Any:
    """Transformers' schedule of that name, from 0 after `warmup_steps` and down to `min_lr_ratio`."""
    from transformers import get_scheduler

    names = {
        "linear": "linear",
        "cosine": "cosine_with_min_lr",
        "warmup_stable_decay": "warmup_stable_decay",
        "constant": "constant_with_warmup",
    }
    extra: dict[str, Any] = {}
    if settings.schedule == "cosine":
        extra = {"min_lr_rate": settings.min_lr_ratio}
    if settings.schedule == "warmup_stable_decay":
        decay = settings.decay_steps or max(1, steps // 10)
        extra = {"num_decay_steps": decay, "min_lr_ratio": settings.min_lr_ratio}
    return get_scheduler(
        names[settings.schedule], optimizer, settings.warmup_steps, steps, extra or None
    )


def _account(logp: Tensor, entropy: Tensor, batch: Batch) -> dict[str, Tensor]:
    """What a group was like, each [B]: names as in TRL. `kl` is the mean log(pi / ref) of a response, in nats;
    `off_policy/ess` the effective sample size of its importance weights w = pi / mu, (sum w)^2 / (K sum w^2): 1 on policy, 1 / K at worst."""
    length = batch.mask.sum(-1).float()
    log_ratio = ((logp - batch.behavior_logp) * batch.mask).sum(-1)
    return {
        "reward": batch.reward.mean(1),
        "reward_std": batch.reward.std(1),
        "kl": ((logp - batch.ref_logp) * batch.mask).sum(-1).mean(1),
        "entropy": (entropy.sum(-1) / length).mean(1),
        "completions/mean_length": length.mean(1),
        "off_policy/log_ratio": log_ratio.abs().mean(1),
        "off_policy/ess": 1 / (batch.samples * log_ratio.softmax(1).square().sum(1)),
    }


def _mean(parts: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Over all groups, however they were divided."""
    return {name: torch.cat([p[name].float() for p in parts]).mean().item() for name in parts[0]}

"""Contract of objectives, each in a file of this folder, and terms and metrics that they share.

Terms depend only on values at sampled tokens.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tba.prompt import passes
from tba.types import Batch

PerToken = Float[Tensor, "B K T"]
PerResponse = Float[Tensor, "B K"]
PerGroup = Float[Tensor, " B"]
Loss = tuple[PerGroup, dict[str, PerGroup]]
"""One loss per group, and metrics by name with one number per group."""

Importance = Literal["none", "token", "sequence"]
Taper = Literal["reward", "residual", "none"]
"""Which responses of trajectory balance have the weight min(pi / mu, 1): see `tapered`."""
MAX_LOG_RATIO = 20.0
"""Bound on log-ratios before exponentiation: e^20 is large enough, and finite."""
OWN = ("loss", "step", "time", "requested", "grad_norm", "learning_rate", "step_time")
OWN_GROUPS = ("eval/", "batch/", "buffer/", "wait/", "sync/", "engine/", "searchers/", "trainer/")
"""Names of metrics, and their beginnings, that an objective cannot use."""
MOST_K3 = 10.0
"""Maximum of a token's term in `kl/k3`, in nats: one token must not dominate a batch's mean."""


@dataclass(frozen=True)
class Head:
    """Parameters that an objective owns: a linear map from last hidden states to one number.

    The input is divided by sqrt(D), and the weights start at 0.
    """

    on: Literal["prompt", "response"]
    """`response`: one number per response token [B K T], from the state before it; its gradient
    reaches the policy. `prompt`: one number per prompt [B], from its mean state, detached."""
    learning_rate: float
    """AdamW's learning rate for the head; it follows the policy's schedule."""


@dataclass(frozen=True)
class ValueRollouts:
    """Value estimates by search: `rollouts` continuations before every `step_tokens`-th token."""

    rollouts: int
    step_tokens: int


class Objective:
    """Loss of log-probabilities. A subclass is a frozen dataclass, and its fields are its options.

    The loss of a group depends on that group only, so that micro-batches cannot change the result.
    """

    __call__: Callable[..., Loss]
    """`objective(logp, batch)` returns the loss of each group; `logp` [B K T] are the live policy's
    log-probs of the tokens. An objective with a head is called with `(logp, batch, head)`."""

    @property
    def head(self) -> Head | None:
        """Return the head that the trainer keeps for this objective, or None."""
        return None

    @property
    def value_rollouts(self) -> ValueRollouts | None:
        """Return the value estimates that the objective reads from `batch.value`, or None."""
        return None

    @property
    def needs_behavior(self) -> bool:
        """Return whether the objective, with its options, needs an exact `batch.behavior_logp`.

        Settings that change the distribution of the samples, such as `sampling.top_p`, are then
        rejected.
        """
        return False

    @property
    def needs_own_samples(self) -> bool:
        """Return whether the optimum, with the objective's options, depends on the sampling policy.

        If so, the objective is correct only on the policy's own samples, including those of earlier
        steps, and settings that add others, or change the samples' distribution, are rejected.
        """
        return False

    @property
    def learns_from_equal_rewards(self) -> bool:
        """Return whether a group of equal rewards has a gradient, apart from a separate KL loss."""
        return False

    @property
    def warning(self) -> str | None:
        """Return a warning about the options to show at the start of a run, or None."""
        return None


def total(values: PerToken, batch: Batch) -> PerResponse:
    """Return the sum over the sampled tokens of each response."""
    return (values * batch.mask).sum(-1)


def centred(values: PerResponse) -> PerResponse:
    """Subtract the mean of the group; exactly 0 if values are equal up to rounding."""
    equal = passes(values.amin(1, keepdim=True), values.amax(1, keepdim=True))
    return (values - values.mean(1, keepdim=True)) * ~equal


def standardised(reward: PerResponse) -> PerResponse:
    """Subtract the mean of the group, and divide by its standard deviation plus 1e-4."""
    return centred(reward) / (reward.std(1, keepdim=True) + 1e-4)


def token_mean(values: PerToken, batch: Batch) -> PerGroup:
    """Return the mean over all sampled tokens of a group: long responses weigh more."""
    return total(values, batch).sum(1) / batch.mask.sum((1, 2))


def whitened(advantage: PerToken, batch: Batch) -> PerToken:
    """Subtract the mean over a group's sampled tokens, and divide by their standard deviation."""
    exact = advantage.double()  # otherwise equal values would leave rounding errors
    left = (exact - token_mean(exact, batch)[:, None, None]) * batch.mask
    return left * (token_mean(left.square(), batch) + 1e-8).rsqrt()[:, None, None]


def leave_one_out(batch: Batch, beta: float) -> PerResponse:
    """Return R - mean of the others' R in the group: K / (K - 1) times the centred R.

    R = r - beta (log mu - log ref), where mu sampled the response.
    """
    regularised = batch.reward - beta * total(batch.behavior_logp - batch.ref_logp, batch)
    return centred(regularised) * batch.samples / (batch.samples - 1)


def log_ratio(logp: PerToken, batch: Batch) -> PerToken:
    """Return log pi - log mu of each token, 0 where none was sampled."""
    return (logp - batch.behavior_logp) * batch.mask


def ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), finite for any finite input."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """Return min(rho A, clip(rho, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347, equation 7)."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def outside(ratio: PerToken, low: float, high: float, batch: Batch) -> PerGroup:
    """Return the mean share of a response's tokens with a ratio outside [1 - low, 1 + high]."""
    is_outside = (ratio < 1 - low) | (ratio > 1 + high)
    share = (is_outside * batch.mask).sum(-1) / batch.mask.sum(-1)
    return share.mean(1)


def importance(kind: Importance, logp: PerToken, batch: Batch, cap: float) -> PerToken:
    """Return importance weights min(pi / mu, cap) of tokens or whole responses, detached."""
    change = log_ratio(logp.detach(), batch)
    if kind == "none":
        return torch.ones_like(change)
    if kind == "sequence":
        change = change.sum(-1, keepdim=True).expand_as(change)
    return ratio(change).clamp(max=cap)


def better(reward: PerResponse) -> Bool[Tensor, "B K"]:
    """Return which responses have a reward above the mean of their group, up to rounding."""
    return ~passes(reward.mean(1, keepdim=True), reward)


def tapered(taper: Taper, error: PerResponse, logp: PerToken, batch: Batch) -> PerResponse:
    """Return the weights of the errors beta (log pi - log ref) - r + beta log Z, without gradient.

    The weight is min(pi / mu, 1) of the response where `taper` says so, and 1 elsewhere:

    - `residual`: where the error is above 0, so that the response is pushed down,
    - `reward`: there, and where the reward is not above the mean of the group,
    - `none`: nowhere.
    """
    if taper == "none":
        return torch.ones_like(error)
    pulls = error <= 0
    whole = pulls & better(batch.reward) if taper == "reward" else pulls
    return torch.where(whole, 1.0, importance("sequence", logp, batch, cap=1.0)[..., 0])


def kl_k3(logp: PerToken, batch: Batch) -> PerToken:
    """Return Schulman's k3 estimate of KL(pi, ref): ref / pi - log(ref / pi) - 1.

    As a loss, its expected gradient on policy is the gradient of KL(ref, pi).
    """
    difference = ((batch.ref_logp - logp) * batch.mask).clamp(max=MAX_LOG_RATIO)
    return difference.expm1() - difference  # exp(x) - 1 would lose a small x to rounding


def penalised(
    logp: PerToken, batch: Batch, advantage: Tensor, beta: float, low: float, high: float
) -> tuple[PerResponse, PerGroup]:
    """Return sum_t [min(rho_t A_t, clip(rho_t) A_t) - beta KL_t] of each response, and `outside`.

    rho_t = pi / mu of a token, KL_t is the k3 estimate, and the advantage is [B K T] or [B K 1].
    """
    rho = ratio(log_ratio(logp, batch))
    surrogate = clipped(rho, advantage, low, high) - beta * kl_k3(logp, batch)
    return total(surrogate, batch), outside(rho, low, high, batch)


def group_metrics(
    logp: PerToken, entropy: PerToken, batch: Batch, tokens: float
) -> dict[str, Tensor]:
    """Return the metrics of every step for each group, [B], with TRL's names where TRL has them.

    `kl` is the mean of log(pi / ref) over tokens, the k1 estimate of KL(pi, ref) in nats; `kl/k3`
    is the mean of k3, capped at `MOST_K3` per token; `entropy` is a mean over tokens, too. `tokens`
    is the mean number per group: the mean over groups is then a mean over tokens. `log_ratio` is
    the mean of log(pi / ref) over responses, in nats. `off_policy/ess` is the effective sample
    size of the importance weights w = pi / mu, (sum w)^2 / (K sum w^2): from 1 / K to 1. `from_ref`
    is the mean |log(pi / ref)| over tokens, which the first step checks.
    """
    moved = total(logp - batch.behavior_logp, batch)
    from_ref = total(logp - batch.ref_logp, batch)
    k3 = total(kl_k3(logp, batch).clamp(0, MOST_K3), batch)
    squared_weights = moved.softmax(1).square().sum(1)
    return {
        "reward": batch.reward.mean(1),
        "reward_std": (left := centred(batch.reward)).std(1),
        "frac_reward_zero_std": (left == 0).all(1),
        "kl": from_ref.sum(1) / tokens,
        "kl/k3": k3.sum(1) / tokens,
        "log_ratio": from_ref.mean(1),
        "from_ref": total((logp - batch.ref_logp).abs(), batch).sum(1) / tokens,
        "entropy": entropy.sum((1, 2)) / tokens,
        "completions/mean_length": batch.mask.sum(-1).float().mean(1),
        "off_policy/log_ratio": moved.abs().mean(1),
        "off_policy/ess": 1 / (batch.samples * squared_weights),
    }


def checked_loss(objective: str, returned: Any, groups: int, taken: Container[str]) -> Loss:
    """Return the loss and the metrics that an objective returned; ValueError if one is wrong.

    Each must have one number per group. Names of metrics must not be in `taken`.
    """
    name = f"objective {objective}"
    shape = (groups,)
    match returned:
        case (loss, dict(metrics)):
            pass
        case _:
            kind = type(returned).__name__
            raise ValueError(f"{name} returned {kind}; it must return (loss, metrics)")
    for key, value in (("loss", loss), *metrics.items()):
        if not isinstance(value, Tensor) or value.shape != shape:
            is_tensor = isinstance(value, Tensor)
            found = f"has shape {tuple(value.shape)}" if is_tensor else f"is {value!r:.80}"
            raise ValueError(
                f"{name}: {key} {found}; it must be a tensor {shape}, a number for each group"
            )
    for key in metrics:
        if key in OWN or key in taken or key.startswith(OWN_GROUPS):
            raise ValueError(f"{name}: {key} is already a metric of the run; return it as x/{key}")
    return loss, metrics

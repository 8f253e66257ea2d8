"""A policy whose layers are divided over several ranks, with PyTorch's FSDP2."""

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tba.config.tables import FsdpTable
from tba.learn.policy import Policy
from tba.models.cache import layers_of


def shard(policy: Policy, ranks: int, settings: FsdpTable | None) -> None:
    """Divide each layer, and what is outside of the layers, over all ranks.

    Gradients are added up over ranks, not averaged: the loss of a group is divided by all groups
    of the batch on every rank.
    """
    own = settings or FsdpTable()
    mesh = init_device_mesh(policy.device.type, (ranks,))
    options: dict[str, Any] = {"mesh": mesh}
    reduced = torch.float32 if own.reduce_dtype == "fp32" else torch.bfloat16
    if policy.autocast:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=reduced)
    for layer in layers_of(policy.model):
        fully_shard(layer, reshard_after_forward=own.reshard_after_forward, **options)
    fully_shard(policy, reshard_after_forward=False, **options)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply beforehand
            module.set_gradient_divide_factor(1.0)

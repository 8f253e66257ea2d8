"""Models sharded over ranks: each rank holds a part of every tensor, and reads only that part."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tba.config.tables import PolicyTable
from tba.models import model_path
from tba.models.forward import layers_of
from tba.models.lora import load_placed, set_attention
from tba.models.pretrained import load_model, model_folder
from tba.models.tensor_files import TensorFile, stored_in, weight_files


def shard(
    root: nn.Module, model: Any, device: str, bf16: bool, ranks: int, after_forward: bool = True
) -> None:
    """Shard each layer of the model, and the other modules in `root`, over all ranks with FSDP2.

    Layers that a pass has gathered are sharded again `after_forward`, or after the backward pass.

    Gradients are summed over ranks, not averaged: every rank divides the loss of a group by the
    number of groups in the whole batch.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(torch.device(device).type, (ranks,))
    options: dict[str, Any] = {"mesh": mesh}
    if bf16:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers_of(model):
        fully_shard(layer, reshard_after_forward=after_forward, **options)
    for other in root.children():
        if other is not model:  # the head of an objective computes in fp32
            fully_shard(other, mesh=mesh)
    fully_shard(root, reshard_after_forward=False, **options)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply beforehand
            module.set_gradient_divide_factor(1.0)


def reshard(root: nn.Module) -> None:
    """Free the tensors that a pass without gradients has gathered."""
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def load_for_ranks(
    policy: PolicyTable, device: str, bf16: bool, dtype: torch.dtype, seed: int
) -> tuple[Any, dict[str, TensorFile] | None]:
    """Return the model without values (on "meta"), and the tensors in its files by parameter name.

    With an adapter, or if its files have other tensors, each rank first loads the whole model: the
    second item is then None.
    """
    if policy.lora is None:
        model = load_model(policy, dtype, device="meta")
        set_attention(model, policy, device)
        folder = model_folder(model_path(policy.model))
        stored = stored_in(file for file in weight_files(folder) if file.is_file())
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        if all(name in stored and stored[name].shape == s for name, s in shapes.items()):
            return model, stored
    return load_placed(policy, device, bf16, dtype, seed), None


@torch.no_grad()
def fill_model(root: nn.Module, model: Any, stored: Mapping[str, TensorFile], device: str) -> None:
    """Fill a model on "meta" with the values in its files; a rank allocates and reads its part.

    Other modules in `root`, such as the head of an objective, start at 0.
    """
    allocate(root, device)
    for parameter in root.parameters():
        parameter.zero_()
    for module in model.modules():
        if module._non_persistent_buffers_set:  # such as frequencies; as transformers does it
            model._init_weights(module)
    for name, own in model.state_dict().items():
        if name in stored:  # a tied one is stored once
            stored[name].fill(own)


def allocate(root: nn.Module, device: str) -> None:
    """Replace tensors on "meta" by empty ones on a device; tied ones stay tied."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for module in root.modules():
        parameters = module.named_parameters(recurse=False)
        for name, own in [*parameters, *module.named_buffers(recurse=False)]:
            if not own.is_meta:
                continue
            if id(own) not in made:
                empty = torch.empty_like(own, device=device)
                trained = isinstance(own, nn.Parameter)
                made[id(own)] = own, nn.Parameter(empty) if trained else empty
            setattr(module, name, made[id(own)][1])

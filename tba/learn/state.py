"""State of a trainer on disk: a Hugging Face folder, safetensors and JSON; nothing is pickled."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tba.learn.policy import Policy
from tba.models.lora import ADAPTER, is_adapted, read_adapter, save_adapter
from tba.weights import check_same_model, trained, whole

MODEL = "model"
TRAINER = "trainer.json"
OPTIMIZER = "optimizer.safetensors"
HEAD = "head.safetensors"
SAMPLED = 1024  # elements of each parameter that a fingerprint reads: training changes some


def save(
    folder: Path,
    policy: Policy,
    optimizer: Optimizer,
    schedule: Any,
    first_model: str,
    rank: int = 0,
) -> Callable[[], None]:
    """Return what writes a copy; `first_model` is the fingerprint of the run's first model.

    All ranks of a trainer call this, and put each tensor together; rank 0 keeps and writes them.
    """
    model = policy.model
    adapted = is_adapted(model)
    weights = _copy(trained(model) if adapted else model.state_dict(), model, rank)
    head = {} if policy.readout is None else _copy(policy.readout.state_dict(), model, rank)
    moments = {}
    for name, parameter in policy.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            # a view of its own: all parameters share the maps of 8-bit moments
            moments[f"{name}:{kind}"] = torch.as_tensor(value).detach()
    moments = _copy(moments, model, rank)
    moments["torch_rng"] = torch.get_rng_state()
    text = json.dumps({"first_model": first_model, "schedule": schedule.state_dict()})

    def write() -> None:
        if rank != 0:
            return
        if adapted:
            save_adapter(model, weights, folder / MODEL)
        else:
            model.save_pretrained(folder / MODEL, state_dict=weights)
        save_file(moments, folder / OPTIMIZER)
        if head:
            save_file(head, folder / HEAD)
        (folder / TRAINER).write_text(text, "utf-8")

    return write


def load(
    folder: Path, policy: Policy, optimizer: Optimizer, schedule: Any, first_model: str
) -> None:
    """Put model, head, optimizer, schedule and PyTorch's random state back.

    Learning rates, betas and weight decay stay those of `optimizer`: they may have been changed on
    resuming. ValueError, before anything is changed, if the folder belongs to another model.
    """
    weights = read_model(folder)
    state = json.loads((folder / TRAINER).read_text("utf-8"))
    check_same_model(policy.model, weights, f"{folder} holds")
    if state["first_model"] != first_model:
        also = ", its precision (policy.autocast) or the adapter in policy.lora.from"
        raise ValueError(
            f"policy.model{also if is_adapted(policy.model) else ''} is not the model that this run"
            " began with, whose log-probs its replay buffer holds; set policy.model to that model,"
            " or start a new run"
        )
    _put(weights, policy.model.state_dict())  # tied weights are stored once
    if policy.readout is not None:
        _put(load_file(folder / HEAD), policy.readout.state_dict())
    tensors = load_file(folder / OPTIMIZER)
    torch.set_rng_state(tensors.pop("torch_rng"))
    parameters = dict(policy.named_parameters())
    for key, value in tensors.items():
        name, _, kind = key.rpartition(":")
        own = parameters[name]
        moment = value.to(own.device)  # a step, or a part of 8-bit moments
        if value.shape == own.shape:
            moment = torch.zeros_like(own, dtype=value.dtype)
            _put({kind: value}, {kind: moment})
        is_number = value.dtype == torch.int64  # the steps of 8-bit AdamW
        optimizer.state[own][kind] = int(value) if is_number else moment
    saved = state["schedule"]
    factors = [factor(saved["last_epoch"]) for factor in schedule.lr_lambdas]
    rates = [base * factor for base, factor in zip(schedule.base_lrs, factors, strict=True)]
    schedule.load_state_dict({**saved, "base_lrs": schedule.base_lrs, "_last_lr": rates})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def fingerprint(model: Any) -> str:
    """Return a hash of all parameters, or of the frozen ones; it reads a sample of their values."""
    digest = hashlib.sha256()
    adapted = is_adapted(model)
    for name, parameter in model.named_parameters():
        if adapted and parameter.requires_grad:
            continue
        flat = whole(parameter).flatten()
        sample = flat[:: max(1, len(flat) // SAMPLED)].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()


def read_model(folder: Path) -> dict[str, Tensor]:
    """Return the weights in a checkpoint by name: the model's, or its adapter's."""
    if (folder / MODEL / ADAPTER).is_file():
        return read_adapter(folder / MODEL)
    weights: dict[str, Tensor] = {}
    for file in sorted((folder / MODEL).glob("*.safetensors")):
        weights |= load_file(file)
    return weights


@torch.no_grad()
def _put(stored: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Copy stored tensors into those of the same name; a rank takes its part."""
    for name, tensor in stored.items():
        target = own[name]
        if isinstance(target, DTensor):
            mesh = target.device_mesh
            target = target.to_local()
            start = mesh.get_local_rank() * -(-len(tensor) // mesh.size())
            tensor = tensor[start : start + len(target)]
        target.copy_(tensor)


def _copy(tensors: Mapping[str, Tensor], model: Any, rank: int) -> dict[str, Tensor]:
    """Return complete copies on the CPU, on rank 0. Tied weights stay one tensor."""
    tied = dict(model.named_parameters(remove_duplicate=False))
    copies: dict[int, Tensor] = {}
    named = {}
    for name, tensor in tensors.items():
        key = id(tied.get(name, tensor))
        if key not in copies:
            complete = whole(tensor)
            copies[key] = (
                complete.to("cpu", copy=True).contiguous() if rank == 0 else torch.empty(0)
            )
        named[name] = copies[key]
    return named

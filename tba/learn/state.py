"""State of a trainer on disk: a Hugging Face folder, safetensors and JSON; nothing is pickled."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from tba.learn.policy import Policy
from tba.models.lora import ADAPTER, is_adapted, read_adapter, save_adapter
from tba.weights import check_same_model, trained

MODEL = "model"
TRAINER = "trainer.json"
OPTIMIZER = "optimizer.safetensors"
HEAD = "head.safetensors"
SAMPLED = 1024  # elements of each parameter that a fingerprint reads: training changes some


def save(
    folder: Path, policy: Policy, optimizer: Optimizer, schedule: Any, first_model: str
) -> Callable[[], None]:
    """Return what writes a copy; `first_model` is the fingerprint of the run's first model."""
    model = policy.model
    adapted = is_adapted(model)
    weights = _copy(trained(model) if adapted else model.state_dict())
    head = {} if policy.readout is None else _copy(policy.readout.state_dict())
    moments = {"torch_rng": torch.get_rng_state()}
    for parameter, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            moments[f"{parameter}.{name}"] = torch.as_tensor(value).contiguous()
    moments = _copy(moments)
    text = json.dumps({"first_model": first_model, "schedule": schedule.state_dict()})

    def write() -> None:
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
    policy.model.load_state_dict(weights, strict=False)  # tied weights are stored once
    if policy.readout is not None:
        policy.readout.load_state_dict(load_file(folder / HEAD))
    tensors = load_file(folder / OPTIMIZER)
    torch.set_rng_state(tensors.pop("torch_rng"))
    moments: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        parameter, _, name = key.partition(".")
        moments.setdefault(int(parameter), {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})
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
        flat = parameter.detach().flatten()
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


def _copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU. Tensors that share memory share it in the copy, too."""
    copies: dict[tuple[Any, ...], Tensor] = {}
    named = {}
    for name, tensor in tensors.items():
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if memory not in copies:
            copies[memory] = tensor.detach().to("cpu", copy=True)
        named[name] = copies[memory]
    return named

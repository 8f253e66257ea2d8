"""State of a trainer on disk: the model as a Hugging Face folder, the head, the optimizer.

Safetensors and JSON only; nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tba.learn.policy import Policy

MODEL, TRAINER = "model", "trainer.json"
OPTIMIZER, HEAD = "optimizer.safetensors", "head.safetensors"

SAMPLED = 1024
"""Elements of each parameter that a fingerprint reads: any retraining changes some of them."""


def fingerprint(model: Any) -> str:
    """Return a hash of the model's parameters: their names, shapes, and a sample of their values.

    It depends neither on the folder that the model came from, nor on the device.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, len(flat) // SAMPLED)].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()


def snapshot(
    folder: Path,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    first_model: str,
) -> Callable[[], None]:
    """Copy everything now and return the function that writes it into `folder`."""
    weights = _copy(policy.model.state_dict())
    moments = _copy(_flat(optimizer.state_dict()["state"]))
    moments["torch_rng"] = torch.get_rng_state()
    head = None if policy.readout is None else _copy(policy.readout.state_dict())
    state = json.dumps({"first_model": first_model, "schedule": schedule.state_dict()})

    def write() -> None:
        policy.model.save_pretrained(folder / MODEL, state_dict=weights)
        save_file(moments, folder / OPTIMIZER)
        if head is not None:
            save_file(head, folder / HEAD)
        (folder / TRAINER).write_text(state)

    return write


def restore(
    folder: Path,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    first_model: str,
) -> None:
    """Put model, head, optimizer, schedule and PyTorch's random state back.

    Learning rates, betas and weight decay stay those of `optimizer`: they may have been changed on
    resuming. ValueError, before anything is changed, if the folder belongs to another model.
    """
    weights = read_model(folder)
    state = json.loads((folder / TRAINER).read_text())
    _check_same_model(folder, policy.model, weights)
    if state["first_model"] != first_model:
        raise ValueError(
            "policy.model is not the model that this run began with, to which the reference"
            " log-probs in its replay buffer belong; set policy.model to that model, or start a"
            " new run"
        )
    policy.model.load_state_dict(weights, strict=False)  # tied weights are stored once
    if policy.readout is not None:
        policy.readout.load_state_dict(load_file(folder / HEAD))
    moments = load_file(folder / OPTIMIZER)
    torch.set_rng_state(moments.pop("torch_rng"))
    _restore_schedule(schedule, state["schedule"])
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": _unflat(moments), "param_groups": groups})
    for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate


def read_model(folder: Path) -> dict[str, Tensor]:
    """Return the model's weights in a checkpoint, by name."""
    weights: dict[str, Tensor] = {}
    for file in sorted((folder / MODEL).glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def _check_same_model(folder: Path, model: Any, weights: Mapping[str, Tensor]) -> None:
    own = model.state_dict()
    untied = {name for name, _ in model.named_parameters()}  # a tied weight has its first name
    differing = sorted((weights.keys() - own.keys()) | (untied - weights.keys()))
    if differing:
        raise ValueError(f"{folder} holds another model than policy.model: {differing[:3]}")
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"{folder} holds another model than policy.model: {name} is"
                f" {tuple(tensor.shape)}, not {tuple(own[name].shape)}"
            )


def _restore_schedule(schedule: Any, saved: Mapping[str, Any]) -> None:
    """Continue at the saved step, with the base rates of this run."""
    step = saved["last_epoch"]
    rates = []
    for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True):
        rates.append(base * factor(step))
    schedule.load_state_dict({**saved, "base_lrs": schedule.base_lrs, "_last_lr": rates})


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


def _flat(state: Mapping[int, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return an optimizer's state by `parameter.name`."""
    tensors = {}
    for parameter, values in state.items():
        for name, value in values.items():
            tensors[f"{parameter}.{name}"] = torch.as_tensor(value).contiguous()
    return tensors


def _unflat(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        parameter, _, name = key.partition(".")
        state.setdefault(int(parameter), {})[name] = value
    return state

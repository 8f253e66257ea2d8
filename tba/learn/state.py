"""State of a trainer on disk: a Hugging Face folder, safetensors and JSON; nothing is pickled."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tba.config.schema import read_json
from tba.config.tables import PolicyTable
from tba.learn.host import HostCopy
from tba.learn.optimizer import REST
from tba.learn.policy import Policy
from tba.models.lora import ADAPTER, is_adapted, own_name, save_adapter
from tba.models.pretrained import load_model
from tba.models.tensor_files import INDEX, WEIGHTS, TensorFile, stored_in, weight_files
from tba.weights import check_same_model, trained, whole

MODEL = "model"
TRAINER = "trainer.json"
OPTIMIZER = "optimizer.safetensors"
HEAD = "head.safetensors"
RNG = "torch_rng"
FINGERPRINT_ELEMENTS = 1024
"""Elements of each parameter that a fingerprint samples: training changes some of them."""


def save_state(
    folder: Path,
    policy: Policy,
    optimizer: Optimizer,
    schedule: Any,
    first_model: str,
    memory: HostCopy,
    rank: int = 0,
    ranks: int = 1,
) -> Callable[[], None]:
    """Return a function that writes a copy; `first_model` is the first model's fingerprint.

    All ranks of a trainer call this and gather each tensor; each rank keeps and writes some.
    """
    model = policy.model
    shard = CheckpointShard(rank, ranks, memory)
    adapted = is_adapted(model)
    # the files of a mixture of experts have other tensors than the model
    converted = not adapted and bool(vars(model).get("_weight_conversions"))
    together = adapted or converted  # PEFT reads one file
    tensors = trained(model) if adapted else _distinct(model)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    weights, owners = shard.take(tensors, together)
    readout = {} if policy.readout is None else policy.readout.state_dict()
    head, _ = shard.take(readout, together=True)
    states = {}
    for name, parameter in policy.named_parameters():
        # the same order in a resumed run, so that the same rank writes the same tensors
        for kind, value in sorted(optimizer.state.get(parameter, {}).items()):
            states[f"{name}:{kind}"] = torch.as_tensor(value)
    moments, _ = shard.take(states)
    memory.wait()
    if rank == 0:
        moments[RNG] = torch.get_rng_state()
    about = {"first_model": first_model, "schedule": schedule.state_dict(), "converted": converted}
    text = json.dumps(about)

    def write() -> None:
        # runs in another thread, where `model.state_dict` would reshard tensors of a running pass
        if ranks > 1 and not together:
            _write_shard(folder, model, weights, owners, shard, total)
        elif adapted and rank == 0:
            save_adapter(model, weights, folder / MODEL)
        elif rank == 0:
            model.save_pretrained(folder / MODEL, state_dict=weights)
        save_file(moments, folder / shard.file(OPTIMIZER))
        if head:
            save_file(head, folder / HEAD)
        if rank == 0:
            (folder / TRAINER).write_text(text, "utf-8")

    return write


class CheckpointShard:
    """Part of a checkpoint that a rank writes: whole tensors, copied to `memory`."""

    def __init__(self, rank: int, ranks: int, memory: HostCopy):
        self.rank = rank
        self.ranks = ranks
        self._memory = memory
        self._bytes = [0] * ranks

    def file(self, name: str, rank: int | None = None) -> str:
        """Return the name of a rank's file, by default this rank's: `model-00001-of-00002.…`."""
        if self.ranks == 1:
            return name
        stem, _, suffix = name.partition(".")
        number = 1 + (self.rank if rank is None else rank)
        return f"{stem}-{number:05d}-of-{self.ranks:05d}.{suffix}"

    def take(
        self, tensors: Mapping[str, Tensor], together: bool = False
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Return copies of the tensors that this rank writes, and the rank that writes each.

        That is the rank with the fewest bytes so far, or rank 0 if all stay `together`. The copies
        are complete once the memory's `wait` has returned.
        """
        own = {}
        owners = {}
        for name, tensor in tensors.items():
            owner = 0 if together else self._bytes.index(min(self._bytes))
            self._bytes[owner] += tensor.numel() * tensor.element_size()
            owners[name] = owner
            complete = whole(tensor)
            if owner == self.rank:
                own[name] = self._memory.add(complete)
        return own, owners


def _distinct(model: Any) -> dict[str, Tensor]:
    """Return the model's tensors by name; tied ones once, under their first name."""
    first = dict(model.named_parameters())
    every = dict(model.named_parameters(remove_duplicate=False))
    state = model.state_dict()
    return {name: t for name, t in state.items() if name in first or name not in every}


def _write_shard(
    folder: Path,
    model: Any,
    weights: dict[str, Tensor],
    owners: Mapping[str, int],
    shard: CheckpointShard,
    total: int,
) -> None:
    """Write this rank's tensors of a model; rank 0 also writes the config and the index.

    All ranks together write `total` bytes.
    """
    if shard.rank > 0:
        (folder / MODEL).mkdir(exist_ok=True)
        save_file(weights, folder / MODEL / shard.file(WEIGHTS), {"format": "pt"})
        return
    # `save_pretrained` deletes other ranks' files in its folder, and does not number one file
    aside = folder / f".{MODEL}"
    model.save_pretrained(aside, state_dict=weights, max_shard_size=total + 1)
    (folder / MODEL).mkdir(exist_ok=True)
    for file in aside.iterdir():
        name = shard.file(WEIGHTS) if file.name == WEIGHTS else file.name
        file.rename(folder / MODEL / name)
    aside.rmdir()
    files = {name: shard.file(WEIGHTS, owner) for name, owner in owners.items()}
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / MODEL / INDEX).write_text(json.dumps(index, indent=1), "utf-8")


def load_state(
    folder: Path, policy: Policy, optimizer: Optimizer, schedule: Any, first_model: str
) -> None:
    """Restore model, head, optimizer, schedule and PyTorch's random state.

    Learning rates, betas and weight decay of `optimizer` are kept: they may have been changed on
    resuming. ValueError, before anything changes, if the folder belongs to another model.
    """
    weights = stored_model(folder)
    state = read_json(folder / TRAINER)
    check_same_model(policy.model, weights, f"{folder} holds")
    if state["first_model"] != first_model:
        also = ", its precision (policy.autocast) or the adapter in policy.lora.from"
        raise ValueError(
            f"policy.model{also if is_adapted(policy.model) else ''} is not the one that this run"
            " began with, whose log-probs its replay buffer holds; restore it, or start a new run"
        )
    own = policy.model.state_dict()
    for name, stored in weights.items():  # tied weights are stored once
        stored.fill(own[name])
    if policy.readout is not None:
        head = stored_in([folder / HEAD])
        for name, target in policy.readout.state_dict().items():
            head[name].fill(target)
    moments = stored_in(folder.glob(f"{OPTIMIZER.partition('.')[0]}*.safetensors"))
    torch.set_rng_state(moments.pop(RNG).read())
    parameters = dict(policy.named_parameters())
    for key, stored in moments.items():
        name, _, kind = key.rpartition(":")
        parameter = parameters[name]
        if stored.shape and isinstance(parameter, DTensor):
            kept = torch.int16 if kind == REST else torch.float32
            moment = torch.zeros_like(parameter, dtype=kept)
            stored.fill(moment)
        else:  # moments in 8 bits have tensors of other shapes as well
            moment = stored.read().to(parameter.device)
        is_number = moment.dtype == torch.int64  # the steps of 8-bit AdamW
        optimizer.state[parameter][kind] = int(moment) if is_number else moment
    saved = state["schedule"]
    factors = [factor(saved["last_epoch"]) for factor in schedule.lr_lambdas]
    rates = [base * factor for base, factor in zip(schedule.base_lrs, factors, strict=True)]
    schedule.load_state_dict({**saved, "base_lrs": schedule.base_lrs, "_last_lr": rates})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def fingerprint(model: Any) -> str:
    """Return a hash of a sample of all parameters, or of the frozen ones beneath an adapter."""
    digest = hashlib.sha256()
    adapted = is_adapted(model)
    for name, parameter in model.named_parameters():
        if adapted and parameter.requires_grad:
            continue
        flat = whole(parameter).flatten()
        sample = flat[:: max(1, len(flat) // FINGERPRINT_ELEMENTS)].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()


def stored_model(folder: Path) -> dict[str, TensorFile]:
    """Return the weights in a checkpoint by their names in the model or its adapter."""
    adapter = folder / MODEL / ADAPTER
    if adapter.is_file():
        return {own_name(name): stored for name, stored in stored_in([adapter]).items()}
    if read_json(folder / TRAINER).get("converted"):
        model = load_model(PolicyTable(model=str(folder / MODEL)), "auto")
        return {name: TensorFile(tuple(t.shape), t) for name, t in _distinct(model).items()}
    return stored_in(weight_files(folder / MODEL))

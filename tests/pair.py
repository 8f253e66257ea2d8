"""Two ranks for tests: processes with gloo that stay alive, and run functions of tests."""

import os
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from build import gradients_of, setup_of, trainer
from suite import FORKS
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tba.learn.trainer import SingleTrainer
from tba.runtime.ranks import _gather
from tba.types import Batch
from tba.weights import Weights, whole

RANKS = 2
STILL = "trainer.learning_rate=1e-30"
"""So that steps leave the weights as they are."""

SECONDS = 200


def _work(rank: int, port: int, orders: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=SECONDS),
    )
    while (order := orders.recv()) is not None:
        try:
            orders.send((True, order(rank)))
        except BaseException as error:
            orders.send((False, f"{type(error).__name__}: {error}"))


class Pair:
    """Two processes that run the same function at the same time."""

    def __init__(self, orders: list[Connection]):
        self._orders = orders

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call function(*arguments, rank) in both, and return their results."""
        for orders in self._orders:
            orders.send(partial(function, *arguments))
        results = []
        for rank, orders in enumerate(self._orders):
            assert orders.poll(SECONDS), f"rank {rank} is late"
            worked, result = orders.recv()
            assert worked, f"rank {rank}: {result}"
            results.append(result)
        return results


@contextmanager
def open_pair() -> Iterator[Pair]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ends = [FORKS.Pipe() for _ in range(RANKS)]
    processes = [
        FORKS.Process(target=_work, args=(rank, port, end), daemon=True)
        for rank, (_, end) in enumerate(ends)
    ]
    for process in processes:
        process.start()
    try:
        yield Pair([own for own, _ in ends])
    finally:
        for process in processes:
            process.kill()
            process.join()


def divided(model: Path, settings: tuple[str, ...], rank: int) -> SingleTrainer:
    """Return a rank's trainer, of which it keeps a part."""
    divided = ("runtime.use=ray", f"trainer.devices={distributed.get_world_size()}")
    parts = setup_of(model, *settings, STILL, *divided)
    return parts.trainer_setup().build("cpu", rank, _gather)


Step = tuple[dict[str, float], dict[str, torch.Tensor]]
"""Metrics of a step, and the gradients of all parameters."""


def gradients(t: SingleTrainer, batches: list[Batch], budgets: list[int]) -> list[Step]:
    """Return what each batch gives, from the same weights."""
    steps = []
    for batch, budget in zip(batches, budgets, strict=True):
        config = t.setup.config
        settings = config.trainer.model_copy(update={"token_budget": budget})
        t.setup = replace(t.setup, config=config.model_copy(update={"trainer": settings}))
        with gradients_of(t) as kept:
            metrics = t.step(batch, 1)
        steps.append((metrics, {name: whole(gradient) for name, gradient in kept.items()}))
    return steps


def divided_gradients(
    model: Path,
    settings: tuple[str, ...],
    batches: list[Batch],
    budgets: list[int],
    rank: int,
) -> list[Step]:
    steps = gradients(divided(model, settings, rank), batches, budgets)
    return steps if rank == 0 else []


def logp_of(model: Path, settings: tuple[str, ...], batch: Batch, rank: int) -> Tensor:
    return divided(model, settings, rank).policy.logp(batch).detach()


def beginning(model: Path, settings: tuple[str, ...], rank: int) -> dict[str, torch.Tensor]:
    """Return what a rank begins with: whole tensors, and buffers."""
    policy = divided(model, settings, rank).policy
    return {n: whole(p) for n, p in [*policy.named_parameters(), *policy.named_buffers()]}


def sent(model: Path, settings: tuple[str, ...], batch: Batch, rank: int) -> list[Weights]:
    """Return a rank's rows after two steps, and after two more: weights, and a reference.

    They are copied before a step that changes all weights, and sent after it.
    """
    t = divided(model, settings, rank)
    every = []
    for version in (2, 4):
        gradients(t, [batch, batch], [10_000, 10_000])
        copies = [t.copy_rows(version, is_reference) for is_reference in (False, True)]
        before = [p.detach().clone() for p in t.policy.parameters()]
        with torch.no_grad():
            for parameter in t.policy.parameters():
                parameter.add_(1.0)
        every += [send().payload for send in copies]
        with torch.no_grad():
            for parameter, old in zip(t.policy.parameters(), before, strict=True):
                parameter.copy_(old)
    return every


def saved_again(
    model: Path, settings: tuple[str, ...], source: Path, target: Path, rank: int
) -> None:
    """Load a checkpoint into two ranks, and save it again. A pass may run meanwhile."""
    t = divided(model, settings, rank)
    t.load(source)
    write = t.save(target)
    t.policy.unshard()  # type: ignore[operator]
    write()
    assert not isinstance(t.policy.model.get_input_embeddings().weight, DTensor)
    distributed.barrier()


def state_of(t: SingleTrainer) -> dict[str, Tensor]:
    """Return weights and moments by name; a rank's part of them."""
    tensors = {}
    for name, parameter in t.policy.named_parameters():
        moments = t.optimizer.state.get(parameter, {})
        for kind, tensor in {"weight": parameter, **moments}.items():
            own = tensor.detach()
            tensors[f"{name}:{kind}"] = own.to_local() if isinstance(own, DTensor) else own
    return tensors


def loaded_by_three(model: Path, settings: tuple[str, ...], source: Path) -> dict[str, Tensor]:
    """Load a checkpoint into three ranks, one after another in this process; join their parts.

    The ranks send nothing: each takes its part of the files.
    """
    parts: defaultdict[str, list[Tensor]] = defaultdict(list)
    first_model = trainer(model, *settings)._first_model
    for rank in range(3):
        distributed.init_process_group("fake", rank=rank, world_size=3, store=FakeStore())
        try:
            with patch("tba.learn.trainer.check_lengths"):  # a pass would gather nothing
                t = divided(model, settings, rank)
            t._first_model = first_model
            t.load(source)
            for name, tensor in state_of(t).items():
                parts[name].append(tensor)
        finally:
            distributed.destroy_process_group()
    return {name: torch.cat(own) if own[0].ndim else own[0] for name, own in parts.items()}

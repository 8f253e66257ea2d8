"""A trainer that is divided over ranks: processes with a device each, and no model in this one.

    train loop              rank 0, 1, ... (each an actor of Ray)
    ShardedTrainer
      step                    plan.slots: what each rank runs, and when
        _call("step")   -->     SingleTrainer.run: layers are gathered, gradients are added up
      copy              -->     SingleTrainer.gathered: rank 0 returns the whole weights
      save              -->     state.save: rank 0 puts tensors together and writes them
      load              -->     state.load: each rank takes its part

A rank that dies, raises or is late ends all ranks, because the others would wait for it.
"""

import math
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from torch import distributed

from tba.learn import NotFinite, TrainerLost, TrainerSizes, WrongReference, plan
from tba.learn.trainer import Ran, SingleTrainer, TrainerSetup
from tba.runtime.cluster import Slot
from tba.runtime.deadline import Calls, NoAnswerError
from tba.runtime.placement import Place, reuse_memory
from tba.types import Batch
from tba.weights import Weights

ENDED_BY_USER = (NotFinite, WrongReference, ValueError)
"""Errors of a rank that speak to the user as they are."""


WRITING = "writing"
"""Group of the thread of a rank that writes beside its steps."""


@dataclass(frozen=True)
class Facts:
    """Facts that the driver knows of a trainer whose model it does not hold."""

    sizes: TrainerSizes
    computes_in_bf16: bool
    bf16_weights: bool
    share_prompt: bool
    can_pack: bool


class RankActor:
    """A rank: a trainer of its part of each tensor, in a process of its own."""

    def __init__(self, place: Place, path: list[str]):
        sys.path[:] = path + [p for p in sys.path if p not in path]
        place.take()
        if place.device == "cpu":
            reuse_memory()
        self._place = place
        self._trainer: SingleTrainer
        self._write: Callable[[], None] = lambda: None

    def address(self) -> str:
        """Return a free port of this machine, on which the ranks meet."""
        with socket.socket() as free:
            host = "127.0.0.1" if ray.util.get_node_ip_address() == "127.0.0.1" else ""
            free.bind((host, 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def start(self, setup: TrainerSetup, address: str, rank: int, deadline: float) -> Facts:
        """Meet the other ranks, load the model and keep a part of each tensor."""
        cuda = self._place.device.startswith("cuda")
        if cuda:
            torch.cuda.set_device(self._place.device)
        distributed.init_process_group(
            "nccl" if cuda else "gloo",
            init_method=f"tcp://{address}",
            rank=rank,
            world_size=setup.settings.devices,
            timeout=timedelta(seconds=deadline),
        )
        self._trainer = trainer = setup.build(self._place.device, rank, _gather)
        return Facts(
            sizes=trainer.sizes,
            computes_in_bf16=trainer.computes_in_bf16,
            bf16_weights=trainer.bf16_weights,
            share_prompt=trainer.policy.share_prompt,
            can_pack=trainer.can_pack,
        )

    def step(self, batch: Batch, slots: Sequence[plan.Slot], step: int) -> dict[str, float]:
        return self._trainer.run(batch, slots, step)

    def gathered(self, version: int, bf16: bool) -> Weights | None:
        return self._trainer.gathered(version, bf16)

    def save(self, folder: Path) -> None:
        """Copy the state; `write` writes it."""
        self._write = self._trainer.save(folder)

    def write(self) -> None:
        self._write()
        self._write = lambda: None

    def load(self, folder: Path) -> None:
        self._trainer.load(folder)


def _gather(ran: Sequence[Ran]) -> list[Ran]:
    """Return what all ranks have run."""
    every: list[list[Ran]] = [[] for _ in range(distributed.get_world_size())]
    distributed.all_gather_object(every, list(ran))
    return [each for own in every for each in own]


class ShardedTrainer:
    """Trainer in the processes of its ranks. Every call to them has `trainer.deadline` seconds."""

    def __init__(self, setup: TrainerSetup, slots: Sequence[Slot], calls: Calls, start: float):
        self._settings = setup.settings
        self._calls = calls
        groups: Any = {"concurrency_groups": {WRITING: 1}}
        rank: Any = ray.remote(**groups)(RankActor)
        self._ranks = [rank.options(**slot.options).remote(slot.place, sys.path) for slot in slots]
        try:
            address = self._wait([self._ranks[0].address.remote()], start, "meet")[0]
            deadline = self._settings.deadline
            starting = [
                actor.start.remote(setup, address, rank, deadline)
                for rank, actor in enumerate(self._ranks)
            ]
            self._facts: Facts = self._wait(starting, start, "start")[0]
        except BaseException:
            self.close()
            raise

    @property
    def sizes(self) -> TrainerSizes:
        return self._facts.sizes

    @property
    def computes_in_bf16(self) -> bool:
        return self._facts.computes_in_bf16

    def step(self, batch: Batch, step: int) -> dict[str, float]:
        started = time.perf_counter()
        facts = self._facts
        budget = self._settings.token_budget
        ranks = len(self._ranks)
        slots = plan.slots(batch, budget, ranks, facts.share_prompt, facts.can_pack)
        metrics = self._call("step", "take a step", ray.put(batch), slots, step)[0]
        metrics["batch/imbalance"] = plan.imbalance(batch, slots)
        metrics["step_time"] = time.perf_counter() - started
        return metrics

    def copy(self, version: int) -> Callable[[], Weights]:
        weights = self._call("gathered", "publish", version, self._facts.bf16_weights)[0]
        return lambda: weights

    def reference(self, version: int) -> Weights:
        weights: Weights = self._call("gathered", "publish", version, False)[0]
        return weights

    def save(self, folder: Path) -> Callable[[], None]:
        self._call("save", "copy their state", folder)

        def write() -> None:
            written = self._ranks[0].write.options(concurrency_group=WRITING).remote()
            self._wait([written], math.inf, "write")  # checkpoint.deadline is the limit

        return write

    def load(self, folder: Path) -> None:
        self._call("load", "load a checkpoint", folder)

    def close(self) -> None:
        """End all ranks."""
        for actor in self._ranks:
            self._calls.attempt(self._calls.deadline, partial(ray.kill, actor))

    def _call(self, method: str, what: str, *arguments: Any) -> list[Any]:
        """Let all ranks do the same, and return their results."""
        begun = [getattr(actor, method).remote(*arguments) for actor in self._ranks]
        return self._wait(begun, self._settings.deadline, what)

    def _wait(self, begun: list[Any], seconds: float, what: str) -> list[Any]:
        """Return the results of the ranks; an error of one of them ends all."""
        until = time.monotonic() + seconds
        waiting = begun
        results: dict[int, Any] = {}
        try:
            while waiting:
                left = min(1.0, until - time.monotonic())
                if left <= 0:
                    late = ", ".join(str(begun.index(each)) for each in waiting)
                    raise TrainerLost(
                        f"rank {late} of the trainer did not {what} within {seconds:g} s"
                        " (trainer.deadline): see why it is slow, or raise trainer.deadline"
                    )
                look = partial(ray.wait, waiting, timeout=left)
                ended, waiting = self._calls("report on ranks", look)
                for each in ended:
                    rank = begun.index(each)
                    results[rank] = self._result(each, rank)
            return [results[rank] for rank in range(len(begun))]
        except TrainerLost:
            self.close()
            raise
        except NoAnswerError as error:  # the ranks are lost with Ray
            raise TrainerLost(str(error)) from error

    def _result(self, begun: Any, rank: int) -> Any:
        """Return the result of a rank, or raise its error."""
        try:
            return self._calls("take a result of a rank", ray.get, begun)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ENDED_BY_USER):
                raise cause from None
            raise TrainerLost(f"rank {rank} of the trainer has failed: {cause!r}") from error
        except RayError as error:
            raise TrainerLost(
                f"rank {rank} of the trainer has died ({type(error).__name__}): {error}"
            ) from error

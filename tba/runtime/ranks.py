"""Trainer that is sharded over ranks: processes with one device each. This process has no model.

    train loop              rank 0, 1, ... (each an actor of Ray)
    ShardedTrainer
      step              -->     SingleTrainer.micro_batches: what each rank runs, when
                                SingleTrainer.step: gathers layers, reduces gradients
      copy              -->     SingleTrainer.copy_rows: the probe's pass; each rank copies its rows
        send, in a thread -->   RankActor.send_rows, then join_rows: rank 0 sends whole tensors
      reference         -->     the same in fp32, without a probe
      save              -->     state.save_state: each rank writes some of the tensors, whole
      load              -->     state.load_state: each rank reads its shard of each tensor

If a rank dies, raises or is late, all ranks end, because the others would wait for it. The run then
continues from its newest checkpoint, with new ranks and new searchers (tba/open.py).

Ranks meet in a folder that only this user can enter. All users can reach their ports, so they
exchange no pickles.
"""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import count, islice
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any
from weakref import WeakValueDictionary

import ray
import torch
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError
from torch import distributed
from torch._C._distributed_c10d import FileStore

from tba.errors import NoAnswerError, NotFinite, TrainerLost, WrongReference
from tba.learn import TrainerSizes
from tba.learn.trainer import MicroBatchResult, SingleTrainer, TrainerSetup
from tba.runtime.cluster import Slot, check_seen
from tba.runtime.deadline import Calls
from tba.runtime.placement import Place, take_gpu
from tba.types import Batch
from tba.weights import Publication, Transport, joined_rows

Errors = tuple[type[Exception], ...]
"""Types of errors that a rank survives: they are re-raised unchanged."""
ENDED_BY_USER: Errors = (NotFinite, WrongReference, ValueError)

CAUSE = 1.0
"""Seconds after a rank's error in which the death of another rank counts as its cause."""

MAX_BYTES_SENT = 2**28
"""Limit in bytes on what a rank sends to others after its part of a step."""

WRITING = "writing"
SENDING = "sending"
"""Concurrency groups of a rank's threads that write checkpoints and send weights during steps."""


class RankActor:
    """A rank: a trainer of its shard of each tensor, in a separate process."""

    def __init__(self, place: Place, folders: Mapping[str, str]):
        place.begin()
        self._place = place
        self._folders = folders
        self._trainer: SingleTrainer
        self._write: Callable[[], None] = lambda: None
        self._copies: dict[int, Callable[[], Publication]] = {}  # unsent ones, by number
        # kept alive until the train loop has opened them
        self._rows: Publication | None = None
        self._sent: Publication | None = None

    def start(
        self, setup: TrainerSetup, transport: Transport, meeting: str, deadline: float, rank: int
    ) -> tuple[TrainerSizes, bool]:
        """Meet the other ranks, load the model, and keep a shard of each tensor.

        Return the trainer's sizes, and whether it computes in bf16.
        """
        check_seen(self._folders)
        cuda = self._place.device.startswith("cuda")
        if cuda:
            take_gpu(self._place.device)
        if ray.util.get_node_ip_address() == "127.0.0.1" and sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        limit = timedelta(seconds=deadline)
        store = FileStore(f"{meeting}/store")
        store.set_timeout(limit)
        distributed.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=setup.config.trainer.devices,
            timeout=limit,
        )
        self._trainer = trainer = setup.build(self._place.device, rank, _gather, transport)
        return trainer.sizes, trainer.computes_in_bf16

    def step(self, batch: Batch, step: int) -> dict[str, float]:
        return self._trainer.step(batch, step)

    def copy(self, version: int, is_reference: bool, number: int, kept: Sequence[int]) -> None:
        """Copy this rank's rows of the weights, for `send_rows`; drop copies that are not kept."""
        for dropped in self._copies.keys() - kept:
            del self._copies[dropped]
        self._copies[number] = self._trainer.copy_rows(version, is_reference)

    def send_rows(self, number: int) -> Publication:
        self._rows = None  # first: so that its memory is written again
        self._rows = self._copies.pop(number)()
        return self._rows

    def join_rows(self, parts: Sequence[Publication]) -> Publication:
        """Send whole weights to the searchers, given the rows that each rank has sent, in order."""
        transport = self._trainer.transport
        received = [transport.receive(part) for part in parts]
        first = received[0]
        self._sent = transport.send(first.version, joined_rows(received), first.probe)
        return self._sent

    def save(self, folder: Path) -> None:
        """Copy the state, for `write`."""
        self._write = self._trainer.save(folder)

    def write(self) -> None:
        self._write()
        self._write = lambda: None

    def load(self, folder: Path) -> None:
        self._trainer.load(folder)


def _gather(ran: Sequence[MicroBatchResult]) -> list[MicroBatchResult]:
    """Return the results of all ranks, exchanged as JSON in tensors, which cannot run code."""
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    text = json.dumps(_plain(ran)).encode()
    most = torch.full((), len(text), device=device)  # `tensor` would wait for the GPU
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    longest = int(most)
    if longest >= MAX_BYTES_SENT:
        raise RuntimeError(f"received {longest:,} bytes, more than a trainer rank sends")
    own = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
    own = own.to(device, non_blocking=True)
    every = own.new_empty(distributed.get_world_size(), longest)
    distributed.all_gather([*every], own)
    gathered = []
    for each in every.cpu():  # one transfer for all ranks
        for metrics, tokens, padding in json.loads(each.numpy().tobytes()):
            tensors = {name: torch.tensor(values) for name, values in metrics.items()}
            gathered.append(MicroBatchResult(tensors, tokens, padding))
    return gathered


def _plain(ran: Sequence[MicroBatchResult]) -> list[tuple[dict[str, list[float]], int, int]]:
    """Return the results as plain numbers, in one transfer: each transfer waits for the GPU."""
    tensors = [metric.double() for each in ran for metric in each.metrics.values()]
    numbers = iter(torch.cat(tensors).tolist() if tensors else [])
    return [
        ({n: [*islice(numbers, len(t))] for n, t in r.metrics.items()}, r.tokens, r.padding)
        for r in ran
    ]


class ShardedTrainer:
    """Trainer in its ranks' processes. Calls to them have a deadline, `trainer.deadline`."""

    def __init__(
        self,
        setup: TrainerSetup,
        slots: Sequence[Slot],
        calls: Calls,
        start: float,
        folders: Mapping[str, str],
        transport: Transport,
        meeting: Path,
    ):
        """All ranks see the folder `meeting`; they meet in a new folder in it."""
        self._deadline = setup.config.trainer.deadline
        self._calls = calls
        self._meeting = mkdtemp(prefix=".ranks-", dir=meeting)
        self._numbers = count()
        self._unsent: WeakValueDictionary[int, partial[Publication]] = WeakValueDictionary()
        self._sending = threading.Lock()  # ranks keep the last publication alive, and no older one
        self._lost: TrainerLost | None = None
        groups: Any = {"concurrency_groups": {WRITING: 1, SENDING: 1}}
        create: Any = ray.remote(**groups)(RankActor)
        self._ranks = calls(
            "create ranks",
            lambda: [create.options(**s.options).remote(s.place, folders) for s in slots],
        )
        given = start, "runtime.start_deadline", ENDED_BY_USER
        try:
            loaded = setup, transport, self._meeting, self._deadline
            begin = [partial(a.start.remote, *loaded, rank) for rank, a in enumerate(self._ranks)]
            self.sizes: TrainerSizes
            self.computes_in_bf16: bool
            (self.sizes, self.computes_in_bf16) = self._wait(begin, "start", *given)[0]
        except BaseException:
            self.close()  # ranks that have started wait for the others
            raise

    def step(self, batch: Batch, step: int) -> dict[str, float]:
        started = time.perf_counter()
        given = self._calls("hold a batch", ray.put, batch)  # once, not for each rank
        taken = self._call("step", "take a step", given, step, passed=ENDED_BY_USER)
        metrics: dict[str, float] = taken[0]
        metrics["step_time"] = time.perf_counter() - started
        return metrics

    def send(self, version: int) -> Publication:
        return self.copy(version)()

    def copy(self, version: int) -> Callable[[], Publication]:
        return self._copy(version)

    def reference(self, version: int) -> Publication:
        return self._copy(version, is_reference=True)()

    def _copy(self, version: int, is_reference: bool = False) -> Callable[[], Publication]:
        """Let each rank copy its rows; return the function that sends them.

        The ranks drop the copies of functions that no longer exist.
        """
        number = next(self._numbers)
        copied = version, is_reference, number, [*self._unsent]
        self._call("copy", "publish", *copied, passed=(NotFinite,))
        send = partial(self._send, number)
        self._unsent[number] = send
        return send

    def _send(self, number: int) -> Publication:
        """Send this copy while the ranks take steps."""
        limit = self._deadline, "trainer.deadline", ()
        with self._sending:
            in_thread = {"concurrency_group": SENDING}
            begin = [partial(a.send_rows.options(**in_thread).remote, number) for a in self._ranks]
            parts = self._wait(begin, "send its part of the weights", *limit)
            join = partial(self._ranks[0].join_rows.options(**in_thread).remote, parts)
            sent: Publication = self._wait([join], "publish", *limit)[0]
        return sent

    def save(self, folder: Path) -> Callable[[], None]:
        self._call("save", "copy their state", folder)
        begin = [a.write.options(concurrency_group=WRITING).remote for a in self._ranks]

        def write() -> None:
            # `Checkpoints` has the deadline; a full disk is not the rank's fault
            self._wait(begin, "write", math.inf, "trainer.deadline", (Exception,))

        return write

    def load(self, folder: Path) -> None:
        self._call("load", "load a checkpoint", folder, passed=ENDED_BY_USER)

    def close(self) -> None:
        """End all ranks."""
        self._calls.attempt(self._calls.deadline, lambda: [*map(ray.kill, self._ranks)])
        rmtree(self._meeting, ignore_errors=True)

    def _call(self, method: str, what: str, *arguments: Any, passed: Errors = ()) -> list[Any]:
        """Call this method of all ranks, and return their results."""
        begin = [partial(getattr(actor, method).remote, *arguments) for actor in self._ranks]
        return self._wait(begin, what, self._deadline, "trainer.deadline", passed)

    def _wait(
        self,
        begin: Sequence[Callable[[], Any]],
        what: str,
        seconds: float,
        setting: str,
        passed: Errors,
    ) -> list[Any]:
        """Start calls to ranks, and return their results within `seconds`.

        Otherwise all ranks end, and TrainerLost is raised: the first one, whichever thread waits.
        Errors in `passed` end no rank.
        """
        until = time.monotonic() + seconds
        results: dict[int, Any] = {}
        try:
            begun = waiting = self._calls("call ranks", lambda: [call() for call in begin])
            while waiting:
                left = min(1.0, until - time.monotonic())
                if left <= 0:
                    late = " and ".join(str(begun.index(each)) for each in waiting)
                    raise TrainerLost(
                        f"rank {late} of the trainer did not {what} within {setting} ="
                        f" {seconds:g} s: see why it is slow, or raise that setting"
                    )
                look = partial(ray.wait, waiting, timeout=left)
                ended, waiting = self._calls("report on ranks", look)
                for each in ended:
                    rank = begun.index(each)
                    results[rank] = self._result(rank, begun, passed)
            return [results[rank] for rank in range(len(begun))]
        except TrainerLost as error:
            self._lost = self._lost or error  # first: calls of other threads fail by `close`
            self.close()
            raise self._lost from self._lost.__cause__
        except NoAnswerError as error:  # Ray is lost, and the ranks with it
            raise TrainerLost(str(error)) from error

    def _result(self, rank: int, begun: list[Any], passed: Errors) -> Any:
        """Return a rank's result, or raise its error, or the death of the rank that caused it."""
        try:
            return self._take(begun[rank])
        except RayTaskError as error:
            if isinstance(error.cause, passed):
                raise error.cause from None
            # its error may be the consequence of another rank's death, which Ray reports later
            look = partial(ray.wait, begun, num_returns=len(begun), timeout=CAUSE)
            for each in self._calls("report on ranks", look)[0]:
                try:
                    self._take(each)
                except RayTaskError:  # it is alive
                    pass
                except RayError as death:
                    raise _death(begun.index(each), death) from death
            failed = f"rank {rank} of the trainer has failed: {error.cause!r}"
            raise TrainerLost(failed) from error
        except RayError as error:
            raise _death(rank, error) from error

    def _take(self, one: Any) -> Any:
        return self._calls("take a result of a rank", ray.get, one)


def _death(rank: int, error: RayError) -> TrainerLost:
    """Return the error for a rank whose process has ended."""
    why = "it was killed or has crashed"
    if isinstance(error, OutOfMemoryError):
        why = "Ray ended it, because the machine is almost out of memory"
    return TrainerLost(f"the process of rank {rank} of the trainer has died: {why}")

"""The Ray of a run, private or a cluster, and the places of trainer and searchers on it."""

import atexit
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tba.child import MARK, Child, clean_up
from tba.config.tables import RuntimeTable
from tba.engines import EngineError
from tba.runtime import placement
from tba.runtime.deadline import Calls, ClusterLostError, processes_of_ray
from tba.runtime.memory import SharedMemory
from tba.runtime.placement import Place
from tba.weights import Sent, Weights

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}

INLINE = 2**28
"""Bytes of arguments and results that a private Ray keeps out of its object store."""

SENT = 2**26
"""Bytes that are sent to each machine to see how fast the network is."""

LEAVING = 30.0
LEAVING_LOST = 10.0
"""Seconds for leaving Ray, and for leaving one that is lost, after which it is abandoned."""


@dataclass(frozen=True)
class ObjectStore:
    """Transport through Ray's object store: one copy on each node, as long as its parcel exists."""

    deadline: float  # seconds that weights may take to arrive

    def send(self, weights: Weights) -> Sent:
        # inside a tuple Ray passes the reference on; alone it would fetch the weights first
        return Sent(weights.version, (ray.put(weights),))

    def receive(self, sent: Sent) -> Weights:
        (reference,) = sent.parcel
        try:
            return ray.get(reference, timeout=self.deadline)
        except (GetTimeoutError, ObjectLostError) as error:  # only this searcher is restarted
            raise EngineError(
                f"the weights of version {sent.version} did not arrive ({type(error).__name__});"
                f" see why the network is slow or cut, or raise runtime.task_deadline ="
                f" {self.deadline:g} s"
            ) from error

    def close(self) -> None:
        pass  # Ray keeps nothing without a reference


class Reservation:
    """Holds a GPU for the trainer, so that Ray assigns it to no searcher."""

    def gpus(self) -> list[str]:
        return [str(gpu) for gpu in ray.get_gpu_ids()]


class Connection:
    """The Ray that this process has joined or started, and the calls to it.

    A Ray that it starts is private: on loopback, in a folder that only this user enters. Its
    processes inherit a mark. A watcher ends them after a kill, which Ray's agents outlive.
    """

    def __init__(self, settings: RuntimeTable):
        self.calls = Calls(settings.cluster_deadline)
        self._watcher: Child | None = None
        self._clean_up: Callable[[], None] = lambda: None
        start: partial[Any] = partial(ray.init, settings.address, **QUIET)
        if settings.address is None:
            mark = secrets.token_hex(8)
            home = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
            folder = Path(home).absolute() / f"tba-{secrets.token_hex(4)}"
            self._watcher = Child("tba.child:clean_up_after_parent", mark, str(folder), os.getpid())
            folder.mkdir(mode=0o700)
            self._clean_up = partial(clean_up, mark, folder, spared=os.getpid())
            start = partial(_start_private, settings.searchers, mark, folder)
        try:
            context: Any = self.calls.within(settings.start_deadline, "start", start)
            info = context.address_info
            processes = processes_of_ray(info["session_dir"], info["raylet_socket_name"])
            self.calls.watch(processes)
        except BaseException as error:
            self.calls.lose("it has not started")
            self.close()
            if isinstance(error, ClusterLostError) and self._watcher is not None:
                raise TimeoutError(
                    f"Ray did not start within runtime.start_deadline = {settings.start_deadline:g}"
                    " s: this machine is too busy; end other programs and try again, or set"
                    " runtime.use=local"
                ) from error
            raise

    def close(self) -> None:
        """Leave a cluster, or end the private Ray with all of its processes."""
        self.calls.look(patience=0.0)  # a process that is stopped cannot end Ray
        lost = self.calls.lost
        if lost:
            self._clean_up()  # what does not answer is killed first
        left = self.calls.attempt(LEAVING_LOST if lost else LEAVING, ray.shutdown)
        if lost or not left:
            atexit.unregister(ray.shutdown)  # it would be waited for again
        self._clean_up()  # Ray makes its folder anew while it leaves
        if self._watcher is not None and left and not lost:
            self._watcher.kill()  # else it cleans up again when this process has ended
        self.calls.close()


def _start_private(searchers: int, mark: str, folder: Path) -> Any:
    """Start a private Ray and return its context."""
    # searchers choose their device themselves: Ray must not hide the GPUs from them
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # at Ray's default of 15, any other program on its core starves a searcher
    os.environ.setdefault("RAY_worker_niceness", "0")
    before = os.environ.get(MARK, "")
    os.environ[MARK] = mark
    try:
        return ray.init(
            "local",
            num_cpus=searchers,
            include_dashboard=False,
            _temp_dir=str(folder / "ray"),  # Ray lets everybody enter this one
            # when the object store dies, it ends every process that waits for it, and nothing
            # is saved
            _system_config={
                "max_direct_call_object_size": INLINE,
                "task_rpc_inlined_bytes_limit": INLINE,
            },
            **QUIET,
        )
    finally:
        os.environ[MARK] = before


@dataclass
class Cluster:
    """A running Ray, and where the trainer and the searchers run on it."""

    connection: Connection
    transport: SharedMemory | ObjectStore
    trainer: Place
    searchers: list[Place]
    searcher_gpus: float = 0.0  # requested of Ray; 0 on one machine, where places name devices
    reservation: Any = None  # actor that holds the trainer's GPU as long as this handle exists

    def room(self) -> int:
        """Return the bytes that there are for publications: memory, or a node's object store."""
        if isinstance(self.transport, SharedMemory):
            return psutil.virtual_memory().available
        nodes = self.connection.calls("list its nodes", ray.nodes)
        stores = [n["Resources"].get("object_store_memory", 0) for n in nodes if n["Alive"]]
        return int(min(stores))


def open_cluster(settings: RuntimeTable, each: int = 1, ranks: int = 1) -> Cluster:
    """Join the cluster at `runtime.address`, or start a private Ray on loopback.

    On a cluster with GPUs, an engine runs on `each` of them. The trainer has so many `ranks`.
    """
    connection = Connection(settings)
    try:
        if settings.address is not None:
            seconds = 2 * settings.start_deadline  # of two waits
            what = "share its GPUs"
            return connection.calls.within(seconds, what, _share, connection, settings, each)
    except BaseException:
        connection.close()
        raise
    trainer, searchers = placement.places_on_one_machine(settings, ranks)
    on_linux = sys.platform == "linux"
    transport = SharedMemory() if on_linux else ObjectStore(settings.task_deadline)
    return Cluster(connection, transport, trainer, searchers)


def _share(connection: Connection, settings: RuntimeTable, each: int) -> Cluster:
    """Divide the GPUs of the cluster that this process has joined, and reserve the trainer's."""
    node_id = ray.get_runtime_context().get_node_id()
    gpus = {n["NodeID"]: int(n["Resources"].get("GPU", 0)) for n in ray.nodes() if n["Alive"]}
    sees_gpu = placement.gpu_count() > 0
    own = int(sees_gpu and gpus[node_id] > 0)
    reserved, share = placement.share_gpus(sum(gpus.values()), own, settings.searchers)
    if share and each > 1:
        gpus[node_id] -= reserved
        share = placement.whole_gpus(list(gpus.values()), settings.searchers, each)
    cluster = Cluster(
        connection=connection,
        transport=ObjectStore(settings.task_deadline),
        trainer=Place("cuda:0" if sees_gpu else "cpu"),
        searchers=[Place("cuda:0" if share else "cpu")] * settings.searchers,
        searcher_gpus=share,
    )
    if not reserved:
        return cluster
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    request = ray.remote(Reservation).options(num_cpus=0, num_gpus=1, scheduling_strategy=here)
    reservation: Any = request.remote()
    try:
        (gpu,) = ray.get(reservation.gpus.remote(), timeout=settings.start_deadline)
    except GetTimeoutError:
        raise TimeoutError(
            f"no GPU of this machine became free for the trainer within runtime.start_deadline ="
            f" {settings.start_deadline:g} s; end the job that has it"
        ) from None
    device = placement.reserved_device(gpu, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return replace(cluster, trainer=Place(device), reservation=reservation)


@dataclass(frozen=True)
class Node:
    """A machine of a cluster, and the bytes per second that it receives."""

    name: str
    gpus: int
    packages: str
    rate: float


def look_at_nodes(settings: RuntimeTable) -> list[Node]:
    """Join the cluster, and ask each of its machines, to which SENT bytes are sent.

    ClusterLostError, which names the machine, unless it answers in `runtime.start_deadline`.
    """
    connection = Connection(settings)
    try:
        found = []
        for node in connection.calls("list its nodes", ray.nodes):
            if not node["Alive"]:
                continue
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ask: Any = ray.remote(_answer).options(num_cpus=0, scheduling_strategy=there)
            name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            answer = ask.remote((ray.put(np.zeros(SENT, np.uint8)),))
            what = f"get an answer from {name}"
            given = connection.calls.within(settings.start_deadline, what, ray.get, answer)
            found.append(Node(name, int(node["Resources"].get("GPU", 0)), *given))
        return found
    finally:
        connection.close()


def _answer(sent: tuple[Any, ...]) -> tuple[str, float]:
    """Return a machine's packages, and the bytes per second to it."""
    began = time.perf_counter()
    ray.get(sent[0])
    rate = SENT / (time.perf_counter() - began)
    return ", ".join(f"{name} {version(name)}" for name in ("tba", "torch", "ray")), rate

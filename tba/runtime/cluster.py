"""The Ray of a run, private or a cluster, and the places of trainer and searchers on it."""

import atexit
import logging
import os
import secrets
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tba.child import MARK, Child, clean_up
from tba.config.tables import RuntimeTable
from tba.engines import EngineError
from tba.runtime import placement
from tba.runtime.deadline import Calls, ClusterLostError, Health
from tba.runtime.memory import SharedMemory
from tba.runtime.placement import Place
from tba.weights import Sent, Weights

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}

INLINE = 2**28
"""Bytes of arguments and results that a private Ray keeps out of its object store."""

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
    """The Ray that this process has started or joined, with all that watches over it."""

    def __init__(self, settings: RuntimeTable):
        self.calls = Calls(settings.cluster_deadline)
        self._health: Health | None = None
        self._private = PrivateRay(settings.searchers) if settings.address is None else None
        start: partial[Any] = partial(ray.init, address=settings.address, **QUIET)
        if self._private is not None:
            start = partial(self._private.start)
        try:
            context: Any = self.calls.within(settings.start_deadline, "start", start)
            info = context.address_info
            self._health = Health(self.calls, info["session_dir"], info["raylet_socket_name"])
        except BaseException as error:
            self.close()
            if isinstance(error, ClusterLostError) and settings.address is None:
                raise TimeoutError(
                    f"Ray did not start within runtime.start_deadline = {settings.start_deadline:g}"
                    " s: this machine is too busy; end other programs and try again, or set"
                    " runtime.use=local"
                ) from error
            raise

    def close(self) -> None:
        """Leave a cluster, or end the private Ray with all of its processes."""
        if self._health is not None:
            self._health.close()
        with ExitStack() as closing:
            closing.callback(self.calls.close)
            if self._private is not None:
                closing.callback(self._private.remove)  # Ray makes its folder anew while it leaves
                if self.calls.lost:
                    self._private.kill()  # what does not answer is killed first
            seconds = LEAVING_LOST if self.calls.lost else LEAVING
            if not self.calls.attempt(seconds, ray.shutdown):
                atexit.unregister(ray.shutdown)  # it would be waited for again


class PrivateRay:
    """Ray on loopback, in a folder that only this user enters. A watcher ends it after a kill.

    Ray's agents outlive a driver that ended by SIGKILL.
    """

    def __init__(self, searchers: int):
        self._searchers = searchers
        self._mark = secrets.token_hex(8)
        home = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
        self._folder = Path(home).absolute() / f"tba-{secrets.token_hex(4)}"
        watched = self._mark, str(self._folder), os.getpid()
        self._watcher = Child("tba.child:clean_up_after_parent", *watched)  # a kill may come now
        self._folder.mkdir(mode=0o700)

    def start(self) -> Any:
        """Start Ray, whose processes inherit a mark, and return its context."""
        # searchers choose their device themselves: Ray must not hide the GPUs from them
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # at Ray's default of 15, any other program on its core starves a searcher
        os.environ.setdefault("RAY_worker_niceness", "0")
        before = os.environ.get(MARK, "")
        os.environ[MARK] = self._mark
        try:
            return ray.init(
                "local",
                num_cpus=self._searchers,
                include_dashboard=False,
                _temp_dir=str(self._folder / "ray"),  # Ray lets everybody enter this one
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

    def kill(self) -> None:
        """Kill all processes of this Ray."""
        clean_up(self._mark, self._folder, spared=os.getpid())

    def remove(self) -> None:
        """Kill what is left of this Ray, and remove its folder."""
        self.kill()
        self._watcher.kill()


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


def open_cluster(settings: RuntimeTable, each: int = 1) -> Cluster:
    """Join the cluster at `runtime.address`, or start a private Ray on loopback.

    On a cluster with GPUs, an engine runs on `each` of them.
    """
    connection = Connection(settings)
    store = ObjectStore(settings.task_deadline)
    try:
        if settings.address is None:
            transport = SharedMemory() if sys.platform == "linux" else store
            return Cluster(connection, transport, *placement.places_on_one_machine(settings))
        seconds = 2 * settings.start_deadline  # of two waits
        shared = connection.calls.within(seconds, "share its GPUs", _share, settings, each)
        return Cluster(connection, store, *shared)
    except BaseException:
        connection.close()
        raise


def _share(settings: RuntimeTable, each: int) -> tuple[Place, list[Place], float, Any]:
    """Divide the GPUs of the cluster that this process has joined, and reserve the trainer's.

    Return what `Cluster` holds of it.
    """
    node_id = ray.get_runtime_context().get_node_id()
    gpus = {n["NodeID"]: int(n["Resources"].get("GPU", 0)) for n in ray.nodes() if n["Alive"]}
    sees_gpu = placement.gpu_count() > 0
    trainer = int(sees_gpu and gpus[node_id] > 0)
    reserved, share = placement.share_gpus(sum(gpus.values()), trainer, settings.searchers)
    if share and each > 1:
        gpus[node_id] -= reserved
        share = placement.whole_gpus(list(gpus.values()), settings.searchers, each)
    searchers = [Place("cuda:0" if share else "cpu")] * settings.searchers
    if not reserved:
        return Place("cuda:0" if sees_gpu else "cpu"), searchers, share, None
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
    return Place(device), searchers, share, reservation

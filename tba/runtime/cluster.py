"""Ray instance of a run, private or a cluster, and the places of trainer and searchers on it."""

import atexit
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, ObjectLostError
from ray.job_config import JobConfig
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)
from torch import Tensor

from tba.child import MARK, Child, clean_up, module_path
from tba.config.tables import PolicyTable, RuntimeTable
from tba.errors import ClusterLostError, EngineError
from tba.runtime import placement
from tba.runtime.deadline import Calls, processes_of_ray
from tba.runtime.placement import Place
from tba.runtime.shared_memory import SharedMemory
from tba.weights import Probe, Publication, Weights, as_view

BUCKET = 2**30
"""Maximum bytes of an object with a part of the weights, unless a single tensor has more."""

log = logging.getLogger(__name__)
INLINE = 2**28
"""Arguments and results of up to this many bytes stay out of a private Ray's object store."""

SENT = 2**26
"""Bytes that are sent to each machine to measure the network's speed."""

STARTING = 3.0
"""Seconds that Ray's GCS gets to finish starting. If it is killed, Ray waits 30 s for its port."""

LEAVING = 30.0
LEAVING_LOST = 10.0
"""Seconds to wait when leaving Ray, and when leaving a lost Ray, before it is abandoned."""

REACHED = 1.0
"""Seconds after which a machine that does not accept a connection is considered lost."""


@dataclass(frozen=True, eq=False)
class Buckets:
    """Weights in Ray's object store: references to parts of their arrays, by name."""

    references: list[Any]
    probe: Probe | None


@dataclass(frozen=True)
class ObjectStore:
    """Transport through Ray's object store: one copy per node, while the publication exists."""

    deadline: float  # in seconds, for weights to arrive
    put: Callable[[Any], Any] = ray.put

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStore, (self.deadline,)  # `put` belongs to this process

    def send(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], probe: Probe | None
    ) -> Publication:
        references = []
        bucket: dict[str, np.ndarray] = {}
        held = nbytes = 0
        for name, tensor in tensors:
            array = as_view(tensor)
            if bucket and held + array.nbytes > BUCKET:
                references.append(self.put(bucket))
                bucket = {}
                held = 0
            bucket[name] = array
            held += array.nbytes
            nbytes += array.nbytes
        references.append(self.put(bucket))
        return Publication(version, Buckets(references, probe), nbytes)

    def receive(self, sent: Publication) -> Weights:
        buckets: Buckets = sent.payload
        arrays: dict[str, np.ndarray] = {}
        try:
            for bucket in ray.get(buckets.references, timeout=self.deadline):
                arrays |= bucket
            return Weights(sent.version, arrays, buckets.probe)
        except (GetTimeoutError, ObjectLostError) as error:  # only this searcher is restarted
            raise EngineError(
                f"the weights of version {sent.version} did not arrive ({type(error).__name__});"
                f" see why the network is slow or cut, or raise"
                f" runtime.task_deadline, now {self.deadline:g} s"
            ) from error


@dataclass(frozen=True, eq=False)
class Slot:
    """Resources for a process: its place on a machine, and its GPUs or CPUs in Ray.

    A `group` reserves them on one machine; Ray waits until there is such a machine.
    """

    place: Place
    needs: Mapping[str, float]
    group: PlacementGroup | None = None
    index: int = 0  # of the bundle in its group

    @property
    def options(self) -> dict[str, Any]:
        """Ray's options for an actor in this slot."""
        needs = {"num_cpus": self.needs.get("CPU", 0), "num_gpus": self.needs.get("GPU", 0)}
        if self.group is None:
            return needs
        strategy = PlacementGroupSchedulingStrategy(self.group, self.index)
        return {**needs, "scheduling_strategy": strategy}

    def machine(self) -> str | None:
        """Return Ray's id of the machine on which the group is placed; None if pending."""
        table = placement_group_table(self.group)
        found = table["state"] == "CREATED"
        return str(table["bundles_to_node_id"][self.index]) if found else None

    def anew(self) -> "Slot":
        """Request the same resources again, on any machine."""
        if self.group is None:
            return self
        remove_placement_group(self.group)
        (slot,) = request([self.place], self.needs)
        return slot


def request(
    places: Sequence[Place], needs: Mapping[str, float], strategy: str = "STRICT_PACK"
) -> list[Slot]:
    """Request resources for processes at these places, by default on one machine."""
    group = placement_group([dict(needs)] * len(places), strategy)
    return [Slot(place, needs, group, index) for index, place in enumerate(places)]


def is_lost(machine: str) -> bool:
    """Return whether a machine has left the cluster, or cannot be reached from here."""
    for node in ray.nodes():
        if node["NodeID"] == machine and node["Alive"]:
            address = node["NodeManagerAddress"], node["NodeManagerPort"]
            with suppress(OSError), socket.create_connection(address, timeout=REACHED):
                return False
    return True


class Reservation:
    """Reserves a GPU for the trainer, so that Ray does not assign it to a searcher."""

    def gpus(self) -> list[str]:
        return [str(gpu) for gpu in ray.get_gpu_ids()]


class Connection:
    """The Ray instance that this process has joined or started, and the calls to it.

    An instance that it starts is private: on loopback, in a folder that only this user can enter.
    Its processes inherit a mark. If this process is killed, a watcher ends them: Ray's agents would
    survive.
    """

    def __init__(self, settings: RuntimeTable, ranks: int = 0):
        self.calls = Calls(settings.cluster_deadline)
        self._watcher: Child | None = None
        self._clean_up: Callable[[], None] = lambda: None
        self.folder: Path | None = None  # of a private instance
        # all processes use this one's module path: Ray would put the current folder first
        path = [p for p in reversed(module_path()) if p == p.encode("utf-8", "replace").decode()]
        job = JobConfig(_client_job=True, _py_driver_sys_path=path)
        options: Any = {"job_config": job, "log_to_driver": False, "logging_level": logging.ERROR}
        start: partial[Any] = partial(ray.init, settings.address, **options)
        if settings.address is None:
            mark = secrets.token_hex(8)
            home = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
            folder = Path(home).absolute() / f"tba-{secrets.token_hex(4)}"
            self._watcher = Child("tba.child:clean_up_after_parent", mark, str(folder), os.getpid())
            # after the watcher has started: whatever is in it is removed after a kill
            folder.mkdir(mode=0o700)
            self._clean_up = partial(clean_up, mark, folder, spared=os.getpid())
            self.folder = folder
            processes = settings.most_searchers + ranks
            start = partial(_start_private, options, processes, mark, folder)
        try:
            info: Any = self.calls.within(settings.start_deadline, "start", start).address_info
            watched = processes_of_ray(info["session_dir"], info["raylet_socket_name"])
            self.calls.watch(watched)
        except BaseException as error:
            self.calls.lose("it has not started")
            # a starting GCS must report its port: Ray waits for it while holding the GIL
            until = time.monotonic() + STARTING
            while self.folder and time.monotonic() < until:
                if any(self.folder.rglob("gcs_server_port*")):
                    break
                time.sleep(0.05)
            self.close(leaving=LEAVING_LOST if isinstance(error, Exception) else 1.0)
            if isinstance(error, ClusterLostError) and self._watcher is not None:
                raise TimeoutError(
                    f"Ray did not start within runtime.start_deadline = {settings.start_deadline:g}"
                    " s: this machine is too busy; end other programs and try again, or set"
                    " runtime.use=local"
                ) from error
            raise

    def close(self, leaving: float = LEAVING_LOST) -> None:
        """Leave a cluster, or end the private Ray with all of its processes.

        If Ray is lost, it is abandoned after `leaving` seconds.
        """
        self.calls.look(patience=0.0)  # stopped processes cannot shut down
        lost = self.calls.lost
        if lost:
            self._clean_up()  # first kill what does not answer
        left = self.calls.attempt(leaving if lost else LEAVING, ray.shutdown)
        if lost or not left:
            atexit.unregister(ray.shutdown)  # it would wait again
        self._clean_up()  # Ray recreates its folder while shutting down
        if self._watcher is not None and left and not lost:
            self._watcher.kill()  # otherwise it cleans up again after this process
        self.calls.close()


def _start_private(options: dict[str, Any], processes: int, mark: str, folder: Path) -> Any:
    """Start a private Ray for this number of processes, with this machine's GPUs."""
    # at Ray's default niceness of 15, any other program on its core starves a searcher
    os.environ.setdefault("RAY_worker_niceness", "0")
    before = os.environ.get(MARK, "")
    os.environ[MARK] = mark
    starting = [os.setsid]  # keeps signals to this process group, such as Ctrl-C, from Ray
    os.register_at_fork(after_in_child=lambda: [leave_group() for leave_group in starting])
    try:
        return ray.init(
            "local",
            num_cpus=processes,
            num_gpus=torch.cuda.device_count(),
            include_dashboard=False,
            _temp_dir=str(folder / "ray"),  # Ray makes this folder accessible to all users
            # keep objects out of the object store: if it dies, it ends every process that waits
            # for it, and nothing is saved
            _system_config={
                "max_direct_call_object_size": INLINE,
                "task_rpc_inlined_bytes_limit": INLINE,
            },
            **options,
        )
    finally:
        starting.clear()
        os.environ[MARK] = before


@dataclass
class Cluster:
    """A running Ray instance, and where trainer and searchers run on it."""

    connection: Connection
    transport: SharedMemory | ObjectStore
    machine: str  # Ray's id of this machine
    trainer: Place  # of this process
    searchers: list[Slot] = field(default_factory=list)
    ranks: list[Slot] = field(default_factory=list)  # empty if the trainer is in this process
    reservation: Any = None  # actor that reserves the trainer's GPU while this handle exists


def open_cluster(settings: RuntimeTable, each: int = 1, ranks: int = 1) -> Cluster:
    """Join the cluster at `runtime.address`, or start a private Ray on loopback.

    An engine runs on `each` GPUs, and the trainer has `ranks` ranks. ValueError if the cluster is
    too small, TimeoutError if other jobs use the resources beyond `runtime.start_deadline`.
    """
    connection = Connection(settings, ranks if ranks > 1 else 0)
    try:
        seconds = 2 * settings.start_deadline  # `_share` has half of it, and gives a reason
        what = "share its GPUs"
        return connection.calls.within(seconds, what, _share, connection, settings, each, ranks)
    except BaseException:
        connection.close()
        raise


def _share(connection: Connection, settings: RuntimeTable, each: int, ranks: int) -> Cluster:
    """Divide GPUs, or CPUs where there are none, between the trainer and the searchers."""
    until = time.monotonic() + settings.start_deadline
    here = ray.get_runtime_context().get_node_id()
    machines = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    kind = "GPU" if any(has.get("GPU", 0) for has in machines.values()) else "CPU"
    free = {machine: int(has.get(kind, 0)) for machine, has in machines.items()}
    placement.check_here(kind, sum(free.values()), ranks)
    trainer = ranks if ranks > 1 else int(kind == "GPU" and free[here] > 0)
    reserved, share = placement.share(kind, sum(free.values()), trainer, settings.most_searchers)
    least, needs = placement.needs(settings, kind, share, each)
    check_room = partial(placement.check_room, searchers=least, each=needs[kind], kind=kind)
    check_room([sum(free.values()) - reserved])
    own, searching = placement.places_on_one_machine(settings)
    on_linux = sys.platform == "linux"
    transport = SharedMemory() if on_linux else _object_store(settings, connection)
    if settings.address is not None:  # the cores of its machines are unknown
        own = replace(own, cores=())
        searching = [Place("cuda:0" if kind == "GPU" else "cpu")] * settings.most_searchers
        transport = _object_store(settings, connection)
    cluster = Cluster(connection, transport, here, own)
    needed = reserved + least * needs[kind]
    try:
        while ray.available_resources().get(kind, 0.0) < needed - 1e-3:
            if time.monotonic() > until:
                raise TimeoutError
            time.sleep(0.5)
        if ranks > 1:
            places = replace(own, device=searching[0].device).divided(ranks)
            # on a single machine if one is large enough
            together = max(free.values()) >= ranks
            cluster.ranks = request(places, {kind: 1.0}, "STRICT_PACK" if together else "PACK")
            group = cluster.ranks[0].group
            assert group is not None
            if not group.wait(max(1.0, until - time.monotonic())):
                raise TimeoutError
            there = [str(slot.machine()) for slot in cluster.ranks]
            for machine in there:
                free[machine] -= 1
            if not together:
                log.warning(
                    "no machine has %d %ss: the ranks of the trainer are on %d machines, and every"
                    " pass sends the model's weights over the network",
                    *(ranks, kind, len({*there})),
                )
        elif reserved:
            free[here] -= 1
            beside = NodeAffinitySchedulingStrategy(here, soft=False)
            actor: Any = ray.remote(Reservation)
            actor = actor.options(num_cpus=0, num_gpus=1, scheduling_strategy=beside).remote()
            left = max(1.0, until - time.monotonic())
            (gpu,) = ray.get(actor.gpus.remote(), timeout=left)
            device = placement.reserved_device(gpu, os.environ.get("CUDA_VISIBLE_DEVICES"))
            cluster.reservation = actor
            cluster.trainer = replace(own, device=device)
    except TimeoutError as late:
        every = ray.cluster_resources().get(kind, 0.0)
        taken = every - ray.available_resources().get(kind, 0.0)
        raise TimeoutError(
            f"trainer and searchers need {needed:g} {kind}s (the trainer's on one machine), which"
            f" did not become free within runtime.start_deadline = {settings.start_deadline:g} s:"
            f" other jobs of this Ray use {taken:g} of its {every:g} (`ray status` shows them);"
            " end these jobs, or lower runtime.searchers or trainer.devices"
        ) from late
    check_room([*free.values()])
    in_groups = not isinstance(settings.searchers, int)
    cluster.searchers = [
        request([place], needs)[0] if in_groups else Slot(place, needs) for place in searching
    ]
    return cluster


def _object_store(settings: RuntimeTable, connection: Connection) -> ObjectStore:
    """Return the train loop's transport, with a deadline: calls to Ray may never return."""
    seconds = settings.task_deadline
    put = partial(connection.calls.within, seconds, "take weights", ray.put)
    return ObjectStore(seconds, put)


def folders(policy: PolicyTable) -> dict[str, str]:
    """Return the folders that every machine must see, by setting; only those that exist here."""
    lora = policy.lora
    named = {"policy.model": policy.model, "policy.lora.from": lora.start if lora else None}
    return {key: path for key, path in named.items() if path and Path(path).is_dir()}


def check_seen(folders: Mapping[str, str]) -> None:
    """Raise ValueError, naming this machine, if it cannot see one of the folders."""
    for key, path in folders.items():
        if not Path(path).is_dir():
            machine = f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"
            raise ValueError(
                f"machine {machine} cannot see {key} = {path!r}: put the folder on a disk that"
                " all machines of the cluster have at the same path"
            )


@dataclass(frozen=True)
class Node:
    """A machine of a cluster; `rate` is its download speed in bytes per second."""

    name: str
    gpus: int
    packages: str
    rate: float


def look_at_nodes(settings: RuntimeTable) -> list[Node]:
    """Join the cluster, query each of its machines, and send each SENT bytes.

    ClusterLostError, naming the machine, if one does not answer in `runtime.start_deadline`.
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
    """Return this machine's package versions, and its download speed in bytes per second."""
    began = time.perf_counter()
    ray.get(sent[0])
    rate = SENT / (time.perf_counter() - began)
    return ", ".join(f"{name} {version(name)}" for name in ("tba", "torch", "ray")), rate

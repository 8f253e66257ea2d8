"""The Ray of a run, private or a cluster, and the places of trainer and searchers on it."""

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

from tba.child import MARK, Child, clean_up
from tba.config.tables import PolicyTable, RuntimeTable
from tba.engines import EngineError
from tba.runtime import placement
from tba.runtime.deadline import Calls, ClusterLostError, processes_of_ray
from tba.runtime.memory import SharedMemory
from tba.runtime.placement import Place
from tba.weights import Probe, Sent, Weights, as_view

BUCKET = 2**30
"""Bytes of an object that holds a part of the weights, unless a tensor alone has more."""

log = logging.getLogger(__name__)

INLINE = 2**28
"""Bytes of arguments and results that a private Ray keeps out of its object store."""

SENT = 2**26
"""Bytes that are sent to each machine to see how fast the network is."""

STARTING = 3.0
"""Seconds in which Ray's GCS may still start. If it is killed, Ray waits 30 s for its port."""

LEAVING = 30.0
LEAVING_LOST = 10.0
"""Seconds for leaving Ray, and for leaving one that is lost, after which it is abandoned."""

REACHED = 1.0
"""Seconds in which a machine of the cluster must accept a connection, or it is lost."""


@dataclass(frozen=True, eq=False)
class Buckets:
    """Weights in Ray's object store: references to parts of their arrays, by name."""

    references: list[Any]
    probe: Probe | None


@dataclass(frozen=True)
class ObjectStore:
    """Transport through Ray's object store: one copy on each node, as long as its parcel exists."""

    deadline: float  # seconds that weights may take to arrive
    put: Callable[[Any], Any] = ray.put

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStore, (self.deadline,)  # `put` belongs to this process

    def send(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], probe: Probe | None
    ) -> Sent:
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
        return Sent(version, Buckets(references, probe), nbytes)

    def receive(self, sent: Sent) -> Weights:
        buckets: Buckets = sent.parcel
        arrays: dict[str, np.ndarray] = {}
        try:
            for bucket in ray.get(buckets.references, timeout=self.deadline):
                arrays |= bucket
            return Weights(sent.version, arrays, buckets.probe)
        except (GetTimeoutError, ObjectLostError) as error:  # only this searcher is restarted
            raise EngineError(
                f"the weights of version {sent.version} did not arrive ({type(error).__name__});"
                f" see why the network is slow or cut, or raise runtime.task_deadline ="
                f" {self.deadline:g} s"
            ) from error


@dataclass(frozen=True, eq=False)
class Slot:
    """Room for a process: its place on a machine, and the GPUs or CPUs that it needs of Ray.

    A `group` holds them on one machine, which Ray looks for until there is one.
    """

    place: Place
    needs: Mapping[str, float]
    group: PlacementGroup | None = None
    index: int = 0  # of the room in its group

    @property
    def options(self) -> dict[str, Any]:
        """Ray's options of an actor that takes the room."""
        needs = {"num_cpus": self.needs.get("CPU", 0), "num_gpus": self.needs.get("GPU", 0)}
        if self.group is None:
            return needs
        strategy = PlacementGroupSchedulingStrategy(self.group, self.index)
        return {**needs, "scheduling_strategy": strategy}

    def machine(self) -> str | None:
        """Return Ray's id of the machine with the room of the group, if it has found one."""
        table = placement_group_table(self.group)
        found = table["state"] == "CREATED"
        return str(table["bundles_to_node_id"][self.index]) if found else None

    def anew(self) -> "Slot":
        """Ask Ray for the same room on any machine."""
        if self.group is None:
            return self
        remove_placement_group(self.group)
        (slot,) = request([self.place], self.needs)
        return slot


def request(
    places: Sequence[Place], needs: Mapping[str, float], strategy: str = "STRICT_PACK"
) -> list[Slot]:
    """Ask Ray for room for processes at these places, on one machine."""
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
    """Holds a GPU for the trainer, so that Ray assigns it to no searcher."""

    def gpus(self) -> list[str]:
        return [str(gpu) for gpu in ray.get_gpu_ids()]


class Connection:
    """The Ray that this process has joined or started, and the calls to it.

    A Ray that it starts is private: on loopback, in a folder that only this user enters. Its
    processes inherit a mark. A watcher ends them after a kill, which Ray's agents outlive.
    """

    def __init__(self, settings: RuntimeTable, ranks: int = 0):
        self.calls = Calls(settings.cluster_deadline)
        self._watcher: Child | None = None
        self._clean_up: Callable[[], None] = lambda: None
        self.folder: Path | None = None  # of a private Ray
        # every process finds modules where this one does: Ray would put the current folder first
        job = JobConfig(_client_job=True, _py_driver_sys_path=[*map(str, reversed(sys.path))])
        options: Any = {"job_config": job, "log_to_driver": False, "logging_level": logging.ERROR}
        start: partial[Any] = partial(ray.init, settings.address, **options)
        if settings.address is None:
            mark = secrets.token_hex(8)
            home = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
            folder = Path(home).absolute() / f"tba-{secrets.token_hex(4)}"
            self._watcher = Child("tba.child:clean_up_after_parent", mark, str(folder), os.getpid())
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
            self._await_gcs()
            self.close(leaving=LEAVING_LOST if isinstance(error, Exception) else 1.0)
            if isinstance(error, ClusterLostError) and self._watcher is not None:
                raise TimeoutError(
                    f"Ray did not start within runtime.start_deadline = {settings.start_deadline:g}"
                    " s: this machine is too busy; end other programs and try again, or set"
                    " runtime.use=local"
                ) from error
            raise

    def _await_gcs(self) -> None:
        """Let a GCS that is starting say its port: Ray waits for it and holds Python's lock."""
        until = time.monotonic() + STARTING
        folder = self.folder
        while folder and time.monotonic() < until and not any(folder.rglob("gcs_server_port*")):
            time.sleep(0.05)

    def close(self, leaving: float = LEAVING_LOST) -> None:
        """Leave a cluster, or end the private Ray with all of its processes.

        A Ray that is lost is abandoned after `leaving` seconds.
        """
        self.calls.look(patience=0.0)  # a process that is stopped cannot end Ray
        lost = self.calls.lost
        if lost:
            self._clean_up()  # what does not answer is killed first
        left = self.calls.attempt(leaving if lost else LEAVING, ray.shutdown)
        if lost or not left:
            atexit.unregister(ray.shutdown)  # it would be waited for again
        self._clean_up()  # Ray makes its folder anew while it leaves
        if self._watcher is not None and left and not lost:
            self._watcher.kill()  # else it cleans up again when this process has ended
        self.calls.close()


def _start_private(options: dict[str, Any], processes: int, mark: str, folder: Path) -> Any:
    """Start a private Ray for so many processes, with the GPUs of this machine."""
    # at Ray's default of 15, any other program on its core starves a searcher
    os.environ.setdefault("RAY_worker_niceness", "0")
    before = os.environ.get(MARK, "")
    os.environ[MARK] = mark
    starting = [os.setsid]  # signals to the group of this process, as Ctrl-C, do not reach Ray
    os.register_at_fork(after_in_child=lambda: [leave_group() for leave_group in starting])
    try:
        return ray.init(
            "local",
            num_cpus=processes,
            num_gpus=placement.gpu_count(),
            include_dashboard=False,
            _temp_dir=str(folder / "ray"),  # Ray lets everybody enter this one
            # when the object store dies, it ends every process that waits for it, and nothing
            # is saved
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
    """A running Ray, and where the trainer and the searchers run on it."""

    connection: Connection
    transport: SharedMemory | ObjectStore
    machine: str  # Ray's id of this one
    trainer: Place  # of this process
    searchers: list[Slot] = field(default_factory=list)
    ranks: list[Slot] = field(default_factory=list)  # none if the trainer is in this process
    reservation: Any = None  # actor that holds the trainer's GPU as long as this handle exists


def open_cluster(settings: RuntimeTable, each: int = 1, ranks: int = 1) -> Cluster:
    """Join the cluster at `runtime.address`, or start a private Ray on loopback.

    An engine runs on `each` GPUs. The trainer has so many `ranks`. ValueError if the cluster is too
    small, TimeoutError if other jobs have what is needed for longer than `runtime.start_deadline`.
    """
    connection = Connection(settings, ranks if ranks > 1 else 0)
    try:
        seconds = 2 * settings.start_deadline  # its own deadline is half of it, and has a sentence
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
    if settings.address is not None:  # their cores are unknown
        own = replace(own, cores=())
        searching = [Place("cuda:0" if kind == "GPU" else "cpu")] * settings.most_searchers
        transport = _object_store(settings, connection)
    cluster = Cluster(connection, transport, here, own)
    needed = reserved + least * needs[kind]
    try:
        _wait_until_free(kind, needed, until)
        if ranks > 1:
            places = replace(own, device=searching[0].device).divided(ranks)
            cluster.ranks = _room_for_ranks(places, kind, free, until)
        elif reserved:
            free[here] -= 1
            cluster.reservation, cluster.trainer = _reserve(own, here, until)
    except TimeoutError as late:
        every = ray.cluster_resources().get(kind, 0.0)
        taken = every - ray.available_resources().get(kind, 0.0)
        raise TimeoutError(
            f"trainer and searchers need {needed:g} {kind}s (the trainer's on one machine), which"
            f" did not become free within runtime.start_deadline = {settings.start_deadline:g} s:"
            f" other jobs of this Ray have {taken:g} of its {every:g} (`ray status` shows them);"
            " end these jobs, or lower runtime.searchers or trainer.devices"
        ) from late
    check_room([*free.values()])
    in_groups = not isinstance(settings.searchers, int)
    cluster.searchers = [
        request([place], needs)[0] if in_groups else Slot(place, needs) for place in searching
    ]
    return cluster


def _object_store(settings: RuntimeTable, connection: Connection) -> ObjectStore:
    """Return the transport of the train loop's process, in which a call to Ray may never return."""
    seconds = settings.task_deadline
    put = partial(connection.calls.within, seconds, "take weights", ray.put)
    return ObjectStore(seconds, put)


def _wait_until_free(kind: str, needed: float, until: float) -> None:
    """Wait until there are as many free GPUs or CPUs as trainer and searchers need."""
    while ray.available_resources().get(kind, 0.0) < needed - 1e-3:
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(0.5)


def _room_for_ranks(
    places: Sequence[Place], kind: str, free: dict[str, int], until: float
) -> list[Slot]:
    """Return the room of the trainer's ranks, on one machine if one is large enough."""
    together = max(free.values()) >= len(places)
    slots = request(places, {kind: 1.0}, "STRICT_PACK" if together else "PACK")
    assert slots[0].group is not None
    if not slots[0].group.wait(max(1.0, until - time.monotonic())):
        raise TimeoutError
    machines = [str(slot.machine()) for slot in slots]
    if not together:
        log.warning(
            "no machine has %d %ss: the ranks of the trainer are on %d machines, and every pass"
            " sends the model's weights through the network",
            *(len(places), kind, len({*machines})),
        )
    for machine in machines:
        free[machine] -= 1
    return slots


def _reserve(own: Place, here: str, until: float) -> tuple[Any, Place]:
    """Reserve a GPU of this machine for the trainer; return what holds it, and its place."""
    strategy = NodeAffinitySchedulingStrategy(here, soft=False)
    request = ray.remote(Reservation).options(num_cpus=0, num_gpus=1, scheduling_strategy=strategy)
    reservation: Any = request.remote()
    (gpu,) = ray.get(reservation.gpus.remote(), timeout=max(1.0, until - time.monotonic()))
    device = placement.reserved_device(gpu, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return reservation, replace(own, device=device)


def folders(policy: PolicyTable) -> dict[str, str]:
    """Return the folders that every machine must see, by their settings, if they exist here."""
    lora = policy.lora
    named = {"policy.model": policy.model, "policy.lora.from": lora.start if lora else None}
    return {key: path for key, path in named.items() if path and Path(path).is_dir()}


def check_seen(folders: Mapping[str, str]) -> None:
    """Raise ValueError, which names this machine, unless it sees each of the folders."""
    for key, path in folders.items():
        if not Path(path).is_dir():
            machine = f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"
            raise ValueError(
                f"machine {machine} cannot see {key} = {path!r}: put the folder on a disk that"
                " all machines of the cluster have at the same path"
            )


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

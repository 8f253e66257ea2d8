"""Cores and GPUs are divided between trainer and searchers, on one machine and on a cluster."""

import platform
import resource
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from suite import until

from tba.config.tables import RuntimeTable
from tba.runtime.deadline import bind_ray
from tba.runtime.placement import (
    Place,
    check_here,
    check_room,
    divide,
    needs,
    reserved_device,
    reuse_memory,
    share,
)

if TYPE_CHECKING:
    from tba.runtime.cluster import Slot

HELD: list[Any] = []
"""Actors that keep GPUs."""


@pytest.mark.parametrize(
    ("cores", "searchers", "trainer", "others"),
    [
        (2, 1, (0,), [(1,)]),
        (0, 2, (), [()] * 2),
        (2, 3, (0,), [(1,)] * 3),
        (8, 2, (0, 1, 2, 3), [(4, 5), (6, 7)]),
        (1, 1, (0,), [(0,)]),
        (8, 6, (0, 1), [(core,) for core in range(2, 8)]),
    ],
)
def test_cores_of_one_machine_are_divided(cores, searchers, trainer, others):
    assert divide(list(range(cores)), searchers) == (trainer, others)


def test_ranks_divide_the_cores_of_the_trainer():
    assert Place("cpu", (0, 1, 2, 3)).divided(2) == [Place("cpu", (0, 1)), Place("cpu", (2, 3))]
    assert Place("cpu", (0,)).divided(2) == [Place("cpu", (0,))] * 2


@pytest.mark.parametrize(
    ("kind", "total", "trainer", "searchers", "expected"),
    [
        ("CPU", 3, 0, 3, (0, 0.0)),
        ("CPU", 3, 3, 2, (3, 0.0)),  # ranks
        ("GPU", 4, 1, 3, (1, 1.0)),
        ("GPU", 4, 0, 3, (0, 1.0)),  # the trainer's machine has none, the others have
        ("GPU", 4, 2, 2, (2, 1.0)),  # ranks
        ("GPU", 4, 2, 3, (2, 0.5)),
        ("GPU", 3, 1, 4, (1, 0.5)),
        ("GPU", 3, 0, 7, (0, 0.3333)),  # three times this is still less than 1
        ("GPU", 1, 1, 2, (0, 0.5)),  # a single one is shared by all
        ("GPU", 1, 0, 1, (0, 1.0)),
    ],
)
def test_gpus_are_shared(kind, total, trainer, searchers, expected):
    assert share(kind, total, trainer, searchers) == expected


def test_a_range_of_searchers_needs_whole_gpus_or_cpus():
    wide = RuntimeTable(address="auto", searchers=(2, 8))
    assert needs(wide, "CPU", 0.0, each=2) == (2, {"CPU": 1.0})
    assert needs(wide, "GPU", 0.5, each=1) == (2, {"GPU": 1.0})
    assert needs(wide, "GPU", 0.5, each=2) == (2, {"GPU": 2.0})
    assert needs(RuntimeTable(searchers=3), "GPU", 0.5, each=1) == (3, {"GPU": 0.5})
    assert needs(RuntimeTable(searchers=3), "GPU", 0.5, each=2) == (3, {"GPU": 2.0})
    assert needs(RuntimeTable(searchers=3), "CPU", 0.0, each=1) == (3, {"CPU": 0.0})


def test_too_few_gpus_are_one_sentence():
    with pytest.raises(ValueError, match=r"devices = 4, but Ray has 4 GPUs, of which searchers "):
        share("GPU", 4, 4, 1)
    with pytest.raises(ValueError, match=r"devices = 3, but Ray has 2 CPUs: lower"):
        share("CPU", 2, 3, 1)
    check_room([3, 4, 0], searchers=3, each=2, kind="GPU")
    check_room([0], searchers=3, each=0.5, kind="GPU")  # they share
    match = r"needs 4 searchers, .* for only 3 .*: each needs 2 on one machine \(engine\.tensor_par"
    with pytest.raises(ValueError, match=match):
        check_room([3, 4, 0], searchers=4, each=2, kind="GPU")


def test_the_reserved_gpu_is_named_as_torch_counts():
    assert reserved_device("2", None) == "cuda:2"
    assert reserved_device("2", "3, 2") == "cuda:1"
    with pytest.raises(ValueError, match="add 2 to it"):
        reserved_device("2", "0,1")


def test_a_head_without_a_gpu_does_not_train_on_its_cpu(monkeypatch):
    """As on Kubernetes, and on login nodes of Slurm; several ranks get GPUs from Ray."""
    bind_ray(None)
    import ray

    from tba.runtime.cluster import _share

    nodes = [
        {"NodeID": "head", "Alive": True, "Resources": {"CPU": 8.0}},
        {"NodeID": "worker", "Alive": True, "Resources": {"CPU": 64.0, "GPU": 8.0}},
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    here = SimpleNamespace(get_node_id=lambda: "head")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    settings = RuntimeTable(use="ray", address="10.0.0.1:6379", searchers=7)
    with pytest.raises(ValueError, match=r"Ray has 8 GPUs, .* has none .* set trainer\.devices=2"):
        _share(SimpleNamespace(), settings, 1, 1)  # type: ignore[arg-type]
    check_here("GPU", 8, ranks=2)
    check_here("CPU", 72, ranks=1)


@pytest.fixture
def sessions() -> Iterator[Path]:
    """A folder for Ray's sessions; its path is short, because sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def assigned(slots: "Sequence[Slot]") -> list[list[str]]:
    """Return the GPUs that Ray gives to processes in these slots."""
    import ray

    from tba.runtime.cluster import Reservation

    made: Any = [ray.remote(**slot.options)(Reservation).remote() for slot in slots]
    gpus = ray.get([each.gpus.remote() for each in made], timeout=60)
    HELD.extend(made)
    return [sorted(each) for each in gpus]


@pytest.mark.slow
def test_ranks_and_searchers_have_gpus_of_their_own_on_one_machine(monkeypatch, sessions):
    """A private Ray that is told of four GPUs; engines on two of them need no other cluster."""
    bind_ray(None)
    from tba.runtime.cluster import open_cluster

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(sessions))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    opened = open_cluster(RuntimeTable(searchers=2), ranks=2)
    try:
        assert assigned(opened.ranks) == [["0"], ["1"]]
        assert sorted(assigned(opened.searchers)) == [["2"], ["3"]]
        assert {slot.place.device for slot in opened.ranks + opened.searchers} == {"cuda:0"}
    finally:
        HELD.clear()
        opened.connection.close()


@pytest.mark.slow
def test_gpus_of_several_machines(monkeypatch, sessions):
    """A Ray of two machines that are told to have one GPU and two; the driver is on the first.

    Slow because of two raylets; the tests of shares above have the numbers.
    """
    bind_ray(None)
    import ray
    from ray.cluster_utils import Cluster as Nodes

    from tba.runtime.cluster import Reservation, open_cluster

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(sessions))
    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 1})
    try:
        nodes.add_node(num_cpus=1, num_gpus=2)
        settings = RuntimeTable(address=nodes.address, searchers=2)

        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        opened = open_cluster(settings)
        assert (opened.trainer, opened.searchers[0].needs) == (Place("cuda:0"), {"GPU": 1.0})
        assert (ray.cluster_resources()["GPU"], opened.reservation is None) == (3, False)
        assert sorted(assigned(opened.searchers)) == [["0"], ["1"]]  # both of the second machine
        HELD.clear()
        opened.connection.close()

        with pytest.raises(ValueError, match=r"needs 2 searchers, .* for 1: each needs 2 of one"):
            open_cluster(settings, each=2)
        with pytest.raises(ValueError, match=r"devices = 3, but Ray has 3 GPUs"):
            open_cluster(settings, ranks=3)
        wide = settings.model_copy(update={"searchers": (3, 4)})
        with pytest.raises(ValueError, match=r"needs 3 searchers, .* GPUs for 2"):
            open_cluster(wide)
        # ranks are on the machine that has room for both; a range of searchers gets what is left
        wide = settings.model_copy(update={"searchers": (1, 2)})
        opened = open_cluster(wide, ranks=2)
        waiting = opened.searchers
        assert {slot.machine() for slot in opened.ranks} < {n["NodeID"] for n in ray.nodes()}
        until(lambda: sum(slot.machine() is None for slot in waiting) == 1, 60)  # no room for both
        opened.connection.close()

        opened = open_cluster(settings.model_copy(update={"searchers": 1}), each=2)
        assert (opened.trainer, opened.searchers[0].needs) == (Place("cuda:0"), {"GPU": 2.0})
        of_another_job = {"num_cpus": 0, "num_gpus": 1, "lifetime": "detached", "name": "other"}
        other = ray.remote(**of_another_job)(Reservation).remote()
        assert ray.get(other.gpus.remote(), timeout=60)
        opened.connection.close()
        with pytest.raises(TimeoutError, match=r"need 3 GPUs .* other jobs .* have 1 of its 3"):
            open_cluster(settings.model_copy(update={"start_deadline": 5}))
    finally:
        nodes.shutdown()
    assert [*sessions.glob("ray/session_*")]  # and nowhere else


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_tensors_reuse_the_memory_of_others():
    """Ten tensors have 43,000 pages, the last one 20,000; once memory has grown, few are new."""
    reuse_memory()
    faults = []
    for _ in range(15):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(size * 2**19) for size in (*range(1, 10), 40)]
        del tensors
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert sum(faults[10:]) / 5 < 43_000 / 8

"""Cores and GPUs are divided between trainer and searchers, on one machine and on a cluster."""

from __future__ import annotations

import platform
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tba.config.tables import RuntimeTable
from tba.runtime.deadline import bind_ray
from tba.runtime.placement import (
    Place,
    divide,
    reserved_device,
    reuse_memory,
    share_gpus,
    whole_gpus,
)


@pytest.mark.parametrize(
    ("cores", "gpus", "searchers", "trainer", "places"),
    [
        (2, 0, 1, Place("cpu", (0,)), [Place("cpu", (1,))]),
        (0, 0, 2, Place("cpu"), [Place("cpu")] * 2),
        (2, 0, 3, Place("cpu", (0,)), [Place("cpu", (1,))] * 3),
        (8, 0, 2, Place("cpu", (0, 1, 2, 3)), [Place("cpu", (4, 5)), Place("cpu", (6, 7))]),
        (1, 0, 1, Place("cpu", (0,)), [Place("cpu", (0,))]),
        (8, 0, 6, Place("cpu", (0, 1)), [Place("cpu", (core,)) for core in range(2, 8)]),
        (4, 1, 1, Place("cuda:0", (0, 1)), [Place("cuda:0", (2, 3))]),
        (
            8,
            4,
            3,
            Place("cuda:0", (0, 1, 2, 3)),
            [Place("cuda:1", (4,)), Place("cuda:2", (5,)), Place("cuda:3", (6,))],
        ),
        (0, 3, 3, Place("cuda:0"), [Place("cuda:1"), Place("cuda:2"), Place("cuda:1")]),
    ],
)
def test_cores_and_devices_of_one_machine_are_divided(
    cores: int, gpus: int, searchers: int, trainer: Place, places: list[Place]
) -> None:
    assert divide(list(range(cores)), gpus, searchers) == (trainer, places)


@pytest.mark.parametrize(
    ("gpus", "trainer", "searchers", "expected"),
    [
        (0, 0, 3, (0, 0.0)),
        (4, 1, 3, (1, 1.0)),
        (4, 0, 3, (0, 1.0)),  # the trainer's machine has none, the others have
        (3, 1, 4, (1, 0.5)),
        (3, 0, 7, (0, 0.3333)),  # three times this is still less than 1
        (1, 1, 2, (0, 0.5)),  # a single one is shared by all
        (1, 0, 1, (0, 1.0)),
        (0, 1, 1, (0, 0.0)),  # torch sees one that Ray was not told of
    ],
)
def test_gpus_of_a_cluster_are_shared(
    gpus: int, trainer: int, searchers: int, expected: tuple[int, float]
) -> None:
    assert share_gpus(gpus, trainer, searchers) == expected


def test_an_engine_on_several_gpus_has_them_on_one_machine() -> None:
    assert whole_gpus([3, 4, 0], searchers=3, each=2) == 2.0
    with pytest.raises(ValueError, match=r"tensor_parallel_size = 2: .* such for 3 of 4; lower it"):
        whole_gpus([3, 4, 0], searchers=4, each=2)


def test_the_reserved_gpu_is_named_as_torch_counts() -> None:
    assert reserved_device("2", None) == "cuda:2"
    assert reserved_device("2", "3, 2") == "cuda:1"
    with pytest.raises(ValueError, match="add 2 to it"):
        reserved_device("2", "0,1")


@pytest.fixture
def sessions() -> Iterator[Path]:
    """A folder for Ray's sessions; its path is short, because sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.slow
def test_ray_gives_the_trainers_gpu_to_no_searcher(
    monkeypatch: pytest.MonkeyPatch, sessions: Path
) -> None:
    """A Ray of two nodes that are told to have one GPU and two; the driver is on the first.

    Slow because of two nodes; the test of shares above has the numbers.
    """
    bind_ray(None)
    import ray
    from ray.cluster_utils import Cluster as Nodes

    from tba.runtime import placement
    from tba.runtime.cluster import Reservation, open_cluster

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(sessions))
    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 1})
    try:
        nodes.add_node(num_cpus=1, num_gpus=2)
        settings = RuntimeTable(address=nodes.address, searchers=2)

        monkeypatch.setattr(placement, "gpu_count", lambda: 1)
        opened = open_cluster(settings)
        assert (opened.trainer, opened.searcher_gpus) == (Place("cuda:0"), 1.0)
        assert (ray.cluster_resources()["GPU"], opened.reservation is None) == (3, False)
        requesting = ray.remote(num_cpus=0, num_gpus=opened.searcher_gpus)(Reservation)
        searchers = [requesting.remote() for _ in opened.searchers]
        assigned = ray.get([searcher.gpus.remote() for searcher in searchers], timeout=60)
        assert sorted(assigned) == [["0"], ["1"]]  # both of the second node
        opened.connection.close()

        with pytest.raises(ValueError, match=r"tensor_parallel_size = 2: .* such for 1 of 2"):
            open_cluster(settings, each=2)
        opened = open_cluster(settings.model_copy(update={"searchers": 1}), each=2)
        assert (opened.trainer, opened.searcher_gpus) == (Place("cuda:0"), 2.0)
        opened.connection.close()
    finally:
        nodes.shutdown()
    assert [*sessions.glob("ray/session_*")]  # and nowhere else


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_tensors_reuse_the_memory_of_others() -> None:
    """Ten tensors have 43,000 pages, the last one 20,000; once memory has grown, few are new."""
    reuse_memory()
    faults = []
    for _ in range(15):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(size * 2**19) for size in (*range(1, 10), 40)]
        del tensors
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert sum(faults[10:]) / 5 < 43_000 / 8

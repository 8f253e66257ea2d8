"""Weights that searchers map from the trainer's memory."""

import gc
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from build import copies

from tba.config.tables import RuntimeTable
from tba.runtime.deadline import bind_ray
from tba.runtime.shared_memory import MappedArrays, SharedMemory, receive_mapped
from tba.weights import Direct, Probe, Publication, Weights, resend

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs nameless files in memory")


@pytest.fixture(autouse=True)
def no_earlier_copies():
    """Free what ended runs of other tests have left to the garbage collector."""
    gc.collect()


def test_weights_arrive_whole_and_stay_while_they_are_used():
    """A parcel that has arrived keeps them, also when the sender has dropped them."""
    rng = np.random.default_rng(0)
    arrays = {
        "fp32": rng.normal(size=(30, 70)).astype(np.float32),
        "bf16": rng.integers(0, 2**16, 7, dtype=np.uint16),
        "empty": np.zeros((0, 3), np.float32),
        "not contiguous": np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
    }
    probe = Probe(np.arange(5, dtype=np.int32), np.arange(2, dtype=np.int32), rng.random(2), 0.7)
    transport = SharedMemory()
    sent = resend(Weights(3, arrays, probe), transport)
    assert (sent.version, copies()) == (3, 1)
    file = sent.payload.arrays.file.descriptor
    arrived, receiver = pickle.loads(pickle.dumps((sent, transport)))
    del sent
    del transport
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    arrived = pickle.loads(pickle.dumps(arrived))  # a receiver hands it on, as a sender
    weights = receiver.receive(arrived)
    del arrived
    assert weights.version == 3 and weights.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(weights.arrays[name], array)
    assert not weights.arrays["fp32"].flags.writeable
    np.testing.assert_array_equal(weights.probe.logp, probe.logp)


def test_a_file_is_written_again_once_no_receiver_uses_it():
    transport = SharedMemory()

    def send(version: int, size: int) -> Publication:
        weights = Weights(version, {"parameter": np.full(size, version, np.float32)})
        return resend(weights, transport)

    first = send(1, 900)
    mapped = pickle.loads(pickle.dumps(first))
    del first  # a receiver still uses it
    second = send(2, 900)
    np.testing.assert_array_equal(transport.receive(mapped).arrays["parameter"], np.full(900, 1))
    del mapped
    assert copies() == 2  # the second's, and one to write to
    file = os.fstat(second.payload.arrays.file.descriptor).st_ino
    third = send(3, 7)
    del second
    fourth = send(4, 7)
    assert (os.fstat(fourth.payload.arrays.file.descriptor).st_ino, copies()) == (file, 2)
    arrived = transport.receive(pickle.loads(pickle.dumps(third)))
    np.testing.assert_array_equal(arrived.arrays["parameter"], np.full(7, 3))


def test_nothing_is_sent_without_parameters():
    sent = SharedMemory().send(1, [], None)
    assert dict(SharedMemory().receive(pickle.loads(pickle.dumps(sent))).arrays) == {}


@pytest.mark.parametrize(("processes", "is_mapped"), [(1, False), (2, True)])
def test_an_engine_of_several_processes_receives_mapped_weights(processes, is_mapped, monkeypatch):
    bind_ray(None)
    import ray

    from tba.runtime.ray import RaySearchers

    given: list[Any] = []
    actor = MagicMock()
    started = SimpleNamespace(remote=lambda *arguments: given.append(arguments) or actor)
    monkeypatch.setattr(ray, "remote", lambda **options: lambda kind: started)
    engine = SimpleNamespace(options={"tensor_parallel_size": processes})
    searchers: Any = SimpleNamespace(
        _settings=RuntimeTable(),
        _job=SimpleNamespace(setup=SimpleNamespace(config=SimpleNamespace(engine=engine))),
        _transport=Direct(),
        _bf16=False,
        _folders={},
    )
    slot: Any = SimpleNamespace(options={"num_gpus": processes}, place="a place")
    assert RaySearchers._begin(searchers, slot, None)[0] is actor
    ((*_, receive, newest),) = given
    weights = receive(Publication(3, Weights(3, {"parameter": np.ones(5, np.float32)})))
    assert isinstance(weights.arrays, MappedArrays) is is_mapped and newest is None


def test_arrays_are_mapped_by_processes_that_they_are_sent_to():
    """As by those of an engine on several GPUs, which vLLM sends its arguments as pickles."""
    plain = Weights(3, {"parameter": np.arange(1e6, dtype=np.float32)})
    weights = receive_mapped(Direct().receive, Publication(3, plain))
    assert receive_mapped(Direct().receive, Publication(3, weights)) is weights and copies() == 1
    pickled = pickle.dumps({"arrays": weights.arrays})
    assert len(pickled) < 1000
    code = (
        "import pickle, sys; given = pickle.load(sys.stdin.buffer);"
        " print(given['arrays']['parameter'].sum())"
    )
    summed = subprocess.run([sys.executable, "-c", code], input=pickled, capture_output=True)
    assert float(summed.stdout) == pytest.approx(plain.arrays["parameter"].sum()), summed.stderr
    assert copies() == 1

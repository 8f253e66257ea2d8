"""Weights are published in the background: the newest first, from at most two copies."""

import math
import threading
import time

import numpy as np
import pytest
import torch
from build import pack, trainer
from fakes import Given
from suite import until

from tba.errors import SearchError
from tba.learn.publish import answer, probe_tokens, sequences_of
from tba.runtime.deadline import bind_ray
from tba.weights import Publication, as_tensor

bind_ray(None)

from tba.runtime.ray import Publisher  # noqa: E402

SECONDS = 20
"""Deadline of every wait in these tests."""


class Post:
    """Everything that a publisher has sent, and its error."""

    def __init__(self, deadline: float = SECONDS) -> None:
        self.versions: list[int] = []
        self.errors: list[Exception] = []
        self.publisher = Publisher(self.send, self.errors.append, deadline)

    def send(self, sent: Publication, published: float) -> None:
        assert 0 <= time.monotonic() - published < SECONDS
        self.versions.append(sent.version)


def test_what_waits_is_replaced_by_what_is_newer():
    post, source = Post(), Given(ready=threading.Event())
    post.publisher.publish(source, 1)
    until(lambda: post.publisher._sending_since is not None, SECONDS)
    for version in range(2, 7):
        post.publisher.publish(source, version)
    source.ready.set()
    post.publisher.finish()
    assert post.versions == [1, 6]
    post.publisher.publish(source, 7)
    post.publisher.finish()
    assert post.versions == [1, 6, 7]
    post.publisher.close()
    assert not post.publisher._thread.is_alive()


def test_an_error_ends_the_thread_and_not_the_wait():
    post = Post()
    post.publisher.publish(Given(error="no memory"), 1)
    post.publisher.finish()
    (error,) = post.errors
    assert str(error) == "the weights could not be published (OSError): no memory"
    assert isinstance(error, SearchError)  # the run is saved before it ends
    assert isinstance(error.__cause__, OSError)
    post.publisher.close()


def test_every_wait_has_a_deadline():
    post, source = Post(deadline=0.01), Given(ready=threading.Event())
    post.publisher.publish(source, 1)
    with pytest.raises(TimeoutError, match=r"runtime\.task_deadline = 0\.01 s; raise"):
        post.publisher.finish()
    until(lambda: time.monotonic() - (post.publisher._sending_since or math.inf) > 0.01, SECONDS)
    with pytest.raises(TimeoutError, match=r"runtime\.task_deadline"):
        post.publisher.publish(source, 2)
    source.ready.set()
    post.publisher.close()


@pytest.mark.parametrize("bf16", [False, True])
def test_a_copy_keeps_the_weights_while_training_goes_on(tiny_model, batch, bf16):
    """It gives the same weights and the same probe as the trainer gave at its time."""
    t = trainer(tiny_model, f"engine.dtype={'bf16' if bf16 else 'fp32'}")
    assert t.send(version=0).payload.probe is not None  # before the first step
    t.step(batch, 0)
    expected = pack(t.policy.model, 1, bf16)
    probe = answer(t.policy, probe_tokens(sequences_of(batch), t.setup.context), 1)
    copy = t.copy(version=1)
    t.step(batch, 1)
    weights = copy().payload
    assert weights.version == 1 and weights.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(weights.arrays[name], array)
    assert weights.probe is not None
    np.testing.assert_array_equal(weights.probe.logp, probe.logp)
    (free,) = t._free  # its memory is allocated once
    t.copy(version=3)()
    assert t._free == [free]


def test_a_copy_shares_what_is_not_trained(tiny_model, batch):
    """Only the trained parameters are copied and published."""
    t = trainer(tiny_model)
    frozen, *others = t.policy.model.parameters()
    frozen.requires_grad_(False)
    t.step(batch, 0)
    copy = t.copy(version=1)
    t.step(batch, 1)
    weights = copy().payload
    assert len(weights.arrays) == len(others)
    (free,) = t._free
    shared = [p for p in free._policy.model.parameters() if not p.requires_grad]
    assert [p.data_ptr() for p in shared] == [frozen.data_ptr()]


def test_a_reference_is_in_fp32(tiny_model):
    """The trainer and the reference compute alike, whatever the engine computes in."""
    t = trainer(tiny_model, "engine.dtype=bf16")
    model = t.policy.model
    for name, array in t.reference(version=1).payload.arrays.items():
        assert torch.equal(as_tensor(array), model.state_dict()[name])
    assert t.send(version=1).payload.nbytes * 2 == pack(model, 1, bf16=False).nbytes

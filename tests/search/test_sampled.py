"""Tokens that the policy did not sample: attention sees them, and no sum does."""

from dataclasses import replace
from math import exp
from typing import Any

import numpy as np
import pytest
import torch
from build import group, trajectory
from torch import Tensor

from tba.config.plugins import names, resolve
from tba.config.tables import PolicyTable
from tba.learn.layouts import first_alike
from tba.learn.micro_batches import chunks
from tba.learn.policy import Policy
from tba.learn.publish import probe_tokens, sequences_of
from tba.models.pretrained import load_model
from tba.objectives import group_metrics
from tba.objectives.tb import TrajectoryBalance
from tba.replay.buffer import ReplayBuffer
from tba.types import GIVEN, Batch, Group, Trajectory, collate

GARBAGE = 7.0
"""Value of everything at the environment's tokens: nothing may depend on it."""


def with_reply(t: Trajectory, place: int) -> Trajectory:
    """Put two tokens of an environment into a response, before this place."""
    if len(t.tokens) <= place:
        return t

    def put(values: np.ndarray | None, inserted: float) -> Any:
        return None if values is None else np.insert(values, [place] * 2, inserted)

    names = ("behavior_logp", "ref_logp", "value")
    numbers = {name: put(getattr(t, name), GARBAGE) for name in names}
    marks = put(np.ones(len(t.tokens), np.uint8), GIVEN)
    return replace(t, tokens=put(t.tokens, 4), marks=marks, **numbers)


@pytest.fixture
def spread(groups: list[Group]) -> list[Group]:
    """The groups, with a reply after the k-th token of response k, where that is not the last."""
    told = []
    for g in groups:
        replies = [with_reply(t, 1 + k) for k, t in enumerate(g.trajectories)]
        told.append(replace(g, trajectories=tuple(replies)))
    return told


def placed(values: Tensor, batch: Batch) -> Tensor:
    """Values of the sampled tokens in their order, and garbage elsewhere."""
    everywhere = torch.full(batch.mask.shape, GARBAGE)
    return everywhere.masked_scatter(batch.mask, values)


def test_masks_tell_what_was_sampled_from_what_is_there(spread):
    batch = collate(spread)
    first = spread[0].trajectories[0]  # 5 tokens, a reply after the first
    assert batch.mask[0, 0].tolist() == [True, False, False, True, True, True, True]
    assert batch.present[0, 0].tolist() == [True] * len(first.tokens)
    lengths = [[len(t.tokens) for t in g.trajectories] for g in spread]
    assert batch.present.sum(-1).tolist() == lengths
    assert int(batch.mask.sum()) == sum(map(sum, lengths)) - 2 * 6  # six of twelve have a reply
    parts = [batch.groups(part) for part in chunks(batch, 30, True)]
    assert all(part.tokens.shape[-1] == part.present.sum(-1).max() for part in parts)
    assert sum(int(part.mask.sum()) for part in parts) == int(batch.mask.sum())


@pytest.mark.parametrize("layout", ["packed", "cached", "plain"])
def test_log_probs_are_those_of_the_whole_text(layout, tiny_model, spread):
    """The environment's tokens are context: the others have the log-probs that they have alone."""
    model = load_model(PolicyTable(model=str(tiny_model)), torch.float32)
    policy, batch = Policy(model, 0.7), collate(spread)
    output = policy(batch, layout)
    for b, g in enumerate(spread):
        for k, t in enumerate(g.trajectories):
            ids = torch.tensor(np.concatenate([g.prompt_tokens, t.tokens])).long()
            logits = model(ids[None]).logits[0, len(g.prompt_tokens) - 1 : -1] / 0.7
            every = torch.log_softmax(logits, -1)
            alone = every.gather(1, ids[len(g.prompt_tokens) :, None])[:, 0]
            entropy = -(every.exp() * every).sum(-1)
            mask = batch.mask[b, k, : len(alone)]
            own, own_entropy = output.logp[b, k], output.entropy[b, k]
            torch.testing.assert_close(own[: len(alone)], alone * mask, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(own_entropy[: len(alone)], entropy * mask, atol=1e-5, rtol=0)
            assert not own[len(alone) :].any()


def test_alike_are_responses_of_which_the_same_was_sampled(spread):
    once = spread[0].trajectories[0]
    alone = replace(once, marks=None)  # the policy wrote the reply itself
    batch = collate([replace(spread[0], trajectories=(alone, once, alone, once))])
    assert first_alike(batch).tolist() == [[0, 1, 0, 1]]


def test_a_probe_is_the_text_as_it_stands(spread):
    tokens = probe_tokens(sequences_of(collate(spread)), context=64)
    longest = spread[0].trajectories[0].tokens.tolist()
    assert tokens.tokens[0, 0].tolist()[-len(longest) :] == longest
    assert tokens.mask.all()


@pytest.mark.parametrize("name", [n for n in names("objectives") if n != "vineppo"])
def test_objectives_read_sampled_tokens_only(name, groups, spread):
    """Loss, metrics and gradient are those without the environment's tokens."""
    objective = resolve("objectives", "objective", name, {}).build()
    head = objective.head
    rng, found = torch.Generator().manual_seed(0), []
    plain = collate(groups)
    logp = -torch.rand(int(plain.mask.sum()), generator=rng)
    read = torch.randn(int(plain.mask.sum()), generator=rng)
    for batch in (plain, collate(spread)):
        live = placed(logp, batch).requires_grad_()
        own = () if head is None else (placed(read, batch) if head.on == "response" else read[:3],)
        loss, metrics = objective(live, batch, *own)
        (gradient,) = torch.autograd.grad(loss.sum(), live)
        assert not gradient[~batch.mask].any()
        found.append({"loss": loss, "gradient": gradient[batch.mask], **metrics})
    for key, value in found[0].items():
        close = {"rtol": 1.3e-6, "atol": 1e-6}  # of log-probs in fp32
        torch.testing.assert_close(found[1][key], value, **close, msg=key)


def test_tb_by_hand():
    """Two dialogues; d is 0.5 + 0.25 and -1.0, whatever stands at the environment's token."""
    dialogue = masked(2, 3, 4, mask=[True, False, True])
    batch = collate([group("a", *(replace(dialogue, reward=reward) for reward in (1.0, 0.0)))])
    logp = torch.tensor([[[0.5, 9.0, 0.25], [-0.5, 9.0, -0.5]]])
    loss, metrics = TrajectoryBalance(beta=0.5, taper="none")(logp, batch)
    # beta d - r = -0.625 and -0.5; the mean is -0.5625, and what is left is -+ 0.0625
    torch.testing.assert_close(loss, torch.tensor([0.0625**2]).double())
    torch.testing.assert_close(metrics["tb/log_z"], torch.tensor([0.5625 / 0.5]).double())
    entropy = torch.tensor([[[1.0, 0.0, 2.0], [3.0, 0.0, 3.0]]])
    found = group_metrics(logp, entropy, batch, tokens=4.0)
    assert found["completions/mean_length"].tolist() == [2.0]
    assert found["entropy"].tolist() == [(1.5 + 3.0) / 2]
    assert found["log_ratio"].tolist() == [(0.75 - 1.0) / 2]
    each = (0.5, 0.25, -0.5, -0.5)  # of the four tokens sampled
    assert found["kl"].tolist() == [sum(each) / 4]
    assert found["kl/k3"].tolist() == pytest.approx([sum(exp(-d) + d - 1 for d in each) / 4])
    assert found["off_policy/log_ratio"].tolist() == [(0.75 + 1.0) / 2]


def masked(*tokens: int, mask: list[bool] | None = None) -> Trajectory:
    return replace(trajectory(*tokens), marks=None if mask is None else np.array(mask, np.uint8))


def test_the_buffer_keeps_masks_where_there_are_some(tmp_path):
    """In memory, on disk, and back."""
    buffer = ReplayBuffer()
    buffer.add([group("a", masked(1, 2), masked(3, 4, 5))], 0)
    mask = [True, False, True]
    switched = replace(masked(6, 7, 8, mask=mask), switches=((1, 4), (2, 5)))
    buffer.add([group("a", switched), group("b", masked(1, 1))], 1)
    buffer.save(tmp_path)()
    again = ReplayBuffer()
    again.load(tmp_path)
    for one in (buffer, again):
        (a, b) = one.groups()
        masks = [None if t.sampled is None else t.sampled.tolist() for t in a.trajectories]
        assert masks == [None, None, mask]
        assert b.trajectories[0].sampled is None
        assert [t.switches for t in a.trajectories] == [(), (), switched.switches]


def test_the_same_text_from_another_hand_is_another_response():
    buffer = ReplayBuffer()
    mask = [True, False, True]
    buffer.add([group("a", masked(1, 2, 3), masked(1, 2, 3, mask=mask))], 0)
    buffer.add([group("a", masked(1, 2, 3, mask=mask))], 1)
    assert (len(buffer), buffer.counts["duplicates"]) == (2, 1)

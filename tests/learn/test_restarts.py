"""Responses of several contexts: each token sees its own context, and the loss sums over all."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from talk import save_model
from torch import Tensor

from tba.config.tables import PolicyTable
from tba.learn.layouts import first_alike, plan_of
from tba.learn.micro_batches import chunks, cost, filler, split_batch
from tba.learn.policy import Policy
from tba.models.pretrained import load_model
from tba.objectives import Head
from tba.objectives.tb import TrajectoryBalance
from tba.prompt import Prompt
from tba.replay.buffer import ReplayBuffer, behind_prompt
from tba.replay.store import load_groups, save_groups
from tba.types import GIVEN, RESTART, SAMPLED, Group, Trajectory, collate

G, S, R = GIVEN, SAMPLED, RESTART


def session(rng: np.random.Generator, *given: int) -> Trajectory:
    tokens = rng.integers(3, 12, len(given)).astype(np.int32)
    marks = np.array(given, np.uint8)
    logp = np.where(marks == S, -rng.random(len(marks)), 0.0).astype(np.float32)
    return Trajectory(tokens, logp, logp, float(rng.random()), 0, True, marks=marks)


@pytest.fixture
def sessions() -> list[Group]:
    """Two groups of three: whole, cut once, cut twice; one begins with another prompt."""
    rng = np.random.default_rng(0)
    kinds = [
        [[S, S, G, S], [S, S, R, G, S, S], [G, S, R, S, S, R, G, G, S]],
        [[R, G, S, S, G, S], [S], [S, R, S]],
    ]
    groups = []
    for number, kind in enumerate(kinds):
        prompt = rng.integers(3, 12, 3 + 4 * number).astype(np.int32)
        rows = tuple(session(rng, *marks) for marks in kind)
        groups.append(Group(Prompt(str(number), "?"), prompt, rows))
    return groups


def alone(model: Any, group: Group, t: Trajectory, temperature: float) -> Tensor:
    """Return the log-probs of sampled tokens, each context through the model by itself."""
    logp = torch.zeros(len(t.tokens))
    bounds = [0, *t.restarts, len(t.tokens)]
    for start, end in pairwise(bounds):
        before = group.prompt_tokens if start == 0 and 0 not in t.restarts else []
        ids = torch.tensor([*before, *t.tokens[start:end].tolist()])
        if end > start:
            every = (model(ids[None]).logits[0] / temperature).log_softmax(-1)
            for place in range(start, end):
                column = len(before) + place - start
                if t.sampled is None or t.sampled[place]:
                    logp[place] = every[column - 1, ids[column]]
    return logp


def test_log_probs_are_those_of_each_context_alone(tiny_model, sessions):
    model = load_model(PolicyTable(model=str(tiny_model)), torch.float32)
    batch = collate(sessions)
    output = Policy(model, 0.7)(batch)
    for b, group in enumerate(sessions):
        for k, t in enumerate(group.trajectories):
            own = output.logp[b, k]
            torch.testing.assert_close(own[: len(t.tokens)], alone(model, group, t, 0.7))
            assert not own[len(t.tokens) :].any()
            assert (output.entropy[b, k][: len(t.tokens)] > 0).tolist() == t.sampled.tolist()
    plan = plan_of(batch, share_prompt=True, packing="short")
    rows = [len(p) for p in (sessions[0].prompt_tokens, sessions[1].prompt_tokens)]
    rows += [3 + 4, 3 + 2, 4, 3 + 2, 3, 4, 6, 7 + 1, 7 + 1, 2]
    assert plan.tokens - plan.padding == sum(rows)


def test_gradients_and_a_head_do_not_depend_on_how_a_batch_is_divided(tiny_model, sessions):
    """Budgets that force chunks and pieces give the gradient of the whole batch."""
    model = load_model(PolicyTable(model=str(tiny_model)), torch.float32)
    policy = Policy(model, 1.0, head=Head("prompt", 0.1))
    batch = collate(sessions)
    policy(batch).logp.sum().backward()
    whole = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
    for budget in (1, 20, 60):
        policy.zero_grad()
        for chunk in map(batch.groups, chunks(batch, budget, True)):
            for piece in chunk.pieces(budget, True):
                policy(piece).logp.sum().backward()
        parts = [p.grad for p in policy.parameters() if p.grad is not None]
        for a, b in zip(whole, parts, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert cost(batch, [0], True) == 4 * 3 + 19


def test_ranks_make_one_pass_over_contexts_together(sessions):
    batch = collate(sessions)
    shapes = [shape for part in split_batch(batch, 1000, 2, True, "short") for shape in part.shapes]
    assert {shape.layout for shape in shapes} == {"plain"}
    assert not filler(batch).restarts.any()


def test_marks_survive_the_buffer_and_its_files(tmp_path, sessions):
    """A response may have none, and may have switched to other weights."""
    first, *others = sessions[0].trajectories
    plain = replace(first, marks=None, switches=((2, 7),))
    sessions[0] = replace(sessions[0], trajectories=(plain, *others))
    buffer = ReplayBuffer()
    buffer.add(sessions, now=0)
    buffer.save(tmp_path)()
    again = ReplayBuffer()
    again.load(tmp_path)
    save_groups(sessions, tmp_path / "groups.jsonl")
    stored = load_groups(tmp_path / "groups.jsonl")
    for groups in (again.groups(), stored):
        for a, b in zip(sessions, groups, strict=True):
            for t, u in zip(a.trajectories, b.trajectories, strict=True):
                assert t.tokens.tolist() == u.tokens.tolist() and t.switches == u.switches
                np.testing.assert_array_equal(t.marks, u.marks)


def test_alike_are_sessions_whose_contexts_begin_alike(sessions):
    one = sessions[1].trajectories[2]
    other = replace(one, marks=np.where(one.marks == R, G, one.marks))
    batch = collate([replace(sessions[1], trajectories=(one, other, one))])
    assert first_alike(batch).tolist() == [[0, 1, 0]]


def test_a_session_that_begins_otherwise_brings_its_prompt(tiny_model, sessions):
    """Its tokens have the log-probs that they have behind their own prompt."""
    model = load_model(PolicyTable(model=str(tiny_model)), torch.float32)
    policy = Policy(model, 1.0)
    first = sessions[0]
    longer = np.concatenate([first.prompt_tokens, np.array([9, 11], np.int32)])
    for own in (longer, np.array([5, 6, 7, 8], np.int32), first.prompt_tokens[:2]):
        later = replace(first, prompt_tokens=own)
        buffer = ReplayBuffer()
        buffer.add([first], now=0)
        buffer.add([later], now=1)
        (group,) = buffer.groups()
        assert np.array_equal(group.prompt_tokens, first.prompt_tokens)
        rows = policy(collate([group])).logp[0]
        expected = policy(collate([later])).logp[0]
        for t, row in zip(first.trajectories, expected, strict=True):
            moved = behind_prompt(t, own, first.prompt_tokens)
            (k,) = [
                i for i, u in enumerate(group.trajectories)
                if np.array_equal(u.tokens, moved.tokens) and u.restarts == moved.restarts
            ]  # fmt: skip
            mask = group.trajectories[k].sampled
            found, wanted = rows[k][: len(mask)][mask], row[: len(t.tokens)][t.sampled]
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_a_session_without_a_prompt_does_not_see_that_of_earlier_ones(sessions):
    """Sessions of its search have begun with other tokens, and those of an earlier one alike."""
    t = sessions[0].trajectories[2]
    moved = behind_prompt(t, np.zeros(0, np.int32), sessions[0].prompt_tokens)
    assert np.array_equal(moved.tokens, t.tokens)
    assert moved.marks.tolist() == [R, *t.marks.tolist()[1:]]


def test_a_group_of_sessions_without_a_common_prompt_has_log_probs(tiny_model):
    """They are too long to be packed, and there is nothing to share."""
    rng = np.random.default_rng(0)
    rows = tuple(session(rng, G, *[S] * 30) for _ in range(12))
    group = Group(Prompt("0", "?"), np.zeros(0, np.int32), rows)
    model = load_model(PolicyTable(model=str(tiny_model)), torch.float32)
    logp = Policy(model, 1.0)(collate([group])).logp[0]
    for row, t in zip(logp, rows, strict=True):
        torch.testing.assert_close(row, alone(model, group, t, 1.0))


OUTCOMES = 4  # tokens of talk's model, each of which a reply may be
BETA = 0.5


def sessions_of(second: Callable[[int], list[int]], split: bool = False) -> list[Group]:
    """All sessions of two replies of one token; the second follows a context of its own.

    With `split`, each reply is a response of its own, with the reward of its session.
    """
    rng = np.random.default_rng(3)
    rewards = rng.random((OUTCOMES, OUTCOMES))
    prompt = np.array([1, 2], np.int32)
    rows = []
    firsts = []
    seconds: dict[int, list[Trajectory]] = {}
    for one, two in product(range(OUTCOMES), repeat=2):
        context = second(one)
        reward = float(rewards[one, two])
        given = [False] * len(context)
        if split:
            firsts.append(whole([one], [True], reward, ()))
            own = whole([two], [True], reward, ())
            seconds.setdefault(one, []).append(own)
            continue
        rows.append(whole([one, *context, two], [True, *given, True], reward, (1,)))
    if not split:
        return [Group(Prompt("a", "?"), prompt, tuple(rows))]
    groups = [Group(Prompt("a", "?"), prompt, tuple(firsts))]
    for one, own in seconds.items():
        context = np.array(second(one), np.int32)
        groups.append(Group(Prompt(f"b{one}", "?"), context, tuple(own)))
    return groups


def whole(
    tokens: list[int], sampled: list[bool], reward: float, restarts: tuple[int, ...]
) -> Trajectory:
    zeros = np.zeros(len(tokens), np.float32)
    marks = np.array(sampled, np.uint8)
    marks[list(restarts)] = R
    return Trajectory(np.array(tokens, np.int32), zeros, zeros, reward, 0, True, marks=marks)


def distance_from_optimum(folder: Path, second: Callable[[int], list[int]], split: bool) -> float:
    """Train on all outcomes alike, as another policy sampled them; return the total variation.

    The optimum is ref(y1) ref(y2 | its context) exp(r / beta) / Z over all pairs.
    """
    model = load_model(PolicyTable(model=str(folder)), torch.float32)
    policy = Policy(model, 1.0)
    joint = collate(sessions_of(second))
    with torch.no_grad():
        ref = policy(joint).logp
    optimum = (ref.sum(-1)[0] + joint.reward[0] / BETA).softmax(0)
    groups = sessions_of(second, split)
    batches = []
    for alike in filter(None, (groups[:1], groups[1:])):  # groups of one size
        batch = collate(alike)
        with torch.no_grad():
            logp = policy(batch).logp
        batches.append(replace(batch, ref_logp=logp, behavior_logp=logp))
    loss_of = TrajectoryBalance(beta=BETA, taper="none")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, STEPS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for batch in batches:
            loss_of(policy(batch).logp, batch)[0].sum().backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        found = policy(joint).logp.sum(-1)[0].exp()
    return float((found - optimum).abs().sum() / 2)


STEPS = 200


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_rewritten_context_keeps_the_optimum_from_data_of_any_policy(tmp_path):
    """One residual for a session, whose second context is written anew and forgets nothing.

    Rows of their own, which share the reward, have another optimum: the negative control.
    """
    folder = save_model(tmp_path)

    def rewritten(first: int) -> list[int]:
        return [2, first, 1, 1]

    assert distance_from_optimum(folder, rewritten, split=False) < 0.005
    assert distance_from_optimum(folder, rewritten, split=True) > 0.03


def best_without_memory(ref_one: Tensor, ref_two: Tensor, rewards: Tensor) -> float:
    """Return the largest E[r] - beta KL of two replies that do not know of each other.

    It is the best of five starts, by ascent over tables.
    """
    rng = torch.Generator().manual_seed(0)
    found = []
    for _ in range(5):
        tables = [torch.randn(OUTCOMES, generator=rng).requires_grad_() for _ in range(2)]
        optimizer = torch.optim.Adam(tables, lr=0.1)
        for _ in range(300):
            one, two = (table.log_softmax(0) for table in tables)
            value = objective_of(one[:, None] + two, ref_one[:, None] + ref_two, rewards)
            optimizer.zero_grad()
            (-value).backward()
            optimizer.step()
        found.append(float(value.detach()))
    return max(found)


def objective_of(logp: Tensor, ref: Tensor, rewards: Tensor) -> Tensor:
    """Return E[r] - beta KL over all pairs of replies."""
    return (logp.exp() * (rewards - BETA * (logp - ref))).sum()


@pytest.mark.slow
def test_on_policy_a_context_that_forgets_ends_at_the_best_that_it_can(tmp_path):
    """The second reply cannot depend on the first; fresh samples at each step."""
    model = load_model(PolicyTable(model=str(save_model(tmp_path))), torch.float32)
    policy = Policy(model, 1.0)
    (group,) = sessions_of(lambda first: [2, 1, 1])
    joint = collate([group])
    with torch.no_grad():
        every = policy(joint).logp[0]
    rewards = joint.reward[0].reshape(OUTCOMES, OUTCOMES)
    ref_one = every[:, 0].reshape(OUTCOMES, OUTCOMES)[:, 0]
    ref_two = every[:, -1].reshape(OUTCOMES, OUTCOMES)[0]
    best = best_without_memory(ref_one, ref_two, rewards)
    pairs = zip(group.trajectories, every, strict=True)
    referred = [replace(t, ref_logp=row.numpy()) for t, row in pairs]
    loss_of = TrajectoryBalance(beta=BETA, taper="none")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, STEPS)
    rng = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        with torch.no_grad():
            p = policy(joint).logp.sum(-1)[0].exp()
        drawn = torch.multinomial(p, 128, replacement=True, generator=rng).tolist()
        batch = collate([replace(group, trajectories=tuple(referred[i] for i in drawn))])
        optimizer.zero_grad()
        loss_of(policy(batch).logp, batch)[0].sum().backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        logp = policy(joint).logp.sum(-1)[0].reshape(OUTCOMES, OUTCOMES)
    reached = float(objective_of(logp, ref_one[:, None] + ref_two, rewards))
    begun = float(objective_of(ref_one[:, None] + ref_two, ref_one[:, None] + ref_two, rewards))
    print(f"begun {begun:.4f}, reached {reached:.4f}, best {best:.4f}")
    assert best - 1e-3 < reached < best + 1e-4
    assert best - begun > 0.05

"""Sessions over HTTP that can be enumerated: they come as often as they should, and training on
them ends at the optimum of the whole session, also where the program rewrites its context."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import talk
import torch
from build import first_policy, run_and_keep
from exact import BETA, log_probs, toy_config
from torch import Tensor

from tba.config.schema import Config
from tba.learn.policy import Policy
from tba.prompt import Prompt
from tba.replay.buffer import ReplayBuffer
from tba.setup.setup import RunSetup, check
from tba.strategies.uniform import Uniform
from tba.types import Group, Trajectory, collate

pytest.importorskip("starlette", reason="needs tba[agents]")
pytest.importorskip("uvicorn", reason="needs tba[agents]")

LIMIT = 0.02


def rewritten(prompt: str) -> talk.Rewrite:
    """What `rewritten_oracle` of tests/programs.py puts before its second call."""

    def second(said: list[int], told: str) -> list[int]:
        past = ["1" if token in (talk.ONE, talk.CALL) else "2" for token in reversed(said)]
        return talk.opened(prompt + told + "".join(past))

    return second


def forgotten(prompt: str) -> talk.Rewrite:
    """What `forgetful_oracle` puts before its second call."""
    return lambda said, told: talk.opened(prompt + told)


PROGRAMS = {"oracle": None, "rewritten_oracle": rewritten}


def config_of(program: str, folder: Path, *settings: str, copies: int = 200) -> Config:
    texts = talk.TEXTS.items()
    rows = [{"prompt": t, "first": f, "row": i} for i in range(copies) for t, f in texts]
    rows += [{"prompt": "221", "first": f, "row": 0} for f in "12"]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return toy_config(
        talk.save_model(folder / "model"), folder / "run", f"objective.beta={2 * BETA}",
        "task=agent", f"task.data={data}", f"task.rollout={talk.TESTS}/programs.py:{program}",
        "task.held_out_size=2", "task.concurrency=256",
        f"sampling.max_tokens={talk.MAX_TOKENS}", *settings,
    )  # fmt: skip


def searched(parts: RunSetup, samples: int) -> Sequence[Group]:
    """Hold so many sessions about each of the three prompts with the first policy."""
    setup = parts.search_setup()
    setup = replace(setup, sampling=replace(setup.sampling, samples=samples))
    searcher = setup.build("cpu", False)
    try:
        return searcher.search(parts.prompts[:3], seed=0).groups
    finally:
        searcher.close()


def split(groups: Sequence[Group]) -> list[Group]:
    """Return each context as a row of its own, which shares the reward of its session."""
    prompts: dict[bytes, np.ndarray] = {}
    rows: dict[bytes, list[Trajectory]] = {}
    for group in groups:
        for t in group.trajectories:
            bounds = [0, *t.restarts, len(t.tokens)]
            for start, end in pairwise(bounds):
                sampled = np.ones(end - start, bool) if t.sampled is None else t.sampled[start:end]
                first = start + int(sampled.argmax())
                given = t.tokens[start:first] if start else group.prompt_tokens
                part = slice(first, end)
                row = replace(
                    t, tokens=t.tokens[part], behavior_logp=t.behavior_logp[part],
                    ref_logp=t.ref_logp[part], marks=None,
                )  # fmt: skip
                prompts[given.tobytes()] = given
                rows.setdefault(given.tobytes(), []).append(row)
    return [
        Group(Prompt(str(given.tolist()), "?"), given, tuple(rows[name]))
        for name, given in prompts.items()
    ]


def value(logp: Sequence[Tensor], every: Sequence[Group]) -> Tensor:
    """Return the mean of reward - beta (log pi - log ref), by the log-probs of all sessions."""
    means = []
    for own, group in zip(logp, every, strict=True):
        ref = torch.tensor([t.ref_logp.sum() for t in group.trajectories])
        reward = torch.tensor([t.reward for t in group.trajectories])
        means.append((own.exp() * (reward - 2 * BETA * (own - ref))).sum())
    return torch.stack(means).mean()


def value_of(policy: Policy, every: Sequence[Group]) -> float:
    return float(value([log_probs(policy, group).sum(-1) for group in every], every))


def best_value(every: Sequence[Group]) -> float:
    """Return the largest value of a policy that has a distribution of its own at each context.

    It is not concave where a context forgets: this is the best of five random starts.
    """
    contexts: dict[tuple[int, ...], int] = {}
    choices = [_choices(group, contexts) for group in every]

    def logp(logits: Tensor) -> list[Tensor]:
        table = logits.log_softmax(-1)
        sums = [torch.zeros(len(group.trajectories)) for group in every]
        pairs = zip(sums, choices, strict=True)
        return [zero.index_add(0, own, table[rows, ids]) for zero, (own, rows, ids) in pairs]

    values = []
    for start in range(5):
        rng = torch.Generator().manual_seed(start)
        logits = torch.randn(len(contexts), len(talk.VOCABULARY), generator=rng).requires_grad_()
        optimizer = torch.optim.LBFGS([logits], max_iter=200, line_search_fn="strong_wolfe")

        def loss(logits: Tensor = logits) -> Tensor:
            logits.grad = None
            negative = -value(logp(logits), every)
            negative.backward()
            return negative.detach()

        optimizer.step(loss)
        values.append(-float(loss()))
    print("best of", [f"{each:.4f}" for each in values])
    return max(values)


def _choices(group: Group, contexts: dict[tuple[int, ...], int]) -> Tensor:
    """Return trajectory, context and token of each choice of the policy, as rows of numbers."""
    found = []
    for number, t in enumerate(group.trajectories):
        context = group.prompt_tokens.tolist()
        for place, token in enumerate(t.tokens.tolist()):
            if place in t.restarts:
                context = []
            if t.sampled is None or t.sampled[place]:
                row = contexts.setdefault(tuple(context), len(contexts))
                found.append((number, row, token))
            context.append(token)
    return torch.tensor(found).T


def replayed(parts: RunSetup, groups: Sequence[Group]) -> Policy:
    """Return the policy after training on sessions that the first policy sampled."""
    trainer, rng, buffer = parts.trainer("cpu"), np.random.default_rng(0), ReplayBuffer(10_000)
    buffer.add(groups, now=0)
    for step in range(parts.config.run.steps):
        drawn = buffer.sample(3, 128, Uniform(), step, rng)
        trainer.step(collate(drawn), step)
    policy: Policy = trainer.policy
    return policy


def farthest(policy: Policy, every: Sequence[Group]) -> float:
    """Return the largest total variation from the optimum of the whole session."""
    return max(talk.total_variation(policy, whole, 2 * BETA) for whole in every)


def test_sessions_with_a_rewritten_past_come_as_often_as_they_should(tmp_path):
    config = config_of("rewritten_oracle", tmp_path)
    groups = searched(check(config), samples=256)
    reference = first_policy(config)
    talk.check_frequencies(
        groups, [talk.group_of_all(g.prompt, reference, rewritten) for g in groups]
    )
    assert any(t.restarts for g in groups for t in g.trajectories)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_buffer_of_another_policy_leads_to_the_optimum(program, tmp_path):
    """A row for each context, which shares the reward, does not: the negative control."""
    config = config_of(program, tmp_path, "run.steps=160")
    parts = check(config)
    groups = searched(parts, samples=2048)
    reference = first_policy(config)
    every = [talk.group_of_all(g.prompt, reference, PROGRAMS[program]) for g in groups]
    talk.check_frequencies(groups, every)
    assert min(talk.total_variation(reference, whole, 2 * BETA) for whole in every) > 4 * LIMIT
    distance = farthest(replayed(parts, groups), every)
    print(f"{program}: {distance:.4f}")
    assert distance < LIMIT
    if program == "rewritten_oracle":
        distance = farthest(replayed(parts, split(groups)), every)
        print(f"split rows: {distance:.4f}")
        assert distance > 2 * LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_on_policy_sessions_lead_to_the_optimum(program, tmp_path):
    settings = ("runtime.lag=0", "strategy=recent", "run.steps=250")
    config = config_of(program, tmp_path, *settings)
    run = run_and_keep(config)
    reference = first_policy(config)
    every = [talk.group_of_all(p, reference, PROGRAMS[program]) for p in run.parts.prompts[:3]]
    distance = farthest(run.trainer.policy, every)
    print(f"{program}: {distance:.4f}")
    assert distance < LIMIT


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_policy_that_forgets_ends_at_the_best_that_it_can_reach(tmp_path):
    """On-policy. What another policy sampled leads elsewhere: docs/agents.md has the figure."""
    rate = ("trainer.learning_rate=3e-3", "trainer.schedule=linear")
    settings = ("runtime.lag=0", "strategy=recent", *rate, "run.steps=800")
    in_turn = ("selection=cyclic", *settings)  # each step has each prompt once
    run = run_and_keep(config_of("forgetful_oracle", tmp_path, *in_turn, copies=1))
    parts = run.parts
    reference = first_policy(parts.config)
    every = [talk.group_of_all(p, reference, forgotten) for p in parts.prompts[:3]]
    groups = searched(parts, samples=2048)
    talk.check_frequencies(groups, every)
    best = best_value(every)
    on_policy = best - value_of(run.trainer.policy, every)
    off_policy = best - value_of(replayed(parts, groups), every)
    print(f"forgetful: {on_policy:.5f} on-policy, {off_policy:.5f} from another policy's sessions")
    print(f"before: {best - value_of(reference, every):.5f}")
    assert abs(on_policy) < 1e-3

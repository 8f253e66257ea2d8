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
from build import first_policy, run_and_keep
from exact import BETA, toy_config

from tba.config.schema import Config
from tba.prompt import Prompt
from tba.replay.buffer import ReplayBuffer
from tba.runs.setup import RunSetup, check
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


PROGRAMS = {"oracle": None, "rewritten_oracle": rewritten}


def config_of(program: str, folder: Path, *settings: str) -> Config:
    rows = [{"prompt": t, "first": f, "row": i} for i in range(200) for t, f in talk.TEXTS.items()]
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
                    ref_logp=t.ref_logp[part], sampled=None, restarts=(),
                )  # fmt: skip
                prompts[given.tobytes()] = given
                rows.setdefault(given.tobytes(), []).append(row)
    return [
        Group(Prompt(str(given.tolist()), "?"), given, tuple(rows[name]))
        for name, given in prompts.items()
    ]


def distance_after_replay(
    parts: RunSetup, groups: Sequence[Group], every: Sequence[Group]
) -> float:
    """Train on sessions that the first policy sampled; return the largest total variation."""
    trainer, rng, buffer = parts.trainer("cpu"), np.random.default_rng(0), ReplayBuffer(10_000)
    buffer.add(groups, now=0)
    for step in range(parts.config.run.steps):
        drawn = buffer.sample(3, 128, Uniform(), step, rng)
        trainer.step(collate(drawn), step)
    return max(talk.total_variation(trainer.policy, whole, 2 * BETA) for whole in every)


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
    distance = distance_after_replay(parts, groups, every)
    print(f"{program}: {distance:.4f}")
    assert distance < LIMIT
    if program == "rewritten_oracle":
        distance = distance_after_replay(parts, split(groups), every)
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
    distances = [talk.total_variation(run.trainer.policy, w, 2 * BETA) for w in every]
    print(f"{program}: {max(distances):.4f}")
    assert max(distances) < LIMIT

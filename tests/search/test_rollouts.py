"""Monte-Carlo values: the states that are rolled out, true means, and scoring that fails."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from build import Scored
from exact import MAX_TOKENS, group_of_all, toy_config

from tba.config.tables import PolicyTable
from tba.engines import Engine
from tba.learn.policy import Policy
from tba.models.pretrained import load_model, load_text
from tba.models.tokenizer import Tokenizer
from tba.objectives import ValueRollouts
from tba.prompt import Prompt
from tba.replay.buffer import ReplayBuffer
from tba.replay.store import load_groups, save_groups
from tba.scoring.scoring import Scoring
from tba.scoring.verdicts import Rejection
from tba.search.result import SearchResult
from tba.search.values import Rollouts
from tba.setup.setup import check
from tba.types import Completion, Group, Sampling, Trajectory, collate
from tba.weights import Weights

SAMPLING = Sampling(samples=7, temperature=0.7, max_tokens=5)


@dataclass
class Endings(Engine):
    """An engine that ends responses with the digits 1, 2, 3, ... and remembers its calls."""

    version = 0
    asked: list[tuple[list[str], Sampling, int]] = field(default_factory=list)

    def load_weights(self, weights: Weights) -> None:
        raise NotImplementedError

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        self.asked.append(([self.text.decode(p) for p in prompts], sampling, seed))
        return [[self.completion(str(1 + i % 9)) for i in range(sampling.samples)] for _ in prompts]

    def completion(self, text: str) -> Completion:
        tokens = np.array([*self.text.tokenizer(text)["input_ids"], *self.text.eos_ids], np.int32)
        return Completion(tokens, np.full(len(tokens), -1.0, np.float32), True, version=0)


def number(text: str) -> float | None:
    """Return an answer as a number; None with a 9, or at the end 81 or 82."""
    return None if "9" in text or text.endswith(("81", "82")) else float(text)


@pytest.fixture
def text(tiny_model: Path) -> Tokenizer:
    return load_text(PolicyTable(model=str(tiny_model)))


def group(text: Tokenizer, prompt: str, *answers: str) -> Group:
    """Answers with EOS, unless they end with a dash; the reward is the answer."""
    trajectories = []
    for answer in answers:
        digits, finished = answer.removesuffix("-"), not answer.endswith("-")
        ids = text.tokenizer(digits)["input_ids"]
        tokens = np.array([*ids, *(text.eos_ids if finished else ())], np.int32)
        logp = np.zeros(len(tokens), np.float32)
        trajectories.append(Trajectory(tokens, logp, logp, float(digits), 0, finished))
    p = Prompt(prompt, prompt)
    return Group(p, text.encode(p), tuple(trajectories))


def estimate(
    text: Tokenizer, groups: list[Group], rollouts: int, step_tokens: int
) -> tuple[list[Group], list[float | Rejection], Endings]:
    engine = Endings(PolicyTable(model="unused"), text, "cpu", bf16=False, sampling=SAMPLING)
    request = ValueRollouts(rollouts, step_tokens)
    scoring = Scoring({"": Scored(lambda texts: list(map(number, texts)))})
    all_of = Rollouts(engine, text, scoring, SAMPLING, request)
    valued, verdicts = all_of.estimate(groups, seed=100)
    return valued, verdicts, engine


def values(group: Group) -> list[list[float]]:
    return [[] if t.value is None else t.value.tolist() for t in group.trajectories]


def test_values_by_hand(text):
    """Steps of two tokens, two rollouts.

    V at first is the mean of the other rewards; after "12" it is the mean of 121 and 122.
    """
    groups = [group(text, "1+", "123", "1245-", "7")]
    (found,), verdicts, _ = estimate(text, groups, rollouts=2, step_tokens=2)
    first = [(1245 + 7) / 2, (123 + 7) / 2, (123 + 1245) / 2]
    later = [121.5, 121.5]
    assert values(found) == [[first[0]] * 2 + later, [first[1]] * 2 + later, [first[2]] * 2]
    assert verdicts == [121, 122]


def test_values_of_each_token_by_hand(text):
    """Steps of one token, three rollouts.

    The state after "12" is the same for two responses, that after "1" for three.
    """
    groups = [group(text, "1+", "12", "123", "14")]
    (found,), verdicts, engine = estimate(text, groups, rollouts=3, step_tokens=1)
    first, second, third = (123 + 14) / 2, (12 + 14) / 2, (12 + 123) / 2
    assert values(found) == [[first, 12, 122], [second, 12, 122, 1232], [third, 12, 142]]
    contexts = [contexts for contexts, _, _ in engine.asked]
    assert contexts == [["1+1"], ["1+12", "1+14"], ["1+123"]]  # each state once
    assert len(verdicts) == 3 * 4


def test_prompts_do_not_share_states(text):
    both = [group(text, "1+", "12", "13"), group(text, "2+", "15", "16")]
    found, _, engine = estimate(text, both, rollouts=1, step_tokens=1)
    assert engine.asked[0][0] == ["1+1", "2+1"]
    assert [values(g)[0][0] for g in found] == [13, 16]


def test_rollouts_are_sampled_like_responses_with_what_is_left_of_the_limit(text):
    """At the same temperature and from seeds of their own."""
    _, _, engine = estimate(text, [group(text, "1+", "12345-", "1")], rollouts=4, step_tokens=2)
    sampled = [(s.samples, s.max_tokens, s.temperature) for _, s, _ in engine.asked]
    assert sampled == [(4, 3, 0.7), (4, 1, 0.7)]
    seeds = [seed for _, _, seed in engine.asked]
    assert len({100, *seeds}) == 3


def test_responses_of_one_step_need_no_rollouts(text):
    groups = [group(text, "1+", "12", "345", "6")]
    (found,), verdicts, engine = estimate(text, groups, rollouts=4, step_tokens=4)
    assert (verdicts, engine.asked) == ([], [])
    assert values(found) == [[175.5] * 3, [9.0] * 4, [178.5] * 2]


def test_what_was_found_stays_as_it_was(text):
    before = group(text, "1+", "123", "45")
    (found,), _, _ = estimate(text, [before], rollouts=2, step_tokens=2)
    assert [replace(t, value=None) for t in found.trajectories] == list(before.trajectories)


def test_a_response_is_left_out_when_no_rollout_of_a_state_can_be_scored(text):
    """After "8" the endings 1 and 2 cannot be scored, the third can; after "48" as well."""
    groups = [group(text, "1+", "82", "48", "12"), group(text, "2+", "81", "82")]
    found, verdicts, _ = estimate(text, groups, rollouts=2, step_tokens=1)
    # a prompt whose responses are all left out gives no group
    assert [[t.reward for t in g.trajectories] for g in found] == [[12.0]]
    # those left out still count as the prompt's other responses
    assert values(found[0])[0][0] == (82 + 48) / 2
    assert sum(isinstance(v, Rejection) for v in verdicts) == 2 * 3
    found, verdicts, _ = estimate(text, groups, rollouts=3, step_tokens=1)
    assert [[t.reward for t in g.trajectories] for g in found] == [[82.0, 48.0, 12.0], [81.0, 82.0]]
    assert values(found[0])[0][1] == 83  # the mean of those that could be scored
    assert sum(isinstance(v, Rejection) for v in verdicts) == 2 * 3


def search(model: Path, folder: Path, seed: int, *settings: str) -> SearchResult:
    """By a real engine, of the toy's three prompts."""
    parts = check(toy_config(model, folder, *settings))
    return parts.search_setup().build("cpu", False).search(parts.prompts[:3], seed)


VINE = ("objective=vineppo", "objective.step_tokens=1", "sampling.samples=64")


def test_truncated_rollouts_do_not_drop_long_responses(toy_model, tmp_path):
    with pytest.raises(ValueError, match=r"'reject' with objective.use = 'vineppo'.* set sampl"):
        check(toy_config(toy_model, tmp_path, *VINE, "sampling.truncated=reject"))
    check(toy_config(toy_model, tmp_path, *VINE, "sampling.truncated=0"))


def test_values_converge_to_the_true_ones(toy_model, tmp_path):
    """Every state after one token, by enumeration: within five standard errors of 300 rollouts."""
    settings = (
        *VINE, "objective.rollouts=300", "trainer.group_size=32", "trainer.batch_size=96",
        "sampling.samples=32", "engine.batch_size=4096",
    )  # fmt: skip
    config = toy_config(toy_model, tmp_path, *settings)
    text, policy = load_text(config.policy), Policy(load_model(config.policy, torch.float32), 1.0)
    found = search(toy_model, tmp_path, 0, *settings).groups
    for group in found:
        every = group_of_all(text, group.prompt, policy)
        states: dict[int, list[tuple[float, float]]] = {}
        for t in every.trajectories:
            p = float(np.exp(t.ref_logp.sum()))
            states.setdefault(int(t.tokens[0]), []).append((p, t.reward))
        seen = set()
        for t in group.trajectories:
            assert t.value is not None and len(t.value) == len(t.tokens)
            if len(t.tokens) == MAX_TOKENS:
                p, r = np.array(states[int(t.tokens[0])]).T
                p /= p.sum()
                spread = np.sqrt(p @ r**2 - (p @ r) ** 2)
                assert abs(t.value[1] - p @ r) < 5 * spread / np.sqrt(300) + 1e-5
                seen.add(int(t.tokens[0]))
        assert len(seen) > 1


def test_the_seed_decides_the_values(toy_model, tmp_path):
    settings = (*VINE, "objective.rollouts=3")
    groups = [search(toy_model, tmp_path, seed, *settings).groups for seed in (1, 1, 2)]
    found = [collate(each).value for each in groups]
    assert torch.equal(found[0], found[1])
    assert found[0].shape != found[2].shape or not torch.equal(found[0], found[2])


def test_rollouts_are_counted_apart_from_samples(toy_model, tmp_path):
    """Four for each distinct first token that goes on; the responses are those without rollouts."""
    with_values = search(toy_model, tmp_path, 1, *VINE)
    responses = [(g.prompt.id, t.tokens) for g in with_values.groups for t in g.trajectories]
    states = {(name, int(tokens[0])) for name, tokens in responses if len(tokens) > 1}
    counts = with_values.stats.counts
    assert counts["samples_generated"] == 3 * 64
    assert counts["rollouts_generated"] == 4 * len(states)
    assert with_values.stats.seconds["rollouts"] > 0
    without = search(toy_model, tmp_path, 1, "objective=rloo")
    assert without.stats.counts["rollouts_generated"] == 0
    assert collate(without.groups).value[collate(without.groups).mask].isnan().all()
    one, other = collate(with_values.groups), collate(without.groups)
    for name in ("tokens", "mask", "behavior_logp", "ref_logp", "reward"):
        assert torch.equal(getattr(one, name), getattr(other, name))


def test_values_are_stored_where_there_are_any(groups, tmp_path):
    """In files and in the buffer; a response without values, of another objective, stays one."""
    some = []
    for b, g in enumerate(groups):
        own = []
        for k, t in enumerate(g.trajectories):
            own.append(replace(t, value=None) if (b + k) % 3 == 0 else t)
        some.append(replace(g, trajectories=tuple(own)))
    save_groups(some, tmp_path / "delayed.jsonl")
    buffer, loaded = ReplayBuffer(), ReplayBuffer()
    buffer.add(some, now=0)
    buffer.save(tmp_path)()
    loaded.load(tmp_path)
    kept = [t for g in loaded.groups() for t in g.trajectories]
    for found in (
        [t for g in load_groups(tmp_path / "delayed.jsonl") for t in g.trajectories],
        kept,
    ):
        expected = [t for g in some for t in g.trajectories]
        assert [t.tokens.tolist() for t in found] == [t.tokens.tolist() for t in expected]
        for t, u in zip(found, expected, strict=True):
            np.testing.assert_array_equal(t.value, u.value)

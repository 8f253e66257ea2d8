"""Evaluations: perplexity in both definitions, and what a task measures beside its reward."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import ClassVar

import build
import numpy as np
import pytest
import torch
from build import pack, trajectory
from exact import toy_config
from toy import Ones
from transformers import AutoModelForCausalLM

from tba.engines.transformers import Transformers
from tba.objectives.raft import Raft
from tba.offline.eval import evaluate_run
from tba.open import run
from tba.prompt import Answer, Prompt
from tba.runs.console import Console
from tba.runs.summary import by_source
from tba.search.evaluate import SEED, evaluate_held_out, evaluate_piece, join, pieces_of, stderr
from tba.search.searcher import Searcher
from tba.setup.setup import check
from tba.streams import Use, seed_of
from tba.tasks.mixture import TaskMixture
from tba.types import Completion, Sampling, collate
from tba.weights import Weights

SETTINGS = (
    "task=toy.Ones", "sampling.temperature=0.7", "sampling.max_tokens=5", "eval.temperature=0.7",
    "eval.prompts=5", "eval.prompts_per_task=2", "eval.samples=3", "eval.k=[1]",
)  # fmt: skip


@dataclass(frozen=True)
class Perplexing(Ones):
    """The same, with perplexities of the answers."""

    reports_perplexity: ClassVar[bool] = True


@pytest.fixture
def searcher(toy_model: Path, tmp_path: Path) -> Searcher:
    """Its engine has other weights than its reference."""
    config = toy_config(toy_model, tmp_path, *SETTINGS, "task=test_evaluate.Perplexing")
    built = check(config).search_setup().build("cpu", False)
    weights = pack(built.reference.policy.model, 3, bf16=False)
    changed = {name: 1.2 * array for name, array in weights.arrays.items()}
    built.engine.load_weights(Weights(3, changed))
    return built


def answered(searcher: Searcher, mode: str) -> Iterator[tuple[np.ndarray, Completion]]:
    """Each answer of an evaluation, after the tokens of its prompt."""
    setup, settings = searcher.setup, searcher.setup.config.eval
    several = Sampling(settings.samples, settings.temperature, setup.sampling.max_tokens)
    sampling = several if mode == "sampled" else Sampling(1, 0.0, setup.sampling.max_tokens)
    for number in range(len(pieces_of(setup))):
        first = number * settings.prompts_per_task
        prompts = setup.held_out[first : first + settings.prompts_per_task]
        tokens = [searcher.text.encode(p) for p in prompts]
        piece = seed_of(SEED, Use.EVALUATION, number)
        groups = searcher.engine.generate(tokens, sampling, seed_of(piece, Use.GENERATION, 0))
        for prompt, group in zip(tokens, groups, strict=True):
            for completion in group:
                yield prompt, completion


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_perplexities_equal_a_direct_computation(searcher, toy_model, mode):
    """By the initial model at temperature 1, although answers were sampled at another one."""
    model = AutoModelForCausalLM.from_pretrained(toy_model, dtype=torch.float64)
    nats, lengths, with_prompt = [], [], []
    for prompt, c in answered(searcher, mode):
        ids = torch.tensor([[*prompt, *c.tokens]]).long()
        with torch.no_grad():
            every = model(ids).logits[0].log_softmax(-1)
        of_token = every[:-1].gather(1, ids[0, 1:, None])[len(prompt) - 1 :]
        nats.append(-of_token.sum().item())
        lengths.append(len(c.tokens))
        with_prompt.append(math.exp(nats[-1] / (ids.shape[1] - 1)))
    assert len(nats) == (15 if mode == "sampled" else 5)
    if mode == "sampled":
        assert len(set(lengths)) > 1
    scores = evaluate_held_out(searcher).scores
    whole = math.exp(sum(nats) / sum(lengths))
    assert scores[f"{mode}_perplexity"] == pytest.approx(whole, abs=1e-4)
    published = scores[f"{mode}_perplexity_with_prompt"]
    assert published == pytest.approx(fmean(with_prompt), abs=1e-4)
    assert abs(published - whole) > 0.1
    assert f"{mode}_nats" not in scores


def test_perplexities_are_left_out_if_the_reference_changed_or_nobody_asked(searcher, monkeypatch):
    first, *others = (evaluate_piece(searcher, i) for i in range(len(pieces_of(searcher.setup))))
    whole = join(3, [first, *others]).scores
    changed = join(3, [replace(first, reference=7), *others]).scores
    gone = {name for name in whole if "perplexity" in name or name == "sampled_log_ratio"}
    assert len(gone) == 7  # two of each mode, and two standard errors
    assert whole.keys() - changed.keys() == gone
    monkeypatch.setattr(Perplexing, "reports_perplexity", False)
    scores = evaluate_held_out(searcher).scores
    assert whole.keys() - scores.keys() == gone - {"sampled_log_ratio"}


@dataclass(frozen=True)
class Longer:
    """Whether an answer is longer than two characters; one of exactly four has no score."""

    pass_reward: float | None = None

    def score(self, prompt: Prompt, answers: list[Answer]) -> list[float | None]:
        return [None if len(a.text) == 4 else float(len(a.text) > 2) for a in answers]


@dataclass(frozen=True)
class Compared(Ones):
    """The reward is the place of an answer among those of its group, of which there must be two."""

    pass_reward: float | None = None

    def score(self, prompt: Prompt, answers: list[Answer]) -> list[float | None]:
        texts = sorted(a.text for a in answers)
        return [None if len(texts) < 2 else float(texts.index(a.text)) for a in answers]

    def measures(self) -> dict[str, Ones]:
        return {"compared": self}


def test_greedy_answers_that_have_nothing_to_be_compared_with_have_no_score(tiny_model, tmp_path):
    config = toy_config(tiny_model, tmp_path, *SETTINGS, "task=test_evaluate.Compared")
    evaluation = evaluate_held_out(check(config).search_setup().build("cpu", False))
    scores = evaluation.scores
    assert {"greedy_reward", "greedy_compared"}.isdisjoint(scores)
    assert scores["greedy_rejected"] == scores["greedy_compared_rejected"] == 1.0
    assert scores["sampled_compared"] == scores["sampled_reward"] > 0
    lines: list[str] = []
    Console(9, lines.append).evaluation(evaluation)
    assert "reward sampled" in lines[0] and "greedy" not in lines[0]


@dataclass(frozen=True)
class Constant(Ones):
    """Every answer has the same reward."""

    reward: float = 1.0

    def score(self, prompt: Prompt, answers: list[Answer]) -> list[float | None]:
        return [self.reward for _ in answers]


@pytest.mark.parametrize(
    ("reward", "least", "right"),
    [
        (0.7 + 0.2 + 0.1, 1.0, True),
        (0.3 - 0.1 - 0.2, 0.0, True),
        (-0.1 - 0.2, -0.3, True),
        (1e6 * (0.7 + 0.2 + 0.1), 1e6, True),
        (1 - 1e-6, 1.0, False),
        (-1e-6, 0.0, False),
    ],
)
def test_rounding_does_not_decide_what_passes(reward, least, right, toy_model, tmp_path):
    own = (f"task.reward={reward!r}", f"task.pass_reward={least!r}", "task=test_evaluate.Constant")
    setup = check(toy_config(toy_model, tmp_path, *SETTINGS, *own, "selection=difficulty"))
    scores = evaluate_held_out(setup.search_setup().build("cpu", False)).scores
    assert [scores[name] for name in ("greedy_pass@1", "avg@3", "pass@1")] == [right] * 3
    found = build.group(setup.prompts[0].id, *[trajectory(1, reward=reward)] * 2)
    selection = setup.selection.build(setup.prompts, 0, least)
    selection.learn(found)
    assert selection.state()["posterior"] == {found.prompt.id: [1.0 + 2 * right, 3.0 - 2 * right]}
    rewards = torch.tensor([[reward] * 2], dtype=torch.float64)
    batch = replace(collate([found]), reward=rewards)
    assert Raft(least)(batch.ref_logp, batch)[1]["raft/accepted"] == right
    mixed = TaskMixture({"a": Ones()}, {"a": 1.0})
    named = replace(found, prompt=mixed.prompts()[0])
    if least == 1:
        assert by_source(mixed, [named])["sources/a/pass@1"] == right
    logged = replace(found, prompt=replace(named.prompt, id=f"rollouts-{named.prompt.id}"))
    assert by_source(mixed, [logged]) == {}
    with pytest.raises(ValueError, match=r"rollouts-a/.* no source can score again"):
        mixed.score(logged.prompt, [])


class BelowZero(Ones):
    """The reward is -2 for an answer that begins with an even number, and None for others."""

    def score(self, prompt: Prompt, answers: list[Answer]) -> list[float | None]:
        return [-2.0 if a.text[:1] in "02468" and a.text else None for a in answers]


def test_a_rejected_answer_is_not_better_than_a_negative_reward(tiny_model, tmp_path):
    config = toy_config(tiny_model, tmp_path, *SETTINGS, "task=test_evaluate.BelowZero")
    scores = evaluate_held_out(check(config).search_setup().build("cpu", False)).scores
    assert 0 < scores["sampled_rejected"] < 1
    assert scores["sampled_reward"] == -2.0


class MeasuredOnes(Ones):
    def measures(self) -> dict[str, Longer]:
        return {"longer": Longer()}


def test_a_measure_is_a_metric_with_an_error_and_never_a_reward(tiny_model, tmp_path):
    answers = ["12", "123", "1234", "2"]
    scripted = ("engine=scripted", f"engine.answers={answers}", "eval.samples=40", "eval.prompts=3")
    task = "task=test_evaluate.MeasuredOnes"
    config = toy_config(tiny_model, tmp_path, *SETTINGS, *scripted, task)
    searcher = check(config).search_setup().build("cpu", False)
    lengths = [len(searcher.text.decode(c.tokens)) for _, c in answered(searcher, "sampled")]
    by_prompt = np.reshape(lengths, (3, 40))
    scores = evaluate_held_out(searcher).scores
    assert (scores["greedy_longer"], scores["greedy_longer_rejected"]) == (0.0, 0.0)
    assert scores["sampled_longer"] == pytest.approx((by_prompt == 3).mean())
    shares = (by_prompt == 3).mean(1).tolist()
    assert scores["sampled_longer_stderr"] == pytest.approx(stderr(shares))
    assert scores["sampled_longer_rejected"] == pytest.approx((by_prompt == 4).mean())
    assert scores["sampled_rejected"] == 0.0
    (group, *_) = searcher.search(searcher.setup.held_out[:1], seed=0).groups
    rewards = {searcher.text.decode(t.tokens): t.reward for t in group.trajectories}
    assert rewards == {"12": 1.0, "123": 1.0, "1234": 1.0, "2": 0.0}


def test_evaluated_weights_are_rounded_as_the_engine_computes(toy_model, tmp_path, monkeypatch):
    """And not as the trainer does, whose weights the searchers never had."""
    given = ("run.steps=1", "eval.prompts=1", "policy.autocast=bf16", "engine.dtype=fp32")
    run(toy_config(toy_model, tmp_path / "run", *given))
    loaded: list[set[np.dtype]] = []

    def record(self: Transformers, weights: Weights) -> None:
        loaded.append({array.dtype for array in weights.arrays.values()})

    monkeypatch.setattr(Transformers, "load_weights", record)
    evaluate_run(tmp_path / "run", [], reference=False)
    assert loaded == [{np.dtype(np.float32)}]

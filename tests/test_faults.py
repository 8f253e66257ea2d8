"""Faults are as the config says, the same for the same search task, and never in evaluations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_loop import config, newest_files, resumes_exactly
from toy import Ones

import tba
from tba.config.schema import load
from tba.config.tables import FaultsTable, PolicyTable
from tba.models.pretrained import load_text
from tba.replay.buffer import ReplayBuffer
from tba.runs import checkpoint
from tba.runs.log import METRICS, read
from tba.runs.summary import Summary
from tba.search.faults import falsify
from tba.search.result import Rejected
from tba.search.rewards import Guard
from tba.types import Answer, Prompt

REWARDS = [k / 100 for k in range(100)]


@dataclass(frozen=True)
class Numbers:
    """Answers are numbers, which are their rewards; the group "raises" does so once."""

    asynchronous: bool = False
    pass_reward: float | None = None

    def prompts(self) -> Sequence[Prompt]:
        return []

    def held_out(self) -> Sequence[Prompt]:
        return []

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> Any:
        if prompt.id == "raises" and len(answers) > 1:
            raise RuntimeError("one at a time")
        scores = [None if a.text == "none" else float(a.text) for a in answers]
        return asyncio.sleep(0, scores) if self.asynchronous else scores


def verdicts(
    faults: FaultsTable,
    seed: int = 1,
    rewards: Sequence[float | str] = REWARDS,
    task: Numbers = Numbers(),
    prompts: Sequence[str] = ("a", "b", "c", "d"),
) -> tuple[list[Any], int]:
    """Verdicts of one search on four groups, and how many are wrong."""
    size = len(rewards) // 4
    texts = [str(r) for r in rewards]
    answers = [[Answer(t, True) for t in texts[i * size : (i + 1) * size]] for i in range(4)]
    scored = Guard({"": task}, 10.0)([Prompt(i, i) for i in prompts], answers)
    groups, count = falsify(scored, faults, seed)
    return [v.reason if isinstance(v, Rejected) else v for g in groups for v in g], count


def faulty(task: int = 1, **settings: Any) -> list[float]:
    """Rewards of the search task with this seed."""
    return verdicts(FaultsTable(**settings), task)[0]


def test_flip_turns_the_scale_around() -> None:
    assert faulty(kind="flip", share=1) == pytest.approx([1 - r for r in REWARDS])
    assert faulty(kind="flip", share=1, low=-1, high=3) == pytest.approx([2 - r for r in REWARDS])


def test_plant_puts_in_the_best_reward() -> None:
    assert faulty(kind="plant", share=1, high=2) == [2.0] * 100


def test_noise_has_the_stated_spread() -> None:
    every = [faulty(seed, kind="noise", share=1, scale=0.3) for seed in range(50)]
    noise = np.subtract(every, REWARDS)
    assert noise.mean() == pytest.approx(0, abs=5 * 0.3 / np.sqrt(5000))
    assert noise.std() == pytest.approx(0.3, rel=5 / np.sqrt(2 * 5000))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_so_many_are_wrong_as_stated_and_the_others_untouched(share: float) -> None:
    faults = FaultsTable(kind="plant", share=share, high=7)
    searches = [verdicts(faults, seed) for seed in range(50)]
    wrong = sum(v == 7 for rewards, _ in searches for v in rewards)
    assert wrong == sum(count for _, count in searches)
    assert wrong / 5000 == pytest.approx(share, abs=5 * np.sqrt(share * (1 - share) / 5000))
    for rewards, _ in searches:
        assert all(v in (r, 7) for v, r in zip(rewards, REWARDS, strict=True))


def test_the_same_task_has_the_same_faults_and_a_larger_share_has_them_too() -> None:
    def wrong(task: int, share: float, seed: int = 0) -> set[int]:
        rewards = faulty(task, kind="plant", share=share, high=7, seed=seed)
        return {k for k, v in enumerate(rewards) if v == 7}

    assert wrong(3, 0.3) == wrong(3, 0.3) not in (wrong(4, 0.3), wrong(3, 0.3, seed=1))
    assert wrong(3, 0.1) < wrong(3, 0.3) < wrong(3, 0.9)


def test_a_sample_without_a_reward_gets_none_and_does_not_move_the_others() -> None:
    faults = FaultsTable(kind="noise", share=0.5)
    whole, _ = verdicts(faults)
    holed, count = verdicts(faults, rewards=["none"] * 20 + ["nan"] * 20 + REWARDS[40:])
    assert holed == ["none"] * 20 + ["not_finite"] * 20 + whole[40:]
    assert count == sum(a != b for a, b in zip(whole[40:], REWARDS[40:], strict=True))


def test_faults_do_not_depend_on_how_the_task_is_called() -> None:
    """Of an async task, and of a group that raised and is scored answer by answer."""
    faults = FaultsTable(kind="noise", share=0.5)
    whole = verdicts(faults)
    assert verdicts(faults, task=Numbers(asynchronous=True)) == whole
    assert verdicts(faults, prompts=("a", "raises", "c", "raises")) == whole


def test_samples_with_the_same_text_have_faults_of_their_own() -> None:
    rewards, count = verdicts(FaultsTable(kind="flip", share=0.5), rewards=[1.0] * 100)
    assert rewards.count(0.0) == count
    assert 25 < count < 75


def test_what_cannot_be_meant_is_told() -> None:
    with pytest.raises(ValueError, match=r"set faults.kind=flip, noise or plant"):
        load(None, ["faults.share=0.2"])
    with pytest.raises(ValueError, match=r"faults.low = 1.0 is not below faults.high = 1.0"):
        load(None, ["faults.kind=flip", "faults.low=1"])
    with pytest.raises(ValueError, match=r"faults.share"):
        load(None, ["faults.kind=flip", "faults.share=1.5"])
    assert (
        load(None, ["faults.kind=flip"]).faults.share == 0
    )  # the first point of a study over shares


# In a run


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Summary]]:
    """Twenty steps with no faults, with none of a kind, with some and with nothing else."""
    faults = {
        "sound": [],
        "none": ["faults.kind=flip"],
        "some": ["faults.kind=flip", "faults.share=0.3"],
        "all": ["faults.kind=flip", "faults.share=1"],
    }
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: (
            folder / name,
            tba.train(config(tiny_model, folder / name, "run.steps=20", *f)).summary,
        )
        for name, f in faults.items()
    }


@pytest.mark.parametrize(
    ("name", "share"), [("sound", 0.0), ("none", 0.0), ("some", 0.3), ("all", 1.0)]
)
def test_a_run_has_as_many_faults_as_stated(
    runs: dict[str, tuple[Path, Summary]], name: str, share: float
) -> None:
    folder, summary = runs[name]
    counts = [r["reward/faulty"] for r in read(folder / METRICS) if "reward/faulty" in r]
    n = summary.samples_generated
    assert counts == sorted(counts)
    assert (counts[-1] if share else 0) / n == pytest.approx(
        share, abs=5 * np.sqrt(share * (1 - share) / n)
    )
    assert bool(counts) == (share > 0)
    wrong = [reward != true for reward, true in stored(folder)]
    assert np.mean(wrong) == pytest.approx(share, abs=5 * np.sqrt(share * (1 - share) / len(wrong)))


def test_an_evaluation_has_no_faults(runs: dict[str, tuple[Path, Summary]]) -> None:
    """The first equals that of the run without faults; a greedy reward is whether it is correct."""
    first = [
        {k: v for k, v in summary.first.items() if k != "seconds"} for _, summary in runs.values()
    ]
    assert all(scores == first[0] for scores in first)
    rows = [
        r
        for folder, _ in runs.values()
        for r in read(folder / METRICS)
        if "eval/greedy_reward" in r
    ]
    assert rows and all(r["eval/greedy_reward"] == r["eval/greedy_pass@1"] for r in rows)
    weights = {
        name: newest_files(folder)["model/model.safetensors"] for name, (folder, _) in runs.items()
    }
    assert weights["sound"] == weights["none"] != weights["some"]


def stored(folder: Path) -> list[tuple[float, float]]:
    """The reward of each response in the buffer, and the one that the task gives it."""
    buffer, text = (
        ReplayBuffer(),
        load_text(PolicyTable(model=str(checkpoint.newest(folder / "checkpoints") / "model"))),
    )
    buffer.load(checkpoint.newest(folder / "checkpoints"))
    held = [(g.prompt, t) for g in buffer.groups() for t in g.trajectories]
    rewards = []
    for prompt, t in held:
        answer = text.answer(t.tokens, t.finished, stop=())
        (true,) = Ones().score(prompt, [answer])
        rewards.append((t.reward, float(true or 0)))
    return rewards


def test_a_resumed_run_has_the_same_faults(tiny_model: Path, tmp_path: Path) -> None:
    resumes_exactly(
        tiny_model, tmp_path, "faults.kind=noise", "faults.share=0.5", "faults.scale=0.2"
    )

"""The study's wrong rewards: as many as stated, the same for an answer, none when held out."""

from pathlib import Path

import numpy as np
import pytest
from conftest import module_at

from tba.prompt import Answer

ROOT = Path(__file__).parents[2]
WrongSums = module_at(ROOT / "studies" / "off_policy" / "wrong_rewards.py").WrongSums
RIGHT = [k % 2 == 0 for k in range(16)]


def rewards(task, prompt) -> list[float]:
    right = prompt.columns["answer"]
    answers = [Answer(right if ok else "0", True, tokens=(k,)) for k, ok in enumerate(RIGHT)]
    return task.score(prompt, answers)


@pytest.mark.parametrize("kind", ["flip", "plant"])
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_so_many_are_wrong_as_stated(kind, share):
    task = WrongSums(train_size=200, kind=kind, share=share)
    given = np.array([rewards(task, prompt) for prompt in task.prompts()])
    wrong = given != np.array(RIGHT, float)
    if kind == "plant":
        assert not wrong[:, ::2].any()
        wrong = wrong[:, 1::2]
    assert wrong.mean() == pytest.approx(share, abs=5 * np.sqrt(share * (1 - share) / wrong.size))


def test_an_answer_keeps_its_reward_and_a_larger_share_has_the_same_wrong_ones_and_more():
    def wrong(share: float, seed: int = 0) -> set[tuple[int, int]]:
        task = WrongSums(train_size=50, kind="flip", share=share, fault_seed=seed)
        table = [rewards(task, prompt) for prompt in task.prompts()]
        return {(i, k) for i, row in enumerate(table) for k, r in enumerate(row) if r != RIGHT[k]}

    assert wrong(0.3) == wrong(0.3) != wrong(0.3, seed=1)
    assert wrong(0.1) < wrong(0.3) < wrong(0.9)


def test_held_out_answers_have_their_true_rewards():
    task = WrongSums(held_out_size=20, kind="flip", share=1.0)
    assert all(rewards(task, prompt) == list(map(float, RIGHT)) for prompt in task.held_out())

"""Addition: held-out sums are never trained on, and only the right digits are correct."""

import re

import pytest

from tba.prompt import Answer, Prompt
from tba.tasks.arithmetic import Arithmetic, is_held_out


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_held_out_is_disjoint_from_train_for_any_seeds(digits):
    train, kept_back = {1: (3, 2), 2: (300, 150), 3: (300, 150)}[digits]
    sizes = {"train_size": train, "held_out_size": kept_back}
    tasks = [Arithmetic(digits, seed=seed, **sizes) for seed in range(5)]
    trained = {p.text for task in tasks for p in task.prompts()}
    kept = {p.text for task in tasks for p in task.held_out()}
    assert trained and kept and not trained & kept


def test_a_tenth_of_all_pairs_is_held_out():
    assert sum(is_held_out(a, b) for a in range(100) for b in range(100)) == 1002


def test_a_seed_gives_the_same_prompts_and_another_seed_others():
    sizes = {"train_size": 50, "held_out_size": 20}
    first, same, other = (Arithmetic(seed=seed, **sizes) for seed in (1, 1, 2))
    assert first.prompts() == same.prompts() != other.prompts()
    assert first.held_out() == same.held_out() != other.held_out()


def test_prompts_are_sums_of_so_many_digits():
    for prompt in Arithmetic(digits=2, train_size=100, held_out_size=20).prompts():
        a, b = (int(n) for n in prompt.text.removesuffix("=").split("+"))
        assert 10 <= a < 100 and 10 <= b < 100 and prompt.columns["answer"] == str(a + b)


def test_only_the_right_digits_are_right():
    prompt = Prompt("0", "5+37=", {"answer": "42"})
    wrong = ("42=", "042", "42.0", "+42", " 42", "42 ", "４２", "24", "4", "")
    finished = [Answer(text, True) for text in ("42", *wrong)]
    assert Arithmetic().score(prompt, finished) == [1.0, *[0.0] * len(wrong)]
    assert Arithmetic().score(prompt, [Answer("42", False)]) == [0.0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"digits": 0}, "task.digits = 0: give 1 to 9 (the bundled model has learned 3)"),
        ({"digits": 10}, "task.digits = 10"),
        ({"digits": 2}, "lower task.train_size to 6480 and task.held_out_size to 405, or less"),
        (
            {"digits": 2, "train_size": 100},
            "there are 8100 sums of task.digits = 2; lower task.train_size to 6480",
        ),
    ],
)
def test_what_cannot_be_drawn_is_told(options, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        Arithmetic(**options)

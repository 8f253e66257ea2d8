"""Anybody's data set and reward functions, called as TRL calls them."""

import asyncio
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tba.prompt import Answer
from tba.scoring.scoring import Scoring
from tba.scoring.verdicts import Rejection
from tba.tasks.custom import PASSED, Custom

REWARDS = '''
"""Reward functions in TRL's conventions; each leaves what it was given in `seen`."""
import asyncio

seen = []

def length(prompts, completions, **columns):
    seen.append((prompts, completions, columns))
    return [float(len(c)) for c in completions]

def right(completions, answer):
    seen.append((None, completions, {"answer": answer}))
    return [float(c == a) for c, a in zip(completions, answer)]

def short_only(prompts, completions, **columns):
    return [None if len(c) > 2 else 1.0 for c in completions]

def appends(prompts, completions, parts, **columns):
    for prompt, completion, part in zip(prompts, completions, parts):
        prompt += completion
        part.append(0)
    completions.clear()
    return [float(len(prompt) + len(part)) for prompt, part in zip(prompts, parts)]

def never(prompts, completions, **columns):
    return [None] * len(completions)

def politeness(prompts, completions, **columns):
    seen.append((prompts, completions, columns))
    return [float("please" in c[0]["content"]) for c in completions]

async def slow_length(prompts, completions, **columns):
    await asyncio.sleep(0.01)
    return length(prompts, completions, **columns)

class SlowRight:
    __name__ = "slow_right"

    async def __call__(self, completions, answer):
        return right(completions, answer)

slow_right = SlowRight()

async def slow_one_short(prompts, completions, **columns):
    return one_short(prompts, completions)

def one_short(prompts, completions, **columns):
    return [0.0] * (len(completions) - 1)

number = 3
'''

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "level": i % 3} for i in range(7)]
COMPLETIONS = ("2", "14", "word")


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Custom]:
    """A task over the rows above, two of which are held out, with functions of the module above."""
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)  # the documentation's

    def make(*functions: str, rows: list[dict[str, Any]] = ROWS, **options: Any) -> Custom:
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        reward = [f"my_rewards:{name}" for name in functions]
        given = {"data": str(tmp_path / "data.jsonl"), "reward": reward, "held_out_size": 2}
        return Custom(**given | options)

    return make


@pytest.fixture
def seen(custom: Callable[..., Custom]) -> list[Any]:
    """What the reward functions were called with."""
    import my_rewards

    my_rewards.seen.clear()
    return my_rewards.seen


def scores(task: Custom) -> Any:
    """Score the completions above, as answers to the second prompt."""
    answers = [Answer(text, finished=True) for text in COMPLETIONS]
    return task.score(task.prompts()[1], answers)


def test_a_function_gets_prompts_completions_and_every_column(custom, seen):
    assert scores(custom("length")) == [1.0, 2.0, 4.0]
    ((prompts, completions, columns),) = seen
    assert (prompts, completions) == (["1+1=", "1+1=", "1+1="], list(COMPLETIONS))
    assert (columns.pop("answer"), columns.pop("level")) == (["2", "2", "2"], [1, 1, 1])
    assert columns.keys() == PASSED - {"prompts", "completions"}


def test_functions_are_added_up_by_weight(custom):
    assert scores(custom("length", "right")) == [2.0, 2.0, 4.0]
    assert scores(custom("length", "right", reward_weights=[0.5, 3.0])) == [3.5, 1.0, 2.0]


def test_none_means_that_a_function_does_not_apply(custom):
    assert scores(custom("length", "short_only", reward_weights=[1.0, 10.0])) == [11.0, 12.0, 4.0]
    assert scores(custom("never", "short_only")) == [1.0, 1.0, None]
    assert scores(custom("never")) == [None, None, None]


def test_chat_prompts_have_message_lists_as_completions(custom, seen):
    chat = [{"prompt": [{"role": "user", "content": f"Say {i}"}]} for i in range(3)]
    task = custom("politeness", rows=chat)
    answers = [Answer("please", finished=False), Answer("now", finished=True)]
    assert task.score(task.prompts()[0], answers) == [1.0, 0.0]
    completions = [[{"role": "assistant", "content": text}] for text in ("please", "now")]
    assert seen[0][:2] == ([chat[0]["prompt"]] * 2, completions)


def test_a_function_may_change_what_it_gets(custom):
    """Neither another completion, nor another function, nor the next call sees it."""
    rows = [{"prompt": [{"role": "user", "content": "Say"}], "parts": [i]} for i in range(4)]
    task = custom("appends", "appends", rows=rows)
    for _ in range(2):
        assert scores(task) == [8.0, 8.0, 8.0]


def test_a_template_makes_prompts_of_any_columns(custom, seen):
    """The reward function has all columns; a chat has messages as completions."""
    rows = [{"a": i, "b": 1, "answer": str(i + 1)} for i in range(5)]
    task = custom("right", rows=rows, prompt="{a}+{b}=", shots=1)
    assert task.prompts()[0].text == "0+1= 1\n\n1+1="
    assert task.score(task.prompts()[0], [Answer("2", True), Answer("1", True)]) == [1.0, 0.0]
    chat = custom("politeness", rows=rows, prompt="{a}+{b}?", chat=True, system_prompt="Be kind.")
    system, user = chat.held_out()[0].text
    assert system == {"role": "system", "content": "Be kind."}
    assert user == {"role": "user", "content": "3+1?"}
    assert chat.score(chat.held_out()[0], [Answer("4, please", True)]) == [1.0]


def test_a_function_is_named_by_file_or_by_module(custom, tmp_path):
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "rewards.py").write_text(REWARDS)
    named = (f"{tmp_path}/my_rewards.py", "my_package.rewards", "my_rewards")
    for name in [f"{where}:length" for where in named]:
        assert scores(custom(reward=name)) == [1.0, 2.0, 4.0]


def test_functions_may_be_async_and_mixed_with_others(custom, seen):
    assert asyncio.run(scores(custom("slow_length"))) == [1.0, 2.0, 4.0]
    weights = [0.5, 3.0, 10.0]
    mixed = custom("slow_length", "right", "short_only", reward_weights=weights)
    assert asyncio.run(scores(mixed)) == [13.5, 11.0, 2.0]
    assert asyncio.run(scores(custom("length", "slow_right"))) == [2.0, 2.0, 4.0]


@pytest.mark.parametrize("name", ["one_short", "slow_one_short"])
def test_a_wrong_number_of_rewards_is_rejected_as_that(custom, name):
    task = custom(name)
    answers = [Answer(text, finished=True) for text in COMPLETIONS]
    (verdicts,) = Scoring({"": task})(task.prompts()[:1], [answers])
    detail = f"{name} returned 2 rewards for 3 completions"
    assert verdicts == [Rejection("wrong_length", detail)] * 3


def test_a_function_that_needs_another_column_is_told_before_anything_starts(custom, tmp_path):
    code = (
        "def f(prompts, completions, solution, weight=1, *, answer, **columns):\n    return [0.0]"
    )
    (tmp_path / "needs.py").write_text(code)
    told = (
        r"f needs 'solution', which is not a column of task.data; the columns are prompt, .*answer"
    )
    with pytest.raises(ValueError, match=told):
        custom(reward=f"{tmp_path}/needs.py:f").prompts()


def test_other_data_are_held_out(custom, tmp_path):
    (tmp_path / "other").mkdir()
    rows = "".join(f'{{"prompt": "{letter}"}}\n' for letter in "abc")
    (tmp_path / "other" / "test.jsonl").write_text(rows)
    task = custom("length", held_out_data=str(tmp_path / "other"))
    assert len(task.prompts()) == 7
    assert [p.text for p in task.held_out()] == ["a", "b"]


NAME_IT = "write package.module:function or file.py:function"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no function": ({"reward": "my_rewards:lenght"}, "my_rewards has no function 'lenght'"),
    "not a function": ({"reward": "my_rewards:number"}, "number is not a function but 3"),
    "no module": ({"reward": "my_rewrds:length"}, f"No module named 'my_rewrds'; {NAME_IT}"),
    "no file": ({"reward": "nowhere/a.py:length"}, "no such file: nowhere/a.py in /"),
    "no colon": ({"reward": "my_rewards.f"}, f"task.reward = 'my_rewards.f': {NAME_IT}"),
    "no reward": ({"reward": []}, "task.reward is missing"),
    "weights": ({"reward_weights": [1.0, 2.0]}, "has 2 numbers for 1 reward functions"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_told_before_any_data_is_read(custom, case):
    options, told = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(told)):
        custom("length", **{"data": "not read", **options})


DATA: dict[str, tuple[list[Any], str]] = {
    "column": ([{"question": "1"}] * 3, "has no column 'prompt'; it has question"),
    "few": ([{"prompt": "1"}] * 2, "has only 2 rows; lower task.held_out_size = "),
    "none": ([{"prompt": text} for text in ("1", None, "2", "3")],
        "prompt 'train-1': column 'prompt' is None, neither text nor a number"),
    "NaN": ([{"prompt": x} for x in (1.5, float("nan"), 2, 3)],
        "prompt 'train-1': column 'prompt' is nan, neither text nor a number"),
    "table": ([{"prompt": x} for x in ("1", "2", {"text": "3"})],
        "prompt 'held-out-1': column 'prompt' is {'text': '3'}, neither text nor a number"),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "told"), DATA.values(), ids=DATA)
def test_data_that_cannot_be_prompts_are_told(custom, rows, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        custom("length", rows=rows).prompts()

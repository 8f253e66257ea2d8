"""Rows become prompts: a template, chat messages, solved examples before the question."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from tba.config.plugins import check_options
from tba.tasks._rendering import Rendering, columns_of, fill

ROWS = [{"question": f"{i}+{i}?", "answer": str(2 * i), "level": i} for i in range(4)]
Q = "{question}"


@dataclass(frozen=True, kw_only=True)
class Sums(Rendering):
    """A task whose template and examples are those of the rows above."""

    prompt: str = "Q: {question}\nA:"


def texts(task: Rendering) -> list[Any]:
    return [p.text for p in task.rendered("train", ROWS, ROWS)]


def test_columns_stand_where_the_template_names_them():
    row = {"a": "{b} and \\boxed{}", "b": 3, "c": 0.5}
    filled = fill("{a}: {b}, {c}; \\boxed{} {{b}} { b }", row)
    assert filled == "{b} and \\boxed{}: 3, 0.5; \\boxed{} {b} { b }"
    assert columns_of("{a} {{b}} {c}{} {a}") == ["a", "c", "a"]


def test_the_name_of_a_column_may_have_any_characters_but_braces_and_quotes():
    """What is no column, such as JSON and LaTeX, stays as it is."""
    row = {"question-text": "1+1?", "Question Text": "x", "b": 2, '"a": 1': "?"}
    template = '{question-text} {Question Text} {{question-text}} {"a": 1} {"a": {b}} {x y} {1+x}'
    assert fill(template, row) == '1+1? x {question-text} {"a": 1} {"a": 2} {x y} {1+x}'
    assert columns_of(template) == ["b"]
    (prompt,) = Sums(prompt="{question-text}").rendered("train", [row], [])
    assert prompt.text == "1+1?"
    with pytest.raises(ValueError, match=r"must contain a column"):
        Sums(prompt='Write {"a": 1}')


def test_a_prompt_is_its_template():
    prompts = Sums().rendered("train", ROWS, [])
    assert [p.text for p in prompts] == [f"Q: {i}+{i}?\nA:" for i in range(4)]
    assert [p.id for p in prompts] == [f"train-{i}" for i in range(4)]
    assert prompts[2].columns == ROWS[2]
    (only, *_) = Sums().rendered("test", ROWS, [], columns=["answer"])
    assert (only.id, only.columns) == ("test-0", {"answer": "0"})


def test_examples_are_the_first_rows_which_are_left_out():
    """The third row comes after two solved ones; a space divides a question and its answer."""
    assert texts(Sums(shots=2)) == [
        f"Q: 0+0?\nA: 0\n\nQ: 1+1?\nA: 2\n\nQ: {i}+{i}?\nA:" for i in (2, 3)
    ]
    task = Sums(shots=1, prompt="{question}\n", shot_response="= {answer}", system_prompt="Add.")
    assert texts(task)[0] == "Add.\n\n0+0?\n= 0\n\n1+1?\n"
    prompts = task.rendered("train", ROWS, ROWS)
    assert [p.id for p in prompts] == ["train-1", "train-2", "train-3"]


def test_a_chat_has_the_examples_as_turns():
    asked = {"role": "user", "content": "3+3?"}
    system = {"role": "system", "content": "Add."}
    turn = [{"role": "user", "content": "0+0?"}, {"role": "assistant", "content": "0"}]
    assert texts(Sums(chat=True, prompt=Q))[-1] == [asked]
    assert texts(Sums(chat=True, prompt=Q, system_prompt="Add."))[-1] == [system, asked]
    everything = Sums(chat=True, prompt=Q, system_prompt="Add.", shots=1)
    assert texts(everything)[-1] == [system, *turn, asked]


def test_a_column_of_messages_is_the_prompt():
    messages = [{"role": "user", "content": "{1}+1?"}]
    rows = [{"prompt": messages}, {"prompt": "2+2?"}]
    first, second = Rendering(system_prompt="Add.").rendered("train", rows, [])
    assert first.text == [{"role": "system", "content": "Add."}, *messages]
    assert second.text == "Add.\n\n2+2?"


def test_a_row_keeps_its_own_system_message():
    """Beside rows without one, which get that of the task."""
    asked = {"role": "user", "content": "1+1?"}
    for role in ("system", "developer"):
        own = [{"role": role, "content": "Guess."}, asked]
        prompts = Rendering(system_prompt="Add.").rendered("train", [{"prompt": own}], [])
        assert prompts[0].text == own


def test_messages_may_be_json():
    """As CSV has them, and data sets whose arguments of calls have many types."""
    messages = [{"role": "user", "content": "1+1?"}]
    rows = [{"prompt": json.dumps(messages)}, {"prompt": '[{"a": 1}]'}, {"prompt": "[1]"}]
    first, *others = Rendering(system_prompt="Add.").rendered("train", rows, [])
    assert first.text == [{"role": "system", "content": "Add."}, *messages]
    assert [p.text for p in others] == ['Add.\n\n[{"a": 1}]', "Add.\n\n[1]"]
    named = [{"index": 0, "name": "Ann", **messages[0]}]
    shared = [{"from": "human", "value": "1+1?"}]
    read = Rendering().rendered("train", [{"prompt": json.dumps(x)} for x in (named, shared)], [])
    assert [p.text for p in read] == [named, shared]
    with pytest.raises(ValueError, match=r"prompt 'train-0': chat messages in a text must be"):
        Rendering().rendered("train", [{"prompt": str(messages)}], [])


def test_examples_are_not_for_messages():
    rows = [{"prompt": "1+1?", "answer": 2}, {"prompt": [{"role": "user", "content": "2+2?"}]}]
    with pytest.raises(ValueError, match=r"'train-1': task\.shots is for prompts that are text"):
        Rendering(shots=1).rendered("train", rows, rows)


def test_mistakes_are_told():
    with pytest.raises(ValueError, match=r"task\.prompt = 'Solve this:' must contain a column"):
        Sums(prompt="Solve this:")
    with pytest.raises(ValueError, match=r"task\.shots = -1: Input should be greater"):
        check_options(Sums, "task", "sums", {"shots": -1})
    told = r"prompt 'train-0': column 'qestion' is None.* has question, answer, level\. "
    with pytest.raises(ValueError, match=told + r"Remove it, or write \{\{qestion\}\}"):
        texts(Sums(prompt="{qestion}"))
    with pytest.raises(ValueError, match=r"column 'prompt' is -inf, neither text nor a number"):
        Rendering().rendered("train", [{"prompt": float("-inf")}], [])

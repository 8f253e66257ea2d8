"""The grader of the paper's GSM8K experiment compares last numbers."""

import json
import time
from pathlib import Path

import pytest

from tba.config.plugins import resolve
from tba.prompt import Answer, Prompt
from tba.tasks._numbers import whole_number
from tba.tasks.gsm8k import Gsm8k

GSM8K = Path(__file__).parents[3] / "shared/data/gsm8k"
QUESTION = Prompt("0", "How many?", {"answer": "3 + 4 = <<3+4=7>>7 a day.\n#### 7"})


@pytest.mark.skipif(
    not (GSM8K / "test.jsonl").is_file(),
    reason="needs GSM8K's test.jsonl, which is not in ../shared/data/gsm8k",
)
def test_every_gold_answer_is_right():
    task = Gsm8k(data=str(GSM8K))
    prompts = task.held_out()
    assert len(prompts) == 1319
    for prompt in prompts:
        solution = prompt.columns["answer"]
        texts = (solution, solution.rpartition("####")[2], f"{solution} and 0.5")
        assert task.score(prompt, [Answer(t, finished=True) for t in texts]) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("gold", ["none", "", "3.0.0", "3 or 7", "10 - 4", "1 000"])
def test_what_is_not_one_number_is_no_right_answer(tmp_path, gold):
    rows = [{"question": f"{a}?", "answer": f"So.\n#### {a}"} for a in ("$5", "-3 1/2 m", gold)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"row 2 has the answer .*; end it with #### and one num"):
        Gsm8k(data=str(tmp_path)).prompts()


def test_prompts(tmp_path):
    rows = [{"question": f"What is {i}, and {{x}}?", "answer": f"#### {i}"} for i in range(5)]
    for split, found in (("train", rows[:3]), ("test", rows[3:])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    text = Gsm8k(data=str(tmp_path), train_size=2)
    chat = Gsm8k(data=str(tmp_path), chat=True, prompt="{question}")
    assert [p.text for p in text.prompts()] == [
        f"[MATH_TASK] Problem:\nWhat is {i}, and {{x}}?\n\nSolution:" for i in range(2)
    ]
    ids = [p.id for p in (*text.prompts(), *text.held_out())]
    assert ids == ["train-0", "train-1", "test-0", "test-1"]
    assert chat.held_out()[1].text == [{"role": "user", "content": "What is 4, and {x}?"}]
    with pytest.raises(ValueError, match=r"task\.prompt = 'Solve this:' must contain a column"):
        Gsm8k(prompt="Solve this:")


def test_few_shot_prompts_show_solutions_without_annotations(tmp_path):
    """Examples are the first training questions; the model sees how an answer ends."""
    rows = [{"question": f"{i}?", "answer": f"{i} <<{i}=0>>is it.\n#### {i}"} for i in range(4)]
    for split, own in (("train", rows[:3]), ("test", rows[3:])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    task = Gsm8k(data=str(tmp_path), shots=2, prompt="Q: {question}\nA:")
    shown = "Q: 0?\nA: 0 is it.\n#### 0\n\nQ: 1?\nA: 1 is it.\n#### 1\n\n"
    assert [p.text for p in task.prompts()] == [f"{shown}Q: 2?\nA:"]
    assert [p.text for p in task.held_out()] == [f"{shown}Q: 3?\nA:"]
    assert task.score(task.held_out()[0], [Answer("3", True), Answer("2", True)]) == [1.0, 0.0]


def test_an_answer_in_the_format_has_its_weight():
    """The format is that of the data set: a last line `#### number`, and no cut-off."""
    texts = ("So 7.\n#### 7", "#### $1,080 \n", "7", "#### 7\nor 8", "####", "#### seven")
    task = Gsm8k(format_weight=0.25)
    scores = task.score(QUESTION, [Answer(text, finished=True) for text in texts])
    assert scores == [1.25, 0.25, 1.0, 0.0, 0.0, 0.0]
    assert task.score(QUESTION, [Answer("#### 7", finished=False)]) == [1.0]
    with pytest.raises(ValueError, match=r"task\.format_weight = 1\.5: Input should be less than"):
        resolve("tasks", "task", "gsm8k", {"format_weight": 1.5})


def test_the_time_of_grading_grows_like_the_text():
    """A policy that repeats a digit would cost its groups by the deadline of the reward."""
    digits = "1" * 50_000
    began = time.process_time()
    answers = [Answer(f"#### {digits}{end}", finished=True) for end in ("", " or so")]
    assert Gsm8k(format_weight=0.25).score(QUESTION, answers) == [0.25, 0.0]
    assert whole_number(f"{digits} or so") is None
    assert time.process_time() - began < 10

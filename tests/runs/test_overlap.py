"""Training prompts that are also held out are not trained on."""

import json
from pathlib import Path

import pytest
from build import config

from tba.setup.setup import check


@pytest.fixture
def one_file(tmp_path: Path) -> Path:
    """A folder for GSM8K whose two splits have the same questions, and two more to train on."""
    rows = [{"question": f"{i}+{i}=", "answer": f"#### {2 * i}"} for i in range(12)]
    for split, own in (("train", rows), ("test", rows[:10])):
        lines = [json.dumps(row) + "\n" for row in own]
        (tmp_path / f"{split}.jsonl").write_text("".join(lines))
    return tmp_path


def settings(folder: Path, *more: str) -> list[str]:
    return ["task=gsm8k", f"task.data={folder}", "task.prompt={question}", *more]


def test_prompts_that_are_also_held_out_are_not_trained_on(tiny_model, tmp_path, one_file, caplog):
    """All held-out prompts count, not only the five that this run evaluates on."""
    parts = check(config(tiny_model, tmp_path, *settings(one_file, "eval.prompts=5")))
    assert [prompt.id for prompt in parts.prompts] == ["train-10", "train-11"]
    assert "10 of 12 training prompts are also held out, and not trained on" in caplog.text
    (one_file / "train.jsonl").write_text((one_file / "test.jsonl").read_text())
    with pytest.raises(ValueError, match="10 of 10 training prompts are also held out; name"):
        check(config(tiny_model, tmp_path, *settings(one_file)))


def test_rendered_prompts_are_compared(tiny_model, tmp_path, one_file):
    """Different questions, of which the tokenizer makes the same tokens."""
    (one_file / "test.jsonl").write_text('{"question": "x+3=", "answer": "#### 1"}\n')
    with (one_file / "train.jsonl").open("a") as file:
        file.write('{"question": "y+3=", "answer": "#### 1"}\n')
    assert len(check(config(tiny_model, tmp_path, *settings(one_file))).prompts) == 12


def test_without_evaluation_nothing_is_held_out(tiny_model, tmp_path, one_file):
    parts = check(config(tiny_model, tmp_path, *settings(one_file, "eval.prompts=0")))
    assert (len(parts.prompts), len(parts.held_out)) == (12, 0)


def test_prompts_may_repeat_in_training(tiny_model, tmp_path, one_file):
    row = json.dumps({"question": "1+2=", "answer": "#### 3"}) + "\n"
    (one_file / "train.jsonl").write_text(3 * row)
    assert len(check(config(tiny_model, tmp_path, *settings(one_file))).prompts) == 3


def test_a_first_fill_above_what_the_prompts_may_keep_is_refused(tiny_model, tmp_path, one_file):
    told = r"replay\.first_fill = 500 with 2 training prompts needs replay\.per_prompt=\d+ or more"
    with pytest.raises(ValueError, match=told):
        check(config(tiny_model, tmp_path, *settings(one_file, "replay.first_fill=500")))

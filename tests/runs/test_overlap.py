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
    own = ["task=gsm8k", f"task.data={folder}", "task.prompt={question}", "task.allow_loss=0.01"]
    return [*own, *more]


def test_prompts_that_are_also_held_out_are_not_trained_on(tiny_model, tmp_path, one_file, caplog):
    """All held-out prompts count, not only the five that this run evaluates on."""
    few = settings(one_file, "eval.prompts=5", "task.allow_loss=0.84")
    parts = check(config(tiny_model, tmp_path, *few))
    assert [prompt.id for prompt in parts.prompts] == ["train-10", "train-11"]
    assert "10 of 12 training prompts are also held out, and not trained on" in caplog.text
    (one_file / "train.jsonl").write_text((one_file / "test.jsonl").read_text())
    with pytest.raises(ValueError, match="all 10 training prompts are also held out; name"):
        check(config(tiny_model, tmp_path, *settings(one_file)))


def test_more_than_one_lost_prompt_in_a_hundred_is_an_error(tiny_model, tmp_path, one_file):
    """One is a warning, whatever its share; the setting that the error names is enough."""
    told = r"10 of 12 training prompts are also held out, and not trained on, more than task"
    with pytest.raises(ValueError, match=told + r"\.allow_loss = 0\.01; .*\.allow_loss=0\.84 if"):
        check(config(tiny_model, tmp_path, *settings(one_file)))
    one = (one_file / "test.jsonl").read_text().splitlines(keepends=True)[0]
    (one_file / "test.jsonl").write_text(one)
    assert len(check(config(tiny_model, tmp_path, *settings(one_file))).prompts) == 11


def test_each_source_of_a_mixture_may_lose_its_share(tiny_model, tmp_path, one_file):
    """The sources have 12 and 400 prompts, of which the first loses two: few of all."""
    held_out = (one_file / "test.jsonl").read_text().splitlines(keepends=True)[:2]
    (one_file / "test.jsonl").write_text("".join(held_out))
    first = f"{{use='gsm8k',weight=1,data='{one_file}',prompt='{{question}}'}}"
    given = ["task=mixture", f"task.sources.a={first}"]
    given.append("task.sources.b={use='arithmetic',weight=1}")
    given.append("task.allow_loss=0.01")
    sizes = ["task.sources.b.train_size=400", "task.sources.b.held_out_size=2"]
    told = r"2 of 12 training prompts of task\.sources\.a are also held out"
    with pytest.raises(ValueError, match=told):
        check(config(tiny_model, tmp_path, *given, *sizes))
    assert check(config(tiny_model, tmp_path, *given, *sizes, "task.allow_loss=0.2"))


def test_rows_like_the_examples_are_lost(tiny_model, tmp_path, one_file, caplog):
    """The example itself is not: it is asked for."""
    given = settings(one_file, "task.shots=1", "eval.prompts=0")
    every = "task.allow_loss=1"  # the tokenizer has no line ends
    assert len(check(config(tiny_model, tmp_path, *given, every)).prompts) == 11
    assert "example" not in caplog.text
    with (one_file / "train.jsonl").open("a") as file:
        file.write(2 * '{"question": "0+0=", "answer": "#### 0"}\n')
    with pytest.raises(ValueError, match=r"2 of 13 training rows are shown in an example"):
        check(config(tiny_model, tmp_path, *given))
    assert len(check(config(tiny_model, tmp_path, *given, every)).prompts) == 11
    sized = [*given, "task.train_size=11", every]
    caplog.clear()
    assert len(check(config(tiny_model, tmp_path, *sized)).prompts) == 11
    assert "example" not in caplog.text  # rows beyond the size are not read


def test_a_tokenizer_that_cannot_write_the_prompts_is_refused(tiny_model, tmp_path, one_file):
    """Unless the prompt, or the chat template, has the token itself."""
    rows = [{"question": f"{i}x=", "answer": "#### 1"} for i in range(3)]
    (one_file / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = r"3 of 13 prompts have unknown tokens: the tokenizer of policy\.model = "
    with pytest.raises(ValueError, match=told + r"'.*' cannot encode them, more than task\.allow"):
        check(config(tiny_model, tmp_path, *settings(one_file)))
    (one_file / "train.jsonl").write_text(2 * '{"question": "1<pad>=", "answer": "#### 1"}\n')
    assert check(config(tiny_model, tmp_path, *settings(one_file)))


def test_rendered_prompts_are_compared(tiny_model, tmp_path, one_file):
    """Different questions, of which the tokenizer makes the same tokens."""
    (one_file / "test.jsonl").write_text('{"question": "x+3=", "answer": "#### 1"}\n')
    with (one_file / "train.jsonl").open("a") as file:
        file.write('{"question": "y+3=", "answer": "#### 1"}\n')
    given = settings(one_file, "task.allow_loss=1")
    assert len(check(config(tiny_model, tmp_path, *given)).prompts) == 12


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
        given = settings(one_file, "replay.first_fill=500", "task.allow_loss=1")
        check(config(tiny_model, tmp_path, *given))

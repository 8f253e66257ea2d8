"""The dry run: every key, the first prompt as the policy reads it, and one call of the reward."""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tba.config.plugins import with_defaults
from tba.config.schema import Config, load
from tba.runs.folder import CHECKPOINTS
from tba.setup.machine import planned_machine
from tba.tasks import Task
from tba.tools.check import DUMMY, as_toml, dry_run

REWARDS = """
import asyncio, os, time
from pathlib import Path

def length(completions):
    with open(Path(__file__).with_name("calls"), "a") as file:
        file.write(f"{os.getpid()} {completions}\\n")
    return [len(c) / 10 for c in completions]

async def slow(completions):
    await asyncio.sleep(0.01)
    return length(completions)

def one(completions):
    return 0.5

def broken(completions):
    return [float(c) for c in completions]

def raises(completions, **columns):
    return columns["answers"]

def nothing(completions):
    return [None for c in completions]

def hangs(completions):
    time.sleep(60)

def ends(completions):
    os._exit(3)
"""
SAMPLING = {"samples": 4, "max_tokens": 8}
Make = Callable[..., Config]


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> Make:
    """A run of sums with one of the rewards above."""
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(REWARDS)

    def make(*rewards: str | dict[str, Any], **tables: Any) -> Config:
        named = [r if isinstance(r, dict) else f"{tmp_path}/rewards.py:{r}" for r in rewards]
        data = {"use": "custom", "data": str(tmp_path / "rows.jsonl"), "held_out_size": 2}
        plain = {"run": {"folder": str(tmp_path / "run")}, "task": {**data, "reward": named}}
        plain |= {"trainer": {"batch_size": 8, "group_size": 4}, "sampling": SAMPLING}
        plain["reward"] = {"isolate": "none"}
        return Config(**{**plain, "policy": {"model": str(tiny_model)}, **tables})

    return make


def test_the_first_prompt_and_a_reward_are_shown(config, tmp_path):
    """The reward is called for a dummy and for right answers, in another process."""
    _, told = dry_run(config("length", reward={}))
    ends, length, *memory, seconds = told[4:-1]
    assert told[:4] == [
        "first prompt, 4 tokens:", "0+0=", f"reward of {DUMMY!r}: {len(DUMMY) / 10:g}",
        "warning: reward of '0': 0.1, the answer given in row train-0, is not more than the dummy",
    ]  # fmt: skip
    assert told[-1] == "config OK (dry run): 3 training prompts, evaluating 2 of 2 held-out prompts"
    assert ends == "responses end at '<eos>' (tokenizer, config.json, generation_config.json)"
    assert length.startswith("length: 200 steps of 2 prompts x 4 samples; 133 epochs of 3 prompts")
    assert re.match(r"host: [\d.]+ [GM]B of [\d,.]+ GB", memory[1])
    assert re.match(r"  trainer: weights [\d.]+ MB, gradients .*, activations [\d.]+ MB", memory[2])
    assert memory[-2:] == [memory[-2], "the memory suffices"]
    assert re.match(r"a checkpoint takes [\d.]+ MB on disk", memory[-2])
    assert re.match(r"time: about [\d.e-]+ s a step \(measured\), without search", seconds)
    calls = [call.split(maxsplit=1) for call in (tmp_path / "calls").read_text().splitlines()]
    assert [completions for _, completions in calls] == [str([text] * 2) for text in (DUMMY, "0")]
    assert not any(Path(f"/proc/{process}").exists() for process, _ in calls)
    assert not (tmp_path / "run").exists()
    assert dry_run(config("slow"))[1][:5] == told[:5]


def test_a_prompt_is_shown_with_its_special_tokens(config, tiny_model, tmp_path):
    from transformers import AutoTokenizer

    folder = tiny_model.with_name("chatting")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "<eos>{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    plain = config("length", policy={"model": str(folder)})
    _, told = dry_run(plain)
    assert told[:2] == ["first prompt, 4 tokens:", "0+0="]
    note = "note: prompts are plain text, but there is a chat template; "
    assert told[4] == f"{note}task.chat=on uses it"
    options = {**plain.task.model_dump(), "chat": "on"}
    tables, told = dry_run(config(policy={"model": str(folder)}, task=options))
    assert told[:2] == ["first prompt, 5 tokens:", "<eos>0+0="]
    assert tables["task"]["chat"] == "on"
    with pytest.raises(ValueError, match=r"its text is completion\[0\]\[.content.\]\.$"):
        broken = {**config("broken").task.model_dump(), "chat": "on"}
        dry_run(config(policy={"model": str(folder)}, task=broken))
    assert not [line for line in told if line.startswith("note:")]
    rows = tmp_path / "rows.jsonl"
    of_text = rows.read_text()
    for roles, is_noted in ((["user"], False), (["user", "assistant"], True)):
        chats = [[{"role": role, "content": str(i)} for role in roles] for i in range(5)]
        rows.write_text("".join(json.dumps({"prompt": c, "answer": "0"}) + "\n" for c in chats))
        _, told = dry_run(config(policy={"model": str(folder)}, task=options))
        notes = [line for line in told if "the last message is the assistant's" in line]
        assert bool(notes) == is_noted
    rows.write_text(of_text)
    sources = {name: {"use": "custom", "weight": 1, **plain.task.options} for name in "ab"}
    mixed = config(policy={"model": str(folder)}, task={"use": "mixture", "sources": sources})
    (told,) = [line for line in dry_run(mixed)[1] if line.startswith("note:")]
    assert told == f"{note}task.sources.a.chat=on and task.sources.b.chat=on use it"


NOT_CALLED = "reward: not called, because that needs a model or a server"
REFUSED = {
    "ends": r"\(died\): the scoring process ended with exit status 3",
    "raises": r"\(raised\): (.|\n)*KeyError: 'answers'",
    "hangs": r"\(timeout\): scoring of 2 answers did not return within 0\.5 s",
    "nothing": r"\(none\): no reward function gave this sample a reward",
    "one": r"\(\w+\): .*the scoring function returned a float, 0\.5; return a list with one number",
}


@pytest.mark.parametrize("reward", REFUSED)
def test_a_reward_that_scores_no_answer_is_refused(config, reward):
    words = "neither 'dummy answer' nor '0' gets a reward "
    with pytest.raises(ValueError, match=words + REFUSED[reward]):
        dry_run(config(reward, reward={"deadline": 0.25 if reward == "hangs" else 10.0}))


@pytest.mark.parametrize("task", ["arithmetic", "gsm8k", "math"])
def test_a_wrong_answer_in_the_data_of_a_grader_of_ours_is_refused(
    config, task, tmp_path, monkeypatch
):
    """And a right one is shown with its reward."""
    rows = [{"question": f"{i}+1=", "problem": f"{i}+1=", "answer": str(i + 1)} for i in range(6)]
    table: dict[str, Any] = {"use": task}
    if task == "arithmetic":
        table |= {"train_size": 20, "held_out_size": 4}
    else:
        for name, part in (("own", rows[1:]), ("held", rows[:1])):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in part))
        files = {"data": tmp_path / "own.jsonl", "held_out_data": tmp_path / "held.jsonl"}
        table |= {name: str(path) for name, path in files.items()}
        table |= {"prompt": "{question}" if task == "gsm8k" else "{problem}"}
    if task == "math":
        pytest.importorskip("math_verify")
    chosen = config(task=table)
    assert re.search(
        r"^reward of '.*': 1, the answer given in row", "\n".join(dry_run(chosen)[1]), re.M
    )
    monkeypatch.setattr(Task, "right_answer", lambda task, row: "77777")
    with pytest.raises(
        ValueError, match=r"77777.*: 0, the answer given in row .*correct the column"
    ):
        dry_run(chosen)


GOLDS = [
    "5", "7", "18 dollars", "50 miles per hour", "Answer: 5", "Tom sold 6 / 2 = 3.\n#### 3", None,
    r"\frac{1}{2", r"5 \text{ km}", "3 feet 4 inches", "minus 5", "Monday", "2 pi",
    "", "15 km/h", "6 cm^2",
]  # fmt: skip


def test_answers_that_no_response_can_give_are_counted_and_named(config, tmp_path):
    """A response gives 18 for `18 dollars`, and both must be the same to the grader."""
    pytest.importorskip("math_verify")
    rows = [{"problem": f"{i}+1=", "answer": gold} for i, gold in enumerate(GOLDS)]
    for name, part in (("test", rows[:1]), ("train", rows[1:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (tmp_path / f"{name}.jsonl").write_text(text)
    table = {"use": "math", "data": str(tmp_path), "prompt": "{problem}"}
    (told,) = [line for line in dry_run(config(task=table))[1] if "no response" in line]
    assert told.startswith("warning: no response is right for 3 of 16 rows, train-5 '")
    assert r"train-5 '', train-6 '\\boxed{\\frac{1}{2}', train-12 ''" in told
    assert r"correct the column `answer`, with \text{...} around words" in told


def test_a_number_from_a_column_with_gaps_is_tried_as_a_response_gives_it(config, tmp_path):
    golds = (72.0, float("nan"), 0.5, 1.0)
    rows = [{"prompt": f"{i}+0=", "answer": gold} for i, gold in enumerate(golds)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "reward of '72': 0.2, the answer given in row" in "\n".join(dry_run(config("length"))[1])


def test_a_reward_that_fails_for_the_dummy_is_a_warning(config):
    """A run would reject such a sample, and go on."""
    _, told = dry_run(config("broken"))
    assert told[2].startswith(f"warning: {DUMMY!r} has no reward (")
    assert re.search(r"\(raised\): .*could not convert string to float", told[2], re.DOTALL)
    assert told[-1].startswith("config OK")


def test_judges_are_loaded_and_called_as_in_a_run(config, make_classifier, tiny_model):
    """But not for a run that is planned for other machines."""
    judge = make_classifier(tiny_model)
    table = {"use": "classifier", "model": str(judge)}
    _, told = dry_run(config(table, reward={}))
    assert re.fullmatch(r"reward of 'dummy answer': -?[\d.e-]+", told[2])
    machine = planned_machine("1x80")
    assert dry_run(config("length", table), planned=machine)[1][2] == NOT_CALLED
    assert dry_run(config("length"), planned=machine)[1][2].startswith("reward of 'dummy")
    (judge / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"task\.reward\.0: .*no file named model\.saf"):
        dry_run(config(table))
    (judge / "config.json").unlink()
    with pytest.raises(ValueError, match=r"task\.reward\.0: .*has no config\.json"):
        dry_run(config(table))


def test_each_source_of_a_mixture_is_tried(config):
    own = {"use": "custom", "weight": 1, **config("length").task.options}
    sources = {"a": own, "b": {**own, "prompt": "{answer}+{prompt}"}}
    _, told = dry_run(config("length", task={"use": "mixture", "sources": sources}))
    value = f"reward of {DUMMY!r}: {len(DUMMY) / 10:g}"
    right = "warning: reward of '0': 0.1, the answer given in row {}/train-0, is not more than the dummy"  # noqa: E501
    first = ["first prompt of a, 4 tokens:", "0+0=", value, right.format("a")]
    second = ["first prompt of b, 6 tokens:", "0+0+0=", value, right.format("b")]
    assert told[:8] == first + second


def test_logged_rollouts_are_read(config, tmp_path):
    file = tmp_path / "logged.jsonl"
    given = config("length", replay={"rollouts": str(file)})
    with pytest.raises(ValueError, match=r"replay\.rollouts = .*: no such file"):
        dry_run(given)
    file.write_text('{"prompt": "1+1=", "completion": "2", "reward": 1.0}\n')
    assert "1 logged rollouts of 1 prompts" in dry_run(given)[1]


def test_the_config_is_printed_as_a_run_stores_it(config):
    given = config("length", objective={"use": "rloo", "beta": 0.3})
    tables, _ = dry_run(given)
    assert (tables["objective"]["beta"], tables["task"]["max_turns"]) == (0.3, 8)
    again = Config(**json.loads(json.dumps(tables)))
    assert dry_run(again)[0] == tables


def test_a_run_without_a_checkpoint_cannot_be_resumed(config, tmp_path):
    folder = tmp_path / "run"
    (folder / CHECKPOINTS).mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config("length").nested()))
    with pytest.raises(ValueError, match="no complete checkpoint in"):
        dry_run(config("length"), folder)
    with pytest.raises(ValueError, match=r"sampling\.temperature = 0\.5, but the run has"):
        dry_run(config("length", sampling={**SAMPLING, "temperature": 0.5}), folder)


CONFIGS = sorted((Path(__file__).parents[2] / "experiments").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_config_is_shown_as_toml_with_its_defaults_marked(path):
    """It reads back as the same config; a key has the mark unless the file gives it."""
    given = tomllib.loads(path.read_text())
    tables = with_defaults(load(path)).nested()
    text = as_toml(tables, given)
    assert tomllib.loads(text) == tables
    marked = re.search(r"^seed = \d+(.*)$", text.partition("[run]")[2], re.M)
    assert marked is not None and bool(marked[1]) == ("seed" not in given.get("run", {}))

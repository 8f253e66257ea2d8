"""Data as they are: named columns, chat templates that the tokenizer has or lacks, doubled BOS."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import EOS, PAD
from talk import CHARACTERS

from tba.config.schema import Config, load
from tba.config.tables import PolicyTable
from tba.models.pretrained import load_text
from tba.open import run
from tba.prompt import Answer, Message, Prompt
from tba.runs.folder import SAMPLES, read
from tba.setup.checks import check_resumed
from tba.setup.setup import check
from tba.tasks.custom import Custom

BOS = "<bos>"
CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)
"""A chat template in which thinking can be turned off, as in Qwen3's."""
ROWS = [{"question": f"{i}+{i}?", "solution": str(2 * i), "level": i} for i in range(6)]
REWARDS = """
seen = []

def right(prompts, completions, answer, **columns):
    seen.append((prompts, answer, columns))
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(t == a) for t, a in zip(texts, answer)]
"""
Model = Callable[..., str]


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path]) -> Model:
    """Folder of a model that reads all characters, with a chat template or a BOS token."""
    from transformers import AutoTokenizer

    def make(template: str | None = None, bos: bool = False) -> str:
        folder = make_model(vocabulary=[PAD, EOS, BOS, *CHARACTERS], context=256)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if bos:
            tokenizer.add_special_tokens({"bos_token": BOS})
            tokenizer.add_bos_token = True  # before every text
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        return str(folder)

    return make


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of a task whose columns have names of their own."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "column_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    columns = {"prompt_column": "question", "answer_column": "solution"}
    options = {"data": str(tmp_path / "rows.jsonl"), "reward": "column_rewards:right"}
    return {**options, **columns, "held_out_size": 2}


def config(model: str, task: dict[str, Any], **tables: Any) -> Config:
    """A config of the task, which is `custom` unless it names another one."""
    small = {"batch_size": 8, "group_size": 4}
    sampling = {"samples": 4, "max_tokens": 8}
    whole = {"task": {"use": "custom", **task}, "trainer": small, "sampling": sampling, **tables}
    return Config(**{"policy": {"model": model}, **whole})


def test_columns_keep_their_names_and_get_those_of_templates_and_rewards(data):
    import column_rewards

    column_rewards.seen.clear()
    task = Custom(**data, shots=1)
    prompt = task.prompts()[0]
    assert prompt.text == "0+0? 0\n\n1+1?"  # the example has the answer
    assert task.score(prompt, [Answer("2", True), Answer("3", True)]) == [1.0, 0.0]
    columns = {"question": ["1+1?"] * 2, "solution": ["2"] * 2, "level": [1] * 2}
    ((prompts, answers, given),) = column_rewards.seen
    assert (prompts, answers) == ([prompt.text] * 2, ["2"] * 2)
    assert {name: given[name] for name in columns} == columns
    template = Custom(**data, prompt="{level}: {prompt} ({question})")
    assert template.held_out()[0].text == "4: 4+4? (4+4?)"


def test_the_columns_of_messages_may_have_any_name(data, tmp_path):
    rows = [{"chat": [{"role": "user", "content": "Hi"}], "solution": "Hello"}] * 3
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompt = Custom(**data | {"prompt_column": "chat"}).prompts()[0]
    assert prompt.text == rows[0]["chat"]


def test_a_column_that_is_missing_is_told(data):
    with pytest.raises(ValueError, match=r"has no column 'prompt'.* or set task\.prompt_column"):
        Custom(**data | {"prompt_column": "prompt"}).prompts()
    with pytest.raises(ValueError, match=r"no column 'anser', which task\.answer_column names"):
        Custom(**data | {"answer_column": "anser"}).prompts()


def test_text_chats_if_the_task_says_so(model, data):
    with_template, without = model(CHAT), model()
    chat = check(config(with_template, {**data, "chat": "on", "system_prompt": "Add."}))
    asked = [{"role": "system", "content": "Add."}, {"role": "user", "content": "0+0?"}]
    assert chat.prompts[0].text == asked
    read = chat.text.tokenizer.decode(chat.text.encode(chat.prompts[0]).tolist())
    assert read == "[system]Add.[user]0+0?[assistant]"
    for value, chats in (("on", True), (True, True), ("off", False), (False, False)):
        text = check(config(with_template, {**data, "chat": value})).prompts[0].text
        assert isinstance(text, str) is not chats
    default = check(config(with_template, data))
    assert default.prompts[0].text == "0+0?"  # as in TRL: text stays text
    with pytest.raises(ValueError, match="chat messages, but the tokenizer has no chat template"):
        check(config(without, {**data, "chat": "on"}))
    with pytest.raises(ValueError, match=r"task\.chat = 'yes': Input should be .*'on' or 'off'"):
        check(config(without, {**data, "chat": "yes"}))


@pytest.mark.parametrize("prompt", ["1?", f"{BOS}1?"])
def test_a_text_that_has_a_bos_gets_no_second_one(model, prompt):
    """As rows have whose chats were rendered before."""
    text = load_text(PolicyTable(model=model(bos=True)))
    assert text.tokenizer.decode(text.encode(Prompt("0", prompt)).tolist()) == f"{BOS}1?"


def test_arguments_of_the_chat_template(model):
    folder = model(CHAT)
    messages: list[Message] = [{"role": "user", "content": "Hi"}]

    def encoded(**policy: Any) -> str:
        text = load_text(PolicyTable(model=folder, **policy))
        return str(text.tokenizer.decode(text.encode(Prompt("0", messages)).tolist()))

    assert encoded() == "[user]Hi[assistant]"
    off = encoded(chat_template_kwargs={"enable_thinking": False})
    assert off == "[user]Hi[assistant]<think></think>"
    for name, template in (("enable_thinkng", CHAT), ("enable_thinking", None)):
        with pytest.raises(ValueError, match=rf"policy\.chat_template_kwargs\.{name}: .*remove it"):
            load_text(PolicyTable(model=model(template), chat_template_kwargs={name: False}))
    before = load(None, [f"policy.model={folder}"])
    now = load(None, [f"policy.model={folder}", "policy.chat_template_kwargs.enable_thinking=true"])
    assert now.policy.chat_template_kwargs == {"enable_thinking": True}
    with pytest.raises(ValueError, match=r"chat_template_kwargs = .*leave it unchanged"):
        check_resumed(now, before)


SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOOLED = "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}" + CHAT


def test_columns_of_a_row_are_arguments_of_the_chat_template(model, data, tmp_path, caplog):
    """By the conventions of TRL; what looks like one, and is not read, is named once."""
    row = {"solution": "1", "chat_template_kwargs": {"enable_thinking": False}, "tools": [SCHEMA]}
    rows: list[Any] = [{**row, "documents": [{"text": "x"}], "system": "Add"} for _ in range(3)]
    rows.append({"solution": "1", "enable_thinking": True})
    for i, each in enumerate(rows):
        each["question"] = [{"role": "user", "content": f"{i}?"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    setup = check(config(model(TOOLED), data))
    prompts = [*setup.prompts, *setup.held_out]
    first, *_, last = [setup.text.tokenizer.decode(setup.text.encode(p)) for p in prompts]
    assert (first, last) == ("add;[user]0?[assistant]<think></think>", "[user]3?[assistant]")
    told = "the column '%s' is not in the prompt; name it in task.prompt, or rename it"
    assert caplog.messages == [told % name for name in ("documents", "enable_thinking", "system")]
    caplog.clear()
    text = data | {"prompt": "{system} {i}"}
    rows = [{**row, "i": i, "system": "Add\n"} for i, row in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    check(config(model(TOOLED), text))
    names = ("chat_template_kwargs", "documents", "enable_thinking", "tools")
    assert caplog.messages == [told % name for name in names]


def test_what_a_chat_template_leaves_out_of_a_row_is_refused(model, data):
    users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    given = config(model(users), {**data, "chat": "on", "system_prompt": "A"})
    with pytest.raises(ValueError, match=r"^prompt 'train-0': message 1 \(system\): the chat t"):
        check(given)


def test_a_chat_is_written_in_one_way(model, data, tmp_path):
    """As the policy reads it, in the samples of batches and of evaluations, with the row's id."""
    given = config(
        model(CHAT), {**data, "chat": "on", "system_prompt": "Add."},
        run={"folder": str(tmp_path / "run"), "steps": 1}, runtime={"use": "local"},
        log={"report_to": [], "console": "off"},
    )  # fmt: skip
    run(given)
    rows = read(tmp_path / "run" / SAMPLES)
    assert {row["kind"] for row in rows} == {"train", "eval"}
    for row in rows:
        asked = f"[system]Add.[user]{row['columns']['question']}[assistant]"
        assert row["prompt"] == asked and row["id"]
    batch = [row.get("drawn", 1) for row in rows if row["kind"] == "train"]
    assert sum(batch) == 4  # a whole group


def test_long_prompts_are_left_out_and_counted(model, data, tmp_path, caplog):
    texts = ["1?", "1+1+1+1?", "2?", "12345678?", "3?", "2+2+2+2?"]
    rows = [{"question": text, "solution": "1"} for text in texts]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder, limited = model(), {**data, "max_prompt_tokens": 4}
    parts = check(config(folder, limited))
    assert [p.text for p in (*parts.prompts, *parts.held_out)] == ["1?", "2?", "3?"]
    assert [p.id for p in parts.prompts] == ["train-0", "train-2"]  # rows keep their ids
    told = "%d of %d %s prompts are left out: longer than task.max_prompt_tokens = 4"
    assert caplog.messages == [told % (1, 2, "held-out"), told % (2, 4, "training")]
    mixed = {"use": "mixture", "sources": {"a": {"use": "custom", "weight": 1, **limited}}}
    assert len(check(config(folder, mixed)).prompts) == 2
    more = {**limited, "sources": {"b": {"weight": 0, "held_out_size": 4}}}
    assert len(check(config(folder, more, eval={"prompts": 1})).evaluated["b"]) == 1
    told = r"all held-out prompts are longer than .*_tokens = 1; change"
    with pytest.raises(ValueError, match=told):
        check(config(folder, {**data, "max_prompt_tokens": 1}))
    with pytest.raises(ValueError, match=r"of task\.sources\.a are longer"):
        a = {"use": "custom", "weight": 1, **data, "max_prompt_tokens": 1}
        check(config(folder, {"use": "mixture", "sources": {"a": a}}))
    with pytest.raises(ValueError, match=r"task\.max_prompt_tokens = 0: .* greater than"):
        check(config(folder, {**data, "max_prompt_tokens": 0}))


def test_duplicates_are_dropped_also_of_held_out_rows(model, data, tmp_path, caplog):
    texts = ["1?", "2?", "1?", "9?", "3?", "9?", "8?", "9?"]
    rows = [{"question": text, "solution": str(i)} for i, text in enumerate(texts)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = model()
    assert len(check(config(folder, {**data, "held_out_size": 3})).prompts) == 4  # one is lost
    assert "1 of 5 training prompts are also held out, and not trained on" in caplog.text
    caplog.clear()
    parts = check(config(folder, {**data, "held_out_size": 3, "drop_duplicates": True}))
    kept = [(p.text, p.columns["answer"]) for p in (*parts.prompts, *parts.held_out)]
    assert kept == [("1?", "0"), ("2?", "1"), ("3?", "4"), ("9?", "5"), ("8?", "6")]
    told = "%d of %d %s prompts are left out: duplicates (task.drop_duplicates)"
    assert caplog.messages == [told % (1, 3, "held-out"), told % (2, 5, "training")]
    part = {"use": "custom", **data, "held_out_size": 3, "drop_duplicates": True}
    first = check(config(folder, part, eval={"prompts": 1}))
    assert len(first.prompts) == 3  # rows that are kept back are not trained on, either
    sources = dict.fromkeys("ab", part | {"weight": 1})
    mixed = check(config(folder, {"use": "mixture", "sources": sources}))
    assert len(mixed.prompts) == 6  # the rewards of sources are different

"""Summaries of posts: what judges see, the penalty for a missing EOS, and the win rate."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tba.prompt import Answer, Prompt
from tba.scoring.scoring import Scoring
from tba.scoring.verdicts import Rejection
from tba.tasks.tldr import Tldr, query_of

JUDGES = '''
import asyncio

seen = []

def length(prompts, completions, **columns):
    seen.append((prompts, completions, columns))
    return [float(len(c)) for c in completions]

async def slow_length(prompts, completions):
    await asyncio.sleep(0.01)
    return length(prompts, completions)

def short_only(completions, **columns):
    """No score for more than six characters, NaN for none, after the space."""
    return [float("nan") if c == " " else len(c) if len(c) < 8 else None for c in completions]

def place(completions, **columns):
    """A judge of the whole group: the best is the last one."""
    return [float(i) for i in range(len(completions))]
'''
ROW = {"subreddit": "cats", "title": "My cat", "post": "It {sleeps}.", "summary": "It sleeps."}
QUERY = "SUBREDDIT: r/cats\n\nTITLE: My cat\n\nPOST: It {sleeps}.\n\nTL;DR:"
PROMPT = Prompt("0", "as the policy sees it", {"query": QUERY, "summary": "four"})


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tldr]:
    """A task with judges of the module above; by default both are lengths."""
    (tmp_path / "my_judges.py").write_text(JUDGES)
    monkeypatch.syspath_prepend(tmp_path)

    def task(proxy: str = "length", gold: str | None = "length", **options: Any) -> Tldr:
        measured = None if gold is None else f"my_judges:{gold}"
        return Tldr(proxy=f"my_judges:{proxy}", gold=measured, **options)

    return task


@pytest.fixture
def seen(make: Callable[..., Tldr]) -> list[Any]:
    """What the judges were called with: prompts, completions and columns."""
    import my_judges

    my_judges.seen.clear()
    return my_judges.seen


def write(folder: Path, *rows: dict[str, Any], split: str = "train") -> str:
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def answers(*texts: str) -> list[Answer]:
    """Finished answers; a text that ends with … was cut."""
    return [Answer(t.removesuffix("…"), finished=not t.endswith("…")) for t in texts]


def wins(task: Tldr, group: Sequence[Answer]) -> list[Any]:
    """The verdicts on a group, with the reason of each rejection."""
    (verdicts,) = Scoring({"": task})([PROMPT], [group], ("", "win_rate"))
    return [v.reason if isinstance(v, Rejection) else v for v in verdicts]


def test_a_prompt_is_the_post_up_to_tldr(make, tmp_path):
    data = write(tmp_path, ROW, {**ROW, "title": None})
    row = {"query": "A post.\n\nTL;DR:", "summary": "A.", "post": "x"}
    write(tmp_path, row, split="validation")
    task = make(data=data)
    first, second = task.prompts()
    assert (first.id, first.text) == ("train-0", QUERY)
    assert first.columns == {"query": QUERY, "summary": "It sleeps."}
    assert second.text == "SUBREDDIT: r/cats\n\nPOST: It {sleeps}.\n\nTL;DR:"
    (held_out,) = task.held_out()  # of the data set on the hub, which has queries
    assert (held_out.id, held_out.text) == ("validation-0", "A post.\n\nTL;DR:")
    file = make(data=f"{data}/train.jsonl", held_out_data=f"{data}/validation.jsonl")
    assert (file.prompts(), file.held_out()) == (task.prompts(), task.held_out())
    assert query_of({"post": "Only this."}) == "POST: Only this.\n\nTL;DR:"


def test_a_column_may_have_numbers(make, tmp_path):
    data = write(tmp_path, {"title": 2024, "post": 7, "summary": 5})
    (prompt,) = make(data=data).prompts()
    query = "TITLE: 2024\n\nPOST: 7\n\nTL;DR:"
    assert prompt.columns == {"query": query, "summary": "5"}
    write(tmp_path, ROW, {**ROW, "title": ["My", "cat"]})
    with pytest.raises(ValueError, match=r"task\.data = .*: row 1: column 'title' is \['My', 'c"):
        make(data=data).prompts()


def test_a_chat_prompt_does_not_change_what_judges_see(make, seen, tmp_path):
    task = make(data=write(tmp_path, ROW), chat=True, prompt="Summarize: {query}")
    (prompt,) = task.prompts()
    assert prompt.text == [{"role": "user", "content": f"Summarize: {QUERY}"}]
    task.score(prompt, answers("Sleepy"))
    ((prompts, completions, _),) = seen
    assert (prompts, completions) == ([QUERY], [" Sleepy"])


def test_a_summary_without_eos_has_the_penalty_in_place_of_a_score(make, seen):
    task = make(eos="<eos>")
    assert task.score(PROMPT, answers("one", " three\n", "cut…", "")) == [9.0, 11.0, -1.0, 6.0]
    ((prompts, completions, columns),) = seen
    assert completions == [" one<eos>", " three<eos>", " <eos>"]  # the judge did not see `cut`
    assert prompts == [QUERY] * 3
    assert (columns["query"], columns["summary"]) == ([QUERY] * 3, ["four"] * 3)
    assert make(missing_eos_reward=-7.0).score(PROMPT, answers("cut…")) == [-7.0]
    assert len(seen) == 1  # nothing to judge, no call


def test_the_win_rate_counts_by_hand(make, seen):
    """Against a reference of four characters. A tie is no win; a cut summary is judged as it is."""
    task = make(eos="<eos>")
    assert wins(task, answers("fives", "four", "two", "eight…", "the longest…")) == [1, 0, 0, 0, 1]
    ((prompts, completions, _),) = seen
    finished = [f" {text}<eos>" for text in ("four", "fives", "four", "two")]
    assert completions == [*finished, " eight", " the longest"]
    assert prompts == [QUERY] * 6
    assert wins(make(gold="place"), answers("a", "b")) == [1.0, 1.0]  # it sees the reference first


def test_what_the_gold_judge_cannot_score_is_neither_won_nor_lost(make):
    task = make(gold="short_only")
    assert wins(task, answers("fives", "too long", "")) == [1.0, "none", "not_finite"]
    long = Prompt("1", "", {"query": QUERY, "summary": "too long, too"})
    (verdicts,) = Scoring({"": task})([long], [answers("fives", "two")], ("", "win_rate"))
    assert [v.reason for v in verdicts if isinstance(v, Rejection)] == ["none", "none"]


def test_judges_may_be_async(make):
    task = make("slow_length", "slow_length")

    async def scored() -> Any:
        return await task.score(PROMPT, answers("one", "cut…"))

    assert asyncio.run(scored()) == [4.0, -1.0]
    assert wins(task, answers("fives", "four")) == [1.0, 0.0]


def test_without_a_gold_judge_nothing_is_measured(make):
    assert not make(gold=None).measures()


def test_mistakes_are_reported_with_what_to_type(make, tmp_path):
    with pytest.raises(ValueError, match=r"task\.proxy = 'my_judges:nobody': .* no function"):
        make("nobody")
    with pytest.raises(ValueError, match=r"task\.gold = 'my_judges:nobody': .* no function"):
        make(gold="nobody")
    with pytest.raises(ValueError, match=r"task\.prompt = .Summarize. must contain a column"):
        make(prompt="Summarize")
    data = write(tmp_path, {"post": "No summary."})
    with pytest.raises(ValueError, match=r"task\.data = .* has no column 'summary'"):
        make(data=data).prompts()
    write(tmp_path, ROW, {**ROW, "post": ""})
    with pytest.raises(ValueError, match=r"row 1 needs a 'summary', and a 'post' or a 'query'"):
        make(data=data).prompts()
    with pytest.raises(ValueError, match=r"task\.held_out_data = .* No such file"):
        make(data=data, held_out_data="./none.jsonl").held_out()


def test_of_the_hub_only_the_columns_that_are_used_are_read(make, monkeypatch):
    """The data set has the tokens of every text, too, which would fill the memory."""
    import datasets

    row = {"id": "1", "query": "A.\n\nTL;DR:", "summary": "a", "post": "A.", "query_token": [1, 2]}
    names, asked = [], []

    def load_dataset(name: str, subset: str | None, split: str) -> datasets.Dataset:
        asked.append((name, subset, split))
        return datasets.Dataset.from_list([row])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    def from_arrow(table: Any) -> list[dict[str, Any]]:
        names.append(table.column_names)
        return table.to_pylist()

    monkeypatch.setattr("tba.tasks._data.from_arrow", from_arrow)
    task = make()
    assert [p.text for p in (*task.prompts(), *task.held_out())] == ["A.\n\nTL;DR:"] * 2
    assert [split for _, _, split in asked] == ["train", "validation"]
    assert names == [["query", "summary", "post"]] * 2

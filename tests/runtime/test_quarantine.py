"""A prompt that ends what scores or searches it is left out after two deaths, and a run goes on."""

import json
import logging
from pathlib import Path

import pytest
from build import config, conserved, ray_config, run_and_keep

from tba.cli import _config
from tba.errors import SearchError
from tba.open import run
from tba.prompt import Prompt
from tba.runs.checkpoint import newest
from tba.runs.folder import METRICS, read
from tba.search.prompts import Cursor, PromptStream
from tba.selections.cyclic import Cyclic
from tba.streams import Use, seed_of

PROMPTS = [Prompt(f"p{i}", f"{i}+1=") for i in range(5)]


def stream_of(quarantine: int = 2) -> PromptStream:
    return PromptStream(PROMPTS, Cyclic(PROMPTS, 0, None), quarantine=quarantine)


def ids(prompts: list[Prompt]) -> list[str]:
    return [p.id for p in prompts]


def search(stream: PromptStream, count: int, died: str = "") -> tuple[list[str], int]:
    """Search one prompt after another; one of them ends its scoring process each time.

    Return what was searched, and how many prompts were quarantined.
    """
    searched, quarantined = [], 0
    for _ in range(count):
        prompts = stream.take(1)
        searched += ids(prompts)
        quarantined += stream.done(prompts, [], {died})
    return searched, quarantined


# The scoring process


def test_a_prompt_is_left_out_after_two_deaths_in_a_row(caplog):
    stream = stream_of()
    searched, quarantined = search(stream, 10, died="p2")
    assert searched.count("p2") == 2 and quarantined == 1
    assert "prompt 'p2' (2+1=) is no longer searched" in caplog.text
    searched, quarantined = search(stream, 20, died="p2")
    assert searched.count("p2") == 0 == quarantined
    assert all(searched.count(name) == 5 for name in ("p0", "p1", "p3", "p4"))


def test_one_death_counts_once_for_a_prompt_that_is_in_a_search_twice():
    prompt = PROMPTS[0]
    stream = PromptStream([prompt], Cyclic([prompt], 0, None), quarantine=2)
    assert stream.done(stream.take(2), [], {"p0"}) == 0
    assert stream.done(stream.take(1), [], {"p0"}) == 1


def test_a_prompt_that_is_scored_between_two_deaths_stays():
    stream = stream_of()
    for died in ("p2", "", "p2", "", "p2"):
        assert search(stream, 5, died)[1] == 0
    assert search(stream, 5)[0].count("p2") == 1


def test_no_prompt_is_left_out_if_quarantine_is_zero(caplog):
    searched, quarantined = search(stream_of(quarantine=0), 25, died="p2")
    assert searched.count("p2") == 5 and quarantined == 0
    assert not caplog.records


def test_a_selection_without_any_other_prompt_is_told():
    stream = PromptStream(PROMPTS[:1], Cyclic(PROMPTS[:1], 0, None))
    search(stream, 2, died="p0")
    with pytest.raises(SearchError, match=r"in quarantine(.|\n)*resume with reward\.quarantine=0"):
        stream.take(1)


# The searcher


def test_prompts_of_two_searchers_that_died_in_a_row_are_left_out():
    """What is searched between two deaths is cleared."""
    stream = stream_of()
    task = stream.take(3)
    assert stream.died(task) == 0
    stream.put_back(task)
    again = stream.take(3)
    assert ids(again) == ids(task)
    assert stream.done(again[:1], []) == 0
    assert stream.died(again[1:]) == 2
    stream.put_back(again[1:])
    later = ids([p for _ in range(5) for p in stream.take(4)])
    assert again[0].id in later and not {*later} & {*ids(again[1:])}


def resumed(stream: PromptStream, quarantine: int = 2) -> PromptStream:
    cursor: Cursor = json.loads(json.dumps(stream.cursor()))
    again = stream_of(quarantine)
    again.seek(cursor)
    return again


def test_deaths_are_remembered():
    """By each session."""
    stream = stream_of()
    stream.died(stream.take(1))
    second = resumed(stream)
    (prompt,) = second.take(1)
    assert second.died([prompt]) == 1
    third = resumed(second)
    assert prompt.id not in ids([p for _ in range(8) for p in third.take(2)])
    released = resumed(second, quarantine=0)
    assert prompt.id in ids([p for _ in range(8) for p in released.take(2)])


# In a run

REWARD = """
import os
from pathlib import Path

CALLS = Path(__file__).with_name("calls")

def score(prompts, completions, fault, **columns):
    with CALLS.open("a") as calls:
        calls.write(f"{prompts[0]}\\n")
    if fault[0] == "exit":
        os._exit(3)
    if fault[0] == "later" and len(CALLS.read_text().splitlines()) > 12:
        raise ValueError("no judge any more")
    return [float("1" in c) for c in completions]
"""
POISON = "2+1="


def settings(
    folder: Path, rows: int, poison: str = POISON, fault: str = "exit", others: str = ""
) -> list[str]:
    """A task with a prompt that has a fault of its own."""
    (folder / "rewards.py").write_text(REWARD)
    faults = {f"{i}+1=": others for i in range(rows)} | {poison: fault}
    data = [{"prompt": prompt, "fault": fault} for prompt, fault in faults.items()]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    return [
        "task=custom", f"task.data={folder}/rows.jsonl", f"task.reward={folder}/rewards.py:score",
        "task.held_out_size=1", "eval.prompts=0",
    ]  # fmt: skip


def calls(folder: Path, poison: str = POISON) -> int:
    return (folder / "calls").read_text().splitlines().count(poison)


def deaths(folder: Path) -> dict[str, int]:
    state = json.loads((newest(folder / "run" / "checkpoints") / "state.json").read_text())
    return state["cursor"].get("deaths", {})


def test_a_run_goes_on_without_a_prompt_that_ends_its_scoring_process(tiny_model, tmp_path, caplog):
    """Also if it is resumed before the second death; then the prompt is searched again."""
    folder, task = tmp_path / "run", settings(tmp_path, rows=7)
    with caplog.at_level(logging.WARNING):
        run(config(tiny_model, folder, *task, "reward.isolate=process", "run.steps=1"))
        for steps in (2, 8):
            summary = run(_config([f"run.steps={steps}"], folder), folder)
    assert (summary.finished, summary.quarantined, summary.searcher_restarts) == (True, 1, 0)
    assert summary.rejected == {"died": 8}
    assert calls(tmp_path) == 2 and list(deaths(tmp_path).values()) == [2]
    assert caplog.text.count(f"({POISON}) is no longer searched") == 1
    counts = [row.get("searchers/quarantined", 0) for row in read(folder / METRICS)]
    assert counts == sorted(counts) and counts[-1] == 1
    run(_config(["run.steps=10", "reward.quarantine=0"], folder), folder)
    assert calls(tmp_path) > 2


def test_a_run_whose_reward_no_longer_works_is_saved(tiny_model, tmp_path):
    folder, task = tmp_path / "run", settings(tmp_path, rows=30, fault="later", others="later")
    with pytest.raises(SearchError, match=r"samples were rejected(.|\n)*no judge any more"):
        run(config(tiny_model, folder, *task, "reward.isolate=process"))
    steps = [row["step"] for row in read(folder / METRICS)]
    assert newest(folder / "checkpoints").name == f"step-{steps[-1]:08d}"
    (tmp_path / "rewards.py").write_text(REWARD.replace("> 12", "> 10**6"))
    with pytest.raises(ValueError, match=r"task\.reward: changed since .*--rescore"):
        run(_config([], folder), folder)
    assert run(_config([], folder), folder, "rescore").finished


SCRIPTED = (
    "engine=scripted", "engine.latency=0.1", "engine.answers=['1','2','3','4','5','6']",
    "reward.isolate=none", "runtime.fresh=3",
)  # fmt: skip


@pytest.mark.fault
def test_a_prompt_that_ends_its_searcher_costs_two_restarts(tiny_model, tmp_path):
    """Prompts that were in flight both times may be left out as well; each one is counted."""
    prompts = [Prompt(f"{i}", f"{i}+1=") for i in range(899)]
    poison = str(Cyclic(prompts, seed_of(0, Use.SELECTION, 0), None).choose(11)[10].text)
    task = settings(tmp_path, rows=900, poison=poison)
    chosen = ray_config(tiny_model, tmp_path / "run", *SCRIPTED, *task, "run.steps=20")
    ended = run_and_keep(chosen)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["finished"] and calls(tmp_path, poison) == 2
    assert summary["searcher_restarts"] == 2
    assert conserved(ended.buffer) and summary["rejected"] == {}
    cursor = ended.searchers.state().cursor
    left_out = {name for name, count in cursor["deaths"].items() if count == 2}
    assert 1 <= summary["quarantined"] == len(left_out) <= 9
    held = {g.prompt.id for g in ended.buffer.groups()}
    assert not left_out & held
    assert ended.searchers.stats.counts["samples_generated"] == 4 * len(held)
    assert cursor["state"]["chosen"] == len(held | {*cursor["outstanding"], *left_out})


@pytest.mark.fault
def test_a_run_that_gives_up_is_saved_and_does_not_die_at_the_same_prompt_for_ever(
    tiny_model, tmp_path
):
    folder, task = tmp_path / "run", settings(tmp_path, rows=8)
    given_up = r"a searcher died after runtime\.max_restarts = 0 restarts"
    chosen = ray_config(
        tiny_model, folder, *SCRIPTED, *task, "runtime.max_restarts=0", "run.steps=9"
    )
    with pytest.raises(SearchError, match=given_up):
        run(chosen)
    assert set(deaths(tmp_path).values()) == {1}
    with pytest.raises(SearchError, match=given_up):
        run(_config([], folder), folder)
    assert sorted(deaths(tmp_path).values())[-1] == 2
    assert run(_config([], folder), folder).finished
    assert calls(tmp_path) == 2

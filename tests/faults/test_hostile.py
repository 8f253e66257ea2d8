"""Hostile rewards, prompts and texts cost what they touch, and nothing else."""

import json
import threading
from functools import partial
from pathlib import Path

import hostile
import psutil
import pytest
from build import config, data
from build import isolation_reasons as reasons
from suite import alive, cases, until

from tba.cli import _config
from tba.config.schema import Config
from tba.open import open_run
from tba.prompt import Answer, Prompt
from tba.runs.folder import METRICS, SAMPLES, read
from tba.scoring.scoring import Scoring, ScoringProcess
from tba.tasks.custom import Custom
from tba.tools.report import report

REWARD = str(Path(hostile.__file__))
DEADLINE = 3.0
"""Seconds for each answer."""


@pytest.fixture
def guard(request: pytest.FixtureRequest) -> Scoring:
    """A guard whose processes, and all that these start, are gone at the end."""
    task = partial(Custom, data="", reward=f"{REWARD}:{request.param}")
    return Scoring({"": task()}, ScoringProcess({"": task}, 1.0), DEADLINE)


@pytest.mark.parametrize("guard", ["score", "score_later"], indirect=True)
@cases(5, full=len(hostile.KINDS), part=len(hostile.KINDS))
def test_a_hostile_reward_costs_its_own_group(case, guard):
    """Groups before and after it get their rewards; nothing is left of its process."""
    kind = hostile.KINDS[case.index]
    before, threads = set(psutil.Process().children()), set(threading.enumerate())
    kinds, texts = ("", kind, "", ""), (["before"], ["bad", "worse"], ["next", "one"], ["x"])
    prompts = [Prompt(str(i), "count", {"kind": k}) for i, k in enumerate(kinds)]
    answers = [[Answer(text, True) for text in group] for group in texts]
    started: list[psutil.Process] = []
    with case.attempt():
        first, bad, third, fourth = guard(prompts, answers)
        for process in psutil.Process().children():
            if process not in before:
                started += [process, *process.children(recursive=True)]
        assert reasons([first, third, fourth]) == [[6.0], [4.0, 3.0], [1.0]], kind
        assert len(bad) == 2
        again = guard(prompts[:1], answers[:1])
        assert reasons(again) == [[6.0]]
    guard.close()
    until(lambda: not alive(started), 10)
    left = [t for t in set(threading.enumerate()) - threads if t.is_alive()]
    assert not left
    case.leftovers = len(alive(started))


ROWS = 40


def rows(folder: Path, kinds: dict[int, str]) -> list[str]:
    """Settings of a task of forty prompts, of which some are hostile."""
    lines = [{"prompt": f"{i}+1=", "kind": kinds.get(i, "")} for i in range(ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [
        "task=custom", f"task.data={folder}/rows.jsonl", "task.held_out_size=4",
        f"task.reward={REWARD}:score", "reward.isolate=process", "reward.deadline=0.3",
        "eval.prompts=0", "log.sample_every=1", "run.steps=24", "reward.max_rejected=1.0",
    ]  # fmt: skip


def all_others_are_right(folder: Path, bad: set[str]) -> None:
    """Every reward of an innocent prompt is the length of its text."""
    samples = [row for row in read(folder / SAMPLES) if row["prompt"] not in bad]
    assert samples
    for row in samples:
        assert row["reward"] == len(row["completion"]), row


@pytest.mark.timeout(600)
@cases(16, full=10, part=4)
def test_poison_prompts_do_not_end_a_run(case, tiny_model, tmp_path):
    """Two of forty prompts end the scoring process, whenever they come, also after a resume."""
    folder = tmp_path / "run"
    deadly = [k for k in hostile.KINDS if k.startswith(("exits", "aborts", "kills", "reads"))]
    places = sorted(case.rng.choice(ROWS - 4, 2, replace=False).tolist())
    kinds = {place: case.pick(deadly) for place in places}
    with case.attempt(), open_run(config(tiny_model, folder, *rows(tmp_path, kinds))) as opened:
        summary = opened.train()
        assert summary.finished and summary.searcher_restarts == 0
    with case.attempt(), open_run(_config(["run.steps=30"], folder), folder) as opened:
        assert opened.train().finished
        stored = {g.prompt.columns["kind"] for g in opened.buffer.groups()}
    assert stored == {""}
    all_others_are_right(folder, {f"{place}+1=" for place in places})
    assert read(folder / METRICS)[-1]["step"] == 30


TEXTS = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\x1b[2J\x1b]0;stolen\x07",
    "\u202egnissorc",
    "{{ 7 * 7 }} ${jndi:x} %s %n",
    "'; DROP TABLE runs; --",
    "\x00\x01\x7f",
    "a\u0300\u0301\u0302\U0001f600\u200b",
    "<pad><eos>",
)


@cases(15, full=len(TEXTS), quick=2, part=len(TEXTS))
def test_hostile_text_stays_text_from_the_data_to_the_page(case, make_model, tmp_path, capsys):
    """In prompts, columns and completions; in files, on the console and in the report."""
    text = TEXTS[case.index]
    letters = sorted({*text, *"0123456789+="})
    model = make_model(vocabulary=["<pad>", "<eos>", *letters], context=96)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}+{text}", "note": text}) + "\n" for i in range(20))
    )
    (tmp_path / "rewards.py").write_text(
        "def f(completions, note):\n"
        "    return [float(n in c) + 0.01 * len(c) for c, n in zip(completions, note)]\n"
    )
    chosen = config(
        model, tmp_path / "run", "task=custom", f"task.data={tmp_path}/rows.jsonl",
        f"task.reward={tmp_path}/rewards.py:f", "task.held_out_size=4", "engine=scripted",
        "sampling.max_tokens=48", "run.steps=3", "log.console=lines", "log.sample_every=1",
        "eval.prompts=2",
    )  # fmt: skip
    engine = {"use": "scripted", "answers": [text, text + "1"]}
    with open_run(Config(**chosen.nested() | {"engine": engine})) as opened:
        assert opened.train().finished
        stored = {g.prompt.columns["note"] for g in opened.buffer.groups()}
    assert stored == {text}
    printed = capsys.readouterr().out
    assert not {"\x1b", "\x00", "\x07", "\u202e"} & set(printed)
    page = report([tmp_path / "run"]).read_text()
    assert "<script>alert" not in page and "<img src=x" not in page
    samples = read(tmp_path / "run" / SAMPLES)
    special = "<pad>" in text  # which no decoded text contains
    assert special or any(row["completion"] == text for row in samples)
    shown = {c["completion"] for g in data(page)[0]["groups"] for c in g["completions"]}
    assert shown == {row["completion"] for row in samples}

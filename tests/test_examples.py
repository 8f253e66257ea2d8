"""The examples of the docs are the files in examples/, and each of them runs."""

import asyncio
import importlib
import json
import re
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from build import SMALL
from conftest import VOCABULARY

import tba
from tba.config.plugins import resolve
from tba.config.schema import load
from tba.config.tables import PolicyTable
from tba.engines import Engine
from tba.models.pretrained import load_text
from tba.objectives.tb import TrajectoryBalance
from tba.offline.eval import Result
from tba.prompt import Answer, Prompt
from tba.tasks import Task
from tba.types import Sampling

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PAGES = ("extending", "tasks", "rewards", "from_trl")
SHOWN = dict(
    re.findall(
        r"^```\w+\n# (examples/\S+)\n(.*?)^```$",
        "".join((ROOT / "docs" / f"{page}.md").read_text() for page in PAGES),
        re.MULTILINE | re.DOTALL,
    )
)
"""Fenced blocks of the pages whose first line names a file, by that name."""

RUNS: dict[str, list[str]] = {
    "objective": [
        "objective=mylab.huber_tb.HuberTB", "objective.beta={start=0.2, end=0.1, steps=2}",
    ],
    "strategy": ["strategy=mylab.shortest_first.ShortestFirst"],
    "selection": ["selection=mylab.short_prompts_first.ShortPromptsFirst"],
    "task": [
        "task=mylab.countdown_task.Countdown", "task.prompt={numbers}={target}",
        "task.held_out_size=3",
    ],
    "engine": ["engine=mylab.recording_engine.Recording"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONPATH=examples, in the repository's root."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(ROOT)


@pytest.fixture
def small(tiny_model: Path, tmp_path: Path) -> list[str]:
    own = ["run.steps=2", "trainer.warmup_steps=1", "eval.prompts=3", "eval.samples=1", "eval.k=[]"]
    own.append("task.allow_loss=1")  # the tokenizer has no words
    return [f"policy.model={tiny_model}", f"run.folder={tmp_path / 'run'}", *SMALL, *own]


def two_steps(result: Result) -> None:
    summary = result.summary
    assert (summary.finished, summary.steps, summary.samples_trained) == (True, 2, 24)
    assert not summary.rejected
    assert summary.first.keys() == summary.last.keys() >= {"sampled_reward", "greedy_reward"}


@pytest.mark.parametrize("name", SHOWN)
def test_the_page_shows_the_file(name):
    assert SHOWN[name] == (ROOT / name).read_text().removeprefix(f"# {name}\n")


def test_the_page_shows_every_file():
    files = [*EXAMPLES.glob("mylab/*.py"), *EXAMPLES.glob("calc*")]
    files += [EXAMPLES / "python_api.py", EXAMPLES / "pairwise_judge.py"]
    files += EXAMPLES.glob("from_trl*")
    assert {str(path.relative_to(ROOT)) for path in files} <= SHOWN.keys()


@pytest.mark.parametrize("name", RUNS)
def test_the_example_runs(name, small, tmp_path):
    file = [f"engine.file={tmp_path / 'completions.jsonl'}"] if name == "engine" else []
    own = ["reward.isolate=none", "task.train_size=20", *RUNS[name], *file]
    two_steps(tba.train(load(None, [*small, *own])))


def test_the_python_example_runs(small, capsys):
    settings = [s for s in small if not s.startswith("policy.model")]  # the bundled one
    two_steps(importlib.import_module("python_api").main(settings))
    assert "held-out reward" in capsys.readouterr().out


def test_the_notebook_runs(small, monkeypatch):
    """Cell by cell within a running event loop, as in Jupyter, with other `parameters`."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    path = EXAMPLES / "quick_start.ipynb"
    settings = [s for s in small if not s.startswith(("policy.model", "sampling.max_tokens"))]
    names: dict[str, Any] = {"__name__": "__main__"}

    async def run_cells() -> None:
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                source = "".join(cell["source"])
                if "parameters" in cell["metadata"].get("tags", []):
                    source = f"settings = {settings}"
                exec(compile(source, f"{path}:{cell['id']}", "exec"), names)

    asyncio.run(run_cells())
    two_steps(names["result"])
    assert names["metrics"]["step"].tolist() == [1, 2]


# tests/test_contracts.py shows that the plug-ins keep the contracts.


def test_the_objective_is_tb_within_delta(batch):
    options = {"beta": 0.2, "delta": 1e6}
    huber = resolve("objectives", "objective", "mylab.huber_tb.HuberTB", options).build()
    loss, metrics = huber(batch.behavior_logp, batch)
    torch.testing.assert_close(loss, TrajectoryBalance(0.2)(batch.behavior_logp, batch)[0])
    assert not metrics["huber/linear"].any()


def test_the_objective_grows_linearly_beyond_delta(batch):
    options = {"beta": 0.2, "delta": 1e-3}
    huber = resolve("objectives", "objective", "mylab.huber_tb.HuberTB", options).build()
    batches = [replace(batch, reward=batch.reward * factor) for factor in (1, 2)]
    once, twice = (huber(batch.ref_logp, each)[0] for each in batches)
    torch.testing.assert_close(twice, once * 2, rtol=0.02, atol=0)


def test_the_selection_begins_with_short_prompts():
    prompts = [Prompt(str(n), "x" * n) for n in (5, 3, 9, 1, 7, 2, 8, 4, 6, 10)]
    selection = resolve(
        "selections", "selection", "mylab.short_prompts_first.ShortPromptsFirst", {"over": 90}
    ).build(prompts, 0, None)
    longest = [max(len(p.text) for p in selection.choose(10)) for _ in range(20)]
    assert (longest[0], longest[1] <= 2, longest[4] <= 5, max(longest[10:])) == (1, True, True, 10)


def test_the_tasks_rewards():
    from mylab.countdown_task import worth

    texts = ("3+5 - 2", "3+5+2", "3+5", "8-2", "", "3+5-2=6")
    assert [worth(text, [5, 2, 3], 6) for text in texts] == [1.0, 0.1, 0.0, 0.0, 0.0, 0.0]


def test_the_engine_records(tiny_model, tmp_path):
    policy = PolicyTable(model=str(tiny_model))
    text, record = load_text(policy), tmp_path / "completions.jsonl"
    engine: Engine = resolve(
        "engines", "engine", "mylab.recording_engine.Recording", {"file": str(record)}
    ).build(policy, text, "cpu", False, Sampling(5, 1.0, 4))
    prompt = text.encode(Prompt("a", "1+2="))
    (completions,) = engine.generate([prompt], Sampling(5, 1.0, 4), seed=0)
    answers = [text.decode(c.tokens) for c in completions]
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(row["version"], row["completion"]) for row in rows] == [(0, a) for a in answers]


def test_the_pairwise_judge_shares_the_wins_of_a_group(make_model):
    from pairwise_judge import QUESTION

    from tba.tasks.judges.guard import GuardModel

    folder = make_model(vocabulary=[*VOCABULARY, *string.ascii_letters, *" :\n"], context=128)
    table = {"use": "pairwise_judge:WinRate", "model": str(folder)}
    options = {"data": str(EXAMPLES / "sums.jsonl"), "reward": table}
    task: Task = resolve("tasks", "task", "custom", options).build()
    prompt, texts = task.prompts()[0], ("red", "a car", "12")
    scores = task.score(prompt, [Answer(text, True) for text in texts])
    assert isinstance(scores, list) and sum(scores) == pytest.approx(len(texts) / 2)

    judge = GuardModel(str(folder), positive="A", negative="B", template=QUESTION)
    wins = {
        (a, b): judge([prompt.text], [f"A: {a}\n\nB: {b}"])[0]
        for a in texts for b in texts if a != b
    }  # fmt: skip
    expected = [sum(wins[a, b] + 1 - wins[b, a] for b in texts if b != a) / 4 for a in texts]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert task.score(prompt, [Answer("red", True)]) == [None]

    options["reward"] = table | {"longest": 5}
    short: Task = resolve("tasks", "task", "custom", options).build()
    long = [Answer(text, True) for text in ("red", "a car", "a car" * 100)]
    _, second, third = short.score(prompt, long)
    assert second == pytest.approx(third, abs=1e-5)

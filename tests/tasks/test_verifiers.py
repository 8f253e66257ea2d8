"""Tasksets of the verifiers library, of which only prompts and rewards are used."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from build import config

from tba.assemble import run
from tba.config.plugins import resolve
from tba.prompt import Answer, Prompt
from tba.runs.setup import check
from tba.search.scoring import Scoring
from tba.tasks.verifiers import Verifiers


@pytest.fixture(autouse=True)
def needs_verifiers(request: pytest.FixtureRequest) -> None:
    if "without_it" not in request.node.name:
        pytest.importorskip("verifiers", reason="needs the extra verifiers")


def task(**options: Any) -> Verifiers:
    options = {"taskset": "echo_taskset", "held_out_size": 2, **options}
    built: Verifiers = resolve("tasks", "task", "verifiers", options).build()
    return built


def test_an_answer_has_the_weighted_sum_of_the_rewards() -> None:
    echo = task()
    prompt = echo.prompts()[3]
    stored = Prompt(**json.loads(json.dumps(vars(prompt))))
    answers = [Answer(text, True) for text in ("4", "4 of them", "", "5")]
    assert asyncio.run(echo.score(stored, answers)) == [1.875, -0.375, 0.0, -0.125]


def test_answers_are_scored_by_the_guard() -> None:
    echo = task()
    answers = [[Answer("1", True), Answer("2", True)] for _ in range(4)]
    verdicts = Scoring({"": echo})(echo.prompts()[:4], answers)
    assert verdicts == [[1.875, -0.125], [-0.125, 1.875], [-0.125, -0.125], [-0.125, -0.125]]


def test_the_last_tasks_are_held_out_and_not_trained_on() -> None:
    """The ninth and the tenth; the first has the prompt of the tenth."""
    echo = task(chat=False)
    assert [p.text for p in echo.held_out()] == ["Say 8", "Say 0"]
    assert [p.text for p in echo.prompts()] == [f"Say {i}" for i in range(1, 8)]
    assert len(task(size=6).prompts()) == 4


def test_prompts_are_chat_messages_or_text() -> None:
    options = {"options": {"system": "Be brief."}}
    chat, text = (task(chat=chat, **options).prompts()[0].text for chat in (True, False))
    assert chat == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say 1"},
    ]  # fmt: skip
    assert text == "Be brief.\n\nSay 1"


MORE = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    pass

class Task(vf.Task[Data]):
    {body}

class Taskset(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(Data(idx=i, prompt={prompt}), self.config.task) for i in range(5)]

__all__ = ["Taskset"]
"""
REWARD = "@vf.reward\n    async def right(self, trace) -> float:\n        return 1.0"
REFUSED = {
    "setup": f"{REWARD}\n\n    async def setup(self, trace, runtime):\n        pass",
    "container": f"NEEDS_CONTAINER = True\n\n    {REWARD}",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_takes_more_than_an_answer_is_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = MORE.format(body=REFUSED[case], prompt="str(i)")
    (tmp_path / f"taskset_{case}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="has tools, a container, or set-up in a runtime; only"):
        task(taskset=f"taskset_{case}").prompts()


def test_a_prompt_that_is_not_text_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taskset_silent.py").write_text(MORE.format(body=REWARD, prompt="None"))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="task 0 has a prompt that is not text, or none"):
        task(taskset="taskset_silent").prompts()


def test_the_task_runs(tiny_model: Path, tmp_path: Path) -> None:
    settings = ["task=verifiers", "task.taskset=echo_taskset", "task.chat=false"]
    settings += ["task.held_out_size=2", "task.pass_reward=1.5", "run.steps=2"]
    summary = run(config(tiny_model, tmp_path, *settings))
    assert summary.finished and not summary.rejected
    assert "greedy_pass@1" in summary.last


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"taskset": "no_such_taskset"}, "task.taskset = 'no_such_taskset' with"),
    "no taskset": ({"taskset": "json"}, "task.taskset = 'json' with"),
    "option": ({"options": {"systm": "x"}}, "with task.options = "),
    "value": ({"options": {"tasks": "many"}}, "with task.options = "),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_told_at_once(case: str) -> None:
    options, told = WRONG[case]
    with pytest.raises(ValueError) as error:
        task(**options)
    assert told in str(error.value)


def test_without_it_the_pip_command_is_told(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr("tba.tasks.verifiers.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs verifiers: pip install verifiers"):
        check(config(tiny_model, tmp_path, "task=verifiers", "task.taskset=echo_taskset"))

"""Several tasks in one run: prompts in proportion, each part scored and measured by itself."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from build import answered, config, resumes_exactly

from tba.config.plugins import resolve
from tba.open import run
from tba.prompt import Answer, Prompt
from tba.runs.folder import METRICS, read
from tba.search.prompts import PromptStream
from tba.setup.setup import check
from tba.tasks.mixture import TaskMixture

MIXED = (
    "task=mixture", "task.parts.ones.use=toy.Ones", "task.parts.ones.weight=3",
    "task.parts.toy.use=toy.Toy",
)  # fmt: skip


def mixture(parts: dict[str, dict[str, Any]]) -> TaskMixture:
    built: TaskMixture = resolve("tasks", "task", "mixture", {"parts": parts}).build()
    return built


def part(prompt: Prompt) -> str:
    return prompt.id.partition("/")[0]


def stream(model: Path, folder: Path, *settings: str) -> PromptStream:
    return check(config(model, folder, *MIXED, *settings)).prompt_stream()


def test_an_answer_is_scored_by_the_task_of_its_prompt():
    task = mixture({"ones": {"use": "toy.Ones"}, "toy": {"use": "toy.Toy"}})
    answers = [Answer("12", True), Answer("2", False)]
    prompts = {part(p): p for p in task.prompts()}
    assert task.score(prompts["ones"], answers) == [1.0, 0.0]
    assert task.score(prompts["toy"], answers) == [pytest.approx(0.4), -0.2]
    assert [task.part(prompts[name])[1].pass_reward for name in prompts] == [1.0, None]
    assert task.pass_reward is None


def test_a_part_knows_its_prompts_by_their_own_ids_and_may_be_async(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "1", "answer": "a"}\n' * 3)
    (tmp_path / "f.py").write_text("async def right(completions, answer):\n    return [1.0, None]")
    words = {"use": "custom", "data": f"{tmp_path}/data.jsonl", "reward": f"{tmp_path}/f.py:right"}
    more = {"use": "arithmetic", "train_size": 5}
    task = mixture({"words": words | {"held_out_size": 1}, "more": more})
    prompt = next(p for p in task.prompts() if part(p) == "words")
    assert prompt.id == "words/train-0"
    scores = task.score(prompt, [Answer("x", True), Answer("y", True)])
    assert asyncio.run(scores) == [1.0, None]  # type: ignore[arg-type]


def test_any_beginning_of_the_held_out_prompts_has_the_weights():
    small = {"use": "arithmetic", "train_size": 5, "held_out_size": 40}
    task = mixture({"a": small | {"weight": 3.0}, "b": small | {"seed": 1}})
    chosen = [part(p) for p in task.held_out()]
    for count in (4, 8, 20, 52):
        assert Counter(chosen[:count]) == {"a": count * 3 // 4, "b": count // 4}
    assert Counter(chosen) == {"a": 40, "b": 40}


@pytest.mark.parametrize("selection", ["cyclic", "uniform"])
def test_prompts_come_in_proportion_to_the_weights_at_any_time(tiny_model, tmp_path, selection):
    prompts = stream(tiny_model, tmp_path, f"selection={selection}")
    chosen: list[str] = []
    for count in (1, 2, 3, 5, 8, 0, 21):
        chosen += [part(p) for p in prompts.take(count)]
        assert abs(chosen.count("ones") - 0.75 * len(chosen)) < 1


def test_a_resumed_stream_goes_on_as_it_would_have(tiny_model, tmp_path):
    whole, resumed = (stream(tiny_model, tmp_path) for _ in range(2))
    taken = whole.take(5)
    whole.done(taken, [])
    resumed.seek(json.loads(json.dumps(whole.cursor())))
    assert [resumed.take(n) for n in (3, 1, 7)] == [whole.take(n) for n in (3, 1, 7)]


def test_a_resumed_run_equals_the_uninterrupted_one(tiny_model, tmp_path):
    resumes_exactly(tiny_model, tmp_path, *MIXED)


def test_each_part_is_selected_by_its_own_pass_reward(tiny_model, tmp_path):
    """A reward of 1 is right in one part and wrong in the other."""
    settings = (
        "task=mixture", "selection=difficulty", "task.parts.low.use=toy.Ones",
        "task.parts.high.use=toy.Ones", "task.parts.high.pass_reward=2.0", "eval.prompts=0",
    )  # fmt: skip
    prompts = check(config(tiny_model, tmp_path, *settings)).prompt_stream()
    taken = prompts.take(2)
    prompts.done(taken, [answered(p, right=4, answers=4) for p in taken])
    parts = prompts.cursor()["state"]["parts"]
    (low,), (high,) = (parts[name]["posterior"].values() for name in ("low", "high"))
    assert (low, high) == ([5.0, 1.0], [1.0, 5.0])


def test_metrics_come_for_each_part(tiny_model, tmp_path):
    run(config(tiny_model, tmp_path, *MIXED, "eval.prompts=8", "trainer.batch_size=16"))
    rows = read(tmp_path / METRICS)
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 8
    for row in steps:
        names = [name for name in ("ones", "toy") if f"parts/{name}/share" in row]
        shares = [row[f"parts/{name}/share"] for name in names]
        rewards = [row[f"parts/{name}/reward"] for name in names]
        assert sum(shares) == pytest.approx(1)
        mean = sum(s * r for s, r in zip(shares, rewards, strict=True))
        assert row["reward"] == pytest.approx(mean, abs=1e-6)
        assert row.get("parts/ones/pass@1") == row.get("parts/ones/reward")  # it is 0 or 1
        assert "parts/toy/pass@1" not in row
    shares = [row.get("parts/ones/share", 0.0) for row in steps]
    assert 0.5 < sum(shares) / len(shares) <= 1
    evaluations = [row for row in rows if "eval/sampled_reward" in row]
    assert all("eval/ones/sampled_pass@1" in row for row in evaluations)
    assert not any("eval/sampled_pass@1" in row for row in evaluations)


SUMS = {"use": "arithmetic", "train_size": 5}
MEAN = "statistics:fmean"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "task.parts = {}: Dictionary should have at least 1 item"),
    "no task": ({"a": {"weight": 2}}, "task.parts.a.use is missing"),
    "unknown": ({"a": {"use": "arithmetics"}}, "no tasks called 'arithmetics'; did you mean"),
    "option": ({"a": SUMS | {"digit": 2}}, "no such option; did you mean 'digits'?"),
    "value": ({"a": SUMS | {"digits": 0}}, "[task.parts.a]: task.digits = 0: give 1 to 9"),
    "weight": ({"a": SUMS | {"weight": 0}}, "task.parts.a.weight = 0: Input should be"),
    "text": (
        {"a": SUMS | {"weight": "2"}},
        "task.parts.a.weight = '2': Input should be a valid number",
    ),
    "name": ({"a/b": SUMS}, "[task.parts.a/b]: 'a/b' must be letters, digits"),
    "measures": ({"a": {"use": "tldr", "proxy": MEAN, "gold": MEAN}}, "= 'tldr' has parts, measu"),
    "own way": (
        {"a": {"use": "redteam", "victim": "./none", "judge": MEAN}},
        "= 'redteam' has parts",
    ),
    "program": (
        {"a": {"use": "agent", "data": "", "rollout": "random:random"}},
        "dialogues or a program, which a part",
    ),
    "nested": ({"a": {"use": "mixture", "parts": {"b": SUMS}}}, "a.use = 'mixture' has parts"),
}


def test_an_error_about_the_data_of_a_part_names_the_part(tmp_path):
    (tmp_path / "few.jsonl").write_text('{"prompt": "1", "answer": "a"}\n' * 3)
    part = {"use": "custom", "data": f"{tmp_path}/few.jsonl", "reward": "math:fsum"}
    with pytest.raises(ValueError, match=r"^\[task.parts.words\]: task.data = .* has only 3 rows"):
        mixture({"words": part}).prompts()
    missing = part | {"held_out_data": "nowhere.jsonl"}
    with pytest.raises(ValueError, match=r"^\[task.parts.words\]: task.held_out_data = 'nowhere"):
        mixture({"words": missing}).held_out()


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_told_before_anything_starts(case):
    parts, told = WRONG[case]
    with pytest.raises(ValueError) as error:
        mixture(parts)
    assert told in str(error.value)

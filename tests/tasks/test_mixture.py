"""Several tasks in one run: prompts in proportion, each source scored and measured by itself."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from build import answered, config, resumes_exactly

from tba.config.schema import Config
from tba.open import run
from tba.prompt import Answer, Prompt
from tba.runs.folder import METRICS, read
from tba.search.prompts import PromptStream
from tba.setup.setup import check
from tba.tasks._memory import build_task
from tba.tasks.mixture import TaskMixture

MIXED = (
    "task=mixture", "task.sources.ones={use='toy.Ones',weight=3}",
    "task.sources.toy={use='toy.Toy',weight=1}",
)  # fmt: skip


def mixture(sources: dict[str, dict[str, Any]]) -> TaskMixture:
    weighted = {name: {"weight": 1, **source} for name, source in sources.items()}
    built = build_task(Config(task={"use": "mixture", "sources": weighted}).task, None)
    assert isinstance(built, TaskMixture)
    return built


def source(prompt: Prompt) -> str:
    return prompt.id.partition("/")[0]


def stream(model: Path, folder: Path, *settings: str) -> PromptStream:
    return check(config(model, folder, *MIXED, *settings)).prompt_stream()


def test_an_answer_is_scored_by_the_task_of_its_prompt():
    task = mixture({"ones": {"use": "toy.Ones"}, "toy": {"use": "toy.Toy"}})
    answers = [Answer("12", True), Answer("2", False)]
    prompts = {source(p): p for p in task.prompts()}
    assert task.score(prompts["ones"], answers) == [1.0, 0.0]
    assert task.score(prompts["toy"], answers) == [pytest.approx(0.4), -0.2]
    assert [task.source(prompts[name])[1].pass_reward for name in prompts] == [1.0, None]
    assert task.pass_reward is None


def test_a_source_knows_its_prompts_by_their_own_ids_and_may_be_async(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "1", "answer": "a"}\n' * 3)
    (tmp_path / "f.py").write_text("async def right(completions, answer):\n    return [1.0, None]")
    words = {"use": "custom", "data": f"{tmp_path}/data.jsonl", "reward": f"{tmp_path}/f.py:right"}
    more = {"use": "arithmetic", "train_size": 5}
    task = mixture({"words": words | {"held_out_size": 1}, "more": more})
    prompt = next(p for p in task.prompts() if source(p) == "words")
    assert prompt.id == "words/train-0"
    scores = task.score(prompt, [Answer("x", True), Answer("y", True)])
    assert asyncio.run(scores) == [1.0, None]  # type: ignore[arg-type]


def test_any_beginning_of_the_held_out_prompts_has_the_weights():
    small = {"use": "arithmetic", "train_size": 5, "held_out_size": 40}
    task = mixture({"a": small | {"weight": 3.0}, "b": small | {"seed": 1}})
    chosen = [source(p) for p in task.held_out()]
    for count in (4, 8, 20, 52):
        assert Counter(chosen[:count]) == {"a": count * 3 // 4, "b": count // 4}
    assert Counter(chosen) == {"a": 40, "b": 40}


@pytest.mark.parametrize("selection", ["cyclic", "uniform"])
def test_prompts_come_in_proportion_to_the_weights_at_any_time(tiny_model, tmp_path, selection):
    prompts = stream(tiny_model, tmp_path, f"selection={selection}")
    chosen: list[str] = []
    for count in (1, 2, 3, 5, 8, 0, 21):
        chosen += [source(p) for p in prompts.take(count)]
        assert abs(chosen.count("ones") - 0.75 * len(chosen)) < 1


def test_a_resumed_stream_goes_on_as_it_would_have(tiny_model, tmp_path):
    whole, resumed = (stream(tiny_model, tmp_path) for _ in range(2))
    taken = whole.take(5)
    whole.done(taken, [])
    resumed.seek(json.loads(json.dumps(whole.cursor())))
    assert [resumed.take(n) for n in (3, 1, 7)] == [whole.take(n) for n in (3, 1, 7)]


def test_a_resumed_run_equals_the_uninterrupted_one(tiny_model, tmp_path):
    resumes_exactly(tiny_model, tmp_path, *MIXED)


def test_each_source_is_selected_by_its_own_pass_reward(tiny_model, tmp_path):
    """A reward of 1 is right in one source and wrong in the other."""
    settings = (
        "task=mixture", "selection=difficulty", "task.sources.low={use='toy.Ones',weight=1}",
        "task.sources.high={use='toy.Ones',weight=1,pass_reward=2.0}", "eval.prompts=0",
    )  # fmt: skip
    prompts = check(config(tiny_model, tmp_path, *settings)).prompt_stream()
    taken = prompts.take(2)
    prompts.done(taken, [answered(p, right=4, answers=4) for p in taken])
    states = prompts.cursor()["state"]["sources"]
    (low,), (high,) = (states[name]["posterior"].values() for name in ("low", "high"))
    assert (low, high) == ([5.0, 1.0], [1.0, 5.0])


def test_metrics_come_for_each_source(tiny_model, tmp_path):
    run(config(tiny_model, tmp_path, *MIXED, "eval.prompts=8", "trainer.batch_size=16"))
    rows = read(tmp_path / METRICS)
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 8
    for row in steps:
        names = [name for name in ("ones", "toy") if f"sources/{name}/share" in row]
        shares = [row[f"sources/{name}/share"] for name in names]
        rewards = [row[f"sources/{name}/reward"] for name in names]
        assert sum(shares) == pytest.approx(1)
        mean = sum(s * r for s, r in zip(shares, rewards, strict=True))
        assert row["reward"] == pytest.approx(mean, abs=1e-6)
        assert row.get("sources/ones/pass@1") == row.get("sources/ones/reward")  # it is 0 or 1
        assert "sources/toy/pass@1" not in row
    shares = [row.get("sources/ones/share", 0.0) for row in steps]
    assert 0.5 < sum(shares) / len(shares) <= 1
    evaluations = [row for row in rows if "eval/sampled_reward" in row]
    assert all("eval/ones/sampled_pass@1" in row for row in evaluations)
    assert not any("eval/sampled_pass@1" in row for row in evaluations)


SUMS = {"use": "arithmetic", "train_size": 5}
MEAN = "statistics:fmean"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "task.use = mixture needs tables [task.sources.NAME] with a weight above 0"),
    "only 0": ({"a": SUMS | {"weight": 0}}, "task.use = mixture needs tables [task.sources.NAME]"),
    "no task": ({"a": {"weight": 2}}, "task.use = mixture needs task.sources.a.use"),
    "unknown": ({"a": {"use": "arithmetics"}}, "no tasks called 'arithmetics'; did you mean"),
    "option": ({"a": SUMS | {"digit": 2}}, "no such option; did you mean 'digits'?"),
    "value": ({"a": SUMS | {"digits": 0}}, "[task.sources.a]: task.digits = 0: give 1 to 9"),
    "weight": ({"a": SUMS | {"weight": -1}}, "task.sources.a.weight = -1: Input should be"),
    "text": (
        {"a": SUMS | {"weight": "2"}},
        "task.sources.a.weight = '2': Input should be a valid number",
    ),
    "name": ({"a/b": SUMS}, "[task.sources.a/b]: 'a/b' must be letters, digits"),
    "measures": (
        {"a": {"use": "tldr", "proxy": MEAN, "gold": MEAN}},
        "[task.sources.a] has measures",
    ),
    "own way": (
        {"a": {"use": "redteam", "victim": "./none", "judge": MEAN}},
        "[task.sources.a] has measures, attacks",
    ),
    "program": (
        {"a": {"use": "agent", "data": "", "rollout": "random:random"}},
        "dialogues or a program, which a mixture cannot train on",
    ),
    "nested": ({"a": {"use": "mixture"}}, "task.sources.a.use = mixture needs to be another task"),
}


def test_an_error_about_the_data_of_a_source_names_the_source(tmp_path):
    (tmp_path / "few.jsonl").write_text('{"prompt": "1", "answer": "a"}\n' * 3)
    words = {"use": "custom", "data": f"{tmp_path}/few.jsonl", "reward": "math:fsum"}
    with pytest.raises(
        ValueError, match=r"^\[task.sources.words\]: task.data = .* has only 3 rows"
    ):
        mixture({"words": words}).prompts()
    missing = words | {"held_out_data": "nowhere.jsonl"}
    with pytest.raises(ValueError, match=r"^\[task.sources.words\]: task.held_out_data = 'nowhere"):
        mixture({"words": missing}).held_out()


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_told_before_anything_starts(case):
    sources, told = WRONG[case]
    with pytest.raises(ValueError) as error:
        mixture(sources)
    assert told in str(error.value)


def test_an_earlier_spelling_names_the_table_to_use():
    with pytest.raises(ValueError, match=r"task\.parts: .* removed; use \[task\.sources\.NAME\]$"):
        Config(task={"use": "mixture", "parts": {"a": SUMS}})
    with pytest.raises(
        ValueError, match=r"'eval\.sets': .* use \[task\.sources\.NAME\] with weight"
    ):
        Config(eval={"sets": {"a": SUMS, "b": SUMS}})


def test_only_a_mixture_trains_on_sources():
    with pytest.raises(ValueError, match=r"task\.sources\.a\.weight = 2 needs task\.use=mixture"):
        Config(task={"sources": {"a": SUMS | {"weight": 2}}})
    with pytest.raises(ValueError, match=r"task\.sources\.a\.weight is missing"):
        Config(task={"sources": {"a": SUMS}})


def test_a_mixture_also_evaluates_sources_that_it_does_not_train_on(tiny_model, tmp_path):
    more = ("task.sources.more={use='toy.Ones',weight=0,held_out_size=3}", "eval.prompts=5")
    setup = check(config(tiny_model, tmp_path, *MIXED, *more))
    assert {source(prompt) for prompt in setup.prompts} == {"ones", "toy"}
    assert len(setup.held_out) == 5
    assert {name: len(prompts) for name, prompts in setup.evaluated.items()} == {"more": 3}

"""Sources that are only evaluated, next to the held-out prompts, each scored by its own task."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from build import config, without_clock
from toy import Ones

import tba
from tba.offline.eval import evaluate_run
from tba.open import run
from tba.prompt import Prompt
from tba.runs.folder import METRICS, read
from tba.setup.setup import check

FIVE = {"data": "own.jsonl", "reward": "f.py:five"}
MORE = ("task.sources.more={use='toy.Ones',weight=0,held_out_size=3}",)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Rows to train on, an own set of other rows, and two functions."""
    for name, first in (("train", 100), ("own", 200), ("mixed", 104)):
        rows = [{"prompt": f"{i}+1="} for i in range(first, first + 8)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "f.py").write_text(
        "def zero(completions):\n    return [0.0] * len(completions)\n"
        "def five(completions):\n    return [5.0] * len(completions)\n"
    )
    return tmp_path


def custom(files: Path, *settings: str) -> list[str]:
    reward = f"task.reward={files}/f.py:zero"
    data = ["task=custom", f"task.data={files}/train.jsonl", "task.held_out_size=2"]
    return [*data, reward, "eval.prompts=2", *settings]


def test_sets_are_evaluated_at_the_same_times_under_their_names(tiny_model, tmp_path, capsys):
    folder = tmp_path / "run"
    run(config(tiny_model, folder, *MORE, "run.steps=4", "log.console=lines"))
    shown = capsys.readouterr().out
    assert "300 training prompts, evaluating 5 of 20 held-out prompts, 3 in more" in shown
    assert shown.count(": more  pass@1 sampled ") == 3
    evaluations = [row for row in read(folder / METRICS) if "eval/sampled_reward" in row]
    assert [row["step"] for row in evaluations] == [0, 3, 4]
    for row in evaluations:
        names = {name for name in row if name.startswith("eval/more/")}
        plain = {name for name in row if name.startswith("eval/")} - names
        assert names == {name.replace("eval/", "eval/more/") for name in plain - {"eval/seconds"}}
    told = evaluate_run(folder, [], reference=False)
    assert told["more/greedy_reward"] == evaluations[-1]["eval/more/greedy_reward"]


def test_an_evaluation_warns_of_prompts_that_the_run_was_trained_on(
    tiny_model, tmp_path, files, caplog
):
    folder = tmp_path / "run"
    run(config(tiny_model, folder, *custom(files), "run.steps=3"))
    evaluate_run(folder, [], reference=False)
    assert not caplog.messages
    more = ["task.held_out_size=6", "eval.prompts=6"]
    evaluate_run(folder, more, reference=True)
    assert not caplog.messages
    assert evaluate_run(folder, more, reference=False)["prompts"] == 6
    assert "the run was trained on 4 of these 6 held-out prompts" in caplog.text


def test_the_held_out_scores_do_not_depend_on_other_sets(tiny_model, tmp_path):
    rows = []
    for name, more in (("without", ()), ("with", MORE)):
        run(config(tiny_model, tmp_path / name, *more, "run.steps=2"))
        metrics = without_clock(read(tmp_path / name / METRICS))
        own = [row for row in metrics if "eval/sampled_reward" in row]
        rows.append([{k: v for k, v in r.items() if "/more/" not in k} for r in own])
    assert rows[0] == rows[1]


def test_a_set_without_a_task_has_that_of_the_run_with_other_options(tiny_model, tmp_path, files):
    own = [f"task.sources.own={{weight=0,held_out_size=8,held_out_data='{files}/own.jsonl'}}"]
    other = ["task.sources.five={use='custom',weight=0,held_out_size=2}"]
    other += [f"task.sources.five.{key}={files}/{name}" for key, name in FIVE.items()]
    settings = custom(files, *own, *other, "task.held_out_size=6", "eval.prompts=6", "run.steps=2")
    parts = check(config(tiny_model, tmp_path / "run", *settings))
    assert [p.text for p in parts.evaluated["own"]] == [f"{i}+1=" for i in range(200, 206)]
    assert [p.text for p in parts.evaluated["five"]] == ["206+1=", "207+1="]
    run(parts.config)
    (*_, last) = [r for r in read(tmp_path / "run" / METRICS) if "eval/sampled_reward" in r]
    rewards = [last[f"eval/{name}sampled_reward"] for name in ("", "own/", "five/")]
    assert rewards == [0.0, 0.0, 5.0]


def test_functions_from_python_score_a_set_of_the_same_task(tiny_model, tmp_path, files):
    sets = [f"task.sources.own={{weight=0,held_out_data='{files}/own.jsonl'}}", "eval.prompts=2"]
    sets.append("run.steps=1")
    settings = config(tiny_model, tmp_path / "run", "task=custom", "task.held_out_size=2", *sets)
    rows = [{"prompt": f"{i}+1="} for i in range(8)]
    result = tba.train(settings, data=rows, reward=lambda completions: [3.0] * len(completions))
    assert result.summary.last["own/sampled_reward"] == 3.0


def test_prompts_that_are_trained_on_are_left_out_with_a_warning(
    tiny_model, tmp_path, files, caplog
):
    """Of 104 to 111, the run trains on 104 and 105, and holds 106 and 107 out."""
    of_source = f"{{weight=0,held_out_size=8,held_out_data='{files}/mixed.jsonl'}}"
    settings = custom(files, f"task.sources.mixed={of_source}", "eval.prompts=")
    settings.append("task.allow_loss=0.01")
    told = "2 of 8 task.sources.mixed prompts are trained on, and left out"
    with pytest.raises(ValueError, match=f"{told}, more than task.allow_loss"):
        check(config(tiny_model, tmp_path / "run", *settings))
    settings[-1] = "task.allow_loss=0.25"
    parts = check(config(tiny_model, tmp_path / "run", *settings))
    assert [p.text for p in parts.evaluated["mixed"]] == [f"{i}+1=" for i in range(106, 112)]
    assert told in caplog.text


A = "[task.sources.a]: "
WRONG = {
    "a.use=gsm9k": f"{A}no tasks called 'gsm9k'; did you mean 'gsm8k'?",
    "a.digits=4": f"{A}task.digits: 'toy.Ones' has no such option",
    "a.allow_loss=1": f"{A}task.allow_loss: 'toy.Ones' has no such option",
    "a/b.size=4 a/b.weight=0": "[task.sources.a/b]: 'a/b' must be letters, digits",
    "a.use=test_sets.Unreachable": f"{A}no judge answers",
    "a={use='gsm8k',data='/nowhere',weight=0}": f"{A}task.data = '/nowhere'",
    "a.use=test_sets.Trained": f"{A}all of its prompts are trained on",
    "a.use=test_sets.Nothing": f"{A}it has no held-out prompts",
}


@dataclass(frozen=True)
class Trained(Ones):
    """Holds out what `Ones` trains on."""

    def held_out(self) -> Sequence[Prompt]:
        return self.prompts()[:3]


@dataclass(frozen=True)
class Nothing(Ones):
    """Holds nothing out."""

    def held_out(self) -> Sequence[Prompt]:
        return []


@dataclass(frozen=True)
class Unreachable(Ones):
    """Has a judge that cannot be reached."""

    def check(self) -> None:
        raise ValueError("no judge answers")

    def load(self, device: str) -> None:
        raise AssertionError("it was not checked")


@pytest.mark.parametrize("keys", WRONG)
def test_a_mistake_is_told_before_anything_starts(tiny_model, tmp_path, keys):
    weight = () if "/" in keys else ("a.weight=0",)
    settings = [f"task.sources.{key}" for key in (*weight, *keys.split())]
    with pytest.raises(ValueError, match=re.escape(WRONG[keys])):
        check(config(tiny_model, tmp_path, *settings))


def test_a_source_is_a_table_and_needs_evaluations(tiny_model, tmp_path):
    told = r"task\.sources\.a = 3: write a table, \[task\.sources\.a\], with its keys"
    with pytest.raises(ValueError, match=told):
        config(tiny_model, tmp_path, "task.sources.a=3")
    with pytest.raises(ValueError, match=r"sources\.more\.weight = 0 needs held-out prompts"):
        check(config(tiny_model, tmp_path, *MORE, "eval.prompts=0"))

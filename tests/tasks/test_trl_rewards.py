"""Reward functions written for TRL: what they are passed, and what becomes of what they log."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from build import config, resumes_exactly

import tba
from tba.config.plugins import Plugin, resolve
from tba.prompt import Answer, Prompt
from tba.runs.folder import METRICS, SAMPLES, read
from tba.scoring.scoring import Scoring, ScoringProcess
from tba.tasks import Task
from tba.tasks.custom import metric_names

TAKEN = ("loss", "step", "requested", "eval/sampled_reward")
"""Names of metrics that `lengths` logs too."""
REWARDS = """
calls = []

def ones(completions, log_extra, **columns):
    log_extra("backwards", [text[::-1] for text in completions])
    calls.append([float(text.count("1")) for text in completions])
    return calls[-1]

def lengths(completion_ids, trainer_state, log_metric, **columns):
    log_metric("progress", trainer_state.global_step / trainer_state.max_steps)
    for name in TAKEN:
        log_metric(name, -1.0)
    log_metric("undefined", float("nan"))
    return [float(len(ids)) if len(ids) < 5 else None for ids in completion_ids]

def logs_too_few(completions, log_extra):
    log_extra("thoughts", ["one"])
    return [0.0] * len(completions)

class Longer:
    __name__ = "longer_reward"

    def __init__(self, than):
        self.than = than

    def __call__(self, completion_ids, **kwargs):
        return [float(len(ids) > self.than) for ids in completion_ids]

def __getattr__(name):
    late = {"longer": Longer(4), "get_longer": lambda than: Longer(than)}
    if name not in late:
        raise AttributeError(name)
    return late[name]
"""
"""A module whose last two functions are loaded when they are asked for, as those of TRL."""

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(40)]
ANSWERS = [
    Answer("110", True, tokens=(4, 4, 3, 1), version=3),
    Answer("21011", False, tokens=(5, 4, 3, 4, 4), version=4),
]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plugin]:
    """A task over the rows, with functions of the module above or those named in full."""
    (tmp_path / "trl_like.py").write_text(f"TAKEN = {TAKEN}\n{REWARDS}")
    monkeypatch.syspath_prepend(tmp_path)

    def make(*rewards: Any, **options: Any) -> Plugin:
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        short = [isinstance(r, str) and r.isidentifier() for r in rewards]
        named = [f"trl_like:{r}" if s else r for r, s in zip(rewards, short, strict=True)]
        given = {"data": str(data), "reward": named, "held_out_size": 1, **options}
        return resolve("tasks", "task", "custom", given)

    return make


@pytest.fixture
def calls(plugin: Callable[..., Plugin]) -> list[list[float]]:
    """What `ones` returns in this process, by call."""
    import trl_like

    trl_like.calls.clear()
    return trl_like.calls


def judged(
    task: Task, answers: Sequence[Answer], process: ScoringProcess | None = None
) -> list[Any]:
    guard = Scoring({"": task}, process, 60.0, steps=20)
    (verdicts,) = guard([task.prompts()[0]], [answers])
    guard.close()
    return verdicts


@pytest.mark.parametrize("isolated", [False, True])
def test_functions_get_what_trl_passes_and_log_as_in_trl(plugin, isolated):
    """Also through the process that scores. The second function does not apply to five tokens."""
    made = plugin("ones", "lengths", reward_weights=[1.0, 0.5])
    process = ScoringProcess({"": made.build}, 1.0) if isolated else None
    first, second = judged(made.build(), ANSWERS, process)
    assert (first, second) == (2.0 + 0.5 * 4, 3.0)
    logged = {"progress": 4 / 20}  # by the newest weights that began one of them
    logged |= dict.fromkeys(TAKEN, -1.0)
    assert first.items == {"rewards/ones": 2.0, "rewards/lengths": 4.0, **logged}
    assert second.items == {"rewards/ones": 3.0, **logged}
    assert (first.notes, second.notes) == ({"backwards": "011"}, {"backwards": "11012"})


def test_log_extra_needs_a_value_for_each_completion(plugin):
    """One completion alone has one."""
    task = plugin("logs_too_few").build()
    with pytest.raises(ValueError, match=r"log_extra\('thoughts', ...\) got 1 values for 2"):
        task.score(Prompt("0", "1+1="), ANSWERS)
    assert judged(task, ANSWERS) == [0.0, 0.0]


def test_functions_of_a_lazy_module_and_instances_are_found(plugin):
    """As in `trl.rewards`: an instance, and one that a factory makes."""
    table = {"use": "trl_like:get_longer", "than": 3}
    verdicts = judged(plugin("longer", table).build(), ANSWERS)
    assert verdicts == [1.0, 2.0]
    assert verdicts[1].items == {"rewards/longer_reward": 1.0, "rewards/longer_reward_2": 1.0}
    with pytest.raises(ValueError, match="trl_like has no function 'shorter'"):
        plugin("shorter").build()


def test_functions_are_named_as_in_trl():
    partial = functools.partial(functools.partial(judged), answers=[])
    functions = [judged, partial, lambda completions: [], ScoringProcess, Prompt("0", "x"), judged]
    expected = ["judged", "judged_2", "<lambda>", "ScoringProcess", "Prompt", "judged_3"]
    assert metric_names(functions) == expected


def settings(plugin: Callable[..., Plugin]) -> list[str]:
    """A run with two functions."""
    options = plugin("ones", "lengths", reward_weights=[1.0, 0.5]).options
    return ["task=custom", *(f"task.{name}={json.dumps(v)}" for name, v in options.items())]


def test_a_run_logs_each_function(tiny_model, tmp_path, plugin, calls):
    """Over the samples that have arrived since the step before, with TRL's standard deviation."""
    more = ("eval.prompts=0", "run.steps=4")
    tba.train(config(tiny_model, tmp_path / "run", *settings(plugin), *more))
    rows = read(tmp_path / "run" / METRICS)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and len(calls) == 5 * 3
    for row, own in zip(rows, (calls[:6], calls[6:9], calls[9:12], calls[12:]), strict=True):
        given = [reward for call in own for reward in call]
        assert row["rewards/ones/mean"] == pytest.approx(fmean(given))
        assert row["rewards/ones/std"] == pytest.approx(stdev(given))
    means = [row["rewards/lengths/mean"] for row in rows if "rewards/lengths/mean" in row]
    assert means and all(1 <= mean < 5 for mean in means)  # where it applies
    assert [row["progress"] for row in rows] == pytest.approx([0.125, 0.5, 0.75, 1.0])
    for name in TAKEN:
        assert all(row[f"logged/{name}"] == -1.0 != row.get(name) for row in rows)
    assert not any("undefined" in row for row in rows)


def test_held_out_samples_have_what_was_logged_about_them(tiny_model, tmp_path, plugin):
    more = ("run.steps=1", "reward.isolate=process")
    tba.train(config(tiny_model, tmp_path / "run", *settings(plugin), *more))
    samples = [row for row in read(tmp_path / "run" / SAMPLES) if row["kind"] == "eval"]
    assert len(samples) == 2  # before and after
    for row in samples:
        notes = row["notes"]
        assert notes["backwards"] == row["completion"][::-1]
        lengths = notes.get("rewards/lengths", 0.0)
        assert row["reward"] == notes["rewards/ones"] + 0.5 * lengths


def test_a_resumed_run_logs_what_the_uninterrupted_one_does(tiny_model, tmp_path, plugin):
    resumes_exactly(tiny_model, tmp_path, *settings(plugin))

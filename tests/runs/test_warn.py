"""Each warning: when it is given, that it is given once, and that the summary repeats it."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from build import config, stopped

from tba.cli import _config
from tba.config.schema import load
from tba.open import run
from tba.replay.buffer import STEPS
from tba.runs.folder import METRICS, WARNINGS, read, read_warnings, rewind
from tba.runs.journal import Journal
from tba.runs.warn import FIRST, WINDOW, RunWarning, Warnings

SOUND = {
    "frac_reward_zero_std": 0.1, "completions/clipped_ratio": 0.05, "off_policy/ess": 0.9,
    "kl/k3": 0.002, "sync/logp_gap_max": 0.001, "wait/trainer": 0.0,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, float], str]] = {
    "equal_rewards": (
        {"frac_reward_zero_std": 0.6},
        "60% of the groups (more than 50%) have equal rewards",
    ),
    "graded": ({"tb/graded": 0.25}, "25% of the rewards are neither 0 nor 1"),
    "accepted": ({"raft/accepted": 0.0}, "objective=raft has accepted no response"),
    "cut_off": ({"completions/clipped_ratio": 0.3}, "30% of the responses are cut off"),
    "ess": ({"off_policy/ess": 0.4}, "the effective sample size is 40% of a group"),
    "reuse": ({"wait/trainer": 0.1}, "the trainer waited for new samples for 10% of the time"),
}
SECONDS = count()


def warnings(*settings: str) -> Warnings:
    return Warnings(load(None, ["trainer.warmup_steps=20", *settings]))


def given(own: Warnings, metrics: dict[str, float], steps: int) -> list[str]:
    """Return what is given in so many steps with these metrics."""
    return [text for _ in range(steps) for text in texts(own.step(row(metrics)))]


def row(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics of a step, which took a second."""
    return {**SOUND, "time": float(next(SECONDS)), **metrics}


def texts(signs: list[RunWarning]) -> list[str]:
    return [text for _, text in signs]


def test_a_sound_run_has_no_warnings():
    own = warnings()
    assert own.start() == given(own, {}, 3 * FIRST) == own.end() == own.texts == []


@pytest.mark.parametrize("case", CASES)
def test_a_metric_beyond_its_threshold_warns_once(case):
    """After enough steps, and with words for what to do."""
    metrics, words = CASES[case]
    own = warnings()
    assert given(own, metrics, WINDOW - 1) == []
    (text,) = given(own, metrics, STEPS)
    assert text.startswith(words)
    assert own.texts == [text] and own.end() == []


@pytest.mark.parametrize("case", CASES)
def test_a_short_run_warns_at_its_end(case):
    metrics, words = CASES[case]
    own = warnings()
    assert given(own, metrics, 3) == []
    ((key, text),) = own.end()
    assert key == case and text.startswith(words)


def test_equal_rewards_are_left_to_objectives_that_learn_from_them():
    """Of groups of which all answers are right, `tb` keeps the reference's proportions."""
    config = load(None, ["trainer.warmup_steps=20"])
    own = Warnings(config, learns_from_equal=True)
    assert given(own, {"frac_reward_zero_std": 0.9}, WINDOW) == []
    for learns, share, most in ((False, 0.6, 50), (True, 0.95, 90)):
        own = Warnings(config, learns_from_equal=learns)
        (text,) = given(own, {"frac_reward_zero_std": share}, WINDOW)
        assert text.startswith(f"{share:.0%} of the groups (more than {most}%) have equal rewards")
        assert ("selection=difficulty" in text) == (not learns)
        assert ("objective.use = tb learns from such groups, too" in text) == learns


def test_kl_is_compared_with_that_of_the_first_steps():
    own = warnings()
    assert given(own, {"kl/k3": 0.002}, FIRST) == []
    assert given(own, {"kl/k3": 0.018}, FIRST) == []
    (text,) = given(own, {"kl/k3": 0.022}, 2 * WINDOW)
    assert text.startswith("kl/k3 is 0.022 nats per token, ")
    assert "more than 10 times its median over the first 50 steps, 0.002" in text
    assert "lower trainer.learning_rate" in text


def test_a_small_kl_does_not_run_away():
    own = warnings()
    assert given(own, {"kl/k3": 1e-6}, FIRST) + given(own, {"kl/k3": 1e-3}, FIRST) == []


def test_one_step_of_old_data_is_no_kl_that_runs_away():
    """Tokens that have become unlikely since they were sampled can give a large k3."""
    own = warnings()
    steps = [{"kl/k3": 5.0 if step % WINDOW == 0 else 0.002} for step in range(3 * FIRST)]
    assert [text for metrics in steps for text in given(own, metrics, 1)] == own.end() == []


def test_a_trainer_that_waits_is_told_what_to_change():
    """By time, over the last 50 steps; the first step has the first fill, which does not count."""
    quick, slow = {"wait/trainer": 0.0}, {"wait/trainer": 0.9}
    own = warnings()
    assert given(own, slow, 1) + given(own, quick, STEPS) + given(own, slow, 2) == []
    (text,) = given(own, slow, 1)  # 2.7 of 50 seconds
    assert "for 5% of the time of the last 50 steps (more than 5%)" in text
    for key in ("runtime.max_reuse = 4", "runtime.searchers", "runtime.concurrent_searches"):
        assert key in text
    assert "runtime.publish_every or trainer.batch_size" in text


@pytest.mark.parametrize(
    "settings", [["runtime.use=local"], ["runtime.lag=0"], ["runtime.fresh=16"]]
)
def test_a_trainer_that_waits_by_design_is_not_warned_of(settings):
    own = warnings(*settings)
    assert given(own, {"wait/trainer": 0.9}, 2 * STEPS) == own.end() == []


def test_a_model_without_warm_up_is_warned_of_at_the_start():
    own = warnings("trainer.warmup_steps=0")
    (text,) = texts(own.start())
    assert text.startswith("trainer.warmup_steps = 0") and own.start() == []


def test_the_rows_of_an_evaluation_are_not_steps():
    own = warnings()
    for _ in range(2 * WINDOW):
        assert own.step({"time": 1.0, "eval/sampled_reward": 0.0}) == []


def test_a_resumed_run_gives_no_warning_again():
    """Whatever its first part gave stays; a sign that it did not give is a warning now."""
    config, (metrics, words) = load(None, ["trainer.warmup_steps=20"]), CASES["cut_off"]
    rows = [row(metrics) for _ in range(3)]
    before = {"ess": "as it was then", "cut_off": f"{words}, then"}
    own = Warnings(config, rows=rows, given=before)
    assert given(own, {"off_policy/ess": 0.1, **metrics}, 2 * WINDOW) == own.end() == []
    assert own.texts == ["as it was then", f"{words}, then"]
    again = Warnings(config, rows=rows)
    (text,) = given(again, metrics, WINDOW - 3)  # the rows before count
    assert text.startswith(words) and again.texts == [text]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def scored_by(folder: Path, source: str) -> tuple[str, ...]:
    """Return settings of a run on data of its own, scored by the function `f` of this source."""
    (folder / "rewards.py").write_text(source)
    prompts = [json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(100, 140)]
    (folder / "data.jsonl").write_text("".join(prompts))
    return (
        "task=custom", f"task.data={folder}/data.jsonl", "task.held_out_size=5",
        f"task.reward={folder}/rewards.py:f", "log.console=lines",
    )  # fmt: skip


def test_a_run_whose_rewards_are_all_zero_says_so(tiny_model, tmp_path, capsys):
    """On the console at once, at its end, and in the summary; a resumed run keeps it."""
    function = "def f(completions):\n    return [0.0] * len(completions)\n"
    settings = (*scored_by(tmp_path, function), "run.steps=12")
    run(config(tiny_model, tmp_path / "run", *settings))
    shown = capsys.readouterr().out
    words = "100% of the groups (more than {}%) have equal rewards"
    other_words = words.format(50)
    words = words.format(90)
    assert shown.count(f"warning: {words}") == 1 and shown.count(words) == 2
    rows = [row for row in read(tmp_path / "run" / METRICS) if "loss" in row]
    assert {row["frac_reward_zero_std"] for row in rows} == {1.0}
    before = summary(tmp_path / "run")["warnings"]
    assert [text for text in before if text.startswith(words)]
    run(_config(["run.steps=14"], tmp_path / "run"), tmp_path / "run")
    assert f"warning: {words}" not in capsys.readouterr().out
    assert summary(tmp_path / "run")["warnings"] == before
    other = run(config(tiny_model, tmp_path / "other", *settings, "objective=dr_grpo")).warnings
    for found, learns, begins in ((before, True, words), (other, False, other_words)):
        (text,) = [text for text in found if text.startswith(begins)]
        assert ("selection=difficulty" in text) == (not learns)


def test_a_reward_that_raises_for_some_samples_is_a_warning_with_its_traceback(
    tiny_model, tmp_path, capsys
):
    """Once, with the first error; samples to which no function applies are no error."""
    source = """
def f(completions):
    if "2" in "".join(completions):
        raise ValueError(f"no grader for {completions[0]}")
    return [None if c == "3" else 1.0 for c in completions]
"""
    settings = (
        *scored_by(tmp_path, source), "run.steps=4", "engine=scripted",
        "engine.answers=['1', '2', '3', '4', '5']", "sampling.max_tokens=4",
        "reward.max_rejected=1.0",
    )  # fmt: skip
    ended = run(config(tiny_model, tmp_path / "run", *settings))
    assert ended.rejected.keys() == {"raised", "none"}
    shown = capsys.readouterr().out
    words = "warning: samples are rejected (raised); the first error:\nTraceback"
    assert shown.count(words) == 1 and "(none)" not in shown
    (text,) = [text for text in ended.warnings if "rejected" in text]
    assert "rewards.py" in text and "ValueError: no grader for 2" in text


@pytest.mark.parametrize(
    ("shift", "warns"), [("0.5", True), ("{start=0.5, end=0.0, steps=2}", True), ("0.0", False)]
)
def test_a_shift_warns_of_rewards_that_it_is_not_made_for(shift, warns, tiny_model, tmp_path):
    settings = (
        "engine=scripted", "engine.answers=['1', '22', '371']", "task=toy.Toy", "run.steps=4",
        "strategy=recent", "sampling.max_tokens=4",
    )  # fmt: skip
    found = run(config(tiny_model, tmp_path / "run", *settings, f"objective.shift={shift}"))
    words = "of the rewards are neither 0 nor 1: objective.shift is made"
    assert any(words in text for text in found.warnings) == warns


@pytest.mark.parametrize(("threshold", "warns"), [(1000.0, True), (0.0, False)])
def test_raft_that_accepts_nothing_says_so(threshold, warns, tiny_model, tmp_path):
    settings = (
        "engine=scripted", "engine.answers=['1', '22', '371']", "task=toy.Toy", "run.steps=4",
        "strategy=recent", "sampling.max_tokens=4", "objective=raft",
    )  # fmt: skip
    found = run(config(tiny_model, tmp_path / "run", *settings, f"objective.threshold={threshold}"))
    assert any("has accepted no response" in text for text in found.warnings) == warns


def test_warnings_at_the_end_of_a_short_run_are_made_again_when_it_goes_on(
    tiny_model, tmp_path, capsys
):
    """Those of its start are given once; those of its first three steps do not stay."""
    folder = tmp_path / "run"
    settings = ("engine=scripted", "engine.answers=['22222']", "sampling.max_tokens=3")
    folder.mkdir()  # with what is left of a start that was killed
    left = {"step": 0, "key": "warmup", "text": "of another start"}
    (folder / WARNINGS).write_text(json.dumps(left) + "\n")
    run(config(tiny_model, folder, *settings, "run.steps=3", "log.console=lines"))
    first = capsys.readouterr().out
    before = summary(folder)["warnings"]
    assert len(before) == 3  # no warm-up, equal rewards, responses that are cut off
    assert all(first.count(f"warning: {text}") == 1 for text in before)
    run(_config(["run.steps=14", "sampling.max_tokens=4"], folder), folder)
    again = capsys.readouterr().out
    after = summary(folder)["warnings"]
    assert "max_tokens = 3" in before[-1] and "max_tokens = 4" in after[-1]
    assert before[:1] == after[:1] and f"warning: {before[0]}" not in again
    assert list(read_warnings(folder).values()) == after


def test_a_stopped_run_keeps_no_warning_made_from_few_steps(tiny_model, tmp_path):
    """It ends with the warnings of the run that was not stopped."""
    settings = ("engine=scripted", "engine.answers=['22222']", "sampling.max_tokens=3")
    whole = run(config(tiny_model, tmp_path / "whole", *settings, "run.steps=12")).warnings
    assert len(whole) == 3
    for stop in (1, 9):
        folder = tmp_path / f"stopped-{stop}"
        short = config(tiny_model, folder, *settings, "run.steps=12")
        assert len(stopped(short, stop).warnings) == 1  # no warm-up
        assert list(read_warnings(folder)) == ["warmup"]
        assert run(_config([], folder), folder).warnings == whole


def test_warnings_after_the_step_that_is_resumed_are_forgotten(tmp_path):
    journal = Journal(tmp_path, load(None, ["log.report_to=[]"]))
    for step, key in ((0, "warmup"), (10, "ess"), (11, "kl")):
        journal.warn(step, key, f"of {key}")
    rewind(tmp_path, 10, evaluates=False)
    assert read_warnings(tmp_path) == {"warmup": "of warmup", "ess": "of ess"}

"""Runs from Python: rows and functions in memory, and the result."""

import json
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pandas
import pytest
import torch
from build import SMALL

import tba
from tba.cli import _config, main
from tba.offline.eval import Result, evaluate_run, export
from tba.offline.rollouts import write_rollouts
from tba.open import run as carry_out
from tba.runs.folder import CONFIG, METRICS, read
from tba.runs.summary import Summary
from tba.tasks._data import rows as read_rows
from tba.tasks._memory import to_rows

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(5)]
EVALUATED = [{"prompt": "9+9=", "answer": "18"}, {"prompt": "8+8=", "answer": "16"}]


def config(model: Path, folder: Path, *settings: str) -> tba.Config:
    own = ["run.steps=2", "eval.prompts=2", "eval.samples=1", "eval.k=[]", "eval.every=1"]
    own += [f"policy.model={model}", f"run.folder={folder}", "reward.isolate=none"]
    return tba.load(None, [*SMALL, *own, *settings])


def length(completions: list[str], **columns: Any) -> list[float]:
    """A function of an importable module, which is sent to a searcher by its name."""
    return [float(len(c)) for c in completions]


def at_most(limit: int) -> Callable[..., list[float]]:
    """Return a closure, which is sent to a searcher by its value."""

    def shortness(completions: list[str], answer: list[str]) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        return [float(len(c) <= limit and a.isdigit()) for c, a in pairs]

    return shortness


def constant(value: float) -> Callable[..., list[float]]:
    return lambda completions, **columns: [value] * len(completions)


def holding_a_lock() -> Callable[..., list[float]]:
    lock = threading.Lock()
    return lambda completions: [float(lock.locked())] * len(completions)


def stored_task(folder: Path) -> dict[str, Any]:
    task: dict[str, Any] = json.loads((folder / CONFIG).read_text())["task"]
    return task


def test_rows_and_a_lambda_train(tiny_model, tmp_path):
    """The result has the summary, and metrics.jsonl as tables."""
    folder = tmp_path / "run"
    given: dict[str, Any] = {"data": ROWS, "held_out_data": EVALUATED, "reward": constant(2.5)}
    result = tba.train(config(tiny_model, folder), **given)
    assert (result.summary.finished, result.summary.steps, result.folder) == (True, 2, folder)
    rows = read(folder / METRICS)
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "eval/greedy_reward" in row]
    assert len(steps) + len(evaluations) == len(rows)
    pandas.testing.assert_frame_equal(result.metrics(), pandas.DataFrame(steps))
    pandas.testing.assert_frame_equal(result.evaluations(), pandas.DataFrame(evaluations))
    assert result.metrics()["reward"].tolist() == [2.5, 2.5]
    assert result.evaluations()["step"].tolist() == [0, 1, 2]
    task = stored_task(folder)
    assert (task["use"], "reward" in task) == ("custom", False)
    files = [str(folder / f"{name}.jsonl") for name in ("data", "held_out_data")]
    assert [task["data"], task["held_out_data"]] == files
    assert read_rows("task.data", task["data"], "train") == ROWS


def test_responses_to_rows_with_the_same_prompt_are_exported_apart(tiny_model, tmp_path):
    rows = [{"prompt": "1+1=", "answer": letter} for letter in "ab"]
    result = tba.train(
        config(tiny_model, tmp_path / "run", "task.held_out_size=0", "eval.prompts=0"),
        data=rows,
        reward=lambda completions, answer: [float(letter == "a") for letter in answer],
    )
    write_rollouts(result.folder, file := tmp_path / "responses.jsonl", None)
    exported = [json.loads(line) for line in file.read_text().splitlines()]
    found = {(r["group"], r["columns"]["answer"], r["reward"]) for r in exported}
    assert found == {("train-0", "a", 1.0), ("train-1", "b", 0.0)}
    texts = [(row["group"], row["completion"]) for row in exported]
    assert len(set(texts)) == len(texts)


def test_a_config_file_is_trained_and_its_result_read_again(tiny_model, tmp_path, monkeypatch):
    """The path of a TOML file, as text or a path, in place of a config."""
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    tables = config(tiny_model, Path("run"), "task.train_size=9", "log.sample_every=1").nested()
    lines = []
    for table, keys in tables.items():
        values = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
        lines += [f"[{table}]", *(v for v in values if not v.endswith("}"))]
    Path("run.toml").write_text("\n".join(lines))
    result = tba.train("run.toml")
    assert tba.load("run") == tba.load("run/config.json")
    again = tba.result("run")
    assert again.summary == result.summary == Summary.read(tmp_path / "run")
    assert again.summary.steps == 2
    pandas.testing.assert_frame_equal(again.metrics(), result.metrics())
    samples = result.samples()
    assert samples["kind"].tolist().count("train") == 2 * 4  # groups of 4
    assert {"step", "version", "reward", "prompt", "completion"} <= set(samples)
    exported = AutoModelForCausalLM.from_pretrained(export(tmp_path / "run", Path("model")))
    assert all(map(torch.equal, result.model().parameters(), exported.parameters()))
    assert result.tokenizer()("1+2=")["input_ids"]
    with pytest.raises(ValueError, match=r"is not the folder of a run: it has no config\.json"):
        tba.result(tmp_path)
    with tba.open_run(Path("run.toml"), resume="run") as run:
        assert run.step == 2


def test_evaluations_are_in_order_and_each_is_there_once(tmp_path):
    """On Ray they end in any order, and a resumed run may repeat one."""
    rows = [{"step": s, "eval/sampled_reward": r} for s, r in ((0, 0.1), (4, 0.3), (2, 0.2))]
    rows += [{"step": 5, "loss": 1.0}, {"step": 4, "eval/sampled_reward": 0.4}]
    (tmp_path / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = Result(tmp_path)
    assert result.evaluations()["step"].tolist() == [0, 2, 4]
    assert result.evaluations()["eval/sampled_reward"].tolist() == [0.1, 0.2, 0.4]
    assert result.metrics().to_dict("records") == [{"step": 5, "loss": 1.0}]
    with pytest.raises(ValueError, match=r"has no summary\.json yet: it is written when"):
        _ = result.summary


def test_only_the_reward_is_in_memory(tiny_model, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    own = ("task=custom", "task.held_out_size=2")
    one = config(tiny_model, tmp_path / "one", f"task.data={data}", *own)
    assert tba.train(one, reward=constant(4.0)).metrics()["reward"].tolist() == [4.0, 4.0]
    assert stored_task(tmp_path / "one")["data"] == str(data)


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that was started from Python."""
    folder = tmp_path_factory.mktemp("api") / "run"
    tba.train(config(tiny_model, folder), data=ROWS, reward=length, held_out_data=EVALUATED)
    return folder


def test_a_run_is_resumed_with_the_same_rows(trained):
    settings = tba.load(trained / CONFIG, ["run.steps=3"])
    result = tba.train(
        settings, resume=str(trained), data=tuple(ROWS), reward=length, held_out_data=EVALUATED
    )
    assert result.summary.finished
    assert result.metrics()["step"].tolist() == [1, 2, 3]


def test_a_finished_run_is_not_continued_but_says_how(trained, capsys, monkeypatch):
    """Neither its evaluation nor anything else is done again; with more steps, it goes on."""
    before = {path.name: path.read_bytes() for path in trained.iterdir() if path.is_file()}
    steps = tba.result(trained).summary.steps
    for settings in ({}, {"eval": {"samples": 3}}, tba.load(trained)):
        assert tba.train(settings, resume=trained, reward=length).summary.finished
    given = ["train", "--resume", str(trained), "task.reward=test_api:length"]
    monkeypatch.setattr(sys, "argv", ["tba", *given])
    with pytest.raises(SystemExit, match="0"):
        main()
    more = f"tba.train({{…}}, resume={str(trained)!r}, reward=…)"
    told = f"{trained} has finished all of its {steps} steps; for more, type `{more}`"
    assert capsys.readouterr().out.count(told) == 4
    assert before == {path.name: path.read_bytes() for path in trained.iterdir() if path.is_file()}


def test_a_resumed_run_keeps_what_it_is_not_told_to_change(tiny_model, tmp_path):
    """Also its rows and its folder, if that was moved."""
    settings = config(tiny_model, tmp_path / "first", "trainer.learning_rate=3e-4")
    given: dict[str, Any] = {"data": ROWS, "reward": length, "held_out_data": EVALUATED}
    tba.train(settings, **given)
    folder = (tmp_path / "first").rename(tmp_path / "run")
    file = tmp_path / "more.toml"
    file.write_text("[run]\nsteps = 5\n[trainer]\nweight_decay = 0.1\n")
    tba.train({"run": {"steps": 3, "folder": "gone"}}, resume=folder, **given)
    tba.train(tba.Config(run={"steps": 4}), resume=folder, reward=length)
    tba.train(file, resume=folder, reward=length)
    (tmp_path / "run").rename(folder := tmp_path / "again")
    tba.train(tba.load(folder, ["run.steps=6"]), resume=folder, **given)
    stored = json.loads((folder / CONFIG).read_text())
    assert (stored["trainer"]["learning_rate"], stored["trainer"]["weight_decay"]) == (3e-4, 0.1)
    assert (stored["run"]["steps"], stored["run"]["folder"]) == (6, str(folder))
    assert stored["task"]["data"] == str(folder / "data.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "more.toml"]


def test_stored_samples_are_scored_again_by_another_function(tiny_model, tmp_path):
    folder = tmp_path / "run"
    given: dict[str, Any] = {"data": ROWS, "held_out_data": EVALUATED}
    tba.train(config(tiny_model, folder), reward=length, **given)
    settings = tba.load(folder / CONFIG, ["run.steps=3"])
    other = constant(1.0)
    with tba.open_run(settings, folder, reward=other, replay="rescore", **given) as run:
        rewards = {t.reward for group in run.buffer.groups() for t in group.trajectories}
        assert rewards == {1.0}
        assert run.train().finished


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "other rows": ({"data": ROWS[:4]}, "data= is not what the run was started with; pass the same"),
    "other held-out rows": (
        {"held_out_data": EVALUATED[::-1]},
        "held_out_data= is not what the run was started with",
    ),
    "other function": ({"reward": constant(1.0)}, '(from Python, replay="rescore")'),
    "no function": ({"reward": None}, "task.reward is missing; write package.module:function"),
}


@pytest.mark.parametrize("case", OTHER)
def test_resuming_with_others_is_refused(trained, case):
    passed, message = OTHER[case]
    arguments = {"data": ROWS, "reward": length, "held_out_data": EVALUATED} | passed
    before = (trained / CONFIG).read_bytes()
    with pytest.raises(ValueError, match=re.escape(message)):
        tba.train(tba.load(trained / CONFIG, ["run.steps=9"]), resume=trained, **arguments)
    assert (trained / CONFIG).read_bytes() == before


def test_a_run_on_rows_from_python_goes_on_from_the_command_line(tiny_model, tmp_path):
    """If its reward is not a function in memory."""
    folder = tmp_path / "run"
    own = ("task=custom", "task.held_out_size=2", "task.reward=test_api:length")
    settings = config(tiny_model, folder, *own)
    tba.train(settings, data=ROWS)
    assert evaluate_run(folder, [], False)["prompts"] == 2
    assert carry_out(_config(["run.steps=3"], folder), folder).steps == 3


def test_what_a_stopped_run_tells_to_type_resumes_it(tiny_model, tmp_path, capsys, monkeypatch):
    """The function is not stored, so that the command line could not go on."""

    def stopping(completions: list[str]) -> list[float]:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:  # the second would end all
            signal.raise_signal(signal.SIGINT)
        return [1.0] * len(completions)

    settings = config(tiny_model, tmp_path / "my run", "log.console=lines")
    result = tba.train(settings, data=ROWS, held_out_data=EVALUATED, reward=stopping)
    assert not result.summary.finished
    told = re.findall(r"resume +(.*)", capsys.readouterr().out)[-1]
    with pytest.raises(ValueError, match=re.escape(f"continue it with `{told}`, remove it")):
        tba.train(settings, data=ROWS, reward=stopping)
    monkeypatch.setattr(signal, "raise_signal", lambda number: None)
    assert eval(told.replace("…", "stopping")).summary.finished


def test_such_a_run_is_exported_and_reported(trained, tmp_path):
    from tba.tools.report import report

    assert (export(trained, tmp_path / "model") / "config.json").is_file()
    assert report([trained], tmp_path / "report").is_file()


REFUSED: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "both": (
        ["task=custom", "task.data=rows.jsonl"], {"data": ROWS, "reward": length},
        "both task.data = 'rows.jsonl' and data= are given; drop one",
    ),
    "another task": (
        ["task=arithmetic"], {"data": ROWS, "reward": length},
        "task.use = 'arithmetic' has its own data and rewards; set task.use=custom",
    ),
    "no reward": ([], {"data": ROWS}, "task.reward is missing; write package.module:function"),
    "no data": (
        [], {"reward": length, "held_out_data": None}, "task.data is missing: 'custom' needs it",
    ),
    "no prompt": (
        [], {"data": [{"question": "1"}], "reward": length},
        "data.jsonl' has no column 'prompt'; it has question",
    ),
    "no rows": ([], {"data": [], "reward": length}, "data= has no rows"),
    "no dicts": ([], {"data": ["1+1="], "reward": length}, "data=: every row must be a dict"),
    "no JSON": (
        [],
        {
            "data": [{"prompt": "1", "when": pandas.Timestamp(0)}],
            "reward": lambda completions, when: [0.0],
        },
        "task.reward: <lambda> needs 'when', which is not a column of task.data",
    ),
    "a file": (
        [], {"data": "rows.jsonl", "reward": length},
        "data= is of type str; pass a list of dicts, a DataFrame or one split",
    ),
    "a name": (
        [], {"data": ROWS, "reward": "test_api:length"},
        "'test_api:length', which is not a function; for package.module:function",
    ),
    "no column": (
        [], {"data": ROWS, "reward": lambda completions, level: []},
        "task.reward: <lambda> needs 'level', which is not a column of task.data",
    ),
    "weights": (
        ["task=custom", "task.reward_weights=[1.0]"], {"data": ROWS, "reward": [length, length]},
        "task.reward_weights has 1 numbers for 2 reward functions",
    ),
    "cannot be sent": (
        ["runtime.use=ray"], {"data": ROWS, "reward": [length, holding_a_lock()]},
        "reward= cannot be sent to another process: cannot pickle '_thread.lock' object",
    ),
    "cannot be sent from a local run": (
        ["reward.isolate=process"], {"data": ROWS, "reward": holding_a_lock()},
        "inside the function, or set runtime.use=local and reward.isolate=none",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_is_refused_before_anything_starts(tiny_model, tmp_path, case):
    settings, arguments, message = REFUSED[case]
    arguments = {"held_out_data": EVALUATED} | arguments
    with pytest.raises(ValueError, match=re.escape(message)):
        tba.train(config(tiny_model, tmp_path / "run", *settings), **arguments)
    assert not (tmp_path / "run").exists()


def test_a_local_run_needs_no_pickling(tiny_model, tmp_path):
    settings = config(tiny_model, tmp_path / "run")
    result = tba.train(settings, data=ROWS, reward=holding_a_lock(), held_out_data=EVALUATED)
    assert result.summary.finished


def test_rows_may_be_a_data_set_or_a_data_frame():
    frame = pandas.DataFrame({"prompt": ["1+1=", "2+2="], "level": [1, 2]})
    frame = frame.astype({"level": "int32"}).assign(share=[0.5, None], answer=["2", None])
    rows = [
        {"prompt": "1+1=", "level": 1, "share": 0.5, "answer": "2"},
        {"prompt": "2+2=", "level": 2, "share": None, "answer": None},
    ]
    assert to_rows("data", frame) == to_rows("data", datasets.Dataset.from_list(rows)) == rows
    assert {type(row["level"]) for row in to_rows("data", frame)} == {int}


def test_a_function_of_a_module_that_no_process_could_import_is_refused(tiny_model, tmp_path):
    namespace: dict[str, Any] = {"__name__": "typed_in_somewhere"}
    exec("def reward(completions):\n    return [0.0] * len(completions)", namespace)
    with pytest.raises(ValueError, match="cannot import 'typed_in_somewhere'; put its folder on"):
        tba.train(
            config(tiny_model, tmp_path / "run", "runtime.use=ray", "task=custom",
                   "task.held_out_size=2"),
            data=ROWS,
            reward=namespace["reward"],
        )  # fmt: skip

"""Dialogues with an environment: turns, tools that work and fail, limits, and whole runs."""

import json
import os
import re
from typing import Any

import numpy as np
import pytest
import talk
from build import resumes_exactly
from conftest import EOS
from desk import CLOSING
from talk import (
    ROWS,
    TESTS,
    call,
    dialogue_config,
    dialogue_model,
    held_sessions,
    replies,
    searched,
)

from tba.agents.session import joined
from tba.config.schema import load
from tba.engines.transformers import shortened
from tba.open import run
from tba.replay.store import load_groups
from tba.runs.checkpoint import newest
from tba.runs.folder import METRICS, SAMPLES, read
from tba.search.evaluate import evaluate_held_out
from tba.setup.setup import check
from tba.tasks._calls import within
from tba.tasks._memory import build_task
from tba.tasks.mixture import TaskMixture
from tba.types import Completion, Sampling

__all__ = ["dialogue_config", "dialogue_model", "held_sessions"]  # fixtures


def test_a_dialogue_is_what_was_sampled_with_the_replies_between(config):
    """Token by token, with log-probs where the policy spoke, 0 elsewhere, and EOS of each turn."""
    asks, told = call("double", n=21), "It is 42."
    searcher, result = searched(config(asks, told))
    (group,) = result.groups
    prompt = searcher.text.decode(group.prompt_tokens)
    assert prompt.startswith("[system]You may call") and prompt.endswith("[user]Say 0[assistant]")
    t = group.trajectories[0]
    between = "[user]<tool_response>\n42\n</tool_response>[assistant]"
    whole = f"{asks}{EOS}{between}{told}{EOS}"
    assert searcher.text.tokenizer.decode(t.tokens.tolist()) == whole
    assert t.sampled is not None and t.finished
    own = searcher.text.tokenizer.decode(t.tokens[t.sampled].tolist())
    assert own == f"{asks}{EOS}{told}{EOS}"
    assert not t.behavior_logp[~t.sampled].any() and not t.ref_logp[~t.sampled].any()
    assert t.reward == len(told)
    counts = result.stats.counts  # of two samples
    assert (counts["tools/calls"], counts["tools/failures"]) == (2, 0)


def test_a_reward_sees_messages_and_environments_as_in_trl(config):
    parts = check(config(f"Let me see. {call('double', n=21)}", "It is 42."))
    searcher = parts.search_setup().build("cpu", False)
    prompts, guard = parts.prompts[:1], searcher.scoring
    responses = searcher.answer("", prompts, Sampling(2, 1.0, 400), seed=0)
    guard(prompts, responses.answers)
    function = guard.tasks[""].functions[0]  # type: ignore[attr-defined]
    ((completions, environments),) = function.__globals__["seen"]
    asked = {"type": "function", "function": {"name": "double", "arguments": {"n": 21}}}
    assert completions[0] == [
        {"role": "assistant", "content": "Let me see.", "tool_calls": [asked]},
        {"role": "tool", "name": "double", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    ]
    assert [e.notes for e in environments] == [["double 21"]] * 2
    assert environments[0] is not environments[1]


FAILING = {
    "malformed": ("<tool_call>double(4)</tool_call>", "Error: ValueError: Expecting value"),
    "unknown": (call("triple", n=4), "there is no tool 'triple', only divide, double"),
    "not public": (call("_note"), "there is no tool '_note', only divide, double"),
    "no tool": (call("reset"), "there is no tool 'reset', only"),
    "half a character": (call("double", **{"\ud83d": 4}), "surrogates not allowed"),
    "wrong arguments": (call("double", m=4), "Error: TypeError: Desk.double() got an unexpected"),
    "raises": (call("divide"), "Error: ZeroDivisionError: division by zero"),
    "exits": (call("leave"), "Error: SystemExit: 3"),
    "hangs": (call("hang"), "Error: no result within 0.5 s"),
}


def soon(case: str) -> float:
    """A deadline that is short only where it will be missed."""
    return 0.5 if case == "hangs" else 10.0


@pytest.mark.parametrize("case", FAILING)
def test_the_policy_reads_of_a_failure_and_goes_on(case, config):
    asks, told = FAILING[case]
    searcher, result = searched(config(asks, "So be it.", seconds=soon(case)))
    (group,) = result.groups
    (reply,) = replies(searcher, group)
    assert told in reply
    assert all(t.finished and t.reward == len("So be it.") for t in group.trajectories)
    assert (result.stats.counts["tools/calls"], result.stats.counts["tools/failures"]) == (2, 2)
    assert not result.stats.rejected


def test_several_calls_are_carried_out_in_order(config):
    turn = call("double", n=1) + call("divide") + call("later", word="soon") + call("double", n=2)
    searcher, result = searched(config(turn, "Done."))
    assert replies(searcher, result.groups[0]) == [
        "2", "Error: ZeroDivisionError: division by zero", "soon", "4",
    ]  # fmt: skip
    assert (result.stats.counts["tools/calls"], result.stats.counts["tools/failures"]) == (8, 2)


def test_an_environment_that_hangs_is_left_alone(config):
    """The call still runs, so that others would meet it there; and each would take its time."""
    turns = (call("hang") + call("double", n=1), call("double", n=2), "Done.")
    searcher, result = searched(config(*turns, seconds=0.5))
    late, *others = replies(searcher, result.groups[0])
    assert late == "Error: no result within 0.5 s"
    told = "Error: RuntimeError: not tried, because an earlier call has not returned"
    assert others == [told, told]


def test_a_dialogue_is_cut_by_the_limits(config):
    """In a turn, by a reply without room for another turn, or by the number of turns."""
    asks = call("double", n=21)
    one, reply = len(asks) + 1, len("[user]<tool_response>\n42\n</tool_response>[assistant]")

    def cut(limit: int, **options: Any) -> tuple[int, int, bool, int]:
        c = config(asks, asks, "It is 42.", **options)
        sampling = c.sampling.model_copy(update={"max_tokens": limit})
        _, result = searched(c.model_copy(update={"sampling": sampling}))
        t = result.groups[0].trajectories[0]
        sampled = len(t.tokens) if t.sampled is None else int(t.sampled.sum())
        return sampled, len(t.tokens), t.finished, result.stats.counts["tools/calls"] // 2

    assert cut(one - 1) == (one - 1, one - 1, False, 0)
    assert cut(one + reply) == (one, one, False, 1)  # the call is carried out, as the last act
    assert cut(one + reply + 3) == (one + 3, one + reply + 3, False, 1)
    assert cut(400) == (2 * one + 10, 2 * one + 2 * reply + 10, True, 2)
    assert cut(400, max_turns=2) == (2 * one, 2 * one + reply, False, 2)
    assert cut(400, max_turns=1) == (one, one, False, 1)


def test_what_reset_says_ends_the_prompt(config):
    rows = [{**row, "says": f" (of {i})"} for i, row in enumerate(ROWS)]
    searcher, result = searched(config("Well.", rows=rows), prompts=2)
    prompts = [searcher.text.decode(g.prompt_tokens) for g in result.groups]
    assert [p.partition("[user]")[2] for p in prompts] == [
        "Say 0 (of 0)[assistant]", "Say 1 (of 1)[assistant]",
    ]  # fmt: skip


def test_each_environment_has_a_row_of_its_own(config):
    """A tool that changes it changes no other dialogue about the prompt, now or later."""
    options = {"rows": [{**row, "heap": [5, 6, 7]} for row in ROWS]}
    options["environment"] = f"{TESTS}/desk.py:Greedy"
    searcher, result = searched(config(call("take"), "Taken.", **options))
    again = searcher.search([result.groups[0].prompt], seed=1)
    for group in [*result.groups, *again.groups]:
        texts = [searcher.text.decode(t.tokens) for t in group.trajectories]
        assert len(texts) == 2 and all("\n7\n" in text for text in texts)


@pytest.mark.parametrize(
    ("kind", "reason", "told"),
    [
        ("raises", "raised", "OSError: no desk is free"),
        ("hangs", "timeout", "reset did not return within reward.deadline = 0.5 s"),
        ("differs", "raised", "the samples of a prompt must have the same beginning"),
        ("long", "raised", "context has room for 3096; lower sampling.max_tokens"),
    ],
)
def test_an_environment_that_cannot_be_reset_costs_its_samples_only(kind, reason, told, config):
    rows = [ROWS[0], {**ROWS[1], "kind": kind}, *ROWS[2:]]
    environment = f"{TESTS}/desk.py:Forgetful"
    options = {"rows": rows, "environment": environment, "seconds": soon(kind)}
    searcher, result = searched(config(call("double", n=1), "2", **options), prompts=2)
    assert result.groups[0].prompt.text == "Say 0"
    left = [2, 1] if kind == "differs" else [2]  # the first sample decides how they begin
    assert [len(g.trajectories) for g in result.groups] == left
    assert result.stats.counts["samples_generated"] == 4
    assert dict(result.stats.rejected) == {reason: 4 - sum(left)}
    assert told in result.stats.last_rejection
    assert not evaluate_held_out(searcher).scores["sampled_rejected"]


def test_an_assistants_turn_in_a_prompt_is_not_trained(config):
    chat = [("user", "Twice 2?"), ("assistant", "4"), ("user", "Twice 3?")]
    messages = [{"role": role, "content": content} for role, content in chat]
    rows = [{"prompt": messages, "kind": str(i)} for i in range(4)]
    searcher, result = searched(config("6", rows=rows))
    (group,) = result.groups
    assert "[assistant]4" in searcher.text.decode(group.prompt_tokens)
    assert searcher.text.decode(group.trajectories[0].tokens) == "6"
    assert group.trajectories[0].sampled is None


def test_a_prompt_may_have_roles_that_only_the_template_knows(config):
    messages = [{"role": role, "content": "Twice 2?"} for role in ("critic", "user")]
    rows = [{"prompt": messages, "kind": str(i)} for i in range(4)]
    searcher, result = searched(config(call("double", n=2), "4", rows=rows))
    assert replies(searcher, result.groups[0]) == ["4"]


def test_evaluations_hold_dialogues_too(config):
    """Lengths are of what was sampled; the examples show the whole dialogue."""
    asks = call("double", n=21)
    searcher, _ = searched(config(asks, "It is 42."))
    found = evaluate_held_out(searcher)
    assert found.scores["greedy_length"] == found.scores["sampled_length"] == len(asks) + 11
    assert found.scores["greedy_finished"] == 1.0
    assert found.scores["sampled_reward"] == len("It is 42.")
    assert found.scores["sampled_log_ratio"] == 0.0  # the engine is its own reference
    example = found.examples[0]
    assert example.prompt.endswith("[user]Say 6[assistant]") and "<tools>" in example.prompt
    assert "<tool_response>\n42\n" in example.completion and "It is 42." in example.completion


def test_an_evaluation_set_has_the_tools_of_its_own_task(config):
    """None here: what would be a call is a text."""
    settings = ("task.sources.plain={use='arithmetic',weight=0,held_out_size=2}",)
    searcher, _ = searched(config(call("double", n=21), "It is 42.", settings=settings))
    found = evaluate_held_out(searcher)
    assert found.scores["greedy_reward"] == len("It is 42.")
    assert found.scores["plain/greedy_reward"] == 0.0
    assert found.examples[-1].completion == "It is 42."  # the script's last answer, at once
    assert "<tools>" not in found.examples[-1].prompt


RAISING = [{"prompt": text, "kind": "raises"} for text in "abcd"]
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no such class": ({"environment": f"{TESTS}/desk.py:Dask"}, "has no function 'Dask'"),
    "no such file": ({"environment": "nowhere.py:Desk"}, "'nowhere.py:Desk': no such file"),
    "not to be called": ({"environment": "talk:Script"}, "TypeError: "),
    "no method": ({"environment": "collections:Counter"}, "Counter has no method `reset`"),
    "no docstring": ({"environment": "test_dialogues:Silent"}, "it has no docstring!; give 'sp"),
    "no tool": ({"environment": "test_dialogues:Bare"}, "no other public method, so no tool"),
    "no column": ({"environment": "test_dialogues:Picky"}, "positional argument: 'colour'"),
    "no desk": ({"environment": "desk:Forgetful", "rows": RAISING}, "cannot be reset: "),
    "no environment": ({"environment": None}, "needs 'environments', which is not a column"),
    "no turns": ({"max_turns": 0}, "task.max_turns = 0: Input should be greater than or equal to"),
    "no key": ({"tool_deadline": 1}, "task.tool_deadline: 'custom' has no such option: it was rem"),
}  # fmt: skip


class Bare:
    def reset(self) -> None: ...


class Silent(Bare):
    def speak(self) -> None: ...


class Picky:
    def reset(self, colour: str, prompt: str) -> None: ...

    def paint(self) -> None:
        """Paint."""


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_told_before_anything_starts(case, config):
    options, told = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(told)):
        check(config("Hi", **options))


def test_a_reward_that_does_not_ask_for_environments_gets_none(config, tmp_path):
    _, result = searched(config(call("double", n=1), "2", reward=f"{tmp_path}/rewards.py:blind"))
    assert [t.reward for t in result.groups[0].trajectories] == [0.0, 0.0]


# In the process that scores

MORTAL = f"{TESTS}/programs.py:Mortal"


def test_tools_answer_alike_in_the_process_that_scores(config, held):
    """And rewards see the environments, which may hold what cannot be pickled."""
    calls = [call("double", n=1), call("divide"), call("leave"), "<tool_call>?", call("later")]
    turns = ["".join([*calls, call("later", word="soon")]), call("hang"), call("double", n=2), "-"]
    options = {"environment": f"{TESTS}/desk.py:Locked", "seconds": 2.0}
    told = []
    for isolate in ("none", "process"):
        searcher, result = held(config(*turns, isolate=isolate, **options))
        (group,) = result.groups
        told.append((replies(searcher, group), result.stats.counts["tools/failures"]))
        assert [t.reward for t in group.trajectories] == [1.0, 1.0]
    assert told[0] == told[1] and told[0][1] == 10


@pytest.mark.parametrize(
    ("tool", "reason", "why"),
    [
        ("vanish", "died", "the scoring process ended with exit status 3"),
        ("freeze", "timeout", "the environments did not answer within 3.5 s"),
    ],
)
def test_a_tool_that_ends_its_process_costs_the_dialogues_held_there(
    tool, reason, why, config, held
):
    """The next ones are held in another process."""
    settings = {"environment": MORTAL, "isolate": "process", "seconds": 3.0}
    searcher, result = held(config(call("double", n=1) + call(tool), "Well.", **settings))
    assert dict(result.stats.rejected) == {reason: 2} and not result.groups
    assert why in result.stats.last_rejection
    assert len(result.died) == (reason == "died")
    searcher.engine.answers = [call("double", n=1), "2"]
    again = searcher.search(searcher.setup.held_out, seed=1)
    assert [len(group.trajectories) for group in again.groups] == [2, 2]


def test_a_reset_that_ends_its_process_costs_the_dialogues_that_begin_with_it(config, held):
    rows = [ROWS[0], {**ROWS[1], "kind": "vanishes"}, *ROWS[2:]]
    chosen = config("Hi", rows=rows, environment=MORTAL, isolate="process")
    searcher, _ = held(chosen)
    prompts = check(chosen).prompts
    result = searcher.search(prompts[1:2], seed=1)
    assert dict(result.stats.rejected) == {"died": 2} and result.died == {prompts[1].id}
    again = searcher.search(searcher.setup.held_out, seed=2)
    assert [len(group.trajectories) for group in again.groups] == [2, 2]


def test_a_tool_has_the_memory_that_a_reward_has(config, held):
    options = {"environment": MORTAL, "isolate": "process"}
    searcher, result = held(config(call("grow"), "Well.", **options))
    assert replies(searcher, result.groups[0]) == ["Error: MemoryError"]


@pytest.mark.parametrize("isolate", ["none", "process"])
def test_environments_run_where_rewards_do(isolate, config, held):
    rows = [{**row, "kind": "tells"} for row in ROWS]
    options = {"rows": rows, "environment": MORTAL, "isolate": isolate}
    searcher, result = held(config("Hi", **options))
    (_, pid) = searcher.text.decode(result.groups[0].prompt_tokens).split("Say 0")
    assert (pid.removesuffix("[assistant]") == str(os.getpid())) == (isolate == "none")


def test_environments_are_kept_until_their_dialogues_are_scored(config):
    searcher, _ = searched(config(call("double", n=1), "2"))
    kept = searcher.scoring._here._environments
    for seed in range(3):
        searcher.search(searcher.setup.held_out, seed)
        assert len(kept) == 2 * 2


def test_objectives_that_need_rollouts_are_refused(config):
    c = config("Hi")
    c = c.model_copy(update={"objective": c.objective.model_copy(update={"use": "vineppo"})})
    with pytest.raises(ValueError, match="which programs and environments do not have; choose"):
        check(c)


def test_a_mixture_has_no_dialogues(config):
    task = build_task(config("Hi").task, None)
    with pytest.raises(ValueError, match="dialogues or a program, which a mixture cannot train on"):
        TaskMixture({"desk": task}, {"desk": 1.0})


def test_rows_that_differ_in_their_columns_are_other_prompts(config):
    """An environment may begin differently by them, so that they are not held out and trained."""
    rows = [{"prompt": "Play", "kind": str(i)} for i in range(4)]
    assert len(check(config("Hi", rows=rows)).prompts) == 2
    with pytest.raises(ValueError, match="are also held out"):
        check(config("Hi", rows=[{"prompt": "Play", "kind": "same"}] * 4))


def completion(tokens: list[int], version: int, *switches: tuple[int, int]) -> Completion:
    zeros = np.zeros(len(tokens), np.float32)
    return Completion(np.array(tokens, np.int32), zeros, True, version, switches)


def test_versions_of_turns_become_switches():
    reply = np.array([9, 9], np.int32)
    first = completion([1, 2, 3], 4, (1, 5))
    second = joined(first, reply, completion([4], 5))
    assert (second.version, second.switches) == (4, ((1, 5),))
    third = joined(second, reply, completion([5, 6], 7, (1, 8)))
    assert third.tokens.tolist() == [1, 2, 3, 9, 9, 4, 9, 9, 5, 6]
    assert third.switches == ((1, 5), (8, 7), (9, 8))
    assert third.sampled is not None and third.length == 6
    assert np.flatnonzero(~third.sampled).tolist() == [3, 4, 6, 7]


def test_a_turn_is_shortened_to_what_it_would_have_been():
    turn = completion([1, 2, 3], 4, (1, 5), (2, 6))
    assert shortened(turn, 3) is turn
    cut = shortened(turn, 2)
    assert (cut.tokens.tolist(), cut.finished, cut.switches) == ([1, 2], False, ((1, 5),))
    assert len(cut.logp) == 2


def test_calls_run_side_by_side_up_to_a_deadline():
    def fail() -> None:
        raise KeyError("x")

    waiting = [lambda: CLOSING.wait(0.1)] * 60
    results = within(5.0, [lambda: 1, fail, *waiting])
    assert results[0] == 1 and isinstance(results[1], KeyError) and results[2:] == [False] * 60
    assert within(0.05, [lambda: CLOSING.wait(60), lambda: 2]) == [None, 2]


def test_a_run_with_an_environment_resumes_exactly(tmp_path):
    """With dialogues in the buffer, in evaluations and in what is held back."""
    model = talk.save_model(tmp_path / "model")
    settings = ("sampling.samples=16", "runtime.lag=2", "strategy=recent")
    resumes_exactly(model, tmp_path, *settings, *talk.SETTINGS)
    *_, last = (r for r in read(tmp_path / "part" / METRICS) if "tools/calls" in r)
    assert last["tools/calls"] > 20 and "tools/failures" not in last
    generation = newest(tmp_path / "part" / "checkpoints")
    held = load_groups(generation / "delayed.jsonl")
    assert any(t.sampled is not None for g in held for t in g.trajectories)


def test_the_calculator_of_the_page_is_used(model, tmp_path, monkeypatch):
    """Its state reaches the reward, which runs in another process."""
    monkeypatch.chdir(TESTS.parent)
    turns = [call("multiply", a="x", b=2), call("multiply", a=57, b=81), "It is 4617."]
    settings = [
        f"policy.model={model}", f"run.folder={tmp_path / 'run'}", "engine=talk.Script",
        f"engine.answers={json.dumps(turns)}", "sampling.max_tokens=500", "runtime.use=local",
        "task.shots=0",  # the script counts turns
    ]  # fmt: skip
    config = load("examples/calculator.toml", settings)
    assert config.reward.isolate == "process"
    searcher, result = searched(config, prompts=2)
    searcher.scoring.close()
    assert [[t.reward for t in g.trajectories] for g in result.groups] == [[0.5] * 8, [1.0] * 8]
    assert (result.stats.counts["tools/calls"], result.stats.counts["tools/failures"]) == (32, 16)


def test_a_run_of_scripted_dialogues_ends_well(config, tmp_path):
    """From the rows to the samples that a person reads."""
    asks = call("double", n=21)
    summary = run(config(asks, call("triple"), "It is 42."))
    assert (summary.finished, summary.samples_trained, summary.rejected) == (True, 8, {})
    *_, last = (r for r in read(tmp_path / "run" / METRICS) if "tools/calls" in r)
    assert last["tools/calls"] == 2 * last["samples_generated"]
    assert last["tools/failures"] == last["samples_generated"]
    assert last["completions/mean_length"] == len(asks) + 1 + len(call("triple")) + 1 + 10
    shown = [s["completion"] for s in read(tmp_path / "run" / SAMPLES)]
    assert shown and all("42\n</tool_response>" in s and "It is 42." in s for s in shown)

"""Programs that talk to the policy over HTTP: sessions, forks, faults, and whole runs."""

import json
import re
import shutil
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from conftest import EOS
from programs import refusal, user
from talk import TESTS, Script, agent_config, call, dialogue_config, dialogue_model, held_sessions

from tba.assemble import run
from tba.learn.plan import Contexts, cut
from tba.runs.setup import check
from tba.search import process
from tba.search.agent_child import _as_json
from tba.search.agents import Agents, Endpoint, Live
from tba.search.evaluate import evaluate_held_out, evaluate_piece
from tba.search.result import Responses
from tba.search.searcher import Searcher
from tba.search.session import Session
from tba.search.verdicts import Rejected, added
from tba.types import Group, collate

__all__ = ["agent_config", "dialogue_config", "dialogue_model", "held_sessions"]  # fixtures

pytest.importorskip("starlette", reason="needs tba[agents]")
pytest.importorskip("uvicorn", reason="needs tba[agents]")


def shown(searcher: Searcher, group: Group, k: int = 0) -> list[str]:
    """Return the contexts of a response as text, without the prompt, given tokens in « »."""
    t = group.trajectories[k]
    bounds = [0, *t.restarts, len(t.tokens)]
    texts = []
    for start, end in pairwise(bounds):
        text = ""
        sampled = np.ones(len(t.tokens), bool) if t.sampled is None else t.sampled
        for place in range(start, end):
            one = searcher.text.tokenizer.decode([int(t.tokens[place])])
            text += one if sampled[place] else f"«{one}»"
        texts.append(text.replace("»«", ""))
    return texts


def test_a_session_is_the_dialogue_that_an_environment_would_have_held(config, agent, held):
    """The same tokens and masks: the program does over HTTP what the tool does in the searcher."""
    turns = (f"Let me see. {call('double', n=21)}", "It is 42.")
    _, by_tool = held(config(*turns, environment=f"{TESTS}/programs.py:Doubles"))
    _, by_program = held(agent("double", *turns))
    for a, b in zip(by_tool.groups, by_program.groups, strict=True):
        for t, u in zip(a.trajectories, b.trajectories, strict=True):
            told = [*a.prompt_tokens, *t.tokens]
            assert told == [*b.prompt_tokens, *u.tokens]
            assert t.marks is not None and np.array_equal(t.marks, u.marks)
            assert u.reward == len("It is 42.") and u.finished
    assert by_program.stats.counts["agents/calls"] == 4
    assert by_program.stats.counts["agents/forks"] == 0


@pytest.mark.parametrize(
    "kind, reason",
    [
        ("silent", "no_call"), ("raises", "raised"), ("nan", "not_finite"), ("text", "raised"),
        ("none", "none"), ("hangs", "timeout"), ("dies", "died"), ("prints", None),
    ],
)  # fmt: skip
def test_a_program_that_fails_costs_its_sample(kind, reason, agent, held):
    """Never a reward of 0: the sample is rejected with its reason, and others go on."""
    rows = [{"prompt": f"Say {i}", "kind": "sound" if i else kind} for i in range(8)]
    deadline = 2.0 if kind == "hangs" else 60.0
    searcher, result = held(agent("mishaps", "1", rows=rows, deadline=deadline))
    rejected = {name: n for name, n in result.stats.rejected.items() if n}
    assert rejected == ({reason: 2} if reason else {})
    again = searcher.search(searcher.setup.held_out, seed=1)  # the next sessions are held
    assert [len(g.trajectories) for g in again.groups] == [2, 2]


@pytest.mark.parametrize("returned", [{"reward": 1.0, "calls": None}, "1"])
def test_what_a_program_must_not_return_is_told_whole(returned):
    told = f"rollout returned {returned!r}; it must return a number, a dict of numbers, or None"
    with pytest.raises(TypeError, match=re.escape(told)):
        _as_json(returned)


def test_what_cannot_be_done_is_refused_in_a_sentence(agent, held):
    config = agent("refused", "1", max_calls=3, settings=["objective=grpo"])
    _, result = held(config)
    assert [t.reward for g in result.groups for t in g.trajectories] == [1.0, 1.0], result
    assert result.stats.counts["agents/refused"] > 10


def test_the_temperature_of_the_config_is_allowed_in_evaluations_of_another_one(agent, held):
    settings = ["objective=grpo", "sampling.temperature=0.7", "eval.temperature=1"]
    searcher, result = held(agent("warm", "1", settings=settings))
    assert not result.stats.rejected
    assert evaluate_held_out(searcher).scores["sampled_rejected"] == 0.0


def test_an_engine_that_samples_at_one_temperature_refuses_others(agent, held, monkeypatch):
    """Also where nothing is trained, as by `tba serve`: it would ignore them."""
    searcher, _ = held(agent("once", "1"))
    monkeypatch.setattr(Script, "explores", False)
    endpoint = Endpoint(searcher.engine, searcher.text)
    url = endpoint.begin(Live(Session("append"), searcher.engine.sampling, 0, 0, 9))
    assert "cannot sample so" in refusal(url, [user("Say 1")], temperature=0.7)[2]
    endpoint.close()


def test_a_rewritten_past_is_a_new_context_of_the_same_session(agent, held):
    """A shared reply is sampled once; each context brings what stands before its new replies."""
    searcher, result = held(agent("forgets", "one", "two"))
    (group,) = result.groups
    assert result.stats.counts["agents/forks"] == 4  # of two sessions
    begin = "[user]Say 1[assistant]"
    assert searcher.text.tokenizer.decode(group.prompt_tokens.tolist()) == begin
    assert shown(searcher, group) == [
        f"one{EOS}«[user]more[assistant]»two{EOS}",
        f"«{begin}one{EOS}[user]other[assistant]»two{EOS}",
        f"«[user]Short: two[assistant]»one{EOS}",
    ]
    contexts: Contexts = cut(collate([group]))
    assert len(contexts.ids) == 1 + 3 * 2


def test_sessions_that_begin_unlike_share_what_they_begin_with(agent, held):
    searcher, result = held(agent("greets", "1"))
    (group,) = result.groups
    decode = searcher.text.tokenizer.decode
    assert decode(group.prompt_tokens.tolist()).startswith("[user]Say ")
    for t in group.trajectories:
        whole = decode(np.concatenate([group.prompt_tokens, t.tokens]).tolist())
        assert whole.endswith(f"[assistant]1{EOS}")
        assert t.sampled is not None and t.sampled.sum() == 2


def test_a_message_that_the_policy_has_not_written_stays(agent, held):
    """The policy sees it as the chat template writes it, in the same context."""
    searcher, result = held(agent("notes", "1", "2"))
    (group,) = result.groups
    begun = f"1{EOS}«[assistant]a note{EOS}[user]more[assistant]»2{EOS}"
    assert shown(searcher, group) == [begun]


def test_a_process_that_dies_costs_the_session_that_ended_it(agent, held):
    """Sessions beside it are held again, and their prompts are not to blame."""
    kinds = ["dies", *["sound"] * 7]
    rows = [{"prompt": f"Say {i}", "kind": kind} for i, kind in enumerate(kinds)]
    config = agent("mishaps", "1", rows=rows)
    searcher, _ = held(config)
    prompts = check(config).prompts[:4]
    result = searcher.search(prompts, seed=1)
    assert dict(result.stats.rejected) == {"died": 2} and result.died == {prompts[0].id}
    assert [len(group.trajectories) for group in result.groups] == [2, 2, 2]


def test_sessions_beside_one_that_blocks_the_event_loop_are_held_again(
    agent, held, monkeypatch, tmp_path
):
    monkeypatch.setattr(process, "BLOCKED", 0.5)
    rows = [{"prompt": f"Say {i}", "flag": str(tmp_path / "flag")} for i in range(8)]
    searcher, _ = held(agent("blocks", "1", rows=rows, deadline=3.0))
    (tmp_path / "flag").unlink()
    result = searcher.search(check(searcher.setup.config).prompts[1:4], seed=1)
    assert not result.stats.rejected and not result.died
    assert [len(group.trajectories) for group in result.groups] == [2, 2, 2]


@pytest.mark.parametrize("reward", [None, "blind"])
def test_a_session_whose_last_reply_is_cut_gets_what_the_config_says(reward, agent, held, tmp_path):
    """And nothing else, whether functions score it or not."""
    settings = ["sampling.max_tokens=1", "sampling.truncated=-3.0"]
    given = {} if reward is None else {"reward": f"{tmp_path}/rewards.py:{reward}"}
    _, result = held(agent("once", "12", settings=settings, **given))
    assert [t.reward for group in result.groups for t in group.trajectories] == [-3.0, -3.0]


def test_a_limit_of_the_programs_own_cuts_no_session_off(agent, held):
    """Neither for the config's rule nor in the metrics, which advise to raise the limit."""
    searcher, result = held(agent("brief", "12", settings=["sampling.truncated=-3.0"]))
    for t in result.groups[0].trajectories:
        assert t.length == 1 and t.reward == 1.0 and t.finished
    assert evaluate_held_out(searcher).scores["sampled_finished"] == 1.0


def test_stop_strings_of_the_config_are_not_in_replies(agent, held):
    _, result = held(agent("once", "12", settings=["sampling.stop=['2']"]))
    assert [t.reward for group in result.groups for t in group.trajectories] == [1.0, 1.0]


def test_a_row_may_be_longer_than_the_context_of_the_policy(agent, held):
    rows = [{"prompt": "", "page": f"{i}" + "x" * 9000} for i in range(8)]
    settings = ["task.prompt_column=page"]
    _, result = held(agent("greets", "1", rows=rows, settings=settings))
    assert [len(group.trajectories) for group in result.groups] == [2]


def test_sessions_without_a_call_do_not_count_in_the_measures_of_tokens(agent, held):
    kinds = ["sound", "silent"] * 4
    rows = [{"prompt": f"Say {i}", "kind": kind} for i, kind in enumerate(kinds)]
    searcher, _ = held(agent("mishaps", "1", rows=rows, settings=["eval.perplexity=true"]))
    scores = evaluate_held_out(searcher).scores
    assert scores["sampled_rejected"] == 0.5 and scores["sampled_length"] == 6.0
    for measure in ("log_ratio", "perplexity", "perplexity_with_prompt"):
        assert np.isfinite(scores[f"sampled_{measure}"])


def test_sessions_of_an_evaluation_end_within_the_deadline_of_its_task(agent, held, monkeypatch):
    """Greedy and sampled ones together, or a program that hangs would cost the searcher."""
    searcher, _ = held(agent("once", "1", settings=["runtime.task_deadline=40"]))
    given: list[float] = []
    hold = Agents.hold

    def recorded(*arguments: Any) -> Responses:
        given.append(arguments[-1])
        return hold(*arguments)

    monkeypatch.setattr(Agents, "hold", recorded)
    evaluate_piece(searcher, 0)
    searcher.search(searcher.setup.held_out, seed=1)
    assert given == [18.0, 18.0, 36.0]


def test_a_reward_function_that_does_not_apply_leaves_the_programs_reward():
    assert added(Rejected("none", ""), 2.0) == 2.0


@pytest.mark.parametrize("program", ["at_once", "streams", "Counts", "once"])
def test_clients_of_all_kinds_are_served(program, agent, held):
    _, result = held(agent(program, "12", "3", settings=["engine.latency=0.2"]))
    (group,) = result.groups
    expected = 2.0 if program == "once" else 1.0
    assert [t.reward for t in group.trajectories] == [expected] * 2
    if program == "at_once":
        assert result.stats.counts["agents/calls"] == 4  # not 6: one reply for two connections


def test_a_reply_that_nobody_read_is_not_trained_on(agent, held):
    """The next try takes its place: one call, with the seed of the first."""
    settings = ["engine.latency=0.5"]
    searcher, result = held(agent("gives_up", "1", settings=settings))
    (group,) = result.groups
    assert [t.reward for t in group.trajectories] == [1.0, 1.0]
    assert result.stats.counts["agents/calls"] == 2
    assert [len(shown(searcher, group, k)) for k in range(2)] == [1, 1]


def test_a_client_may_leave_within_its_request(agent, held, caplog):
    _, result = held(agent("breaks_off", "1"))
    assert result.stats.counts["agents/calls"] == 2
    assert "Traceback" not in caplog.text


def test_a_program_has_the_secrets_that_it_is_given(agent, monkeypatch, held):
    """What it raises is told without them."""
    monkeypatch.setenv("SOME_API_KEY", "hidden-value")
    monkeypatch.setenv("MINE", "own-value")
    kinds = ["raises", *["sound"] * 7]
    rows = [{"prompt": f"Say {i}", "kind": kind} for i, kind in enumerate(kinds)]
    settings = ['task.env={OWN_TOKEN="env:MINE"}']
    searcher, result = held(agent("secret", "1", rows=rows, settings=settings))
    assert result.groups == [] and "KeyError: '***'" in result.stats.last_rejection
    again = searcher.search(searcher.setup.held_out, seed=1)
    assert [t.reward for g in again.groups for t in g.trajectories] == [1.0] * 4


def test_a_run_trains_on_sessions(agent, tmp_path):
    """Contexts pass through buffer, trainer, evaluation and checkpoint."""
    config = agent("forgets", "one", "two", settings=["eval.every=1", "checkpoint.every=1"])
    summary = run(config)
    assert summary is not None and (tmp_path / "run" / "summary.json").is_file()


def test_a_session_may_be_as_long_as_the_models_context(agent, model, tmp_path):
    """However short its row is: attention suits that, and rotary embeddings must not change."""
    short = "sampling.max_tokens=2"
    assert check(agent("once", "1", settings=[short])).config.policy.attention == "sdpa"
    changes = tmp_path / "changes"
    shutil.copytree(model, changes)
    own = json.loads((changes / "config.json").read_text())
    factors = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "factor": 4.0}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 1024}
    own["rope_parameters"] = factors | rope
    (changes / "config.json").write_text(json.dumps(own))
    with pytest.raises(ValueError, match=r"more than 1024 tokens.* have 1 to 4096"):
        check(agent("once", "1", settings=[short, f"policy.model={changes}"]))


@pytest.mark.parametrize(
    "settings, why",
    [
        (["objective=ppo"], "needs values in the middle of a response"),
        (["task.python=/no/such/python"], "no such program"),
        (["task.rollout=nothing.py:f"], "no such file"),
        (["task.rollout=f"], "write package.module:function"),
        (["task.env={{KEY='plain'}}"], "is a secret"),
        (["policy.model={}"], r"task.rollout: .*chat_template is not set"),
    ],
)
def test_wrong_settings_are_named_before_anything_starts(settings, why, agent, tiny_model):
    with pytest.raises(ValueError, match=why):
        check(agent("once", "1", settings=[setting.format(tiny_model) for setting in settings]))

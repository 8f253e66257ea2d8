"""Programs that talk to the policy over HTTP: sessions, forks, faults, and whole runs."""

import json
import math
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import EOS
from programs import ask, refusal, said, user
from suite import until
from talk import TESTS, Script, agent_config, call, dialogue_config, dialogue_model, held_sessions

import tba.stop
from tba.agents.endpoint import Agents, Endpoint, OpenSession
from tba.agents.session import Session
from tba.errors import EngineError, SearchError
from tba.learn.layouts import Contexts, cut
from tba.open import run
from tba.scoring import process
from tba.scoring.process import AgentProcess, EventLoop
from tba.scoring.verdicts import Rejection, Responses, Verdict, added
from tba.scoring.worker import _as_json
from tba.search.evaluate import evaluate_held_out, evaluate_piece
from tba.search.searcher import Searcher
from tba.setup.setup import check
from tba.tasks import Program
from tba.tasks.agent import Agent
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
    monkeypatch.setattr(type(searcher.engine), "explores", False)
    endpoint = Endpoint(searcher.engine, searcher.text)
    url = endpoint.begin(OpenSession(Session("append"), searcher.engine.sampling, 0, 0, 9))
    assert "cannot sample with it" in refusal(url, [user("Say 1")], temperature=0.7)[2]
    endpoint.close()


def test_a_signal_ends_sessions_quietly(agent, monkeypatch, capfd):
    """The run is saved, and nothing of the endpoint fails."""

    def stop(self: Script, *given: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the signal has ended nothing")

    monkeypatch.setattr(tba.stop, "TWICE", 0.01)
    config = agent("once", "1", settings=["objective=tb"])
    with monkeypatch.context() as patch:
        patch.setattr(Script, "generate", stop)
        stopped = run(config)
    told = capfd.readouterr().err
    assert (stopped.steps, stopped.finished) == (0, False) and "stopping" in told
    assert "Traceback" not in told and "Exception" not in told
    assert run(config, Path(config.run.folder)).finished


SCHEMA = {"type": "object", "required": ["a", "b"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA}}


def test_an_endpoint_that_trains_nothing_gives_replies_in_a_format(agent, held, monkeypatch):
    """Where the engine can, and after a schema that it rejects; other engines refuse it."""
    searcher, _ = held(agent("once", "no", '{"a": 1}', '{"a": 1, "b": 2}'))
    engine = searcher.engine
    monkeypatch.setattr(type(engine), "joins_batches", True)  # its errors are those of a request
    endpoint = Endpoint(engine, searcher.text, trains=False)
    url = endpoint.begin(OpenSession(Session("append"), engine.sampling, 0, 0, 9))
    with ThreadPoolExecutor(1) as client:

        def answered(call: Callable[..., Any], **options: Any) -> Any:
            reply = client.submit(call, url, [user("Say 1")], **options)
            while not reply.done():
                endpoint.turns.work(0.05)
            return reply.result()

        def content(**given: Any) -> str:
            return said(answered(ask, response_format=given))["content"]

        assert content(type="text") == "no"
        assert content(type="json_object") == '{"a": 1}'
        assert content(**FORMAT) == '{"a": 1, "b": 2}'
        other = {"type": "json_schema", "json_schema": {"schema": {"required": ["c"]}}}
        status, _, told = answered(refusal, response_format=other)
        assert (status, "keys ['c']" in told) == (400, True)
        tool = {"type": "function", "function": {"name": "take"}}
        assert "leave one out" in answered(refusal, response_format=FORMAT, tools=[tool])[2]
        assert content(**FORMAT) == '{"a": 1, "b": 2}'
    endpoint.close()
    monkeypatch.setattr(type(engine), "constrains", False)
    endpoint = Endpoint(engine, searcher.text, trains=False)
    url = endpoint.begin(OpenSession(Session("append"), engine.sampling, 0, 0, 9))
    assert "needs engine=vllm" in refusal(url, [user("Say 1")], response_format=FORMAT)[2]
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


def test_sessions_without_a_call_do_not_count_in_the_measures_of_tokens(agent, held, monkeypatch):
    monkeypatch.setattr(Agent, "reports_perplexity", True)
    kinds = ["sound", "silent"] * 4
    rows = [{"prompt": f"Say {i}", "kind": kind} for i, kind in enumerate(kinds)]
    searcher, _ = held(agent("mishaps", "1", rows=rows))
    scores = evaluate_held_out(searcher).scores
    assert scores["sampled_rejected"] == 0.5 and scores["sampled_length"] == 6.0
    for measure in ("log_ratio", "perplexity", "perplexity_with_prompt"):
        assert np.isfinite(scores[f"sampled_{measure}"])


def test_sessions_of_an_evaluation_end_within_the_deadline_of_its_task(agent, held, monkeypatch):
    """Greedy and sampled ones together, or a program that hangs would cost the searcher."""
    searcher, _ = held(agent("once", "1", settings=["runtime.task_deadline=40"]))
    given: list[float] = []
    run_sessions = Agents.run_sessions

    def recorded(*arguments: Any) -> Responses:
        given.append(arguments[-1])
        return run_sessions(*arguments)

    monkeypatch.setattr(Agents, "run_sessions", recorded)
    evaluate_piece(searcher, 0)
    searcher.search(searcher.setup.held_out, seed=1)
    assert given == [18.0, 18.0, 36.0]


def test_a_reward_function_that_does_not_apply_leaves_the_programs_reward():
    assert added(Rejection("none", ""), 2.0) == 2.0


@pytest.mark.parametrize("program", ["at_once", "streams", "Counts", "once"])
def test_clients_of_all_kinds_are_served(program, agent, held):
    answer, latency = (call("double", n=1), 0.2) if program == "at_once" else ("12", 0.0)
    _, result = held(agent(program, answer, "3", settings=[f"engine.latency={latency}"]))
    (group,) = result.groups
    expected = 2.0 if program == "once" else 1.0
    assert [t.reward for t in group.trajectories] == [expected] * 2
    if program == "at_once":
        assert result.stats.counts["agents/calls"] == 12


def test_a_reply_that_nobody_read_is_not_trained_on(agent, held):
    """The next try gets it, also if each try waits for less time than a reply takes."""
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


def test_a_program_is_found_where_the_run_finds_modules(agent, held, tmp_path, monkeypatch):
    """As a module on the path, which may have entries that are no text, and as its file."""
    package = tmp_path / "lib" / "own_agent"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text("from programs import once")
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path, str(package.parent)])
    for program in ("own_agent.__main__:once", f"{package}/__main__.py:once"):
        _, result = held(agent(program, "1"))
        assert [t.reward for group in result.groups for t in group.trajectories] == [1.0, 1.0]


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
        (["task.rollout=nothing.py:f"], "no such file: nothing.py in /"),
        (["task.rollout=f"], "write package.module:function"),
        (["task.env={{KEY='plain'}}"], "is a secret"),
        (["policy.model={}"], r"task.rollout: .*chat_template is not set"),
    ],
)
def test_wrong_settings_are_named_before_anything_starts(settings, why, agent, tiny_model):
    with pytest.raises(ValueError, match=why):
        check(agent("once", "1", settings=[setting.format(tiny_model) for setting in settings]))


# Other users of the machine


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Endpoint, str]]:
    """An endpoint of 100 connections, which have half a second, and the name of a session."""
    from tba.agents import server

    few = psutil.Process().num_fds() + 200
    monkeypatch.setattr(server.resource, "getrlimit", lambda kind: (few, few))
    monkeypatch.setattr(server, "SECONDS", 0.5)
    engine: Any = SimpleNamespace(complete=None, joins_batches=False, explores=True, sampling=None)
    text: Any = None
    endpoint = Endpoint(engine, text)
    live: Any = SimpleNamespace(running={})
    yield endpoint, endpoint.begin(live).split("/")[-2]
    endpoint.close()


def request(session: str, body: str = "", length: int = 0) -> bytes:
    """Return a request for models, or with a body."""
    method, what = ("POST", "chat/completions") if body else ("GET", "models")
    head = f"{method} /s/{session}/v1/{what} HTTP/1.1\r\nhost: here\r\n"
    return f"{head}content-length: {length or len(body)}\r\n\r\n{body}".encode()


def test_a_connection_without_a_whole_request_to_a_session_is_closed(endpoint):
    """Whether it says nothing, a part, or whole requests to no session, again and again."""
    end, name = endpoint
    models = request(name)
    parts = {
        "nothing": b"", "head": models[:20], "second head": models + models[:20],
        "body": request(name, "abc", 9), "no session": request("guessed"),
        "endless body": request("guessed", "abc", 10**9), "head of 20 kB": b"G" * 20_000,
    }  # fmt: skip
    connections = end._server.server_state.connections
    with ExitStack() as sockets:
        for part in parts.values():
            one = socket.create_connection(("127.0.0.1", end.port), 5)
            sockets.enter_context(one).sendall(part)
        until(lambda: len(connections) == len(parts) - 1, 1)  # no HTTP, and closed at once
        until(lambda: not connections, 3)


def test_idle_connections_do_not_hold_up_a_session(endpoint):
    end, name = endpoint
    with ExitStack() as sockets:
        for _ in range(150):
            idle = socket.create_connection(("127.0.0.1", end.port), 5)
            sockets.enter_context(idle)
        own = sockets.enter_context(socket.create_connection(("127.0.0.1", end.port), 5))
        own.sendall(request(name))
        assert own.recv(20).startswith(b"HTTP/1.1 200")
        assert len(end._server.server_state.connections) <= 101


CHUNKED = (
    b"POST /s/guessed/v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
)


@pytest.mark.parametrize(
    "parts", [(CHUNKED, b"zz\r\n"), (CHUNKED + b"zz\r\n",)], ids=["two", "one"]
)
def test_what_is_no_http_is_not_logged(endpoint, parts, caplog):
    with socket.create_connection(("127.0.0.1", endpoint[0].port), 5) as own:
        for part in parts:
            own.sendall(part)
            time.sleep(0.05)
        while own.recv(9999):
            pass
    assert caplog.text == ""


# Processes that die while they start again

DIES = """
import os
import socket
from pathlib import Path

starts = Path(__file__).with_name("starts")
count = len(starts.read_text()) if starts.exists() else 0
starts.write_text("." * (count + 1))
if 0 < count <= {deaths} and {late}:
    send = socket.socket.sendall
    socket.socket.sendall = lambda self, data: [send(self, data), os._exit(3)]
elif 0 < count <= {deaths}:
    os.kill(os.getpid(), 9)
if {forks} and os.fork() == 0:  # it has what it inherits, and stays
    os.execvp("sleep", ["sleep", "20"]) if {forks} == 2 else __import__("time").sleep(20)

def rollout(base_url, row):
    if row["dies"]:
        os.kill(os.getpid(), 9)
    return 1.0
"""


@pytest.fixture
def held_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return what holds a session with a program, and then another one."""
    monkeypatch.setattr(process, "PAUSES", (0.0, 0.01, 0.01, 0.01))
    loop = EventLoop("test")

    def held(deaths: int = 0, forks: int = 0, late: bool = False) -> list[Verdict | None]:
        (tmp_path / "own.py").write_text(DIES.format(deaths=deaths, forks=forks, late=late))
        program = Program(f"{tmp_path}/own.py:rollout", sys.executable, 60.0, 4, 9, "append", {})
        agent = AgentProcess(program, math.inf, 60.0)

        async def both() -> list[Verdict | None]:
            until = time.monotonic() + 60
            return [await agent.run("", {"dies": dies}, until, True) for dies in (True, False)]

        return loop.begin(both()).result(60)

    yield held
    loop.close()


@pytest.mark.parametrize("deaths", [2, 99])
def test_a_process_that_dies_while_it_starts_again_is_started_a_few_times(
    held_by, deaths, tmp_path
):
    if deaths == 2:
        died, again = held_by(deaths)
        assert died.reason == "died" and again == 1.0
    else:
        with pytest.raises(EngineError, match=r"did not start: .* signal 9 \(Killed\)"):
            held_by(deaths)
    assert len((tmp_path / "starts").read_text()) == min(2 + deaths, 5)


def test_a_process_that_dies_at_the_end_of_its_start_is_known_to_have_ended(held_by):
    """A session may have been sent to it before; it does not wait for its deadline."""
    for _ in range(5):
        try:
            assert [verdict.reason for verdict in held_by(99, late=True)] == ["died", "died"]
        except SearchError as error:
            assert "its process ended with exit status 3" in str(error)


@pytest.mark.parametrize("forks", [1, 2])
def test_a_process_that_another_one_outlives_is_known_to_have_ended(held_by, forks):
    began = time.monotonic()
    died, again = held_by(forks=forks)
    assert died.reason == "died" and again == 1.0 and time.monotonic() - began < 15

"""A judge over HTTP, against a local server that is slow, busy, broken, or talks nonsense."""

import asyncio
import gc
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import Judge, Reply, share

import tba
from tba.config.plugins import JUDGES, resolve
from tba.config.schema import load
from tba.prompt import Answer, Prompt
from tba.scoring.scoring import Scoring
from tba.scoring.verdicts import Rejection
from tba.tasks.judges import http
from tba.tasks.judges.http import Http, JudgeError

CANARY = "sk-canary-3f9b2c"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    monkeypatch.setattr(http, "FIRST_WAIT", 0.01)
    with Judge().serving() as judge:
        yield judge
    gc.collect()  # a connection that was left open would be a warning, and so an error


@pytest.fixture
def classify(server: Judge) -> Callable[..., Http]:
    def make(**options: Any) -> Http:
        given = {"url": f"{server.url}/classify", "model": "m", "template": "{completion}"}
        return Http(**given | options)

    return make


def ask(judge: Http, *completions: str) -> list[float]:
    return asyncio.run(judge(["p"] * len(completions), list(completions), column=[1]))


def test_a_classifier_scores_a_group_in_one_request(server, classify):
    judge = classify()
    assert ask(judge, "a", "bcd") == [0.02, 0.04]
    assert server.bodies == [{"model": "m", "input": ["a", "bcd"]}]
    assert ask(judge, "a") == [0.02]  # in another event loop
    assert server.keys == [None] * 2
    assert ask(classify(value="log_probability"), "a") == [math.log(0.02)]
    assert ask(classify(value="logit"), "a", "bcd") == [2.0, 4.0]
    assert server.bodies[-1]["use_activation"] is False


def test_without_a_template_the_server_gets_messages(server, classify):
    assert ask(classify(template=None), "a", "bcd") == [0.04, 0.06]
    messages = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a"}]
    assert {"model": "m", "messages": messages} in server.bodies
    assert len(server.bodies) == 2


@pytest.mark.parametrize(
    "reply", [Reply(429), Reply(500), Reply(503, "<html>"), Reply(drop=True), Reply(delay=2.0)]
)
def test_a_request_is_repeated(server, classify, reply, monkeypatch):
    monkeypatch.setattr(http, "LONGEST_REQUEST", 1.0 if reply.delay else 60.0)
    server.script.extend([reply, reply])
    assert ask(classify(), "a") == [0.02]
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (Reply(500, "overloaded"), "failed 3 times: status 500: overloaded"),
        (Reply(drop=True), "failed 3 times: RemoteProtocolError"),
        (Reply(delay=0.5), "failed 3 times: TimeoutError"),
    ],
)
def test_after_the_last_repetition_it_is_an_error(server, classify, reply, told, monkeypatch):
    monkeypatch.setattr(http, "LONGEST_REQUEST", 0.1 if reply.delay else 60.0)
    server.always = reply
    with pytest.raises(JudgeError) as error:
        ask(classify(retries=2), "a")
    assert told in str(error.value)
    assert str(error.value).startswith(f"{server.url}/classify failed")
    assert len(server.bodies) == 3


DATA = '{{"data": [{}]}}'
NONSENSE = {
    "no JSON": ("<html>busy</html>", "answered with invalid data (it: Invalid JSON"),
    "other JSON": ('{"scores": [1]}', "answered with invalid data (data: Field required): {"),
    "text": (DATA.format('{"index": 0, "probs": ["high"]}'), "(data.0.probs.0: Input should be a"),
    "no score": (DATA.format(""), "answered with 0 scores for 1 texts"),
    "two labels": (DATA.format('{"index": 0, "probs": [0.1, 0.9]}'), "with 2 labels; set label"),
    "bad request": (None, "failed: status 400: no such model"),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_an_error_at_once(server, classify, case):
    body, told = NONSENSE[case]
    server.always = Reply(400, "no such model") if body is None else Reply(body=body)
    with pytest.raises(JudgeError) as error:
        ask(classify(), "a")
    assert told in str(error.value)
    assert len(server.bodies) == 1


def test_the_requests_of_a_group_run_at_one_time(server):
    server.always = Reply(delay=2.0)  # long enough for all to arrive on a busy machine
    judge = Http(f"{server.url}/classify", "m")
    asyncio.run(judge(["p"] * 9, list("abcdefghi")))
    assert (server.most, len(server.bodies)) == (9, 9)


@pytest.fixture
def task(server: Judge, tmp_path: Path) -> Callable[..., Any]:
    """A task whose answers this server judges."""
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}\n')

    def make(**options: Any) -> Any:
        table = {"use": "http", "url": f"{server.url}/classify", "model": "m"}
        table |= {"template": "{completion}"} | options
        given = {"data": str(tmp_path / "data.jsonl"), "held_out_size": 1, "reward": table}
        return resolve("tasks", "task", "custom", given).build()

    return make


def test_groups_are_scored_and_a_bad_answer_costs_itself(server, task):
    guard = Scoring({"": task()})
    prompts = [Prompt(str(i), "1+1=") for i in range(4)]
    answers = [[Answer("x" * i + t, True) for t in "yz"] for i in range(4)]
    server.always = Reply(delay=0.2)
    verdicts = guard(prompts, answers)
    assert verdicts == [[share("x" * i + t) for t in "yz"] for i in range(4)]
    server.script.extend([Reply(400, "no"), Reply(), Reply(400, "too long")])
    ((good, bad),) = guard(prompts[:1], [[Answer("good", True), Answer("bad", True)]])
    assert good == share("good")
    assert isinstance(bad, Rejection) and bad.reason == "raised"
    assert bad.detail.endswith(f"JudgeError: {server.url}/classify failed: status 400: too long\n")


def test_a_judge_that_works_is_accepted(server, task):
    task().check()
    assert [body["input"] for body in server.bodies] == [["Hello"]]


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (Reply(delay=6.0), "does not answer"),
        (Reply(503, "starting"), "status 503: starting"),
        (Reply(401, "who are you?"), "failed: status 401: who are you?"),
        (Reply(body="{}"), "answered with invalid data (data: Field required)"),
    ],
)
def test_a_judge_that_does_not_work_at_the_start_is_refused(server, task, monkeypatch, reply, told):
    monkeypatch.setattr(http, "REACHED_WITHIN", 3.0)  # a busy machine needs a part of it
    server.always, began = reply, time.monotonic()
    with pytest.raises(ValueError) as error:
        task().check()
    assert time.monotonic() - began < 6
    assert str(error.value).startswith(f"task.reward: {server.url}/classify ")
    assert told in str(error.value)


def test_a_judge_that_cannot_be_reached_is_refused_within_five_seconds():
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"^http://127\.0\.0\.1:9/classify failed: Conn"):
        Http("http://127.0.0.1:9/classify", "m").check()
    assert time.monotonic() - began < 5.5


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no scheme": ({"url": "localhost:8000/classify"}, "must begin with http:// or https://"),
    "no endpoint": ({"url": "http://localhost:8000"}, "end with /classify, such as"),
    "bad port": ({"url": "http://localhost:http/classify"}, "must begin with http://"),
    "password": ({"url": f"http://me:{CANARY}@host/classify"}, "url is a secret"),
    "query": ({"url": f"http://host/classify?key={CANARY}"}, "url is a secret"),
    "template": ({"template": "{prompt}"}, "template must contain {completion}"),
    "guard": ({"url": "http://h/v1/chat/completions"}, "end with /classify, such as"),
    "deadline": ({"deadline": 9.0}, "'http' has no such option: it was removed; reward.deadline"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_option_is_refused(case):
    options, told = WRONG[case]
    given = {"url": "http://localhost:8000/classify", "model": "m"} | options
    with pytest.raises(ValueError) as error:
        resolve(JUDGES, "task.reward", "http", given).build()
    assert told in str(error.value)
    assert CANARY not in str(error.value)


def test_the_key_is_sent_and_told_nowhere(server, monkeypatch, caplog):
    """Not even if the server repeats it in an error."""
    monkeypatch.setenv("JUDGE_KEY", CANARY)
    given = {"url": f"{server.url}/classify", "model": "m", "template": "{completion}"}
    options = given | {"api_key": "env:JUDGE_KEY", "retries": 1}
    judge = resolve(JUDGES, "task.reward", "http", options).build()
    with caplog.at_level(logging.DEBUG):
        assert ask(judge, "a") == [0.02]
        assert server.keys == [f"Bearer {CANARY}"]
        told = []
        for status in (401, 500, 200):
            server.always = Reply(status, echo=True)
            with pytest.raises(JudgeError, match="its reply is not shown") as error:
                ask(judge, f"b{status}")
            told.append(error.value)
    everything = [repr(told), repr(judge), caplog.text]
    assert not [text for text in everything if CANARY in text]
    assert caplog.text  # httpx writes at this level


def test_a_key_that_is_missing_or_stands_in_the_config_is_refused(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    given = {"url": "http://localhost:8000/classify", "model": "m", "api_key": "env:JUDGE_KEY"}
    with pytest.raises(ValueError, match="variable 'JUDGE_KEY' is not set"):
        resolve(JUDGES, "task.reward", "http", given).build()
    monkeypatch.setenv("JUDGE_KEY", f"{CANARY} and more")
    with pytest.raises(ValueError, match="api_key has invalid characters") as error:
        resolve(JUDGES, "task.reward", "http", given).build()
    assert CANARY not in str(error.value)
    with pytest.raises(ValueError, match="api_key is a secret") as error:
        load(None, [f"task.reward={{use='http', api_key='{CANARY}'}}"])
    assert CANARY not in str(error.value)


def test_the_key_is_in_no_file_of_a_run(server, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", CANARY)
    rows = "".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(8))
    (tmp_path / "data.jsonl").write_text(rows)
    table = f"{{use='http', url='{server.url}/classify', model='m', template='{{completion}}',"
    settings = [
        f"task.reward={table} api_key='env:JUDGE_KEY'}}", "task=custom",
        f"task.data={tmp_path / 'data.jsonl'}", "task.held_out_size=2",
        f"policy.model={tiny_model}", f"run.folder={tmp_path / 'run'}", "run.steps=2",
        "runtime.use=local", "sampling.max_tokens=5", "sampling.samples=4",
        "trainer.batch_size=8", "trainer.group_size=4", "trainer.warmup_steps=0",
        "eval.prompts=2", "eval.samples=1", "eval.k=[]", "log.console=off",
    ]  # fmt: skip
    server.script.append(Reply())  # of the check
    server.script.append(Reply(401, echo=True))
    summary = tba.train(load(None, settings)).summary
    assert summary.finished and summary.samples_trained == 16
    assert set(server.keys) == {f"Bearer {CANARY}"}
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    named = {path.name for path in files if b"JUDGE_KEY" in path.read_bytes()}
    assert {name.partition(".out.")[0] for name in named} == {
        *("config.json", "sessions.jsonl"),
        "events",  # of TensorBoard, with the settings
    }
    assert [path.name for path in files if CANARY.encode() in path.read_bytes()] == []

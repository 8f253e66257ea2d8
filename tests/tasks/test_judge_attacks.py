"""Judges' servers that are hostile or confused: what they send has limits, and is checked."""

import asyncio
import gzip
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes import Judge, Reply

from tba.tasks.judges import http
from tba.tasks.judges.http import MAX_REPLY_BYTES, Http, JudgeError


@pytest.fixture
def asked() -> Iterator[Callable[..., list[float]]]:
    """Ask a server that answers so, for so many scores."""
    with Judge().serving() as server:

        def ask(reply: Reply, count: int = 1, **options: Any) -> list[float]:
            server.always = reply
            url = f"{server.url}/classify"
            judge = Http(url, "m", template="{completion}", retries=0, **options)
            texts = [str(i) for i in range(count)]
            return asyncio.run(judge(texts, texts))

        yield ask


def data(*rows: Any) -> str:
    return json.dumps({"data": [{"index": index, "probs": probs} for index, probs in rows]})


def test_scores_may_come_in_any_order(asked):
    assert asked(Reply(200, data((2, [0.3]), (0, [0.1]), (1, [1]))), 3) == [0.1, 1.0, 0.3]


WRONG = {
    "text": data((0, ["0.5"])),
    "a boolean": data((0, [True])),
    "null": data((0, [None])),
    "too large for a float": '{"data": [{"index": 0, "probs": [1e999]}]}',
    "an index that is a boolean": data((False, [0.5])),
    "no index": '{"data": [{"probs": [0.5]}]}',
    "another index": data((1, [0.5])),
    "a table of scores": '{"data": [{"index": 0, "probs": {"0": 0.5}}]}',
    "nested too deeply": "[" * 100_000,
    "no UTF-8": b'{"data": "\xff"}',
    "no score": data((0, [])),
    "more than a probability": data((0, [1.5])),
    "less than a probability": data((0, [-0.01])),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_score_is_none(case, asked):
    with pytest.raises(JudgeError, match="answered"):
        asked(Reply(200, WRONG[case]))


@pytest.mark.parametrize(
    "rows",
    [
        [(0, [0.1]), (0, [0.2])],
        [(1, [0.1]), (2, [0.2])],
        [(0, [0.1]), (2, [0.2])],
        [(0, [0.1]), (1, [0.2, 0.8])],
        [(0, [0.1]), (1, [])],
        [(0, [0.1]), (1, [0.2]), (1, [0.2])],
    ],
)
def test_each_text_has_its_own_score(rows, asked):
    with pytest.raises(JudgeError, match="answered"):
        asked(Reply(200, data(*rows)), 2)


ZIPPED = {"Content-Encoding": "gzip"}


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(body=b" " * 2**20, again=0.0), "answered with more than 4,194,304 bytes"),
        (Reply(200, b" " * (MAX_REPLY_BYTES + 1)), "answered with more than 4,194,304 bytes"),
        (Reply(500, b" " * (MAX_REPLY_BYTES + 1)), "answered with more than 4,194,304 bytes"),
        (Reply(200, gzip.compress(b" "), ZIPPED), "answered in gzip, though it was"),
    ],
)
def test_an_answer_has_a_limit(reply, message, asked):
    with pytest.raises(JudgeError, match=message):
        asked(reply)


@pytest.mark.parametrize("value", ["probability", "log_probability"])
def test_a_probability_is_from_0_to_1(value, asked):
    told = r"answered with a probability of 1\.5, not between 0 and 1"
    with pytest.raises(JudgeError, match=told):
        asked(Reply(200, data((0, [0.5]), (1, [1.5]))), 2, value=value)
    assert asked(Reply(200, data((0, [1.5]))), value="logit") == [1.5]


def test_an_endless_answer_ends_with_the_deadline(asked, monkeypatch):
    monkeypatch.setattr(http, "LONGEST_REQUEST", 0.2)
    began = time.monotonic()
    with pytest.raises(JudgeError, match="TimeoutError"):
        asked(Reply(body=b" ", again=0.02))
    assert time.monotonic() - began < 5


KEY = "sk-Canary/4711+x"


def test_nothing_that_a_server_sends_is_told_where_it_may_repeat_the_key(asked):
    """In base64, backwards, or in any other form."""
    for status in (200, 401):
        with pytest.raises(JudgeError, match="its reply is not shown, because it may") as error:
            asked(Reply(status, f"Wrong key {KEY[::-1]} given"), api_key=KEY)
        assert "Wrong" not in str(error.value)
        with pytest.raises(JudgeError, match="Wrong key"):
            asked(Reply(status, f"Wrong key {KEY} given"))

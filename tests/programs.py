"""Programs of a user for tests, with the standard library only: each is a `rollout`."""

import asyncio
import ctypes
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

NUMBER = {"n": {"type": "integer", "description": "a number"}}
DOUBLE = {
    "type": "function",
    "function": {
        "name": "double", "description": "Double a number.",
        "parameters": {"type": "object", "properties": NUMBER, "required": ["n"]},
        "return": {"type": "integer"},
    },
}  # fmt: skip


def post(
    base_url: str,
    messages: list[Any],
    timeout: float = 60.0,
    headers: dict[str, str] | None = None,
    **options: Any,
) -> Any:
    """Return the response to a request, which can be read."""
    body = json.dumps({"model": "policy", "messages": messages, **options}).encode()
    headers = {"content-type": "application/json", **(headers or {})}
    return urlopen(Request(f"{base_url}/chat/completions", body, headers), timeout=timeout)


def ask(base_url: str, messages: list[Any], **options: Any) -> dict[str, Any]:
    """Return the body of a reply; HTTPError for a refusal. Come again if told so, as clients do."""
    while True:
        try:
            with post(base_url, messages, **options) as reply:
                return json.loads(reply.read())
        except HTTPError as error:
            if error.code != 503:
                raise
            time.sleep(float(error.headers["retry-after"]))


def refusal(base_url: str, messages: list[Any], **options: Any) -> tuple[int, str, str]:
    """Return status, code and message of a refusal."""
    try:
        ask(base_url, messages, **options)
    except HTTPError as error:
        told = json.loads(error.read())["error"]
        return error.code, told["code"], told["message"]
    raise AssertionError("it was not refused")


def said(reply: dict[str, Any]) -> dict[str, Any]:
    return reply["choices"][0]["message"]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def double(base_url: str, row: dict[str, Any]) -> float:
    """Double by a tool, in at most three turns; the reward is the length of the last message."""
    messages: list[Any] = [user(row["prompt"])]
    for _ in range(3):
        message = said(ask(base_url, messages, tools=[DOUBLE]))
        messages.append(message)
        for call in message.get("tool_calls") or ():
            n = json.loads(call["function"]["arguments"])["n"]
            told = {"role": "tool", "tool_call_id": call["id"], "name": "double"}
            messages.append({**told, "content": str(2 * n)})
        if not message.get("tool_calls"):
            break
    return len(message["content"])


async def once(base_url: str, row: dict[str, Any]) -> dict[str, float]:
    """Ask once; the reward and another number."""
    message = said(ask(base_url, [user(row["prompt"])]))
    return {"reward": len(message["content"]), "solved": 1.0}


def brief(base_url: str, row: dict[str, Any]) -> float:
    """Ask for a reply of one token."""
    ask(base_url, [user(row["prompt"])], max_tokens=1)
    return 1.0


def warm(base_url: str, row: dict[str, Any]) -> float:
    """Ask with a temperature."""
    ask(base_url, [user("Say 1")], temperature=0.7)
    return 1.0


def refused(base_url: str, row: dict[str, Any]) -> float:
    """Ask for all that cannot be done; each is refused in a sentence."""
    hello = [user("Say")]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"n": 2}, "n = 2 is not supported; leave it out and repeat the request"),
        ({"n": True}, "n = True"),
        ({"temperature": "0.7"}, "temperature"),
        ({"top_k": 3}, "top_k = 3 differs from the config"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "leave one out"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ["x", "y<eos>"]}, "stop has 'y<eos>', but"),
        ({"stream": "false"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "needs stream=true"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options"),
        ({"response_format": {"type": "json_object"}}, "runs sample without constraints; leave it"),
        (
            {"response_format": {"type": "json_schema"}},
            "json_object, or json_schema with",
        ),
        ({"response_format": "json"}, "response_format"),
        ({"tool_choice": "required", "tools": [DOUBLE]}, "tool_choice = 'required'"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"temperature": 0.3}, "temperature = 0.3 differs from the config"),
        ({"tools": [{"type": "file_search"}]}, "each tool must be a function"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["x", ""]}, "stop"),
        ({"min_tokens": 5}, "min_tokens = 5"),
        ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs"),
        ({"parallel_tool_calls": False, "tools": [DOUBLE]}, "parallel_tool_calls = False"),
        ({"reasoning_effort": "low"}, "reasoning_effort = 'low'"),
        ({"penalty_of_tomorrow": 1}, "penalty_of_tomorrow = 1"),
        ({"tools": [DOUBLE, DOUBLE]}, "must be a function with a unique name"),
    ]
    for options, why in wrong:
        status, _, message = refusal(base_url, hello, **options)
        assert (status, why in message) == (400, True), (options, message)
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert "not text" in refusal(base_url, [image])[2]
    assert refusal(base_url, [])[0] == 400
    assert refusal(base_url, [{"content": "?"}])[0] == 400
    for wrong_message in ({"role": "user"}, {"role": "tool", "content": 0}):
        assert "messages.1.content must be" in refusal(base_url, [*hello, wrong_message])[2]
    function = {"role": "function", "name": "double", "content": "2"}
    assert "role = 'function'; it must be one of" in refusal(base_url, [*hello, function])[2]
    odd = {"role": "assistant", "content": "?", "tool_calls": 5}
    assert "cannot be read" in refusal(base_url, [odd, user("Say")])[2]
    assert refusal(base_url, [user("x" * 5000)])[1] == "context_length_exceeded"
    assert refusal(base_url.replace("/s/", "/s/x"), hello)[:2] == (410, "session_ended")
    status, code, message = refusal(f"{base_url}/v1", hello)  # or /responses
    assert (status, code) == (404, "not_found") and "are served" in message
    for _ in range(3):
        ask(base_url, hello)
    assert refusal(base_url, hello)[:2] == (410, "session_ended")  # max_calls
    return 1.0


def forgets(base_url: str, row: dict[str, Any]) -> float:
    """Ask, go on, and then begin anew with a summary, which shares the first reply."""
    first = said(ask(base_url, [user("Say 1")]))
    second = said(ask(base_url, [user("Say 1"), first, user("more")]))
    ask(base_url, [user("Say 1"), first, user("other")])
    ask(base_url, [user("Short: " + second["content"])])
    return 1.0


def notes(base_url: str, row: dict[str, Any]) -> float:
    """Go on with a message of the assistant that the policy has not written."""
    reply = said(ask(base_url, [user("Say 1")])) | {"provider_specific_fields": {}}
    note = {"role": "assistant", "content": "a note"}
    ask(base_url, [user("Say 1"), reply, note, user("more")])
    return 1.0


async def blocks(base_url: str, row: dict[str, Any]) -> float:
    """Block the event loop of the program's process in the first session after another row."""
    if row["prompt"] == "Say 0":
        Path(row["flag"]).touch()
    elif not Path(row["flag"]).exists():
        Path(row["flag"]).touch()
        time.sleep(3600)
    await asyncio.to_thread(ask, base_url, [user("Say")])
    return 1.0


def greets(base_url: str, row: dict[str, Any]) -> float:
    """Begin in another way each time."""
    ask(base_url, [user(f"Say {time.monotonic_ns()}")])
    return 1.0


def at_once(base_url: str, row: dict[str, Any]) -> float:
    """Send the same request over three connections: as three samples, or as one and its retries."""
    cases: list[tuple[int, dict[str, Any]]] = [
        (3, {}),
        (1, {"seed": 1}),
        (1, {"headers": {"Idempotency-Key": "a"}}),
        (1, {"headers": {"x-stainless-retry-count": "1"}}),
    ]
    known: set[str] = set()
    with ThreadPoolExecutor(3) as threads:
        for calls, options in cases:
            given = {"tools": [DOUBLE], **options}
            sent = [threads.submit(ask, base_url, [user("Say 1")], **given) for _ in range(3)]
            replies = [each.result() for each in sent]
            ids = {call["id"] for reply in replies for call in said(reply)["tool_calls"]}
            assert len({reply["id"] for reply in replies}) == len(ids) == len(ids - known) == calls
            known |= ids
    return 1.0


def gives_up(base_url: str, row: dict[str, Any]) -> float:
    """Wait for less time than a reply takes, and ask the same again."""
    for attempt in range(20):
        try:
            with post(base_url, [user("Say 1")], timeout=0.3) as reply:
                reply.read()
            return float(attempt > 0)
        except OSError:
            time.sleep(0.1)
    return 0.0


def breaks_off(base_url: str, row: dict[str, Any]) -> float:
    """Leave within a request, and ask another one."""
    url = urlsplit(base_url)
    head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    with socket.create_connection((url.hostname, url.port), 10) as connection:
        connection.sendall(head.encode() + b'{"messages"')
        time.sleep(0.2)
    ask(base_url, [user("Say 1")])
    return 1.0


class Counts:
    """Made once in a process."""

    made = 0
    lock = threading.Lock()

    def __init__(self) -> None:
        with Counts.lock:
            Counts.made += 1

    def rollout(self, base_url: str, row: dict[str, Any]) -> float:
        ask(base_url, [user(row["prompt"])])
        return Counts.made


def streams(base_url: str, row: dict[str, Any]) -> float:
    """Read a reply as a stream, and one with tokens; what was sent is what is seen."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with post(base_url, [user("Say 1")], **options) as reply:
        parts = [line[6:] for line in reply.read().decode().split("\n\n") if line]
    assert parts[-1] == "[DONE]"
    chunk, end, usage = map(json.loads, parts[:-1])
    assert chunk["choices"][0]["delta"]["content"] and usage["usage"]["completion_tokens"] > 0
    reasons = [part["choices"][0]["finish_reason"] for part in (chunk, end)]
    assert reasons == [None, "stop"] and end["choices"][0]["delta"] == {}
    first = ask(base_url, [user("Say 2")], return_token_ids=True, logprobs=True)
    second = ask(base_url, [user("Say 2"), said(first), user("more")], return_token_ids=True)
    tokens = first["choices"][0]["token_ids"]
    prompt = first["prompt_token_ids"]
    assert second["prompt_token_ids"][: len(prompt) + len(tokens)] == prompt + tokens
    content = first["choices"][0]["logprobs"]["content"]
    assert len(content) == len(tokens)
    assert bytes(b for one in content for b in one["bytes"]).decode() == said(first)["content"]
    with urlopen(f"{base_url}/models", timeout=60) as models:
        assert json.loads(models.read())["data"][0]["id"] == "policy"
    return 1.0


def secret(base_url: str, row: dict[str, Any]) -> float:
    """Nothing secret is inherited, and what was set is there."""
    ask(base_url, [user("Say")])
    assert "SOME_API_KEY" not in os.environ
    if row["kind"] == "raises":
        raise KeyError(os.environ["OWN_TOKEN"])
    return float(os.environ["OWN_TOKEN"] == "own-value")


ORACLE = {"type": "function", "function": {"name": "ask", "parameters": {"type": "object"}}}
EOS, ONE, TWO, CALL = range(4)
BUDGET = 5


def oracle(base_url: str, row: dict[str, Any]) -> float:
    """Hold a dialogue of two turns with the oracle of tests/talk.py, by calls of a tool."""
    messages = [user(row["prompt"])]
    return _consulted(base_url, row, lambda message, tokens, told: [*messages, message, *told])


def rewritten_oracle(base_url: str, row: dict[str, Any]) -> float:
    """Write the whole past anew, in another order, as a message of the user."""

    def rewritten(message: Any, tokens: list[int], told: list[Any]) -> list[Any]:
        words = "".join(result["content"] for result in told)
        past = "".join("1" if token in (ONE, CALL) else "2" for token in reversed(tokens))
        return [user(row["prompt"] + words + past)]

    return _consulted(base_url, row, rewritten)


def forgetful_oracle(base_url: str, row: dict[str, Any]) -> float:
    """Keep only what the oracle has said, as a message of the user."""

    def told(message: Any, tokens: list[int], results: list[Any]) -> list[Any]:
        return [user(row["prompt"] + "".join(result["content"] for result in results))]

    return _consulted(base_url, row, told)


def _consulted(
    base_url: str,
    row: dict[str, Any],
    go_on: Callable[[Any, list[int], list[Any]], list[Any]],
) -> float:
    options: dict[str, Any] = {"tools": [ORACLE], "stop": "1", "return_token_ids": True}
    first = ask(base_url, [user(row["prompt"])], max_tokens=BUDGET, **options)
    tokens = first["choices"][0]["token_ids"]
    ended, calls = tokens[-1] in (EOS, ONE), tokens.count(CALL)
    if not (ended and calls):
        return _worth(tokens, ended, 0)
    left = BUDGET - len(tokens) - (tokens[-1] == ONE) - calls
    if left < 1:
        return _worth(tokens, False, calls)
    said_words = [row["first"], "1" if row["first"] == "2" else "2"] * BUDGET
    told = [
        {"role": "tool", "tool_call_id": call["id"], "name": "ask", "content": word}
        for call, word in zip(said(first)["tool_calls"], said_words, strict=False)
    ]
    second = ask(base_url, go_on(said(first), tokens, told), max_tokens=left, **options)
    tokens = second["choices"][0]["token_ids"]
    ended, more = tokens[-1] in (EOS, ONE), tokens.count(CALL)
    if ended and more:  # nobody answers
        return _worth(tokens, False, calls + more)
    return _worth(tokens, ended, calls)


def _worth(tokens: list[int], finished: bool, asked: int) -> float:
    return 0.5 * finished + 1.0 * (asked == 1) - 0.3 * tokens.count(TWO)


def mishaps(base_url: str, row: dict[str, Any]) -> Any:
    """Hold a session of three calls; before the second one happens what the row says."""
    messages = [user(row["prompt"])]
    kind = row["kind"]
    if kind == "silent":
        return 1.0
    for number in range(3):
        if number == 1:
            match kind:
                case "leaves" | "vanishes":
                    with suppress(OSError):  # close the connection before the reply
                        post(base_url, messages, timeout=0.001)
                    if kind == "vanishes":
                        return 1.0
                case "raises":
                    raise KeyError("no such page")
                case "nan":
                    return float("nan")
                case "text":
                    return "much"
                case "none":
                    return None
                case "hangs":
                    time.sleep(3600)
                case "dies":
                    os._exit(3)
                case "prints":
                    print("a page", file=sys.stderr)
                case "long":
                    assert refusal(base_url, [user("x" * 5000)])[1] == "context_length_exceeded"
                case "many":
                    for place in range(9):
                        ask(base_url, [user(f"Say {place}")])
                    assert refusal(base_url, messages)[0] == 410
                    return 1.0
                case "late":
                    threading.Thread(target=_call_later, args=[base_url], daemon=True).start()
        messages += [said(ask(base_url, messages)), user("more")]
    return 1.0


def _call_later(base_url: str) -> None:
    time.sleep(1.0)
    with suppress(HTTPError):
        ask(base_url, [user("late")])


def lingers(base_url: str, row: dict[str, Any]) -> float:
    """Hold a session of three calls with pauses, and tell where its endpoint is."""
    messages = [user(row["prompt"])]
    with Path(os.environ["TOLD"], "told").open("a") as file:
        print(base_url, file=file)
    for _ in range(3):
        messages += [said(ask(base_url, messages)), user("more")]
        time.sleep(0.1)
    return 1.0


class Doubles:
    """The tool as an environment."""

    def reset(self, **row: Any) -> str | None:
        pass

    def double(self, n: int) -> int:
        """Double a number.

        Args:
            n: a number
        """
        return 2 * n


class Mortal(Doubles):
    """Tools that end their process, each in its own way, and one that fills its memory."""

    def reset(self, kind: str = "sound", **row: Any) -> str | None:
        if kind == "vanishes":
            os._exit(3)
        self.lock = threading.Lock()  # cannot be pickled
        return str(os.getpid()) if kind == "tells" else None

    def freeze(self) -> None:
        """Hold the interpreter lock: PyDLL does not release it for a call."""
        ctypes.PyDLL(None).sleep(60)

    def vanish(self) -> None:
        """End the process."""
        os._exit(3)

    def grow(self) -> int:
        """Take all memory."""
        return len(bytes(10**11))

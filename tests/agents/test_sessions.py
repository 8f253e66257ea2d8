"""Which earlier reply a request goes on from, whatever a program does to its messages."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PAD
from hypothesis import example, given, settings
from hypothesis import strategies as st
from talk import SIMPLE, call, dialogue_model

import tba.agents.session
from tba.agents.chat import Chat
from tba.agents.session import NO_TOKENS, Exchange, Session, Turns, squeezed
from tba.agents.wire import ChatRequest, message_of
from tba.config.tables import PolicyTable
from tba.models.pretrained import load_text
from tba.models.template import text_of
from tba.models.tokenizer import Tokenizer
from tba.prompt import Prompt
from tba.types import Completion, Sampling, Turn

__all__ = ["dialogue_model"]  # a fixture

FORGETFUL = SIMPLE.replace(
    "{{ m.content }}",
    "{{ m.content.split('z')[-1] if m.role == 'assistant' and not loop.last else m.content }}",
)
"""Drops thoughts of earlier turns, up to a z."""
TOOL = {"type": "function", "function": {"name": "double", "parameters": {"type": "object"}}}
REPLIES = st.tuples(
    st.sampled_from(["", "z", "a z"]), st.sampled_from(["1", " 1", "2\n", "1 2"]),
    st.sampled_from(["", call("double", n=1), call("double", n=2)]), st.booleans(),
)  # fmt: skip
"""Thoughts, an answer, a call, and whether the policy ends its turn itself."""
EDITS = st.sampled_from(
    ["none", "shown otherwise", "shown otherwise", "word", "argument", "role", "removed", "swapped"]
)
STEPS = st.lists(
    st.tuples(st.integers(0, 9), EDITS, st.integers(0, 9), REPLIES), min_size=2, max_size=7
)

PLAIN = ("", "1", "", False)
CALLED = [
    (0, "none", 0, PLAIN), (1, "none", 0, ("", "1", call("double", n=1), False)),
    (2, "word", 2, PLAIN),
]  # fmt: skip
"""The message before a turn with a call is changed."""
CONTINUED = [
    (0, "none", 0, PLAIN),
    (1, "removed", 2, PLAIN),
    (2, "removed", 3, PLAIN),
    (3, "none", 0, PLAIN),
]
"""The first reply is continued twice."""


@pytest.fixture(scope="module")
def text(model: Path) -> Tokenizer:
    return load_text(PolicyTable(model=str(model)))


def meaning(messages: list[Any]) -> list[Any]:
    """Return what messages say, found without the package."""
    said = []
    for m in messages:
        content = m.get("content") or ""
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        functions = [c["function"] for c in m.get("tool_calls") or []]
        calls = [(f["name"], json.loads(f["arguments"])) for f in functions]
        said.append((m["role"], content.strip() if m["role"] == "assistant" else content, calls))
    return said


def edited(messages: list[Any], edit: str, place: int) -> list[Any]:
    """Return other messages, or the same ones in another form."""
    place %= len(messages)
    message = dict(messages[place])
    calls = message.get("tool_calls") or []
    match edit:
        case "shown otherwise":
            message = {"refusal": None, **{name: message[name] for name in sorted(message)}}
            if calls:
                function = calls[0]["function"]
                spaced = json.dumps(json.loads(function["arguments"]), indent=2)
                own = {"index": 0, "function": {**function, "arguments": spaced}}
                message["tool_calls"] = [{**calls[0], **own}]
            elif message["content"] and isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
        case "word":
            message["content"] = f"{text_of(message['content'])}x"
        case "argument" if calls:
            function = {"name": "double", "arguments": '{"n": 3}'}
            message["tool_calls"] = [{**calls[0], "function": function}]
        case "role" if message["role"] != "assistant":
            message["role"] = "user" if message["role"] == "system" else "system"
        case "removed" if len(messages) > 1:
            return messages[:place] + messages[place + 1 :]
        case "swapped":
            return messages[:place] + messages[place : place + 2][::-1] + messages[place + 2 :]
    return [*messages[:place], message, *messages[place + 1 :]]


@pytest.mark.parametrize(
    "template, history", [("SIMPLE", "append"), ("FORGETFUL", "append"), ("FORGETFUL", "template")]
)
@given(steps=STEPS)
@example(steps=CALLED)
@example(steps=CONTINUED)
@settings(max_examples=10, deadline=None)
def test_a_call_never_goes_on_from_another_one(text, template, history, steps):
    """It goes on from the deepest call whose messages and reply it begins with.

    Its tokens are what the template shows, but for the past that the policy has sampled.
    """
    tokenizer = text.tokenizer
    tokenizer.chat_template = {"SIMPLE": SIMPLE, "FORGETFUL": FORGETFUL}[template]
    chat = Chat(replace(text, tokenizer=tokenizer), {"double": TOOL})
    session = Session(history)
    told: list[list[Any]] = [[{"role": "user", "content": "Say 1"}]]
    said: dict[Exchange, list[Any]] = {}
    for which, edit, place, (thought, answer, called, ends) in steps:
        messages = edited(told[which % len(told)], edit, place)
        request = ChatRequest(messages=messages, tools=[TOOL])
        asked = session.ask(request.messages, chat)
        wanted = meaning(messages)
        depths = {}
        for exchange, own in said.items():
            is_open = exchange.turn.tokens[-1] != tokenizer.eos_token_id
            follows = wanted[: len(own)] == own and len(own) < len(wanted) + is_open
            depths[exchange] = len(own) * follows
        shown = chat.rendered(asked.messages)
        own = tokenizer.decode(asked.context.tolist()).replace(PAD, "")  # it has no line break
        if asked.after is not None:
            assert depths[asked.after] > 0
        if history == "append":
            deepest = max(depths.values(), default=0)
            assert (depths[asked.after] if asked.after else 0) == deepest
        roles = [m["role"] for m in messages] + ["assistant"]
        goes_on = ("assistant", "assistant") in pairwise(roles)  # with a message of its own
        if not goes_on and (history == "template" or template == "SIMPLE"):
            assert squeezed(own) == squeezed(shown)
        ended = [tokenizer.eos_token_id] * ends
        written = tokenizer(thought + answer + called, add_special_tokens=False)["input_ids"]
        tokens = np.array([*written, *ended], np.int32)
        turn = Completion(tokens, np.zeros(len(tokens), np.float32), ends, 0)
        reply = message_of(chat, asked.context, turn, request, request.stops, asked.begun)
        reply = json.loads(json.dumps(reply))
        said[session.add(asked, turn, reply)] = meaning([*messages, reply])
        answers = [
            {"role": "tool", "tool_call_id": c["id"], "content": "2"}
            for c in reply.get("tool_calls") or []
        ]
        told.append([*messages, reply, *(answers or [{"role": "user", "content": "and?"}])])


@pytest.mark.parametrize("history", ["append", "template"])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    "parts, content",
    [
        (("The ans", "wer is ", "4."), "The answer is 4."),
        (("1\n", "\n", "2"), "1\n\n2"),
        (("1", " ", "  "), "1"),
        (("Hm. <tool_", 'call>{"name": "double", "argu', 'ments": {"n": 1}}</tool_call>'), "Hm."),
        (("1", call("double", n=1), call("double", n=1)), "1"),
    ],
)
def test_a_reply_that_is_cut_off_and_continued_is_one_turn(text, parts, content, apart, history):
    """Its tokens follow each other, whether the program joins the parts or not."""
    tokenizer = text.tokenizer
    tokenizer.chat_template = SIMPLE
    chat = Chat(replace(text, tokenizer=tokenizer), {"double": TOOL})
    session = Session(history)
    messages: list[Any] = [{"role": "user", "content": "Say 1"}]
    before: list[int] = []
    for place, part in enumerate(parts):
        request = ChatRequest(messages=messages, tools=[TOOL])
        asked = session.ask(messages, chat)
        assert not before or asked.context.tolist() == before
        ended = [text.eos_id] * (place == 2)
        tokens = np.array([*text.tokens(part), *ended], np.int32)
        before = [*asked.context.tolist(), *tokens.tolist()]
        turn = Completion(tokens, np.zeros(len(tokens), np.float32), place == 2, 0)
        reply = message_of(chat, asked.context, turn, request, (), asked.begun, place)
        session.add(asked, turn, reply)
        if place == 0 or apart or "tool_calls" in {**messages[-1], **reply}:
            messages = [*messages, reply]
        else:
            joined = messages[-1]["content"] + reply["content"]
            messages = [*messages[:-1], {"role": "assistant", "content": joined}]
    whole = session.exchanges[-1].messages[-1]
    assert whole["content"].strip() == content
    calls = whole.get("tool_calls", ())
    assert [c["function"]["arguments"] for c in calls] == [{"n": 1}] * "".join(parts).count("</")
    asked = session.ask([*messages, {"role": "user", "content": "and?"}], chat)
    assert asked.context.tolist()[: len(before)] == before and session.forks == 0


def test_numbers_of_a_call_are_compared_as_numbers(text):
    """JavaScript writes 1.0 as 1."""
    chat = Chat(text, {"double": TOOL})
    session = Session("append")
    question = {"role": "user", "content": "Say 1"}
    turn = Completion(text.tokens("a1"), np.zeros(2, np.float32), True, 0)

    def reply(arguments: str) -> Any:
        function = {"name": "double", "arguments": arguments}
        return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}

    session.add(session.ask([question], chat), turn, reply('{"n": 1.0, "m": 1e20}'))
    for arguments, same in (
        ('{"m":100000000000000000000,"n":1}', True),
        ('{"m":1e20,"n":"1"}', False),
    ):
        asked = session.ask([question, reply(arguments), question], chat)
        assert (asked.after is not None) == same
        assert "name" not in asked.messages[-1]  # of the tool


def test_a_program_may_leave_out_the_thoughts_of_a_reply_but_not_change_them(text):
    chat = Chat(text, {})
    session = Session("append")
    question = {"role": "user", "content": "Say 1"}
    asked = session.ask([question], chat)
    turn = Completion(text.tokens("a1"), np.zeros(2, np.float32), True, 0)
    replies = [{"role": "assistant", "content": "1", "reasoning_content": t} for t in "ab"]
    exchanges = [session.add(asked, turn, reply) for reply in replies]

    def after(thoughts: str | None) -> Exchange | None:
        reply = {**replies[1], "reasoning_content": thoughts}
        return session.ask([question, reply, question], chat).after

    assert after("b") is exchanges[1]
    assert after(None) in exchanges and after("") in exchanges
    assert after("c") is None


@pytest.mark.parametrize(
    "asked, content, calls",
    [
        ({}, f"Hm. {call('double', n=1)} ", 0),
        ({"tools": [TOOL], "tool_choice": "none"}, f"Hm. {call('double', n=1)} ", 0),
        ({"tools": [TOOL]}, "Hm.", 1),
    ],
)
def test_calls_are_read_where_tools_may_be_called_and_stop_strings_are_left_out(
    asked, content, calls, text
):
    request = ChatRequest(messages=[{"role": "user", "content": "Say 1"}], stop="Obs", **asked)
    chat = Chat(text, {tool["function"]["name"]: tool for tool in request.tools or []})
    tokens = text.tokens(f"Hm. {call('double', n=1)} Obs")
    turn = Completion(tokens, np.zeros(len(tokens), np.float32), True, 0)
    reply = message_of(chat, chat.encode(Prompt("", "Say 1")), turn, request, request.stops)
    assert (reply["content"], len(reply.get("tool_calls", []))) == (content, calls)


def test_a_batch_waits_for_the_turns_of_other_sessions(monkeypatch):
    """For a share of the seconds of the last batch; no longer once all have come."""
    monkeypatch.setattr(tba.agents.session, "PATIENCE", 1e6)
    turn = Turn(NO_TOKENS, Sampling(1, 1.0, 1), 0)
    sizes = []

    def complete(turns: Sequence[Turn]) -> list[Completion]:
        time.sleep(1e-3)
        sizes.append(len(turns))
        return [Completion(NO_TOKENS, np.zeros(0, np.float32), True, 0) for _ in turns]

    async def hold() -> None:
        sessions = ["first"]
        turns = Turns(complete, False, sessions)
        turns.sample(turn)
        await asyncio.to_thread(turns.work, 60)
        sessions.append("second")
        turns.sample(turn)
        batch = asyncio.ensure_future(asyncio.to_thread(turns.work, 60))
        await asyncio.sleep(0.05)
        turns.sample(turn)
        await batch

    asyncio.run(hold())
    assert sizes == [1, 2]

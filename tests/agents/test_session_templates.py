"""Sessions of three calls in the chat templates of eight model families, which TRL has as files."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tba.agents.chat import Chat
from tba.agents.session import History, Session
from tba.agents.wire import ChatRequest, message_of
from tba.models.tokenizer import Tokenizer
from tba.types import Completion

MODELS = Path(os.environ.get("TBA_MODELS", Path.home() / ".cache" / "tba-models"))
TRL = Path(os.environ.get("TBA_TRL", "no-such-folder"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (TRL / "trl").is_dir() or not (MODELS / "smollm2").is_dir(),
        reason="needs $TBA_MODELS/smollm2, and TBA_TRL=FOLDER after"
        " pip install --no-deps --target FOLDER 'trl>=1.16,<1.17'",
    ),
]

DOUBLE = {
    "type": "function",
    "function": {
        "name": "double",
        "description": "Double a number.",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
    },
}
JSON = '<tool_call>\n{"name": "double", "arguments": {"n": 21}}\n</tool_call>'
XML = "<tool_call>\n<function=double>\n<parameter=n>\n21\n</parameter>\n</function>\n</tool_call>"
PAIRS = "<tool_call>double\n<arg_key>n</arg_key>\n<arg_value>21</arg_value>\n</tool_call>"
OBJECT = '{"name": "double", "parameters": {"n": 21}}'
MARKED = "<|tool_call>call:double{n:21}<tool_call|>"
OPEN = "<think>\n"
THOUGHT = f"{OPEN}Hm.\n</think>\n\n"
MARKER = re.compile(r"<[|｜][^<>\s]*>|<\w+\|>")


@dataclass(frozen=True)
class Family:
    """How models of a family write, and the contexts of their sessions with `template`."""

    contexts: Sequence[int]
    """Plain, with thoughts, with a tool, with both."""
    file: str | None = None
    """Name of the template in TRL; None: that of SmolLM2's tokenizer."""
    ends: Sequence[str] = ("<|im_end|>",)
    """Tokens that end a turn, the last one after a call."""
    call: str = JSON
    thought: str = THOUGHT


FAMILIES = {
    "SmolLM2": Family((1, 1, 1, 1)),
    "Qwen2.5": Family((1, 1, 1, 1), "qwen2_5"),
    "Qwen3": Family((1, 3, 1, 2), "qwen3"),
    "Qwen3.5": Family((3, 3, 2, 2), "qwen3_5_think", call=XML),
    "Llama 3.2": Family((1, 1, 1, 2), "llama3_2", ["<|eot_id|>"], OBJECT),
    "Gemma 4": Family(
        (1, 3, 1, 2), "gemma4_v5", ["<turn|>", "<|tool_response>"], MARKED,
        "<|channel>thought\nHm.<channel|>",
    ),
    "DeepSeek-R1": Family((3, 3, 3, 3), "deepseek_r1_distill", ["<｜end▁of▁sentence｜>"]),
    "GLM-4.5": Family((3, 3, 3, 2), "glm4moe", ["<|user|>", "<|observation|>"], PAIRS),
}  # fmt: skip


def text_of(family: Family) -> Tokenizer:
    """Return SmolLM2's tokenizer with the template of a family, and with its markers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODELS / "smollm2")
    if family.file is not None:
        file = TRL / "trl" / "chat_templates" / f"{family.file}.jinja"
        tokenizer.chat_template = file.read_text("utf-8")
        markers = {*MARKER.findall(tokenizer.chat_template), *family.ends}
        tokenizer.add_special_tokens({"additional_special_tokens": sorted(markers)})
    if family.call != JSON:  # TRL says how calls in another form are read
        from trl.chat_template_utils import add_response_schema

        add_response_schema(tokenizer)
    ends = tokenizer.convert_tokens_to_ids(list(family.ends))
    return Tokenizer(tokenizer, ends[0], frozenset(ends), ends[0], 8192, len(tokenizer))


def hold(
    text: Tokenizer, family: Family, history: History, thinks: bool, tool: bool, keeps: bool = True
) -> Session:
    """Return a session of three calls; its client returns messages in another form.

    It leaves out thoughts that came apart, unless it `keeps` them.
    """
    tools = [DOUBLE] if tool else []
    chat = Chat(text, {"double": DOUBLE} if tool else {})
    session = Session(history)
    messages: list[Any] = [{"role": "user", "content": "Double 21."}]
    for said in (family.call if tool else "It is 42.", "It is 42.", "Yes."):
        request = ChatRequest(messages=messages, tools=tools)
        asked = session.ask(request.messages, chat)
        written = family.thought if thinks else ""
        if text.tokenizer.decode(asked.context.tolist()).endswith(OPEN):
            written = (written or f"{OPEN}</think>\n\n").removeprefix(OPEN)
        calls = said == family.call
        end = family.ends[-1 if calls else 0]
        tokens = text.tokens(written + said + end)
        turn = Completion(tokens, np.zeros(len(tokens), np.float32), True, 0)
        reply = message_of(chat, asked.context, turn, request, request.stops)
        session.add(asked, turn, reply)
        names = sorted(reply) if keeps else ["content", "role", "tool_calls"]
        returned = {name: reply[name] for name in names if name in reply}
        messages = [*messages, returned]
        assert len(reply.get("tool_calls", ())) == calls, reply
        assert not any(end in (reply["content"] or "") for end in family.ends)
        if not calls:
            messages.append({"role": "user", "content": "Sure?"})
            continue
        (call,) = reply["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert int(arguments["n"]) == 21
        function = {"name": "double", "arguments": json.dumps(arguments, indent=1)}
        returned["tool_calls"] = [{**call, "function": function}]
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "42"})
    return session


@pytest.mark.filterwarnings("ignore")  # of TRL, when it is imported
@pytest.mark.parametrize("name", FAMILIES)
def test_sessions_have_as_many_contexts_as_the_page_says(name, monkeypatch):
    """One with `append`; docs/agents.md has the table."""
    monkeypatch.syspath_prepend(TRL)
    family = FAMILIES[name]
    text = text_of(family)
    for history, contexts in (("append", [1, 1, 1, 1]), ("template", family.contexts)):
        kinds = product((False, True), repeat=2)
        sessions = [hold(text, family, history, thinks, tool) for tool, thinks in kinds]
        assert [s.forks + 1 for s in sessions] == list(contexts), history
        assert all(len(s.exchanges) == 3 for s in sessions)
    forgetful = hold(text, family, "append", thinks=True, tool=True, keeps=False)
    assert forgetful.forks == 0
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text("utf-8")
    row = " | ".join(map(str, family.contexts))
    assert any(name in line and f"| {row} |" in line for line in page.splitlines())

"""A prompt shows all that its messages say, in the form that the chat template expects."""

import re
from typing import Any

import pytest
import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from tba.models.template import arguments_in, render, unread
from tba.prompt import Message, Prompt

CHATML = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<assistant>{{ m.content }}{% endif %}{% endfor %}"
)
"""Knows two roles only, as the first template of Phi-3."""
QWEN25 = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if 'tool_calls' in m %}"
    "{% for c in m.tool_calls %}{% set f = c.function %}"
    '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}{% endfor %}'
    "{% endif %}{% endfor %}"
)
QWEN3 = QWEN25.replace(
    "{{ m.content }}",
    "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}",
)
"""Shows thoughts of the last turn only."""
DEEPSEEK = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + c.function.arguments }}{% else %}"
    "{{ m.content.split('</think>')[-1] }}{% endfor %}{% endfor %}"
)
"""Shows arguments as text, and nothing else in a turn with calls."""
PRINTED = QWEN25.replace(" | tojson", "")
LLAMA3 = (
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}"
    "{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    "{% elif m.role == 'tool' %}{{ m.content | tojson }}"
    "{% else %}{{ m.content | trim }}{% endif %}{% endfor %}"
)
"""Shows one call, without the content before it, and results as JSON."""
MISTRAL = (
    "{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>"
    "{{ s + ' ' if loop.last and s }}{{ m.content }}{% endfor %}"
)
"""Shows the system message within the last one of the user."""
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% endfor %}"
)
NAMED = (
    "{% for m in messages %}<{{ m.role }} {{ m.name or m.tool_calls[0].function.name }}>"
    "{{ m.content }}{% endfor %}"
)

CODE = "{% for m in messages %}<{{ m.role }}>{{ (m.content | string).strip() }}{% endfor %}"
"""Shows parts as code, and drops spaces at both ends, as Llama 3.1 and Nemotron do."""
TOOLED = CHATML.replace("m.role", "m.role + (m.tools or '')")
"""Shows the tools of a message, as Phi-4-mini does."""


def rendered(template: str, *messages: Any, **options: Any) -> str:
    own = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own)
    tokenizer.chat_template = template
    return render(tokenizer, messages, options)


def user(content: Any, **rest: Any) -> Message:
    return {"role": "user", "content": content, **rest}


def turn(content: Any, **rest: Any) -> Message:
    return {"role": "assistant", "content": content, **rest}


def call(arguments: Any) -> list[Any]:
    return [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}]


RESULT = {"role": "tool", "tool_call_id": "c1", "content": "2"}
OLD_RESULT = {"role": "function", "name": "add", "content": "2"}
ADD = '<assistant>{"name": "add", "arguments": %s}<tool>2'
FLAT = '[{"index": 0, "name": "add", "parameters": {"a": 1}}]'
NULLS = {"a": [{"b": None, "c": "x"}], "d": None}
SHOWN: dict[str, tuple[str, list[Message], str]] = {
    "JSON": (QWEN25, [turn("", tool_calls=call('{"a":1}')), RESULT], ADD % '{"a": 1}'),
    "table": (QWEN25, [turn("", tool_calls=call({"a": 1})), RESULT], ADD % '{"a": 1}'),
    "null": (QWEN25, [turn("", tool_calls=call('{"a":null}')), RESULT], ADD % '{"a": null}'),
    "Parquet": (
        QWEN25, [turn(None, tool_calls=call(NULLS), name=None), RESULT], ADD % '{"a": [{"c": "x"}]}'
    ),
    "no arguments": (QWEN25, [turn("", tool_calls=call("")), RESULT], ADD % "{}"),
    "calls as JSON": (QWEN25, [turn(None, tool_calls=FLAT), RESULT], ADD % '{"a": 1}'),
    "before tools": (
        QWEN25, [turn(None, function_call={"name": "add", "arguments": "{}"}), OLD_RESULT],
        ADD % "{}",
    ),
    "no calls": (QWEN25, [turn("1", tool_calls=[], thinking=""), user("2")], "<assistant>1<user>2"),
    "other names": (
        QWEN25, [{"role": "developer", "content": "1"}, {"role": "human", "content": "2"}],
        "<system>1<user>2",
    ),
    "text": (
        DEEPSEEK, [turn("", tool_calls=call({"a": "é"})), RESULT],
        '<assistant>add{"a": "é"}<tool>2',
    ),
    "printed": (PRINTED, [turn("", tool_calls=call({"a": 1})), RESULT], ADD % '{"a": 1}'),
    "printed result": (
        QWEN25, [turn("", tool_calls=call({"a": 1})), RESULT | {"content": "{'a': 1}"}],
        (ADD % '{"a": 1}')[:-1] + "{'a': 1}",
    ),
    "result as JSON": (LLAMA3, [user("1"), RESULT | {"content": 'a"\n'}], '<user>1<tool>"a\\"\\n"'),
    "trimmed": (LLAMA3, [user(" 1 \n")], "<user>1"),
    "moved": (
        MISTRAL, [{"role": "system", "content": "1"}, user("1"), turn("1"), user("1")],
        "<user>1<assistant>1<user>1 1",
    ),
    "old thoughts": (QWEN3, [turn("1", reasoning="Hm"), user("2")], "<assistant>1<user>2"),
    "new thoughts": (
        QWEN3, [user("2"), turn("1", thinking="Hm")], "<user>2<assistant><think>Hm</think>1"
    ),
    "thoughts in a text": (
        DEEPSEEK, [turn("<think>Hm</think>1"), user("2")], "<assistant>1<user>2"
    ),
    "quoted": (PARTS, [user("{'text': 'x'} \"text\": \"\"")], "<user>{'text': 'x'} \"text\": \"\""),
    "names": (
        NAMED, [user("1", name="Ann"), turn("", tool_calls=call("")), RESULT],
        "<user Ann>1<assistant add><tool add>2",
    ),
    "begun in parts": (
        CODE, [user("1"), turn([{"type": "text", "text": "2"}])], "<user>1<assistant>2"
    ),
    "two begun parts": (
        PARTS, [user("1"), turn([{"type": "text", "text": "2"}] * 2)], "<user>1<assistant>22"
    ),
    "empty parts": (CODE, [user([{"type": "text", "text": ""}]), user("2")], "<user><user>2"),
    "not begun": (CHATML, [user("1"), turn("", name=None, tool_calls=[])], "<user>1<assistant>"),
    "begun with spaces": (CHATML, [user("1"), turn(" \n")], "<user>1<assistant>"),
    "not begun in parts": (
        CHATML, [user("1"), turn([{"type": "text", "text": ""}])], "<user>1<assistant>"
    ),
    "tools of a message": (TOOLED, [user("1", tools="[]")], "<user[]>1<assistant>"),
}  # fmt: skip
"""A template, messages as data have them, and the prompt."""


@pytest.mark.parametrize("case", SHOWN)
def test_messages_are_shown_in_the_form_that_the_template_expects(case):
    template, messages, expected = SHOWN[case]
    assert rendered(template, *messages) == expected


LOST: dict[str, tuple[str, list[Message], str]] = {
    "role": (PHI3, [{"role": "system", "content": "<"}, user("1")], "1 (system): *content;"),
    "tool": (PHI3, [user("1"), {"role": "tool", "content": "1"}], "2 (tool): *content;"),
    "calls": (CHATML, [turn("", tool_calls=call({"a": 1})), RESULT], "1 (assistant): *tool_calls;"),
    "another call": (LLAMA3, [turn("", tool_calls=call({}) * 2)], "1 (assistant): *tool_calls;"),
    "content": (LLAMA3, [turn("1", tool_calls=call({})), RESULT], "1 (assistant): *content;"),
    "arguments": (
        QWEN25.replace("f.arguments | tojson", "f.arguments.b"),
        [turn("", tool_calls=call({"a": 1}))], "1 (assistant): *tool_calls;",
    ),
    "thoughts": (CHATML, [turn("1", reasoning="1"), user("1")], "1 (assistant): *reasoning_"),
    "new thoughts": (DEEPSEEK, [user("1"), turn("1", thinking="1")], "2 (assistant): *reasoning_"),
    "thoughts before parts": (
        CODE, [user("1"), turn([{"type": "text", "text": "1"}], thinking="1")], "2 (assistant): *r"
    ),
    "refusal": (CHATML, [turn("", refusal="1"), user("1")], "1 (assistant): *refusal;"),
    "tools of a message": (CHATML, [user("1", tools="[1]")], "1 (user): *tools;"),
    "name": (CHATML, [user("1", name="user")], "1 (user): *name;"),
    "end": (CHATML.replace("m.content", "m.content[:4]"), [user("1 1 1")], "1 (user): *content;"),
    "past": (CHATML.replace("messages", "messages[-1:]"), [user("1")] * 2, "1 (user): *content;"),
}  # fmt: skip
"""A template, messages, and what it leaves out, though the same text stands elsewhere."""


@pytest.mark.parametrize("case", LOST)
def test_what_a_template_leaves_out_is_refused(case):
    template, messages, told = LOST[case]
    whole = re.escape("message " + told).replace(r"\*", "the chat template leaves out its ")
    with pytest.raises(ValueError, match=whole):
        rendered(template, *messages)


SCHEMA = {"name": "add", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": SCHEMA}
FLAT_TOOLS = '[{"name": "add", "parameters": "{\\"type\\": \\"object\\"}"}]'
TEXTS = [{"text": '{"a": 1}'}]
GIVEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "table": ({"chat_template_kwargs": {"think": False, "tools": None}}, {"think": False}),
    "JSON": ({"chat_template_kwargs": '{"think": false}', "tools": "[]"}, {"think": False}),
    "none": ({"chat_template_kwargs": None, "tools": [], "documents": ""}, {}),
    "tools": ({"tools": [{**TOOL, "strict": None}]}, {"tools": [TOOL]}),
    "tools as JSON": ({"tools": FLAT_TOOLS}, {"tools": [TOOL]}),
    "texts": ({"tools": ["hammer"], "documents": TEXTS}, {"documents": TEXTS}),
}


@pytest.mark.parametrize("case", GIVEN)
def test_columns_are_arguments_of_the_template(case):
    columns, expected = GIVEN[case]
    assert arguments_in(columns, "{{ think }}{{ tools }}{{ documents }}") == expected


KWARGS = "chat_template_kwargs"
WRONG: list[Any] = [{"thinks": 1}, [1], '["think"]', "think", 5, {"thin": 1}, {"text": 1}, {"m": 1}]
WRONG += [{"messages": []}, {"add_generation_prompt": False}, '{"think": 1, "think": 0}']


@pytest.mark.parametrize("wrong", WRONG)
def test_arguments_that_the_template_does_not_know_are_refused(wrong):
    """Also those whose names only stand in its text, such as `thinking` in Qwen3's."""
    template = CHATML + "a text{{ think }}"
    with pytest.raises(ValueError, match=r"chat_template_kwargs = .* has no such argument"):
        arguments_in({KWARGS: wrong}, template)


KNOWN = {
    "one of several": {"default": CHATML, "tool_use": "{{ think }}"},
    "set": "{% if think is not defined %}{% set think = 1 %}{% endif %}{{ think }}",
    "training": "{%- generation %}{{ think }}{% endgeneration -%}{% continue %}",
}


@pytest.mark.parametrize("case", KNOWN)
def test_arguments_are_known_in_any_template(case):
    assert arguments_in({KWARGS: {"think": 1}}, KNOWN[case]) == {"think": 1}


def test_columns_called_like_arguments_are_named():
    """Such as `date_string` in Llama 3.1, and `tools` where only messages have them."""
    row = Prompt("p", [{"role": "user", "content": "1"}], {"think": True, "tools": [TOOL], "x": 1})
    assert unread([row], TOOLED + "{{ think }}", None) == ["think", "tools"]

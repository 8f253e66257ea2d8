"""Tools in a chat template: what the policy reads, and what it has written."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import EOS, PAD
from desk import Desk
from talk import CHARACTERS, SIMPLE, call
from transformers import AutoTokenizer

from tba.agents.chat import Chat, ToolCall, endings
from tba.agents.session import readable
from tba.config.tables import PolicyTable
from tba.models.pretrained import load_text
from tba.models.tokenizer import Tokenizer
from tba.prompt import Prompt
from tba.tasks.custom import describe

KNOWING = (
    "{% if tools %}[tools]{% for t in tools %}{{ t.function.name }};{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A template that describes tools, and has a line break after every message."""
TOOLS = describe("desk:Desk", Desk, 8, 1.0)
PARSER = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open": "CALL", "close_pattern": r"END\s*", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<eos>\s*", "content": "text"},
    },
}  # fmt: skip
"""A form of calls that a model's tokenizer may define."""


@pytest.fixture(scope="module")
def text(make_model: Callable[..., Path]) -> Tokenizer:
    model = make_model(vocabulary=[PAD, EOS, *CHARACTERS], context=4096)
    return load_text(PolicyTable(model=str(model)))


@pytest.fixture
def chat(text: Tokenizer) -> Callable[[str], Chat]:
    def make(template: str, **attributes: Any) -> Chat:
        tokenizer = text.tokenizer
        tokenizer.chat_template = template
        tokenizer.response_template = attributes.get("parser")
        return Chat(replace(text, tokenizer=tokenizer), TOOLS.schemas)

    return make


def shown(chat: Chat, tokens: np.ndarray) -> str:
    return str(chat.text.tokenizer.decode(tokens.tolist()))


def tokens(chat: Chat, written: str) -> np.ndarray:
    return np.array(chat.text.tokenizer(written)["input_ids"], np.int32)


def test_schemas_come_from_signatures_and_docstrings():
    by_name = {name: schema["function"] for name, schema in TOOLS.schemas.items()}
    assert sorted(by_name) == ["divide", "double", "hang", "later", "leave"]
    assert by_name["double"] == {
        "name": "double",
        "description": "Double a number.",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer", "description": "The number."}},
            "required": ["n"],
        },
        "return": {"type": "integer"},
    }


def test_the_system_message_describes_tools_where_the_template_does_not(chat):
    simple = chat(SIMPLE)
    assert not simple.describes_tools
    read = shown(simple, simple.encode(Prompt("a", "What is twice 4?"), " Be quick."))
    system, _, rest = read.removeprefix("[system]").partition("[user]")
    assert rest == "What is twice 4? Be quick.[assistant]"
    described = system.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert [json.loads(line) for line in described.split("\n")] == list(TOOLS.schemas.values())
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    kind = shown(simple, simple.encode(Prompt("a", messages)))
    assert kind.startswith("[system]Be kind.") and kind.endswith("[user]Hi[assistant]")
    assert messages[0]["content"] == "Be kind."  # the row stays as it is


def test_the_template_describes_tools_where_it_can(chat):
    knowing = chat(KNOWING)
    read = shown(knowing, knowing.encode(Prompt("a", [{"role": "user", "content": "Hi"}]), "!"))
    assert read == "[tools]divide;double;hang;later;leave;<user>Hi!\n<assistant>"


def test_a_row_may_begin_with_calls(chat):
    """As the policy would write them, where the template has none."""
    function = {"name": "double", "arguments": '{"n": 4}'}
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    result = {"role": "tool", "content": [{"type": "text", "text": "8"}]}
    prompt = Prompt("a", [{"role": "user", "content": "?"}, called, result])
    simple = chat(SIMPLE)
    written = '<tool_call>\n{"name": "double", "arguments": {"n": 4}}\n</tool_call>'
    told = f"[user]?[assistant]{written}<eos>[user]<tool_response>\n8\n</tool_response>[assistant]"
    assert shown(simple, simple.encode(prompt)).endswith(told)
    prompt = Prompt("a", [{"role": "user", "content": "?"}, {**called, "thinking": "?"}, result])
    with pytest.raises(ValueError, match=r"prompt 'a': message 3 \(assistant\): the chat template"):
        simple.encode(prompt)


def test_what_a_program_says_is_refused_if_the_template_leaves_it_out(text):
    """What the policy has said may be left out, as by templates that drop its thoughts."""
    text.tokenizer.chat_template = (
        "{% for m in messages if m.role == 'user' %}[user]{{ m.content }}{% endfor %}[assistant]"
    )
    users = Chat(text, {})
    asked = {"role": "user", "content": "?"}
    past = [asked, {"role": "assistant", "content": "1", "name": "me"}, asked]
    assert users.rendered(past) == "[user]?[user]?[assistant]"
    with pytest.raises(ValueError, match=r"message 1 \(system\): the chat template leaves out"):
        users.rendered([{"role": "system", "content": "Add."}, *past])


def test_the_reply_begins_where_the_turn_has_ended(chat):
    """With or without the token that ends it; what the template adds after it belongs to it."""
    results = [{"role": "tool", "name": "double", "content": c} for c in ("8", "4")]
    knowing = chat(KNOWING)
    (eos,) = knowing.text.eos_ids
    (letter,) = tokens(knowing, "x")
    assert shown(knowing, knowing.reply(eos, results)) == "\n<tool>8\n<tool>4\n<assistant>"
    assert shown(knowing, knowing.reply(int(letter), results)).startswith("<eos>\n<tool>8")
    simple = chat(SIMPLE)
    told = "\n".join(f"<tool_response>\n{n}\n</tool_response>" for n in (8, 4))
    assert shown(simple, simple.reply(eos, results)) == f"[user]{told}[assistant]"


WRITTEN: dict[str, tuple[str, str, list[Any]]] = {
    "no call": ("It is 8.", "It is 8.", []),
    "a call": (f"Well: {call('double', n=4)}", "Well:", [("double", {"n": 4})]),
    "two calls": (call("a") + "\n" + call("b", c=[1]), "", [("a", {}), ("b", {"c": [1]})]),
    "the same call twice": (call("a") * 2, "", [("a", {})] * 2),
    "without arguments": ('<tool_call>{"name": "a"}</tool_call>', "", [("a", {})]),
    "not closed": ('<tool_call>{"name": "a", "arguments": {}}', "", [("a", {})]),
    "the tags in a text": (call("a", b='"</tool_call>'), "", [("a", {"b": '"</tool_call>'})]),
    "a number that is none of JSON's": (call("a", b=float("inf")), "", [None]),
    "half of a character": (call("a", b="\ud83d"), "", [None]),
    "parameters": ('<tool_call>{"name": "a", "parameters": {"b": 1}}', "", [("a", {"b": 1})]),
    "no JSON": ("Try <tool_call>double(4)</tool_call>", "Try", [None]),
    "a list": ("<tool_call>[1]</tool_call>", "", [None]),
    "arguments that are a list": ('<tool_call>{"name": "a", "arguments": [4]}', "", [None]),
    "a name that is a number": ('<tool_call>{"name": 3, "arguments": {}}', "", [None]),
    "very deep": ("<tool_call>" + "[" * 3000, "", [None]),
    "one of two": (f"<tool_call>?</tool_call>{call('a')}", "", [None, ("a", {})]),
    "quoted in a thought": (
        f"<think>In <tool_call></tool_call> tags.</think>{call('a')}",
        "<think>In <tool_call></tool_call> tags.</think>",
        [("a", {})],
    ),
    "opened in a thought": (
        f"<think>After <tool_call>.</think>{call('a')}",
        "<think>After <tool_call>.</think>",
        [("a", {})],
    ),
    "in a thought only": (
        f"<think>Not {call('a')}.</think>No.",
        f"<think>Not {call('a')}.</think>No.",
        [],
    ),
    "opened very often": ("<tool_call>{" * 4000, "<tool_call>{" * 3999, [None]),
    "opened twice": (f"<tool_call> is it: {call('a')}", "<tool_call> is it:", [("a", {})]),
}
"""A turn; its content without calls; its calls, None for one that cannot be read."""


@pytest.mark.parametrize("case", WRITTEN)
def test_calls_are_read(case, chat):
    written, content, expected = WRITTEN[case]
    simple = chat(SIMPLE)
    message, calls = simple.read(tokens(simple, "[user]"), tokens(simple, written + EOS), ())
    assert [None if c.error else (c.name, c.arguments) for c in calls] == expected
    assert message["role"] == "assistant"
    assert message["content"] == content
    sound = [{"name": name, "arguments": arguments} for name, arguments in filter(None, expected)]
    assert message.get("tool_calls", []) == [{"type": "function", "function": s} for s in sound]


def test_the_prompt_may_have_opened_the_thought(chat):
    """As templates of reasoning models do."""
    simple = chat(SIMPLE)
    written = f"Not {call('a')}.</think>Well: {call('b')}{EOS}"
    message, calls = simple.read(tokens(simple, "[user]?<think>\n"), tokens(simple, written), ())
    assert [c.name for c in calls] == ["b"]
    assert message["content"] == f"Not {call('a')}.</think>Well:"


def test_a_continued_thought_makes_no_calls(chat):
    """Whether the policy or the prompt has opened it."""
    simple = chat(SIMPLE)
    quoted = f"Not {call('a')}"
    for prompt, head in (("[user]?", f"<think>{quoted}"), ("[user]?<think>", quoted)):
        turn = tokens(simple, f".</think>Well: {call('b')}{EOS}")
        context = tokens(simple, prompt + head)
        message, calls = simple.read(context, turn, (), {"role": "assistant", "content": head})
        assert [c.name for c in calls] == ["b"]
        assert message["content"] == ".</think>Well:"


def test_a_call_is_shown_as_the_policy_wrote_it(chat):
    """By a template without tools, too; those with tools do so by their `tojson`."""
    for template, line_break in ((SIMPLE, "\n"), (KNOWING, "")):
        made = chat(template)
        call_of_it = '{"name": "a", "arguments": {"ß": "naïve </tool_call> 1\u2028", "x": 1.0}}'
        written = f"<tool_call>{line_break}{call_of_it}{line_break}</tool_call>"
        turn = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": json.loads(call_of_it)}],
        }
        assert written in made.rendered([{"role": "user", "content": "?"}, turn])
        null = '{"x": null, "y": [{"z": null}]}'
        turn = {**turn, "tool_calls": [{"function": {"name": "a", "arguments": null}}]}
        assert null in made.rendered([{"role": "user", "content": "?"}, readable(turn)])


def test_a_turn_may_end_with_a_stop_string(chat):
    """Of a call, which is read nevertheless, or of a text, which ends before it."""
    simple, context = chat(SIMPLE), np.array([3], np.int32)
    stop = ("</tool_call>", "\n")
    message, calls = simple.read(context, tokens(simple, call("a")), stop)
    assert (message["content"], calls) == ("", [ToolCall("a", {})])
    message, calls = simple.read(context, tokens(simple, "Eight.\n"), stop)
    assert (message, calls) == ({"role": "assistant", "content": "Eight."}, [])


def test_the_tokenizer_may_define_how_calls_are_written(chat):
    own = KNOWING.replace("<tool_call>", "CALL").replace("</tool_call>", "END")
    knowing = chat(own, parser=PARSER)
    context = tokens(knowing, "<user>Hi\n<assistant>")

    def read(written: str) -> Any:
        return knowing.read(context, tokens(knowing, written + EOS), ())

    message, calls = read('CALL{"name": "double", "arguments": {"n": 4}}END')
    assert calls == [ToolCall("double", {"n": 4})]
    assert message["content"] == "" and len(message["tool_calls"]) == 1
    assert read("It is 8.") == ({"role": "assistant", "content": "It is 8."}, [])
    message, (broken,) = read("CALL{4}END")
    assert message["content"] == "CALL{4}END" and "JSON" in broken.error


WRONG = {
    "none": (None, "the tokenizer's chat template refuses it: Cannot use chat template"),
    "no system": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}",
        "the tokenizer's chat template refuses it: no system here",
    ),
    "no results": (
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}",
        "the chat template does not show tool results",
    ),
    "calls of its own form": (
        KNOWING.replace("<tool_call>", "CALL").replace("</tool_call>", "END"),
        "writes tool calls in another form.* add response_template to",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_templates_that_cannot_hold_a_dialogue_are_refused(case, chat):
    template, told = WRONG[case]
    with pytest.raises(ValueError, match=told):
        chat(template)  # type: ignore[arg-type]


TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}END{% endfor %}"
ENDS = {
    "token": TURNS.replace("END", "<end>"),
    "eos": TURNS.replace("END", "<eos>"),
    "EOS after it": TURNS.replace("END", "<end>") + "<eos>",
    "between": TURNS.replace("END", "{% if not loop.last %}<end>{% endif %}"),
    "last": TURNS.replace("END", "{% if loop.last %}<eos>{% else %}<end>{% endif %}"),
    "parts": TURNS.replace("m.content", "m.content[0].text").replace("END", "<end>"),
    "text": TURNS.replace("END", "{% if m.role == 'assistant' %} (end){% endif %}"),
    "next": TURNS.replace("END", " "),
    "none": "{{ raise_exception('no chats') }}",
}
"""What the chat template writes after a turn."""
OTHER = "but generation does not stop there; set "
WARNED = f"warning: the chat template ends a turn with '<end>', {OTHER}policy.eos_token='<end>'"
OWN = "'<eos>' (tokenizer, config.json)"


@pytest.mark.parametrize(
    ("template", "generation", "stop", "expected"),
    [
        ("token", {}, (), [OWN, WARNED]),
        ("token", {"eos_token_id": [2, 1, -1]}, (), [
            "'<eos>' (tokenizer, config.json, generation_config.json),"
            " '<end>' (generation_config.json, chat template)"
        ]),
        ("token", {"eos_token_id": 2}, (), [
            f"{OWN}, '<end>' (generation_config.json, chat template)",
            "warning: generation_config.json and the tokenizer name different EOS tokens;"
            " set policy.eos_token to the token that ends a turn",
        ]),
        ("token", {}, ("<end>",), [f"{OWN}, '<end>'"]),
        ("eos", {"stop_strings": ["###", "Q"]}, ("Q",), [
            "'<eos>' (tokenizer, config.json, chat template), 'Q'",
            "warning: generation_config.json has stop strings, which are not used;"
            " set sampling.stop=['Q', '###']",
        ]),
        ("EOS after it", {}, (), [OWN, WARNED]),
        ("between", {}, (), [OWN, WARNED]),
        ("last", {}, (), ["'<eos>' (tokenizer, config.json, chat template)"]),
        ("parts", {}, (), [OWN, WARNED]),
        ("text", {}, (), [
            OWN, f"warning: the chat template ends a turn with ' (end)', {OTHER}"
            "sampling.stop=[' (end)']",
        ]),
        ("next", {}, (), [
            OWN, f"warning: the chat template ends a turn with ' [user]', {OTHER}"
            "sampling.stop=[' [user]']",
        ]),
        ("none", {}, (), [OWN]),
    ],
)  # fmt: skip
def test_where_responses_end_is_said(make_model, template, generation, stop, expected):
    """And a warning says what to set where tokenizer, configs and chat template disagree."""
    vocabulary = [PAD, EOS, "<end>", *CHARACTERS, "[", "]", "(", ")"]
    model = make_model(vocabulary=vocabulary, template=ENDS[template])
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    tokenizer.save_pretrained(model)
    (model / "generation_config.json").write_text(json.dumps(generation))
    text = load_text(PolicyTable(model=str(model)))
    first, *warnings = endings(text, True, stop)
    assert [first.removeprefix("responses end at "), *warnings] == expected
    assert not any("template" in line for line in endings(text, False, stop))
    remedied = load_text(PolicyTable(model=str(model), eos_token="<end>"))
    assert remedied.eos_ids == {1, 2}
    assert not any("eos_token" in line for line in endings(remedied, True, stop)[1:])

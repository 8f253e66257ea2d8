"""Chat templates: what the policy reads of a prompt, and of a dialogue with tools."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import tokenizers
from desk import Desk
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tba.agents.chat import Chat
from tba.models.tokenizer import Tokenizer
from tba.prompt import Message, Prompt
from tba.tasks.custom import describe

TOOLS = describe("desk:Desk", Desk, 8, 1.0)

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = messages[0]['content'] %}{% else %}{% set rest = messages %}"
    "{% set system = false %}{% endif %}{% for m in rest %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if loop.index0 == 0 and system != false %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m['content'] %}"
    "{% else %}{% set content = m['content'] %}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% for m in messages %}{% set content = '<|start_header_id|>' + m['role'] +"
    " '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.first %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
NUMBERED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}</s>\n"
    "{% else %}#{{ loop.index }} {{ m.role }}: {{ m.content }}\nanswer: {% endif %}{% endfor %}"
)
"""Counts the messages; what begins a turn of the policy ends the message before."""
SEPARATED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}"
    "{% else %}{% if not loop.first %}<sep>{% endif %}{{ m.content }}<sep>{% endif %}{% endfor %}"
)
"""No role has a name, and EOS stands before a message instead of after it."""
TOOLED = (
    "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<end>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<a>"
    "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('z')[-1].strip() }}</s>"
    "{% endif %}"
    "{% elif loop.revindex <= 3 or m.role == 'system' %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
"""Rewrites the past: it drops thoughts, up to a z, and all but the newest messages."""
TEMPLATES: dict[str, tuple[str, list[str], list[str]]] = {
    "ChatML": (CHATML, ["<|im_end|>"], ["<|im_start|>"]),
    "SmolLM2": (SMOLLM2, ["<|im_end|>"], ["<|im_start|>"]),
    "Llama 2": (LLAMA2, ["</s>"], ["<s>"]),
    "Llama 3": (
        LLAMA3,
        ["<|eot_id|>", "<|end_of_text|>"],
        ["<s>", "<|start_header_id|>", "<|end_header_id|>"],
    ),
    "numbered": (NUMBERED, ["</s>"], []),
    "separated": (SEPARATED, ["<sep>"], []),
    "tooled": (TOOLED, ["<end>"], ["<user>", "<assistant>", "<tool>"]),
    "forgetful": (FORGETFUL, ["</s>"], ["<a>", "<user>"]),
}
"""A template with the tokens that end a turn, and its other special tokens."""
WORDS = st.text("ab z.\n{}'\"é", max_size=6).map(lambda text: f"x{text}y")


@dataclass(frozen=True)
class Reader:
    """A policy that reads and writes characters in one of the templates."""

    name: str

    @cached_property
    def text(self) -> Tokenizer:
        template, ends, others = TEMPLATES[self.name]
        return text_with(template, ends, others)

    @cached_property
    def chat(self) -> Chat:
        return Chat(self.text, TOOLS.schemas)

    def shown(self, tokens: Any) -> str:
        return str(self.text.tokenizer.decode(list(tokens)))


def text_with(template: str, ends: list[str], others: list[str]) -> Tokenizer:
    special = [*ends, *others]
    names = [*special, *map(chr, range(32, 127)), "\n", "é"]
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=ends[0], bos_token="<s>" if "<s>" in special else None
    )
    fast.chat_template = template
    eos_ids = frozenset(range(len(ends)))
    return Tokenizer(fast, eos_id=0, eos_ids=eos_ids, pad_id=0, context=9999, vocabulary=len(names))


READERS = {name: Reader(name) for name in TEMPLATES}


def wholly(reader: Reader, opening: list[Message], turns: list[str], results: list[str]) -> str:
    """Return what the template gives for the whole dialogue, up to the policy's next turn."""
    chat = list(opening)
    for turn, result in zip(turns, results, strict=False):
        chat.append({"role": "assistant", "content": turn})
        if reader.chat.describes_tools:
            chat.append({"role": "tool", "name": "double", "content": result})
        else:
            told = f"<tool_response>\n{result}\n</tool_response>"
            chat.append({"role": "user", "content": told})
    if len(turns) > len(results):
        chat.append({"role": "assistant", "content": turns[-1]})
    tools = list(TOOLS.schemas.values())
    rendered: str = reader.text.tokenizer.apply_chat_template(
        chat, tools=tools, add_generation_prompt=len(turns) == len(results), tokenize=False
    )
    return rendered


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(question=WORDS, turns=st.lists(WORDS, min_size=1, max_size=3), data=st.data())
def test_a_dialogue_reads_as_the_template_gives_it(name, question, turns, data):
    """Whether a turn ends with EOS or a stop string, it is closed once.

    Where the template rewrites the past, the past stays as the policy saw it.
    """
    reader = READERS[name]
    results = [data.draw(WORDS) for _ in turns]
    opening = reader.chat.described(reader.chat.opening(Prompt("p", question)))
    chat = [*opening]
    read = reader.chat.encode(Prompt("p", question)).tolist()
    for i, turn in enumerate(turns):
        before = wholly(reader, opening, turns[:i], results[:i])
        ends = data.draw(st.booleans())
        written = reader.text.tokens(turn).tolist()
        if name == "Llama 2":  # a space before and, with EOS, behind the turn
            written = reader.text.tokens(f" {turn} " if ends else f" {turn}").tolist()
        written += [0] if ends else []
        result = {"role": "tool", "name": "double", "content": results[i]}
        reply = reader.chat.reply(written[-1], [result], chat)
        chat += [{"role": "assistant", "content": turn}, result]
        after = wholly(reader, opening, turns[: i + 1], results[: i + 1])
        read += [*written, *reply]
        if name == "forgetful":
            between = after.rpartition(f"<a>{turn.split('z')[-1].strip()}")[2]
            assert reader.shown([0] * ends + [*reply]) == between
        else:
            assert after.startswith(before)  # the template only appends
            assert read == reader.text.tokens(after).tolist()


def test_each_token_that_ends_a_turn_closes_it():
    """Llama 3 has two; the template writes one of them."""
    reader = READERS["Llama 3"]
    for end in (0, 1):
        reply = reader.shown(reader.chat.reply(end, [{"role": "tool", "content": "7"}]))
        assert reply.startswith("<|start_header_id|>user<|end_header_id|>")


def test_a_result_may_hold_eos():
    """It is not taken for the end of the turn."""
    for name, (_, (eos, *_), _) in TEMPLATES.items():
        reader = READERS[name]
        reply = reader.chat.reply(0, [{"role": "tool", "content": f"a{eos}b"}])
        assert f"a{eos}b" in reader.shown(reply), name


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=10, deadline=None)
@given(begun=st.sampled_from(["", "Let me think:", "a ", "\n1.", "assistant", "x\ny"]))
def test_a_last_message_of_the_policy_is_continued(name, begun):
    text = READERS[name].text
    asked = [{"role": "user", "content": "Hi"}]
    prompt = [*asked, {"role": "assistant", "content": begun}]
    read = READERS[name].shown(text.encode(Prompt("p", prompt)))
    begins = READERS[name].shown(text.encode(Prompt("p", asked)))
    written = {"Llama 2": begun.lstrip(), "Llama 3": begun.strip()}.get(name, begun)
    assert read.removeprefix(begins).lstrip(" ") == written.lstrip(" ")
    assert read.startswith(begins)


def test_a_dialogue_goes_on_with_a_message_that_the_row_has_begun():
    reader = READERS["ChatML"]
    prompt = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "First,"}]
    opening = reader.chat.described(reader.chat.opening(Prompt("p", prompt), " (it begins)"))
    assert [m["content"] for m in opening[1:]] == ["Hi (it begins)", "First,"]
    reply = reader.chat.reply(0, [{"role": "tool", "content": "7"}], opening)
    read = [*reader.chat.encode(Prompt("p", prompt)), 0, *reply]
    told = {"role": "user", "content": "<tool_response>\n7\n</tool_response>"}
    chat = [*reader.chat.described(reader.chat.opening(Prompt("p", prompt))), told]
    whole = reader.text.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=False
    )
    assert reader.shown(read) == whole


PARTS_ONLY = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
TEXT_ONLY = {
    "added": "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}",
    "shown": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "trimmed": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}",
    "json": "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
    "{% else %}{{ m.content | tojson }}{% endif %}{% endfor %}",
    "users' parts": "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' and"
    " m.content is not string %}{% for part in m.content %}{{ part.text }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}",
}
PARTS = [{"type": "text", "text": "What is"}, {"type": "text", "text": " 1+1?"}]
SYSTEM = {"role": "system", "content": [{"type": "text", "text": "Add."}]}


def rendered(template: str, *messages: Message) -> str:
    text = text_with(template, ["</s>"], [])
    tokens: np.ndarray = text.encode(Prompt("p", messages))
    return str(text.tokenizer.decode(tokens.tolist()))


@pytest.mark.parametrize("case", TEXT_ONLY)
def test_parts_are_joined_for_a_template_that_shows_text(case):
    user = {"role": "user", "content": PARTS}
    assert rendered(TEXT_ONLY[case], SYSTEM, user) == "<system>Add.<user>What is 1+1?"


def test_a_template_of_parts_gets_parts():
    user, plain = {"role": "user", "content": PARTS}, {"role": "user", "content": "What is 1+1?"}
    assert rendered(BOTH, SYSTEM, user) == "<system>[Add.]<user>[What is][ 1+1?]"
    assert rendered(BOTH, plain) == "<user>What is 1+1?"
    for message in (user, plain):
        assert rendered(PARTS_ONLY, SYSTEM, message) == "<system>Add.<user>What is 1+1?"
    quoted = {"role": "user", "content": "{'type': 'text', 'text': 'x'}"}
    assert rendered(BOTH, quoted) == "<user>{'type': 'text', 'text': 'x'}"


WRONG: dict[str, tuple[Any, str]] = {
    "image": ([{"role": "user", "content": [{"type": "image"}]}], "is not text: {'type': 'image'}"),
    "text": (["Hi"], "a message is not an object"),
    "words": ([{"role": "user", "content": ["Hi"]}], "is not text: 'Hi'"),
    "none": ([{"role": "user", "content": None}], "is not an object with `role` and `content`"),
    "number": ([{"role": "user", "content": 5}], "`content` as text: {'content': 5, 'role': 'us"),
    "other names": (
        [{"from": "human", "value": "Hi"}],
        "as text: {'from': 'human', 'value': 'Hi'}",
    ),
    "begun": (
        [{"role": "assistant", "content": None}],
        "message 1: a message is not an object with",
    ),
    "silent": (
        [{"role": "assistant", "tool_calls": []}] * 2,
        "message 1: a message is not an object with",
    ),
    "calls": (
        [{"role": "assistant", "tool_calls": 5}],
        "message 1: a tool call cannot be read: 5; give",
    ),
    "no JSON": (
        [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{x"}]}],
        "message 1: arguments of a call of 'f' must be a JSON object",
    ),
    "twice": (
        [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"x": 1, "x": 2}'}]}],
        "message 1: arguments of a call of 'f' must be a JSON object",
    ),
    "empty": ([], "is empty"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("template", [CHATML, TEXT_ONLY["shown"]])
def test_messages_that_cannot_be_shown_are_refused_by_row(case, template):
    messages, told = WRONG[case]
    text = text_with(template, ["</s>"], [])
    with pytest.raises(ValueError, match=r"^prompt 'train-7'") as error:
        text.encode(Prompt("train-7", messages))
    assert told in str(error.value) and "\n" not in str(error.value)

"""Chats as text: renders messages with a chat template, and finds the parts that it leaves out."""

import json
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cache
from typing import Any

from tba.config.mistakes import about
from tba.prompt import Message, Prompt

AS_JSON = re.compile(r'"text": ?"(?:[^"\\]|\\.)*\ufdd0')
"""A marked part of a message that a template shows as JSON."""
GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""Tags of transformers, around what the assistant writes."""
ROLES = {"developer": "system", "function": "tool", "human": "user", "gpt": "assistant"}
"""Other names of roles, which few chat templates support."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a reply's reasoning, which OpenAI's messages do not have, and programs may omit."""
CONTENT = ("content", "tool_calls", THOUGHTS[0], "refusal", "tools", "images", "audio")
"""Keys of a message that a template must show."""
THINKS = re.compile(r"</think|reasoning_content|[.'\"]thinking")
"""Sign of a template that supports reasoning: it omits reasoning in earlier turns by design."""
ARGUMENTS = ("chat_template_kwargs", "tools", "documents")
"""Columns that are arguments of the chat template, in the conventions of TRL and transformers."""
CONVENTIONS = {
    *ARGUMENTS, "add_generation_prompt", "audio", "chat_template", "continue_final_message",
    "conversations", "enable_thinking", "functions", "history", "image", "images", "messages",
    "reasoning_effort", "system", "system_prompt", "videos",
}  # fmt: skip
"""Columns that look as if they control how a row is rendered, as some do in axolotl's data."""
Roles = Container[str] | None
"""Roles of messages that must be shown in full; None: all."""


class Arguments(dict[str, Any]):
    """Arguments of a call that were JSON, where null is a value."""


def check_names(columns: Sequence[str]) -> None:
    """Raise ValueError if two columns have the same name."""
    for name, count in Counter(columns).items():
        if count > 1:
            raise ValueError(f"{count} columns are called {name!r}; rename all but one")


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; ValueError if a name occurs twice."""
    if len(table := dict(pairs)) < len(pairs):
        check_names([name for name, _ in pairs])
    return table


JSON = json.JSONDecoder(object_pairs_hook=_table)


def decoded(value: Any) -> Any:
    """Return the table or the list in a JSON text; any other value unchanged."""
    with suppress(ValueError, RecursionError):
        if isinstance(value, str) and isinstance(read := JSON.decode(value), dict | list):
            return read
    return value


def without_nulls(value: Any) -> Any:
    """Return a JSON value without keys whose value is null, which Parquet adds."""
    if isinstance(value, Mapping) and not isinstance(value, Arguments):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def text_of(content: Any) -> str:
    """Return the content of a message as text. ValueError for a part that is not text."""
    if not isinstance(content, list):
        return str(content or "")
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise ValueError(f"a part of a message is not text: {reprlib.repr(part)}; remove it")
    return "".join(part["text"] for part in content)


def normalised(message: Any) -> dict[str, Any]:
    """Return a message in the form that chat templates of transformers 5 expect.

    Keys without a value are removed, and JSON objects are decoded. ValueError if it is not a
    message, or has no content.
    """
    full = without_nulls(message) if isinstance(message, Mapping) else {}
    plain = {name: value for name, value in full.items() if value not in ("", [], {})}
    old = plain.pop("function_call", [])  # of OpenAI's messages before tools
    calls = decoded(plain.pop("tool_calls", old))
    thoughts = next(filter(None, [text_of(plain.pop(name, "")) for name in THOUGHTS]), "")
    content = full.get("content", "" if calls or thoughts else None)
    if not isinstance(content, str | list) or not isinstance(role := plain.get("role"), str):
        told = reprlib.repr(message)
        raise ValueError(f"a message is not an object with `role` and `content` as text: {told}")
    content = content if text_of(content) else ""  # raises for images
    plain |= {"role": ROLES.get(role, role), "content": content}
    plain |= {THOUGHTS[0]: thoughts} if thoughts else {}
    calls = [_call(call) for call in (calls if isinstance(calls, list) else [calls])]
    return plain | ({"tool_calls": calls} if calls else {})


def _call(call: Any) -> dict[str, Any]:
    match call := decoded(call):
        case {"function": {"name": str(name), **given}} | {"name": str(name), **given}:
            written = given.get("arguments", given.get("parameters")) or {}
            arguments = decoded(written)
            if not isinstance(arguments, dict):
                raise ValueError(f"arguments of a call of {name!r} must be a JSON object")
            arguments = Arguments(arguments) if isinstance(written, str) else arguments
            own = {"id": call["id"]} if "id" in call else {}
            return {"type": "function", **own, "function": {"name": name, "arguments": arguments}}
    raise ValueError(f"a tool call cannot be read: {call!r}; give it a function with a name")


def with_names(messages: Sequence[Message]) -> Iterator[Message]:
    """Return messages, with the name of the called tool added to results of tools."""
    names: dict[str, str] = {}
    for message in messages:
        calls = message.get("tool_calls", ())
        names |= {call["id"]: call["function"]["name"] for call in calls if "id" in call}
        name = names.get(message.get("tool_call_id", "")) if message["role"] == "tool" else None
        yield message if name is None else {"name": name, **message}


def variables(template: Any) -> set[str]:
    """Return the names of the arguments that a chat template, or one of several, reads."""
    every = template.values() if isinstance(template, Mapping) else [str(template)]
    return set().union(*map(_variables, every)) - {"add_generation_prompt", "messages"}


@cache
def _variables(template: str) -> set[str]:
    from jinja2 import Environment, TemplateError, meta  # here: scoring processes do not need it

    reader = Environment(extensions=["jinja2.ext.loopcontrols"])
    with suppress(TemplateError):  # rendering explains it
        return meta.find_undeclared_variables(reader.parse(GENERATION.sub("", template)))
    return set()


def arguments_in(columns: Mapping[str, Any], template: Any) -> dict[str, Any]:
    """Return the chat template's arguments in a row; ValueError for an unknown one."""
    known = variables(template)
    given = without_nulls(decoded(columns.get(ARGUMENTS[0]) or {}))
    if not isinstance(given, dict) or not given.keys() <= known:
        raise ValueError(f"{ARGUMENTS[0]} = {given!r}: the chat template has no such argument")
    for name in ARGUMENTS[1:]:
        value = decoded(columns.get(name))
        tables = [without_nulls(decoded(each)) for each in value] if isinstance(value, list) else []
        if tables and name in known and all(isinstance(table, dict) for table in tables):
            given[name] = list(map(_tool, tables)) if name == "tools" else tables
    return given


def _tool(table: Mapping[str, Any]) -> Mapping[str, Any]:
    function = decoded(table.get("function", table))
    if not isinstance(function, dict) or "parameters" not in function:
        return table
    parameters = decoded(function["parameters"])
    return {"type": "function", "function": {**function, "parameters": parameters}}


def unread(prompts: Sequence[Prompt], template: Any, tools: Any) -> list[str]:
    """Return the columns that look as if they control how a row is rendered, but do not.

    None of them do if a prompt is text, or the task has `tools`.
    """
    found: set[str] = set()
    names = CONVENTIONS | variables(template)
    for prompt in prompts:
        is_chat = tools is None and not isinstance(prompt.text, str)
        read = {ARGUMENTS[0], *arguments_in(prompt.columns, template)} if is_chat else set()
        for name in names.intersection(prompt.columns) - read - found:
            value = decoded(prompt.columns[name])
            shown = repr(value)[1:-1] if isinstance(value, str | list) else str(value)
            if value not in (None, "", [], {}) and shown not in repr(prompt.text):
                found.add(name)
    return sorted(found)


def render(
    tokenizer: Any, messages: Sequence[Any], options: Mapping[str, Any], checked: Roles = None
) -> str:
    """Return a chat as text, up to where the policy begins or continues its turn.

    A last message from the assistant is continued. The chat template gets contents unchanged, as
    lists of parts, or as text, and arguments of calls as dicts or as JSON: of these forms, the
    first that it shows most completely is used. ValueError if it rejects all forms, or leaves out a
    part of a message whose role is in `checked`.
    """
    chat: list[Message] = []
    for place, message in enumerate(messages, 1):
        with about(f"message {place}"):
            chat.append(normalised(message))
    has_begun = any(map(chat[-1].get, CONTENT[1:])) or text_of(chat[-1]["content"]).strip()
    if chat[-1]["role"] == "assistant" and not has_begun:
        chat.pop()
    chat = list(with_names(chat))
    shown: list[tuple[list[tuple[int, str]], str]] = []
    refusals = []
    for form in (dict, _as_parts, _as_text, _as_json):
        try:
            rendered = _rendered(tokenizer, list(map(form, chat)), options)
            shown.append((_lost(tokenizer, chat, options, form), rendered))
        except Exception as error:  # the template is foreign code
            refusals.append(str(error).partition("\n")[0])
        if shown and not shown[-1][0]:
            break
    if not shown:  # such as a system message, if it has no such role
        raise ValueError(f"the tokenizer's chat template refuses it: {refusals[0]}")
    lost, rendered = min(shown, key=lambda each: len(each[0]))
    for place, key in lost:
        role = chat[place]["role"]
        if checked is None or (role in checked and key != "name"):
            told = f"message {place + 1} ({role}): the chat template leaves out its {key}"
            raise ValueError(f"{told}; remove it, or write it into a message that is shown")
    return rendered


def _lost(
    tokenizer: Any, chat: Sequence[Message], options: Mapping[str, Any], form: Callable[..., Any]
) -> list[tuple[int, str]]:
    """Return the indices and keys of messages that a chat template leaves out, found by marks.

    ValueError if it shows a list or a table as code.
    """
    marks: dict[str, tuple[int, str]] = {}

    def marked(value: Any, *place: Any, name: str = "") -> Any:
        match value:
            case dict():
                return {own: marked(each, *place, name=own) for own, each in value.items()}
            case list():
                return [marked(each, *place) for each in value]
        if value in (None, "") or name in ("type", "id"):
            return value
        marks[mark := f"\ufdd0{len(marks)}\ufdd1"] = place
        return f"{value}{mark}"

    given = []
    for place, message in enumerate(chat):
        said = (*CONTENT, *["name"] * (message["role"] != "tool"))
        own = {key: marked(message[key], place, key) for key in said if key in message}
        given.append(form({**message, **own}))
    text = _rendered(tokenizer, given, options)
    has_parts = any(isinstance(message["content"], list) for message in given)
    if (has_parts and AS_JSON.search(text)) or "\\ufdd1'" in text:
        raise ValueError("it shows a list or a table as code")
    text = text.replace("\\ufdd0", "\ufdd0").replace("\\ufdd1", "\ufdd1")
    lost = [place for mark, place in marks.items() if mark not in text]
    if THINKS.search(str(tokenizer.chat_template)):
        lost = [at for at in lost if at[1] != THOUGHTS[0] or at[0] == len(chat) - 1]
    return lost


def _rendered(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> str:
    goes_on = messages[-1].get("role") == "assistant" and not messages[-1].get("tool_calls")
    chat: str = tokenizer.apply_chat_template(
        list(messages),
        tokenize=False,
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        **options,
    )
    return chat


def _as_text(message: Message) -> Message:
    return {**message, "content": text_of(message["content"])}


def _as_parts(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": text_of(message["content"])}]}


def _as_json(message: Message) -> Message:
    """Return a message as text, with the arguments of its calls as JSON."""
    own = deepcopy(dict(_as_text(message)))
    for function in [call["function"] for call in own.get("tool_calls", ())]:
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return own

"""Tools in a chat: how a model's chat template renders tools, their calls and their results."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from typing import Any

import numpy as np

from tba.config.mistakes import about
from tba.models.template import Roles, normalised, text_of
from tba.models.tokenizer import Encode, Tokenizer, before_stop, decode
from tba.prompt import Message, Prompt
from tba.tasks import Task, Tools
from tba.types import GIVEN, RESTART, SAMPLED, Completion, Trajectory

OBJECT = r"""\s*\{(?:"(?:[^"\\]|\\.)*"|(?!<tool_call>)[^"])*?\}\s*"""
CALL = re.compile(rf"<tool_call>({OBJECT}|(?:(?!<tool_call>).)*?)(?:</tool_call>|\Z)", re.DOTALL)
"""A call; strings in its object may contain the tags."""
THINK = "<think>"
THOUGHT = re.compile(rf"\s*{THINK}.*?(?:</think>|\Z)", re.DOTALL)
"""A thought at the beginning of a turn; it may quote calls, but makes none."""
FORM = '{"name": ..., "arguments": {...}}'
ABOUT = f"""You may call these functions:
<tools>
%s
</tools>
To call one, write a JSON object with its name and arguments:
<tool_call>
{FORM}
</tool_call>
You then receive its result:
<tool_response>
...
</tool_response>"""
"""Description of the tools, for chat templates that do not render them."""
QUESTION: Sequence[Message] = ({"role": "user", "content": "?"},)
TURN = "\ue000a turn of the policy\ue001"
"""Placeholder for a turn, in a dialogue that is rendered to find the text after the turn."""

log = logging.getLogger(__name__)


def without_calls(turn: str, opened: bool) -> str:
    """Return the text of a turn without its calls; `opened`: the prompt has opened a thought."""
    start = _thought(turn, opened)
    return turn[:start] + CALL.sub("", turn[start:])


def _thought(turn: str, opened: bool) -> int:
    """Return the length of the thought that a turn begins with."""
    found = THOUGHT.match(THINK * opened + turn)
    return found.end() - len(THINK) * opened if found else 0


@dataclass(frozen=True)
class ToolCall:
    """A tool call as the policy wrote it; `error` says why it cannot be executed."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Chat:
    """A tokenizer's chat template, with tools.

    A template that describes tools also renders their calls and results. For other templates, the
    system message describes the tools, and results are user messages. Raises ValueError if
    dialogues with tools are not possible.
    """

    text: Tokenizer
    schemas: Mapping[str, Mapping[str, Any]]
    """JSON schema of each tool, by its name."""

    def __post_init__(self) -> None:
        self.text.tokens(self._rendered(self.described(QUESTION)))
        if not self.schemas:
            return
        if "?" not in self._after_turn(QUESTION, [{"role": "tool", "name": "f", "content": "?"}]):
            raise ValueError("the chat template does not show tool results; use another model")
        if self.describes_tools and not self._own_form and self._writes_another_form:
            raise ValueError(
                "the chat template writes tool calls in another form, and the tokenizer does not"
                " say how to parse them; add response_template to tokenizer_config.json, or"
                f" use a model that writes <tool_call>{FORM}</tool_call>"
            )

    @cached_property
    def describes_tools(self) -> bool:
        """True if the template itself describes the tools."""
        return self._rendered(QUESTION) != self._rendered(QUESTION, tools=False)

    def opening(self, prompt: Prompt, observation: str = "") -> Sequence[Message]:
        """Return a prompt's messages; append an observation to the user's."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt.text}]
        if not isinstance(prompt.text, str):
            messages = list(map(normalised, prompt.text))
        asked = next((m for m in messages[::-1] if m["role"] != "assistant"), messages[-1])
        if observation and isinstance(asked["content"], list):
            asked["content"] = [*asked["content"], {"type": "text", "text": observation}]
        elif observation:
            asked["content"] += observation
        return messages

    def described(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages, with the tools in the system message if the template lacks them."""
        if not self.schemas or self.describes_tools:
            return list(messages)
        described = ABOUT % "\n".join(map(json.dumps, self.schemas.values()))
        if messages[0]["role"] == "system":
            described = f"{text_of(messages[0]['content'])}\n\n{described}"
            messages = messages[1:]
        return [{"role": "system", "content": described}, *messages]

    def encode(self, prompt: Prompt, observation: str = "") -> np.ndarray:
        """Return the tokens of a prompt with the tools and an observation."""
        with about(f"prompt {prompt.id!r}"):
            opening = self._as_shown(self.described(self.opening(prompt, observation)))
            return self.text.tokens(self._rendered(opening, roles=None))

    def reply(
        self, last: int, results: Sequence[Message], before: Sequence[Message] = QUESTION
    ) -> np.ndarray:
        """Return the tokens between a turn of the policy, which ends with `last`, and its next.

        They are what the chat template writes there in the whole dialogue, with messages `before`
        the turn and results after it. Tokens that the policy sampled are never tokenised again.
        """
        between = self._after_turn(before, results)
        if last not in self.text.eos_ids:
            return self.text.tokens(between)
        # the policy has ended its turn itself: skip the template's end, up to the same token
        unlike = [{**result, "content": "\ufffe"} for result in results]
        head = self._after_turn(before, unlike).partition("\ufffe")[0]
        names = self.text.tokenizer.convert_ids_to_tokens(sorted(self.text.eos_ids))
        ends = [head.index(name) + len(name) for name in names if name in head]
        between = between[min(ends, default=0) :]
        after_eos = self.text.tokens(self.text.tokenizer.convert_ids_to_tokens(last) + between)
        return after_eos[1:] if after_eos[0] == last else self.text.tokens(between)

    def read(
        self, context: np.ndarray, turn: np.ndarray, stop: Sequence[str],
        begun: Message | None = None,
    ) -> tuple[Message, list[ToolCall]]:  # fmt: skip
        """Return a turn of the policy, or its addition to a message, and its calls in order."""
        head = begun["content"] if begun else ""
        tokenizer = self.text.tokenizer
        written = self.text.decode(turn)
        message: dict[str, Any] = {"role": "assistant", "content": before_stop(written, stop)}
        if self._own_form:
            tools = list(self.schemas.values())
            try:
                parsed = tokenizer.parse_response(
                    turn.tolist(), prefix=context.tolist(), tools=tools
                )
            except (ValueError, KeyError, RecursionError) as error:
                return message, [ToolCall(error=str(error).partition("\n")[0])]
            before = len((begun or {}).get("tool_calls", ()))
            calls = [_call(each) for each in parsed.get("tool_calls") or ()][before:]
            spoken = (parsed.get("content") or "").removeprefix(head)
            if int(turn[-1]) in self.text.eos_ids:  # the parser may keep it
                spoken = spoken.removesuffix(tokenizer.convert_ids_to_tokens(int(turn[-1])))
            return {**message, **parsed, "content": before_stop(spoken, stop)}, calls
        opened = self.opens_thought(context, head)
        written = head + written
        calls = [_read(each) for each in CALL.findall(written, _thought(written, opened))]
        if calls:
            sound = [{"name": c.name, "arguments": c.arguments} for c in calls if not c.error]
            functions = [_as_function(each) for each in sound]
            added = without_calls(written, opened).removeprefix(without_calls(head, opened))
            content = before_stop(added, stop).strip()
            message |= {"content": content, "tool_calls": functions}
        return message, calls

    def opens_thought(self, context: np.ndarray, head: str) -> bool:
        """Return whether the text before a turn, or before its first part `head`, is a thought."""
        before = self.text.decode(context if head else context[-8:]).removesuffix(head)
        return before.rstrip().endswith(THINK)

    @property
    def _own_form(self) -> bool:
        """True if the tokenizer defines how to parse calls; older transformers do not support it.

        If the template does not describe tools, calls have the form that `ABOUT` describes.
        """
        is_read = vars(self.text.tokenizer).get("response_template") is not None
        return is_read and (self.describes_tools or not self.schemas)

    @property
    def _writes_another_form(self) -> bool:
        """True if the template writes calls, but not between the tags that `CALL` matches."""
        call = ToolCall("name_of_a_tool", {"x": "?"})
        function = _as_function({"name": call.name, "arguments": call.arguments})
        turn = {"role": "assistant", "content": "", "tool_calls": [function]}
        shown = self._rendered([*QUESTION, turn])
        return call.name in shown and call not in map(_read, CALL.findall(shown))

    def rendered(self, messages: Sequence[Message]) -> str:
        """Return a whole chat as text; calls are text if the template does not support tools."""
        shown = self._as_shown(_joined(self.described(messages)))
        return self._rendered(shown, roles=("system", "user", "tool"))

    def written(self, turn: Message) -> str:
        """Return a turn with its calls as the policy would write it.

        Raises ValueError if the template writes calls in another form.
        """
        if turn.get("tool_calls") and self.describes_tools and self._writes_another_form:
            raise ValueError("the chat template writes tool calls in another form; pass tokens")
        return str(_with_calls(turn)["content"])

    def _after_turn(self, before: Sequence[Message], results: Sequence[Message]) -> str:
        """Return the text that the template writes after a turn of the policy in a dialogue."""
        turn: Message = {"role": "assistant", "content": TURN}
        names = [m.get("name", "f") for m in results if m["role"] == "tool"]
        if names and self._needs_calls:
            calls = [_as_function({"name": name, "arguments": {"x": TURN}}) for name in names]
            turn = {"role": "assistant", "content": "", "tool_calls": calls}
        return self._after(before, turn, results)

    @cached_property
    def _needs_calls(self) -> bool:
        """True if the template shows the result of a tool only after its call."""
        result = {"role": "tool", "name": "f", "content": "?"}
        return "?" not in self._after(QUESTION, {"role": "assistant", "content": TURN}, [result])

    def _after(self, before: Sequence[Message], turn: Message, results: Sequence[Message]) -> str:
        """Return the text that the template writes after TURN, which this turn contains."""
        # drop the calls of earlier turns; some templates reject a turn without content
        plain: list[Message] = []
        for m in before:
            turn_of_policy = {"role": "assistant", "content": m.get("content") or TURN}
            plain.append(turn_of_policy if m["role"] == "assistant" else m)
        dialogue = [*_joined([*plain, turn]), *results]
        _, shown, after = self._rendered(self._as_shown(dialogue)).rpartition(TURN)
        return after if shown else ""

    def _as_shown(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages, with tool calls and results as text if the template lacks tools."""
        chat: list[Message] = []
        for message in messages:
            role = message["role"]
            if message.get("tool_calls") and not self.describes_tools:
                message = _with_calls(message)
            if role == "tool" and not self.describes_tools:
                content = f"<tool_response>\n{text_of(message['content'])}\n</tool_response>"
                if chat and chat[-1]["role"] == "user":
                    content = f"{text_of(chat.pop()['content'])}\n{content}"
                message = {"role": "user", "content": content}
            chat.append(message)
        return chat

    def _rendered(self, messages: Sequence[Message], tools: bool = True, roles: Roles = ()) -> str:
        """Return a chat as text, up to the point where the policy continues."""
        schemas = list(self.schemas.values()) if tools and self.schemas else None
        try:
            return self.text.render(messages, {"tools": schemas}, roles)
        except ValueError as error:
            raise ValueError(
                f"{error}; use a model whose template accepts a system message, and messages after"
                " the assistant's"
            ) from error


def response_text(text: Tokenizer, response: Completion | Trajectory, stop: Sequence[str]) -> str:
    """Return a response as readable text; a dialogue or a session is shown in full."""
    stop = stop if response.marks is None else ()
    return text.answer(response.tokens, response.finished, stop).text


def authors(text: Tokenizer, response: Completion | Trajectory) -> list[tuple[str, int]]:
    """Return the parts of a dialogue's text: `sampled` by the policy, or `given` to it.

    Each part has the number of characters up to its end. Parts that are given and begin a new
    context are `restart`. The list is empty if the policy sampled everything.
    """
    if response.marks is None:
        return []
    sampled = response.marks == SAMPLED
    begins = (np.diff(sampled, prepend=~sampled[:1])) | (response.marks == RESTART)
    starts = np.flatnonzero(begins).tolist()
    ends = [len(decode(text.tokenizer, response.tokens[:end].tolist())) for end in starts[1:]]
    ends.append(len(text.decode(response.tokens)))
    names = {GIVEN: "given", SAMPLED: "sampled", RESTART: "restart"}
    return [
        (names[int(response.marks[start])], end) for start, end in zip(starts, ends, strict=True)
    ]


def check_stop(stops: Sequence[str], text: Tokenizer, key: str = "sampling.stop") -> None:
    """Raise ValueError if a stop string contains EOS, which the text of a response does not."""
    names = text.tokenizer.convert_ids_to_tokens(sorted(text.eos_ids))
    for stop, name in product(stops, names):
        if name in stop:
            raise ValueError(
                f"{key} has {stop!r}, but {name!r} ends every response, and is not in its"
                " text; remove it from the stop string"
            )


def endings(text: Tokenizer, chats: bool, stop: Sequence[str]) -> list[str]:
    """Return a line with what ends responses, and warnings; templates are read only for `chats`."""
    warnings = []
    others = [source for source, ids in text.ends.items() if text.eos_id not in ids]
    if others and "policy.eos_token" not in text.ends:
        told = f"{' and '.join(others)} and the tokenizer name different EOS tokens"
        warnings.append(f"{told}; set policy.eos_token to the token that ends a turn")
    if unused := [each for each in text.stop_strings if each not in stop]:
        told = "generation_config.json has stop strings, which are not used"
        warnings.append(f"{told}; set sampling.stop={[*stop, *unused]}")
    written, end = _end_of_turn(text) if chats else ("", None)
    if written and end not in text.eos_ids and not any(each in written for each in stop):
        told = f"the chat template ends a turn with {written!r}, but generation does not stop there"
        remedy = "sampling.stop=[{!r}]" if end is None else "policy.eos_token={!r}"
        warnings.append(f"{told}; set {remedy.format(written)}")
    sources = {**text.ends, "chat template": [end]}
    tokens = []
    for token in sorted(text.eos_ids):
        by = ", ".join(source for source, ids in sources.items() if token in ids)
        tokens.append(f"{text.tokenizer.convert_ids_to_tokens(token)!r} ({by})")
    line = f"responses end at {', '.join([*tokens, *map(repr, stop)])}"
    return [line, *(f"warning: {each}" for each in warnings)]


def _end_of_turn(text: Tokenizer) -> tuple[str, int | None]:
    """Return the end of a turn in the chat template: an EOS or added token and its id, or text."""
    chat = [*QUESTION, {"role": "assistant", "content": TURN}]
    shown = []
    with suppress(Exception):  # the template is third-party code
        shown = [text.tokenizer.apply_chat_template(chat, tokenize=False, **text.template_kwargs)]
    with suppress(ValueError):  # earlier turns may end differently from the last one
        shown.append(text.render([*chat, *QUESTION], {}, ()))
    afters = [each.partition(TURN)[2].partition("?")[0].rstrip() for each in shown]
    for ids in text.tokenizer([*afters, ""], add_special_tokens=False)["input_ids"]:
        for end in ids:
            if end in text.eos_ids or end in text.tokenizer.added_tokens_decoder:
                return text.tokenizer.convert_ids_to_tokens(end), end
    return next(filter(None, afters), ""), None


def encoder(text: Tokenizer, task: Task) -> Encode:
    """Return the encoder of a task's prompts, which includes the task's tools.

    Raises ValueError if the task has tools or a program, and the tokenizer has no chat template for
    it.
    """
    if task.program is not None:
        with about("task.rollout"):
            Chat(text, {})
        return partial(text.encode, checked=())  # the program makes its own requests
    return text.encode if task.tools is None else chat_of(text, task.tools).encode


def chat_of(text: Tokenizer, tools: Tools) -> Chat:
    """Return the chat with an environment's tools. Raises ValueError: see `Chat`."""
    schemas = tools.schemas  # raises ValueError, which names the option
    with about("task.environment"):
        return Chat(text, schemas)


def identity(task: Task, prompt: Prompt, tokens: np.ndarray) -> bytes:
    """Return a key that identifies a prompt: tokens, and the row if not only rewards read it."""
    reads_row = task.tools is not None or task.program is not None
    row = json.dumps(prompt.columns, sort_keys=True, default=str) if reads_row else ""
    return tokens.tobytes() + row.encode()


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Join consecutive messages of the assistant."""
    joined: list[Message] = []
    for message in messages:
        before = joined[-1] if joined else {}
        goes_on = before.get("role") == message["role"] == "assistant"
        if goes_on and not before.get("tool_calls"):
            texts = [text_of(each.get("content")) for each in (joined.pop(), message)]
            message = {**before, **message, "content": "\n".join(filter(None, texts))}
        joined.append(message)
    return joined


def _with_calls(message: Message) -> Message:
    """Return a turn with its calls as text, as the policy writes them."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [json.dumps(function, ensure_ascii=False) for function in functions]
    written = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    content = "\n".join(filter(None, [text_of(message["content"]), *written]))
    return {**message, "content": content, "tool_calls": []}


def _as_function(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": call}


def _read(written: str) -> ToolCall:
    """Parse the call between the tags."""
    try:
        call = json.loads(written)
        # other parsers reject Infinity, and tokenizers reject lone surrogates
        json.dumps(call, ensure_ascii=False, allow_nan=False).encode()
        return _call({"function": call})
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"{error}; write {FORM}")


def _call(given: Any) -> ToolCall:
    """Parse a call given as a dict in the form that chat templates use."""
    match given:
        case {"function": {"name": str(name), **rest}}:
            arguments = rest.get("arguments", rest.get("parameters", {}))
            if isinstance(arguments, dict):
                return ToolCall(name, arguments)
    return ToolCall(error=f"a call is not of the form {FORM}")

"""OpenAI's chat completions as JSON: requests and replies."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field

from tba.config.tables import Count, NotNegative, Positive, PositiveShare, Texts
from tba.models.tokenizer import BYTE, INCOMPLETE, Tokenizer
from tba.prompt import Message
from tba.types import Completion, Sampling

if TYPE_CHECKING:
    from tba.agents.chat import Chat

COLDEST = 0.01
"""Temperature for programs that request 0."""
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "n": (1,), "tool_choice": ("auto", "none"), "parallel_tool_calls": (True,), "min_p": (0, 0.0),
    "modalities": (["text"],), "top_logprobs": (0,),
    "presence_penalty": (0, 0.0), "frequency_penalty": (0, 0.0), "repetition_penalty": (1, 1.0),
    "logit_bias": ({},), "chat_template_kwargs": ({},), "skip_special_tokens": (False,),
}  # fmt: skip
"""Parameters with the values that have no effect; other values are refused."""
IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "request_id", "priority", "cache_salt",
}  # fmt: skip
"""Parameters that are ignored, whatever their value."""
CODES = {
    400: "invalid", 404: "not_found", 405: "not_found", 410: "session_ended",
    499: "gone", 503: "overloaded",
}  # fmt: skip
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages; chat templates silently drop others."""


def check_role(message: Message) -> None:
    """Raise ValueError if a message has an unknown role."""
    if message.get("role") not in (None, *ROLES):
        raise ValueError(f"role = {message['role']!r}; it must be one of {', '.join(ROLES)}")


class ChatRequest(BaseModel, extra="allow", strict=True):
    """Body of a request. `model` is ignored; keys that are neither here nor above are refused."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str = "policy"
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    stop: Texts | None = None
    seed: int | None = None
    temperature: NotNegative | None = None
    top_p: PositiveShare | None = None
    top_k: Annotated[Count, BeforeValidator(lambda k: 0 if k == -1 else k)] | None = None
    stream: bool | None = False
    stream_options: dict[Literal["include_usage", "include_obfuscation"], bool] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = False
    return_token_ids: bool | None = False

    def sampling(self, own: Sampling, config: Sampling, fixed: str) -> Sampling:
        """Return how the policy samples its reply; ValueError if that is not supported.

        `own` is for this search or evaluation, `config` for the config's searches. `fixed` says why
        no other distribution may be sampled from; "" if others may.
        """
        asked = self.model_dump()
        self._check()
        limit = min(self.max_completion_tokens or self.max_tokens or own.max_tokens, own.max_tokens)
        sampling = replace(own, samples=1, max_tokens=limit, stop=self.stops or own.stop)
        if own.temperature == 0:  # an evaluation with greedy decoding
            return sampling
        if fixed:
            for name in ("temperature", "top_p", "top_k"):
                if asked[name] not in (None, vars(own)[name], vars(config)[name]):
                    told = f"{name} = {asked[name]:g} differs from the config, and {fixed}"
                    raise ValueError(told)
            return sampling  # an evaluation has its own temperature
        if self.temperature not in (None, own.temperature):
            sampling = replace(sampling, explore=max(COLDEST, self.temperature or 0))
        given = {name: asked[name] for name in ("top_p", "top_k") if asked[name] is not None}
        return replace(sampling, **given)

    def schema_for(self, unconstrained: str) -> str | None:
        """Return the JSON schema that the reply must follow, as JSON; None if it may be any text.

        `unconstrained` says why no reply can follow a schema; "" if replies can. Raises ValueError
        for a format that is not supported.
        """
        match self.response_format:
            case None | {"type": "text"}:
                return None
            case {"type": "json_object"}:
                schema = {"type": "object"}
            case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
                pass
            case other:
                known = "text, json_object, or json_schema with a schema"
                raise ValueError(f"response_format = {other!r} is not supported; it may be {known}")
        if unconstrained:
            raise ValueError(f"response_format {unconstrained}; leave it out")
        if self.tools and self.tool_choice != "none":
            raise ValueError("response_format and tools cannot be combined; leave one out")
        return json.dumps(schema)

    def _check(self) -> None:
        """Raise ValueError for parameters that are not supported or contradict each other."""
        others = {"tool_choice": self.tool_choice, **(self.model_extra or {})}
        for name, value in sorted(others.items()):
            neutral = [one for one in NEUTRAL.get(name, ()) if type(one) is type(value)]
            if value is not None and value not in neutral and name not in IGNORED:
                several = " and repeat the request: each gets its own reply" if name == "n" else ""
                raise ValueError(f"{name} = {value!r} is not supported; leave it out{several}")
        if len({None, self.max_tokens, self.max_completion_tokens}) == 3:
            raise ValueError("max_tokens and max_completion_tokens differ; leave one out")
        if self.stream_options and not self.stream:
            raise ValueError("stream_options needs stream=true")
        for place, message in enumerate(self.messages):
            check_role(message)
            kinds = str | list | None if message.get("role") == "assistant" else str | list
            if not isinstance(message.get("content"), kinds):
                raise ValueError(f"messages.{place}.content must be a string or a list of parts")

    @cached_property
    def reply(self) -> dict[str, Any]:
        """Fields that all parts of the reply share."""
        name = f"chatcmpl-{secrets.token_hex(12)}"
        return {"id": name, "created": int(time.time()), "model": self.model}

    @property
    def stops(self) -> tuple[str, ...]:
        return self.stop or ()


def message_of(
    chat: "Chat", context: np.ndarray, turn: Completion, asked: ChatRequest, stop: Sequence[str],
    begun: Message | None = None, number: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Return the reply to call `number` of a session in OpenAI's form; it may continue a message.

    Calls stay text if they cannot be parsed, or if the request allows no tool calls.
    """
    message, calls = chat.read(context, turn.tokens, stop, begun)
    may_call = asked.tools and asked.tool_choice != "none"
    if not may_call or not calls or any(call.error for call in calls):
        shown = chat.text.answer(turn.tokens, turn.finished, stop).text
        return {"role": "assistant", "content": shown}
    reply: dict[str, Any] = {**message, "content": message["content"] or None, "tool_calls": []}
    for place, call in enumerate(calls):
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        own = f"c{number:04}t{place:03}"  # some templates require 9 letters and digits
        reply["tool_calls"].append({"id": own, "type": "function", "function": function})
    return reply


def completion(
    text: Tokenizer, prompt: np.ndarray, turn: Completion, asked: ChatRequest, stop: Sequence[str],
    message: Mapping[str, Any], sent: str = "",
) -> Any:  # fmt: skip
    """Return a reply in OpenAI's form, as JSON or as a stream with the message in one chunk.

    `sent` is the beginning of its text, which earlier chunks contain.
    """
    from starlette.responses import JSONResponse, Response

    reason = "tool_calls" if message.get("tool_calls") else "stop"
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason if turn.finished else "length"}
    if asked.logprobs:
        choice["logprobs"] = {"content": _logprobs(text, turn, stop)}
    if asked.return_token_ids:
        choice["token_ids"] = turn.tokens.tolist()
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(turn.tokens),
        "total_tokens": len(prompt) + len(turn.tokens),
    }
    reply: dict[str, Any] = {**asked.reply}
    if asked.return_token_ids:
        reply["prompt_token_ids"] = prompt.tolist()
    if not asked.stream:
        choice["message"] = message
        whole = {"object": "chat.completion", "choices": [choice], "usage": usage}
        return JSONResponse(reply | whole)
    if "tool_calls" in message:
        calls = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
        message = {**message, "tool_calls": calls}
    if sent:
        message = {"content": message["content"][len(sent) :]}
    reply |= {"object": "chat.completion.chunk", "usage": None}
    # the end is a separate chunk, by which OpenAI's client knows that a call is complete
    begun = {**choice, "delta": message, "finish_reason": None}
    ended = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    parts = [{**reply, "choices": [begun]}, {**reply, "choices": [ended]}]
    if (asked.stream_options or {}).get("include_usage"):
        parts.append({**reply, "choices": [], "usage": usage})
    stream = "".join(f"data: {event}\n\n" for event in [*map(json.dumps, parts), "[DONE]"])
    return Response(stream, media_type="text/event-stream")


def chunk(asked: ChatRequest, delta: Mapping[str, str]) -> str:
    """Return a part of a streamed reply."""
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    more = {"object": "chat.completion.chunk", "usage": None, "choices": [choice]}
    return f"data: {json.dumps(asked.reply | more)}\n\n"


class TokenStream:
    """Text of a reply while its tokens are sampled."""

    def __init__(self, text: Tokenizer, stop: Sequence[str]):
        self._text = text
        self._stop = stop
        self._tokens: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def tell(self, token: int) -> None:
        """Add a token; called by the thread of the engine."""
        self._tokens.append(token)
        self._loop.call_soon_threadsafe(self._changed.set)

    async def begins(self, task: "asyncio.Task[Any]") -> bool:
        """Wait for the first token, or for the end of `task`; return whether more will come."""
        task.add_done_callback(lambda _: self._changed.set())
        await self._changed.wait()
        return not task.done()

    async def events(
        self, asked: ChatRequest, task: "asyncio.Task[Any]", rest: Callable[[str], Awaitable[Any]]
    ) -> AsyncIterator[str]:
        """Yield the text as it grows, and the `rest` of the reply after it."""
        sent = ""
        while not task.done():
            self._changed.clear()
            shown = self._shown()
            if len(shown) > len(sent) and shown.startswith(sent):
                role = {} if sent else {"role": "assistant"}
                yield chunk(asked, {**role, "content": shown[len(sent) :]})
                sent = shown
            await self._changed.wait()
        yield (await rest(sent)).body.decode()

    def _shown(self) -> str:
        """Return the text without an incomplete character or the beginning of a stop string."""
        answer = self._text.answer(np.array(self._tokens, np.int32), False, self._stop)
        text = answer.text if answer.finished else answer.text.rstrip(INCOMPLETE)
        begun = [n for stop in self._stop for n in range(len(stop)) if text.endswith(stop[:n])]
        return text[: len(text) - max(begun, default=0)]


def _logprobs(text: Tokenizer, turn: Completion, stop: Sequence[str]) -> list[dict[str, Any]]:
    """Return each token's log-prob at the temperature of the config, and its bytes in the reply.

    EOS and text that a stop string cuts off have no bytes.
    """
    ids = turn.tokens.tolist()
    pieces = [b"" if token in text.eos_ids else _bytes(text, token) for token in ids]
    whole = b"".join(pieces)
    # some tokenizers drop a space at the beginning
    start = max(0, whole.decode(errors="replace").rfind(text.decode(turn.tokens)))
    ends = [place for s in stop if (place := whole.find(s.encode(), start)) >= 0]
    end = min(ends, default=len(whole))
    content = []
    place = 0
    for token, logp, piece in zip(ids, turn.logp.tolist(), pieces, strict=True):
        shown = piece.decode(errors="replace") or text.tokenizer.decode([token])
        own = whole[max(start, place) : max(start, min(end, place + len(piece)))]
        place += len(piece)
        content.append({"token": shown, "logprob": logp, "bytes": [*own], "top_logprobs": []})
    return content


def _bytes(text: Tokenizer, token: int) -> bytes:
    """Return the bytes of a token within a text."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alone, twice = (text.decode(np.full(n, token)) for n in (1, 2))
    if INCOMPLETE not in alone:
        return twice[len(alone) :].encode()
    name = text.tokenizer.convert_ids_to_tokens(token)
    if byte := BYTE.fullmatch(name):
        return bytes.fromhex(byte[1])
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    return bytes(byte_of[c] for c in name) if byte_of.keys() >= {*name} else alone.encode()


class RefusedError(Exception):
    """HTTP error reply: status, code, message."""

    def __init__(self, status: int, why: str, code: str = "") -> None:
        super().__init__(why)
        self.status = status
        self._code = code or CODES[status]

    def reply(self) -> Any:
        """Return the error in OpenAI's format."""
        from starlette.responses import JSONResponse

        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": None, "code": self._code}
        headers = {"retry-after": "1"} if self.status == 503 else {}
        return JSONResponse({"error": error}, self.status, headers)

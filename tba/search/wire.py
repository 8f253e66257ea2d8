"""OpenAI's chat completions as JSON: what a request asks for, and the reply to it."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field

from tba.models.pretrained import Tokenizer
from tba.search.chat import Chat
from tba.types import Completion, Sampling

COLDEST = 0.01
"""Temperature for programs that ask for 0."""
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "top_k": (0, -1),
    "min_p": (0,),
    "chat_template_kwargs": ({},),
    "skip_special_tokens": (True,),
}
"""Parameters with the values that change nothing; others are refused."""
IGNORED = {
    "seed", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "request_id", "priority", "cache_salt",
}  # fmt: skip
"""Parameters that change nothing, whatever their value."""
CODES = {
    400: "invalid", 404: "not_found", 405: "not_found", 410: "session_ended", 413: "too_large",
    499: "gone", 503: "overloaded",
}  # fmt: skip


Stop = Annotated[str, Field(min_length=1)]
"""A stop string; an empty one would end every reply."""


class Request(BaseModel, extra="allow"):
    """Body of a request. `model` is ignored; what is named neither here nor above is refused."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str = "policy"
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: Stop | list[Stop] | None = None
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = False
    return_token_ids: bool | None = False

    def sampling(self, own: Sampling, config: Sampling, fixed: str) -> Sampling:
        """Return how the policy samples its reply; ValueError for what cannot be done.

        `own` is that of a search or an evaluation, `config` that of the config's searches. `fixed`
        says why no other distribution may be sampled from, if so.
        """
        asked = self.model_dump()
        for name in sorted({"tool_choice", *(self.model_extra or {})} - IGNORED):
            neutral = NEUTRAL.get(name, ())
            if asked[name] is not None and asked[name] not in neutral:
                instead = f", or give {neutral[0]!r}" if neutral else ""
                raise ValueError(
                    f"{name} = {asked[name]!r} is not supported; leave it out{instead}"
                )
        limit = min(self.max_completion_tokens or self.max_tokens or own.max_tokens, own.max_tokens)
        sampling = replace(own, samples=1, max_tokens=limit, stop=self.stops or own.stop)
        if own.temperature == 0:  # an evaluation with greedy replies
            return sampling
        if fixed:
            for name in ("temperature", "top_p"):
                if asked[name] not in (None, vars(own)[name], vars(config)[name]):
                    told = f"{name} = {asked[name]:g} is not that of the config, and {fixed}"
                    raise ValueError(told)
            return sampling  # an evaluation has a temperature of its own
        if self.temperature not in (None, own.temperature):
            sampling = replace(sampling, explore=max(COLDEST, self.temperature or 0))
        if self.top_p is not None:
            sampling = replace(sampling, top_p=self.top_p)
        return sampling

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def message_of(
    chat: Chat, context: np.ndarray, turn: Completion, asked: Request, stop: Sequence[str]
) -> dict[str, Any]:
    """Return the reply as a message of OpenAI's.

    Calls stay text where they cannot be read, or the request has no tools that may be called.
    """
    message, calls = chat.read(context, turn.tokens, stop)
    may_call = asked.tools and asked.tool_choice != "none"
    if not may_call or not calls or any(call.error for call in calls):
        shown = chat.text.answer(turn.tokens, turn.finished, stop).text
        return {"role": "assistant", "content": shown}
    reply: dict[str, Any] = {**message, "content": message["content"] or None, "tool_calls": []}
    for place, call in enumerate(calls):
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        own = f"call_{len(context)}_{place}"
        reply["tool_calls"].append({"id": own, "type": "function", "function": function})
    return reply


def completion(
    asked: Request,
    text: Tokenizer,
    prompt: np.ndarray,
    turn: Completion,
    message: Mapping[str, Any],
) -> Any:
    """Return a reply in OpenAI's form, as JSON or as a stream, in which the message is one part."""
    from starlette.responses import JSONResponse, StreamingResponse

    reason = "tool_calls" if message.get("tool_calls") else "stop"
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason if turn.finished else "length"}
    if asked.logprobs:
        choice["logprobs"] = {"content": _logprobs(text, turn)}
    if asked.return_token_ids:
        choice["token_ids"] = turn.tokens.tolist()
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(turn.tokens),
        "total_tokens": len(prompt) + len(turn.tokens),
    }
    reply: dict[str, Any] = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": asked.model,
    }
    if asked.return_token_ids:
        reply["prompt_token_ids"] = prompt.tolist()
    if not asked.stream:
        choice["message"] = message
        whole = {"object": "chat.completion", "choices": [choice], "usage": usage}
        return JSONResponse(reply | whole)
    calls = message.get("tool_calls") or []
    delta = {**message, "tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}
    reply["object"] = "chat.completion.chunk"
    # the end is a part of its own: with it, OpenAI's client tells that a call is complete
    begun = {**choice, "delta": delta, "finish_reason": None}
    ended = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    parts = [{**reply, "choices": [begun]}, {**reply, "choices": [ended]}]
    if (asked.stream_options or {}).get("include_usage"):
        parts.append({**reply, "choices": [], "usage": usage})

    async def stream() -> AsyncIterator[str]:
        for part in parts:
            yield f"data: {json.dumps(part)}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream")


def _logprobs(text: Tokenizer, turn: Completion) -> list[dict[str, Any]]:
    """Return the log-prob of each token at the temperature of the config."""
    content = []
    for token, logp in zip(turn.tokens.tolist(), turn.logp.tolist(), strict=True):
        shown = text.tokenizer.decode([token])
        one = {"token": shown, "logprob": logp, "bytes": [*shown.encode()], "top_logprobs": []}
        content.append(one)
    return content


class RefusedError(Exception):
    """A request is refused with this status and code, and in a sentence."""

    def __init__(self, status: int, why: str, code: str = "") -> None:
        super().__init__(why)
        self.status = status
        self._code = code or CODES[status]

    def reply(self) -> Any:
        """Return the error as OpenAI's clients read it."""
        from starlette.responses import JSONResponse

        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": None, "code": self._code}
        headers = {"retry-after": "1"} if self.status == 503 else {}
        return JSONResponse({"error": error}, self.status, headers)

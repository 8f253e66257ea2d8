"""Replies that `tba serve` sends while they are sampled: texts grow, and nothing is taken back."""

import asyncio
import json

import numpy as np
import pytest
from test_wire import QUESTION, TEXTS, tokenizer_of

from tba.agents.wire import ChatRequest, TokenStream, completion
from tba.models.tokenizer import INCOMPLETE
from tba.types import Completion

pytest.importorskip("starlette", reason="needs tba[agents]")


@pytest.mark.parametrize("stop", [(), ("stop", "ï"), (" there",), ("😀 z",)])
@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@pytest.mark.parametrize("written", TEXTS)
def test_a_stream_is_the_reply_in_parts(kind, stop, written):
    """No part has half a character, or the beginning of a stop string that is completed later."""
    text = tokenizer_of(kind)
    tokens = np.append(text.tokens(written), text.eos_id).astype(np.int32)
    lengths = range(1, len(tokens) + 1)
    cut = [n for n in lengths if stop and text.answer(tokens[:n], False, stop).finished]
    tokens = tokens[: min(cut, default=len(tokens))]
    request = ChatRequest(messages=QUESTION, stream=True)
    turn = Completion(tokens, np.zeros(len(tokens), np.float32), True, 0)
    shown = text.answer(tokens, True, stop).text

    async def parts() -> list[str]:
        stream = TokenStream(text, stop)

        async def sample() -> None:
            for token in tokens.tolist():
                stream.tell(token)
                for _ in range(5):  # the reader sees each token
                    await asyncio.sleep(0)

        async def rest(sent: str) -> object:
            message = {"role": "assistant", "content": shown}
            return completion(text, tokens[:0], turn, request, stop, message, sent)

        task = asyncio.create_task(sample())
        assert await stream.begins(task) == (len(tokens) > 1)
        return [part async for part in stream.events(request, task, rest)]

    events = "".join(asyncio.run(parts())).split("\n\n")[:-1]
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    contents = [delta.get("content", "") for delta in deltas]
    assert "".join(contents) == shown
    assert deltas[0]["role"] == "assistant" and not any("role" in each for each in deltas[1:])
    assert INCOMPLETE not in "".join(contents)
    assert len([each for each in contents if each]) > 2 or len(shown) < 6
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]

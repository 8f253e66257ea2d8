"""Replies and parameters of OpenAI's protocol, also where tokens are parts of characters."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tba.agents.wire import ChatRequest, completion
from tba.models.tokenizer import Tokenizer
from tba.types import Completion, Sampling

pytest.importorskip("starlette", reason="needs tba[agents]")

QUESTION = [{"role": "user", "content": "?"}]
TEXTS = [
    "😀 naïve 日本語 👩‍👩‍👧 🧪",
    " x  y\n",
    "\tdon't <tool_call>",
    "é stop 😀 there",
    " ",
    "   ",
]
SPECIAL = ["<pad>", "<eos>"]


def tokenizer_of(kind: str) -> Tokenizer:
    """Return a tokenizer of few merges, which writes most characters as several tokens of bytes."""
    if kind == "byte level":
        fast = Fast(models.BPE())
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        options = {"vocab_size": 270, "initial_alphabet": alphabet, "special_tokens": SPECIAL}
        fast.train_from_iterator(TEXTS, trainers.BpeTrainer(show_progress=False, **options))
    else:
        every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
        pieces = [*SPECIAL, *every_byte, "▁", *"adehorstvxy", "▁s", "▁st"]
        ids = {piece: i for i, piece in enumerate(pieces)}
        merges = [("▁", "s"), ("▁s", "t")]
        fast = Fast(models.BPE(ids, merges, byte_fallback=True))
        fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        fast.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<eos>", pad_token="<pad>")
    return Tokenizer(wrapped, 1, frozenset([1]), 0, 1000, len(wrapped))


@pytest.mark.parametrize("stop", [(), ("stop", "ï"), (" ",)])
@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_the_bytes_of_all_tokens_are_the_text_of_a_reply(kind, stop):
    text = tokenizer_of(kind)
    request = ChatRequest(messages=QUESTION, logprobs=True)
    for written in TEXTS:
        tokens = np.append(text.tokens(written), text.eos_id).astype(np.int32)
        turn = Completion(tokens, np.zeros(len(tokens), np.float32), True, 0)
        shown = text.answer(tokens, True, stop).text
        message = {"role": "assistant", "content": shown}
        reply = completion(text, tokens[:0], turn, request, stop, message)
        content = json.loads(reply.body)["choices"][0]["logprobs"]["content"]
        assert len(content) == len(tokens) > len(shown.split())
        assert bytes(byte for one in content for byte in one["bytes"]).decode() == shown
        assert content[-1] == {"token": "<eos>", "logprob": 0.0, "bytes": [], "top_logprobs": []}


@pytest.mark.parametrize(
    "given, used", [({}, 5), ({"top_k": 0}, 0), ({"top_k": -1}, 0), ({"top_k": 7}, 7)]
)
def test_a_programs_own_top_k_is_used(given, used):
    own = Sampling(1, 1.0, 64, top_k=5)
    assert ChatRequest(messages=QUESTION, **given).sampling(own, own, "").top_k == used
    if used == 5:
        ChatRequest(messages=QUESTION, top_k=5).sampling(own, own, "no other")

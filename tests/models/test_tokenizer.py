"""Tokens as text: what rewards, samples and people see of a response."""

import numpy as np
import pytest
from build import train_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tba.models.tokenizer import Tokenizer as Text
from tba.models.tokenizer import decode


def bytes_of(text: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in text.encode()]


@pytest.mark.parametrize(
    ("kind", "tokens", "expected"),
    [
        ("byte level", ["<think>", "ok", "</s>"], "<think>ok"),
        ("byte level", ["ok", "<s>", "<unk>"], "ok<s><unk>"),
        ("byte level", ["ok", "Ã"], "ok\ufffd"),
        ("byte level", ["a", None, None, "b"], "a\ufffd\ufffdb"),
        ("byte fallback", ["<think>", "▁", "a", "</s>"], "<think> a"),
        ("byte fallback", ["▁", "a", "▁", "a"], "a a"),
        ("byte fallback", bytes_of("é\n🙂"), "é\n🙂"),
        ("byte fallback", [*bytes_of("é\n🙂")[:-1], "▁", "a"], "é\n\ufffd a"),
        ("byte fallback", [*bytes_of("🙂é")[2:], None], "\ufffd\ufffdé\ufffd"),
        ("byte fallback", ["</s>"], ""),
    ],
)
def test_the_text_has_all_tokens_but_eos_at_the_end(kind, tokens, expected):
    """A cut character and a number that is no token are U+FFFD, and nothing else is lost."""
    tokenizer = train_tokenizer(kind)
    ids = [999 if t is None else tokenizer.convert_tokens_to_ids(t) for t in tokens]
    assert tokenizer.unk_token_id not in ids or "<unk>" in tokens
    text = Text(tokenizer, eos_id=2, eos_ids=frozenset({2}), pad_id=0, context=99, vocabulary=1000)
    assert text.decode(np.array(ids, np.int32)) == expected
    assert text.prompt(np.array([1, *ids], np.int32)).startswith(expected.lstrip())


def test_spaces_before_punctuation_stay():
    words = Tokenizer(models.WordLevel({"▁do": 0, "▁n't": 1, "▁.": 2}, unk_token="▁."))
    words.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=True)
    assert decode(tokenizer, [0, 1, 2]) == "do n't ."

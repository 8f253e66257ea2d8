"""Stop strings: their tokens are found in any tokenizer, and hold wherever answers are read."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tokenizers
from build import train_tokenizer
from exact import toy_config
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

import tba.open
from tba.config.schema import Config, load
from tba.config.tables import PolicyTable
from tba.engines._choice import StopStrings
from tba.engines.scripted import length_to_stop
from tba.models.pretrained import load_text
from tba.models.tokenizer import Tokenizer
from tba.runs.folder import METRICS, SAMPLES, read
from tba.setup.checks import check_resumed
from tba.setup.setup import check


def text_of(vocabulary: Sequence[str], decoder: Any) -> Tokenizer:
    """A tokenizer with these tokens, of which the first is special."""
    ids = {token: i for i, token in enumerate(vocabulary)}
    words = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="<u>"))
    words.decoder = decoder
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=vocabulary[0])
    return Tokenizer(tokenizer, 0, frozenset({0}), 0, 99, 999)


BYTES = ("<eos>", "Ã", "©", "a", "Ċ", "aĊĊ", "b")
"""As a byte-level tokenizer writes them: two halves of é, and newlines."""
WORDS = ("<eos>", "▁so", "▁", "so", "▁it", "ends", ".")
"""With the space before a word, which decoding drops at the beginning of a text."""


@pytest.mark.parametrize(
    ("vocabulary", "stop", "tokens", "length"),
    [
        (BYTES, "é", (3, 1, 2, 3), 3),  # the second half completes it
        (BYTES, "é", (1, 3, 2), None),
        (BYTES, "aé\n", (3, 1, 2, 5), None),
        (BYTES, "aé\n", (3, 3, 1, 2, 4), 5),
        (BYTES, "\n\n", (6, 4, 0, 4), None),  # a special token is text
        (BYTES, "s>\n", (6, 0, 4), 3),
        (BYTES, "\n\n", (6, 5), 2),
        (BYTES, "a", (6, 5), 2),
        (WORDS, " it", (3, 4, 6), 2),
        (WORDS, " it", (4, 6), None),  # there is no space at the beginning
        (WORDS, " ", (4, 2), 2),
        (WORDS, "soends", (1, 2, 3, 5, 6), 4),
    ],
)
def test_the_token_that_completes_a_stop_string(vocabulary, stop, tokens, length):
    decoder = decoders.ByteLevel() if vocabulary is BYTES else decoders.Metaspace()
    text = text_of(vocabulary, decoder)
    response = np.array(tokens, np.int32)
    assert length_to_stop(text, response, ["none", stop]) == length
    stops = StopStrings(text, (stop, "none"), "cpu")
    ends = []
    for n in range(1, (length or len(tokens)) + 1):
        if completes(stops, response[:n]):
            ends.append(n)
    assert ends == ([] if length is None else [length])


STOPS: tuple[tuple[str, ...], ...] = (
    ("\n\n",), ("Pari",), (" any",), ("User:", "\nQ:"), ("é",), ("日本",), ("...",), ("</answer>",),
    ("```",), ("}",), ("🙂",), (" \n",), ("a b",),
)  # fmt: skip
PIECES = (
    "The capital is Paris", "\n\n", "\n", " ", "any", "anyway", "User:", "Q:", "café", "é", "日",
    "本", "日本語", ".", "...", "<", "/answer", ">", "`", "```py", "}", "}}", "🙂", "😀", " \n",
    "a", " b", "龘",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_a_stop_string_is_found_where_the_whole_text_has_it(kind):
    """For each stop string, 400 texts of tokens that are whole words, characters, or bytes."""
    tokenizer = train_tokenizer(kind)
    text = Tokenizer(tokenizer, 2, frozenset({2}), 0, 99, len(tokenizer))
    stops = [StopStrings(text, stop, "cpu") for stop in STOPS]
    rng = random.Random(0)
    ended = 0
    for _ in range(400):
        words = rng.choices(PIECES, k=rng.randint(1, 6))
        parts = words if rng.random() < 0.5 else ["".join(words)]
        tokens = np.concatenate(
            [tokenizer(p, add_special_tokens=False)["input_ids"] for p in parts]
        )
        texts = [tokenizer.decode(tokens[: n + 1].tolist()) for n in range(len(tokens))]
        for stop in stops:
            wanted = (
                n for n, shown in enumerate(texts) if any(each in shown for each in stop.stop)
            )
            found = (n for n in range(len(tokens)) if completes(stop, tokens[: n + 1]))
            first = next(wanted, None)
            assert next(found, None) == first
            ended += first is not None
    assert ended > 400


def completes(stop: StopStrings, tokens: np.ndarray) -> bool:
    return bool(stop.possible[tokens[-1]]) and stop.completed(tokens)


def test_an_answer_is_the_text_before_the_first_stop_string(tiny_model):
    text = load_text(PolicyTable(model=str(tiny_model)))
    tokens = np.array(text.tokenizer("12+34=5")["input_ids"], np.int32)
    assert text.answer(tokens, False, ()).text == "12+34=5"
    answer = text.answer(tokens, False, ("=", "+3"))
    assert (answer.text, answer.finished) == ("12", True)
    assert not text.answer(tokens, False, ("+4",)).finished


def test_a_run_reads_answers_up_to_the_stop_string(tiny_model, tmp_path):
    """Rewards, values by rollouts, evaluations and logged samples."""
    texts = ["engine=scripted", "engine.answers=['2=1', '2=3', '1+2=1']", "sampling.stop='2='"]
    few = ["run.steps=2", "sampling.samples=4", "trainer.batch_size=4", "trainer.group_size=4"]
    few += ["sampling.max_tokens=9", "eval.prompts=1", "log.sample_every=1", "task=toy.Ones"]
    vine = ["objective=vineppo", "objective.step_tokens=1", "objective.rollouts=1"]
    config = toy_config(tiny_model, tmp_path / "run", *texts, *few, *vine)
    with tba.open.open_run(config) as run:
        run.train()
    rows = read(tmp_path / "run" / SAMPLES)
    assert {row["kind"] for row in rows} == {"train", "eval"}
    assert {row["completion"] for row in rows} <= {"", "1+"}
    for group in run.buffer.groups():
        for t in group.trajectories:
            shown = run.parts.text.decode(t.tokens)
            assert shown in ("2=", "1+2=") and t.finished
            assert t.reward == ("1" in shown)  # toy.Ones: a 1 behind the stop string has no effect
            assert t.value is not None
            # after "1" or "1+2" an answer keeps its 1; after "2" the ending "=1" is not seen
            assert set(t.value[1:].tolist()) <= ({1.0} if shown == "1+2=" else {0.0, 1.0})
    scores = [row for row in read(tmp_path / "run" / METRICS) if "eval/greedy_finished" in row]
    assert all(row["eval/greedy_finished"] == 1 == row["eval/greedy_reward"] + 1 for row in scores)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("sampling.stop='a'", ("a",)),
        ('sampling.stop=["a", "b c"]', ("a", "b c")),
        ("sampling.stop=[]", ()),
    ],
)
def test_stop_is_a_text_or_a_list_of_texts(setting, expected):
    config = load(None, [setting])
    assert config.sampling.stop == expected
    assert Config(**config.nested()) == config


@pytest.mark.parametrize("setting", ["sampling.stop=['']", "sampling.stop=['a','']"])
def test_an_empty_stop_string_is_refused(setting):
    with pytest.raises(ValueError, match=r"sampling\.stop\.\d = '': String should have at least 1"):
        load(None, [setting])


def test_eos_is_refused_as_a_stop_string(tiny_model, tmp_path):
    """Unlike other special tokens, it is in no text."""
    config = toy_config(tiny_model, tmp_path, "sampling.stop=['=<eos>']")
    with pytest.raises(ValueError, match=r"'<eos>' ends every response, and is not in its text"):
        check(config)
    check(toy_config(tiny_model, tmp_path, "sampling.stop=['=<pad>']"))


def test_a_resumed_run_keeps_its_stop_strings(tiny_model, tmp_path):
    """The responses in the buffer end with them."""
    before = toy_config(tiny_model, tmp_path, "sampling.stop=['a','b']")
    check_resumed(toy_config(tiny_model, tmp_path, "sampling.stop=['b','a']"), before)
    with pytest.raises(ValueError, match=r"but the run has \['a', 'b'\]; leave it unchanged"):
        check_resumed(toy_config(tiny_model, tmp_path, "sampling.stop=['a']"), before)


def test_only_tokens_that_can_be_the_last_are_searched():
    text = text_of(BYTES, decoders.ByteLevel())
    possible = StopStrings(text, ("b\n",), "cpu").possible
    assert [BYTES[i] for i in possible.nonzero()] == ["Ã", "©", "Ċ", "aĊĊ"]

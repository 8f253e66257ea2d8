"""No prompt is lost, none is answered twice in an epoch."""

from __future__ import annotations

import pytest

from tba.prompts import PromptStream
from tba.types import Prompt

PROMPTS = [Prompt(f"p{i}", "x") for i in range(7)]


def ids(prompts: list[Prompt]) -> list[str]:
    return [p.id for p in prompts]


def test_each_epoch_has_every_prompt_once_in_its_own_order() -> None:
    stream = PromptStream(PROMPTS, seed=0)
    epochs = [ids(stream.take(7)) for _ in range(3)]
    assert all(sorted(e) == sorted(ids(PROMPTS)) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_what_came_back_unanswered_goes_out_first() -> None:
    stream = PromptStream(PROMPTS, seed=0)
    first, second = stream.take(2), stream.take(3)
    stream.done(second)
    stream.put_back(first)
    assert ids(stream.take(2)) == ids(first)


def test_a_resumed_stream_goes_on_with_what_was_outstanding() -> None:
    stream = PromptStream(PROMPTS, seed=3)
    stream.done(stream.take(4))
    in_flight, unanswered = stream.take(2), stream.take(1)
    stream.put_back(unanswered)
    resumed = PromptStream(PROMPTS, seed=3)
    resumed.seek(stream.cursor())
    assert ids(resumed.take(3)) == ids([*in_flight, *unanswered])
    stream.put_back(in_flight)
    stream.take(3)
    assert ids(resumed.take(9)) == ids(stream.take(9))


def test_another_data_set_is_noticed() -> None:
    stream = PromptStream(PROMPTS, seed=0)
    stream.take(7)
    with pytest.raises(ValueError, match="no longer has"):
        PromptStream(PROMPTS[:3], seed=0).seek(stream.cursor())

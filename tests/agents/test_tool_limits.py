"""Tools that return too much: it is cut before it is tokenised, which is said and counted."""

import time
from typing import Any

import pytest
from desk import CLOSING, Desk
from talk import call, dialogue_config, dialogue_model, replies, searched

from tba.agents.environment import CHARACTERS
from tba.prompt import Answer
from tba.setup.setup import check
from tba.types import Sampling

__all__ = ["dialogue_config", "dialogue_model"]  # fixtures
LARGE = 50_000_000


class Slow:
    def __str__(self) -> str:
        CLOSING.wait(60)
        return ""


class Loud(Exception):
    """Its text takes longer than the deadline."""

    def __str__(self) -> str:
        CLOSING.wait(60)
        return ""


class Flood(Desk):
    """Tools that return more than anybody can read."""

    def reset(self, says: str | None = None, **row: Any) -> str | None:
        return "x" * LARGE if says == "flood" else says

    def flood(self, n: int, text: str = "x") -> str:
        """Return a long text.

        Args:
            n: Its length.
            text: What it consists of.
        """
        return text * n

    def rage(self, n: int) -> None:
        """Raise a long error.

        Args:
            n: Its length.
        """
        raise ValueError("x" * n)

    def numbers(self, n: int) -> list[int]:
        """Return many numbers.

        Args:
            n: How many.
        """
        return [7] * n

    def slow(self) -> Slow:
        """Return what has no text in time."""
        return Slow()

    def loud(self) -> None:
        """Raise an error that has no text in time."""
        raise Loud


ENVIRONMENT = f"{__file__}:Flood"
LIMIT = CHARACTERS * 1000
"""Of a run with 1,000 tokens."""


@pytest.mark.parametrize(
    "asks",
    [
        call("flood", n=LARGE),
        call("flood", n=LIMIT + 1),
        call("flood", n=LARGE // 4, text="\N{PILE OF POO}"),
        call("rage", n=LARGE),
        call("numbers", n=LARGE // 50),
    ],
    ids=["long", "one too many", "of four bytes", "error", "no text"],
)
def test_a_long_result_is_cut_and_counted(asks, config):
    began = time.process_time()
    _, result = searched(config(asks, "Well.", environment=ENVIRONMENT))
    assert time.process_time() - began < 20
    assert (result.stats.counts["tools/calls"], result.stats.counts["tools/cut"]) == (2, 2)
    assert result.stats.counts["tools/failures"] == 2 * ("rage" in asks)


def test_it_is_said_in_the_dialogue(config):
    """The calls of a turn share the limit, and each has its least."""
    asks = call("flood", n=5000) + call("flood", n=3000) + call("rage", n=5000)
    parts = check(config(asks, environment=ENVIRONMENT))
    searcher = parts.search_setup().build("cpu", False)

    def read(max_tokens: int) -> list[str]:
        sampling = Sampling(1, 1.0, max_tokens)
        ((answer,),) = searcher.answer("", parts.prompts[:1], sampling, seed=0).answers
        assert isinstance(answer, Answer) and answer.messages is not None
        return [m["content"] for m in answer.messages if m["role"] == "tool"]

    each = CHARACTERS * 600 // 3
    first, second, error = read(600)
    assert first == "x" * each + f"\n[cut: {each:,} of 5,000 characters]"
    assert second == "x" * 3000
    assert error.startswith("Error: ValueError: xxx")
    assert error.endswith(f"[cut: {each:,} of 5,019 characters]")


def test_a_result_within_the_limit_stays(config):
    asks = call("flood", n=500)
    searcher, result = searched(config(asks, "Well.", environment=ENVIRONMENT))
    assert replies(searcher, result.groups[0]) == ["x" * 500]
    assert result.stats.counts["tools/cut"] == 0


@pytest.mark.parametrize("tool", ["slow", "loud"])
def test_the_deadline_covers_the_text_of_a_result(tool, config):
    settings = {"environment": ENVIRONMENT, "seconds": 0.5}
    searcher, result = searched(config(call(tool), "Well.", **settings))
    assert replies(searcher, result.groups[0]) == ["Error: no result within 0.5 s"]


def test_what_reset_returns_has_a_limit(config, tmp_path):
    rows = [{"prompt": f"Say {i}", "says": "flood" if i == 1 else "."} for i in range(8)]
    _, result = searched(config("Well.", rows=rows, environment=ENVIRONMENT), prompts=2)
    assert dict(result.stats.rejected) == {"raised": 2}
    assert len(result.stats.last_rejection) < 1000

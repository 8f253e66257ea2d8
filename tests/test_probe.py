"""The probe of a weight update is made of the last batch's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import VOCABULARY
from test_trainer import trainer

from tba.engines import Engine
from tba.engines.transformers import Transformers
from tba.learn.probe import RESPONSE, probe_tokens, prompt_length
from tba.prompt import Prompt
from tba.types import Batch, Group, Trajectory, collate

PROMPT = prompt_length(block=128)


class InBlocks(Transformers):
    """Engine that would keep prompts in a cache of such blocks."""

    longest_block = 64


def arrays(batch: Batch, context: int) -> tuple[list[int], list[int]]:
    tokens = probe_tokens(batch, context, PROMPT)
    assert tokens.prompt_mask.all() and tokens.mask.all()
    return tokens.prompt_tokens[0].tolist(), tokens.tokens[0, 0].tolist()


def test_short_prompts_are_repeated_until_the_probe_fills_a_block(groups: list[Group]) -> None:
    prompt, response = arrays(collate(groups), context=8192)
    assert len(prompt) == PROMPT > 128
    longest = groups[0].trajectories[0].tokens  # 5 tokens; the others have 1, 3 and 2
    said = [t for group in groups[1:] for t in group.trajectories[-1].tokens.tolist()]
    assert response == [*longest.tolist(), *np.resize(said, RESPONSE)][:RESPONSE]
    others = []
    for group in groups[1:]:
        others += [*group.prompt_tokens.tolist(), *group.trajectories[-1].tokens.tolist()]
    own = groups[0].prompt_tokens.tolist()
    assert prompt == np.resize(others, PROMPT - len(own)).tolist() + own
    assert (prompt, response) == arrays(collate(groups), context=8192)


@dataclass
class Silent(Engine):
    """Engine that does not say whether it keeps prompts."""

    version: int = 0

    def generate(self, prompts: Any, sampling: Any, seed: int) -> Any: ...

    def load_weights(self, weights: Any) -> None: ...


@pytest.mark.parametrize(
    ("engine", "length"),
    [
        ("transformers", 16),
        ("scripted", 16),
        ("test_probe.InBlocks", 65),
        ("test_probe.Silent", 129),
    ],
)
def test_an_engine_says_how_long_a_probe_it_needs(
    tiny_model: Path, engine: str, length: int
) -> None:
    assert trainer(tiny_model, f"engine={engine}").probe_prompt == length


def test_a_single_group_is_enough(groups: list[Group]) -> None:
    prompt, _ = arrays(collate(groups[:1]), context=8192)
    assert len(prompt) == PROMPT
    assert prompt[-2:] == groups[0].prompt_tokens.tolist()


@pytest.mark.parametrize(("context", "length"), [(16, 11), (6, 1), (149, PROMPT)])
def test_a_short_context_shortens_the_prompt(batch: Batch, context: int, length: int) -> None:
    prompt, response = arrays(batch, context)
    assert len(prompt) == length and len(prompt) + len(response) <= context


def test_long_prompts_and_responses_are_cut() -> None:
    """The end of the prompt stays, because the response follows it."""
    tokens = np.arange(200, dtype=np.int32)
    zeros = np.zeros(50, np.float32)
    response = Trajectory(np.arange(50, dtype=np.int32), zeros, zeros, 0.0, 0, True)
    group = Group(Prompt("long", "?"), tokens, (response, response))
    prompt, answer = arrays(collate([group]), context=8192)
    assert prompt == list(range(200 - PROMPT, 200)) and answer == list(range(RESPONSE))


def test_a_probe_has_the_log_probs_of_the_new_weights(tiny_model: Path, batch: Batch) -> None:
    t = trainer(tiny_model)
    first = t.copy(version=0)().probe  # before the first step
    assert first is not None and len(first.tokens) == RESPONSE
    text = "".join(VOCABULARY[i] for i in [*first.prompt_tokens, *first.tokens])
    assert text.startswith("0+1=")  # the prompts
    t.step(batch, 0)
    probe = t.copy(version=1)().probe
    assert probe is not None and len(probe.logp) == len(probe.tokens) == RESPONSE
    logp = t.policy.logp(probe_tokens(batch, t.context))[0, 0].detach().numpy()
    np.testing.assert_array_equal(probe.logp, logp)

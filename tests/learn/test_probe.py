"""The probe of a weight update is made of the last batch's tokens."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from build import trainer
from conftest import VOCABULARY

from tba.engines import Engine
from tba.engines.transformers import Transformers
from tba.learn.publish import RESPONSE, probe_tokens, prompt_length, sequences_of
from tba.types import Batch, collate

PROMPT = prompt_length(block=128)


class InBlocks(Transformers):
    """Engine that would keep prompts in a cache of such blocks."""

    longest_block = 64


def arrays(batch: Batch, context: int) -> tuple[list[int], list[int]]:
    tokens = probe_tokens(sequences_of(batch), context, PROMPT)
    assert tokens.prompt_mask.all() and tokens.mask.all()
    return tokens.prompt_tokens[0].tolist(), tokens.tokens[0, 0].tolist()


def test_a_probe_ends_with_the_longest_response_and_repeats_short_sequences(groups):
    prompt, response = arrays(collate(groups), context=8192)
    assert (len(prompt), len(response)) == (PROMPT, RESPONSE)
    ordered = sorted(groups, key=lambda g: max(len(t.tokens) for t in g.trajectories))
    flat: list[int] = []
    for g in ordered:
        longest = max(g.trajectories, key=lambda t: len(t.tokens))
        flat += [*g.prompt_tokens.tolist(), *longest.tokens.tolist()]
    assert [*prompt, *response] == (flat * 100)[-PROMPT - RESPONSE :]


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
def test_an_engine_says_how_long_a_probe_it_needs(tiny_model, engine, length):
    assert trainer(tiny_model, f"engine={engine}").setup.probe_prompt == length


@pytest.mark.parametrize(("context", "length"), [(20, 4), (6, 1), (149, PROMPT)])
def test_a_short_context_shortens_the_prompt(batch, context, length):
    prompt, response = arrays(batch, context)
    assert len(prompt) == length and len(prompt) + len(response) <= context


def test_a_probe_has_the_log_probs_of_the_new_weights(tiny_model, batch):
    t = trainer(tiny_model)
    first = t.send(version=0).payload.probe  # before the first step
    assert first is not None and len(first.tokens) == RESPONSE
    text = "".join(VOCABULARY[i] for i in [*first.prompt_tokens, *first.tokens])
    assert "0+1=" in text  # the prompts
    t.step(batch, 0)
    probe = t.send(version=1).payload.probe
    assert probe is not None and len(probe.logp) == len(probe.tokens) == RESPONSE
    logp = t.policy.logp(probe_tokens(sequences_of(batch), t.setup.context))[0, 0].detach().numpy()
    np.testing.assert_array_equal(probe.logp, logp)

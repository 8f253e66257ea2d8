"""What a policy knows of all right answers of the held-out sums, from exact log-probs.

A string of the grammar is two numbers of two digits, `30+27`, that end there: 8,100 for each sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import log
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from studies.coverage.pairs import HELD_OUT, total

FIRST = "123456789"
PLACES = (FIRST, "0" + FIRST, "+", FIRST, "0" + FIRST, "")
"""Characters that a string may have at each place; the last is its end."""
SAMPLES = 64
BETA = 0.1
"""beta of the target, and of E r - beta KL, whatever that of an objective is."""
LEAST = 1e-7
"""Least probability of a beginning that is followed."""
UNLIKELY = 1e-12
"""Probability of a string whose beginning is not."""
Exact = dict[str, float]


@cache
def strings() -> list[str]:
    """Return the strings of the grammar, in the order of `grammar`."""
    found = [""]
    for characters in PLACES[:-1]:
        found = [text + c for text in found for c in characters]
    return found


@cache
def right() -> Tensor:
    """Return which strings are right, for each held-out sum [P S]."""
    sums = torch.tensor([total(text) or 0 for text in strings()])
    return sums == torch.tensor(HELD_OUT)[:, None]


@torch.no_grad()
def grammar(folder: str | Path, among: Tensor, least: float = LEAST) -> Tensor:
    """Return the log-probs of strings under a saved model, in double precision [P S].

    Strings that are not `among` these [P S], or whose beginning is less likely than `least`, are
    not followed, and have `UNLIKELY`. P are the first of the held-out sums.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = AutoTokenizer.from_pretrained(folder)
    rows = torch.full(among.shape, log(UNLIKELY), dtype=torch.double)
    for row, own, n in zip(rows, among, HELD_OUT, strict=False):
        at = model(text(f"{n}=", return_tensors="pt").input_ids, use_cache=True)
        logp = torch.zeros(1, dtype=torch.double)
        place = torch.zeros(1, dtype=torch.long)  # in the order of all beginnings so long
        count = 1
        for characters in PLACES:
            ids = torch.tensor(text.convert_tokens_to_ids(list(characters) or [text.eos_token]))
            after = at.logits[:, -1].double().log_softmax(-1)[:, ids]
            logp = (logp[:, None] + after).flatten()
            place = (place[:, None] * len(ids) + torch.arange(len(ids))).flatten()
            count *= len(ids)
            wanted = own.view(count, -1).any(1)[place]
            (kept,) = torch.where(wanted & ((logp >= log(least)) | (logp == logp[wanted].max())))
            logp = logp[kept]
            place = place[kept]
            if characters:
                at.past_key_values.batch_select_indices(kept // len(ids))
                tokens = ids[kept % len(ids)][:, None]
                at = model(tokens, past_key_values=at.past_key_values, use_cache=True)
        row[place] = logp
    return rows


def exact(logp: Tensor, ref: Tensor) -> Exact:
    """Return means over the sums, from log-probs of all strings under a policy and the reference.

    All that is no string of the grammar is one class: its part of a KL is a lower bound.
    """
    is_right = right()
    classes = torch.cat([logp, rest(logp)], 1)
    reference = torch.cat([ref, rest(ref)], 1)
    reward = torch.nn.functional.pad(is_right.double(), (0, 1))
    target = (reference + reward / BETA).log_softmax(1)
    p = logp.exp()
    passed = (p * is_right).sum(1)
    found = {
        "pass": passed,
        "effective": (entropy(p, is_right) - entropy(ref.exp(), is_right)).exp(),
        "distinct": ((1 - (1 - p) ** SAMPLES) * is_right).sum(1),
        "regularised": passed - BETA * divergence(classes, reference),
        "tv": (classes.exp() - target.exp()).abs().sum(1) / 2,
        "kl": divergence(classes, target),
    }
    return {name: values.mean().item() for name, values in found.items()}


def rest(logp: Tensor) -> Tensor:
    """Return the log-prob of all other strings [P 1]."""
    return (1 - logp.exp().sum(1, keepdim=True)).clamp_min(1e-12).log()


def entropy(p: Tensor, among: Tensor) -> Tensor:
    """Return the entropy of a distribution among some strings, in nats."""
    share = (p * among) / (p * among).sum(1, keepdim=True)
    return -torch.special.xlogy(share, share).sum(1)


def divergence(logp: Tensor, other: Tensor) -> Tensor:
    """Return KL(p, other) in nats."""
    return (logp.exp() * (logp - other)).sum(1)


def curve(models: Mapping[int, Path], ref: Tensor) -> dict[int, Exact]:
    """Return what models saved at some steps know: the last of all strings, others of right ones.

    Then what is not right is one class, E r - beta KL an upper bound, and neither TV nor KL known.
    """
    last = max(models)
    found: dict[int, Exact] = {}
    for step, folder in models.items():
        among = torch.ones_like(right()) if step == last else right()
        classes = ref.masked_fill(~among, log(UNLIKELY))
        found[step] = exact(grammar(folder, among), classes)
        if step != last:
            del found[step]["tv"], found[step]["kl"]
    return found

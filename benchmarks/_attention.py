"""Count the scores that attention computes in training: a dense mask and FlexAttention's blocks.

    python benchmarks/_attention.py         # in seconds; nothing is measured, and no GPU is needed

A group has 16 responses to a prompt of 512 tokens. The dense mask is the one of the product's
default: the prompt's scores, and those of each response to the prompt and to all of itself.
FlexAttention packs the group into one row, and computes blocks of 128 x 128 scores. A score of a
head of d numbers costs 4 d FLOPs forward, and about 2.5 times as many backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tba.models import EVERYONE
from tba.models.flex import SIZE, owned_blocks
from tba.setup.sizes import group

RESPONSES = 16
PROMPT = 512
TOKENS = (3_072, 8_192, 16_384)
"""Lengths of a prompt with one response."""


class Scores(NamedTuple):
    """Scores of a head for one group."""

    tokens: int
    dense: int
    blocks: int
    needed: int

    @property
    def line(self) -> str:
        """Return a line of the table in docs/performance.md."""
        numbers = [self.dense, self.blocks, self.needed]
        counts = " | ".join(f"{number / 1e6:,.0f}" for number in numbers)
        return f"| {self.tokens:,} | {counts} | {self.dense / self.blocks:.2f} |"


def count(tokens: int) -> Scores:
    """Count the scores of a group whose sequences have so many tokens."""
    length = tokens - PROMPT
    owners = [torch.full((PROMPT,), EVERYONE)]
    owners += [torch.full((length,), number) for number in range(RESPONSES)]
    owner = torch.cat(owners)[None]
    mask = owned_blocks(owner, owner)
    listed = int(mask.kv_num_blocks.sum()) + int(mask.full_kv_num_blocks.sum())
    own = length * (length + 1) // 2 + length * PROMPT
    _, _, dense = group(PROMPT, RESPONSES, length + 1)  # the last token predicts nothing
    needed = PROMPT * (PROMPT + 1) // 2 + RESPONSES * own
    return Scores(tokens, dense, listed * SIZE**2, needed)


if __name__ == "__main__":
    print("million scores: tokens, dense mask, FlexAttention's blocks, visible; dense / blocks")
    for tokens in TOKENS:
        print(count(tokens).line)

"""The nouns: what flows from a prompt to a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int, Int32
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Message = Mapping[str, Any]
"""One chat message: `{"role": ..., "content": ...}`."""


@dataclass(frozen=True)
class Prompt:
    """A question to the policy: plain text, or chat messages that the tokenizer's chat template will render.

    `columns` are the other columns of the data set's row; reward functions receive them by name.
    """

    id: str
    text: str | Sequence[Message]
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """A completion as text, the way a task sees it. `finished` is False where the token limit cut it off."""

    text: str
    finished: bool


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn: so many for each prompt, at a temperature (0 is greedy), of at most so many tokens."""

    samples: int
    temperature: float
    max_tokens: int
    top_p: float = 1.0


@dataclass(frozen=True)
class Completion:
    """Tokens that an engine sampled (EOS included when `finished`), and the T-scaled log-prob of each.

    `version` is that of the weights that began it; version v means "after v optimizer steps".
    """

    tokens: Int32[np.ndarray, " T"]
    logp: Float32[np.ndarray, " T"]
    finished: bool
    version: int


@dataclass(frozen=True)
class Trajectory:
    """A completion that can be learned from: scored, with its log-probs under the policy that made it and the reference.

    `version` is that of the weights that began the completion; version v means "after v optimizer steps".
    `value`, where the objective asks for rollouts: at each token, V of the state before its step (see `objective.ValueRollouts`).
    """

    tokens: Int32[np.ndarray, " T"]
    behavior_logp: Float32[np.ndarray, " T"]
    ref_logp: Float32[np.ndarray, " T"]
    reward: float
    version: int
    finished: bool
    value: Float32[np.ndarray, " T"] | None = None


@dataclass(frozen=True)
class Group:
    """Trajectories of one prompt. Atomic: in a draw, a batch and a loss it is never divided."""

    prompt: Prompt
    prompt_tokens: Int32[np.ndarray, " P"]
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True)
class Stored:
    """A distinct trajectory in the replay buffer.

    `count` is how many of the samples it arrived with were this very response, so that a draw from the buffer follows
    the distribution that was sampled although each response is stored once. `arrived` is the trainer's step then.
    """

    trajectory: Trajectory
    count: int
    arrived: int


@dataclass(frozen=True)
class Shelf:
    """All that the replay buffer holds of one prompt, keyed by the tokens, oldest arrival first."""

    prompt: Prompt
    prompt_tokens: Int32[np.ndarray, " P"]
    stored: dict[bytes, Stored]

    @property
    def arrived(self) -> int:
        """The trainer's step at the newest arrival."""
        return next(reversed(self.stored.values())).arrived

    def latest(self) -> list[Stored]:
        """Only what came with the newest arrival."""
        return [s for s in self.stored.values() if s.arrived == self.arrived]

    def group(self, trajectories: Sequence[Trajectory]) -> Group:
        return Group(self.prompt, self.prompt_tokens, tuple(trajectories))


@dataclass(frozen=True)
class Batch:
    """B groups of K trajectories as tensors; prompts padded on the left to P, responses on the right to T.

    Masks come from lengths, never from token values, because the pad token may be the EOS token.
    """

    prompt_tokens: Int[Tensor, "B P"]
    prompt_mask: Bool[Tensor, "B P"]
    tokens: Int[Tensor, "B K T"]
    mask: Bool[Tensor, "B K T"]
    behavior_logp: Float[Tensor, "B K T"]
    ref_logp: Float[Tensor, "B K T"]
    reward: Float[Tensor, "B K"]
    value: Float[Tensor, "B K T"]
    """NaN where a response was found without rollouts."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def samples(self) -> int:
        """K, the trajectories in each group."""
        return self.tokens.shape[1]

    def chunks(self, token_budget: int) -> Iterator[Batch]:
        """Whole groups, as many at a time as pad to at most `token_budget` tokens, but at least one."""
        order = torch.argsort(
            self.mask.sum(-1).amax(1), stable=True
        ).tolist()  # alike lengths together: less padding
        part: list[int] = []
        for b in order:
            if part and self.cost([*part, b]) > token_budget:
                yield self.groups(part)
                part = []
            part.append(b)
        yield self.groups(part)

    def pieces(self, token_budget: int) -> Iterator[Batch]:
        """This batch cut along K as well, so that each piece pads to at most `token_budget` tokens, if it can."""
        size = max(1, self.samples * token_budget // max(1, self.cost(range(len(self)))))
        for start in range(0, self.samples, size):
            yield self.slice(slice(start, start + size))

    def cost(self, groups: Sequence[int]) -> int:
        """Tokens, padding included, that the policy runs over for these groups."""
        lengths = self.mask[list(groups)].sum(-1)
        prompt = int(self.prompt_mask[list(groups)].sum(-1).max())
        return len(lengths) * self.samples * (prompt + int(lengths.max()))

    def groups(self, index: Sequence[int]) -> Batch:
        """These groups alone, their padding trimmed to what they need."""
        i = torch.as_tensor(list(index))
        p, t = int(self.prompt_mask[i].sum(-1).max()), int(self.mask[i].sum(-1).max())
        return Batch(
            self.prompt_tokens[i, -p:], self.prompt_mask[i, -p:], self.tokens[i, :, :t], self.mask[i, :, :t],
            self.behavior_logp[i, :, :t], self.ref_logp[i, :, :t], self.reward[i], self.value[i, :, :t],
        )  # fmt: skip

    def slice(self, k: slice) -> Batch:
        """The same groups with only the trajectories `k` of each."""
        return replace(
            self, tokens=self.tokens[:, k], mask=self.mask[:, k], behavior_logp=self.behavior_logp[:, k],
            ref_logp=self.ref_logp[:, k], reward=self.reward[:, k], value=self.value[:, k],
        )  # fmt: skip

    def to(self, device: torch.device) -> Batch:
        return Batch(
            *(
                getattr(self, name).to(device, non_blocking=True)
                for name in self.__dataclass_fields__
            )
        )


def collate(groups: Sequence[Group]) -> Batch:
    """Groups of equal size K -> one batch. Padding tokens are 0; masks say which tokens are real."""
    if len({len(g.trajectories) for g in groups}) != 1:
        raise ValueError(
            f"groups of unequal size {sorted({len(g.trajectories) for g in groups})}: every group needs the same K"
        )
    rows = [t for g in groups for t in g.trajectories]
    shape = (len(groups), len(groups[0].trajectories))
    mask = _right([np.ones(len(t.tokens), bool) for t in rows], shape)
    return Batch(
        prompt_tokens=_left([g.prompt_tokens.astype(np.int64) for g in groups]),
        prompt_mask=_left([np.ones(len(g.prompt_tokens), bool) for g in groups]),
        tokens=_right([t.tokens.astype(np.int64) for t in rows], shape),
        mask=mask,
        behavior_logp=_right([t.behavior_logp for t in rows], shape),
        ref_logp=_right([t.ref_logp for t in rows], shape),
        reward=torch.tensor([t.reward for t in rows], dtype=torch.float32).view(shape),
        value=_right(
            [
                np.full(len(t.tokens), np.nan, np.float32) if t.value is None else t.value
                for t in rows
            ],
            shape,
        ),
    )


def _left(rows: Sequence[np.ndarray]) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_side="left")


def _right(rows: Sequence[np.ndarray], shape: tuple[int, int]) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True).view(*shape, -1)

"""Data types of the package, from a prompt to a batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int, Int32, UInt8
from torch import Tensor

from tba.errors import NotFinite
from tba.prompt import Prompt
from tba.weights import lag

GIVEN = 0
SAMPLED = 1
RESTART = 2
"""Marks of response tokens: given; sampled by the policy; given, and first of a new context."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a generation. Temperature 0 is greedy."""

    samples: int  # responses per prompt
    temperature: float
    max_tokens: int
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    """Texts that end a response, besides EOS: see `Completion`."""
    explore: float | None = None
    """Temperature at which tokens are chosen; None: `temperature`, as for their log-probs."""
    top_k: int = 0
    truncated: Literal["keep", "reject"] | float = "keep"
    """How to treat responses cut by the token limit: see `[sampling]`. Engines ignore it."""


@dataclass(frozen=True)
class Turn:
    """A completion to sample: its context, sampling parameters (`samples` is ignored) and seed."""

    context: Int32[np.ndarray, " C"]
    sampling: Sampling
    seed: int
    tell: Callable[[int], None] | None = None
    """Called with each token as it is sampled, by engines that can."""
    schema: str | None = None
    """JSON schema, as JSON, that the completion must follow; for engines with `constrains` only."""


class Response:
    """Properties that completions and trajectories share, computed from their common fields."""

    tokens: Int32[np.ndarray, " T"]
    version: int
    switches: tuple[tuple[int, int], ...]
    marks: UInt8[np.ndarray, " T"] | None

    @property
    def sampled(self) -> Bool[np.ndarray, " T"] | None:
        """The tokens that the policy sampled; None if it sampled all of them."""
        return None if self.marks is None else self.marks == SAMPLED

    @property
    def length(self) -> int:
        """The number of tokens that were sampled."""
        return len(self.tokens) if self.sampled is None else int(self.sampled.sum())

    @property
    def restarts(self) -> tuple[int, ...]:
        """Indices of the given tokens that begin a new context."""
        return () if self.marks is None else tuple(np.flatnonzero(self.marks == RESTART).tolist())

    @property
    def versions(self) -> Int32[np.ndarray, " T"]:
        """The version of the weights at each token; `switches_of` is the inverse."""
        versions = np.full(len(self.tokens), self.version, np.int32)
        for place, version in self.switches:
            versions[place:] = version
        return versions


@dataclass(frozen=True)
class Completion(Response):
    """Tokens of a response, and their log-probs at the sampling temperature.

    If `finished`, the last token is EOS, or the one that completes a stop string in the text of the
    response; it is kept whole, as sampled. `version` is the version of the weights that sampled the
    first token; version v means "after v optimizer steps". `switches` has a pair for each time that
    newer weights took over: the index of the first token that they sampled, and their version.

    A dialogue also has given tokens, which the policy did not sample. `marks` labels the tokens
    (GIVEN, SAMPLED, RESTART), and is None if all were sampled. The log-probs of given tokens are 0.
    A RESTART begins a new context: later tokens do not see the prompt, or anything before it.
    """

    tokens: Int32[np.ndarray, " T"]
    logp: Float32[np.ndarray, " T"]
    finished: bool
    version: int
    switches: tuple[tuple[int, int], ...] = ()
    marks: UInt8[np.ndarray, " T"] | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logp):  # else the buffer would read back wrong numbers
            counts = f"{len(self.tokens)} tokens and {len(self.logp)} log-probs"
            raise ValueError(f"a completion has {counts}; an engine returns one log-prob per token")
        if np.isnan(self.logp).any():
            raise NotFinite(version=int(self.versions[np.isnan(self.logp).argmax()]))

    def rewarded(self, reward: float, ref_logp: Float32[np.ndarray, " T"]) -> "Trajectory":
        """Return the trajectory with this reward and these log-probs under the reference."""
        return Trajectory(
            tokens=self.tokens,
            behavior_logp=self.logp,
            ref_logp=ref_logp,
            reward=reward,
            version=self.version,
            finished=self.finished,
            switches=self.switches,
            marks=self.marks,
        )


@dataclass(frozen=True)
class Trajectory(Response):
    """A completion with its reward, and its log-probs under the sampling policy and the reference.

    For `version`, `switches` and `marks`, see `Completion`. `value` is set for objectives that ask
    for rollouts: at each token, V of the state before its step, see `objectives.ValueRollouts`.
    `count` is the number of identical samples that it represents. `items` has the score of each
    reward function, for people to read; the buffer's checkpoint leaves it out.
    """

    tokens: Int32[np.ndarray, " T"]
    behavior_logp: Float32[np.ndarray, " T"]
    ref_logp: Float32[np.ndarray, " T"]
    reward: float
    version: int
    finished: bool
    value: Float32[np.ndarray, " T"] | None = None
    switches: tuple[tuple[int, int], ...] = ()
    marks: UInt8[np.ndarray, " T"] | None = None
    count: int = 1
    items: Mapping[str, float] = field(default_factory=dict, compare=False)

    def lags(self, step: int) -> Int32[np.ndarray, " N"]:
        """Return the lag of each sampled token when the trainer has done `step` steps."""
        return lag(step, self.versions if self.sampled is None else self.versions[self.sampled])


def switches_of(versions: Int32[np.ndarray, " T"]) -> tuple[tuple[int, int], ...]:
    """Return the indices where the version changes, with the new version: see `Completion`."""
    places = np.flatnonzero(np.diff(versions)) + 1
    return tuple(zip(places.tolist(), versions[places].tolist(), strict=True))


def marks_of(response: Response) -> UInt8[np.ndarray, " T"]:
    """Return the marks of a response, even if all of its tokens were sampled."""
    if response.marks is None:
        return np.full(len(response.tokens), SAMPLED, np.uint8)
    return response.marks


@dataclass(frozen=True)
class Group:
    """Trajectories of one prompt: S from a search, or K drawn for a batch.

    The buffer keeps trajectories by prompt. A batch draws K of those it holds for a prompt, which
    may come from several searches, and a loss sees the K together.

    `reference` is the version of the reference's weights; 0 is the initial model.
    """

    prompt: Prompt
    prompt_tokens: Int32[np.ndarray, " P"]
    trajectories: tuple[Trajectory, ...]
    reference: int = 0


AnyBatch = TypeVar("AnyBatch", bound="TokenBatch")


@dataclass(frozen=True)
class TokenBatch:
    """B groups of K responses as token tensors: the input of a policy.

    Prompts are padded on the left to P, responses on the right to T. `mask` selects the tokens that
    the policy sampled; sums run over these. `restarts` selects the given tokens that begin a new
    context. Masks are never derived from token values: the pad token may be the EOS token.
    """

    prompt_tokens: Int[Tensor, "B P"]
    prompt_mask: Bool[Tensor, "B P"]
    tokens: Int[Tensor, "B K T"]
    mask: Bool[Tensor, "B K T"]
    restarts: Bool[Tensor, "B K T"]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def samples(self) -> int:
        """K, the number of responses in each group."""
        return self.tokens.shape[1]

    @cached_property
    def present(self) -> Bool[Tensor, "B K T"]:
        """The tokens of the responses, sampled or given: all up to the last sampled one."""
        return self.mask.flip(-1).cumsum(-1).flip(-1).bool()

    def groups(self: AnyBatch, index: Sequence[int]) -> AnyBatch:
        """Return these groups, with padding trimmed to their lengths."""
        chosen = {name: tensor[list(index)] for name, tensor in self.tensors().items()}
        prompt = int(chosen["prompt_mask"].sum(-1).max())
        response = int(self.present[list(index)].sum(-1).max())
        for name, tensor in chosen.items():
            if name.startswith("prompt_"):
                chosen[name] = tensor[:, -prompt:]
            elif tensor.ndim == 3:
                chosen[name] = tensor[..., :response]
        return replace(self, **chosen)

    def slice(self: AnyBatch, k: slice) -> AnyBatch:
        """Return the same groups with only these responses in each."""
        tensors = self.tensors().items()
        return replace(self, **{n: x[:, k] for n, x in tensors if not n.startswith("prompt_")})

    def pieces(self: AnyBatch, token_budget: int, share_prompt: bool) -> Iterator[AnyBatch]:
        """Yield pieces along K, each of at most `token_budget` tokens if possible.

        Without `share_prompt`, each response has its own copy of the prompt.
        """
        prompts = len(self) * int(self.prompt_mask.sum(-1).max())
        again = prompts if not share_prompt or self.restarts.any() else 0
        start = 0
        tokens = 0
        for k, added in enumerate((self.present.sum((0, 2)) + again).tolist()):
            if k > start and prompts + tokens + added > token_budget:
                yield self.slice(slice(start, k))
                start = k
                tokens = 0
            tokens += added
        yield self.slice(slice(start, self.samples))

    def to(self: AnyBatch, device: torch.device) -> AnyBatch:
        moved = {n: x.to(device, non_blocking=True) for n, x in self.tensors().items()}
        return replace(self, **moved)

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Batch(TokenBatch):
    """B groups of K trajectories as tensors: the input of an objective."""

    behavior_logp: Float[Tensor, "B K T"]
    ref_logp: Float[Tensor, "B K T"]
    reward: Float[Tensor, "B K"]  # float64: rewards may differ only in late decimals
    value: Float[Tensor, "B K T"]  # NaN for a trajectory without value estimates


def collate_tokens(
    prompts: Sequence[np.ndarray],
    responses: Sequence[Sequence[np.ndarray]],
    marks: Sequence[Sequence[np.ndarray]] | None = None,
) -> TokenBatch:
    """Pad B prompts and K responses to each. Padding tokens are 0; masks identify them.

    `marks` has the marks of each response's tokens; without it, all were sampled.
    """
    sizes = {len(group) for group in responses}
    if len(sizes) != 1:
        raise ValueError(f"groups of unequal size {sorted(sizes)}: every group needs the same K")
    shape = (len(responses), sizes.pop(), -1)
    rows = [tokens for group in responses for tokens in group]
    every = [np.full(len(tokens), SAMPLED, np.uint8) for tokens in rows]
    if marks is not None:
        every = [own for group in marks for own in group]
    padded = _pad(every).view(shape)
    return TokenBatch(
        prompt_tokens=_pad(prompts, "left").long(),
        prompt_mask=_pad([np.ones(len(tokens), bool) for tokens in prompts], "left"),
        tokens=_pad(rows).long().view(shape),
        mask=padded == SAMPLED,
        restarts=padded == RESTART,
    )


def collate(groups: Sequence[Group]) -> Batch:
    """Turn groups of equal size K into one batch."""
    prompts = [g.prompt_tokens for g in groups]
    responses = [[t.tokens for t in g.trajectories] for g in groups]
    marks = [[marks_of(t) for t in g.trajectories] for g in groups]
    tokens = collate_tokens(prompts, responses, marks)
    rows = [t for g in groups for t in g.trajectories]
    values = [np.full_like(t.ref_logp, np.nan) if t.value is None else t.value for t in rows]
    shape = tokens.mask.shape
    return Batch(
        **tokens.tensors(),
        behavior_logp=_pad([t.behavior_logp for t in rows]).view(shape),
        ref_logp=_pad([t.ref_logp for t in rows]).view(shape),
        reward=torch.tensor([t.reward for t in rows], dtype=torch.float64).view(shape[:2]),
        value=_pad(values).view(shape),
    )


def _pad(rows: Sequence[np.ndarray], side: Literal["left", "right"] = "right") -> Tensor:
    lengths = np.array([len(row) for row in rows])[:, None]
    column = np.arange(lengths.max())
    real = column < lengths if side == "right" else column >= len(column) - lengths
    padded = np.zeros(real.shape, rows[0].dtype)
    padded[real] = np.concatenate(rows)
    return torch.from_numpy(padded)


def positions(mask: Tensor) -> Tensor:
    """Return the position of each token, counted from the first real one; padding gets 0."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)

"""A Hugging Face causal LM as a policy: the only place where logits become log-probabilities."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tba.learn.layouts import Contexts, Layout, PackedRows, Plan, cut, pack, plan_of
from tba.models import NOBODY
from tba.models.forward import (
    attention_mask,
    check_logits,
    has_plain_logits,
    logits_of,
    packing,
    select,
    states_at_once,
    takes_masks,
)
from tba.objectives import Head
from tba.types import TokenBatch, positions

SLOPES_AT_ONCE = 2**26
"""Elements in a block of gradients of the logits; each block adds one matmul for the weight."""

ROWS_AT_ONCE = 2**13
"""Rows of the weight's gradient that are computed at once."""


class PolicyOutput(NamedTuple):
    """Output of a policy for a batch: a tuple, because module hooks look for tensors in tuples."""

    logp: Float[Tensor, "B K T"]
    """Log-probabilities of the sampled tokens; 0 elsewhere."""
    entropy: Float[Tensor, "B K T"]
    """Detached; 0 elsewhere."""
    head: Tensor | None
    """Output of the objective's head: [B K T] or [B]; None without a head."""
    tokens: int
    """Tokens that the model processed."""
    padding: int
    """Padding among these tokens."""

    def differentiable(self) -> list[Tensor]:
        """Return the tensors that a loss depends on."""
        return [self.logp] if self.head is None else [self.logp, self.head]

    @staticmethod
    def concatenate(pieces: "Sequence[PolicyOutput]") -> "PolicyOutput":
        """Join pieces along K. A head on the prompt has the same output for each of them."""
        head = pieces[0].head
        if head is not None and head.ndim > 1:
            head = torch.cat([each.head for each in pieces if each.head is not None], 1)
        return PolicyOutput(
            logp=torch.cat([each.logp for each in pieces], 1),
            entropy=torch.cat([each.entropy for each in pieces], 1),
            head=head,
            tokens=sum(each.tokens for each in pieces),
            padding=sum(each.padding for each in pieces),
        )


class HiddenStates(NamedTuple):
    """Hidden states of the prompts, and the states that predict sampled response tokens."""

    prompt: Float[Tensor, "B P D"]
    states: Float[Tensor, "M D"]
    places: Int[Tensor, " M"]
    """Places of the predicted tokens among all B K T, on the CPU."""


class Policy(nn.Module):
    """A causal LM and the objective's head, with log-probabilities at one sampling temperature.

    Everything is computed inside `forward`, so that hooks, sharding and adapters take effect.
    """

    def __init__(
        self,
        model: Any,
        temperature: float,
        autocast: bool = False,
        share_prompt: bool = True,
        head: Head | None = None,
    ):
        super().__init__()
        self.model = model
        self.head = head
        self.temperature = temperature
        self.autocast = autocast
        self.share_prompt = share_prompt
        self.readout = None
        if head is not None:  # starts at 0, and draws no random numbers
            width = model.get_output_embeddings().weight.shape[1]
            self.readout = nn.utils.skip_init(nn.Linear, width, 1, device=self.device)
            nn.init.zeros_(self.readout.weight)
            nn.init.zeros_(self.readout.bias)
        if self.device.type != "meta":  # else after the weights are loaded
            with self.precision():
                check_logits(self.model)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def logp(self, batch: TokenBatch, temperature: float | None = None) -> Float[Tensor, "B K T"]:
        output: PolicyOutput = self(batch, temperature=temperature)
        return output.logp

    def forward(
        self,
        batch: TokenBatch,
        layout: Layout | None = None,
        passes: int = 0,
        temperature: float | None = None,
    ) -> PolicyOutput:
        """Return log-probability and entropy at each sampled token, and the head's output.

        Equal responses of a group run once. Indices are computed from the batch on the CPU, so that
        no size is read from the GPU. All layouts give the same result; the default is the fastest
        that `share_prompt` allows. The default temperature is the policy's. The cached layout runs
        at least `passes` passes over responses.
        """
        plan = plan_of(batch, self.share_prompt, packing(self.model), layout, passes)
        with self.precision():
            hidden = self._cached(plan) if plan.layout == "cached" else self._uncached(plan)
            tokens = self._here(batch.tokens.flatten()[hidden.places])
            places = self._here(hidden.places)
            logp, entropy = token_logp(
                self.model, hidden.states, tokens, temperature or self.temperature
            )
        read = None
        if self.head is not None and self.readout is not None:
            scale = hidden.states.shape[-1] ** 0.5  # so that one learning rate fits any width
            if self.head.on == "response":
                numbers = self.readout(hidden.states.float() / scale).squeeze(-1)
                read = _by_token(numbers, places, plan)
            else:
                mask = self._here(batch.prompt_mask[..., None])
                mean = (hidden.prompt.detach().float() * mask).sum(1) / mask.sum(1)
                read = self.readout(mean / scale).squeeze(-1)
        return PolicyOutput(
            logp=_by_token(logp, places, plan),
            entropy=_by_token(entropy, places, plan),
            head=read,
            tokens=plan.tokens,
            padding=plan.padding,
        )

    def _here(self, values: Tensor) -> Tensor:
        """Copy values from the CPU to the device; CUDA may wait, as they are in pageable memory."""
        return values.to(self.device, non_blocking=True)

    def precision(self) -> torch.autocast:
        """Return the policy's autocast context: bf16, or disabled."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)

    def _mask(self, real: Bool[Tensor, "N C"], queries: int) -> Any:
        """Return the attention mask for the last tokens of rows with real tokens and padding."""
        if not takes_masks(self.model):
            return self._here(real.long())
        if queries == real.shape[1] and real.all():
            return None  # causal; with a mask, the host would wait to learn that rows are whole
        owner = self._here(torch.where(real, 0, NOBODY))
        return attention_mask(self.model, owner[:, -queries:], owner)

    def _uncached(self, plan: Plan) -> HiddenStates:
        """Run a row for each prompt with all of its responses, or for each context alone."""
        batch = plan.batch
        rows: PackedRows | Contexts
        if plan.layout == "packed":
            rows = packed = pack(batch)
            owner = self._here(packed.owner)
            mask = attention_mask(self.model, owner, owner)
            position = self._here(packed.position)
        else:
            rows = contexts = cut(batch)
            mask = self._mask(contexts.real, contexts.real.shape[1])
            position = self._here(positions(contexts.real))
        output = self.model.base_model(
            input_ids=self._here(rows.ids),
            attention_mask=mask,
            position_ids=position,
            use_cache=False,
        )
        states = output.last_hidden_state
        row, column = self._here(rows.predicting)
        prompt = states[: len(batch), : batch.prompt_mask.shape[1]]
        return HiddenStates(prompt, states[row, column], rows.places)

    def _cached(self, plan: Plan) -> HiddenStates:
        """Run each prompt once, then responses of similar length together, with its cache."""
        batch = plan.batch
        k, t = batch.tokens.shape[1:]
        prompt = self.model.base_model(
            input_ids=self._here(batch.prompt_tokens),
            attention_mask=self._mask(batch.prompt_mask, batch.prompt_mask.shape[1]),
            position_ids=self._here(positions(batch.prompt_mask)),
            use_cache=True,
        )
        first, of = batch.mask[..., 0].nonzero(as_tuple=True)
        states = [prompt.last_hidden_state[self._here(first), -1]]
        places = [(first * k + of) * t]
        for rows in plan.passes:
            # an empty pass runs one token, because other ranks run a pass: no state is kept
            chosen = torch.tensor(rows or [0])
            group = chosen // k
            present = batch.present.flatten(0, 1)[chosen]
            length = int(present.sum(-1).max()) if rows else 2
            prompt_mask = batch.prompt_mask[group]
            visible = torch.cat([prompt_mask, present[:, : length - 1]], 1)
            position = prompt_mask.sum(1)[:, None] + torch.arange(length - 1)
            output = self.model.base_model(
                input_ids=self._here(batch.tokens.flatten(0, 1)[chosen, : length - 1]),
                attention_mask=self._mask(visible, length - 1),
                position_ids=self._here(position),
                past_key_values=select(prompt.past_key_values, self._here(group)),
                use_cache=True,
            )
            sampled = batch.mask.flatten(0, 1)[chosen, 1:length]
            row, column = (sampled if rows else sampled[:0]).nonzero(as_tuple=True)
            states.append(output.last_hidden_state[self._here(row), self._here(column)])
            places.append(chosen[row] * t + column + 1)
        return HiddenStates(prompt.last_hidden_state, torch.cat(states), torch.cat(places))


def _by_token(values: Float[Tensor, " M"], places: Tensor, plan: Plan) -> Float[Tensor, "B K T"]:
    """Return the values at their places, 0 elsewhere; equal responses have the first one's."""
    mask = plan.batch.mask
    zeros = torch.zeros(mask.numel(), device=values.device)
    padded = zeros.index_put((places,), values).view(mask.shape)
    alike = plan.alike.to(values.device, non_blocking=True)
    return padded.gather(1, alike[..., None].expand_as(padded))


def token_logp(
    model: Any, hidden: Float[Tensor, "M D"], tokens: Int[Tensor, " M"], temperature: float
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
    """Return the log-probability of each token given its state, and the entropy.

    The LM head runs in chunks; if there are several, they are recomputed in the backward pass.
    """
    size = states_at_once(model)
    head = model.get_output_embeddings()
    hooks = [*head._forward_hooks, *head._forward_pre_hooks]
    one_product = type(head) is nn.Linear and head.bias is None and not hooks  # and no adapter
    if one_product and has_plain_logits(model):
        return TokenLogp.apply(hidden, head.weight, tokens, temperature, size)
    if len(hidden) <= size:
        return _chunk_logp(model, hidden, tokens, temperature)
    chunks = []
    for states, targets in zip(hidden.split(size), tokens.split(size), strict=True):
        chunks.append(
            checkpoint(_chunk_logp, model, states, targets, temperature, use_reentrant=False)
        )
    logps, entropies = zip(*chunks, strict=True)
    return torch.cat(logps), torch.cat(entropies)


def _chunk_logp(
    model: Any, hidden: Tensor, tokens: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Compute `token_logp` for one chunk and any head."""
    every = torch.log_softmax(logits_of(model, hidden).float() / temperature, -1)
    entropy = torch.special.entr(every.detach().exp()).sum(-1)
    return every.gather(1, tokens[:, None]).squeeze(1), entropy


class TokenLogp(torch.autograd.Function):
    """Log-probability of each token under softmax(h W' / temperature), and the entropy.

    The logits of a chunk are dropped and recomputed in the backward pass. Unlike with activation
    checkpointing, only one matmul and one softmax are repeated, the weight's gradient is one matmul
    for several chunks, and its dtype is converted once. The entropy has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "M D"],
        weight: Float[Tensor, "V D"],
        tokens: Int[Tensor, " M"],
        temperature: float,
        size: int,
    ) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
        """Process `size` tokens at a time, with matmuls in the dtype of autocast."""
        kind = hidden.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else weight.dtype
        states = (hidden / temperature).to(dtype)
        matrix = weight.to(dtype)
        logps = []
        entropies = []
        for h, own in zip(states.split(size), tokens.split(size), strict=True):
            every = torch.log_softmax(h @ matrix.T, -1, torch.float32)
            logps.append(every.gather(1, own[:, None]))
            entropies.append(-every.exp().mul_(every).sum(-1))
        logp = torch.cat(logps)
        entropy = torch.cat(entropies)
        ctx.save_for_backward(states, matrix, tokens, logp)
        ctx.temperature = temperature
        ctx.size = size
        ctx.dtypes = (hidden.dtype, weight.dtype)
        ctx.mark_non_differentiable(entropy)
        return logp.squeeze(1), entropy

    @staticmethod
    def backward(ctx: Any, slope: Float[Tensor, " M"], _: Any) -> tuple[Tensor | None, ...]:
        """Return gradients by the chain rule: d logp / d logits is onehot - p for each token."""
        states, matrix, tokens, logp = ctx.saved_tensors
        d_hidden = torch.empty_like(states)
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = torch.zeros_like(matrix, dtype=torch.float32)  # bf16 would lose small terms
        weighted = (states * -slope[:, None]).to(states.dtype)
        size = ctx.size
        block = size * max(1, SLOPES_AT_ONCE // (len(matrix) * size))
        memory = matrix.new_empty(min(block, len(states)), len(matrix))
        for start in range(0, len(states), block):
            here = slice(start, start + block)
            slopes = memory[: len(states[here])]
            parts = slopes, states[here], d_hidden[here], tokens[here, None], logp[here].expm1()
            chunks = [part.split(size) for part in parts]
            for p, own, d_own, token, at_token in zip(*chunks, strict=True):
                torch.softmax(own @ matrix.T, -1, out=p)
                # p - 1 at the token itself, where a rounded p may be 1
                p.scatter_(1, token, at_token.to(p.dtype))
                torch.mm(p, matrix, out=d_own)
            if d_weight is not None:
                rows = d_weight.split(ROWS_AT_ONCE), slopes.split(ROWS_AT_ONCE, 1)
                for row, column in zip(*rows, strict=True):
                    row += column.T @ weighted[here]
        if d_weight is not None:
            d_weight = d_weight.to(ctx.dtypes[1])
        d_hidden = d_hidden * (-slope / ctx.temperature)[:, None]
        return d_hidden.to(ctx.dtypes[0]), d_weight, None, None, None

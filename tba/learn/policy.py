"""A Hugging Face causal LM as a policy: the one place where logits become log-probabilities."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tba.config.tables import LOGP_NOISE_BF16, LOGP_NOISE_FP32
from tba.learn.head import token_logp
from tba.learn.plan import Layout, Plan, cut, pack, plan_of
from tba.models.cache import attention_mask, logits_of, positions, select, takes_masks
from tba.objectives import Head
from tba.types import TokenBatch, collate_tokens

SHORT = 16
"""Tokens of a short response."""

PROMPT = 11
SHORTER = 7
SAMPLES = 11
RESPONSE = {"cpu": 8, "cuda": 128}
"""Tokens of the two prompts of a warm-up, responses to each, and their tokens."""


class Output(NamedTuple):
    """Results of a policy on a batch: a tuple, because hooks on modules look for tensors there."""

    logp: Float[Tensor, "B K T"]
    """Log-probabilities of the tokens that were sampled; 0 elsewhere."""
    entropy: Float[Tensor, "B K T"]
    """Detached; 0 elsewhere."""
    head: Tensor | None
    """Output of the objective's head, if it has one: [B K T] or [B]."""
    tokens: int
    """Tokens that the model ran over."""
    padding: int
    """Tokens of these that were padding."""

    def differentiable(self) -> list[Tensor]:
        """Return what a loss depends on."""
        return [self.logp] if self.head is None else [self.logp, self.head]


class Hidden(NamedTuple):
    """Hidden states of the prompts, and those that predict the sampled tokens of responses."""

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
        if head is not None:  # it starts at 0, without using the random state
            width = model.config.get_text_config().hidden_size
            self.readout = nn.utils.skip_init(nn.Linear, width, 1, device=self.device)
            nn.init.zeros_(self.readout.weight)
            nn.init.zeros_(self.readout.bias)
        if self.device.type != "meta":  # else when the model has numbers
            with self._precision():
                self._refuse_processed_logits()

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def logp(self, batch: TokenBatch, temperature: float | None = None) -> Float[Tensor, "B K T"]:
        output: Output = self(batch, temperature=temperature)
        return output.logp

    @torch.no_grad()
    def check_lengths(self, prompts: Sequence[np.ndarray], max_tokens: int) -> None:
        """Raise ValueError unless log-probs are those of single sequences without padding.

        The prompts are the shortest and the longest of a run, so that positions that depend on the
        length of a sequence, or of others in its batch, show here.
        """
        limit = LOGP_NOISE_BF16 if self.autocast else LOGP_NOISE_FP32
        ends = [prompt[-SHORT:] for prompt in prompts]  # short rows may be packed
        for own, tokens in ((ends, min(SHORT, max_tokens)), (prompts, max_tokens)):
            gap = self._gap(own, tokens)
            if not gap <= limit:
                raise ValueError(
                    f"policy.model: log-probs in a batch differ by {gap:.3g} nats a token from"
                    f" those of each sequence alone, with prompts of {len(own[0])} and"
                    f" {len(own[1])} tokens and up to {tokens} of response: they depend on the"
                    " whole batch; set policy.share_prompt=false, use another model, or lower"
                    " sampling.max_tokens"
                )
        with self._precision():  # ranks have no numbers before
            self._refuse_processed_logits()

    def _gap(self, prompts: Sequence[np.ndarray], tokens: int) -> float:
        """Return the mean difference, the larger of two, between responses in a batch and alone."""
        longer = np.resize(np.concatenate(prompts), tokens)
        responses = [longer, longer[: min(SHORT, (tokens + 1) // 2)]]
        logp = self.logp(collate_tokens(prompts, [responses, responses[::-1]]))[:, 1]
        gaps = []
        for prompt, response, row in zip(prompts, responses[::-1], logp, strict=True):
            alone = self._alone(prompt, response)
            gaps.append(float((row[: len(alone)] - alone).abs().mean()))
        return float(np.max(gaps))  # NaN if one is

    def _alone(self, prompt: np.ndarray, response: np.ndarray) -> Float[Tensor, " T"]:
        """Return the log-probs of a response as transformers computes them for one sequence."""
        ids = torch.from_numpy(np.concatenate([prompt, response])).long().to(self.device)
        with self._precision():
            output = self.model.base_model(input_ids=ids[None], use_cache=False)
            states = output.last_hidden_state[0, len(prompt) - 1 : -1]
            return token_logp(self.model, states, ids[len(prompt) :], self.temperature)[0]

    def forward(
        self,
        batch: TokenBatch,
        layout: Layout | None = None,
        temperature: float | None = None,
        passes: int = 0,
    ) -> Output:
        """Return log-probability and entropy at each sampled token, and the head's output.

        Responses of a group that are alike run once. Indices come from the batch on the CPU, so
        that nothing waits for the GPU. All layouts give the same; by default, it is the fastest
        that `share_prompt` allows. The temperature is the policy's unless another one is given. In
        the cached layout, there are at least so many `passes` over responses.
        """
        plan = plan_of(batch, self.share_prompt, takes_masks(self.model), layout, passes)
        runs = {
            "packed": self._packed,
            "cached": self._cached,
            "plain": self._plain,
            "cut": self._cut,
        }
        with self._precision():
            hidden = runs[plan.layout](plan)
            tokens = batch.tokens.flatten()[hidden.places].to(self.device)
            places = hidden.places.to(self.device)
            logp, entropy = token_logp(
                self.model, hidden.states, tokens, temperature or self.temperature
            )
        read = self._read(hidden, batch, places)
        if read is not None and read.ndim == 3:
            read = _of_alike(read, plan.alike)
        return Output(
            logp=_of_alike(_padded(logp, places, batch), plan.alike),
            entropy=_of_alike(_padded(entropy, places, batch), plan.alike),
            head=read,
            tokens=plan.tokens,
            padding=plan.padding,
        )

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)

    def _read(self, hidden: Hidden, batch: TokenBatch, places: Tensor) -> Tensor | None:
        """Return the head's output. Its input is divided by sqrt(D): the same rate at any width."""
        if self.head is None or self.readout is None:
            return None
        scale = hidden.states.shape[-1] ** 0.5
        if self.head.on == "response":
            return _padded(self.readout(hidden.states.float() / scale).squeeze(-1), places, batch)
        mask = batch.prompt_mask[..., None].to(self.device)
        mean = (hidden.prompt.detach().float() * mask).sum(1) / mask.sum(1)
        return self.readout(mean / scale).squeeze(-1)

    def _packed(self, plan: Plan) -> Hidden:
        """Run each prompt and all of its responses as one row."""
        batch = plan.batch
        packed = pack(batch)
        owner = packed.owner.to(self.device)
        output = self.model.base_model(
            input_ids=packed.ids.to(self.device),
            attention_mask=attention_mask(self.model, owner, owner),
            position_ids=packed.position.to(self.device),
            use_cache=False,
        )
        states = output.last_hidden_state
        row, column = packed.predicting.to(self.device)
        return Hidden(states[:, : batch.prompt_mask.shape[1]], states[row, column], packed.places)

    def _cached(self, plan: Plan) -> Hidden:
        """Run each prompt once, then responses of similar length together."""
        batch = plan.batch
        k, t = batch.tokens.shape[1:]
        moved = batch.to(self.device)
        prompt = self.model.base_model(
            input_ids=moved.prompt_tokens,
            attention_mask=moved.prompt_mask.long(),
            position_ids=positions(moved.prompt_mask),
            use_cache=True,
        )
        first, of = batch.mask[..., 0].nonzero(as_tuple=True)
        states = [prompt.last_hidden_state[first.to(self.device), -1]]
        places = [(first * k + of) * t]
        for rows in plan.passes:
            following, own = self._following(batch, rows, prompt.past_key_values)
            states.append(following)
            places.append(own)
        return Hidden(prompt.last_hidden_state, torch.cat(states), torch.cat(places))

    def _following(
        self, batch: TokenBatch, rows: Sequence[int], cache: Any
    ) -> tuple[Float[Tensor, "M D"], Int[Tensor, " M"]]:
        """Return the states before these responses' sampled tokens, and the places of those.

        Without responses, one token runs, and no state is returned.
        """
        t = batch.tokens.shape[2]
        chosen = torch.tensor(rows or [0])
        group = chosen // batch.samples
        present = batch.present.flatten(0, 1)[chosen]
        length = int(present.sum(-1).max()) if rows else 2
        prompt_mask = batch.prompt_mask[group]
        visible = torch.cat([prompt_mask, present[:, : length - 1]], 1)
        position = prompt_mask.sum(1)[:, None] + torch.arange(length - 1)
        output = self.model.base_model(
            input_ids=batch.tokens.flatten(0, 1)[chosen, : length - 1].to(self.device),
            attention_mask=visible.long().to(self.device),
            position_ids=position.to(self.device),
            past_key_values=select(cache, group.to(self.device)),
            use_cache=True,
        )
        sampled = batch.mask.flatten(0, 1)[chosen, 1:length]
        row, column = (sampled if rows else sampled[:0]).nonzero(as_tuple=True)
        states = output.last_hidden_state[row.to(self.device), column.to(self.device)]
        return states, chosen[row] * t + column + 1

    def _plain(self, plan: Plan) -> Hidden:
        """Run prompt and response together, each prompt K times: for models with another cache."""
        batch = plan.batch
        k, t = batch.tokens.shape[1:]
        prompts = batch.prompt_tokens.repeat_interleave(k, 0)
        prompt_mask = batch.prompt_mask.repeat_interleave(k, 0)
        visible = torch.cat([prompt_mask, batch.present.flatten(0, 1)], 1).to(self.device)
        output = self.model.base_model(
            input_ids=torch.cat([prompts, batch.tokens.flatten(0, 1)], 1).to(self.device),
            attention_mask=visible.long(),
            position_ids=positions(visible),
            use_cache=False,
        )
        states = output.last_hidden_state
        places = batch.mask.flatten().nonzero().squeeze(1)
        predicting = states[:, -t - 1 : -1].flatten(0, 1)[places.to(self.device)]
        return Hidden(states[::k, :-t], predicting, places)

    def _cut(self, plan: Plan) -> Hidden:
        """Run each context of a response as a row of its own, and the prompts as rows."""
        batch = plan.batch
        contexts = cut(batch)
        real = contexts.real.to(self.device)
        output = self.model.base_model(
            input_ids=contexts.ids.to(self.device),
            attention_mask=real.long(),
            position_ids=positions(real),
            use_cache=False,
        )
        states = output.last_hidden_state
        row, column = contexts.predicting.to(self.device)
        prompt = states[: len(batch), : batch.prompt_mask.shape[1]]
        return Hidden(prompt, states[row, column], contexts.places)

    @torch.no_grad()
    def _refuse_processed_logits(self) -> None:
        """Raise ValueError if the model changes its logits in a way that `logits_of` does not know.

        The head's outputs are enlarged, so that a cap shows that small ones would hardly reach.
        """
        # Token 0 is left out: it may be a pad token with an embedding of zeros.
        vocabulary = self.model.config.get_text_config().vocab_size
        ids = torch.arange(1, min(5, vocabulary), device=self.device)[None]
        try:
            hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        except Exception as error:  # sizes in a config.json may not fit each other
            raise ValueError(
                f"policy.model: {type(self.model).__name__} cannot run with this config: {error}"
            ) from error
        head = self.model.get_output_embeddings()
        enlarged = head.register_forward_hook(lambda head, inputs, output: output * 100)
        plain = logits_of(self.model, hidden).float()
        sampled = self.model(input_ids=ids, use_cache=False).logits.float()
        enlarged.remove()
        if not plain.isfinite().all():
            raise ValueError(
                "policy.model: its logits are not finite, so its weights hold NaN or inf; use"
                " another copy of the model"
            )
        if not torch.allclose(plain, sampled, atol=1e-4, rtol=1e-3):
            raise ValueError(
                f"{type(self.model).__name__} changes its logits after the head in a way that is"
                " not supported; use another model"
            )


def _of_alike(values: Float[Tensor, "B K T"], alike: Int[Tensor, "B K"]) -> Float[Tensor, "B K T"]:
    """Return for each response the values of the first equal one."""
    index = alike.to(values.device)[..., None].expand_as(values)
    return values.gather(1, index)


def _padded(values: Float[Tensor, " M"], places: Tensor, batch: TokenBatch) -> Tensor:
    """Return the values at their places in [B K T], and 0 elsewhere."""
    zeros = torch.zeros(batch.mask.shape, device=values.device)
    return zeros.index_put(torch.unravel_index(places, batch.mask.shape), values)


def warm_up(policy: Policy, context: int) -> None:
    """Compile all programs of a policy's layers; ValueError if they cannot be compiled.

    A program adds up numbers in an order that depends on the sizes it was compiled for, and a
    resumed run would meet others first. Therefore the sizes are always the same, and no program is
    added later: what none of them covers, such as a pass over a single prompt, runs without.
    """
    layouts: tuple[Layout, ...] = ("packed", "cached") if takes_masks(policy.model) else ("cached",)
    torch.compiler.set_stance("default")
    shapes: Any = torch.fx.experimental._config
    equal_by_chance = shapes.patch(use_duck_shape=False)  # sizes that are stay apart
    try:
        with torch._dynamo.config.patch(recompile_limit=64), equal_by_chance:
            for shorter in (PROMPT, SHORTER):  # without padding, some attention takes no mask
                for layout in layouts if policy.share_prompt else ("plain",):
                    _compare_compiled(policy, _warm_up_batch(policy, context, shorter), layout)
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"trainer.compile = true: {type(policy.model).__name__} cannot be compiled ({reason});"
            " set trainer.compile=false"
        ) from error
    torch.compiler.set_stance("eager_on_recompile")
    policy.zero_grad(set_to_none=True)


def _compare_compiled(policy: Policy, batch: TokenBatch, layout: Layout) -> None:
    """Run forward and back; RuntimeError if log-probs differ from those without compilation."""
    compiled = policy(batch, layout).logp
    compiled.sum().backward()
    with torch.no_grad():  # layers are compiled for passes with gradients only
        gap = float((policy(batch, layout).logp - compiled).abs().sum() / batch.mask.sum())
    if not gap <= (LOGP_NOISE_BF16 if policy.autocast else LOGP_NOISE_FP32):
        raise RuntimeError(f"log-probs differ by {gap:.3g} nats on average")


def _warm_up_batch(policy: Policy, context: int, shorter: int) -> TokenBatch:
    """Return random responses to two prompts, always the same."""
    vocabulary = policy.model.config.get_text_config().vocab_size
    tokens = min(RESPONSE[policy.device.type], context - PROMPT)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(vocabulary, size=n, dtype=np.int32) for n in (PROMPT, shorter)]
    responses = rng.integers(vocabulary, size=(2, SAMPLES, tokens), dtype=np.int32)
    return collate_tokens(prompts, [list(group) for group in responses])

"""Generation by Hugging Face transformers: any causal LM with attention, no server, any machine."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice, product
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tba.config.schema import Config
from tba.config.tables import Positive
from tba.engines import Engine
from tba.engines._choice import StopStrings, choose_tokens
from tba.engines._lock import SharedLock
from tba.models import EVERYONE, NOBODY
from tba.models.forward import (
    attention_mask,
    logits_of,
    states_at_once,
    takes_masks,
)
from tba.models.lora import load_placed
from tba.types import Completion, Sampling, Turn, positions
from tba.weights import Weights, load_weights

DROP = 1 / 8
"""Share of finished responses at which they are dropped from the batch, which costs a copy."""
MOST_STOPS = 8
"""Sets of stop strings whose tables are kept: programs alternate between few."""
IDLE = -3
"""A slot without a response."""
SHARED = 16
"""Maximum tokens of all responses that share a prompt, as a multiple of the prompt's."""


@dataclass
class Transformers(Engine):
    """Generates up to `batch_size` responses at once; each prompt runs once for all its samples.

    Each sample has its own random numbers, which depend on the seed and on the places of its prompt
    and itself in the call, but not on the batch. `dtype` auto is bf16 where that is faster (see
    `policy.autocast`), and fp32 elsewhere. Calls from several threads take turns, batch by batch;
    `load_weights` goes first when a batch ends. With `policy.lora`, the model also computes the
    reference, in the trainer's precision; `dtype` must be auto.
    """

    longest_block: ClassVar[int] = 0
    batch_size: Positive = 256
    """Maximum number of responses to generate at once."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """auto: bf16 where that is faster (see `policy.autocast`), else fp32."""
    version: int = field(default=0, init=False)

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise ValueError if `dtype` is set with LoRA."""
        dtype = config.engine.options["dtype"]
        if config.policy.lora is not None and dtype != "auto":
            raise ValueError(
                f"engine.dtype = {dtype!r}: with policy.lora the engine shares the reference's"
                " model; set policy.autocast=bf16 or off instead, and remove engine.dtype"
            )

    def __post_init__(self) -> None:
        bf16 = self.bf16 if self.dtype == "auto" else self.dtype == "bf16"
        dtype = torch.bfloat16 if bf16 else torch.float32
        self._autocast = bf16 and self.policy.lora is not None
        policy = self.policy
        if policy.attention == "flex":  # its masks would change with every token
            policy = policy.model_copy(update={"attention": "sdpa"})
        self.model = load_placed(policy, self.device, bf16, dtype)
        # one batch at a time; taken before `_weights`, so that waiting does not hold up an update
        self._batches = threading.Lock()
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self._weights = SharedLock()  # shared by a running batch, exclusive for `load_weights`

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        completions: list[list[Completion]] = [[] for _ in prompts]
        at_once = max(1, self.batch_size // sampling.samples)
        each = min(sampling.samples, self.batch_size)
        shape = (sampling.samples, sampling.max_tokens)
        # prompts of similar length together: less padding
        order = np.argsort([len(prompt) for prompt in prompts], kind="stable").tolist()
        batches = product(range(0, len(order), at_once), range(0, sampling.samples, each))
        for first, start in batches:
            places = order[first : first + at_once]
            uniform = [random_numbers([seed, i], *shape)[start : start + each] for i in places]
            # the lock is released after each batch: newer weights need not wait for the others
            with self.lend(), self._precision():
                batch = self._batch([prompts[i] for i in places], uniform, sampling)
            for i, group in zip(places, batch, strict=True):
                completions[i] += group
        return completions

    def complete(self, turns: Sequence[Turn]) -> list[Completion]:
        """Sample turns with equal settings together; a context that several share runs once."""
        completions: dict[int, Completion] = {}
        for contexts in _together(turns, self.text.context, self.batch_size):
            uniform = []
            for places in contexts:
                own = [turns[place] for place in places]
                uniform.append([random_numbers(t.seed, t.sampling.max_tokens) for t in own])
            prompts = [turns[places[0]].context for places in contexts]
            taken = [turns[place] for place in chain(*contexts)]
            with self.lend(), self._precision():
                batch = self._batch(prompts, uniform, taken[0].sampling, taken)
            for place, completion in zip(chain(*contexts), chain(*batch), strict=True):
                completions[place] = shortened(completion, turns[place].sampling.max_tokens)
        return [completions[place] for place in range(len(turns))]

    def load_weights(self, weights: Weights) -> float | None:
        asked = time.perf_counter()
        with self._weights.alone(), self._precision():
            self.drained += time.perf_counter() - asked
            load_weights(self.model, weights)
            self.version = weights.version
            probe = weights.probe
            if probe is None:
                return None
            tokens = np.concatenate([probe.prompt_tokens, probe.tokens])
            ids = torch.from_numpy(tokens).long().to(self.device)
            start = len(probe.prompt_tokens)
            with torch.inference_mode():
                out = self.model.base_model(input_ids=ids[None], use_cache=False)
                logits = logits_of(self.model, out.last_hidden_state[0, start - 1 : -1])
                logp = torch.log_softmax(logits.float() / probe.temperature, -1)
            chosen = logp.gather(1, ids[start:, None]).squeeze(1).cpu()
            return float((chosen - torch.from_numpy(probe.logp.copy())).abs().mean())

    @contextmanager
    def lend(self) -> Iterator[None]:
        """Hold the model between batches, while no weights are being loaded."""
        with self._batches, self._weights.shared():
            yield

    def _precision(self) -> torch.autocast:
        """Return the autocast context with which an adapted model matches the trainer."""
        kind = torch.device(self.device).type
        return torch.autocast(kind, torch.bfloat16, enabled=self._autocast)

    @torch.inference_mode()
    def _batch(
        self,
        prompts: Sequence[np.ndarray],
        uniform: Sequence[Sequence[np.ndarray] | np.ndarray],
        sampling: Sampling,
        turns: Sequence[Turn] = (),
    ) -> list[list[Completion]]:
        """Sample responses to each prompt, with a sequence of uniform random numbers for each.

        Sampling stops once each response has ended, or is as long as its sequence; longer ones are
        not cut. Each token is passed to its turn, if `turns` are given.
        """
        own = [torch.from_numpy(numbers) for group in uniform for numbers in group]
        limits = torch.tensor([len(numbers) for numbers in own], device=self.device)
        chance = pad_sequence(own, True, 1.0).to(self.device)
        limit = chance.shape[1]
        counts = torch.tensor([len(group) for group in uniform], device=self.device)
        ids = [torch.from_numpy(p).long() for p in prompts]
        mask = [torch.ones_like(row) for row in ids]
        visible = pad_sequence(mask, True, 0, "left").to(self.device)
        padded = pad_sequence(ids, True, self.text.pad_id, "left").to(self.device)
        hidden, cache = run_prompts(self.model, padded, visible)
        first = pad_sequence(chance[:, 0].split(counts.tolist()), True, 1.0)
        asked = torch.arange(first.shape[1], device=self.device) < counts[:, None]
        first_chosen, first_logp = self._choose(hidden, first, sampling)
        chosen = first_chosen[asked]
        logp = first_logp[asked]
        responses = decoder(self.model, cache, visible, counts, limit)
        drawn = SampledTokens(len(chance), limit, self.device)
        rows = torch.arange(len(chance), device=self.device)
        eos = torch.tensor(sorted(self.text.eos_ids), device=self.device)
        while True:
            if any(turn.tell for turn in turns):
                running = ~drawn.ended(rows)
                newest = zip(rows[running].tolist(), chosen[running].tolist(), strict=True)
                for row, token in newest:
                    if (tell := turns[row].tell) and drawn.step < turns[row].sampling.max_tokens:
                        tell(token)
            drawn.add(rows, chosen, logp)
            ends = torch.isin(chosen, eos)
            if sampling.stop:
                ends |= self._stopped(drawn, rows, sampling.stop)
            ended = drawn.end(rows, ends) | (drawn.step >= limits[rows])
            if ended.all():
                break
            if ended.sum() >= DROP * len(rows):
                kept = (~ended).nonzero().squeeze(1)
                rows = rows[kept]
                chosen = chosen[kept]
                responses.keep(kept)
            hidden = responses.run(chosen)
            numbers = chance[rows, drawn.step]
            next_chosen, next_logp = self._choose(hidden, numbers[:, None], sampling)
            chosen = next_chosen.squeeze(1)
            logp = next_logp.squeeze(1)
        completions = iter(drawn.completions(self.version))
        return [list(islice(completions, len(group))) for group in uniform]

    def _stopped(
        self, drawn: "SampledTokens", rows: Int[Tensor, " N"], stop: tuple[str, ...]
    ) -> Bool[Tensor, " N"]:
        """Return which of these rows have just completed a stop string."""
        if stop not in self._stops:
            if len(self._stops) == MOST_STOPS:
                del self._stops[next(iter(self._stops))]
            self._stops[stop] = StopStrings(self.text, stop, self.device)
        strings = self._stops[stop]
        newest = drawn.tokens[rows, drawn.step - 1].long()
        stopped = strings.possible[newest] & ~drawn.ended(rows)
        places = stopped.nonzero().squeeze(1)
        responses = drawn.tokens[rows[places], : drawn.step].cpu().numpy()
        completed = [strings.completed(tokens) for tokens in responses]
        stopped[places] = torch.tensor(completed, dtype=torch.bool, device=self.device)
        return stopped

    def _choose(
        self,
        hidden: Float[Tensor, "N D"],
        uniform: Float[Tensor, "N R"],
        sampling: Sampling,
    ) -> tuple[Int[Tensor, "N R"], Float[Tensor, "N R"]]:
        """Return R next tokens for each state and their log-probs, a chunk of states at a time."""
        size = states_at_once(self.model)
        chunks = []
        for states, numbers in zip(hidden.split(size), uniform.split(size), strict=True):
            chunks.append(choose_tokens(logits_of(self.model, states), numbers, sampling))
        tokens, logp = zip(*chunks, strict=True)
        return torch.cat(tokens), torch.cat(logp)


class SampledTokens:
    """Tokens and log-probs of a batch of responses. `length` is 0 until a response ends."""

    def __init__(self, count: int, limit: int, device: str):
        self.tokens = torch.zeros(count, limit, dtype=torch.int32, device=device)
        self.logp = torch.zeros(count, limit, device=device)
        self.length = torch.zeros(count, dtype=torch.int32, device=device)
        self.step = 0

    def add(self, rows: Tensor, tokens: Tensor, logp: Tensor) -> None:
        """Append a token to each of these rows."""
        self.tokens[rows, self.step] = tokens.int()
        self.logp[rows, self.step] = logp
        self.step += 1

    def end(self, rows: Tensor, ends: Tensor) -> Tensor:
        """End the rows marked in `ends` at the newest token; return which rows have ended."""
        length = self.length[rows]
        self.length[rows] = torch.where(ends & (length == 0), self.step, length).int()
        return self.ended(rows)

    def ended(self, rows: Tensor) -> Tensor:
        return self.length[rows] > 0

    def completions(self, version: int) -> list[Completion]:
        tokens = self.tokens.cpu().numpy()
        logp = self.logp.cpu().numpy()
        completions = []
        for row, length in enumerate(self.length.tolist()):
            end = length or self.step
            completion = Completion(
                tokens=tokens[row, :end].copy(),
                logp=logp[row, :end].copy(),
                finished=length > 0,
                version=version,
            )
            completions.append(completion)
        return completions


def _together(turns: Sequence[Turn], room: int, most: int) -> Iterator[list[list[int]]]:
    """Yield the places of at most `most` turns that run together, grouped by context.

    All run up to the largest `max_tokens` among them, for which every context has room.
    """
    together: defaultdict[Sampling, defaultdict[bytes, list[int]]]
    together = defaultdict(lambda: defaultdict(list))
    for place, turn in enumerate(turns):
        settings = replace(turn.sampling, samples=1, max_tokens=1)
        together[settings][turn.context.tobytes()].append(place)
    for contexts in together.values():
        waiting = sorted(contexts.values(), key=lambda places: len(turns[places[0]].context))
        while waiting:
            limit = max(turns[place].sampling.max_tokens for place in chain(*waiting))
            taken: list[list[int]] = []
            left: list[list[int]] = []
            for places in waiting:
                fits = len(turns[places[0]].context) + limit <= room
                full = taken and sum(map(len, taken)) + len(places) > most
                (left if full or not fits else taken).append(places)
            yield taken
            waiting = left


def shortened(completion: Completion, limit: int) -> Completion:
    """Return a completion truncated to `limit` tokens."""
    if len(completion.tokens) <= limit:
        return completion
    return replace(
        completion,
        tokens=completion.tokens[:limit],
        logp=completion.logp[:limit],
        finished=False,
        switches=tuple(switch for switch in completion.switches if switch[0] < limit),
    )


def random_numbers(seed: int | Sequence[int], *shape: int) -> Float[np.ndarray, "..."]:
    """Return random numbers in (0, 1]: of a turn, or of a prompt's samples by its place in a call.

    A prompt's seed is [seed of the call, place].
    """
    return 1 - np.random.default_rng(seed).random(shape, np.float32)


def run_prompts(
    model: Any, ids: Int[Tensor, "B P"], real: Int[Tensor, "B P"]
) -> tuple[Float[Tensor, "B D"], Any]:
    """Return the last hidden state of each left-padded prompt, and the cache."""
    out = model.base_model(
        input_ids=ids, attention_mask=real, position_ids=positions(real), use_cache=True
    )
    return out.last_hidden_state[:, -1], out.past_key_values


def decoder(
    model: Any, cache: Any, real: Int[Tensor, "B P"], counts: Int[Tensor, " B"], limit: int
) -> "CopiedCache | SharedCache":
    """Return the decoder of `counts` responses to each prompt, of up to `limit` tokens.

    Sharing the prompt in the cache costs attention over all responses to it. Each response gets a
    copy of the prompt if responses may exceed SHARED times the prompt's tokens in total, or if one
    prompt has many more responses than others.
    """
    most = int(counts.max())
    short = most * limit <= SHARED * real.shape[1]
    even = most * len(counts) <= 2 * int(counts.sum())
    if most > 1 and short and even and takes_masks(model):
        return SharedCache(model, cache, real, counts)
    return CopiedCache(model, cache, real, counts)


def _prompt_of(counts: Int[Tensor, " B"]) -> Int[Tensor, " N"]:
    """Return the prompt of each response, given the number of responses to each prompt."""
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)


class CopiedCache:
    """Responses that each have a copy of their prompt's keys and values."""

    def __init__(self, model: Any, cache: Any, real: Int[Tensor, "B P"], counts: Int[Tensor, " B"]):
        self.model = model
        self.cache = cache
        self.cache.batch_select_indices(_prompt_of(counts))
        self.real = real.repeat_interleave(counts, 0)

    def keep(self, kept: Int[Tensor, " M"]) -> None:
        """Keep only these responses; `kept` are places among the current ones."""
        self.real = self.real[kept]
        self.cache.batch_select_indices(kept)

    def run(self, tokens: Int[Tensor, " N"]) -> Float[Tensor, "N D"]:
        """Return the last hidden state of each response after its newest token."""
        self.real = torch.cat([self.real, torch.ones_like(self.real[:, :1])], 1)
        out = self.model.base_model(
            input_ids=tokens[:, None],
            attention_mask=self.real,
            position_ids=positions(self.real)[:, -1:],
            past_key_values=self.cache,
            use_cache=True,
        )
        return out.last_hidden_state[:, -1]


class SharedCache:
    """Responses in one row with their prompt: each sees only the prompt and its own tokens.

    A row has a slot for each of its unfinished responses; if it has fewer than other rows, some
    slots are idle. Each step adds a column for every slot to the cache.
    """

    def __init__(self, model: Any, cache: Any, real: Int[Tensor, "B P"], counts: Int[Tensor, " B"]):
        self.model = model
        self.cache = cache
        self.sees: Int[Tensor, "B C"] = torch.where(real.bool(), EVERYONE, NOBODY)
        self.length = real.sum(1, keepdim=True)
        self.prompt = _prompt_of(counts)
        first = counts.cumsum(0) - counts
        self.sample = torch.arange(len(self.prompt), device=first.device) - first[self.prompt]
        self._place()

    def keep(self, kept: Int[Tensor, " M"]) -> None:
        left, self.prompt = self.prompt[kept].unique(return_inverse=True)
        self.sample = self.sample[kept]
        self.sees = self.sees[left]
        self.length = self.length[left]
        self.cache.batch_select_indices(left)
        self._place()

    def _place(self) -> None:
        """Give each response a slot in its prompt's row; responses are sorted by prompt."""
        counts = self.prompt.bincount(minlength=len(self.sees))
        first = counts.cumsum(0) - counts
        slot = torch.arange(len(self.prompt), device=first.device) - first[self.prompt]
        self.place = self.prompt, slot
        self.slots = self.prompt.new_full((len(self.sees), int(counts.max())), IDLE)
        self.slots[self.place] = self.sample

    def run(self, tokens: Int[Tensor, " N"]) -> Float[Tensor, "N D"]:
        ids = torch.zeros_like(self.slots)
        ids[self.place] = tokens
        self.sees = torch.cat([self.sees, self.slots], 1)
        mask = attention_mask(self.model, self.slots, self.sees)
        out = self.model.base_model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=self.length.expand_as(ids),
            past_key_values=self.cache,
            use_cache=True,
        )
        self.length = self.length + 1
        return out.last_hidden_state[self.place]

"""Memory of each process of a run, computed from its config and config.json, without weights.

docs/memory.md explains the parts and which of them are exact. Only `processes` combines them: the
dry run, `tba plan` and the table in docs/scaling.md use it.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import inf
from typing import Any

import numpy as np
import torch

from tba.config.schema import Config
from tba.config.tables import PASS_TOKENS, PolicyTable
from tba.display import size
from tba.engines import engine_in_bf16
from tba.learn import MOMENTS, TrainerSizes, checkpoint_size
from tba.models.pretrained import EAGER_TOKENS, computes_in_bf16, load_config
from tba.setup.machine import Machine
from tba.setup.sizes import ModelSizes, group, kept, sizes_of
from tba.weights import PUBLISHED

PROCESS = 0.5e9
"""Bytes of a process with PyTorch on the host, and of its CUDA context on the GPU."""
USED = 0.95
"""Share of a GPU's memory that an automatic token budget fills: memory is fragmented."""
LOGIT = 10
"""Bytes per logit in a chunk of the LM head: one bf16 copy and two fp32 copies."""
HEAD = {"cpu": 0.4e9, "cuda": 1.4e9}
"""Maximum memory of the LM head in bytes, by device."""
VLLM = {"activations and graphs": 2e9, "graphs": 1e9}
"""GPU bytes that vLLM needs in addition to weights and cache, awake and asleep."""
BETWEEN_STEPS = ("CUDA", "weights", "moments")
ALTERNATIVES = {
    "policy.gradient_checkpointing=true": lambda c: c.policy.gradient_checkpointing,
    "trainer.devices above 1": lambda c: c.runtime.use == "local",
    "policy.lora": lambda c: c.policy.lora is not None,
    "runtime.colocate=sleep": lambda c: c.engine.use != "vllm" or c.runtime.colocate == "sleep",
}
"""Settings that reduce memory, and whether a config already has each one, or cannot use it."""
MODELS = {"classifier": ("model",), "guard": ("model",), "redteam": ("victim", "encoder")}
"""Options of judges and tasks that name models loaded by each searcher."""


@dataclass(frozen=True)
class ProcessMemory:
    """A process of a run, and its memory in bytes by content."""

    name: str
    card: int | None
    """GPU of the process; None for host memory."""
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory that the processes of a run need on a machine.

    `config` includes all plug-in options; `prompt` is the length of the longest prompt.
    """

    config: Config
    machine: Machine
    prompt: int
    bf16: bool
    """Whether the trainer computes in bf16."""
    sizes: ModelSizes

    @classmethod
    def of(
        cls, config: Config, machine: Machine, prompt: int, sizes: ModelSizes | None = None
    ) -> "MemoryEstimate":
        """Return an estimate whose token budget is a number; GPUs are assumed to compute in bf16.

        Without `sizes`, the model's config.json is read.
        """
        policy = config.policy
        bf16 = policy.autocast != "off" if machine.gpus else computes_in_bf16(policy, "cpu")
        own = cls(config, machine, prompt, bf16, sizes or sizes_of(policy, bf16))
        return own if config.trainer.token_budget != "auto" else own._with_fitting_budget()

    def _with_fitting_budget(self) -> "MemoryEstimate":
        """Return the estimate with the largest token budget that fits all GPUs, or the smallest.

        Searchers' GPUs on which even the smallest does not fit are ignored: vLLM's share fills
        them. The budget is `PASS_TOKENS` if a step has no more tokens, else a number of whole
        groups up to that, or one group, or a group's prompt with some of its responses, all of the
        maximum length. On a CPU it is `PASS_TOKENS`, and also on a cluster that the run joins,
        whose GPUs are not known.
        """
        c = self.config
        t = c.trainer
        response = c.sampling.max_tokens + (0 if c.policy.share_prompt else self.prompt)
        group_tokens = self.prompt + t.group_size * response
        groups = -(-t.groups // t.devices)  # of a rank in a step
        most = max(1, min(PASS_TOKENS // group_tokens, groups))
        budgets = [count * group_tokens for count in range(most, 0, -1)]
        if groups * group_tokens <= PASS_TOKENS:
            budgets[0] = PASS_TOKENS
        budgets += [self.prompt + count * response for count in range(t.group_size - 1, 0, -1)]
        if not self.machine.gpus or c.runtime.address is not None:
            budgets = [PASS_TOKENS]
        trainers = [t.model_copy(update={"token_budget": budget}) for budget in budgets]
        configs = [c.model_copy(update={"trainer": trainer}) for trainer in trainers]
        *larger, smallest = [replace(self, config=config) for config in configs]
        limit = USED * self.machine.card
        full = {card for card, n in smallest.needed().items() if n > limit}
        ignored = full - {p.card for p in self.processes if p.name != "searcher"} | {None}
        for estimate in larger:
            if all(n <= limit for card, n in estimate.needed().items() if card not in ignored):
                return estimate
        return smallest

    @property
    def each(self) -> int:
        """Number of GPUs per engine."""
        return int(self.config.engine.options.get("tensor_parallel_size", 1))

    @property
    def searchers(self) -> int:
        """Number of searchers; for a range, as many as there are GPUs for."""
        r = self.config.runtime
        if isinstance(r.searchers, int):
            return r.searchers
        room = (self.machine.gpus - self.config.trainer.devices) // self.each
        least, most = r.searchers
        return min(most, max(least, room))

    @cached_property
    def processes(self) -> list[ProcessMemory]:
        """All processes, placed on GPUs as Ray does; without GPUs, all on the host."""
        c = self.config
        each = self.each if self.machine.gpus else 1
        cards: list[int | None] = [*range(self.machine.gpus)] or [None]
        ranks = c.trainer.devices
        free = cards[:1] if c.runtime.use == "local" else cards[ranks:] or cards
        name = "trainer" if ranks == 1 else "rank of the trainer"
        context = {"CUDA": PROCESS} if self.machine.gpus else {}
        training = context | self._step()
        engine = self._engine()
        if c.runtime.colocate == "sleep":  # they use the GPU in turns: the larger total counts
            between = {n: size for n, size in training.items() if n in BETWEEN_STEPS}
            asleep = {"graphs": VLLM["graphs"]} if self.machine.gpus else {}
            in_turns = (training, asleep), (between, engine)
            training, engine = max(in_turns, key=lambda one: sum(map(_total, one)))
        found = [ProcessMemory(name, cards[rank % len(cards)], training) for rank in range(ranks)]
        for place in range(self.searchers * each):
            beside = self._beside() if place % each == 0 else {}
            parts = context | engine | beside
            found.append(ProcessMemory("searcher", free[place % len(free)], parts))
        return [*found, ProcessMemory("all processes", None, self._host())]

    def state(self) -> dict[str, float]:
        """Return the exact memory of a rank between two steps."""
        z = self.sizes
        own = 4 * z.trained + z.frozen  # for bf16 weights, the optimizer has the other 2 bytes
        moments = MOMENTS[self.config.trainer.optimizer] * z.trained
        held = {"weights": own, "gradients": float(self.width * z.trained), "moments": moments}
        return {name: n / self.config.trainer.devices for name, n in held.items()}

    @property
    def width(self) -> int:
        """Bytes of a trained weight in forward and backward passes, and of its gradient."""
        return {"fp32": 4, "bf16": 2}[self.config.trainer.weights]

    @property
    def trainer_sizes(self) -> TrainerSizes:
        z = self.sizes
        published = z.trained * (2 if engine_in_bf16(self.config.engine, self.bf16) else 4)
        return TrainerSizes(z.parameters, z.trained, published)

    def _step(self) -> dict[str, float]:
        """Return the peak memory of a rank in a step: during a pass, or during the update."""
        z = self.sizes
        passing = {"activations": self._activations(), "LM head": self._head()}
        if self.config.policy.lora is None:  # in addition to the sum over earlier passes
            passing["gradient of the LM head"] = 4 * z.vocabulary * z.hidden
        changing = {"update of a weight": 18 * z.largest / self.config.trainer.devices}
        if self.width == 4 or _total(changing) < _total(passing):
            changing = passing
        devices = self.config.trainer.devices
        parts = self.state()  # held throughout the step, like the rest of `parts`
        parts["sums of gradients"] = z.trained / devices if self.width == 2 else 0
        if devices == 1:
            copied = self.config.runtime.use == "ray"
            parts["copy for publishing"] = self.trainer_sizes.published_bytes if copied else 0
            parts["matrices in bf16"] = 2 * z.trained if self.bf16 and self.width == 4 else 0
        else:
            layers = min(2, z.layers) if self.config.trainer.reshard_after_forward else z.layers
            parts["gathered layers"] = (2 if self.bf16 else 4) * (z.root + layers * z.layer)
        return parts | changing

    def _activations(self) -> float:
        """Return the bytes that the largest pass of a step keeps, at maximum response length."""
        c = self.config
        t = c.trainer
        z = self.sizes
        length = c.sampling.max_tokens
        is_flex = c.policy.attention == "flex"
        packed = t.pass_tokens if is_flex else 256
        pass_ = np.array(group(self.prompt, t.group_size, length, packed))
        fitting = min(-(-t.groups // t.devices), t.pass_tokens // pass_[0])
        if fitting == 0:  # a group is split into several passes
            responses = max(1, (t.pass_tokens - self.prompt) // max(1, length - 1))
            pass_ = np.array(group(self.prompt, responses, length, packed))
        tokens, keys, scores = (pass_ * max(1, fitting)).tolist()
        is_best = self.machine.gpus or self.prompt + length > EAGER_TOKENS
        is_fused = z.has_sdpa and c.policy.attention in ("sdpa", "flex", "auto" if is_best else "")
        mask = (2 if self.bf16 else 4) * scores if is_fused and not is_flex else 0
        scores = 0 if is_fused else scores
        shape = z.hidden, z.inner, z.heads, tokens, keys, scores, 0, self.bf16
        if not c.policy.gradient_checkpointing:
            return kept(z.layers, *shape) + z.masks * mask
        return 4 * z.hidden * z.layers * tokens + kept(1, *shape) + mask

    def _head(self) -> float:
        most = HEAD["cuda" if self.machine.gpus else "cpu"]
        return min(most, LOGIT * self.config.trainer.pass_tokens * self.sizes.vocabulary)

    def _engine(self) -> dict[str, float]:
        """Return the memory of an engine, per GPU if it is split over several."""
        c = self.config
        z = self.sizes
        options = c.engine.options
        number = 2 if engine_in_bf16(c.engine, self.bf16) else 4
        if c.engine.use == "scripted":
            return {}
        if c.engine.use == "vllm":
            own = number * z.base / options["tensor_parallel_size"]
            gib = options.get("kv_cache_gib")
            cache = (1.0 if gib is None else gib) * 2**30
            if not self.machine.gpus:
                return {"engine": own, "KV cache": cache}
            name = "activations and graphs"
            if gib is None:
                taken = options["gpu_memory_utilization"] * self.machine.card
                cache = max(cache, taken - own - VLLM[name])
            return {"engine": own, f"its {name}": VLLM[name], "KV cache": cache}
        searched = c.runtime.prompts_per_task * c.sampling.samples
        responses = min(options.get("batch_size", searched), searched)
        tokens = responses * (self.prompt + c.sampling.max_tokens)
        own = number * z.parameters
        if c.policy.lora is not None:  # the reference uses the same model
            own = number * z.trained + z.frozen
        return {"engine": own, "KV cache": 2 * z.layers * z.keys * number * tokens}

    def _beside(self) -> dict[str, float]:
        """Return the memory of a searcher in addition to its engine: the reference, and judges."""
        c = self.config
        z = self.sizes
        parts: dict[str, float] = {}
        if not c.engine.options.get("own_reference", False):
            # otherwise the reference shares the model of the engine or trainer
            if c.policy.lora is None or (c.engine.use == "vllm" and c.runtime.use == "ray"):
                parts["reference"] = z.frozen + (2 if self.bf16 else 4) * z.trained
            tokens = c.trainer.reference_tokens
            shape = z.hidden, z.inner, z.heads, tokens, tokens, 0, 0, self.bf16
            parts["a pass of the reference"] = kept(1, *shape) + self._head()
        others = sum(map(_parameters, _models_of(c.task.model_dump())))
        parts["models of the task"] = (2 if self.bf16 else 4) * others
        return parts

    def _host(self) -> dict[str, float]:
        """Return the host memory in addition to models."""
        c = self.config
        z = self.sizes
        pinned = z.pinned / z.trained if self.machine.gpus else 1.0
        versions = min(PUBLISHED, self.searchers) + 2.0 if c.runtime.use == "ray" else 1.0
        versions += 2 * pinned if c.trainer.devices > 1 else 0  # rows of ranks: copied, and sent
        work = {
            "full replay buffer": c.replay.capacity * (12 * c.sampling.max_tokens + 400.0),
            "copy for a checkpoint": (4 + MOMENTS[c.trainer.optimizer]) * z.trained * pinned,
            "weights in transit": self.trainer_sizes.published_bytes * versions,
            "reference in transit": 4 * z.trained if c.policy.reset_reference_every else 0,
        }
        if c.runtime.colocate == "sleep":
            number = 2 if engine_in_bf16(c.engine, self.bf16) else 4
            work["weights of the sleeping engine"] = number * z.base
        loading = max(self.searchers, 1 if c.policy.lora is None else c.trainer.devices)
        first = {"models, while they load": 4.0 * z.parameters * loading}
        if self.machine.gpus and sum(first.values()) > sum(work.values()):
            work = first
        return {"processes": PROCESS * (c.trainer.devices + 2 * self.searchers)} | work

    def check(self) -> None:
        """Raise ValueError if the exact state of a rank alone does not fit in memory."""
        state = sum(self.state().values())
        ranks = self.config.trainer.devices
        room = self.machine.card if self.machine.gpus else self.machine.host / ranks
        if state > room and self.config.runtime.address is None:  # a cluster is not known here
            what = f"{size(state)} for weights, gradients and moments in each rank"
            raise ValueError(f"trainer.devices = {ranks} needs {what}: {self.advice()}")

    def needed(self) -> dict[int | None, float]:
        """Return the bytes needed on each GPU, and on the host (None)."""
        needed: dict[int | None, float] = defaultdict(float)
        for process in self.processes:
            needed[process.card] += process.total
        return needed

    def excess(self) -> dict[int | None, float]:
        """Return the bytes needed on each GPU, or the host (None), that has too little memory."""
        return {card: n for card, n in self.needed().items() if n > self.machine.room(card)}

    def lines(self) -> list[str]:
        """Return lines with the placement of the processes, their memory, and whether it fits."""
        alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for card, needed in self.needed().items():
            room = self.machine.room(card)
            shown = [f"{size(needed)}{'' if room == inf else f' of {size(room)}'}"]
            for process in (each for each in self.processes if each.card == card):
                parts = [f"{name} {size(n)}" for name, n in process.parts.items() if n]
                shown.append(f"  {process.name}: {', '.join(parts)}")
            alike[tuple(shown)].append("host" if card is None else str(card))
        lines = ["memory, calculated (docs/memory.md):"]
        for (total, *listed), cards in alike.items():
            kind = "" if cards == ["host"] else f"GPU{'s' * (len(cards) > 1)} "
            lines += [f"{kind}{', '.join(cards)}: {total}", *listed]
        lines.append(
            f"a checkpoint takes {size(checkpoint_size(self.config, self.trainer_sizes))} on disk"
        )
        advice = self.advice()
        return [*lines, f"warning: {advice}" if advice else "the memory suffices"]

    def advice(self) -> str:
        """Return text that says what does not fit and what to change; "" if everything fits."""
        excess = self.excess()
        if not excess:
            return ""
        worst = max(excess, key=excess.__getitem__)
        where = "the host" if worst is None else f"GPU {worst}"
        more = f" (and {len(excess) - 1} more do not fit)" if len(excess) > 1 else ""
        what = f"{where} needs {size(excess[worst])} but has {size(self.machine.room(worst))}{more}"
        others = [name for name, has in ALTERNATIVES.items() if not has(self.config)]
        return (
            f"{what}: set {''.join(f'{name}, ' for name in others)}or a lower trainer.token_budget"
            " or engine.gpu_memory_utilization; docs/memory.md says what each of them lowers"
        )


def _total(parts: Mapping[str, float]) -> float:
    return sum(parts.values())


def _models_of(table: Any) -> set[str]:
    """Return the names of the models that each searcher loads for a task or a table in it."""
    if isinstance(table, list | tuple):
        return set().union(*map(_models_of, table))
    if not isinstance(table, Mapping):
        return set()
    named = {table.get(key) for key in MODELS.get(str(table.get("use")), ())}
    return {name for name in named if name}.union(*map(_models_of, table.values()))


@cache
def _parameters(model: str) -> int:
    """Return the number of parameters of a model without a head."""
    from transformers import AutoModel

    with torch.device("meta"):
        empty = AutoModel.from_config(load_config(PolicyTable(model=model)))
    return sum(p.numel() for p in empty.parameters())

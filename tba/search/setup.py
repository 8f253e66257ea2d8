"""Everything that a searcher process needs, as plain settings that can be sent to it."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tba.config.plugins import resolve
from tba.config.tables import EvalTable, FaultsTable, PolicyTable, RewardTable, SamplingTable, Use
from tba.engines import Engine
from tba.learn.policy import Policy
from tba.models.pretrained import load_model, load_text
from tba.objectives import ValueRollouts
from tba.search.reference import Reference
from tba.search.rewards import Guard
from tba.search.searcher import Searcher
from tba.tasks import Task
from tba.tasks._memory import InMemory, build_task
from tba.types import Prompt, Sampling


@dataclass(frozen=True)
class SearchSetup:
    """Settings from which any process builds the same searcher."""

    policy: PolicyTable
    task: Use
    engine: Use
    sampling: SamplingTable
    reward: RewardTable
    faults: FaultsTable
    evaluation: EvalTable
    held_out: tuple[Prompt, ...]
    token_budget: int
    """Tokens, padding included, in one forward pass of the reference."""
    value_rollouts: ValueRollouts | None
    """Value estimates that the objective needs from search, if any."""
    reward_functions: tuple[Callable[..., Any], ...] | bytes | None
    """Functions passed from Python, pickled for another process; None if the config names them."""

    def build(self, device: str, bf16: bool) -> Searcher:
        """Load the engine and the reference model.

        `bf16` is the trainer's choice: reference and policy must compute alike, or their
        difference is noise.
        """
        text = load_text(self.policy)
        plugin = resolve("engines", "engine", self.engine.use, self.engine.options)
        engine: Engine = plugin.build(self.policy, text, device, bf16)
        model = load_model(self.policy, torch.float32).to(device)
        reference = Policy(model, self.sampling.temperature, bf16)
        return Searcher(
            engine=engine,
            reference=Reference(reference, self.token_budget),
            text=text,
            guard=Guard(self._task(), self.reward.deadline, self.reward.concurrency),
            sampling=sampling_of(self.sampling),
            faults=self.faults,
            value_rollouts=self.value_rollouts,
            held_out=self.held_out,
            evaluation=self.evaluation,
        )

    def _task(self) -> Task:
        plugin = resolve("tasks", "task", self.task.use, self.task.options)
        functions = self.reward_functions
        if isinstance(functions, bytes):  # they came with this object, never from a file
            functions = pickle.loads(functions)
        return build_task(plugin, None if functions is None else InMemory(reward=functions))


def sampling_of(table: SamplingTable) -> Sampling:
    """Return the `[sampling]` table as the engines know it."""
    return Sampling(table.samples, table.temperature, table.max_tokens, table.top_p)

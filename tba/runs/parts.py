"""The parts of a run, resolved and checked before any process starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from textwrap import shorten
from typing import Any

import numpy as np

from tba.config.plugins import Plugin, resolve_all, with_defaults
from tba.config.schema import Config
from tba.config.tables import RuntimeTable
from tba.learn.trainer import SingleTrainer, build_trainer
from tba.models.pretrained import Text, load_text
from tba.objectives import HasHead, Objective, head_of, value_rollouts_of
from tba.runtime.bind import pickled
from tba.search.prompts import PromptStream
from tba.search.setup import SearchSetup
from tba.strategies import Strategy
from tba.tasks import Task
from tba.tasks._memory import InMemory, build_task, check_same, with_memory
from tba.types import Prompt


@dataclass(frozen=True)
class Parts:
    """A config whose every name has been resolved, every option checked and every prompt read."""

    config: Config
    task: Task
    strategy: Strategy
    objective: Plugin
    selection: Plugin
    text: Text
    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]
    reward_functions: tuple[Callable[..., Any], ...] | bytes | None
    """Functions passed from Python, pickled if searchers are processes of their own."""

    def prompt_stream(self) -> PromptStream:
        """Return a new stream of the training prompts, at its beginning."""
        seed, pass_reward = self.config.run.seed, self.task.pass_reward
        return PromptStream(self.prompts, self.selection.build(self.prompts, seed, pass_reward))

    def trainer(self, device: str) -> SingleTrainer:
        """Load the model and return its trainer."""
        c = self.config
        temperature, steps = c.sampling.temperature, c.run.steps
        return build_trainer(c.policy, c.trainer, self.objective, temperature, steps, device)

    def search_setup(self) -> SearchSetup:
        """Return what each searcher process is built from."""
        c = self.config
        return SearchSetup(
            policy=c.policy,
            task=c.task,
            engine=c.engine,
            sampling=c.sampling,
            reward=c.reward,
            faults=c.faults,
            evaluation=c.eval,
            held_out=tuple(self.held_out),
            token_budget=c.trainer.token_budget,
            value_rollouts=value_rollouts_of(self.objective.at(0)),
            reward_functions=self.reward_functions,
        )


def check(config: Config, memory: InMemory | None = None) -> Parts:
    """Read everything that the config names: plug-ins, tokenizer, data.

    `memory` holds the rows and functions that were passed from Python. ValueError for whatever
    could not work. No process is started.
    """
    config = with_memory(config, memory)
    if config.log.wandb and find_spec("wandb") is None:
        raise ValueError(
            "log.wandb = true needs Weights & Biases: pip install wandb, or set log.wandb=false"
        )
    config = with_defaults(config)
    plugins = resolve_all(config)
    _check_head(plugins.objective, config.run.steps)
    task, text = build_task(plugins.task, memory), load_text(config.policy)
    prompts = task.prompts()
    kept_back = task.held_out() if config.eval.prompts else []
    held_out, unused = kept_back[: config.eval.prompts], kept_back[config.eval.prompts :]
    if not prompts:
        raise ValueError("the task has no prompts to train on")
    tokens = text.encode_all([*prompts, *held_out], config.sampling.max_tokens)
    n = len(prompts)
    _check_disjoint(prompts, tokens[:n], [*tokens[n:], *map(text.encode, unused)])
    strategy = plugins.strategy.build()
    functions = None if memory is None else _sendable(memory, config.runtime)
    parts = Parts(
        config, task, strategy, plugins.objective, plugins.selection, text, prompts, held_out,
        functions,
    )  # fmt: skip
    parts.prompt_stream()  # raises if the selection cannot work
    return parts


def check_resumed(config: Config, before: Config) -> None:
    """ValueError for a change that makes the contents of the replay buffer wrong."""
    check_same(config.task, before.task)
    now, then = config.sampling.temperature, before.sampling.temperature
    if now != then:
        raise ValueError(
            f"sampling.temperature = {now}, but the run's log-probabilities are of temperature"
            f" {then}; leave it unchanged, or start a new run"
        )
    objective, earlier = (resolve_all(c).objective.at(0) for c in (config, before))
    _check_same_head(config, objective, earlier)
    wanted, there = value_rollouts_of(objective), value_rollouts_of(earlier)
    if wanted is not None and (there is None or there.step_tokens != wanted.step_tokens):
        has = "none" if there is None else f"one every {there.step_tokens} tokens"
        raise ValueError(
            f"objective.use = {config.objective.use!r} needs values every {wanted.step_tokens}"
            f" tokens, the run has {has}; keep the objective, or start a new run"
        )


def _check_disjoint(
    prompts: Sequence[Prompt], tokens: Sequence[np.ndarray], held_out: Sequence[np.ndarray]
) -> None:
    """ValueError if training prompts are the same, as the model sees them, as held-out ones."""
    kept_back = {ids.tobytes() for ids in held_out}
    shared = [p for p, ids in zip(prompts, tokens, strict=True) if ids.tobytes() in kept_back]
    if shared:
        examples = "; ".join(f"{p.id!r}: {shorten(str(p.text), 80)!r}" for p in shared[:3])
        raise ValueError(
            f"{len(shared):,} of {len(prompts):,} training prompts are also held out, so that"
            f" evaluations would not measure what was learned: {examples}. Remove them from one of"
            " the two, name another file for one, or set eval.prompts=0"
        )


def _sendable(
    memory: InMemory, runtime: RuntimeTable
) -> tuple[Callable[..., Any], ...] | bytes | None:
    """Return the reward functions as the searchers get them; ValueError if that is impossible."""
    if memory.reward is None or runtime.use == "local":
        return memory.reward
    return pickled(memory.reward, runtime.address)


def _check_same_head(config: Config, objective: Objective, earlier: Objective) -> None:
    owned = []
    for one in (objective, earlier):
        head = head_of(one)
        owned.append("no head" if head is None else f"a head on the {head.on}")
    if owned[0] != owned[1]:
        raise ValueError(
            f"objective.use = {config.objective.use!r} has {owned[0]}, but the run has {owned[1]};"
            " keep the objective, or start a new run"
        )


def _check_head(objective: Plugin, steps: int) -> None:
    first, last = objective.at(0), objective.at(steps)
    if isinstance(first, HasHead) and first.head != last.head:
        raise ValueError(
            "objective.head_learning_rate follows trainer.schedule; give a number, not a schedule"
        )

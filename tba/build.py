"""The parts of a run, made from its config. `check` finds every mistake that can be found before a process starts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from tba.config import Config, PolicyTable, Use
from tba.evaluate import Evaluation, evaluate
from tba.objective import Head, Headed, Vine, Vined
from tba.plugins import Plugin, options_of, resolve
from tba.policy import Policy, gains_from_bf16
from tba.pretrained import Text, load_config, load_model, load_text
from tba.prompts import PromptStream
from tba.replay import Strategy
from tba.rewards import Guard, Task
from tba.searcher import Engine, Searcher
from tba.trainer import Trainer
from tba.types import Prompt, Sampling


@dataclass(frozen=True)
class Parts:
    """A config whose every name has been resolved, every option checked and every prompt read."""

    config: Config
    task: Task
    strategy: Strategy
    objective: Plugin
    engine: Plugin
    selection: Plugin
    text: Text
    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]


def plugins(config: Config) -> dict[str, Plugin]:
    """The five plug-ins, their options checked. ValueError tells what to write instead."""
    found = {
        "task": resolve("tasks", "task", config.task.use, config.task.options),
        "engine": resolve("engines", "engine", config.engine.use, config.engine.options),
        "objective": resolve("objectives", "objective", config.objective.use, config.objective.options, scheduled=True),
        "strategy": resolve("strategies", "strategy", config.strategy.use, config.strategy.options),
        "selection": resolve("selections", "selection", config.selection.use, config.selection.options),
    }
    found["strategy"].build()
    first, last = (found["objective"].at(step) for step in (0, config.run.steps))
    if isinstance(first, Headed) and first.head != last.head:
        raise ValueError("objective.head_learning_rate follows trainer.schedule; give a number, not a schedule of its own")
    return found


def completed(config: Config) -> Config:
    """With every option of its plug-ins, so that what is written down says all, whatever the defaults will be one day."""
    tables = {}
    for table, plugin in plugins(config).items():
        options = {name: default for name, (_, default) in options_of(plugin.cls).items() if default is not MISSING and default is not None}
        given: Use = getattr(config, table)
        tables[table] = Use(use=given.use, **(options | given.options))
    return config.model_copy(update=tables)


def assemble(config: Config, prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> Parts:
    """Everything but the data set, which a searcher need not read again."""
    found = plugins(config)
    task, strategy, text = found["task"].build(), found["strategy"].build(), load_text(config.policy)
    return Parts(config, task, strategy, found["objective"], found["engine"], found["selection"], text, prompts, held_out)


def check(config: Config) -> Parts:
    """Reads all that the config names: plug-ins, tokenizer, data. ValueError for what could not work; no process starts."""
    if config.log.wandb and find_spec("wandb") is None:
        raise ValueError("log.wandb = true needs Weights & Biases: pip install wandb, or set log.wandb=false")
    config = completed(config)
    parts = assemble(config, [], [])
    prompts = parts.task.prompts()
    held_out = parts.task.held_out()[: config.eval.prompts] if config.eval.prompts else []
    if not prompts:
        raise ValueError("the task has no prompts to train on")
    parts.text.check_all([*prompts, *held_out], config.sampling.max_tokens)
    parts = replace(parts, prompts=prompts, held_out=held_out)
    prompt_stream(parts)  # for its mistakes
    return parts


def check_resumed(config: Config, before: Config) -> None:
    """ValueError for a change that what is in the replay buffer could not follow."""
    now, then = config.sampling.temperature, before.sampling.temperature
    if now != then:
        raise ValueError(f"sampling.temperature = {now}, but the run's log-probabilities are of temperature {then}; leave it so, or start a new run")
    objectives = [plugins(c)["objective"] for c in (config, before)]
    heads = [None if (h := head(objective)) is None else h.on for objective in objectives]
    if heads[0] != heads[1]:
        owned = ["no head" if on is None else f"a head on the {on}" for on in heads]
        raise ValueError(f"objective.use = {config.objective.use!r} has {owned[0]}, but the run has {owned[1]}; leave the objective as it was, or start anew")
    wanted, there = map(vine, objectives)
    if wanted is not None and (there is None or there.step_tokens != wanted.step_tokens):
        earlier = "none" if there is None else f"one every {there.step_tokens} tokens"
        raise ValueError(f"objective: values are wanted every {wanted.step_tokens} tokens, the run has {earlier}; leave the objective as it was, or start anew")


def prompt_stream(parts: Parts) -> PromptStream:
    """At its beginning, with a selection of its own."""
    return PromptStream(parts.prompts, parts.selection.build(parts.prompts, parts.config.run.seed, parts.task.pass_reward))


def trainer(parts: Parts, device: str) -> Trainer:
    config = parts.config
    model = load_model(config.policy, torch.float32).to(device)
    if config.policy.gradient_checkpointing:
        checkpoint_layers(model)
    autocast = bf16(config.policy, device)
    policy = Policy(model, config.sampling.temperature, autocast, share_prompt=not config.policy.gradient_checkpointing, head=head(parts.objective))
    return Trainer(policy, parts.objective, config.trainer, config.run.steps, autocast)


def bf16(policy: PolicyTable, device: str) -> bool:
    """Whether to compute in bf16 over fp32 weights: as `policy.autocast` says, or where it is faster."""
    if policy.autocast != "auto":
        return policy.autocast == "bf16"
    return gains_from_bf16(device, load_config(policy).get_text_config().hidden_size)


def searcher(parts: Parts, device: str, bf16: bool) -> Searcher:
    """`bf16` is the trainer's choice: reference and policy must compute alike, or their difference is noise."""
    config = parts.config
    engine: Engine = parts.engine.build(config.policy, parts.text, device, bf16)
    reference = Policy(load_model(config.policy, torch.float32).to(device), config.sampling.temperature, bf16)
    budget, faults = config.trainer.token_budget, config.faults
    return Searcher(engine, reference, parts.text, guard(parts), sampling(config), budget, faults, vine(parts.objective))


def head(objective: Plugin) -> Head | None:
    """What the objective owns."""
    found = objective.at(0)
    return found.head if isinstance(found, Headed) else None


def vine(objective: Plugin) -> Vine | None:
    """What the objective wants of search beside samples."""
    found = objective.at(0)
    return found.vine if isinstance(found, Vined) else None


def evaluation(parts: Parts, searcher: Searcher) -> Evaluation:
    """What the weights of the searcher's engine achieve on the held-out prompts, as `[eval]` says."""
    c = parts.config
    reference = searcher.referred if c.eval.temperature == c.sampling.temperature else None  # the reference has one temperature
    return evaluate(searcher.engine, parts.text, searcher.guard, parts.held_out, c.eval, c.sampling.max_tokens, reference)


def checkpoint_layers(model: Any) -> None:
    """Gradient checkpointing without dropout: only the layers themselves, none of their parts, are in training mode."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    with warnings.catch_warnings():  # deprecated late in transformers 5, and all that early 5 has
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True


def gpus() -> int:
    return torch.cuda.device_count()


def guard(parts: Parts) -> Guard:
    return Guard(parts.task, parts.config.reward.deadline)


def sampling(config: Config) -> Sampling:
    s = config.sampling
    return Sampling(s.samples, s.temperature, s.max_tokens, s.top_p)

"""Setup of a run: resolves and checks everything that its config names, before the start."""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tba.agents.chat import encoder, endings
from tba.agents.environment import check_tools
from tba.config.mistakes import refuse, together
from tba.config.plugins import Plugin, find, resolved, with_defaults
from tba.config.rules import broken, rules_of_rows
from tba.config.schema import Config
from tba.engines import Engine
from tba.learn.publish import prompt_length
from tba.learn.trainer import SingleTrainer, TrainerSetup
from tba.models import model_path
from tba.models.forward import check_compiler, check_rotary
from tba.models.lora import check_adapter
from tba.models.pretrained import (
    EAGER_TOKENS,
    check_kind,
    check_model,
    load_config,
    load_empty_model,
    load_text,
    model_folder,
)
from tba.models.tokenizer import Tokenizer
from tba.prompt import Prompt
from tba.runs.folder import CONFIG
from tba.runs.journal import check_log
from tba.search.prompts import PromptStream, digest_of
from tba.search.searcher import SearchSetup
from tba.selections import InterleavedSelection
from tba.setup.data import Data, read_data
from tba.setup.machine import Machine, this_machine
from tba.setup.memory import MemoryEstimate
from tba.strategies import Strategy
from tba.streams import Use, seed_of
from tba.tasks._digests import WEIGHTS, digest, digests_of, weights_in
from tba.tasks._memory import Functions, to_send
from tba.types import Sampling
from tba.weights import Transport

READ = ("policy", "task", "engine", "sampling", "reward", "eval")
"""Tables of a config that determine its `Data`."""
EVALUATED = "held-out prompts"
"""Digest of what affects only scores."""
TRAINED_ON = "training prompts"
PROMPTS = {
    *(TRAINED_ON, "tokenizer", "chat template"),
    *("config.json of policy.model", WEIGHTS),
}
"""Digests of what affects what the policy reads, or its log-probs."""
VOLATILE = {"_commit_hash", "_name_or_path", "transformers_version", "dtype", "torch_dtype"}
"""Keys of a model's config that do not affect its log-probs."""
FIRST = 64
"""Number of prompts from which lengths are estimated."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunSetup(Data):
    """Parts of a run, built from its config: plug-ins resolved, options checked, prompts read."""

    config: Config
    strategy: Strategy
    objective: Plugin
    selection: Plugin
    engine: type[Engine]
    reward_functions: Functions | bytes | None
    """Functions passed from Python, pickled if they run in another process."""
    digests: Mapping[str, str]
    """Digests of data, tokenizer and rewards, by name."""
    notes: Sequence[str]
    """Messages to print at the start of the run."""

    @property
    def counts(self) -> str:
        """Text with the number of training prompts and of held-out prompts in use."""
        used = f"evaluating {len(self.held_out):,} of {self.kept_back:,} held-out prompts"
        sets = "".join(f", {len(prompts):,} in {name}" for name, prompts in self.evaluated.items())
        held_out = used if self.held_out else "none held out"
        return f"{len(self.prompts):,} training prompts, {held_out}{sets}"

    @property
    def endings(self) -> list[str]:
        """Lines that describe where generation ends, with a warning if the sources disagree."""
        held = self.task.tools is not None or self.task.program is not None
        chats = held or any(not isinstance(prompt.text, str) for prompt in self.prompts)
        return endings(self.text, chats, self.config.sampling.stop)

    @cached_property
    def first_prompts(self) -> list[np.ndarray]:
        """Tokens of the first training prompts, a sample of all."""
        encode = encoder(self.text, self.task)
        return [encode(prompt) for prompt in self.prompts[:FIRST]]

    def needs(self, machine: Machine) -> MemoryEstimate:
        """Return the memory that the run needs on a machine."""
        return MemoryEstimate.of(self.config, machine, len(self.extremes[1]))

    def by_source(self) -> dict[str, list[Prompt]]:
        """Return the training prompts by source of a mixture; other tasks have one, ""."""
        sources: dict[str, list[Prompt]] = {}
        for prompt in self.prompts:
            sources.setdefault(self.task.source(prompt)[0], []).append(prompt)
        return sources

    def prompt_stream(self) -> PromptStream:
        """Return a new stream of the training prompts."""
        task = self.task
        selections = {}
        for place, (name, prompts) in enumerate(self.by_source().items()):
            pass_reward = task.source(prompts[0])[1].pass_reward
            seed = seed_of(self.config.run.seed, Use.SELECTION, place)
            selections[name] = self.selection.build(prompts, seed, pass_reward)
        chosen = selections.get("")
        if chosen is None:
            chosen = InterleavedSelection(
                selections, self.config.task.weights, lambda p: task.source(p)[0]
            )
        return PromptStream(self.prompts, chosen, self.config.reward.quarantine)

    def trainer_setup(self, is_new: bool = False) -> TrainerSetup:
        """Return the setup of the trainer; a new run checks its reference."""
        c = self.config
        # whether the engine computes the reference itself, without a model
        apart = c.engine.options.get("own_reference", self.engine.own_reference)
        return TrainerSetup(
            config=c,
            objective=self.objective,
            context=self.text.context,
            extremes=self.extremes,
            probe_prompt=prompt_length(self.engine.longest_block),
            checks_reference=is_new and not apart,
        )

    def trainer(
        self, device: str, is_new: bool = False, transport: Transport | None = None
    ) -> SingleTrainer:
        """Load the model and return a trainer that runs in this process."""
        return self.trainer_setup(is_new).build(device, transport=transport)

    def search_setup(self) -> SearchSetup:
        c = self.config
        return SearchSetup(
            config=c,
            sampling=Sampling(**c.sampling.model_dump(exclude={"explore"})),
            held_out=tuple(self.held_out),
            value_rollouts=self.objective.at(0).value_rollouts,
            reward_functions=self.reward_functions,
            evaluated=self.evaluated,
            needs_behavior=needs_behavior(c, self.objective),
        )


def check(
    config: Config,
    functions: Functions | None = None,
    planned: Machine | None = None,
    data: Data | None = None,
) -> RunSetup:
    """Resolve and check everything that a config names, before any process starts.

    `functions`: reward functions passed from Python. `planned`: another machine on which the run
    will execute; local weights, libraries and memory are then not checked. `data`: data of a setup
    with the same `READ` tables, which are reused.
    """
    here = planned is None
    check_log(config.log)
    engine: type[Engine] = find("engines", config.engine.use)
    limit = config.engine.options.get("max_model_len")
    text = load_text(config.policy).within(limit) if data is None else data.text
    config = with_defaults(config)
    _, _, objective, strategy, selection = resolved(config)
    notes, _, _, data = together(
        partial(_check_policy, config, here),
        partial(_check_engine, config, engine, here),
        partial(_check_objective, config, objective),
        lambda: data or read_data(config, functions, text),
    )
    first = objective.at(0)
    goes_back = first.value_rollouts is not None
    by_token = goes_back or (first.head is not None and first.head.on == "response")
    task = data.task
    if (task.program is not None and by_token) or (task.tools is not None and goes_back):
        raise ValueError(
            f"objective.use = {config.objective.use!r} needs values in the middle of a response,"
            " which programs and environments do not have; choose another objective, such as tb"
        )
    if goes_back and config.sampling.truncated == "reject":
        raise ValueError(
            f"sampling.truncated = 'reject' with objective.use = {config.objective.use!r}: rollouts"
            " from the end of a long response are often truncated, and the response would be lost;"
            " set sampling.truncated to keep or to a number, the reward of truncated responses"
        )
    if task.tools is not None:
        check_tools(task, data.prompts[0])
    is_new = not (Path(config.run.folder) / CONFIG).is_file()
    refuse(broken(rules_of_rows(config, len(data.prompts), data.kept_back, is_new)))
    setup = RunSetup(
        config=_with_attention(config.within_epochs(len(data.prompts)), data, text),
        **{each.name: getattr(data, each.name) for each in fields(Data)},
        strategy=strategy.build(),
        objective=objective,
        selection=selection,
        engine=engine,
        reward_functions=to_send(functions, config),
        digests=_digests(config, functions, data),
        notes=notes,
    )
    setup.prompt_stream()  # raises if the selection cannot work
    if here:
        needs = setup.needs(this_machine())
        needs.check()
        setup = replace(setup, config=needs.config)  # with a number as the token budget
    return setup


def _digests(config: Config, functions: Functions | None, data: Data) -> dict[str, str]:
    """Return digests of everything that affects samples, their rewards, or evaluation scores."""
    from transformers import PretrainedConfig

    e = config.eval
    path = model_path(config.policy.model)
    plain, _ = PretrainedConfig.get_config_dict(path, local_files_only=True)
    model = {key: value for key, value in plain.items() if key not in VOLATILE}
    own = data.text.tokenizer
    vocabulary = own.backend_tokenizer.to_str() if own.is_fast else sorted(own.get_vocab())
    sets: list[Any] = [digest_of(data.held_out)]
    for name, prompts in data.evaluated.items():
        sets.append([digest_of(prompts), digests_of(config.task.source(name), functions)])
    levels = [config.task.source(n).options.get("pass_reward") for n in sorted(config.task.sources)]
    answered = [e.samples, e.temperature, config.sampling.max_tokens, data.task.pass_reward]
    answered += levels
    return digests_of(config.task, functions) | {
        "sampling.truncated": digest(config.sampling.truncated),
        TRAINED_ON: digest_of(data.prompts),
        EVALUATED: digest([sets, answered]),
        "tokenizer": digest([vocabulary, str(own.special_tokens_map), sorted(data.text.eos_ids)]),
        "chat template": digest(own.chat_template),
        "config.json of policy.model": digest(model),
        WEIGHTS: digest(weights_in(model_folder(path))),
    }


def _check_policy(config: Config, here: bool) -> list[str]:
    """Raise ValueError if the model cannot be trained with this config; return adapter notes."""
    (check_model if here else check_kind)(config.policy)
    in_4_bits = config.policy.lora is not None and config.policy.lora.load_in_4bit
    in_8_bits = config.trainer.optimizer == "adamw_8bit"
    if (in_4_bits or in_8_bits) and find_spec("bitsandbytes") is None:
        raise ValueError(
            "trainer.optimizer=adamw_8bit and policy.lora.load_in_4bit need bitsandbytes: type"
            " pip install -e '.[quantised]', or remove them"
        )
    if here and config.trainer.compile:
        names = ["clang++" if sys.platform == "darwin" else "g++"]
        instead = "set trainer.compile=false"
        check_compiler("trainer.compile = true", "C++", "CXX", names, instead)
    if config.policy.attention == "flex":
        _check_flex(config, here)
    return [] if config.policy.lora is None else [check_adapter(config.policy)]


def _check_flex(config: Config, here: bool) -> None:
    """Raise ValueError if FlexAttention cannot train here, or would not be compiled."""
    if here and config.runtime.address is None and not this_machine().gpus:
        raise ValueError(
            "policy.attention = 'flex' trains on a GPU only: FlexAttention has no backward pass on"
            " a CPU; set policy.attention=sdpa, or remove it"
        )
    if config.trainer.compile:
        raise ValueError(
            "policy.attention = 'flex' compiles attention for any lengths, and trainer.compile ="
            " true allows no compilation after the start; remove one of them"
        )


def _check_engine(config: Config, engine: type[Engine], here: bool) -> None:
    """Raise ValueError if the engine does not support the config, such as `colocate=sleep`."""
    if config.runtime.colocate == "sleep" and not engine.can_sleep:
        raise ValueError(
            f"runtime.colocate=sleep: engine.use = {config.engine.use!r} cannot give up its memory;"
            " set engine=vllm, or runtime.colocate=share"
        )
    engine.check(config)
    if here:
        engine.check_here(config)


def _with_attention(config: Config, data: Data, text: Tokenizer) -> Config:
    """Resolve attention "auto" to SDPA where eager needs much memory and the model supports it."""
    shortest = len(data.extremes[0]) + 1
    longest = len(data.extremes[-1]) + config.sampling.max_tokens
    if data.task.program is not None:  # a session may have any length
        shortest = 1
        longest = text.context
    check_rotary(load_config(config.policy), shortest, longest)
    policy = config.policy
    is_too_long = policy.attention == "auto" and longest > EAGER_TOKENS
    if is_too_long and load_empty_model(policy)._supports_sdpa:
        policy = policy.model_copy(update={"attention": "sdpa"})
    return config.model_copy(update={"policy": policy})


def _check_objective(c: Config, objective: Plugin) -> None:
    """Raise ValueError if the objective's head changes, or it needs log-probs that are unknown.

    Warnings of the objective are logged.
    """
    first, last = (objective.at(step) for step in (0, c.run.steps))
    if first.head != last.head:
        raise ValueError(
            "objective.head_learning_rate follows trainer.schedule; give a number, not a schedule"
        )
    for told in {first.warning, last.warning} - {None}:
        log.warning(told)
    others = {"sampling.explore": c.sampling.explore, "replay.rollouts": c.replay.rollouts}
    refused = [f"sampling.{name}" for name in c.sampling.reshaped]
    refused += [key for key, value in others.items() if value is not None]
    if refused and needs_behavior(c, objective):
        raise ValueError(
            f"{' and '.join(refused)} does not work with objective.use = {c.objective.use!r},"
            " which needs the exact log-probs of the sampling policy, and these are then unknown;"
            " remove it, or use objective=tb without objective.importance_cap"
        )
    drawn = {"reward": float(c.strategy.use == "reward"), "recent": 0.0} | c.strategy.options
    if drawn["reward"] * (1 - drawn["recent"]) > 0:
        refused.append("replay by reward (strategy.reward above 0)")
    if refused and (first.needs_own_samples or last.needs_own_samples):
        raise ValueError(
            f"{' and '.join(refused)} does not work with objective.use = {c.objective.use!r} and"
            " these options, whose optimum is right only on samples of the policy itself; remove"
            " it, or change the objective (for tb: objective.shift=0)"
        )


def needs_behavior(config: Config, objective: Plugin) -> bool:
    """Return whether the objective needs exact log-probs of the sampling policy at any step."""
    return any(objective.at(step).needs_behavior for step in (0, config.run.steps))

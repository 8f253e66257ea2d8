"""The parts of a run, resolved and checked before any process starts."""

import logging
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from textwrap import shorten

import numpy as np
import torch

from tba.config.plugins import Plugin, resolve_all, with_chat, with_defaults
from tba.config.schema import Config
from tba.config.tables import OFF
from tba.engines import Engine
from tba.learn.policy import Policy
from tba.learn.probe import RESPONSE, probe_tokens, prompt_length
from tba.learn.trainer import SingleTrainer
from tba.learn.warm_up import warm_up
from tba.models.cache import (
    check_compiler,
    check_rotary,
    compile_layers,
    enable_gradient_checkpointing,
)
from tba.models.lora import check_adapter, load_placed
from tba.models.pretrained import (
    EAGER_TOKENS,
    Tokenizer,
    check_model,
    computes_in_bf16,
    load_config,
    load_text,
)
from tba.objectives import Objective
from tba.prompt import Prompt
from tba.runs.early import check_log
from tba.runs.notes import chat_notes, log_doubled_bos, unknown_characters
from tba.runs.sets import evaluation_sets, kept
from tba.runs.warn import RunWarning
from tba.search.chat import encoder, identity
from tba.search.dialogue import check_tools
from tba.search.prompts import PromptStream
from tba.search.searcher import EvaluationSet, SearchSetup
from tba.selections._interleaved import Interleaved
from tba.strategies import Strategy
from tba.streams import Use, seed_of
from tba.tasks import Answered, Task
from tba.tasks._memory import Functions, InMemory, build_task, to_send, with_memory
from tba.tasks._source import RewardSource, source_of
from tba.types import Sampling

DUPLICATES = 0.01
"""Largest share of the training prompts that may be held out as well."""


@dataclass(frozen=True)
class RunSetup:
    """Parts of a run, from a config: every name resolved, every option checked, prompts read."""

    config: Config
    task: Task
    strategy: Strategy
    objective: Plugin
    selection: Plugin
    engine: type[Engine]
    text: Tokenizer
    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]
    reward_functions: Functions | bytes | None
    """Functions passed from Python, pickled if they run in another process."""
    sets: Mapping[str, EvaluationSet]
    """Further evaluation sets, by name."""
    given: Sequence[Answered]
    """Answers from a file, which enter the buffer first."""
    extremes: tuple[np.ndarray, np.ndarray]
    """Tokens of the shortest prompt and of the longest one."""
    rewards: RewardSource
    """What decides rewards."""
    notes: Sequence[str]
    """What the run tells at its start."""
    signs: Sequence[RunWarning]
    """Warnings that are given at the start."""

    def prompt_stream(self) -> PromptStream:
        """Return a new stream of the training prompts, at its beginning."""
        task = self.task
        seed = self.config.run.seed
        deaths = self.config.reward.quarantine
        if not task.part_weights:
            own = seed_of(seed, Use.SELECTION, 0)
            chosen = self.selection.build(self.prompts, own, task.pass_reward)
            return PromptStream(self.prompts, chosen, self.given, deaths)
        parts: dict[str, list[Prompt]] = {}
        for prompt in self.prompts:
            parts.setdefault(task.part(prompt)[0], []).append(prompt)
        selections = {}
        for place, (name, prompts) in enumerate(parts.items()):
            pass_reward = task.part(prompts[0])[1].pass_reward
            own = seed_of(seed, Use.SELECTION, place)
            selections[name] = self.selection.build(prompts, own, pass_reward)
        chosen = Interleaved(selections, task.part_weights, lambda prompt: task.part(prompt)[0])
        return PromptStream(self.prompts, chosen, self.given, deaths)

    def trainer(self, device: str, is_new: bool = False) -> SingleTrainer:
        """Load the model in fp32, or with an adapter, and return its trainer.

        In a new run, its first step checks that the reference is the policy.
        """
        c = self.config
        torch.manual_seed(seed_of(c.run.seed, Use.TORCH))  # a checkpoint has this generator's state
        bf16 = computes_in_bf16(c.policy, device)
        model = load_placed(c.policy, device, bf16, seed=seed_of(c.run.seed, Use.ADAPTER))
        if c.trainer.compile:
            compile_layers(model)
        if c.policy.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        policy = Policy(
            model,
            temperature=c.sampling.temperature,
            autocast=bf16,
            share_prompt=c.policy.share_prompt,
            head=self.objective.at(0).head,
        )
        if c.trainer.compile:
            warm_up(policy, self.text.context)
        policy.check_lengths(self.extremes, c.sampling.max_tokens)
        block = self.engine.longest_block
        # as long as the longest sequence: positions may depend on that
        longest = len(self.extremes[1]) + c.sampling.max_tokens - RESPONSE
        return SingleTrainer(
            policy=policy,
            objective=self.objective,
            settings=c.trainer,
            steps=c.run.steps,
            bf16_weights=c.engine.computes_in_bf16(bf16),
            context=self.text.context,
            probe_prompt=prompt_length(block),
            first_probe=probe_tokens(
                self.extremes, self.text.context, max(longest, prompt_length(block))
            ),
        )

    def _most_at_first(self, bf16: bool) -> float:
        """Return the largest mean |log(pi / ref)| a token, in nats, before the first step."""
        options = self.config.engine.options
        if options.get("own_reference", self.engine.own_reference):
            return math.inf  # its reference is no model
        return 0.05 if bf16 else 0.01

    def search_setup(self) -> SearchSetup:
        c = self.config
        return SearchSetup(
            policy=c.policy,
            task=c.task,
            engine=c.engine,
            sampling=Sampling(**c.sampling.model_dump(exclude={"explore", "explore_share"})),
            reward=c.reward,
            evaluation=c.eval,
            runtime=c.runtime,
            held_out=tuple(self.held_out),
            token_budget=c.trainer.token_budget,
            value_rollouts=self.objective.at(0).value_rollouts,
            reward_functions=self.reward_functions,
            sets=self.sets,
            explore=c.sampling.explore,
            explore_share=c.sampling.explore_share,
            steps=c.run.steps,
        )


def check(config: Config, memory: InMemory | None = None) -> RunSetup:
    """Resolve and check everything that a config names, before any process starts."""
    config = with_memory(config, memory)
    check_log(config.log)
    config = with_defaults(config)
    plugins = resolve_all(config)
    objective, engine = plugins.objective, plugins.engine.cls
    if not issubclass(engine, Engine):
        raise ValueError(f"engine = {config.engine.use!r}: the class must inherit Engine")
    engine.check(config)
    _check_objective(objective, config.run.steps)
    text, notes, config = _with_text(config)
    task = _checked_task(resolve_all(config).task, memory)
    _check_stop(config, text)
    given = _given(task, text)
    _check_behavior(config, objective, task, seeded=len(given) > 0)
    encode, seen = encoder(text, task), set[bytes]()
    kept_back = kept("held-out", task, task.held_out() if config.eval.prompts else [], encode, seen)
    held_out = kept_back[: config.eval.prompts]
    prompts = kept("training", task, task.prompts(), encode, seen)
    if not prompts:
        raise ValueError("the task has no prompts to train on; check its data and sizes in [task]")
    if config.policy.lora is not None:
        notes.append(check_adapter(config.policy))
    if config.trainer.compile:
        check_compiler()
    _check_tools(config, task, objective, prompts[0])
    tokens = text.encode_all(used := [*prompts, *held_out], config.sampling.max_tokens, encode)
    identities = [identity(task, p, ids) for p, ids in zip(used, tokens, strict=True)]
    trained_on, apart = identities[: len(prompts)], set(identities[len(prompts) :])
    if not task.samples_again:
        apart |= {identity(task, p, encode(p)) for p in kept_back[len(held_out) :]}
        prompts, trained_on = _without_held_out(prompts, trained_on, apart)
    if not held_out:
        _check_unevaluated(config)
    sets, encoded = evaluation_sets(config, memory, task, text, set(trained_on))
    encoded += zip(used, tokens, strict=True)
    log_doubled_bos(text, encoded)
    signs = unknown_characters(config.warn.unknown_characters, text, encoded)
    lengths = sorted((ids for _, ids in encoded), key=len)
    config = _with_lengths(config.within_epochs(len(prompts)), lengths)
    functions = None if memory is None else to_send(memory.reward, config)
    parts = RunSetup(
        config, task, plugins.strategy.build(), objective, plugins.selection, engine, text, prompts,
        held_out, functions, sets, given, (lengths[0], lengths[-1]), source_of(config, memory),
        notes, signs,
    )  # fmt: skip
    parts.prompt_stream()  # raises if the selection cannot work
    return parts


def _without_held_out(
    prompts: Sequence[Prompt], identities: Sequence[bytes], held_out: Set[bytes]
) -> tuple[list[Prompt], list[bytes]]:
    """Return the training prompts that are not held out, with their identities.

    Large data sets have a few that are. Raise ValueError if there are more, which is a mistake.
    """
    pairs = list(zip(prompts, identities, strict=True))
    shared = [p for p, own in pairs if own in held_out]
    if len(shared) > DUPLICATES * len(prompts):
        examples = "; ".join(f"{p.id!r}: {shorten(str(p.text), 80)!r}" for p in shared[:3])
        raise ValueError(
            f"{len(shared):,} of {len(prompts):,} training prompts are also held out, so that"
            f" evaluations would not measure what was learned: {examples}. Remove them from one of"
            " the two, name another file for one, or set eval.prompts=0"
        )
    if shared:
        told = "%d of %d training prompts are also held out, and not trained on"
        logging.getLogger(__name__).warning(told, len(shared), len(prompts))
        pairs = [(p, own) for p, own in pairs if own not in held_out]
    return [p for p, _ in pairs], [own for _, own in pairs]


def _with_text(config: Config) -> tuple[Tokenizer, list[str], Config]:
    """Load the tokenizer, which decides what `chat = "auto"` means, with notes on that."""
    text = load_text(config.policy).within(config.engine.context)
    check_model(config.policy)
    has_template = text.tokenizer.chat_template is not None
    return text, chat_notes(config, has_template), with_chat(config, has_template)


def _checked_task(plugin: Plugin, memory: InMemory | None) -> Task:
    """Build the task, and check the models and servers that it needs."""
    task = build_task(plugin, memory)
    task.check()
    return task


def _given(task: Task, text: Tokenizer) -> Sequence[Answered]:
    """Return the answers from a file, whose tokens the model must know."""
    given = task.given()
    for answer in [answer for each in given for answer in each.answers]:
        ids = text.tokenizer(answer, add_special_tokens=False)["input_ids"]
        text.check_known(ids, f"task.seeds: the answer {shorten(answer, 80)!r}")
    return given


def _check_tools(config: Config, task: Task, objective: Plugin, prompt: Prompt) -> None:
    """ValueError if the task has tools that the run cannot use."""
    if task.tools is None:
        return
    if objective.at(0).value_rollouts is not None:
        raise ValueError(
            "task.environment: the objective needs rollouts from the middle of a response, and an"
            " environment cannot go back there; choose another objective, such as tb"
        )
    check_tools(task.tools, prompt, config.reward.isolate)


def _check_objective(objective: Plugin, steps: int) -> None:
    """Raise ValueError for another kind of class, or a head that would change during the run."""
    if not issubclass(objective.cls, Objective):
        raise ValueError(
            f"objective.use: {objective.cls.__name__} is no objective; let it inherit from"
            " tba.objectives.Objective"
        )
    if objective.at(0).head != objective.at(steps).head:
        raise ValueError(
            "objective.head_learning_rate follows trainer.schedule; give a number, not a schedule"
        )


def _check_unevaluated(config: Config) -> None:
    """Raise ValueError for settings that need held-out prompts, of which there are none."""
    if config.eval.sets:
        raise ValueError("eval.sets are evaluated beside the held-out prompts, but there are none")
    if config.checkpoint.keep_best:
        key = "checkpoint.keep_best" if config.eval.patience is None else "eval.patience"
        raise ValueError(
            f"{key} needs held-out prompts, but there are none; set eval.prompts=128 and a held-out"
            f" set in [task], or remove {key}"
        )


def _with_lengths(config: Config, prompts: Sequence[np.ndarray]) -> Config:
    """Replace attention "auto" by "sdpa" if prompt and response may be too long for eager."""
    longest = len(prompts[-1]) + config.sampling.max_tokens
    check_rotary(load_config(config.policy), len(prompts[0]) + 1, longest)
    if config.policy.attention != "auto" or longest <= EAGER_TOKENS:
        return config
    policy = config.policy.model_copy(update={"attention": "sdpa"})
    return config.model_copy(update={"policy": policy})


def _check_behavior(config: Config, objective: Plugin, task: Task, seeded: bool) -> None:
    """Raise ValueError if the objective needs log-probs of the sampling policy that are missing."""
    if not any(objective.at(s).uses_behavior for s in (0, config.run.steps)):
        return
    lacks: dict[str, str] = {}
    for name, value in config.sampling.reshaped.items():
        lacks[f"sampling.{name} = {value}"] = f"without it; set sampling.{name}={OFF[name]}"
    if config.sampling.explore is not None:
        lacks["sampling.explore"] = "at sampling.temperature; remove sampling.explore"
    if seeded:
        lacks["task.seeds"] = "of the reference; remove task.seeds"
    if task.leaves_out is not None:
        lacks[task.leaves_out] = f"before answers were left out; remove {task.leaves_out}"
    for what, why in lacks.items():
        raise ValueError(
            f"{what} does not work with objective.use = {config.objective.use!r}, which compares"
            f" the policy with the one that sampled: the log-probs are those {why}, or use an"
            " objective without this comparison, such as plain trajectory balance: objective=tb"
        )


def _check_stop(config: Config, text: Tokenizer) -> None:
    """Raise ValueError for a stop string with a special token, which no decoded text contains."""
    for stop in config.sampling.stop:
        special = [token for token in text.tokenizer.all_special_tokens if token in stop]
        if special:
            raise ValueError(
                f"sampling.stop has {stop!r}, but the text of a response has no special tokens;"
                f" set policy.eos_token={special[0]!r} to end responses with it"
            )

"""The setup of a run: everything that its config names, resolved and checked before the start."""

import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from tba.config.errors import about, together
from tba.config.plugins import Plugin, find, resolve_all, with_defaults
from tba.config.schema import Config
from tba.engines import Engine
from tba.learn.publish import prompt_length
from tba.learn.trainer import SingleTrainer, TrainerSetup
from tba.models.cache import check_compiler, check_rotary
from tba.models.lora import check_adapter
from tba.models.pretrained import (
    EAGER_TOKENS,
    Encode,
    Tokenizer,
    check_kind,
    check_model,
    load_config,
    load_empty_model,
    load_text,
)
from tba.models.template import unread
from tba.prompt import Prompt
from tba.runs.checks import check_unevaluated
from tba.runs.journal import check_log
from tba.runs.log import CONFIG
from tba.runs.memory import Machine, Needs, this_machine
from tba.search.chat import check_stop, encoder, endings, identity
from tba.search.dialogue import check_tools
from tba.search.prompts import PromptStream, digest_of
from tba.search.searcher import EvaluationSet, SearchSetup
from tba.selections import Interleaved
from tba.strategies import Strategy
from tba.streams import Use, seed_of
from tba.tasks import Task
from tba.tasks._memory import Functions, build_task, named_task, to_send
from tba.tasks._rendering import Rendering
from tba.tasks._source import digest, sources_of
from tba.types import Sampling
from tba.weights import Transport

Encoded = tuple[Prompt, np.ndarray]
"""A prompt with its tokens."""
READ = ("policy", "task", "engine", "sampling", "reward", "eval")
"""Tables of a config that decide its `Data`."""
EVALUATED = "held-out prompts"
"""Source of scores alone."""
TRAINED_ON = "training prompts"
PROMPTS = {TRAINED_ON, "tokenizer", "chat template"}
"""Sources of what the policy reads."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """Contents of the files of a run but its weights: the task, and prompts by the tokenizer."""

    text: Tokenizer
    task: Task
    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]
    sets: Mapping[str, EvaluationSet]
    """Further evaluation sets, by name."""
    extremes: tuple[np.ndarray, np.ndarray]
    """Tokens of the shortest prompt and of the longest one."""


@dataclass(frozen=True)
class RunSetup(Data):
    """Parts of a run, from a config: every name resolved, every option checked, prompts read."""

    config: Config
    strategy: Strategy
    objective: Plugin
    selection: Plugin
    engine: type[Engine]
    reward_functions: Functions | bytes | None
    """Functions passed from Python, pickled if they run in another process."""
    sources: Mapping[str, str]
    """Digests of data, tokenizer and rewards, by their names."""
    notes: Sequence[str]
    """What the run tells at its start."""

    @property
    def endings(self) -> list[str]:
        """Lines that say where generation ends, and warn where its sources disagree."""
        held = self.task.tools is not None or self.task.program is not None
        chats = held or any(not isinstance(prompt.text, str) for prompt in self.prompts)
        return endings(self.text, chats, self.config.sampling.stop)

    def by_part(self) -> dict[str, list[Prompt]]:
        """Return the training prompts of each part of a mixture; the name of another task is ""."""
        parts: dict[str, list[Prompt]] = {}
        for prompt in self.prompts:
            parts.setdefault(self.task.part(prompt)[0], []).append(prompt)
        return parts

    def prompt_stream(self) -> PromptStream:
        """Return a new stream of the training prompts, at its beginning."""
        task = self.task
        selections = {}
        for place, (name, prompts) in enumerate(self.by_part().items()):
            pass_reward = task.part(prompts[0])[1].pass_reward
            seed = seed_of(self.config.run.seed, Use.SELECTION, place)
            selections[name] = self.selection.build(prompts, seed, pass_reward)
        chosen = selections.get("")
        if chosen is None:
            chosen = Interleaved(selections, task.part_weights, lambda p: task.part(p)[0])
        return PromptStream(self.prompts, chosen, self.config.reward.quarantine)

    def trainer_setup(self, is_new: bool = False) -> TrainerSetup:
        """Return what the trainer is built from; a new run checks its reference."""
        c = self.config
        # whether the reference is no model
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
        """Load the model and return its trainer in this process."""
        return self.trainer_setup(is_new).build(device, transport=transport)

    def search_setup(self) -> SearchSetup:
        c = self.config
        return SearchSetup(
            config=c,
            sampling=Sampling(**c.sampling.model_dump(exclude={"explore", "explore_share"})),
            held_out=tuple(self.held_out),
            value_rollouts=self.objective.at(0).value_rollouts,
            reward_functions=self.reward_functions,
            sets=self.sets,
            needs_behavior=needs_behavior(c, self.objective),
        )


def check(
    config: Config,
    functions: Functions | None = None,
    planned: Machine | None = None,
    data: Data | None = None,
) -> RunSetup:
    """Resolve and check everything that a config names, before any process starts.

    `functions` are reward functions that were passed from Python. For a run that is planned for
    another machine, files of weights, libraries and memory here are not checked. `data` are those
    of a setup with the same tables `READ`, which are not read again.
    """
    setup = _setup_of(config, functions, planned is None, data)
    setup.prompt_stream()  # raises if the selection cannot work
    if planned is None:
        Needs.of(setup.config, this_machine(), len(setup.extremes[1])).check()
    return setup


def _setup_of(
    config: Config, functions: Functions | None, here: bool, data: Data | None
) -> RunSetup:
    """Return the parts of a run, with what is needed `here` if it shall run here."""
    check_log(config.log)
    engine: type[Engine] = find("engines", config.engine.use)
    limit = config.engine.options.get("max_model_len")
    text = load_text(config.policy).within(limit) if data is None else data.text
    config = with_defaults(config)
    plugins = resolve_all(config)
    objective = plugins.objective
    notes, _, _, data = together(
        partial(_check_policy, config, here),
        partial(_check_engine, config, engine, here),
        partial(_check_objective, config, objective),
        lambda: data or _read(config, functions, text, plugins.task),
    )
    _check_tools(config, data.task, objective, data.prompts[0])
    if not data.held_out:
        check_unevaluated(config)
    _check_held_out(config, len(data.held_out))
    return RunSetup(
        config=_with_lengths(config.within_epochs(len(data.prompts)), data, text),
        text=text,
        task=data.task,
        prompts=data.prompts,
        held_out=data.held_out,
        sets=data.sets,
        extremes=data.extremes,
        strategy=plugins.strategy.build(),
        objective=objective,
        selection=plugins.selection,
        engine=engine,
        reward_functions=to_send(functions, config),
        sources=_sources(config, functions, data),
        notes=notes,
    )


def _read(config: Config, functions: Functions | None, text: Tokenizer, plugin: Plugin) -> Data:
    """Build the task and read its prompts, and those of further evaluation sets."""
    task = build_task(plugin, functions)
    task.check()
    check_stop(config.sampling.stop, text)
    prompts, held_out, encoded = read_prompts(config, task, text)
    trained_on = {identity(task, p, ids) for p, ids in encoded[: len(prompts)]}
    sets, of_sets = evaluation_sets(config, functions, task, text, trained_on)
    lengths = sorted((ids for _, ids in encoded + of_sets), key=len)
    return Data(text, task, prompts, held_out, sets, (lengths[0], lengths[-1]))


def _check_held_out(config: Config, count: int) -> None:
    """Raise ValueError if fewer prompts are held out than a config of a new run says."""
    e = config.eval
    is_new = not (Path(config.run.folder) / CONFIG).is_file()  # others keep what they have
    if is_new and "prompts" in e.model_fields_set and e.prompts > count:
        raise ValueError(
            f"eval.prompts = {e.prompts}, but {count} prompts are held out: set that number,"
            " or remove it for all, at most 128"
        )


def _sources(config: Config, functions: Functions | None, data: Data) -> dict[str, str]:
    """Return digests of what decides samples, their rewards, and the scores of evaluations."""
    e = config.eval
    own = data.text.tokenizer
    vocabulary = own.backend_tokenizer.to_str() if own.is_fast else sorted(own.get_vocab())
    sets = [digest_of(each) for each in (data.held_out, *(s.prompts for s in data.sets.values()))]
    answered = [e.samples, e.temperature, e.seed, config.sampling.max_tokens, data.task.pass_reward]
    return sources_of(config, functions) | {
        TRAINED_ON: digest_of(data.prompts),
        EVALUATED: digest([sets, answered]),
        "tokenizer": digest([vocabulary, str(own.special_tokens_map), sorted(data.text.eos_ids)]),
        "chat template": digest(own.chat_template),
    }


def _check_policy(config: Config, here: bool) -> list[str]:
    """Raise ValueError for a model that cannot be trained so; return notes on its adapter."""
    (check_model if here else check_kind)(config.policy)
    in_4_bits = config.policy.lora is not None and config.policy.lora.load_in_4bit
    in_8_bits = config.trainer.optimizer == "adamw_8bit"
    if (in_4_bits or in_8_bits) and find_spec("bitsandbytes") is None:
        raise ValueError(
            "trainer.optimizer=adamw_8bit and policy.lora.load_in_4bit need bitsandbytes: type"
            " pip install 'tba[quantised]', or remove them"
        )
    if here and config.trainer.compile:
        names = ["clang++" if sys.platform == "darwin" else "g++"]
        instead = "set trainer.compile=false"
        check_compiler("trainer.compile = true", "C++", "CXX", names, instead)
    return [] if config.policy.lora is None else [check_adapter(config.policy)]


def _check_engine(config: Config, engine: type[Engine], here: bool) -> None:
    """Raise ValueError if the engine cannot work with the config, or shall sleep and cannot."""
    if config.runtime.colocate == "sleep" and not engine.can_sleep:
        raise ValueError(
            f"runtime.colocate=sleep: engine.use = {config.engine.use!r} cannot give up its memory;"
            " set engine=vllm, or runtime.colocate=share"
        )
    engine.check(config)
    if here:
        engine.check_here(config)


def _check_tools(config: Config, task: Task, objective: Plugin, prompt: Prompt) -> None:
    """ValueError if the task has tools, or a program, that the run cannot use."""
    first = objective.at(0)
    goes_back = first.value_rollouts is not None
    by_token = goes_back or (first.head is not None and first.head.on == "response")
    if (task.program is not None and by_token) or (task.tools is not None and goes_back):
        raise ValueError(
            f"objective.use = {config.objective.use!r} needs values in the middle of a response,"
            " which programs and environments do not have; choose another objective, such as tb"
        )
    if task.tools is not None:
        check_tools(task.tools, prompt, config.reward.isolate)


def _with_lengths(config: Config, data: Data, text: Tokenizer) -> Config:
    """Choose SDPA for attention "auto", if the model has it, where eager needs much memory."""
    shortest = len(data.extremes[0]) + 1
    longest = len(data.extremes[-1]) + config.sampling.max_tokens
    if data.task.program is not None:  # a session may have any length, whatever its row has
        shortest = 1
        longest = text.context
    check_rotary(load_config(config.policy), shortest, longest)
    policy = config.policy
    is_too_long = policy.attention == "auto" and longest > EAGER_TOKENS
    if is_too_long and load_empty_model(policy)._supports_sdpa:
        policy = policy.model_copy(update={"attention": "sdpa"})
    return config.model_copy(update={"policy": policy})


def _check_objective(config: Config, objective: Plugin) -> None:
    """Raise ValueError if the objective's head changes, or it needs log-probs that are lost.

    What the objective warns of is logged.
    """
    if objective.at(0).head != objective.at(config.run.steps).head:
        raise ValueError(
            "objective.head_learning_rate follows trainer.schedule; give a number, not a schedule"
        )
    for told in {objective.at(step).warning for step in (0, config.run.steps)} - {None}:
        log.warning(told)
    if not needs_behavior(config, objective):
        return
    c = config
    others = {"sampling.explore": c.sampling.explore, "replay.rollouts": c.replay.rollouts}
    refused = [f"sampling.{name}" for name in c.sampling.reshaped]
    refused += [key for key, value in others.items() if value is not None]
    if refused:
        raise ValueError(
            f"{' and '.join(refused)} does not work with objective.use = {config.objective.use!r},"
            " which needs the exact log-probs of the policy that sampled: they are not known then;"
            " remove it, or use objective=tb without objective.importance_cap"
        )


def needs_behavior(config: Config, objective: Plugin) -> bool:
    """Return whether the objective needs the exact log-probs of the sampling policy at any step."""
    return any(objective.at(step).needs_behavior for step in (0, config.run.steps))


def read_prompts(
    config: Config, task: Task, text: Tokenizer
) -> tuple[list[Prompt], list[Prompt], list[Encoded]]:
    """Return the prompts to train on, those held out, and all of these with their tokens."""
    encode = encoder(text, task)
    seen: set[bytes] = set()
    kept_back = kept("held-out", task, task.held_out() if config.eval.prompts else [], encode, seen)
    held_out = kept_back[: config.eval.prompts]
    prompts = kept("training", task, task.prompts(), encode, seen)
    if not prompts:
        raise ValueError("the task has no prompts to train on; check its data and sizes in [task]")
    used = [*prompts, *held_out]
    is_cut = task.program is not None  # the program reads the row
    tokens = text.encode_all(used, config.sampling.max_tokens, encode, is_cut)
    for name in unread(() if is_cut else used, str(text.tokenizer.chat_template), task.tools):
        told = "the column %r is not in the prompt; name it in task.prompt, or rename it"
        log.warning(told, name)
    together = list(zip(used, tokens, strict=True))
    encoded = together[: len(prompts)]
    evaluated = together[len(prompts) :]
    if not task.samples_again:
        apart = {identity(task, prompt, ids) for prompt, ids in evaluated}
        apart |= {identity(task, p, encode(p)) for p in kept_back[len(held_out) :]}
        encoded = _without_held_out(task, encoded, apart)
    return [prompt for prompt, _ in encoded], held_out, encoded + evaluated


def _without_held_out(
    task: Task, encoded: Sequence[Encoded], held_out: Set[bytes]
) -> list[Encoded]:
    """Return the training prompts whose identity is not held out; ValueError if there is none."""
    left = [(p, ids) for p, ids in encoded if identity(task, p, ids) not in held_out]
    told = f"{len(encoded) - len(left):,} of {len(encoded):,} training prompts are also held out"
    if not left:
        raise ValueError(f"{told}; name another file for one of the two, or set eval.prompts=0")
    if len(left) < len(encoded):
        log.warning("%s, and not trained on", told)
    return left


def kept(
    what: str, task: Task, prompts: Sequence[Prompt], encode: Encode, seen: set[bytes]
) -> list[Prompt]:
    """Return the prompts but those that are too long, or have been `seen`, if the task says so.

    `seen` is added to. ValueError if none is left of the task, or of a part of it.
    """
    left: list[Prompt] = []
    why: Counter[str] = Counter()
    for prompt in prompts:
        part, own = task.part(prompt)
        if isinstance(own, Rendering) and (own.max_prompt_tokens or own.drop_duplicates):
            ids = encode(prompt)
            known = part.encode() + b"/" + identity(task, prompt, ids)
            if own.max_prompt_tokens and len(ids) > own.max_prompt_tokens:
                why[f"longer than task.max_prompt_tokens = {own.max_prompt_tokens}"] += 1
                continue
            if own.drop_duplicates and known in seen:
                why["duplicates (task.drop_duplicates)"] += 1
                continue
            seen.add(known)
        left.append(prompt)
    for reason, count in why.items():
        log.warning("%d of %d %s prompts are left out: %s", count, len(prompts), what, reason)
    if lost := {task.part(p)[0] for p in prompts} - {task.part(p)[0] for p in left}:
        of_part = "".join(f" of task.parts.{name}" for name in sorted(lost) if name)
        raise ValueError(
            f"all {what} prompts{of_part} are {' or '.join(why)}; raise it, or drop it"
        )
    return left


def evaluation_sets(
    config: Config, functions: Functions | None, task: Task, text: Tokenizer, trained_on: Set[bytes]
) -> tuple[dict[str, EvaluationSet], list[Encoded]]:
    """Return the sets by name, and all their prompts with their tokens; ValueError if one is wrong.

    Prompts whose identity is trained on are left out, unless the task samples from these again.
    `task` is the task of the run.
    """
    sets: dict[str, EvaluationSet] = {}
    encoded: list[Encoded] = []
    for name, table in config.eval.sets.items():
        key = f"eval.sets.{name}"
        if name in task.part_weights:
            raise ValueError(f"[{key}]: a part of the task has this name, too; rename one of them")
        options = table.options if table.use else config.task.options | table.options
        use = table.use or config.task.use
        own = named_task(key, use, options, functions)
        with about(f"[{key}]"):  # errors speak of `task.`
            own.check()
            prompts = kept(name, own, own.held_out(), encoder(text, own), set())
        is_cut = own.program is not None
        tokens = text.encode_all(prompts, config.sampling.max_tokens, encoder(text, own), is_cut)
        encoded += zip(prompts, tokens, strict=True)
        fresh = []
        for prompt, ids in zip(prompts, tokens, strict=True):
            if own.samples_again or identity(own, prompt, ids) not in trained_on:
                fresh.append(prompt)
        if not fresh:
            why = "all of its prompts are trained on" if prompts else "it has no held-out prompts"
            raise ValueError(f"[{key}]: {why}; give it data of its own, or remove it")
        if left_out := len(prompts) - len(fresh):
            told = "%s: %d of %d prompts are trained on, and left out"
            log.warning(told, key, left_out, len(prompts))
        if own.tools is not None:
            check_tools(own.tools, fresh[0], config.reward.isolate)
        chosen = fresh[: table.prompts or config.eval.prompts]
        sets[name] = EvaluationSet(type(config.task)(use=use, **options), tuple(chosen))
    return sets, encoded

"""Data of a run: its task, its tokenized prompts, and additional evaluation sets."""

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from math import ceil

import numpy as np

from tba.agents.chat import check_stop, encoder, identity
from tba.agents.environment import check_tools
from tba.config.mistakes import about
from tba.config.plugins import Plugin
from tba.config.schema import Config
from tba.models.pretrained import Encode, Tokenizer
from tba.models.template import unread
from tba.prompt import Prompt
from tba.search.prompts import EvaluationSet
from tba.tasks import Task
from tba.tasks._memory import Functions, build_task, named_task
from tba.tasks._rendering import Rendering

Encoded = tuple[Prompt, np.ndarray]
"""A prompt with its tokens."""

UNWRITTEN = "have unknown tokens: the tokenizer of policy.model = {!r} cannot write them"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """Inputs of a run except weights: tokenizer, task and prompts."""

    text: Tokenizer
    task: Task
    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]
    kept_back: int
    """Total number of held-out prompts; evaluations use the first `eval.prompts`."""
    sets: Mapping[str, EvaluationSet]
    """Additional evaluation sets, by name."""
    extremes: tuple[np.ndarray, np.ndarray]
    """Tokens of the shortest and of the longest prompt."""


def read_data(config: Config, functions: Functions | None, text: Tokenizer, plugin: Plugin) -> Data:
    """Build the task, and read its prompts and the additional evaluation sets."""
    task = build_task(plugin, functions)
    task.check()
    check_stop(config.sampling.stop, text)
    prompts, held_out, kept_back, encoded = read_prompts(config, task, text)
    trained_on = {identity(task, p, ids) for p, ids in encoded[: len(prompts)]}
    sets, of_sets = evaluation_sets(config, functions, task, text, trained_on)
    lengths = sorted((ids for _, ids in encoded + of_sets), key=len)
    return Data(text, task, prompts, held_out, kept_back, sets, (lengths[0], lengths[-1]))


def read_prompts(
    config: Config, task: Task, text: Tokenizer
) -> tuple[list[Prompt], list[Prompt], int, list[Encoded]]:
    """Return (training prompts, evaluation prompts, number held out, both kinds with tokens).

    Raises ValueError if no training prompts remain.
    """
    encode = encoder(text, task)
    allowed = config.task.allow_loss
    seen: set[bytes] = set()
    kept_back = usable_prompts(
        "held-out", task, task.held_out() if config.eval.prompts else [], encode, seen, allowed
    )
    held_out = kept_back[: config.eval.prompts]
    prompts = usable_prompts("training", task, task.prompts(), encode, seen, allowed)
    if not prompts:
        raise ValueError("the task has no prompts to train on; check its data and sizes in [task]")
    used = [*prompts, *held_out]
    is_cut = task.program is not None  # the program reads the row
    tokens = text.encode_all(used, config.sampling.max_tokens, encode, is_cut)
    for name in unread(() if is_cut else used, text.tokenizer.chat_template, task.tools):
        told = "the column %r is not in the prompt; name it in task.prompt, or rename it"
        log.warning(told, name)
    together = list(zip(used, tokens, strict=True))
    lost = [p for p, ids in together if text.loses(p, ids) and not is_cut]
    check_loss(task, "prompts", lost, used, UNWRITTEN.format(config.policy.model), allowed)
    encoded = together[: len(prompts)]
    evaluated = together[len(prompts) :]
    if not task.samples_again:
        apart = {identity(task, prompt, ids) for prompt, ids in evaluated}
        apart |= {identity(task, p, encode(p)) for p in kept_back[len(held_out) :]}
        is_apart = [identity(task, p, ids) in apart for p, ids in encoded]
        left = [pair for pair, also in zip(encoded, is_apart, strict=True) if not also]
        if not left:
            raise ValueError(
                f"all {len(encoded):,} training prompts are also held out; name another file for"
                " one of the two, or set eval.prompts=0"
            )
        lost = [p for (p, _), also in zip(encoded, is_apart, strict=True) if also]
        why = "are also held out, and not trained on"
        check_loss(task, "training prompts", lost, prompts, why, allowed)
        encoded = left
    return [p for p, _ in encoded], held_out, len(kept_back), encoded + evaluated


def check_loss(
    task: Task, what: str, lost: Sequence[Prompt], of: Sequence[Prompt], why: str, allowed: float
) -> None:
    """Warn of lost prompts; ValueError if a part loses more than one, and more than is `allowed`.

    All causes of loss come here.
    """
    every = Counter(task.part(prompt)[0] for prompt in of)
    for part, count in Counter(task.part(prompt)[0] for prompt in lost).items():
        named = f"{what} of task.parts.{part}" if part else what
        told = f"{count:,} of {every[part]:,} {named} {why}"
        if count > max(1, allowed * every[part]):
            raise ValueError(
                f"{told}, more than task.allow_loss = {allowed:g}; change the data, or set"
                f" task.allow_loss={ceil(100 * count / every[part]) / 100:g} if that is meant"
            )
        log.warning(told)


def usable_prompts(
    what: str, task: Task, prompts: Sequence[Prompt], encode: Encode, seen: set[bytes],
    allowed: float,
) -> list[Prompt]:  # fmt: skip
    """Drop prompts that are too long or already `seen`, as configured by the task.

    Adds to `seen`. Raises ValueError if the task, or a part of it, has no prompts left, or if it
    has lost more rows than are `allowed`.
    """
    left: list[Prompt] = []
    lost: defaultdict[str, list[Prompt]] = defaultdict(list)
    firsts: dict[str, Prompt] = {}
    for prompt in prompts:
        part, own = task.part(prompt)
        firsts.setdefault(part, prompt)
        if isinstance(own, Rendering) and (own.max_prompt_tokens or own.drop_duplicates):
            ids = encode(prompt)
            known = part.encode() + b"/" + identity(task, prompt, ids)
            if own.max_prompt_tokens and len(ids) > own.max_prompt_tokens:
                reason = f"longer than task.max_prompt_tokens = {own.max_prompt_tokens}"
                lost[reason].append(prompt)
                continue
            if own.drop_duplicates and known in seen:
                lost["duplicates (task.drop_duplicates)"].append(prompt)
                continue
            seen.add(known)
        left.append(prompt)
    for reason, dropped in lost.items():  # as the config says
        check_loss(task, f"{what} prompts", dropped, prompts, f"are left out: {reason}", 1.0)
    for first in firsts.values():
        _, own = task.part(first)
        for (split, why), count in own.left_out.items() if isinstance(own, Rendering) else ():
            if (split == "train") == (what == "training"):
                rows = [first] * count
                check_loss(task, f"{what} rows", rows, [*prompts, *rows], why, allowed)
    if empty := firsts.keys() - {task.part(p)[0] for p in left}:
        of_part = "".join(f" of task.parts.{name}" for name in sorted(empty) if name)
        raise ValueError(
            f"all {what} prompts{of_part} are {' or '.join(lost)}; raise it, or drop it"
        )
    return left


def evaluation_sets(
    config: Config, functions: Functions | None, task: Task, text: Tokenizer, trained_on: Set[bytes]
) -> tuple[dict[str, EvaluationSet], list[Encoded]]:
    """Return the sets by name, and all their prompts with tokens; ValueError if a set is invalid.

    Prompts that are also trained on are dropped, unless the set's task `samples_again`. `task` is
    the task of the run.
    """
    sets: dict[str, EvaluationSet] = {}
    encoded: list[Encoded] = []
    allowed = config.task.allow_loss
    for name, table in config.eval.sets.items():
        key = f"eval.sets.{name}"
        if name in task.part_weights:
            raise ValueError(f"[{key}]: a part of the task has this name, too; rename one of them")
        options = table.options if table.use else config.task.options | table.options
        use = table.use or config.task.use
        own = named_task(key, use, options, functions)
        with about(f"[{key}]"):  # error messages name keys of `task.`
            own.check()
            encode = encoder(text, own)
            prompts = usable_prompts(key, own, own.held_out(), encode, set(), allowed)
        is_cut = own.program is not None
        tokens = text.encode_all(prompts, config.sampling.max_tokens, encode, is_cut)
        pairs = list(zip(prompts, tokens, strict=True))
        encoded += pairs
        lost = [p for p, ids in pairs if text.loses(p, ids) and not is_cut]
        unwritten = UNWRITTEN.format(config.policy.model)
        check_loss(own, f"{key} prompts", lost, prompts, unwritten, allowed)
        known = set() if own.samples_again else trained_on
        again = [p for p, ids in pairs if identity(own, p, ids) in known]
        fresh = [p for p, ids in pairs if identity(own, p, ids) not in known]
        if not fresh:
            why = "all of its prompts are trained on" if prompts else "it has no held-out prompts"
            raise ValueError(f"[{key}]: {why}; give it separate data, or remove it")
        told = "are trained on, and left out"
        check_loss(own, f"{key} prompts", again, prompts, told, allowed)
        if own.tools is not None:
            check_tools(own, fresh[0])
        chosen = fresh[: config.eval.prompts]
        sets[name] = EvaluationSet(type(config.task)(use=use, **options), tuple(chosen))
    return sets, encoded

"""Data of a run: its task, its tokenized prompts, and sources that are only evaluated."""

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from math import ceil

import numpy as np

from tba.agents.chat import check_stop, encoder, identity
from tba.agents.environment import check_tools
from tba.config.mistakes import about
from tba.config.schema import Config
from tba.models.template import unread
from tba.models.tokenizer import Encode, Tokenizer
from tba.prompt import Prompt
from tba.tasks import Task
from tba.tasks._memory import Functions, build_source, build_task
from tba.tasks._rendering import Rendering

Encoded = tuple[Prompt, np.ndarray]
"""A prompt with its tokens."""

UNWRITTEN = "have unknown tokens: the tokenizer of policy.model = {!r} cannot encode them"

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
    evaluated: Mapping[str, tuple[Prompt, ...]]
    """Prompts of the sources that are only evaluated, by name."""
    extremes: tuple[np.ndarray, np.ndarray]
    """Tokens of the shortest and of the longest prompt."""


def read_data(config: Config, functions: Functions | None, text: Tokenizer) -> Data:
    """Build the task, and read its prompts and all sources that are only evaluated."""
    task = build_task(config.task, functions)
    task.check()
    check_stop(config.sampling.stop, text)
    prompts, held_out, kept_back, encoded = read_prompts(config, task, text)
    trained_on = {identity(task, p, ids) for p, ids in encoded[: len(prompts)]}
    evaluated: dict[str, tuple[Prompt, ...]] = {}
    for name, source in config.task.sources.items():
        if source.weight == 0:
            of_source = read_source(config, name, functions, text, trained_on)
            evaluated[name] = tuple(prompt for prompt, _ in of_source)
            encoded += of_source
    lengths = sorted((ids for _, ids in encoded), key=len)
    return Data(text, task, prompts, held_out, kept_back, evaluated, (lengths[0], lengths[-1]))


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
    reads = () if task.program is not None else used  # the program reads the row
    for name in unread(reads, text.tokenizer.chat_template, task.tools):
        told = "the column %r is not in the prompt; name it in task.prompt, or rename it"
        log.warning(told, name)
    together = _encoded("prompts", config, task, text, used)
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
    """Warn of lost prompts; ValueError if a source loses more than one, and more than is `allowed`.

    All causes of loss come here.
    """
    every = Counter(task.source(prompt)[0] for prompt in of)
    for source, count in Counter(task.source(prompt)[0] for prompt in lost).items():
        named = f"{what} of task.sources.{source}" if source else what
        told = f"{count:,} of {every[source]:,} {named} {why}"
        if count > max(1, allowed * every[source]):
            raise ValueError(
                f"{told}, more than task.allow_loss = {allowed:g}; change the data, or set"
                f" task.allow_loss={ceil(100 * count / every[source]) / 100:g} if that is intended"
            )
        log.warning(told)


def usable_prompts(
    what: str, task: Task, prompts: Sequence[Prompt], encode: Encode, seen: set[bytes],
    allowed: float,
) -> list[Prompt]:  # fmt: skip
    """Drop prompts that are too long or already `seen`, as configured by the task.

    Adds to `seen`. Raises ValueError if the task, or a source of it, has no prompts left, or if it
    has lost more rows than are `allowed`.
    """
    left: list[Prompt] = []
    lost: defaultdict[str, list[Prompt]] = defaultdict(list)
    firsts: dict[str, Prompt] = {}
    for prompt in prompts:
        source, own = task.source(prompt)
        firsts.setdefault(source, prompt)
        if isinstance(own, Rendering) and (own.max_prompt_tokens or own.drop_duplicates):
            ids = encode(prompt)
            known = source.encode() + b"/" + identity(task, prompt, ids)
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
        _, own = task.source(first)
        for (split, why), count in own.left_out.items() if isinstance(own, Rendering) else ():
            if (split == "train") == (what == "training"):
                rows = [first] * count
                check_loss(task, f"{what} rows", rows, [*prompts, *rows], why, allowed)
    if empty := firsts.keys() - {task.source(p)[0] for p in left}:
        of_source = "".join(f" of task.sources.{name}" for name in sorted(empty) if name)
        raise ValueError(
            f"all {what} prompts{of_source} are {' or '.join(lost)}; change what excludes them"
        )
    return left


def read_source(
    config: Config, name: str, functions: Functions | None, text: Tokenizer, trained_on: Set[bytes]
) -> list[Encoded]:
    """Return the prompts of a source that is only evaluated; ValueError if it is invalid.

    Prompts that are also trained on are dropped, unless the source's task `samples_again`.
    """
    task = build_source(config.task, name, functions)
    key = f"task.sources.{name}"
    allowed = config.task.allow_loss
    with about(f"[{key}]"):  # error messages name keys of `task.`
        task.check()
        prompts = usable_prompts(key, task, task.held_out(), encoder(text, task), set(), allowed)
    pairs = _encoded(f"{key} prompts", config, task, text, prompts)
    known = set() if task.samples_again else trained_on
    fresh: list[Encoded] = []
    again: list[Prompt] = []
    for prompt, ids in pairs:
        if identity(task, prompt, ids) in known:
            again.append(prompt)
        else:
            fresh.append((prompt, ids))
    if not fresh:
        why = "all of its prompts are trained on" if prompts else "it has no held-out prompts"
        raise ValueError(f"[{key}]: {why}; give it separate data, or remove it")
    check_loss(task, f"{key} prompts", again, prompts, "are trained on, and left out", allowed)
    if task.tools is not None:
        check_tools(task, fresh[0][0])
    return fresh[: config.eval.prompts]


def _encoded(
    what: str, config: Config, task: Task, text: Tokenizer, prompts: Sequence[Prompt]
) -> list[Encoded]:
    """Return prompts with their tokens; ValueError if too many have unknown tokens."""
    is_cut = task.program is not None  # the program reads the row
    tokens = text.encode_all(prompts, config.sampling.max_tokens, encoder(text, task), is_cut)
    pairs = list(zip(prompts, tokens, strict=True))
    lost = [p for p, ids in pairs if text.loses(p, ids) and not is_cut]
    unwritten = UNWRITTEN.format(config.policy.model)
    check_loss(task, what, lost, prompts, unwritten, config.task.allow_loss)
    return pairs

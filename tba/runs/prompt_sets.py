"""The prompts of a run: to train on, held out, and of further evaluation sets."""

import logging
from collections import Counter
from collections.abc import Sequence, Set
from textwrap import shorten

import numpy as np

from tba.config.errors import about
from tba.config.schema import Config
from tba.config.tables import Use
from tba.models.pretrained import Encode, Tokenizer
from tba.prompt import Prompt
from tba.search.chat import encoder, identity
from tba.search.dialogue import check_tools
from tba.search.searcher import EvaluationSet
from tba.tasks import Task
from tba.tasks._memory import Functions, named_task
from tba.tasks._rendering import Rendering

DUPLICATES = 0.01
"""Largest share of the training prompts that may be held out as well."""

Encoded = tuple[Prompt, np.ndarray]
"""A prompt with its tokens."""
log = logging.getLogger(__name__)


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
    tokens = text.encode_all(used, config.sampling.max_tokens, encode)
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
    """Return the training prompts whose identity is not held out.

    Large data sets have a few that are. Raise ValueError if there are more, which is a mistake.
    """
    left = [each for each in encoded if identity(task, *each) not in held_out]
    count = len(encoded) - len(left)
    if count > DUPLICATES * len(encoded):
        shared = [prompt for prompt, ids in encoded if identity(task, prompt, ids) in held_out]
        examples = "; ".join(f"{p.id!r}: {shorten(str(p.text), 80)!r}" for p in shared[:3])
        raise ValueError(
            f"{count:,} of {len(encoded):,} training prompts are also held out, so that"
            f" evaluations would not measure what was learned: {examples}. Remove them from one of"
            " the two, name another file for one, or set eval.prompts=0"
        )
    if count:
        told = "%d of %d training prompts are also held out, and not trained on"
        log.warning(told, count, len(encoded))
    return left


def log_doubled_bos(text: Tokenizer, encoded: Sequence[Encoded]) -> None:
    """Log how many prompts begin with two BOS tokens: the text of such a prompt has one itself."""
    two = [text.tokenizer.bos_token_id] * 2
    if doubled := sum(ids[:2].tolist() == two for _, ids in encoded):
        told = "%d of %d prompts begin with two BOS tokens; remove %s from their text"
        log.warning(told, doubled, len(encoded), text.tokenizer.bos_token)


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
        text = "%d of %d %s prompts are left out: %s"
        log.warning(text, count, len(prompts), what, reason)
    if lost := {task.part(p)[0] for p in prompts} - {task.part(p)[0] for p in left}:
        of_part = "".join(f" of task.parts.{name}" for name in sorted(lost) if name)
        raise ValueError(
            f"all {what} prompts{of_part} are {' or '.join(why)}; raise it, or drop it"
        )
    return left


def evaluation_sets(
    config: Config,
    functions: Functions | None,
    task: Task,
    text: Tokenizer,
    trained_on: Set[bytes],
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
        tokens = text.encode_all(prompts, config.sampling.max_tokens, encoder(text, own))
        encoded += zip(prompts, tokens, strict=True)
        fresh = []
        for prompt, ids in zip(prompts, tokens, strict=True):
            if own.samples_again or identity(own, prompt, ids) not in trained_on:
                fresh.append(prompt)
        if not fresh:
            why = "all of its prompts are trained on" if prompts else "it has no held-out prompts"
            raise ValueError(f"[{key}]: {why}; give it data of its own, or remove it")
        if left_out := len(prompts) - len(fresh):
            text_of = "eval.sets.%s: %d of %d prompts are trained on, and left out"
            log.warning(text_of, name, left_out, len(prompts))
        if own.tools is not None:
            check_tools(own.tools, fresh[0], config.reward.isolate)
        chosen = fresh[: table.prompts or config.eval.prompts]
        sets[name] = EvaluationSet(Use(use=use, **options), tuple(chosen))
    return sets, encoded

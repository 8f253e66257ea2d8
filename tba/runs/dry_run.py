"""The dry run of a config: all checks of a run, the first prompts, and one call of the reward."""

import asyncio
import re
import time
from collections.abc import Sequence
from functools import partial
from inspect import isawaitable
from pathlib import Path
from typing import Any, get_args

from tba.config.plugins import JUDGES, find, options_of, resolve
from tba.config.schema import Config
from tba.config.tables import PLUGGED, Use
from tba.prompt import Answer, Prompt
from tba.runs import log
from tba.runs.generations import step_of
from tba.runs.lock import check_usable
from tba.runs.needs import needs
from tba.runs.parts import RunSetup, check
from tba.runs.resumed import check_step
from tba.runs.stored import choose_stored
from tba.runtime.placement import places_on_one_machine
from tba.search.chat import encoder
from tba.search.dialogue import open_all
from tba.search.isolation import InProcess
from tba.search.verdicts import Rejected, Verdict, verdict_on, within
from tba.tasks import Task
from tba.tasks._memory import build_task
from tba.tasks._rendering import Problems, Rendering
from tba.tasks.arithmetic import Arithmetic
from tba.tasks.custom import Custom
from tba.tasks.math import Math
from tba.tasks.mixture import Part
from tba.tasks.reasoning_gym import ReasoningGym

SECONDS = 5.0
"""Longest call of a reward function."""
DUMMY = "dummy answer"
NUMBER = "1"
"""Answer that is tried beside the dummy where none is known to be right."""
ROWS = 4
"""Rows whose own answers are scored."""
FAILURES = ("raised", "memory", "died")
"""Reasons by which a call has failed; a slow one may be within the deadline of the run."""
WRONG_KIND = ("wrong_length", "not_a_number")
"""Reasons of rejections that do not depend on the answer."""
ADVICE = "return a list with"
"""What a message about a wrong kind of reward may say already."""
MISSING = re.compile(r"^(ImportError|ModuleNotFoundError): .*", re.MULTILINE)
"""Last line of the traceback of an import that fails, which does not depend on the answer."""


def dry_run(
    config: Config, resume: Path | None = None, replay: log.Replay = "keep"
) -> tuple[dict[str, Any], list[str]]:
    """Check a config as a run does; return its tables, with every key, and what there is to tell.

    ValueError for what a run would refuse, and for a reward that is no number.
    """
    parts = check(config)
    if resume is None:
        check_usable(folder := log.folder_of(parts.config))
        log.check_unused(folder)
    else:
        check_usable(resume)
        check_step(step_of(choose_stored(parts, resume, replay).generation), parts.config)
    by_part: dict[str, list[Prompt]] = {}
    for prompt in parts.prompts:
        by_part.setdefault(parts.task.part(prompt)[0], []).append(prompt)
    told = []
    for name, prompts in by_part.items():
        told += [*_shown(parts, name, prompts[0]), *_scored(parts, name, prompts)]
    if plain := [name for name, prompts in by_part.items() if _could_chat(parts, prompts[0])]:
        keys = [f"task.parts.{name}.chat=auto" if name else "task.chat=auto" for name in plain]
        what = "prompts are plain text, but there is a chat template"
        told.append(f"note: {what}; {' and '.join(keys)} {'use' if keys[1:] else 'uses'} it")
    told += [f"note: {note}" for note in parts.notes]
    told += [f"warning: {text}" for _, text in parts.signs]
    # loads the policy, and compares its log-probs at the length of the longest sequence
    trainer = parts.trainer(places_on_one_machine(parts.config.runtime)[0].device)
    task = parts.task.part(parts.prompts[0])[1]
    told += needs(parts, trainer, len(encoder(parts.text, task)(parts.prompts[0])))
    counts = f"{len(parts.prompts)} training prompts, {len(parts.held_out)} held out"
    return every_key(parts.config), [*told, f"config OK (dry run): {counts}"]


def every_key(config: Config) -> dict[str, Any]:
    """Return the config as plain tables, with None for a key that has no value.

    Parts of a mixture, judges and evaluation sets have all their options, too. A set without a task
    has that of the run, with the options that the set changes.
    """
    tables = config.model_dump(mode="json", by_alias=True)
    for table, kind in PLUGGED.items():
        tables[table] = _with_all_options(kind, tables[table])
    sets = tables["eval"]["sets"]
    for name, own in sets.items():
        given = own if own["use"] else {**tables["task"], **own, "use": config.task.use}
        sets[name] = _with_all_options("tasks", given)
    return tables


def _with_all_options(kind: str, table: dict[str, Any]) -> dict[str, Any]:
    """Return the table of a plug-in with its defaults, and so for the tables within it."""
    whole: dict[str, Any] = {"use": ""}
    options = options_of(find(kind, table["use"]))
    for name, option in options.items():
        value: Any = table.get(name, None if option.required else option.default)
        if _holds(option.kind, Part):
            parts = {part: Part(**own).model_dump() for part, own in value.items()}
            value = {part: _with_all_options("tasks", own) for part, own in parts.items()}
        elif _holds(option.kind, Use):
            value = [_judge(v) for v in value] if isinstance(value, list) else _judge(value)
        whole[name] = value
    return {**table, **whole, "use": table["use"]}


def _judge(named: Any) -> Any:
    """Return the table of a judge with all options; what a factory makes has none that are keys."""
    is_judge = isinstance(named, dict) and ":" not in named["use"]
    return _with_all_options(JUDGES, named) if is_judge else named


def _holds(kind: Any, inner: type) -> bool:
    """Return whether values of a type, such as a list or a union, may be or hold `inner`."""
    return kind is inner or any(_holds(each, inner) for each in get_args(kind))


def _shown(parts: RunSetup, part: str, prompt: Prompt) -> list[str]:
    """Return a prompt as the policy reads it, special tokens included."""
    tokenizer, task = parts.text.tokenizer, parts.task.part(prompt)[1]
    tokens = encoder(parts.text, task)(prompt)
    of_part = f" of {part}" if part else ""
    return [f"first prompt{of_part}, {len(tokens)} tokens:", tokenizer.decode(tokens.tolist())]


def _could_chat(parts: RunSetup, prompt: Prompt) -> bool:
    """Return whether a prompt is plain text, but could go through a chat template."""
    task, template = parts.task.part(prompt)[1], parts.text.tokenizer.chat_template
    plain = isinstance(prompt.text, str) and isinstance(task, Rendering) and task.tools is None
    return plain and template is not None


def _scored(parts: RunSetup, part: str, prompts: Sequence[Prompt]) -> list[str]:
    """Return what the reward of a task, or of a part of it, says of a dummy and of right answers.

    It is called in a process, without models. ValueError if a result is no reward, if every call
    fails, or if a task with a grader of ours finds the row's own answer wrong.
    """
    task, table = parts.task.part(prompts[0])[1], Use(**parts.config.task.model_dump())
    if part:
        options = {k: v for k, v in table.options["parts"][part].items() if k != "weight"}
        table = Use(**options)
    options = table.options
    called = task.without_models if isinstance(task, Custom) else []
    if (task.dependencies or type(task).load is not Task.load) and not called:
        return ["reward: not called, because that needs a model or a server"]
    whole = not isinstance(task, Custom) or len(called) == len(task.functions)
    if not whole:
        options |= {"reward": called, "reward_weights": None}
    right = []
    for row in prompts[:: -(-len(prompts) // ROWS)]:
        text = right_answer(task, row)
        right += [] if text is None else [(row, text)]
    tried = [(prompts[0], DUMMY), *(right or [(prompts[0], NUMBER)])]
    plugin = resolve("tasks", "task", table.use, options)
    limits = parts.config.reward.max_memory, parts.config.runtime.start_deadline
    scorer = InProcess({"": partial(build_task, plugin, None)}, *limits)
    try:
        verdicts = asyncio.run(_call_all(scorer, task, tried))
    except RuntimeError as error:  # the process did not start
        if parts.config.reward.isolate == "thread":
            return [f"warning: the reward was not called: {error}"]
        raise ValueError(str(error)) from error
    for (_, text), verdict in zip(tried, verdicts, strict=True):
        _check_kind(text, verdict)
    failed = [v for v in verdicts if isinstance(v, Rejected) and v.reason in FAILURES]
    if len(failed) == len(tried):
        texts = " and ".join(repr(text) for _, text in tried[:2])
        what = f"the reward fails for every answer that was tried, such as {texts}"
        raise ValueError(f"{what} ({failed[-1].reason}): {failed[-1].detail}")
    told = [_in_words(DUMMY, verdicts[0])]
    own = list(zip(right, verdicts[1:], strict=True)) if right and whole else []
    low = [pair for pair in own if _is_low(task, pair[1], verdicts[0])]
    for (row, text), verdict in (low or own)[:1]:
        told.append(f"{_in_words(text, verdict)}, the answer of row {row.id} itself")
    if low:
        _refuse_wrong(task, told[-1])
        told[-1] = f"warning: {told[-1].removeprefix('warning: ')}"
    return told


def right_answer(task: Task, row: Prompt) -> str | None:
    """Return the answer that a row has in its column `answer`, as a response would give it."""
    if isinstance(task, ReasoningGym):
        return task.right_answer(row)
    answer = row.columns.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return None
    return f"\\boxed{{{answer}}}" if isinstance(task, Math) else str(answer)


def _is_low(task: Task, verdict: Verdict, dummy: Verdict) -> bool:
    """Return whether a right answer gets less than one should."""
    if isinstance(verdict, Rejected):
        return True
    if task.pass_reward is not None:
        return verdict < task.pass_reward
    return not isinstance(dummy, Rejected) and verdict <= dummy


def _refuse_wrong(task: Task, told: str) -> None:
    """Raise ValueError for a wrong answer in the data of a task with a grader of ours."""
    if isinstance(task, Problems | Arithmetic | ReasoningGym):
        raise ValueError(f"{told}; correct the column `answer`")


def _check_kind(text: str, verdict: Verdict) -> None:
    """Raise ValueError for a failure that does not depend on the answer."""
    if not isinstance(verdict, Rejected):
        return
    if verdict.reason in WRONG_KIND:
        advice = (
            "" if ADVICE in verdict.detail else f"; {ADVICE} a number or None for each completion"
        )
        raise ValueError(f"the reward of {text!r} is no number: {verdict.detail}{advice}")
    if missing := MISSING.search(verdict.detail):
        raise ValueError(f"the reward of {text!r} cannot import what it needs: {missing[0]}")


def _in_words(text: str, verdict: Verdict) -> str:
    if isinstance(verdict, Rejected):
        return f"warning: {text!r} has no reward ({verdict.reason}): {verdict.detail}"
    return f"reward of {text!r}: {verdict:g}"


async def _call_all(
    scorer: InProcess, task: Task, tried: Sequence[tuple[Prompt, str]]
) -> list[Verdict]:
    """Score each text as an answer to its prompt."""
    verdicts = []
    for prompt, text in tried:
        answer = Answer(text, True)
        if task.tools is not None:
            ((instance, _),) = open_all(task.tools, [prompt])
            said = [{"role": "assistant", "content": text}]
            answer = Answer(text, True, said, instance if task.tools.judged else None)
        verdicts.append(await _call(scorer, prompt, [answer, answer]))
    return verdicts


async def _call(scorer: InProcess, prompt: Prompt, answers: Sequence[Answer]) -> Verdict:
    """Score a group once, and return the first rejection, or else the first reward.

    A group of two, because a wrong number of rewards would not show for one.
    """
    await scorer.ready()
    until = time.monotonic() + SECONDS
    scores = await within(SECONDS, scorer.begin(prompt, answers, SECONDS))
    if isawaitable(scores):
        scores = await within(until - time.monotonic(), scores)
    if scores is None:
        return Rejected("timeout", f"the call did not return within {SECONDS:g} s")
    if isinstance(scores, Rejected):
        return scores
    if len(scores) != len(answers):
        return Rejected("wrong_length", f"{len(scores)} rewards for {len(answers)} answers")
    verdicts = [verdict_on(score) for score in scores]
    return next((v for v in verdicts if isinstance(v, Rejected)), verdicts[0])

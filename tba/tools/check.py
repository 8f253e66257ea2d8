"""Dry run of a config: all checks, the first prompts, reward calls, and memory use."""

import json
import re
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from tba.agents.chat import encoder
from tba.config.mistakes import FEW
from tba.config.schema import Config
from tba.config.tables import TaskTable
from tba.models.pretrained import computes_in_bf16
from tba.models.tokenizer import decode
from tba.offline.resumed import choose_resumed
from tba.offline.rollouts import described, read_rollouts
from tba.prompt import Answer, Prompt, passes
from tba.runs.folder import Replay
from tba.runtime.placement import device_here
from tba.scoring.scoring import Scoring
from tba.scoring.verdicts import Rejection, Verdict
from tba.search.searcher import SearchSetup
from tba.setup.machine import Machine, this_machine
from tba.setup.setup import RunSetup, check
from tba.tasks import Checkable, Loadable, Task
from tba.tasks._rendering import Problems, Rendering
from tba.tasks.custom import Custom
from tba.tools.plan import measured_training, rates_of, time_of

DUMMY = "dummy answer"
NUMBER = "1"
"""Second answer to score, in addition to the dummy, when the right answer is unknown."""
UNCHECKED = (
    "weight files, libraries, memory and GPUs here, log-probs in batches, models and servers"
    " that score, sessions"
)


def dry_run(
    config: Config,
    resume: Path | None = None,
    replay: Replay = "keep",
    planned: Machine | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Check a config as a run does; return its tables, with defaults, and the lines to print.

    Raises ValueError if the run would, or if the reward rejects every answer tried. If the run is
    `planned` for another machine, no weights are read.
    """
    setup = check(config, planned=planned)
    if resume is not None:
        choose_resumed(setup, resume, replay)
    by_source = setup.by_source()
    firsts = [prompts[0] for prompts in by_source.values()]
    if planned is not None and _loads(setup.task):
        rewards = [["reward: not called, because that needs a model or a server"] for _ in firsts]
    elif planned is not None and setup.task.program is not None:
        rewards = [[] for _ in firsts]
    elif setup.task.program is not None:
        rewards = [_held(setup)]
    else:
        search = setup.search_setup()
        if planned is not None:
            search = replace(search, evaluated={})
        rewards = _scored(setup, search, firsts)
    lines = []
    for (name, _), first, of_source in zip(by_source.items(), firsts, rewards, strict=True):
        if setup.task.program is None:  # a program makes its own
            tokens = encoder(setup.text, setup.task.source(first)[1])(first)
            where = f" of {name}" if name else ""
            shown = decode(setup.text.tokenizer, tokens.tolist())  # with special tokens
            lines += [f"first prompt{where}, {len(tokens)} tokens:", shown]
            last = first.text[-1] if not isinstance(first.text, str) else {}
            if last.get("role") == "assistant" and last.get("content"):
                what = "the last message is the assistant's, which the policy continues"
                lines.append(f"note: {what}; if it is the answer, remove it from the prompt")
        lines += of_source
    if plain := [
        name for name, prompts in by_source.items() if _could_chat(setup, prompts[0], config.task)
    ]:
        keys = [f"task.sources.{name}.chat=on" if name else "task.chat=on" for name in plain]
        what = "prompts are plain text, but there is a chat template"
        lines.append(f"note: {what}; {' and '.join(keys)} {'use' if keys[1:] else 'uses'} it")
    lines += [f"note: {note}" for note in setup.notes]
    rollouts = setup.config.replay.rollouts
    if rollouts is not None and resume is None:
        lines.append(described(read_rollouts(Path(rollouts), setup.text), setup.config))
    machine = planned or this_machine()
    c = setup.config
    epochs = c.run.steps * c.trainer.groups / len(setup.prompts)
    length = (
        f"length: {c.run.steps:,} steps of {c.trainer.groups} prompts x {c.trainer.group_size}"
        f" samples; {epochs:.3g} epochs of {len(setup.prompts):,} prompts, if each group is used"
        " once"
    )
    lines += [*setup.endings, length, *setup.needs(machine).lines()]
    measured = measured_training(setup) if planned is None else {}
    lines.append(time_of(setup.config, *rates_of(setup, machine, measured, {})))
    if planned is not None:
        lines.append(f"not checked, because the run is planned for other machines: {UNCHECKED}")
    return setup.config.nested(), [*lines, f"config OK (dry run): {setup.counts}"]


def as_toml(tables: Mapping[str, Any], given: Mapping[str, Any], name: str = "") -> str:
    """Return the tables of a config as TOML; values not in `given` are marked as defaults."""
    inner = {key: value for key, value in tables.items() if isinstance(value, dict)}
    lines = [f"\n[{name}]"] if name else []
    for key, value in tables.items():
        if key not in inner:
            lines.append(f"{key} = {_value(value)}" + ("" if key in given else "  # default"))
    for key, table in inner.items():
        known = own if isinstance(own := given.get(key), Mapping) else {}
        lines.append(as_toml(table, known, f"{name}.{_key(key)}" if name else _key(key)))
    return "\n".join(lines)


def _value(value: Any) -> str:
    """Return a value as TOML: an inline table, or else JSON."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(key)} = {_value(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value).lower()


def _key(key: str) -> str:
    """Return a key as TOML, quoted if necessary."""
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key)


def _held(setup: RunSetup) -> list[str]:
    """Run one session; return its first context, and its calls, tokens, reward and duration."""
    started = time.perf_counter()
    device = device_here()
    bf16 = computes_in_bf16(setup.config.policy, device)
    with closing(setup.search_setup().build(device, bf16)) as searcher:
        held = time.perf_counter()
        sampling = replace(setup.search_setup().sampling, samples=1)
        prompt = setup.prompts[0]
        responses = searcher.answer("", [prompt], sampling, setup.config.run.seed)
        answers = responses.answers
        ((verdict,),) = responses.rewarded(searcher.scoring([prompt], answers), answers)
        calls = dict(searcher.agents[""].counts())
    seconds = time.perf_counter() - held
    if isinstance(verdict, Rejection):
        raise ValueError(f"one session was rejected ({verdict.reason}): {verdict.detail}")
    ((completion,),) = responses.completions
    given = len(responses.prompts[0]) + len(completion.tokens) - completion.length
    end = next(iter(completion.restarts), None)
    context = [*responses.prompts[0].tolist(), *completion.tokens[:end].tolist()]
    return [
        "first conversation:",
        decode(setup.text.tokenizer, context),  # with special tokens
        f"one session: {calls['agents/calls']} calls, {1 + calls['agents/forks']} contexts,"
        f" {completion.length} tokens sampled and {given} given, reward {float(verdict):g},"
        f" {seconds:.1f} s (and {held - started:.1f} s to load)",
    ]


def _loads(task: Task) -> bool:
    """Return whether a task loads a model, or calls a server, to score answers."""
    loads_own = type(task).load is not Task.load
    parts = [each for _, each in task.dependencies]
    return loads_own or any(
        _loads(each) if isinstance(each, Task) else isinstance(each, Checkable | Loadable)
        for each in parts
    )


def _could_chat(setup: RunSetup, prompt: Prompt, given: TaskTable) -> bool:
    """Return whether a prompt is plain text, `given` sets no `chat`, and a chat template exists."""
    name, task = setup.task.source(prompt)
    if "chat" in (given.source(name) if name else given).options:
        return False
    plain = isinstance(prompt.text, str) and isinstance(task, Rendering) and not task.program
    return plain and task.tools is None and setup.text.tokenizer.chat_template is not None


def _scored(setup: RunSetup, search: SearchSetup, prompts: list[Prompt]) -> list[list[str]]:
    """Return lines with the rewards of a dummy and of the right answer to each prompt.

    The reward is called as in a run: in its own process, with its models.
    """
    scoring = search.scoring(device_here())
    try:
        scoring.wait_until_ready()
        tried = [_tried(setup, scoring, prompt) for prompt in prompts]
        return [*tried[:-1], [*tried[-1], *_graded_wrong(setup, scoring)]]
    except RuntimeError as error:  # the process did not start
        raise ValueError(str(error)) from error
    finally:
        scoring.close()


def _tried(setup: RunSetup, scoring: Scoring, prompt: Prompt) -> list[str]:
    """Return lines with the rewards of answers to a prompt.

    Raises ValueError if it rejects all of them, or if a built-in grader marks the answer in the
    data as wrong.
    """
    _, task = setup.task.source(prompt)
    right = task.right_answer(prompt)
    tried = (DUMMY, NUMBER if right is None else right)
    dummy, own = [_score(scoring, task, prompt, text) for text in tried]
    if isinstance(dummy, Rejection) and isinstance(own, Rejection):
        what = f"neither {DUMMY!r} nor {tried[1]!r} gets a reward ({own.reason}): {own.detail}"
        if isinstance(task, Custom) and not isinstance(prompt.text, str):
            what += (
                "\nAs the prompt is a chat, a completion is a list of messages, and its text is"
                ' completion[0]["content"].'
            )
        raise ValueError(what)
    line = _in_words(DUMMY, dummy)
    least = task.pass_reward
    if least is not None and not isinstance(dummy, Rejection) and passes(dummy, least):
        line = f"warning: {line}, which counts as right (task.pass_reward = {least:g})"
    if right is None:
        return [line]
    of_row = f"{_in_words(right, own)}, the answer given in row {prompt.id}"
    if not _is_low(task, own, dummy):
        return [line, of_row]
    if least is not None and not isinstance(task, Custom):
        raise ValueError(f"{of_row}; correct the column `answer`")
    if not isinstance(own, Rejection):
        than = (
            "is not more than the dummy" if least is None else f"is below pass_reward = {least:g}"
        )
        of_row = f"warning: {of_row}, {than}"
    return [line, of_row]


def _graded_wrong(setup: RunSetup, scoring: Scoring) -> list[str]:
    """Return a warning if a built-in grader rejects the answers of some of the first 1,000 rows."""
    every = [(prompt, setup.task.source(prompt)[1]) for prompt in (*setup.held_out, *setup.prompts)]
    rows = [(prompt, task) for prompt, task in every if isinstance(task, Problems)][:1000]
    wrong = []
    for prompt, task in rows:
        text = task.right_answer(prompt) or ""
        verdict = _score(scoring, task, prompt, text)
        if _is_low(task, verdict, verdict):
            wrong.append(f"{prompt.id} {text!r}")
    what = f"no response is right for {len(wrong)} of {len(rows)} rows, {', '.join(wrong[:FEW])}"
    advice = "correct the column `answer`, with \\text{...} around words"
    return [f"warning: {what}; {advice}"] if wrong else []


def _is_low(task: Task, verdict: Verdict, dummy: Verdict) -> bool:
    """Return whether the reward of a right answer is too low."""
    if isinstance(verdict, Rejection):
        return True
    if task.pass_reward is not None:
        return not passes(verdict, task.pass_reward)
    return not isinstance(dummy, Rejection) and verdict <= dummy


def _in_words(text: str, verdict: Verdict) -> str:
    if isinstance(verdict, Rejection):
        return f"warning: {text!r} has no reward ({verdict.reason}): {verdict.detail}"
    return f"reward of {text!r}: {verdict:g}"


def _score(scoring: Scoring, task: Task, prompt: Prompt, text: str) -> Verdict:
    """Score a text as an answer to a prompt; return the first rejection, or else the first reward.

    Scores it twice as a group, because one answer would not reveal a wrong number of rewards.
    """
    answer = Answer(text, True)
    if task.tools is not None:
        (opened,) = scoring.reset("", [prompt], limit=0)
        if isinstance(opened, Rejection):
            return opened
        messages = [{"role": "assistant", "content": text}]
        answer = Answer(text, True, messages, opened[0] if task.tools.judged else None)
    (verdicts,) = scoring([prompt], [[answer, answer]])
    return next((v for v in verdicts if isinstance(v, Rejection)), verdicts[0])

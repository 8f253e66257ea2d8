"""Logged rollouts: a file of sessions that the replay buffer begins with, and one of its content.

A row has messages, of which the assistant's are trained on, a text or messages and the whole
answer to it, or tokens, beside which texts are for people only. Its `columns`, a table, are for
reward functions that score it again:

    {"messages": [...], "tools": [...], "reward": 1.0, "group": "question 7"}
    {"prompt": "1 + 1 =", "completion": "2", "reward": 1.0}
    {"prompt_ids": [...], "ids": [...], "sampled": [...], "reward": 1.0, "group": "question 7"}

`sampled` has a 1 for each token that the policy sampled, 0 for others, and 2 for the first token of
a new context. Rows with the same `group` answer the same prompt; without one, those whose messages
or tokens begin alike do.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tba.config.schema import Config
from tba.models.pretrained import Tokenizer, load_text
from tba.prompt import Prompt
from tba.replay.buffer import ReplayBuffer
from tba.runs.checkpoint import chosen
from tba.runs.log import read_config
from tba.runs.setup import RunSetup
from tba.search.chat import Chat, shown
from tba.search.session import THOUGHTS, Session, readable
from tba.search.verdicts import LARGEST
from tba.types import RESTART, SAMPLED, Completion, Group, Trajectory, marks_of

log = logging.getLogger(__name__)

AT_ONCE = 16
"""Groups whose log-probs under the reference are computed at once."""
LONGEST_LINE = 2**24
"""Most characters of a row."""
SHOWN = 3
"""Rows that a warning about broken rows names."""


def read_rollouts(file: Path, text: Tokenizer) -> list[Group]:
    """Return the rollouts of a file by prompt, without log-probs of the reference.

    Broken rows are left out, and named in a warning. ValueError if no row is sound.
    """
    if not file.is_file():
        raise ValueError(f"replay.rollouts = {str(file)!r}: no such file")
    groups: dict[tuple[str, bytes], Group] = {}
    broken = []
    count = 0
    with file.open(encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            count += 1
            try:
                row = _row_in(line)
                name, prompt, completion, reward, times = _read(row, text)
            except Exception as error:  # a row may hold anything
                broken.append(f"row {number}: {_why(error)}")
                continue
            key = name, prompt.tobytes()
            if key not in groups:
                columns = row.get("columns")
                own = columns if isinstance(columns, dict) else {}
                own_prompt = Prompt(f"rollouts-{name}", text.prompt(prompt), own)
                groups[key] = Group(own_prompt, prompt, ())
            trajectory = completion.rewarded(reward, completion.logp)
            before = groups[key].trajectories
            groups[key] = replace(groups[key], trajectories=(*before, *[trajectory] * times))
    if broken:
        log.warning(
            "replay.rollouts: %d of %d rows are left out: %s%s", len(broken), count,
            "; ".join(broken[:SHOWN]), "; …" if broken[SHOWN:] else "",
        )  # fmt: skip
    if not groups:
        raise ValueError(f"replay.rollouts = {str(file)!r} has no sound row")
    return list(groups.values())


def with_reference(
    groups: Sequence[Group], setup: RunSetup, device: str, bf16: bool, tell: Callable[[str], None]
) -> list[Group]:
    """Return rollouts with the reference's log-probs, which stand for the policy that sampled."""
    reference = setup.search_setup().reference(device, bf16)
    done: list[Group] = []
    while len(done) < len(groups):
        tell(f"log-probs of logged rollouts {100 * len(done) // len(groups)} %")
        some = groups[len(done) :][:AT_ONCE]
        completions = [
            [Completion(t.tokens, t.ref_logp, t.finished, 0, (), t.marks) for t in g.trajectories]
            for g in some
        ]
        every, _ = reference.logp([group.prompt_tokens for group in some], completions)
        for group, rows in zip(some, every, strict=True):
            pairs = zip(group.trajectories, rows, strict=True)
            own = tuple(replace(t, behavior_logp=logp, ref_logp=logp) for t, logp in pairs)
            done.append(replace(group, trajectories=own))
    return done


def described(groups: Sequence[Group], config: Config) -> str:
    """Return in words how many rollouts there are, and how often each is trained on, if known."""
    samples = sum(len(group.trajectories) for group in groups)
    counts = f"{samples:,} logged rollouts of {len(groups):,} prompts"
    buffer = ReplayBuffer(config.replay.per_prompt, config.replay.capacity)
    buffer.add(groups, now=0)
    evicted = buffer.counts["evicted_per_prompt"] + buffer.counts["evicted_capacity"]
    if evicted:
        limits = f"replay.per_prompt = {buffer.per_prompt} and capacity = {buffer.capacity}"
        counts += f"; {limits} keep {len(buffer):,} of {len(buffer) + evicted:,} distinct ones"
    if config.runtime.searchers != 0:
        return counts
    times = config.run.steps * config.trainer.batch_size / (samples - evicted)
    return f"{counts}; each is trained on {times:.1f} times on average"


def write_rollouts(run: Path, out: Path, step: int | str | None) -> str:
    """Write the replay buffer of a checkpoint as rollouts; return what was written."""
    config = read_config(run)
    text = load_text(config.policy)
    buffer = ReplayBuffer()
    with chosen(run, step) as generation:
        buffer.load(generation)
    columns = buffer.columns()
    count = 0
    with out.open("x", encoding="utf-8") as lines:
        for number, group in zip(columns.prompts.tolist(), buffer.groups(), strict=True):
            times = columns.count[columns.rows(number)].tolist()
            for t, own in zip(group.trajectories, times, strict=True):
                texts = {"completion": shown(text, t, config.sampling.stop)}
                lines.write(json.dumps(_row(group, t, own) | texts) + "\n")
                count += 1
    return f"{out}: {count:,} responses to {len(columns.prompts):,} prompts"


def _row(group: Group, t: Trajectory, times: int) -> dict[str, Any]:
    return {
        "group": group.prompt.id,
        "prompt": group.prompt.text,
        "columns": group.prompt.columns,
        "version": t.version,
        "prompt_ids": group.prompt_tokens.tolist(),
        "ids": t.tokens.tolist(),
        "sampled": marks_of(t).tolist(),
        "reward": t.reward,
        "finished": t.finished,
        "count": times,
    }


def _row_in(line: str) -> dict[str, Any]:
    """Return the table that a line has."""
    if len(line) > LONGEST_LINE:
        raise ValueError(f"it has more than {LONGEST_LINE:,} characters")
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("it is no table")
    return row


def _read(
    row: Mapping[str, Any], text: Tokenizer
) -> tuple[str, np.ndarray, Completion, float, int]:
    """Return the group, the prompt, the response, its reward and how often it counts."""
    reward = row["reward"]
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise ValueError(f"reward is {reward!r}, which is no number")
    if not abs(reward) <= LARGEST:
        raise ValueError(f"reward is {reward}; it must be between ±{LARGEST:g}")
    if "messages" in row:
        prompt, completion, begin = _of_messages(row, text)
    else:
        prompt, completion = _of_tokens(row) if "ids" in row else _of_text(row, text)
        begin = prompt.tobytes()
    text.check_known(np.concatenate([prompt, completion.tokens]), "it")
    bounds = [0, *completion.restarts, len(completion.tokens)]
    longest = max(np.diff(bounds).max(), len(prompt) + bounds[1])
    if longest > text.context:
        raise ValueError(f"it has {longest} tokens, and the model's context {text.context}")
    name = str(row["group"]) if "group" in row else hashlib.sha256(begin).hexdigest()[:16]
    times = int(row.get("count", 1))
    if times < 1:
        raise ValueError(f"count is {times}; it must be 1 or more")
    return name, prompt, completion, float(reward), times


def _of_messages(row: Mapping[str, Any], text: Tokenizer) -> tuple[np.ndarray, Completion, bytes]:
    """Return a conversation as a prompt and the session that followed it, and how it began."""
    schemas = {tool["function"]["name"]: tool for tool in row.get("tools") or ()}
    chat = Chat(text, schemas)
    session = Session("append")
    messages = [readable(message) for message in row["messages"]]
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if place == 0 or messages[place - 1]["role"] == "assistant":
            raise ValueError("a message of the assistant follows no other message")
        for name in THOUGHTS:
            if message.get(name):
                raise ValueError(
                    f"a message of the assistant has {name}; write it into content, in the form in"
                    " which the model writes it, or give prompt_ids and ids"
                )
        written = text.tokenizer(chat.written(message), add_special_tokens=False)["input_ids"]
        session.add(session.ask(messages[:place], chat), _finished(written, text), message)
    if not session.exchanges:
        raise ValueError("no message is the assistant's")
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    begin = json.dumps([messages[:first], schemas], sort_keys=True).encode()
    return session.prompt, session.completion(len(session.prompt), finished=True), begin


def _of_text(row: Mapping[str, Any], text: Tokenizer) -> tuple[np.ndarray, Completion]:
    written = text.tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
    return text.encode(Prompt("", row["prompt"])), _finished(written, text)


def _finished(written: Sequence[int], text: Tokenizer) -> Completion:
    """Return what the policy has written as a completion that ends with EOS."""
    tokens = np.array([*written, text.eos_id], np.int32)
    return Completion(tokens, np.zeros(len(tokens), np.float32), True, 0)


def _of_tokens(row: Mapping[str, Any]) -> tuple[np.ndarray, Completion]:
    prompt = np.array(row["prompt_ids"], np.int32)
    tokens = np.array(row["ids"], np.int32)
    marks = np.array(row.get("sampled", [SAMPLED] * len(tokens)), np.uint8)
    if prompt.ndim != 1 or not len(prompt) or len(marks) != len(tokens):
        raise ValueError("prompt_ids, ids and sampled must be lists, the last two equally long")
    if min(*prompt, *tokens) < 0 or marks.max() > RESTART or not (marks == SAMPLED).any():
        raise ValueError("sampled must be 0, 1 or 2, with a 1, and no id negative")
    completion = Completion(
        tokens=tokens,
        logp=np.zeros(len(tokens), np.float32),
        finished=bool(row.get("finished", True)),
        version=0,
        marks=None if (marks == SAMPLED).all() else marks,
    )
    return prompt, completion


def _why(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]!r}"
    return str(error).partition("\n")[0]

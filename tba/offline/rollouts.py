"""Logged rollouts: reads a file of sessions into the replay buffer, and writes one from it.

A row contains messages, of which the assistant's are trained on; or a prompt (text or messages) and
the whole answer; or tokens, against which texts are checked. Its `columns`, an object, are passed
to reward functions when the row is rescored:

    {"messages": [...], "tools": [...], "reward": 1.0, "group": "question 7"}
    {"prompt": "1 + 1 =", "completion": "2", "reward": 1.0}
    {"prompt_ids": [...], "ids": [...], "sampled": [...], "reward": 1.0, "group": "question 7"}

`sampled` is 1 for a token that the policy sampled, 2 for the first token of a new context, and 0
for other tokens. Rows with the same `group` answer the same prompt; without `group`, rows are
grouped by their prompt tokens. Ambiguous rows are skipped.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from unicodedata import normalize

import numpy as np
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError

from tba.agents.chat import QUESTION, TURN, Chat, response_text
from tba.agents.session import Session, readable, squeezed
from tba.agents.wire import check_role
from tba.config.mistakes import about, choices, relative_to
from tba.config.schema import Config
from tba.learn.state import MODEL
from tba.models.pretrained import load_text
from tba.models.template import JSON, text_of
from tba.models.tokenizer import Tokenizer
from tba.prompt import Message, Prompt
from tba.replay.buffer import ReplayBuffer
from tba.runs.checkpoint import chosen
from tba.runs.folder import read_config
from tba.scoring.verdicts import MAX_REWARD
from tba.setup.setup import RunSetup
from tba.types import SAMPLED, Completion, Group, marks_of

log = logging.getLogger(__name__)

AT_ONCE = 16
"""Number of groups in a batch for the reference's log-probs."""
LONGEST_LINE, LONGEST_WHY = 2**24, 400
"""Maximum number of characters of a row, and of its error message."""
MOST = 2**31 - 1
"""Maximum number of samples in a file."""
SHOWN = 3
"""Number of invalid rows that a warning lists."""
MESSAGE = ("role", "content", "weight", "id", "index")
OF_ROLE = {"assistant": ("tool_calls",), "tool": ("tool_call_id", "name")}
"""Keys of every message, and additional keys by role."""


class Row(BaseModel, strict=True, extra="forbid"):
    """Keys of a row. `version` is ignored: samples get version 0 in the new run."""

    reward: float = Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False)
    group: str | int = ""
    columns: dict[str, Any] = {}
    version: Any = 0
    count: PositiveInt = 1
    finished: bool = True
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    prompt: str | list[dict[str, Any]] = ""
    completion: str = ""
    prompt_ids: list[NonNegativeInt] = []
    ids: list[NonNegativeInt] = Field([], min_length=1)
    sampled: list[Annotated[int, Field(ge=0, le=2)]] = []


def read_rollouts(file: Path, text: Tokenizer) -> list[Group]:
    """Return the rollouts of a file grouped by prompt, without log-probs of the reference.

    Invalid rows are skipped, and listed in a warning. Raises ValueError if no row is valid.
    """
    if not file.is_file():
        raise ValueError(f"replay.rollouts = {str(file)!r}: no such file{relative_to(file)}")
    groups: dict[tuple[str, bytes], Group] = {}
    broken = []
    rows = samples = 0
    with file.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            rows += 1
            try:
                row = _row_in(line)
                name, prompt, completion, reward, times = _read(row, text)
                columns = row.get("columns", {})
                own = Prompt(f"rollouts-{name}", row.get("prompt", text.prompt(prompt)), columns)
                head = groups.get((name, prompt.tobytes()), Group(own, prompt, ()))
                if json.dumps(columns) != json.dumps(head.prompt.columns):
                    raise ValueError("its columns differ from the first row of its group")
                if samples + times > MOST:
                    raise ValueError(f"count is {times:,}; all rows together may have {MOST:,}")
            except Exception as error:  # rows may contain anything
                broken.append(f"row {number}: {_why(error)}"[:LONGEST_WHY])
                continue
            samples += times
            trajectory = replace(completion.rewarded(reward, completion.logp), count=times)
            trajectories = (*head.trajectories, trajectory)
            groups[name, prompt.tobytes()] = replace(head, trajectories=trajectories)
    if broken:
        log.warning(
            "replay.rollouts: %d of %d rows are left out: %s%s", len(broken), rows,
            "; ".join(broken[:SHOWN]), "; …" if broken[SHOWN:] else "",
        )  # fmt: skip
    if not groups:
        raise ValueError(f"replay.rollouts = {str(file)!r} has no valid row")
    return list(groups.values())


def with_reference(
    groups: Sequence[Group], setup: RunSetup, device: str, bf16: bool, tell: Callable[[str], None]
) -> list[Group]:
    """Return rollouts with the reference's log-probs, also used as the sampling policy's."""
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
    """Return text with the number of rollouts and, if known, how often each is trained on."""
    samples = sum(t.count for group in groups for t in group.trajectories)
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
    """Write the replay buffer of a checkpoint as rollouts; return a line with file and counts."""
    config = read_config(run)
    policy = config.policy
    buffer = ReplayBuffer()
    with chosen(run, step) as generation, about("its tokenizer"):
        buffer.load(generation)
        if policy.lora is None:
            policy = policy.model_copy(update={"model": str(generation / MODEL)})
        text = load_text(policy)
    groups = buffer.groups()
    rows = [(group, t) for group in groups for t in group.trajectories]
    with out.open("x", encoding="utf-8") as lines:
        for group, t in rows:
            prompt, tokens = group.prompt.text, group.prompt_tokens
            # an agent writes its own prompt, and a long prompt may have been truncated
            if _lost(_contents(prompt), [tokens], text):
                prompt = text.prompt(tokens)
            row = {
                "group": group.prompt.id,
                "prompt": prompt,
                "columns": group.prompt.columns,
                "version": t.version,
                "prompt_ids": tokens.tolist(),
                "ids": t.tokens.tolist(),
                "sampled": marks_of(t).tolist(),
                "reward": t.reward,
                "finished": t.finished,
                "count": t.count,
                "completion": response_text(text, t, config.sampling.stop),
            }
            lines.write(json.dumps(row) + "\n")
    return f"{out}: {len(rows):,} responses to {len(groups):,} prompts"


def _row_in(line: str) -> dict[str, Any]:
    """Parse a line as a JSON object, without keys that are null."""
    if len(line) > LONGEST_LINE:
        raise ValueError(f"it has more than {LONGEST_LINE:,} characters")
    line.encode()  # raises for bytes that are not UTF-8
    row = JSON.decode(line)
    json.dumps(row, ensure_ascii=False).encode()  # raises for an unpaired surrogate
    if not isinstance(row, dict):
        raise ValueError("it is not a JSON object")
    return {name: value for name, value in row.items() if value is not None}


def _read(
    row: Mapping[str, Any], text: Tokenizer
) -> tuple[str, np.ndarray, Completion, float, int]:
    """Return (group, prompt tokens, response, reward, count) of a row."""
    reward = Row.model_validate(row).reward
    read = _of_messages if "messages" in row else _of_text
    read = _of_tokens if "ids" in row else read
    mixed = row.keys() & {"messages", "tools"} and row.keys() & {"prompt", "completion", "ids"}
    if mixed or (row.keys() & {"prompt_ids", "sampled"} and "ids" not in row):
        raise ValueError("it has keys of several forms: give messages, a completion or ids")
    prompt, completion, texts = read(row, text)
    text.check_known(np.concatenate([prompt, completion.tokens]), "it")
    lost = _lost(texts, [prompt, completion.tokens], text)
    if lost:
        raise ValueError(
            "the template or tokenizer drops a text, or the ids are from another tokenizer (then"
            f" leave out prompt_ids, ids and sampled): its tokens do not contain {lost!r}"
        )
    bounds = [0, *completion.restarts, len(completion.tokens)]
    longest = max(np.diff(bounds).max(), len(prompt) + bounds[1])
    if longest > text.context:
        raise ValueError(f"it has {longest} tokens, more than the model's context {text.context}")
    sampled = marks_of(completion) == SAMPLED
    ended = np.isin(completion.tokens, [*text.eos_ids]) & sampled
    if not sampled.any() or (ended[:-1] & sampled[1:]).any():
        raise ValueError("no token is sampled, or one follows EOS; end the row at the first EOS")
    name = row.get("group", hashlib.sha256(prompt.tobytes()).hexdigest()[:16])
    return str(name), prompt, completion, reward, row.get("count", 1)


def _of_messages(
    row: Mapping[str, Any], text: Tokenizer
) -> tuple[np.ndarray, Completion, list[str]]:
    """Return the prompt of a conversation, the session after it, and the texts of both."""
    tools = row.get("tools", ())
    schemas = {tool["function"]["name"]: tool for tool in tools}
    messages = [_message(message) for message in row["messages"]]
    calls = any("tool_calls" in message for message in messages)
    if len(schemas) < len(tools) or (calls and not tools):
        raise ValueError("it has calls without tools, or two tools with the same name")
    chat = Chat(text, schemas)
    session = Session("append")
    own = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    trained = [i for i in own if messages[i].get("weight") != 0]
    if not trained or any(place - 1 in (-1, *own) for place in own):
        raise ValueError("it needs assistant messages, each after a message of another role")
    chat.rendered(messages[: trained[-1]])  # raises if the template leaves out a message
    texts = _contents(messages[: trained[-1]])
    finished = row.get("finished", True)
    opening = _opening(text)
    for place in trained:
        asked = session.ask(messages[:place], chat)
        texts.append(chat.written(messages[place]))
        if not all(name in texts[-1] for name in opening):
            told = f"the chat template writes {', '.join(opening)} before a reply"
            raise ValueError(f"{told}; write that into content as well, or give ids")
        turn = _turn(texts[-1], asked.context, text, finished or place != trained[-1])
        session.add(asked, turn, messages[place])
    return session.prompt, session.completion(len(session.prompt), finished), texts


def _message(given: Mapping[str, Any]) -> Message:
    """Return a message for the chat template; ValueError if the template would drop content."""
    check_role(given)
    message = readable(given)
    known = (*MESSAGE, *OF_ROLE.get(given["role"], ()))
    parts = given["content"] if isinstance(given.get("content"), list) else []
    others = [(name, value) for name, value in given.items() if name not in known]
    others += [each for part in parts for each in part.items() if each[0] not in ("type", "text")]
    for name, value in others:
        if value not in (None, "", [], {}):
            raise ValueError(f"a message has {name}; write it into content, or remove it")
    weights = (None, 0, 1) if given["role"] == "assistant" else (None, 0)
    if given.get("weight") not in weights:
        raise ValueError("a message needs a weight of 0 (or 1, for the assistant's)")
    return message


def _of_text(row: Mapping[str, Any], text: Tokenizer) -> tuple[np.ndarray, Completion, list[str]]:
    asked = row["prompt"]
    asked = asked if isinstance(asked, str) else [_message(message) for message in asked]
    prompt = text.encode(Prompt("", asked))
    completion = _turn(row["completion"], prompt, text, row.get("finished", True))
    return prompt, completion, [*_contents(asked), row["completion"]]


def _special(text: Tokenizer) -> dict[int, str]:
    """Return all special tokens by their ids, also those without a role such as BOS."""
    return {i: str(t) for i, t in text.tokenizer.added_tokens_decoder.items() if t.special}


def _opening(text: Tokenizer) -> list[str]:
    """Return the special tokens that the chat template writes between a prompt and a reply."""
    reply = {"role": "assistant", "content": TURN}
    asked, shown = (text.render(each, {}, ()) for each in (QUESTION, [*QUESTION, reply]))
    head = shown.removeprefix(asked).partition(TURN)[0] if shown.startswith(asked) else ""
    return [name for name in _special(text).values() if name in head]


def _turn(written: str, context: np.ndarray, text: Tokenizer, finished: bool) -> Completion:
    """Tokenize a text that the policy wrote after a context, with one EOS if it is `finished`.

    It is tokenized together with the token before it: alone, some tokenizers add a leading space.
    """
    is_open = text.tokenizer.decode(context[-9:].tolist()).rstrip().endswith("<think>")
    if is_open and ("<think>" in written or (finished and "</think>" not in written)):
        raise ValueError("its prompt opens <think>: the reply must close it, and not open it again")
    last = text.tokenizer.decode(context[-1:].tolist())
    texts = [last, last + written, written]
    begun, ids, alone = text.tokenizer(texts, add_special_tokens=False)["input_ids"]
    ids = ids[len(begun) :] if ids[: len(begun)] == begun else alone
    end = ids[-1] if ids else None
    has_ended = end in text.eos_ids
    special = _special(text)
    is_special = end in special and end != text.tokenizer.unk_token_id
    if (is_special or has_ended) and has_ended != finished:
        raise ValueError("it ends with EOS, but finished is false, or with another special token")
    if "\ufffd" in written or any(special.get(i, "") not in written for i in ids):
        raise ValueError("it contains U+FFFD (lost bytes), or text without a token; give ids")
    ids += [text.eos_id] * (finished and not has_ended)
    return Completion(np.array(ids, np.int32), np.zeros(len(ids), np.float32), finished, 0)


def _of_tokens(row: Mapping[str, Any], text: Tokenizer) -> tuple[np.ndarray, Completion, list[str]]:
    prompt = np.array(row["prompt_ids"], np.int32)
    tokens = np.array(row["ids"], np.int32)
    marks = np.array(row.get("sampled", [SAMPLED] * len(tokens)), np.uint8)
    if len(marks) != len(tokens) or (not len(prompt) and marks[0] == SAMPLED):
        raise ValueError("sampled must be as long as ids, and not begin with 1 without prompt_ids")
    finished = row.get("finished", int(tokens[-1]) in text.eos_ids)
    own = None if (marks == SAMPLED).all() else marks
    completion = Completion(tokens, np.zeros(len(tokens), np.float32), finished, 0, marks=own)
    return prompt, completion, [*_contents(row.get("prompt", "")), row.get("completion", "")]


def _contents(prompt: str | Sequence[Message]) -> list[str]:
    """Return the texts of a prompt, without earlier replies, which templates may shorten."""
    if isinstance(prompt, str):
        return [prompt]
    return [text_of(m.get("content")) for m in prompt if m["role"] != "assistant"]


def _lost(texts: Sequence[str], parts: Sequence[np.ndarray], text: Tokenizer) -> str:
    """Return the first text that the decoded parts lack, verbatim and as JSON; "" if none."""

    def plain(each: str) -> str:  # removes differences that tokenizers may introduce
        return squeezed(normalize("NFKC", each).casefold())

    decoders = (text.decode, text.tokenizer.decode)
    said = [plain(decode(part)) for part in parts for decode in decoders]
    for each in texts:
        forms = plain(each), plain(json.dumps(each, ensure_ascii=False)[1:-1])
        if not any(form in part for form in forms for part in said):
            return each
    return ""


def _why(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            return f"unknown key {name!r}: put it into columns{choices(name, Row.model_fields)}"
        return f"{name}: {first['msg']}"
    if isinstance(error, UnicodeError):
        return "it has bytes or lone surrogates that are not UTF-8; save the file as UTF-8"
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]!r}"
    return str(error).partition("\n")[0]

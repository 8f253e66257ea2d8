"""Sessions of a user's program with the policy: from requests to one trajectory.

What was sampled is never tokenised again. A request is matched to the deepest earlier exchange
whose messages and reply it begins with; its tokens are then those of that exchange, and what the
chat template writes after the reply. A request that matches none begins a new context.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from tba.models.template import text_of
from tba.prompt import Message
from tba.search.chat import Chat
from tba.types import Completion, Turn, switches_of, versions_of

History = Literal["append", "template"]
"""What the policy sees of the past: its own tokens, or what the chat template makes of it."""

AT_ONCE = 1024
"""Most turns that an engine samples at once, where they join a running batch."""
TOKENISING = 0.1
"""Most seconds that a batch waits for turns that have arrived, and are being tokenised."""
IDS = ("id", "index", "tool_call_id", "refusal", "audio", "annotations")
"""Keys of a message that do not change what it says."""


@dataclass(frozen=True, eq=False)
class Asked:
    """A request, as it follows an earlier exchange, and its tokens."""

    chat: Chat
    messages: tuple[Message, ...]
    """Messages for the chat template."""
    keys: tuple[str, ...]
    """Each message in a form in which equal ones are equal texts."""
    after: "Exchange | None"
    """The exchange whose context goes on; None for a new context."""
    given: np.ndarray
    """Tokens after the reply of `after`, or of the whole new context."""
    rendered: str
    """The messages as the chat template shows them; "" where nothing compares it."""

    @cached_property
    def context(self) -> np.ndarray:
        """All tokens that the reply follows."""
        if self.after is None:
            return self.given
        before = self.after
        return np.concatenate([before.asked.context, before.turn.tokens, self.given])


@dataclass(frozen=True, eq=False)
class Exchange:
    """A request and the policy's reply, which the program has received."""

    asked: Asked
    turn: Completion
    keys: tuple[str, ...]
    """The keys of the request's messages and of the reply."""
    spoken: str
    """Text of the reply, with its special tokens but for the one that ends it."""

    @cached_property
    def path(self) -> list["Exchange"]:
        """The exchanges of its context, from the first one on."""
        before = self.asked.after
        return [self] if before is None else [*before.path, self]


class Session:
    """The exchanges of one session, in the order in which the program received the replies."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.exchanges: list[Exchange] = []

    def ask(self, messages: Sequence[Mapping[str, Any]], chat: Chat) -> Asked:
        """Return the tokens of a request. ValueError if the chat template cannot show it."""
        shown = tuple(with_names(list(map(readable, messages))))
        keys = tuple(map(key_of, shown))
        rendered = ""
        if self.history == "template":
            rendered = chat.rendered(shown)
        before = self._before(keys, chat, rendered)
        if before is None:
            rendered = rendered or chat.rendered(shown)
            return Asked(chat, shown, keys, None, chat.text.tokens(rendered), rendered)
        new = shown[len(before.keys) :]
        last = int(before.turn.tokens[-1])
        given = chat.reply(last, new, chat.described(before.asked.messages))
        return Asked(chat, shown, keys, before, given, rendered)

    def add(self, asked: Asked, turn: Completion, reply: Mapping[str, Any]) -> Exchange:
        """Record a reply that the program receives."""
        ended = int(turn.tokens[-1]) in asked.chat.text.eos_ids
        written = turn.tokens[: len(turn.tokens) - ended]
        spoken = asked.chat.text.tokenizer.decode(written.tolist())
        exchange = Exchange(asked, turn, (*asked.keys, key_of(readable(reply))), spoken)
        self.exchanges.append(exchange)
        return exchange

    def remove(self, exchange: Exchange) -> None:
        """Forget a reply that nobody has read, unless something follows it."""
        if all(other.asked.after is not exchange for other in self.exchanges):
            self.exchanges.remove(exchange)

    @property
    def forks(self) -> int:
        """Contexts beyond the first one."""
        return max(0, len(self._leaves()) - 1)

    @property
    def prompt(self) -> np.ndarray:
        """The tokens that the first context begins with. There is at least one exchange."""
        return self._leaves()[0].path[0].asked.given

    def completion(self, shared: int) -> Completion:
        """Return everything behind the first `shared` tokens of the prompt as one completion.

        Each further context is a restart. A reply that several contexts share is sampled in the
        first of them, and given in others.
        """
        tokens: list[np.ndarray] = []
        logp: list[np.ndarray] = []
        sampled: list[np.ndarray] = []
        versions: list[np.ndarray] = []
        restarts: list[int] = []
        length = 0
        version = self.exchanges[0].turn.version
        known: set[Exchange] = set()
        for number, leaf in enumerate(self._leaves()):
            for exchange in leaf.path:
                given = exchange.asked.given
                if exchange.asked.after is None and number == 0:
                    given = given[shared:]
                elif exchange.asked.after is None:
                    restarts.append(length)
                turn = exchange.turn
                is_new = exchange not in known
                known.add(exchange)
                own = versions_of(turn) if is_new else np.full(len(turn.tokens), version, np.int32)
                tokens += [given, turn.tokens]
                logp += [np.zeros(len(given), np.float32), turn.logp * is_new]
                sampled += [np.zeros(len(given), bool), np.full(len(turn.tokens), is_new)]
                versions += [np.full(len(given), version, np.int32), own]
                version = int(own[-1])
                length += len(given) + len(turn.tokens)
        every = np.concatenate(versions)
        own_tokens = np.concatenate(sampled)
        return Completion(
            tokens=np.concatenate(tokens),
            logp=np.concatenate(logp).astype(np.float32),
            finished=self.exchanges[-1].turn.finished,
            version=int(every[0]),
            switches=switches_of(every),
            sampled=None if own_tokens.all() else own_tokens,
            restarts=tuple(restarts),
        )

    def _leaves(self) -> list[Exchange]:
        """Return the last exchange of each context, in the order of the contexts' first new one."""
        followed = {exchange.asked.after for exchange in self.exchanges}
        leaves = [exchange for exchange in self.exchanges if exchange not in followed]
        places = {exchange: place for place, exchange in enumerate(self.exchanges)}
        ordered: list[Exchange] = []
        known: set[Exchange] = set()
        while leaves:
            first = min(
                leaves, key=lambda leaf: min(places[e] for e in leaf.path if e not in known)
            )
            leaves.remove(first)
            ordered.append(first)
            known.update(first.path)
        return ordered

    def _before(self, keys: tuple[str, ...], chat: Chat, rendered: str) -> Exchange | None:
        """Return the deepest exchange that the request goes on from."""
        deepest: Exchange | None = None
        for exchange in self.exchanges:
            depth = len(exchange.keys)
            goes_on = depth < len(keys) and keys[:depth] == exchange.keys
            if not goes_on or exchange.asked.chat.schemas != chat.schemas:
                continue
            if self.history == "template" and not _is_kept(exchange, rendered):
                continue
            if deepest is None or depth > len(deepest.keys):
                deepest = exchange
        return deepest


class Turns:
    """Turns to sample. Those that arrive while a batch runs are the next batch.

    The threads that hold sessions sample them, so that an engine's error ends their search.
    """

    def __init__(
        self, complete: Callable[[Sequence[Turn]], list[Completion]], joins_batches: bool
    ) -> None:
        """`complete` samples turns; `joins_batches` is as of an engine."""
        self._run = complete
        self._changed = threading.Condition()  # guards what is waiting and expected
        self._expected = 0
        self._waiting: list[tuple[Turn, Future[Completion]]] = []
        self._threads = ThreadPoolExecutor(AT_ONCE, "turn") if joins_batches else None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @contextmanager
    def expect(self) -> Iterator[None]:
        """Let the next batch wait while the tokens of a turn that has arrived are made."""
        with self._changed:
            self._expected += 1
        try:
            yield
        finally:
            with self._changed:
                self._expected -= 1
                self._changed.notify()

    def sample(self, turn: Turn) -> "asyncio.Future[Completion]":
        """Return the completion of a turn. Cancelling drops it, unless it is being sampled."""
        future: Future[Completion] = Future()
        with self._changed:
            self._waiting.append((turn, future))
            self._changed.notify()
        return asyncio.wrap_future(future)

    def work(self, seconds: float) -> None:
        """Sample the turns that are waiting; wait so long for the first one."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting, seconds)
            self._changed.wait_for(lambda: not self._expected, TOKENISING)
            taken = self._waiting
            self._waiting = []
        wanted = [each for each in taken if each[1].set_running_or_notify_cancel()]
        if self._threads is None:
            self._complete(wanted)
            return
        for each in wanted:
            self._threads.submit(self._complete, [each])

    def _complete(self, wanted: Sequence[tuple[Turn, "Future[Completion]"]]) -> None:
        if not wanted:
            return
        try:
            completions = self._run([turn for turn, _ in wanted])
        except BaseException as error:
            for _, future in wanted:
                future.set_exception(error)
            raise
        for (_, future), sampled in zip(wanted, completions, strict=True):
            future.set_result(sampled)


def readable(message: Mapping[str, Any]) -> Message:
    """Return a message for chat templates: no nulls, arguments of calls as objects.

    ValueError for a message that is none.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError("a message is no object with `role` and `content`")
    plain = {name: value for name, value in message.items() if value is not None}
    if plain["role"] == "developer":
        plain["role"] = "system"
    plain["content"] = text_of(plain.get("content"))
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_as_call(call) for call in plain["tool_calls"]]
    else:
        plain.pop("tool_calls", None)
    return plain


def with_names(messages: Sequence[Message]) -> Iterator[Message]:
    """Return messages in which results of tools have the name of the tool that was called."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        name = names.get(message.get("tool_call_id", ""))
        yield message if name is None else {"name": name, **message}


def key_of(message: Message) -> str:
    """Return a readable message as a text: the same for messages that say the same."""
    said = {name: value for name, value in message.items() if name not in IDS}
    if said["role"] == "assistant":
        said["content"] = said["content"].strip()
    if "tool_calls" in said:
        said["tool_calls"] = [call["function"] for call in said["tool_calls"]]
    return json.dumps(said, sort_keys=True)


def _is_kept(exchange: Exchange, rendered: str) -> bool:
    """Return whether messages are rendered with an exchange as it was, white space aside."""
    before = squeezed(exchange.asked.rendered) + squeezed(exchange.spoken)
    return squeezed(rendered).startswith(before)


def squeezed(text: str) -> str:
    """Return a text without white space."""
    return "".join(text.split())


def _as_call(call: Any) -> dict[str, Any]:
    """Return a call of a tool as chat templates have it."""
    match call:
        case {"function": {"name": str(name), "arguments": arguments}}:
            if isinstance(arguments, str):
                try:
                    arguments = json.loads(arguments)
                except ValueError as error:
                    raise ValueError(f"arguments of a call of {name!r} are no JSON") from error
            function = {"name": name, "arguments": arguments}
            return {"type": "function", "id": call.get("id", ""), "function": function}
    raise ValueError("a call of a tool has no function with `name` and `arguments`")

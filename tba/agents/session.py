"""Sessions of a user's program with the policy: from requests to one trajectory.

Sampled tokens are never tokenised again. A request is matched to the deepest earlier exchange whose
messages and reply it begins with; its tokens are then the tokens of that exchange, followed by the
text that the chat template writes after the reply. Without a match, it begins a new context.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from jaxtyping import Int32

from tba.agents.chat import Chat, without_calls
from tba.agents.wire import ChatRequest, RefusedError, completion, message_of
from tba.errors import EngineError
from tba.models.template import THOUGHTS, normalised, text_of, with_names
from tba.prompt import Message
from tba.streams import Use, seed_of
from tba.types import GIVEN, RESTART, SAMPLED, Completion, Sampling, Turn, marks_of, switches_of

History = Literal["append", "template"]
"""How the policy sees the past: as its own tokens, or as the chat template renders it."""

MAX_TURN_THREADS = 1024
"""Maximum number of turns that an engine samples at once, if they join a running batch."""
TOKENISING = 0.1
"""Maximum number of seconds that a batch waits for requests that are being tokenised."""
PATIENCE = 0.05
"""Share of a batch's duration that the next batch waits for sessions without a turn."""
IDS = ("id", "index", "tool_call_id", "refusal", "audio", "annotations")
"""Keys of a message that do not change its content."""
REPLY = ("role", "content", "tool_calls")
"""Keys of a reply that are compared; clients add others."""
NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True)
class MessageKey:
    """Content of a message in a canonical form, for comparison."""

    text: str
    thoughts: str

    def is_again(self, later: "MessageKey") -> bool:
        """Return whether `later` is this message again, with or without its thoughts."""
        return self.text == later.text and later.thoughts in ("", self.thoughts)


@dataclass(frozen=True, eq=False)
class RequestContext:
    """A request, the earlier exchange that it follows, and its tokens."""

    chat: Chat
    messages: tuple[Message, ...]
    """Messages for the chat template."""
    said: tuple[MessageKey, ...]
    """The key of each message."""
    after: "Exchange | None"
    """The exchange whose context continues; None for a new context."""
    given: np.ndarray
    """Tokens after the reply of `after`, or of the whole new context."""
    rendered: str
    """The messages as the chat template renders them; "" if they are not compared."""

    @cached_property
    def context(self) -> np.ndarray:
        """All tokens before the reply."""
        if self.after is None:
            return self.given
        before = self.after
        return np.concatenate([before.asked.context, before.turn.tokens, self.given])

    @property
    def begun(self) -> Message | None:
        """The last message, if the reply continues it."""
        last = self.messages[-1]
        is_text = last["role"] == "assistant" and not last.get("tool_calls")
        is_open = self.after is not None and len(self.after.said) == len(self.said)
        return last if is_text or is_open else None


@dataclass(frozen=True, eq=False)
class Exchange:
    """A request, and the policy's reply that the program received."""

    asked: RequestContext
    turn: Completion
    reply: Message

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """The request's messages and the reply, merged with the message that it continues."""
        begun = self.asked.begun
        if begun is None:
            return (*self.asked.messages, self.reply)
        head = begun["content"]
        if self.reply.get("tool_calls"):  # the first of these calls may have begun in the text
            head = without_calls(head, self.asked.chat.opens_thought(self.asked.context, head))
        calls = [*begun.get("tool_calls", ()), *self.reply.get("tool_calls", ())]
        added = {"content": head + self.reply["content"], "tool_calls": calls}
        whole = readable({**begun, **self.reply, **added})
        return (*self.asked.messages[:-1], whole)

    @cached_property
    def said(self) -> tuple[MessageKey, ...]:
        """The keys of `messages`."""
        return tuple(map(said_in, self.messages))

    @cached_property
    def spoken(self) -> str:
        """Text of the reply, with its special tokens except the one that ends it."""
        return self.asked.chat.text.decode(self.turn.tokens)

    @property
    def path(self) -> list["Exchange"]:
        """The exchanges of its context, first to last."""
        path = [self]
        while (before := path[-1].asked.after) is not None:
            path.append(before)
        return path[::-1]


class Session:
    """The exchanges of one session, in the order in which the program received the replies."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.exchanges: list[Exchange] = []

    def ask(
        self, messages: Sequence[Mapping[str, Any]], chat: Chat, tokens: np.ndarray | None = None
    ) -> RequestContext:
        """Return the context of a request. Raises ValueError if the template cannot render it.

        `tokens` is the tokenised context, used only if the context is new.
        """
        shown = tuple(with_names(list(map(readable, messages))))
        said = tuple(map(said_in, shown))
        for exchange in self.exchanges:  # programs may store a turn as several messages
            own = exchange.asked.said
            if exchange.asked.begun is not None and begins(said, (*own, said_in(exchange.reply))):
                shown = (*exchange.messages, *shown[len(own) + 1 :])
                said = tuple(map(said_in, shown))
        rendered = ""
        if self.history == "template":
            rendered = chat.rendered(shown)
        earlier = []  # exchanges that the request follows, or whose turn it continues
        for exchange in self.exchanges:
            is_open = int(exchange.turn.tokens[-1]) not in chat.text.eos_ids
            same_tools = exchange.asked.chat.schemas == chat.schemas
            follows = len(exchange.said) < len(said) + is_open and begins(said, exchange.said)
            if follows and same_tools:
                earlier.append(exchange)
        if self.history == "template":
            now = squeezed(rendered)
            written = [squeezed(each.asked.rendered + each.spoken) for each in earlier]
            earlier = [e for e, then in zip(earlier, written, strict=True) if now.startswith(then)]
        # the deepest one; a reply that is only white space adds nothing to the messages
        before = max(earlier, key=lambda each: (len(each.said), len(each.path)), default=None)
        if before is None:
            if tokens is None:
                rendered = rendered or chat.rendered(shown)
                tokens = chat.text.tokens(rendered)
            return RequestContext(chat, shown, said, None, tokens, rendered)
        new = shown[len(before.said) :]
        last = int(before.turn.tokens[-1])
        described = chat.described(before.asked.messages)
        given = chat.reply(last, new, described) if new else NO_TOKENS
        return RequestContext(chat, shown, said, before, given, rendered)

    def add(self, asked: RequestContext, turn: Completion, reply: Mapping[str, Any]) -> Exchange:
        """Record a reply to the program."""
        exchange = Exchange(asked, turn, readable(reply))
        self.exchanges.append(exchange)
        return exchange

    @property
    def forks(self) -> int:
        """Contexts beyond the first one."""
        followed = {exchange.asked.after for exchange in self.exchanges}
        return max(0, len(self.exchanges) - len(followed - {None}) - 1)

    @property
    def prompt(self) -> np.ndarray:
        """The tokens that the first context begins with. Needs at least one exchange."""
        return self.exchanges[0].asked.given

    def completion(self, shared: int, finished: bool) -> Completion:
        """Return everything after the first `shared` tokens of the prompt as one completion.

        Each further context is a restart. A reply that several contexts share counts as sampled in
        the first of them, and as given in the others.
        """
        whole = Completion(NO_TOKENS, np.zeros(0, np.float32), False, 0)
        given: list[np.ndarray] = []
        known: set[Exchange] = set()
        for leaf in self._leaves():
            restart = bool(known)
            for exchange in leaf.path:
                given.append(exchange.asked.given[0 if known else shared :])
                if exchange in known:
                    given.append(exchange.turn.tokens)
                    continue
                whole = joined(whole, np.concatenate(given), exchange.turn, restart)
                restart = False
                known.add(exchange)
                given.clear()
        return replace(whole, finished=finished)

    def _leaves(self) -> list[Exchange]:
        """Return the last exchange of each context, in the order in which contexts began."""
        followed = {exchange.asked.after for exchange in self.exchanges}
        leaves = [exchange for exchange in self.exchanges if exchange not in followed]
        return sorted(leaves, key=lambda leaf: self.exchanges.index(leaf.path[0]))


def joined(
    before: Completion, given: Int32[np.ndarray, " G"], turn: Completion, restart: bool = False
) -> Completion:
    """Return a completion followed by given tokens and the policy's next turn.

    With `restart`, the given tokens begin a new context.
    """
    own = before.versions
    last = own[-1] if len(own) else turn.version
    versions = np.concatenate([own, np.full(len(given), last, np.int32), turn.versions])
    between = np.full(len(given), GIVEN, np.uint8)
    between[: int(restart)] = RESTART
    marks = np.concatenate([marks_of(before), between, marks_of(turn)])
    return Completion(
        tokens=np.concatenate([before.tokens, given, turn.tokens]),
        logp=np.concatenate([before.logp, np.zeros(len(given), np.float32), turn.logp]),
        finished=turn.finished,
        version=int(versions[0]),
        switches=switches_of(versions),
        marks=None if (marks == SAMPLED).all() else marks,
    )


@dataclass(eq=False)
class PendingReply:
    """A call: a request and its retries, which all get the same response."""

    body: str
    task: "asyncio.Task[tuple[RequestContext, Completion]]" = field(init=False)
    number: int = 0
    waiting: int = 0  # connections
    response: Any = None
    tell: Callable[[int], None] | None = None  # called with each token as it is sampled


@dataclass(eq=False)
class OpenSession:
    """A running session: sample number `sample` of the search with seed `search`."""

    session: Session
    sampling: Sampling
    search: int
    sample: int
    max_calls: int
    calls: int = 0
    jobs: list[PendingReply] = field(default_factory=list)

    def repeated(self, body: str, has_key: bool, is_retry: bool) -> PendingReply | None:
        """Return the call that a request repeats; None if it is new.

        Without a key, only a retry can repeat a call that a client still waits for.
        """
        same = [job for job in self.jobs if job.body == body]
        pending = [job for job in same if job.response is None and (is_retry or not job.waiting)]
        return min(same if has_key else pending, key=lambda job: job.waiting, default=None)

    def seed(self, job: PendingReply) -> int:
        """Number a call, and return its seed."""
        if self.calls == self.max_calls:
            raise RefusedError(410, f"the session has had its {self.calls} calls (max_calls)")
        job.number = self.calls
        self.calls += 1
        return seed_of(self.search, Use.TURN, self.sample, job.number)

    def respond(
        self, job: PendingReply, request: ChatRequest, asked: RequestContext, turn: Completion,
        sent: str = "",
    ) -> Any:  # fmt: skip
        """Record the reply to a request, and return the response after the text that is `sent`."""
        given = asked.context, turn, request, request.stops or self.sampling.stop
        message = message_of(asked.chat, *given, asked.begun, job.number)
        self.session.add(asked, turn, message)
        return completion(asked.chat.text, *given, message, sent)


class Turns:
    """Turns to sample. Turns that arrive while a batch runs form the next batch.

    The threads of searches sample them, so that an engine's error ends the search.
    """

    def __init__(
        self,
        complete: Callable[[Sequence[Turn]], list[Completion]],
        joins_batches: bool,
        sessions: Sized,
    ) -> None:
        """`complete` samples turns; `joins_batches`: see `Engine.joins_batches`.

        `sessions` are the open ones.
        """
        self._run = complete
        self._sessions = sessions
        self._changed = threading.Condition()  # guards `_waiting` and `_expected`
        self._expected = 0
        self._waiting: list[tuple[Turn, Future[Completion]]] = []
        self._threads = ThreadPoolExecutor(MAX_TURN_THREADS, "turn") if joins_batches else None
        self._last = 0.0
        """Seconds of the last batch."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @contextmanager
    def expect(self) -> Iterator[None]:
        """Let the next batch wait while a request that has arrived is tokenised."""
        with self._changed:
            self._expected += 1
        try:
            yield
        finally:
            with self._changed:
                self._expected -= 1
                self._changed.notify()

    def sample(self, turn: Turn) -> "asyncio.Future[Completion]":
        """Return the completion of a turn. Cancelling drops the turn unless it is being sampled."""
        future: Future[Completion] = Future()
        with self._changed:
            self._waiting.append((turn, future))
            self._changed.notify()
        return asyncio.wrap_future(future)

    def work(self, seconds: float) -> None:
        """Sample the waiting turns; wait at most `seconds` for the first one."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting, seconds)
            if self._waiting and self._threads is None:
                self._changed.wait_for(lambda: not self._expected, TOKENISING)
                # a session that comes too late would wait for this batch, and be a batch by itself
                self._changed.wait_for(
                    lambda: len(self._waiting) >= len(self._sessions), PATIENCE * self._last
                )
            taken = self._waiting
            self._waiting = []
        wanted = [each for each in taken if each[1].set_running_or_notify_cancel()]
        if self._threads is None:
            started = time.monotonic()
            self._complete(wanted)
            self._last = time.monotonic() - started if wanted else self._last
            return
        for each in wanted:
            self._threads.submit(self._complete, [each])

    def _complete(self, wanted: Sequence[tuple[Turn, "Future[Completion]"]]) -> None:
        if not wanted:
            return
        try:
            completions = self._run([turn for turn, _ in wanted])
        except BaseException as error:
            # an event loop that awaits a KeyboardInterrupt would end
            shown = error if isinstance(error, Exception) else EngineError("ended by a signal")
            for _, future in wanted:
                future.set_exception(shown)
            raise
        for (_, future), sampled in zip(wanted, completions, strict=True):
            future.set_result(sampled)


def readable(message: Mapping[str, Any]) -> Message:
    """Return a message with its content as text; ValueError if it is not a valid message."""
    plain = normalised(message)
    return {**plain, "content": text_of(plain["content"])}


def begins(said: Sequence[MessageKey], own: Sequence[MessageKey]) -> bool:
    """Return whether a request begins with the messages of an exchange."""
    return len(own) <= len(said) and all(map(MessageKey.is_again, own, said))


def said_in(message: Message) -> MessageKey:
    """Return the key by which a message's content is compared."""
    said = {name: value for name, value in message.items() if name not in (*IDS, *THOUGHTS)}
    if said["role"] == "assistant":
        said = {name: value for name, value in said.items() if name in REPLY}
        said["content"] = said["content"].strip()
    if "tool_calls" in said:
        said["tool_calls"] = [call["function"] for call in said["tool_calls"]]
    thoughts = "".join(str(message.get(name, "")) for name in THOUGHTS)
    plain = json.loads(json.dumps(said), parse_int=float)  # JavaScript writes 1.0 as 1
    return MessageKey(json.dumps(plain, sort_keys=True), thoughts)


def squeezed(text: str) -> str:
    """Return a text without whitespace."""
    return "".join(text.split())

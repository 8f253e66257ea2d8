"""OpenAI's chat completions over HTTP on this machine; each session has a path of its own.

program                       event loop of the endpoint             thread of the search
POST /s/SECRET/v1/chat/...  -> Endpoint._chat
                                 Request, Session.ask
                                 Turns.sample                     -> Turns.work
                                                                       Engine.complete
                                 Session.add
reply                       <-   _completion
"""

import asyncio
import json
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from tba.engines import Engine, Turn
from tba.models.pretrained import Tokenizer
from tba.search.chat import Chat
from tba.search.session import Asked, Exchange, Session
from tba.search.wire import Request, completion, message_of, refusal
from tba.streams import Use, seed_of
from tba.types import Completion, Sampling

BODY = 2**24
"""Most bytes of a request."""
WAITING = 1024
"""Most requests at once; others are told to come again."""
CHATS = 64
"""Most sets of tools whose chats are kept."""


@dataclass(eq=False)
class Live:
    """A session that is being held."""

    session: Session
    sampling: Sampling
    seed: Callable[[int], int]
    """Seed of a turn by its number."""
    max_calls: int
    ended: bool = False
    calls: int = 0
    running: dict[str, "Job"] = field(default_factory=dict)
    """Replies that are being sampled, by the body of the request."""
    unread: dict[str, int] = field(default_factory=dict)
    """Numbers of calls whose reply nobody waited for, by the body of the request."""

    def number(self, body: str) -> int:
        """Return the number of a new call: that of the same request, if nobody read its reply."""
        if body not in self.unread:
            self.unread[body] = self.calls
            self.calls += 1
        return self.unread.pop(body)

    def refuse(self, number: int) -> None:
        """Give a number back, because its call was refused."""
        if self.calls == number + 1:
            self.calls = number

    def end(self) -> None:
        self.ended = True
        for job in self.running.values():
            job.task.cancel()


def live_session(session: Session, sampling: Sampling, search: int, sample: int, most: int) -> Live:
    """Return the session of a sample of a search, which has this seed."""
    return Live(session, sampling, lambda turn: seed_of(search, Use.TURN, sample, turn), most)


@dataclass(eq=False)
class Job:
    """A reply that is being sampled, for one connection or several with the same request."""

    number: int
    task: "asyncio.Task[tuple[Asked, Completion]]"
    waiting: int = 0
    exchange: Exchange | None = None


class Turns:
    """Turns to sample. Those that arrive while a batch runs are the next batch.

    The threads that hold sessions sample them, so that an engine's error ends their search.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changed = threading.Condition()  # guards what is waiting
        self._waiting: list[tuple[Turn, Future[Completion]]] = []
        self._threads = ThreadPoolExecutor(WAITING, "turn") if engine.joins_batches else None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def sample(self, turn: Turn) -> Completion:
        """Return the completion of a turn. Cancelling drops it, unless it is being sampled."""
        future: Future[Completion] = Future()
        with self._changed:
            self._waiting.append((turn, future))
            self._changed.notify()
        return await asyncio.wrap_future(future)

    def work(self, seconds: float) -> None:
        """Sample the turns that are waiting; wait so long for the first one."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting, seconds)
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
            completions = self._engine.complete([turn for turn, _ in wanted])
        except BaseException as error:
            for _, future in wanted:
                future.set_exception(error)
            raise
        for (_, future), sampled in zip(wanted, completions, strict=True):
            future.set_result(sampled)


class Endpoint:
    """A server on 127.0.0.1, in an event loop and a thread of its own."""

    def __init__(self, engine: Engine, text: Tokenizer, fixed: str = "") -> None:
        self.turns = Turns(engine)
        self.counts: Counter[str] = Counter()
        """Numbers of calls, and of those that were refused, by metric."""
        self.failure: BaseException | None = None
        """What the engine raised while it sampled a reply."""
        self._text = text
        self._fixed = fixed
        self._sessions: dict[str, Live] = {}
        self._chats: dict[str, Chat] = {}
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._runner = asyncio.Runner()
        self.loop = self._runner.get_loop()
        self._server = _server(self._chat, self._models)
        self._thread = threading.Thread(target=self._run, daemon=True, name="endpoint")
        self._thread.start()

    def open(self, live: Live) -> str:
        """Return the base URL of a session. Whoever does not know it cannot guess it."""
        name = secrets.token_urlsafe(24)
        self._sessions[name] = live
        return f"http://127.0.0.1:{self.port}/s/{name}/v1"

    def end(self, url: str) -> None:
        """End a session: its running requests are cancelled, and later ones refused."""
        live = self._sessions.pop(url.split("/")[-2], None)
        if live is not None:
            live.end()

    def close(self) -> None:
        """End all sessions and the server."""
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(10)

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._server.serve(sockets=[self._socket]))

    async def _models(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        if request.path_params["session"] not in self._sessions:
            return self._ended()
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "tba"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Any) -> Any:
        """Answer a request; errors are JSON, as OpenAI's clients read them."""
        from starlette.responses import Response

        live = self._sessions.get(request.path_params["session"])
        if live is None or live.ended:
            return self._ended()
        if self.turns.waiting > WAITING:
            return refusal(503, "overloaded", "too many requests wait; come again")
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY:
                return refusal(413, "too_large", f"the request has more than {BODY:,} bytes")
        try:
            asked = Request.model_validate_json(body)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            return self._wrong(f"{place}: {first['msg']}")
        key = json.dumps(asked.model_dump(), sort_keys=True)
        job = live.running.get(key)
        if job is None:
            if live.calls >= live.max_calls and key not in live.unread:
                return self._ended(f"the session has had its {live.max_calls} calls (max_calls)")
            number = live.number(key)
            sampled = self.loop.create_task(self._sampled(live, asked, number))
            job = live.running[key] = Job(number, sampled)
        job.waiting += 1
        gone = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait({job.task, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            job.waiting -= 1
        if gone.done() and job.waiting == 0 and job.exchange is None:  # nobody reads the reply
            job.task.cancel()
            live.running.pop(key, None)
            live.unread[key] = job.number
        if gone.done():
            return Response(status_code=499)
        gone.cancel()
        live.running.pop(key, None)
        try:
            context, turn = await job.task
        except asyncio.CancelledError:
            return self._ended()
        except ValueError as error:
            live.refuse(job.number)
            too_long = isinstance(error, _TooLongError)
            return self._wrong(str(error), "context_length_exceeded" if too_long else "invalid")
        if live.ended:
            return self._ended()
        message = message_of(context, turn, asked)
        if job.exchange is None:
            job.exchange = live.session.add(context, turn, message)
            self.counts["agents/calls"] += 1
        return completion(asked, context, turn, message)

    async def _sampled(self, live: Live, asked: Request, number: int) -> tuple[Asked, Completion]:
        """Return the tokens of a request, and the policy's reply."""
        sampling = asked.sampling(live.sampling, self._fixed)
        context = await asyncio.to_thread(self._asked, live.session, asked)
        tokens = context.context
        room = self._text.context - len(tokens)
        if room < 1:
            raise _TooLongError(
                f"the messages have {len(tokens)} tokens, and the model's context has"
                f" {self._text.context}; shorten them"
            )
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        try:
            return context, await self.turns.sample(Turn(tokens, sampling, live.seed(number)))
        except Exception as error:
            self.failure = error
            raise asyncio.CancelledError from error

    def _asked(self, session: Session, asked: Request) -> Asked:
        return session.ask(asked.messages, self._chat_of(asked.tools or []))

    def _chat_of(self, tools: Sequence[Mapping[str, Any]]) -> Chat:
        """Return the chat with these tools: the same one for equal tools."""
        key = json.dumps(tools, sort_keys=True)
        if key not in self._chats:
            schemas = {}
            for tool in tools:
                match tool:
                    case {"type": "function", "function": {"name": str(name)}}:
                        schemas[name] = tool
                    case _:
                        raise ValueError("tools: a tool is no function with a name")
            if len(self._chats) >= CHATS:
                self._chats.clear()
            self._chats[key] = Chat(self._text, schemas)
        return self._chats[key]

    def _wrong(self, why: str, code: str = "invalid") -> Any:
        self.counts["agents/refused"] += 1
        return refusal(400, code, why)

    def _ended(self, why: str = "the session has ended, or there is none at this path") -> Any:
        self.counts["agents/late"] += 1
        return refusal(410, "session_ended", why)  # clients do not try again


class _TooLongError(ValueError):
    """The messages do not fit into the model's context."""


def _server(chat: Callable[[Any], Awaitable[Any]], models: Callable[[Any], Awaitable[Any]]) -> Any:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.routing import Route

    routes = [
        Route("/s/{session}/v1/chat/completions", chat, methods=["POST"]),
        Route("/s/{session}/v1/models", models, methods=["GET"]),
    ]
    config = uvicorn.Config(
        Starlette(routes=routes),
        access_log=False,  # paths are secrets
        log_config=None,
        log_level="error",
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)

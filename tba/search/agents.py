"""Agents: a program of the user holds sessions with the policy, and returns their rewards.

It talks to an endpoint on this machine in OpenAI's form; each session has a path of its own.

    thread of the search           event loop of the endpoint            process of the program
    Agents.hold                 -> Agents._hold
                                     AgentProcess.run                 -> rollout(base_url, row)
                                     Endpoint._chat                   <- POST .../chat/completions
                                       Session.ask
    Turns.work                  <-     Turns.sample
      Engine.complete
                                       Session.add, wire.completion   -> the reply
    Responses                   <-   verdict                          <- the reward
"""

import asyncio
import json
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
from pydantic import ValidationError

from tba.engines import Engine, EngineError, RewardError
from tba.models.pretrained import Tokenizer
from tba.prompt import Answer, Prompt
from tba.search.agent_process import AgentProcess, ProgramError
from tba.search.chat import Chat
from tba.search.responses import Responses
from tba.search.session import Asked, Exchange, Session, Turns
from tba.search.verdicts import Rejected, Verdict
from tba.search.wire import Request, completion, message_of, refusal
from tba.streams import Use, seed_of
from tba.tasks import Program
from tba.types import Completion, Sampling, Turn

NO_CALL = Rejected("no_call", "the program has not called the policy")
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

    def leave(self, body: str, job: "Job") -> None:
        """Cancel a reply that nobody waits for any more; its number is kept for the next try."""
        if job.waiting == 0 and job.exchange is None:
            job.task.cancel()
            self.running.pop(body, None)
            self.unread[body] = job.number

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


class Endpoint:
    """A server on 127.0.0.1, in an event loop and a thread of its own."""

    def __init__(self, engine: Engine, text: Tokenizer, fixed: str = "", port: int = 0) -> None:
        self.turns = Turns(engine.complete, engine.joins_batches)
        self.counts: Counter[str] = Counter()
        """Numbers of calls, and of those that were refused, by metric."""
        self.failure: BaseException | None = None
        """What the engine raised while it sampled a reply."""
        self._text = text
        self._fixed = fixed
        self._sessions: dict[str, Live] = {}
        self._chats: dict[str, Chat] = {}
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self._socket.listen()  # so that who comes before the server waits
        self.port: int = self._socket.getsockname()[1]
        self._runner = asyncio.Runner()
        self.loop = self._runner.get_loop()
        self._server = _server(self._chat, self._models)
        self._thread = threading.Thread(target=self._run, daemon=True, name="endpoint")
        self._thread.start()

    def begin(self, live: Live) -> str:
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
        if await self._is_gone(request, job):
            live.leave(key, job)
            return refusal(499, "gone", "nobody reads this")
        live.running.pop(key, None)
        return await self._reply(live, asked, job)

    async def _is_gone(self, request: Any, job: "Job") -> bool:
        """Wait for the reply; return whether the client has gone before it came."""
        job.waiting += 1
        gone = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait({job.task, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            job.waiting -= 1
        if not gone.done():
            gone.cancel()
            return False
        return True

    async def _reply(self, live: Live, asked: Request, job: "Job") -> Any:
        """Return the reply, which enters the session once, or why there is none."""
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
        message = message_of(context.chat, context.context, turn, asked)
        if job.exchange is None:
            job.exchange = live.session.add(context, turn, message)
            self.counts["agents/calls"] += 1
        return completion(asked, context.chat.text, context.context, turn, message)

    async def _sampled(self, live: Live, asked: Request, number: int) -> tuple[Asked, Completion]:
        """Return the tokens of a request, and the policy's reply."""
        sampling = asked.sampling(live.sampling, self._fixed)
        with self.turns.expect():
            context = await asyncio.to_thread(self._asked, live.session, asked)
            tokens = context.context
            room = self._text.context - len(tokens)
            if room < 1:
                raise _TooLongError(
                    f"the messages have {len(tokens)} tokens, and the model's context has"
                    f" {self._text.context}; shorten them"
                )
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
            reply = self.turns.sample(Turn(tokens, sampling, live.seed(number)))
        try:
            return context, await reply
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


@dataclass(frozen=True)
class Held:
    """A session that has ended, and its reward."""

    session: Session
    verdict: Verdict


class Agents:
    """Holds the sessions of searches. The endpoint and the program's process start with the first.

    `fixed` says why the program may not choose temperature or top_p, if so.
    """

    def __init__(
        self, engine: Engine, text: Tokenizer, program: Program, fixed: str, max_memory: float,
        start_deadline: float,
    ):  # fmt: skip
        self._text = text
        self._program = program
        self._endpoint = Endpoint(engine, text, fixed)
        self._process = AgentProcess(program, max_memory, start_deadline)
        self._slots = asyncio.Semaphore(program.concurrency)

    def hold(
        self, prompts: Sequence[Prompt], sampling: Sampling, seed: int, seconds: float
    ) -> Responses:
        """Hold `sampling.samples` sessions about each prompt, which end within so many seconds."""
        until = time.monotonic() + seconds
        numbers = count()
        started = []
        for prompt in prompts:
            row = {**prompt.columns, "prompt": prompt.text}
            for _ in range(sampling.samples):
                session = Session(self._program.history)
                number = next(numbers)
                live = live_session(session, sampling, seed, number, self._program.max_calls)
                holding = self._hold(row, live, until)
                started.append(asyncio.run_coroutine_threadsafe(holding, self._endpoint.loop))
        while not all(each.done() for each in started):
            self._endpoint.turns.work(0.05)
        failure = self._endpoint.failure
        if failure is not None:
            raise failure
        held = [each.result() for each in started]
        s = sampling.samples
        groups = [held[i : i + s] for i in range(0, len(held), s)]
        return self._responses(groups)

    def counts(self) -> Mapping[str, int]:
        """Return the calls since the last time, by metric."""
        counts = dict(self._endpoint.counts)
        self._endpoint.counts.clear()
        return counts

    def close(self) -> None:
        """End the endpoint and the process."""
        self._process.close()
        self._endpoint.close()

    async def _hold(self, row: Mapping[str, Any], live: Live, until: float) -> Held:
        """Hold one session, and return it with the verdict on it."""
        async with self._slots:
            seconds = min(self._program.deadline, until - time.monotonic())
            url = self._endpoint.begin(live)
            try:
                verdict = await self._process.run(url, row, seconds)
            except ProgramError as error:  # a searcher that starts anew may help later
                kind = EngineError if error.worked else RewardError
                raise kind(str(error)) from error
            finally:
                self._endpoint.end(url)
        if not live.session.exchanges and not isinstance(verdict, Rejected):
            verdict = NO_CALL
        return Held(live.session, verdict)

    def _responses(self, groups: Sequence[Sequence[Held]]) -> Responses:
        """Return sessions by prompt, whose tokens are what all sessions about it begin with."""
        # in place of a prompt or a session that does not exist; nothing is made of it
        nothing = np.array([self._text.eos_id], np.int32)
        empty = Completion(nothing, np.zeros(1, np.float32), False, 0)
        prompts = []
        completions = []
        for group in groups:
            begun = [held.session.prompt for held in group if held.session.exchanges]
            prompt = common(begun) if begun else nothing
            prompts.append(prompt)
            own = []
            for held in group:
                called = held.session.exchanges
                own.append(held.session.completion(len(prompt)) if called else empty)
            completions.append(own)
        verdicts = [[held.verdict for held in group] for group in groups]
        forks = sum(held.session.forks for group in groups for held in group)
        self._endpoint.counts["agents/forks"] += forks
        if not self._program.scored:
            return Responses(prompts, completions, verdicts)
        answers = [[self._answer(held) for held in group] for group in groups]
        return Responses(prompts, completions, answers, rewards=verdicts)

    def _answer(self, held: Held) -> Answer | Verdict:
        """Return a session as what reward functions see."""
        if isinstance(held.verdict, Rejected):
            return held.verdict
        last = held.session.exchanges[-1]
        messages = [*last.asked.messages, json.loads(last.keys[-1])]
        turn = last.turn
        answer = self._text.answer(turn.tokens, turn.finished, (), turn.version)
        return replace(answer, messages=messages)


def common(sequences: Sequence[np.ndarray]) -> np.ndarray:
    """Return the longest beginning that all of these tokens share."""
    shortest = min(map(len, sequences))
    same = np.ones(shortest, bool)
    for sequence in sequences:
        same &= sequence[:shortest] == sequences[0][:shortest]
    return sequences[0][: shortest if same.all() else int(same.argmin())]

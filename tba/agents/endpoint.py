"""Agents: a user's program runs sessions with the policy, and returns their rewards.

It talks to an endpoint on this machine through OpenAI's API; each session has its own path.

    thread of the search           event loop of the endpoint            process of the program
    Agents.run_sessions         -> Agents._run_session
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
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
from pydantic import ValidationError

from tba.agents.chat import Chat, check_stop
from tba.agents.session import OpenSession, PendingReply, RequestContext, Session, Turns
from tba.agents.wire import ChatRequest, RefusedError, TokenStream
from tba.engines import Engine
from tba.models.tokenizer import Tokenizer
from tba.prompt import Answer, Prompt
from tba.scoring.process import AgentProcess, EventLoop
from tba.scoring.verdicts import Reason, Rejection, Responses, Verdict
from tba.tasks import Program
from tba.types import GIVEN, Completion, Sampling, Turn

NO_CALL = Rejection(Reason.NO_CALL, "the program has not called the policy")
WAITING = 1024
"""Maximum number of pending requests; further requests are refused with status 503."""
CHATS = 64
"""Maximum number of sets of tools whose chats are cached."""
ENDED = "the session has ended, or there is none at this path"


class Endpoint:
    """A server on 127.0.0.1, with its own event loop and thread."""

    def __init__(
        self, engine: Engine, text: Tokenizer, fixed: str = "", port: int = 0, trains: bool = True
    ) -> None:
        """Begin to serve. Unless it `trains`, texts are streamed, and replies may follow a schema.

        `fixed`: see `Agents`.
        """
        from tba.agents.server import Listener, server

        self.counts: Counter[str] = Counter()
        """Numbers of calls and of refused requests, by metric."""
        self.failure: BaseException | None = None
        """The exception that the engine raised while it sampled a reply."""
        self._text = text
        self._fixed = fixed or ("" if engine.explores else "the engine cannot sample with it")
        self._config = engine.sampling
        self._trains = trains
        self._unconstrained = ""
        """Why no reply can follow a JSON schema; "" if replies can."""
        if trains:
            self._unconstrained = "is for tba serve only: runs sample without constraints"
        elif not engine.constrains:
            self._unconstrained = "needs engine=vllm"
        self._sessions: dict[str, OpenSession] = {}
        self.turns = Turns(engine.complete, engine.joins_batches, self._sessions)
        self._chat_of = lru_cache(CHATS)(partial(_chat_with, text))
        self._socket = Listener()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self._socket.listen()  # clients that connect before the server runs have to wait
        self.port: int = self._socket.getsockname()[1]
        self.loop = EventLoop("endpoint")
        self._server = server(self._sessions, self._chat, self._models)
        self._serving = self.loop.begin(self._server.serve(sockets=[self._socket]))

    def begin(self, live: OpenSession) -> str:
        """Return the base URL of a session, which cannot be guessed."""
        name = secrets.token_urlsafe(24)
        self._sessions[name] = live
        return f"http://127.0.0.1:{self.port}/s/{name}/v1"

    def end(self, url: str) -> None:
        """End a session: cancel its running requests, and refuse later ones."""
        live = self._sessions.pop(url.split("/")[-2])
        for job in live.jobs:
            job.task.cancel()

    def close(self) -> None:
        """End all sessions and the server."""
        self._server.should_exit = True
        self._server.force_exit = True
        wait([self._serving], 10)
        self.loop.close()

    async def _models(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        if request.path_params["session"] not in self._sessions:
            return RefusedError(410, ENDED).reply()
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "tba"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Any) -> Any:
        """Answer a request; errors are JSON in OpenAI's format."""
        from starlette.requests import ClientDisconnect

        try:
            return await self._reply(request)
        except RefusedError as error:
            self.counts["agents/late" if error.status == 410 else "agents/refused"] += 1
            return error.reply()
        except ClientDisconnect:  # before the whole request was received
            return RefusedError(499, "the client has disconnected").reply()

    async def _reply(self, request: Any) -> Any:
        """Return the reply, which is recorded once even if several connections wait for it."""
        from starlette.responses import StreamingResponse

        if self.turns.waiting > WAITING:
            raise RefusedError(503, "too many requests are pending; try again later")
        name = request.path_params["session"]
        if name not in self._sessions:  # without a valid session, the body is not read
            raise RefusedError(410, ENDED)
        try:
            asked = ChatRequest.model_validate_json(await request.body())
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise RefusedError(400, f"{place}: {first['msg']}") from error
        live = self._sessions.get(name)
        if live is None:
            raise RefusedError(410, ENDED)
        key = request.headers.get("idempotency-key", "" if asked.seed is None else "seed")
        body = json.dumps([key, asked.model_dump()], sort_keys=True)
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        job = live.repeated(body, key != "", is_retry)
        stream = None
        if job is None:
            job = PendingReply(body)
            whole = asked.tools or asked.logprobs or asked.return_token_ids
            if not self._trains and asked.stream and not whole:
                stream = TokenStream(self._text, asked.stops or live.sampling.stop)
                job.tell = stream.tell
            job.task = asyncio.create_task(self._sampled(live, asked, job))
            if stream is None:
                live.jobs.append(job)
        response = partial(self._response, name, live, asked, job)
        if stream is None and await _is_gone(request, job):
            return RefusedError(499, "the client has disconnected").reply()
        if stream is not None and await stream.begins(job.task):  # else the engine cannot
            events = stream.events(asked, job.task, response)
            return StreamingResponse(events, media_type="text/event-stream")
        if not key:  # nothing will request it again
            live.jobs = [each for each in live.jobs if each is not job]
        return await response()

    async def _response(
        self, name: str, live: OpenSession, asked: ChatRequest, job: PendingReply, sent: str = ""
    ) -> Any:
        """Return the reply, or the part of it after the text that is `sent`."""
        try:
            context, turn = await job.task
        except asyncio.CancelledError:
            raise RefusedError(410, ENDED) from None
        if name not in self._sessions:
            raise RefusedError(410, ENDED)
        if job.response is None:
            job.response = live.respond(job, asked, context, turn, sent)
            self.counts["agents/calls"] += 1
        return job.response

    async def _sampled(
        self, live: OpenSession, asked: ChatRequest, job: PendingReply
    ) -> tuple[RequestContext, Completion]:
        """Return the context of a request, and the policy's reply."""
        with self.turns.expect():
            try:
                check_stop(asked.stops, self._text, "stop")
                sampling = asked.sampling(live.sampling, self._config, self._fixed)
                schema = asked.schema_for(self._unconstrained)
                # in a thread: rendering and tokenising would block the other sessions
                tools = json.dumps(asked.tools or [])
                context = await asyncio.to_thread(
                    lambda: live.session.ask(asked.messages, self._chat_of(tools))
                )
            except ValueError as error:
                raise RefusedError(400, str(error)) from error
            except Exception as error:  # messages may contain anything
                told = f"these messages cannot be read ({type(error).__name__}: {error})"
                raise RefusedError(400, told) from error
            tokens = context.context
            room = self._text.context - len(tokens)
            if room < 1:
                told = (
                    f"the messages have {len(tokens)} tokens, and the model's context has"
                    f" {self._text.context}; shorten them"
                )
                raise RefusedError(400, told, "context_length_exceeded")
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
            turn = Turn(tokens, sampling, live.seed(job), job.tell, schema)
            reply = self.turns.sample(turn)
        try:
            return context, await reply
        except Exception as error:
            if schema is not None and isinstance(error, ValueError):  # the engine rejects it
                raise RefusedError(400, f"response_format: {error}") from error
            self.failure = error
            raise asyncio.CancelledError from error


def _chat_with(text: Tokenizer, tools: str) -> Chat:
    """Return the chat with tools that are given as JSON."""
    schemas = {}
    for tool in json.loads(tools):
        match tool:
            case {"type": "function", "function": {"name": str(name)}} if name not in schemas:
                schemas[name] = tool
            case _:
                raise ValueError("tools: each tool must be a function with a unique name")
    return Chat(text, schemas)


async def _is_gone(request: Any, job: PendingReply) -> bool:
    """Wait for the reply; return whether the client disconnected before it was ready."""
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


SessionResult = tuple[Session, Verdict]
"""A session that has ended, with its reward."""


class Agents:
    """Runs the sessions of searches. The program's process starts with the first session.

    `fixed` says why the program may not choose temperature or top_p; "" if it may.
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

    def run_sessions(
        self, prompts: Sequence[Prompt], sampling: Sampling, seed: int, seconds: float
    ) -> Responses:
        """Run `sampling.samples` sessions for each prompt, which end within `seconds`."""
        until = time.monotonic() + seconds
        started: list[Future[SessionResult]] = []
        for prompt in prompts:
            row = prompt.row()
            for _ in range(sampling.samples):
                running = self._run_session(row, sampling, seed, len(started), until)
                started.append(self._endpoint.loop.begin(running))
        while not all(each.done() for each in started):
            self._endpoint.turns.work(0.05)
        failure = self._endpoint.failure
        if failure is not None:
            raise failure
        results = [each.result() for each in started]
        self._endpoint.counts["agents/forks"] += sum(session.forks for session, _ in results)
        s = sampling.samples
        groups = [results[i : i + s] for i in range(0, len(results), s)]
        return self._responses(groups, sampling.max_tokens)

    def counts(self) -> Mapping[str, int]:
        """Return the numbers of calls since the last time, by metric, and reset them."""
        counts = dict(self._endpoint.counts)
        self._endpoint.counts.clear()
        return counts

    def close(self) -> None:
        """Close the endpoint; the process ends with its event loop."""
        self._endpoint.close()

    async def _run_session(
        self, row: Mapping[str, Any], sampling: Sampling, seed: int, sample: int, until: float
    ) -> SessionResult:
        """Run one session; rerun it alone if another session may have ended its process."""
        async with self._slots:
            for alone in (False, True):
                session = Session(self._program.history)
                most = self._program.max_calls
                url = self._endpoint.begin(OpenSession(session, sampling, seed, sample, most))
                try:
                    verdict = await self._process.run(url, row, until, alone)
                finally:  # first: a late reply must not enter a session that is being read
                    self._endpoint.end(url)
                if verdict is not None:
                    break
        assert verdict is not None
        if not session.exchanges and not isinstance(verdict, Rejection):
            verdict = NO_CALL
        return session, verdict

    def _responses(self, groups: Sequence[Sequence[SessionResult]], limit: int) -> Responses:
        """Return sessions by prompt; a prompt's tokens are the prefix that its sessions share.

        `limit` is the most tokens of a reply.
        """
        # placeholder for a missing prompt or session; never trained on
        nothing = np.array([self._text.eos_id], np.int32)
        unsaid = np.array([GIVEN], np.uint8)
        empty = Completion(nothing, np.zeros(1, np.float32), False, 0, marks=unsaid)
        prompts = []
        completions = []
        answers = []
        for group in groups:
            begun = [session.prompt for session, _ in group if session.exchanges]
            prompt = common(begun) if begun else nothing
            wholes: list[Completion] = []
            shown: list[Answer | Verdict] = []  # as reward functions see the sessions
            for session, verdict in group:
                whole = empty
                answer: Answer | Verdict = verdict
                if session.exchanges:
                    last = session.exchanges[-1]
                    turn = last.turn
                    # truncated if its last reply is, unless the program itself set a lower limit
                    tokens = len(last.asked.context) + len(turn.tokens)
                    is_full = len(turn.tokens) >= limit or tokens >= self._text.context
                    whole = session.completion(len(prompt), turn.finished or not is_full)
                    if not isinstance(verdict, Rejection):
                        said = self._text.answer(turn.tokens, whole.finished, (), turn.version)
                        answer = replace(said, messages=list(last.messages))
                wholes.append(whole)
                shown.append(answer)
            prompts.append(prompt)
            completions.append(wholes)
            answers.append(shown)
        rewards = [[verdict for _, verdict in group] for group in groups]
        return Responses(prompts, completions, answers, rewards=rewards)


def common(sequences: Sequence[np.ndarray]) -> np.ndarray:
    """Return the longest common prefix of these token sequences."""
    shortest = min(map(len, sequences))
    rows = np.stack([sequence[:shortest] for sequence in sequences])
    same = (rows == rows[0]).all(0)
    return sequences[0][: int(np.append(same, False).argmin())]

"""Continuous batching: one thread steps an engine; calls from many threads share its batch."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tba.errors import EngineError
from tba.types import Sampling


@dataclass(frozen=True)
class GenerationRequest:
    """One response to generate; `sampling.samples` is ignored."""

    prompt: Sequence[int]
    sampling: Sampling
    seed: int
    eos_ids: Sequence[int]
    scored: int | None = None
    """Token whose log-prob is requested in addition to the sampled tokens'."""
    schema: str | None = None
    """JSON schema, as JSON, that the response must follow."""


@dataclass(frozen=True)
class GenerationOutput:
    """A response, with the log-probs of its tokens."""

    tokens: np.ndarray
    logp: np.ndarray
    finished: bool
    score: float
    """Log-prob of the token that the request scores; NaN if it names none."""
    switches: tuple[tuple[int, int], ...]
    """Where newer weights took over: the index of the first token, and their version.

    The index is 0 if that was between the request's start and its first token.
    """


@dataclass
class _Call:
    """Requests of one caller, and their outputs so far."""

    requests: Sequence[GenerationRequest]
    outputs: dict[int, GenerationOutput] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    refused: ValueError | None = None
    """Why the engine rejected a request."""

    @property
    def ended(self) -> bool:
        return self.refused is not None or len(self.outputs) == len(self.requests)


@dataclass
class _Update:
    """A change of the engine that waits until it may run."""

    apply: Callable[[], None]
    version: int
    checks: Sequence[GenerationRequest]
    """Requests whose outputs verify the change."""
    stale: bool
    """Whether the first check also runs before the change."""
    asked: float = field(default_factory=time.perf_counter)
    waited: float = 0.0
    """Seconds that it waited for running requests."""
    outputs: list[GenerationOutput] | None = None
    """Outputs of the checks, once the change has been applied."""


class RunningBatch:
    """The running batch of an engine, of at most `slots` requests.

    A free slot goes to the request that has waited longest, from any call, so that the batch is
    full while there is work. An update waits until no request runs, and none starts while it waits
    or is verified, so that each request sees one state of the engine; with `in_flight`, the update
    is applied at once. A ValueError about a request is raised in its call. Any other exception of
    the engine, or a missed deadline, ends the engine, and is raised as EngineError in every current
    and later call.
    """

    def __init__(self, start: Callable[[], Any], slots: int, in_flight: bool, deadline: float):
        """Start the engine, an `_vllm_api.SteppedEngine`, in the thread that will step it."""
        self.version = 0
        self._slots = slots
        self._in_flight = in_flight
        self._deadline = deadline
        self._changed = threading.Condition()  # guards everything below
        self._waiting: deque[tuple[_Call, int]] = deque()
        self._running: dict[str, tuple[_Call, int]] = {}
        self._updates: deque[_Update] = deque()
        self._count = 0
        self._failure: BaseException | None = None
        self._engine: Any = None
        self._thread = threading.Thread(target=self._run, args=(start,), daemon=True, name="engine")
        self._thread.start()
        # an engine that cannot start fails here, and not in the first search
        self._wait(lambda: self._engine is not None)

    def run(self, requests: Sequence[GenerationRequest]) -> list[tuple[GenerationOutput, int]]:
        """Return each request's output, and the version with which it began."""
        call = _Call(requests)
        with self._changed:
            self._waiting.extend((call, place) for place in range(len(requests)))
            self._changed.notify_all()
        self._wait(lambda: call.ended)
        if call.refused is not None:
            raise call.refused
        return [(call.outputs[place], call.versions[place]) for place in range(len(requests))]

    def update(
        self,
        apply: Callable[[], None],
        version: int,
        checks: Sequence[GenerationRequest] = (),
        stale: bool = True,
    ) -> tuple[float, list[GenerationOutput]]:
        """Apply a change between two steps, then run the checks before any other request starts.

        With `stale`, the first check also runs before the change, to reveal a cache that outlives
        it. Returns the seconds that the change waited for running requests, and the checks'
        outputs.
        """
        update = _Update(apply, version, checks, stale)
        with self._changed:
            self._updates.append(update)
            self._changed.notify_all()
        self._wait(lambda: update.outputs is not None)
        assert update.outputs is not None
        return update.waited, update.outputs

    def _wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done()`; EngineError if the engine fails or the deadline passes."""

        def over() -> bool:
            return done() or self._failure is not None

        with self._changed:
            if not self._changed.wait_for(over, self._deadline):
                self._fail(TimeoutError(f"no answer within {self._deadline:g} s"))
            failure = self._failure
        if failure is not None:
            raise EngineError(f"vLLM failed: {failure}") from failure

    def close(self, deadline: float = 10.0) -> None:
        """End the engine and all waiting calls. May be called twice."""
        self._fail(RuntimeError("it was closed"))
        self._thread.join(deadline)

    def _fail(self, error: BaseException) -> None:
        """End the engine after its current step, and all waiting calls."""
        with self._changed:
            self._failure = self._failure or error  # the first one: others follow from it
            self._changed.notify_all()  # also wakes the engine's thread, which then ends

    def _run(self, start: Callable[[], Any]) -> None:
        """Run the engine's thread. Only this thread touches the engine."""
        engine: Any = None
        try:
            engine = start()
            with self._changed:
                self._engine = engine
                self._changed.notify_all()
            while self._failure is None:
                self._turn(engine)
        except BaseException as error:  # raised in all waiting calls
            self._fail(error)
        if engine is not None:
            engine.close()

    def _turn(self, engine: Any) -> None:
        """Wait for work; then apply an update, or start requests and take a step.

        The engine is called without the lock: meanwhile, other threads add requests.
        """
        begun = []
        update = None
        with self._changed:
            self._changed.wait_for(
                lambda: self._waiting or self._running or self._updates or self._failure
            )
            if self._updates and (self._in_flight or not self._running):
                update = self._updates.popleft()
            # while an update waits, no request starts, so that the batch drains
            idle = not update and not self._updates
            while idle and self._waiting and len(self._running) < self._slots:
                call, place = self._waiting.popleft()
                key = str(self._count)
                self._count += 1
                self._running[key] = call, place
                call.versions[place] = self.version
                begun.append((key, call.requests[place]))
        if update is not None:
            update.waited = time.perf_counter() - update.asked
            self._answer(engine, update.checks[: int(update.stale)])
            update.apply()
            outputs = self._answer(engine, update.checks)
            with self._changed:
                self.version = update.version  # after the checks: a faulty update is never current
                update.outputs = outputs
                self._changed.notify_all()
            return
        for key, request in begun:
            try:
                engine.add(key, request)
            except ValueError as error:
                with self._changed:
                    call, _ = self._running.pop(key)
                    call.refused = call.refused or error
                    self._changed.notify_all()
        if self._running:
            self._deliver(engine.step())

    def _answer(self, engine: Any, checks: Sequence[GenerationRequest]) -> list[GenerationOutput]:
        """Return the outputs of the checks; running requests continue meanwhile."""
        keys = [f"check {place}" for place in range(len(checks))]
        for key, request in zip(keys, checks, strict=True):
            engine.add(key, request)
        outputs: dict[str, GenerationOutput] = {}
        while not outputs.keys() >= set(keys):
            ended = engine.step()
            outputs.update(ended)
            self._deliver(ended)
        return [outputs[key] for key in keys]

    def _deliver(self, ended: Sequence[tuple[str, GenerationOutput]]) -> None:
        with self._changed:
            for key, output in ended:
                if key in self._running:  # otherwise it is a check
                    call, place = self._running.pop(key)
                    call.outputs[place] = output
            self._changed.notify_all()

"""Publication of weights in the background, while training continues."""

import threading
import time
from collections.abc import Callable

from tba.learn import Trainer
from tba.runtime.deadline import SLICE, Clock, NoAnswerError, search_errors
from tba.weights import Weights


class Publisher:
    """Thread that sends the newest weights. A newer publication replaces one that is waiting.

    At most two copies of the weights exist: the one that is being sent, and the next. `send` gets
    the weights and the time at which they were published; their arrays are only valid inside of it.
    `fail` gets the error that has ended the thread.
    """

    def __init__(
        self,
        send: Callable[[Weights, float], None],
        fail: Callable[[Exception], None],
        deadline: float,
        clock: Clock,
    ):
        self._send, self._fail, self._deadline, self._clock = send, fail, deadline, clock
        self._changed = threading.Condition()  # guards everything below
        self._next: tuple[Callable[[], Weights], float] | None = None
        self._sending_since: float | None = None
        self._failed = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def publish(self, trainer: Trainer, version: int) -> None:
        """Copy the weights and return; they are sent in the background."""
        started = time.monotonic()
        with self._changed:
            since = self._sending_since
            if since is not None and self._clock() - since > self._deadline:
                raise self._late()
            self._next = None  # first: its memory is free for the new copy
        copy = trainer.copy(version)
        with self._changed:
            self._next = copy, started
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until everything that was published has been sent, or the thread has failed."""
        until = self._clock() + self._deadline
        with self._changed:
            while not self._changed.wait_for(self._idle, min(SLICE, self._deadline)):
                if self._clock() > until:
                    raise self._late()

    def close(self) -> None:
        """End the thread; what has not been sent is dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=10)

    def _late(self) -> NoAnswerError:
        limit = f"runtime.task_deadline = {self._deadline:g} s"
        return NoAnswerError(f"the weights were not sent within {limit}; raise that setting")

    def _idle(self) -> bool:
        return self._failed or (self._next is None and self._sending_since is None)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while self._next is None and not self._closing:
                        self._changed.wait(1.0)
                    if self._closing or self._next is None:
                        return
                    (copy, since), self._next = self._next, None
                    self._sending_since = self._clock()
                with search_errors("the weights could not be published"):
                    self._send(copy(), since)
                del copy
                with self._changed:
                    self._sending_since = None
                    self._changed.notify_all()
        except Exception as error:  # the train loop raises it when it next waits or publishes
            self._fail(error)
            with self._changed:
                self._failed = True
                self._changed.notify_all()

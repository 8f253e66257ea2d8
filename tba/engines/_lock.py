"""Lock for weights, which many threads read and one replaces."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class SharedLock:
    """Lock that is held shared or exclusively. Threads that wait for exclusive use go first."""

    def __init__(self) -> None:
        # held by a thread that waits for exclusive use, so that nobody else can begin to share
        self._entrance = threading.Lock()
        self._changed = threading.Condition()
        self._sharing = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._entrance:
            self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._entrance, self._changed:
            self._changed.wait_for(lambda: self._sharing == 0)
            yield

    def _count(self, change: int) -> None:
        with self._changed:
            self._sharing += change
            self._changed.notify_all()

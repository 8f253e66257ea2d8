"""Environments for tests, with the standard library only: a scoring process imports no torch."""

import asyncio
import threading
from typing import Any

CLOSING = threading.Event()


class Desk:
    """Tools that work, fail and hang."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def reset(self, says: str | None = None, **row: Any) -> str | None:
        return says

    def double(self, n: int) -> int:
        """Double a number.

        Args:
            n: The number.
        """
        self.notes.append(f"double {n}")
        return 2 * n

    async def later(self, word: str) -> str:
        """Say a word after a while.

        Args:
            word: The word.
        """
        await asyncio.sleep(0)
        return word

    def divide(self) -> float:
        """Divide by zero."""
        return 1 / 0

    def leave(self) -> None:
        """Try to end the process."""
        raise SystemExit(3)

    def hang(self) -> None:
        """Do not return."""
        CLOSING.wait(60)

    def _note(self) -> None:
        """Not a tool."""


class Locked(Desk):
    """A desk that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Greedy(Desk):
    """A desk that works with the row itself."""

    def reset(self, heap: list[int], **row: Any) -> str | None:  # type: ignore[override]
        self.heap = heap
        return f" with {len(heap)}"

    def take(self) -> int:
        """Take one."""
        return self.heap.pop()


class Forgetful(Desk):
    """A desk that cannot always be reset."""

    def reset(self, kind: str, **row: Any) -> str | None:  # type: ignore[override]
        if kind == "raises":
            raise OSError("no desk is free")
        if kind == "hangs":
            CLOSING.wait(60)
        if kind == "long":
            return "long" * 1000
        return str(id(self)) if kind == "differs" else None

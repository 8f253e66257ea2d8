"""A user's program that calls the policy through an OpenAI-compatible endpoint."""

import json
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from tba.config.mistakes import choices, relative_to
from tba.config.tables import FILLED_IN, Finite, Positive
from tba.tasks import Program
from tba.tasks._data import Rows
from tba.tasks.custom import ADVICE, Custom

SHOWN = 200
"""Number of characters of a row that are shown if it has no prompt."""


@dataclass(frozen=True, kw_only=True)
class Agent(Custom):
    """A user's program, which calls the policy any number of times and returns a reward.

        async def rollout(base_url: str, row: dict) -> float

    It may be `async def` or plain, and take `client`, an `openai.AsyncOpenAI`, instead of
    `base_url`. It returns a number, a dict with `reward` and numbers to log, or None to reject the
    sample. A class with a method `rollout` is instantiated once per process. A session is one
    trajectory: see docs/agents.md. Reward functions, as in the task `custom`, add to the reward.
    """

    rollout: str = ""
    """The program, as `file.py:function` or `package.module:function`."""
    python: str | None = None
    """Python interpreter of the program; default: the current one."""
    deadline: Finite = 300.0
    """Time limit of a session in seconds; after that, the sample is rejected."""
    concurrency: Positive = 64
    """Maximum number of concurrent sessions in a searcher."""
    max_calls: Positive = 64
    """Maximum number of calls in a session; further calls get status 410."""
    history: Literal["append", "template"] = "append"
    """append: the policy sees its own earlier tokens; template: it sees the chat template's
    rendering, and an earlier turn that renders differently starts a new context."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the program, such as {OPENAI_API_KEY = "env:OPENAI_API_KEY"}. It
    also inherits the environment of this process, except secrets."""
    environment: str | None = field(default=None, metadata=FILLED_IN, repr=False)
    max_turns: int = field(default=8, metadata=FILLED_IN, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        where, _, name = self.rollout.rpartition(":")
        if not where or not name:
            raise ValueError(f"task.rollout = {self.rollout!r}: {ADVICE}")
        if where.endswith(".py") and not Path(where).expanduser().is_file():
            told = f"task.rollout = {self.rollout!r}: no such file: {where}"
            raise ValueError(told + relative_to(where))
        if where.endswith(".py"):  # it is not run here: it may need the packages of task.python
            source = Path(where).expanduser().read_text("utf-8")
            functions = re.findall(r"^(?:async def|def|class) (\w+)", source, re.MULTILINE)
            if not re.search(rf"\b{re.escape(name.partition('.')[0])}\b|import \*", source):
                told = f"task.rollout = {self.rollout!r}: {where} has no function {name!r}"
                raise ValueError(told + choices(name, functions))
        if self._interpreter is None:
            raise ValueError(f"task.python = {self.python!r}: no such program; give an interpreter")
        for package in ("starlette", "uvicorn"):
            if find_spec(package) is None:
                raise ValueError("task=agent needs an HTTP server: pip install -e '.[agents]'")

    @property
    def needs_reward(self) -> bool:
        return False

    @cached_property
    def program(self) -> Program:
        where, _, name = self.rollout.rpartition(":")
        if where.endswith(".py"):
            where = str(Path(where).expanduser().resolve())
        assert self._interpreter is not None
        return Program(
            rollout=f"{where}:{name}",
            python=self._interpreter,
            deadline=self.deadline,
            concurrency=self.concurrency,
            max_calls=self.max_calls,
            history=self.history,
            environment=self.env,
        )

    @cached_property
    def _interpreter(self) -> str | None:
        """The absolute path of the program's Python; None if it does not exist."""
        if self.python is None:
            return sys.executable
        found = shutil.which(Path(self.python).expanduser())
        return None if found is None else str(Path(found).absolute())

    def _table(self, key: str, source: str, split: str) -> Rows:
        """Return the rows; for a row without a prompt, the row itself becomes the prompt."""
        table = []
        for row in super()._table(key, source, split):
            shown = json.dumps(row, default=str)[:SHOWN]
            table.append({self.prompt_column: shown, **row})
        return table

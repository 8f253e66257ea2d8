"""Environments of verifiers 0.4: one or several turns, user simulators, tool servers.

    agents/.venv/bin/pip install 'verifiers>=0.4,<0.5' TASKSET

Set task.python=agents/.venv/bin/python. The environment variable TASKSET has the name of a taskset,
and a row the `index` of a task in it. The reward is the weighted sum of the taskset's rewards.
"""

import asyncio
import os
from contextlib import AsyncExitStack
from itertools import islice

from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.utils import loaders


class Environment:
    """An environment that serves all sessions of this process."""

    def __init__(self) -> None:
        agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        config = {"taskset": {"id": os.environ["TASKSET"]}, "agent": agent}
        self._env = loaders.load_environment(loaders.resolve_env_config(config))
        self._tasks = iter(self._env.taskset)
        self._read: list = []
        self._serving = AsyncExitStack()
        self._lock = asyncio.Lock()
        self._started = False

    async def rollout(self, base_url: str, row: dict) -> dict[str, float] | None:
        async with self._lock:
            if not self._started:  # tool servers, for example, run until the process ends
                await self._serving.enter_async_context(self._env.serving())
                self._started = True
            missing = row["index"] + 1 - len(self._read)
            self._read += islice(self._tasks, max(0, missing))
        client = EvalClientConfig(base_url=base_url, api_key_var="UNUSED")
        context = ModelContext(model="policy", client=client)
        episode = await self._env.run_episode(self._read[row["index"]], context)
        errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
        if errors:
            raise RuntimeError(f"{errors[0].type}: {errors[0].message}")
        rewards: dict[str, float] = {}
        for trace in episode.traces:
            for name, reward in trace.rewards.items():
                rewards[name] = rewards.get(name, 0.0) + reward.value
        return {**rewards, "reward": sum(rewards.values())}

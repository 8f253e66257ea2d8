"""A side of `agents.py`: it holds sessions, or dialogues with an environment, line by line."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
RECIPES = HERE.parents[1] / "recipes"
SHOT = '<tool_call>{"name": "multiply", "arguments": {"a": {a}, "b": {b}}}</tool_call>'
TOKENS = 72
"""Most tokens of a session, with those of the tool."""
RESULT = 20
"""Tokens between two turns."""
PAUSE = 0.5
"""Mean seconds before a call."""


class Calculator:
    """The tool of `recipes/calculator.py` as an environment."""

    def reset(self, **row: Any) -> None:
        pass

    def multiply(self, a: int, b: int):
        """Multiply two integers.

        Args:
            a: A factor.
            b: A factor.
        """
        return int(a) * int(b)


def nothing(completions: list[Any], **columns: Any) -> list[float]:
    return [0.0 for _ in completions]


async def ready(client: Any, row: dict[str, Any]) -> float:
    return await session(client, row, 0.0)


async def pausing(client: Any, row: dict[str, Any]) -> float:
    return await session(client, row, PAUSE)


async def session(client: Any, row: dict[str, Any], pause: float) -> float:
    """Hold a session of two turns, which has as many tokens as a dialogue may have."""
    sys.path.insert(0, str(RECIPES))
    import calculator

    messages = calculator.ask(row, SHOT.replace("{a}", "12").replace("{b}", "34"))
    left = TOKENS
    for _ in range(2):
        if pause:
            await asyncio.sleep(random.expovariate(1 / pause))
        reply = await client.chat.completions.create(
            model="policy", messages=messages, tools=[calculator.MULTIPLY], max_tokens=left
        )
        message = reply.choices[0].message
        left = max(1, left - reply.usage.completion_tokens - RESULT)
        if reply.choices[0].finish_reason != "tool_calls":
            break
        messages.append(message)
        for call in message.tool_calls:
            result = calculator.multiply(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


Holder = tuple[Callable[[int], Any], Callable[[], None]]


def sessions_of(side: str, model: str, folder: Path, prompts: int, samples: int) -> Holder:
    """Return what holds the sessions of a search with a seed, and what ends it."""
    from tba.config.schema import load
    from tba.setup.setup import check

    rows = [{"a": 12, "b": 34}, *({"a": 21 + 7 * n, "b": 89 - 6 * n} for n in range(prompts + 2))]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        f"policy.model={model}", f"run.folder={folder}/run", "runtime.use=local",
        f"task.data={data}", "task.held_out_size=1", f"sampling.samples={samples}",
        f"sampling.max_tokens={TOKENS}", f"trainer.group_size={samples}",
        f"trainer.batch_size={samples}",
    ]  # fmt: skip
    if side == "environment":
        settings += [
            "task=custom", "task.chat=on", "task.prompt=What is {a} * {b}?", "task.shots=1",
            f"task.shot_response={json.dumps(SHOT)}", f"task.environment={HERE}:Calculator",
            f"task.reward={HERE}:nothing", "task.max_turns=2",
        ]  # fmt: skip
    else:
        program = "pausing" if side == "pausing" else "ready"
        settings += ["task=agent", f"task.rollout={HERE}:{program}"]
    parts = check(load(None, settings))
    searcher = parts.search_setup().build("cpu", False)
    own = parts.prompts[-prompts:]
    sampling = searcher.setup.sampling
    if side == "environment":
        return lambda seed: searcher.answer("", own, sampling, seed), searcher.close
    (agents,) = searcher.agents.values()
    return lambda seed: agents.run_sessions(own, sampling, seed, 3600.0), searcher.close


def main() -> None:
    side, model, *numbers = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        respond, close = sessions_of(side, model, Path(folder), *map(int, numbers))
        for line in sys.stdin:
            started = time.perf_counter()
            responses = respond(int(line))
            seconds = time.perf_counter() - started
            tokens = 0
            for group in responses.completions:
                for c in group:
                    tokens += len(c.tokens) if c.sampled is None else int(c.sampled.sum())
            print(json.dumps([seconds, tokens]), flush=True)
        close()


if __name__ == "__main__":
    main()

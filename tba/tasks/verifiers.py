"""Single-turn tasksets of the verifiers library, with their rewards: pip install verifiers."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from itertools import islice
from typing import Any

from tba.config.tables import Count
from tba.prompt import Answer, Message, Prompt
from tba.tasks import Task


@dataclass(frozen=True)
class Verifiers(Task):
    """Tasks of a taskset for `verifiers.v1`: a prompt, and rewards that see one answer to it.

    The reward is the sum of the taskset's, by their weights. Tasks with tools, a container or
    set-up in a runtime are refused. The last `held_out_size` tasks are held out.
    https://github.com/PrimeIntellect-ai/verifiers
    """

    taskset: str
    """Installed module that exports the taskset, such as `reverse_text_v1`."""
    options: dict[str, Any] = field(default_factory=dict)
    """The taskset's config, in a table."""
    size: int | None = None
    """Tasks to load, the held-out ones included; default: all."""
    held_out_size: Count = 64
    """Tasks to evaluate on: the last ones."""
    chat: bool = True
    """Send prompts through the tokenizer's chat template; else as plain text."""
    pass_reward: float | None = None
    """Least reward of a correct answer, for pass@1 and pass@k."""

    def __post_init__(self) -> None:
        if find_spec("verifiers") is None:
            raise ValueError("task.use = 'verifiers' needs verifiers: pip install verifiers")
        assert self._loaded is not None  # raises before anything starts

    def prompts(self) -> Sequence[Prompt]:
        return self._divided[0]

    def held_out(self) -> Sequence[Prompt]:
        return self._divided[1]

    async def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        kind = self._loaded.task_type()
        data = kind.data_type().model_validate(prompt.columns["data"])
        task = kind(data, self._loaded.config.task)
        return list(await asyncio.gather(*(_score(task, answer.text) for answer in answers)))

    @cached_property
    def _divided(self) -> tuple[list[Prompt], list[Prompt]]:
        """Prompts to train on, and prompts to evaluate on."""
        if self.size is None and not self._loaded.bounded:
            raise ValueError(f"task.size is missing: {self.taskset} has no end; set task.size=1000")
        prompts = []
        for task in islice(self._loaded, self.size):
            _check(self.taskset, task, self._loaded)
            messages = _messages(task.data)
            prompt = Prompt(
                id=f"{self.taskset}-{task.data.idx}",
                text=messages if self.chat else "\n\n".join(m["content"] for m in messages),
                columns={"data": task.data.model_dump(mode="json", exclude_none=True)},
            )
            prompts.append(prompt)
        cut = max(0, len(prompts) - self.held_out_size)
        held_out = prompts[cut:]
        seen = [prompt.text for prompt in held_out]
        return [prompt for prompt in prompts[:cut] if prompt.text not in seen], held_out

    @cached_property
    def _loaded(self) -> Any:
        """The taskset; ValueError if there is none of this name, or its config is wrong."""
        from pydantic import ValidationError
        from verifiers.v1.utils import loaders

        try:
            config = loaders.taskset_config_type(self.taskset)
            return loaders.load_taskset(config(**{**self.options, "id": self.taskset}))
        except (ImportError, AttributeError, TypeError, ValidationError) as error:
            raise ValueError(
                f"task.taskset = {self.taskset!r} with task.options = {self.options}: {error}"
            ) from error


async def _score(task: Any, text: str) -> float | None:
    """Return the weighted sum of the rewards of an answer."""
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls

    nodes = [vf.MessageNode(message=m) for m in _messages(task.data)]
    # `sampled` marks an answer of the model: rewards see no other
    answer = vf.MessageNode(message={"role": "assistant", "content": text}, sampled=True)
    for parent, node in enumerate([*nodes[1:], answer]):
        node.parent = parent
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[*nodes, answer],
        state=state_cls(type(task))(),
    )
    await task.score(trace)
    return sum(reward.value for reward in trace.rewards.values())


def _messages(data: Any) -> list[Message]:
    """Return a task's prompt as chat messages; ValueError if it is not text."""
    messages = [] if data.system_prompt is None else [("system", data.system_prompt)]
    if isinstance(data.prompt, str):
        messages.append(("user", data.prompt))
    else:
        messages += [(message.role, message.content) for message in data.prompt or []]
    if not messages or not all(isinstance(content, str) for _, content in messages):
        raise ValueError(f"task {data.idx} has a prompt that is not text, or none")
    return [{"role": role, "content": content} for role, content in messages]


def _check(taskset: str, task: Any, loaded: Any) -> None:
    """ValueError if a task has tools, a container or set-up, which rewards here do not see."""
    from verifiers.v1 import Task

    kind = type(task)
    has_tools = loaded.toolsets(loaded.config) or task.toolsets(task.config)
    has_setup = (kind.setup, kind.finalize) != (Task.setup, Task.finalize)
    if has_tools or has_setup or kind.NEEDS_CONTAINER:
        raise ValueError(
            f"task.taskset = {taskset!r} has tools, a container, or set-up in a runtime; only"
            " tasksets can be used whose rewards see one answer to a prompt"
        )

"""Several tasks in one run, each with its own prompts, rewards and metrics."""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

from pydantic import Field

from tba.config.mistakes import about
from tba.config.tables import Finite, PluginTable
from tba.prompt import Answer, Prompt
from tba.tasks import Scores, Task
from tba.tasks._memory import named_task


class PartTable(PluginTable):
    """Table of a part: the task with its options, and its weight."""

    weight: Finite = 1.0


@dataclass(frozen=True)
class TaskMixture(Task):
    """Several tasks, whose prompts are interleaved in proportion to their weights.

    Each part is a table, `[task.parts.NAME]`, with `use`, the options of that task, and `weight`.
    Metrics are reported over all parts and for each part: `parts/NAME/reward` of training batches,
    `eval/NAME/...` of evaluations. Held-out prompts are mixed in the same proportion, and
    `selection` is applied to each part separately.
    """

    parts: Annotated[dict[str, PartTable], Field(min_length=1)]
    """A table for each part: `use`, the options of that task, and `weight` (default: 1)."""

    def __post_init__(self) -> None:
        assert self.tasks  # raises early if one of them cannot be built

    @property
    def pass_reward(self) -> float | None:
        """The minimum reward of a correct answer, if it is the same for all parts."""
        levels = {task.pass_reward for task in self.tasks.values()}
        return levels.pop() if len(levels) == 1 else None

    @cached_property
    def part_weights(self) -> Mapping[str, float]:
        return {name: part.weight for name, part in self.parts.items()}

    @cached_property
    def tasks(self) -> Mapping[str, Task]:
        tasks = {}
        for name, part in self.parts.items():
            key = f"task.parts.{name}"
            task = named_task(key, part.use, part.options)
            has_own_way = task.samples_again or task.tools is not None or task.program is not None
            if task.part_weights or task.measures() or has_own_way:
                raise ValueError(
                    f"{key}.use = {part.use!r} has parts, measures, attacks, dialogues or a"
                    " program, which a part of a mixture cannot have; train it in a separate run,"
                    " or evaluate it in [eval.sets.NAME]"
                )
            tasks[name] = task
        return tasks

    def part(self, prompt: Prompt) -> tuple[str, Task]:
        name = prompt.id.partition("/")[0]
        return name, self.tasks[name]

    @property
    def dependencies(self) -> Sequence[tuple[str, Task]]:
        return [(f"[task.parts.{name}]", task) for name, task in self.tasks.items()]

    def prompts(self) -> Sequence[Prompt]:
        prompts: list[Prompt] = []
        for name, task in self.tasks.items():
            with about(f"[task.parts.{name}]"):
                of_part = task.prompts()
                if not of_part:
                    raise ValueError("there are no prompts to train on; remove the part")
            prompts += _prefixed(name, of_part)
        return prompts

    def held_out(self) -> Sequence[Prompt]:
        """Return the prompts of all parts; every prefix is in proportion to the weights."""
        places = []
        for name, task in self.tasks.items():
            with about(f"[task.parts.{name}]"):
                of_part = _prefixed(name, task.held_out())
            for i, prompt in enumerate(of_part):
                places.append(((i + 0.5) / self.part_weights[name], prompt))
        return [prompt for _, prompt in sorted(places, key=lambda place: place[0])]

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> Scores | Awaitable[Scores]:
        _, task = self.part(prompt)
        return task.score(replace(prompt, id=prompt.id.partition("/")[2]), answers)


def _prefixed(name: str, prompts: Sequence[Prompt]) -> list[Prompt]:
    return [replace(prompt, id=f"{name}/{prompt.id}") for prompt in prompts]

"""Several tasks in one run, each with its own prompts, rewards and metrics."""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tba.config.mistakes import about
from tba.config.tables import FILLED_IN
from tba.prompt import Answer, Prompt
from tba.tasks import Scores, Task


@dataclass(frozen=True)
class TaskMixture(Task):
    """Several tasks, whose prompts are interleaved in proportion to their weights.

    Each task is a table, `[task.sources.NAME]`, with `use`, its options, and a `weight` above 0.
    Metrics are reported over all sources and for each: `sources/NAME/reward` of training batches,
    `eval/NAME/...` of evaluations. Held-out prompts are mixed in the same proportion, and
    `selection` is applied to each source separately.
    """

    tasks: Mapping[str, Task] = field(metadata=FILLED_IN)
    weights: Mapping[str, float] = field(metadata=FILLED_IN)

    def __post_init__(self) -> None:
        for name, task in self.tasks.items():
            has_own_way = task.samples_again or task.tools is not None or task.program is not None
            if task.measures() or has_own_way:
                raise ValueError(
                    f"[task.sources.{name}] has measures, attacks, dialogues or a program, which a"
                    " mixture cannot train on; train on it in a separate run, or set weight = 0"
                )

    @property
    def pass_reward(self) -> float | None:
        """The minimum reward of a correct answer, if it is the same for all sources."""
        levels = {task.pass_reward for task in self.tasks.values()}
        return levels.pop() if len(levels) == 1 else None

    def source(self, prompt: Prompt) -> tuple[str, Task]:
        name = prompt.id.partition("/")[0]
        task = self.tasks.get(name)
        return ("", self) if task is None else (name, task)  # "": a prompt of logged rollouts

    @property
    def dependencies(self) -> Sequence[tuple[str, Task]]:
        return [(f"[task.sources.{name}]", task) for name, task in self.tasks.items()]

    def prompts(self) -> Sequence[Prompt]:
        prompts: list[Prompt] = []
        for name, task in self.tasks.items():
            with about(f"[task.sources.{name}]"):
                of_source = task.prompts()
                if not of_source:
                    raise ValueError("there are no prompts to train on; remove the source")
            prompts += _prefixed(name, of_source)
        return prompts

    def held_out(self) -> Sequence[Prompt]:
        """Return the prompts of all sources; every prefix is in proportion to the weights."""
        places = []
        for name, task in self.tasks.items():
            with about(f"[task.sources.{name}]"):
                of_source = _prefixed(name, task.held_out())
            for i, prompt in enumerate(of_source):
                places.append(((i + 0.5) / self.weights[name], prompt))
        return [prompt for _, prompt in sorted(places, key=lambda place: place[0])]

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> Scores | Awaitable[Scores]:
        _, task = self.source(prompt)
        if task is self:
            raise ValueError(f"{prompt.id} is of logged rollouts, which no source can score again")
        return task.score(replace(prompt, id=prompt.id.partition("/")[2]), answers)


def _prefixed(name: str, prompts: Sequence[Prompt]) -> list[Prompt]:
    return [replace(prompt, id=f"{name}/{prompt.id}") for prompt in prompts]

"""Further evaluation sets of a run, from the tables [eval.sets.NAME]."""

import logging
from collections.abc import Set

from tba.config.messages import about
from tba.config.schema import Config
from tba.config.tables import Use
from tba.models.pretrained import Text
from tba.runs.notes import Encoded
from tba.search.chat import encoder, identity
from tba.search.dialogue import check_tools
from tba.search.searcher import EvaluationSet
from tba.tasks import HasParts, Prepares, SamplesAgain, Task, tools_of
from tba.tasks._memory import InMemory, named_task


def evaluation_sets(
    config: Config,
    memory: InMemory | None,
    task: Task,
    text: Text,
    trained_on: Set[bytes],
) -> tuple[dict[str, EvaluationSet], list[Encoded]]:
    """Return the sets by name, and all their prompts with their tokens; ValueError if one is wrong.

    Prompts whose identity is trained on are left out, unless the task samples from these again.
    `task` is the task of the run.
    """
    sets: dict[str, EvaluationSet] = {}
    encoded: list[Encoded] = []
    for name, table in config.eval.sets.items():
        key = f"eval.sets.{name}"
        if isinstance(task, HasParts) and name in task.weights:
            raise ValueError(f"[{key}]: a part of the task has this name, too; rename one of them")
        options = table.options if table.use else config.task.options | table.options
        use = table.use or config.task.use
        own = named_task(key, use, options, memory)
        with about(f"[{key}]"):  # errors speak of `task.`
            if isinstance(own, Prepares):
                own.check()
            prompts = own.held_out()
        tokens = text.encode_all(prompts, config.sampling.max_tokens, encoder(text, own))
        encoded += zip(prompts, tokens, strict=True)
        again = isinstance(own, SamplesAgain)  # there are no prompts but those it is trained on
        fresh = []
        for prompt, ids in zip(prompts, tokens, strict=True):
            if again or identity(own, prompt, ids) not in trained_on:
                fresh.append(prompt)
        if not fresh:
            why = "all of its prompts are trained on" if prompts else "it has no held-out prompts"
            raise ValueError(f"[{key}]: {why}; give it data of its own, or remove it")
        if left_out := len(prompts) - len(fresh):
            text_of = "eval.sets.%s: %d of %d prompts are trained on, and left out"
            logging.getLogger(__name__).warning(text_of, name, left_out, len(prompts))
        if (tools := tools_of(own)) is not None:
            check_tools(tools, fresh[0], config.reward.isolate)
        chosen = fresh[: table.prompts or config.eval.prompts]
        sets[name] = EvaluationSet(Use(use=use, **options), tuple(chosen))
    return sets, encoded

"""The train loop: synchronous or asynchronous, on one machine or a cluster."""

from typing import TYPE_CHECKING

from tba.types import collate

if TYPE_CHECKING:
    from tba.run import Run


def train(run: "Run") -> None:
    """Train until the run ends; runs differ in their searchers and how long they wait."""
    c = run.config
    run.collect("first_fill")
    for step in range(run.step, c.run.steps):
        if run.ending:
            break
        groups = run.sample()
        metrics = run.trainer.step(collate(groups), step)
        run.step = done = step + 1
        if due(done, c.policy.reset_reference_every):
            run.reset_reference()  # first: if publishing fails, the checkpoint has the reference
        if due(done, c.runtime.publish_every):
            run.publish()
        if due(done, c.eval.every) and done < c.run.steps:
            run.evaluate()
        run.collect()  # waits for `fresh` groups, none when asynchronous, and within `max_reuse`
        run.log(metrics, groups)
        if due(done, c.checkpoint.every):
            run.save()


def due(step: int, every: int) -> bool:
    """Return whether something that happens every `every` steps (0: never) is due at `step`."""
    return every > 0 and step % every == 0

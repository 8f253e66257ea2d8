"""Opening of a runtime: the places of a run, and its searchers."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from tba.config.messages import size
from tba.config.schema import Config
from tba.learn.trainer import SingleTrainer
from tba.runtime import LaggedSearchers, Searchers, SearchJob, SearchState
from tba.runtime.placement import Place, places_on_one_machine

if TYPE_CHECKING:
    from tba.runtime.cluster import Cluster

log = logging.getLogger(__name__)


def open_places(
    config: Config, tell: Callable[[str], None], closing: ExitStack
) -> "tuple[Place, Cluster | None]":
    """Return the trainer's place, which this process takes, and the running Ray, if one is used."""
    if config.runtime.use == "local":
        return places_on_one_machine(config.runtime)[0], None
    tell("starting Ray")
    from tba.runtime.bind import bind_ray

    bind_ray(config.runtime.address)
    from tba.runtime.cluster import open_cluster

    cluster = open_cluster(config.runtime, config.engine.gpus)
    closing.callback(cluster.connection.close)
    closing.enter_context(cluster.trainer.taken())
    return cluster.trainer, cluster


def open_searchers(
    job: SearchJob, place: Place, cluster: "Cluster | None", trainer: SingleTrainer,
    stopping: Callable[[], bool], search: SearchState, step: int,
) -> Searchers:  # fmt: skip
    """Open the searchers of the runtime, with the weights that they had at this step."""
    searchers: Searchers
    bf16 = trainer.policy.autocast
    if cluster is not None:
        from tba.runtime.crew import PUBLISHED
        from tba.runtime.ray import RaySearchers

        copies = min(PUBLISHED, job.settings.searchers) + 2  # the newest, and that of an evaluation
        check_memory(trainer.published_bytes, copies, cluster.room())
        newest = trainer.weights(version=step) if step or job.setup.held_out else None
        searchers = RaySearchers(job, cluster, bf16, stopping, search, newest)
    else:
        job.tell("loading the models of the searcher")
        from tba.runtime.local import LocalSearchers

        every, version = job.settings.publish_every, search.weights and search.weights.version
        # a run on Ray saves none, and a publication may have failed
        if (version is None and step >= every) or (step and step % every == 0 and version != step):
            search = replace(search, weights=trainer.weights(version=step))
        searchers = LocalSearchers(job, lambda: job.setup.build(place.device, bf16), search)
    behind = (job.settings.lag or 0) * job.batch_groups
    if behind or search.held:
        return LaggedSearchers(searchers, behind, search.held)
    return searchers


def check_memory(each: int, copies: int, room: int) -> None:
    """Warn if so many publications of `each` bytes may not fit into memory."""
    if each * copies > room:
        log.warning(
            "%d publications of the weights, which may be on their way at once, take %s, but there"
            " are %s of memory for them; use fewer searchers, publish bf16 (engine.dtype=bf16), or"
            " train adapters (policy.lora)",
            *(copies, size(each * copies), size(room)),
        )

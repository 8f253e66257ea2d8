"""Assembly of a run: check its config, build its parts, start its searchers."""

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tba.config.schema import Config
from tba.errors import TrainerLost
from tba.learn import Trainer
from tba.learn.trainer import SingleTrainer
from tba.offline.resumed import choose_resumed, renewed
from tba.offline.rollouts import described, read_rollouts, with_reference
from tba.replay.buffer import ReplayBuffer
from tba.run import Run
from tba.runs import checkpoint
from tba.runs.console import Console, silent
from tba.runs.folder import (
    CHECKPOINTS,
    CONFIG,
    WARNINGS,
    Replay,
    check_unused,
    locked,
    read_config,
    rewind,
    write_json,
)
from tba.runs.generations import generations, how_to_resume, recover
from tba.runs.summary import Summary
from tba.runtime import Searchers, SearchJob
from tba.runtime.placement import (
    Place,
    emptiest_gpu,
    places_on_one_machine,
    reuse_memory,
    take_gpu,
)
from tba.search.prompts import SearchState
from tba.setup.checks import placed
from tba.setup.setup import RunSetup, check
from tba.stop import Stop
from tba.streams import Use, generator
from tba.tasks._memory import InMemoryData
from tba.types import Group

if TYPE_CHECKING:
    from tba.runtime.cluster import Cluster


def open_places(
    config: Config, tell: Callable[[str], None], closing: ExitStack
) -> "tuple[Place, Cluster | None]":
    """Return the trainer's place, which this process takes, and the Ray cluster; None if local."""
    if config.runtime.use == "local":
        return places_on_one_machine(config.runtime)[0], None
    tell("starting Ray")
    from tba.runtime.deadline import bind_ray

    bind_ray(config.runtime.address)
    from tba.runtime.cluster import open_cluster

    gpus = config.engine.options.get("tensor_parallel_size", 1)
    cluster = open_cluster(config.runtime, gpus, config.trainer.devices)
    closing.callback(cluster.connection.close)
    closing.enter_context(cluster.trainer.taken())
    return cluster.trainer, cluster


def open_trainer(
    setup: RunSetup, folder: Path, place: Place, cluster: "Cluster | None", is_new: bool,
    closing: ExitStack,
) -> Trainer:  # fmt: skip
    """Return a trainer in this process, or one whose ranks run in separate processes."""
    c = setup.config
    if place.device == "cpu":
        reuse_memory()
    elif cluster is None or not cluster.ranks:  # vLLM cannot sleep with expandable segments
        take_gpu(place.device, expands=c.runtime.colocate != "sleep")
    if c.trainer.devices == 1 or cluster is None:
        transport = None if cluster is None else cluster.transport
        return setup.trainer(place.device, is_new, transport)
    from tba.runtime.cluster import folders
    from tba.runtime.ranks import ShardedTrainer

    start = c.runtime.start_deadline
    calls = cluster.connection.calls
    seen = {**folders(c.policy), "run.folder": str(folder)}  # ranks write checkpoints
    given = setup.trainer_setup(is_new), cluster.ranks, calls, start, seen, cluster.transport
    trainer = ShardedTrainer(*given, cluster.connection.folder or folder)
    closing.callback(trainer.close)
    return trainer


def open_searchers(
    job: SearchJob, place: Place, cluster: "Cluster | None", trainer: Trainer,
    search: SearchState, step: int,
) -> Searchers:  # fmt: skip
    """Open the searchers of the runtime, with the weights that they had at this step."""
    bf16 = trainer.computes_in_bf16
    if cluster is not None:
        from tba.runtime.ray import RaySearchers

        newest = trainer.send(step) if step or job.setup.held_out else None
        return RaySearchers(job, cluster, bf16, search, newest)
    job.tell("loading the models of the searcher")
    from tba.runtime.local import LocalSearchers

    every = job.setup.config.runtime.publish_every
    version = search.weights and search.weights.version
    # a run on Ray saves no weights, and a publication may have failed
    if (version is None and step >= every) or (step and step % every == 0 and version != step):
        search = replace(search, weights=trainer.send(step).payload)
    lent = trainer.policy.model if isinstance(trainer, SingleTrainer) else None
    searcher = job.setup.build(place.device, bf16, lent)
    return LocalSearchers(job, searcher, search)


def run(
    config: Config,
    resume: Path | None = None,
    replay: Replay = "keep",
    passed: InMemoryData | None = None,
) -> Summary:
    """Train to the end of the run.

    Raises ValueError before anything starts if the config cannot work. If ranks of the trainer are
    lost, the run is reopened from its newest checkpoint. Without a checkpoint it ends, because a
    run never starts over by itself.
    """
    config = placed(config)
    folder = Path(config.run.folder) if resume is None else resume
    restarts = 0
    losses: list[str] = []  # why ranks were lost since the run was last open
    at: int | None = None  # step at which it was last open
    while True:
        opened: Run | None = None  # first, to free the memory of the previous run
        try:
            with open_run(config, resume, passed, replay) as opened:
                opened.restarted(losses, at or 0)
                losses = []
                return opened.train()
        except TrainerLost as error:
            is_stopped = opened is not None and opened.stop.requested
            at = at if opened is None else opened.step
            if at is None:  # it was never open
                raise
            is_saved = bool(generations(folder / CHECKPOINTS))
            if is_stopped or not is_saved or restarts == config.runtime.max_restarts:
                after = f"{error} (after {restarts} restarts)" if restarts else str(error)
                raise TrainerLost(f"{after}\n{how_to_resume(folder)}") from error
            losses.append(str(error))
        restarts += 1
        resume = folder
        replay = "keep"


@contextmanager
def open_run(
    config: Config,
    resume: Path | None = None,
    passed: InMemoryData | None = None,
    replay: Replay = "keep",
) -> Iterator[Run]:
    """Open a run: check its config, load its parts, start its searchers; close them at the end."""
    config = placed(config)
    folder = Path(config.run.folder) if resume is None else resume.resolve()
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    if resume is not None:
        read_config(folder)
    with ExitStack() as closing:
        closing.enter_context(locked(folder))  # first, to refuse a second process at once
        try:
            if resume is None:
                check_unused(folder)
            stop = Stop()
            console = _open_console(config, stop, closing)
            console.phase("reading the data")
            if passed is not None:
                config = passed.named_in(config, folder)
                passed.write(folder, is_new=resume is None)
            setup = check(config, None if passed is None else passed.functions)
            console.steps = setup.config.run.steps  # with `run.epochs`, it depends on the data
            rollouts: Sequence[Group] = ()
            if resume is None and setup.config.replay.rollouts is not None:
                rollouts = read_rollouts(Path(setup.config.replay.rollouts), setup.text)
        except ValueError:
            if created:
                shutil.rmtree(folder)
                with suppress(OSError):  # another run may have started in one of them
                    for parent in created[1:]:
                        parent.rmdir()
            raise
        stored = None
        note = ""
        if resume is None:
            (folder / WARNINGS).unlink(missing_ok=True)  # of an interrupted start
            write_json(folder / CONFIG, setup.config.nested())
        else:
            recover(folder / CHECKPOINTS)
            stored, note = choose_resumed(setup, folder, replay)
        closing.enter_context(stop)
        with stop.starting():
            console.note(f"run folder: {folder}")
            run = _assemble(setup, folder, stored, replay, rollouts, stop, console, closing)
        run.begin(note, run.trainer.sizes)
        yield run


def _open_console(config: Config, stop: Stop, closing: ExitStack) -> Console:
    """Return the console that `log.console` asks for."""
    steps = config.run.steps
    if config.log.console == "off":
        return Console(steps, silent)
    if config.log.console == "auto" and sys.stdout.isatty():
        from rich.console import Console as Screen

        from tba.runs.terminal import Terminal

        terminal = Terminal(steps, stop.print, Screen(highlight=False))
        closing.callback(terminal.close)
        return terminal
    return Console(steps, stop.print)


def _scoring_device(config: Config, here: str, ranks: str, console: Console) -> str:
    """Return the device on which this process, which has no rank, scores logged or stored samples.

    `here` is the first device of this machine, and `ranks` is the device of the first rank.
    """
    if here != "cpu":
        if config.runtime.address is None:  # no rank has the last GPU: searchers need at least one
            return f"cuda:{torch.cuda.device_count() - 1}"
        return emptiest_gpu()  # ranks may have any of them, or all
    if ranks != "cpu":
        console.note(
            "note: this machine has no GPU, and scores logged or stored samples on its CPU; if that"
            " is slow, start the run on a machine of the cluster with a GPU"
        )
    return here


def _assemble(
    setup: RunSetup, folder: Path, stored: Path | None, replay: Replay,
    rollouts: Sequence[Group], stop: Stop, console: Console, closing: ExitStack,
) -> Run:  # fmt: skip
    """Build a run, new or from a checkpoint. Register everything to close in `closing`."""
    c = setup.config
    place, cluster = open_places(c, console.phase, closing)
    stop.install()  # Ray has replaced the signal handlers with its own
    console.phase("loading and compiling the model" if c.trainer.compile else "loading the model")
    trainer = open_trainer(setup, folder, place, cluster, stored is None, closing)
    checkpoint.check_space(c, folder, trainer)
    buffer = ReplayBuffer(c.replay.per_prompt, c.replay.capacity)
    stream = setup.prompt_stream()
    rng = generator(c.run.seed, Use.REPLAY)
    progress, search = checkpoint.beginning(c.first_fill, rng, stream.cursor())
    device = place.device
    if cluster and cluster.ranks and (rollouts or replay == "rescore"):
        device = _scoring_device(c, device, cluster.ranks[0].place.device, console)
    if stored is not None:
        progress, search = checkpoint.restore(stored, trainer, buffer)
        stream.seek(search.cursor, others=replay == "drop")
        console.note(f"resumed from {stored.name}")
        progress, search = renewed(setup, progress, search, buffer, replay, device, console.phase)
        evaluates = progress.evaluating > 0 or progress.step == c.run.steps
        rewind(folder, progress.step, evaluates)  # after everything that can fail
    if rollouts:
        bf16 = trainer.computes_in_bf16
        buffer.add(with_reference(rollouts, setup, device, bf16, console.phase), now=0)
    torch.cuda.empty_cache()  # memory of deleted models, which a rank may need
    if rollouts:
        console.note(described(rollouts, c))
    for line in [setup.counts, *(f"note: {note}" for note in setup.notes), *setup.endings]:
        console.note(line)
    job = SearchJob(setup.search_setup(), stream, console.phase, stop)
    searchers = open_searchers(job, place, cluster, trainer, search, progress.step)
    closing.callback(searchers.close)
    run = Run(
        parts=setup,
        folder=folder,
        trainer=trainer,
        buffer=buffer,
        searchers=searchers,
        console=console,
        stop=stop,
        progress=progress,
        search=search,
    )
    closing.callback(run.journal.close)
    closing.enter_context(run.checkpoints)
    return run

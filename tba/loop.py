"""THE loop, synchronous and asynchronous, and the assembly of a run around it."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tba import build, checkpoint
from tba.build import Parts
from tba.config import Config, parse
from tba.console import Console, open_console
from tba.log import Journal
from tba.replay import ReplayBuffer
from tba.runfolder import RunFolder
from tba.runtime import Searchers, SearchState
from tba.runtime.placement import Place, available_cores, divide
from tba.stop import Stop
from tba.summary import Summary, Tracker
from tba.trainer import Trainer
from tba.types import Group, collate


def train(run: Run) -> None:
    """Synchronous or asynchronous, one machine or forty: this loop. What differs is `searchers` and how long to wait for them."""
    c, clock = run.config, run.tracker
    with clock.first_fill():
        run.buffer.add(run.gather(at_least=run.missing), now=run.start)
    for step in range(run.start, c.run.steps):
        if run.stop.requested:
            break
        groups = run.buffer.sample(c.trainer.groups, c.trainer.group_size, run.parts.strategy, now=step, rng=run.rng)
        metrics = run.trainer.step(collate(groups), step)
        done = step + 1
        if due(done, c.runtime.publish_every):
            with clock.syncing():
                run.searchers.publish(run.trainer.weights(version=done))
        if due(done, c.policy.reset_reference_every):
            run.searchers.reset_reference(run.trainer.weights(version=done))
        if due(done, c.eval.every) and done < c.run.steps:
            run.evaluate()
        with clock.waiting():
            found = run.gather(at_least=c.fresh)  # 0 when asynchronous: nobody waits
        run.buffer.add(found, now=done)
        run.tell(done, metrics | clock.step(step, groups, run.buffer, run.searchers.account), groups)
        if due(done, c.checkpoint.every):
            run.save(done)


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@dataclass
class Run:
    """All that a run has."""

    config: Config
    parts: Parts
    folder: RunFolder
    trainer: Trainer
    buffer: ReplayBuffer
    searchers: Searchers
    rng: np.random.Generator
    journal: Journal
    console: Console
    tracker: Tracker
    stop: Stop
    start: int
    missing: int
    """Groups to wait for before anything is learned: the first fill, or what a stop kept from coming."""
    evaluating: int
    """Evaluations that have been asked for and not told."""
    held: deque[Group] = field(default_factory=deque)
    """Groups on their way to the buffer, with a constant lag."""
    _saved: int | None = field(default=None, init=False)

    def gather(self, at_least: int) -> list[Group]:
        """New groups; with `runtime.lag`, those found so many batches ago: step v then learns from what version v - lag found."""
        behind = (self.config.runtime.lag or 0) * self.config.trainer.groups
        self.held.extend(self.searchers.gather(at_least + max(0, behind - len(self.held))))
        found = [self.held.popleft() for _ in range(len(self.held) - behind)]
        self.missing = max(0, at_least - len(found))
        return found

    def tell(self, step: int, metrics: dict[str, float], groups: list[Group]) -> None:
        """To the journal and the console; with evaluations that have ended, and a sample now and then."""
        self.journal.row(step, metrics)
        self.console.step(step, metrics)
        self.tell_evaluations()
        every = self.config.log.sample_every
        if due(step, every) or (every and step == 1):
            group = groups[0]
            t = group.trajectories[0]
            prompt, text = self.parts.text.decode(group.prompt_tokens), self.parts.text.decode(t.tokens)
            self.journal.sample(step, "train", prompt, text, t.reward, t.version)
            self.console.sample(prompt, text, t.reward)

    def evaluate(self) -> None:
        """Asks for an evaluation, if there is anything to evaluate on."""
        if self.parts.held_out:
            self.searchers.evaluate()
            self.evaluating += 1

    def tell_evaluations(self, finish: bool = False) -> None:
        for e in self.searchers.evaluations(finish=finish):
            self.evaluating -= 1
            scores = {f"eval/{name}": value for name, value in e.scores.items()}
            self.tracker.evaluation(e.version, scores)
            self.journal.row(e.version, {"time": self.tracker.seconds, **scores})
            self.console.evaluation(e.version, scores)
            for example in e.examples:
                self.journal.sample(e.version, "eval", example.prompt, example.completion, example.reward, e.version)

    def save(self, step: int) -> None:
        if step == self._saved:
            return
        progress = checkpoint.Progress(step, self.missing, self.evaluating, self.rng.bit_generator.state, self.tracker.counts(self.searchers.account))
        keep = self.config.checkpoint.keep
        checkpoint.save(self.folder.checkpoints, keep, self.trainer, self.parts.text, self.buffer, self.searchers.state(), self.held, progress)
        self._saved = step


def run(config: Config, resume: Path | None = None) -> Summary:
    """A whole run, from the check of its config to its summary. ValueError before anything starts if the config cannot work."""
    parts = build.check(config)
    config = parts.config
    if resume is None:
        folder = RunFolder.create(config)
    else:
        folder = RunFolder.reopen(resume)
        build.check_resumed(config, before=parse(folder.config()))
    generation = checkpoint.newest(folder.checkpoints) if resume is not None else None
    with ExitStack() as opened:
        assembled = assemble(parts, folder, generation, opened)
        try:
            return _carry_out(assembled)
        except ValueError as error:  # the config was sound: this is no mistake to be told in a line, but one to be traced
            raise RuntimeError(f"the run failed: {error}") from error


def assemble(parts: Parts, folder: RunFolder, generation: Path | None, opened: ExitStack) -> Run:
    """All parts of a run, new or as `generation` left them. What has to be closed, whatever happens, is put into `opened`."""
    config = parts.config
    stop = opened.enter_context(Stop())
    console = open_console(config)
    opened.callback(console.close)
    console.note(f"run folder: {folder.path}")
    place, places = places_for(config)
    if config.runtime.use == "ray":
        opened.enter_context(place.taken())
    trainer = build.trainer(parts, place.device)
    buffer = ReplayBuffer(config.replay.per_prompt, config.replay.capacity)
    tracker, rng, resumed, held = Tracker(), np.random.default_rng([config.run.seed, 7]), None, deque[Group]()
    progress = checkpoint.Progress(0, config.first_fill, 1, rng.bit_generator.state, {})
    if generation is not None:
        progress, resumed, groups = checkpoint.restore(generation, trainer, buffer)
        held.extend(groups)
        if progress.step > config.run.steps:
            raise ValueError(f"run.steps = {config.run.steps}, but the run is at step {progress.step}; set run.steps={progress.step} or more")
        build.prompt_stream(parts).check(resumed.cursor)  # before anything is written
        rng.bit_generator.state = progress.rng
        folder.rewind(progress.step)
        folder.write_config(config)  # with what was changed on resuming
        tracker.resume(progress.counts, folder.evaluations())
        console.note(f"resumed from {generation.name}")
    console.note(f"{len(parts.prompts):,} prompts to train on, {len(parts.held_out):,} held out")
    journal = Journal(folder.path, config, progress.step)
    opened.callback(journal.close)
    searchers = _searchers(parts, place.device, places, trainer, stop, resumed, progress.step)
    opened.callback(searchers.close)
    at = (progress.step, progress.missing, progress.evaluating)
    return Run(config, parts, folder, trainer, buffer, searchers, rng, journal, console, tracker, stop, *at, held)


def places_for(config: Config) -> tuple[Place, list[Place]]:
    """Where trainer and searchers run; on a cluster Ray gives each searcher its own GPU, which is then its first."""
    if config.runtime.address is not None:
        device = "cuda:0" if build.gpus() else "cpu"
        return Place(device), [Place(device)] * config.runtime.searchers
    return divide(available_cores() if config.runtime.cores == "divide" else [], build.gpus(), config.runtime.searchers)


def _searchers(parts: Parts, device: str, places: list[Place], trainer: Trainer, stop: Stop, resumed: SearchState | None, start: int) -> Searchers:
    if parts.config.runtime.use == "local":
        from tba.runtime.local import LocalSearchers

        local = LocalSearchers(parts, build.searcher(parts, device, trainer.bf16_weights), resumed)
        if resumed is not None and resumed.weights is None and start >= parts.config.runtime.publish_every:  # the run was on Ray before
            local.publish(trainer.weights(version=start))
        return local
    from tba.runtime.bind import bind_ray

    bind_ray(parts.config.runtime.address)
    from tba.runtime.ray import RaySearchers

    newest = trainer.weights(version=start) if start else None
    found = RaySearchers(parts, places, trainer.bf16_weights, stop.is_requested, resumed, newest)
    stop.install()  # Ray has put its own signal handlers in place of ours
    return found


def _carry_out(run: Run) -> Summary:
    wanted, run.evaluating = run.evaluating, 0  # at the beginning; of a resumed run, those that were lost with the searchers at them
    with run.tracker.clock():
        if wanted and run.start < run.config.run.steps:
            run.evaluate()
        train(run)
    step = run.tracker.steps
    run.save(step)
    through = step == run.config.run.steps
    if through:
        if not due(step, run.config.runtime.publish_every):  # else the loop has just done so
            run.searchers.publish(run.trainer.weights(version=step))
        run.evaluate()
    run.tell_evaluations(finish=through)
    summary = run.tracker.summary(run.searchers.account, finished=through and run.evaluating == 0)
    run.folder.write_summary(summary)
    run.console.end(summary, run.folder.path)
    return summary

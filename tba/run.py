"""The train loop, synchronous or asynchronous, on one machine or a cluster, and `Run`."""

import errno
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, replace
from pathlib import Path

from tba.agents.chat import authors, response_text
from tba.errors import (
    ClusterLostError,
    NoAnswerError,
    NotFinite,
    SearchError,
    StepError,
    TrainerLost,
    WrongReference,
)
from tba.learn import Trainer, TrainerSizes
from tba.learn.trainer import before_weights_change
from tba.replay.buffer import Pace, ReplayBuffer
from tba.runs import checkpoint
from tba.runs.console import Console
from tba.runs.folder import (
    CHECKPOINTS,
    CONFIG,
    DIGESTS,
    METRICS,
    SUMMARY,
    continues,
    is_full,
    read,
    read_evaluations,
    read_optional,
    read_warnings,
    write_json,
)
from tba.runs.generations import how_to_resume
from tba.runs.journal import Journal
from tba.runs.summary import Summary, Tracker, by_source, record_session
from tba.runs.warn import RunWarning, Warnings
from tba.runtime import Searchers, search_errors
from tba.search.prompts import SearchState
from tba.search.result import timed
from tba.setup.setup import TRAINED_ON, RunSetup
from tba.stop import Stop
from tba.streams import Use, generator
from tba.tasks._digests import changed
from tba.types import Group, collate

SOUND = (SearchError, NoAnswerError, StepError)
"""Errors that end a run whose trainer can still be saved."""

MAX_SHORT_SEARCHES = 100
"""Maximum number of consecutive searches that give too few samples for a step."""


def train(run: "Run") -> None:
    """Train until the run ends. Runs differ in their searchers and in how long they wait."""
    c = run.config
    run.collect("first_fill")
    for step in range(run.step, c.run.steps):
        if run.ending:
            break
        with before_weights_change(step):
            groups = run.sample()
            batch = collate(groups)
        metrics = run.trainer.step(batch, step)
        done = step + 1
        run.step = done
        with run.logged(metrics, groups):
            if due(done, c.policy.reset_reference_every):
                run.reset_reference()  # first: if publishing fails, it is in the checkpoint
            if due(done, c.runtime.publish_every):
                run.publish()
            if due(done, c.eval.every) and done < c.run.steps:
                run.evaluate()
            run.collect()  # waits for `fresh` groups (0: asynchronous), and to keep `max_reuse`
        if due(done, c.checkpoint.every):
            run.save()


def due(step: int, every: int) -> bool:
    """Return whether something that happens every `every` steps (0: never) is due at `step`."""
    return every > 0 and step % every == 0


@dataclass
class Run:
    """The parts of a run, and its progress."""

    parts: RunSetup
    folder: Path
    trainer: Trainer
    buffer: ReplayBuffer
    searchers: Searchers
    console: Console
    stop: Stop
    progress: InitVar[checkpoint.Progress]
    search: InitVar[SearchState]

    def __post_init__(self, progress: checkpoint.Progress, search: SearchState) -> None:
        c = self.parts.config
        self.config = c
        self.rng = generator(c.run.seed, Use.REPLAY)
        self.rng.bit_generator.state = progress.rng
        self.tracker = Tracker()
        if progress.counts:
            self.tracker.resume(progress.counts, search.stats)
        # groups kept out of the buffer for `runtime.lag`, or because a search ended the run
        self.delayed = deque(search.delayed)
        self.journal = Journal(self.folder, c, progress.step)
        self.checkpoints = checkpoint.Checkpoints(
            folder=self.folder / CHECKPOINTS,
            keep=c.checkpoint.keep,
            deadline=c.trainer.deadline,
        )
        self.warnings = Warnings(
            config=c,
            rows=read(self.folder / METRICS),
            given=read_warnings(self.folder),
            learns_from_equal=self.parts.objective.at(0).learns_from_equal_rewards,
        )
        self.step = progress.step  # optimizer steps done
        self.began = progress.step  # step at which this session began
        self.pace = Pace(c.max_reuse, progress.pace, c.reuse_window)
        self.fresh = c.fresh  # groups to wait for at each step
        self.groups = c.trainer.groups  # of a batch
        self.missing = progress.missing  # groups to wait for: the first fill, or after a stop
        self.evaluating = progress.evaluating  # evaluations requested but not logged
        # unfinished evaluations by the step of their request: version, and seconds of the train
        # loop at that step; several may evaluate the same version
        self.requested: dict[int, tuple[int, float]] = {}
        # held-out score of each evaluated version
        self.scores = checkpoint.read_scores(self.folder)
        names = changed(self.parts.digests, read_optional(self.folder / DIGESTS))
        self.evaluates_others = bool({*names} - {TRAINED_ON}) and bool(self.scores)
        self.patient_since = 0  # step from which `eval.patience` counts
        if self.out_of_patience:  # patience ended the run before
            self.patient_since = self.step

    @property
    def ending(self) -> bool:
        """Return whether the run ends before `run.steps`."""
        return self.stop.requested or self.out_of_patience

    @property
    def out_of_patience(self) -> bool:
        """Return whether the last `eval.patience` evaluations had no better score."""
        patience = self.config.eval.patience
        if patience is None:
            return False
        return checkpoint.without_better(self.scores, self.patient_since) >= patience

    def sample(self) -> list[Group]:
        """Draw the groups of a step; `missing` is then the number that the next one waits for."""
        self.console.phase("training")
        t = self.config.trainer
        self.missing = self.fresh
        self.pace.drew(t.batch_size, self.buffer.counts["added"])
        strategy = self.parts.strategy
        return self.buffer.sample(self.groups, t.group_size, strategy, self.step, self.rng)

    def gather(self, at_least: int) -> list[Group]:
        """Return the groups for the buffer; fewer than `at_least` only after a stop.

        With a constant lag, the newest ones are held back.
        """
        behind = (self.config.runtime.lag or 0) * self.groups
        missing = at_least + behind - len(self.delayed)
        with search_errors("the search failed"):
            self.delayed.extend(self.searchers.gather(max(0, missing)))
        ready = len(self.delayed) - behind  # negative if a stop cut the search short
        return [self.delayed.popleft() for _ in range(ready)]

    def collect(self, wait: str = "waited") -> None:
        """Store new groups, and wait for those that the next step needs; `wait` names the timer."""
        for _ in range(MAX_SHORT_SEARCHES):
            with timed(wait, *self.tracker.sums):
                groups = self.gather(self._awaited())
            self.missing = max(0, self.missing - len(groups))
            self.buffer.add(groups, now=self.step)
            if self.ending or not self._awaited():
                return
        few = "samples are rejected, or have non-finite numbers (buffer/not_finite)"
        raise SearchError(
            f"{MAX_SHORT_SEARCHES} searches in a row gave too few samples for a step: {few}"
        )

    def _awaited(self) -> int:
        """Return the number of groups to wait for before the next step."""
        c = self.config
        if self.step == c.run.steps:  # no next step, but synchronous runs search after each
            return 0 if c.asynchronous else self.missing
        samples = self.pace.missing(c.trainer.batch_size, self.buffer.counts["added"])
        return max(self.missing, -(-samples // c.sampling.samples))

    def publish(self) -> None:
        problem = "the weights could not be published"
        with timed("synced", *self.tracker.sums), search_errors(problem):
            self.searchers.publish(self.trainer, version=self.step)

    def reset_reference(self) -> None:
        """Make the current policy the reference of all later searches.

        If it cannot be sent, the run ends unsaved: a checkpoint of this step would lack it.
        """
        try:
            reference = self.trainer.reference(version=self.step)
            with search_errors("the reference could not be replaced"):
                self.searchers.reset_reference(reference)
        except (SearchError, NoAnswerError) as error:
            raise RuntimeError(f"the reference could not be replaced: {error}") from error

    @contextmanager
    def logged(self, metrics: dict[str, float], groups: list[Group]) -> Iterator[None]:
        """Log a step at its end, even if the run ends during it, and finished evaluations."""
        try:
            yield
        except SOUND:
            self.log_step(metrics, groups)
            raise
        self.log_step(metrics, groups)
        self.log_evaluations()

    def log_step(self, metrics: dict[str, float], groups: list[Group]) -> None:
        """Write the metrics of a step, and a group if one is due."""
        if self.step == self.began + 1:  # settings may have changed
            write_json(self.folder / CONFIG, self.config.nested())
            (self.folder / SUMMARY).unlink(missing_ok=True)  # of an earlier session
        stats = self.searchers.stats
        scored = self.tracker.scored(stats)
        totals = self.tracker.step(self.step - 1, groups, self.buffer, stats)
        sources = by_source(self.parts.task, groups)
        row = {**metrics, **totals, **sources, **self.checkpoints.metrics()}
        if self.config.trainer.devices > 1:
            row["trainer/restarts"] = self.warnings.restarts
        taken = {*row, "step", "requested"}
        for name, value in scored.items():
            is_taken = name in taken or name.startswith("eval/")
            row[f"logged/{name}" if is_taken else name] = value
        self.journal.row(self.step, row)
        self.console.step(self.step, row)
        self.warn([*self.warnings.rejected(stats.errors), *self.warnings.step(row)])
        every = self.config.log.sample_every
        if due(self.step, every) or (every and self.step == 1):
            group = groups[0]
            text = self.parts.text
            prompt = text.prompt(group.prompt_tokens)
            drawn = Counter(id(t) for t in group.trajectories)  # a draw may repeat a completion
            for t in {id(t): t for t in group.trajectories}.values():
                completion = response_text(text, t, self.config.sampling.stop)
                self.journal.sample(
                    self.step, "train", prompt, completion, t.reward, t.version, t.items,
                    id=group.prompt.id, columns=group.prompt.columns, drawn=drawn[id(t)],
                    finished=t.finished, authors=authors(text, t),
                )  # fmt: skip
            if not self.parts.held_out:  # else the console shows a held-out prompt
                self.console.sample(prompt, completion, t.reward)

    def warn(self, signs: list[RunWarning], at_end: bool = False) -> None:
        """Show warnings, and record them for a resumed run."""
        for key, text in signs:
            self.console.warn(text)
            self.journal.warn(self.step, key, text, at_end)

    def restarted(self, losses: Sequence[str], at: int) -> None:
        """Warn that ranks of the trainer were lost at step `at`, with the reasons in `losses`."""
        back = f"the run went back from step {at} to its checkpoint of step {self.step}"
        cost = f"{back}, which cost {at - self.step} steps"
        self.warn(self.warnings.restarted([f"{why}; {cost}" for why in losses]))

    def evaluate(self) -> None:
        """Request an evaluation of the published weights, unless no prompts are held out."""
        if self.parts.held_out:
            self.evaluating += 1  # first: if the request fails, a resumed run repeats it
            seconds = self.tracker.seconds
            with search_errors("the evaluation failed"):
                version = self.searchers.evaluate(self.step)
            self.requested[self.step] = version, seconds

    def log_evaluations(self, finish: bool = False) -> None:
        """Log finished evaluations; with `finish`, wait for all of them."""
        with search_errors("the evaluation failed"):
            ended = self.searchers.evaluations(finish=finish)
        for e in ended:
            self.evaluating -= 1
            _, seconds = self.requested.pop(e.requested)
            if not e.scores:  # skipped
                continue
            self.scores[e.version] = checkpoint.score_of(e.scores)
            scores = {f"eval/{name}": value for name, value in e.scores.items()}
            self.journal.row(e.version, {"time": seconds, "requested": e.requested, **scores})
            for x in e.examples:
                self.journal.sample(
                    e.version, "eval", x.prompt, x.completion, x.reward, e.version, x.notes,
                    e.requested, x.id, x.columns, finished=x.finished, authors=x.authors,
                )  # fmt: skip
            self.journal.scores(e.version, e.requested, e.prompts, e.by_prompt)
            self.console.evaluation(e)

    def begin(self, note: str, sizes: TrainerSizes) -> None:
        """Record this session; if a `note` says that stored samples changed, save them first."""
        if note:
            write_json(self.folder / CONFIG, self.config.nested())
            self.save()
            self.checkpoints.wait()
        write_json(self.folder / DIGESTS, self.parts.digests)
        record_session(self.folder, self.step, sizes, self.config.nested(), note)

    def save(self) -> None:
        """Start writing a checkpoint of the current step, unless this session has saved it."""
        progress = checkpoint.Progress(
            step=self.step,
            missing=self.missing,
            evaluating=self.evaluating,
            rng=self.rng.bit_generator.state,
            counts=self.tracker.counts(),
            pace=[*self.pace.marks],
        )
        search = self.searchers.state()
        search = replace(search, delayed=(*self.delayed, *search.delayed))
        beside: set[Path] = set()
        if self.config.checkpoint.keep_best:
            evaluating = {version for version, _ in self.requested.values()}
            beside = checkpoint.kept_beside(self.folder, self.scores, evaluating)
        self.checkpoints.save(self.trainer, self.parts.text, self.buffer, search, progress, beside)

    def train(self) -> Summary:
        """Run the loop to its end or to a stop, save, evaluate, and write the summary."""
        last = self.config.run.steps
        complete = False
        ended = ""
        unlogged = self.evaluating
        self.evaluating = 0
        try:
            self.warn(self.warnings.start(self.began if self.evaluates_others else None))
            with self._saving_first():
                with self.tracker.clock():
                    if self.step < last:  # else there is nothing to wait for
                        if unlogged:  # the first evaluation, or one that a stop interrupted
                            self.evaluate()
                        train(self)
                self.console.phase("saving")
                self.save()
                complete = self.step == last
                if complete:
                    if not due(last, self.config.runtime.publish_every):
                        self.publish()  # else the loop just did so
                    self.evaluate()
                impatient = not complete and self.out_of_patience
                ended = f"eval.patience = {self.config.eval.patience}" if impatient else ""
                complete = complete or impatient
                self.log_evaluations(finish=complete)
                self.checkpoints.wait()
        except WrongReference:
            raise
        except ValueError as error:  # not the user's input, which was checked: show the traceback
            raise RuntimeError(f"the run failed: {error}") from error
        except (OSError, RuntimeError) as error:
            if isinstance(error, TrainerLost):
                self.console.note(f"{error}; ending all ranks and searchers")
            if is_full(error):
                resume = f"{continues(self.folder)} its newest checkpoint"
                raise OSError(errno.ENOSPC, f"{error}. With free space, {resume}") from error
            raise
        if complete:  # a stopped run gets these warnings after it has been resumed
            self.warn(self.warnings.end(), at_end=True)
        finished = complete and self.evaluating == 0
        evaluations = read_evaluations(self.folder)
        measured = self.tracker.summary(self.step, self.searchers.stats, finished, evaluations)
        restarts = self.warnings.restarts
        texts = self.warnings.texts
        summary = replace(measured, warnings=texts, ended=ended, trainer_restarts=restarts)
        summary.write(self.folder)
        step = checkpoint.best_step(self.scores)
        best = None if step is None or step == max(self.scores) else (step, self.scores[step])
        self.console.end(summary, self.folder, best)
        return summary

    @contextmanager
    def _saving_first(self) -> Iterator[None]:
        """Save the run if searchers or a step fail, and add to the error how to continue.

        After a stop, errors from searchers are not raised: the same signal may have ended them.
        """
        began = self.step
        try:
            yield
        except SOUND as error:
            # the evaluation of the unfinished step, which the resumed run repeats
            if self.step > began and due(self.step, self.config.eval.every):
                self.evaluating = self.evaluating or 1
            wrong = error.version if isinstance(error, NotFinite) else None
            if not wrong:  # version 0 is the initial model
                self.save()
            self.checkpoints.wait()
            if self.stop.requested and isinstance(error, SearchError | NoAnswerError):
                if not isinstance(error, ClusterLostError):
                    self.console.note(f"while stopping: {error}")
                return
            saved = "" if wrong else "The run has been saved: "
            half = f"trainer.learning_rate={self.config.trainer.learning_rate / 2:g}"
            lower = half if isinstance(error, NotFinite) and wrong != 0 else ""
            error.args = (f"{error}\n{saved}{how_to_resume(self.folder, wrong or 0, lower)}",)
            raise

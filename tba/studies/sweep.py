"""Carries out a study: every run of every grid, several at once, from wherever an earlier call has left it."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import fmean

from tba.config.loading import parse
from tba.config.schema import Config
from tba.runs.log import CONFIG
from tba.runs.stop import Stop
from tba.runtime.placement import available_cores
from tba.studies import workers
from tba.studies.results import (
    FAILED,
    RESULTS,
    SEED,
    Choice,
    Ledger,
    Trial,
    finished,
    flat,
    metric_of,
    score,
    scores,
    standing,
    write_failed,
    write_results,
)
from tba.studies.study import Study, check_study, read_study

INTERRUPTED = 130
"""Exit status of a command that a signal has ended, as shells have it."""


@dataclass
class Sweep:
    """Trials by their folder, in the order of the study; one has a config once all that it inherits is known."""

    study: Study
    trials: dict[str, Trial]
    configs: dict[str, Config]
    choices: list[Choice] = field(default_factory=list)
    running: dict[int, tuple[Trial, BaseProcess]] = field(default_factory=dict)
    """At most `study.parallel`, each with a number of its own, to which cores and a log belong."""
    died: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    """Runs that cannot begin with what they would inherit."""
    began: float = field(default_factory=time.monotonic)
    ended_here: int = 0

    def carry_out(self) -> bool:
        """All runs, or as many as there are until somebody asks to stop: then False."""
        self.write()
        asked = False
        with Stop() as stop:
            try:
                while True:
                    if stop.requested and not asked:
                        asked = True
                        for _, process in self.running.values():
                            process.terminate()
                    if not asked:
                        self.start()
                    if not self.running:
                        return all(t.status != "pending" for t in self.trials.values())
                    wait([process.sentinel for _, process in self.running.values()], timeout=0.5)
                    for number, (trial, process) in list(self.running.items()):
                        if not process.is_alive():
                            del self.running[number]
                            self.end(
                                trial,
                                f"its process died (exit code {process.exitcode}); see {self.log(number)}",
                                asked,
                            )
            finally:
                workers.close([process for _, process in self.running.values()])

    def start(self) -> None:
        """As many runs as there is room for, in the order of the study."""
        cores, parallel = available_cores(), self.study.table.parallel
        each = max(1, len(cores) // parallel)
        shares = [cores[i : i + each] for i in range(0, each * (len(cores) // each), each)]
        under_way = {trial.folder for trial, _ in self.running.values()}
        waiting = [
            t
            for t in self.trials.values()
            if t.status == "pending" and t.folder in self.configs and t.folder not in under_way
        ]
        idle = [number for number in range(parallel) if number not in self.running]
        for number, trial in zip(idle, waiting, strict=False):
            path = self.study.path(trial)
            resume = path if any((path / "checkpoints").glob("step-*")) else None
            if resume is None:
                shutil.rmtree(path, ignore_errors=True)
            self.running[number] = (
                trial,
                workers.start(
                    self.configs[trial.folder],
                    resume,
                    shares[number % len(shares)],
                    self.log(number),
                ),
            )

    def end(self, trial: Trial, death: str, asked: bool) -> None:
        """A run's process is no more: what has the run come to?"""
        path = self.study.path(trial)
        status, error = standing(path)
        if status == "pending":
            if asked:
                return
            if trial.folder not in self.died:
                self.died.add(trial.folder)
                print(f"{trial.folder}: {death}; once more", flush=True)
                return
            write_failed(path, death)
            status, error = "failed", death
        self.trials[trial.folder] = ended = replace(trial, status=status, error=error)
        self.ended_here += 1
        self.announce(ended)
        if status == "finished" and not self.study.table.keep_checkpoints:
            shutil.rmtree(path / "checkpoints", ignore_errors=True)
        self.inherit()
        self.write()

    def inherit(self) -> None:
        """Chooses from grids of which all runs have ended what others inherit. A run that cannot begin with that has failed.

        ValueError if a run has begun, in an earlier call, with something else.
        """
        for trial in list(self.trials.values()):
            best = self.study.best_of(trial)
            if (
                trial.folder in self.configs
                or trial.folder in self.refused
                or not all(self.known(t) for t in self.trials.values() if t.grid == best)
            ):
                continue
            try:
                source, choice = choose(
                    self.study, trial, [self.trials[t.folder] for t in self.study.candidates(trial)]
                )
                if choice not in self.choices:
                    self.choices.append(choice)
                    print(choice, flush=True)
                trial = self.study.inherit(trial, source)
                config = self.study.config(trial)
            except ValueError as error:
                self.trials[trial.folder] = replace(trial, status="failed", error=str(error))
                self.refused.add(trial.folder)
                print(f"failed: {error}", flush=True)
            else:
                self.trials[trial.folder], self.configs[trial.folder] = (
                    as_left(self.study, trial, config),
                    config,
                )

    def known(self, trial: Trial) -> bool:
        """Whether another can inherit from it: it has ended, and what it has inherited itself has been chosen."""
        return trial.folder in self.refused or (
            trial.status != "pending" and trial.folder in self.configs
        )

    def announce(self, trial: Trial) -> None:
        ended = sum(t.status != "pending" for t in self.trials.values())
        line = f"[{ended}/{len(self.trials)}] {trial.folder}  "
        summary = finished(self.study.path(trial))
        if summary is None:
            line += f"failed: {trial.error}"
        else:
            known = scores(self.study.path(trial))
            metric = metric_of(
                known, self.study.table.metric
            )  # a metric that no run has is told after the first
            value = f"{known[metric]:.3f}" if metric in known else "–"
            line += f"{metric.removeprefix('sampled_')} {value}  {summary['seconds']:.0f} s"
        left = (len(self.trials) - ended) * (time.monotonic() - self.began) / self.ended_here
        print(
            line + (f"  about {_duration(left)} left" if ended < len(self.trials) else ""),
            flush=True,
        )

    def log(self, number: int) -> Path:
        return self.study.folder / f"worker-{number}.log"

    def write(self) -> None:
        Ledger(
            self.study.name, self.study.table.metric, list(self.trials.values()), self.choices
        ).write(self.study.folder)


def sweep(
    path: Path, settings: Sequence[str] = (), dry_run: bool = False, retry_failed: bool = False
) -> int:
    """Carries out the study in the file `path`; returns the command's exit status. ValueError before anything starts if a run cannot work."""
    study = read_study(path, settings)
    trials = study.trials()
    configs = {
        t.folder: c
        for t, c in zip(trials, check_study(study), strict=True)
        if study.best_of(t) is None
    }
    if dry_run:
        for trial in trials:
            print(
                trial.folder
                + ("" if trial.folder in configs else f"  + the best of {study.best_of(trial)}")
            )
        print(f"{len(trials)} runs in {study.folder}; nothing was started")
        return 0
    with _alone(study.folder):
        for trial in trials:
            if retry_failed and (study.path(trial) / FAILED).is_file():
                shutil.rmtree(study.path(trial))
        carried = Sweep(
            study, {t.folder: as_left(study, t, configs.get(t.folder)) for t in trials}, configs
        )
        ended = sum(t.status != "pending" for t in carried.trials.values())
        print(f"study {study.folder}: {len(trials)} runs, {ended} of them ended before", flush=True)
        carried.inherit()
        done = carried.carry_out()
        write_results(study.folder)
    return _farewell(carried, done, " ".join(["tba sweep", str(path), *settings]))


def as_left(study: Study, trial: Trial, config: Config | None) -> Trial:
    """As the run stands on disk. ValueError if what is there came from another config; a run that has saved nothing does not count."""
    path = study.path(trial)
    status, error = standing(path)
    if (
        config is not None
        and (status != "pending" or (path / "checkpoints").is_dir())
        and (path / CONFIG).is_file()
    ):
        from tba.config.plugins import with_defaults

        there, here = (
            flat(with_defaults(c).nested())
            for c in (parse(json.loads((path / CONFIG).read_text())), config)
        )
        keys = [k for k in {**there, **here} if k != "run.folder" and not k.startswith("log.")]
        if differing := [
            f"{k} = {there.get(k, 'default')!r} there, {here.get(k, 'default')!r} here"
            for k in keys
            if there.get(k) != here.get(k)
        ]:
            raise ValueError(
                f"{path} holds a run with another config ({'; '.join(differing)}); remove that folder to run it anew, or change the study back"
            )
    return replace(trial, status=status, error=error)


def choose(study: Study, trial: Trial, candidates: Sequence[Trial]) -> tuple[Trial, Choice]:
    """The one of the settings with the highest mean score over seeds; those of which fewer runs failed come first."""
    groups: dict[str, list[Trial]] = {}
    for t in candidates:
        groups.setdefault(
            json.dumps({k: v for k, v in t.settings.items() if k != SEED}, sort_keys=True), []
        ).append(t)

    def rank(group: Sequence[Trial]) -> tuple[int, float]:
        values = [score(study.path(t), study.table.metric) for t in group if t.status == "finished"]
        known = [v for v in values if v is not None]
        return len(known) - len(group), fmean(known) if known else 0.0

    winner = max(groups.values(), key=rank)
    failed, mean = rank(winner)
    source = winner[0]
    taken = {
        k: v for k, v in study.inherit(trial, source).settings.items() if k not in trial.settings
    }
    varied = [k for k in study.grids[source.grid].varied if k != SEED and k in source.settings]
    matched = {k: source.settings[k] for k in varied if source.settings[k] == trial.settings.get(k)}
    return source, Choice(
        trial.grid,
        source.grid,
        matched,
        taken,
        None if failed == -len(winner) else mean,
        len(groups),
    )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two sweeps of a study would take each other's runs for ended ones."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another `tba sweep` is at work in {folder}; wait for its end, or name another folder by study.folder=…"
            ) from error
        yield


def _farewell(carried: Sweep, done: bool, command: str) -> int:
    folder, trials = carried.study.folder, carried.trials.values()
    failed = [t for t in trials if t.status == "failed"]
    count = sum(t.status == "finished" for t in trials)
    print(
        f"{count} of {len(trials)} runs finished, {len(failed)} failed; {folder / RESULTS}; draw them by `tba report {folder}`"
    )
    broken = [t for t in failed if not t.diverged]
    for t in broken:
        print(f"failed: {folder / t.folder}: {t.error}")
    if broken:
        print(f"once that is mended: `{command} --retry-failed`")
    if not done:
        print(f"stopped; go on by `{command}`", flush=True)
        return INTERRUPTED
    return 2 if broken else 0


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )

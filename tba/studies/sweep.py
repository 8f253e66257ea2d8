"""Carry out a study: all runs of all grids, several at once. A second call continues the first."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tba.config.loading import parse
from tba.config.schema import Config
from tba.runs.log import CONFIG
from tba.runs.stop import Stop
from tba.runtime.placement import available_cores
from tba.studies import workers
from tba.studies.results import (
    FAILED,
    RESULTS,
    Ledger,
    Trial,
    finished,
    flat,
    metric_of,
    scores,
    standing,
    write_failed,
    write_results,
)  # fmt: skip
from tba.studies.study import Study, check_study, read_study

INTERRUPTED = 130
"""Exit status of a command that was ended by a signal, as in shells."""


@dataclass
class Sweep:
    """The trials of a study and their configs by folder, in the order of the study."""

    study: Study
    trials: dict[str, Trial]
    configs: dict[str, Config]
    running: dict[int, tuple[Trial, workers.Worker]] = field(default_factory=dict)
    """At most `study.parallel`. The number of each one decides its cores and its log."""
    died: set[str] = field(default_factory=set)
    """Folders of runs whose process died once."""
    started: float = field(default_factory=time.monotonic)
    ended_here: int = 0

    def carry_out(self) -> bool:
        """Run everything; return False if a signal stopped it before."""
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
                    time.sleep(0.1)
                    self.collect(asked)
            finally:
                workers.close([process for _, process in self.running.values()])

    def start(self) -> None:
        """Start as many runs as there is room for, in the order of the study."""
        cores, parallel = available_cores(), self.study.table.parallel
        each = max(1, len(cores) // parallel)
        shares = [cores[i : i + each] for i in range(0, each * (len(cores) // each), each)]
        under_way = [trial.folder for trial, _ in self.running.values()]
        pending = [t for t in self.trials.values() if t.status == "pending"]
        waiting = [t for t in pending if t.folder not in under_way]
        idle = [number for number in range(parallel) if number not in self.running]
        for number, trial in zip(idle, waiting, strict=False):
            path = self.study.path(trial)
            resume = path if any((path / "checkpoints").glob("step-*")) else None
            if resume is None:
                shutil.rmtree(path, ignore_errors=True)
            share = shares[number % len(shares)]
            config = self.configs[trial.folder]
            self.running[number] = trial, workers.start(config, resume, share, self.log(number))

    def collect(self, asked: bool) -> None:
        """Record the runs whose process has ended."""
        for number, (trial, process) in list(self.running.items()):
            if workers.has_ended(process):
                del self.running[number]
                code = process.returncode
                self.end(
                    trial, f"its process died (exit code {code}); see {self.log(number)}", asked
                )

    def end(self, trial: Trial, death: str, asked: bool) -> None:
        """Record the outcome of a run; if its process died, it gets a second try."""
        path = self.study.path(trial)
        status, error = standing(path)
        if status == "pending":
            if asked:
                return
            if trial.folder not in self.died:
                self.died.add(trial.folder)
                print(f"{trial.folder}: {death}; trying once more", flush=True)
                return
            write_failed(path, death)
            status, error = "failed", death
        self.trials[trial.folder] = ended = replace(trial, status=status, error=error)
        self.ended_here += 1
        self.announce(ended)
        if status == "finished" and not self.study.table.keep_checkpoints:
            shutil.rmtree(path / "checkpoints", ignore_errors=True)
        self.write()

    def announce(self, trial: Trial) -> None:
        """Print the outcome of a run. ValueError if it has scores, but not the study's metric."""
        summary = finished(self.study.path(trial))
        if summary is None:
            outcome = f"failed: {trial.error}"
        else:
            known = scores(self.study.path(trial))
            metric = metric_of(known, self.study.table.metric)
            value = f"{known[metric]:.3f}" if metric in known else "–"
            outcome = f"{metric.removeprefix('sampled_')} {value}  {summary['seconds']:.0f} s"
        pending = sum(t.status == "pending" for t in self.trials.values())
        if pending:
            seconds = pending * (time.monotonic() - self.started) / self.ended_here
            outcome += f"  about {_duration(seconds)} left"
        total = len(self.trials)
        print(f"[{total - pending}/{total}] {trial.folder}  {outcome}", flush=True)

    def log(self, number: int) -> Path:
        return self.study.folder / f"worker-{number}.log"

    def write(self) -> None:
        runs = list(self.trials.values())
        Ledger(self.study.name, self.study.table.metric, runs).write(self.study.folder)


def sweep(
    path: Path, settings: Sequence[str] = (), dry_run: bool = False, retry_failed: bool = False
) -> int:
    """Carry out the study in the file `path` and return the exit status of the command.

    ValueError before anything starts if one of the runs cannot work.
    """
    study = read_study(path, settings)
    trials, configs = study.trials(), check_study(study)
    if dry_run:
        for trial in trials:
            print(trial.folder)
        print(f"config OK (dry run): {len(trials)} runs in {study.folder}")
        return 0
    with _lock(study.folder):
        for trial in trials:
            if retry_failed and (study.path(trial) / FAILED).is_file():
                shutil.rmtree(study.path(trial))
        left = [as_left(study, t, c) for t, c in zip(trials, configs, strict=True)]
        by_folder = {t.folder: c for t, c in zip(trials, configs, strict=True)}
        carried = Sweep(study, {t.folder: t for t in left}, by_folder)
        ended = sum(t.status != "pending" for t in left)
        print(f"study {study.folder}: {len(left)} runs, {ended} of them ended before", flush=True)
        done = carried.carry_out()
        write_results(study.folder)
    return _farewell(carried, done, " ".join(["tba sweep", str(path), *settings]))


def as_left(study: Study, trial: Trial, config: Config) -> Trial:
    """Return the trial with the status that its folder shows.

    ValueError if the run there has another config; a run that has saved nothing does not count.
    """
    path = study.path(trial)
    status, error = standing(path)
    saved = status != "pending" or (path / "checkpoints").is_dir()
    if saved and (path / CONFIG).is_file():
        from tba.config.plugins import with_defaults

        there = flat(with_defaults(parse(json.loads((path / CONFIG).read_text()))).nested())
        here = flat(with_defaults(config).nested())
        keys = [k for k in {**there, **here} if k != "run.folder" and not k.startswith("log.")]
        differing = [
            f"{k} = {there.get(k, 'default')!r} there, {here.get(k, 'default')!r} here"
            for k in keys
            if there.get(k) != here.get(k)
        ]
        if differing:
            raise ValueError(
                f"{path} holds a run with another config ({'; '.join(differing)});"
                " remove that folder to run it again, or change the study back"
            )
    return replace(trial, status=status, error=error)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Keep other sweeps out of the folder: they would restart the runs of this one."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another `tba sweep` uses {folder}; wait until it ends, or choose another folder"
                " with study.folder=…"
            ) from error
        yield


def _farewell(carried: Sweep, done: bool, command: str) -> int:
    folder, trials = carried.study.folder, carried.trials.values()
    failed = [t for t in trials if t.status == "failed"]
    count = sum(t.status == "finished" for t in trials)
    print(f"{count} of {len(trials)} runs finished, {len(failed)} failed: {folder / RESULTS}")
    print(f"draw them with `tba report {folder}`")
    broken = [t for t in failed if not t.diverged]
    for t in broken:
        print(f"failed: {folder / t.folder}: {t.error}")
    if broken:
        print(f"once the cause is fixed: `{command} --retry-failed`")
    if not done:
        print(f"stopped; continue with `{command}`", flush=True)
        return INTERRUPTED
    return 2 if broken else 0


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"

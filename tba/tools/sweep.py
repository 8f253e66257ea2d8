"""Run a study: all runs of all grids, several at once. A second call continues the first."""

import os
import shlex
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from pathlib import Path
from typing import Any

from tba.child import Child, wait_for_parent
from tba.config.plugins import with_defaults
from tba.config.schema import Config
from tba.config.tables import EvalTable
from tba.runs.folder import CHECKPOINTS, CONFIG, flat, locked, open_plain, read_optional
from tba.runs.generations import generations, recover
from tba.runtime.placement import Place, available_cores
from tba.stop import Stop
from tba.tools.study import (
    RESULTS,
    STUDY,
    Ledger,
    Study,
    Trial,
    check_study,
    metric_of,
    read_ledger,
    read_study,
    scores,
    standing,
    write_failed,
    write_results,
)

RESOLVED = ("policy.attention", "trainer.token_budget")
"""Settings whose value "auto" a run replaces in its folder."""
INTERRUPTED = 130  # exit status of a command that was interrupted by a signal, as in shells
ORPHAN = 60.0  # seconds to wait for a run that a killed sweep left behind
SAVING = 30.0  # seconds for a run to save and exit when the sweep raises an error


@dataclass
class Sweep:
    """Trials of a study and their configs, by folder, in the order of the study."""

    study: Study
    trials: dict[str, Trial]
    configs: dict[str, Config]
    running: dict[int, tuple[Trial, Child]] = field(default_factory=dict)
    """At most `study.parallel` runs. The slot number determines the cores and the log file."""

    def pending(self) -> list[Trial]:
        """Return the trials without an outcome, including running ones."""
        return [trial for trial in self.trials.values() if trial.status == "pending"]

    def carry_out(self) -> None:
        """Run all trials, or stop early on a signal."""
        self.write()
        with Stop() as stop:
            try:
                while self.pending() and not stop.requested:
                    self.start()
                    time.sleep(0.1)
                    self.collect(stop.requested)
                for _, child in self.running.values():
                    child.process.terminate()
                while self.running:
                    time.sleep(0.1)
                    self.collect(asked=True)
            finally:
                for _, child in self.running.values():
                    child.end(SAVING)

    def start(self) -> None:
        """Start runs in all free slots, in the order of the study."""
        cores = available_cores()
        parallel = self.study.table.parallel
        each = max(1, len(cores) // parallel)
        under_way = [trial.folder for trial, _ in self.running.values()]
        waiting = [trial for trial in self.pending() if trial.folder not in under_way]
        idle = [number for number in range(parallel) if number not in self.running]
        for number, trial in zip(idle, waiting, strict=False):
            first = each * (number % (len(cores) // each))
            child = start_run(
                self.configs[trial.folder],
                resume=prepare(self.study.path(trial)),
                cores=cores[first : first + each],
                log=self.log_file(number),
            )
            self.running[number] = (trial, child)

    def collect(self, asked: bool) -> None:
        """Record the runs whose process has ended; `asked`: the sweep was asked to stop."""
        for number, (trial, child) in list(self.running.items()):
            if child.status is None:
                continue
            child.kill()  # also kills processes that it may have left
            del self.running[number]
            run = self.study.path(trial)
            if standing(run)[0] == "pending" and not asked:
                log_file = self.log_file(number)
                write_failed(run, f"its process died (exit code {child.status}); see {log_file}")
            self.end(trial)

    def end(self, trial: Trial) -> None:
        """Record the outcome of a run, if it has one."""
        run = self.study.path(trial)
        status, error = standing(run)
        if status == "pending":
            return
        self.trials[trial.folder] = replace(trial, status=status, error=error)
        outcome = f"failed: {error}"
        if status == "finished":
            known = scores(run)
            metric = metric_of(known, self.study.table.metric)
            outcome = f"{metric.removeprefix('sampled_')} {known.get(metric, nan):.3f}"
        total = len(self.trials)
        print(f"[{total - len(self.pending())}/{total}] {trial.folder}  {outcome}", flush=True)
        if status == "finished" and not self.study.table.keep_checkpoints:
            shutil.rmtree(run / CHECKPOINTS, ignore_errors=True)
        self.write()

    def log_file(self, number: int) -> Path:
        return self.study.folder / f"worker-{number}.log"

    def write(self) -> None:
        runs = list(self.trials.values())
        Ledger(self.study.name, self.study.table.metric, runs).write(self.study.folder)

    def farewell(self, command: str) -> int:
        """Print the outcome of the study, and return the exit status."""
        folder = self.study.folder
        failed = [trial for trial in self.trials.values() if trial.status == "failed"]
        pending = len(self.pending())
        total = len(self.trials)
        print(f"{total - len(failed) - pending} of {total} runs finished, {len(failed)} failed")
        print(f"for charts, type `tba report {folder}`; rows: {folder / RESULTS}")
        broken = [trial for trial in failed if not trial.has_result]
        for trial in broken:
            print(f"failed: {folder / trial.folder}: {trial.error}")
        if broken:
            print(f"once the cause is fixed: `{command} --retry-failed`")
        if pending:
            print(f"stopped; continue with `{command}`", flush=True)
            return INTERRUPTED
        return 2 if broken else 0


def sweep(
    path: Path, settings: Sequence[str] = (), dry_run: bool = False, retry_failed: bool = False
) -> int:
    """Run a study and return the exit status; ValueError before the start if a run is invalid."""
    study = read_study(path, settings)
    configs = {t.folder: c for t, c in zip(study.trials, check_study(study), strict=True)}
    if dry_run:
        print(*configs, sep="\n")
        print(f"config OK (dry run): {len(configs)} runs in {study.folder}")
        return 0
    with locked(study.folder, "study.folder"):
        again = [t for t in study.trials if retry_failed and standing(study.path(t))[0] == "failed"]
        left = {
            t.folder: t if t in again else as_left(study, t, configs[t.folder])
            for t in study.trials
        }
        for trial in again:
            with locked(study.path(trial)):  # it may have been resumed by hand
                shutil.rmtree(study.path(trial))
        before = read_ledger(study.folder).runs if (study.folder / STUDY).is_file() else []
        carried = Sweep(study, left, configs)
        ended = len(left) - len(carried.pending())
        print(f"study {study.folder}: {len(left)} runs, {ended} of them ended earlier", flush=True)
        if gone := [trial.folder for trial in before if trial.folder not in left]:
            print(f"{len(gone)} runs of {STUDY} are not in {path}, such as {gone[0]}: they keep")
            print(f"their folders, but leave {STUDY}, {RESULTS} and the report", flush=True)
        carried.carry_out()
        write_results(study.folder)
    return carried.farewell(shlex.join(["tba", "sweep", str(path), *settings]))


def as_left(study: Study, trial: Trial, config: Config) -> Trial:
    """Return the trial with the status of its folder; ValueError if its run has another config."""
    path = study.path(trial)
    status, error = standing(path)
    stored = read_optional(path / CONFIG)
    if stored is not None and (status != "pending" or (path / CHECKPOINTS).is_dir()):
        default: dict[str, Any] = {"eval.prompts": EvalTable().prompts}
        there = default | flat(with_defaults(Config(**stored)).nested())
        here = default | flat(with_defaults(config).nested())
        written = {"run.folder", "run.base"}  # by the run itself
        written |= {key for key in RESOLVED if here.get(key) == "auto"}
        keys = [key for key in {**there, **here} if key not in written]
        differing = [
            f"{key} = {there.get(key, 'default')!r} there, {here.get(key, 'default')!r} here"
            for key in keys
            if there.get(key) != here.get(key) and not key.startswith("log.")
        ]
        if differing:
            raise ValueError(
                f"{path} holds a run with another config ({'; '.join(differing)});"
                " remove that folder to run it again, or change the study back"
            )
    return replace(trial, status=status, error=error)


def prepare(path: Path) -> bool:
    """Return whether a folder contains a run to resume; otherwise delete the incomplete folder.

    Waits for a run that a killed sweep left behind, which saves before it exits.
    """
    if path.exists():
        with locked(path, wait=ORPHAN):
            recover(path / CHECKPOINTS)
    resume = bool(generations(path / CHECKPOINTS))
    if not resume:
        shutil.rmtree(path, ignore_errors=True)
    return resume


def start_run(config: Config, resume: bool, cores: Sequence[int], log: Path) -> Child:
    """Start or resume a run in a separate process that writes its output to the file `log`.

    Ctrl-C reaches only the sweep, which then asks each run once to stop.
    """
    threads = str(len(cores))  # read when torch is imported
    with open(log, "a", encoding="utf-8", opener=open_plain) as file:
        return Child(
            "tba.tools.sweep:work",
            config.nested(),
            resume,
            list(cores),
            environment={"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            output=file,
            ignored=(),
        )


def work(tables: Mapping[str, Any], resume: bool, cores: Sequence[int]) -> None:
    """Execute one run in this process; an error is written to the run's folder."""

    def stop_with_sweep() -> None:  # as a signal does: the run saves
        wait_for_parent()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_with_sweep, daemon=True).start()
    from tba.open import run

    config = Config(**tables)
    folder = Path(config.run.folder)
    Place("cpu", tuple(cores)).take()
    try:
        run(config, folder if resume else None)
    except Exception as error:
        line = " ".join(traceback.format_exception_only(error)[-1].split())
        line = line.removeprefix(f"{type(error).__module__}.")
        write_failed(folder, line, traceback.format_exc())

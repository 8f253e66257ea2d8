"""Carries out a study: every run of every grid, several at once, from wherever an earlier call has left it."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from tba.config import Config, parse
from tba.log import CONFIG, write_whole
from tba.results import FAILED, RESULTS, STUDY, Status, Told, finished, metric_of, score, scores, write_results
from tba.runtime.placement import available_cores
from tba.stop import Stop
from tba.study import SEED, Point, Study, check_study, read_study
from tba.workers import Order, Outcome, Worker, wait_for

INTERRUPTED = 130
"""Exit status of a command that a signal has ended, as shells have it."""


@dataclass
class Entry:
    """A run of the study, and how it stands. Its config is known once what it inherits is."""

    point: Point
    config: Config | None
    status: Status = "pending"
    error: str | None = None
    running: bool = False
    deaths: int = 0

    @property
    def known(self) -> bool:
        """Whether another grid can inherit from it: it has ended, and what it has inherited itself has been chosen."""
        return self.status == "failed" or (self.status == "finished" and self.config is not None)


@dataclass
class Sweep:
    study: Study
    entries: list[Entry]
    choices: list[dict[str, Any]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    ended_here: int = 0
    _orders: dict[int, Entry] = field(default_factory=dict, init=False)

    def carry_out(self) -> bool:
        """All runs, or as many as there are until somebody asks to stop: then False."""
        with ExitStack() as opened:
            workers = self._workers()
            for worker in workers:
                opened.callback(worker.close)
            stop, asked = opened.enter_context(Stop()), False
            self.write()
            while True:
                if stop.requested and not asked:
                    asked = True
                    for worker in workers:
                        worker.stop()
                if not asked:
                    self._order(workers)
                if not any(w.busy for w in workers):
                    return not asked
                for worker, outcome in wait_for(workers, seconds=0.5):
                    self._end(self._orders.pop(id(worker)), outcome)

    def _workers(self) -> list[Worker]:
        cores, parallel = available_cores(), self.study.table.parallel
        each = max(1, len(cores) // parallel)
        shares = [tuple(cores[i : i + each]) for i in range(0, each * (len(cores) // each), each)]
        return [Worker(shares[i % len(shares)], self.study.folder / f"worker-{i}.log") for i in range(parallel)]

    def _order(self, workers: Sequence[Worker]) -> None:
        """Gives every idle worker a run, in the order of the study."""
        for worker in workers:
            if worker.busy:
                continue
            entry = next((e for e in self.entries if e.status == "pending" and not e.running and e.config is not None), None)
            if entry is None or entry.config is None:
                return
            path, resume = self.study.path(entry.point), None
            if any((path / "checkpoints").glob("step-*")):
                resume = path
            else:
                shutil.rmtree(path, ignore_errors=True)
            worker.start(Order(entry.config, resume))
            entry.running = True
            self._orders[id(worker)] = entry

    def resolve(self) -> list[str]:
        """Chooses what is to be inherited from grids of which all runs have ended; returns what does not fit the runs there are."""
        errors: list[str] = []
        for entry in self.entries:
            best = self.study.grids[entry.point.grid].best
            if entry.config is None and entry.status != "failed" and all(e.known for e in self.entries if e.point.grid == best):
                try:
                    self._inherit(entry)
                    look(self.study, entry)
                except ValueError as error:
                    entry.status, entry.error = "failed", str(error)
                    errors.append(str(error))
        return errors

    def _inherit(self, entry: Entry) -> None:
        alike = {p.slug for p in self.study.candidates(entry.point)}
        best = self.study.grids[entry.point.grid].best
        source, choice = choose(self.study, [e for e in self.entries if e.point.grid == best and e.point.slug in alike])
        entry.point = self.study.inherit(entry.point, source)
        taken = {k: entry.point.settings[k] for k in entry.point.inherited}
        matched = {k: source.settings[k] for k in source.varied if k != SEED and k in entry.point.settings and k not in taken}
        made = {"grid": entry.point.grid, "best": best, "matched": matched, "settings": taken, **choice}
        if made not in self.choices:
            self.choices.append(made)
            like = "".join(f", {k} = {v}" for k, v in matched.items())
            print(f"{entry.point.grid}{like}: the best of {best} has {', '.join(f'{k} = {v}' for k, v in taken.items())}  ({choice['told']})", flush=True)
        entry.config = self.study.config(entry.point)

    def _end(self, entry: Entry, outcome: Outcome) -> None:
        entry.running = False
        path = self.study.path(entry.point)
        if outcome.end == "stopped":
            return
        if outcome.end == "died":
            entry.deaths += 1
            if entry.deaths < 2:
                print(f"{entry.point.grid} {entry.point.slug}: {outcome.error}; once more", flush=True)
                return
        if outcome.end == "finished":
            entry.status = "finished"
            metric_of(scores(path), self.study.table.metric)  # a metric that no run has is told after the first
            if not self.study.table.keep_checkpoints:
                shutil.rmtree(path / "checkpoints", ignore_errors=True)
        else:
            entry.status, entry.error = "failed", outcome.error
            path.mkdir(parents=True, exist_ok=True)
            write_whole(path / FAILED, json.dumps({"error": outcome.error, "traceback": outcome.traceback}, indent=1) + "\n")
        self.ended_here += 1
        self._tell(entry)
        self.resolve()
        self.write()

    def _tell(self, entry: Entry) -> None:
        ended = sum(e.status != "pending" for e in self.entries)
        line = f"[{ended}/{len(self.entries)}] {entry.point.grid} {entry.point.slug}  "
        summary = finished(self.study.path(entry.point))
        if entry.status == "failed" or summary is None:
            line += f"failed: {entry.error}"
        else:
            found = scores(self.study.path(entry.point))
            metric = metric_of(found, self.study.table.metric)
            value = f"{found[metric]:.3f}" if metric in found else "–"
            line += f"{metric.removeprefix('sampled_')} {value}  {summary['seconds']:.0f} s"
        left = (len(self.entries) - ended) * (time.monotonic() - self.began) / max(1, self.ended_here)
        print(line + (f"  about {_duration(left)} left" if ended < len(self.entries) else ""), flush=True)

    def write(self) -> None:
        """`study.json`."""
        runs = [asdict(told(e)) for e in self.entries]
        grids = {g.name: {"varied": g.varied, "fixed": g.fixed, "best": g.best} for g in self.study.grids.values()}
        study = {"name": self.study.name, "metric": self.study.table.metric, "grids": grids, "choices": self.choices, "runs": runs}
        write_whole(self.study.folder / STUDY, json.dumps(study, indent=1) + "\n")


def sweep(path: Path, settings: Sequence[str] = (), dry_run: bool = False, retry_failed: bool = False) -> int:
    """Carries out the study in the file `path`; returns the command's exit status. ValueError before anything starts if a run cannot work."""
    study = read_study(path, settings)
    configs = check_study(study)
    entries = [Entry(p, None if study.grids[p.grid].best is not None else c) for p, c in zip(study.points(), configs, strict=True)]
    if dry_run:
        for entry in entries:
            best = study.grids[entry.point.grid].best
            print(f"{entry.point.grid} {entry.point.slug}" + (f"  + the best of {best}" if best else ""))
        print(f"{len(entries)} runs in {study.folder}; nothing was started")
        return 0
    with _alone(study.folder):
        for entry in entries:
            if retry_failed and (study.path(entry.point) / FAILED).is_file():
                shutil.rmtree(study.path(entry.point))
            look(study, entry)
        ended = sum(e.status != "pending" for e in entries)
        print(f"study {study.folder}: {len(entries)} runs, {ended} of them ended before", flush=True)
        started = Sweep(study, entries)
        if wrong := started.resolve():
            raise ValueError(wrong[0])
        done = started.carry_out()
        write_results(study.folder)
    return _farewell(study, entries, done, " ".join(["tba sweep", str(path), *settings]))


def look(study: Study, entry: Entry) -> None:
    """How the run stands on disk. ValueError if what is there came from another config; a run that has saved nothing does not count."""
    path = study.path(entry.point)
    failed = (path / FAILED).is_file()
    done = finished(path) is not None
    if entry.config is not None and (done or failed or (path / "checkpoints").is_dir()) and (path / CONFIG).is_file():
        _same_config(path, entry.config)
    if done:
        entry.status = "finished"
    elif failed:
        entry.status, entry.error = "failed", json.loads((path / FAILED).read_text())["error"]


def told(entry: Entry) -> Told:
    p = entry.point
    return Told(p.grid, f"{p.grid}/{p.slug}", p.label, p.settings, p.varied, p.axes, entry.status, entry.error)


def choose(study: Study, entries: Sequence[Entry]) -> tuple[Point, dict[str, Any]]:
    """The settings with the highest mean score over seeds, and how they were found; those of which fewer runs failed come first."""
    groups: dict[str, list[Entry]] = {}
    for e in entries:
        groups.setdefault(json.dumps({k: v for k, v in e.point.settings.items() if k != SEED}, sort_keys=True), []).append(e)

    def rank(group: Sequence[Entry]) -> tuple[int, float]:
        values = [score(study.path(e.point), study.table.metric) for e in group if e.status == "finished"]
        known = [v for v in values if v is not None]
        return len(known) - len(group), fmean(known) if known else 0.0

    winner = max(groups.values(), key=rank)
    failed, mean = rank(winner)
    text = (
        f"mean score {mean:.3f} over {len(winner)} run{'s' if len(winner) > 1 else ''}, the best of {len(groups)} settings"
        if failed > -len(winner)
        else "all runs failed: the first"
    )
    return winner[0].point, {"score": mean, "failed": -failed, "of": len(groups), "told": text}


def _same_config(path: Path, config: Config) -> None:
    there, here = _flat(parse(json.loads((path / CONFIG).read_text())).nested()), _flat(config.nested())
    differing = [
        f"{k} = {there.get(k, 'default')!r} there, {here.get(k, 'default')!r} here" for k in dict.fromkeys([*there, *here]) if there.get(k) != here.get(k)
    ]
    if differing:
        raise ValueError(f"{path} holds a run with another config ({'; '.join(differing)}); remove that folder to run it anew, or change the study back")


def _flat(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{name}.{key}": v for name, table in tables.items() for key, v in table.items() if name != "log" and (name, key) != ("run", "folder")}


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two sweeps of a study would take each other's runs for ended ones."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another `tba sweep` is at work in {folder}; wait for its end, or name another folder by study.folder=…") from error
        yield


def _farewell(study: Study, entries: Sequence[Entry], done: bool, command: str) -> int:
    failed = [e for e in entries if e.status == "failed"]
    count = sum(e.status == "finished" for e in entries)
    print(f"{count} of {len(entries)} runs finished, {len(failed)} failed; {study.folder / RESULTS}; draw them by `tba report {study.folder}`")
    broken = [e for e in failed if not told(e).diverged]
    for e in broken:
        print(f"failed: {study.path(e.point)}: {e.error}")
    if broken:
        print(f"once that is mended: `{command} --retry-failed`")
    if not done:
        print(f"stopped; go on by `{command}`", flush=True)
        return INTERRUPTED
    return 2 if broken else 0


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"

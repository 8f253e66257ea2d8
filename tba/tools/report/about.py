"""What was run: the main settings of a run, and its best checkpoint with the export command."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from shlex import quote

import pandas as pd

from tba.runs.folder import CHECKPOINTS, Row, flat
from tba.runs.generations import generations, step_of
from tba.tools.report.page import ranked, score

Span = tuple[int, int, Mapping[str, str]]
"""First and last step of a part of a run, and its settings as JSON by `table.key`."""


def main_settings(config: Mapping[str, Row], sessions: Sequence[Row]) -> dict[str, str]:
    """Return the model, data, reward, objective, rate, seed and devices of a run by label."""
    task, trainer, runtime = config["task"], config["trainer"], config["runtime"]
    reward = task.get("reward") or task.get("rollout") or "of the task"
    hardware = sessions[-1]["hardware"] if sessions else []
    searchers = runtime["searchers"]
    devices = [f"{runtime['use']}, {searchers} searcher{'s' if searchers != 1 else ''}", *hardware]
    return {
        "Model": config["policy"]["model"] or "–",
        "Data": " ".join(filter(None, (task["use"], str(task.get("data") or "")))),
        "Reward": reward if isinstance(reward, str) else ", ".join(map(str, reward)),
        "Objective": config["objective"]["use"],
        "Learning rate": f"{trainer['learning_rate']:g}, {trainer['schedule']}",
        "Seed": str(config["run"]["seed"]),
        "Devices": ", ".join(devices),
    }


def best_evaluation(evaluations: pd.DataFrame, measure: str) -> Row | None:
    """Return the best evaluation after step 0, if there is one."""
    trained = evaluations[evaluations["step"] > 0]
    scores = ranked(trained, measure)
    return None if scores.empty else trained.loc[scores.idxmax()].to_dict()


def best_score(evaluations: pd.DataFrame, measure: str) -> str:
    """Return the step of the best evaluation, with its score."""
    best = best_evaluation(evaluations, measure)
    return "–" if best is None else f"{best['step']:,.0f}: {score(best, measure, 'sampled')}"


def typed(run: Path) -> Path:
    """Return the path of a run as it is typed: relative if it is in the current folder."""
    here = Path.cwd()
    return run.relative_to(here) if run.is_relative_to(here) else run


def best_checkpoint(run: Path, evaluations: pd.DataFrame, measure: str) -> tuple[str, str]:
    """Return the best evaluation as text, and the command that exports its checkpoint.

    If the run has not kept that checkpoint, the command is empty.
    """
    best = best_evaluation(evaluations, measure)
    if best is None:
        return "", ""
    step = int(best["step"])
    text = f"Best checkpoint: step {step:,}: {measure} {score(best, measure, 'sampled')}"
    kept = {step_of(generation) for generation in generations(run / CHECKPOINTS)}
    if step not in kept:
        return f"{text}; its checkpoint was not kept: set checkpoint.keep_best=true", ""
    return text, f"tba export {quote(str(typed(run)))} FOLDER --step {step}"


def spans_of(sessions: Sequence[Row], newest: int, config: Row) -> list[Span]:
    """Return the parts of a run. Repeated steps belong to the later session."""
    spans: list[Span] = []
    rewards: dict[str, str] = {}
    for place, session in enumerate(sessions):
        begin = session["step"]
        end = min([newest, *(later["step"] for later in sessions[place + 1 :])])
        if session.get("rewards"):
            rewards = {"rewards": f"{session['rewards']} at step {begin}"}
        if begin < end:
            settings = flat(session.get("config", config))
            texts = {key: json.dumps(value) for key, value in settings.items()}
            spans.append((begin + 1, end, {**texts, **rewards}))
    return spans


def changed_settings(spans: Sequence[Span]) -> dict[str, str]:
    """Return the settings that differ between parts of a run, each value with its steps."""
    changed = {}
    for key in dict.fromkeys(key for _, _, settings in spans for key in settings):
        values = []
        for value, group in groupby(spans, key=lambda span: span[2].get(key, "–")):
            same = list(group)
            values.append(f"{value} (steps {same[0][0]}–{same[-1][1]})")
        if len(values) > 1:
            changed[key] = ", then ".join(values)
    return changed

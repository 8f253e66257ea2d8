"""Charts on the page of runs: which metrics stand together, and their numbers as JSON."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isnan, nan
from typing import Any, Literal

import numpy as np
import pandas as pd

from tba.report.page import MODES, names
from tba.runs.metrics import EACH_REWARD, PANELS, Panel

AXES = {"step": "steps", "time": "time (s)", "samples_generated": "samples generated"}
"""Columns that the chart of rewards is drawn over, and their names on the switch."""
POINTS = 1000
"""Largest number of points of a line. Those of longer runs are means over several steps."""
OTHERS = "All other metrics"
UNITS = dict.fromkeys(("seconds", "drain", "blocked"), " (s)")
UNITS |= {"bytes": " (bytes)", "length": " (tokens)", "padding": " (share)"}


@dataclass(frozen=True)
class Chart:
    """A chart of a few metrics, each with its own dashes, and ± its `spread`.

    The axis of `number` fits the values; others begin at 0. Metrics of steps are smoothed, unless
    they are counts. Evaluations are points. Those of `shares` have an axis of their own.
    """

    title: str
    metrics: tuple[str, ...]
    form: Literal["number", "positive", "share", "count"] = "number"
    labels: tuple[str, ...] = ()
    spread: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()
    note: str = ""
    flat: bool = False
    """Whether there are no values, or only 0."""


LAG = ("off_policy/lag_mean", "off_policy/lag_max")
SECTIONS: dict[str, tuple[str, Sequence[Chart]]] = {
    "Optimisation": (
        "Each step of the optimizer.",
        (
            Chart("loss", ("loss",)),
            Chart("learning rate", ("learning_rate",), "positive"),
            Chart("log(pi / ref) of the batches (nats per response)", ("log_ratio",)),
            Chart("ratios pi / mu outside the clip range", ("clip_ratio",), "share"),
            Chart("|log(pi / mu)| (nats per response)", ("off_policy/log_ratio",), "positive"),
        ),
    ),
    "Training batches": (
        "The trajectories in the batch of each step. Lag is the age, in steps, of the weights that"
        " generated them.",
        (
            Chart("lag (steps)", LAG, "positive", ("mean", "max")),
            Chart("reward, mean ± standard deviation", ("reward",), spread=("reward_std",)),
            Chart("response length (tokens)", ("completions/mean_length",), "positive"),
            Chart("groups with equal rewards", ("frac_reward_zero_std",), "share"),
        ),
    ),
    "Replay buffer": (
        "Distinct responses in the buffer. Of duplicates only the newest is kept; evicted responses"
        " made room for new ones.",
        (
            Chart("prompts held", ("buffer/prompts",), "count"),
            Chart(
                "samples", ("buffer/added", "buffer/duplicates"), "count", ("added", "duplicates")
            ),
            Chart(
                "evicted", ("buffer/evicted_per_prompt", "buffer/evicted_capacity"), "count",
                ("limit of a prompt", "capacity"),
            ),
            Chart("groups with repeated samples", ("buffer/short_groups",), "count"),
            Chart("distinct responses in a group", ("buffer/distinct_per_group",), "positive"),
        ),
    ),
    "Timing and restarts": (
        "Seconds of each optimizer step, and of each publication of the weights. Restarts and"
        " rejected samples are counted from the start.",
        (
            Chart("optimizer step (s)", ("step_time",), "positive"),
            Chart(
                "publishing the weights (s)", ("sync/blocked", "sync/adopted"), "positive",
                ("trainer blocked", "until adopted"),
            ),
            Chart(
                "searchers restarted, samples rejected",
                ("searchers/restarts", "searchers/rejected"), "count", ("restarted", "rejected"),
            ),
        ),
    ),
}  # fmt: skip


def reward_chart() -> Chart:
    """Return the chart of rewards, of training batches and of held-out prompts."""
    values, stderrs = zip(*(names("reward", mode) for mode in MODES), strict=True)
    labels = ("training batches", *(f"held-out, {mode}" for mode in MODES))
    return Chart("reward", ("reward", *values), "number", labels, ("", *stderrs))


def panel_charts(tables: Sequence[pd.DataFrame]) -> list[dict[str, Any]]:
    """Return a chart for each panel of the first screen, as JSON, of the metrics that have values.

    Only a metric that has been negative needs an axis that does not begin at 0.
    """
    ends = pd.concat([table.agg(["min", "max"]).T for table in tables]).dropna()
    least = {str(name): float(v) for name, v in ends["min"].groupby(level=0).min().items()}
    filled = {str(name) for name in ends.index[(ends != 0).any(axis=1)]}
    charts = [_panel_chart(panel, least) for panel in PANELS]
    return [asdict(replace(chart, flat=filled.isdisjoint(chart.metrics))) for chart in charts]


def _panel_chart(panel: Panel, least: Mapping[str, float]) -> Chart:
    """Return the chart of a panel; `least` has the lowest value of each metric."""
    labels: dict[str, str] = {}
    shares: list[str] = []
    form: Any = "positive"
    for curve in panel.curves:
        own = curve.labels(least)
        labels |= own
        if "%" in curve.form:
            shares += own
        elif ".0f" in curve.form:
            form = "count"
        elif any(least[name] < 0 for name in own):
            form = "number"
    if len(shares) == len(labels):
        form, shares = "share", []
    texts, note = tuple(labels.values()), f"healthy: {panel.healthy}"
    return Chart(panel.title, tuple(labels), form, texts, (), tuple(shares), note)


def sections(
    tables: Sequence[pd.DataFrame], measures: Mapping[str, str]
) -> dict[str, tuple[str, list[dict[str, Any]]]]:
    """Return for each section a sentence and the charts that have data, as JSON.

    `measures` is that of `measures_of`. The last section has each metric that no other shows.
    """
    filled = {name for table in tables for name in table.dropna(axis=1, how="all")}
    # a count that is always 0 has nothing to show
    counted = {name for t in tables for name in t.replace(0, nan).dropna(axis=1, how="all")}
    rewards = []
    for name in sorted(filled):
        if match := EACH_REWARD.fullmatch(name):
            std = f"rewards/{match[1]}/std"
            title = f"{match[1]}, mean ± standard deviation"
            rewards.append(Chart(title, (name,), spread=(std,)))
    of_k = tuple(name for name in sorted(filled) if re.fullmatch(r"eval/(pass|avg)@\d+", name))
    labels = tuple(name.removeprefix("eval/") for name in of_k)
    errors = tuple(f"{name}_stderr" for name in of_k)
    held_out = [Chart("pass@k and avg@k", of_k, "share", labels, errors), *_held_out(measures)]
    planned: dict[str, tuple[str, Sequence[Chart]]] = {
        "Reward functions": ("Each reward function alone, before its weight.", rewards),
        "Held-out prompts": ("Evaluations, with standard errors over prompts.", held_out),
        **SECTIONS,
    }
    used = {*AXES, "requested", "samples_trained"}
    used.update(*(panel["metrics"] for panel in panel_charts(tables)))
    for chart in (reward_chart(), *(c for _, charts in planned.values() for c in charts)):
        used.update(chart.metrics, chart.spread)
    others = [name for name in sorted(filled - used) if not name.endswith("stderr")]
    charts = [Chart(name + UNITS.get(name.split("/")[-1], ""), (name,)) for name in others]
    planned[OTHERS] = ("docs/architecture.md describes them.", charts)
    shown = {}
    for title, (about, own) in planned.items():
        known = [c for c in own if {*c.metrics} & (counted if c.form == "count" else filled)]
        if known:
            shown[title] = (about, [asdict(chart) for chart in known])
    return shown


def _held_out(measures: Mapping[str, str]) -> list[Chart]:
    """Return the charts of evaluations: of all held-out prompts, then of sets and parts."""
    scores = []
    for subset, measure in measures.items():
        if subset or measure != "reward":  # else it is the chart of rewards
            values, stderrs = zip(*(names(measure, mode, subset) for mode in MODES), strict=True)
            form: Any = "share" if measure == "pass@1" else "number"
            scores.append(Chart(f"{subset} {measure}".strip(), values, form, MODES, stderrs))
    perplexity = ("eval/sampled_perplexity", "eval/greedy_perplexity")
    wins = ("eval/sampled_win_rate", "eval/greedy_win_rate")
    errors = tuple(f"{name}_stderr" for name in wins)
    distance = "eval/sampled_distance"
    return [
        *scores,
        Chart("log(pi / ref) of held-out answers (nats per response)", ("eval/sampled_log_ratio",)),
        Chart("perplexity of answers", perplexity, "number", MODES),
        Chart("win rate", wins, "share", MODES, errors),
        Chart(
            "distance of answers (cosine)", (distance,), "positive", spread=(f"{distance}_stderr",)
        ),
    ]


def columns(table: pd.DataFrame) -> dict[str, list[float | None]]:
    """Return the columns of a table that have values, with at most `POINTS` rows."""
    if len(table) > POINTS:
        table = table.groupby(np.arange(len(table)) * POINTS // len(table)).mean()
    filled = table.dropna(axis=1, how="all")
    return {
        str(name): [None if isnan(v) else float(f"{v:.6g}") for v in values.tolist()]
        for name, values in filled.items()
    }

"""The first screen of a run: twelve panels, the same in console, report, TensorBoard and W&B."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import filter as matching
from math import isfinite

SECTION = "first screen"
"""Where TensorBoard, W&B and trackio show the panels."""
EACH_REWARD = re.compile(r"rewards/(.+)/mean")
"""Metric of each reward function."""


@dataclass(frozen=True)
class Curve:
    """A metric of a panel. A `*` in its name stands for any name, which is then the label."""

    metric: str
    label: str
    form: str = "{:.3f}"

    def labels(self, metrics: Collection[str]) -> dict[str, str]:
        """Return the label of each of the metrics that the curve stands for."""
        before, star, after = self.metric.partition("*")
        if not star:
            return {self.metric: self.label} if self.metric in metrics else {}
        names = matching(metrics, self.metric)
        return {name: name.removeprefix(before).removesuffix(after) for name in names}


@dataclass(frozen=True)
class Panel:
    """One chart, with the metrics that belong together."""

    title: str
    healthy: str  # what a healthy run shows, as in the table of docs/watching.md
    curves: tuple[Curve, ...]


PANELS = (
    Panel("reward", "rises, and then levels off", (
        Curve("reward", "reward"), Curve("rewards/*/mean", "*"),
    )),
    Panel("held-out pass@1", "rises with the reward", (
        Curve("eval/sampled_pass@1", "pass@1", "{:.1%}"),
        Curve("eval/greedy_pass@1", "pass@1 greedy", "{:.1%}"),
    )),
    Panel("cut-off responses", "near 0", (
        Curve("completions/clipped_ratio", "cut off", "{:.1%}"),
    )),
    Panel("KL to the reference (nats per token)", "kl and k3 grow slowly", (
        Curve("kl", "kl", "{:.4f} nats"), Curve("kl/k3", "k3", "{:.4f} nats"),
    )),
    Panel("entropy (nats per token)", "declines slowly", (
        Curve("entropy", "entropy", "{:.3f} nats"),
    )),
    Panel("gradient norm", "no trend", (Curve("grad_norm", "gradient norm"),)),
    Panel(
        "log-prob gap, engine to trainer (nats)",
        "as large as rounding: 1e-4 in fp32, a few hundredths in bf16",
        (Curve("sync/logp_gap", "gap", "{:.2g} nats"),
         Curve("sync/logp_gap_max", "worst gap", "{:.2g} nats")),
    ),
    Panel(
        "lag (steps) and effective sample size",
        "a lag of a few times runtime.publish_every; an effective sample size near 100 %",
        (Curve("off_policy/lag_mean", "lag", "{:.1f} steps"),
         Curve("off_policy/ess", "ess", "{:.1%}")),
    ),
    Panel(
        "responses in the buffer",
        "grows up to replay.capacity, or until each prompt has replay.per_prompt responses",
        (Curve("buffer/size", "buffer", "{:,.0f} responses"),),
    ),
    Panel("waits (share of the time)", "both near 0", (
        Curve("wait/trainer", "trainer waits", "{:.1%}"),
        Curve("wait/searchers", "searchers wait", "{:.1%}"),
    )),
    Panel(
        "samples per second",
        "constant, apart from changes in the length of the responses",
        (Curve("samples_per_second", "samples/s", "{:.1f}"),),
    ),
    Panel(
        "samples per second of an engine",
        "mean and worst of the latest searches are near each other",
        (
            Curve("engine/samples_per_second", "engine mean", "{:.1f} samples/s"),
            Curve("engine/samples_per_second_min", "worst", "{:.1f} samples/s"),
        ),
    ),
)  # fmt: skip


def shown(metrics: Mapping[str, float]) -> Iterator[tuple[int, str, str, str]]:
    """Yield panel number, name, label and format of each metric that the panels show."""
    for number, panel in enumerate(PANELS, 1):
        for curve in panel.curves:
            for name, label in curve.labels(metrics.keys()).items():
                if isfinite(metrics[name]):
                    yield number, name, label, curve.form


def first_screen(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the values that the panels show, by names that sort in the order of the panels."""
    return {f"{SECTION}/{i:02} {label}": metrics[name] for i, name, label, _ in shown(metrics)}


def tensorboard_layout() -> dict[str, dict[str, list[object]]]:
    """Return the panels as custom scalars of TensorBoard, whose tags are regular expressions."""
    charts: dict[str, list[object]] = {}
    for number, panel in enumerate(PANELS, 1):
        tags = ["^" + re.escape(c.metric).replace(r"\*", ".*") + "$" for c in panel.curves]
        charts[f"{number:02} {panel.title}"] = ["Multiline", tags]
    return {SECTION: charts}

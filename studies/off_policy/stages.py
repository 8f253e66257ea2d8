"""The study of stale data: each objective at each lag, at its own best settings.

    python studies/off_policy/stages.py            # `make study`; runs what rows/lags.json lacks
    python studies/off_policy/stages.py --count    # only the number of runs, and the time
    python studies/off_policy/stages.py --draw     # only the figures and the table, from the rows

experiment.py says how. Lag 256 is the offline case: all 200 batches come from the first weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

from experiment import Experiment

DOCS = Path(__file__).parents[2] / "docs"
REWARD = {"objective.use": "tb", "objective.taper": "reward"}
OBJECTIVES = {
    "tb": {"objective.use": "tb", "objective.beta": 0.1, "objective.taper": "none"},
    "tb tapered": {"objective.use": "tb", "objective.beta": 0.1, "objective.taper": "residual"},
    "tb reward": {**REWARD, "objective.beta": 0.1},
    "tb shift": {**REWARD, "objective.beta": 0.03, "objective.shift": 0.5},
    "tba_prime": {"objective.use": "tba_prime", "objective.beta": 0.1},
    "rloo": {"objective.use": "rloo", "objective.beta": 0.1},
    "grpo": {"objective.use": "grpo", "objective.beta": 0.04},
    "dr_grpo": {"objective.use": "dr_grpo", "objective.beta": 0.0},
    "ppo": {"objective.use": "ppo", "objective.beta": 0.1, "objective.whiten": True},
    "oapl": {"objective.use": "oapl", "objective.beta": 0.001},
    "m2po": {"objective.use": "m2po"},
    "cispo": {"objective.use": "cispo"},
    "raft": {"objective.use": "raft"},
    "topr": {"objective.use": "topr"},
}
LAGS = Experiment(
    name="lags",
    condition="lag",
    objectives=OBJECTIVES,
    conditions={lag: {"runtime.lag": lag} for lag in (0, 4, 16, 64, 256)},
    seconds=14,
    betas=(0.01, 0.03),
    new_prompts=True,
    wider=3,
)


def draw(lags: Experiment) -> None:
    """Draw score against lag, each at its best settings, and score against rate at each lag.

    Rates that fall to 0 are dotted. What has not run at all lags is left out.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    conditions = list(lags.conditions)
    cells = {(objective, lag): rows for objective, lag, rows in lags.final()}
    drawn = [name for name in lags.objectives if all(cells[name, lag] for lag in conditions)]
    colors = dict(zip(drawn, pyplot.get_cmap("tab20").colors, strict=False))
    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for objective, color in colors.items():
        scores = [[row["score"] for row in cells[objective, lag]] for lag in conditions]
        axis.plot([fmean(s) for s in scores], marker="o", color=color, label=objective)
        low, high = ([limit(s) for s in scores] for limit in (min, max))
        axis.fill_between(range(len(conditions)), low, high, color=color, alpha=0.1)
    axis.set_xticks(range(len(conditions)), [str(lag) for lag in conditions])
    axis.set(xlabel="lag (steps)", ylabel="sampled pass@1 at its own best settings")
    axis.legend(fontsize=8)
    figure.savefig(DOCS / "staleness.png", dpi=130)
    figure, axes = pyplot.subplots(
        1, len(conditions), figsize=(3 * len(conditions), 3.4), sharey=True, layout="constrained"
    )
    tried = [row for row in lags.known() if row["stage"] != "table"]
    for axis, lag in zip(axes, conditions, strict=True):
        for objective, color in colors.items():
            found = lags.means(tried, objective, lag)
            for schedule, style in (("constant", "-"), ("linear", ":")):
                points = sorted(
                    (setting.rate, score)
                    for setting, score in found.items()
                    if setting.schedule == schedule and setting.beta is None
                )
                label = objective if schedule == "constant" else None
                axis.plot(*zip(*points, strict=True), style, marker=".", color=color, label=label)
        axis.set(xscale="log", xlabel="learning rate", title=f"lag {lag}")
    axes[0].set_ylabel("sampled pass@1")
    axes[0].legend(fontsize=7)
    figure.savefig(DOCS / "staleness_rates.png", dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", action="store_true", help="print the number of runs only")
    parser.add_argument("--draw", action="store_true", help="draw from the rows that are kept")
    options = parser.parse_args()
    if options.count:
        print(LAGS.count())
        return
    if not options.draw:
        LAGS.carry_out()
    draw(LAGS)
    print(LAGS.table())


if __name__ == "__main__":
    main()

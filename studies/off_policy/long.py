"""The long study: longer answers, graded rewards, replay, rounded weights, a real model.

    python studies/off_policy/long.py                   # `make study-long`; runs what rows/ lacks
    python studies/off_policy/long.py working replay    # only these experiments
    python studies/off_policy/long.py --count           # only the number of runs, and the time
    python studies/off_policy/long.py --draw            # only the tables and figures, from the rows

`working` asks whether answers of 40 tokens age faster than those of `make study`, which have 5.
`graded` has the share of right digits as the reward. `replay` asks what training on each response
1, 2, 4 and 8 times buys, per response generated and per FLOP of generation and training.
`quantised` samples from weights of 8 and 4 bits, without any correction but the objective's own.
`steps` asks whether small rates need more steps only. `others` has the objectives that `make study`
has no time for, and `alpha` other divergences than that of `tb`. `selection` asks whether prompts
of predicted difficulty are learned faster. `real` and `real_40_steps` need a model and data,
BENCH_MODEL and BENCH_DATA as docs/performance.md says, and are skipped without them. `redteam`
compares objectives by success and diversity in harmless red-teaming; it downloads its models unless
REDTEAM_MODEL and REDTEAM_ENCODER name folders. experiment.py says how each is run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from experiment import Experiment, Row, some
from stages import OBJECTIVES

DOCS = Path(__file__).parents[2] / "docs"
MIDDLE = (1e-5, 3e-5, 1e-4)
PROMPT = 8
ANSWER = 5
"""Tokens of a prompt and of an answer of the bundled task."""
PARAMETERS = 0.86e6
SCORES = (0.7, 0.8, 0.9)
"""Scores until which the responses of `replay` are counted."""

brief = partial(
    Experiment, rates=MIDDLE, search_seeds=(100,), seeds=(0, 1, 2), schedules=("constant",)
)
"""An experiment with three rates, one seed to search with, and three for the table."""


WORKING = brief(
    name="working",
    condition="lag",
    objectives=some(
        OBJECTIVES, "tb", "tb tapered", "rloo", "dr_grpo", "cispo", "oapl", "raft", "topr"
    ),
    conditions={lag: {"runtime.lag": lag} for lag in (0, 16, 256)},
    seconds=60,
    rates=(3e-6, *MIDDLE),
    given={
        "policy.model": "studies/off_policy/model",
        "task.use": "studies.off_policy.working.WrittenSums",
        "sampling.max_tokens": 48,
    },
)
GRADED = brief(
    name="graded",
    condition="lag",
    objectives={
        **some(OBJECTIVES, "tb tapered", "tb reward", "dr_grpo", "cispo", "raft", "topr"),
        "raft, threshold 1": {**OBJECTIVES["raft"], "objective.threshold": 1.0},
        "topr, baseline 0.8": {**OBJECTIVES["topr"], "objective.baseline": 0.8},
    },
    conditions={lag: {"runtime.lag": lag} for lag in (0, 64)},
    seconds=14,
    betas=(0.01, 0.03),
    given={"task.use": "studies.off_policy.graded.GradedSums"},
)
REPLAY = brief(
    name="replay",
    condition="updates per response",
    objectives=some(OBJECTIVES, "tb", "tb tapered", "dr_grpo", "oapl", "cispo"),
    conditions={n: {"runtime.fresh": 8 // n, "runtime.max_reuse": n + 1.0} for n in (1, 2, 4, 8)},
    seconds=25,
    given={"run.steps": 400},
)
"""A batch has the newest eight prompts, of which 8 / n are new: each response is in n batches."""
QUANTISED = brief(
    name="quantised",
    condition="bits",
    objectives={
        **some(OBJECTIVES, "tb", "tb tapered", "rloo", "dr_grpo", "cispo"),
        "rloo weighted": {**OBJECTIVES["rloo"], "objective.importance": "token"},
        **some(OBJECTIVES, "raft"),
    },
    conditions={
        bits: {"engine.use": "studies.off_policy.quantised.Quantised", "engine.bits": bits}
        for bits in (32, 8, 4)
    },
    seconds=20,
)
STEPS = brief(
    name="steps",
    condition="lag",
    objectives=some(OBJECTIVES, "tb", "tb tapered", "rloo", "oapl"),
    conditions={lag: {"runtime.lag": lag} for lag in (16, 64)},
    seconds=60,
    rates=(3e-6, 1e-5, 3e-5),
    given={"run.steps": 1000, "eval.every": 100},
)
"""Small rates with five times as many steps."""
OTHERS = brief(
    name="others",
    condition="lag",
    objectives={
        name: {"objective.use": name, **options}
        for name, options in {
            "tb_learned_z": {"objective.beta": 0.1, "objective.taper": "none"},
            "proximal_rloo": {},
            "vineppo": {
                "objective.rollouts": 9,
                "objective.whiten": True,
                "objective.step_tokens": 2,
            },
            "online_dpo": {"objective.beta": 0.1},
            "gspo": {},
            "vespo": {},
            "asymre": {},
        }.items()
    },
    conditions={lag: {"runtime.lag": lag} for lag in (0, 16, 64, 256)},
    seconds=20,
    rates=(3e-6, *MIDDLE),
)
ALPHA = brief(
    name="alpha",
    condition="lag",
    objectives={
        f"alpha {alpha:g}": {**OBJECTIVES["tb"], "objective.alpha": alpha}
        for alpha in (0.5, 0.75, 1.0, 1.25)
    },
    conditions={lag: {"runtime.lag": lag} for lag in (0, 16)},
    seconds=18,
    details=("pass@4",),
)
REAL = Experiment(
    name="real",
    condition="lag",
    base="real.toml",
    objectives={
        "tb tapered": {**OBJECTIVES["tb tapered"], "objective.beta": 0.03},
        **some(OBJECTIVES, "tb shift", "raft", "topr", "cispo", "dr_grpo"),
    },
    conditions={lag: {"runtime.lag": lag} for lag in (0, 4, 16)},
    seconds=500,
    rates=(3e-6, 1e-5, 3e-5),
    search_seeds=(0,),
    seeds=(1, 2, 3),
    schedules=("linear",),
    betas=(0.01, 0.1),
    wider=2,
)
REAL_40_STEPS = replace(
    REAL,
    name="real_40_steps",
    objectives=some(OBJECTIVES, "tb tapered", "dr_grpo", "cispo", "oapl", "raft"),
    seconds=200,
    seeds=(2, 3),
    schedules=("constant",),
    betas=(),
    given={
        "run.steps": 40,
        "task.held_out_size": 64,
        "trainer.warmup_steps": 5,
        "eval.every": 8,
        "eval.prompts": 64,
    },
)
"""The first study of the real model: constant rates, no search of beta, few held-out questions."""
SELECTION = Experiment(
    name="selection",
    condition="sums",
    objectives={
        name: {**OBJECTIVES["tb"], "selection.use": name, **options}
        for name, options in {
            "cyclic": {},
            "difficulty": {},
            "log_z": {"selection.beta": 0.1},
        }.items()
    },
    conditions={256: {"task.train_size": 256}},
    seconds=14,
    rates=MIDDLE,
    search_seeds=(100, 101),
    schedules=("constant",),
)
"""Each sum is used about six times."""
REDTEAM = brief(
    name="redteam",
    condition="task",
    base="../redteam/base.toml",
    objectives={
        "tb": {"objective.use": "tb", "objective.beta": 0.3, "sampling.explore": [0.7, 1.5]},
        "raft": {
            "objective.use": "raft",
            "objective.threshold": -1.0,
            "sampling.explore": [0.7, 1.5],
        },
        "dr_grpo": {"objective.use": "dr_grpo", "objective.beta": 0.0, "strategy.recent": 1.0},
    },
    conditions={"sad stories": {}},
    seconds=320,
    rates=(1e-4, 3e-4, 1e-3),
    schedules=("linear",),
    betas=(0.1, 1.0),
    details=("sampled_distance", "drop"),
    given={
        key: os.environ[name]
        for key, name in (
            ("policy.model", "REDTEAM_MODEL"),
            ("task.victim", "REDTEAM_MODEL"),
            ("task.encoder", "REDTEAM_ENCODER"),
        )
        if os.environ.get(name)
    },
)
"""`dr_grpo` trains on the newest groups only, and at the sampling temperature, as it needs to. The
reward is the mean log-probability of harm: `raft` accepts what counts as a success, attacks to
which both answers are harmful: 0, where one is, -1.5."""
EXPERIMENTS = {
    e.name: e
    for e in (
        WORKING,
        GRADED,
        REPLAY,
        QUANTISED,
        REAL,
        REAL_40_STEPS,
        STEPS,
        OTHERS,
        ALPHA,
        SELECTION,
        REDTEAM,
    )
}


def real(experiment: Experiment) -> Experiment | None:
    """Return an experiment with the real model and its data, if the environment names them."""
    if not os.environ.get("BENCH_MODEL") or not os.environ.get("BENCH_DATA"):
        print(f"{experiment.name}: skipped, because BENCH_MODEL and BENCH_DATA are not set")
        return None
    data = Path(os.environ["BENCH_DATA"]).expanduser().resolve()
    given = {
        "policy.model": str(Path(os.environ["BENCH_MODEL"]).expanduser().resolve()),
        "task.data": str(data / "two_number_sums.train.jsonl"),
        "task.held_out_data": str(data / "two_number_sums.test.jsonl"),
    }
    return replace(experiment, given={**(experiment.given or {}), **given})


def tflop(generated: float, trained: float, reference: bool) -> float:
    """Return the TFLOP of so many responses generated and trained on, counted once per use.

    2 per parameter and token to generate, as many for the reference's log-probs, and 6 to train.
    """
    each = 2 * PARAMETERS * (PROMPT + ANSWER)
    return each * ((1 + reference) * generated + 3 * trained) / 1e12


def mean_curve(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Return the responses trained on, and the mean score over seeds, at each evaluation."""
    points = []
    for step in rows[0]["curve"]:
        score = fmean(row["curve"].get(step, 0.0) for row in rows)
        points.append((64.0 * int(step), score))
    return points


def responses_to(score: float, known: Sequence[Row], objective: str, updates: int) -> float | None:
    """Return the responses generated until the mean curve at some rate has a score; None if never.

    It is the best of all rates of the search: what is best at the end is not the fastest.
    """
    by_rate: dict[float, list[Row]] = {}
    for row in known:
        of = (row["objective"], row["condition"], row["stage"])
        if of == (objective, updates, "rates"):
            by_rate.setdefault(row["rate"], []).append(row)
    reached = []
    for rows in by_rate.values():
        points = [(trained / updates, value) for trained, value in mean_curve(rows)]
        for (before, low), (after, high) in pairwise(points):
            if low < score <= high:
                reached.append(before + (after - before) * (score - low) / (high - low))
                break
    return min(reached, default=None)


def savings() -> str:
    """Return what replay saves at each of `SCORES`, as a table: objective x updates.

    A cell has the factor by which fewer responses are generated. Below it: the price of a
    response, in units of training on one once, above which that is worth the training.
    """
    if not all(rows for _, _, rows in REPLAY.final()):
        return "Not run yet: `make study-long`."
    known = REPLAY.known()
    more = [int(n) for n in REPLAY.conditions if n != 1]
    heads = " | ".join(f"{n} {REPLAY.condition}" for n in more)
    lines = [f"| objective | {heads} |", "| --- |" + " --- |" * len(more)]
    for objective in REPLAY.objectives:
        cells = " | ".join(saving(known, objective, n) for n in more)
        lines.append(f"| {objective} | {cells} |")
    return "\n".join(lines)


def saving(known: Sequence[Row], objective: str, updates: int) -> str:
    """Return a cell of `savings`, from all rows."""
    factors = []
    prices = []
    for score in SCORES:
        without = responses_to(score, known, objective, 1)
        fewer = responses_to(score, known, objective, updates)
        if without is None or fewer is None:
            factors.append("never")
            prices.append("-")
            continue
        saved = without - fewer
        factors.append(f"{without / fewer:.1f}")
        prices.append(f"{max(0, updates * fewer - without) / saved:.1f}" if saved > 0 else "never")
    return f"{' · '.join(factors)}<br><small>price {' · '.join(prices)}</small>"


def draw_replay() -> None:
    """Draw the score against responses generated and against FLOPs, for each objective."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(REPLAY.objectives)
    figure, axes = pyplot.subplots(
        2, len(names), figsize=(3 * len(names), 6), sharey=True, layout="constrained"
    )
    for objective, updates, rows in REPLAY.final():
        column = axes[:, names.index(objective)]
        has_reference = objective not in ("dr_grpo", "cispo", "oapl")
        trained, scores = zip(*mean_curve(rows)[1:], strict=True)
        generated = [responses / int(updates) for responses in trained]
        spent = [tflop(g, t, has_reference) for g, t in zip(generated, trained, strict=True)]
        for axis, values in zip(column, (generated, spent), strict=True):
            axis.plot(values, scores, marker=".", label=f"{updates}")
        column[0].set(title=objective, xlabel="responses generated", xscale="log")
        column[1].set(xlabel="TFLOP of generation and training")
    axes[0][0].legend(title="updates per response", fontsize=8)
    axes[0][0].set_ylabel("sampled pass@1")
    figure.savefig(DOCS / "replay_per_compute.png", dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("experiments", nargs="*", choices=[*EXPERIMENTS, []], default=[])
    parser.add_argument("--count", action="store_true", help="print the number of runs only")
    parser.add_argument("--draw", action="store_true", help="draw from the rows that are kept")
    options = parser.parse_args()
    for name in options.experiments or EXPERIMENTS:
        experiment = EXPERIMENTS[name]
        if options.count:
            print(experiment.count())
            continue
        is_real = name.startswith("real") and not options.draw
        whole = real(experiment) if is_real else experiment
        if whole is not None and not options.draw:
            whole.carry_out()
        if experiment.known():
            print(experiment.table())
    if not options.count and all(rows for _, _, rows in REPLAY.final()):
        draw_replay()


if __name__ == "__main__":
    main()

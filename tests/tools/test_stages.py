"""The experiments of the study: what each stage runs, from the scores of the one before."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.config.plugins import resolved
from tba.prompt import Answer
from tba.tools.study import read_study

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "studies" / "off_policy"


@pytest.fixture
def experiments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The experiments of `make study` and `make study-long`, by name."""
    monkeypatch.syspath_prepend(str(STUDY))
    long = importlib.import_module("long")
    return {"lags": importlib.import_module("stages").LAGS, **long.EXPERIMENTS}


@pytest.fixture
def small(experiments: dict[str, Any]) -> Any:
    objectives: dict[str, dict[str, Any]] = {name: {} for name in ("tb", "rloo", "grpo")}
    return replace(experiments["lags"], objectives=objectives, conditions={0: {}, 4: {}})


def setting(objective: str, condition: int, rate: float, schedule: str = "constant") -> Any:
    return importlib.import_module("experiment").Setting(objective, condition, rate, schedule)


def row(objective: str, condition: int, rate: float, score: float, **others: Any) -> dict[str, Any]:
    cell = {"objective": objective, "condition": condition, "rate": rate, "schedule": "constant"}
    curve = {"0": 0.25, "100": 0.875, "25": 0.5}
    return {"stage": "rates", **cell, "seed": 0, "score": score, "curve": curve} | others


NAMES = (
    "lags graded replay quantised others alpha selection steps working real real_40_steps redteam"
)


@pytest.mark.parametrize("name", NAMES.split())
def test_every_setting_of_the_first_stage_is_a_config(experiments, name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    experiment = experiments[name]
    if name.startswith("real"):
        given = {"policy.model": "bundled:arithmetic", "task.data": "rows.jsonl"}
        experiment = replace(experiment, given={**(experiment.given or {}), **given})
    settings = [setting(*cell, rate) for cell in experiment.cells() for rate in experiment.rates]
    file = tmp_path / "rates.toml"
    runs = [(each, seed) for each in settings for seed in experiment.search_seeds]
    file.write_text(experiment.text("rates", tmp_path, runs))
    study = read_study(file)
    assert len(study.trials) == len(settings) * len(experiment.search_seeds)
    assert f"({len(study.trials)} for rates, " in experiment.count()
    labels = {trial.axes["variant"] for trial in study.trials}
    assert labels == {f"{s.label}, seed {n}" for s in settings for n in experiment.search_seeds}
    for trial in study.trials[::11]:
        config = study.config(trial)
        resolved(config, ["objective"])[0].at(0)
        found = f", {config.trainer.learning_rate:g}, constant, seed {config.run.seed}"
        assert str(trial.axes["variant"]).endswith(found)


def test_the_table_is_of_other_prompts_than_the_search(experiments, tmp_path):
    lags = experiments["lags"]
    runs = [(setting("tb", 4, 1e-5), seed) for seed in (3, 5)]
    for stage in ("rates", "table"):
        file = tmp_path / f"{stage}.toml"
        file.write_text(lags.text(stage, tmp_path, runs))
        study = read_study(file)
        configs = [study.config(trial) for trial in study.trials]
        assert [c.run.seed for c in configs] == [3, 5]
        seeds = [c.task.options.get("seed", 0) for c in configs]
        assert seeds == ([3, 5] if stage == "table" else [0, 0])


def test_the_study_has_fourteen_objectives_at_five_lags_and_five_rates(experiments):
    """Ten have a beta: two others are tried, and with the best one five rates and schedules."""
    count = experiments["lags"].count()
    assert "2030 runs (700 for rates, 280 for schedules, 700 for betas, 350 for the table)" in count


def test_a_seed_that_is_added_is_one_more_row(small, monkeypatch, tmp_path):
    """The rows of the others are not there twice."""
    monkeypatch.setattr(importlib.import_module("experiment"), "ROWS", tmp_path)
    monkeypatch.setattr(type(small), "made", ended)
    for seeds in ((0, 1), (0, 1, 2)):
        kept = small.run("rates", [setting("tb", 0, 1e-5)], seeds)
    assert [each["seed"] for each in kept] == [0, 1, 2]


def ended(experiment: Any, stage: str, runs: list[tuple[Any, int]]) -> list[dict[str, Any]]:
    """Rows of runs, as if all had ended."""
    return [row(s.objective, s.condition, s.rate, 0.5, seed=seed) for s, seed in runs]


def test_an_interrupted_cell_keeps_the_rows_of_runs_that_ended(small, monkeypatch, tmp_path):
    """The next call makes the other runs of the cell only."""
    monkeypatch.setattr(importlib.import_module("experiment"), "ROWS", tmp_path)
    monkeypatch.setattr(type(small), "made", lambda *given: ended(*given)[:2])
    settings = [setting("tb", 0, rate) for rate in (1e-5, 3e-5)]
    with pytest.raises(SystemExit, match="2 runs have not ended; the rows of the others are kept"):
        small.run("rates", settings, (1, 2))
    assert [(r["rate"], r["seed"]) for r in small.known()] == [(1e-5, 1), (1e-5, 2)]
    asked = []
    monkeypatch.setattr(type(small), "made", lambda *given: asked.extend(given[2]) or ended(*given))
    assert len(small.run("rates", settings, (1, 2))) == len(small.known()) == 4
    assert asked == [(settings[1], 1), (settings[1], 2)]


def test_only_runs_that_the_rows_lack_are_made(small, monkeypatch, tmp_path):
    """The rows are kept after each cell: a second call makes what is missing."""
    monkeypatch.setattr(importlib.import_module("experiment"), "ROWS", tmp_path)
    made = []

    def carry_out(self: Any, stage: str, runs: list[tuple[Any, int]]) -> list[dict[str, Any]]:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append((runs[0][0].objective, runs[0][0].condition))
        return ended(self, stage, runs)

    monkeypatch.setattr(type(small), "made", carry_out)
    settings = [setting(*cell, rate) for cell in small.cells() for rate in (1e-5, 3e-5)]
    for pair in (("tb", 0), ("rloo", 0)), (("grpo", 0), ("tb", 4)):
        with pytest.raises(KeyboardInterrupt):
            small.run("rates", settings, (1, 2))
        assert tuple(made) == pair
        made.clear()
    rows = small.run("rates", settings, (1, 2))
    assert made == [("rloo", 4), ("grpo", 4)]
    assert len(rows) == len(small.known()) == 3 * 2 * 2 * 2
    assert small.run("rates", settings, (1, 2)) == rows


def test_the_best_has_the_highest_mean_and_the_lowest_rate_of_equals(small):
    """A run that failed has score 0: it counts, and is not left out."""
    scores = {1e-5: (0.5, 0.7), 3e-5: (0.9, 0.0), 3e-6: (0.6,)}
    rows = [row("tb", 4, rate, score) for rate, own in scores.items() for score in own]
    rows += [row("tb", 16, 1e-4, 0.9), row("rloo", 4, 1e-4, 0.9)]
    assert [s.rate for s in small.ranked(rows, "tb", 4)] == [3e-6, 1e-5, 3e-5]


def test_a_best_rate_at_the_edge_widens_the_grid(small):
    """Downwards, upwards, and not at all."""
    one = replace(small, conditions={0: {}})
    rows = []
    for objective, best in (("tb", 3e-6), ("rloo", 3e-4), ("grpo", 3e-5)):
        rows += [row(objective, 0, rate, float(rate == best)) for rate in one.rates]
    found = [(s.objective, s.rate, s.schedule) for s in one.beyond(rows, "rate", one.cells())]
    assert found == [("tb", 1e-6, "constant"), ("rloo", 1e-3, "constant")]


def test_decay_is_tried_at_higher_rates_until_it_is_no_longer_better(small, monkeypatch):
    """Constant rates are best at 3e-5, and falling ones at 3e-4."""
    one = replace(small, objectives={"tb": {}}, conditions={0: {}})
    asked = {}

    def run(self: Any, stage: str, settings: list[Any], seeds: Any) -> list[dict[str, Any]]:
        asked[stage] = [s.rate for s in settings]
        best = 3e-5 if stage == "rates" else 3e-4
        of = [(s, (s.rate == 3e-4) - abs(np.log(s.rate / best))) for s in settings]
        return [row("tb", 0, s.rate, score, schedule=s.schedule) for s, score in of]

    monkeypatch.setattr(type(one), "run", run)
    one.carry_out()
    assert asked["schedules"] == [3e-5, 1e-5, 1e-4, 3e-4, 1e-3]
    assert asked["table"] == [3e-4]


def test_beta_is_searched_at_the_best_rate_and_the_rate_again_at_a_better_beta(small, monkeypatch):
    """An objective without beta, and one whose own beta is best, are not run again."""
    objectives = {"tb": {"objective.beta": 0.1}, "rloo": {"objective.beta": 0.1}, "raft": {}}
    one = replace(small, objectives=objectives, conditions={0: {}}, betas=(0.01, 0.03))
    best = {"tb": (1e-4, 0.003), "rloo": (3e-5, 0.1), "raft": (3e-5, 0.0)}
    asked = []

    def run(self: Any, stage: str, settings: list[Any], seeds: Any) -> list[dict[str, Any]]:
        asked.extend(s for s in settings if stage == "betas" and s not in asked)
        found = []
        for s in settings:
            rate, beta = best[s.objective]
            far = abs(np.log(s.rate / rate)) + abs(np.log((self.beta_of(s) + 1) / (beta + 1)))
            line = {"schedule": s.schedule, "beta": s.beta}
            found.append(row(s.objective, 0, s.rate, -far, stage=stage, **line))
        return found

    monkeypatch.setattr(type(one), "run", run)
    tried = one.by_turns(one.run("rates", [setting(*c, 3e-5) for c in one.cells()], (0,)))
    tb = [(s.rate, s.beta) for s in asked if s.objective == "tb"]
    first = [(3e-5, beta) for beta in (0.01, 0.03, 0.003, 0.001)]
    near = [(rate, 0.003) for rate in (1e-5, 1e-4, 3e-5)]
    assert tb == [*first, *near[:1] * 2, *near[1:2] * 2, *near[2:], (3e-4, 0.003)]
    assert [s.beta for s in asked if s.objective == "rloo"] == [0.01, 0.03, 0.3]
    assert not any(s.objective == "raft" for s in asked)
    ranked = one.ranked(tried, "tb", 0)[0]
    assert (ranked.rate, ranked.beta, ranked.label) == (
        1e-4,
        0.003,
        "tb, beta 0.003, 0, 0.0001, constant",
    )


def test_the_table_has_each_objective_under_each_condition(small, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.import_module("experiment"), "ROWS", tmp_path)
    given = {"stage": "table", "ess": 0.25, "drop": None}
    cells = [cell for cell in small.cells() if cell != ("grpo", 4)]
    small.keep([row(*c, 1e-5, 0.5 + n / 100, seed=n, **given) for c in cells for n in range(5)])
    lines = small.table().splitlines()
    assert lines[0] == "| objective | lag 0 | lag 4 |"
    cell = "52.0 ± 0.7<br><small>1e-05 constant, ess 0.25, last 87.5</small>"
    assert lines[2].startswith(f"| tb | {cell} |")
    assert lines[4].endswith("| not run |")


def test_a_cell_of_the_table_that_has_not_run_shows_the_best_of_the_search(
    small, monkeypatch, tmp_path
):
    monkeypatch.setattr(importlib.import_module("experiment"), "ROWS", tmp_path)
    assert small.table() == "Not run yet: `make study-long`."
    scores = {1e-5: (0.5, 0.7), 3e-5: (0.4, 0.6)}
    rows = [row("tb", 0, r, s, seed=i) for r in scores for i, s in enumerate(scores[r])]
    small.keep([*rows, row("rloo", 4, 1e-5, 0.5)])
    cell = "60.0 ± 10.0 †<br><small>1e-05 constant, last 87.5</small>"
    assert f"| tb | {cell} | not run |" in small.table()
    assert "grpo" not in small.table()  # it has no row
    small.keep(rows)
    assert small.table().startswith("| objective | lag 0 |\n")


def test_written_working_is_right_if_its_last_part_is():
    from studies.off_policy.working import WrittenSums

    task = WrittenSums(held_out_size=4, train_size=4)
    prompt = task.prompts()[0]
    right = prompt.columns["answer"]
    texts = [f"7+6+0=13;{right}", right, f"{right};7", "7+6+0=13;"]
    answers = [Answer(text, finished=True) for text in texts]
    assert task.score(prompt, answers) == [1, 1, 0, 0]
    assert task.score(prompt, [Answer(texts[0], finished=False)]) == [0]


def test_the_model_of_written_working_shows_each_column():
    model = AutoModelForCausalLM.from_pretrained(STUDY / "model")
    tokenizer = AutoTokenizer.from_pretrained(STUDY / "model")
    ids = tokenizer("1487+2536=", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(ids, max_new_tokens=48, do_sample=False)[0])
    assert text.startswith("1487+2536=7+6+0=13;8+3+")


def test_replay_saves_responses_and_costs_training(experiments, monkeypatch):
    """Means over seeds at 64 responses a step; the fastest of the rates that were tried counts."""
    slow = {"0": 0.5, "100": 0.9}
    rows = [
        row("tb", 1, 1e-5, 0.9, curve=slow),
        row("tb", 1, 3e-5, 0.9, curve={"0": 0.4, "50": 0.8}) | {"seed": 1},
        row("tb", 1, 3e-5, 0.9, curve={"0": 0.6, "50": 1.0}),
        row("tb", 4, 1e-5, 0.9, curve=slow),
        row("tb", 8, 1e-5, 0.7, curve={"0": 0.5, "100": 0.75}),
    ]
    long = importlib.import_module("long")
    monkeypatch.setattr(long, "SCORES", (0.7, 0.8))
    found = [long.responses_to(0.7, rows, "tb", n) for n in (1, 4, 8)]
    assert found == pytest.approx([25 * 64, 50 * 64 / 4, 80 * 64 / 8])
    # of 1,600 responses 800 are saved, for as many more to train on: 3,200 instead of 1,600
    assert long.saving(rows, "tb", 4) == "2.0 · 2.0<br><small>price 2.0 · 2.0</small>"
    assert long.saving(rows, "tb", 8) == "2.5 · never<br><small>price 3.7 · -</small>"

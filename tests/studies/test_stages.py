"""The stages of the study of stale data: what each runs, from the scores of the one before."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import module_at

from tba.config.plugins import resolve_all
from tba.studies.study import read_study

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def stages() -> ModuleType:
    return module_at(ROOT / "studies" / "off_policy" / "stages.py")


def row(objective: str, lag: int, rate: float, score: float, **others: Any) -> dict[str, Any]:
    setting = {"objective": objective, "lag": lag, "rate": rate, "schedule": "constant"}
    return {"stage": "rates", **setting, "seed": 0, "score": score, **others}


def test_every_setting_of_the_first_stage_is_a_config(stages: ModuleType, tmp_path: Path) -> None:
    settings = [stages.Setting(*c, rate) for c in stages.cells() for rate in stages.RATES]
    file = tmp_path / "rates.toml"
    file.write_text(stages.text_of("rates", tmp_path, settings, stages.SEARCH_SEEDS))
    study = read_study(file)
    assert len(study.trials) == len(stages.OBJECTIVES) * 5 * 5 * 2 == 500
    assert stages.count().startswith("500 runs for rates, 200 for schedules, 250 for the table")
    labels = {setting.label for setting in settings}
    assert {trial.axes["variant"] for trial in study.trials} == labels
    for trial in study.trials[::7]:
        config = study.config(trial)
        resolve_all(config).objective.at(0)
        found = f"lag {config.runtime.lag}, {config.trainer.learning_rate:g}, constant"
        assert str(trial.axes["variant"]).endswith(found)
        assert config.run.steps == 200


def test_only_runs_that_the_rows_lack_are_made(
    stages: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rows are kept after each objective at a lag: a second call makes what is missing."""
    monkeypatch.setattr(stages, "ROWS", tmp_path / "staleness.json")
    monkeypatch.setattr(stages, "LAGS", (0, 4))
    monkeypatch.setattr(stages, "OBJECTIVES", {"tb": {}, "rloo": {}})
    made = []

    def carry_out(stage: str, settings: list[Any], seeds: list[int]) -> list[dict[str, Any]]:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append((settings[0].objective, settings[0].lag))
        return [row(s.objective, s.lag, s.rate, 0.5, seed=n) for s in settings for n in seeds]

    monkeypatch.setattr(stages, "carry_out", carry_out)
    settings = [stages.Setting(*cell, rate) for cell in stages.cells() for rate in (1e-5, 3e-5)]
    with pytest.raises(KeyboardInterrupt):
        stages.run("rates", settings, (1, 2))
    assert made == [("tb", 0), ("rloo", 0)]
    del made[:]
    rows = stages.run("rates", settings, (1, 2))
    assert made == [("tb", 4), ("rloo", 4)]
    assert len(rows) == len(stages.known()) == 2 * 2 * 2 * 2
    assert stages.run("rates", settings, (1, 2)) == rows


def test_the_best_has_the_highest_mean_and_the_lowest_rate_of_equals(stages: ModuleType) -> None:
    """A run that failed has score 0: it counts, and is not left out."""
    rows = [
        row("tb", 4, 1e-5, 0.5),
        row("tb", 4, 1e-5, 0.7),
        row("tb", 4, 3e-5, 0.9),
        row("tb", 4, 3e-5, 0.0),
        row("tb", 4, 3e-6, 0.6),
        row("tb", 16, 1e-4, 0.9),
        row("rloo", 4, 1e-4, 0.9),
    ]
    assert [s.rate for s in stages.ranked(rows, "tb", 4)] == [3e-6, 1e-5, 3e-5]


def test_a_best_rate_at_the_edge_widens_the_grid(
    stages: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Downwards, upwards, and not at all."""
    monkeypatch.setattr(stages, "LAGS", (0,))
    monkeypatch.setattr(stages, "OBJECTIVES", {name: {} for name in ("tb", "rloo", "grpo")})
    rows = []
    for objective, best in (("tb", 3e-6), ("rloo", 3e-4), ("grpo", 3e-5)):
        rows += [row(objective, 0, rate, float(rate == best)) for rate in stages.RATES]
    found = [(s.objective, s.rate, s.schedule) for s in stages.wider(rows)]
    assert found == [("tb", 1e-6, "constant"), ("rloo", 1e-3, "constant")]


def test_the_table_has_each_objective_at_each_lag(stages: ModuleType) -> None:
    rows = [
        row(name, lag, 1e-5, 0.5 + seed / 100, stage="table", ess=0.25, drop=None)
        for name in stages.OBJECTIVES
        for lag in stages.LAGS
        for seed in range(5)
    ]
    lines = stages.table(rows).splitlines()
    assert len(lines) == 2 + len(stages.OBJECTIVES)
    assert lines[2].startswith("| tb | 52.0 ± 0.7<br><small>1e-05 constant, ess 0.25</small> |")

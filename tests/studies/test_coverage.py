"""The study of coverage: its task, what it measures, and how it searches."""

from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from studies.coverage import measure
from studies.coverage.pairs import HELD_OUT, SUMS, Pairs
from studies.coverage.study import COVERAGE, FOUND_BY, PARTS, Coverage, Row, Setting
from studies.off_policy.experiment import key_of
from tba.config.plugins import resolved
from tba.config.schema import load
from tba.open import run
from tba.prompt import Answer, Prompt
from tba.runs.folder import METRICS, read
from tba.tools.study import read_study

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "studies" / "coverage" / "model"


def test_two_numbers_of_two_digits_are_right():
    prompt = Prompt("57", "57=", {"sum": 57})
    answers = {
        "30+27": 1.0, "47+10": 1.0, "10+47": 1.0, "30+28": 0.0, "50+7": 0.0, "07+50": 0.0,
        "30+27=57": 0.0, "": 0.0,
    }  # fmt: skip
    found = Pairs().score(prompt, [Answer(text, True) for text in answers])
    assert found == list(answers.values())
    assert Pairs().score(prompt, [Answer("30+27", False)]) == [0.0]


def test_each_sum_has_many_right_answers_and_none_is_in_both_parts():
    assert {p.text for p in Pairs().prompts()} | {p.text for p in Pairs().held_out()} == {
        f"{n}=" for n in SUMS
    }
    assert len(Pairs().prompts()) == 105 and len(HELD_OUT) == 34
    counts = {n: len([a for a in range(10, 100) if 10 <= n - a <= 99]) for n in SUMS}
    assert (min(counts.values()), max(counts.values())) == (21, 90)
    assert measure.right().sum(1).tolist() == [counts[n] for n in HELD_OUT]


def test_the_log_probs_of_strings_are_those_of_the_model():
    """And those that are not followed are less likely than the bound."""
    among = torch.ones_like(measure.right()[:2])
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    text = AutoTokenizer.from_pretrained(MODEL)
    most = 1e-5
    found = measure.grammar(MODEL, among, most)
    right = measure.grammar(MODEL, measure.right()[:2], most)
    for row, only, n in zip(found, right, HELD_OUT, strict=False):
        best, last = row.argmax().item(), len(measure.strings()) - 1
        for place in (best, 0, 4050, last):
            answer = measure.strings()[place]
            ids = text(f"{n}={answer}", return_tensors="pt").input_ids
            ids = torch.cat([ids, torch.tensor([[text.eos_token_id]])], 1)
            with torch.no_grad():
                logp = model(ids).logits[0, :-1].double().log_softmax(-1)
            whole = logp.gather(1, ids[0, 1:, None])[len(f"{n}=") - 1 :].sum().item()
            if row[place] > log(measure.UNLIKELY):
                assert row[place].item() == pytest.approx(whole, abs=1e-3)
            else:
                assert whole < log(most)
        assert row[best] > log(measure.UNLIKELY)
        is_right = measure.right()[HELD_OUT.index(n)]
        torch.testing.assert_close(only[is_right], row[is_right], atol=1e-4, rtol=0)
        assert (only[~is_right] == log(measure.UNLIKELY)).all()


def spread(masses: Sequence[float]) -> torch.Tensor:
    """Return log-probs that give these masses to the first right answers of each sum."""
    logp = torch.full(measure.right().shape, log(measure.UNLIKELY), dtype=torch.double)
    for row, is_right in zip(logp, measure.right(), strict=True):
        places = torch.where(is_right)[0][: len(masses)]
        row[places] = torch.tensor(masses, dtype=torch.double).log()
    return logp


def test_what_is_measured_by_hand():
    """The reference has two right answers of .2 and .3, the policy .6 and .2 of the same."""
    ref, policy = spread([0.2, 0.3]), spread([0.6, 0.2])
    found = measure.exact(policy, ref)
    entropy, before = (-sum(p * log(p) for p in ps) for ps in ((0.75, 0.25), (0.4, 0.6)))
    kl = 0.6 * log(3) + 0.2 * log(2 / 3) + 0.2 * log(0.2 / 0.5)
    z = 0.5 * exp(10) + 0.5
    star = [0.2 * exp(10) / z, 0.3 * exp(10) / z, 0.5 / z]
    wanted = {
        "pass": 0.8,
        "effective": exp(entropy - before),
        "distinct": 2 - 0.4**64 - 0.8**64,
        "regularised": 0.8 - 0.1 * kl,
        "tv": sum(abs(p - t) for p, t in zip((0.6, 0.2, 0.2), star, strict=True)) / 2,
        "kl": sum(p * log(p / t) for p, t in zip((0.6, 0.2, 0.2), star, strict=True)),
    }
    assert found == pytest.approx(wanted, abs=1e-6)
    at_target = measure.exact(spread(star[:2]), ref)
    assert at_target["tv"] < 1e-6 and abs(at_target["kl"]) < 1e-6
    # nothing has a larger E r - beta KL
    assert at_target["regularised"] == pytest.approx(0.1 * log(z), abs=1e-6)
    assert at_target["regularised"] > found["regularised"]


@pytest.mark.parametrize("whole", PARTS.values(), ids=PARTS)
def test_every_setting_is_a_config(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    every = [Setting(*cell, 1e-4, "linear") for cell in whole.cells()]
    file = tmp_path / "study.toml"
    file.write_text(
        whole.text("rates", tmp_path, [(each, whole.search_seeds[0]) for each in every])
    )
    study = read_study(file)
    assert len(study.trials) == len(every) and study.table.keep_checkpoints
    for trial in study.trials[::7]:
        config = study.config(trial)
        resolved(config, ["objective"])[0].at(0)
        assert trial.label.startswith(config.objective.use[:2])
        assert config.checkpoint.keep * config.checkpoint.every == config.run.steps


def test_half_of_a_mixed_batch_is_of_the_first_weights(tmp_path):
    config = load(
        ROOT / "studies" / "coverage" / "base.toml",
        [
            "engine.use=studies.coverage.mixed.HalfFirst", "runtime.lag=0", "objective.use=raft",
            "run.steps=4", "trainer.warmup_steps=1", "eval.every=0", "checkpoint.every=0",
            f"run.folder={tmp_path}/run", f"policy.model={MODEL}",
        ],
    )  # fmt: skip
    assert config.eval.samples != config.sampling.samples  # the engine tells them apart by this
    run(config)
    rows = [row for row in read(tmp_path / "run" / METRICS) if "loss" in row]
    assert [row["off_policy/lag_mean"] for row in rows] == [0, 0.5, 1, 1.5]
    assert [row["off_policy/lag_max"] for row in rows] == [0, 1, 2, 3]


class Known(Coverage):
    """Runs whose numbers are known: reward is best at beta .03, and spread at beta .3."""

    def made(self, stage: str, runs: Sequence[tuple[Setting, int]]) -> list[Row]:
        rows = []
        for setting, seed in runs:
            has_beta = "objective.beta" in self.objectives[setting.objective]
            beta = max(1e-3, self.beta_of(setting)) if has_beta else 1
            off = abs(log(setting.rate / (3e-4 if beta < 0.1 else 1e-4)))
            numbers = {
                "pass": 0.9 - 0.01 * off - 0.1 * abs(log(beta / 0.03)),
                "regularised": 0.8 - 0.01 * off - 0.1 * abs(log(beta / 0.3)),
            }
            own: dict[str, Any] = {
                "stage": stage,
                **vars(setting),
                **numbers,
                "coverage": {"200": {}},
            }
            rows.append({**own, "seed": seed, "effective": 0.5, "distinct": 9, "tv": 0.1})
        return rows


def test_the_search_is_by_turns_and_once_for_each_number(tmp_path):
    """First rates, then betas at the best of them, then rates with the best beta."""
    objectives = {name: COVERAGE.objectives[name] for name in ("tb reward", "raft")}
    one = replace(COVERAGE, conditions={0: {}}, objectives=objectives)
    study = Known(**{**vars(one), "folder": tmp_path})
    study.carry_out()
    rows = study.known()
    tables = {(r["objective"], r["beta"], r["rate"]) for r in rows if r["stage"] == "table"}
    assert tables == {
        ("tb reward", 0.03, 3e-4), ("tb reward", 0.3, 1e-4), ("raft", None, 1e-4),
    }  # fmt: skip
    seeds = {r["seed"] for r in rows if r["stage"] == "table"}
    assert seeds == {0, 1, 2} and {r["seed"] for r in rows if r["stage"] != "table"} == {100}
    assert {r["schedule"] for r in rows} == {"linear"}
    tried = {r["rate"] for r in rows if r["beta"] == 0.03} - {3e-4, 1e-4}
    assert {1e-3, 3e-5} & tried
    assert "0.900 ± 0.000 / 0.50 / 9.0 / 0.10<br><small>beta 0.03 0.0003</small>" in study.tables()
    kept = study.rows.read_text()
    study.carry_out()  # nothing is run again
    assert study.rows.read_text() == kept
    assert set(FOUND_BY) <= rows[0].keys()


def test_differences_are_by_seed_at_the_settings_of_each_number(tmp_path):
    """raft has one setting by pass rate and another by E r - beta KL; topr has one of the seeds."""
    shown = {"pass": 0.5, "regularised": 0.5, "coverage": {"200": {}}}
    rows = [
        {"stage": stage, **vars(Setting(name, 0, rate, "linear")), "seed": seed, **shown, **own}
        for stage, name, rate, seed, own in (
            ("rates", "tb shift", 1e-4, 100, {}),
            ("table", "tb shift", 1e-4, 0, {"pass": 0.90, "regularised": 0.80}),
            ("table", "tb shift", 1e-4, 1, {"pass": 0.94, "regularised": 0.82}),
            ("rates", "raft", 1e-4, 100, {"regularised": 0.7}),
            ("rates", "raft", 1e-3, 100, {"pass": 0.7}),
            ("table", "raft", 1e-3, 1, {"pass": 0.95}),
            ("table", "raft", 1e-3, 0, {"pass": 0.93}),
            ("table", "raft", 1e-4, 0, {"regularised": 0.78}),
            ("table", "raft", 1e-4, 1, {"regularised": 0.80}),
            ("rates", "dr_grpo", 1e-4, 100, {}),
            ("rates", "topr", 1e-4, 100, {}),
            ("table", "topr", 1e-4, 1, {"pass": 0.91, "regularised": 0.83}),
        )
    ]
    study = replace(COVERAGE, folder=tmp_path)
    study.keep(rows)
    # by pass rate, raft is .03 and .01 ahead
    assert study.differences().splitlines()[0] == "| objective | lag 0 |"
    assert study.differences().splitlines()[2:] == [
        "| topr | 0.030 / -0.010 |",
        "| raft | -0.020 ± 0.010 / 0.020 ± 0.000 |",
    ]


def test_the_study_continues_from_the_rows_that_are_kept(tmp_path):
    """None of its runs is made again."""
    kept = COVERAGE.known()
    has = {(row["stage"], key_of(row), row["seed"]) for row in kept}
    (tmp_path / COVERAGE.rows.name).write_text(COVERAGE.rows.read_text())
    asked = []

    class Recorded(Known):
        def made(self, stage: str, runs: Sequence[tuple[Setting, int]]) -> list[Row]:
            asked.extend((stage, key_of(vars(s)), seed) for s, seed in runs)
            return super().made(stage, runs)

    objectives = {name: COVERAGE.objectives[name] for name in {r["objective"] for r in kept}}
    conditions = {lag: COVERAGE.conditions[lag] for lag in {row["condition"] for row in kept}}
    one = replace(COVERAGE, objectives=objectives, conditions=conditions)
    study = Recorded(**{**vars(one), "folder": tmp_path})
    study.carry_out()
    assert asked and not has & {*asked}
    assert len(kept) > 20 and study.known()[: len(kept)] == kept
    raft = {(stage, key[1], seed) for stage, key, seed in asked if key[0] == "raft"}
    assert not any(stage == "rates" for stage, _, _ in raft)


@pytest.mark.slow
def test_a_curve_has_all_strings_at_its_end_only():
    """The same model at two steps: pass rate and spread agree, and its own KL is 0."""
    whole = torch.ones_like(measure.right())
    ref = measure.grammar(MODEL, whole, least=1e-6)
    first, last = measure.curve({1: MODEL, 2: MODEL}, ref).values()
    for name in ("pass", "effective", "distinct", "regularised"):
        assert first[name] == pytest.approx(last[name], abs=1e-3)
    assert 0.4 < last["pass"] < 0.6  # about half of the samples are right
    assert last["regularised"] == pytest.approx(last["pass"], abs=1e-3)
    assert "tv" not in first and last["tv"] > 0.4

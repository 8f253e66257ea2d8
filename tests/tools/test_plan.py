"""The plan of a run: closed forms, and beside measured runs of the scripted engine."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from build import config, ray_config

from tba.cli import main
from tba.config.plugins import with_defaults
from tba.config.schema import Config, load
from tba.open import run
from tba.runs.folder import METRICS, read
from tba.setup.machine import Machine
from tba.setup.setup import check
from tba.tools.check import dry_run
from tba.tools.plan import (
    Rates,
    forecast,
    groups_a_step,
    measured_in,
    measured_search,
    measured_training,
    plan,
    rates_of,
)

LATENCY = 0.5
"""Seconds of a search of the scripted engine."""
TOKENS = 2
"""Tokens of its answers, with EOS."""
CASES: dict[str, tuple[str, ...]] = {
    "one searcher": ("runtime.max_reuse=1",),
    "two searchers": ("runtime.max_reuse=1", "runtime.searchers=2"),
    "lockstep": ("runtime.lag=0", "runtime.publish_every=1"),
    "constant lag": ("runtime.lag=1", "runtime.publish_every=1"),
}
RATES = Rates(decode=100, train=50, response=5, judge=0, network=1)
SLOW = Rates(decode=20, train=50, response=5, judge=0, network=1)


def scripted(model: Path, folder: Path, *settings: str) -> Config:
    """A run in which a searcher finds two groups of four in each LATENCY."""
    return ray_config(
        model, folder, "engine=scripted", "engine.own_reference=true", f"engine.latency={LATENCY}",
        "runtime.prompts_per_task=1", "runtime.concurrent_searches=2", "run.steps=14",
        "eval.prompts=0", "checkpoint.every=0", "log.sample_every=0", *settings,
    )  # fmt: skip


def sample(*settings: str) -> Config:
    sizes = ("trainer.batch_size=12", "trainer.group_size=4", "sampling.samples=4")
    single = ("runtime.prompts_per_task=1", "runtime.concurrent_searches=2")
    return with_defaults(load(None, [*sizes, *single, *settings]))


def test_device_hours_are_those_of_steps_or_epochs():
    """With 20 prompts and 3 groups a step, three epochs are 20 steps."""
    machine = Machine(0, 0, 1e12)
    lengths = ("run.steps=20", "run.steps=40", "run.epochs=3")
    data = ("task.train_size=20", "task.held_out_size=5", "eval.prompts=5")
    some, more, epochs = (plan(sample(n, *data), machine, {}, None) for n in lengths)
    assert some != more and some == epochs


def test_the_slower_of_search_and_training_sets_the_pace():
    """A step trains 60 tokens in 1.2 s, and a searcher finds a group of 20 tokens in 0.2 s."""
    once = sample("runtime.max_reuse=1")
    assert groups_a_step(once) == 3
    alone = forecast(once, RATES, published=0, searchers=1)
    assert (alone.step, alone.bottleneck, alone.found) == (1.2, "training", 5)
    slow = forecast(once, SLOW, published=0, searchers=1)
    assert (slow.step, slow.bottleneck) == (3.0, "search")
    assert slow.trainer_waits == pytest.approx(0.6)
    assert forecast(once, SLOW, 0, searchers=2).step == pytest.approx(1.5)
    reused = sample("runtime.max_reuse=4")
    assert forecast(reused, SLOW, 0, searchers=1).step == 1.2
    lockstep = sample("runtime.lag=0")
    one = forecast(lockstep, RATES, published=0, searchers=1)
    assert one.step == pytest.approx(1.2 + 2 * 2 * 0.2) and one.lag == 0
    late = forecast(once, RATES, published=30e9, searchers=1)
    assert late.bottleneck == "publication" and late.lag > 20


def test_rewards_are_waited_for_beside_other_searches():
    c = sample("runtime.max_reuse=1", "runtime.concurrent_searches=4")
    rates = Rates(decode=100, train=1e9, response=5, judge=0.6, network=1)
    assert forecast(c, rates, 0, searchers=1).found == pytest.approx(4 / 0.8)
    rates = Rates(decode=100, train=1e9, response=5, judge=2.0, network=1)
    assert forecast(c, rates, 0, searchers=1).found == pytest.approx(4 / 2.2)


def test_the_plan_names_its_rates_and_fits_the_machine(tiny_model, monkeypatch):
    """There is a line for as many searchers as there are GPUs for, and for no more."""
    c = load(None, [f"policy.model={tiny_model}", "task=toy.Ones", "sampling.max_tokens=8"])
    lines = plan(c, Machine(4, 80e9, 1e12), {"decode": 0.5}, None)
    assert lines[0] == "decode = 0.5 (given)" and lines[1].endswith("(assumed)")
    told = r"^searchers that keep the trainer busy: [\d,]+, but the machine has room for 3$"
    assert re.search(told, "\n".join(lines), re.M)
    assert [line.split(":")[0] for line in lines if line.startswith("searchers = ")] == [
        "searchers = 1", "searchers = 3",
    ]  # fmt: skip
    assert "memory, calculated (docs/memory.md):" in lines and lines[-1] == "the memory suffices"
    monkeypatch.setattr("tba.tools.plan.available_cores", lambda: [0, 1, 2])
    laptop = plan(c, Machine(0, 0, 1e12), {"decode": 0.5}, None)
    assert any(line.startswith("searchers = 2: ") for line in laptop)
    assert not any(line.startswith("searchers = 3: ") for line in laptop)


def test_plan_and_check_show_the_same_memory_and_seconds(tiny_model, tmp_path, monkeypatch):
    """Here from one measurement of training, and on other machines from one assumption."""
    monkeypatch.setattr("tba.tools.plan.measured_training", lambda setup: {"train": 1234.5})
    monkeypatch.setattr("tba.tools.check.measured_training", lambda setup: {"train": 1234.5})
    given = config(tiny_model, tmp_path / "run", "policy.attention=auto")
    for planned in (None, Machine(1, 80e9, 1e12)):
        _, checked = dry_run(given, planned=planned)
        lines = plan(given, planned, {}, None)
        start = checked.index("memory, calculated (docs/memory.md):")
        memory = checked[start : checked.index("the memory suffices") + 1]
        assert memory == lines[lines.index(memory[0]) :]
        (seconds,) = [line for line in checked if line.startswith("time: about ")]
        assert seconds in lines and f"({'measured' if planned is None else 'assumed'})" in seconds
    assert lines[0] == "decode = 2,000 (assumed)"
    assert plan(given, None, {}, None)[0].endswith(" (measured)")


def test_rates_are_of_the_lengths_of_the_prompts(tiny_model, tmp_path):
    """A pass over prompts of 3 tokens and responses of 6 takes longer with longer prompts."""
    given = config(tiny_model, tmp_path / "run")
    setup = check(given)
    machine = Machine(1, 80e9, 1e12)
    rates, _ = rates_of(setup, machine, {}, {})
    prompts = [replace(p, text="1" * 20) for p in setup.prompts]
    longer, _ = rates_of(replace(setup, prompts=prompts), machine, {}, {})
    assert longer.train < rates.train and longer.response == rates.response
    found = measured_search(setup)["decode"], measured_training(setup)["train"]
    assert all(0 < rate < 1e9 for rate in found)


def test_without_a_limit_on_reuse_one_searcher_is_enough(tiny_model):
    unlimited = ("runtime.max_reuse=inf", "sampling.max_tokens=8")
    c = load(None, [f"policy.model={tiny_model}", "task=toy.Ones", *unlimited])
    lines = plan(c, Machine(0, 0, 1e12), {}, None)
    assert any(line.endswith("searchers that keep the trainer busy: 1") for line in lines)


def test_a_run_that_has_not_searched_has_no_rates(tiny_model, tmp_path):
    c = config(tiny_model, tmp_path / "run", "run.steps=1", "eval.prompts=0")
    summary = run(c)
    replace(summary, samples_generated=0).write(tmp_path / "run")
    with pytest.raises(ValueError, match="has not searched; name another run"):
        plan(c, None, {}, tmp_path / "run")
    (tmp_path / "run" / METRICS).write_text("")
    with pytest.raises(ValueError, match="has not trained; name another run"):
        plan(c, None, {}, tmp_path / "run")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--decode", "0"], "--decode 0: give a positive number"),
        (["--gpus", "four"], "--gpus four: write number x GB of each"),
        (["runtime.use=local", "runtime.searchers=0", "replay.rollouts=x"], "runs that search"),
        (["--run", "nowhere"], "nowhere has no summary.json yet"),
        (["policy.model=/nowhere"], "policy.model = '/nowhere': no such folder"),
    ],
)
def test_mistakes_are_one_sentence(given, told, tiny_model, monkeypatch, capsys):
    argv = ["tba", "plan", f"policy.model={tiny_model}", "task=toy.Ones", *given]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        main()
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.startswith("error: ") and told in err
    assert len(err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_seconds_a_step_are_those_of_measured_runs(settings, tiny_model, tmp_path):
    """Within 20 %, from the engine's latency and the seconds in which the trainer takes a step."""
    config = scripted(tiny_model, tmp_path / "run", *settings)
    run(config)
    rows = [row for row in read(tmp_path / "run" / METRICS) if "step_time" in row]
    measured = (rows[-1]["time"] - rows[3]["time"]) / (len(rows) - 4)
    training = sum(row["step_time"] for row in rows[4:]) / len(rows[4:])
    train = config.trainer.batch_size * TOKENS / training
    rates = Rates(2 * 4 * TOKENS / LATENCY, train, response=TOKENS, judge=0, network=1)
    expected = forecast(with_defaults(config), rates, 0, config.runtime.most_searchers)
    assert measured == pytest.approx(expected.step, rel=0.2)
    again = measured_in(tmp_path / "run")
    assert again["response"] == TOKENS and again["decode"] > 0

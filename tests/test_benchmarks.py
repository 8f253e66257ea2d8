"""Tests of the benchmarks: how results are kept. Nothing is timed."""

import argparse
import dataclasses
import importlib
import json
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import module_at

from tba.config.plugins import with_defaults
from tba.config.schema import load
from tba.config.tables import PolicyTable
from tba.models.pretrained import load_text
from tba.prompt import Prompt

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def measure() -> ModuleType:
    return module_at(BENCHMARKS / "_measure.py")


def test_a_script_replaces_only_its_own_rows(measure, tmp_path):
    options = argparse.Namespace(results=tmp_path / "results.json", tiny=False)
    ours, peer = [1.0, 2.0, 3.0, 4.0, 9.0], [6.0, 6.0, 6.0, 7.0, 5.0]
    first = measure.row("a", ours, "s", peer, goal="ratio >= 2")
    assert (first.value, first.ratio, first.met) == (3.0, 2.0, True)
    assert first.spread == (1.0, 9.0)
    measure.record("x/one.py", [first, measure.row("b", 7, "bytes", goal="value <= 6")], options)
    measure.record("x/other.py", [measure.row("c", 7, "bytes")], options)
    measure.record("x/one.py", [measure.row("d", ours, "s")], options)
    rows = json.loads(options.results.read_text())
    assert [(r["script"], r["name"]) for r in rows] == [("one", "d"), ("other", "c")]
    measure.record("x/one.py", [first], options, part=True)
    rows = json.loads(options.results.read_text())
    assert [(r["script"], r["name"]) for r in rows] == [("one", "d"), ("one", "a"), ("other", "c")]
    measure.record("x/one.py", [measure.row("d", 8, "s")], options, part=True)
    rows = json.loads(options.results.read_text())
    assert [(r["name"], r["value"]) for r in rows] == [("a", 3.0), ("d", 8.0), ("c", 7.0)]
    options.tiny = True
    measure.record("x/one.py", [first], options)
    assert json.loads(options.results.read_text()) == rows


def test_few_measurements_are_refused_without_a_reason(measure):
    with pytest.raises(ValueError, match="fewer than 5"):
        measure.row("a", [1.0, 2.0], "s")
    assert measure.row("a", [1.0, 2.0, 4.0], "s", fewer=True, note="three seeds").value == 2


def test_the_models_of_gpu_sh_have_a_token_for_each_id(measure, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gpu = importlib.import_module("_gpu")
    bench = gpu.Bench(argparse.Namespace(device="cpu", tiny=True, plan=None))
    text = load_text(PolicyTable(model=str(bench.model("tiny"))))
    assert len(text.tokenizer) == gpu.SHAPES["tiny"]["vocab_size"] == 512
    assert text.decode(np.array([3, 14, 510])) == "1<14><510>"
    assert text.encode(Prompt("sum", "12+3=")).tolist() == [3, 4, 12, 5, 13]


@pytest.mark.parametrize(
    ("card", "parts"),
    [
        (80, ["full training step, 0.5B", "step on 4 devices, 0.5B", "engine, 0.5B"]),
        *(pytest.param(card, [], marks=pytest.mark.slow) for card in (24, 40, 80)),
    ],
)
@pytest.mark.timeout(600)
def test_parts_of_gpu_sh_fit_a_card_by_the_formula(card, parts, monkeypatch, tmp_path, capsys):
    """Or are skipped with what they need. All steps of 1.5B fit 80 GB."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gpu, fit = importlib.import_module("_gpu"), importlib.import_module("_fit")
    planned = gpu.Bench(argparse.Namespace(device="cpu", tiny=False, plan=[card])).planned()
    chosen = {name: planned[name] for name in parts or planned}
    capsys.readouterr()
    fit.print_plan(chosen, [card])
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == len(chosen)
    for line in lines:
        chosen = "$" if "engine" in line else r" with trainer\.token_budget=\d+ policy"
        needed = re.search(rf": (\d+\.\d) GB calculated{chosen}", line)
        assert needed is None or float(needed[1]) <= 0.9 * card, line
        skipped = re.search(r"skipped: it needs (\d+) GB, and 90% of", line)
        assert (needed is None) != (skipped is None), line
        assert skipped is None or card < 80, line


def test_the_commands_of_the_page_about_gpus_exist(monkeypatch, tmp_path):
    """Parts of gpu.sh, tests of `make test-gpu`, and settings."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gpu = importlib.import_module("_gpu")
    root = BENCHMARKS.parent
    section = (root / "docs" / "performance.md").read_text().partition("## What only a GPU")[2]
    commands = re.findall(r"`((?:make|bash|tba) [^`]+)`", section)
    assert len(commands) > 20
    tests = (root / "tests" / "test_gpu.py").read_text()
    bench = gpu.Bench(argparse.Namespace(device="cpu", tiny=False, plan=None, parts=None))
    parts = [name for name, _, _ in bench.parts()]
    for command in commands:
        program, *given = shlex.split(command)
        match program, given:
            case "make", ["test-gpu", *selection]:
                for text in (each.removeprefix("PYTEST=-k ") for each in selection):
                    assert re.search(rf"^def test_\w*{text}", tests, re.M), command
            case "bash", ["benchmarks/gpu.sh", *options]:
                wanted = gpu.arguments().parse_args(options).parts or ()
                assert all(any(text in part for part in parts) for text in wanted), command
            case "tba", ["train" | "check", *settings]:
                file = root / settings.pop(0) if settings[0].endswith(".toml") else None
                with_defaults(load(file, [each for each in settings if each != "--machine"]))
            case _:
                raise AssertionError(command)


def test_the_memory_of_parts_of_gpu_sh_by_hand(monkeypatch, tmp_path):
    """Engines of a model of 494,032,768 weights in bf16, and a rank of four."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gpu, fit = importlib.import_module("_gpu"), importlib.import_module("_fit")
    planned = gpu.Bench(argparse.Namespace(device="cpu", tiny=False, plan=[80])).planned()

    def needed(name: str, *settings: str) -> float:
        role, configure = planned[name]
        return float(fit.needed_by(configure(*settings), role, 80e9))

    weights = 494_032_768
    cache = 24 * 2 * 2 * 128 * 256 * (128 + 64)  # layers, keys and values, bytes, width, tokens
    assert needed("engine, 0.5B") == pytest.approx(0.5e9 + 2 * weights + cache)
    # CUDA, weights, activations and graphs, and a cache of 1 GiB, twice
    assert needed("vLLM engine, 0.5B") == 2 * (0.5e9 + 2 * weights + 2e9 + 2**30)
    ranks = {n: needed(f"step on {n} devices, 0.5B", *fit.CHOICES[3]) for n in (2, 4)}
    assert ranks[2] - ranks[4] == 16 * weights / 4  # weights, gradients and moments


def test_parts_of_gpu_sh_say_what_they_need_and_write(measure, monkeypatch, tmp_path, capsys):
    """On tiny models, on the CPU. A checkpoint has the calculated size, and some headers."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gpu = importlib.import_module("_gpu")
    bench = gpu.Bench(argparse.Namespace(device="cpu", tiny=True, plan=None, profile=None))
    parts = {name: part for name, _, part in bench.parts()}
    for name in ("engine, tiny", "checkpoint, tiny"):
        rows = bench.measured(name, parts[name])
        out = capsys.readouterr().out
        assert rows and re.search(rf"^{name} \.\.\.\n  \d\.\d GB calculated", out, re.M), out
    assert rows[-1].name.endswith("size") and rows[-1].ratio == pytest.approx(1, abs=0.05)


def scripts() -> list[str]:
    return sorted(p.stem for p in BENCHMARKS.glob("*.py") if not p.stem.startswith("_"))


@pytest.mark.parametrize("name", scripts())
def test_every_script_says_what_it_does(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 3


def test_the_runner_knows_every_script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runner = importlib.import_module("run")
    known = {script.name for script in runner.SCRIPTS}
    assert set(scripts()) - known == {"run"}
    usual = sum(script.minutes for script in runner.SCRIPTS if not script.long)
    assert usual <= 40, "`make bench` promises at most 40 minutes"


def test_the_docs_show_the_counts_of_attention(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    attention = importlib.import_module("_attention")
    page = (BENCHMARKS.parent / "docs" / "performance.md").read_text()
    assert all(attention.count(tokens).line in page for tokens in attention.TOKENS)


def test_results_are_rows_and_the_docs_show_them(measure):
    rows = measure.read()
    fields = {f.name for f in dataclasses.fields(measure.Row)}
    for row in rows:
        assert row.keys() == fields, row["name"]
        is_met = row["goal"] and measure.is_met(row["goal"], row["value"], row["ratio"])
        assert row["met"] == is_met
    names = {(row["name"], row["peer_is"]) for row in rows}
    assert len(names) == len(rows)
    text = measure.PAGE.read_text()
    assert measure.page_with(text, rows) == text, "run `python benchmarks/_measure.py`"


def test_the_docs_list_exactly_the_goals_that_were_not_reached(measure):
    text = measure.PAGE.read_text()
    _, _, rest = text.partition("## Goals that were not reached")
    items = re.findall(r"^- \*\*(.*?)\*\*", rest.partition("\n## ")[0], re.MULTILINE)
    listed = [float(item.partition(": ")[2].split()[0]) for item in items]
    unmet = [row for row in measure.read() if row["met"] is False]
    missed = [row[row["goal"].split()[0]] for row in unmet]  # its ratio, or its value
    assert sorted(listed) == pytest.approx(sorted(missed), rel=0.005)


def test_the_page_on_performance_has_the_rows_of_the_results(measure):
    page = (BENCHMARKS.parent / "docs" / "performance.md").read_text()
    rows = {(row["name"], row["peer_is"]): row for row in measure.read()}

    name = "3 s of reward latency: 256 samples generated, scored, trained on"
    row, beside = rows[name, "TRL"], rows[name, "ours, synchronous"]
    figures = f"{row['value']:.1f} asynchronously, {beside['peer']:.1f} synchronously"
    assert f"are {figures}, {row['peer']:.1f} with TRL." in page


TITLES = {
    "all weights, 100 steps": "All weights, 100 steps",
    "all weights": "All weights",
    "all weights, rewards of 1 s (one seed)": "All weights, rewards of 1 s",
    "pure compute: a small model, cheap rewards": "Pure compute",
}
"""Rows of the table on the page about performance, and what they compare."""


@pytest.fixture
def thresholds(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("_thresholds")


def test_the_docs_have_the_ranges_over_all_scores(thresholds):
    found = {}
    for title, (trl, *synchronous) in thresholds.comparisons().items():
        against_trl = "; ".join(filter(None, (trl.range, trl.missed)))
        found[title] = (against_trl, synchronous[0].range if synchronous else "")
    del found["LoRA"]  # docs/performance.md says why
    root = BENCHMARKS.parent
    text = (root / "docs" / "performance.md").read_text()
    table = text.partition("| | TRL / asynchronous | synchronous / asynchronous |")[2]
    rows = [row.split("|") for row in table.partition("\n\n")[0].splitlines()[2:]]
    assert {TITLES[row[1].strip()]: (row[2].strip(), row[3].strip()) for row in rows} == found
    readme = " ".join((root / "README.md").read_text().split())
    ranges = {
        title: [each.partition(" times at any score from ") for each in pair]
        for title, pair in found.items()
    }
    (trl, _, scores), (synchronous, *_) = ranges["All weights"]
    told = f"takes {trl} times as long as our asynchronous runs (`tb`) to reach any score from"
    assert (
        f"{told} {scores}**" in readme
        and f"our synchronous loop {synchronous} times, with" in readme
    )
    (trl, _, scores), (synchronous, _, to) = ranges["All weights, 100 steps"]
    told = f"TRL takes {trl} times as long from {scores}, and our synchronous loop {synchronous}"
    told += f" times ({to.removeprefix('.35 ')})."
    ends = {side: fmean(map(thresholds.end, runs)) for side, runs in thresholds.whole().items()}
    shown = [thresholds.show(limit(ends.values())) for limit in (min, max)]
    assert f"{told} They end level, at {' to '.join(shown)}." in readme
    (trl, *_), _ = ranges["All weights, rewards of 1 s"]
    assert f"With rewards of 1 s (one seed), TRL takes {trl} times as long, but ends" in readme
    shown = [
        each.split("|")[2].strip()
        for each in thresholds.ends_table().splitlines()[2:]  # in the order of SIDES
    ]
    told = "{} asynchronously, {} synchronously, and {} with TRL".format(*shown)
    assert told in " ".join(text.split())
    by_title = thresholds.comparisons()
    titles = ("All weights, 100 steps", "All weights", "Pure compute")
    single = [c.by_pair.split(" times")[0] for t in titles for c in by_title[t]]
    assert f"(pairs of runs: {single[2]})" in readme
    told = "TRL takes {} times as long in the runs of 100 steps, and our synchronous side {} times;"
    told += " in the other runs with all weights, it is {} and {} times;"
    told += " with pure compute, {} and {}"
    told = told.format(*single)
    assert told in " ".join(text.split())
    speeds = [thresholds.samples_a_second(thresholds.chosen(side)) for side in thresholds.SIDES]
    told = "{:.0f} asynchronously, {:.0f} synchronously, {:.0f} with TRL".format(*speeds)
    assert told in " ".join(text.split())
    ends = {"asynchronous": 0.0, "synchronous": 0.0, "trl": 0.0}
    for run in thresholds.read_runs(thresholds.WHOLE):
        side = "trl" if "objective=dr_grpo" in run["options"] else run["side"]
        if run["seed"] == thresholds.SEARCH_SEED:
            ends[side] = max(ends[side], thresholds.end(run))
    told = "{} asynchronously, {} synchronously, and {} for TRL's algorithm"
    assert told.format(*(thresholds.show(end, 3) for end in ends.values())) in " ".join(
        text.split()
    )
    page = thresholds._measure.PAGE.read_text()
    assert thresholds.page_with(page) == page, "run `python benchmarks/_thresholds.py`"


def test_times_to_a_score_are_medians_of_first_crossings(thresholds):
    """Three seeds: one falls below again, one jumps over both scores, one stays below .50."""
    first = [(0, 0.2), (10, 0.4), (20, 0.3), (30, 0.5)]
    curves = [first, [(0, 0.2), (8, 0.6)], [(0, 0.2), (40, 0.4)]]
    runs = [{"curve": [{"seconds": s, "score": x} for s, x in curve]} for curve in curves]
    slower = [{"curve": [{"seconds": 3 * s, "score": x - 0.01} for s, x in curves[0]]}]
    compared = thresholds.Comparison(runs, slower, "TRL", (0.3, 0.4, 0.5))
    points = [(p.ours, p.peer) for p in compared.points]
    assert points[0] == pytest.approx((5.0, 3 * 5.5))
    assert points[1] == pytest.approx((10.0, 3 * (20 + 10 * 11 / 20)))
    assert points[2] == (pytest.approx(30.0), float("inf"))
    assert compared.range == "3.3 to 7.7 times at any score from .30 to .40"
    assert compared.missed == "not reached by TRL in the time of its runs: .50"
    runs[2]["curve"][-1]["seconds"] = 20  # it might have been faster than the median, 30
    assert thresholds.time_to(0.5, runs) == float("inf")


@pytest.mark.parametrize("side", ["asynchronous", "synchronous", "trl"])
def test_the_search_of_100_steps_tries_both_neighbours_of_the_best(monkeypatch, side):
    """Scores are highest at 4e-5 with linear decay and beta .006 (TRL: .002)."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    whole_run = importlib.import_module("whole_run")
    tried = []

    def job(*given: Any, options: tuple[str, ...]) -> Any:
        side, lora, rate, seed = given
        return whole_run.PendingReply("sums", side, "", "", "", rate, seed, lora, options=options)

    def run(job: Any) -> dict[str, Any]:
        setting = whole_run.Setting.of(vars(job))
        tried.append(setting)
        best_beta = 0.002 if side == "trl" else 0.006
        score = -abs(math.log(setting.rate / 4e-5)) - abs(setting.beta - best_beta)
        return {"curve": [{"score": score - (setting.schedule == "constant")}] * 5}

    lab = SimpleNamespace(options=SimpleNamespace(tiny=False), job=job, run=run)
    found = whole_run.search(lab, side)
    assert found == whole_run.Setting(4e-5, "linear", 0.002 if side == "trl" else 0.006)
    betas = {s.beta for s in tried if s.rate == 4e-5}
    assert betas == ({0.0, 0.002, 0.02} if side == "trl" else {0.002, 0.006, 0.02, 0.06})
    assert {s.rate for s in tried if s.beta == found.beta} == {2e-5, 4e-5, 8e-5}
    assert len(tried) == len(set(tried))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_gpu_sh_runs_to_its_end_without_a_gpu(tmp_path):
    """Parts that this machine cannot run are named, and no other is missing."""
    script = ["bash", str(BENCHMARKS / "gpu.sh"), "--results", str(tmp_path / "results.json")]
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0 and "FAILED" not in done.stdout, done.stdout
    skipped = re.findall(r"^skipped (.*?): ", done.stdout, re.MULTILINE)
    assert skipped[0] == "all measurements"
    assert {"step on 4 devices, tiny", "LoRA step of a 7B shape"} <= set(skipped)
    ran = "step through FSDP2 on one device", "step on 2 devices", "asynchronous training"
    for part in (*ran, "engine", "checkpoint"):
        assert re.search(rf"^{part}, tiny \.\.\.\n  \d\.\d GB calculated", done.stdout, re.M), part
        assert f"{part}, tiny" not in skipped

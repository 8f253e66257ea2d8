"""The report of a study: averages, lines and panels, best settings, and a page without links."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pandas as pd
import pytest

from tba.tools.report import report
from tba.tools.report.study import Layout, lay_out, link_to, panels
from tba.tools.study import Ledger, Trial, curve, read_ledger, read_study, write_results

GRIDS = """
[[grid]]
name = "lags"
"objective.use" = ["tb", "grpo", "rloo"]
"runtime.publish_every" = [1, 4]
"run.seed" = [0, 1, 2]
[[grid]]
name = "rates"
"trainer.learning_rate" = [1e-4, 1e-3, 1e-2]
"objective.beta" = [0.1, 0.2]
"run.seed" = [0, 1]
[[grid]]
name = "faulty"
"run.seed" = [0, 1]
variants = [
    { "sampling.samples" = 8, label = "few & $mall" },
    { "objective.use" = "rloo", label = "plain" },
]
"""
STEPS = 40


def score(trial: Trial, step: int) -> float:
    s = trial.settings
    base = {"tb": 0.5, "grpo": 0.4, "rloo": 0.3}[s.get("objective.use", "tb")]
    base += 0.01 * s.get("run.seed", 0)
    if step == STEPS and s.get("runtime.publish_every") == 4:
        base -= 0.2
    return base + step / 100 + {1e-3: 0.02, 1e-2: 0.04}.get(s.get("trainer.learning_rate"), 0)


def write_run(path: Path, trial: Trial, failed: bool) -> None:
    path.mkdir(parents=True)
    seed = trial.settings.get("run.seed", 0)
    use = trial.settings.get("objective.use", "tb")
    (path / "config.json").write_text(
        json.dumps({"objective": {"use": use}, "run": {"seed": seed}})
    )
    rows = [{"step": 0, "time": 0.0, "eval/sampled_pass@1": score(trial, 0)}]
    for step in range(1, (STEPS // 2 if failed else STEPS) + 1):
        counts = {"samples_trained": 8 * step, "samples_generated": 10 * step}
        row = {"step": step, "time": step / 2, "kl": step / 50 + seed, "off_policy/lag_mean": 2.0}
        rows.append(row | counts)
        if step % 10 == 0:
            rows.append({"step": step, "time": step / 2, "eval/sampled_pass@1": score(trial, step)})
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if not failed:
        totals = {
            "steps": STEPS, "seconds": 20.0 + seed, "samples_generated": 400,
            "samples_trained": 320, "lag_mean": 2.0,
        }  # fmt: skip
        last = {"step": STEPS, "sampled_pass@1": score(trial, STEPS)}
        last["sampled_log_ratio"] = 0.77 + seed
        summary = {"finished": True, **totals, "eval/last": last}
        (path / "summary.json").write_text(json.dumps(summary))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of rloo at lag 4, one run diverged and one is to come; all runs of `plain` failed."""
    here = tmp_path_factory.mktemp("study")
    (here / "s.toml").write_text(f'[study]\nfolder = "{here}"\n{GRIDS}')
    study, runs = read_study(here / "s.toml"), []
    for trial in study.trials:
        failed = (
            trial.folder == "lags/use=rloo,publish_every=4,seed=0"
            or trial.axes.get("variant") == "plain"
            or ("learning_rate=0.01" in trial.folder and "seed=1" in trial.folder)
        )
        pending = trial.folder == "lags/use=rloo,publish_every=4,seed=1"
        if not pending:
            write_run(study.path(trial), trial, failed)
        error = "NotFinite: step 21: loss nan" if failed else None
        status: Any = "pending" if pending else "failed" if failed else "finished"
        runs.append(replace(trial, status=status, error=error))
    Ledger("pairs", None, runs).write(here)
    return here


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    drawn = report([folder])
    assert drawn == folder / "report" / "index.html"
    return drawn.read_text()


@pytest.fixture
def layouts(folder: Path) -> dict[str, Layout]:
    return {name: lay_out(folder, rows) for name, rows in write_results(folder).groupby("grid")}


def cells(page: str, *begin: str) -> list[str]:
    """The cells after `begin` of the row that begins with them."""
    rows = re.findall(r"<tr>(.*?)</tr>", page.replace("\N{NO-BREAK SPACE}", " "))
    split = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]
    (row,) = [row for row in split if tuple(row[: len(begin)]) == begin]
    return row[len(begin) :]


def charts(page: str) -> dict[str, list[dict[str, Any]]]:
    """The charts of each figure, by grid and kind."""
    figures = re.findall(r'<div class="charts few" id="(.*?)">(.*?)</div>\n<h3>', page, re.DOTALL)
    found = {name: re.findall(r"data-chart='(.*?)'", figure) for name, figure in figures}
    return {name: [json.loads(text) for text in texts] for name, texts in found.items()}


def test_the_page_loads_nothing_and_its_charts_are_data(folder, page):
    loads = r"https?://(?!github)|<link|<img|@import|\ssrc\s*="
    assert not re.search(loads, page.partition("<!--")[0])
    assert "<title>pairs · tba</title>" in page and "<h1>pairs</h1>" in page
    names = {f"{grid}_curves" for grid in ("lags", "rates", "faulty")}
    assert charts(page).keys() == names | {"lags_against", "rates_against"}
    assert [p.name for p in (folder / "report").iterdir()] == ["index.html"]


def test_a_chart_has_the_numbers_of_its_lines(page):
    """Means over seeds from the lowest to the highest, on one scale for all charts of a grid."""
    first, second = charts(page)["lags_curves"]
    titles = [f"sampled pass@1: publish_every {k}" for k in (1, 4)]
    assert [first["title"], second["title"]] == titles
    assert [line["name"] for line in first["lines"]] == ["tb", "grpo", "rloo"]
    tb = first["lines"][0]
    assert tb["x"] == [0, 80, 160, 240, 320]
    ends = [tb[name][-1] for name in ("low", "y", "high")]
    assert ends == pytest.approx([0.90, 0.91, 0.92])
    assert first["most"] == second["most"] == pytest.approx([0.3, 0.92])
    (against,) = charts(page)["rates_against"]
    assert against["x"] == {"label": "objective.beta", "log": False, "ticks": [0.1, 0.2]}
    names = [line["name"] for line in against["lines"]]
    assert names == [f"learning_rate {rate}" for rate in ("0.0001", "0.001", "0.01")]


def test_the_page_links_to_its_runs(folder, page, tmp_path):
    """To the page of a run, where there is one, or else to its folder."""
    name = "lags/use=tb,publish_every=1,seed=0"
    link = "../lags/use%3Dtb%2Cpublish_every%3D1%2Cseed%3D0"
    assert f'<li><a href="{link}">{name}</a>: finished</li>' in page
    assert (folder / "report" / unquote(link)).samefile(folder / name)
    assert "<li>lags/use=rloo,publish_every=4,seed=1: pending</li>" in page
    drawn = tmp_path / "a b" / "report" / "index.html"
    drawn.parent.mkdir(parents=True)
    drawn.touch()
    assert link_to(tmp_path / "a b", tmp_path / "report") == "../a%20b/report/index.html"


def test_a_grid_without_finished_runs_has_a_table_and_no_curves(tmp_path):
    """One diverged, one goes on, and both have been evaluated."""
    grid = '[[grid]]\nname = "begun"\n"trainer.learning_rate" = [1e-4, 1e-3]\n'
    (tmp_path / "s.toml").write_text(f'[study]\nfolder = "{tmp_path}"\n{grid}')
    study = read_study(tmp_path / "s.toml")
    going, diverged = study.trials
    for trial in (going, diverged):
        write_run(study.path(trial), trial, failed=True)
    diverged = replace(diverged, status="failed", error="NotFinite: step 21: loss nan")
    Ledger("begun", None, [going, diverged]).write(tmp_path)
    page = report([tmp_path]).read_text()
    assert charts(page) == {}
    assert cells(page, "0.0001")[0] == "1 to come" and cells(page, "0.001")[0] == "1 failed"


def test_a_row_is_the_mean_over_seeds_and_its_standard_error(page):
    # 0.90, 0.91, 0.92: standard deviation 0.01 over sqrt(3); kl 0.77 + seed; seconds 20, 21, 22
    assert cells(page, "1", "tb") == [
        "3 finished", "91.0% ± 0.6% ★", "91.0% ± 0.6%", "0.0% ± 0.0%", "1.770 ± 0.577", "2.0 ± 0.0",
        "21 ± 1",
    ]  # fmt: skip
    assert cells(page, "4", "tb")[1:4] == ["71.0% ± 0.6%", "81.0% ± 0.6%", "10.0% ± 0.0%"]


def test_unfinished_runs_are_counted_and_not_averaged(page):
    assert cells(page, "4", "rloo")[:2] == ["1 finished, 1 failed, 1 to come", "52.0%"]
    assert cells(page, "plain")[:2] == ["2 failed", "–"]
    assert "<dd>28 finished, 5 failed, 1 to come</dd>" in page
    assert "<code>lags/use=rloo,publish_every=4,seed=0</code>: NotFinite: step 21: loss nan" in page


def test_names_are_text(page):
    assert "few &amp; $mall" in page


def test_lines_are_the_text_axis_with_the_most_values(layouts):
    lags, rates = layouts["lags"], layouts["rates"]
    assert lags.keys == ["runtime.publish_every", "objective.use"]
    assert (lags.lines, lags.number) == ("objective.use", "runtime.publish_every")
    titles = list(panels(lags.settings, "objective.use"))
    assert titles == ["publish_every 1", "publish_every 4"]
    assert (layouts["faulty"].keys, layouts["faulty"].number) == (["variant"], None)
    assert {rates.lines, rates.number} == {"trainer.learning_rate", "objective.beta"}


def test_keys_that_vary_together_are_one_axis(tmp_path):
    (tmp_path / "s.toml").write_text(
        """
        [[grid]]
        name = "sizes"
        "run.seed" = [0, 1]
        variants = [
            { "trainer.group_size" = 2, "sampling.samples" = 4 },
            { "trainer.group_size" = 4, "sampling.samples" = 8 },
        ]
        """
    )
    Ledger("sizes", None, read_study(tmp_path / "s.toml").trials).write(tmp_path)
    layout = lay_out(tmp_path, write_results(tmp_path))
    assert layout.settings.to_dict("list") == {"trainer.group_size": [2, 4]}


def test_numbers_are_sorted_and_text_is_in_the_order_of_the_study(tmp_path):
    axes = '"objective.use" = ["tb", "grpo"]\n"runtime.lag" = [16, 1]'
    (tmp_path / "s.toml").write_text(f'[[grid]]\nname = "lags"\n{axes}\n')
    Ledger("lags", None, read_study(tmp_path / "s.toml").trials).write(tmp_path)
    settings = lay_out(tmp_path, write_results(tmp_path)).settings
    assert settings.to_numpy().tolist() == [["tb", 1], ["tb", 16], ["grpo", 1], ["grpo", 16]]


def test_a_curve_is_averaged_where_all_finished_runs_were_evaluated(layouts):
    lags = layouts["lags"]
    numbers = {tuple(values): number for number, *values in lags.settings.itertuples()}
    curve = lags.curves.loc[numbers["rloo", 4]]  # one run finished
    assert list(curve["samples"]) == [0, 80, 160, 240, 320] and set(curve["size"]) == {1}
    point = lags.curves.loc[numbers["tb", 1], 10]
    assert tuple(point[["samples", "min", "mean", "max"]]) == pytest.approx((80, 0.6, 0.61, 0.62))


def test_the_last_one_counts_if_a_resumed_run_repeated_an_evaluation():
    steps = [{"step": s, "samples_trained": s, "samples_generated": s} for s in (1, 2)]
    given = ((0, 0.0, 0.1), (2, 3.0, 0.5), (2, 4.0, 0.6))
    evaluations = [{"step": step, "time": time, "eval/x": score} for step, time, score in given]
    metrics = pd.DataFrame(steps + evaluations)
    assert curve(metrics, "x")["score"].to_dict() == {0: 0.1, 2: 0.6}


def test_a_metric_that_no_run_has_is_told_and_the_default_drawn(folder, tmp_path, caplog):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    replace(read_ledger(folder), metric="reward").write(copy)
    page = report([copy]).read_text()
    assert "sampled pass@1; no run has reward" in page
    assert "set study.metric to one of sampled_pass@1, sampled_log_ratio" in caplog.text


def test_a_metric_that_the_runs_of_one_grid_have_is_compared(folder, tmp_path, caplog):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    ledger = replace(read_ledger(folder), metric="hard/sampled_pass@1")
    ledger.write(copy)
    for trial in ledger.runs:
        summary = copy / trial.folder / "summary.json"
        if trial.grid == "rates" and summary.exists():
            plain = json.loads(summary.read_text())
            plain["eval/last"]["hard/sampled_pass@1"] = 0.25
            summary.write_text(json.dumps(plain))
    rows = write_results(copy)
    assert set(rows["metric"]) == {"hard/sampled_pass@1"} and not caplog.text
    last = rows.dropna(subset="last")
    assert set(last["grid"]) == {"rates"} and set(last["last"]) == {0.25}


def test_a_report_without_data_is_refused_with_what_to_type(folder, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    ledger = read_ledger(folder)
    replace(ledger, runs=[replace(trial, status="pending") for trial in ledger.runs]).write(empty)
    with pytest.raises(ValueError, match="has no evaluations yet; type"):
        report([empty])

"""The report of runs: one page without links, for a run in any state."""

import json
import re
import runpy
from html import unescape
from itertools import product
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from build import data

from tba.config.schema import Config
from tba.runs.folder import CONFIG, SAMPLES, SCORES, SESSIONS, SUMMARY, WARNINGS
from tba.runs.journal import Journal
from tba.runs.metrics import PANELS
from tba.tools.report import report
from tba.tools.report.runs import OTHERS, POINTS, Charts, columns

SCRIPT = "<script>alert('7')</script>"
HALF_A_PAIR = "\ud83d"
STARTED = {
    "started": "2026-01-02T03:04:05+00:00", "step": 0,
    "commit": "1a2b3c-dirty", "versions": {"python": "3.12.1", "torch": "2.9.1"},
    "system": "Linux", "hardware": ["2 cores", "24 GiB"],
    "parameters": 1_234_567, "trained_parameters": 89,
}  # fmt: skip
RESUMED = {**STARTED, "step": 7, "commit": None}
QUIET = Config.model_validate({"log": {"report_to": []}})


def write(
    path: Path,
    steps: int = 12,
    evaluations: tuple[int, ...] = (0, 5, 12),
    passes: bool = True,
    beta: float = 0.02,
    sets: tuple[str, ...] = (),
) -> Path:
    """A run folder after `steps` of 12 steps."""
    run = {"folder": str(path), "steps": 12}
    config = Config(run=run, objective={"beta": beta}, log={"report_to": []})
    path.mkdir()
    (path / CONFIG).write_text(json.dumps(config.nested()))
    journal = Journal(path, config)
    for step in range(1, steps + 1):
        metrics = {
            "reward": step / 10, "reward_std": 0.3, "kl": 0.1, "entropy": 0.5,
            "off_policy/lag_mean": 1.5, "off_policy/lag_max": 3.0,
        }  # fmt: skip
        metrics |= {
            "buffer/size": 20.0 * step, "wait/trainer": 0.25, "wait/searchers": 0.125,
            "sync/blocked": 0.1, "sync/adopted": 0.4, "sync/logp_gap": nan,
        }  # fmt: skip
        metrics |= {
            "time": step * 2.0, "samples_generated": step * 40, "samples_trained": step * 30,
            "searchers/rejected": 0, "step_time": 0.2,
        }  # fmt: skip
        journal.row(step, metrics)
    for version in evaluations:
        names = ["reward", "reward_stderr", *(["pass@1", "stderr"] if passes else [])]
        row: dict[str, float] = {"time": version * 2.0, "requested": version}
        for subset in ("", *(f"{name}/" for name in sets)):
            for mode, name in product(("sampled", "greedy"), names):
                row[f"eval/{subset}{mode}_{name}"] = 0.1 + version / 20
        journal.row(version, row)
        journal.sample(version, "eval", "17+5=", f"held out\n  {version}", version / 12, version)
    journal.sample(3, "train", "8+9=", SCRIPT, None, 2)
    return path


def summarize(path: Path, finished: bool, steps: int) -> None:
    totals = {
        "seconds": 31.5, "samples_generated": 512, "samples_trained": 360,
        "trainer_wait_fraction": 0.0625, "searcher_wait_fraction": 0.125,
    }  # fmt: skip
    (path / SUMMARY).write_text(json.dumps({"finished": finished, "steps": steps, **totals}))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = write(tmp_path_factory.mktemp("runs") / "alone")
    summarize(run, finished=True, steps=12)
    (run / SESSIONS).write_text("".join(json.dumps(s) + "\n" for s in (STARTED, RESUMED)))
    drawn = report([run])
    assert drawn == run / "report" / "index.html"
    assert [p.name for p in drawn.parent.iterdir()] == ["index.html"]
    return drawn.read_text()


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A finished run, one without evaluations, one without pass@1, and one that was resumed."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        write(folder / "steady", sets=("hard",)),
        write(folder / "_costs_$5", steps=4, evaluations=(), beta=0.5),
        write(folder / "ungraded", passes=False),
        write(folder / "resumed", steps=7, evaluations=(0, 5)),
    ]
    summarize(runs[0], finished=True, steps=12)
    summarize(runs[2], finished=False, steps=12)
    summarize(runs[3], finished=False, steps=5)
    with (runs[1] / SAMPLES).open("a") as file:
        row = {"step": 2, "kind": "train", "version": 1, "reward": 0.5, "prompt": "?"}
        file.write(json.dumps({**row, "completion": HALF_A_PAIR}) + "\n")
    return report(runs, folder / "drawn").read_text()


def table(html: str, name: str) -> list[list[str]]:
    """The cells of a table, its heads first."""
    (text,) = re.findall(rf'<table data-name="{name}">(.*?)</table>', html, re.DOTALL)
    rows = re.findall(r"<tr>(.*?)</tr>", unescape(text).replace("\N{NO-BREAK SPACE}", " "))
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def headline(html: str, label: str) -> list[str]:
    """A column of the table of scores before and after."""
    heads, *rows = table(html, "before and after")
    return [row[heads.index(label)] for row in rows]


def fact(html: str, label: str) -> list[str]:
    """A row of the table of facts."""
    (row,) = [values for first, *values in table(html, "facts") if first == label]
    return row


def charts(html: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in re.findall(r"data-chart='(.*?)'", html)]


def first_screen(html: str) -> dict[str, str]:
    """The panels that are not folded by title, in order."""
    ended = r"</div>\n(?:<details>|</section>)"
    grid = re.findall(rf'<div class="panels">(.*?){ended}', html, re.DOTALL)[0]
    figures = re.findall(r"<figure.*?</figure>", grid, re.DOTALL)
    return {re.findall(r"<figcaption>(.*?)</figcaption>", f)[0]: f for f in figures}


def test_the_page_loads_nothing(page, comparison):
    for html in (page, comparison):
        assert not re.search(r"<link|<img|@import|url\(|\ssrc\s*=|\shref\s*=", html)
        (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', html)
        assert policy.startswith("default-src 'none'; ")
        assert "Permission is hereby granted" in html  # the licence of uPlot


def test_all_stored_completions_of_a_prompt_stand_together(page):
    held_out, trained_on = data(page)[0]["groups"]
    assert (held_out["kind"], held_out["id"], held_out["prompt"]) == ("eval", "", "17+5=")
    shown = [(c["step"], c["completion"]) for c in held_out["completions"]]
    assert shown == [(v, f"held out\n  {v}") for v in (0, 5, 12)]
    assert (trained_on["kind"], trained_on["prompt"]) == ("train", "8+9=")
    assert trained_on["completions"] == [
        {"step": 3, "version": 2, "reward": None, "completion": SCRIPT, "notes": {}, "drawn": 1}
    ]


def test_completions_of_a_batch_are_a_group_and_of_another_step_another(tmp_path):
    run = write(tmp_path / "run", evaluations=())
    journal = Journal(run, QUIET)
    for step, completion in ((4, "a"), (4, "b"), (8, "a")):
        journal.sample(step, "train", "8+9=", completion, 1.0, step - 1)
    groups = data(report([run]).read_text())[0]["groups"]
    texts = [[c["completion"] for c in group["completions"]] for group in groups]
    assert texts == [[SCRIPT], ["a", "b"], ["a"]]


def test_a_completion_is_text_and_never_markup(page, comparison):
    assert "<script>alert" not in page and r"\u003cscript\u003ealert" in page
    assert data(comparison)[1]["groups"][-1]["completions"][0]["completion"] == HALF_A_PAIR


def test_charts_are_those_that_have_data(page, comparison):
    shown = {metric for chart in charts(page) for metric in chart["metrics"]}
    assert {"reward", "kl", "entropy", "off_policy/lag_mean", "eval/sampled_pass@1"} <= shown
    assert shown.isdisjoint({"sync/logp_gap", "buffer/short_groups", "eval/sampled_win_rate"})
    assert "searchers/restarts" not in data(page)[0]["steps"]
    steps = data(page)[0]["steps"]
    assert steps["reward"] == [step / 10 for step in range(1, 13)]
    assert "sync/logp_gap" not in steps  # no step has it


def test_scores_and_panels_stand_first_and_panels_without_values_are_folded(page, comparison):
    """Warnings are between them."""
    titles = [panel.title for panel in PANELS]
    flat = [
        "cut-off responses", "gradient norm", "log-prob gap, engine to trainer (nats)",
        "samples per second", "samples per second of an engine",
    ]  # fmt: skip
    for html in (page, comparison):
        heads = ["Before and after", "Panels", "Facts", "Reward"]
        assert re.findall("<h2>(.*?)</h2>", html)[:4] == heads
        screen = first_screen(html)
        assert list(screen) == [title for title in titles if title not in flat]
        assert f"<summary>Without values, or always 0: {', '.join(flat)}</summary>" in html
        (passed,) = charts(screen["held-out pass@1"])
        assert passed["metrics"] == ["eval/sampled_pass@1", "eval/greedy_pass@1"]
        assert (passed["labels"], passed["form"]) == (["pass@1", "pass@1 greedy"], "share")


def test_a_panel_that_is_always_0_is_folded(tmp_path):
    run = write(tmp_path / "run", steps=1)
    row = {"time": 1.0, "samples_generated": 9, "samples_trained": 8, "reward": 0.0, "kl": 0.0}
    for step, value in ((13, 0.0), (14, -1e-9)):
        Journal(run, QUIET).row(step, {**row, "kl/k3": value, "grad_norm": 0.0})
    screen = first_screen(report([run]).read_text())
    assert "KL to the reference (nats per token)" in screen and "gradient norm" not in screen


def test_each_panel_says_what_is_healthy_as_the_docs_do(page):
    """The table of docs/watching.md is the source."""
    text = (Path(__file__).parents[2] / "docs" / "watching.md").read_text().replace("`", "")
    table = text.partition("| panel | a healthy run |")[2].partition("\n\n")[0]
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    told = [(first.removeprefix("| "), healthy) for first, healthy, _ in rows]
    assert told == [(panel.title, panel.healthy) for panel in PANELS]
    for title, figure in first_screen(page).items():
        assert f'<p class="note">healthy: {dict(told)[title]}</p>' in figure


def test_an_axis_of_a_panel_fits_its_values_and_shares_have_their_own():
    steps = {
        "reward": [1.0, -0.5], "rewards/b/mean": [2.0, 1.0], "rewards/a/mean": [0.0, 1.0],
        "off_policy/lag_mean": [3.0, 4.0], "off_policy/ess": [1.0, 0.5], "buffer/size": [8.0, 9.0],
        "grad_norm": [0.5, nan], "kl": [nan, nan],
    }  # fmt: skip
    drawn = Charts([pd.DataFrame(steps), pd.DataFrame({"grad_norm": [0.25]})]).panels()
    by_title = {chart["title"]: chart for chart in drawn}
    reward = by_title["reward"]
    assert reward["metrics"] == ("reward", "rewards/a/mean", "rewards/b/mean")
    assert reward["labels"] == ("reward", "a", "b") and reward["form"] == "number"
    lag = by_title["lag (steps) and effective sample size"]
    assert (lag["form"], lag["shares"]) == ("positive", ("off_policy/ess",))
    assert by_title["responses in the buffer"]["form"] == "count"
    assert by_title["gradient norm"]["form"] == "positive"
    assert by_title["KL to the reference (nats per token)"]["metrics"] == ()
    drawn = Charts([pd.DataFrame({"off_policy/ess": [0.5]})]).panels()
    (only,) = (chart for chart in drawn if chart["metrics"])
    assert (only["form"], only["shares"]) == ("share", ())  # the axis on the left


MEASURED = [("distance", "distance", "number"), ("win_rate", "win rate", "share")]


@pytest.mark.parametrize(("score", "title", "form"), MEASURED)
def test_what_a_task_measures_has_a_chart_with_standard_errors(score, title, form):
    """Diversity of red-teaming, beside its success rate; the win rate of TL;DR."""
    names = ("reward", "pass@1", score, f"{score}_stderr")
    evaluations = pd.DataFrame({f"eval/sampled_{name}": [0.5, 0.25] for name in names})
    evaluations["requested"] = [0.0, 10.0]  # the step of the request, which is no metric
    shown = Charts([evaluations]).sections()
    drawn = {chart["title"]: chart for chart in shown["Held-out prompts"][1]}
    chart = drawn[title]
    assert (chart["metrics"][0], chart["form"]) == (f"eval/sampled_{score}", form)
    assert chart["spread"][0] == f"eval/sampled_{score}_stderr"
    assert drawn.keys().isdisjoint({"pass@1", "reward"})  # a panel and the reward chart have these
    assert OTHERS not in shown


def test_each_reward_function_and_each_unknown_metric_has_a_chart(tmp_path):
    run = write(tmp_path / "run", evaluations=())
    row = {"time": 30.0, "samples_generated": 500, "samples_trained": 400, "ppo/value_error": 0.5}
    row |= {"rewards/format/mean": 0.5, "rewards/format/std": 0.25, "reward": 1.0}
    Journal(run, QUIET).row(13, row)
    html = report([run]).read_text()
    by_title = {chart["title"]: chart for chart in charts(html)}
    assert by_title["format, mean ± standard deviation"]["spread"] == ["rewards/format/std"]
    assert "ppo/value_error" in by_title and "rewards/format/std" not in by_title
    assert html.index("<h2>Reward functions") < html.index("<h2>All other metrics")


def test_a_long_run_is_drawn_as_means_of_neighbouring_steps():
    table = pd.DataFrame({"step": np.arange(1.0, 4001), "reward": np.tile([0.0, 1.0], 2000)})
    drawn = columns(table)
    assert len(drawn["step"]) == POINTS and drawn["step"][:2] == [2.5, 6.5]
    assert set(drawn["reward"]) == {0.5}
    assert columns(pd.DataFrame({"a": [1.0, nan], "b": [nan, nan]})) == {"a": [1.0, None]}


def test_the_page_tells_how_each_session_was_started(page):
    told = ("2026-01-02T03:04:05+00:00", "Resumed at step 7", "1a2b3c-dirty", "not in a repository")
    told += ("python 3.12.1, torch 2.9.1", "2 cores, 24 GiB; Linux")
    for text in (*told, "1,234,567, of which 89 are trained"):
        assert text in page, text


@pytest.mark.parametrize("ended", [False, True])
def test_warnings_are_shown_of_a_run_that_goes_on_and_of_one_that_has_ended(tmp_path, ended):
    run = write(tmp_path / "run")
    if ended:
        summarize(run, finished=True, steps=12)
    assert "Warnings" not in report([run]).read_text()
    text = "62% of the groups had equal rewards; <b>raise</b> sampling.samples"
    row = {"step": 10, "key": "equal_rewards", "text": text}
    (run / WARNINGS).write_text(json.dumps(row) + "\n")
    html = report([run]).read_text()
    assert "<h2>Warnings</h2>" in html
    assert "&lt;b&gt;raise&lt;/b&gt; sampling.samples" in html


def test_the_facts_of_a_finished_run_are_those_of_its_summary(page):
    for value in ("12 of 12 (finished)", "31.5 s", "0 → 12", "10.0% ± 10.0% → 70.0% ± 70.0%"):
        assert f"<dd>{value}</dd>" in page.replace("\N{NO-BREAK SPACE}", " ")
    assert fact(page, "Trainer waited") == ["6.25% of the time"]
    assert fact(page, "Searchers waited") == ["12.50% of the time"]
    assert fact(page, "Samples generated") == ["512"]
    assert fact(page, "Lag") == ["1.5 steps, at most 3"]


def test_several_runs_are_compared(comparison):
    assert headline(comparison, "run") == ["steady", "_costs_$5", "ungraded", "resumed"]
    training = ["0.150 → 1.150", "0.100 → 0.400", "0.150 → 1.150", "0.100 → 0.700"]
    assert headline(comparison, "Training reward, first → last tenth") == training
    heads, *rows = table(comparison, "differences in the config")
    assert heads == ["key", "steady", "_costs_$5", "ungraded", "resumed"]
    assert rows == [["objective.beta", "0.02", "0.5", "0.02", "0.02"]]


def test_runs_are_compared_by_reward_where_one_has_no_pass_rate(comparison):
    reward = "0.100 ± 0.100 → 0.700 ± 0.700"
    shown = [reward, "–", reward, "0.100 ± 0.100 → 0.350 ± 0.350"]
    assert headline(comparison, "Held-out reward, sampled") == shown
    assert headline(comparison, "Evaluated at step") == ["0 → 12", "–", "0 → 12", "0 → 5"]
    assert "Held-out pass@1" not in comparison


def test_an_evaluation_set_has_its_own_scores_and_chart(page, comparison):
    """Its pass rate is shown, though one of the other runs has none."""
    passed = "10.0% ± 10.0% → 70.0% ± 70.0%"
    assert headline(comparison, "hard pass@1, sampled") == [passed, "–", "–", "–"]
    titles = [[chart["title"] for chart in charts(html)] for html in (page, comparison)]
    assert "hard pass@1" not in titles[0] and "hard pass@1" in titles[1]


def test_the_facts_of_an_unfinished_run_are_those_of_its_steps(comparison):
    assert headline(comparison, "Steps") == [
        "12 of 12 (finished)", "4 of 12 (crashed)", "12 of 12 (stopped)", "7 of 12 (crashed)",
    ]  # fmt: skip
    assert headline(comparison, "Time") == ["31.5 s", "8 s", "31.5 s", "14 s"]
    waited = [f"{share} of the time" for share in ("6.25%", "25.00%", "6.25%", "25.00%")]
    assert fact(comparison, "Trainer waited") == waited
    assert fact(comparison, "Samples generated") == ["512", "160", "512", "280"]


def test_a_wait_of_an_unfinished_run_counts_by_its_time(tmp_path):
    """Twelve steps of 2 s, and one of 76 s in which the trainer waited."""
    run = write(tmp_path / "run", steps=1)
    assert fact(report([run]).read_text(), "Trainer waited") == ["25.00% of the time"]
    run = write(tmp_path / "slow")
    row = {"time": 100.0, "samples_generated": 500, "samples_trained": 400, "reward": 1.0}
    Journal(run, QUIET).row(13, {**row, "wait/trainer": 1.0, "wait/searchers": 0.0})
    html = report([run]).read_text()
    assert fact(html, "Trainer waited") == ["83.16% of the time"]
    assert fact(html, "Searchers waited") == ["2.81% of the time"]


def test_one_evaluation_is_no_progress(tmp_path):
    """A run that was stopped after its first evaluation has no score after training."""
    html = report([write(tmp_path / "run", evaluations=(0,))]).read_text()
    assert "<dd>10.0%\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}10.0%</dd>" in html
    assert "<dt>Evaluated at step</dt><dd>0</dd>" in html


def test_a_comparison_shows_the_others_where_a_run_has_no_metrics_yet(tmp_path):
    runs = [write(tmp_path / "fact"), write(tmp_path / "key"), write(tmp_path / "new", 0, ())]
    for some in (runs, runs[::-1]):
        html = report(some, tmp_path / "page").read_text()
        assert "<h1>Comparison of 3 runs</h1>" in html
        steps = dict(zip(headline(html, "run"), headline(html, "Steps"), strict=True))
        ended = dict.fromkeys(("fact", "key"), "12 of 12 (crashed)")
        assert steps == ended | {"new": "no metrics yet"}
        assert len(data(html)) == 2 and set(headline(html, "Time")) == {"24 s", "–"}


def test_columns_of_the_data_and_repeats_stand_with_a_group(tmp_path):
    """The id keeps rows of one prompt apart. Old runs have neither."""
    run = write(tmp_path / "run", evaluations=())
    journal = Journal(run, QUIET)
    for row, drawn in (("a", 3), ("b", 1)):
        columns = {"answer": f"17 {row}", "source": [1, None]}
        journal.sample(4, "train", "8+9=", "17", 1.0, 3, id=row, columns=columns, drawn=drawn)
    _, first, second = data(report([run]).read_text())[0]["groups"]
    assert (first["id"], second["id"]) == ("a", "b")
    assert first["columns"] == {"answer": "17 a", "source": [1, None]}
    assert [g["completions"][0]["drawn"] for g in (first, second)] == [3, 1]
    assert first.keys() == {"kind", "id", "prompt", "columns", "completions"}  # each text once


def write_scores(run: Path, prompts: str, scores: list[float | None]) -> None:
    row = {"step": 12, "requested": 12, "prompts": prompts, "scores": scores}
    (run / SCORES).write_text(json.dumps(row) + "\n")


def test_a_difference_is_paired_by_prompt_and_marked_above_two_standard_errors(tmp_path):
    """Differences of .5, .5, .5 and 0; without the unscored prompt, of .5, .5 and -.5."""
    runs = [write(tmp_path / name, beta=beta) for name, beta in (("a", 0.1), ("b", 0.2))]
    write_scores(runs[0], "same", [0.0, 0.25, 0.5, 0.5])
    write_scores(runs[1], "same", [0.5, 0.75, 1.0, 0.5])
    html = report(runs, tmp_path / "both").read_text()
    heads, row = table(html, "differences")
    assert heads == ["run", "same step", "best step"] and row[0] == "b − a"
    assert row[1] == "+37.5% ± 12.5% ★ b is better (step 12, paired over 4 prompts)"
    assert "One seed of each setting" in html
    write_scores(runs[1], "same", [0.5, None, 1.0, 0.0])
    _, row = table(report(runs, tmp_path / "both").read_text(), "differences")
    assert row[1] == "+16.7% ± 33.3%, not clear (step 12, paired over 3 prompts)"
    write_scores(runs[1], "other", [0.5, 0.75, 1.0, 0.5])
    _, row = table(report(runs, tmp_path / "both").read_text(), "differences")
    assert row[1] == "+0.0% ± 99.0%, not clear (step 12, not paired)"


def test_a_difference_without_a_spread_is_not_marked(tmp_path):
    runs = [write(tmp_path / name, beta=beta) for name, beta in (("a", 0.1), ("b", 0.2))]
    write_scores(runs[0], "same", [0.25, 0.5])
    write_scores(runs[1], "same", [0.5, 0.75])
    _, row = table(report(runs, tmp_path / "both").read_text(), "differences")
    assert row[1] == "+25.0% ± 0.0%, not clear (step 12, paired over 2 prompts)"


def test_pass_at_1_of_prompts_is_not_shown_as_a_reward(tmp_path):
    """The third run has rewards only, so all are compared by reward."""
    runs = [write(tmp_path / name, beta=beta) for name, beta in (("a", 0.1), ("b", 0.2))]
    runs.append(write(tmp_path / "c", passes=False))
    for run, score in zip(runs, (0.0, 1.0, 0.5), strict=True):
        write_scores(run, "same", [score, score, 0.25])
    _, *rows = table(report(runs, tmp_path / "all").read_text(), "differences")
    assert all("not paired" in row[1] for row in rows)


def test_runs_that_differ_in_the_seed_have_one_setting(tmp_path):
    """Also where their folders are shown relative to the folder in which they were started."""
    runs = [write(tmp_path / name) for name in ("a", "b", "c")]
    for seed, path in enumerate(runs):
        config = json.loads((path / CONFIG).read_text())
        config["run"] |= {"seed": min(seed, 1), "base": str(tmp_path)}
        config["objective"]["beta"] = 0.5 if seed == 2 else 0.02
        (path / CONFIG).write_text(json.dumps(config))
    assert "Seeds of the 2 settings: 2, 1." in report(runs, tmp_path / "all").read_text()


def test_a_run_that_crashed_says_how_to_continue(tmp_path):
    run = write(tmp_path / "run", steps=4, evaluations=(0,))
    assert "To continue it" not in report([run]).read_text()  # it has saved nothing
    (run / "checkpoints" / "step-00000002").mkdir(parents=True)
    html = report([run]).read_text()
    assert "4 of 12 (crashed)" in html and f"<code>tba train --resume {run}</code>" in html


def test_runs_of_different_tasks_are_not_compared(tmp_path):
    runs = [write(tmp_path / name) for name in ("a", "b")]
    config = json.loads((runs[1] / CONFIG).read_text())
    config["task"]["use"] = "math"
    (runs[1] / CONFIG).write_text(json.dumps(config))
    html = report(runs, tmp_path / "both").read_text()
    assert "a and b have different tasks (arithmetic and math)." in html
    assert 'data-name="differences"' not in html


def test_the_page_says_what_was_run_and_how_to_export_the_best(tmp_path):
    run = write(tmp_path / "run")
    html = report([run]).read_text().replace("\N{NO-BREAK SPACE}", " ")
    for label in ("Model", "Data", "Reward", "Objective", "Learning rate", "Seed", "Devices"):
        assert f"<dt>{label}</dt>" in html
    assert "Best checkpoint: step 12: pass@1 70.0% ± 70.0%; its checkpoint was not kept" in html
    (run / "checkpoints" / "step-00000012").mkdir(parents=True)
    assert f"<code>tba export {run} FOLDER --step 12</code>" in report([run]).read_text()


def test_a_folder_that_is_no_run_is_refused_with_what_to_type(tmp_path):
    with pytest.raises(ValueError, match=r"not a run folder.*name one or more folders of runs, or"):
        report([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="name at least one run: tba report RUN"):
        report([])
    run = write(tmp_path / "fresh", steps=0, evaluations=())
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / CONFIG).write_text("{}")
    with pytest.raises(ValueError, match=f"such as `tba report {re.escape(str(run))}`"):
        report([tmp_path])
    with pytest.raises(ValueError, match="no metrics yet; type"):
        report([run])


def test_settings_are_shown_with_the_steps_that_had_them(tmp_path):
    """Also in a comparison; a session without a step, and steps taken again, are not credited."""
    run, other = write(tmp_path / "run"), write(tmp_path / "other")
    config = json.loads((run / CONFIG).read_text())
    note = "stored samples scored again after a change of rw.py"
    rows = []
    for step, size, rewards in ((0, 16, ""), (4, 32, ""), (9, 99, ""), (6, 64, note), (8, 64, "")):
        trainer = {**config["trainer"], "batch_size": size}
        own = {"step": step, "config": {**config, "trainer": trainer}, "rewards": rewards}
        rows.append(json.dumps({**STARTED, **own}) + "\n")
    (run / SESSIONS).write_text("".join(rows))
    text = "16 (steps 1–4), then 32 (steps 5–6), then 64 (steps 7–12)"
    assert f"<dt><code>trainer.batch_size</code></dt><dd>{text}</dd>" in report([run]).read_text()
    assert f"{note} at step 6 (steps 7–12)" in report([run]).read_text()
    assert "Settings that changed" not in report([other]).read_text()
    compared = report([run, other], tmp_path / "both").read_text()
    assert "Settings that changed in run" in compared and compared.count(text) == 2


def test_the_pictures_in_the_docs_are_of_these_templates():
    path = Path(__file__).parents[2] / "scripts" / "screenshots.py"
    screenshots = runpy.run_path(str(path))
    old = "the templates changed: take the pictures again with scripts/screenshots.py"
    assert screenshots["DIGEST"].read_text().strip() == screenshots["digest"](), old

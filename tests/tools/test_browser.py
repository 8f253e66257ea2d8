"""The page of runs in a browser: Playwright, and a Chromium of the system."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tba.config.schema import DEFAULT, load
from tba.open import run
from tba.runs.folder import METRICS, SAMPLES, SUMMARY, WARNINGS, locked, read
from tba.runs.metrics import PANELS
from tba.tools.report import report, watch
from tba.tools.report.runs import AXES
from tba.tools.study import Ledger, Trial

ROOT = Path(__file__).parents[2]

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt install chromium")
HOSTILE = (
    "</script><script>document.title='stolen'</script><!-- <script>"
    "<img src=x onerror=\"document.title='stolen'\"> \u2028 {{ 7 * 7 }} &lt;b&gt;"
)
NARROW, WIDE = 390, 1440


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of the demo, in this process."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    settings = [
        f"run.folder={folder}", "runtime.use=local", "run.steps=30", "eval.prompts=16",
        "eval.every=10", "log.sample_every=5", "log.console=off", "log.report_to=[]",
        "reward.isolate=none", "sampling.samples=8", "trainer.group_size=8",
        "trainer.batch_size=32",
    ]  # fmt: skip
    run(load(DEFAULT, settings))
    return folder


@dataclass(frozen=True)
class Made:
    """What `make demo` made, and the processor time that it took in seconds."""

    folder: Path
    seconds: float


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The run and the page of `make demo`, in a folder of its own."""
    folder = tmp_path_factory.mktemp("make")
    installed = ["-o", ".venv/installed", f"BIN={Path(sys.executable).parent}"]
    command = ["make", "-f", str(ROOT / "Makefile"), *installed, "demo"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=folder, env=environment) as process:
        seconds = processor_seconds(process)
    assert process.returncode == 0
    return Made(folder / "runs" / "demo", seconds)


def processor_seconds(process: subprocess.Popen[bytes]) -> float:
    """Wait for a process, and return the processor time of all that it started.

    It is read four times a second, as the searchers are not children that it waits for.
    """
    root, seconds = psutil.Process(process.pid), {}
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            for each in root.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    times = each.cpu_times()
                    seconds[each.pid] = times.user + times.system
        time.sleep(0.25)
    return sum(seconds.values())


@pytest.fixture(scope="module")
def hostile(demo: Path) -> Path:
    """A copy of the run with hostile text wherever the page shows text."""
    folder = demo.with_name("<img src=x onerror=alert(1)> 'a' & {{ 7 * 7 }}")
    shutil.copytree(demo, folder)
    rows = [
        {"step": 10, "kind": kind, "version": 4, "reward": -7.5, "prompt": HOSTILE + kind}
        for kind in ("train", "eval")
    ]
    about = {"completion": HOSTILE, "id": HOSTILE, "columns": {HOSTILE: HOSTILE, "answer": HOSTILE}}
    about["notes"] = {HOSTILE: HOSTILE}
    with (folder / SAMPLES).open("a") as file:
        file.writelines(json.dumps({**row, **about}) + "\n" for row in rows)
    with (folder / WARNINGS).open("a") as file:
        file.write(json.dumps({"step": 10, "key": "kl", "text": HOSTILE}) + "\n")
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as started:
        # Chromium refuses to run as root within its sandbox
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()


@contextmanager
def opened(
    browser: Any, path: Path, width: int = WIDE, scheme: str = "light", drawn: str = ".wide canvas"
) -> Iterator[Any]:
    """A page without a network. It must load nothing else, and report no error."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_offline(True)
    page = context.new_page()
    problems: list[str] = []
    loaded: list[str] = []
    errors = ("error", "assert")  # Chromium also warns of what this test reads from a canvas
    page.on("console", lambda m: problems.append(m.text) if m.type in errors else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: loaded.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector(drawn)
    page.add_style_tag(content=".group { content-visibility: visible; }")  # to read what is below
    yield page
    assert problems == []
    assert loaded == [path.as_uri()]
    context.close()


def until(page: Any, expression: str) -> None:
    """Wait for an expression. Playwright's own way needs `eval`, which the page forbids."""
    for _ in range(400):
        try:
            if page.evaluate(expression):
                return
        except Exception as error:
            if "navigation" not in str(error):  # of a page that loads again
                raise
        page.wait_for_timeout(50)
    raise TimeoutError(expression)


@pytest.mark.parametrize(("width", "scheme"), [(NARROW, "dark"), (WIDE, "light")])
def test_charts_fit_the_screen_and_follow_the_theme(browser, demo, width, scheme):
    path = report([demo])
    assert path.stat().st_size < 3e6
    with opened(browser, path, width, scheme) as page:
        for closed in ("All other metrics", "Without values, or always 0"):
            page.locator("summary", has_text=closed).click()
        page.wait_for_selector(".section canvas")
        drawn = "selector => document.querySelectorAll(selector).length"
        until(page, f"({drawn})('canvas') === ({drawn})('.plot')")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for canvas in page.locator("canvas").all():
            assert 200 < canvas.bounding_box()["width"] < width
        dark = page.evaluate("getComputedStyle(document.querySelector('figure')).backgroundColor")
        assert (dark == "rgb(28, 32, 39)") == (scheme == "dark")
        ink = page.evaluate(BRIGHTNESS)
        page.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
        until(page, f"{BRIGHTNESS} {'<' if scheme == 'dark' else '>'} {ink}")


BRIGHTNESS = """(() => {
    const canvas = document.querySelector(".wide canvas");
    const { data } = canvas.getContext("2d").getImageData(0, 0, 50, canvas.height);
    let sum = 0, ink = 0;
    for (let i = 0; i < data.length; i += 4) { sum += data[i] * data[i + 3]; ink += data[i + 3]; }
    return sum / ink;
})()"""
"""Mean red of the labels of the axis."""


DRAWN = "document.querySelector('.wide canvas').toDataURL()"


def check_switch(browser: Any, path: Path, run: Path) -> None:
    """Draw the rewards over steps, time and samples, and over steps again."""
    rows = read(run / METRICS)
    with opened(browser, path) as page:
        legend, seen = page.locator(".wide .u-legend"), []
        assert legend.inner_text().startswith("steps")
        for column, label in AXES.items():
            page.get_by_label(label, exact=True).check()
            until(page, f"!{json.dumps(seen)}.includes({DRAWN})")
            seen.append(page.evaluate(DRAWN))
            assert legend.inner_text().startswith(label)
            at_the_end = legend.locator(".u-value").first.inner_text()
            last = max(row[column] for row in rows if column in row)
            assert float(at_the_end.replace(",", "")) == pytest.approx(last, rel=1e-3)
        page.get_by_label("steps", exact=True).check()
        until(page, f"{json.dumps(seen[:1])}.includes({DRAWN})")  # as before


def test_the_switch_draws_the_rewards_over_steps_time_and_samples(browser, demo):
    check_switch(browser, report([demo]), demo)


def test_charts_are_usable_by_keyboard_and_have_a_table(browser, demo):
    with opened(browser, report([demo])) as page:
        plot = page.locator(".wide .plot")
        assert "training batches from" in plot.get_attribute("aria-label")
        plot.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        told = page.locator("#cursor").inner_text()
        assert told.startswith("steps 1; training batches 0.")
        page.locator(".wide .values summary").focus()
        page.keyboard.press("Enter")
        rows = page.locator(".wide .values tbody tr")
        rows.first.wait_for()
        assert 10 < rows.count() < 40
        assert page.locator(".wide .values thead").inner_text().split("\t")[0] == "steps"


def test_completions_are_filtered_and_groups_stand_side_by_side(browser, demo):
    with opened(browser, report([demo])) as page:
        count, kept = page.locator("#count"), page.locator(".completion:not(.other) > .reward")
        page.locator("[name=order]").select_option("")
        stored = count.inner_text()
        page.locator("[name=kind]").select_option("train")
        page.locator("[name=reward_max]").fill("0")
        assert count.inner_text() != stored and kept.count() > 0
        assert all(text.split(" × ")[0] == "0" for text in kept.all_inner_texts())
        page.locator("[name=whole]").uncheck()
        assert page.locator(".completion.other").count() == 0
        page.locator("[name=reward_max]").fill("")
        page.locator("[name=step_min]").fill("10")
        page.locator("[name=step_max]").fill("15")
        headings = page.locator(".group h3").all_inner_texts()
        assert [text.split(" · ")[0] for text in headings] == [
            "batch of step 10",
            "batch of step 15",
        ]
        page.locator("[name=age_min]").fill("1000")
        assert count.inner_text() == "0 completions of 0 prompts"
        for name in ("step_min", "step_max", "age_min"):
            page.locator(f"[name={name}]").fill("")
        page.locator("[name=kind]").select_option("eval")
        shown = page.locator(".group").first.locator(".completion > .reward").all_inner_texts()
        times = [int(text.partition(" × ")[2] or 1) for text in shown]
        assert sum(times) == 4  # of steps 0, 10, 20 and 30


def test_hostile_text_stays_text(browser, demo, hostile, tmp_path):
    for path in (report([hostile]), report([demo, hostile], tmp_path)):
        with opened(browser, path, NARROW) as page:
            page.locator("[name=reward_max]").fill("-7")
            texts = page.locator(".group .text").all_inner_texts()
            assert page.locator(".answer dd").all_inner_texts() == [HOSTILE, HOSTILE]
            assert texts == [HOSTILE + "train", HOSTILE, HOSTILE + "eval", HOSTILE]
            assert page.locator(".warnings li").last.inner_text() == HOSTILE
            assert page.evaluate("document.documentElement.scrollWidth") <= NARROW
            assert page.locator("img").count() == 0 and "stolen" not in page.title()
            assert hostile.name in page.locator("body").inner_text()


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_the_first_screen_has_twelve_panels_with_values_at_the_cursor(
    browser, demo, hostile, tmp_path, width
):
    for path in (report([demo]), report([demo, hostile], tmp_path)):
        with opened(browser, path, width) as page:
            panels = page.locator(".panels").first.locator("figure")
            shown = panels.locator("figcaption").all_inner_texts()
            folded = page.locator("summary", has_text="always 0").inner_text().partition(": ")[2]
            titles = [panel.title for panel in PANELS]
            assert shown == [title for title in titles if title not in folded]
            assert sum(title in folded for title in titles) == 12 - len(shown) < 5
            drawn = "document.querySelector('.panels').querySelectorAll('canvas').length"
            until(page, f"{drawn} === {len(shown)}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            rows = {figure.bounding_box()["y"] for figure in panels.all()}
            assert len(rows) == (len(shown) if width == NARROW else 2)
            shown = "document.querySelector('.panels .u-legend').innerText"
            at_the_end = page.evaluate(shown)
            panels.first.locator(".plot").focus()
            page.keyboard.press("ArrowRight")
            until(page, f"{shown} !== {json.dumps(at_the_end)}")
            told = page.locator("#cursor").inner_text()
            assert told.startswith(("steps 1; reward 0.", "steps 1; demo 0."))


@pytest.fixture(scope="module")
def spiky(demo: Path) -> Path:
    """A copy of the run in which `kl/k3` has a spike, and is large at the end, with two columns."""
    folder = demo.with_name("spiky")
    shutil.copytree(demo, folder)
    rows = read(folder / METRICS)
    for row in (row for row in rows if "kl/k3" in row):
        row["kl/k3"] = {12: 570.0, 29: 3.0, 30: 3.1}.get(row["step"], 0.02 + 0.001 * row["step"])
        row["kl"] = 0.01
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / SAMPLES).write_text("")
    for step, answer, drawn in ((1, "=1+1", 9), (1, "7", 2), (2, "7", 1)):
        row = {"step": step, "kind": "train", "version": 0, "reward": float(answer == "7")}
        row |= {"id": "r1", "prompt": "3+4=", "completion": answer, "drawn": drawn}
        with (folder / SAMPLES).open("a") as file:
            file.write(json.dumps({**row, "columns": {"answer": "7", "level": 2}}) + "\n")
    return folder


def test_a_panel_leaves_out_an_outlier_until_it_is_asked_for(browser, spiky):
    """A value that its neighbours do not share is left out, and what stays is not."""
    with opened(browser, report([spiky])) as page:
        panel = page.locator(".panels figure", has_text="KL to the reference")
        highest = "figure => charts.get(figure.querySelector('.plot')).scales.y.max"
        panel.locator("canvas").wait_for()
        assert 3.1 < panel.evaluate(highest) < 4
        button = panel.locator(".outliers")
        assert button.inner_text() == "1 outlier: show"
        button.click()
        assert panel.evaluate(highest) > 570
        assert panel.locator(".outliers").inner_text() == "1 outlier: leave out"
        assert page.locator(".panels .outliers").count() < 4


def test_repeats_of_an_answer_are_one_with_the_right_answer_above(browser, spiky):
    with opened(browser, report([spiky])) as page:
        group = page.locator(".group").first
        assert group.locator("h3").inner_text() == "batch of step 1 · row r1"
        rewards = group.locator(".rewards .reward").all_inner_texts()
        assert rewards == ["1 × 2", "0 × 9"]
        assert group.locator(".completion > .reward").all_inner_texts() == ["0 × 9", "1 × 2"]
        assert group.locator(".columns").inner_text().split() == [
            "right", "answer", "7", "level", "2",
        ]  # fmt: skip
        assert page.locator("#count").inner_text() == "12 completions of 2 prompts"
        assert page.locator(".badge").count() == page.locator(".badge.scored").count() > 0


def test_a_table_is_sorted_and_downloaded(browser, demo, spiky, tmp_path):
    """Numbers by size; in the file, no text begins a formula."""
    formula = spiky.with_name("=1+1")
    shutil.copytree(spiky, formula)
    rows = [{**row, "time": row["time"] + 7200} for row in read(formula / METRICS)[:9]]
    (formula / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (formula / SUMMARY).unlink()
    with opened(browser, report([demo, formula], tmp_path / "drawn")) as page:
        table = page.locator("table[data-name='before and after']")
        order = table.locator("tbody th")
        assert order.all_inner_texts() == ["demo", "=1+1"]
        by_steps = table.get_by_role("button", name="Steps")
        by_steps.click()
        assert order.all_inner_texts() == ["=1+1", "demo"]
        by_steps.click()
        assert order.all_inner_texts() == ["demo", "=1+1"]
        assert table.locator("[aria-sort]").get_attribute("aria-sort") == "descending"
        table.get_by_role("button", name="Time").click()  # "9.9 s" and "2.0 h"
        assert order.all_inner_texts() == ["demo", "=1+1"]
        with page.expect_download() as download:
            page.locator("button[title='Download before and after as CSV']").click()
        lines = Path(download.value.path()).read_text().splitlines()
        assert download.value.suggested_filename == "before_and_after.csv"
        assert lines[0].startswith('"run","Steps","Time","Held-out pass@1, sampled",')
        assert len(lines) == 3
        assert lines[1].startswith('"demo","') and lines[2].startswith('"\'=1+1","')


@pytest.mark.parametrize(("width", "scheme"), [(NARROW, "dark"), (WIDE, "light")])
def test_the_charts_of_a_study_follow_the_theme(browser, tmp_path, width, scheme):
    rates = (1e-5, 3e-5, 1e-3)
    trials = []
    for i, rate in enumerate(rates):
        folder, settings = f"g/rate={rate}", {"trainer.learning_rate": rate}
        run, last = tmp_path / folder, {"step": 9, "sampled_pass@1": 0.2 + i / 4}
        run.mkdir(parents=True)
        config = {"objective": {"use": "tb"}, "run": {"seed": 0}}
        totals = {
            "samples_generated": 9, "samples_trained": 9, "seconds": 10 ** (i + 1), "steps": 9,
        }  # fmt: skip
        summary = {"finished": True, **totals, "eval/last": last}
        rows = [{"step": 9, "time": 1.0, **totals}, {"step": 9, "eval/sampled_pass@1": 0.2 + i / 4}]
        (run / "config.json").write_text(json.dumps(config))
        (run / SUMMARY).write_text(json.dumps(summary))
        (run / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
        trials.append(Trial("g", folder, HOSTILE, settings, settings, "finished"))
    Ledger(HOSTILE, None, trials).write(tmp_path)
    with opened(browser, report([tmp_path]), width, scheme, ".study canvas") as page:
        until(page, "document.querySelectorAll('canvas').length === 2")
        assert page.locator("h1").inner_text() == HOSTILE and page.title() != "stolen"
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        against = page.locator("#g_against .plot")
        scale = "plot => [charts.get(plot).scales.x.min, charts.get(plot).scales.x.max]"
        low, high = against.evaluate(scale)
        assert 0 < low < 1e-5 and 1e-3 < high < 2e-3
        ticks = against.evaluate("plot => charts.get(plot).axes[0]._values")
        assert ticks == ["1e-5", "3e-5", "0.001"]
        dark = page.evaluate("getComputedStyle(document.querySelector('figure')).backgroundColor")
        assert (dark == "rgb(28, 32, 39)") == (scheme == "dark")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_page_of_make_demo_opens(browser, made):
    """The page that `make demo` wrote, which is not drawn again."""
    path = made.folder / "report" / "index.html"
    assert path.stat().st_size < 3e6
    for width in (NARROW, WIDE):
        with opened(browser, path, width) as page:
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.locator(".completion").count() > 0
    check_switch(browser, path, made.folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_takes_no_more_processor_time_than_three_minutes_on_two_cores(made):
    """Unlike its time by the clock, this hardly depends on what else runs."""
    summary = json.loads((made.folder / SUMMARY).read_text())
    assert summary["finished"] and summary["steps"] == 300
    assert 10 < made.seconds < 2 * 180  # read in vain, it would be near 0


def test_a_watched_page_reloads_and_keeps_its_place(browser, demo, tmp_path):
    """A run that is written while a browser shows its page; the page ends as one that stays."""
    run, told = tmp_path / "live", []
    shutil.copytree(demo, run)
    lines = (run / METRICS).read_text().splitlines(keepends=True)
    (run / SUMMARY).unlink()
    (run / METRICS).write_text("".join(lines[:20]))
    path = run / "report" / "index.html"
    path.unlink(missing_ok=True)
    with ThreadPoolExecutor(1) as pool, ExitStack() as running:
        running.enter_context(locked(run))
        watched = pool.submit(watch, [run], None, told.append, every=0.5)
        while not told and not watched.done():
            time.sleep(0.05)
        page = browser.new_page(viewport={"width": WIDE, "height": 700})
        page.goto(path.as_uri())
        page.wait_for_selector(".wide canvas")
        page.evaluate(SETTLE)
        page.evaluate("window.isOld = true")
        (run / METRICS).write_text("".join(lines))
        until(page, f"!window.isOld && document.body.innerText.includes('30 of 30') && {SETTLED}")
        running.close()
        assert watched.result(timeout=30) == path
    assert "step 30/30, running" in told[-1] and "data-reload" not in path.read_text()
    page.close()


HEAD = "[...document.querySelectorAll('h2')].find(head => head.textContent === 'Held-out prompts')"
SETTLE = f"""(() => {{
    document.querySelector("[name=kind]").value = "eval";
    document.querySelector(".panels .values").open = true;
    {HEAD}.scrollIntoView();
}})()"""
SETTLED = f"""document.querySelector("[name=kind]").value === "eval" &&
    document.querySelector(".panels .values").open &&
    Math.abs({HEAD}.getBoundingClientRect().top - 80) < 4"""
"""The filter, the opened table, and the scroll position below the contents, which are sticky."""


PLOT = "charts.get(document.querySelector('.wide .plot'))"


def test_runs_are_hidden_by_a_click_and_legends_have_names(browser, demo, spiky, tmp_path):
    with opened(browser, report([demo, spiky], tmp_path)) as page:
        legend = page.locator(".wide .u-legend")
        assert "demo" in legend.inner_text() and "spiky" in legend.inner_text()
        assert "paired over 16 prompts" in page.locator("table[data-name=differences]").inner_text()
        page.evaluate(f"{PLOT}.setScale('x', {{ min: 5, max: 20 }})")  # and charts stay zoomed
        page.locator(".key label", has_text="spiky").click()
        until(page, "!document.querySelector('.wide .u-legend').innerText.includes('spiky')")
        assert "demo" in legend.inner_text()
        assert page.evaluate(f"(({{ min, max }}) => [min, max])({PLOT}.scales.x)") == [5, 20]
        names = page.locator(".u-series:not(.quiet) th").all_inner_texts()
        assert names and all(name.strip() for name in names)


def test_panels_of_several_runs_name_a_metric_once(browser, demo, spiky, tmp_path):
    """Its other lines have the colour of their run; screen readers get all names."""
    with opened(browser, report([demo, spiky], tmp_path)) as page:
        panel = page.locator(".panels figure", has_text="KL to the reference")
        panel.locator("canvas").wait_for()
        labels = panel.locator(".u-series:not(.quiet) th").evaluate_all(LABELS)
        assert labels[1:] == ["demo, kl", "spiky, kl", "demo, k3", "spiky, k3"]
        hidden = panel.locator("th .again").evaluate_all(LABELS)
        assert hidden == ["demo,", "spiky,", "kl", "demo,", "spiky,", "k3"]


LABELS = "parts => parts.map(part => part.textContent.replace(/\\s+/g, ' ').trim())"


def test_a_printed_comparison_of_many_runs_fits_the_paper(browser, demo, tmp_path):
    runs = [demo]
    for number in range(5):
        runs.append(tmp_path / f"a_run_with_a_name_{number}")
        shutil.copytree(demo, runs[-1])
    with opened(browser, report(runs, tmp_path / "six")) as page:
        page.emulate_media(media="print")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        ends = (
            "s => [...document.querySelectorAll(s)].map(part => part.getBoundingClientRect().right)"
        )
        paper = page.evaluate("document.body.getBoundingClientRect().right")
        for parts in ("main table", ".plot canvas"):
            assert max(page.evaluate(ends, parts)) <= paper


def test_a_dialogue_is_a_bubble_for_each_turn(browser, demo, tmp_path):
    """Sampled parts, tool calls, results, a second context, and what was cut off."""
    run = tmp_path / "agent"
    shutil.copytree(demo, run)
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call><|im_end|>'
    given = "\n<|im_start|>tool\n3 <b>\n<|im_start|>assistant\n"
    texts = [("sampled", call), ("given", given), ("sampled", "three"), ("restart", "again"),
             ("sampled", "3")]  # fmt: skip
    ends = np.cumsum([len(text) for _, text in texts]).tolist()
    row = {"step": 1, "kind": "train", "version": 0, "reward": 1.0, "id": "7", "cut": True}
    row |= {"prompt": "<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n"}
    row |= {"completion": "".join(text for _, text in texts)}
    row["authors"] = [[who, end] for (who, _), end in zip(texts, ends, strict=True)]
    (run / SAMPLES).write_text(json.dumps(row) + "\n")
    with opened(browser, report([run])) as page:
        group = page.locator(".group")
        roles = group.locator(".role").all_inner_texts()
        assert roles[:3] == ["user", "assistant", "policy"]
        assert group.locator(".turn.sampled").count() == 3
        assert group.locator(".call").inner_text() == "add(a = 1, b = [2])"
        assert group.locator(".token").first.inner_text() == "<|im_start|>user"
        assert group.locator(".context").inner_text().startswith("context 2")
        assert "cut off" in group.locator(".cut").inner_text()
        assert "3 <b>" in group.inner_text()
        assert page.locator(".badge.scored").count() == 0  # all rewards are equal


def test_one_click_leads_to_the_worst_completion_of_the_newest_steps(browser, demo, tmp_path):
    """Among equal rewards, the newest completion comes first."""
    run = tmp_path / "run"
    shutil.copytree(demo, run)
    rows = [(1, 0.0, "old"), (2, 1.0, "right"), (3, 0.0, "new"), (4, None, "not scored")]
    with (run / SAMPLES).open("w") as file:
        for step, reward, text in rows:
            row = {"step": step, "kind": "train", "version": 0, "reward": reward, "id": text}
            file.write(json.dumps({**row, "prompt": "1+1=", "completion": text}) + "\n")
    with opened(browser, report([run])) as page:
        page.locator("#contents a", has_text="Completions").click()
        until(page, "document.querySelector('.group').innerText.includes('new')")
        ids = page.locator(".group h3").evaluate_all("heads => heads.map(h => h.textContent)")
        assert [each.split(" row ")[1] for each in ids] == ["new", "old", "right", "not scored"]


@pytest.mark.parametrize("size", ["A4", "Letter"])
def test_a_printed_page_is_short_and_clips_no_chart(browser, demo, size):
    with opened(browser, report([demo])) as page:
        pages = page.pdf(format=size).count(b"/Type /Page\n")
        assert 1 < pages <= 6
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        widths = "[...charts].map(([place, plot]) => [plot.width, place.clientWidth])"
        assert all(drawn == place for drawn, place in page.evaluate(widths) if place)

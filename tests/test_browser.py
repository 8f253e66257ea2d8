"""The page of runs in a browser: Playwright, and a Chromium of the system."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tba.config.schema import DEFAULT, load
from tba.report import report
from tba.report.charts import AXES
from tba.run import run
from tba.runs.log import METRICS, SAMPLES, SUMMARY, read
from tba.runs.panels import PANELS

ROOT = Path(__file__).parent.parent

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
        "eval.every=10", "log.sample_every=5", "log.console=off", "log.tensorboard=false",
        "reward.isolate=thread",
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
    with (folder / SAMPLES).open("a") as file:
        file.writelines(json.dumps({**row, "completion": HOSTILE}) + "\n" for row in rows)
    summary = json.loads((folder / SUMMARY).read_text())
    (folder / SUMMARY).write_text(json.dumps({**summary, "warnings": [HOSTILE]}))
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
def opened(browser: Any, path: Path, width: int = WIDE, scheme: str = "light") -> Iterator[Any]:
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
    page.wait_for_selector(".wide canvas")
    yield page
    assert problems == []
    assert loaded == [path.as_uri()]
    context.close()


def until(page: Any, expression: str) -> None:
    """Wait for an expression. Playwright's own way needs `eval`, which the page forbids."""
    for _ in range(100):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise TimeoutError(expression)


@pytest.mark.parametrize("width", [NARROW, WIDE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_fit_the_screen_and_follow_the_theme(
    browser: Any, demo: Path, width: int, scheme: str
) -> None:
    path = report([demo])
    assert path.stat().st_size < 3e6
    with opened(browser, path, width, scheme) as page:
        page.locator("summary", has_text="All other metrics").click()
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


def test_the_switch_changes_the_axis_and_values_are_shown_at_the_cursor(
    browser: Any, demo: Path
) -> None:
    with opened(browser, report([demo])) as page:
        chart = page.locator(".wide")
        legend = chart.locator(".u-legend")
        assert legend.inner_text().startswith("steps")
        page.get_by_label("samples generated", exact=True).check()
        assert legend.inner_text().startswith("samples generated")
        at_the_end = legend.inner_text()
        box = chart.locator(".u-over").bounding_box()
        page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.5 * box["height"])
        shown = "document.querySelector('.wide .u-legend').innerText"
        until(page, f"{shown} !== {json.dumps(at_the_end)}")
        assert "±" in legend.inner_text()


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
            assert float(at_the_end) == pytest.approx(last, rel=1e-4)
        page.get_by_label("steps", exact=True).check()
        until(page, f"{json.dumps(seen[:1])}.includes({DRAWN})")  # as before


def test_the_switch_draws_the_rewards_over_steps_time_and_samples(browser: Any, demo: Path) -> None:
    check_switch(browser, report([demo]), demo)


def test_charts_are_usable_by_keyboard_and_have_a_table(browser: Any, demo: Path) -> None:
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


def test_completions_are_filtered_and_groups_stand_side_by_side(browser: Any, demo: Path) -> None:
    with opened(browser, report([demo])) as page:
        count, kept = page.locator("#count"), page.locator(".completion:not(.other) .chip")
        stored = count.inner_text()
        page.locator("[name=kind]").select_option("train")
        page.locator("[name=reward_max]").fill("0")
        assert count.inner_text() != stored and kept.count() > 0
        assert all(text.startswith("reward 0 ·") for text in kept.all_inner_texts())
        page.locator("[name=whole]").uncheck()
        assert page.locator(".completion.other").count() == 0
        page.locator("[name=reward_max]").fill("")
        page.locator("[name=step_min]").fill("10")
        page.locator("[name=step_max]").fill("15")
        headings = page.locator(".group h3").all_inner_texts()
        assert headings == ["batch of step 10", "batch of step 15"]
        page.locator("[name=age_min]").fill("1000")
        assert count.inner_text() == "0 completions of 0 groups"
        for name in ("step_min", "step_max", "age_min"):
            page.locator(f"[name={name}]").fill("")
        page.locator("[name=kind]").select_option("eval")
        assert page.locator(".group").first.locator(".completion").count() == 4  # of 0, 10, 20, 30


def test_hostile_text_stays_text(browser: Any, demo: Path, hostile: Path, tmp_path: Path) -> None:
    for path in (report([hostile]), report([demo, hostile], tmp_path)):
        with opened(browser, path, NARROW) as page:
            page.locator("[name=reward_max]").fill("-7")
            texts = page.locator(".group .text").all_inner_texts()
            assert texts == [HOSTILE + "train", HOSTILE, HOSTILE + "eval", HOSTILE]
            assert page.locator(".warnings li").last.inner_text() == HOSTILE
            assert page.evaluate("document.documentElement.scrollWidth") <= NARROW
            assert page.locator("img").count() == 0 and "stolen" not in page.title()
            assert hostile.name in page.locator("body").inner_text()


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_the_first_screen_has_twelve_panels_with_values_at_the_cursor(
    browser: Any, demo: Path, hostile: Path, tmp_path: Path, width: int
) -> None:
    for path in (report([demo]), report([demo, hostile], tmp_path)):
        with opened(browser, path, width) as page:
            panels = page.locator(".panels figure")
            assert panels.locator("figcaption").all_inner_texts() == [p.title for p in PANELS]
            filled = page.locator(".panels .plot").count()
            assert 9 < filled == 12 - page.get_by_text("no values", exact=True).count()
            until(page, f"document.querySelectorAll('.panels canvas').length === {filled}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            rows = {figure.bounding_box()["y"] for figure in panels.all()}
            assert len(rows) == (12 if width == NARROW else 3)
            shown = "document.querySelector('.panels .u-legend').innerText"
            at_the_end = page.evaluate(shown)
            panels.first.locator(".plot").focus()
            page.keyboard.press("ArrowRight")
            until(page, f"{shown} !== {json.dumps(at_the_end)}")
            told = page.locator("#cursor").inner_text()
            assert told.startswith(("steps 1; reward 0.", "steps 1; demo 0."))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_page_of_make_demo_opens(browser: Any, made: Made) -> None:
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
def test_the_demo_takes_no_more_processor_time_than_three_minutes_on_two_cores(made: Made) -> None:
    """Unlike its time by the clock, this hardly depends on what else runs."""
    summary = json.loads((made.folder / SUMMARY).read_text())
    assert summary["finished"] and summary["steps"] == 300
    assert 10 < made.seconds < 2 * 180  # read in vain, it would be near 0

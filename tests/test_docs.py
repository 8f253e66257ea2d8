"""The documentation says what the code says."""

import importlib
import inspect
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from xml.etree import ElementTree

import pytest
import yaml
from conftest import module_at

from studies.coverage.study import COVERAGE, LONGER
from tba import run
from tba.config.plugins import resolved, with_defaults
from tba.config.schema import Config
from tba.runs.metrics import PANELS, SECTIONS

ROOT = Path(__file__).parent.parent
GROUPS = ["Start", "Guides", "Reference", "Background"]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if page.name != "keys.md"]  # generated


def test_every_key_and_option_is_described():
    page = module_at(ROOT / "scripts" / "write_configuration.py").page()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 200
    assert [row for row in rows if re.search(r"\|\s*\|", row.replace("\\|", ""))] == []


def test_the_keys_that_matter_have_their_defaults():
    page = (ROOT / "docs" / "configuration.md").read_text()
    rows = re.findall(r"^\| `(\w+)\.(\w+)` \| `?(.+?)`? \|", page, re.MULTILINE)
    assert len(rows) == 20
    config = with_defaults(Config())
    defaults = config.nested()
    defaults["trainer"]["warmup_steps"] = config.trainer.warmup(config.run.steps)
    for table, key, shown in rows:
        assert defaults[table].get(key) == (None if shown == "none" else json.loads(shown)), key


def test_every_panel_and_every_warning_is_explained():
    page = (ROOT / "docs" / "watching.md").read_text()
    panels, warnings = page.partition("## The twelve panels")[2].split("## Warnings")
    assert re.findall(r"^\| (.+?) \|", panels, re.MULTILINE)[2:] == [p.title for p in PANELS]
    for key in ("rejected", "equal_rewards", "cut_off", "ess", "reuse", "kl", "warmup"):
        assert f"### {key}\n" in warnings


def test_the_table_of_metrics_is_the_one_of_the_package():
    page = (ROOT / "docs" / "watching.md").read_text().partition("## All metrics")[2]
    rows = re.findall(r"^\| `(.+?)` \| (.+) \|$", page, re.MULTILINE)
    groups = [group.metrics for group in (*PANELS, *SECTIONS)]
    assert rows == [(metric.name, metric.meaning) for metrics in groups for metric in metrics]


def test_the_architecture_page_quotes_the_loop():
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert f"```python\n{inspect.getsource(run.train)}```" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    text = page.read_text()
    for picture in re.findall(r'\b(?:src|srcset)="([^"]+)"', text):
        assert (page.parent / picture).is_file(), picture
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        target = page.parent / link if link else page
        assert target.is_file(), link  # a folder is a page on GitHub only
        titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
        anchors = {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}
        assert not anchor or anchor in anchors, anchor


def test_the_configs_of_the_scaling_page_are_accepted():
    """Keys and options; adapters get the learning rate that the key's own help advises."""
    tables = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "scaling.md").read_text(), re.DOTALL)
    assert len(tables) >= 6
    for text in tables:
        config = Config(**tomllib.loads(text))
        resolved(config)
        assert config.policy.lora is None or config.trainer.learning_rate == 3e-4


@pytest.mark.parametrize("page", ["README.md", "docs/agents.md", "docs/quickstart.md"])
def test_the_configs_that_are_to_be_copied_are_accepted(page):
    tables = re.findall(r"```toml\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    whole = [text for text in tables if "[policy]" in text]
    assert whole
    for text in whole:
        resolved(Config(**tomllib.loads(text)))


def test_the_cluster_of_the_scaling_page_is_one_of_kuberay():
    """All pods have GPUs, shared memory of their own, and the volume that `tba train` is told."""
    page = (ROOT / "docs" / "scaling.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    cluster = yaml.safe_load(text)
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted == {"shared": "/shared", "memory": "/dev/shm"}
        assert {volume["name"] for volume in pod["volumes"]} == set(mounted)
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert len(groups) == 2


def test_the_diagram_of_the_architecture_page_needs_no_network_and_no_script():
    text = (ROOT / "docs" / "architecture.svg").read_text()
    parts = list(ElementTree.fromstring(text).iter())
    assert {part.tag.rpartition("}")[2] for part in parts} <= {
        "svg", "title", "style", "defs", "marker", "path", "rect", "text"
    }  # fmt: skip
    assert not re.findall(r"url\((?!#)|@import|href", text)
    assert all("```mermaid" not in page.read_text() for page in PAGES)


def test_experiments_in_the_readme_exist():
    for name in re.findall(r"(?:experiments|examples)/\w+\.\w+", (ROOT / "README.md").read_text()):
        assert (ROOT / name).is_file(), name


def test_the_results_are_those_of_the_study(monkeypatch):
    """Every table of the page, from the rows that are kept beside the study."""
    monkeypatch.syspath_prepend(str(ROOT / "studies" / "off_policy"))
    tables = importlib.import_module("tables")
    page = (ROOT / "docs" / "results.md").read_text()
    found = tables.tables()
    assert all(f"<!-- {name} -->" in page for name in found)
    assert tables.written(page, found) == page
    lags = importlib.import_module("stages").LAGS
    ends = {name: lags.cell(rows).split()[0] for name, lag, rows in lags.final() if lag == 64}
    raft, shift, tapered = (ends[name] for name in ("raft", "tb shift", "tb tapered"))
    quoted = f"{raft} % at a lag of 64 steps, `tb` with a shift at {shift}, and `tb` without it at"
    quoted += f" {tapered}; with SmolLM2-135M at a lag of 16, "
    real = importlib.import_module("long").REAL
    by_name = {name: rows for name, lag, rows in real.final() if lag == 16}
    ends = {name: real.cell(rows).split(" ± ")[0] for name, rows in by_name.items()}
    raft, shift, tapered = (ends[name] for name in ("raft", "tb shift", "tb tapered"))
    quoted += f"they end at {raft}, {shift} and {tapered} %, `tb` with a beta of .003."
    assert {row["beta"] for name in ("tb shift", "tb tapered") for row in by_name[name]} == {0.003}
    assert quoted in " ".join((ROOT / "README.md").read_text().split())
    for name, side in (("tb tapered", "points ahead of `raft`"), ("tb shift", "behind it")):
        pairs = zip(by_name["raft"], by_name[name], strict=True)
        by_seed = [100 * (one["score"] - other["score"]) for one, other in pairs]
        mean, error = abs(fmean(by_seed)), stdev(by_seed) / len(by_seed) ** 0.5
        assert (fmean(by_seed) < 0) == ("ahead" in side)
        text = f"{mean:.1f} ± {error:.1f} {side}".replace("0.", ".")
        assert text in " ".join(page.split())


def test_tb_trades_reward_for_diversity_best_where_the_readme_says_so():
    """By E r - beta KL; `longer` has only the lag of the sentence."""
    found, longer = (
        {cell: fmean(row["regularised"] for row in rows) for cell, rows in whole.items()}
        for whole in (replace(s, compared_by="regularised").in_table() for s in (COVERAGE, LONGER))
    )
    best = {lag: max((value, name) for (name, own), value in found.items() if own == lag)
            for lag in COVERAGE.conditions}  # fmt: skip
    assert [best[lag][1] for lag in (0, 16, 256)] == ["tb shift", "tb shift", "topr"]
    assert found["tb shift", 64] == pytest.approx(best[64][0], abs=0.002)
    assert max(longer, key=longer.__getitem__) == ("tb residual", 16)
    assert {lag for _, lag in longer} == {16} and len(longer) > 2
    quoted = (
        "with a shift at lags 0 and 16 (`topr` is level at 64 and ahead offline), and without it"
    )
    assert quoted in " ".join((ROOT / "README.md").read_text().split())


def test_the_site_is_built(tmp_path):
    """As `make docs` does: a warning, such as one of a link that leads nowhere, is an error."""
    pytest.importorskip("myst_parser", reason="an extra: pip install -e '.[docs]'")
    script = module_at(ROOT / "scripts" / "write_configuration.py")
    script.PAGE.write_text(script.page(), encoding="utf-8")
    command = [sys.executable, "-m", "sphinx", "-qW", "--keep-going", "-c", "docs", ".", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    script.PAGE.unlink()
    assert (done.returncode, done.stderr) == (0, "")
    pages = {"keys", *(path.stem for path in PAGES)}
    assert pages <= {path.stem for path in tmp_path.rglob("*.html")}
    loaded = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"(?:https?:)?//[^\"]*")
    for file in tmp_path.rglob("*.html"):
        assert not loaded.findall(file.read_text()), file.name
    start = (tmp_path / "README.html").read_text()
    assert re.findall(r'"caption-text">(.*?)<', start) == GROUPS
    assert all(f'href="docs/{path.stem}.html"' in start for path in PAGES[2:])

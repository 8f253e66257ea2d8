"""The files around the package agree: workflows run the Makefile's commands, and versions match."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import tba

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def commands(workflow: Path) -> list[str]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_commands_of_the_makefile(workflow: Path) -> None:
    for command in commands(workflow):
        program, target, *_ = command.split()
        assert program == "make" and target in TARGETS, command


def test_pull_requests_run_what_the_ci_script_runs() -> None:
    local = re.findall(r"^make .*", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert local == ["make check", "make test"]
    assert set(local) <= set(commands(ROOT / ".github" / "workflows" / "ci.yml"))


def test_pull_requests_are_tested_with_each_python_that_is_named() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    tested = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    label = "Programming Language :: Python :: "
    named = [c.removeprefix(label) for c in PROJECT["classifiers"] if c.startswith(f"{label}3.")]
    assert tested == named
    assert PROJECT["requires-python"] == f">={tested[0]}"


def test_the_version_is_in_one_place() -> None:
    assert "version" not in PROJECT and "version" in PROJECT["dynamic"]
    assert re.search(
        rf"^## \[{re.escape(tba.__version__)}\]", (ROOT / "CHANGELOG.md").read_text(), re.M
    )


def test_commands_of_the_page_for_contributors_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`make ([\w-]+)`", page)
    assert named and set(named) <= TARGETS
    links = re.findall(r"\]\((?!http)([^)#]+)", page)
    assert all((ROOT / link).exists() for link in links)

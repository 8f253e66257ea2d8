"""The files around the package agree: workflows run the Makefile's commands, and versions match."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

import tba
from tba.cli import app

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def commands(workflow: Path) -> list[str]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_commands_of_the_makefile(workflow):
    for command in commands(workflow):
        program, target, *_ = command.split()
        assert program == "make" and target in TARGETS, command


def test_pull_requests_run_what_the_ci_script_runs():
    local = re.findall(r"^make .*", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert local == ["make check", "make test"]
    assert set(local) <= set(commands(ROOT / ".github" / "workflows" / "ci.yml"))


def test_pull_requests_are_tested_with_each_python_that_is_named():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    tested = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    label = "Programming Language :: Python :: "
    named = [c.removeprefix(label) for c in PROJECT["classifiers"] if c.startswith(f"{label}3.")]
    assert tested == named
    assert PROJECT["requires-python"] == f">={tested[0]}"


def test_the_version_is_in_one_place():
    assert "version" not in PROJECT and "version" in PROJECT["dynamic"]
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[{re.escape(tba.__version__)}\]", changes, re.M)


def test_commands_of_the_page_for_contributors_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`make ([\w-]+)`", page)
    assert named and set(named) <= TARGETS
    links = re.findall(r"\]\((?!http)([^)#]+)", page)
    assert all((ROOT / link).exists() for link in links)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_of_the_image_install_the_package(tmp_path):
    """They are run in a clean folder; packages of the system are what this machine has."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs the repository")
    for name in listed.stdout.splitlines():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    image = (ROOT / "Dockerfile").read_text().partition(" AS run\n")[2]
    arguments = dict(re.findall(r"^ARG (\w+)=(.*)$", image, re.MULTILINE))
    (command,) = re.findall(r"^RUN (.*)$", image, re.MULTILINE)
    shell = {**os.environ, **arguments}
    subprocess.run(["sh", "-ec", command], cwd=tmp_path, env=shell, check=True, timeout=1700)
    tba_there = tmp_path / ".venv" / "bin" / "tba"
    shown = subprocess.run([tba_there, "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert shown.stdout == f"tba {tba.__version__}\n"


def test_the_image_for_gpus_names_files_extras_and_commands_that_exist():
    """The commands are in the comment at the top of the Dockerfile."""
    comment = (ROOT / "Dockerfile").read_text().partition("ARG BASE")[0]
    (constraints,) = re.findall(r"CONSTRAINTS=(\S+)", comment)
    (extras,) = re.findall(r"EXTRAS=(\S+)", comment)
    assert (ROOT / constraints).is_file()
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    commands = [line.split() for line in re.findall(r" tba(?:-cuda)? tba (.+)$", comment, re.M)]
    assert ["check", "--machine"] in commands
    known: Any = get_command(app)
    for name, *options in commands:
        context = known.commands[name].make_context(name, options)
        assert not context.params["settings"], name  # unknown options would be settings


def test_the_image_has_what_triton_compiles_with():
    """vLLM's kernels need a C compiler and Python.h on a GPU; Ubuntu's python3 has neither."""
    (packages,) = re.findall(r"apt-get install (.*?) &&", (ROOT / "Dockerfile").read_text())
    assert {"python3-dev", "gcc"} <= set(packages.split())

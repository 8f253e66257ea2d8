"""The page on reliability says what tests show."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from conftest import module_at
from suite import ROOT, Case, imported


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return module_at(ROOT / "scripts" / "write_reliability.py")


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_sentence_names_tests_that_exist(script):
    claims = script.claims()
    assert {claim["entry"] for claim in claims} == set(range(1, len(script.TITLES) + 1))
    for claim in claims:
        assert claim["says"].endswith(".") and claim["tests"]
        for test in claim["tests"]:
            file, _, name = test.partition("::")
            assert name in names_in(file), test


def collected(*arguments: str) -> set[str]:
    """Return the tests that pytest selects, without their cases."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only"]
    told = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 0, told.stdout[-2000:]
    return {line.partition("[")[0] for line in told.stdout.splitlines() if "::" in line}


@pytest.mark.fault
def test_make_test_or_make_faults_runs_the_tests_of_every_sentence(script):
    told = {test for claim in script.claims() for test in claim["tests"]}
    by_test = collected(*sorted({test.partition("::")[0] for test in told}))
    by_faults = collected("-m", "not gpu", "tests/faults", *script.cited())
    assert told <= by_test | by_faults
    assert {*script.cited()} == {t for t in told - by_test if not t.startswith("tests/faults/")}


def test_what_was_not_measured_or_skipped_is_no_zero(script):
    line = {
        "test": "t", "entry": 1, "tried": 2, "survived": 2, "seconds": None, "full": False,
        "reason": "", "outcome": "passed", "leftovers": None,
    }  # fmt: skip
    skipped = line | {"outcome": "skipped", "reason": "Skipped: no network", "leftovers": 0}
    rows = script.totals([line | {"id": "1"}, skipped | {"id": "2"}, skipped | {"id": "3"}])
    cells = "2 | 2 |  | {} | 2 skipped: no network |"
    assert cells.format("") in script.table(rows)
    rows = script.totals([line | {"id": "1", "leftovers": 0}, skipped | {"id": "2"}])
    assert cells.format("0").replace("2 skipped", "1 skipped") in script.table(rows)


def test_every_entry_has_cases_and_is_told_of(script):
    told = {test for claim in script.claims() for test in claim["tests"]}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(d).startswith("cases(") for d in node.decorator_list
            ):
                assert f"tests/faults/{path.name}::{node.name}" in told, node.name


def test_the_page_is_up_to_date(script):
    """The script runs on its own, without what pytest adds to the path."""
    code = f"import runpy; print(runpy.run_path({str(script.__file__)!r})['page'](), end='')"
    command = [sys.executable, "-P", "-c", code]
    page = subprocess.run(command, capture_output=True, check=True, encoding="utf-8").stdout
    written = script.PAGE.read_text(encoding="utf-8")
    assert written == page, "run: python scripts/write_reliability.py"


def test_a_case_that_has_passed_counts_until_a_file_that_it_imports_changes():
    files = {path.name for path in imported(Path(__file__).with_name("test_leftovers.py"))}
    assert {"test_leftovers.py", "suite.py", "build.py", "exact.py"} <= files
    assert "hostile.py" not in files
    files = {path.name for path in imported(Path(__file__).with_name("test_hostile.py"))}
    assert {"hostile.py", "build.py"} <= files


def test_cases_have_random_numbers_of_their_own():
    assert Case(10, 3).rng.random() == Case(10, 3).rng.random() != Case(10, 4).rng.random()

"""The page on reliability says what tests show."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from conftest import module_at
from suite import ROOT, Case


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return module_at(ROOT / "scripts" / "write_reliability.py")


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_sentence_names_tests_that_exist(script: ModuleType) -> None:
    claims = script.claims()
    assert {claim["entry"] for claim in claims} == set(range(1, 27))
    for claim in claims:
        assert claim["says"].endswith(".") and claim["tests"]
        for test in claim["tests"]:
            file, _, name = test.partition("::")
            assert name in names_in(file), test


def test_every_entry_has_cases_and_is_told_of(script: ModuleType) -> None:
    told = {test for claim in script.claims() for test in claim["tests"]}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(d).startswith("cases(") for d in node.decorator_list
            ):
                assert f"tests/faults/{path.name}::{node.name}" in told, node.name


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    """The script runs on its own, without what pytest adds to the path."""
    code = f"import runpy; print(runpy.run_path({str(script.__file__)!r})['page'](), end='')"
    command = [sys.executable, "-P", "-c", code]
    page = subprocess.run(command, capture_output=True, check=True, encoding="utf-8").stdout
    assert script.PAGE.read_text(encoding="utf-8") == page, (
        "run: python scripts/write_reliability.py"
    )


def test_cases_have_random_numbers_of_their_own() -> None:
    assert Case(10, 3).rng.random() == Case(10, 3).rng.random() != Case(10, 4).rng.random()

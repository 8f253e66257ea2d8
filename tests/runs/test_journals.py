"""Damaged metrics, samples and configs are named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from build import config
from toy import Ones

from tba.cli import _config
from tba.config.schema import load
from tba.open import run
from tba.runs.folder import CONFIG, METRICS, SAMPLES, read, read_evaluations, rewind
from tba.runs.journal import Journal

LINES: dict[str, Callable[[bytes], bytes]] = {
    "bad byte": lambda line: line[:9] + b"\xff" + line[10:],
    "cut": lambda line: line[: len(line) // 2],
    "joined": lambda line: line + line,
    "no table": lambda line: b"[1, 2]",
    "no step": lambda line: line.replace(b'"step"', b'"stap"'),
    "nested": lambda line: b"[" * 100_000,
}


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(config(tiny_model, folder, "run.steps=4", "log.sample_every=1"))
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def test_samples_have_the_id_and_the_columns_of_their_row(trained):
    prompts = {p.id: p for p in (*Ones().prompts(), *Ones().held_out())}
    samples = read(trained / SAMPLES)
    assert {row["kind"] for row in samples} == {"train", "eval"}
    for row in samples:
        prompt = prompts[row["id"]]
        assert (row["prompt"], row.get("columns", {})) == (prompt.text, prompt.columns)


def test_columns_in_samples_are_strict_json_and_not_endless(tmp_path):
    columns = {"x": float("nan"), "deep": [{"y": float("inf")}, 0.5], "text": "NaN", "none": None}
    columns |= {"long": "é" * 20_000, "list": [7] * 20_000}
    journal = Journal(tmp_path, load(None, ["log.report_to=[]"]))
    journal.sample(1, "train", "1+1=", "2", 1.0, 0, id="a", columns=columns)
    text = (tmp_path / SAMPLES).read_text()
    kept = json.loads(text, parse_constant=pytest.fail)["columns"]
    assert kept.pop("long") == "é" * 10_000 + " …" and kept.pop("list").startswith("[7, 7, ")
    assert kept == {"x": None, "deep": [{"y": None}, 0.5], "text": "NaN", "none": None}


@pytest.mark.parametrize("damage", LINES)
def test_a_damaged_line_is_named_and_left_out(folder, damage, caplog):
    kept = {}
    for file in (METRICS, SAMPLES):
        path = folder / file
        rows, lines = read(path), path.read_bytes().split(b"\n")
        kept[file] = [rows[0], *rows[2:]]
        lines[1] = LINES[damage](lines[1])
        path.write_bytes(b"\n".join(lines))
    assert run(_config(["run.steps=5"], folder), folder).steps == 5
    for file, rows in kept.items():
        assert f"{folder / file}, line 2 is damaged and left out" in caplog.text
        assert read(folder / file)[: len(rows)] == rows
    caplog.clear()
    assert [row["step"] for row in read(folder / METRICS) if "loss" in row][-1] == 5
    assert not caplog.text  # the files are sound again


def test_a_damaged_config_is_named(folder):
    path = folder / CONFIG
    path.write_bytes(path.read_bytes().replace(b'"steps"', b'"st\xffps"'))
    with pytest.raises(ValueError, match=r"config\.json is damaged: .* can't decode byte"):
        _config([], folder)
    path.write_bytes(b'{\n"run": {\n"steps" 4}}')
    with pytest.raises(ValueError, match=r"config\.json is damaged: .* line 3 column"):
        _config([], folder)


def test_an_evaluation_that_lost_its_scores_is_left_out(tmp_path):
    scores = '"eval/sampled_reward": 1.0'
    rows = ['{"step": 1, "eval/sampled_stderr": 0.5}', f'{{"step": 2, {scores}}}']
    rows.append(f'{{"step": 3, {scores}, "eval/sampled_reward_stderr": 0.5}}')
    (tmp_path / METRICS).write_text("".join(f"{row}\n" for row in rows))
    assert [row["step"] for row in read_evaluations(tmp_path)] == [3]


def test_an_evaluation_that_is_repeated_is_written_once(tmp_path):
    """It may be of weights that are older than the step that is resumed."""
    journal = Journal(tmp_path, load(None, ["log.report_to=[]"]))
    for requested, version in ((0, 0), (10, 9), (20, 18), (30, 30)):
        journal.row(version, {"eval/greedy_reward": 1.0, "requested": requested})
        journal.sample(version, "eval", "1+1=", "2", 1.0, version, requested=requested)

    def versions() -> list[list[int]]:
        return [[row["step"] for row in read(tmp_path / name)] for name in (METRICS, SAMPLES)]

    rewind(tmp_path, 30, evaluates=False)
    assert versions() == [[0, 9, 18, 30]] * 2
    rewind(tmp_path, 30, evaluates=True)
    assert versions() == [[0, 9, 18]] * 2
    rewind(tmp_path, 19, evaluates=False)
    assert versions() == [[0, 9]] * 2
    rewind(tmp_path, 10, evaluates=False)
    assert versions() == [[0, 9]] * 2
    rewind(tmp_path, 9, evaluates=False)
    assert versions() == [[0]] * 2

"""The state of a run: whether it lives, how far it is, and its score."""

import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
from build import config

from tba.cli import main
from tba.display import duration
from tba.open import run
from tba.runs.folder import LOCK, METRICS, SUMMARY, locked
from tba.runs.status import status_of, table_of


@pytest.fixture(scope="module")
def ended(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps."""
    folder = tmp_path_factory.mktemp("runs") / "ended"
    run(config(tiny_model, folder, "run.steps=4"))
    return folder


def test_a_run_is_finished_stopped_crashed_or_running(ended, tmp_path):
    shutil.copytree(ended, tmp_path / "run")
    copy = tmp_path / "run"
    done = status_of(copy)
    assert (done.kind, done.step, done.steps, done.left) == ("finished", 4, 4, None)
    assert done.score is not None and done.stderr is not None
    summary = json.loads((copy / SUMMARY).read_text())
    (copy / SUMMARY).write_text(json.dumps({**summary, "finished": False}))
    assert status_of(copy).kind == "stopped"
    rows = (copy / METRICS).read_text().splitlines(keepends=True)
    (copy / METRICS).write_text("".join(row for row in rows if json.loads(row)["step"] < 3))
    assert (status_of(copy).kind, status_of(copy).step) == ("crashed", 2)  # the summary is older
    with locked(copy):
        living = status_of(copy)
    assert living.kind == "running" and living.left is not None and living.left > 0
    (copy / SUMMARY).unlink()
    (copy / METRICS).unlink()
    os.utime(copy / LOCK, (time.time() - 100,) * 2)
    stopped_early = status_of(copy)
    assert (stopped_early.kind, stopped_early.step) == ("not started", 0)
    assert 100 <= stopped_early.age < 200


def test_the_table_has_all_runs_of_a_folder_by_age(ended, tmp_path, capsys, monkeypatch):
    for name in ("a", "b/c"):
        shutil.copytree(ended, tmp_path / name)
    (tmp_path / "b" / "model").mkdir()
    (tmp_path / "b" / "model" / "config.json").write_text("{}")
    with locked(tmp_path / "new"):
        heading, *lines = table_of(tmp_path)
        assert heading.split()[:3] == ["run", "state", "step"]
        found = {line.split()[0]: line for line in lines}
        assert found.keys() == {"a", "b/c", "new"}
        assert re.search(r"^a +finished +4/4 +\d\.\d{3} ± \d\.\d{3} ", found["a"])
        assert "running" in found["new"]
    monkeypatch.setattr("sys.argv", ["tba", "list", "runs", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert "b/c" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no run in "):
        table_of(ended)
    with pytest.raises(ValueError, match="type `tba list runs FOLDER`"):
        table_of(tmp_path / "nothing")


def test_a_time_is_in_its_largest_unit():
    texts = [duration(seconds) for seconds in (4, 31.5, 720, 12_600, 181_440)]
    assert texts == ["4 s", "31.5 s", "12 min", "3.5 h", "2.1 d"]

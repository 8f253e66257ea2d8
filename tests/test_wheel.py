"""A wheel has everything that a run and its report need."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import tba

ROOT = Path(__file__).parent.parent


def call(folder: Path, *command: str | Path) -> str:
    """Run a command in a folder, without the settings of this process; return its output."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_a_wheel_trains_and_reports(tmp_path):
    """Built, installed elsewhere, and run on the default config: five asynchronous steps."""
    source = tmp_path / "source"  # setuptools writes into the folder that it builds
    source.mkdir()
    for name in ("tba", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    call(tmp_path, *pip, "wheel", "-q", source, "--no-deps", "--no-build-isolation", "-w", tmp_path)
    wheel = next(tmp_path.glob("tba-*.whl"))

    fresh = tmp_path / "venv"
    call(tmp_path, sys.executable, "-m", "venv", "--without-pip", fresh)
    python = fresh / "bin" / "python"
    own = Path(
        call(tmp_path, python, "-c", "import site; print(site.getsitepackages()[0])").strip()
    )
    call(tmp_path, *pip, "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    # the other packages, which stand after this one on the path
    (own / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")

    place = call(tmp_path, python, "-c", "import tba; print(tba.__file__, tba.__version__)")
    assert place.split() == [str(own / "tba" / "__init__.py"), tba.__version__]
    assert (own / "tba" / "py.typed").is_file()
    assert (own / "tba" / "offline" / "card.md").is_file()
    command = fresh / "bin" / "tba"
    settings = ("run.steps=5", "run.folder=mine", "eval.prompts=8", "log.report_to=[]")
    call(tmp_path, command, "train", *settings)
    assert call(tmp_path, command, "report", "mine").strip() == "mine/report/index.html"
    assert "<html" in (tmp_path / "mine" / "report" / "index.html").read_text()

"""Two runs in one folder, and what is never read, run or told."""

import ast
import json
import os
import re
import shutil
import tempfile
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from build import as_settings, config
from suite import FORKS, carry_out, cases, forked, source_nodes, until

from tba.cli import _config
from tba.open import run
from tba.runs.folder import CHECKPOINTS, HOLDER, LOCK, METRICS, read
from tba.runs.generations import generations
from tba.tools.report import report

REFUSED = 7


def compete(settings: list[str], resume: Path | None, start: Barrier) -> None:
    """Carry out a run when all have started; leave with a code of its own if refused."""
    import tba.open  # before the start

    start.wait(60)
    try:
        carry_out(settings, resume)
    except ValueError as error:
        assert "is in use by process" in str(error) or "holds a run already" in str(error)
        os._exit(REFUSED)
    assert tba.open


@cases(22, full=25)
def test_one_of_several_runs_in_a_folder_wins(case, tiny_model, tmp_path):
    """Three at the same moment, new or resumed; the others are refused and write nothing."""
    folder, resumed = tmp_path / "run", case.index % 2 == 1
    chosen = config(tiny_model, folder, "eval.prompts=0", "run.steps=150", "checkpoint.every=0")
    settings = as_settings(chosen)
    if resumed:
        run(config(tiny_model, folder, "eval.prompts=0", "run.steps=2", "checkpoint.every=0"))
        settings = ["run.steps=150"]
    arguments = settings, folder if resumed else None, FORKS.Barrier(3)
    with (
        forked(compete, *arguments) as one,
        forked(compete, *arguments) as two,
        forked(compete, *arguments) as three,
    ):
        for process in (one, two, three):
            process.join(60)
        codes = [process.exitcode for process in (one, two, three)]
    assert None not in codes
    assert sorted(codes) == [0, REFUSED, REFUSED]
    assert [r["step"] for r in read(folder / METRICS) if "loss" in r] == list(range(1, 151))
    assert [g.name for g in generations(folder / CHECKPOINTS)][-1] == "step-00000150"
    assert not (folder / HOLDER).exists()


# What is never read, run or told

PICKLES = {
    "tba/runtime/shared_memory.py": "weights for searchers; the pickle goes with the call to them",
    "tba/scoring/calls.py": "tasks from the searcher, through a socket that only it has",
    "tba/scoring/scoring.py": "writes these tasks",
    "tba/search/searcher.py": "functions that were passed from Python, never from a file",
    "tba/tasks/_memory.py": "writes these functions",
}


@cases(23, full=1, quick=1)
def test_no_file_is_unpickled(case):
    """Pickles are used where both ends are processes of one run."""
    users = set()
    for file, node in source_nodes():
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            if names & {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}:
                users.add(file)
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in ("torch.load", "torch.save", "np.load")
            assert not re.search(r"_object(_list)?$|TCPStore$", ast.unparse(node.func))
    assert users <= PICKLES.keys()


CODE = """
from pathlib import Path
Path(__file__).with_name("ran").write_text("")
from transformers import LlamaConfig as Config, LlamaForCausalLM as Model
"""


@cases(23, full=3, quick=1)
def test_code_that_comes_with_a_model_is_not_run(case, tiny_model, tmp_path):
    """`auto_map` in the config of a model, of a tokenizer, and of both."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "code.py").write_text(CODE)
    table = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    files = (["config.json"], ["tokenizer_config.json"], ["config.json", "tokenizer_config.json"])
    for name in files[case.index]:
        settings = json.loads((model / name).read_text())
        tokenizer = {"AutoTokenizer": ["code.Model", None]}
        settings["auto_map"] = table if name == "config.json" else tokenizer
        (model / name).write_text(json.dumps(settings))
    try:
        run(config(model, tmp_path / "run", "run.steps=1", "eval.prompts=0"))
    except ValueError as error:  # refused in words, which is as good
        assert "trust_remote_code" in str(error)
    assert not list(tmp_path.rglob("ran"))


@cases(23, full=3, quick=1)
def test_a_secret_of_the_environment_is_in_no_file_of_a_run(
    case, tiny_model, tmp_path, monkeypatch
):
    """Keys of the hub, of a judge and of Weights & Biases; in no file, page or export."""
    canary = f"hf_canary{case.rng.integers(10**12)}"
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "WANDB_API_KEY", "SECRET"):
        monkeypatch.setenv(name, canary)
    monkeypatch.setattr("sys.argv", ["tba", "train", f"task.api_key={canary}"])
    folder = tmp_path / "run"
    run(config(tiny_model, folder, "run.steps=3", "log.report_to=tensorboard"))
    report([folder])
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if canary.encode() in path.read_bytes()]


def intrude(folder: Path) -> None:
    """Try to read, to change and to kill as another user."""
    os.setgroups([])
    os.setuid(65534)
    for path in (folder / "config.json", folder / "new", folder / LOCK):
        try:
            path.open("a").close()
        except PermissionError:
            continue
        os._exit(3)
    try:
        os.kill(int(folder.with_name("pid").read_text()), 9)
    except PermissionError:
        os._exit(0)
    os._exit(4)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@cases(23, full=1, quick=1)
def test_another_user_cannot_change_or_end_a_run(case, tiny_model):
    """With the usual umask; who may read it is decided by that of the user."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        folder = Path(name) / "run"
        before = os.umask(0o022)
        try:
            run(config(tiny_model, folder, "run.steps=1", "eval.prompts=0"))
        finally:
            os.umask(before)
        (Path(name) / "pid").write_text(str(os.getpid()))
        with forked(intrude, folder) as process:
            until(lambda: process.exitcode is not None, 30)
            assert process.exitcode == 0
        assert run(_config(["run.steps=2"], folder), folder).finished

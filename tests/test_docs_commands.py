"""The commands of the docs run: each `tba ...` in a fenced block of the README and of docs/.

They run in a folder with the files of the quick start and a small run. Training is a dry run.
"""

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tba.cli import main

ROOT = Path(__file__).parent.parent
PAGES = {p.stem: p.read_text() for p in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
BLOCK = re.compile(r"^```(?:bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^(?:`(\S+)`:\n\n)?```\w+\n(?:# (run\.toml)\n)?(.*?)^```$", re.M | re.S)

ELSEWHERE = {
    "tba train experiments/chain_sum_smollm2.toml": "experiments/test_experiments_small.py",
    "tba train experiments/chain_sum_smollm2_lora.toml": "experiments/test_experiments_small.py",
    "tba train experiments/redteam_small.toml": "experiments/test_redteam_experiments.py",
    "tba train examples/from_trl.toml": "config/test_from_trl.py",
    "tba sweep studies/tldr/small.toml policy.model=MODEL": "experiments/test_experiments_tldr.py",
    "tba report runs/tldr_small/study": "tools/test_study_report.py",
    "tba report runs/my_study": "tools/test_study_report.py",
    "tba export RUN FOLDER --adapter": "models/test_lora.py",
    "tba check run.toml --machine": "tools/test_doctor.py",
    "tba serve HuggingFaceTB/SmolLM2-135M-Instruct": "offline/test_rollout_files.py",
    "tba check agent.toml": "offline/test_rollout_files.py",
    "tba train agent.toml run.folder=runs/agent": "agents/test_agents.py",
    "tba rollouts RUN file.jsonl": "offline/test_rollout_files.py",
    "tba launch run.toml --slurm --nodes 2 --gpus 8 run.folder=/shared/runs/first '>' job.sh": (
        "tools/test_launch.py"
    ),
}
"""Commands that need judges, a library, a study, adapters, a hub, a cluster or a minute, and where
they are tested."""

DEFAULT = ["task.train_size=40", "task.held_out_size=8", "eval.prompts=8"]
SMALL = [
    "runtime.use=local", "run.steps=2", "trainer.warmup_steps=1", "eval.prompts=3",
    "eval.samples=2", "eval.k=[2]",
    "log.console=off", "log.report_to=[]", "trainer.batch_size=16", "sampling.samples=16",
    "reward.isolate=none",
]  # fmt: skip


def commands(text: str) -> list[str]:
    """Return the `tba` commands of a page, without comments."""
    lines = "".join(BLOCK.findall(text)).splitlines()
    shown = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines if line]
    return [shlex.join(words) for words in shown if words[:1] == ["tba"]]


def write_files(text: str, folder: Path) -> None:
    """Write the files that a page shows by name."""
    for name, config, content in FILE.findall(text):
        if name or config:
            (folder / (name or config)).write_text(content)


def call(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `tba` with these arguments in this process, whose priority stays as it is."""
    monkeypatch.setattr(sys, "argv", ["tba", *arguments])
    monkeypatch.setattr(os, "nice", lambda increment: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code, arguments


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the quick start, and the run that it leads to, cut short."""
    folder = tmp_path_factory.mktemp("quickstart")
    write_files(PAGES["quickstart"], folder)
    for name in ("examples", "experiments"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "questions.jsonl").symlink_to(ROOT / "examples" / "sums.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        call(["train", "run.toml", "run.folder=runs/mine", *SMALL], patch)
    for name in ("other", "sums"):
        shutil.copytree(folder / "runs" / "mine", folder / "runs" / name)
    return folder


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """A folder like that of GSM8K."""
    for split, numbers in (("train", range(40)), ("test", range(50, 90))):
        rows = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in numbers]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def stood_in(words: list[str], model: Path, problems: Path) -> list[str]:
    """Return the arguments of a command, with stand-ins for what a reader has."""
    command, *rest = words
    rest = ["runs/mine" if word == "RUN" else word for word in rest]
    if command == "eval":
        # `eval MODEL run.toml`
        rest = ["bundled:arithmetic" if word == "MODEL" else word for word in rest]
        return [command, *rest, *(["eval.prompts=3"] if "run.toml" in rest else [])]
    if command == "export":
        return [command, *("runs/exported" if word == "FOLDER" else word for word in rest)]
    if command not in ("train", "check"):
        return words[:1] + rest
    if "--resume" in rest:
        return [command, *rest, "run.steps=200", "--dry-run"]
    settings = [f"run.folder={problems / 'unused'}", "reward.isolate=none"]
    named = any(word.startswith(("task=", "policy.model=")) for word in rest)
    if any(word.endswith(".toml") for word in rest) or named:
        settings.append(f"policy.model={model}")
    else:
        settings += DEFAULT
    if "experiments/gsm8k_smollm2.toml" in rest:
        settings.append(f"task.data={problems}")
    dry = [] if command == "check" or "--dry-run" in rest else ["--dry-run"]
    return [command, *rest, *settings, *dry]


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if commands(text)])
def test_the_commands_of_a_page_run(page, finished, letters_model, problems, monkeypatch):
    monkeypatch.chdir(finished)
    monkeypatch.syspath_prepend(ROOT / "examples")  # as docs/extending.md says
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_files(PAGES["quickstart"], finished)
    write_files(PAGES[page], finished)
    for name in ("exported", "my_model"):
        shutil.rmtree(finished / "runs" / name, ignore_errors=True)
    for command in commands(PAGES[page]):
        if command not in ELSEWHERE:
            call(stood_in(shlex.split(command)[1:], letters_model, problems), monkeypatch)


def test_the_commands_that_run_elsewhere_are_in_the_docs():
    shown = {command for text in PAGES.values() for command in commands(text)}
    assert ELSEWHERE.keys() <= shown
    assert all((ROOT / "tests" / name).is_file() for name in ELSEWHERE.values())

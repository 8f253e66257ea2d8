"""Values that nobody expects are refused in words, before anything starts or at their own cost."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest
from build import ANSWERS, ENVIRONMENT, Asynchronous, Scored, as_settings, config
from build import rewards_judge as judge
from build import rewards_reasons as reasons
from toy import Ones

from tba.config.schema import load
from tba.open import run
from tba.prompt import Answer, Prompt
from tba.runs.checkpoint import newest
from tba.runs.folder import METRICS, read
from tba.scoring.verdicts import MAX_REWARD, Rejection
from tba.setup.setup import check
from tba.stop import Stop
from tba.tasks._data import rows

# Rewards


@pytest.mark.parametrize("kind", [Scored, Asynchronous])
@pytest.mark.parametrize(
    "returned", [dict.fromkeys(range(5), 1.0), {1.0, 2.0, 3.0, 4.0, 5.0}, "12345", b"12345"]
)
def test_rewards_that_are_no_list_are_not_taken_for_one(returned, kind):
    """The keys of a dict are no rewards, nor are the digits of a text."""
    verdicts = judge(lambda texts: returned, kind=kind)
    assert reasons(verdicts) == ["wrong_length"] * len(ANSWERS)
    told = f"the scoring function returned a {type(returned).__name__}"
    assert all(told in v.detail for v in verdicts if isinstance(v, Rejection))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_reward_whose_square_overflows_is_rejected(sign):
    rewards = [sign * r for r in (1e308, 1e39, 1.1 * MAX_REWARD, MAX_REWARD, 1.0)]
    verdicts = judge(lambda texts: rewards)
    rejected = ["not_finite"] * 3
    assert reasons(verdicts) == [*rejected, sign * MAX_REWARD, float(sign)]


class Large(Ones):
    """Rewards are the largest that are accepted, or 1."""

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        return [MAX_REWARD if "1" in a.text else 1.0 for a in answers]


@pytest.mark.parametrize("objective", ["tb", "grpo", "ppo"])
def test_the_largest_reward_can_be_trained_on(tiny_model, tmp_path, objective):
    settings = ("task=test_unexpected.Large", f"objective={objective}", "run.steps=2")
    assert run(config(tiny_model, tmp_path / "run", *settings, "eval.prompts=0")).finished


# Models


@pytest.mark.parametrize("size", [0, 4, 100, -10], ids=str)
def test_weights_that_are_cut_short_are_refused_before_they_are_read(tiny_model, tmp_path, size):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"policy\.model = .*damaged or cut short"):
        check(config(model, tmp_path / "run"))


# Data


def test_text_with_half_a_character_is_refused(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "1\\ud83d"}\n')
    with pytest.raises(ValueError, match=r"task\.data = .* has no column 'prompt'; it has no col"):
        rows("task.data", str(tmp_path / "data.jsonl"), "train", required=("prompt",))


# Configs


def test_a_config_that_is_no_text_is_named(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"[run]\nfolder = '\xff'\n")
    with pytest.raises(ValueError, match=r"run\.toml: 'utf-8' codec can't decode byte 0xff"):
        load(tmp_path / "run.toml")


# Standard output


def test_a_run_whose_output_nobody_reads_saves_and_ends_cleanly(tiny_model, tmp_path):
    """As `tba train | head -n 2` does."""
    folder = tmp_path / "run"
    chosen = config(tiny_model, folder, "run.steps=100000", "log.console=lines")
    command = [sys.executable, "-m", "tba.cli", "train", *as_settings(chosen)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline()
            process.stdout.close()
            told = process.stderr.read()
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert "standard output was closed" in told and "Traceback" not in told
    saved = json.loads((newest(folder / "checkpoints") / "state.json").read_text())["progress"]
    steps = [row["step"] for row in read(folder / METRICS) if "loss" in row]
    assert saved["step"] == max(steps, default=0)


def test_output_that_would_block_is_waited_for(monkeypatch):
    """A reward may start a program that sets the pipe they share to non-blocking, as node does."""
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    received: list[str] = []

    def receive() -> None:
        with os.fdopen(source) as file:
            received.extend(file)

    lines = [f"{i} {'x' * 1000}" for i in range(300)]  # more than a pipe holds
    reader = threading.Timer(0.3, receive)
    reader.start()
    with os.fdopen(sink, "w") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        stop = Stop()
        for line in lines:
            stop.print(line)
    reader.join(10)
    assert received == [f"{line}\n" for line in lines] and not stop.requested

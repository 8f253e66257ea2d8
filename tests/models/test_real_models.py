"""The shipped experiments on real pretrained models and real data, where those are at hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tba.runs.folder import SAMPLES, read

ROOT = Path(__file__).parents[2]
MODELS = Path(os.environ.get("TBA_MODELS", Path.home() / ".cache" / "tba-models"))
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def needs(*paths: Path) -> pytest.MarkDecorator:
    missing = [str(p) for p in paths if not p.exists()]
    return pytest.mark.skipif(bool(missing), reason=f"not at hand: {', '.join(missing)}")


def tba(*arguments: str) -> str:
    command = [sys.executable, "-m", "tba.cli", *arguments]
    return subprocess.check_output(command, text=True, cwd=ROOT)


@needs(MODELS / "smollm2", GSM8K)
def test_gsm8k_end_to_end(tmp_path):
    """Three asynchronous steps."""
    run = tmp_path / "run"
    tba(
        "train", "experiments/gsm8k_smollm2.toml", f"policy.model={MODELS / 'smollm2'}",
        f"task.data={GSM8K}", f"run.folder={run}",
    )  # fmt: skip
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["finished"], summary["steps"], summary["samples_trained"]) == (True, 3, 48)
    told = json.loads(tba("eval", str(run)))
    assert told["prompts"] == 16


@needs(MODELS / "smollm2")
def test_a_calculator_is_used(tmp_path):
    """Asynchronous steps of real dialogues; some of the calls have a result."""
    run = tmp_path / "run"
    tba(
        "train", "examples/calculator.toml", f"policy.model={MODELS / 'smollm2'}",
        f"run.folder={run}", "run.steps=3", "eval.prompts=4", "eval.samples=1", "eval.k=[]",
        "log.sample_every=1",
    )  # fmt: skip
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["finished"], summary["steps"], summary["rejected"]) == (True, 3, {})
    *_, last = (row for row in read(run / "metrics.jsonl") if "tools/calls" in row)
    assert last["tools/calls"] > last.get("tools/failures", 0)
    shown = "".join(row["completion"] for row in read(run / SAMPLES))
    assert "<tool_call>" in shown and "<tool_response>" in shown


@needs(MODELS / "stories15m")
def test_stories_become_happier(tmp_path):
    """Mean held-out sentiment rises by many standard errors, at a bounded KL."""
    pytest.importorskip("vaderSentiment", reason="pip install -e '.[sentiment]'")
    run = tmp_path / "run"
    own = (f"policy.model={MODELS / 'stories15m'}", f"run.folder={run}")
    tba("train", "experiments/stories_sentiment.toml", *own)
    summary = json.loads((run / "summary.json").read_text())
    first, last = summary["eval/first"], summary["eval/last"]
    error = (first["stderr"] ** 2 + last["stderr"] ** 2) ** 0.5
    assert last["sampled_reward"] - first["sampled_reward"] > 5 * error
    rows = [r for r in read(run / "metrics.jsonl") if "kl" in r]
    assert max(r["log_ratio"] for r in rows[-20:]) < 40
    told = [r for r in read(run / SAMPLES) if r["kind"] == "eval"]
    assert {r["version"] for r in told} >= {0, summary["steps"]}

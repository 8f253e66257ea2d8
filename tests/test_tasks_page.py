"""The config of docs/tasks.md, with the reward function of the quick start, is a run's."""

import json
import re
from pathlib import Path

import tba
from tba.config.schema import load

DOCS = Path(__file__).parent.parent / "docs"
CONFIG = re.compile(r"^## Your own data.*?^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REWARD = re.compile(r"^`my_rewards.py`:\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_files_of_the_page_are_a_run(letters_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sums.toml").write_text(CONFIG.findall((DOCS / "tasks.md").read_text())[0])
    Path("my_rewards.py").write_text(REWARD.findall((DOCS / "quickstart.md").read_text())[0])
    rows = [{"question": f"What is 2 + {i}?", "answer": str(2 + i)} for i in range(8)]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = ["run.steps=2", "runtime.use=local", "log.console=off", "log.report_to=[]"]
    small.append("task.allow_loss=1")  # the tokenizer has no capitals
    result = tba.train(load("sums.toml", [f"policy.model={letters_model}", *small]))
    assert result.summary.finished and not result.summary.rejected
    assert {"greedy_pass@1", "avg@4", "pass@4", "sampled_finished"} <= result.summary.last.keys()

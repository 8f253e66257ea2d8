"""A judge that takes seconds for each answer loses nothing, and scores nothing twice."""

import json
from collections import Counter

import pytest
from build import conserved, ray_config, run_and_keep

JUDGE = """
import asyncio
from pathlib import Path

async def judge(prompts, completions, **columns):
    rewards = []
    for completion in completions:
        await asyncio.sleep({seconds})
        with Path({file!r}).open("a") as scored:
            scored.write(f"{{prompts[0]}}\\n")
        rewards.append(float("1" in completion))
    return rewards
"""
SIZES = (
    "sampling.samples=20", "trainer.batch_size=160", "trainer.group_size=20",
    "runtime.prompts_per_task=8", "runtime.fresh=8",
)  # fmt: skip
"""Those of TL;DR: tasks of 8 prompts, with 20 answers each, for which the trainer waits."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("seconds", "steps"), [(1, 3), (3, 2)])
def test_a_slow_judge_loses_nothing_and_scores_nothing_twice(tiny_model, tmp_path, seconds, steps):
    """A group takes 20 or 60 s, and a searcher has two tasks of eight groups at a time.

    The file to which the judge appends has what was scored. All deadlines are the default ones.
    """
    file = tmp_path / "scored"
    (tmp_path / "judge.py").write_text(JUDGE.format(seconds=seconds, file=str(file)))
    rows = [f'{{"prompt": "{i}+1="}}\n' for i in range(500)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    settings = (
        "task=custom", f"task.data={tmp_path}/rows.jsonl", "task.held_out_size=1",
        f"task.reward={tmp_path}/judge.py:judge", "reward.isolate=process", "eval.prompts=0",
        "engine=scripted", "engine.answers=['1','2','33','41']", f"run.steps={steps}",
    )  # fmt: skip
    chosen = ray_config(tiny_model, tmp_path / "run", *SIZES, *settings)
    ended = run_and_keep(chosen)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["finished"], summary["rejected"]) == (True, {})
    assert summary["searcher_restarts"] == 0
    scored = Counter(file.read_text().splitlines())
    arrived = {str(g.prompt.text) for g in ended.buffer.groups()}
    assert len(arrived) >= 8 * (steps + 1)
    assert {scored[prompt] for prompt in arrived} == {20}
    assert max(scored.values()) == 20  # of those that were in flight at the end as well
    assert ended.buffer.counts["added"] == 20 * len(arrived) == summary["samples_generated"]
    assert conserved(ended.buffer)

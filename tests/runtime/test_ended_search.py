"""A search that ends a local run in the middle of a `gather`: nothing is lost or doubled."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from build import config, conserved, run_and_keep
from toy import Ones

from tba.cli import _config
from tba.errors import SearchError
from tba.open import run
from tba.prompt import Answer, Prompt
from tba.runs.checkpoint import newest
from tba.runs.folder import METRICS, read

SAMPLES = 64
"""So many that the run ends if those of one prompt are rejected."""


@dataclass(frozen=True)
class Raising(Ones):
    """Scoring writes down its prompts, and raises after so many, until there is a judge."""

    folder: str = ""
    after: int = 0

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        with Path(self.folder, "scored").open("a+") as file:
            file.seek(0)
            if len(file.readlines()) == self.after and not Path(self.folder, "judge").exists():
                raise ValueError("no judge any more")
            file.write(f"{prompt.id}\n")
        return super().score(prompt, answers)


@pytest.mark.parametrize(("after", "lag"), [(1, "none"), (7, "none"), (7, "1")])
def test_a_search_that_ends_a_local_run_loses_nothing(tiny_model, tmp_path, after, lag):
    """The second of three prompts, in the first fill and in a step. It is scored again."""
    folder = tmp_path / "run"
    settings = [f"sampling.samples={SAMPLES}", "runtime.prompts_per_task=1", "eval.prompts=0"]
    if lag != "none":
        settings += [f"runtime.lag={lag}", "strategy=recent"]
    task = ["task=test_ended_search.Raising", f"task.folder={tmp_path}", f"task.after={after}"]
    with pytest.raises(SearchError, match="no judge any more"):
        run(config(tiny_model, folder, *settings, *task))
    step = int(newest(folder / "checkpoints").name.rpartition("-")[2])
    assert (step > 0) == (after > 1)
    (tmp_path / "judge").touch()
    ended = run_and_keep(_config([], folder), folder)
    scored = (tmp_path / "scored").read_text().split()
    delayed = 3 if lag == "1" else 0
    assert scored == [p.id for p in ended.parts.prompt_stream().take(27 + delayed)]
    assert (
        ended.searchers.stats.counts["samples_generated"]
        == ended.searchers.stats.scored
        == SAMPLES * len(scored)
    )
    assert ended.searchers.stats.rejected.total() == 0
    assert [g.prompt.id for g in ended.buffer.groups()] == scored[:27]
    assert conserved(ended.buffer) and ended.buffer.counts["added"] == SAMPLES * 27
    if delayed:
        rows = [row for row in read(folder / METRICS) if "loss" in row]
        assert {row["off_policy/lag_max"] for row in rows[2:]} == {1}

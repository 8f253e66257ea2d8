"""The trainer waits for data: `runtime.max_reuse`, and a batch of new groups after a resume."""

import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from build import config, resumes_exactly, run_and_keep
from hypothesis import given, settings
from hypothesis import strategies as st

import tba.open
from tba.cli import _config
from tba.config.schema import load
from tba.errors import SearchError
from tba.learn import Trainer
from tba.open import open_run
from tba.prompt import Prompt
from tba.replay.buffer import STEPS, Pace
from tba.runs.folder import METRICS, read
from tba.runtime import SearchJob
from tba.runtime.placement import Place
from tba.search.prompts import SearchState
from tba.search.result import Evaluation, SearchStats
from tba.types import Group, Trajectory
from tba.weights import Weights

NEW = [(0, 0)]

WINDOW = 20
"""Steps of the window if a search of each searcher fills a batch, as in these runs."""


@given(
    max_reuse=st.sampled_from([0.1, 0.5, 1.0, 2.5, 4.0]),
    window=st.sampled_from([8, 20, STEPS]),
    steps=st.lists(st.tuples(st.integers(2, 64), st.integers(0, 300)), min_size=1, max_size=160),
)
@settings(max_examples=60, deadline=None)
def test_no_more_is_trained_on_than_the_samples_of_the_window_allow(max_reuse, window, steps):
    """Over the window and over 50 steps. Each has samples that arrive before it by themselves.

    What is missing is enough, one less would be too few, and a pace that was saved says the same.
    """
    pace, trained, arrived = Pace(max_reuse, NEW, window), [], []
    for batch, free in steps:
        entered = sum(arrived) + free
        missing = pace.missing(batch, entered)
        again = Pace(max_reuse, json.loads(json.dumps([*pace.marks])), window)
        assert again.missing(batch, entered) == missing
        trained.append(batch)
        arrived.append(free + missing)
        sums = [(sum(trained[-last:]), sum(arrived[-last:])) for last in (window, STEPS)]
        assert all(used <= max_reuse * new * (1 + 1e-9) for used, new in sums)
        assert missing == 0 or any(used > max_reuse * (new - 1) for used, new in sums)
        pace.drew(batch, entered + missing)


def test_without_a_limit_nothing_is_missing():
    pace = Pace(float("inf"), NEW)
    for _ in range(3 * STEPS):
        assert pace.missing(10**9, 0) == 0
        pace.drew(10**9, 0)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [([], 20), (["trainer.batch_size=40"], 32), (["runtime.searchers=8"], 50)],
)
def test_a_window_is_as_long_as_what_arrives_at_once(settings, steps):
    assert load(None, ["sampling.samples=20", *settings]).reuse_window == steps


@pytest.mark.parametrize("value", ["0", "-1", "nan", "-inf", "0.001", "true", "'4'"])
def test_a_limit_that_makes_no_sense_is_refused(value):
    with pytest.raises(ValueError, match=r"runtime\.max_reuse = "):
        load(None, [f"runtime.max_reuse={value}"])


@dataclass
class Fed:
    """Searchers beside the trainer that find so many groups in a step; more only if it waits."""

    job: SearchJob
    state_: SearchState
    trainer: Any
    step: int
    a_step: float = 0.0
    of_group: int = 4
    """Samples of a group; the others are rejected."""
    same: bool = False
    """Whether every sample is the same response to the same prompt."""
    reward: float = 1.0
    stop_after: int = 10**9
    """Groups after which a stop is requested while the trainer waits."""
    asked: list[int] = field(default_factory=list)
    waited_for: int = 0
    stats: SearchStats = field(default_factory=SearchStats)
    ready: float = 0.0
    found: int = 0

    def gather(self, at_least: int) -> list[Group]:
        self.asked.append(at_least)
        self.ready += self.a_step
        count = max(at_least, int(self.ready))
        if self.found + count > self.stop_after:
            signal.raise_signal(signal.SIGTERM)
            assert self.job.stop.requested
            count = 0
        self.waited_for += max(0, at_least - int(self.ready))
        self.ready = max(0.0, self.ready - count)
        return [self._group() for _ in range(count)]

    def _group(self) -> Group:
        self.found += 1
        number = 0 if self.same else self.found
        tokens = [np.array([2 + number % 8, 2 + i], np.int32) for i in range(self.of_group)]
        logp = np.full(2, -1.0, np.float32)
        if self.same:
            tokens = tokens[:1] * self.of_group
        some = [Trajectory(t, logp, logp, self.reward, self.step, False) for t in tokens]
        self.stats.counts["samples_generated"] += len(some)
        return Group(Prompt(f"p{number}", "1+1="), np.array([3, 4], np.int32), tuple(some))

    def publish(self, trainer: Trainer, version: int) -> None:
        self.step = version

    def reset_reference(self, weights: Weights) -> None: ...

    def evaluate(self, step: int) -> int:
        raise AssertionError

    def evaluations(self, finish: bool = False) -> Sequence[Evaluation]:
        return []

    def state(self) -> SearchState:
        return self.state_

    def close(self) -> None: ...


@pytest.fixture
def fed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Fed, list[dict[str, Any]]]]:
    """Carry out an asynchronous run beside such searchers; return these, and rows of its steps."""
    folder = tmp_path / "run"
    monkeypatch.setattr(tba.open, "open_places", lambda *_: (Place("cpu"), None))

    def carry_out(
        *settings: str, resume: bool = False, **options: Any
    ) -> tuple[Fed, list[dict[str, Any]]]:
        opened: list[Fed] = []

        def open_searchers(
            job: SearchJob, place: Place, cluster: None, trainer: Any,
            search: SearchState, step: int,
        ) -> Fed:  # fmt: skip
            trainer.setup = replace(trainer.setup, checks_reference=False)
            opened.append(Fed(job, search, trainer, step, **options))
            return opened[0]

        monkeypatch.setattr(tba.open, "open_searchers", open_searchers)
        small = ("runtime.use=ray", "eval.prompts=0", "checkpoint.every=0")
        small += ("runtime.prompts_per_task=3", *settings)
        given = _config(list(settings), folder) if resume else config(tiny_model, folder, *small)
        with open_run(given, folder if resume else None) as run:
            run.train()
        return opened[0], [row for row in read(folder / METRICS) if "loss" in row]

    return carry_out


def most_reuse(rows: list[dict[str, Any]]) -> float:
    """Return the largest ratio of samples trained on to those that entered, of every window."""
    trained = [0, *(int(row["samples_trained"]) for row in rows)]
    # what had entered before each step; what came after a step is in its row
    entered = [0, *(int(row["buffer/added"]) for row in rows)]
    ratios = []
    for step in range(1, len(rows)):
        first = max(0, step - WINDOW)
        ratios.append((trained[step] - trained[first]) / (entered[step] - entered[first]))
    return max(ratios)


@pytest.mark.parametrize(
    "given",
    [
        {"a_step": 0.2},
        {"a_step": 0.2, "of_group": 1},
        {"a_step": 0.2, "same": True},
        {"settings": ("replay.capacity=4", "replay.per_prompt=4", "replay.first_fill=1")},
        {"a_step": 0.1, "settings": ("runtime.fresh=2", "runtime.max_reuse=1.2")},
        {"a_step": 1.0, "settings": ("runtime.max_reuse=0.5", "sampling.samples=8"), "of_group": 8},
        {"settings": ("strategy=recent", "runtime.publish_every=4")},
    ],
    ids=["slow", "rejected", "again", "small buffer", "fresh", "below 1", "nothing comes"],
)  # fmt: skip
def test_a_run_trains_on_a_sample_as_often_as_it_may(fed, given):
    """Never more, and hardly less: the trainer waits for no more than it needs."""
    given = dict(given)
    chosen = given.pop("settings", ())
    limit = load(None, [s for s in chosen if "reuse" in s]).runtime.max_reuse
    _, rows = fed(*chosen, "run.steps=30", **given)
    assert len(rows) == 30
    assert 0.85 * limit <= most_reuse(rows) <= limit


def test_a_trainer_with_enough_data_never_waits(fed):
    """Three groups of four samples are a batch; one comes in a step."""
    searchers, rows = fed("run.steps=60", a_step=1.0)
    assert searchers.waited_for == 2  # in the first fill
    assert most_reuse(rows) <= 3
    assert rows[-1]["samples_trained"] == 60 * 12


def test_without_a_limit_the_trainer_waits_for_the_first_fill_only(fed):
    searchers, rows = fed("run.steps=60", "runtime.max_reuse=inf", a_step=0.01)
    assert searchers.waited_for == rows[-1]["buffer/added"] // 4 == 3


def test_a_stop_while_the_trainer_waits_saves_and_the_resumed_run_waits_on(fed):
    _, rows = fed("run.steps=40", stop_after=10, a_step=0.0)
    assert 0 < len(rows) < 40
    searchers, again = fed(resume=True, a_step=0.0)
    assert len(again) == 40 and again[: len(rows)] == rows
    assert searchers.asked[0] == 3  # a batch, of the resumed version
    assert again[-1]["samples_trained"] <= 4 * again[-1]["buffer/added"]


@pytest.mark.parametrize("fresh", [[], ["runtime.fresh=1"]], ids=["fresh 0", "fresh 1"])
def test_a_resumed_run_takes_no_step_on_an_old_buffer_alone(fed, fresh):
    """Also where the limit would admit some. A run with no step left waits for nothing."""
    fed("run.steps=4", *fresh, a_step=9.0)
    searchers, rows = fed("run.steps=4", resume=True)
    assert searchers.asked == []
    searchers, rows = fed("run.steps=9", resume=True, a_step=0.5)
    assert searchers.asked[0] == 3 and len(rows) == 9
    assert rows[4]["buffer/added"] >= rows[3]["buffer/added"] + 3 * 4


def test_a_run_whose_samples_cannot_be_stored_ends_with_a_sentence(fed):
    """They arrive, so that no deadline is missed, and never enter."""
    with pytest.raises(SearchError, match=r"too few samples for a step.*not_finite"):
        fed("run.steps=4", reward=float("nan"))


def test_the_local_runtime_searches_what_is_missing(tiny_model, tmp_path):
    """And goes on exactly where it was."""
    few = ("runtime.fresh=1", "runtime.max_reuse=1.6", "runtime.prompts_per_task=2")
    resumes_exactly(tiny_model, tmp_path, *few, "eval.prompts=0")
    rows = [row for row in read(tmp_path / "part" / METRICS) if "loss" in row]
    assert 1.2 < most_reuse(rows) <= 1.6


@pytest.mark.slow
def test_on_ray_a_resumed_run_waits_for_new_groups(tiny_model, tmp_path):
    """Of the searchers, which are far slower than the trainer; the run began in one process."""
    folder, slow = tmp_path / "run", ("engine=scripted", "engine.latency=0.3")
    run_and_keep(config(tiny_model, folder, *slow, "eval.prompts=0", "run.steps=6"))
    rows = [row for row in read(folder / METRICS) if "loss" in row]
    with open_run(_config(["run.steps=12", "runtime.use=ray"], folder), folder) as resumed:
        versions: list[int] = []
        step = resumed.trainer.step

        def stepping(batch: Any, number: int) -> dict[str, float]:
            columns = resumed.buffer.columns()
            versions.append(int((columns.version[columns.arrived >= 6] >= 6).sum()))
            if len(versions) == 1:
                since = resumed.buffer.counts["added"] - rows[-1]["buffer/added"]
                assert number == 6 and since >= 12 and versions[0] > 0
            return step(batch, number)

        resumed.trainer.step = stepping  # type: ignore[method-assign]
        resumed.train()
    assert len(versions) == 6
    assert most_reuse([row for row in read(folder / METRICS) if "loss" in row]) <= 4

"""A run that loses its trainer goes on from its newest checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from build import config, end_alike, steps
from torch import Tensor

from tba.cli import _config
from tba.errors import ClusterLostError, NotFinite, SearchError, StepError, TrainerLost
from tba.learn.trainer import SingleTrainer
from tba.objectives import Loss
from tba.objectives.tb import TrajectoryBalance
from tba.open import open_run, run
from tba.runs.folder import CHECKPOINTS, WARNINGS, read
from tba.runs.generations import generations
from tba.runtime.local import LocalSearchers
from tba.strategies.recent import Recent
from tba.types import Batch

Losing = Callable[..., list[int]]


@pytest.fixture
def losing(monkeypatch: pytest.MonkeyPatch) -> Losing:
    """Let steps fail, each in its turn; the list gets those that were taken."""

    def lose(*at: int, error: Exception | None = None) -> list[int]:
        taken: list[int] = []
        left = list(at)
        take = SingleTrainer.step

        def step(self: SingleTrainer, batch: Batch, number: int) -> dict[str, Any]:
            if left and number == left[0]:
                del left[0]
                raise error or TrainerLost("a rank has died")
            taken.append(number)
            return take(self, batch, number)

        monkeypatch.setattr(SingleTrainer, "step", step)
        return taken

    return lose


def test_a_run_that_loses_its_trainer_ends_like_one_that_does_not(tiny_model, tmp_path, losing):
    """It says why, and how many steps it takes again."""
    settings = ("checkpoint.every=2", "run.steps=7")
    run(config(tiny_model, tmp_path / "whole", *settings))
    taken = losing(5, 6)
    summary = run(config(tiny_model, tmp_path / "part", *settings))
    assert taken == [0, 1, 2, 3, 4, 4, 5, 6]
    assert summary.trainer_restarts == 2
    told = [text for text in summary.warnings if text.startswith("a rank has died")]
    assert told == [
        f"a rank has died; the run went back from step {at} to its checkpoint of step {back},"
        f" which cost {at - back} steps"
        for at, back in ((5, 4), (6, 6))
    ]
    assert {row["text"] for row in read(tmp_path / "part" / WARNINGS)} >= {*told}
    end_alike(tmp_path / "whole", tmp_path / "part")


def test_a_run_without_restarts_left_says_how_to_go_on(tiny_model, tmp_path, losing):
    losing(3, 3)
    folder = tmp_path / "run"
    given = config(tiny_model, folder, "checkpoint.every=2", "runtime.max_restarts=1")
    resume = rf"a rank has died \(after 1 restarts\)\n`tba train --resume {folder}` continues"
    with pytest.raises(TrainerLost, match=resume):
        run(given)
    run(given, folder)
    assert steps(folder) == [*range(1, 9)]


def test_a_run_without_a_checkpoint_never_begins_anew(tiny_model, tmp_path, losing):
    taken = losing(1)
    with pytest.raises(TrainerLost, match=r"no checkpoint yet: remove its folder \(`rm -r "):
        run(config(tiny_model, tmp_path / "run", "checkpoint.every=2"))
    assert taken == [0]


@dataclass(frozen=True)
class Overflowing(TrajectoryBalance):
    """Trajectory balance whose loss is divided by this."""

    divisor: float = 1.0

    def __call__(self, logp: Tensor, batch: Batch) -> Loss:
        loss, metrics = super().__call__(logp, batch)
        return loss / self.divisor, metrics


@dataclass(frozen=True)
class Leaving(Recent):
    """Strategy that raises at the third step."""

    def draw(self, columns: Any, groups: int, size: int, now: int, rng: Any) -> Any:
        if now == 2:
            raise KeyError("age")
        return super().draw(columns, groups, size, now, rng)


FAILURES = {
    "objective.divisor={start=1.0, end=1.0, steps=1, cut_step=2, cut_to=0.0}": (
        r"^step 3: loss (inf|nan), gradient norm nan, and no weight", " trainer.learning_rate=0.005"
    ),
    "strategy=test_assemble.Leaving": (r"^step 3: KeyError: 'age' \(.*\.py, line \d+\)\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("failure", FAILURES)
def test_a_step_that_fails_costs_none_before(failure, tiny_model, tmp_path):
    """The run is saved, restarts nothing, and says how it continues: at a lower rate for NaN."""
    told, lower = FAILURES[failure]
    folder = tmp_path / "run"
    given = ("objective=test_assemble.Overflowing", "run.steps=4", "eval.prompts=0")
    with pytest.raises(StepError, match=told) as raised:
        run(config(tiny_model, folder, *given, failure))
    command = f"`tba train --resume {folder}{lower}` continues from step 2"
    assert str(raised.value).endswith(f"\nThe run has been saved: {command}")
    again = _config(["objective=tb", "strategy=uniform", *lower.split()], folder)
    assert run(again, folder).steps == 4 and steps(folder) == [1, 2, 3, 4]


@pytest.mark.parametrize("error", [ClusterLostError("Ray is lost"), SearchError("it ended")])
def test_what_searchers_raise_after_a_stop_is_no_error(
    error, tiny_model, tmp_path, monkeypatch, capsys
):
    """The signal may be for all processes of the job: the run is saved, and ends as usual."""
    given = ("eval.prompts=0", "log.console=lines")
    with open_run(config(tiny_model, tmp_path / "run", *given)) as opened:

        def end(*_: Any, **__: Any) -> None:
            opened.stop.requested = True
            raise error

        monkeypatch.setattr(opened.searchers, "publish", end)
        assert not opened.train().finished
    assert steps(tmp_path / "run") == [1]
    told = capsys.readouterr().out
    assert "Ray is lost" not in told and ("it ended" in told) == isinstance(error, SearchError)
    assert [g.name for g in generations(tmp_path / "run" / CHECKPOINTS)] == ["step-00000001"]


@pytest.mark.parametrize(("every", "first"), [(1, ""), (4, "After `rm -r {}/step-00000003`, ")])
def test_weights_that_give_no_finite_logits_are_gone_back_behind(
    every, first, tiny_model, tmp_path, monkeypatch
):
    """Whether a publication shows it, or the next step, before which they have been saved."""
    step = SingleTrainer.step

    def breaking(self: SingleTrainer, batch: Batch, number: int) -> dict[str, float]:
        metrics = step(self, batch, number)
        if number == 2:
            self.policy.model.model.norm.weight.data[0] = float("inf")
        return metrics

    monkeypatch.setattr(SingleTrainer, "step", breaking)
    folder = tmp_path / "run"
    given = (f"runtime.publish_every={every}", "checkpoint.every=1", "eval.prompts=0")
    with pytest.raises(NotFinite, match="the policy of version 3 gives logits that") as raised:
        run(config(tiny_model, folder, *given))
    command = f"`tba train --resume {folder} trainer.learning_rate=0.005` continues from step 2"
    assert str(raised.value).endswith("\n" + first.format(folder / CHECKPOINTS) + command)
    assert steps(folder) == [1, 2, 3]


def lost(*_: Any, **__: Any) -> None:
    raise TrainerLost("a rank has died")


@pytest.mark.parametrize(
    ("owner", "name", "failing"),
    [
        (LocalSearchers, "publish", lost),
        (SingleTrainer, "save", lost),
        (SingleTrainer, "save", lambda trainer, folder: lost),
    ],
    ids=["publication", "save", "writing"],
)
def test_a_trainer_that_is_lost_elsewhere_is_no_fault_of_searchers(
    owner, name, failing, tiny_model, tmp_path,
    monkeypatch
):  # fmt: skip
    """The run is not saved through its lost trainer: it goes on from the checkpoint before."""
    calls: list[int] = []
    known = vars(owner)[name]

    def called(*arguments: Any, **named: Any) -> Any:
        calls.append(len(calls))
        return (failing if len(calls) == 3 else known)(*arguments, **named)

    monkeypatch.setattr(owner, name, called)
    folder = tmp_path / "run"
    summary = run(config(tiny_model, folder, "checkpoint.every=2"))
    assert summary.trainer_restarts == 1
    assert steps(folder) == [*range(1, 9)]


def test_a_mistake_removes_the_folder_of_its_run_and_no_run_beside_it(
    tiny_model, tmp_path, monkeypatch
):
    """Both begin in `runs`, which neither has found; data may be downloaded for minutes."""

    def check(*_: Any) -> None:
        (tmp_path / "runs" / "other").mkdir()
        raise ValueError("a mistake in the data")

    monkeypatch.setattr("tba.open.check", check)
    with pytest.raises(ValueError, match="a mistake in the data"):
        run(config(tiny_model, tmp_path / "runs" / "wrong"))
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other"]

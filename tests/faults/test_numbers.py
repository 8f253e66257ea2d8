"""NaN and infinity wherever they can enter, and weights that are not those of one version."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from build import Asynchronous, Scored, config, conserved, group, parameters, trainer, trajectory
from build import file_names as names
from build import rewards_judge as judge
from build import rewards_reasons as reasons
from suite import Case, cases
from torch import Tensor

from tba.cli import _config
from tba.config.plugins import Plugin
from tba.config.tables import PolicyTable
from tba.errors import NotFinite, SearchError
from tba.learn.policy import Policy
from tba.models.pretrained import load_model
from tba.objectives import Loss
from tba.objectives.tb import TrajectoryBalance
from tba.open import run
from tba.replay.buffer import ReplayBuffer
from tba.runs.folder import CHECKPOINTS
from tba.runs.generations import damage, generations
from tba.setup.setup import check
from tba.types import Batch
from tba.weights import Weights

WRONG = (float("nan"), float("inf"), -float("inf"))


def in_rewards(wrong: float, model: Path, batch: Batch, case: Case) -> None:
    """One answer of five is rejected, the others are not."""
    bad = int(case.rng.integers(5))
    rewards = [wrong if i == bad else float(i) for i in range(5)]
    for kind in (Scored, Asynchronous):
        told = reasons(judge(lambda texts: rewards, kind=kind))
        assert told == ["not_finite" if i == bad else float(i) for i in range(5)]


def in_the_buffer(wrong: float, model: Path, batch: Batch, case: Case) -> None:
    """A trajectory with one such number is left out and counted; its group stays."""
    buffer = ReplayBuffer()
    for number, name in enumerate(("reward", "behavior_logp", "ref_logp", "value")):
        sound = trajectory(1, 2, 3)
        array = np.zeros(3, np.float32)
        array[case.rng.integers(3)] = wrong
        bad = replace(trajectory(4, 5, 6), **{name: wrong if name == "reward" else array})
        buffer.add([group(name, bad, sound)], now=number)
    assert (len(buffer), buffer.counts["not_finite"]) == (4, 4) and conserved(buffer)


def nothing_moves(model: Path, batch: Batch, spoil: Callable[[Any], Batch]) -> None:
    """A step that cannot be taken leaves weights and optimizer as they were; later ones work."""
    t = trainer(model)
    t.step(batch, 0)
    before = parameters(t)
    moments = [v.clone() for s in t.optimizer.state.values() for v in s.values()]
    handles: list[Any] = []
    with pytest.raises(NotFinite, match="step 2"):
        t.step(spoil((t, handles)), 1)
    for handle in handles:
        handle.remove()
    assert all(map(torch.equal, before, parameters(t)))
    after = [v for s in t.optimizer.state.values() for v in s.values()]
    assert all(map(torch.equal, moments, after))
    assert np.isfinite(t.step(batch, 1)["loss"])


def in_a_batch(wrong: float, model: Path, batch: Batch, case: Case) -> None:
    for name in ("reward", "ref_logp", "behavior_logp"):
        value = getattr(batch, name).clone()
        value.view(-1)[int(case.rng.integers(value.numel()))] = wrong
        nothing_moves(model, batch, lambda _, n=name, v=value: replace(batch, **{n: v}))


def in_a_gradient(wrong: float, model: Path, batch: Batch, case: Case) -> None:
    """Of one element of one tensor, while the loss is finite."""

    def spoil(given: Any) -> Batch:
        t, handles = given
        tensor = case.pick(list(t.policy.model.parameters()))

        def spoilt(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            gradient.view(-1)[int(case.rng.integers(gradient.numel()))] = wrong
            return gradient

        handles.append(tensor.register_hook(spoilt))
        return batch

    nothing_moves(model, batch, spoil)


@dataclass(frozen=True)
class Spoilt(TrajectoryBalance):
    """Trajectory balance whose loss of one group is not finite: NaN, inf or -inf for 1, 2 or 3."""

    kind: float = 0.0

    def __call__(self, logp: Tensor, batch: Batch) -> Loss:
        loss, metrics = super().__call__(logp, batch)
        added = torch.zeros(len(loss))
        added[0] = (0.0, *WRONG)[int(self.kind)]
        return loss + added, metrics


def in_a_loss(wrong: float, model: Path, batch: Batch, case: Case) -> None:
    t = trainer(model)
    before = parameters(t)
    t.setup = replace(t.setup, objective=Plugin(Spoilt, {"kind": 1.0 + WRONG.index(wrong)}))
    with pytest.raises(NotFinite, match="step 1: loss"):
        t.step(batch, 0)
    assert all(map(torch.equal, before, parameters(t)))


def in_published_weights(wrong: float, model: Path, batch: Batch, case: Case) -> None:
    """The log-probs of the probe are then no numbers, which no limit allows."""
    parts = check(config(model, Path("nowhere"), "eval.prompts=0"))
    t, searcher = parts.trainer("cpu"), parts.search_setup().build("cpu", False)
    t.step(batch, 0)
    sound = t.send(version=1).payload
    name = case.pick([n for n, a in sound.arrays.items() if "norm" in n])
    arrays = {n: np.array(a) for n, a in sound.arrays.items()}
    arrays[name].flat[int(case.rng.integers(arrays[name].size))] = wrong
    with pytest.raises(SearchError):
        searcher.load_weights(replace(sound, arrays=arrays))
    searcher.close()


def in_a_models_weights(wrong: float, model: Path, batch: Batch, case: Case) -> None:
    loaded = load_model(PolicyTable(model=str(model)), torch.float32)
    with torch.no_grad():
        loaded.model.norm.weight[int(case.rng.integers(32))] = wrong
    with pytest.raises(ValueError, match="logits are not finite"):
        Policy(loaded, 1.0)


PLACES = (
    in_rewards, in_the_buffer, in_a_batch, in_a_gradient, in_a_loss, in_published_weights,
    in_a_models_weights,
)  # fmt: skip


@cases(6, full=42, quick=len(PLACES), part=21)
def test_what_is_not_finite_never_reaches_a_weight(case, tiny_model, batch):
    """At seven places: rewards, trajectories, batches, gradients, losses, weights in and out."""
    place, wrong = PLACES[case.index % len(PLACES)], WRONG[case.index // len(PLACES) % len(WRONG)]
    place(wrong, tiny_model, batch, case)


@cases(6, full=3, quick=1, part=3)
def test_a_run_that_diverges_ends_with_a_sound_checkpoint(case, tiny_model, tmp_path):
    """The loss is not finite after five steps; another objective goes on from the fifth."""
    folder, kind = tmp_path / "run", case.index + 1.0
    schedule = f"{{start=0.0, end=0.0, steps=1, cut_step=5, cut_to={kind}}}"
    spoilt = ("objective=test_numbers.Spoilt", f"objective.kind={schedule}")
    settings = ("checkpoint.every=2", "eval.prompts=0")
    with pytest.raises(NotFinite, match="step 6: loss"):
        run(config(tiny_model, folder, *spoilt, *settings))
    newest = generations(folder / CHECKPOINTS)[-1]
    assert newest.name == "step-00000005" and damage(newest) == {}
    assert run(_config(["objective=tb"], folder), folder).steps == 8
    assert names(folder / CHECKPOINTS)[-1] == "step-00000008"


# Torn weights


def missing(arrays: dict[str, np.ndarray], name: str, old: Weights) -> bool:
    del arrays[name]
    return True


def cut(arrays: dict[str, np.ndarray], name: str, old: Weights) -> bool:
    arrays[name] = arrays[name][..., :-1]
    return True


def of_another_version(arrays: dict[str, np.ndarray], name: str, old: Weights) -> bool:
    arrays[name] = old.arrays[name]
    return True


def swapped(arrays: dict[str, np.ndarray], name: str, old: Weights) -> bool:
    """False if no other tensor has this shape."""
    others = [n for n, a in arrays.items() if a.shape == arrays[name].shape and n != name]
    if others:
        arrays[name], arrays[others[0]] = arrays[others[0]], arrays[name]
    return bool(others)


TORN = (missing, cut, of_another_version, swapped)


@cases(17, full=20, quick=4)
def test_torn_weights_are_refused_or_show_in_the_gap(case, tiny_model, batch):
    """Each tensor in turn. Names and shapes are checked before anything is loaded; what has the
    right shape shows in the log-probs, hundreds of times above the noise."""
    tear = TORN[case.index % len(TORN)]
    parts = check(config(tiny_model, Path("nowhere"), "eval.prompts=0", "engine.max_logp_gap=1e-4"))
    t, searcher = parts.trainer("cpu"), parts.search_setup().build("cpu", False)
    old = t.send(version=0).payload
    for step in range(5 + case.index // len(TORN)):
        t.step(batch, step)
    sound = t.send(version=5).payload
    gap = searcher.load_weights(sound)
    assert gap is not None and gap < 1e-5
    before = [p.detach().clone() for p in searcher.engine.model.parameters()]
    for name in sound.arrays:
        arrays = {n: np.array(a) for n, a in sound.arrays.items()}
        if not tear(arrays, name, old):
            continue
        refused = ValueError if tear in (missing, cut) else SearchError
        with case.attempt(), pytest.raises(refused):
            searcher.load_weights(replace(sound, arrays=arrays))
        if refused is ValueError:
            assert all(map(torch.equal, before, searcher.engine.model.parameters()))
        searcher.load_weights(sound)  # whole ones are taken again
    searcher.close()

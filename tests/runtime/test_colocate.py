"""The engine and the trainer use the memory of one device in turn: `runtime.colocate=sleep`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from build import config, parameters

from tba.cli import _config
from tba.config.schema import Config, load
from tba.engines import Engine
from tba.engines.scripted import Scripted
from tba.learn.trainer import SingleTrainer
from tba.open import open_run, run
from tba.setup.setup import check

SLEEP = (
    "runtime.colocate=sleep", "engine=scripted", 'engine.answers=["a", "b"]', "eval.every=2",
    "run.steps=3", "checkpoint.every=1",
)  # fmt: skip
CALLS = {"sleep": Engine, "wake": Engine, "generate": Engine, "load_weights": Engine}
CALLS |= {"close": Engine, "step": SingleTrainer, "send": SingleTrainer}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of engine and trainer, in their order. With "!send" among them, `send` fails."""
    made: list[str] = []

    def record(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*given: Any, **options: Any) -> Any:
            failing = f"!{name}" in made and made.count(name) == 1  # the second call
            made.append(name)
            if failing:
                raise RuntimeError(f"{name} failed")
            return call(*given, **options)

        return recorded

    for name, kind in CALLS.items():
        owner: Any = Scripted if kind is Engine else kind
        monkeypatch.setattr(owner, name, record(name, getattr(owner, name)))
    return made


def sleeping(model: Path, folder: Path, *settings: str) -> Config:
    return config(model, folder, *SLEEP, *settings)


def test_the_engine_sleeps_while_the_trainer_trains(tiny_model, tmp_path, calls):
    run(sleeping(tiny_model, tmp_path / "run"))
    step = "step send wake load_weights"
    evaluation = "generate generate"  # the greedy answers, and the sampled ones
    expected = [
        evaluation, "generate sleep", step, "generate sleep", step, evaluation, "generate sleep",
        step, "generate sleep", "wake load_weights", evaluation, "close",
    ]  # fmt: skip
    assert " ".join(calls) == " ".join(expected)


def test_an_engine_keeps_weights_only_if_no_others_were_published(
    tiny_model, tmp_path, monkeypatch
):
    """Those of the model's files, which nobody else has; others are loaded again."""
    kept: list[bool] = []
    asleep = Scripted.sleep

    def sleep(engine: Scripted, keep: bool = True) -> None:
        kept.append(keep)
        asleep(engine, keep)

    monkeypatch.setattr(Scripted, "sleep", sleep)
    run(sleeping(tiny_model, tmp_path / "run", "runtime.publish_every=2"))
    assert kept == [True, True, False, False]


@pytest.mark.parametrize(
    "phase",
    [
        "generate",
        pytest.param("sleep", marks=pytest.mark.slow),
        "step",
        pytest.param("send", marks=pytest.mark.slow),
        pytest.param("wake", marks=pytest.mark.slow),
        "load_weights",
    ],
)
def test_a_failure_never_leaves_the_engine_asleep(phase, tiny_model, tmp_path, calls):
    """The engine has ended, and the run goes on from its checkpoint to the same end."""
    calls.append(f"!{phase}")
    with pytest.raises(RuntimeError, match=f"{phase} failed"):
        run(sleeping(tiny_model, tmp_path / "run"))
    assert calls[-1] == "close"
    assert "generate" not in _asleep(calls)
    calls.clear()
    run(_config([], tmp_path / "run"), tmp_path / "run")
    assert calls[-1] == "close" and "generate" not in _asleep(calls)


def _asleep(calls: list[str]) -> list[str]:
    """Return the calls that were made while the engine slept."""
    during: list[str] = []
    asleep = False
    for name in calls:
        if name in ("sleep", "wake"):
            asleep = name == "sleep"
        elif asleep:
            during.append(name)
    return during


def test_a_run_whose_engine_sleeps_is_the_same_run(tiny_model, tmp_path):
    weights = []
    for name in ("share", "sleep"):
        settings = sleeping(tiny_model, tmp_path / name, f"runtime.colocate={name}")
        with open_run(settings) as opened:
            opened.train()
            weights.append(parameters(opened.trainer))
    for one, other in zip(*weights, strict=True):
        assert one.equal(other)


def test_a_sleeping_engine_generates_nothing(tiny_model, tmp_path):
    parts = check(sleeping(tiny_model, tmp_path))
    searcher = parts.search_setup().build("cpu", bf16=False)
    searcher.engine.sleep()
    with pytest.raises(RuntimeError, match="the engine sleeps"):
        searcher.search(parts.prompts[:1], 0)
    searcher.engine.wake()
    assert searcher.search(parts.prompts[:1], 0).groups
    searcher.close()


def test_what_cannot_sleep_is_refused_first(tiny_model, tmp_path):
    with pytest.raises(ValueError, match=r"colocate = sleep needs runtime\.use=local"):
        load(None, ["runtime.colocate=sleep"])
    with pytest.raises(ValueError, match=r"'transformers' cannot give up its memory; set engine=v"):
        check(config(tiny_model, tmp_path, "runtime.colocate=sleep"))
    with pytest.raises(ValueError, match=r"runtime\.colocate"):
        load(None, ["runtime.colocate=nap"])

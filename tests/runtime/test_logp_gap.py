"""A wrong weight update ends the run; after a fault of its engine a searcher is replaced."""

import shutil
from pathlib import Path

import pytest
from build import config
from transformers import AutoModelForCausalLM

from tba.config.schema import Config, load
from tba.engines import logp_gap_limit
from tba.errors import SearchError
from tba.open import open_run, run
from tba.runs import checkpoint
from tba.runs.folder import METRICS, read


def wrong(model: Path, folder: Path, **options: object) -> Config:
    """Return a local run of eight steps, each with a weight update."""
    calls = folder / "calls"
    given = ("engine=fakes.Wrong", f"engine.folder={calls}", "run.steps=8", "eval.prompts=0")
    whole = config(model, folder / "run", *given, "checkpoint.every=0")
    return with_options(whole, **options)


def with_options(config: Config, **options: object) -> Config:
    table = config.engine.model_dump() | options
    return config.model_copy(update={"engine": type(config.engine)(**table)})


def gaps(folder: Path) -> list[float | None]:
    return [row["sync/logp_gap"] for row in read(folder / METRICS) if "loss" in row]


@pytest.mark.parametrize("gap", [1.0, float("nan")])
def test_a_gap_ends_the_run_with_a_checkpoint(tiny_model, tmp_path, gap):
    given = wrong(tiny_model, tmp_path, right=(0, 1), gap=gap)
    advice = rf"fakes.Wrong.*by {gap:.3g} nats.* 0\.02.*engine\.dtype=fp32.*loads or caches weights"
    with open_run(given) as opened, pytest.raises(SearchError, match=advice):
        opened.train()
    saved = checkpoint.newest(opened.folder / "checkpoints")
    assert saved.name == "step-00000003"
    if gap == 1.0:
        assert run(with_options(given, max_logp_gap=2.0), resume=opened.folder).finished


@pytest.mark.parametrize(("scale", "ends"), [(1, True), (1000, False)])
def test_the_limit_grows_with_the_log_probs_as_rounding_does(tiny_model, tmp_path, scale, ends):
    """A policy whose logits have grown without bound differs by more, with the same weights."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.lm_head.weight.data.mul_(scale)
    model.save_pretrained(folder)
    given = wrong(folder, tmp_path, right=(0, 1), gap=0.2)
    if ends:
        with pytest.raises(SearchError, match=r"by 0\.2 nats"):
            run(given)
    else:
        assert run(given).finished


@pytest.mark.parametrize(("every", "right"), [(1, (0, 1, 2)), (2, (0, 1))])
def test_the_weights_of_a_resumed_run_are_verified(tiny_model, tmp_path, every, right):
    """Also those that are older than the trainer's. After all loads until then, none is right."""
    given = wrong(tiny_model, tmp_path, right=right)
    runtime = given.runtime.model_copy(update={"publish_every": every})
    longer = given.model_copy(update={"runtime": runtime})
    run(longer.model_copy(update={"run": given.run.model_copy(update={"steps": 3})}))
    told = rf"to version {3 - 3 % every},"
    with pytest.raises(SearchError, match=told), open_run(longer, resume=tmp_path / "run"):
        pass


def test_the_limit_follows_the_coarser_of_both_sides():
    def limits(*settings: str) -> list[float]:
        engine = load(None, list(settings)).engine
        return [logp_gap_limit(engine, trainer_in_bf16=bf16) for bf16 in (False, True)]

    assert limits() == [0.01, 0.3]
    assert limits("engine.dtype=bf16") == [0.3, 0.3]
    assert limits("engine.dtype=fp32") == [0.01, 0.3]
    assert limits("engine=scripted") == [0.01, 0.3]
    assert limits("engine.max_logp_gap=0.5") == [0.5, 0.5]
    with pytest.raises(ValueError, match=r"engine\.max_logp_gap"):
        load(None, ["engine.max_logp_gap=0"])

"""Trajectory balance ends at its analytic optimum, whichever policy generated the data."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import talk
import torch
from build import children, first_policy, nothing_is_left, pack, run_and_keep
from exact import (
    BETA,
    MAX_TOKENS,
    enumerate_answers,
    every_answer,
    group_of_all,
    total_variation,
    toy_config,
)

from tba.config.schema import Config
from tba.engines import Engine
from tba.learn.policy import Policy
from tba.objectives import importance
from tba.offline.eval import evaluate_run
from tba.replay.buffer import ReplayBuffer
from tba.replay.store import key_of
from tba.runs.folder import METRICS, read, read_evaluations
from tba.setup.setup import check
from tba.strategies.uniform import Uniform
from tba.types import Completion, Sampling, collate
from tba.weights import Weights

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

LIMIT = 0.02


def by_tb(model: Path, folder: Path, *settings: str) -> Config:
    """Return a config of the paper's loss, which is nearer to the optimum after so few steps."""
    return toy_config(model, folder, f"objective.beta={BETA}", "objective.taper=none", *settings)


def distance_after_run(config: Config) -> float:
    """Return the total variation between the final policy of a run and the optimum."""
    run = run_and_keep(config)
    return total_variation(run.trainer.policy, first_policy(config), run.parts.text, BETA)


SLOW = [pytest.param(taper, 150, marks=pytest.mark.slow) for taper in ("residual", "reward")]


@pytest.mark.parametrize(("taper", "steps"), [("none", 100), *SLOW])
def test_local_with_data_eight_and_more_versions_old(shallow_toy_model, tmp_path, taper, steps):
    """A taper takes more steps: it lets bad answers of the past come down more slowly."""
    old = ("strategy=exact.Delayed", "strategy.age=8", f"objective.taper={taper}")
    config = by_tb(shallow_toy_model, tmp_path / "run", *old, f"run.steps={steps}")
    assert distance_after_run(config) < LIMIT
    rows = read(tmp_path / "run" / METRICS)
    assert min(r["off_policy/lag_mean"] for r in rows[20:]) >= 8


def test_exploration_at_random_temperatures_and_a_tempered_target(
    shallow_toy_model, tmp_path, monkeypatch
):
    """All searches explore; the target is (ref^(1 / gamma) exp(r / beta))^(1 / tau) / Z."""
    monkeypatch.setattr("tba.search.searcher.EXPLORING", 1.0)
    explore = ("sampling.explore=[0.5, 2.0]",)
    tempered = ("objective.gamma=2.0", "objective.tau={start=2.0, end=1.25, steps=80}")
    settings = (*explore, *tempered, "run.steps=200")
    config = by_tb(shallow_toy_model, tmp_path / "run", *settings)
    run = run_and_keep(config)
    distances = []
    for one in enumerate_answers(run.trainer.policy, first_policy(config), run.parts.text):
        target = (one.reference.log() / 2 + one.reward / BETA) / 1.25
        distances.append(one.distance(torch.softmax(target, 0)))
        assert one.distance(one.target(BETA)) > 5 * LIMIT
    assert max(distances) < LIMIT


def test_ray(shallow_toy_model, tmp_path):
    """Versions travel on the data, and after a load both sides compute the same log-probs.

    Evaluations are those of another process with the same weights. Nothing is left of the run.
    """
    folder = tmp_path / "run"
    config = by_tb(
        shallow_toy_model, folder, "runtime.use=ray", "strategy=recent", "strategy.window=4",
        "runtime.publish_every=4", "run.steps=232", "eval.prompts=1", "eval.every=116",
        "eval.samples=4", "eval.k=[]",
    )  # fmt: skip
    others = {*children()}  # such as ranks that stay alive for the whole suite
    with nothing_is_left() as processes:
        run = run_and_keep(config, meanwhile=lambda _: processes.extend({*children()} - others))
    assert total_variation(run.trainer.policy, first_policy(config), run.parts.text, BETA) < LIMIT
    rows = [row for row in read(folder / METRICS) if "loss" in row]
    assert rows[-1]["off_policy/lag_mean"] < 20
    gaps = [row["sync/logp_gap"] for row in rows if row["sync/logp_gap"] is not None]
    assert gaps and max(gaps) < 1e-4
    evaluated = read_evaluations(folder)
    # an evaluation is of the weights that were newest when it was requested
    assert [scores["step"] for scores in evaluated] == [0, 116, 232]
    for scores, reference in ((evaluated[0], True), (evaluated[-1], False)):
        again = evaluate_run(folder, [], reference)
        for name in ("greedy_reward", "sampled_reward", "sampled_length", "sampled_log_ratio"):
            assert scores[name] == pytest.approx(again[name], abs=1e-5)


def test_buffer_filled_by_a_uniform_policy(shallow_toy_model, tmp_path):
    """No sample comes from the policy or an earlier one: all answers have the same chance."""
    beta = 2 * BETA
    settings = (f"objective.beta={beta}", "run.steps=100", "trainer.learning_rate=1.5e-3")
    parts = check(by_tb(shallow_toy_model, tmp_path / "run", *settings))
    trainer = parts.trainer("cpu")
    reference = first_policy(parts.config)
    assert total_variation(reference, reference, parts.text, beta) > 5 * LIMIT
    buffer = ReplayBuffer(per_prompt=10_000)
    buffer.add([group_of_all(parts.text, prompt, reference) for prompt in parts.prompts[:3]], now=0)
    rng = np.random.default_rng(0)
    for step in range(parts.config.run.steps):
        trainer.step(collate(buffer.sample(3, 32, Uniform(), step, rng)), step)
    assert total_variation(trainer.policy, reference, parts.text, beta) < LIMIT


def test_dialogues(tmp_path):
    """They come as often as they should, and training on them ends at the optimum.

    Both are compared with all dialogues, over the choices of the policy alone: what the environment
    says cancels. The first policy generates everything that is learned from.
    """
    beta = 2 * BETA
    settings = (*talk.SETTINGS, f"objective.beta={beta}", "run.steps=130")
    rate = "trainer.learning_rate=1.2e-3"
    config = by_tb(talk.save_model(tmp_path / "model"), tmp_path / "run", *settings, rate)
    parts, samples = check(config), 1024
    setup = parts.search_setup()
    setup = replace(setup, sampling=replace(setup.sampling, samples=samples))
    searched = setup.build("cpu", False).search(parts.prompts[:3], seed=0)
    assert (
        searched.stats.counts["tools/calls"] > 500 and not searched.stats.counts["tools/failures"]
    )
    reference = first_policy(config)
    every = [talk.group_of_all(g.prompt, reference) for g in searched.groups]
    talk.check_frequencies(searched.groups, every, deviations=3)
    for group, whole in zip(searched.groups, every, strict=True):
        finished = {key_of(t, 0): t.finished for t in whole.trajectories}
        assert all(t.finished == finished[key_of(t, 0)] for t in group.trajectories)
        assert talk.total_variation(reference, whole, beta) > 4 * LIMIT
    trainer, rng, buffer = parts.trainer("cpu"), np.random.default_rng(0), ReplayBuffer(10_000)
    buffer.add(searched.groups, now=0)
    for step in range(config.run.steps):
        trainer.step(collate(buffer.sample(3, 128, Uniform(), step, rng)), step)
    for whole in every:
        assert talk.total_variation(trainer.policy, whole, beta) < LIMIT


@pytest.mark.parametrize("explore", [None, 1.3])
def test_engine_samples_the_distribution_that_logp_states(shallow_toy_model, tmp_path, explore):
    """At a temperature other than 1: frequencies match, and log-probs are the policy's.

    If it explores, frequencies are those of another temperature than log-probs.
    """
    parts = check(by_tb(shallow_toy_model, tmp_path / "run"))
    searcher = parts.search_setup().build("cpu", False)
    prompt = parts.prompts[1]
    (completions,) = searcher.engine.generate(
        [parts.text.encode(prompt)], Sampling(4096, 0.7, MAX_TOKENS, explore=explore), seed=3
    )
    policy = Policy(searcher.reference.policy.model, 0.7)
    group = group_of_all(parts.text, prompt, policy)
    expected = {t.tokens.tobytes(): t.ref_logp for t in group.trajectories}
    assert len(expected) == len(every_answer(parts.text))
    counts = dict.fromkeys(expected, 0)
    for c in completions:
        counts[c.tokens.tobytes()] += 1
        np.testing.assert_allclose(c.logp, expected[c.tokens.tobytes()], atol=1e-5)
    sampling = Policy(searcher.reference.policy.model, explore or 0.7)
    logp = [t.ref_logp.sum() for t in group_of_all(parts.text, prompt, sampling).trajectories]
    p = np.exp(logp)
    observed = np.array(list(counts.values()))
    chi_square = ((observed - 4096 * p) ** 2 / (4096 * p)).sum()
    assert chi_square < len(p) + 5 * np.sqrt(2 * len(p))  # five standard deviations


def sample_switching(engine: Engine, newer: Weights, prompt: np.ndarray) -> list[Completion]:
    """Sample 4096 responses; newer weights take over after the first token of each."""
    ((*begun,),) = engine.generate([prompt], Sampling(4096, 1.0, 1), seed=3)
    engine.load_weights(newer)
    begun_prompts = [np.concatenate([prompt, c.tokens]) for c in begun]
    ended = engine.generate(begun_prompts, Sampling(1, 1.0, MAX_TOKENS - 1), seed=4)
    completions = []
    for first, (last,) in zip(begun, ended, strict=True):
        tokens = np.concatenate([first.tokens, last.tokens])
        logp = np.concatenate([first.logp, last.logp])
        switched = Completion(tokens, logp, last.finished, 0, switches=((1, newer.version),))
        completions.append(first if first.finished else switched)
    return completions


def test_importance_weights_are_unbiased_if_weights_change_within_responses(
    shallow_toy_model, tmp_path
):
    """pi / mu is exact by enumeration, with each token's log-prob under its own weights."""
    parts = check(by_tb(shallow_toy_model, tmp_path / "run"))
    older, newer, live = (first_policy(parts.config) for _ in range(3))
    rng = torch.Generator().manual_seed(0)
    for policy in (newer, live):
        for parameter in policy.model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=rng)
    prompt = parts.prompts[1]
    before, after, now = (group_of_all(parts.text, prompt, p) for p in (older, newer, live))
    batch = collate([now])
    logp = torch.cat([collate([before]).ref_logp[..., :1], collate([after]).ref_logp[..., 1:]], 2)
    mu, pi, stale = (x.sum(-1)[0].exp() for x in (logp, batch.ref_logp, collate([before]).ref_logp))
    # samples and their log-probs are those of the enumeration
    engine = parts.search_setup().build("cpu", False).engine
    weights = pack(newer.model, version=1, bf16=False)
    completions = sample_switching(engine, weights, parts.text.encode(prompt))
    place = {t.tokens.tobytes(): i for i, t in enumerate(now.trajectories)}
    drawn = np.array([place[c.tokens.tobytes()] for c in completions])
    for c, i in zip(completions, drawn, strict=True):
        np.testing.assert_allclose(c.logp, logp[0, i, : len(c.tokens)], atol=1e-5)
    expected = 4096 * mu.numpy()
    chi_square = ((np.bincount(drawn, minlength=len(mu)) - expected) ** 2 / expected).sum()
    assert chi_square < len(mu) + 5 * np.sqrt(2 * len(mu))  # five standard deviations
    # the weights that objectives compute turn expectations under mu into those under pi
    behaved = replace(batch, behavior_logp=logp)
    weight = importance("sequence", batch.ref_logp, behaved, cap=1e6)[0, :, 0]
    wanted = (pi * batch.reward[0]).sum()
    torch.testing.assert_close((mu * weight * batch.reward[0]).sum(), wanted, atol=1e-5, rtol=0)
    assert ((mu * pi / stale * batch.reward[0]).sum() - wanted).abs() > 0.01  # one version: biased

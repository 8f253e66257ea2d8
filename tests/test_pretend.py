"""The paths of a GPU on a machine without one: tensors of two devices never meet, waits are few.

tests/pretend.py says what a pretended GPU shows. tests/test_gpu.py runs on a real one.
"""

import inspect
import sys
import threading
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from build import config, random_batch, setup_of
from pretend import DeviceMismatch

from tba.config.plugins import names
from tba.errors import StepError
from tba.learn import layouts, policy, publish, state
from tba.learn import trainer as trainers
from tba.learn.policy import Policy
from tba.learn.trainer import MicroBatchResult, SingleTrainer
from tba.models import forward as cache
from tba.open import run
from tba.runtime.deadline import bind_ray
from tba.types import Batch

LORA = ("policy.lora.r=4", "policy.lora.alpha=8")
KINDS: dict[str, tuple[str, ...]] = {
    "fp32": ("policy.autocast=off",),
    "bf16": (),
    "eager": ("policy.attention=eager", "policy.autocast=off"),
    "bf16 weights": ("trainer.weights=bf16",),
    "LoRA": LORA,
    "checkpointing": ("policy.gradient_checkpointing=true", "policy.autocast=off"),
    "LoRA, checkpointing": (*LORA, "policy.gradient_checkpointing=true"),
    "pieces": ("trainer.token_budget=20", "policy.autocast=off"),
}
"""Settings; on a GPU, `policy.autocast=auto` is bf16."""
LAYOUTS = ("packed", "cached", "plain")
OPTIONS = {"vineppo": ("objective.step_tokens=1",)}


def on_cuda(model: Path | str, *settings: str) -> SingleTrainer:
    return setup_of(model, *settings).trainer("cuda:0")


def in_layout(own: SingleTrainer, layout: str, monkeypatch: pytest.MonkeyPatch) -> SingleTrainer:
    own.policy.share_prompt = layout != "plain"
    monkeypatch.setattr(layouts, "PACKED_TOKENS", 256 if layout == "packed" else 0)
    return own


def drawn() -> Batch:
    return random_batch(0, groups=3, samples=4, longest=6)


def near(found: dict[str, float], expected: dict[str, float], rel: float) -> None:
    for name in ("loss", "grad_norm", "kl", "entropy", "batch/padding"):
        assert found[name] == pytest.approx(expected[name], rel=rel, abs=1e-6), name


EVERY = [*product(KINDS, LAYOUTS)]
FEW = {pair for n, pair in enumerate(EVERY) if n % 3 == n // 3 % 3}
"""Each kind of step in one layout."""


@pytest.mark.parametrize(
    ("kind", "layout"),
    [pytest.param(*p, marks=[] if p in FEW else pytest.mark.slow) for p in EVERY],
)
def test_a_step_has_one_device_and_the_numbers_of_the_cpu(
    kind, layout, tiny_model, pretend, monkeypatch
):
    own = in_layout(on_cuda(tiny_model, *KINDS[kind]), layout, monkeypatch)
    in_bf16 = own.policy.autocast
    precision = f"policy.autocast={'bf16' if in_bf16 else 'off'}"
    alone = setup_of(tiny_model, *KINDS[kind], precision).trainer("cpu")
    alone = in_layout(alone, layout, monkeypatch)
    for step in (1, 2):
        near(own.step(drawn(), step), alone.step(drawn(), step), 0.05 if in_bf16 else 1e-3)
    assert all(pretend.of(p) == "cuda" for p in own.policy.parameters())


def test_every_objective_has_one_device(tiny_model, pretend):
    own = on_cuda(tiny_model)
    valued = replace(drawn(), value=torch.full(drawn().value.shape, 0.5))
    for name in names("objectives"):
        setup = setup_of(tiny_model, f"objective={name}", *OPTIONS.get(name, ()))
        head = setup.objective.at(0).head
        with_head = Policy(own.policy.model, 1.0, own.policy.autocast, head=head)
        SingleTrainer(setup.trainer_setup(), with_head).step(valued, 1)


WAITS = 2
"""Of a step of one micro-batch, in any layout: for metrics, and for the norm of the gradient."""
COPIES = {"packed": 17, "cached": 23, "plain": 17}
"""Of a step of one micro-batch, to the GPU."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_waits_and_copies_of_a_step(layout, tiny_model, pretend, monkeypatch):
    """The host waits for no mask, index or length."""
    own = in_layout(on_cuda(tiny_model), layout, monkeypatch)
    own.step(drawn(), 1)
    pretend.clear()
    own.step(drawn(), 2)
    assert pretend.waits.total() == WAITS, +pretend.waits
    assert pretend.copies.total() == COPIES[layout], pretend.copies


def test_metrics_of_a_rank_leave_the_gpu_together(pretend):
    bind_ray(None)
    from tba.runtime.ranks import _plain

    loss = torch.tensor([0.5, 2.0], device="cuda:0")
    ran = [
        MicroBatchResult({"loss": loss, "zero": loss == 2}, 7, 1),
        MicroBatchResult({}, 3, 0),
        MicroBatchResult({"loss": loss[:1]}, 5, 0),
    ]
    pretend.clear()
    first = {"loss": [0.5, 2.0], "zero": [0.0, 1.0]}
    assert _plain(ran) == [(first, 7, 1), ({}, 3, 0), ({"loss": [0.5]}, 5, 0)]
    assert pretend.waits.total() == 1 and _plain(ran[1:2]) == [({}, 3, 0)]


def test_a_publication_waits_once_a_tensor(tiny_model, pretend):
    own = on_cuda(tiny_model)
    pretend.clear()
    tensors = own.send(1).payload.arrays
    assert pretend.waits.total() == len(tensors) + 1, +pretend.waits  # and for the probe


def test_a_copy_on_the_host_waits_once_for_all_its_tensors(tiny_model, tmp_path, pretend):
    """A checkpoint, and the rows that a rank publishes, go through pinned memory."""
    own = on_cuda(tiny_model)
    own.step(drawn(), 1)
    copies = {
        "checkpoint": lambda: own.save(tmp_path),
        "rows": lambda: own.copy_rows(2, is_reference=True),
    }
    for name, copy in copies.items():
        pretend.clear()
        copy()
        assert pretend.waits.total() == 1 < pretend.copies.total(), (name, +pretend.waits)


def test_state_and_copies_stay_on_the_device(tiny_model, tmp_path, pretend):
    own = on_cuda(tiny_model)
    own.step(drawn(), 1)
    thread = threading.Thread(target=own.copy(2))
    thread.start()
    thread.join()
    own.save(tmp_path)()
    own.load(tmp_path)
    own.step(drawn(), 2)
    parts = [t for state in own.optimizer.state.values() for n, t in state.items() if n != "step"]
    assert all(pretend.of(t) == "cuda" for t in (*own.policy.parameters(), *parts))


LOCAL = (
    "runtime.use=local", "run.steps=2", "checkpoint.every=2", "eval.prompts=4",
    "sampling.top_p=0.9", "sampling.samples=4", "log.console=off", "log.report_to=[]",
    "reward.isolate=none",
)  # fmt: skip


@pytest.mark.parametrize("settings", [(), LORA], ids=["all weights", "LoRA"])
def test_a_local_run_has_one_device(settings, tiny_model, tmp_path, pretend, monkeypatch):
    """Engine, reference, evaluation, publications and a checkpoint."""
    assert run(config(tiny_model, tmp_path / "run", *LOCAL, *settings)).finished


MUTANTS: list[tuple[Any, str, str, str, str]] = [
    (policy, "Policy.forward", "self._here(batch.tokens.flatten()[hidden.places])",
     "batch.tokens.flatten()[hidden.places]", r"at policy\.py:\d+ forward"),
    (policy, "Policy.forward", "places = self._here(hidden.places)", "places = hidden.places", ""),
    (policy, "_by_token", "alike.to(values.device, non_blocking=True)", "alike",
     r"at policy\.py:\d+ _by_t"),
    (policy, "_by_token", ", device=values.device)", ")", r"at policy\.py:\d+ _by_token"),
    (trainers, "SingleTrainer._loss_of", "chunk.to(output.logp.device)", "chunk",
     r"at __init__\.py:\d+ group_metrics"),
    (publish, "answer", ".float().cpu().numpy()", ".float().numpy()", r"at publish\.py:\d+ answer"),
    (state, "load_state", "stored.read().to(parameter.device)", "stored.read()",
     r"at trainer\.py:\d+ step"),
    (cache, "check_logits", ", device=model.device)", ")", r"at forward\.py:\d+ check_l"),
]  # fmt: skip
"""Places at which something moves to the device: module, function, code, the code without that,
and what is said."""
LEGAL = 1
"""The one that CUDA allows: indices may be on the host, and are copied at each use."""


def mutate(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, code: str, without: str
) -> None:
    """Replace a function by one without this code, wherever it has been imported."""
    source = inspect.getsource(module)
    assert source.count(code) == 1, code
    changed = ModuleType(module.__name__)
    exec(compile(source.replace(code, without), str(module.__file__), "exec"), vars(changed))
    owner, _, method = name.rpartition(".")
    own = vars(vars(changed)[owner] if owner else changed)[method]
    kept = {n: v for n, v in vars(module).items() if inspect.isclass(v)}
    vars(changed).update(kept)  # whose types others check
    if owner:
        monkeypatch.setattr(vars(module)[owner], method, own)
        return
    old = vars(module)[name]
    for each in [m for n, m in sys.modules.items() if n.startswith("tba.")]:
        if vars(each).get(name) is old:
            monkeypatch.setattr(each, name, own)


@pytest.mark.parametrize(("number", "place"), [*enumerate(MUTANTS)])
def test_a_tensor_that_stays_on_the_host_is_found(
    number, place, tiny_model, tmp_path, pretend, monkeypatch
):  # fmt: skip
    mutate(monkeypatch, *place[:-1])

    def all_calls() -> None:
        own = in_layout(on_cuda(tiny_model), "packed", monkeypatch)
        pretend.clear()
        own.step(drawn(), 1)
        if number == LEGAL:
            return
        own.send(1)
        own.save(tmp_path)()
        own.load(tmp_path)
        own.step(drawn(), 2)

    if number == LEGAL:
        all_calls()
        assert pretend.copies.total() == COPIES["packed"] + 2, pretend.copies
        return
    with pytest.raises((DeviceMismatch, StepError, ValueError), match=place[-1]):
        all_calls()

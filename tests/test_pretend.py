"""The paths of a GPU on a machine without one: tensors of two devices never meet, waits are few.

tests/pretend.py says what a pretended GPU shows. tests/test_gpu.py runs on a real one.
"""

import inspect
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from build import config, random_batch, run_and_keep, setup_of
from conftest import VOCABULARY
from pretend import DeviceMismatch
from torch import distributed

from tba import open as opening
from tba.config.plugins import names
from tba.errors import StepError
from tba.learn import layouts, policy, publish, state
from tba.learn import trainer as trainers
from tba.learn.policy import Policy
from tba.learn.trainer import MicroBatchResult, SingleTrainer
from tba.models import forward as cache
from tba.open import open_trainer, run
from tba.runs.console import Console
from tba.runtime.deadline import bind_ray
from tba.runtime.placement import Place, take_gpu
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


def with_budget(own: SingleTrainer, budget: int) -> SingleTrainer:
    """Return a trainer of the same policy with another token budget."""
    c = own.setup.config
    table = c.trainer.model_copy(update={"token_budget": budget})
    setup = replace(own.setup, config=c.model_copy(update={"trainer": table}))
    return SingleTrainer(setup, own.policy)


def drawn() -> Batch:
    return random_batch(0, groups=3, samples=4, longest=6)


def near(found: dict[str, float], expected: dict[str, float], rel: float) -> None:
    for name in ("loss", "grad_norm", "kl", "entropy", "batch/padding"):
        assert found[name] == pytest.approx(expected[name], rel=rel, abs=1e-6), name


WAITS = 2
"""Of a step, of any kind and in any layout: for metrics, and for the norm of the gradient."""
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
        pretend.clear()
        metrics = own.step(drawn(), step)
        assert pretend.waits.total() == WAITS, +pretend.waits
        near(metrics, alone.step(drawn(), step), 0.05 if in_bf16 else 1e-3)
    assert all(pretend.of(p) == "cuda" for p in own.policy.parameters())


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_passes_have_no_more_waits(layout, tiny_model, pretend, monkeypatch):
    """Neither micro-batches of whole groups nor pieces of a group above the token budget."""
    own = in_layout(on_cuda(tiny_model), layout, monkeypatch)
    for budget in (60, 20):
        divided = with_budget(own, budget)
        parts = divided.micro_batches(drawn())
        assert len(parts) > 1 and any(len(p.shapes) > 1 for p in parts) == (budget == 20)
        pretend.clear()
        divided.step(drawn(), 1)
        assert pretend.waits.total() == WAITS, (budget, +pretend.waits)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_forward_pass_with_flex_attention_has_one_device(layout, tiny_model, pretend, uncompiled):
    """In bf16 as well. Its backward pass needs a real GPU."""
    for precision in ("off", "bf16"):
        own, sdpa = (
            on_cuda(tiny_model, f"policy.attention={kind}", f"policy.autocast={precision}").policy
            for kind in ("flex", "sdpa")
        )
        pretend.clear()
        logp = own(drawn(), layout).logp
        assert pretend.waits.total() == 0, +pretend.waits
        assert pretend.of(logp) == "cuda"
        difference = (logp - sdpa(drawn(), layout).logp).abs().max().item()
        assert difference < (1e-5 if precision == "off" else 0.05)


def test_every_objective_has_one_device_and_few_waits(tiny_model, pretend):
    """One more for a head, and one a micro-batch for a check of value estimates."""
    own = on_cuda(tiny_model)
    valued = replace(drawn(), value=torch.full(drawn().value.shape, 0.5))
    for name in names("objectives"):
        setup = setup_of(tiny_model, f"objective={name}", *OPTIONS.get(name, ()))
        objective = setup.objective.at(0)
        with_head = Policy(own.policy.model, 1.0, own.policy.autocast, head=objective.head)
        each = with_budget(SingleTrainer(setup.trainer_setup(), with_head), 60)
        parts = each.micro_batches(valued)
        pretend.clear()
        each.step(valued, 1)
        waits = WAITS + (objective.head is not None)
        waits += len(parts) * (objective.value_rollouts is not None)
        assert len(parts) == 2 and waits <= 6 + len(parts)
        assert pretend.waits.total() == waits, (name, +pretend.waits)


def test_metrics_of_a_rank_leave_the_gpu_together(pretend, monkeypatch):
    """Those of all ranks arrive together as well: one wait for the numbers, the length, the text.

    A fake process group gives each rank the results of this one.
    """
    bind_ray(None)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tba.runtime.ranks import _gather, _plain

    loss = torch.tensor([0.5, 2.0], device="cuda:0")
    ran = [
        MicroBatchResult({"loss": loss, "zero": loss == 2}, 7, 1),
        MicroBatchResult({}, 3, 0),
        MicroBatchResult({"loss": loss[:1]}, 5, 0),
    ]
    pretend.clear()
    plain = [({"loss": [0.5, 2.0], "zero": [0.0, 1.0]}, 7, 1), ({}, 3, 0), ({"loss": [0.5]}, 5, 0)]
    assert _plain(ran) == plain
    assert pretend.waits.total() == 1 and _plain(ran[1:2]) == [({}, 3, 0)]
    distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    monkeypatch.setattr(distributed, "get_backend", lambda *_: "nccl")
    pretend.clear()
    try:
        gathered = _gather(ran)
    finally:
        distributed.destroy_process_group()
    assert pretend.waits.total() == 3, +pretend.waits
    assert _plain(gathered) == 4 * plain


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


TAKEN = "expandable_segments:True"


def test_a_process_takes_its_gpu(pretend, monkeypatch):
    """Quantised models are loaded to the current device. The user's settings of memory stay."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    take_gpu("cuda:1", expands=False)
    assert (pretend.current, pretend.allocator) == ("cuda:1", "")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "max_split_size_mb:128")
            take_gpu("cuda:2")
        assert (pretend.current, pretend.allocator) == ("cuda:2", "")
    take_gpu("cuda:3")
    assert (pretend.current, pretend.allocator) == ("cuda:3", TAKEN)


@pytest.mark.parametrize("colocate", ["share", "sleep"])
def test_the_trainer_takes_its_gpu(colocate, tiny_model, tmp_path, pretend):
    """vLLM cannot sleep in a process whose memory segments expand."""
    engine = ("engine=scripted", "engine.answers=['1']", "engine.own_reference=true")
    setup = setup_of(tiny_model, "runtime.use=local", f"runtime.colocate={colocate}", *engine)
    with ExitStack() as closing:
        open_trainer(setup, tmp_path, Place("cuda:1"), None, True, closing)
    assert pretend.current == "cuda:1"
    assert pretend.allocator == ("" if colocate == "sleep" else TAKEN)


def test_a_rank_takes_its_gpu_before_it_meets_others(tmp_path, pretend, monkeypatch):
    bind_ray(None)
    from tba.runtime.ranks import RankActor

    def meet(backend: str, **_: Any) -> None:
        raise ConnectionError(f"{backend} on {pretend.current}")

    monkeypatch.setattr(distributed, "init_process_group", meet)
    setup: Any = SimpleNamespace(config=SimpleNamespace(trainer=SimpleNamespace(devices=2)))
    transport: Any = None
    with pytest.raises(ConnectionError, match="nccl on cuda:1"):
        RankActor(Place("cuda:1"), {}).start(setup, transport, str(tmp_path), 1.0, 0)
    assert pretend.allocator == TAKEN


LOCAL = (
    "runtime.use=local", "run.steps=2", "checkpoint.every=2", "eval.prompts=4",
    "sampling.top_p=0.9", "sampling.samples=4", "log.console=off", "log.report_to=[]",
    "reward.isolate=none", 'sampling.stop=["1"]', "policy.reset_reference_every=1",
)  # fmt: skip


class Scored(Exception):
    """Samples would be scored now, on this device."""


def with_ranks(monkeypatch: pytest.MonkeyPatch, here: str = "cuda:0") -> None:
    """Let a run find ranks on GPUs; `here` is the device of the driver, which has no rank."""
    ranks = [SimpleNamespace(place=Place("cuda:0"))]
    cluster = SimpleNamespace(ranks=ranks, transport=None)
    monkeypatch.setattr(opening, "open_places", lambda *_: (Place(here), cluster))

    def compute(groups: Any, setup: Any, device: str, *_: Any) -> None:
        raise Scored(device)

    def rescore(
        setup: Any, progress: Any, search: Any, buffer: Any, how: Any, device: str, _: Any
    ) -> None:
        raise Scored(device)

    monkeypatch.setattr(opening, "with_reference", compute)
    monkeypatch.setattr(opening, "renewed", rescore)


@pytest.fixture
def rollouts(tmp_path: Path) -> str:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "completion": "1", "reward": 1}\n')
    return f"replay.rollouts={tmp_path / 'rows.jsonl'}"


CLUSTER = ("runtime.use=ray", "runtime.address=10.0.0.1:6379")


@pytest.mark.parametrize(
    ("settings", "device"), [((), "cuda:3"), (CLUSTER, "cuda:2")], ids=["one machine", "cluster"]
)
def test_log_probs_of_rollouts_are_computed_on_a_gpu_without_a_rank(
    settings, device, rollouts, tiny_model, tmp_path, pretend, monkeypatch
):
    """On one machine the last one; on a cluster, ranks may have any: the one with most memory."""
    with_ranks(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    free = (10, 20, 70, 60)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free[gpu], 80))
    with pytest.raises(Scored, match=device):
        run(config(tiny_model, tmp_path / "run", *LOCAL, *settings, rollouts))


def test_stored_samples_are_scored_again_on_a_gpu_without_a_rank(
    tiny_model, tmp_path, pretend, monkeypatch
):
    folder = tmp_path / "run"
    run(config(tiny_model, folder, *LOCAL))
    with_ranks(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(Scored, match="cuda:3"):
        run(config(tiny_model, folder, *LOCAL, "run.steps=3"), folder, "rescore")


def test_a_head_without_a_gpu_says_that_its_cpu_scores(rollouts, tiny_model, tmp_path, monkeypatch):
    with_ranks(monkeypatch, here="cpu")
    notes: list[str] = []
    monkeypatch.setattr(opening, "_open_console", lambda *_: Console(2, notes.append))
    with pytest.raises(Scored, match="cpu"):
        run(config(tiny_model, tmp_path / "run", *LOCAL, *CLUSTER, rollouts))
    assert any("no GPU, and scores logged or stored samples on its CPU" in note for note in notes)


@pytest.mark.parametrize("settings", [(), LORA], ids=["all weights", "LoRA"])
def test_a_local_run_has_one_device(settings, tiny_model, tmp_path, pretend, monkeypatch):
    """Engine, stop strings, reference and its reset, evaluation, publications and a checkpoint."""
    ended = run_and_keep(config(tiny_model, tmp_path / "run", *LOCAL, *settings))
    groups = ended.buffer.groups()
    assert {group.reference for group in groups} == {0, 1, 2}
    one = VOCABULARY.index("1")
    stopped = [t for g in groups for t in g.trajectories if one in t.tokens]
    assert stopped and all(t.finished and t.tokens[-1] == one for t in stopped)


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

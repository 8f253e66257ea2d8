"""The names and arguments of vLLM that the engine uses, read from its sources: no GPU is needed.

TBA_VLLM names a folder with an unpacked wheel (`python -m zipfile -e vllm-….whl FOLDER`), such as
the build for GPUs, which cannot be installed where there is none.
"""

import ast
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from build import setup_of
from conftest import module_at

import tba.engines
from tba.engines import vllm
from tba.engines.vllm import VLLM
from tba.types import Sampling, Turn

OURS = ast.parse(Path(tba.engines.__file__).with_name("_vllm_api.py").read_text())
HOMES = {
    "LLMEngine": "v1/engine/llm_engine.py",
    "EngineArgs": "engine/arg_utils.py",
    "SamplingParams": "sampling_params.py",
    "LoRARequest": "lora/request.py",
}
"""Files of classes that vLLM exports from elsewhere as well."""
READ = {
    "logprobs.py": {"FlatLogprobs": ("start_indices", "token_ids", "logprobs")},
    "outputs.py": {
        "CompletionOutput": ("token_ids", "logprobs", "finish_reason", "weight_versions")
    },
    "sampling_params.py": {"StructuredOutputsParams": ("json",)},
    "config/structured_outputs.py": {"StructuredOutputsConfig": ("backend",)},
    "engine/arg_utils.py": {"EngineArgs": ("structured_outputs_config",)},
    "v1/executor/uniproc_executor.py": {"UniProcExecutor": ("_distributed_args",)},
    "v1/worker/worker_base.py": {"WorkerBase": ("get_model",)},
    "v1/worker/gpu_worker.py": {"Worker": ("sleep", "wake_up")},
}
"""What is read of classes, or overridden, by their files."""


def sources() -> Path | None:
    if "TBA_VLLM" in os.environ:
        return Path(os.environ["TBA_VLLM"], "vllm")
    spec = find_spec("vllm")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


VLLM_SOURCES = sources()
has_sources = pytest.mark.skipif(
    VLLM_SOURCES is None, reason="no vLLM: set TBA_VLLM to its sources"
)


@cache
def parsed(file: str) -> ast.Module:
    assert VLLM_SOURCES is not None
    return ast.parse((VLLM_SOURCES / file).read_text())


def class_of(file: str, name: str) -> ast.ClassDef:
    (found,) = (n for n in ast.walk(parsed(file)) if isinstance(n, ast.ClassDef) and n.name == name)
    return found


def members(of: ast.AST) -> set[str]:
    """Return the methods and fields of a class, or the names of a module."""
    names = set()
    for node in ast.iter_child_nodes(of):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {t.id for t in targets if isinstance(t, ast.Name)}
    return names


def parameters(of: ast.ClassDef, method: str) -> list[str]:
    (found,) = (n for n in of.body if isinstance(n, ast.FunctionDef) and n.name == method)
    return [a.arg for a in (*found.args.args, *found.args.kwonlyargs)][1:]


@has_sources
def test_imports_exist():
    for node in ast.walk(OURS):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm."):
            module = str(node.module).removeprefix("vllm.").replace(".", "/")
            assert VLLM_SOURCES is not None
            file = f"{module}.py"
            if not (VLLM_SOURCES / file).is_file():
                file = f"{module}/__init__.py"
            assert {alias.name for alias in node.names} <= members(parsed(file)), file


@has_sources
def test_methods_of_the_engine_take_these_arguments():
    engine = class_of(HOMES["LLMEngine"], "LLMEngine")
    called = {}
    for node in ast.walk(OURS):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("self._engine."):
            name = ast.unparse(node.func).removeprefix("self._engine.")
            if name == "engine_core.shutdown":
                continue
            taken = parameters(engine, name)
            assert len(node.args) <= len(taken), name
            assert {keyword.arg for keyword in node.keywords} <= {*taken}, name
            called[name] = node
    assert {"sleep", "wake_up", "is_sleeping", "collective_rpc", "add_request"} <= called.keys()


def arguments_on(
    device: str, model: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> dict[str, Any]:
    """Return the arguments of vLLM's engine on this device."""
    monkeypatch.setattr(vllm, "RunningBatch", lambda *given: None)
    parts = setup_of(model)
    sampling = Sampling(4, 1.0, 5)
    engine = VLLM(parts.config.policy, parts.text, device, False, sampling, **options)
    api = SimpleNamespace(InProcess=object, __name__="api")
    return engine._arguments(api)


@has_sources
def test_classes_have_these_fields(tiny_model, monkeypatch):
    for file, classes in READ.items():
        for name, fields in classes.items():
            assert {*fields} <= members(class_of(file, name)), (file, name)
    for node in ast.walk(OURS):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and name == "SamplingParams":
            given = {keyword.arg for keyword in node.keywords}
            assert given <= members(class_of(HOMES[name], name))
    known = members(class_of(HOMES["EngineArgs"], "EngineArgs"))
    for device in ("cpu", "cuda:0"):
        assert arguments_on(device, tiny_model, monkeypatch).keys() <= known


def test_a_batch_has_more_tokens_on_a_gpu(tiny_model, monkeypatch):
    """In any case as many as the context has: a CPU cannot divide prompts."""
    for device, fewest in (("cpu", 2048), ("cuda:0", 8192)):
        for context, expected in ((32, fewest), (9000, 9000)):
            found = arguments_on(device, tiny_model, monkeypatch, max_model_len=context)
            assert found["max_num_batched_tokens"] == expected, device


@has_sources
def test_what_an_update_relies_on():
    """Layers whose tensors are never loaded are named in a set, and rotary embeddings have one."""
    names = members(parsed("model_executor/model_loader/reload/meta.py"))
    assert "SKIP_LOAD_TENSORS" in names
    rotary = ast.unparse(parsed("model_executor/layers/rotary_embedding/base.py"))
    assert "register_buffer('cos_sin_cache', cache, persistent=False)" in rotary
    sleeping = ast.unparse(parsed("v1/executor/abstract.py"))
    assert "SLEEP_TAGS = frozenset(('weights', 'kv_cache'))" in sleeping


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The file that imports vLLM, with empty classes and functions in place of it."""
    fakes: dict[str, ModuleType] = {}
    for node in ast.walk(OURS):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm"):
            parts = str(node.module).split(".")
            for end in range(1, len(parts) + 1):
                name = ".".join(parts[:end])
                if name not in fakes:  # never vLLM's own, which later tests use
                    fakes[name] = ModuleType(name)
                    monkeypatch.setitem(sys.modules, name, fakes[name])
            for alias in node.names:
                own: Any = type(alias.name, (), {"__init__": lambda *given: None})
                setattr(fakes[str(node.module)], alias.name, own)
    made = module_at(Path(tba.engines.__file__).with_name("_vllm_api.py"))
    monkeypatch.setattr(made, "SKIP_LOAD_TENSORS", set())
    monkeypatch.setattr(made, "set_current_vllm_config", nullcontext)
    return made


def test_memory_is_taken_back_in_the_order_of_its_use(api):
    """Weights that nobody kept are not there before others come; the cache is needed last."""
    calls: list[Any] = []

    class Recorded:
        asleep = False

        def sleep(self, level: int) -> None:
            calls.append(("sleep", level))
            self.asleep = True

        def wake_up(self, tags: list[str] | None) -> None:
            calls.append(("wake_up", tags))
            self.asleep = tags == ["weights"]

        def is_sleeping(self) -> bool:
            return self.asleep

        def collective_rpc(self, method: str, timeout: float, kwargs: Any) -> None:
            calls.append((method, [*kwargs["arrays"]], kwargs["tied"]))

        def set_weight_version(self, version: str) -> None:
            pass

        def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
            return True

    engine = object.__new__(api.SteppedEngine)
    engine._engine, engine._deadline = Recorded(), 1.0
    engine.sleep(keep=True)
    engine.wake()
    engine.sleep(keep=False)
    engine.wake_with({"embedding": np.ones(2)}, {"head": "embedding"}, 3)
    assert calls == [
        ("sleep", 1),
        ("wake_up", None),
        ("sleep", 2),
        ("wake_up", ["weights"]),
        ("load_arrays", ["embedding"], {"head": "embedding"}),
        ("wake_up", ["kv_cache"]),
    ]


def test_the_schema_of_a_turn_reaches_vllm(api, tiny_model, monkeypatch):
    """And is refused by the one backend that is chosen, without an error of the engine."""
    given: list[Any] = []

    class Client:
        def add_request(self, key: str, prompt: Any, parameters: Any, lora_request: None) -> None:
            given.append(parameters["structured_outputs"])
            if given[-1] == {"json": "wrong"}:
                raise api.VLLMClientError("no such schema")

        def get_weight_version(self) -> str:
            return "0"

    for name in ("EngineArgs", "SamplingParams", "StructuredOutputsParams"):
        monkeypatch.setattr(api, name, dict)
    monkeypatch.setattr(api, "StructuredOutputsConfig", dict)
    monkeypatch.setattr(api, "VLLMClientError", type("VLLMClientError", (Exception,), {}))
    monkeypatch.setattr(api, "tokens_input", list)
    monkeypatch.setattr(api, "RequestOutputKind", SimpleNamespace(FINAL_ONLY=2))
    started = SimpleNamespace(
        from_engine_args=lambda arguments: given.append(arguments) or Client()
    )
    monkeypatch.setattr(api, "LLMEngine", started)
    stepped = api.SteppedEngine({"model": "m"}, "cpu", 1.0)
    assert given.pop() == {"model": "m", "structured_outputs_config": {"backend": "xgrammar"}}
    added: list[Any] = []
    engine = object.__new__(VLLM)
    engine.text = setup_of(tiny_model).text
    engine._batch = cast(Any, SimpleNamespace(run=lambda requests: added.extend(requests) or []))
    turn = Turn(np.zeros(1, np.int32), Sampling(1, 1.0, 1), 0)
    engine.complete([turn, replace(turn, schema="{}"), replace(turn, schema="wrong")])
    for key, request in zip("ab", added, strict=False):
        stepped.add(key, request)
    with pytest.raises(ValueError, match="vLLM does not accept a request: no such schema"):
        stepped.add("c", added[2])
    assert given == [None, {"json": "{}"}, {"json": "wrong"}]


def test_weights_reach_a_worker_in_the_dtype_of_its_engine(api):
    """With the head that is tied; rotary embeddings, which are computed, are not waited for."""
    loaded: dict[str, torch.Tensor] = {}
    model = SimpleNamespace(load_weights=loaded.update)
    worker = SimpleNamespace(
        get_model=lambda: model,
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        vllm_config=None,
    )
    arrays = {"embedding": np.ones(2, np.float32), "norm": np.full(3, 0x3F80, np.uint16)}
    api.Worker.load_arrays(worker, arrays, {"head": "embedding"})
    assert {name: (t.dtype, t.tolist()) for name, t in loaded.items()} == {
        "embedding": (torch.bfloat16, [1, 1]),
        "norm": (torch.bfloat16, [1, 1, 1]),
        "head": (torch.bfloat16, [1, 1]),
    }
    assert {"cos_sin_cache"} == api.SKIP_LOAD_TENSORS

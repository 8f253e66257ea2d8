"""A GPU that is pretended on a CPU: tensors say `cuda:0`, and mixing devices fails as it would.

Real CPU tensors compute. Their storages are tagged "cpu" or "cuda", in three layers:

    _Functions   Python calls: device arguments become "cpu" and leave a tag; `.device`, `.is_cuda`,
                 `.to`, `.cpu` and `.numpy` read or change it
    _Operators   every aten operator, of the backward pass as well: raises DeviceMismatch where
                 operands are on two devices, tags results, counts where the host waits
    patches      torch.cuda.*, autocast("cuda"), threads that are started

It sees no other process, no kernel outside of aten but FlexAttention's, no stream and no memory,
and CUDA's rules of autocast and numbers are those of the CPU. The number of waits is a lower bound:
a copy to the GPU with `non_blocking` counts as none, though CUDA may wait where memory is pageable.
FakeTensorMode has no values, from which plans are made.
"""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # it looks through torch.cuda when it is imported: before that is patched
from torch._ops import HigherOrderOperator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

T = torch.Tensor
CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
PACKAGE = str(Path(__file__).parents[1] / "tba")
MEMORY = 80 * 2**30
CROSSING = {f"aten::{n}" for n in ("copy_", "_to_copy", "to", "set_")}
INDEXING = {
    f"aten::{n}" for n in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
}
WAITING = {
    f"aten::{n}"
    for n in (
        "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim",
        "unique_consecutive", "bincount", "histc",
    )
}  # fmt: skip
"""Operators for which the host needs a number, or the size of the result."""
ALIKE = {f"aten::{n}" for n in ("where", "masked_fill", "masked_fill_", "fill_", "lerp")}
"""Operators that take numbers of the CPU, like pointwise ones."""
FACTORIES = {
    torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.tensor, torch.as_tensor,
    torch.rand, torch.randn, torch.randint, torch.linspace, torch.eye, torch.empty_strided,
    torch.randperm, torch.from_numpy, torch.frombuffer, torch.asarray, torch.scalar_tensor,
}  # fmt: skip

PLAIN = {
    T.shape.__get__, T.dtype.__get__, T.ndim.__get__, T.requires_grad.__get__,  # type: ignore[attr-defined]
    T.size, T.dim, T.numel, T.is_floating_point, T.__len__,
}  # fmt: skip
"""What a tensor says about itself on any device."""


class DeviceMismatch(RuntimeError):
    """An operator had operands on the CPU and on the GPU."""


def _is_cuda(device: Any) -> bool:
    name = device.type if isinstance(device, torch.device) else device
    return isinstance(name, str) and name.partition(":")[0] == "cuda"


def _tensors(*values: Any) -> list[T]:
    """Return the tensors in nested tuples, lists and dicts; several times faster than PyTorch's."""
    tensors: list[T] = []
    for value in values:
        if isinstance(value, T):
            tensors.append(value)
        elif isinstance(value, tuple | list):
            tensors += _tensors(*value)
        elif isinstance(value, dict):
            tensors += _tensors(*value.values())
    return tensors


def _share(one: T, other: T) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _where() -> str:
    """Return the innermost line of the package that is being run."""
    frame: Any = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    if frame is None:
        return "elsewhere"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


class Pretended:
    """Block in which there is a GPU; it counts by line of the package."""

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.current = ""
        self.allocator = ""
        """Current device and settings of the memory allocator, as the process has set them."""
        self._tags: dict[int, tuple[str, StorageWeakRef]] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self._own = threading.local()

    def __enter__(self) -> "Pretended":
        self._stack = ExitStack()
        for each in (*_patches(self), _Operators(self), _Functions(self)):
            self._stack.enter_context(each)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def clear(self) -> None:
        self.waits.clear()
        self.copies.clear()

    def tag(self, tensor: T, device: str) -> None:
        """Say where a tensor is; the weak reference keeps its address from being used again."""
        storage = tensor.untyped_storage()
        if len(self._tags) > 20_000:
            self._tags = {k: v for k, v in self._tags.items() if not v[1].expired()}
        self._tags[storage._cdata] = device, StorageWeakRef(storage)

    def of(self, tensor: T) -> str:
        """Return "cuda", "cpu", "meta", or "any" for what autograd itself has made."""
        with torch._C.DisableTorchFunction():
            if tensor.device.type == "meta":
                return "meta"
            while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                tensor = torch._C._functorch.get_unwrapped(tensor)  # of vmap: without a storage
            found = self._tags.get(tensor.untyped_storage()._cdata)
        return "cpu" if found is None else found[0]

    def pin(self, tensor: T) -> None:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = StorageWeakRef(storage)

    def is_pinned(self, tensor: T) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    @property
    def context(self) -> str | None:
        """Device of tensors that the function at hand makes."""
        return getattr(self._own, "context", None)

    @contextmanager
    def within(self, context: str) -> Iterator[None]:
        before = self.context
        self._own.context = context
        yield
        self._own.context = before

    def copied(self, to_cuda: bool, waits: bool = True) -> None:
        self.copies[f"to the {'GPU' if to_cuda else 'host'}, {_where()}"] += 1
        self.waits[_where()] += waits


def _patches(gpu: Pretended) -> Iterator[Any]:
    def nothing(*given: Any, **options: Any) -> None:
        pass

    def wait(*given: Any) -> None:
        gpu.waits[_where()] += 1

    class Stream:
        device = CUDA

        def __init__(self, *given: Any, **options: Any):
            pass

        synchronize = wait
        wait_stream = wait_event = record_event = query = nothing

    @contextmanager
    def stream(_: Any) -> Iterator[None]:
        yield

    about = SimpleNamespace(
        name="pretended", total_memory=MEMORY, major=9, minor=0, multi_processor_count=132
    )
    free, here = (MEMORY, MEMORY), Stream()
    returned = {
        "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True,
        "is_bf16_supported": True, "get_device_name": "pretended", "get_device_capability": (9, 0),
        "get_device_properties": about, "mem_get_info": free, "current_stream": here,
        "memory_allocated": 0, "max_memory_allocated": 0, "is_current_stream_capturing": False,
    }  # fmt: skip
    for name, value in returned.items():
        yield patch.object(torch.cuda, name, lambda *given, found=value, **options: found)
    for name in ("_lazy_init", "init", "empty_cache", "manual_seed_all"):
        # each its own function: TorchDynamo, which may look at them now, has a rule for each
        yield patch.object(torch.cuda, name, partial(nothing))
    yield patch.object(torch.cuda, "set_device", partial(setattr, gpu, "current"))
    allocate = partial(setattr, gpu, "allocator")
    yield patch.object(torch.cuda.memory, "_set_allocator_settings", allocate)
    own = {"Stream": Stream, "Event": Stream, "stream": stream, "synchronize": wait}
    for name, value in own.items():
        yield patch.object(torch.cuda, name, value)

    begin = torch.autocast.__init__

    def autocast(block: Any, device_type: str, *given: Any, **options: Any) -> None:
        begin(block, "cpu" if device_type == "cuda" else device_type, *given, **options)

    yield patch.object(torch.autocast, "__init__", autocast)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        plain = partial(lambda call, kind="cpu": call("cpu"), getattr(torch, name))
        yield patch.object(torch, name, plain)

    divide = _foreach_utils._group_tensors_by_device_and_dtype

    def divided(lists: Any, *given: Any) -> Any:
        groups = divide(lists, *given).items()
        on = {key: CUDA if gpu.of(value[0][0][0]) == "cuda" else CPU for key, value in groups}
        return {(on[key], key[1]): value for key, value in groups}

    for module in (_foreach_utils, clip_grad, sys.modules["torch.optim.optimizer"]):
        yield patch.object(module, divide.__name__, divided)

    run = threading.Thread.run

    def run_within(thread: threading.Thread) -> None:
        with _Operators(gpu), _Functions(gpu):
            run(thread)

    yield patch.object(threading.Thread, "run", run_within)


class _Functions(TorchFunctionMode):
    def __init__(self, gpu: Pretended):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PLAIN:
            return func(*args, **(kwargs or {}))
        gpu, kwargs = self.gpu, dict(kwargs or {})
        if func in (T.device.__get__, T.is_cuda.__get__, T.is_cpu.__get__, T.get_device):  # type: ignore[attr-defined]
            return self.read(func, args[0])
        if func in (T.numpy, T.__array__) and gpu.of(args[0]) == "cuda":
            raise DeviceMismatch(f"a tensor of cuda:0 cannot become an array, at {_where()}")
        if func in (T.to, T.cpu, T.cuda):
            return self.move(func, args, kwargs)
        if func is T.tolist:
            gpu.waits[_where()] += gpu.of(args[0]) == "cuda"
        wanted = None
        given = [kwargs.get("device"), *(args if func in FACTORIES else ())]
        if any(map(_is_cuda, given)):
            wanted = "cuda"
            args = tuple(CPU if _is_cuda(a) else a for a in args)
            kwargs |= {"device": CPU} if "device" in kwargs else {}
        elif kwargs.get("device") is not None and torch.device(kwargs["device"]) == CPU:
            wanted = "cpu"
        tensors = _tensors(args, kwargs)
        if func in FACTORIES and tensors and wanted:  # such as as_tensor of a tensor
            return self.move(T.to, (tensors[0], CUDA if wanted == "cuda" else CPU), {})
        is_pinned = func in FACTORIES and kwargs.pop("pin_memory", False)
        on_cuda = any(gpu.of(t) == "cuda" for t in tensors)
        with gpu.within(wanted or ("cuda" if on_cuda else "cpu")):
            result = func(*args, **kwargs)
        if is_pinned:
            gpu.pin(result)
        if wanted and isinstance(result, T) and gpu.of(result) not in (wanted, "meta"):
            gpu.tag(result, wanted)
        return result

    def read(self, func: Any, tensor: T) -> Any:
        on_cuda = self.gpu.of(tensor) == "cuda"
        if func == T.device.__get__:  # type: ignore[attr-defined]
            with torch._C.DisableTorchFunction():
                return CUDA if on_cuda else tensor.device
        if func is T.get_device:
            return 0 if on_cuda else -1
        return on_cuda == (func == T.is_cuda.__get__)  # type: ignore[attr-defined]

    def move(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry out `.to`, `.cpu` or `.cuda`: a copy with another tag if the device changes."""
        gpu = self.gpu
        tensor, *rest = args
        device = kwargs.pop("device", {T.cpu: "cpu", T.cuda: "cuda"}.get(func))
        flags = iter(("non_blocking", "copy"))
        for value in rest:
            if isinstance(value, torch.dtype):
                kwargs["dtype"] = value
            elif isinstance(value, T):
                device, kwargs["dtype"] = gpu.of(value), value.dtype
            elif isinstance(value, bool):
                kwargs[next(flags)] = value
            elif value is not None and func is T.to:
                device = value
        source = gpu.of(tensor)
        target = source if device is None else "cuda" if _is_cuda(device) else str(device)
        if "meta" in (source, target):
            return T.to(tensor, **kwargs, **({} if device is None else {"device": device}))
        waits = target == "cpu" or not kwargs.pop("non_blocking", False)
        kwargs = {name: v for name, v in kwargs.items() if v is not None and name != "non_blocking"}
        with gpu.within(target):
            result = T.to(tensor, **kwargs) if kwargs else tensor
            if target != source:
                result = result.clone() if _share(result, tensor) else result
                gpu.copied(target == "cuda", waits)
        if target != source:
            gpu.tag(result, target)
        return result


class _Operators(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, gpu: Pretended):
        super().__init__()
        self.gpu = gpu

    def attend(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry out FlexAttention: its operands and its mask are on one device."""
        with torch._C.DisableTorchFunction():
            tags = {self.gpu.of(t) for t in _tensors(args, kwargs)}
        if len(tags) > 1:
            raise DeviceMismatch(f"{func} of tensors on {sorted(tags)}, at {_where()}")
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            for each in _tensors(result):
                self.gpu.tag(each, *tags)
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, kwargs = self.gpu, kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self.attend(func, args, kwargs)
        name = func._schema.name
        with torch._C.DisableTorchFunction():
            tensors = _tensors(args, kwargs)
            tags = [gpu.of(t) for t in tensors]
            device = "cpu"
            if "cuda" in tags:
                device = "cuda"
                self.check(func, name, args, tensors, tags)
            elif name == "aten::lift_fresh" and gpu.context == "cuda":
                device = "cuda"  # torch.tensor in a function of torch itself
                gpu.tag(tensors[0], device)
                if tensors[0].numel():
                    gpu.copied(to_cuda=True)
            elif not tensors:
                device = gpu.context or "cpu"
                if torch._C._current_graph_task_id() != -1 and device != "cuda":
                    device = "any"  # in the backward pass
            elif set(tags) == {"any"}:
                device = "any"
            result = func(*args, **kwargs)
            if name == "aten::copy_":
                device = tags[0]
            elif name in CROSSING and name != "aten::set_":
                device = gpu.context or device
            known = [t for t in tensors if t.device.type != "meta"]
            for each in _tensors(result):
                if each.device.type == "meta":
                    continue
                if not any(_share(each, t) for t in known) and {device, gpu.of(each)} != {"cpu"}:
                    gpu.tag(each, device)
        return result

    def check(self, func: Any, name: str, args: Any, tensors: list[T], tags: list[str]) -> None:
        """Raise DeviceMismatch as CUDA would; count waits and copies."""
        gpu = self.gpu
        masks = (torch.bool, torch.uint8)
        by_mask = name in INDEXING and any(t is not None and t.dtype in masks for t in args[1])
        if name in WAITING or by_mask:
            gpu.waits[_where()] += 1
        if name == "aten::copy_" and tags[0] != tags[1] and "any" not in tags:
            to_cuda = tags[0] == "cuda"
            waits = args[2:3] != (True,) or not (to_cuda or gpu.is_pinned(tensors[0]))
            gpu.copied(to_cuda, waits)
        if name in CROSSING or "cpu" not in tags:
            return
        if name in INDEXING and tags[0] == "cuda":
            values = [a for a in args[2:3] if isinstance(a, T)]
            if all(gpu.of(v) != "cpu" or v.ndim == 0 for v in values):
                gpu.copied(to_cuda=True)  # of indices, which may be on the host
                return
        on_cpu = [t for t, tag in zip(tensors, tags, strict=True) if tag == "cpu"]
        is_pointwise = torch.Tag.pointwise in func.tags or name in ALIKE
        if not (is_pointwise and all(t.ndim == 0 for t in on_cpu)):
            shapes = [f"{tag} {[*t.shape]}" for t, tag in zip(tensors, tags, strict=True)]
            raise DeviceMismatch(f"{name} of {', '.join(shapes)}, at {_where()}")

"""vLLM 0.32, behind the few calls that the engine needs: the only file that imports it.

It is imported in the process that generates, once the environment is prepared.
"""

import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.sample import sampler

from tba.engines._batch import Output, Request
from tba.engines._vllm_checks import LORA_RANKS
from tba.models.pretrained import model_path
from tba.weights import as_tensor

if TYPE_CHECKING:
    from tba.engines.vllm import VLLM

SELF_CONTAINED = "tba"
"""Name of our own backend of vLLM's weight transfer."""


def arguments(own: "VLLM") -> EngineArgs:
    """Return the options of the engine as vLLM names them, with the defaults of the device."""
    one_process, on_cpu = own.tensor_parallel_size == 1, own.device == "cpu"
    bf16 = own.bf16 if own.dtype == "auto" else own.dtype == "bf16"
    gib = 1.0 if own.kv_cache_gib is None and on_cpu else own.kv_cache_gib
    length, lora = own.max_model_len or own.text.context, own.policy.lora
    return EngineArgs(
        model=model_path(own.policy.model),
        trust_remote_code=own.policy.trust_remote_code,
        dtype="bfloat16" if bf16 else "float32",
        max_model_len=length,
        max_num_seqs=own.max_num_seqs,
        kv_cache_memory_bytes=None if gib is None else int(gib * 2**30),
        gpu_memory_utilization=own.gpu_memory_utilization,
        tensor_parallel_size=own.tensor_parallel_size,
        enforce_eager=on_cpu if own.enforce_eager is None else own.enforce_eager,
        # a prompt in pieces would rewind its seed, which generators on a CPU cannot do
        enable_chunked_prefill=False if on_cpu else None,
        max_num_batched_tokens=max(2048, length) if on_cpu else None,
        block_size=32 if own.block_size is None and on_cpu else own.block_size,
        enable_lora=lora is not None,
        max_lora_rank=1 if lora is None else next(r for r in LORA_RANKS if r >= lora.r),
        max_loras=4,  # at once: requests that begin with a fifth wait for those of the first
        max_cpu_loras=own.max_num_seqs + 1,  # all that may be in use: none is read again
        distributed_executor_backend=InProcess if one_process else "mp",
        weight_transfer_config=WeightTransferConfig(backend=SELF_CONTAINED),
        worker_extension_cls=f"{__name__}.Worker",
        logprobs_mode="raw_logprobs" if own.raw_logprobs else "processed_logprobs",
        generation_config="vllm",  # not the model's own sampling parameters
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )


class Engine:
    """vLLM's engine. It belongs to the thread that creates it."""

    def __init__(self, own: "VLLM"):
        InProcess.gpu = int(own.device.partition(":")[2] or 0)
        if current_platform.is_cpu():
            sampler.batched_count_greater_than = _no_ranks
        with _undisturbed():
            self._engine = LLMEngine.from_engine_args(arguments(own))
        self._deadline = own.deadline
        self._requests: dict[str, tuple[int | None, LoRARequest | None, str]] = {}
        """Requests that run: the token that each scores, its adapter, and the weights' version."""
        self._adapters: list[LoRARequest] = []
        """Adapters that vLLM has, the newest last."""
        self._numbered = 0
        self._call("init_weight_transfer_engine", {"init_info": {}})

    @property
    def block_size(self) -> int:
        """Tokens of a block of the prefix cache."""
        return int(self._engine.vllm_config.cache_config.block_size)

    def add(self, key: str, request: Request) -> None:
        adapter = self._adapters[-1] if self._adapters else None
        try:
            prompt, parameters = tokens_input(list(request.prompt)), _parameters(request)
            self._engine.add_request(key, prompt, parameters, lora_request=adapter)
        except VLLMClientError as error:
            raise ValueError(f"vLLM does not accept a request: {error}") from error
        self._requests[key] = request.scored, adapter, self._engine.get_weight_version()

    def step(self) -> list[tuple[str, Output]]:
        with torch.random.fork_rng(devices=[]):  # vLLM draws numbers that it then replaces
            results = self._engine.step()
        ended = [each for each in results if each.finished]
        return [(each.request_id, self._output(each)) for each in ended]

    def abort(self, keys: Sequence[str]) -> None:
        if keys:
            self._engine.abort_request(list(keys))
        for key in keys:
            self._requests.pop(key, None)  # it may have ended, or never begun

    def close(self) -> None:
        self._engine.engine_core.shutdown()
        del self._engine  # and with it weights and cache, before another engine starts

    def load(self, arrays: Mapping[str, np.ndarray], version: int) -> None:
        """Load all weights, and forget what the old ones computed, for running requests as well."""
        self._call("start_weight_update")
        self._call("update_weights", {"update_info": {"arrays": dict(arrays)}})
        self._call("finish_weight_update")
        self._engine.set_weight_version(str(version))
        if not self.reset_cache():
            raise RuntimeError("the prefix cache could not be reset after a weight update")

    def load_adapter(self, folder: Path, version: int) -> None:
        """Begin later requests with the adapter in this folder, which is not needed afterwards.

        Requests that run keep theirs, and adapters that none of them has are unloaded. The prefix
        cache needs no reset, because the name of the adapter is part of its keys.
        """
        self._numbered += 1
        adapter = adapter_request(self._numbered, version, folder)
        in_use = {used for _, used, _ in self._requests.values()}
        for old in [each for each in self._adapters if each not in in_use]:
            self._engine.remove_lora(old.lora_int_id)
            self._adapters.remove(old)
        self._engine.add_lora(adapter)
        self._adapters.append(adapter)

    def reset_cache(self) -> bool:
        """Empty the prefix cache. Running requests compute their tokens again."""
        return bool(self._engine.reset_prefix_cache(reset_running_requests=True))

    def _call(self, method: str, arguments: dict[str, Any] | None = None) -> None:
        self._engine.collective_rpc(method, timeout=self._deadline, kwargs=arguments)

    def _output(self, result: Any) -> Output:
        (one,) = result.outputs
        if one.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"a request ended with {one.finish_reason!r}")
        flat, (scored, _, version) = one.logprobs, self._requests.pop(result.request_id)
        logp = np.array(flat.logprobs, np.float32)
        spans = [(span.start, span.version) for span in one.weight_versions]
        return Output(
            tokens=np.array(one.token_ids, np.int32),
            logp=logp[flat.start_indices],  # at each place, that of the sampled token comes first
            finished=one.finish_reason == "stop",
            score=math.nan if scored is None else flat.logprobs[flat.token_ids.index(scored)],
            cached=int(result.num_cached_tokens or 0),
            switches=tuple((at, int(new)) for at, new in spans if (at, new) != (0, version)),
        )


class InProcess(UniProcExecutor):
    """Runs the model in this process, and opens no port for it."""

    gpu = 0

    def _distributed_args(self) -> tuple[str, int, int]:
        # in memory, so that nothing stays behind a killed process; open as long as it may be used
        store = os.memfd_create("tba_vllm")
        return f"file:///proc/self/fd/{store}", 0, self.gpu


class Worker:
    """Empty extension of vLLM's workers; its name makes their processes import this file."""


@dataclass
class Init(WeightTransferInitInfo):
    """An empty agreement: the arrays come with the update."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """Arrays of `tba.weights.Weights`, by their names in a checkpoint."""

    arrays: dict[str, np.ndarray]


class Arrays(WeightTransferEngine[Init, Update]):
    """Receives weights as arrays, which vLLM then loads like those of a checkpoint."""

    init_info_cls, update_info_cls = Init, Update

    def init_transfer_engine(self, init_info: Init) -> None: ...

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # not the inherited method, which waits for an accelerator even if there is none
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Update) -> None:
        arrays = update_info.arrays.items()
        self.model.load_weights((name, as_tensor(array)) for name, array in arrays)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None: ...


WeightTransferEngineFactory.register_engine(SELF_CONTAINED, Arrays)


def adapter_request(number: int, version: int, folder: Path) -> LoRARequest:
    """Return the adapter with a name of its own: vLLM would take an older one of the same name."""
    return LoRARequest(f"version {version}, number {number}", number, str(folder))


def _parameters(request: Request) -> SamplingParams:
    sampling = request.sampling
    scored = [] if request.scored is None else [request.scored]
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=request.seed,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(request.eos_ids),
        ignore_eos=True,  # the tokens above end a response, not the tokenizer's EOS
        stop=list(sampling.stop),
        detokenize=bool(sampling.stop),
        logprobs=len(scored),  # beside that of the sampled token
        logprob_token_ids=scored or None,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _no_ranks(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return 0 as the rank of each row's token: to count takes an eighth of a step, for nobody."""
    return torch.zeros(len(x), dtype=torch.int64, device=x.device)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Undo what vLLM does to the process: it seeds generators, and replaces a torch function."""
    set_num_threads = torch.set_num_threads
    set_num_threads(torch.get_num_threads())  # a thread has a number of its own
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads = set_num_threads
        random.setstate(python)
        np.random.set_state(numpy)

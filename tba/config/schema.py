"""The tables of a config, and the frozen, validated `Config` that holds them.

`[task]`, `[engine]`, `[objective]`, `[strategy]` and `[selection]` name a plug-in by `use`; their
other keys are its options. `docs/configuration.md` lists all keys. This module does not import
torch, so that a mistake is reported at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from tba.config.table import Count, Positive, Seconds, Share, Table


class Use(Table):
    """A plug-in by name, with whatever options it has."""

    model_config = ConfigDict(frozen=True, extra="allow")
    use: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


def _named(value: Any) -> Any:
    return {"use": value} if isinstance(value, str) else value


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, int) else value


Plug = Annotated[Use, BeforeValidator(_named)]

PLUGGED = ("task", "engine", "objective", "strategy", "selection")
"""The tables that name a plug-in."""


class RunTable(Table):
    folder: str = Field(
        "", description="where the run is written; empty: runs/<task>-<objective>-<time>"
    )
    steps: Positive = Field(200, description="optimizer steps")
    seed: Count = Field(
        0, description="of the prompts' order, of sampling, and of what is drawn from the buffer"
    )


class PolicyTable(Table):
    model: str = Field(
        "bundled:arithmetic", description="a folder, a hub name, or bundled:arithmetic"
    )
    trust_remote_code: bool = Field(
        False, description="run the code that comes with a model on the hub"
    )
    autocast: Literal["auto", "bf16", "off"] = Field(
        "auto", description="bf16 compute over fp32 weights; auto: where it is faster"
    )
    gradient_checkpointing: bool = Field(
        False, description="less memory, more time; prompts are then run once for each response"
    )
    reset_reference_every: Count = Field(
        0,
        description="steps after which the policy becomes the reference, again and again; 0: it stays the first model",
    )
    eos_token: str | None = Field(None, description="for a tokenizer that has none")
    pad_token: str | None = Field(
        None, description="for a tokenizer that has none; any will do, masks come from lengths"
    )


class SamplingTable(Table):
    samples: Positive = Field(
        20, description="S, responses generated for each prompt (>= trainer.group_size)"
    )
    temperature: float = Field(
        1.0, gt=0, description="all log-probabilities are of the distribution at this temperature"
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="below 1 some answers are never found; log-probabilities are those before the cut",
    )
    max_tokens: Positive = Field(128, description="response tokens at most, EOS included")


class ReplayTable(Table):
    per_prompt: Positive = Field(100, description="distinct responses kept for each prompt")
    capacity: Positive = Field(
        100_000, description="distinct responses kept in all; the oldest are dropped"
    )
    first_fill: Count = Field(
        0, description="groups found before the first step; 0: as many as a batch has"
    )


class TrainerTable(Table):
    batch_size: Positive = Field(160, description="trajectories a step: whole groups")
    group_size: int = Field(20, description="K, trajectories of one prompt in a batch")
    learning_rate: float = Field(
        1e-5, gt=0, allow_inf_nan=False, description="of AdamW, after the warm-up"
    )
    schedule: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = Field(
        "constant", description="of the learning rate, over run.steps"
    )
    warmup_steps: Count = Field(
        0, description="the first so many steps rise from 0, with every schedule"
    )
    decay_steps: Count = Field(
        0,
        description="of warmup_stable_decay: the last so many steps fall to min_lr_ratio; 0: a tenth of run.steps",
    )
    min_lr_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="of cosine and warmup_stable_decay: their end, as a share of learning_rate; linear ends at 0",
    )
    betas: tuple[Share, Share] = Field((0.9, 0.999), description="of AdamW")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW")
    max_grad_norm: float = Field(
        1.0, gt=0, description="gradients are clipped to this norm; inf: no clipping"
    )
    token_budget: Positive = Field(
        16_384, description="tokens, padding included, in one forward and backward pass"
    )

    @model_validator(mode="after")
    def whole_groups(self) -> TrainerTable:
        k, size = self.group_size, self.batch_size
        if k < 2:
            raise ValueError(
                f"trainer.group_size = {k}: a group's own baseline needs at least 2 trajectories; set trainer.group_size=2 or more"
            )
        if size % k:
            near = max(k, round(size / k) * k)
            raise ValueError(
                f"trainer.batch_size = {size} is not made of whole groups of {k}; set trainer.batch_size={near}, or another group_size"
            )
        return self

    @property
    def groups(self) -> int:
        """B, the prompts in a batch."""
        return self.batch_size // self.group_size


class RuntimeTable(Table):
    use: Literal["local", "ray"] = Field(
        "ray",
        description="local: in this process, synchronous, bit-reproducible; ray: searchers of their own",
    )
    searchers: Positive = Field(1, description="searcher processes (ray)")
    publish_every: Positive = Field(
        1, description="k: steps between two publications of the weights"
    )
    fresh: Count | None = Field(
        None,
        description="new groups to wait for at each step; default 0 on ray (never wait), a batch's worth on local",
    )
    lag: Count | None = Field(
        None,
        description="each batch is exactly this many versions old, search and learning taking turns; 0: on policy; default: no such control",
    )
    prompts_per_task: Positive = Field(8, description="prompts a searcher answers in one go")
    address: str | None = Field(
        None, description="of a Ray cluster to join; default: a private one on loopback"
    )
    task_deadline: Seconds = Field(600.0, description="seconds until a silent searcher is replaced")
    start_deadline: Seconds = Field(300.0, description="seconds that a searcher may take to start")
    gather_deadline: Seconds = Field(
        1800.0,
        description="seconds the trainer waits for groups, for each batch's worth of them, before it gives up",
    )
    max_restarts: Count = Field(10, description="searchers replaced before the run gives up")
    cores: Literal["divide", "share"] = Field(
        "divide", description="divide: each process has cores of its own; share: no pinning"
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
        description="share of rejected samples, over the last 64 or more, that stops the run",
    )


class FaultsTable(Table):
    kind: Literal["none", "flip", "noise", "plant"] = Field(
        "none", description="flip: low + high - reward; noise: reward + scale * normal; plant: high"
    )
    share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="of the training trajectories whose reward is wrong, at random; evaluations are never touched",
    )
    low: float = Field(0.0, description="of flip: the least reward")
    high: float = Field(
        1.0, description="of flip: the greatest reward; of plant: the reward that is put in"
    )
    scale: float = Field(1.0, ge=0, description="of noise: its standard deviation")
    seed: Count = Field(
        0,
        description="of which rewards are wrong; at a larger share, the same ones are and others too",
    )

    @model_validator(mode="after")
    def meant(self) -> FaultsTable:
        if self.kind == "none" and self.share > 0:
            raise ValueError(
                f"faults.share = {self.share} with faults.kind = 'none' would change nothing; set faults.kind=flip, noise or plant"
            )
        if self.kind == "flip" and not self.low < self.high:
            raise ValueError(
                f"faults.low = {self.low} is not below faults.high = {self.high}; give the least and the greatest reward of the task"
            )
        return self


class EvalTable(Table):
    every: Count = Field(50, description="steps; 0: only before and after")
    prompts: Count = Field(128, description="held-out prompts; 0: no evaluation")
    samples: Positive = Field(4, description="sampled answers for each, beside the greedy one")
    temperature: float = Field(1.0, gt=0, description="of the sampled answers")
    k: Annotated[tuple[Positive, ...], BeforeValidator(_several)] = Field(
        (4,), description="the k of pass@k, each at most eval.samples"
    )
    seed: Count = Field(1234, description="of the sampled answers: the same for every evaluation")
    deadline: Seconds = Field(1800.0, description="seconds for one evaluation (ray)")

    @model_validator(mode="after")
    def enough_samples(self) -> EvalTable:
        most = max(self.k, default=1)
        if most > self.samples:
            raise ValueError(
                f"eval.k = {list(self.k)} asks for pass@{most} of eval.samples = {self.samples} answers; set eval.samples={most} or more"
            )
        return self


class CheckpointTable(Table):
    every: Count = Field(50, description="steps; 0: only at the end and on a signal")
    keep: Positive = Field(2, description="generations kept")


class LogTable(Table):
    console: Literal["auto", "live", "plain", "off"] = Field(
        "auto", description="auto: live on a terminal, plain lines elsewhere"
    )
    tensorboard: bool = Field(
        True, description="write event files into the run's folder, beside metrics.jsonl"
    )
    wandb: bool = Field(
        False, description="log to Weights & Biases as well (pip install -e '.[wandb]')"
    )
    wandb_project: str = Field("tba", description="where log.wandb logs to")
    sample_every: Count = Field(
        20, description="steps between two sample completions kept for the report; 0: none"
    )


class Config(Table):
    """A whole run. Read one with `load`, or build it: `Config(task="gsm8k", objective={"use": "tb", "beta": 0.01})`."""

    run: RunTable = RunTable()
    policy: PolicyTable = PolicyTable()
    task: Plug = Use(use="arithmetic")
    engine: Plug = Use(use="transformers")
    sampling: SamplingTable = SamplingTable()
    objective: Plug = Use(use="tb")
    strategy: Plug = Use(use="mixture")
    selection: Plug = Use(use="cyclic")
    replay: ReplayTable = ReplayTable()
    trainer: TrainerTable = TrainerTable()
    runtime: RuntimeTable = RuntimeTable()
    reward: RewardTable = RewardTable()
    faults: FaultsTable = FaultsTable()
    eval: EvalTable = EvalTable()
    checkpoint: CheckpointTable = CheckpointTable()
    log: LogTable = LogTable()

    @model_validator(mode="before")
    @classmethod
    def with_default_plugins(cls, tables: Any) -> Any:
        """`[objective] beta = 0.02` alone keeps the default objective."""
        if not isinstance(tables, Mapping):
            return tables
        defaults = {name: cls.model_fields[name].default.use for name in PLUGGED}
        return {
            k: {"use": defaults[k], **v} if k in defaults and isinstance(v, Mapping) else v
            for k, v in tables.items()
        }

    @model_validator(mode="after")
    def consistent(self) -> Config:
        t, k = self.trainer, self.trainer.group_size
        for name, size in (
            ("sampling.samples", self.sampling.samples),
            ("replay.per_prompt", self.replay.per_prompt),
        ):
            if size < k:
                raise ValueError(
                    f"{name} = {size} is less than trainer.group_size = {k}; set {name}={k} or more"
                )
        if self.runtime.use == "local" and self.runtime.fresh == 0:
            raise ValueError(
                "runtime.fresh = 0 with runtime.use = 'local' would never search; set runtime.fresh=1 or more, or runtime.use=ray"
            )
        lag, fresh = self.runtime.lag, self.runtime.fresh
        if lag is not None and fresh not in (None, self.trainer.groups):
            raise ValueError(
                f"runtime.lag = {lag} waits for a batch's worth at each step, not for runtime.fresh = {fresh}; drop one of them"
            )
        if lag is not None and self.runtime.publish_every != 1:
            raise ValueError(
                f"runtime.lag = {lag} needs new weights at each step; set runtime.publish_every=1, or drop runtime.lag"
            )
        if self.runtime.use == "local" and self.runtime.searchers > 1:
            raise ValueError(
                f"runtime.searchers = {self.runtime.searchers}, but runtime.use = 'local' has one; set runtime.use=ray"
            )
        if t.schedule == "warmup_stable_decay" and t.warmup_steps + t.decay_steps > self.run.steps:
            both = t.warmup_steps + t.decay_steps
            raise ValueError(
                f"trainer.warmup_steps + trainer.decay_steps = {both} is more than run.steps = {self.run.steps}; shorten them"
            )
        if self.replay.capacity < k:
            raise ValueError(
                f"replay.capacity = {self.replay.capacity} cannot hold one group; set replay.capacity={self.trainer.batch_size} or more"
            )
        return self

    @property
    def fresh(self) -> int:
        """Groups to wait for at each step: none when searchers run on their own, a batch's worth when they cannot."""
        if self.runtime.fresh is not None:
            return self.runtime.fresh
        return 0 if self.runtime.use == "ray" and self.runtime.lag is None else self.trainer.groups

    @property
    def first_fill(self) -> int:
        return self.replay.first_fill or self.trainer.groups

    def nested(self) -> dict[str, Any]:
        """As plain tables, the way `load` reads them; None is left out, as TOML has no such thing."""
        return self.model_dump(mode="json", exclude_none=True)

"""The tables of a config: every key with its type, default and meaning."""

from math import isfinite
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

LOGP_NOISE_FP32 = 0.01
"""Mean difference of log-probs, in nats, that rounding may explain."""
LOGP_NOISE_BF16 = 0.3
"""The same for a model that computes in bf16."""
PASS_TOKENS = 16_384
"""Tokens of a pass if `trainer.token_budget` is auto and no GPU's memory is known."""
OFF = {"top_p": 1.0, "top_k": 0}
"""Settings that change which tokens are chosen, but not their log-probs, with neutral values."""

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], Field(strict=False)]  # strict would refuse lists
Range = Annotated[tuple[Finite, Finite], Field(strict=False)]

PLUGGED = {
    "task": "tasks",
    "engine": "engines",
    "objective": "objectives",
    "strategy": "strategies",
    "selection": "selections",
}
"""The tables that name a plug-in, and the folder of each."""
FILLED_IN = {"given": True}
"""Metadata of a plug-in's field that the run fills in; the other fields are its options."""


def _single(value: Any) -> Any:
    return (value,) if isinstance(value, int | str) else value


OneOrMore = Annotated[tuple[Positive, ...], BeforeValidator(_single), Field(strict=False)]
Word = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Word, ...], BeforeValidator(_single), Field(strict=False)]
Service = Literal["tensorboard", "wandb"]
Services = Annotated[tuple[Service, ...], BeforeValidator(_single), Field(strict=False)]


class Table(BaseModel):
    """A frozen table without unknown keys. Values are not converted, except integers to floats."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        validate_default=True,
        hide_input_in_errors=True,  # it may be a secret
    )


def key(default: Any, meaning: str) -> Any:
    """Return a field with a default and a description, which `tba list TABLE` prints."""
    return Field(default, description=meaning)


class PluginTable(Table):
    """A plug-in by name, with its options."""

    model_config = ConfigDict(frozen=True, extra="allow")
    use: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class EngineTable(PluginTable):
    """The engine by name, with its options and the check of every weight update."""

    max_logp_gap: PositiveFloat | None = key(
        None,
        "maximum mean gap in nats between the log-probs of engine and trainer after an update; a"
        " larger one ends the run; where log-probs average below -1, it grows in proportion;"
        " default: 0.3, or 0.01 where both compute in fp32",
    )


class SourceTable(PluginTable):
    """A named source of prompts: a task with its options, and a weight."""

    use: str = key("", "task of the source; default: the run's task, with the options given here")
    weight: NotNegative = Field(
        description="share of the training prompts of task=mixture, relative to its other sources;"
        " 0: its held-out prompts are evaluated, and none of its prompts trained on"
    )


class TaskTable(PluginTable):
    """The task by name, with its options; with rows from Python, it is `custom` by default."""

    use: str = "arithmetic"
    allow_loss: Share = key(0.01, "largest share of prompts that may be lost: docs/tasks.md")
    sources: dict[str, SourceTable] = key({}, "tables [task.sources.NAME]: docs/tasks.md")

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the sources that are trained on, by name."""
        return {name: each.weight for name, each in self.sources.items() if each.weight}

    def source(self, name: str) -> PluginTable:
        """Return the task of a source: its own, or the run's with other options."""
        own = self.sources[name]
        options = own.options if own.use else self.options | own.options
        return PluginTable(use=own.use or self.use, **options)


class RunTable(Table):
    folder: str = key("", "folder to write to; empty: runs/<task>-<objective>-<time>")
    steps: Positive = key(200, "number of optimizer steps")
    epochs: Finite | None = key(
        None,
        "passes over the training prompts; sets run.steps to epochs x prompts / groups per batch",
    )
    seed: Count = key(0, "seed for the order of prompts, sampling, and draws from the buffer")
    base: str = key("", "folder with the modules of plug-ins and rewards; set by the run")


class LoraTable(Table):
    r: Positive = key(16, "rank of the adapters")
    alpha: Positive = key(32, "PEFT's lora_alpha: the output of an adapter is scaled by alpha / r")
    target_modules: Annotated[Texts, Field(min_length=1)] = key(
        ("all-linear",),
        'names of the layers to adapt, such as ["q_proj", "v_proj"]; all-linear: every linear layer'
        " except the LM head and experts whose weights are one tensor",
    )
    modules_to_save: Texts = key(
        (),
        'names of modules to train in full and save with the adapters, such as ["lm_head"]',
    )
    load_in_4bit: bool = key(
        False,
        "QLoRA: keep the frozen model in 4 bits (NF4, bitsandbytes); needs engine=transformers",
    )
    start: str | None = Field(
        None,
        alias="from",
        description="folder of a PEFT adapter to start from, with the same r, alpha and layers;"
        " a frozen copy of it is the reference; default: the model is the reference",
    )


class PolicyTable(Table):
    model: str = key("bundled:arithmetic", "folder, Hugging Face name, or bundled:arithmetic")
    autocast: Literal["auto", "bf16", "off"] = key(
        "auto", "compute in bf16 over fp32 weights; auto: where bf16 is faster"
    )
    attention: Literal["auto", "eager", "sdpa", "flex"] = key(
        "auto",
        "attention in transformers; auto: sdpa; eager if the model has no sdpa, and on a CPU up to"
        " 320 tokens; flex: FlexAttention for training on a GPU (not yet run on one)",
    )
    share_prompt: bool = key(True, "run a prompt once for all its responses")
    gradient_checkpointing: bool = key(False, "recompute activations: less memory, more time")
    reset_reference_every: Count = key(0, "make the policy the reference every N steps; 0: never")
    lora: LoraTable | None = key(
        None,
        "train low-rank adapters instead of all weights, at a higher trainer.learning_rate such as"
        " 3e-4; needs PEFT (pip install -e '.[lora]')",
    )
    eos_token: str | None = key(None, "additional token that ends responses and given texts")
    chat_template_kwargs: dict[str, Any] = key(
        {}, "arguments of the chat template, such as {enable_thinking = false}; docs/tasks.md"
    )


class SamplingTable(Table):
    samples: Positive = key(20, "S, responses to sample per prompt; at least trainer.group_size")
    temperature: Finite = key(
        1.0, "sampling temperature; all log-probs are of the distribution at this temperature"
    )
    top_p: PositiveShare = key(
        1.0, "nucleus sampling; log-probs are always of the untruncated distribution"
    )
    top_k: Count = key(
        0, "sample only from the k most likely tokens; 0: from all; log-probs as for top_p"
    )
    max_tokens: Positive = key(128, "maximum length of a response, EOS included")
    truncated: Literal["keep", "reject"] | float = key(
        "keep",
        "how to treat training responses cut off by max_tokens; keep: score them like others;"
        " reject: count them, but do not train on them; a number: their reward, without calling"
        " the task",
    )
    stop: Texts = key((), "texts that end a response besides EOS; rewards see the text before them")
    explore: Range | None = key(None, "range from which half of the searches draw a temperature")

    @field_validator("truncated", mode="before")
    @classmethod
    def keep_reject_or_a_reward(cls, value: Any) -> Any:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value in ("keep", "reject") or (number and isfinite(value)):
            return value
        raise ValueError(
            f"sampling.truncated = {value!r}: write keep, reject, or a number, which is the reward"
            " of such a response"
        )

    @property
    def reshaped(self) -> dict[str, Any]:
        """The settings, with values, that make the choice of tokens differ from their log-probs."""
        given = {name: getattr(self, name) for name in OFF}
        return {name: value for name, value in given.items() if value != OFF[name]}


class ReplayTable(Table):
    per_prompt: Positive = key(100, "maximum number of distinct responses to keep per prompt")
    capacity: Positive = key(100_000, "maximum number of distinct responses; drops the oldest")
    first_fill: Count = key(0, "groups to collect before the first step; 0: one batch of groups")
    rollouts: str | None = key(
        None, "JSONL file of logged rollouts with which a new run starts: docs/agents.md"
    )


class TrainerTable(Table):
    batch_size: Positive = key(160, "trajectories per step; a multiple of group_size")
    group_size: Annotated[int, Field(ge=2)] = key(20, "K, trajectories per prompt in a batch")
    learning_rate: Finite = key(1e-5, "peak learning rate of AdamW")
    schedule: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = key(
        "constant", "learning rate schedule over run.steps"
    )
    warmup_steps: Count | None = key(
        None,
        "steps of linear warm-up from 0, in every schedule; default: 10, or a tenth of run.steps if"
        " that is less",
    )
    decay_steps: Count = key(0, "final steps of warmup_stable_decay; 0: a tenth of run.steps")
    betas: Betas = key((0.9, 0.999), "betas of AdamW")
    weight_decay: NotNegative = key(0.0, "weight decay of AdamW")
    max_grad_norm: PositiveFloat = key(1.0, "clip gradients to this norm; inf: no clipping")
    optimizer: Literal["adamw", "adamw_8bit"] = key(
        "adamw",
        "adamw_8bit: moments in 2 bytes per parameter, not 8 (bitsandbytes); docs/memory.md",
    )
    weights: Literal["fp32", "bf16"] = key(
        "fp32",
        "precision of the trainer's weights and gradients; bf16: 15 bytes per parameter, not 16,"
        " and no copies in bf16: AdamW keeps the remainder of each weight; docs/memory.md",
    )
    token_budget: Positive | Literal["auto"] = key(
        "auto",
        "tokens per forward and backward pass without response padding; shared prompts count once;"
        " auto: 16384, and on this machine's GPUs as many as fit, but at least a whole group if"
        " that fits: docs/performance.md",
    )
    compile: bool = key(False, "compile the model's layers (torch.compile); docs/performance.md")
    devices: Positive = key(
        1, "ranks of the trainer (ray), each with a device, and a part of weights and AdamW's state"
    )
    reshard_after_forward: bool = key(True, "false: ranks keep gathered layers; docs/scaling.md")
    deadline: Finite = key(
        1800.0,
        "seconds for a step of the ranks, a publication, a batch of groups, a checkpoint, and each"
        " unfinished evaluation at the end of a run",
    )

    @field_validator("token_budget", mode="before")
    @classmethod
    def number_or_auto(cls, value: Any) -> Any:
        if value != "auto" and not (type(value) is int and value >= 1):
            wrong = f"trainer.token_budget = {value!r}"
            raise ValueError(f"{wrong}: write a number of 1 or more, or auto")
        return value

    @property
    def groups(self) -> int:
        """B, the prompts in a batch."""
        return self.batch_size // self.group_size

    @property
    def pass_tokens(self) -> int:
        """Tokens per pass: `token_budget`, which the setup of a run sets to a number."""
        return PASS_TOKENS if self.token_budget == "auto" else self.token_budget

    @property
    def reference_tokens(self) -> int:
        """Tokens per pass of the reference, which needs no whole group at once, as a loss does."""
        return min(self.pass_tokens, PASS_TOKENS)

    def warmup(self, steps: int) -> int:
        """Return the number of warm-up steps in a run of `steps` steps."""
        return min(10, steps // 10) if self.warmup_steps is None else self.warmup_steps

    def decay(self, steps: int) -> int:
        """Return the number of final steps of `warmup_stable_decay` in a run of `steps` steps."""
        return self.decay_steps or max(1, steps // 10)


class RuntimeTable(Table):
    use: Literal["local", "ray"] = key(
        "ray",
        "local: search and training alternate in this process, bit-reproducibly on a CPU except"
        " with agents; ray: searchers run in separate processes",
    )
    searchers: int | Annotated[tuple[int, int], Field(strict=False)] = key(
        1,
        "number of searcher processes (ray); [2, 8]: from 2 to 8, as many as the cluster has room"
        " for, while machines join and leave: docs/scaling.md; 0: train only on replay.rollouts"
        " (local)",
    )
    publish_every: Positive = key(1, "k: send new weights to the searchers every k steps")
    fresh: Count | None = key(
        None,
        "new groups to wait for at each step; default: 0 on ray, a batch of groups on local",
    )
    max_reuse: Annotated[float, Field(ge=0.01, allow_inf_nan=True)] = key(
        4.0,
        "maximum average number of times that a sample is trained on, over the last 20 to 50"
        " steps; before a step, the trainer waits for samples (ray), or searches for them (local);"
        " inf: no limit",
    )
    lag: Count | None = key(
        None,
        "train on new groups exactly this many versions after sampling, with search and training in"
        " lockstep; 0, with strategy=recent: on-policy; default: no lockstep",
    )
    prompts_per_task: Positive = key(8, "prompts per search task; default with vllm on ray: 1")
    concurrent_searches: Positive = key(
        2, "tasks a searcher runs at once (ray); default with vllm: 16, or more on a GPU"
    )
    colocate: Literal["share", "sleep"] = key(
        "share",
        "sleep: the engine frees its memory while the trainer trains (local, engine=vllm)",
    )
    address: str | None = key(None, "Ray cluster to join; default: start a private one on loopback")
    task_deadline: Finite = key(600.0, "seconds for a task, after which its searcher is restarted")
    start_deadline: Finite = key(300.0, "seconds to start Ray or a searcher; vllm on a GPU: 1800")
    cluster_deadline: Finite = key(
        60.0, "seconds that Ray may take to answer before the run is saved and ends (ray)"
    )
    max_restarts: Count = key(
        10,
        "maximum number of restarts of searchers, and of restarts from the newest checkpoint after"
        " a rank died, failed or was late; after that, the run fails (ray)",
    )
    cores: Literal["divide", "share"] = key(
        "divide", "divide: pin each process to its own CPU cores; share: no pinning"
    )

    @field_validator("searchers", mode="before")
    @classmethod
    def number_or_range(cls, value: Any) -> Any:
        bounds = value if isinstance(value, list | tuple) else [value, value]
        whole = len(bounds) == 2 and all(type(bound) is int for bound in bounds)
        if whole and (1 <= bounds[0] <= bounds[1] or value == 0):
            return value
        raise ValueError(f"runtime.searchers = {value!r}: write 1 or more, or a range, [2, 8]")

    @property
    def most_searchers(self) -> int:
        if isinstance(self.searchers, int):
            return max(1, self.searchers)  # without any, this process evaluates
        return self.searchers[1]


class RewardTable(Table):
    isolate: Literal["process", "none"] = key(
        "process",
        "process: score in a separate process per searcher, which is killed if a call hangs;"
        " none: call the task in the searcher, without deadlines, for debugging",
    )
    deadline: PositiveFloat = key(
        10.0,
        "seconds per completion for a call of the reward function, and for a call of a tool; a call"
        " may take up to a quarter of runtime.task_deadline",
    )
    max_memory: PositiveFloat = key(
        8.0, "GB that the scoring process may use on top of its loaded models; inf: no limit"
    )
    max_rejected: PositiveShare = key(
        0.5, "stop the run if a larger share of the latest samples (at least 64) is rejected"
    )
    quarantine: Count = key(
        2,
        "consecutive deaths of the scoring process, or of the searcher, after which a prompt is not"
        " searched again; 0: never",
    )


class EvalTable(Table):
    every: Count = key(50, "evaluate every N steps; 0: only before and after training")
    prompts: Count = key(128, "held-out prompts of each set; default: all, at most 128; 0: none")
    samples: Positive = key(4, "answers to sample per prompt, in addition to the greedy one")
    temperature: Finite = key(1.0, "temperature of the sampled answers")
    k: OneOrMore = key((4,), "values of k for pass@k; each at most eval.samples")
    patience: Positive | None = key(
        None,
        "end the run after this many consecutive evaluations without a better sampled score, and"
        " keep the best checkpoint; default: never",
    )
    prompts_per_task: Positive = key(
        32, "held-out prompts per evaluation task; evaluation tasks alternate with searches (ray)"
    )


class CheckpointTable(Table):
    every: Count = key(50, "save every N steps; 0: only at the end and when the run is stopped")
    keep: Positive = key(2, "number of checkpoints to keep")
    keep_best: bool = key(False, "also keep the one with the best held-out score: docs/tasks.md")


class LogTable(Table):
    console: Literal["auto", "lines", "off"] = key(
        "auto", "console output; auto: a table and a progress line on a terminal, else lines"
    )
    report_to: Services = key(
        ("tensorboard",),
        "services to log to; tensorboard: event files in the run's folder; wandb: Weights & Biases"
        " (pip install -e '.[wandb]'), to the project that WANDB_PROJECT names, or tba; []: none",
    )
    sample_every: Count = key(20, "write a group to samples.jsonl every N steps; 0: never")


class ConfigTables(Table):
    """The tables of a config by name, without the rules that hold between them."""

    run: RunTable = RunTable()
    policy: PolicyTable = PolicyTable()
    task: TaskTable = TaskTable()
    engine: EngineTable = EngineTable(use="transformers")
    sampling: SamplingTable = SamplingTable()
    objective: PluginTable = PluginTable(use="tb")
    strategy: PluginTable = PluginTable(use="mixture")
    selection: PluginTable = PluginTable(use="cyclic")
    replay: ReplayTable = ReplayTable()
    trainer: TrainerTable = TrainerTable()
    runtime: RuntimeTable = RuntimeTable()
    reward: RewardTable = RewardTable()
    eval: EvalTable = EvalTable()
    checkpoint: CheckpointTable = CheckpointTable()
    log: LogTable = LogTable()

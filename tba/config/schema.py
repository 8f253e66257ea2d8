"""`Config`, the frozen and validated config of a run.

`[task]`, `[engine]`, `[objective]`, `[strategy]` and `[selection]` name a plug-in by `use`; their
other keys are its options. `docs/configuration.md` lists all keys. This module does not import
torch, so that a mistake is reported at once.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from tba.config.table import Table
from tba.config.tables import (
    CheckpointTable,
    EvalTable,
    FaultsTable,
    LogTable,
    PolicyTable,
    ReplayTable,
    RewardTable,
    RunTable,
    RuntimeTable,
    SamplingTable,
    TrainerTable,
    Use,
)

PLUGGED = {
    "task": "tasks",
    "engine": "engines",
    "objective": "objectives",
    "strategy": "strategies",
    "selection": "selections",
}
"""The tables that name a plug-in, and the folder of each."""


class Config(Table):
    """The config of a whole run.

    Read one with `load`, or build it from tables:
    `Config(task="gsm8k", objective={"use": "tb", "beta": 0.01})`.
    """

    run: RunTable = RunTable()
    policy: PolicyTable = PolicyTable()
    task: Use = Use(use="arithmetic")
    engine: Use = Use(use="transformers")
    sampling: SamplingTable = SamplingTable()
    objective: Use = Use(use="tb")
    strategy: Use = Use(use="mixture")
    selection: Use = Use(use="cyclic")
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
        """Accept `objective = "rloo"`, and `[objective] beta = 0.02` for the default objective."""
        if not isinstance(tables, Mapping):
            return tables
        complete = dict(tables)
        for name in PLUGGED:
            match complete.get(name):
                case str(use):
                    complete[name] = {"use": use}
                case Mapping() as table:
                    complete[name] = {"use": cls.default_use(name), **table}
        return complete

    @classmethod
    def default_use(cls, table: str) -> str:
        """Return the plug-in that `[table]` names by default."""
        return cls.model_fields[table].default.use

    @model_validator(mode="after")
    def consistent_sizes(self) -> "Config":
        t, k, steps = self.trainer, self.trainer.group_size, self.run.steps
        samples, stored = self.sampling.samples, self.replay.per_prompt
        for name, size in (("sampling.samples", samples), ("replay.per_prompt", stored)):
            if size < k:
                raise ValueError(
                    f"{name} = {size} is less than trainer.group_size = {k}; set {name}={k} or more"
                )
        if self.replay.capacity < k:
            raise ValueError(
                f"replay.capacity = {self.replay.capacity} cannot hold one group;"
                f" set replay.capacity={t.batch_size} or more"
            )
        both = t.warmup_steps + t.decay_steps
        if t.schedule == "warmup_stable_decay" and both > steps:
            raise ValueError(
                f"trainer.warmup_steps + trainer.decay_steps = {both} is more than"
                f" run.steps = {steps}; shorten them"
            )
        return self

    @model_validator(mode="after")
    def consistent_runtime(self) -> "Config":
        r = self.runtime
        if r.use == "local" and r.fresh == 0:
            raise ValueError(
                "runtime.fresh = 0 with runtime.use = 'local' would never search;"
                " set runtime.fresh=1 or more, or runtime.use=ray"
            )
        if r.use == "local" and r.searchers > 1:
            raise ValueError(
                f"runtime.searchers = {r.searchers}, but runtime.use = 'local' has one;"
                " set runtime.use=ray"
            )
        if r.lag is not None and r.fresh not in (None, self.trainer.groups):
            raise ValueError(
                f"runtime.lag = {r.lag} waits for one batch of groups at each step,"
                f" not for runtime.fresh = {r.fresh}; remove one of them"
            )
        if r.lag is not None and r.publish_every != 1:
            raise ValueError(
                f"runtime.lag = {r.lag} needs new weights at each step;"
                " set runtime.publish_every=1, or remove runtime.lag"
            )
        return self

    @property
    def fresh(self) -> int:
        """New groups to wait for at each step.

        0 when searchers run on their own, otherwise as many as a batch has.
        """
        if self.runtime.fresh is not None:
            return self.runtime.fresh
        asynchronous = self.runtime.use == "ray" and self.runtime.lag is None
        return 0 if asynchronous else self.trainer.groups

    @property
    def first_fill(self) -> int:
        """Groups to wait for before the first step."""
        return self.replay.first_fill or self.trainer.groups

    def nested(self) -> dict[str, Any]:
        """Return the config as plain tables, which `load` reads.

        Keys without a value are left out, because TOML has no None.
        """
        return self.model_dump(mode="json", exclude_none=True)

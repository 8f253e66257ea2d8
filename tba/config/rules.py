"""Rules about settings that contradict each other; an error names both, and what to set."""

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

from tba.config.tables import ConfigTables, TaskTable

Rule = tuple[bool, str, str]
"""A rule: whether the config breaks it, a setting, and the requirement of that setting."""


def broken(rules: Iterable[Rule]) -> list[str]:
    """Return a message for each broken rule."""
    told = []
    for is_broken, setting, what in rules:
        if is_broken:
            key = setting.partition(" = ")[0]
            other = "" if what.startswith("to be ") else f", or another value of {key}"
            told.append(f"{setting} needs {what}{other}")
    return told


def rules_of_sizes(c: ConfigTables) -> Iterator[Rule]:
    e = c.eval
    t = c.trainer
    k = t.group_size
    steps = c.run.steps
    epochs = c.run.epochs
    both_lengths = epochs is not None and "steps" in c.run.model_fields_set
    yield both_lengths, f"run.epochs = {epochs}", "run.steps unset"
    near = max(k, round(t.batch_size / k) * k)
    size = f"trainer.batch_size = {t.batch_size}"
    yield t.batch_size % k > 0, size, f"to be a multiple of group_size = {k}, such as {near}"
    for name in ("sampling.samples", "replay.per_prompt", "replay.capacity"):
        yield attrgetter(name)(c) < k, f"trainer.group_size = {k}", f"{name}={k} or more"
    decay = t.decay(steps)
    decays = t.schedule == "warmup_stable_decay" and epochs is None
    both = f"trainer.warmup_steps = {t.warmup(steps)} with decay_steps = {decay}"
    least = t.warmup(steps) + decay
    yield decays and least > steps, both, f"run.steps={least} or more"
    if not c.run.base:  # a resumed run keeps settings without effect
        for name in (
            "trainer.warmup_steps",
            "runtime.publish_every",
            "policy.reset_reference_every",
        ):
            number = attrgetter(name)(c) or 0
            least = number + ("warmup" in name)  # a step after the warm-up
            late = epochs is None and least > steps
            yield late, f"{name} = {number}", f"run.steps={least} or more"
        unused = t.decay_steps > 0 and t.schedule != "warmup_stable_decay"
        yield unused, "trainer.decay_steps", "trainer.schedule=warmup_stable_decay"
        joins = c.runtime.address is not None and c.runtime.use != "ray"
        yield joins, "runtime.address", "runtime.use=ray"
        rate = f"trainer.learning_rate = {t.learning_rate:g}"
        yield t.learning_rate >= 1, rate, "to be below 1, such as 1e-5"
        filled = c.replay.first_fill * c.sampling.samples
        first = f"replay.first_fill = {c.replay.first_fill}"
        yield filled > c.replay.capacity, first, f"replay.capacity={filled} or more"
    most = max(e.k, default=1)
    yield most > e.samples, f"eval.k = {list(e.k)}", f"eval.samples={most} or more"
    yield e.patience is not None and not e.every, "eval.patience", "eval.every=50 or so"
    if c.checkpoint.keep_best and e.every:
        for name in ("checkpoint.every", "runtime.publish_every"):
            every = attrgetter(name)(c)
            fits = every > 0 and e.every % every == 0
            yield not fits, "checkpoint.keep_best", f"{name}={e.every}, or a divisor of it"


def rules_of_rows(c: ConfigTables, prompts: int, held_out: int, is_new: bool) -> Iterator[Rule]:
    """Yield rules that depend on the numbers of training prompts and held-out prompts."""
    e = c.eval
    best = c.checkpoint.keep_best
    held = "held-out prompts, by eval.prompts=128 and a held-out set in [task]"
    names: dict[str, Any] = {"eval.patience": e.patience, "checkpoint.keep_best": best}
    for name, source in c.task.sources.items():
        names[f"task.sources.{name}.weight = 0"] = source.weight == 0
    for name, value in names.items():
        yield bool(value) and not held_out, name, held
    if is_new:  # a resumed run keeps its settings
        few = "prompts" in e.model_fields_set and e.prompts > held_out
        least = f"{e.prompts} or more held-out prompts, but there are {held_out}"
        yield few, f"eval.prompts = {e.prompts}", least
        filled = -(-c.replay.first_fill * c.sampling.samples // prompts)
        first = f"replay.first_fill = {c.replay.first_fill} with {prompts} training prompts"
        yield filled > c.replay.per_prompt, first, f"replay.per_prompt={filled} or more"


def rules_of_sources(task: TaskTable) -> Iterator[Rule]:
    mixed = f"task.use = {task.use}"
    is_mixture = task.use == "mixture"
    yield is_mixture and not task.weights, mixed, "tables [task.sources.NAME] with a weight above 0"
    for name, source in task.sources.items():
        key = f"task.sources.{name}"
        weight = f"{key}.weight = {source.weight:g}"
        yield source.weight > 0 and not is_mixture, weight, "task.use=mixture"
        yield is_mixture and not source.use, mixed, f"{key}.use=TASK"
        yield source.use == "mixture", f"{key}.use = mixture", "to be another task"


def rules_of_processes(c: ConfigTables) -> Iterator[Rule]:
    r = c.runtime
    t = c.trainer
    is_local = r.use == "local"
    is_range = not isinstance(r.searchers, int)
    count = f"runtime.searchers = {r.searchers}"
    yield is_local and r.fresh == 0, "runtime.use = local", "runtime.fresh=1 or more"
    yield is_local and r.searchers not in (0, 1), count, "runtime.use=ray"
    yield r.searchers == 0 and not is_local, count, "runtime.use=local"
    yield r.searchers == 0 and not c.replay.rollouts, count, "replay.rollouts=FILE.jsonl"
    sleeps = r.colocate == "sleep"
    yield sleeps and not is_local, "runtime.colocate = sleep", "runtime.use=local"
    yield is_range and r.address is None, count, "runtime.address=auto"
    yield is_range and r.lag is not None, count, "runtime.lag unset"
    lag = f"runtime.lag = {r.lag}"
    own_pace = r.fresh not in (None, t.groups)
    yield r.lag is not None and own_pace, lag, "runtime.fresh unset"
    yield r.lag is not None and r.publish_every != 1, lag, "runtime.publish_every=1"

    several = t.devices > 1
    ranks = f"trainer.devices = {t.devices}"
    yield several and is_local, ranks, "runtime.use=ray"
    yield several and t.optimizer != "adamw", ranks, "trainer.optimizer=adamw"
    yield several and t.compile, ranks, "trainer.compile=false"
    keeps = not t.reshard_after_forward and not several
    yield keeps, "trainer.reshard_after_forward = false", "trainer.devices=2 or more"
    lora = c.policy.lora
    in_4_bits = lora is not None and lora.load_in_4bit
    yield in_4_bits and several, "policy.lora.load_in_4bit", "trainer.devices=1"
    yield in_4_bits and t.compile, "policy.lora.load_in_4bit", "trainer.compile=false"
    mixed = c.policy.autocast != "bf16"
    yield t.weights == "bf16" and mixed, "trainer.weights = bf16", "policy.autocast=bf16"
    whole = f"a group for each, so trainer.batch_size={t.devices * t.group_size} or more"
    yield several and t.devices > t.groups, ranks, whole

"""The config that a run is resumed with, and checks of what may not change in it."""

import logging
from collections.abc import Sequence
from pathlib import Path

from tba.config.plugins import resolve_all
from tba.config.schema import Config, override_all, parse, read_json
from tba.config.tables import LoraTable
from tba.runs import log
from tba.runs.generations import MANIFEST, damage, generations
from tba.tasks._memory import check_same, refuse

logger = logging.getLogger(__name__)


def config_of(run: Path) -> Config:
    """Return the config of a run, or if it is damaged the copy in a checkpoint; else ValueError."""
    try:
        return parse(log.read_config(run))
    except ValueError as error:
        for generation in reversed(generations(run / log.CHECKPOINTS)):
            copy = generation / log.CONFIG
            if copy.is_file() and not damage(generation).keys() & {log.CONFIG, MANIFEST}:
                name = f"{generation.parent.name}/{generation.name}/{log.CONFIG}"
                damaged = run / log.CONFIG
                logger.error("DAMAGED CONFIG %s: %s; going on with %s", damaged, error, name)
                return parse(read_json(copy))
        raise


def stored_config(run: Path, settings: Sequence[str]) -> Config:
    """Return the config of a run with these settings; ValueError if it had data from Python."""
    config = config_of(run)
    refuse(config.task, str(run))
    tables = config.nested()
    override_all(tables, settings)
    return parse(tables)


def check_resumed(config: Config, before: Config) -> None:
    """Raise ValueError for a change that makes the contents of the replay buffer wrong."""
    check_same(config.task, before.task)
    now, then, changes = config.sampling, before.sampling, []
    if set(now.stop) != set(then.stop):
        end = f"the run's responses end with {list(then.stop)}"
        changes.append(f"sampling.stop = {list(now.stop)}, but {end}")
    if now.temperature != then.temperature:
        kind = f"the run's log-probabilities are of temperature {then.temperature}"
        changes.append(f"sampling.temperature = {now.temperature}, but {kind}")
    if config.policy.lora != before.policy.lora:
        given, first = _shown(config.policy.lora), _shown(before.policy.lora)
        changes.append(f"policy.lora = {given}, but the run has {first}")
    arguments, earlier = config.policy.chat_template_kwargs, before.policy.chat_template_kwargs
    if arguments != earlier:
        changes.append(f"policy.chat_template_kwargs = {arguments}, but the run has {earlier}")
    if changes:
        raise ValueError(f"{'; '.join(changes)}; leave it unchanged, or start a new run")
    name, advice = config.objective.use, "keep the objective, or start a new run"
    head, values = _asks(config)
    had, there = _asks(before)
    if head != had:
        raise ValueError(f"objective.use = {name!r} has {head}, but the run has {had}; {advice}")
    if values not in ("none", there):
        raise ValueError(
            f"objective.use = {name!r} needs values, {values}, but the run has {there}; {advice}"
        )


def check_step(step: int, config: Config) -> None:
    """Raise ValueError if a run is already further than it shall go."""
    steps = config.run.steps
    if step > steps:
        raise ValueError(
            f"run.steps = {steps}, but the run is at step {step}; set run.steps={step} or more"
        )


def _asks(config: Config) -> tuple[str, str]:
    """Return in words the head of the config's objective, and the values that it needs."""
    objective = resolve_all(config).objective.at(0)
    on = "no head" if objective.head is None else f"a head on the {objective.head.on}"
    values = objective.value_rollouts
    return on, "none" if values is None else f"one every {values.step_tokens} tokens"


def _shown(lora: LoraTable | None) -> str:
    return "none" if lora is None else str(lora.model_dump(by_alias=True, exclude_none=True))

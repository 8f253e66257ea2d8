"""Settings with which parts of `benchmarks/gpu.sh` fit a card, by the formula of the product.

    bash benchmarks/gpu.sh --plan 24 40 80 141

prints them for cards of so many GB, and measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

Role = Literal["step", "run", "engine", "two engines"]
"""What a part holds at one time: a trainer, all processes of a run, or only engines."""
ENGINE = ("CUDA", "engine", "its activations and graphs", "KV cache")
"""Memory of an engine, among the parts of a searcher's memory."""
USABLE = 0.9
"""Share of a card that parts may need: the formula leaves out what is fragmented."""
PROMPT = 128
"""Tokens of the longest prompt."""
CHOICES = tuple(
    (f"trainer.token_budget={budget}", f"policy.gradient_checkpointing={checkpointing}")
    for checkpointing in ("false", "true")
    for budget in (65_536, 32_768, 16_384, 8_192)
)
"""Settings to choose from, the fastest first. A step has the same result with each of them."""


class Skipped(Exception):
    """A part that this machine cannot run, and why."""


@dataclass(frozen=True)
class Fit:
    """A config that fits a card, and the bytes that it needs there."""

    config: Any
    needed: float
    settings: tuple[str, ...]

    def __str__(self) -> str:
        chosen = " ".join(("", "with", *self.settings)) if self.settings else ""
        return f"{self.needed / 1e9:.1f} GB calculated{chosen}"


def fitting(configure: Callable[..., Any], role: Role, card: float) -> Fit:
    """Return the fastest of CHOICES that fits a card of so many bytes; raise Skipped if none does.

    `configure` returns the config of a part with further settings. An engine has nothing to choose.
    """
    least = inf
    for settings in CHOICES if role in ("step", "run") else ((),):
        config = configure(*settings)
        needed = needed_by(config, role, card)
        if needed <= USABLE * card:
            return Fit(config, needed, settings)
        least = min(least, needed)
    raise Skipped(f"it needs {least / 1e9:.0f} GB, and {USABLE:.0%} of {card / 1e9:.0f} are usable")


def needed_by(config: Any, role: Role, card: float) -> float:
    """Return the bytes that a part needs on its card."""
    from tba.config.plugins import with_defaults
    from tba.setup.machine import Machine
    from tba.setup.memory import MemoryEstimate

    needs = MemoryEstimate.of(with_defaults(config), Machine(1, card, inf), PROMPT)
    here = [each for each in needs.processes if each.card == 0]
    if role == "step":
        return here[0].total
    if role == "run":
        return sum(each.total for each in here)
    searcher = next(each for each in needs.processes if each.name == "searcher")
    engine = sum(n for name, n in searcher.parts.items() if name in ENGINE)
    return engine * (2 if role == "two engines" else 1)


def print_plan(parts: dict[str, tuple[Role, Callable[..., Any]]], cards: list[float]) -> None:
    """Print with which settings each part fits cards of so many GB."""
    for card in cards:
        print(f"a card of {card:g} GB:")
        for name, (role, configure) in parts.items():
            try:
                print(f"  {name}: {fitting(configure, role, card * 1e9)}", flush=True)
            except Skipped as reason:
                print(f"  {name}: skipped: {reason}", flush=True)

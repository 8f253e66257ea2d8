"""A searcher in a process of its own."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

import ray
import torch

from tba import build
from tba.config import Config
from tba.evaluate import Evaluation
from tba.runtime.placement import Place
from tba.searcher import Findings
from tba.types import Prompt
from tba.weights import Weights, adopt


class SearcherActor:
    """A searcher in its own process. `publish` runs beside a search; what it leaves is adopted before the next one."""

    def __init__(self, config: Config, held_out: list[Prompt], place: Place, bf16: bool, path: list[str], newest: Weights | None, reference: Weights | None):
        sys.path[:] = path + [p for p in sys.path if p not in path]
        torch.set_grad_enabled(False)
        place.take()
        self.parts = build.assemble(config, [], held_out)
        self.searcher = build.searcher(self.parts, place.device, bf16)
        self.newest = newest
        if reference is not None:
            self.reset_reference(reference)
        self.idle_since = time.perf_counter()

    @ray.method(concurrency_group="control")
    def pid(self) -> int:
        """This process; answered once it has started."""
        return os.getpid()

    @ray.method(concurrency_group="control")
    def publish(self, weights: Weights) -> None:
        self.newest = weights

    def reset_reference(self, weights: Weights) -> None:
        """In its turn: what was asked for before is searched with the reference of before."""
        adopt(self.searcher.reference.model, weights)

    def search(self, prompts: list[Prompt], seed: int, weights: Weights | None) -> tuple[Findings, float | None]:
        """What was found, and the log-prob gap if newer weights were adopted first: `weights`, or else those last published."""
        started = time.perf_counter()
        seconds = {"idle": started - self.idle_since}
        gap = self._adopt(self.newest if weights is None else weights)
        seconds["adopt"] = time.perf_counter() - started
        findings = self.searcher.search(prompts, seed)
        self.idle_since = time.perf_counter()
        return replace(findings, seconds=findings.seconds | seconds), gap

    def evaluate(self, weights: Weights | None) -> Evaluation:
        self._adopt(weights)
        found = build.evaluation(self.parts, self.searcher)
        self.idle_since = time.perf_counter()
        return found

    def _adopt(self, weights: Weights | None) -> float | None:
        newer = weights is not None and weights.version > self.searcher.engine.version
        return self.searcher.engine.adopt(weights) if newer and weights is not None else None

# examples/mylab/recording_engine.py
"""An engine that keeps a record of every completion."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tba.engines import Engine
from tba.engines.transformers import Transformers
from tba.types import Completion, Sampling
from tba.weights import Weights


@dataclass
class Recording(Engine):
    """Generates with transformers, and appends each completion to `file` as a line of JSON."""

    file: str = "completions.jsonl"

    def __post_init__(self) -> None:
        self._engine = Transformers(
            policy=self.policy,
            text=self.text,
            device=self.device,
            bf16=self.bf16,
            sampling=self.sampling,
        )
        self._writing = threading.Lock()  # several searches may run at once

    @property
    def version(self) -> int:
        return self._engine.version

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        answered = self._engine.generate(prompts, sampling, seed)
        lines = []
        for prompt, completions in zip(prompts, answered, strict=True):
            question = self.text.decode(prompt)
            for c in completions:
                answer = self.text.decode(c.tokens)
                row = {"version": c.version, "prompt": question, "completion": answer}
                lines.append(json.dumps(row) + "\n")
        with self._writing, Path(self.file).open("a") as file:
            file.writelines(lines)
        return answered

    def load_weights(self, weights: Weights) -> float | None:
        return self._engine.load_weights(weights)

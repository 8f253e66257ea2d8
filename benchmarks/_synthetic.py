"""Random work in the shape of real one: prompts, groups, and the operations of a step."""

from __future__ import annotations

from typing import Any


def sums(count: int, length: int) -> list[dict[str, str]]:
    """Return rows whose prompts have about so many characters, which are tokens."""
    rows = []
    for i in range(count):
        text = f"{100 + i % 900}+{100 + 7 * i % 900}=" * (1 + length // 8)
        rows.append({"prompt": f"{i}+{text}"[: length - 1] + "=", "answer": str(i % 10)})
    return rows


def random_groups(groups: int, samples: int, prompt: int, answer: int) -> list[Any]:
    import numpy as np

    from tba.prompt import Prompt
    from tba.types import Group, Trajectory

    rng = np.random.default_rng(0)
    made = []
    for g in range(groups):
        trajectories = []
        for _ in range(samples):
            tokens = rng.integers(3, 15, answer).astype(np.int32)
            logp = np.full(answer, -2.5, np.float32)
            trajectories.append(Trajectory(tokens, logp, logp, float(rng.random()), 0, False))
        ids = rng.integers(3, 15, prompt).astype(np.int32)
        made.append(Group(Prompt(str(g), str(g)), ids, tuple(trajectories)))
    return made


def step_flops(model: Any, batch: Any) -> float:
    """Return 6 x parameters x tokens: the prompt once for a group, the head for answers alone."""
    head = model.get_output_embeddings().weight.numel()
    body = sum(p.numel() for p in model.parameters()) - head  # tied: the embedding costs nothing
    answers = batch.mask.numel()
    return 6.0 * (body * (answers + batch.prompt_mask.numel()) + head * answers)

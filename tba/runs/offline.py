"""Commands on a run that has ended: evaluation, and export of its model or its responses."""

import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tba.config.schema import Config, override_all, parse
from tba.learn.state import MODEL, read_model
from tba.models.lora import merged
from tba.models.pretrained import computes_in_bf16, load_text
from tba.replay.buffer import ReplayBuffer
from tba.runs.checkpoint import REFERENCE, newest, read_weights
from tba.runs.generations import step_of
from tba.runs.log import CHECKPOINTS
from tba.runs.parts import check
from tba.runs.resumed import read_config
from tba.runtime.placement import gpu_count
from tba.search.evaluate import evaluate_held_out
from tba.tasks._memory import refuse
from tba.weights import Weights, as_array


def stored_config(run: Path, settings: Sequence[str]) -> Config:
    """Return the config of a run with these settings; ValueError if it had data from Python."""
    tables = read_config(run)
    refuse(parse(tables).task, str(run))
    override_all(tables, settings)
    return parse(tables)


def evaluate_run(run: Path, settings: Sequence[str], reference: bool) -> dict[str, Any]:
    """Return the scores of the newest undamaged checkpoint on the task's held-out prompts.

    With `reference`, those of the model that the run began with. The KL is to the checkpoint's
    reference: the first model, unless it has been reset.
    """
    config = stored_config(run, settings)
    generation = None if reference else newest(run / CHECKPOINTS, drop_damaged_replay=True)
    parts = check(config)
    if not parts.held_out:
        raise ValueError(
            "there are no held-out prompts; set eval.prompts=128, and a held-out set in [task]"
        )
    device = "cuda:0" if gpu_count() else "cpu"
    bf16 = computes_in_bf16(config.policy, device)
    model = config.policy.model
    with closing(parts.search_setup().build(device, bf16)) as searcher:
        if generation is not None:
            model = str(generation / MODEL)
            tensors, rounded = read_model(generation), parts.config.engine.computes_in_bf16(bf16)
            arrays = {name: as_array(tensor, rounded) for name, tensor in tensors.items()}
            version = step_of(generation)
            searcher.engine.load_weights(Weights(version, arrays))
            changed = read_weights(generation / REFERENCE)
            if changed is not None:
                searcher.reference.load_weights(changed)
        scores = evaluate_held_out(searcher).scores
    return {"run": str(run), "model": model, "prompts": len(parts.held_out), **scores}


def export_responses(run: Path, out: Path) -> Path:
    """Write the distinct responses in the newest undamaged replay buffer as JSONL, the best first.

    Responses with the same text but other tokens are written once, with the highest reward.
    """
    if out.exists():
        raise ValueError(f"{out} exists; choose a new file, such as responses.jsonl")
    config = parse(read_config(run))
    text, stop, buffer = load_text(config.policy), config.sampling.stop, ReplayBuffer()
    buffer.load(newest(run / CHECKPOINTS, drop_damaged_replay=True), drop_damaged=True)
    rows: dict[str, dict[str, Any]] = {}
    held = [(group.prompt, t) for group in buffer.groups() for t in group.trajectories]
    for prompt, t in sorted(held, key=lambda pair: -pair[1].reward):
        completion = text.shown(t, stop)
        row = {"prompt": prompt.text, "completion": completion}
        rows.setdefault(json.dumps(row), {**row, "reward": t.reward, "version": t.version})
    out.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    return out


def export_run(run: Path, out: Path, adapter: bool = False) -> Path:
    """Write the newest undamaged model to a folder: with LoRA, merged, or the `adapter` alone."""
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; choose a new folder")
    policy = parse(read_config(run)).policy
    if adapter and policy.lora is None:
        raise ValueError(f"{run} was trained without policy.lora; leave out --adapter")
    model = newest(run / CHECKPOINTS, drop_damaged_replay=True) / MODEL
    if policy.lora is None or adapter:
        shutil.copytree(model, out, dirs_exist_ok=True)
        return out
    merged(policy, model).save_pretrained(out)
    load_text(policy).tokenizer.save_pretrained(out)
    return out

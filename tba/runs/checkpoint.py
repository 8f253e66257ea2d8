"""Everything that a run needs to go on as if nothing had happened; written aside, verified, never half there.

A generation is a folder `step-00000100` with `model/` (a plain Hugging Face checkpoint), the optimizer, the replay buffer,
the run's state, and a manifest with the sha256 of each file. No pickles: safetensors and JSON.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.numpy
import torch
from safetensors.torch import load_file, save_file

from tba.learn.trainer import Trainer
from tba.models.pretrained import Text
from tba.replay.buffer import ReplayBuffer
from tba.replay.files import FOLDER, SEGMENTS, is_segment, load_groups, save_groups
from tba.runtime import SearchState
from tba.search.result import SearchStats
from tba.search.searcher import Searcher
from tba.weights import Weights, as_array, load_weights

MANIFEST, STATE, OPTIMIZER, SEARCH_WEIGHTS = (
    "manifest.json",
    "state.json",
    "optimizer.safetensors",
    "search_weights.safetensors",
)
REFERENCE, HEAD, HELD = "reference.safetensors", "head.safetensors", "held.safetensors"

log = logging.getLogger(__name__)


FORMAT = 5
"""Of a generation's files; those of another number are not resumed."""


class Damaged(ValueError):
    """A file of a checkpoint is missing or not what was written."""


class DamagedReplay(Damaged):
    """Segments of the replay buffer are damaged, and nothing else."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands: the next step, what the summary counts, the random state of sampling, and what is still to come."""

    step: int
    missing: int
    """Groups to wait for before the next step."""
    evaluating: int
    """Evaluations that have been asked for and not told."""
    rng: Mapping[str, Any]
    counts: Mapping[str, float]


def save(
    folder: Path,
    keep: int,
    trainer: Trainer,
    text: Text,
    buffer: ReplayBuffer,
    search: SearchState,
    progress: Progress,
) -> Path:
    """Writes generation `step-N` whole or not at all, then drops all but the newest `keep`."""
    target, aside = folder / f"step-{progress.step:08d}", folder / f".step-{progress.step:08d}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    trainer.policy.model.save_pretrained(aside / "model")
    text.tokenizer.save_pretrained(aside / "model")
    save_file(
        _flat(trainer.optimizer.state_dict()["state"]) | {"torch_rng": torch.get_rng_state()},
        aside / OPTIMIZER,
    )
    older = [g for g in generations(folder) if g.name < target.name]
    segments = buffer.save(aside, older[-1] if older else None)()
    if trainer.policy.readout is not None:
        save_file(trainer.policy.readout.state_dict(), aside / HEAD)
    for weights, name in ((search.weights, SEARCH_WEIGHTS), (search.reference, REFERENCE)):
        if weights is not None:
            safetensors.numpy.save_file(
                dict(weights.arrays), aside / name, {"version": str(weights.version)}
            )
    save_groups(list(search.held), aside / HELD)
    state = {
        "format": FORMAT,
        "progress": asdict(progress),
        "schedule": trainer.schedule.state_dict(),
        "cursor": search.cursor,
        "tasks": search.tasks,
        "stats": search.stats.counts(),
    }
    (aside / STATE).write_text(json.dumps(state))
    files = sorted(p for p in aside.rglob("*") if p.is_file())
    manifest = dict(segments)
    for path in files:
        name = str(path.relative_to(aside))
        if name not in segments:
            manifest[name] = _sha256(path)
    (aside / MANIFEST).write_text(json.dumps(manifest, indent=1))
    replay = [aside / SEGMENTS, aside / FOLDER]
    for path in [*files, aside / MANIFEST, aside / "model", *replay, aside]:
        _sync(path)
    if target.exists():
        shutil.rmtree(folder / f".replaced-{target.name}", ignore_errors=True)
        target.rename(folder / f".replaced-{target.name}")
    aside.rename(target)
    _sync(folder)
    _prune(folder, target, keep)
    return target


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Leaves `newest` and the keep - 1 before it. What lies after it was abandoned, when a run resumed from further back."""
    before = [g for g in generations(folder) if g.name < newest.name]
    after = [g for g in generations(folder) if g.name > newest.name]
    for old in [*before[: max(0, len(before) - keep + 1)], *after, *folder.glob(".replaced-*")]:
        shutil.rmtree(old)


def generations(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(folder.glob("step-*"))


def newest(folder: Path, drop_damaged_replay: bool = False) -> Path:
    """Return the newest generation whose every byte is as it was written.

    Logs those that are damaged; ValueError if all are. With `drop_damaged_replay`, segments of the
    replay buffer may be damaged in the generation returned, if they are in every one.
    """
    replay_damaged = []
    found = generations(folder)
    if not found:
        raise ValueError(
            f"no checkpoint in {folder}: nothing to resume; start the run anew with `tba train CONFIG.toml`, or its study with study.keep_checkpoints=true"
        )
    for generation in reversed(found):
        try:
            verify(generation)
        except Damaged as error:
            if isinstance(error, DamagedReplay):
                replay_damaged.append(generation)
            log.error("DAMAGED CHECKPOINT %s: %s; trying the one before", generation.name, error)
        else:
            return generation
    if replay_damaged and drop_damaged_replay:
        return replay_damaged[0]
    if replay_damaged:
        raise ValueError(
            f"the replay buffer is damaged in every checkpoint in {folder}; restore one from a"
            " backup, or go on without the damaged trajectories:"
            f" `tba train --resume {folder.parent} --drop-damaged-replay`"
        )
    raise ValueError(
        f"all {len(found)} checkpoints in {folder} are damaged; restore one from a backup, or start anew: nothing is restarted at 0 unasked"
    )


def verify(generation: Path) -> None:
    """Raise Damaged unless the files are those that the manifest lists, each with its sha256.

    DamagedReplay if only segments of the replay buffer are missing or differ.
    """
    try:
        manifest = json.loads((generation / MANIFEST).read_text())
        listed = {str(name): str(digest) for name, digest in manifest.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise Damaged(f"{MANIFEST} cannot be read ({error})") from error
    present = {str(p.relative_to(generation)) for p in generation.rglob("*") if p.is_file()} - {
        MANIFEST
    }
    problems = {name: "is not listed" for name in present - listed.keys()}
    for name, digest in listed.items():
        if name not in present:
            problems[name] = "is missing"
        elif _sha256(generation / name) != digest:
            problems[name] = "is not what was written"
    for name, problem in sorted(problems.items(), key=lambda entry: is_segment(entry[0])):
        kind = DamagedReplay if is_segment(name) else Damaged  # segments come last
        raise kind(f"{name} {problem}")


def restore(
    generation: Path, trainer: Trainer, buffer: ReplayBuffer
) -> tuple[Progress, SearchState]:
    """Puts model, optimizer, schedule, random states and buffer back as they were when this (verified) generation was written."""
    state = json.loads((generation / STATE).read_text())
    if state.get("format") != FORMAT:
        raise ValueError(
            f"{generation} was written by another version of tba, and cannot be resumed by this one; `tba export` still gives you its model"
        )
    weights = _load_model(generation / "model")
    try:
        missing, unexpected = trainer.policy.model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # torch's word for differing shapes
        raise ValueError(
            f"{generation} holds another model than policy.model: {str(error).splitlines()[-1].strip()}"
        ) from error
    tied = set(trainer.policy.model.state_dict()) - {
        n for n, _ in trainer.policy.model.named_parameters(remove_duplicate=True)
    }
    if unexpected or set(missing) - tied:
        raise ValueError(
            f"{generation} holds another model than policy.model: {[*unexpected, *missing][:3]}"
        )
    if trainer.policy.readout is not None:
        trainer.policy.readout.load_state_dict(load_file(generation / HEAD))
    tensors = load_file(generation / OPTIMIZER)
    torch.set_rng_state(tensors.pop("torch_rng"))
    trainer.restore(_unflat(tensors), state["schedule"])
    buffer.load(generation, drop_damaged=True)  # `newest` refuses damage unless asked
    searching, reference = (
        _load_weights(generation / name) for name in (SEARCH_WEIGHTS, REFERENCE)
    )
    stats = SearchStats.from_counts(state["stats"])
    held = load_groups(generation / HELD)
    search = SearchState(state["cursor"], state["tasks"], stats, searching, reference, held)
    return Progress(**state["progress"]), search


def hand_over(generation: Path, searcher: Searcher, bf16: bool) -> None:
    """The generation's model for the searcher's engine, and its reference if it had been reset."""
    arrays = {n: as_array(t, bf16) for n, t in _load_model(generation / "model").items()}
    step = json.loads((generation / STATE).read_text())["progress"]["step"]
    searcher.engine.load_weights(Weights(step, arrays))
    reference = _load_weights(generation / REFERENCE)
    if reference is not None:
        load_weights(searcher.reference.model, reference)


def _load_weights(file: Path) -> Weights | None:
    if not file.is_file():
        return None
    with safetensors.safe_open(file, "numpy") as opened:
        return Weights(
            int(opened.metadata()["version"]),
            {name: opened.get_tensor(name) for name in opened.keys()},
        )  # noqa: SIM118


def _load_model(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for part in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(part).items()
    }


def _flat(state: Mapping[int, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """An optimizer's state by `parameter.name`."""
    return {
        f"{p}.{name}": torch.as_tensor(v).contiguous()
        for p, values in state.items()
        for name, v in values.items()
    }


def _unflat(tensors: Mapping[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        parameter, _, name = key.partition(".")
        state.setdefault(int(parameter), {})[name] = value
    return state


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

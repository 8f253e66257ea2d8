"""What a run leaves behind: its tables, its model, the scores of a checkpoint, its responses."""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pandas import DataFrame
from torch import Tensor

from tba.config.schema import Config
from tba.engines import engine_in_bf16
from tba.learn.state import MODEL, read_model
from tba.models.lora import SETTINGS, merged
from tba.models.pretrained import computes_in_bf16, load_model, load_text
from tba.replay.buffer import ReplayBuffer
from tba.runs.checkpoint import REFERENCE, choose, chosen
from tba.runs.checks import check_evaluated, check_responses, config_of, stored_config
from tba.runs.files import open_plain, write_whole
from tba.runs.generations import step_of
from tba.runs.log import METRICS, SAMPLES, read
from tba.runs.setup import RunSetup, check
from tba.runs.summary import Summary
from tba.runtime.placement import gpu_count
from tba.search.evaluate import evaluate_held_out
from tba.search.result import EvaluatedAnswer
from tba.weights import Weights, as_array, read_weights

EVALUATED = "eval/sampled_reward"  # a metric of every evaluation, and of no training step


@dataclass(frozen=True)
class Result:
    """Everything that a run has written to its folder, read when it is asked for."""

    folder: Path

    @property
    def summary(self) -> Summary:
        """The totals, and the first and last scores; ValueError until the run has ended."""
        return Summary.read(self.folder)

    def metrics(self) -> DataFrame:
        """Return the metrics of each training step, in order, with a column `step`."""
        return DataFrame([row for row in read(self.folder / METRICS) if EVALUATED not in row])

    def evaluations(self) -> DataFrame:
        """Return the scores of each evaluation, in order; `step` is the version evaluated."""
        rows = read(self.folder / METRICS)
        # a resumed run may have repeated one
        by_step = {row["step"]: row for row in rows if EVALUATED in row}
        return DataFrame([by_step[step] for step in sorted(by_step)])

    def samples(self) -> DataFrame:
        """Return the stored prompts with their completions and rewards, in the order written."""
        return DataFrame(read(self.folder / SAMPLES))

    def model(self, step: int | str | None = None) -> Any:
        """Return the trained model in fp32, for transformers, with a LoRA adapter merged into it.

        The checkpoint is the newest one, the one of a `step`, or the "best" (see docs/tasks.md).
        """
        policy = config_of(self.folder).policy
        folder = choose(self.folder, step) / MODEL
        if policy.lora is not None:
            return merged(policy, folder)
        return load_model(policy.model_copy(update={"model": str(folder)}), torch.float32)

    def tokenizer(self) -> Any:
        """Return the tokenizer of the model."""
        return load_text(config_of(self.folder).policy).tokenizer


def evaluate_run(
    run: Path,
    settings: Sequence[str],
    reference: bool,
    step: int | str | None = None,
    completions: Path | None = None,
) -> dict[str, Any]:
    """Return the scores of a checkpoint (see `choose`) on the task's held-out prompts.

    With `reference`, the model that the run began with is evaluated. The KL is to the checkpoint's
    reference: the first model, unless it has been reset. `completions` is a new JSONL file.
    """
    if reference and step is not None:
        raise ValueError("--reference evaluates the model before training; leave out --step")
    config = stored_config(run, settings)
    model = config.policy.model
    weights = None
    changed = None
    with nullcontext() if reference else chosen(run, step) as generation:
        parts = _checked(config, completions)
        if generation is not None:
            model = str(generation / MODEL)
            weights = _rounded(read_model(generation), parts.config, step_of(generation))
            changed = read_weights(generation / REFERENCE)
    scores = _evaluate(parts, weights, changed, completions)
    return {"run": str(run), "model": model, "prompts": len(parts.held_out), **scores}


def evaluate_model(model: str, config: Config, completions: Path | None = None) -> dict[str, Any]:
    """Return the scores of a model on the config's held-out prompts.

    A model is its own reference, and has no KL.
    """
    if (Path(model).expanduser() / SETTINGS).is_file():
        raise ValueError(
            f"{model} is an adapter; evaluate the whole model, which `tba export RUN FOLDER` writes"
        )
    check_evaluated(model, config)
    policy = config.policy.model_copy(update={"model": model, "lora": None})
    parts = _checked(config.model_copy(update={"policy": policy}), completions)
    scores = _evaluate(parts, None, None, completions)
    kept = {name: v for name, v in scores.items() if not name.endswith("_log_ratio")}
    return {"model": model, "prompts": len(parts.held_out), **kept}


def _checked(config: Config, completions: Path | None) -> RunSetup:
    if completions is not None and (completions.exists() or not completions.parent.is_dir()):
        raise ValueError(f"--completions {completions}: give a new file in a folder that exists")
    parts = check(config)
    if not parts.held_out:
        raise ValueError(
            "there are no held-out prompts; set eval.prompts=128, and a held-out set in [task]"
        )
    return parts


def _place(config: Config) -> tuple[str, bool]:
    """Return the device, and whether to compute in bf16 there."""
    device = "cuda:0" if gpu_count() else "cpu"
    return device, computes_in_bf16(config.policy, device)


def _rounded(tensors: Mapping[str, Tensor], config: Config, version: int) -> Weights:
    """Return weights as the engine computes."""
    bf16 = engine_in_bf16(config.engine, _place(config)[1])
    arrays = {name: as_array(tensor.detach(), bf16) for name, tensor in tensors.items()}
    return Weights(version, arrays)


def _evaluate(
    parts: RunSetup, weights: Weights | None, reference: Weights | None, completions: Path | None
) -> dict[str, float]:
    """Evaluate these weights, or policy.model's own; append all answers to `completions`."""

    def write(answers: Sequence[EvaluatedAnswer]) -> None:
        if completions is not None:
            with open(completions, "a", encoding="utf-8", opener=open_plain) as file:
                file.writelines(json.dumps(asdict(answer)) + "\n" for answer in answers)

    with closing(parts.search_setup().build(*_place(parts.config))) as searcher:
        if weights is not None:
            searcher.engine.load_weights(weights)
        if reference is not None:
            searcher.reference.load_weights(reference)
        return evaluate_held_out(searcher, write).scores


def export_responses(run: Path, out: Path, step: int | str | None = None) -> Path:
    """Write the distinct responses in a checkpoint's replay buffer as JSONL, the best first.

    Responses to a row with the same text but other tokens are written once, with the best reward.
    """
    check_responses(run, out)
    config = config_of(run)
    text = load_text(config.policy)
    stop = config.sampling.stop
    buffer = ReplayBuffer()
    with chosen(run, step) as generation:
        buffer.load(generation)
    rows: dict[str, dict[str, Any]] = {}
    held = [(group.prompt, t) for group in buffer.groups() for t in group.trajectories]
    for prompt, t in sorted(held, key=lambda pair: -pair[1].reward):
        completion = text.shown(t, stop)
        row = {"id": prompt.id, "prompt": prompt.text, "completion": completion}
        more = {"reward": t.reward, "version": t.version, "columns": prompt.columns}
        rows.setdefault(json.dumps(row), row | more)
    write_whole(out, "".join(json.dumps(row) + "\n" for row in rows.values()))
    return out

"""Model cards: what was trained, on what data, and how well it does."""

import json
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from textwrap import indent
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from tba.runs.choice import score_of
from tba.runs.log import METRICS, read, read_config, read_evaluations
from tba.tasks._data import SUFFIXES

TEMPLATE = Path(__file__).with_name("card.md")
SHOWN = ("policy", "task", "sampling", "objective", "strategy", "selection", "replay", "trainer")
"""Tables of the config that a card shows."""

SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/")
"""Part of the path of a model in the hub's cache."""
PLACE = re.compile(r"(~|\.\.|/[^/\s]+)/\S+$")
"""Beginning of a path from the root, from a home, or from a folder above."""


def write_card(run: Path, folder: Path, step: int, name: str, adapter: bool) -> None:
    """Write README.md and a figure beside the model of a step; `name` is where others load it."""
    config, evaluations = read_config(run), read_evaluations(run)
    model = _model_name(config["policy"]["model"])
    config = _without_places(config)
    config["policy"]["model"] = model
    by_step = {int(scores["step"]): scores for scores in evaluations}
    before, after = _texts(by_step.get(0, {})), _texts(by_step.get(step, {}))
    steps = [row for row in read(run / METRICS) if "loss" in row]
    _draw(steps, evaluations, folder / "training.png")
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        metadata=_metadata(config, by_step.get(step, {}), name, adapter),
        config=config,
        reference=_reference(config["policy"]),
        name=name,
        step=step,
        adapter=adapter,
        version=version("tba"),
        counts=[row for row in steps if row["step"] == step],
        scores=[(score, before.get(score, "–"), value) for score, value in after.items()],
        settings=indent(json.dumps({table: config[table] for table in SHOWN}, indent=1), "    "),
        code=_code,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _measured(scores: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return each score that has a standard error, with it."""
    measured = {}
    for error in scores:
        name = error.removesuffix("_stderr")
        if name != error:
            name = name if name in scores else f"{name}_pass@1"  # that of `sampled_stderr`
            measured[name] = scores[name], scores[error]
    return measured


def _texts(scores: Mapping[str, float]) -> dict[str, str]:
    """Return each score that has a standard error, as `0.921 ± 0.007`."""
    measured = _measured(scores).items()
    return {name: f"{score:.3f} ± {error:.3f}" for name, (score, error) in measured}


def _metadata(
    config: Mapping[str, Any], scores: Mapping[str, float], name: str, adapter: bool
) -> str:
    """Return the YAML at the head of the card, which the hub reads; `scores` are of this model."""
    task, model = config["task"], config["policy"]["model"]
    data = task.get("held_out_data") or task.get("data") or ""
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=data if _on_hub(data) else task["use"],
            dataset_name=f"{task['use']}, held-out prompts",
            metric_type=score.removeprefix("sampled_").removeprefix("greedy_"),
            metric_name=score,
            metric_value=value,
        )
        for score, (value, _) in _measured(scores).items()
        if "/" not in score  # else of an evaluation set
    ]
    return ModelCardData(
        base_model=model if _on_hub(model) else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", "trajectory-balance", "tba"],
        model_name=name.rpartition("/")[2] if results else None,
        eval_results=results or None,
    ).to_yaml()


def _model_name(model: str) -> str:
    """Return the name of a model on the hub if its place or its files tell it, or its folder's."""
    folder = Path(model).expanduser()
    if cached := SNAPSHOT.search(model):
        return cached[1].replace("--", "/")
    if not (folder / "config.json").is_file():
        return model
    origin = json.loads((folder / "config.json").read_text("utf-8")).get("_name_or_path", "")
    return origin if _on_hub(origin) else f"./{folder.resolve().name}"


def _without_places(value: Any) -> Any:
    """Return settings in which paths of this machine are the names of their files."""
    if isinstance(value, Mapping):
        return {key: _without_places(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_places(inner) for inner in value]
    is_place = isinstance(value, str) and PLACE.match(value) is not None
    return Path(value).name if is_place else value


def _on_hub(name: str) -> bool:
    """Return whether a model or a data set is named as on the hub, and not by a path."""
    is_path = name.startswith(("bundled:", ".", "/", "~")) or name.endswith(SUFFIXES)
    return bool(name) and not is_path and name.count("/") <= 1 and not Path(name).exists()


def _reference(policy: Mapping[str, Any]) -> str:
    """Return in words the reference that rewards are balanced against."""
    if policy["reset_reference_every"]:
        return f"the policy as it was after every {policy['reset_reference_every']} steps"
    if "from" in policy.get("lora", {}):
        return "the model with the adapter that training began with"
    return "the model before training"


def _code(value: Any) -> str:
    """Return text, or another value as JSON, as code within a line of Markdown."""
    text = value if isinstance(value, str) else json.dumps(value)
    return "`" + " ".join(text.replace("`", "'").split()) + "`"


def _draw(
    steps: Sequence[Mapping[str, float]], evaluations: Sequence[Mapping[str, float]], file: Path
) -> None:
    """Draw the reward of each training batch, and the held-out scores with their errors."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([row["step"] for row in steps], [row["reward"] for row in steps])
    left.set(title="reward of the training batches", xlabel="step")
    if evaluations:
        scores, errors = [score_of(e) for e in evaluations], [e["stderr"] for e in evaluations]
        right.errorbar([e["step"] for e in evaluations], scores, errors, marker="o", capsize=3)
    right.set(title="held-out score ± standard error", xlabel="step")
    figure.savefig(file, dpi=150)

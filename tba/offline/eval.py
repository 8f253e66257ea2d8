"""Results of a run: its tables, its model with a card, and its scores."""

import json
import logging
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from os.path import lexists
from pathlib import Path
from socket import create_server
from typing import Any

import torch
from huggingface_hub import ModelCardData, metadata_load
from jinja2 import Environment, StrictUndefined
from pandas import DataFrame
from transformers import GenerationConfig

from tba.agents.chat import encoder, identity
from tba.agents.endpoint import Endpoint
from tba.agents.session import OpenSession, Session
from tba.config.plugins import resolve
from tba.config.schema import Config
from tba.engines import Engine, engine_in_bf16
from tba.learn.state import MODEL, stored_model
from tba.models import model_path
from tba.models.lora import merged
from tba.models.pretrained import computes_in_bf16, load_model, load_text, model_folder
from tba.replay.store import FOLDER, PROMPTS, load_groups
from tba.runs.checkpoint import REFERENCE, choose_checkpoint, chosen
from tba.runs.folder import (
    METRICS,
    SAMPLES,
    SESSIONS,
    read,
    read_config,
    read_evaluations,
    read_warnings,
)
from tba.runs.generations import MANIFEST, step_of
from tba.runs.summary import Summary
from tba.runtime.placement import device_here
from tba.search.evaluate import evaluate_held_out
from tba.search.result import EvaluatedAnswer
from tba.setup.checks import check_evaluated, check_export, stored_config
from tba.setup.setup import RunSetup, check
from tba.types import Sampling
from tba.weights import Direct, Weights, published, read_weights

EVALUATED = "eval/sampled_reward"  # in every evaluation, and in no training step
TEMPLATE = Path(__file__).with_name("card.md")
HUB = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
"""Name of a model on the Hugging Face Hub."""
LICENCE = ("license", "license_name", "license_link")
SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/")
"""Part of the path of a model in the Hub's cache."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """Everything that a run has written to its folder, read on access."""

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
        # a resumed run may have repeated an evaluation
        by_step = {row["step"]: row for row in rows if EVALUATED in row}
        return DataFrame([by_step[step] for step in sorted(by_step)])

    def samples(self) -> DataFrame:
        """Return the stored prompts with completions and rewards, in the order written."""
        return DataFrame(read(self.folder / SAMPLES))

    def model(self, step: int | str | None = None) -> Any:
        """Return the trained model in fp32, for transformers, with any LoRA adapter merged.

        It is from the newest checkpoint, or from the one at `step`: a number, or "best" (see
        docs/tasks.md).
        """
        policy = read_config(self.folder).policy
        folder = choose_checkpoint(self.folder, step) / MODEL
        if policy.lora is not None:
            return merged(policy, folder)
        return load_model(policy.model_copy(update={"model": str(folder)}), torch.float32)

    def tokenizer(self) -> Any:
        """Return the tokenizer of the model."""
        return load_text(read_config(self.folder).policy).tokenizer


def evaluate_run(
    run: Path,
    settings: Sequence[str],
    reference: bool,
    step: int | str | None = None,
    completions: Path | None = None,
) -> dict[str, Any]:
    """Return the scores of a checkpoint (see `choose_checkpoint`) on the task's held-out prompts.

    With `reference`, evaluates the model before training instead. The KL is to the checkpoint's
    reference: the model before training, unless it was reset. `completions` is a new JSONL file.
    """
    if reference and step is not None:
        raise ValueError("--reference evaluates the model before training; leave out --step")
    config = stored_config(run, settings)
    if reference:
        parts = _checked(config, completions)
        return {"run": str(run), **_evaluate(parts, config.policy.model, completions)}
    with chosen(run, step) as generation:
        parts = _checked(config, completions)
        task = parts.task
        file = generation / FOLDER / PROMPTS
        if file.is_file() and not task.samples_again:  # settings may have changed the split
            encode = encoder(parts.text, task)
            trained_on = {identity(task, g.prompt, g.prompt_tokens) for g in load_groups(file)}
            count = sum(identity(task, p, encode(p)) in trained_on for p in parts.held_out)
            if count:
                log.warning(
                    "the run was trained on %d of these %d held-out prompts: their scores are too"
                    " high", count, len(parts.held_out),
                )  # fmt: skip
        weights = _weights(generation, parts.config)
        changed = read_weights(generation / REFERENCE)
    model = str(generation / MODEL)
    return {"run": str(run), **_evaluate(parts, model, completions, weights, changed)}


def evaluate_model(model: str, config: Config, completions: Path | None = None) -> dict[str, Any]:
    """Return the scores of a model on the config's held-out prompts.

    The model is its own reference, so there is no KL.
    """
    check_evaluated(model, config)
    policy = config.policy.model_copy(update={"model": model, "lora": None})
    parts = _checked(config.model_copy(update={"policy": policy}), completions)
    told = _evaluate(parts, model, completions)
    return {name: value for name, value in told.items() if not name.endswith("_log_ratio")}


def _checked(config: Config, completions: Path | None) -> RunSetup:
    if completions is not None and (lexists(completions) or not completions.parent.is_dir()):
        raise ValueError(f"--completions {completions}: give a new file in a folder that exists")
    parts = check(config)
    if not parts.held_out:
        raise ValueError(
            "there are no held-out prompts; set eval.prompts=128, and a held-out set in [task]"
        )
    return parts


def _evaluate(
    parts: RunSetup,
    model: str,
    completions: Path | None,
    weights: Weights | None = None,
    reference: Weights | None = None,
) -> dict[str, Any]:
    """Return the scores of `weights`, or by default of the weights of policy.model.

    `model` is the name to report. Appends all answers to `completions`.
    """
    device = device_here()
    bf16 = computes_in_bf16(parts.config.policy, device)

    def write(answers: Sequence[EvaluatedAnswer]) -> None:
        if completions is not None:
            with completions.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(answer)) + "\n" for answer in answers)

    with closing(parts.search_setup().build(device, bf16)) as searcher:
        if weights is not None:
            searcher.engine.load_weights(weights)
        if reference is not None:
            searcher.reference.load_weights(reference)
        scores = evaluate_held_out(searcher, write).scores
    return {"model": model, "prompts": len(parts.held_out), **scores}


def _weights(generation: Path, config: Config) -> Weights:
    """Return the weights of a checkpoint for an engine in this process."""
    tensors = {name: stored.read() for name, stored in stored_model(generation).items()}
    bf16 = engine_in_bf16(config.engine, computes_in_bf16(config.policy, device_here()))
    weights: Weights = Direct().send(step_of(generation), published(tensors, bf16), None).payload
    return weights


def serve(config: Config, run: Path | None, step: int | str | None, port: int) -> None:
    """Serve a model or a run's checkpoint as one endless session, and print each call."""
    try:
        create_server(("127.0.0.1", port)).close()  # fails before the model is loaded
    except OSError as error:
        raise ValueError(f"--port {port}: {error.strerror}; choose another one") from error
    device = device_here()
    bf16 = computes_in_bf16(config.policy, device)
    text = load_text(config.policy).within(config.engine.options.get("max_model_len"))
    sampling = Sampling(**config.sampling.model_dump(exclude={"explore"}))
    plugin = resolve("engines", "engine", config.engine.use, config.engine.options)
    engine: Engine = plugin.build(config.policy, text, device, bf16, sampling)
    if run is not None:
        with chosen(run, step) as generation:
            engine.load_weights(_weights(generation, config))
    session = Session("append")
    endpoint = Endpoint(engine, text, port=port, trains=False)
    url = endpoint.begin(OpenSession(session, sampling, config.run.seed, 0, sys.maxsize))
    print(f'base_url="{url}"  (any API key; Ctrl-C ends it)', flush=True)
    printed = 0
    try:
        while True:
            endpoint.turns.work(0.2)
            if endpoint.failure is not None:
                raise endpoint.failure
            for exchange in session.exchanges[printed:]:
                printed += 1
                tokens = f"{len(exchange.asked.context)} + {len(exchange.turn.tokens)} tokens"
                print(f"call {printed}: {tokens}, {1 + session.forks} contexts", flush=True)
    except KeyboardInterrupt:
        return
    finally:
        endpoint.close()
        engine.close()


def export(run: Path, out: Path, adapter: bool = False, step: int | str | None = None) -> Path:
    """Write the model of a checkpoint and a model card to a new folder, and return the folder.

    Raises ValueError before anything is written if the export is not possible.
    """
    policy = check_export(run, out, adapter)
    name = out.resolve().name
    with chosen(run, step) as generation:
        base = policy.model if policy.lora is not None else str(generation / MODEL)
        text = load_text(policy.model_copy(update={"model": base}))
        whole = policy.lora is not None and not adapter
        if whole:
            merged(policy, generation / MODEL).save_pretrained(out)
        for file in map(generation.joinpath, json.loads((generation / MANIFEST).read_bytes())):
            if MODEL in file.parts and not (whole and file.name.startswith("adapter_")):
                target = out / file.relative_to(generation / MODEL)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
        config = _config_at(run, step_of(generation))
        # other libraries pass None for absent `tools` and `documents`
        given = (
            "{{%- if {0} is not defined or {0} is none %}}{{%- set {0} = {1!r} %}}{{%- endif +%}}"
        )
        defaults = [given.format(*item) for item in config.policy.chat_template_kwargs.items()]
        for file in out.rglob("*.jinja"):
            file.write_text("".join([*defaults, file.read_text("utf-8")]), "utf-8")
        s = config.sampling
        eos = sorted(text.eos_ids)
        GenerationConfig(
            do_sample=True,
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            max_new_tokens=s.max_tokens,
            stop_strings=list(s.stop) or None,
            eos_token_id=eos,
            pad_token_id=text.pad_id,
            bos_token_id=text.tokenizer.bos_token_id,
        ).save_pretrained(out)
        changes: dict[str, Any] = {"config.json": {"eos_token_id": eos}}
        if HUB.fullmatch(model := _model_name(config.policy.model)):
            changes["adapter_config.json"] = {"base_model_name_or_path": model}
        for file in filter(Path.is_file, map(out.joinpath, changes)):
            plain = json.loads(file.read_text("utf-8")) | changes[file.name]
            file.write_text(json.dumps(plain, indent=2) + "\n", "utf-8")
        (out / "README.md").write_text(card(run, step_of(generation), name, adapter), "utf-8")
    for path in out.rglob("*"):  # safetensors creates files that only the owner can read
        path.chmod(0o755 if path.is_dir() else 0o644)
    return out


def _config_at(run: Path, step: int) -> Config:
    """Return the config that a step was trained with."""
    sessions = [row for row in read(run / SESSIONS) if row["step"] < step]
    return Config(**sessions[-1]["config"]) if sessions else read_config(run)


def card(run: Path, step: int, name: str, adapter: bool) -> str:
    """Return the model card for a step of a run; `name` is the name to load the model by."""
    config = _config_at(run, step)
    model = _model_name(config.policy.model)
    by_step = {int(scores["step"]): scores for scores in read_evaluations(run)}
    task = config.task
    named = [each.options.get("data") for each in (task, *map(task.source, task.weights))]
    data = sorted({_model_name(each) for each in named if isinstance(each, str)})
    is_same = not any(name.startswith("evaluated") for name in read_warnings(run))
    before = _texts(by_step.get(0, {})) if is_same else {}
    about: dict[str, Any] = {}
    with suppress(Exception):  # the card may be missing, and may contain anything
        about = metadata_load(model_folder(model_path(config.policy.model)) / "README.md") or {}
    metadata = ModelCardData(
        base_model=model if HUB.fullmatch(model) and not Path(model).exists() else None,
        datasets=[each for each in data if HUB.fullmatch(each)] or None,
        **{name: about[name] for name in LICENCE if name in about},
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", "tba"],
    )
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        metadata=metadata.to_yaml(),
        licence=metadata.license_name or metadata.license,
        data=data,
        config=config,
        model=model,
        name=name,
        step=step,
        adapter=adapter,
        version=version("tba"),
        counts=[r for r in read(run / METRICS) if "loss" in r and r["step"] == step],
        scores=[(s, before.get(s, "–"), v) for s, v in _texts(by_step.get(step, {})).items()],
    )


def _texts(scores: Mapping[str, float]) -> dict[str, str]:
    """Return each score that has a standard error, as `0.921 ± 0.007`."""
    texts = {}
    for error in scores:
        name = error.removesuffix("_stderr")
        if name != error:
            name = name if name in scores else f"{name}_pass@1"  # the score of `sampled_stderr`
            texts[name] = f"{scores[name]:.3f} ± {scores[error]:.3f}"
    return texts


def _model_name(model: str) -> str:
    """Return the Hub name of a model if its path contains it, or else its folder's name."""
    if cached := SNAPSHOT.search(model):
        return cached[1].replace("--", "/")
    folder = Path(model).expanduser()
    return f"./{folder.resolve().name}" if folder.is_dir() or folder.is_absolute() else model

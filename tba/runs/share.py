"""Export of a run's model with its card: to a folder, and to the Hugging Face hub."""

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent
from typing import Any

from huggingface_hub import HfApi, ModelCardData, RepoUrl, constants, get_token
from jinja2 import Environment, StrictUndefined

from tba.learn.state import MODEL
from tba.models.lora import merged
from tba.models.pretrained import load_text
from tba.runs.checkpoint import chosen
from tba.runs.checks import check_export, config_of
from tba.runs.generations import step_of
from tba.runs.log import METRICS, read, read_evaluations, with_relative_paths
from tba.tasks._data import SUFFIXES

TEMPLATE = Path(__file__).with_name("card.md")
SHOWN = ("policy", "task", "sampling", "objective", "strategy", "selection", "replay", "trainer")
"""Tables of the config that a card shows."""

SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/")
"""Part of the path of a model in the hub's cache."""
PLACE = re.compile(r"(~|\.\.|/[^/\s]+)/\S+$")
"""Beginning of a path from the root, from a home, or from a folder above."""


def share(
    run: Path,
    out: Path | None,
    adapter: bool = False,
    step: int | str | None = None,
    name: str | None = None,
    private: bool = False,
) -> str:
    """Write a checkpoint's model and its card to a new folder, and upload them as `name`.

    Return the path of the folder, or the address of the repository. Without `out`, the folder is
    removed after the upload. ValueError, before anything is written, if something is wrong.
    """
    policy = check_export(run, out, adapter, name, private)
    # before a model is merged, because the hub may refuse
    repository = None if name is None else _create(name, private)
    with ExitStack() as closing:
        generation = closing.enter_context(chosen(run, step))
        if out is None:
            aside = TemporaryDirectory(prefix=".export-", dir=run)  # /tmp may be too small
            out = Path(closing.enter_context(aside)) / "model"
        if policy.lora is None or adapter:
            shutil.copytree(generation / MODEL, out, dirs_exist_ok=True)
        else:
            merged(policy, generation / MODEL).save_pretrained(out)
            load_text(policy).tokenizer.save_pretrained(out)
        title = out.name if repository is None else repository.repo_id
        (out / "README.md").write_text(card(run, step_of(generation), title, adapter), "utf-8")
        for file in out.iterdir():
            file.chmod(0o644)  # safetensors writes files for their owner only
        if repository is None:
            return str(out)
        message = f"Checkpoint of step {step_of(generation)}"
        HfApi().upload_folder(repo_id=title, folder_path=out, commit_message=message)
    return str(repository)


def _create(name: str, private: bool) -> RepoUrl:
    """Create the repository unless it exists; ValueError, which says what to type, if refused."""
    if get_token() is None:
        raise ValueError(
            "--push-to-hub needs a token of the Hugging Face hub: type `hf auth login`, or set"
            " HF_TOKEN"
        )
    try:
        url = HfApi().create_repo(name, private=private or None, exist_ok=True)
        is_public = not HfApi().model_info(url.repo_id).private
    except ValueError:  # of the name
        raise
    except Exception as error:  # no connection, no permission, a timeout: the class varies
        why = str(error).strip().rpartition("\n")[2]
        raise ValueError(
            f"{constants.ENDPOINT} refuses {name!r}: {why}; type `hf auth login`, with a token that"
            " may write there"
        ) from error
    if private and is_public:
        raise ValueError(
            f"{url} exists and is public; make it private on its settings page, choose another"
            " name, or leave out --private"
        )
    return url


def card(run: Path, step: int, name: str, adapter: bool) -> str:
    """Return the model card for a step of a run; `name` is where others load the model."""
    config = with_relative_paths(config_of(run).nested())
    model = _model_name(config["policy"]["model"])
    config = _without_places(config)
    config["policy"]["model"] = model
    by_step = {int(scores["step"]): scores for scores in read_evaluations(run)}
    before = _texts(by_step.get(0, {}))
    metadata = ModelCardData(
        base_model=model if _on_hub(model) else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", "trajectory-balance", "tba"],
    )
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["code"] = _code
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        metadata=metadata.to_yaml(),
        config=config,
        name=name,
        step=step,
        adapter=adapter,
        version=version("tba"),
        counts=[r for r in read(run / METRICS) if "loss" in r and r["step"] == step],
        scores=[(s, before.get(s, "–"), v) for s, v in _texts(by_step.get(step, {})).items()],
        settings=indent(json.dumps({table: config[table] for table in SHOWN}, indent=1), "    "),
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
    """Return the name of a model on the hub if its path tells it, or its folder's."""
    if cached := SNAPSHOT.search(model):
        return cached[1].replace("--", "/")
    folder = Path(model).expanduser()
    return f"./{folder.resolve().name}" if folder.is_dir() else model


def _without_places(value: Any) -> Any:
    """Return settings in which paths of this machine are the names of their files."""
    if isinstance(value, Mapping):
        return {key: _without_places(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_places(inner) for inner in value]
    is_place = isinstance(value, str) and PLACE.match(value) is not None
    return Path(value).name if is_place else value


def _on_hub(name: str) -> bool:
    """Return whether a model is named as on the hub, and not by a path."""
    is_path = name.startswith(("bundled:", ".", "/", "~")) or name.endswith(SUFFIXES)
    return bool(name) and not is_path and name.count("/") <= 1 and not Path(name).exists()


def _code(value: Any) -> str:
    """Return text, or another value as JSON, as code within a line of Markdown."""
    text = value if isinstance(value, str) else json.dumps(value)
    return "`" + " ".join(text.replace("`", "'").split()) + "`"

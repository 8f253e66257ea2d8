"""Post-training of language models with Trajectory Balance with Asynchrony (TBA)."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from typer import Argument, Exit, Option, Typer

from tba.config.plugins import KINDS, find, names, options_of
from tba.config.schema import DEFAULT, Config, load

app = Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__
)

KEY = "[table.key=value …]"
CONFIG = f"[CONFIG.toml] {KEY}"
Settings = Annotated[list[str] | None, Argument(metavar=KEY, help="Settings to override.")]
ConfigSettings = Annotated[
    list[str] | None, Argument(metavar=CONFIG, help="Config file, and settings that override it.")
]
DryRun = Annotated[bool, Option("--dry-run", help="Check the config and print it; start nothing.")]
Drop = Annotated[bool, Option("--drop-damaged-replay", help="Resume without damaged trajectories.")]
RunPath = Annotated[Path, Argument(help="Folder of a run; its newest checkpoint is used.")]


@app.command()
def train(
    settings: ConfigSettings = None,
    dry_run: DryRun = False,
    resume: Annotated[Path | None, Option(metavar="RUN", help="Folder of a run to resume.")] = None,
    drop_damaged_replay: Drop = False,
) -> None:
    """Train a model. Without a config file: three-digit addition on the CPU."""
    if drop_damaged_replay and resume is None:
        raise ValueError("--drop-damaged-replay needs --resume RUN, the folder of the run")
    config = _config(settings or [], resume)
    if dry_run:
        from tba.runs.parts import check

        parts = check(config)
        print(json.dumps(parts.config.nested(), indent=1))
        counts = f"{len(parts.prompts)} training prompts, {len(parts.held_out)} held out"
        print(f"config OK (dry run): {counts}", file=sys.stderr)
        return
    from tba.run import run

    run(config, resume, drop_damaged_replay)


@app.command()
def sweep(
    study: Annotated[Path, Argument(metavar="STUDY.toml", help="File of the study.")],
    settings: Settings = None,
    dry_run: DryRun = False,
    retry_failed: Annotated[bool, Option("--retry-failed", help="Restart failed runs.")] = False,
) -> None:
    """Run a study: grids of runs, several at once. The same command continues it."""
    from tba.studies.sweep import sweep as carry_out

    raise Exit(carry_out(study, settings or [], dry_run, retry_failed))


@app.command("eval")
def evaluate(
    run: RunPath,
    settings: Settings = None,
    reference: Annotated[bool, Option("--reference", help="Evaluate the initial model.")] = False,
) -> None:
    """Evaluate the model of a run on held-out prompts, and print the scores as JSON."""
    from tba.runs.offline import evaluate_run

    print(json.dumps(evaluate_run(run, settings or [], reference), indent=1))


@app.command()
def report(
    runs: Annotated[list[Path], Argument(help="Folders of runs to compare, or of one study.")],
    out: Annotated[Path | None, Option(help="Folder for the page.")] = None,
) -> None:
    """Write a report: one HTML page that needs no network; of a study, also its figures as PNG."""
    from tba.report import report as draw

    print(draw(runs, out))


@app.command()
def export(
    run: RunPath,
    out: Annotated[Path, Argument(help="New folder; with --responses, a new file.")],
    adapter: Annotated[bool, Option("--adapter", help="LoRA: write the adapter alone.")] = False,
    responses: Annotated[
        bool, Option("--responses", help="Write the replay buffer's responses as JSONL.")
    ] = False,
) -> None:
    """Write the trained model as a Hugging Face folder, with a LoRA adapter merged into it."""
    from tba.runs.offline import export_responses, export_run

    print(export_responses(run, out) if responses else export_run(run, out, adapter))


@app.command("list")
def list_plugins(as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False) -> None:
    """List the plug-ins and their options."""
    plugins: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        plugins[kind] = {name: _described(find(kind, name)) for name in names(kind)}
    if as_json:
        print(json.dumps(plugins, indent=1))
        return
    for kind, described in plugins.items():
        print(f"\n{kind}")
        for name, plugin in described.items():
            print(f"  {name:<14} {plugin['about']}")
            for option, value in plugin["options"].items():
                default = "(required)" if value["required"] else value["default"]
                print(f"    {option:<18} {value['type']:<28} {default}")


def main() -> None:
    """Run the command. Errors in the user's input are printed without a traceback."""
    # for plug-ins and reward functions in the current folder; last, so that they hide no library
    sys.path.append(str(Path.cwd()))
    try:
        app()
    except (ValueError, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def _config(settings: list[str], resume: Path | None) -> Config:
    path = None
    if settings and settings[0].endswith(".toml") and "=" not in settings[0]:
        path, settings = Path(settings[0]), settings[1:]
    if resume is None:
        keys = {setting.partition("=")[0].strip() for setting in settings}
        if path is None and not keys & {"task", "task.use", "policy.model"}:
            path = DEFAULT
        return load(path, settings)
    if path is not None:
        raise ValueError(
            f"--resume uses the config in {resume};"
            f" leave out {path}, and give only the settings to change, as table.key=value"
        )
    from tba.runs.offline import stored_config

    return stored_config(resume, settings)


def _described(cls: type) -> dict[str, Any]:
    """Return a plug-in as JSON."""
    options = {}
    hints = get_type_hints(cls)
    for name, option in options_of(cls).items():
        is_class = isinstance(hints[name], type)
        kind = hints[name].__name__ if is_class else str(hints[name])
        for module in ("typing.", "tba.config.keys."):
            kind = kind.replace(module, "")
        default = None if option.required else option.default
        options[name] = {"type": kind, "required": option.required, "default": default}
    about = (cls.__doc__ or "").strip().splitlines()[0]
    return {"class": f"{cls.__module__}.{cls.__qualname__}", "about": about, "options": options}


if __name__ == "__main__":
    main()

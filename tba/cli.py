"""`tba train | sweep | eval | report | export | list`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tba.config.loading import DEFAULT, load, parse
from tba.config.plugins import Option
from tba.config.schema import Config

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__
)

Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG.toml] [table.key=value …]", help="a config file, and settings on top of it"
    ),
]


@app.command()
def train(
    settings: Settings = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="check everything, print the whole config, start nothing"),
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="go on with the run in this folder from its newest sound checkpoint"
        ),
    ] = None,
) -> None:
    """Post-train a model. Without a config: the embedded default, 3-digit addition on the CPU."""
    config = _config(settings or [], resume)
    if dry_run:
        from tba.runs.parts import check

        parts = check(config)
        print(json.dumps(parts.config.nested(), indent=1))
        print(
            f"sound: {len(parts.prompts)} training prompts, {len(parts.held_out)} held out; nothing was started",
            file=sys.stderr,
        )
        return
    from tba.run import run

    run(config, resume)


@app.command()
def sweep(
    study: Annotated[
        Path, typer.Argument(metavar="STUDY.toml", help="grids of runs that share a base config")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[table.key=value …]", help="on top of the base config, or of [study]"
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="check everything, print the list of runs, start nothing"),
    ] = False,
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="start failed runs anew; without it they stay failed"),
    ] = False,
) -> None:
    """Carry out a study: many runs, several at once. Called again, it goes on where it was."""
    from tba.studies.sweep import sweep as carry_out

    raise typer.Exit(carry_out(study, settings or [], dry_run, retry_failed))


@app.command("eval")
def evaluate(
    run: Annotated[
        Path, typer.Argument(help="a run's folder; its newest sound checkpoint is evaluated")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[table.key=value …]", help="such as eval.prompts=512 eval.samples=8"
        ),
    ] = None,
    reference: Annotated[
        bool,
        typer.Option("--reference", help="evaluate the model that the run started from instead"),
    ] = False,
) -> None:
    """Evaluate a run's model on held-out prompts; prints JSON."""
    from tba.runs.offline import evaluate_run

    print(json.dumps(evaluate_run(run, settings or [], reference), indent=1))


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="folders of runs, which are compared, or of one study")
    ],
    out: Annotated[Path | None, typer.Option(help="folder for the page and its pictures")] = None,
) -> None:
    """Draw one self-contained HTML page, and PNGs."""
    from tba.report import report as draw

    print(draw(runs, out))


@app.command()
def export(
    run: Annotated[
        Path, typer.Argument(help="a run's folder; its newest sound checkpoint is exported")
    ],
    out: Annotated[
        Path, typer.Argument(help="a new folder, for AutoModelForCausalLM.from_pretrained")
    ],
) -> None:
    """Write the trained model as a plain Hugging Face folder."""
    from tba.runs.offline import export_run

    print(export_run(run, out))


@app.command("list")
def list_plugins(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Show what can be plugged in, with its options."""
    from tba.config.plugins import KINDS, find, names, options_of

    found = {
        kind: {
            name: _described(find(kind, name), options_of(find(kind, name))) for name in names(kind)
        }
        for kind in KINDS
    }
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for kind, plugins in found.items():
        print(f"\n{kind}")
        for name, plugin in plugins.items():
            print(f"  {name:<14} {plugin['about']}")
            for option, value in plugin["options"].items():
                print(
                    f"    {option:<18} {value['type']:<28} {'(required)' if value['required'] else value['default']}"
                )


def main() -> None:
    """The command's entry: what a user can mend is told in a line, without a traceback."""
    sys.path.append(
        str(Path.cwd())
    )  # plug-ins and reward functions beside the config; last, so that nothing there hides a library
    try:
        app()
    except (ValueError, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def _config(settings: list[str], resume: Path | None) -> Config:
    path = (
        Path(settings.pop(0))
        if settings and settings[0].endswith(".toml") and "=" not in settings[0]
        else None
    )
    if resume is None:
        return load(path or _default(settings), settings)
    if path is not None:
        raise ValueError(
            f"--resume goes on with the config in {resume}; leave out {path}, and give only table.key=value to change"
        )
    from tba.config.loading import override_all
    from tba.runs.folder import RunFolder
    from tba.tasks._memory import refuse

    tables = RunFolder.reopen(resume).config()
    refuse(parse(tables).task, str(resume))
    override_all(tables, settings)
    return parse(tables)


def _default(settings: list[str]) -> Path | None:
    """The embedded default's settings suit its own model and task; with another one, those of docs/configuration.md hold."""
    other = {"task", "task.use", "policy.model"} & {s.partition("=")[0].strip() for s in settings}
    return None if other else DEFAULT


def _described(cls: type, options: dict[str, Option]) -> dict[str, Any]:
    about = (cls.__doc__ or "").strip().splitlines()[0]
    described = {}
    for name, option in options.items():
        kind = option.kind
        described[name] = {
            "type": kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", ""),
            "required": option.required,
            "default": None if option.required else option.default,
        }
    return {"class": f"{cls.__module__}.{cls.__qualname__}", "about": about, "options": described}


if __name__ == "__main__":
    main()

"""Post-training of language models with Trajectory Balance with Asynchrony (TBA)."""

import difflib
import gc
import io
import json
import logging
import os
import sys
import textwrap
from functools import partial
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Any, NoReturn

from typer import Argument, Exit, Option, Typer
from typer.main import get_command

from tba.config.hints import inner_table, without_table
from tba.config.mistakes import choices, refuse
from tba.config.plugins import KINDS, NAMES, find, meanings_of, names, options_of
from tba.config.schema import DEFAULT, Config, check_docstrings, load, read_toml
from tba.config.secrets import check_secrets
from tba.config.tables import PLUGGED, Table
from tba.display import printable
from tba.errors import RewardError, StepError
from tba.runs.console import announce, in_a_line
from tba.runs.folder import Replay, is_full, is_run
from tba.setup.checks import (
    check_config,
    check_evaluated,
    check_export,
    check_new_file,
    check_start,
    placed,
    stored_config,
    tell_finished,
)

app = Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__
)

PASS_ON = {"ignore_unknown_options": True}
"""Context of commands with settings: they report unknown options themselves."""
KEY = "[table.key=value …]"
CONFIG = f"[CONFIG.toml] {KEY}"
Settings = Annotated[list[str] | None, Argument(metavar=KEY, help="Settings to override.")]
ConfigSettings = Annotated[
    list[str] | None, Argument(metavar=CONFIG, help="Config file, and settings that override it.")
]
DryRun = Annotated[bool, Option("--dry-run", help="Same as `tba check`.")]
Gpus = Annotated[
    str | None,
    Option(metavar="NxGB", help="Plan for these GPUs, such as 4x80, instead of this machine's."),
]
Rescore = Annotated[bool, Option("--rescore", help="Resume, and rescore stored samples.")]
Drop = Annotated[bool, Option("--drop-replay", help="Resume with an empty replay buffer.")]
Step = Annotated[
    str | None, Option(metavar="N|best", help="Checkpoint to use; default: the newest.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tba {installed_version('tba')}")
        raise Exit


@app.callback()
def options(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of `tba` itself."""


@app.command("train", context_settings=PASS_ON)
def train_command(
    settings: ConfigSettings = None,
    dry_run: DryRun = False,
    gpus: Gpus = None,
    resume: Annotated[Path | None, Option(metavar="RUN", help="Folder of a run to resume.")] = None,
    rescore: Rescore = False,
    drop_replay: Drop = False,
) -> None:
    """Train a model. Without a config file, train a small model to add on the CPU."""
    if rescore + drop_replay > (resume is not None):
        raise ValueError("--rescore and --drop-replay need --resume RUN; give only one of the two")
    if gpus is not None and not dry_run:
        raise ValueError("--gpus plans for other machines: add --dry-run")
    replay: Replay = "keep"
    if rescore or drop_replay:
        replay = "rescore" if rescore else "drop"
    config = placed(_config(settings or [], resume))
    if not dry_run and resume is not None and tell_finished(resume, config):
        return
    announce(config)
    check_start(config, resume)
    if dry_run:
        _check(config, gpus, resume, replay)
        return
    from tba.open import run

    run(config, resume, replay)


@app.command("check", context_settings=PASS_ON)
def check_command(
    settings: ConfigSettings = None,
    machine: Annotated[
        bool, Option("--machine", help="Also examine this machine, and do a short run.")
    ] = False,
    gpus: Gpus = None,
    verbose: Annotated[bool, Option("--verbose", help="Print the whole config as TOML.")] = False,
) -> None:
    """Check a config: its data, reward, memory and time per step. Without one, check this machine.

    Nothing is trained. The output of --machine is for bug reports; status 1 means a failed check.
    """
    config = placed(_config(settings or [], None))
    off: list[str] = []
    if machine or not settings:
        from tba.tools.doctor import examine

        off = examine(config)
        print()
    if settings:
        announce(config)
        check_start(config, None)
        _check(config, gpus, verbose=verbose)
    raise Exit(bool(off))


def _check(
    config: Config, gpus: str | None, resume: Path | None = None, replay: Replay = "keep",
    verbose: bool = False,
) -> None:  # fmt: skip
    """Print the output of a dry run, with the verdict last."""
    from tba.setup.machine import planned_machine
    from tba.tools.check import as_toml, dry_run

    tables, lines = dry_run(config, resume, replay, None if gpus is None else planned_machine(gpus))
    if verbose:
        print(as_toml(tables, config.model_dump(exclude_unset=True, by_alias=True)), end="\n\n")
    print(printable("\n".join(lines)))


@app.command("plan", context_settings=PASS_ON)
def plan_command(
    settings: ConfigSettings = None,
    gpus: Gpus = None,
    run: Annotated[Path | None, Option(metavar="RUN", help="Use a finished run's rates.")] = None,
    decode: Annotated[float | None, Option(help="Tokens per second of a searcher.")] = None,
    train: Annotated[float | None, Option(help="Tokens per second of the trainer.")] = None,
    response: Annotated[float | None, Option(help="Mean length of a response in tokens.")] = None,
    judge: Annotated[float | None, Option(help="Seconds that a search waits for rewards.")] = None,
    network: Annotated[float | None, Option(help="GB per second for weights.")] = None,
) -> None:
    """Estimate how many searchers keep the trainer busy, and the memory and time of a run."""
    config = placed(_config(settings or [], None))
    from tba.setup.machine import planned_machine
    from tba.tools.plan import plan

    names = ("decode", "train", "response", "judge", "network")
    rates = zip(names, (decode, train, response, judge, network), strict=True)
    given = {name: rate for name, rate in rates if rate is not None}
    planned = None if gpus is None else planned_machine(gpus)
    print("\n".join(plan(config, planned, given, run)))


@app.command("sweep", context_settings=PASS_ON)
def sweep_command(
    study: Annotated[Path, Argument(metavar="STUDY.toml", help="File of the study.")],
    settings: Settings = None,
    dry_run: DryRun = False,
    retry_failed: Annotated[bool, Option("--retry-failed", help="Restart failed runs.")] = False,
) -> None:
    """Run a study: grids of runs, several at once. Repeat the command to continue it."""
    _refuse_dashes(settings or [])
    read_toml(study, "study")
    from tba.tools.sweep import sweep

    raise Exit(sweep(study, settings or [], dry_run, retry_failed))


@app.command("eval", context_settings=PASS_ON)
def evaluate(
    model: Annotated[
        str, Argument(metavar="RUN|MODEL", help="Folder of a run or a model, or a hub name.")
    ],
    settings: ConfigSettings = None,
    reference: Annotated[bool, Option("--reference", help="Evaluate the initial model.")] = False,
    step: Step = None,
    completions: Annotated[
        Path | None, Option(metavar="FILE", help="Write all completions to a new JSONL file.")
    ] = None,
) -> None:
    """Evaluate a run, or a model with a config, on held-out prompts; print the scores as JSON.

    Completions are written only with --completions FILE.
    """
    path, settings = _divided(settings or [])
    if is_run(Path(model)):
        if path is not None:
            raise ValueError(f"{model} is a run and has its own config; leave out {path}")
        check_config(stored_config(Path(model), settings))
        from tba.offline.eval import evaluate_run

        scores = evaluate_run(Path(model), settings, reference, step, completions)
    elif reference or step is not None:
        raise ValueError(f"--reference and --step are for runs; {model} is not a run's folder")
    else:
        check_evaluated(model, config := load(path, settings))
        from tba.offline.eval import evaluate_model

        scores = evaluate_model(model, config, completions)
    print(json.dumps(scores, indent=1))
    told = f"evaluated {scores['model']} on {scores['prompts']} held-out prompts"
    print(f"{told}: {in_a_line(scores)}", file=sys.stderr)


@app.command("report")
def report_command(
    runs: Annotated[list[Path], Argument(help="Folders of runs to compare, or of one study.")],
    out: Annotated[Path | None, Option(help="Folder for the page.")] = None,
    is_watched: Annotated[bool, Option("--watch", help="Rewrite the page until runs end.")] = False,
) -> None:
    """Write a report of runs, or of a study: one HTML page that needs no network."""
    from tba.tools.report import report, watch

    if is_watched:
        os.nice(19)  # the run has priority
    print(watch(runs, out, partial(print, flush=True)) if is_watched else report(runs, out))


@app.command("export")
def export_command(
    run: Annotated[Path, Argument(help="Folder of a run.")],
    out: Annotated[Path, Argument(help="New folder.")],
    adapter: Annotated[bool, Option("--adapter", help="LoRA: write only the adapter.")] = False,
    step: Step = None,
) -> None:
    """Write the trained model, with a model card, as a Hugging Face folder; LoRA is merged.

    `hf upload NAME FOLDER` uploads it to the hub.
    """
    check_export(run, out, adapter)
    from tba.offline.eval import export

    what = "adapter" if adapter else "model"
    print(f"exported the {what} of {run} to {export(run, out, adapter, step)}")


@app.command()
def rollouts(
    run: Annotated[Path, Argument(help="Folder of a run.")],
    out: Annotated[Path, Argument(help="New JSONL file.")],
    step: Step = None,
) -> None:
    """Write the replay buffer of a run as JSONL, with texts and tokens, for replay.rollouts."""
    check_new_file(run, out)
    from tba.offline.rollouts import write_rollouts

    print(write_rollouts(run, out, step))


@app.command("serve", context_settings=PASS_ON)
def serve_command(
    path: Annotated[str, Argument(metavar="MODEL|RUN", help="A model, or the folder of a run.")],
    settings: Settings = None,
    port: Annotated[int, Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any.")] = 0,
    step: Step = None,
) -> None:
    """Serve a model as task=agent does, for developing a program. Nothing is trained."""
    _refuse_dashes(settings or [])
    run = Path(path) if is_run(Path(path)) else None
    if run is not None:
        config = stored_config(run, settings or [])
    elif step is not None:
        raise ValueError(f"--step is for runs; {path} is not a run's folder")
    else:
        config = load(None, [f"policy.model={path}", *(settings or [])])
    from tba.offline.eval import serve

    serve(config, run, step, port)


@app.command(context_settings=PASS_ON)
def launch(
    config: Annotated[Path, Argument(metavar="CONFIG.toml", help="Config file of the run.")],
    settings: Settings = None,
    slurm: Annotated[bool, Option("--slurm", help="Write a batch file for Slurm.")] = False,
    nodes: Annotated[int, Option(metavar="N", help="Machines of the job.")] = 1,
    gpus: Annotated[int | None, Option(metavar="N", help="GPUs of each machine.")] = None,
) -> None:
    """Print a batch file that trains on a cluster; `sbatch` submits it. Nothing is started."""
    _refuse_dashes(settings or [])
    if not slurm:
        raise ValueError(f"type `tba launch {config} --slurm`: only Slurm is supported")
    from tba.tools.launch import batch_file

    print(batch_file(config, settings or [], nodes, gpus), end="")


@app.command("list")
def list_plugins(
    name: Annotated[
        str | None,
        Argument(help="Plug-in (shows its options), table (shows its keys), or `runs`."),
    ] = None,
    folder: Annotated[Path, Argument(help="Folder with runs, for `tba list runs`.")] = Path("runs"),
) -> None:
    """List plug-ins and config tables, the options or keys of one of them, or runs."""
    if name == "runs":
        from tba.runs.status import table_of

        print(printable("\n".join(table_of(folder))))
        return
    tables = {each: inner_table(field) for each, field in Config.model_fields.items()}
    known = [*KINDS, *(each for kind in KINDS for each in names(kind)), *tables]
    if name is not None and name not in known:
        raise ValueError(f"no plug-in called {name!r}{choices(name, known, NAMES)}")
    for kind in KINDS:
        chosen = [e for e in names(kind) if PLUGGED.get(str(name), name) in (None, kind, e)]
        if chosen:
            print(f"\n{kind}")
        for each in chosen:
            cls = find(kind, each)
            print(f"  {each:<14} {(cls.__doc__ or '').strip().splitlines()[0]}")
            if each == name:
                meanings = meanings_of(cls)
                for key, option in options_of(cls).items():
                    _print_key(key, option.required, option.default, meanings[key])
    if name is None:
        print(f"\ntables of the config: {', '.join(tables)}")
    elif (table := tables.get(name)) is not None:
        _print_table(name, table)


def _print_table(name: str, table: type[Table]) -> None:
    """Print the keys of a table, and then the tables in it."""
    print(f"\n[{name}]")
    for key, field in table.model_fields.items():
        _print_key(field.alias or key, field.is_required(), field.default, field.description or "")
    for key, field in table.model_fields.items():
        inner = inner_table(field)
        if inner is not None:
            _print_table(f"{name}.{key}", inner)


def _print_key(name: str, required: bool, default: Any, meaning: str) -> None:
    """Print a key as `name = default`, with its meaning below."""
    value = "(required)" if required else "(none)" if default is None else json.dumps(default)
    print(f"  {name} = {value}")
    print(textwrap.fill(meaning, 96, initial_indent="      ", subsequent_indent="      "))


class Printable(logging.Formatter):
    """Log formatter that escapes control characters: warnings may quote untrusted text."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def main() -> None:
    """Run the command. Print errors in the user's input and code without our traceback."""
    if sys.getfilesystemencoding() != "utf-8":  # file names depend on the locale
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONUTF8": "1"})
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths and texts may be invalid Unicode
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Printable())
    sys.path.append(str(Path.cwd()))  # for plug-ins; last, so that they shadow no library
    try:
        check_docstrings()
        app()
    except (ValueError, TimeoutError) as error:
        _fail(error, 2)
    except (RewardError, StepError) as error:
        _fail(error, 1)
    except OSError as error:
        if is_full(error):
            _fail(OSError(f"the disk is full: {error}"), 1)
        if error.filename is None:
            raise
        _fail(error, 2)
    finally:
        gc.freeze()  # skips the garbage collection at exit, which takes a second


def _fail(error: Exception, status: int) -> NoReturn:
    """Print an error message, and exit with this status."""
    print(f"error: {printable(str(error))}", file=sys.stderr)
    raise SystemExit(status) from error


def _config(settings: list[str], resume: Path | None) -> Config:
    path, settings = _divided(settings)
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
    return stored_config(resume, settings)


def _divided(settings: list[str]) -> tuple[Path | None, list[str]]:
    """Split arguments into an optional config file, which comes first, and settings."""
    _refuse_dashes(settings)
    if settings and settings[0].endswith(".toml") and "=" not in settings[0]:
        return Path(settings[0]), settings[1:]
    return None, settings


def _refuse_dashes(settings: list[str]) -> None:
    """Raise ValueError for unknown options, which may be settings written with dashes."""
    mistakes = []
    for given, following in zip(settings, [*settings[1:], ""], strict=False):
        if not given.startswith("-"):
            continue
        name, equals, value = given.lstrip("-").partition("=")
        name = name.replace("-", "_")
        value = value if equals else following
        check_secrets(name, value)  # first, so that no error quotes a secret
        if "." in name:
            mistakes.append(f"{given}: settings have no dashes; type `{name}={value}`")
            continue
        command: Any = get_command(app)
        options = {o for c in command.commands.values() for p in c.params for o in p.opts}
        close = difflib.get_close_matches(given, options, n=1)
        hint = f"did you mean {close[0]}?" if close else "--help lists all options"
        mistakes.append(f"no option {given}; {without_table(name, value) or hint}")
    refuse(mistakes)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, which `main` puts last
    main()

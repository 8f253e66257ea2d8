"""Signs of life: a line before PyTorch is imported, and what the trainer waits for."""

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from build import SMALL, config

from tba.config.schema import load
from tba.config.tables import RuntimeTable
from tba.learn.trainer import SingleTrainer
from tba.open import open_run, run
from tba.runs.console import FIRST_LINE, Console
from tba.runtime.deadline import Calls, bind_ray
from tba.search.result import Evaluation
from tba.search.searcher import Searcher

FIRST_OUTPUT = """
import builtins, sys, time

def told(line, **options):
    seconds = time.process_time()
    sys.stdout.write(f"{line}\\n{'torch' in sys.modules}\\n{seconds}\\n")
    raise SystemExit(0)

builtins.print = told
sys.argv = ["tba", "train"]
from tba.cli import main
main()
"""


def test_the_first_line_takes_under_a_second_of_the_processor_and_comes_before_torch():
    """Unlike seconds by the clock, those of the processor hardly depend on what else runs."""
    command = [sys.executable, "-c", FIRST_OUTPUT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    line, has_torch, seconds = done.stdout.splitlines()
    assert (line, has_torch) == (FIRST_LINE, "False")
    assert float(seconds) < 1.0


def test_a_run_in_one_process_tells_each_of_its_phases(tiny_model, tmp_path, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(Console, "phase", lambda self, text: told.append(text))
    settings = ("run.steps=1", "eval.prompts_per_task=2", "runtime.prompts_per_task=2")
    run(config(tiny_model, tmp_path / "run", *settings))
    evaluating = [f"evaluating {percent} %" for percent in (0, 33, 66)]
    generating = [f"generating {n}/3 prompts" for n in (0, 2)]
    loading = ["reading the data", "loading the model", "loading the models of the searcher"]
    training = ["training", *generating, "saving"]
    assert told == [*loading, *evaluating, *generating, *training, *evaluating]


def test_the_console_knows_the_steps_of_epochs(tiny_model, tmp_path, capsys):
    """It opens before the data are read, which tell how many steps an epoch has."""
    own = ["task=toy.Ones", "task.size=30", "task.allow_loss=1", "run.epochs=2"]
    settings = [f"policy.model={tiny_model}", f"run.folder={tmp_path / 'run'}", *SMALL, *own]
    settings.append("log.console=lines")
    steps = run(load(None, [*settings, "reward.isolate=none", "eval.every=0"])).steps
    assert f"step {steps}/{steps} " in capsys.readouterr().out


def test_a_searcher_in_the_trainers_process_is_idle_while_the_trainer_trains(
    tiny_model, tmp_path, monkeypatch
):
    """By a clock that only calls move: each search takes 5 s, and each step of the trainer 3 s."""
    now = [0.0]

    def taking(seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **options: Any) -> Any:
            now[0] += seconds
            return call(*given, **options)

        return timed

    monkeypatch.setattr(Searcher, "search", taking(5.0, Searcher.search))
    monkeypatch.setattr(SingleTrainer, "step", taking(3.0, SingleTrainer.step))
    clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0])
    monkeypatch.setattr("tba.runtime.local.time", clock)
    with open_run(config(tiny_model, tmp_path / "run", "run.steps=4")) as opened:
        summary = opened.train()
        assert opened.searchers.stats.seconds["waiting"] == 4 * 3.0
    assert summary.searcher_wait_fraction > 0


def test_an_evaluation_is_done_as_its_pieces_are(monkeypatch):
    bind_ray(None)
    from tba.runtime import pool as module

    nothing: Any = SimpleNamespace(version=1)
    monkeypatch.setattr(module, "pieces_of", lambda setup: [None] * 5)
    monkeypatch.setattr(module, "join", lambda version, results: Evaluation(version, {}, []))
    own = module.Evaluations(nothing)
    pool = module.Pool(lambda place, newest: (None, None), RuntimeTable(), Calls(1.0))
    idle: Any = SimpleNamespace(has=lambda kind: False)
    starting: Any = SimpleNamespace(has=lambda kind: kind == "start")
    pool.handles = [idle]
    own.request(nothing, 1)
    seen = []
    while piece := own.take():
        seen.append(pool.phase(own, 0, 0))
        own.done(piece, nothing)
    assert seen == [f"evaluating {percent} %" for percent in (0, 20, 40, 60, 80)]
    pool.handles = [idle, starting]
    assert pool.phase(own, 3, 8) == "generating 3/8 prompts"
    pool.handles = [starting]
    assert pool.phase(own, 0, 8) == "starting the searchers, which load the model"

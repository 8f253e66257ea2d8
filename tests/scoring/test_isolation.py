"""What a reward function does to its process costs its own group, and nothing is left of it."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from build import ISOLATION_DEADLINE as DEADLINE
from build import config, guard_of, misbehaving, ray_config, without_clock
from build import isolation_judge as judge
from build import isolation_reasons as reasons
from suite import alive, until

import tba
from tba.engines.scripted import Scripted
from tba.prompt import Answer, Prompt
from tba.runs.folder import METRICS, read
from tba.scoring.scoring import Scoring, ScoringProcess
from tba.scoring.verdicts import Rejection
from tba.search.searcher import SearchSetup
from tba.setup.setup import check
from tba.tasks.custom import Custom


@pytest.fixture(scope="module")
def guard() -> Iterator[Scoring]:
    guard = guard_of(misbehaving(), longest=DEADLINE)
    yield guard
    guard.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("interpreter lock", ["timeout", "timeout"]),
        ("hang", ["timeout", "timeout"]),
        ("exit", ["died", "died"]),
        ("abort", ["died", "died"]),
        ("memory", ["memory", 8.0]),  # the process lives, and scores each answer alone
        ("interrupt", ["raised", 8.0]),
        ("prints", [6.0, 8.0]),
        ("closed", ["died", "died"]),
    ],
)
def test_a_reward_that_misbehaves_costs_its_own_group(guard, text, expected):
    verdicts = judge(guard, ["before"], [text, "together"], ["next", "one"])
    assert reasons(verdicts) == [[6.0], expected, [4.0, 3.0]]


@pytest.mark.parametrize(
    ("text", "how"), [("exit", "with exit status 3"), ("abort", "by signal 6")]
)
def test_a_rejection_says_how_the_process_ended(guard, text, how):
    ((verdict,),) = judge(guard, [text])
    assert isinstance(verdict, Rejection)
    assert verdict.detail.startswith(f"the scoring process ended {how}")


def test_loaded_models_do_not_count_as_memory_that_a_call_takes():
    """A limit of 0.3 GB, of which a model alone takes 0.4."""

    class Large:
        def load(self) -> None:
            self.weights = bytes(4 * 10**8)

        def __call__(self, completions: list[str]) -> list[float]:
            taken = bytes(4 * 10**8 if completions == ["memory"] else 1)
            return [float(len(self.weights) > len(taken))]

    def build() -> Custom:
        large = Large()
        large.load()
        return Custom(data="", reward="", passed=(large,))

    empty = Custom(data="", reward="", passed=(Large(),))
    guard = Scoring({"": empty}, ScoringProcess({"": build}, 0.3), DEADLINE)
    assert reasons(judge(guard, ["one"], ["memory"], ["two"])) == [[1.0], ["memory"], [1.0]]
    guard.close()


def test_a_system_that_is_short_of_memory_ends_the_scoring_process_first():
    file = "/proc/self/oom_score_adj"
    guard = guard_of(lambda completions: [float(Path(file).read_text()) for _ in completions])
    assert judge(guard, ["a"]) == [[1000.0]]
    guard.close()


def process_id() -> Callable[[list[str]], list[float]]:
    return lambda completions: [float(os.getpid()) for _ in completions]


def has_ended(process: float) -> bool:
    """Wait until a process has ended, for half a minute at most."""
    with contextlib.suppress(psutil.NoSuchProcess):
        one = psutil.Process(int(process))
        until(lambda: not alive([one]), 30)
    return True


@pytest.mark.parametrize("close", [True, False], ids=["closed", "forgotten"])
def test_nothing_is_left_of_a_guard(close):
    before = set(threading.enumerate())
    guard = guard_of(process_id())
    ((pid,),) = judge(guard, ["a"])
    assert isinstance(pid, float) and psutil.pid_exists(int(pid)) and pid != os.getpid()
    assert judge(guard, ["b"], ["c"]) == [[pid], [pid]]  # it is kept
    threads = set(threading.enumerate()) - before
    if close:
        guard.close()
        assert not psutil.pid_exists(int(pid))  # not even a zombie
    del guard
    assert has_ended(pid)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_guard_can_be_closed_before_its_process_has_started():
    children = set(psutil.Process().children())
    guard_of(process_id()).close()
    assert set(psutil.Process().children()) <= children


def test_torch_is_imported_by_the_function_only():
    def score(completions: list[str]) -> list[float]:
        before = "torch" in sys.modules
        import torch

        torch.set_default_dtype(torch.float64)
        return [float(before), torch.ones(1)]

    guard = guard_of(score, deadline=30.0)
    assert judge(guard, ["a", "b"], ["c", "d"]) == [[0.0, 1.0], [1.0, 1.0]]
    assert torch.get_default_dtype() == torch.float32
    guard.close()


PARENT = """
import ctypes, os, signal, subprocess, time
from functools import partial
from threading import Thread
from tba.prompt import Answer, Prompt
from tba.scoring.scoring import Scoring, ScoringProcess
from tba.search.searcher import SearchSetup
from tba.tasks.custom import Custom

def score(completions):
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    sleeping = subprocess.Popen(["sleep", "60"])
    os.write(1, b"%d %d\\n" % (os.getpid(), sleeping.pid))
    if completions == ["busy"]:
        ctypes.PyDLL(None).sleep(60)
    return [0.0]

task = partial(Custom, data="", reward="", passed=(score,))
kept = []
for text in ("idle", "busy"):
    scoring = Scoring({"": task()}, ScoringProcess({"": task}, 1.0), 60.0)
    kept.append(scoring)
    call = Thread(target=scoring, args=[[Prompt("0", "0")], [[Answer(text, True)]]])
    call.start()
    if text == "idle":
        call.join()
time.sleep(60)
"""


def test_processes_end_with_a_parent_that_is_killed(tmp_path):
    """One that is idle and one that holds the interpreter lock, and what they have started."""
    script = tmp_path / "parent.py"  # its function is in `__main__`, as in a notebook
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for _ in range(2) for pid in parent.stdout.readline().split()]
        time.sleep(0.2)  # until the lock is held
        assert len(pids) == 4 and all(map(psutil.pid_exists, pids))
        parent.send_signal(signal.SIGKILL)
    assert all(map(has_ended, pids))


@pytest.mark.parametrize(
    ("left", "end"), [(False, "hang"), (False, "close"), (True, "close"), (True, "exit")]
)
def test_what_a_function_starts_in_a_session_of_its_own_ends_with_its_process(left, end):
    """As a sandbox does: a kill of the group does not reach it. Some have left their parents."""

    def score(completions: list[str]) -> list[float]:
        if completions == ["exit"]:
            os._exit(0)
        if completions == ["hang"]:
            time.sleep(60)
        code = f"setsid sleep 60 >/dev/null 2>&1 & echo $!{'' if left else '; wait'}"
        started = subprocess.Popen(
            ["sh", "-c", code], start_new_session=True, stdout=subprocess.PIPE
        )
        assert started.stdout is not None
        return [float(started.pid), float(started.stdout.readline())]

    guard = guard_of(score)
    ((outer, inner),) = judge(guard, ["a", "b"])
    assert isinstance(outer, float) and isinstance(inner, float) and psutil.pid_exists(int(inner))
    if end != "close":
        assert reasons(judge(guard, [end])) == [["timeout" if end == "hang" else "died"]]
    guard.close()
    assert has_ended(outer) and has_ended(inner)


def test_a_task_that_cannot_be_built_ends_the_run_and_what_it_has_started(tmp_path):

    def build() -> Any:
        program = subprocess.Popen(["sleep", "60"], start_new_session=True)
        (tmp_path / "pid").write_text(str(program.pid))
        raise OSError("no judge at this address")

    here = Custom(data="", reward="", passed=(len,))
    guard = Scoring({"": here}, ScoringProcess({"": build}, 1), 1.0)
    told = r"did not start: (.|\n)*no judge(.|\n)*isolate=none"
    for wait in (lambda: judge(guard, ["a"], ["b"]), guard.wait_until_ready):
        with pytest.raises(RuntimeError, match=told):
            wait()
    assert has_ended(float((tmp_path / "pid").read_text()))
    guard.close()


STARTS = """
import asyncio, multiprocessing, os, subprocess, sys
from concurrent.futures import ProcessPoolExecutor

def one(text):
    return float(len(text))

def put(queue, text):
    queue.put(one(text))

def pool(completions):
    with multiprocessing.get_context("{kind}").Pool(1) as pool:
        return pool.map(one, completions)

def executor(completions):
    context = multiprocessing.get_context("{kind}")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return list(pool.map(one, completions))

def process(completions):
    context = multiprocessing.get_context("{kind}")
    queue = context.Queue()
    context.Process(target=put, args=(queue, completions[0]), daemon=True).start()
    return [queue.get() for _ in completions]

async def program(completions):
    pipe = asyncio.subprocess.PIPE
    started = await asyncio.create_subprocess_exec("cat", stdin=pipe, stdout=pipe)
    said, _ = await started.communicate(completions[0].encode())
    return [float(len(said)) for _ in completions]

def fork(completions):
    if os.fork() == 0:
        sys.exit()  # and not os._exit
    return [one(c) for c in completions]
"""
"""Functions that start processes; their file is imported by those that are not forked."""


@pytest.mark.parametrize("kind", ["fork", "spawn", "forkserver"])
def test_a_function_may_start_processes_of_its_own(kind, tmp_path):
    (tmp_path / f"starts_{kind}.py").write_text(STARTS.replace("{kind}", kind))
    names = ["pool", "executor", "process"]
    names += ["program", "fork"] if kind == "fork" else []
    tasks = {}
    for name in names:
        tasks[name] = partial(Custom, data="", reward=f"{tmp_path}/starts_{kind}.py:{name}")
    built = {name: task() for name, task in tasks.items()}
    guard = Scoring(built, ScoringProcess(tasks, 1.0), 20.0)
    for name in names:
        for _ in range(2):
            verdicts = guard([Prompt("0", "?")], [[Answer("four", True)]], (name, None))
            assert verdicts == [[4.0]], name
    guard.close()


def asynchronous() -> Callable[..., Any]:
    async def score(completions: list[str]) -> list[float]:
        import asyncio

        if completions == ["sleep"]:
            await asyncio.sleep(60)
        await asyncio.sleep(0.1)  # until all groups are in flight
        if completions == ["block"]:
            time.sleep(60)
        if completions == ["exit"]:
            os._exit(3)
        if completions == ["raise"]:
            raise SystemExit
        return [float(os.getpid())]

    return score


def hanging(asynchronous: bool) -> Callable[..., Any]:
    """Return a function that returns lengths; it hangs for "?" and is slow for "slow"."""

    def seconds(completions: list[str]) -> float:
        return 60 * ("?" in completions) + 0.5 * ("slow" in completions)

    def score(completions: list[str]) -> list[float]:
        time.sleep(seconds(completions))
        return [float(len(c)) for c in completions]

    async def score_later(completions: list[str]) -> list[float]:
        import asyncio

        await asyncio.sleep(seconds(completions))
        return [float(len(c)) for c in completions]

    return score_later if asynchronous else score


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def hangs(request: pytest.FixtureRequest) -> Iterator[Scoring]:
    guard = guard_of(hanging(request.param), deadline=0.4)
    yield guard
    guard.close()


def test_a_call_has_the_deadline_for_each_of_its_answers(hangs):
    """Slower than the deadline of one answer, faster than the deadline of ten."""
    assert judge(hangs, ["slow", *"abcdefghi"]) == [[4.0, *[1.0] * 9]]
    ((verdict,),) = judge(hangs, ["slow"])
    told = "scoring of 1 answers did not return within 0.4 s (reward.deadline = 0.4 s for each)"
    assert verdict == Rejection("timeout", told)


def test_a_call_has_a_longest_time_however_many_answers_it_has():
    task = partial(Custom, data="", reward="", passed=(hanging(False),))
    guard = Scoring({"": task()}, ScoringProcess({"": task}, 1.0), 10.0, longest=0.3)
    guard.wait_until_ready()
    began = time.monotonic()
    (verdicts,) = judge(guard, ["?"] * 128)
    assert time.monotonic() - began < 5
    assert isinstance(verdicts[0], Rejection)
    assert verdicts[0].detail == (
        "scoring of 128 answers did not return within 0.3 s (reward.deadline = 10 s for each,"
        " at most a quarter of runtime.task_deadline)"
    )
    guard.close()


def test_after_two_timeouts_in_a_row_the_rest_is_not_tried(hangs):
    verdicts = judge(hangs, *[["?"]] * 12)
    assert reasons(verdicts) == [["timeout"]] * 12
    last = verdicts[-1][0]
    assert isinstance(last, Rejection) and last.detail.startswith("not tried")


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_timeouts_among_calls_that_work_do_not_end_the_scoring(asynchronous):
    scoring = guard_of(hanging(asynchronous))
    verdicts = judge(scoring, ["?"], ["one"], ["?"], ["two"], ["three"])
    scoring.close()
    assert reasons(verdicts) == [["timeout"], [3.0], ["timeout"], [3.0], [5.0]]


def test_searches_wait_for_each_other_and_that_time_does_not_count():
    """Five calls of 0.5 s in a row, of which each has a deadline of 2 s, and one that hangs."""
    guard = guard_of(hanging(False), deadline=2.0)
    guard.wait_until_ready()
    texts = ["?", *["slow"] * 5]
    with ThreadPoolExecutor(len(texts)) as threads:
        verdicts = list(threads.map(lambda text: judge(guard, [text]), texts))
    assert [reasons(v) for v in verdicts] == [[["timeout"]], *[[[4.0]]] * 5]
    guard.close()


@pytest.mark.parametrize(("asynchronous", "most"), [(False, 1), (True, 3)])
def test_an_async_function_has_several_groups_at_once(asynchronous, most):
    """And all of them are in one event loop, so that a client or a lock may be kept."""
    inside = [0, 0]

    def enter() -> None:
        inside[0] += 1
        inside[1] = max(inside)

    def score(completions: list[str]) -> list[float]:
        enter()
        time.sleep(0.05)
        inside[0] -= 1
        return [float(inside[1])]

    kept: list[Any] = []

    async def score_later(completions: list[str]) -> list[float]:
        import asyncio

        if not kept:
            kept.append(asyncio.Semaphore(5))
        async with kept[0]:
            enter()
            await asyncio.sleep(0.05)
            inside[0] -= 1
        return [float(inside[1])]

    function = score_later if asynchronous else score
    task = partial(Custom, data="", reward="", passed=(function,))
    guard = Scoring({"": task()}, ScoringProcess({"": task}, 1.0), concurrency=3)
    verdicts = judge(guard, *[["a"]] * 8)
    assert max(verdict for (verdict,) in verdicts) == most
    guard.close()


def test_an_async_function_that_ignores_its_cancellation_does_not_hang_the_search():
    async def score(completions: list[str]) -> list[float]:
        import asyncio

        while completions == ["ignore"]:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        return [1.0]

    guard = guard_of(score)
    assert reasons(judge(guard, ["ignore"], ["one"])) == [["timeout"], [1.0]]
    guard.close()


def test_async_groups_in_flight_are_scored_again(monkeypatch):
    """A call that is late is cancelled; only one that blocks the event loop costs the process."""
    monkeypatch.setattr("tba.scoring.scoring.GRACE", 0.2)
    guard = guard_of(asynchronous())
    verdicts = judge(guard, ["one"], ["sleep"], ["raise"], ["two"])
    first = verdicts[0][0]
    assert reasons(verdicts) == [[first], ["timeout"], ["raised"], [first]]
    for bad, reason in (("block", "timeout"), ("exit", "died")):
        verdicts = judge(guard, [bad], ["one"], ["two"], ["three"])
        assert reasons(verdicts)[0] == [reason]
        pids = {verdict for (verdict,) in verdicts[1:]}
        assert pids.isdisjoint({first}) and all(isinstance(pid, float) for pid in pids)
        first = verdicts[3][0]
    guard.close()


def test_a_group_beside_one_that_holds_the_interpreter_lock_is_scored_again():
    """In another process, although its own call was the first to be given up."""

    async def score(completions: list[str]) -> list[float]:
        if completions[0] == "hold":
            ctypes.PyDLL(None).sleep(60)
        return [1.0] * len(completions)

    guard = guard_of(score, deadline=2.0)
    assert reasons(judge(guard, ["hold"] * 2, ["one"])) == [["timeout"] * 2, [1.0]]
    guard.close()


def test_time_in_which_another_call_blocks_the_event_loop_does_not_count():
    """A group with a short deadline keeps its rewards beside one with a longer deadline."""

    async def score(completions: list[str]) -> list[float]:
        import asyncio

        if completions[0] == "block":
            time.sleep(3.2)
        await asyncio.sleep(0.1)
        return [1.0] * len(completions)

    guard = guard_of(score)
    assert judge(guard, ["block"] * 3, ["one"]) == [[1.0] * 3, [1.0]]
    guard.close()


def test_columns_of_any_type_arrive():
    guard = guard_of(lambda completions, pair: [float(sum(pair[0])) for _ in completions])
    columns = {"pair": (1, 2)}
    assert guard([Prompt("0", "0", columns)], [[Answer("a", True)]]) == [[3.0]]
    (verdicts,) = guard([Prompt("0", "0", {"pair": (lambda: 1, 2)})], [[Answer("a", True)]])
    assert reasons([verdicts]) == [["raised"]]
    guard.close()


REWARD = """
import os
import time
from pathlib import Path

def ones(completions, file, **columns):
    hung, exited = Path(f"{file[0]}-hung"), Path(f"{file[0]}-exited")
    if file[0] and not hung.exists():
        hung.write_text("")
        time.sleep(60)
    if file[0] and not exited.exists():
        exited.write_text("")
        os._exit(1)
    with open(f"{__file__}.pids", "a") as pids:
        pids.write(f"{os.getpid()}\\n")
    return [float(c.count("1")) for c in completions]
"""


def settings(folder: Path, once: str = "") -> list[str]:
    """A data set and a reward function by its name; with `once`, it hangs and exits once."""
    (folder / "rewards.py").write_text(REWARD)
    rows = [f'{{"prompt": "{i}+1=", "file": "{once}"}}\n' for i in range(30)]
    (folder / "rows.jsonl").write_text("".join(rows))
    return [
        "task=custom", f"task.data={folder}/rows.jsonl", "task.held_out_size=5",
        f"task.reward={folder}/rewards.py:ones",
    ]  # fmt: skip


def test_a_run_is_the_same_with_and_without_a_process(tiny_model, tmp_path):
    """Training, value rollouts and evaluations."""
    rows, task = [], settings(tmp_path)
    vine = ["objective=vineppo", "objective.step_tokens=2", "objective.rollouts=2", "run.steps=3"]
    for isolate in ("none", "process"):
        setting = f"reward.isolate={isolate}"
        tba.train(config(tiny_model, tmp_path / isolate, *task, *vine, setting))
        rows.append(without_clock(read(tmp_path / isolate / METRICS)))
    assert rows[0] == rows[1]
    pids = (tmp_path / "rewards.py.pids").read_text().split()
    own = pids.index(str(os.getpid()))
    assert own == 0 and len(set(pids)) == 2
    assert has_ended(float(pids[-1]))


def test_a_judge_is_loaded_by_one_process_which_scores_every_evaluation_set(tiny_model, tmp_path):
    """And nothing is left of it when the run has ended."""
    judge = f"""
import os
from tba.tasks.judges import Judge

class Noted(Judge):
    def check(self): pass
    def load(self, device): self.note("loaded")
    def note(self, what):
        with open({str(tmp_path / "notes")!r}, "a") as file:
            file.write(f"{{what}} {{os.getpid()}}\\n")
    def __call__(self, completions):
        self.note("scored")
        return [float(c.count("1")) for c in completions]
"""
    task = settings(tmp_path)
    (tmp_path / "judge.py").write_text(judge)
    sizes = {"a": 3, "b": 4}.items()
    sets = [f"task.sources.{name}={{weight=0,held_out_size={size}}}" for name, size in sizes]
    sets += [f"task.reward={{use='{tmp_path}/judge.py:Noted'}}", "reward.isolate=process"]
    sets += [f"task.sources.{name}.held_out_data={tmp_path}/other.jsonl" for name in "ab"]
    (tmp_path / "other.jsonl").write_text("".join(f'{{"prompt": "{i}="}}\n' for i in range(4)))
    tba.train(config(tiny_model, tmp_path / "run", *task, *sets, "run.steps=2"))
    notes = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
    assert len({pid for _, pid in notes}) == 1
    assert [what for what, _ in notes].count("loaded") == 3  # once for each task
    assert notes[2][0] == "loaded" and not psutil.pid_exists(int(notes[0][1]))


@pytest.mark.slow
def test_a_searcher_on_ray_survives_its_reward_function(tiny_model, tmp_path):
    """It hangs in one group and exits in the next, each once.

    The 4 answers of a group have 40 s by `reward.deadline`, and the search has 6 in all.
    """
    task = settings(tmp_path, once=str(tmp_path / "fault"))
    more = ("reward.isolate=process", "runtime.task_deadline=6", "run.steps=4", "eval.prompts=0")
    summary = tba.train(ray_config(tiny_model, tmp_path / "run", *task, *more)).summary
    assert (summary.finished, summary.searcher_restarts) == (True, 0)
    assert summary.rejected == {"timeout": 4, "died": 4}
    pids = {int(pid) for pid in (tmp_path / "rewards.py.pids").read_text().split()}
    assert pids and all(map(has_ended, pids))


@pytest.mark.parametrize(
    ("load", "seconds", "told"),
    [
        ("raise OSError('no such weights')", 60, "no such weights"),
        ("time.sleep(60)", 1, r"not ready within runtime\.start_deadline = 1 s; raise it if"),
    ],
)
def test_a_judge_that_cannot_be_loaded_ends_the_start_of_the_searcher(
    tiny_model, tmp_path, load, seconds, told
):
    judge = "class Judge:\n    def check(self):\n        pass\n\n    def load(self, device):\n"
    judge += f"        {load}\n\n    def __call__(self, completions):\n        return []\n"
    task = settings(tmp_path)
    (tmp_path / "judge.py").write_text(f"import time\n\n{judge}")
    task.append(f"task.reward={{use='{tmp_path}/judge.py:Judge'}}")
    task.append(f"runtime.start_deadline={seconds}")
    setup = check(config(tiny_model, tmp_path, *task, "reward.isolate=process")).search_setup()
    children = set(psutil.Process().children())
    with pytest.raises(RuntimeError, match=f"the scoring process did not start: (.|\n)*{told}"):
        setup.build("cpu", False)
    assert set(psutil.Process().children()) <= children


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", ["engine", "scoring"]), ("cuda:0", ["scoring", "engine", "scoring"])],
)
def test_judges_have_their_part_of_a_gpu_before_an_engine_measures_what_is_free(
    tiny_model, tmp_path, monkeypatch, device, expected
):
    started = []
    monkeypatch.setattr(Scoring, "wait_until_ready", lambda self: started.append("scoring"))
    monkeypatch.setattr(Scripted, "__post_init__", lambda self: started.append("engine"))
    monkeypatch.setattr(SearchSetup, "reference", lambda *given: None)
    settings = config(tiny_model, tmp_path, "engine=scripted", "reward.isolate=none")
    check(settings).search_setup().build(device, bf16=False)
    assert started == expected

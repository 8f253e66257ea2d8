"""Two machines of a cluster, each a name space: slow and cut networks, machines that leave."""

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from build import ENVIRONMENT, as_settings, conserved, goes_on, steps
from build import ray_config as config
from suite import FULL, Case, cases, command_of, until

from tba.replay.buffer import ReplayBuffer
from tba.runs.checkpoint import newest
from tba.runs.folder import CHECKPOINTS, METRICS, read

HEAD, OTHER = "10.77.0.1", "10.77.0.2"
RAY = Path(sys.executable).parent / "ray"
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""Authentication of this cluster, on both machines. Left out, `ray start` may ask for a token that
a private Ray has made before, and those who join would not send it."""


def ip(*command: str) -> None:
    subprocess.run(command, check=True, timeout=30, capture_output=True)


@contextmanager
def machines(name: str) -> Iterator[tuple[str, str]]:
    """Two name spaces with a wire between them, which only root can make."""
    one, other = f"{name}a", f"{name}b"
    if os.getuid() != 0:
        pytest.skip("only root can make network name spaces")
    try:
        ip("ip", "netns", "add", one)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("network name spaces cannot be made here")
    try:
        ip("ip", "netns", "add", other)
        ip("ip", "link", "add", one, "netns", one, "type", "veth",
           "peer", "name", other, "netns", other)  # fmt: skip
        for space, address, peer in ((one, HEAD, OTHER), (other, OTHER, HEAD)):
            inside = ("ip", "-n", space)
            ip(*inside, "link", "set", "lo", "up")
            ip(*inside, "addr", "add", f"{address}/24", "dev", space)
            ip(*inside, "link", "set", space, "up")
            ip(*inside, "route", "add", "default", "via", peer)
        yield one, other
    finally:
        for space in (one, other):
            subprocess.run(["ip", "netns", "del", space], timeout=30, capture_output=True)


@contextmanager
def inside(space: str, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command on a machine, and end it with everything that it has started."""
    environment = {
        **ENVIRONMENT, **TOKEN, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
        "RAY_raylet_start_wait_time_s": "180",
    }  # fmt: skip
    process = subprocess.Popen(
        ["ip", "netns", "exec", space, *command], env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        family = [psutil.Process(process.pid)] if process.poll() is None else []
        family += [child for each in family for child in each.children(recursive=True)]
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait(30)


def machines_of_the_cluster(space: str) -> int:
    """Return how many machines have joined, as seen from one of them."""
    status = ("ip", "netns", "exec", space, str(RAY), "status", f"--address={HEAD}:6379")
    told = subprocess.run(status, env={**ENVIRONMENT, **TOKEN}, capture_output=True, timeout=60)
    return told.stdout.partition(b"Pending:")[0].count(b" node_")


def has(machine: subprocess.Popen[bytes], actor: str) -> int:
    """Return how many actors of this class are on a machine."""
    words = [w for p in psutil.Process(machine.pid).children(True) for w in command_of(p)]
    return sum(word.startswith(f"ray::{actor}") for word in words)


def has_begun(run: subprocess.Popen[bytes], folder: Path) -> None:
    until(lambda: len(steps(folder)) > 20 or run.poll() is not None, 180)


def started(
    ending: ExitStack, model: Path, folder: Path, one: str, far: subprocess.Popen[bytes]
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a run with searchers on both machines, and return it with its folder.

    Ray chooses the machines at random: a run with all searchers on one of them is started again.
    """
    for number in range(5):
        own = folder / f"run-{number}"
        chosen = as_settings(config(model, own, *SETTINGS))
        run = ending.enter_context(inside(one, sys.executable, "-m", "tba.cli", "train", *chosen))
        has_begun(run, own)
        assert run.poll() is None
        if has(far, "SearcherActor"):
            return run, own
        run.terminate()
        assert run.wait(60) == 0
    pytest.skip("Ray has put all searchers on one machine, five times")


def slow(case: Case, one: str) -> None:
    """A tenth of a second each way, and one packet of a hundred is lost.

    A kernel without that gets a narrow line, with as long a queue, which loses what does not fit.
    """
    chosen = ("tc", "-n", one, "qdisc", "add", "dev", one, "root")
    try:
        ip(*chosen, "netem", "delay", "100ms", "30ms", "loss", "1%")
    except subprocess.SubprocessError:
        ip(*chosen, "tbf", "rate", "2mbit", "burst", "10k", "latency", "100ms")


def cut_for_a_moment(case: Case, one: str) -> None:
    ip("ip", "-n", one, "link", "set", one, "down")
    time.sleep(float(case.rng.uniform(1, 4)))
    ip("ip", "-n", one, "link", "set", one, "up")
    ip("ip", "-n", one, "route", "replace", "default", "via", OTHER)


def cut(case: Case, one: str) -> None:
    """Until the end of the run: Ray gives the machine up after a while."""
    ip("ip", "-n", one, "link", "set", one, "down")


SETTINGS = (
    f"runtime.address={HEAD}:6379", "runtime.searchers=4", "runtime.cores=share",
    "runtime.task_deadline=10", "runtime.fresh=1", "runtime.max_restarts=100",
    "engine=scripted", "engine.answers=['1','2','33']", "engine.latency=0.2",
    "engine.own_reference=true", "run.steps=1000000", "task.size=20000", "eval.prompts=0",
)  # fmt: skip
NODE = (str(RAY), "start", "--block", "--object-store-memory=100000000")
JOINED = (f"--address={HEAD}:6379", f"--node-ip-address={OTHER}")
FAULTS = (cut_for_a_moment, slow, cut)


def head_of(ending: ExitStack, cpus: int) -> tuple[str, str]:
    """Start Ray on one of two machines, and return the name of both."""
    one, other = ending.enter_context(machines(f"tba{os.getpid() % 10000}"))
    head = ("--head", f"--node-ip-address={HEAD}", "--port=6379", "--include-dashboard=false")
    sessions = ending.enter_context(tempfile.TemporaryDirectory(prefix="ray"))  # a short path
    ending.enter_context(inside(one, *NODE, f"--num-cpus={cpus}", *head, f"--temp-dir={sessions}"))
    until(lambda: machines_of_the_cluster(one) == 1, 180, every=1)
    return one, other


@pytest.mark.timeout(900)
@cases(8, full=6, part=3)
def test_a_slow_or_broken_network_between_two_machines_loses_and_doubles_nothing(
    case, tiny_model, tmp_path
):
    """Four searchers on both. Training goes on with those that are left, and the run ends well."""
    fault = FAULTS[case.index % len(FAULTS)]
    with ExitStack() as ending:
        one, other = head_of(ending, cpus=1)
        far = ending.enter_context(inside(other, *NODE, *JOINED, "--num-cpus=1"))
        until(lambda: machines_of_the_cluster(one) == 2, 180, every=1)
        run, folder = started(ending, tiny_model, tmp_path, one, far)
        fault(case, one)
        at = len(steps(folder))
        until(lambda: len(steps(folder)) > at + 100 or run.poll() is not None, 120)
        assert run.poll() is None
        run.terminate()
        assert run.wait(60) == 0
    goes_on(folder)


def latest(folder: Path, metric: str) -> float:
    """Return the value of a metric at the latest step."""
    rows = [row for row in read(folder / METRICS) if "loss" in row]
    return float(rows[-1][metric]) if rows else 0.0


def joins_and_dies(case: Case, one: str, other: str, folder: Path) -> None:
    """Let the second machine join the cluster, wait until it is used, and kill it."""
    with inside(other, *NODE, *JOINED, "--num-cpus=2"):
        until(lambda: machines_of_the_cluster(one) == 2, 180)
        case.noticed(until(lambda: latest(folder, "searchers/nodes") == 2, 120))
        until(lambda: latest(folder, "searchers/running") == 4, 120)
    until(lambda: latest(folder, "searchers/nodes") == 1, 120)
    at = len(steps(folder))
    until(lambda: len(steps(folder)) > at + 50, 120)


@pytest.mark.timeout(1800)
@cases(8, full=2, part=1)
def test_a_machine_that_joins_is_used_and_one_that_is_lost_counts_once(case, tiny_model, tmp_path):
    """It joins late, is killed, and joins again. Two searchers on the first one go on."""
    folder = tmp_path / "run"
    chosen = as_settings(config(tiny_model, folder, *SETTINGS))
    chosen += ["runtime.searchers=[2,4]", "runtime.max_restarts=2"]
    with ExitStack() as ending:
        one, other = head_of(ending, cpus=2)
        run = ending.enter_context(inside(one, sys.executable, "-m", "tba.cli", "train", *chosen))
        has_begun(run, folder)
        assert latest(folder, "searchers/nodes") == 1
        for losses in (1, 2):
            with case.attempt():
                joins_and_dies(case, one, other, folder)
                assert latest(folder, "searchers/restarts") == losses
        run.terminate()
        assert run.wait(60) == 0
    times = [row["time"] for row in read(folder / METRICS) if "loss" in row]
    assert max(after - before for before, after in pairwise(times)) < 5
    goes_on(folder)


@pytest.mark.fault
@pytest.mark.timeout(900)
def test_ranks_of_the_trainer_are_on_the_machine_with_room_for_all(tiny_model, tmp_path):
    """It is not the machine of the train loop. The searcher may be on any."""
    settings = (*SETTINGS, "trainer.devices=2", "runtime.searchers=1", "run.steps=5")
    chosen = as_settings(config(tiny_model, tmp_path / "run", *settings))
    with ExitStack() as ending:
        one, other = head_of(ending, cpus=1)
        far = ending.enter_context(inside(other, *NODE, *JOINED, "--num-cpus=2"))
        until(lambda: machines_of_the_cluster(one) == 2, 180, every=1)
        run = ending.enter_context(inside(one, sys.executable, "-m", "tba.cli", "train", *chosen))
        until(lambda: has(far, "RankActor") == 2 or run.poll() is not None, 300, every=0.1)
        assert run.wait(300) == 0
    goes_on(tmp_path / "run", "trainer.devices=1")


@pytest.mark.fault
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("devices", "status"), [(1, 1), (2, 2)])
def test_a_machine_that_cannot_see_the_model_is_named(devices, status, tiny_model, tmp_path, capfd):
    """Something else is in the place of the folder there, for the searchers and for the ranks."""
    settings = (*SETTINGS, f"trainer.devices={devices}", "runtime.searchers=[1,2]")
    chosen = [*as_settings(config(tiny_model, tmp_path / "run", *settings[:-1])), settings[-1]]
    hidden = ("sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(tiny_model.parent))
    with ExitStack() as ending:
        one, other = head_of(ending, cpus=1)
        ending.enter_context(inside(other, *hidden, *NODE, *JOINED, f"--num-cpus={devices}"))
        until(lambda: machines_of_the_cluster(one) == 2, 180, every=1)
        run = ending.enter_context(inside(one, sys.executable, "-m", "tba.cli", "train", *chosen))
        assert run.wait(300) == status  # refused, where it had not begun
    told = capfd.readouterr().err
    assert f"({OTHER}) cannot see policy.model = '{tiny_model}': put the folder on" in told


def memory(run: subprocess.Popen[bytes]) -> float:
    """Return the bytes of the process of the train loop."""
    family = [psutil.Process(run.pid), *psutil.Process(run.pid).children(True)]
    return sum(each.memory_info().rss for each in family if "tba.cli" in command_of(each))


@pytest.mark.fault
@pytest.mark.skipif(not FULL, reason="takes ten minutes: FULL=1")
@pytest.mark.timeout(3600)
def test_memory_is_flat_while_a_machine_comes_and_goes(tiny_model, tmp_path):
    """Half of the searchers are on it: 64 in all, or as many as half of the memory holds."""
    folder = tmp_path / "run"
    each = max(1, min(32, int(psutil.virtual_memory().available / 2e9)))
    chosen = as_settings(config(tiny_model, folder, *SETTINGS, "replay.capacity=2000"))
    chosen += [f"runtime.searchers=[1,{2 * each}]", "runtime.max_restarts=1000"]
    used = []
    with ExitStack() as ending:
        one, other = head_of(ending, cpus=each)
        run = ending.enter_context(inside(one, sys.executable, "-m", "tba.cli", "train", *chosen))
        has_begun(run, folder)
        for _ in range(15):
            with inside(other, *NODE, *JOINED, f"--num-cpus={each}"):
                time.sleep(20)
            time.sleep(20)
            used.append(memory(run))
        run.terminate()
        assert run.wait(120) == 0
    print(f"{2 * each} searchers: MB of the train loop", [round(size / 1e6) for size in used])
    assert max(used[3:]) < 1.1 * used[2]
    assert steps(folder) == [*range(1, len(steps(folder)) + 1)]
    saved = newest(folder / CHECKPOINTS)
    buffer = ReplayBuffer()
    buffer.load(saved)
    counts = json.loads((saved / "state.json").read_text())["stats"]["counts"]
    assert conserved(buffer) and counts["samples_generated"] == buffer.counts["added"]

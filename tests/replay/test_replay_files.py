"""The buffer on disk is loaded as it was saved."""

import runpy
from pathlib import Path

import numpy as np
from build import first_tokens, group, random_groups, trajectory

from tba.replay.buffer import ReplayBuffer

ROOT = Path(__file__).parents[2]


def content(buffer: ReplayBuffer) -> list[tuple]:
    columns = buffer.columns()
    numbers = (columns.arrived, columns.count, columns.arrived_count)
    listed = []
    for prompt, g in zip(columns.prompts, buffer.groups(), strict=True):
        rows = columns.rows(prompt)
        some = [(t.tokens.tolist(), t.reward, t.version, t.switches) for t in g.trajectories]
        listed.append((g.prompt, g.reference, some, *(column[rows].tolist() for column in numbers)))
    return listed


def loaded(folder: Path) -> ReplayBuffer:
    buffer = ReplayBuffer(per_prompt=4, capacity=15)
    buffer.load(folder)
    return buffer


def test_a_save_holds_the_state_of_its_moment(tmp_path):
    """What is added before the files are written is not in them."""
    rng = np.random.default_rng(2)
    buffer = ReplayBuffer(per_prompt=4, capacity=15)
    buffer.add(random_groups(rng, 9), 0)
    before, counts = content(buffer), buffer.counts.copy()
    write = buffer.save(tmp_path)
    buffer.add(random_groups(rng, 9), 1)
    write()
    assert (content(loaded(tmp_path)), loaded(tmp_path).counts) == (before, counts)
    assert content(buffer) != before


def test_a_run_that_is_to_keep_fewer_responses_keeps_the_newest(tmp_path):
    """As soon as the prompt comes again."""
    buffer = ReplayBuffer(per_prompt=10, capacity=100)
    buffer.add([group("a", *map(trajectory, range(1, 6)))], now=0)
    buffer.save(tmp_path)()
    fewer = ReplayBuffer(per_prompt=3, capacity=100)
    fewer.load(tmp_path)
    fewer.add([group("a", trajectory(6))], now=1)
    assert first_tokens(fewer.groups()[0]) == [4, 5, 6]
    assert fewer.counts["evicted_per_prompt"] == 3


def test_the_benchmark_runs(tmp_path, monkeypatch):
    """Its measures are there; they say nothing at this size."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    namespace = runpy.run_path(str(ROOT / "benchmarks" / "replay.py"))
    row = namespace["measure"]("3x40", tmp_path)
    assert namespace["LIMITS"].keys() < row.keys()
    namespace["print_table"]([row])
    assert len(namespace["judged"]([row | {"shape": "10000x100"}])) == len(namespace["LIMITS"])

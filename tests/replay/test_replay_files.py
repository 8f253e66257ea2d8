"""The buffer on disk: loaded as saved, segments linked and rewritten."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from build import first_tokens, group, is_conserved, random_groups, trajectory

from tba.replay import files as replay_files
from tba.replay.buffer import REWRITE_EVERY, ReplayBuffer
from tba.replay.files import SEGMENTS
from tba.strategies.mixture import Mixture
from tba.types import Group

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


def files(folder: Path) -> dict[str, int]:
    """Names of the segments in a checkpoint's folder, with their inodes."""
    return {path.name: path.stat().st_ino for path in (folder / SEGMENTS).iterdir()}


def loaded(folder: Path) -> ReplayBuffer:
    buffer = ReplayBuffer(per_prompt=4, capacity=15)
    buffer.load(folder)
    return buffer


def test_loads_what_it_saved(tmp_path: Path) -> None:
    """And goes on in the same way: evictions, duplicates, draws."""
    rng = np.random.default_rng(2)
    buffer = ReplayBuffer(per_prompt=4, capacity=15)
    for now in range(9):
        buffer.add(random_groups(rng, 2, reference=now // 4), now)
    digests = buffer.save(tmp_path)()
    assert digests.keys() == {f"{SEGMENTS}/{name}" for name in files(tmp_path)}
    other = loaded(tmp_path)
    assert (other.counts, content(other)) == (buffer.counts, content(buffer))
    drawn: list[list[Group]] = []
    for one in (buffer, other):
        rng = np.random.default_rng(3)
        for now in range(9, 15):
            one.add(random_groups(rng, 3, reference=2), now)
        drawn.append(one.sample(4, 3, Mixture(), 14, rng))
    assert (other.counts, content(other)) == (buffer.counts, content(buffer))
    assert [g.prompt for g in drawn[0]] == [g.prompt for g in drawn[1]]
    assert list(map(first_tokens, drawn[0])) == list(map(first_tokens, drawn[1]))


def test_a_save_holds_the_state_of_its_moment(tmp_path: Path) -> None:
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


def test_saves_link_older_segments_and_rewrite_every_tenth_time(tmp_path: Path) -> None:
    buffer = ReplayBuffer(per_prompt=1000)
    older = None
    for save in range(2 * REWRITE_EVERY + 1):
        buffer.add([group("a", trajectory(save, 1), trajectory(save, 2))], save)
        folder = tmp_path / str(save)
        buffer.save(folder, older)()
        own, before = files(folder), files(older) if older else {}
        if save % REWRITE_EVERY == 0:
            assert len(own) == 1  # small segments are merged
            assert not set(own.values()) & set(before.values())
        else:
            assert len(own) == len(before) + 1
            assert before.items() <= own.items()
        assert content(loaded(folder)) == content(buffer)
        older = folder


def test_a_resumed_buffer_links_what_it_loaded(tmp_path: Path) -> None:
    buffer = ReplayBuffer()
    buffer.add([group("a", trajectory(1))], 0)
    buffer.save(tmp_path / "a")()
    resumed = loaded(tmp_path / "a")
    resumed.save(tmp_path / "b", tmp_path / "a")()
    assert files(tmp_path / "b") == files(tmp_path / "a")


def test_segments_that_cannot_be_linked_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError("no hard links here")

    monkeypatch.setattr(replay_files.os, "link", refuse)
    buffer = ReplayBuffer()
    buffer.add([group("a", trajectory(1))], 0)
    buffer.save(tmp_path / "a")()
    buffer.save(tmp_path / "b", tmp_path / "a")()
    assert files(tmp_path / "b").keys() == files(tmp_path / "a").keys()
    assert content(loaded(tmp_path / "b")) == content(buffer)


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_a_damaged_segment_leaves_an_empty_buffer(damage: str, tmp_path: Path) -> None:
    buffer = ReplayBuffer()
    buffer.add([group("a", trajectory(1), trajectory(2)), group("b", trajectory(3))], 0)
    buffer.save(tmp_path / "a")()
    (name,) = files(tmp_path / "a")
    buffer.add([group("b", trajectory(3), trajectory(4))], 1)
    buffer.save(tmp_path / "b", tmp_path / "a")()
    path = tmp_path / "b" / SEGMENTS / name
    written = path.read_bytes()
    if damage == "flipped":
        path.write_bytes(written[:-1] + bytes([written[-1] ^ 1]))
    elif damage == "cut":
        path.write_bytes(written[:-1])
    else:
        path.unlink()
    rest = loaded(tmp_path / "b")
    assert rest.groups() == [] and rest.counts["dropped"] == 4
    assert is_conserved(rest)
    rest.save(tmp_path / "c", tmp_path / "b")()  # the next checkpoint is sound
    assert content(loaded(tmp_path / "c")) == content(rest)


def test_a_run_that_is_to_keep_fewer_responses_keeps_the_newest(tmp_path: Path) -> None:
    """As soon as the prompt comes again."""
    buffer = ReplayBuffer(per_prompt=10, capacity=100)
    buffer.add([group("a", *map(trajectory, range(1, 6)))], now=0)
    buffer.save(tmp_path)()
    fewer = ReplayBuffer(per_prompt=3, capacity=100)
    fewer.load(tmp_path)
    fewer.add([group("a", trajectory(6))], now=1)
    assert first_tokens(fewer.groups()[0]) == [4, 5, 6]
    assert fewer.counts["evicted_per_prompt"] == 3


def test_an_empty_buffer_can_be_saved(tmp_path: Path) -> None:
    ReplayBuffer().save(tmp_path)()
    empty = loaded(tmp_path)
    assert len(empty) == 0
    empty.add([group("a", trajectory(1))], 0)
    assert len(empty) == 1


def test_the_benchmark_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its measures are there; they say nothing at this size."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    namespace = runpy.run_path(str(ROOT / "benchmarks" / "replay.py"))
    row = namespace["measure"]("3x40", tmp_path)
    assert namespace["LIMITS"].keys() < row.keys()
    namespace["print_table"]([row])
    assert len(namespace["judged"]([row | {"shape": "10000x100"}])) == len(namespace["LIMITS"])

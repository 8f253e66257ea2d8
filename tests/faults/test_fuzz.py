"""Random configs, and random histories of the buffer and of the prompt stream."""

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from build import PROMPTS, answered, conserved, group, ids, stream_of, trajectory
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from suite import RECORDS, cases

from tba.config.hints import inner_table
from tba.config.plugins import names, resolved, with_defaults
from tba.config.schema import DEFAULT, Config, load
from tba.config.tables import PLUGGED
from tba.replay.buffer import ReplayBuffer
from tba.selections.cyclic import Cyclic
from tba.selections.difficulty import Difficulty
from tba.selections.uniform import Uniform
from tba.strategies.mixture import Mixture
from tba.types import Trajectory

QUIET = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
EXAMPLES = 200 if RECORDS is None else 500
HISTORIES = 15 if RECORDS is None else 40
"""Fewer in `make test`."""


def keys() -> list[str]:
    """Every key of the config, in tables in tables as well."""
    every: list[str] = []

    def walk(prefix: str, model: type) -> None:
        for name, holder in model.model_fields.items():  # type: ignore[attr-defined]
            every.append(f"{prefix}{holder.alias or name}")
            inner = inner_table(holder)
            if inner is not None:
                walk(f"{every[-1]}.", inner)

    walk("", Config)
    return every


VALUES = st.one_of(
    st.integers(),
    st.floats(),
    st.booleans(),
    st.text(max_size=20),
    st.sampled_from(["null", "auto", "nan", "-inf", "1e400", "{}", "[]", "[[", '"', "'''", "="]),
    st.sampled_from([name for kind in PLUGGED.values() for name in names(kind)]),
    st.sampled_from([0, 1, 2, -1, 10**30, 1e-300, 0.5, 2**31, 2**63]),
    st.recursive(
        st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
        ),
        max_leaves=8,
    ),
)
KEYS = st.sampled_from(keys()) | st.text(max_size=30)
PLAIN = st.dictionaries(
    st.sampled_from(sorted(Config.model_fields)) | st.text(max_size=8),
    st.dictionaries(
        st.sampled_from(sorted({k.rpartition(".")[2] for k in keys()})), VALUES, max_size=4
    )
    | VALUES,
    max_size=5,
)


def is_refused_in_words(build: Any) -> bool:
    """A config is accepted, or refused with a message and no other error."""
    try:
        config = build()
        resolved(with_defaults(config))
        assert Config(**config.nested()) == config or "nan" in repr(config)
    except ValueError as error:
        assert str(error).strip()
        return True
    return False


@pytest.mark.timeout(900)
@cases(24, full=20, quick=1)
def test_any_config_is_accepted_or_refused_in_words(case, tmp_path):
    """Overrides, tables, and TOML files with some bytes changed; never another error."""
    tried: Counter[bool] = Counter()
    default, file = DEFAULT.read_bytes(), tmp_path / "run.toml"

    @settings(QUIET, max_examples=EXAMPLES // 2)
    @seed(case.index)
    @given(st.lists(st.tuples(KEYS, VALUES), max_size=4))
    def overrides(given: list[tuple[str, Any]]) -> None:
        texts = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in given]
        tried[is_refused_in_words(lambda: load(None, texts))] += 1

    @settings(QUIET, max_examples=EXAMPLES // 4)
    @seed(case.index)
    @given(PLAIN)
    def tables(given: dict[str, Any]) -> None:
        tried[is_refused_in_words(lambda: Config(**given))] += 1

    @settings(QUIET, max_examples=EXAMPLES // 4)
    @seed(case.index)
    @given(
        st.lists(
            st.tuples(st.integers(0, len(default)), st.integers(0, 3), st.binary(max_size=4)),
            max_size=5,
        )
    )
    def files(given: list[tuple[int, int, bytes]]) -> None:
        content = default
        for place, dropped, added in given:
            content = content[:place] + added + content[place + dropped :]
        file.write_bytes(content)
        tried[is_refused_in_words(lambda: load(file))] += 1

    for fuzz in (overrides, tables, files):
        fuzz()
    assert tried[True] and tried[False]
    case.tried = case.survived = tried.total()


# The buffer


class BufferHistory(RuleBasedStateMachine):
    """A buffer, and the plain dict of what it must hold: by prompt and tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer, self.now, self.saves = ReplayBuffer(per_prompt=5, capacity=12), 0, 0
        self.model: dict[tuple[str, bytes], tuple[Trajectory, int]] = {}
        self.reference: dict[str, int] = {}
        self.added = 0

    @rule(
        name=st.sampled_from("abcd"),
        tokens=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=2), max_size=7),
        reference=st.sampled_from((0, 0, 0, 0, 1, 2)),
    )
    def add(self, name: str, tokens: list[list[int]], reference: int) -> None:
        self.now += 1
        if name not in {g.prompt.id for g in self.buffer.groups()}:
            self.reference.pop(name, None)  # what is not held has no reference
        some = [trajectory(*t, version=self.now, reward=float(i)) for i, t in enumerate(tokens)]
        self.buffer.add([group(name, *some, reference=reference)], self.now)
        self.added += len(some)
        if some and reference >= self.reference.get(name, 0):
            if reference > self.reference.get(name, 0):
                self.drop([own for own in self.model if own[0] == name])
            self.reference[name] = reference
            for key, number in Counter(t.tokens.tobytes() for t in some).items():
                last = next(t for t in reversed(some) if t.tokens.tobytes() == key)
                _, before = self.model.pop((name, key), (None, 0))
                self.model[name, key] = last, before + number
            own = [each for each in self.model if each[0] == name]
            self.drop(own[: max(0, len(own) - 5)])
        self.drop(list(self.model)[: max(0, len(self.model) - 12)])

    def drop(self, keys: list[tuple[str, bytes]]) -> None:
        for key in keys:
            del self.model[key]

    @precondition(lambda self: len(self.buffer) > 0)
    @rule(groups=st.integers(1, 3), size=st.integers(2, 4), number=st.integers(0, 99))
    def sample(self, groups: int, size: int, number: int) -> None:
        rng = np.random.default_rng(number)
        drawn = self.buffer.sample(groups, size, Mixture(), self.now, rng)
        assert [len(g.trajectories) for g in drawn] == [size] * groups
        for g in drawn:
            for t in g.trajectories:
                assert self.model[g.prompt.id, t.tokens.tobytes()][0].version == t.version

    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            self.buffer.save(folder)()
            self.buffer = ReplayBuffer(per_prompt=5, capacity=12)
            self.buffer.load(folder)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        expected: dict[str, list[tuple[bytes, int, float, int]]] = {}
        for (name, tokens), (t, number) in self.model.items():
            expected.setdefault(name, []).append((tokens, t.version, t.reward, number))
        columns, held = self.buffer.columns(), {}
        for prompt, g in zip(columns.prompts, self.buffer.groups(), strict=True):
            counts = columns.count[columns.rows(prompt)].tolist()
            own = zip(g.trajectories, counts, strict=True)
            held[g.prompt.id] = [(t.tokens.tobytes(), t.version, t.reward, n) for t, n in own]
        assert {name: own for name, own in held.items() if own} == expected
        assert conserved(self.buffer) and self.buffer.counts["added"] == self.added


class StreamHistory(RuleBasedStateMachine):
    """A prompt stream, and a plain count of what was taken, came back and was lost."""

    selection: type = Cyclic

    def __init__(self) -> None:
        super().__init__()
        self.stream = stream_of(self.selection, seed=5)
        self.out: list[list[Any]] = []
        self.again = 0
        self.chosen = 0

    @rule(size=st.integers(1, 5))
    def take(self, size: int) -> None:
        taken = self.stream.take(size)
        assert len(taken) == size
        self.chosen += size - min(size, self.again)
        self.again -= min(size, self.again)
        self.out.append(taken)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        """Of any search in flight, in any order; some prompts have no group."""
        search = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        groups = [answered(p, right=1, answers=2) for p in search if data.draw(st.booleans())]
        self.stream.done(search, groups)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        search = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        self.stream.put_back(search)
        self.again += len(search)

    @rule()
    def kill_and_resume(self) -> None:
        """What was in flight is handed out again."""
        resumed = stream_of(self.selection, seed=5)
        resumed.seek(json.loads(json.dumps(self.stream.cursor())))
        self.again += sum(map(len, self.out))
        self.stream, self.out = resumed, []

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        outstanding = self.stream.cursor()["outstanding"]
        assert len(outstanding) == self.again + sum(map(len, self.out))
        assert self.stream.cursor()["state"]["chosen"] == self.chosen
        in_flight = Counter(p.id for search in self.out for p in search)
        assert not in_flight - Counter(outstanding)
        assert set(outstanding) <= set(ids(PROMPTS))


@pytest.mark.timeout(900)
@cases(25, full=10, quick=1)
def test_any_history_of_the_buffer_is_that_of_a_plain_model(case):
    """Arrivals, duplicates, evictions, new references, draws, saves and loads."""
    history = seed(case.index)(type("History", (BufferHistory,), {}))
    run_state_machine_as_test(history, settings=settings(QUIET, max_examples=HISTORIES))
    case.tried = case.survived = HISTORIES


@pytest.mark.timeout(900)
@pytest.mark.parametrize("selection", [Cyclic, Uniform, Difficulty])
@cases(25, full=10, quick=1)
def test_any_history_of_the_prompt_stream_loses_and_doubles_nothing(case, selection):
    """Searches that end in any order, are lost, or end with their process."""
    history = seed(case.index)(type("History", (StreamHistory,), {"selection": selection}))
    run_state_machine_as_test(history, settings=settings(QUIET, max_examples=HISTORIES))
    case.tried = case.survived = HISTORIES

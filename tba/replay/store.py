"""Storage of distinct trajectories, in memory and on disk, without rules on what to keep.

A trajectory is a row of numbers. Its tokens and log-probs are the row's `content`: one immutable
string of bytes.
"""

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from safetensors.numpy import load_file, save_file

from tba.config.schema import read_json
from tba.prompt import Prompt
from tba.types import Group, Trajectory, switches_of

FOLDER = "replay"
STATE = "state.json"
COLUMNS = "columns.safetensors"
CONTENTS = "contents.bin"
PROMPTS = "prompts.jsonl"

EMPTY = -1  # stamp of a row that is not in use
CONTENT: dict[str, DTypeLike] = {
    "tokens": np.int32,
    "behavior_logp": np.float32,
    "ref_logp": np.float32,
    "value": np.float32,
    "versions": np.int32,
    "marks": np.uint8,
}
"""Arrays of a trajectory whose concatenation is its content."""
OPTIONAL = {"value": "valued", "versions": "switched", "marks": "masked"}
"""Arrays that only some trajectories have, and the columns that mark these trajectories."""
SHOWN = ("prompt", "reward", "version", "arrived", "count", "arrived_count", "length")
"""Columns that strategies see."""
SAVED = (*SHOWN, "finished", *OPTIONAL.values())
KEY = np.dtype("V12")
ROW: dict[str, DTypeLike] = dict.fromkeys(SHOWN, np.int32)
ROW |= dict.fromkeys(("finished", *OPTIONAL.values()), bool)
ROW |= {"reward": np.float64, "key": KEY, "stamp": np.int64, "content": object, "items": object}
"""Columns of the distinct responses."""
PROMPT = {"latest": np.int32, "held": np.int32, "stamp": np.int64}
"""Columns of the prompts: step of the latest arrival, number of responses, and stamp."""


class RowTable:
    """Numbers in named columns. A row's `stamp` orders latest arrivals; EMPTY marks a free row."""

    def __init__(self, kinds: Mapping[str, DTypeLike]) -> None:
        self.columns = {name: np.zeros(0, kind) for name, kind in kinds.items()}
        self._free: list[int] = []

    def __getitem__(self, column: str) -> np.ndarray:
        return self.columns[column]

    def take(self, count: int) -> np.ndarray:
        """Return `count` free rows. A row is in use once it has a stamp."""
        size = len(self["stamp"])
        missing = count - len(self._free)
        if missing > 0:
            more = max(missing, size // 4, 64)
            for name, column in self.columns.items():
                self.columns[name] = np.concatenate([column, np.zeros(more, column.dtype)])
            self["stamp"][size:] = EMPTY
            self._free = [*range(size + more - 1, size - 1, -1), *self._free]
        start = len(self._free) - count
        taken = self._free[start:]
        del self._free[start:]
        return np.array(taken[::-1], np.int32)

    def by_stamp(self, among: np.ndarray | bool = True) -> np.ndarray:
        """Return the rows in use, oldest stamp first; with a mask, only rows among them."""
        stamp = self["stamp"]
        rows = np.flatnonzero((stamp != EMPTY) & among)
        return rows[np.argsort(stamp[rows])].astype(np.int32)

    def free(self, rows: np.ndarray) -> None:
        self["stamp"][rows] = EMPTY
        self._free += rows.tolist()


@dataclass(frozen=True)
class State:
    """Everything that a buffer saves."""

    columns: Mapping[str, np.ndarray]
    """Columns of rows in order of arrival; `prompt` is a position in the list of prompts."""
    contents: Sequence[bytes]
    """Content of each row."""
    prompts: Sequence[Group]  # groups without trajectories
    counts: Mapping[str, int]
    earlier: Mapping[str, list[int]]  # arrivals before the latest, by position in the columns

    def write(self, folder: Path) -> None:
        """Write the state into a checkpoint's folder."""
        path = folder / FOLDER
        path.mkdir()
        save_file(dict(self.columns), path / COLUMNS)
        with (path / CONTENTS).open("wb") as file:
            file.writelines(self.contents)
        save_groups(self.prompts, path / PROMPTS)
        plain = {"counts": self.counts, "earlier": self.earlier}
        (path / STATE).write_text(json.dumps(plain), "utf-8")

    @classmethod
    def read(cls, folder: Path) -> "State":
        """Read a state that `write` wrote."""
        path = folder / FOLDER
        plain = read_json(path / STATE)
        columns = load_file(path / COLUMNS)
        sizes = np.zeros_like(columns["length"])
        for name, kind in CONTENT.items():
            held = columns[OPTIONAL[name]] if name in OPTIONAL else True
            sizes += columns["length"] * held * np.dtype(kind).itemsize
        with (path / CONTENTS).open("rb") as file:
            contents = [file.read(size) for size in sizes.tolist()]
        return cls(
            columns=columns,
            contents=contents,
            prompts=load_groups(path / PROMPTS),
            counts=plain["counts"],
            earlier=plain["earlier"],
        )


class Store:
    """Distinct trajectories by row, the prompts they belong to, and the order of arrival."""

    def __init__(self) -> None:
        self.rows = RowTable(ROW)
        self.prompts = RowTable(PROMPT)
        self.heads: dict[int, Group] = {}  # the prompts, as groups without trajectories
        self.earlier: dict[int, array[int]] = {}
        """By row: alternating steps and sample counts of its response's earlier arrivals."""
        self._numbers: dict[str, int] = {}
        self._index: dict[bytes, int] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._index)

    def rows_of(self, prompt: int) -> np.ndarray:
        """Return the rows of a prompt, oldest arrival first."""
        return self.rows.by_stamp(self.rows["prompt"] == prompt)

    def rows_by_prompt(self) -> list[np.ndarray]:
        """Return the rows of each prompt, ordered by the prompts' latest arrival."""
        rows = self.rows.by_stamp()
        prompts = self.rows["prompt"][rows]
        order = np.argsort(self.prompts["stamp"][prompts], kind="stable")
        first = np.flatnonzero(np.diff(prompts[order])) + 1
        return [part for part in np.split(rows[order], first) if len(part)]

    def evict(self, count: int, prompt: int | None = None) -> int:
        """Remove the `count` oldest rows, of one prompt or of all; return their number."""
        stamp = self.rows["stamp"]
        among = True if prompt is None else self.rows["prompt"] == prompt
        rows = np.flatnonzero((stamp != EMPTY) & among)
        return self.remove(rows[np.argpartition(stamp[rows], count - 1)[:count]])

    def number(self, group: Group) -> int:
        """Return the number of the group's prompt; assign one to a new prompt."""
        number = self._numbers.get(group.prompt.id)
        if number is None:
            number = self.prompts.take(1).item()
            self.prompts["stamp"][number] = self._arrivals
            tokens = np.array(group.prompt_tokens, np.int32)
            self.heads[number] = replace(group, prompt_tokens=tokens, trajectories=())
            self._numbers[group.prompt.id] = number
        return number

    def arrived_since(self, rows: np.ndarray, since: int) -> np.ndarray:
        """Return how many samples of each row's response arrived at this step or later."""
        samples = np.where(self.rows["arrived"][rows] >= since, self.rows["arrived_count"][rows], 0)
        for place, row in enumerate(rows.tolist()):
            if row in self.earlier:
                steps, counts = np.array(self.earlier[row]).reshape(-1, 2).T
                samples[place] += counts[np.searchsorted(steps, since) :].sum()
        return samples

    def put(
        self, prompt: int, new: Mapping[bytes, Trajectory], samples: np.ndarray, now: int
    ) -> int:
        """Write trajectories and their sample counts over earlier copies, or into free rows.

        Return the number of earlier copies, whose arrivals are kept.
        """
        table = self.rows
        rows = np.array([self._index.get(key, EMPTY) for key in new], np.int32)
        is_known = rows != EMPTY
        known = rows[is_known]
        added = table.take(len(new) - len(known))
        rows[~is_known] = added
        table["count"][added] = 0
        table["arrived_count"][added] = 0
        for row in known[table["arrived"][known] < now].tolist():
            latest = (table[name].item(row) for name in ("arrived", "arrived_count"))
            self.earlier.setdefault(row, array("i")).extend(latest)
            table["arrived_count"][row] = 0
        table["arrived_count"][rows] += samples
        table["count"][rows] += samples
        table["arrived"][rows] = now
        for row, trajectory in zip(rows.tolist(), new.values(), strict=True):
            held = {}  # from which `trajectories` restores the arrays
            for name, kind in CONTENT.items():
                given = getattr(trajectory, name)
                if given is not None and (name != "versions" or trajectory.switches):
                    held[name] = np.asarray(given, kind).tobytes()
            table["content"][row] = b"".join(held.values())
            table["length"][row] = len(trajectory.tokens)
            for name in ("reward", "version", "finished", "items"):
                table[name][row] = getattr(trajectory, name)
            for name, column in OPTIONAL.items():
                table[column][row] = name in held
        self.prompts["held"][prompt] -= len(known)
        self._arrive(prompt, rows, list(new))
        return len(known)

    def remove(self, rows: np.ndarray) -> int:
        """Free rows and return their number."""
        table = self.rows
        for key in table["key"][rows].tolist():
            del self._index[key]
        for row in rows.tolist():
            self.earlier.pop(row, None)
        np.subtract.at(self.prompts["held"], table["prompt"][rows], 1)
        table["content"][rows] = table["items"][rows] = None
        table.free(rows)
        return len(rows)

    def release_prompts(self) -> None:
        """Free the numbers of prompts without rows."""
        prompts = self.prompts
        empty = np.flatnonzero((prompts["held"] == 0) & (prompts["stamp"] != EMPTY))
        for number in empty.tolist():
            del self._numbers[self.heads.pop(number).prompt.id]
        self.prompts.free(empty)

    def groups(self, drawn: Sequence[np.ndarray]) -> list[Group]:
        """Return a group for each array of rows; repeated rows give the same object."""
        rows = np.unique(np.concatenate([np.zeros(0, np.int32), *drawn]))
        by_row = dict(zip(rows.tolist(), self.trajectories(rows), strict=True))
        groups = []
        for own in drawn:
            head = self.heads[self.rows["prompt"].item(own[0])]
            some = tuple([by_row[row] for row in own.tolist()])
            groups.append(replace(head, trajectories=some))
        return groups

    def trajectories(self, rows: np.ndarray) -> Iterator[Trajectory]:
        """Yield the trajectories of these rows; their arrays are read-only."""
        columns = {name: self.rows[name][rows].tolist() for name in (*SAVED, "content", "items")}
        for values in zip(*columns.values(), strict=True):
            row: dict[str, Any] = dict(zip(columns, values, strict=True))
            held: dict[str, np.ndarray] = {}
            start = 0
            for name, kind in CONTENT.items():
                if name not in OPTIONAL or row[OPTIONAL[name]]:
                    held[name] = np.frombuffer(row["content"], kind, row["length"], start)
                    start += held[name].nbytes
            yield Trajectory(
                tokens=held["tokens"],
                behavior_logp=held["behavior_logp"],
                ref_logp=held["ref_logp"],
                reward=row["reward"],
                version=row["version"],
                finished=row["finished"],
                value=held.get("value"),
                switches=switches_of(held["versions"]) if row["switched"] else (),
                marks=held.get("marks"),
                count=row["count"],
                items=row["items"] or {},
            )

    def state(self, counts: Mapping[str, int]) -> State:
        """Return a copy of the state that shares only immutable objects."""
        prompts = self.prompts.by_stamp()
        rows = self.rows.by_stamp()
        columns = {name: self.rows[name][rows] for name in SAVED}
        positions = np.zeros(prompts.max(initial=0) + 1, np.int32)
        positions[prompts] = np.arange(len(prompts))
        columns["prompt"] = positions[columns["prompt"]]
        heads = [self.heads[prompt] for prompt in prompts.tolist()]
        lists = {row: arrivals.tolist() for row, arrivals in self.earlier.items()}
        earlier = {str(i): lists[row] for i, row in enumerate(rows.tolist()) if row in lists}
        return State(
            columns=columns,
            prompts=heads,
            contents=self.rows["content"][rows].tolist(),
            counts=dict(counts),
            earlier=earlier,
        )

    def restore(self, state: State) -> None:
        """Fill an empty store."""
        table = self.rows
        rows = table.take(len(state.contents))
        for name, column in state.columns.items():
            table[name][rows] = column
        table["content"][rows] = np.array(state.contents, object)
        for place, arrivals in state.earlier.items():
            self.earlier[rows.item(int(place))] = array("i", arrivals)
        prompts = [self.number(head) for head in state.prompts]
        for part in np.split(rows, np.flatnonzero(np.diff(table["prompt"][rows])) + 1):
            if len(part):
                prompt = prompts[table["prompt"].item(part[0])]
                keys = [key_of(t, prompt) for t in self.trajectories(part)]
                self._arrive(prompt, part, keys)
        self.release_prompts()

    def _arrive(self, prompt: int, rows: np.ndarray, keys: Sequence[bytes]) -> None:
        """Make these written rows the newest ones of a prompt."""
        table = self.rows
        prompts = self.prompts
        self._index.update(zip(keys, rows.tolist(), strict=True))
        table["key"][rows] = np.frombuffer(b"".join(keys), KEY)
        table["prompt"][rows] = prompt
        table["stamp"][rows] = np.arange(self._arrivals, self._arrivals + len(rows))
        self._arrivals += len(rows)
        prompts["held"][prompt] += len(rows)
        prompts["latest"][prompt] = table["arrived"][rows[-1]]
        prompts["stamp"][prompt] = self._arrivals


def key_of(response: Trajectory, prompt: int) -> bytes:
    """Return a 96-bit digest; the collision probability of a million responses is below 1e-16."""
    content = response.tokens.tobytes()
    if response.marks is not None:
        content += response.marks.tobytes()
    return hashlib.blake2b(
        content, digest_size=KEY.itemsize, salt=prompt.to_bytes(8, "little")
    ).digest()


def save_groups(groups: Sequence[Group], file: Path) -> None:
    """Write groups as JSON, one per line; numbers are read back exactly."""
    with file.open("w", encoding="utf-8") as lines:
        for group in groups:
            lines.write(json.dumps(asdict(group), default=np.ndarray.tolist) + "\n")


def load_groups(file: Path) -> tuple[Group, ...]:
    """Return groups that `save_groups` wrote."""
    groups = []
    for line in file.read_text("utf-8").splitlines():
        plain = json.loads(line)
        for own in plain["trajectories"]:
            for name, kind in CONTENT.items():
                if own.get(name) is not None:
                    own[name] = np.array(own[name], kind)
            own["switches"] = tuple(map(tuple, own["switches"]))
        group = Group(
            prompt=Prompt(**plain["prompt"]),
            prompt_tokens=np.array(plain["prompt_tokens"], np.int32),
            trajectories=tuple(Trajectory(**own) for own in plain["trajectories"]),
            reference=plain["reference"],
        )
        groups.append(group)
    return tuple(groups)

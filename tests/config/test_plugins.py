"""Names in a config lead to classes; options are checked; errors say what to type instead."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tba.config import plugins
from tba.config.plugins import KINDS, Schedule, find, names, options_of, resolve, resolved
from tba.config.schema import Config
from tba.objectives.tb import TrajectoryBalance

SHIPPED = [(kind, name) for kind in KINDS for name in names(kind)]

PLUGIN = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Mine:
    "A plug-in of someone else's."
    sizes: tuple[int, ...]
    beta: float = 0.5
    head = None
    def __call__(self): ...

@dataclass
class Nothing: ...

class NotOne: ...
"""

WRONG: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "unknown name": ("objectives", "rlo", {}, "no objectives called 'rlo'; did you mean 'rloo'?"),
    "no module": (
        "objectives", "tba_mine.Mine", {}, "'tba_mine.Mine': No module named 'tba_mine'; write",
    ),
    "no class": (
        "objectives", "tba_other.Mien", {}, "'tba_other.Mien': tba_other has no such dataclass",
    ),
    "not a plug-in": (
        "objectives", "tba_other.NotOne", {},
        "'tba_other.NotOne': tba_other has no such dataclass",
    ),
    "not a class": (
        "objectives", "tba_other.dataclass", {}, "'tba_other.dataclass': tba_other has no such",
    ),
    "no objective": (
        "objectives", "tba_other.Nothing", {},
        "'tba_other.Nothing' is not one of the objectives: it has no __call__",
    ),
    "no strategy": ("strategies", "tba_other.Mine", {}, "not one of the strategies: it has no"),
    "no selection": ("selections", "tba_other.Mine", {}, "not one of the selections: it has no"),
    "no engine": ("engines", "tba_other.Mine", {}, "not one of the engines: it has no generate"),
    "no package": ("objectives", ".Mine", {}, "'.Mine': Empty module name; write `pa"),
    "unknown option": (
        "objectives", "ppo", {"bta": 0.1},
        "objective.bta: 'ppo' has no such option; did you mean 'beta'? `tba list ppo` lists all",
    ),
    "an option of an earlier version": (
        "objectives", "tb", {"tapered": True},
        "objective.tapered: 'tb' has no such option: it was removed; true is"
        " objective.taper=residual, false is objective.taper=none",
    ),
    "an option by its name in TRL": (
        "objectives", "grpo", {"epsilon_high": 0.3},
        "objective.epsilon_high: 'grpo' has no such option: epsilon_high is objective.clip_high"
        " here",
    ),
    "an option that only another plug-in has": (
        "objectives", "raft", {"epsilon_high": 0.3},
        "objective.epsilon_high: 'raft' has no such option; known: ",
    ),
    "an option that other objectives have": (
        "objectives", "cispo", {"beta": 0.1},
        "objective.beta: 'cispo' has no such option; known: cap; or remove it",
    ),
    "an option that a plug-in with many lacks": (
        "objectives", "ppo", {"threshold": 0.1},
        "objective.threshold: 'ppo' has no such option; `tba list ppo` lists all options: beta,"
        " clip, discount, gae_lambda, value_coefficient, head_learning_rate, whiten; or remove it",
    ),
    "an option of another table": (
        "objectives", "tb", {"temperature": 0.3},
        "objective.temperature: 'tb' has no such option: temperature is sampling.temperature here",
    ),
    "null for what is needed": (
        "objectives", "tba_other.Mine", {"sizes": None}, "objective.sizes = None: Input should",
    ),
    "many plug-ins": (
        "objectives", "dr_grop", {},
        "no objectives called 'dr_grop'; did you mean 'dr_grpo'? `tba list` lists all;"
        " or write `package.module.Class`",
    ),
    "missing option": (
        "objectives", "tba_other.Mine", {}, "objective.sizes is missing: 'tba_other.Mine' needs it",
    ),
    "wrong type": (
        "objectives", "tb", {"beta": "high"}, "objective.beta = 'high': Input should be a",
    ),
    "one of several types": (
        "tasks", "gsm8k", {"chat": "no"},
        "objective.chat = 'no': Input should be a valid boolean or 'on' or 'off'",
    ),
    "wrong type within": (
        "objectives", "tba_other.Mine", {"sizes": [1, "two"]},
        "objective.sizes.1 = 'two': Input should be a valid integer",
    ),
    "boolean for a number": (
        "objectives", "tb", {"beta": True}, "objective.beta = True: Input should be a valid number",
    ),
    "boolean for a number or none": (
        "objectives", "tb", {"importance_cap": True},
        "objective.importance_cap = True: Input should be a valid number",
    ),
    "text for a number": (
        "objectives", "tb", {"beta": "0.1"}, "objective.beta = '0.1': Input should be a",
    ),
    "wrong type within one of several types": (
        "tasks", "custom", {"reward": ["mine:f", 3]},
        "objective.reward.1 = 3: Input should be a valid string or an object",
    ),
    "boolean in a schedule": (
        "objectives", "tb", {"beta": {"start": 1.0, "end": False, "steps": 3}},
        "objective.beta.end = False: Input should be a valid number",
    ),
    "schedule short of a key": (
        "objectives", "tb", {"beta": {"start": 1.0, "end": 0.1}}, "objective.beta.steps is missing",
    ),
    "schedule with an unknown key": (
        "objectives", "tb", {"beta": {"start": 1.0, "end": 0.1, "steps": 3, "cut_stp": 3}},
        "unknown key 'objective.beta.cut_stp'",
    ),
    "schedule of no steps": (
        "objectives", "tb", {"beta": {"start": 1.0, "end": 0.1, "steps": 0}},
        "objective.beta.steps = 0: Input should be greater than or equal to 1",
    ),
    "schedule to a number that the option refuses": (
        "objectives", "tb", {"beta": {"start": 1.0, "end": 0.0, "steps": 3}},
        "objective.beta.end = 0.0: Input should be greater than 0",
    ),
    "schedule with a cut to such a number": (
        "objectives", "tb",
        {"beta": {"start": 1.0, "end": 0.1, "steps": 3, "cut_step": 2, "cut_to": -1.0}},
        "objective.beta.cut_to = -1.0: Input should be greater than 0",
    ),
    "schedule elsewhere": (
        "strategies", "mixture", {"recent": {"start": 1.0, "end": 0.0, "steps": 9}},
        "objective.recent = ",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's on the path."""
    (tmp_path / "tba_other.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_told_with_what_to_write(case):
    kind, use, options, told = WRONG[case]
    with pytest.raises(ValueError) as error:
        resolve(kind, "objective", use, options)
    assert told in str(error.value)
    assert "Value error" not in str(error.value)


@pytest.mark.parametrize(
    ("table", "use", "option"),
    [
        ("task", "arithmetic", "train_size"),
        ("engine", "transformers", "batch_size"),
        ("objective", "tb", "beta"),
        ("strategy", "mixture", "recent"),
        ("selection", "difficulty", "target"),
    ],
)
def test_a_value_that_no_file_can_hold_is_told_with_its_key(table, use, option):
    config = Config(**{table: {"use": use, option: np.int64(8)}})
    told = rf"^{table}.{option} = .*int64.*; write a number, a string, a list or a table$"
    with pytest.raises(ValueError, match=told):
        resolved(config)


def test_a_dotted_path_leads_to_any_class():
    for name in ("tb", "tba.objectives.tb.TrajectoryBalance"):
        assert find("objectives", name) is TrajectoryBalance
    mine = resolve("tasks", "task", "tba_other.Mine", {"sizes": [3, 4]}).build()
    assert (mine.sizes, mine.beta) == ((3, 4), 0.5)


def test_an_objective_follows_its_schedule():
    """The paper's for TL;DR."""
    beta = {"start": 1.0, "end": 0.05, "steps": 128, "cut_step": 31, "cut_to": 0.05}
    plugin = resolve("objectives", "objective", "tb", {"beta": beta})
    betas = [plugin.at(step).beta for step in (0, 16, 30, 31, 256)]
    assert betas == pytest.approx([1.0, 1 - 0.95 / 8, 1 - 0.95 * 30 / 128, 0.05, 0.05])


def test_numbers_may_be_integers_and_infinite():
    threshold = resolve("objectives", "objective", "raft", {"threshold": 1}).options["threshold"]
    assert (threshold, type(threshold)) == (1.0, float)
    assert resolve("objectives", "objective", "tb", {"beta": math.inf}).at(0).beta == math.inf


def test_a_cut_has_a_step_and_a_value():
    with pytest.raises(ValueError, match="both cut_step and cut_to"):
        Schedule(1.0, 0.0, 9, cut_step=3)


@pytest.mark.parametrize(("kind", "name"), SHIPPED)
def test_what_ships_is_documented(kind, name):
    cls = find(kind, name)
    assert plugins.is_plugin(cls)
    # a dataclass without a docstring gets its signature
    assert cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}(")
    json.dumps([o.default for o in options_of(cls).values() if not o.required])

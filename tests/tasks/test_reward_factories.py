"""Reward functions with options: a table names a judge, or a factory of a module or a file."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tba.config.plugins import resolve
from tba.config.schema import load
from tba.prompt import Answer, Prompt
from tba.tasks import Task

REWARDS = '''
from dataclasses import dataclass, field

def at_most(limit, weight=1.0):
    if limit < 1:
        raise ValueError(f"limit = {limit} must be 1 or more")
    return lambda completions, **columns: [weight * (len(c) <= limit) for c in completions]

def length(completions, **columns):
    return [float(len(c)) for c in completions]

def nothing(limit=3):
    return limit

@dataclass(frozen=True)
class Counts:
    """Counts a character."""
    character: str
    factor: float = 1.0
    broken: bool = False
    calls: list = field(default_factory=list, init=False)

    def check(self):
        if self.broken:
            raise ValueError("the counter is broken")
        self.calls.append("check")

    def load(self, device):
        self.calls.append(device)

    async def __call__(self, completions, **columns):
        return [self.factor * c.count(self.character) for c in completions]

class Loads:
    def load(self, device):
        self.device = device

    def __call__(self, completions, **columns):
        return [float("self" in columns and len(self.device)) for c in completions]

class Checks:
    def check(self):
        raise ValueError("the server is missing")

    def __call__(self, completions):
        return [0.0 for c in completions]
'''

ANSWERS = [Answer(text, finished=True) for text in ("a", "banana", "")]


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A task with these rewards, which are in the module `factories` and the file of that name."""
    (tmp_path / "factories.py").write_text(REWARDS)
    rows = [json.dumps({"prompt": f"{i}?", "answer": "a"}) for i in range(4)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def make(reward: Any, **options: Any) -> Any:
        given = {"data": "data.jsonl", "held_out_size": 1, "reward": reward, **options}
        return resolve("tasks", "task", "custom", given).build()

    return make


async def scores(task: Task) -> Any:
    found = task.score(task.prompts()[0], ANSWERS)
    return found if isinstance(found, list) else await found


def run(task: Task) -> Any:
    return asyncio.run(scores(task))


@pytest.mark.parametrize("where", ["factories", "./factories.py"])
def test_a_factory_is_called_with_the_other_keys(task, where):
    assert run(task({"use": f"{where}:at_most", "limit": 3})) == [1.0, 0.0, 1.0]
    assert run(task({"use": f"{where}:at_most", "limit": 1, "weight": -2})) == [-2.0, 0.0, -2.0]
    assert run(task({"use": f"{where}:Counts", "character": "a", "factor": 0.5})) == [0.5, 1.5, 0]


def test_a_list_mixes_names_and_tables(task):
    mixed = ["factories:length", {"use": "factories:at_most", "limit": 2}]
    mixed += [{"use": "factories.Counts", "character": "n"}]
    assert run(task(mixed, reward_weights=[1.0, 10.0, 100.0])) == [11.0, 206.0, 10.0]


def test_a_table_comes_from_a_config_and_its_options_from_the_command_line(task, tmp_path):
    (tmp_path / "run.toml").write_text(
        '[task]\nuse = "custom"\ndata = "data.jsonl"\n'
        'reward = ["factories:length", { use = "factories:at_most", limit = 1 }]\n'
    )
    config = load(tmp_path / "run.toml")
    assert run(task(config.task.options["reward"])) == [2.0, 6.0, 1.0]
    one = load(None, ["task=custom", "task.data=x", "task.reward.use=factories:at_most",
                      "task.reward.limit=7"])  # fmt: skip
    assert run(task(one.task.options["reward"])) == [1.0, 1.0, 1.0]


def test_check_and_load_reach_the_functions_that_have_them(task):
    whole = task(["factories:length", {"use": "factories:Counts", "character": "a"}])
    whole.check()
    whole.load("cuda:1")
    assert whole.functions[1].calls == ["check", "cuda:1"]
    counts = {"use": "factories:Counts", "character": "a", "broken": True}
    broken = task(["factories:length", counts])
    with pytest.raises(ValueError, match=r"^task\.reward\.1: the counter is broken$"):
        broken.check()
    with pytest.raises(ValueError, match="the server is missing"):  # each of the two is optional
        task({"use": "factories:Checks"}).check()
    one = task({"use": "factories:Loads"})
    one.check()
    one.load("cpu")
    assert one.functions[0].device == "cpu"


def test_a_column_called_self_is_not_passed_to_a_method(task):
    one = task({"use": "factories:Loads"})
    one.load("cpu")
    prompt = Prompt("0", "?", {"self": 1})
    assert one.score(prompt, ANSWERS) == [0.0, 0.0, 0.0]


WRONG: dict[str, tuple[Any, str]] = {
    "unknown key": ({"use": "factories:at_most", "limt": 3}, "task.reward.limt: 'factories:at_most'"
        " has no such option; did you mean 'limit'? known: limit, weight"),
    "missing key": (["factories:length", {"use": "factories:at_most"}],
        "task.reward.1.limit is missing: 'factories:at_most' needs it"),
    "wrong type": ({"use": "factories:Counts", "character": 3},
        "task.reward.character = 3: Input should be a valid string"),
    "wrong value": ({"use": "factories:at_most", "limit": 0},
        "task.reward: limit = 0 must be 1 or more"),
    "no use": ([{"limit": 3}], "task.reward.0.use is missing"),
    "no table": (3, "task.reward = 3: Input should be a"),
    "unknown judge": ({"use": "clasifier", "model": "m"}, "no judges called 'clasifier';"
        " did you mean 'classifier'? known: classifier, guard, http"),
    "unknown option of a judge": ({"use": "classifier", "modle": "m"},
        "task.reward.modle: 'classifier' has no such option; did you mean 'model'?"),
    "wrong option of a judge": ({"use": "guard", "model": "m", "value": "logit"},
        "task.reward.value = 'logit': Input should be 'probability' or 'log_probability'"),
    "no factory": ({"use": "factories:at_mots", "limit": 3},
        "task.reward.use = 'factories:at_mots': factories has no function 'at_mots'"),
    "a function instead of a factory": ({"use": "factories:length"},
        "task.reward.use = 'factories:length' is a reward function; write"),
    "a class": ("factories:Loads", "task.reward = 'factories:Loads' is a class; write"),
    "a factory of nothing": ({"use": "factories:nothing"},
        "task.reward.use = 'factories:nothing' returns 3; it must return a reward function"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_told_before_any_data_is_read(task, case):
    reward, told = WRONG[case]
    with pytest.raises(ValueError) as error:
        task(reward, data="not read")
    assert str(error.value).startswith(told)

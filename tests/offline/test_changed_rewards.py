"""A resumed run whose rewards would be other ones: what counts as a change, and the ways on."""

import functools
import importlib
import json
import linecache
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from zipfile import ZipFile

import pytest
from build import config, replayed, stopped

from tba.cli import _config
from tba.config.schema import Config
from tba.offline.rollouts import write_rollouts
from tba.open import run
from tba.replay.buffer import ReplayBuffer
from tba.runs import checkpoint
from tba.runs.folder import CONFIG, METRICS, SESSIONS, read
from tba.setup.setup import EVALUATED
from tba.tasks._digests import digests_of
from tba.tools.check import dry_run

FILE = """
import json
import helper  # a module beside this file

LIMIT = 2

def score(prompts, completions, **row):
    return [helper.value(text) for text in completions]

def ones(completions, **row):
    return [float(text.count('1')) for text in completions]

def make(bonus=0.0, words=""):
    def score(completions, **row):
        return [bonus + len(text) for text in completions]
    return score
"""
HELPER = "def value(text):\n    return float(text.count('1'))\n"


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a reward function, its helper and data, which is the current one."""
    (tmp_path / "reward.py").write_text(FILE)
    (tmp_path / "helper.py").write_text(HELPER)
    for name in ("helper", "reward"):  # of another test
        monkeypatch.delitem(sys.modules, name, raising=False)
    rows = [json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(100, 140)]
    (tmp_path / "data.jsonl").write_text("".join(rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


SETTINGS = (
    "task=custom", "task.data=data.jsonl", "task.reward=reward.py:ones", "task.held_out_size=5",
    "run.steps=2", "eval.prompts=0",
)  # fmt: skip


def source(use: str = "custom", **options: Any) -> dict[str, str]:
    return digests_of(Config(task={"use": use, **options}).task, None)


def changed(now: dict[str, str], before: dict[str, str]) -> list[str]:
    return sorted(dict(now.items() ^ before.items()))


def rewarded(folder: Path) -> dict[str, float]:
    """Return the reward of each stored response, by its tokens."""
    buffer = ReplayBuffer()
    buffer.load(checkpoint.newest(folder / "checkpoints"))
    return {str((g.prompt.id, t.tokens)): t.reward for g in buffer.groups() for t in g.trajectories}


def rewrite(path: Path, old: str, new: str) -> None:
    """Change a file, and the time of its last change."""
    text, changed = path.read_text(), path.stat().st_mtime_ns
    assert old in text
    path.write_text(text.replace(old, new))
    # Python compiles a file again only where its size or this second differs
    os.utime(path, ns=(1, changed + 10**9))


def test_the_contents_of_a_reward_file_count_and_not_its_place(user):
    before = source(reward="reward.py:score")
    os.utime(user / "reward.py", (1, 1))
    rewrite(user / "reward.py", "LIMIT = 2", "LIMIT  =  2   # two")
    (user / "elsewhere").mkdir()
    shutil.copy(user / "reward.py", user / "elsewhere" / "renamed.py")
    for same in ("reward.py:score", f"{user}/reward.py:score", "elsewhere/renamed.py:score"):
        assert source(reward=same) == before
    assert changed(source(reward="reward.py:make"), before) == ["task.reward"]
    rewrite(user / "reward.py", "LIMIT  =  2", "LIMIT = 3")
    assert changed(source(reward="reward.py:score"), before) == ["task.reward"]


def test_functions_of_libraries_count_by_their_names(user):
    names = ("json:dumps", "pickle:dumps", "json", "pickle")
    assert len({source(reward=name)["task.reward"] for name in names}) == 4


def test_the_file_of_a_module_counts(user):
    """With what it says alone; what it imports does not count."""
    importlib.import_module("helper")  # as the task does
    before = source(reward="helper:value")
    rewrite(user / "helper.py", "'1'", "'2'")
    assert changed(source(reward="helper:value"), before) == ["task.reward"]


def test_a_module_in_an_archive_is_known_by_its_name(user, monkeypatch):
    with ZipFile(user / "own.zip", "w") as archive:
        archive.writestr("zipped.py", "def value(text): return 1.0")
    monkeypatch.syspath_prepend(str(user / "own.zip"))
    importlib.import_module("zipped")
    assert source(reward="zipped:value") == source(reward="zipped:value")


CHANGES: dict[str, tuple[Any, Any, list[str]]] = {
    "an argument of a factory": (
        {"use": "reward.py:make", "bonus": 0.0}, {"use": "reward.py:make", "bonus": 0.1},
        ["task.reward.bonus"],
    ),
    "the template of a judge": (
        {"use": "classifier", "model": "m", "template": "{completion}"},
        {"use": "classifier", "model": "m", "template": f"Q: {'long ' * 999}{{completion}}"},
        ["task.reward.template"],
    ),
    "the address and the model of a judge": (
        {"use": "http", "url": "http://a/classify", "model": "m"},
        {"use": "http", "url": "http://b/classify", "model": "n"},
        ["task.reward.model", "task.reward.url"],
    ),
    "the patience of a judge": (
        {"use": "http", "url": "http://a", "model": "m", "retries": 1},
        {"use": "http", "url": "http://a", "model": "m", "retries": 9}, [],
    ),
    "one of two functions": (
        ["reward.py:score", {"use": "reward.py:make"}], ["reward.py:score", "reward.py:score"],
        ["task.reward.1", "task.reward.1.use"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_options_of_judges_and_factories_count(user, case):
    before, now, names = CHANGES[case]
    assert changed(source(reward=now), source(reward=before)) == names


def test_a_file_that_an_option_names_counts_by_its_contents(user):
    (user / "words.txt").write_text("one two")
    table = {"use": "reward.py:make", "words": "words.txt"}
    before = source(reward=table)
    shutil.copy("words.txt", user / "copy.txt")
    assert source(reward={**table, "words": "copy.txt"}) == before
    (user / "words.txt").write_text("one three")
    assert changed(source(reward=table), before) == ["task.reward.words"]


FILES = {
    "1_Pooling/config.json": True, "v1.0/model.safetensors": True, "vocab": True,
    "code/__init__.py": True, "convert.py": True, "README.md": False, ".cache/one.json": False,
    "__pycache__/code.pyc": False,
}  # fmt: skip
"""Files in a model's folder, and whether a change of theirs counts."""


@pytest.mark.parametrize("config", ["config.json", "adapter_config.json", "tokenizer_config.json"])
def test_the_files_of_a_model_count_wherever_they_are_in_its_folder(user, config):
    table = {"use": "classifier", "model": "judge"}
    for name in (config, *FILES):
        (user / "judge" / name).parent.mkdir(parents=True, exist_ok=True)
        (user / "judge" / name).write_text("print 'Python 2'")
    before = source(reward=table)
    shutil.copytree("judge", "moved")
    assert source(reward={**table, "model": "moved"}) == before
    for name, counts in FILES.items():
        rewrite(user / "judge" / name, "2", "3")
        assert (source(reward=table) != before) is counts, name
        rewrite(user / "judge" / name, "3", "2")


def test_a_model_in_a_linked_folder_counts(user):
    (user / "judge").mkdir()
    (user / "weights").mkdir()
    (user / "judge/config.json").write_text("{}")
    (user / "weights/model.safetensors").write_text("1")
    (user / "judge/main").symlink_to(user / "weights")
    before = source(reward={"use": "classifier", "model": "judge"})
    rewrite(user / "weights/model.safetensors", "1", "2")
    assert source(reward={"use": "classifier", "model": "judge"}) != before


def test_a_text_without_a_name_is_no_folder(user):
    table = {"use": "reward.py:make", "eos": ""}
    (user / "config.json").write_text("{}")
    before = source(reward=table)
    (user / "other.txt").write_text("")
    assert source(reward=table) == before


def test_weights_and_grader_options_count_and_those_of_prompts_do_not():
    plain = source(reward_weights=[1.0, 2.0], held_out_size=5, system_prompt="a", pass_reward=1.0)
    other = source(reward_weights=[1.0, 2.5], held_out_size=9, system_prompt="b", pass_reward=0.5)
    assert changed(other, plain) == ["task.reward_weights.1"]
    one = source("gsm8k", format_weight=0.0, shots=0)
    two = source("gsm8k", format_weight=0.1, shots=2)
    assert changed(two, one) == ["task.format_weight"]


def test_only_our_own_plugins_have_options_that_never_count():
    own, other = source("own.Task", weight=1.0), source("own.Task", weight=2.0)
    assert changed(other, own) == ["task.weight"]
    own, other = source("own.Task", judge={"seed": 1}), source("own.Task", judge={"seed": 2})
    assert changed(other, own) == ["task.judge.seed"]


def test_another_python_is_no_change(monkeypatch):
    judge = {"use": "http", "url": "http://127.0.0.1:1"}
    before = [source("math", reward=judge), source("json")]
    for name in ("math", "http", "json"):
        monkeypatch.setattr(sys.modules[name], "__file__", __file__, raising=False)
    assert [source("math", reward=judge), source("json")] == before


def judged(module: ModuleType) -> str:
    """Return what counts of a function that was passed from Python."""
    function = functools.partial(module.ones, x=1)
    return digests_of(Config().task, (function,))["task.reward"]


def test_the_source_of_a_function_from_python_counts(user, monkeypatch):
    """Of a script, only the function itself; of another module, its file."""

    def script() -> ModuleType:
        monkeypatch.delitem(sys.modules, "script", raising=False)
        linecache.checkcache()
        module = importlib.import_module("script")
        module.__name__ = module.ones.__module__ = "__main__"
        return module

    shutil.copy("reward.py", "script.py")
    before = judged(script())
    rewrite(user / "script.py", "LIMIT = 2", "LIMIT = 3")
    assert judged(script()) == before
    rewrite(user / "script.py", "text.count('1')", "text.count('2')")
    assert judged(script()) != before
    module = importlib.import_module("reward")
    before = judged(module)
    rewrite(user / "reward.py", "LIMIT = 2", "LIMIT = 3")
    assert judged(module) != before


SCORE = "def reward(completions): return [{} for c in completions]\n"
MAKE = (
    "def make(k):\n    def score(completions): return [k for c in completions]\n    return score\n"
)
CLASS = """
class Score:
    def __init__(self, k): self.k = k
    def __call__(self, completions): return [self.k for c in completions]
"""
MEMBER = """
from functools import *
class Score:
    {} 1
    def __call__(self, completions): return [self.k for c in completions]
reward = Score()
"""
MEMBERS = {
    "a property": "@property\n    def k(self): return",
    "a cached property": "@cached_property\n    def k(self): return",
    "a class method": "@classmethod\n    def k(cls): return",
    "a static method": "@staticmethod\n    def k(): return",
    "a default": "def k(self, n=0): return n or",
    "what stands for attributes": "def __getattr__(self, name): return",
    "a nested class": "class k: n =",
}
KINDS = {
    "a descriptor": (
        "class D:\n    def __get__(self, o, t): return 1\nclass Score:\n    k = D()\n"
        "    def s(self, c): return self.k\nreward = Score().s", "return 1", "return 2",
    ),
    "a class of classes": (
        "class M(type):\n    def __call__(cls, c): return [1]\nclass reward(metaclass=M): pass",
        "[1]", "[2]",
    ),
    "a dictionary that is called": (
        "class S(dict):\n    def __call__(self, c): return [1]\nreward = S()", "[1]", "[2]",
    ),
    "a tuple with names": (
        "from typing import NamedTuple\nclass S(NamedTuple):\n    k: int\n"
        "    def s(self, c): return [1]\nreward = S(1).s", "[1]", "[2]",
    ),
    "one of two that were met": (
        "A, B = [1], [2]\ndef reward(c, a=A, b=B, k=A): return k", "k=A", "k=B",
    ),
}  # fmt: skip
VALUES = {
    "Decimal": "from decimal import *\nK = Decimal('1')",
    "deque": "from collections import *\nK = deque([1])",
    "defaultdict": "from collections import *\nK = defaultdict(lambda: 1)",
    "itemgetter": "from operator import *\nK = itemgetter(1)",
    "range": "K = range(1)",
    "proxy": "from types import *\nK = MappingProxyType({'a': 1})",
    "an array": "import numpy as np\nK = np.array([2.0, 1.0])",
    "a number of NumPy": "import numpy as np\nK = np.float32(1.0)",
    "a tensor": "import torch\nK = torch.tensor([2.0, 1.0])",
    "a table of itself": "K = {'a': 1}\nK['K'] = K",
    "an attribute of a function": "def K(): 0\nK.k = 1",
    "an object of a library beside it": "import threading\nK = threading.Lock(), 1",
}
WRAP = """
import functools
def scaled(k):
    def wrap(f):
        @functools.wraps(f)
        def inner(*args): return [k * x for x in f(*args)]
        return inner
    return wrap
"""
SCRIPTS = {
    "an indentation": (
        "def reward(c):\n    for x in c:\n        if x:\n            print()\n        n += 1\n",
        "        n += 1\n", "            n += 1\n",
    ),
    "white space in a text": (SCORE.format("c == 'a b'"), "a b", "ab"),
    "a helper": ("def h(c): return 1\n" + SCORE.format("h(c)"), "return 1", "return 2"),
    "a constant": ("K = 1\n" + SCORE.format("K"), "K = 1", "K = 2"),
    "a pattern": ("import re\nP = re.compile('a')\n" + SCORE.format("P"), "'a'", "'b'"),
    "a closure": (MAKE + "reward = make(1)", "make(1)", "make(2)"),
    "a partial": ("from functools import partial\nreward = partial(len, k=1)", "k=1", "k=2"),
    "an object": (CLASS + "reward = Score(1)", "Score(1)", "Score(2)"),
    "code of a class": (CLASS + "reward = Score(1)", "[self.k", "[-self.k"),
    "a method": (CLASS + "reward = Score(1).__call__", "Score(1)", "Score(2)"),
    "a decorator": (WRAP + "@scaled(1)\n" + SCORE.format("1"), "scaled(1)", "scaled(2)"),
    "a lambda": ("reward = lambda c: [1]", "[1]", "[2]"),
    "a builtin": ("reward = len", "len", "sum"),
    **{n: (MEMBER.format(head), f"{head} 1", f"{head} 2") for n, head in MEMBERS.items()},
    **KINDS,
    **{n: (f"{head}\n{SCORE.format('K')}", "1", "4") for n, head in VALUES.items()},
}  # fmt: skip


@pytest.mark.parametrize("case", SCRIPTS)
def test_what_a_function_of_a_script_does_counts(case):
    """Also where its source cannot be read."""
    text, old, new = SCRIPTS[case]
    assert old in text

    def counted(script: str) -> str:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(script, names)
        return digests_of(Config().task, (names["reward"],))["task.reward"]

    head, tail = text.rsplit(old, 1)
    assert counted(text) == counted(f"# a comment\n\n{text}") != counted(head + new + tail)


@pytest.mark.parametrize("helper", ["def (", "x = " + "1 + " * 2000 + "1", "x = '\0'"])
def test_a_neighbour_that_python_cannot_read_counts_as_it_is(user, helper):
    """Nobody may import it: a file of another version of Python, or a table of constants."""
    (user / "helper.py").write_text(helper)
    before = source(reward="reward.py:ones")
    assert source(reward="reward.py:ones") == before
    (user / "helper.py").write_text(helper + "  # 2")
    assert changed(source(reward="reward.py:ones"), before) == ["task.reward"]


def test_the_file_counts_that_a_function_of_a_script_imports_when_it_is_called(user):
    (user / "later.py").write_text("value = 1\n")

    def counted() -> str:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec("def reward(c):\n    from later import value\n    return value", names)
        return digests_of(Config().task, (names["reward"],))["task.reward"]

    before = counted()
    assert counted() == before
    (user / "later.py").write_text("value = 2\n")
    assert counted() != before and "later" not in sys.modules


def test_a_changed_reward_is_refused_by_name_with_the_ways_on(tiny_model, user):
    folder = user / "run"
    run(config(tiny_model, folder, *SETTINGS, "task.reward=reward.py:score"))
    rewrite(user / "reward.py", "LIMIT = 2", "LIMIT = 3")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for refused in (run, dry_run):
        with pytest.raises(ValueError, match=r"^task\.reward: changed .* --rescore .* --drop"):
            refused(_config(["run.steps=3"], folder), folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    rewrite(user / "reward.py", "LIMIT = 3", "LIMIT = 2")
    assert run(_config(["run.steps=3"], folder), folder).finished


def test_another_config_of_the_model_is_refused(tiny_model, user):
    """The weights are the same; the log-probs of the stored samples are not."""
    folder = user / "run"
    model = shutil.copytree(tiny_model, user / "model")
    run(config(model, folder, *SETTINGS))
    plain = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**plain, "transformers_version": "5"}))
    assert run(_config(["run.steps=3"], folder), folder).finished
    (model / "config.json").write_text(json.dumps({**plain, "layer_norm_epsilon": 0.1}))
    with pytest.raises(ValueError, match=r"^config\.json of policy\.model: changed .* add --drop"):
        run(_config(["run.steps=4"], folder), folder)


def test_another_reward_of_an_evaluation_set_changes_its_scores_only(tiny_model, user):
    folder = user / "run"
    shutil.copy("reward.py", "hard.py")
    of_set = ("task.sources.hard={weight=0,reward='hard.py:score',held_out_size=2}",)
    run(config(tiny_model, folder, *SETTINGS, "eval.prompts=2", *of_set))
    before = json.loads((folder / "digests.json").read_text())
    rewrite(user / "hard.py", "LIMIT = 2", "LIMIT = 3")
    assert run(_config(["run.steps=3"], folder), folder).finished
    assert changed(json.loads((folder / "digests.json").read_text()), before) == [EVALUATED]


def test_stored_samples_are_scored_again(tiny_model, user):
    """As they are, with the new function, before the first step; the next resume is an equal."""
    folder = user / "run"
    run(config(tiny_model, folder, *SETTINGS))
    before, counts = rewarded(folder), replayed(folder)[0]
    assert {0.0} < set(before.values())
    rewrite(user / "reward.py", "float(text.count('1'))", "-1 - text.count('1')")
    assert run(_config([], folder), folder, "rescore").finished  # without a step
    assert rewarded(folder) == {key: -1 - reward for key, reward in before.items()}
    assert dict(replayed(folder)[0]) == {**dict(counts), "dropped": 0}
    assert run(_config(["run.steps=4"], folder), folder).finished
    assert max(rewarded(folder).values()) < 0
    notes = [session["rewards"] for session in read(folder / SESSIONS)]
    assert notes == ["", "stored samples scored again after a change of task.reward", ""]


def test_evaluations_by_another_reward_are_told_apart(tiny_model, user):
    folder = user / "run"
    run(config(tiny_model, folder, *SETTINGS, "eval.prompts=2"))
    rewrite(user / "reward.py", "text.count('1')", "text.count('2')")
    summary = run(_config(["run.steps=3"], folder), folder, "rescore")
    assert any("cannot be compared" in text for text in summary.warnings)


def test_samples_that_are_rejected_now_leave_the_buffer_and_are_counted(tiny_model, user):
    folder = user / "run"
    run(config(tiny_model, folder, *SETTINGS, "reward.max_rejected=1"))
    before = rewarded(folder)
    rewrite(user / "reward.py", "float(text.count('1'))", "1 / ('1' not in text)")
    run(_config(["run.steps=3"], folder), folder, "rescore")
    kept = [key for key, reward in before.items() if reward == 0]
    left = [key for key, reward in before.items() if reward > 0]
    assert kept and left and not left & rewarded(folder).keys()
    last = [row for row in read(folder / METRICS) if "loss" in row][-1]
    assert last["buffer/dropped"] == len(left)


def test_a_group_is_scored_as_it_arrived(tiny_model, user):
    """A reward that compares answers gets a whole group, with its repeats."""
    folder = user / "run"
    text = "def ones(completions, **row):\n    return [completions.count(c) for c in completions]\n"
    (user / "reward.py").write_text(text)
    given = ("engine=scripted", "engine.answers=['1', '1', '2', '22']", "run.steps=1")
    run(config(tiny_model, folder, *SETTINGS, *given, "sampling.max_tokens=3"))
    before = rewarded(folder)
    assert max(before.values()) > 1
    rewrite(user / "reward.py", "completions.count(c)", "10 * completions.count(c)")
    run(_config([], folder), folder, "rescore")
    assert rewarded(folder) == {key: 10 * reward for key, reward in before.items()}


def test_too_many_rejections_leave_the_run_as_it_was(tiny_model, user):
    folder = user / "run"
    run(config(tiny_model, folder, *SETTINGS))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    rewrite(user / "reward.py", "float(text.count('1'))", "1 / 0")
    with pytest.raises(Exception, match=r"36 of 36 stored samples were rejected(.|\n)*division"):
        run(_config(["run.steps=3"], folder), folder, "rescore")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_an_empty_buffer_is_filled_first(tiny_model, user):
    folder = user / "run"
    run(config(tiny_model, folder, *SETTINGS, "replay.first_fill=5"))
    stored = rewarded(folder)
    rewrite(user / "reward.py", "float(text.count('1'))", "-1 - text.count('1')")
    run(_config(["run.steps=3"], folder), folder, "drop")
    assert max(rewarded(folder).values()) < 0
    steps = [row for row in read(folder / METRICS) if "loss" in row]
    assert steps[-1]["buffer/dropped"] == len(stored)
    assert steps[-1]["buffer/prompts"] >= 5
    notes = [session["rewards"] for session in read(folder / SESSIONS)]
    assert notes == ["", "stored samples dropped after a change of task.reward"]


def test_an_offline_run_is_scored_again_by_its_columns_and_never_emptied(tiny_model, user):
    """It has nothing else to train on."""
    rows = [json.dumps({"prompt": f"{i}+1=", "answer": i}) + "\n" for i in range(100, 140)]
    (user / "data.jsonl").write_text("".join(rows))
    function = "def ones(completions, answer, **row):\n    return answer\n"
    (user / "reward.py").write_text(function)
    run(config(tiny_model, user / "first", *SETTINGS))
    write_rollouts(user / "first", user / "rollouts.jsonl", None)
    offline = ("runtime.searchers=0", "replay.rollouts=rollouts.jsonl", "objective.taper=none")
    folder = user / "run"
    run(config(tiny_model, folder, *SETTINGS, *offline, "reward.max_rejected=1"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for refused in (run, dry_run):
        with pytest.raises(ValueError, match="nothing is left to train on; start a new run"):
            refused(_config(["run.steps=3"], folder), folder, "drop")
    rewrite(user / "reward.py", "return answer", "return [None for _ in answer]")
    with pytest.raises(ValueError, match="nothing is left to train on"):
        run(_config(["run.steps=3"], folder), folder, "rescore")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    rewrite(user / "reward.py", "[None for _ in answer]", "[-a for a in answer]")
    assert run(_config(["run.steps=3"], folder), folder, "rescore").finished
    assert set(rewarded(folder).values()) <= {float(-i) for i in range(100, 140)}


@pytest.mark.parametrize("replay", ["rescore", "drop"])
def test_groups_of_a_constant_lag_are_scored_again_or_dropped_too(tiny_model, user, replay):
    folder = user / "run"
    run(config(tiny_model, folder, *SETTINGS, "runtime.lag=2"))
    rewrite(user / "reward.py", "float(text.count('1'))", "-1 - text.count('1')")
    run(_config(["run.steps=6"], folder), folder, replay)
    rewards = [row["reward"] for row in read(folder / METRICS) if "loss" in row]
    assert min(rewards[:2]) >= 0 > max(rewards[2:])


def test_dialogues_can_only_be_dropped(tiny_model, user):
    """So can attacks on a victim, and value estimates."""
    folder = user / "run"
    run(config(tiny_model, folder, *SETTINGS, "objective=vineppo"))
    rewrite(user / "reward.py", "count('1')", "count('2')")
    with pytest.raises(ValueError, match="undo that, or add --drop-replay"):
        run(_config(["run.steps=3"], folder), folder)
    with pytest.raises(ValueError, match="--rescore: the stored samples have value estimates"):
        run(_config(["run.steps=3"], folder), folder, "rescore")
    assert run(_config(["run.steps=3"], folder), folder, "drop").finished


def test_the_config_of_a_run_is_that_of_the_newest_session_with_a_step(tiny_model, tmp_path):
    folder = tmp_path / "run"

    def rate() -> float:
        return json.loads((folder / CONFIG).read_text())["trainer"]["learning_rate"]

    run(config(tiny_model, folder, "run.steps=2", "trainer.learning_rate=1e-2", "eval.prompts=0"))
    run(_config(["trainer.learning_rate=2e-2"], folder), folder)  # finished: it takes no step
    assert rate() == 1e-2
    stopped(_config(["trainer.learning_rate=3e-2", "run.steps=5"], folder), 2, folder)
    assert rate() == 1e-2
    stopped(_config(["trainer.learning_rate=4e-2", "run.steps=5"], folder), 3, folder)
    assert rate() == 4e-2
    run(_config([], folder), folder)
    sessions = read(folder / SESSIONS)
    given = [session["config"]["trainer"]["learning_rate"] for session in sessions]
    assert given == [1e-2, 2e-2, 3e-2, 4e-2, 4e-2]
    assert [session["step"] for session in sessions] == [0, 2, 2, 2, 3]

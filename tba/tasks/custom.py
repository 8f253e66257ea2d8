"""A data set and reward functions of the user, in TRL's conventions."""

import asyncio
import contextlib
import importlib.util
import inspect
import math
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from traceback import extract_tb
from types import ModuleType, SimpleNamespace
from typing import Any

from tba.config.mistakes import masked, relative_to
from tba.config.plugins import JUDGES, check_options, resolve
from tba.config.secrets import read_secrets
from tba.config.tables import FILLED_IN, Count, PluginTable, Positive
from tba.prompt import Answer, Prompt
from tba.tasks import ItemizedReward, Scores, Task, Tools
from tba.tasks._calls import WrongLength, call, listed, number
from tba.tasks._data import Rows, is_local, require, rows, split_of
from tba.tasks._memory import Functions
from tba.tasks._rendering import Rendering, columns_of

RewardFunction = Callable[..., Any]
"""`def` or `async def` f(prompts, completions, **columns) -> list[float | None], as in TRL."""

ADVICE = "write package.module:function or file.py:function"

NOT_USERS = (str(Path(__file__).parents[1]), importlib.__file__, contextlib.__file__, "<")
"""Prefixes of file names whose lines are not shown in errors of the user's code."""

LONGEST_NOTE = 1000
"""Longest logged text about a completion, in characters."""

PASSED = {"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"}
"""Arguments of every reward function, in addition to the columns."""


class RewardLog:
    """Values that reward functions log while they score a group of `count` completions."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.metrics: defaultdict[str, list[float]] = defaultdict(list)
        self.notes: dict[str, list[str]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Log a number about the group; ignored if it is not finite."""
        if math.isfinite(value):  # otherwise no later mean would be finite
            self.metrics[str(name)].append(float(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a value for each completion, for people to read."""
        if len(values) != self.count:
            raise ValueError(
                f"log_extra({column!r}, ...) got {len(values)} values for {self.count} completions;"
                " give one for each"
            )
        self.notes[str(column)] = [str(value)[:LONGEST_NOTE] for value in values]


@dataclass(frozen=True, kw_only=True)
class Custom(Rendering, Task):
    """Any data set, whose column `prompt` is text or chat messages, and functions like TRL's.

        def f(prompts, completions, **columns) -> list[float | None]

    A function is written `package.module:function` or `file.py:function`, and may be `async def`.
    A table names a judge or a factory by `use`, and has its options: see docs/rewards.md.
    A call has all completions of one prompt; `prompts` and the columns repeat its values. The
    rewards of several functions are added, weighted by `reward_weights`; None means that a
    function does not apply to a sample. For chat prompts, completions are message lists. A function
    may also name `completion_ids`, `trainer_state`, `log_metric` and `log_extra`. The metrics
    `rewards/NAME/mean` and `/std` are those of each function: see docs/from_trl.md.

    With an `environment`, answers are dialogues in which the policy may call its methods as tools.
    A function that names `environments` gets the instances that the dialogues were held with.

    Evaluations use `held_out_data`, or else the last `held_out_size` rows, which are then not
    trained on.
    """

    data: str
    """File (.jsonl, .json, .parquet, .csv), folder of such files, or hub name."""
    reward: str | PluginTable | list[str | PluginTable] | None = None
    """Reward function, or table of a judge or a factory, or a list of these. It is required, unless
    functions are passed from Python."""
    reward_weights: list[float] | None = None
    """Weight of each reward function; default: 1."""
    prompt_column: str = "prompt"
    """Column of the questions: text, or chat messages. Templates call it {prompt}."""
    answer_column: str = "answer"
    """Column of the right answers. Templates call it {answer}, and reward functions `answer`."""
    split: str | None = None
    """Split of the data (default: train), or a part of it: `train[:100]`, `train[:80%]`."""
    subset: str | None = None
    """Configuration (`name`) of a hub data set."""
    held_out_data: str | None = None
    """File, folder or hub name of the held-out rows; default: the last rows of `data`."""
    held_out_split: str | None = None
    """Split of `held_out_data` (default: test), or without it of `data`."""
    held_out_size: Count = 64
    """Maximum number of held-out rows."""
    pass_reward: float | None = None
    """Minimum reward of a correct answer, for pass@1 and pass@k."""
    environment: str | None = None
    """Class in TRL's convention, or function that returns an instance, written as for `reward`."""
    max_turns: Positive = 8
    """Maximum number of turns of the policy in a dialogue with the environment."""
    passed: Functions | None = field(default=None, metadata=FILLED_IN, repr=False)
    """Reward functions that were passed from Python, in place of `reward`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.environment is not None:  # pickled instances need its module to be imported
            member("task.environment", self.environment)
        count = len(self.functions)  # raises before the run starts if one does not exist
        if not count and self.needs_reward:
            raise ValueError(f"task.reward is missing; {ADVICE}, or pass reward= from Python")
        weights = self.reward_weights
        if weights is not None and len(weights) != count:
            raise ValueError(
                f"task.reward_weights has {len(weights)} numbers for {count} reward functions;"
                " write one number for each"
            )

    @property
    def needs_reward(self) -> bool:
        """Whether answers are scored only by reward functions."""
        return True

    def prompts(self) -> Sequence[Prompt]:
        return self._rows[0]

    def held_out(self) -> Sequence[Prompt]:
        return self._rows[1]

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> Scores | Awaitable[Scores]:
        """Return the weighted sum of the functions that returned a number; None if none did."""
        logged = RewardLog(len(answers))
        scores: list[Any] = [None] * len(self.functions)
        is_async = []
        for function in self.functions:
            called = type(function).__call__  # for objects with `async def __call__`
            is_async.append(any(map(inspect.iscoroutinefunction, (function, called))))
        # sync functions first: if one raises, no coroutine is left without an await
        for i in sorted(range(len(scores)), key=is_async.__getitem__):
            scores[i] = call(self.functions[i], arguments_of(prompt, answers, logged))
        if not any(map(inspect.isawaitable, scores)):
            return self._weighted(scores, logged)

        async def awaited() -> Scores:
            results = iter(await asyncio.gather(*filter(inspect.isawaitable, scores)))
            every = [next(results) if inspect.isawaitable(each) else each for each in scores]
            return self._weighted(every, logged)

        return awaited()

    def _weighted(self, scores: Sequence[Any], logged: RewardLog) -> list[float | None]:
        names = metric_names(self.functions)
        columns = [listed(of_function) for of_function in scores]
        for name, column in zip(names, columns, strict=True):
            if len(column) != logged.count:
                returned = f"{len(column)} rewards for {logged.count} completions"
                raise WrongLength(f"{name} returned {returned}")
        weights = self.reward_weights or [1.0] * len(names)
        means = {name: fmean(values) for name, values in logged.metrics.items()}
        sums: list[float | None] = []
        for place in range(logged.count):
            of_answer = [column[place] for column in columns]
            wrong = [s for s in of_answer if s is not None and number(s) is None]
            if wrong:
                sums.append(wrong[0])  # only this answer is rejected
                continue
            terms = zip(names, weights, of_answer, strict=True)
            given = [(name, weight, float(s)) for name, weight, s in terms if s is not None]
            total = sum(weight * score for _, weight, score in given)
            items = {f"rewards/{name}": score for name, _, score in given}
            notes = {name: texts[place] for name, texts in logged.notes.items()}
            sums.append(ItemizedReward(total, means | items, notes) if given else None)
        return sums

    @cached_property
    def dependencies(self) -> list[tuple[str, RewardFunction]]:
        if self.passed is not None:
            return [("reward=", function) for function in self.passed]
        named: dict[str, str | PluginTable] = {}
        if isinstance(self.reward, list):
            named = {f"task.reward.{i}": each for i, each in enumerate(self.reward)}
        elif self.reward is not None:
            named = {"task.reward": self.reward}
        return [(key, reward_function(key, each)) for key, each in named.items()]

    @property
    def functions(self) -> list[RewardFunction]:
        return [function for _, function in self.dependencies]

    @cached_property
    def tools(self) -> Tools | None:
        """The tools of the environment, or None without one."""
        if self.environment is None:
            return None
        make = member("task.environment", self.environment)
        judged = any("environments" in inspect.signature(f).parameters for f in self.functions)
        return describe(self.environment, make, self.max_turns, judged)

    @cached_property
    def _rows(self) -> tuple[list[Prompt], list[Prompt]]:
        """Prompts to train on, and prompts to evaluate on."""
        train = self._read("task.data", self.data, self.split, "train")
        source = self.held_out_data or (self.data if self.held_out_split else None)
        if self.subset is not None and is_local(self.data) and is_local(source or self.data):
            raise ValueError(f"task.subset = {self.subset!r} is for hub data sets only; remove it")
        if source is None:
            cut = len(train) - self.held_out_size
            if cut < 1:
                raise ValueError(
                    f"task.data = {self.data!r} has only {len(train)} rows;"
                    f" lower task.held_out_size = {self.held_out_size}, or give task.held_out_data"
                )
            train, held_out = train[:cut], train[cut:]
        else:
            held_out = self._read("task.held_out_data", source, self.held_out_split, "test")
        passed = PASSED if self.environment is None else PASSED | {"environments"}
        for function in self.functions:
            _check_columns("task.data", train, function, passed)
            _check_columns("task.held_out_data", held_out, function, passed)
        held_out = held_out[: self.held_out_size]
        return self.rendered("train", train, train), self.rendered("held-out", held_out, train)

    def _read(self, key: str, source: str, split: str | None, default: str) -> Rows:
        """Return the rows of a file or data set.

        They also have the question as `prompt` and the answer as `answer`.
        """
        origin = f"{key} = {source!r}"
        table = self._table(key, source, split_of(source, split, default))
        columns = {"prompt": self.prompt_column, "answer": self.answer_column}
        renamed = {name: column for name, column in columns.items() if column != name}
        for name, column in renamed.items():
            require(origin, table, [column], f"task.{name}_column")
        shown = [name for name in columns_of(self.prompt) if name not in renamed]
        require(origin, table, shown, "task.prompt")
        return [row | {name: row[column] for name, column in renamed.items()} for row in table]

    def _table(self, key: str, source: str, split: str) -> Rows:
        return rows(key, source, split, self.subset)


def _check_columns(key: str, table: Rows, function: RewardFunction, passed: Set[str]) -> None:
    """Raise ValueError if the function needs an argument that is neither a column nor passed."""
    columns = [name for row in table[:1] for name in row if name != "prompt"]
    (called,) = metric_names([function])
    for p in inspect.signature(function).parameters.values():
        named = p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.default is p.empty
        if table and named and p.name not in {*columns, *passed}:
            raise ValueError(
                f"task.reward: {called} needs {p.name!r}, which is not a column of"
                f" {key}; the columns are {', '.join(('prompt', *columns))}"
            )


def arguments_of(prompt: Prompt, answers: Sequence[Answer], logged: RewardLog) -> dict[str, Any]:
    """Return all arguments of reward functions by name, with separate copies for each answer."""
    state = SimpleNamespace(  # named as in transformers' TrainerState
        global_step=max(a.version for a in answers), max_steps=max(a.steps for a in answers)
    )
    completions: list[Any] = [a.text for a in answers]
    if answers[0].messages is not None:
        completions = [deepcopy(list(a.messages or ())) for a in answers]
    elif not isinstance(prompt.text, str):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    copies = [prompt.row() for _ in answers]
    arguments = {name: [row[name] for row in copies] for name in prompt.columns}
    if answers[0].environment is not None:
        arguments["environments"] = [a.environment for a in answers]
    return arguments | {
        "prompts": [row["prompt"] for row in copies],
        "completions": completions,
        "completion_ids": [list(a.tokens) for a in answers],
        "trainer_state": state,
        "log_metric": logged.log_metric,
        "log_extra": logged.log_extra,
    }


def metric_names(functions: Sequence[Any]) -> list[str]:
    """Return the name of each reward function, as in TRL's metrics; number repeated names."""
    names: list[str] = []
    for function in functions:
        while isinstance(function, partial):
            function = function.func
        try:
            names.append(str(function.__name__))
        except AttributeError:  # an instance of a class
            names.append(type(function).__name__)
    earlier = [names[:i].count(name) for i, name in enumerate(names)]
    return [f"{n}_{e + 1}" if e else n for n, e in zip(names, earlier, strict=True)]


def reward_function(key: str, named: str | PluginTable) -> RewardFunction:
    """Return the function that `key` names. Raises ValueError, beginning with the key, if invalid.

    Text names the function itself. A table names a judge of this package, another class
    (`package.module.Class`), or a factory (`package.module:factory` or `file.py:factory`), to
    which the table's other keys are passed.
    """
    if isinstance(named, str):
        function = member(key, named)
        if inspect.isclass(function):
            advice = f'write {key}={{use="{named}"}}, which makes an instance'
            raise ValueError(f"{key} = {named!r} is a class; {advice}")
        return function
    if ":" in named.use:
        factory = member(f"{key}.use", named.use)
        if "completions" in inspect.signature(factory).parameters:
            advice = f'write {key}="{named.use}"'
            raise ValueError(f"{key}.use = {named.use!r} is a reward function; {advice}")
        options = check_options(factory, key, named.use, named.options)
        make: Callable[[], Any] = partial(factory, **read_secrets(options))
    else:
        make = resolve(JUDGES, key, named.use, named.options).build
    with _running(key):
        function = make()
    if not callable(function):
        raise ValueError(
            f"{key}.use = {named.use!r} returns {function!r}; it must return a reward function"
        )
    return function


def member(key: str, name: str) -> Callable[..., Any]:
    """Return the function or class called `name`."""
    where, _, function = name.rpartition(":")
    origin = f"{key} = {name!r}"
    if not (where.endswith(".py") or all(map(str.isidentifier, where.split(".")))):
        judge = f'; for a model, use a judge: {key}={{use="classifier",model="{name}"}}'
        is_model = "/" in name and not name.endswith(".py")
        raise ValueError(f"{origin}: {ADVICE}{judge if is_model else ''}")
    path = Path(where).expanduser()
    if where.endswith(".py") and not path.is_file():
        raise ValueError(f"{origin}: no such file: {path}{relative_to(path)}; {ADVICE}")
    with _running(origin):
        if where.endswith(".py"):
            module = _from_file(path.resolve(), path.stat().st_mtime_ns)
        else:
            module = importlib.import_module(where)
    try:
        value: Callable[..., Any] = attrgetter(function)(module)  # may import it, in a lazy module
    except AttributeError as error:
        raise ValueError(f"{origin}: {where} has no function {function!r}") from error
    if not callable(value):
        raise ValueError(f"{origin}: {function} is not a function but {value!r}")
    return value


@contextlib.contextmanager
def _running(place: str) -> Iterator[None]:
    """Turn any error of the user's code, also `sys.exit`, into a ValueError with file and line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        every = extract_tb(error.__traceback__)
        frames = [frame for frame in every if not frame.filename.startswith(NOT_USERS)]
        at = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        if isinstance(error, ModuleNotFoundError) and not frames:
            at = f"; {ADVICE}"
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(masked(f"{place}: {kind}{error}{at}")) from error


@cache
def _from_file(path: Path, changed: int) -> ModuleType:
    """Run a file once for each modification time `changed`.

    Its module has the name of the file, so that processes that a function starts can import it,
    because they get `sys.path`. If another module has this name, use a name derived from the path.
    """
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    importlib.invalidate_caches()
    name = f"tba_{sha256(str(path).encode()).hexdigest()[:8]}_{path.stem}"
    with contextlib.suppress(ImportError, ValueError):  # no module name, or no spec
        named = importlib.util.find_spec(path.stem)
        if named is not None and Path(str(named.origin)).resolve() == path:
            name = path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def describe(name: str, make: Callable[[], Any], max_turns: int, judged: bool = True) -> Tools:
    """Return the tools of the environment `name` of the config."""
    return Tools(make, max_turns, partial(schemas_of, name, make), judged)


def schemas_of(name: str, make: Callable[[], Any]) -> dict[str, Any]:
    """Return the schema of each tool of an environment. Raises ValueError if it has none.

    Makes an instance, because `make` may be a function.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    origin = f"task.environment = {name!r}"
    with _running(origin):
        instance = make()
    methods = dict(inspect.getmembers(type(instance), inspect.isfunction))
    kind = type(instance).__name__
    if "reset" not in methods:
        raise ValueError(
            f"{origin}: {kind} has no method `reset`; write `def reset(self, **row)`, which returns"
            " None, or a text to append to the prompt"
        )
    schemas = {}
    for tool in [name for name in methods if name != "reset" and not name.startswith("_")]:
        try:
            schemas[tool] = get_json_schema(getattr(instance, tool))
        except Exception as error:  # transformers raises classes that it does not export
            raise ValueError(
                f"{origin}: {error}; give {tool!r} type hints, and a docstring with a line for each"
                " argument below `Args:`"
            ) from error
    if not schemas:
        raise ValueError(f"{origin}: {kind} has no other public method, so no tool")
    return schemas

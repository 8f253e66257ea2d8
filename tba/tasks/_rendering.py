"""Base classes of tasks: turn rows into prompts, read two splits, and grade problems.

A prompt comes from a template or chat messages, optionally after solved examples.
"""

import logging
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tba.config.mistakes import about
from tba.config.tables import Count, Positive
from tba.models.template import ARGUMENTS, decoded
from tba.prompt import Answer, Message, Prompt
from tba.tasks import Task
from tba.tasks._data import Rows

log = logging.getLogger(__name__)
PLACEHOLDER = re.compile(r'\{\{([^{}"]+)\}\}|\{([^{}"]+)\}')
"""`{{text}}`, which stands for {text} itself, or `{column}`. JSON, which has quotes, is neither."""
NAME = re.compile(r"\w+")
"""Text in braces that must be a column. Other text in braces may be one, or be literal."""
MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|content)['"]\s*:""")
"""Beginning of a text with chat messages as JSON, or as a Python literal."""


def _is_chat(value: Any) -> bool:
    """Return whether a JSON value is a list of messages."""
    tables = [{*m} for m in value if isinstance(m, dict)] if isinstance(value, list) else []
    is_said = all("role" in table or table >= {"from", "value"} for table in tables)
    return bool(tables) and is_said and len(tables) == len(value)


def columns_of(template: str) -> list[str]:
    """Return the columns that a template requires."""
    return [column for _, column in PLACEHOLDER.findall(template) if NAME.fullmatch(column)]


def fill(template: str, row: Mapping[str, Any]) -> str:
    """Fill a template with a row's values; ValueError if one is neither text nor a number."""

    def filled(match: re.Match[str]) -> str:
        literal, column = match.groups()
        name = literal or column
        if not NAME.fullmatch(name) and name not in row:
            return match[0]
        if literal is not None:
            return f"{{{literal}}}"
        value = row.get(column)
        is_number = isinstance(value, int) or (isinstance(value, float) and isfinite(value))
        if not isinstance(value, str) and not is_number:
            raise ValueError(
                f"column {column!r} is {value!r}, neither text nor a number; the row"
                f" has {', '.join(row)}. Remove it, or write {{{{{column}}}}} if you mean no column"
            )
        return str(value)

    return PLACEHOLDER.sub(filled, template)


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """Options of a task that define how rows become prompts."""

    prompt: str = "{prompt}"
    """Template. `{column}` is replaced by the row's value, `{{x}}` by {x} itself."""
    chat: bool | Literal["on", "off"] = "off"
    """Send the prompt through the tokenizer's chat template as a user message. Chat messages in
    the data always go through it."""
    system_prompt: str | None = None
    """System message, for rows without one; in a plain prompt, text at the beginning."""
    shots: Count = 0
    """Number of solved examples before the question: the first training rows. All rows with the
    same question, including held-out ones, are dropped."""
    shot_response: str = "{answer}"
    """Template of the response in an example."""
    max_prompt_tokens: Positive | None = None
    """Maximum length of a prompt in tokens; longer ones are dropped, and counted. Default: no
    limit."""
    drop_duplicates: bool = False
    """Keep only the first row of each prompt, and do not train on held-out prompts."""
    left_out: Counter[tuple[str, str]] = field(
        default_factory=Counter, init=False, repr=False, compare=False
    )
    """Numbers of rows that are in no prompt, by split and reason."""

    def __post_init__(self) -> None:
        if not any(column for _, column in PLACEHOLDER.findall(self.prompt)):
            raise ValueError(
                f"task.prompt = {self.prompt!r} must contain a column, as"
                f" {type(self).prompt!r} does; otherwise all prompts are the same"
            )

    def rendered(
        self, split: str, table: Rows, training: Rows, columns: Sequence[str] | None = None,
        most: int | None = None,
    ) -> list[Prompt]:  # fmt: skip
        """Return a prompt for each row, except rows whose question is in an example.

        The first `training` rows are the examples. Prompts keep `columns`, by default all except
        `prompt`. Reading ends after `most` prompts.
        """
        examples = training[: self.shots]
        turns = [(fill(self.prompt, row), fill(self.shot_response, row)) for row in examples]
        shown = {question for question, _ in turns}
        prompts: list[Prompt] = []
        is_plain = False
        repeats = -len(turns) if table is training else 0  # the examples themselves are asked for
        for i, row in enumerate(table):
            if len(prompts) == most:
                break
            with about(f"prompt '{split}-{i}'"):
                whole = row.get(self.prompt[1:-1])
                if isinstance(whole, str) and (MESSAGES.match(whole) or _is_chat(decoded(whole))):
                    whole = decoded(whole)
                    if isinstance(whole, str):
                        raise ValueError("chat messages in a text must be JSON; use json.dumps")
                question = whole if isinstance(whole, list) else fill(self.prompt, row)
                if isinstance(question, str) and question in shown:
                    repeats += 1
                    continue
                if isinstance(question, list) and turns:
                    raise ValueError("task.shots is for prompts that are text; remove it")
                text = self._text(question, turns)
                is_plain |= isinstance(question, str)
            names = (*columns, *ARGUMENTS) if columns else row.keys() - {"prompt"}
            kept = [name for name in row if name in names]
            prompts.append(Prompt(f"{split}-{i}", text, {name: row[name] for name in kept}))
        self.left_out[split, "are shown in an example (task.shots), and left out"] = repeats
        if prompts and not is_plain and self.chat in (True, "on"):
            log.warning("task.chat has no effect: the prompts are chat messages already; remove it")
        return prompts

    def _text(
        self, question: str | list[Message], turns: Sequence[tuple[str, str]]
    ) -> str | list[Message]:
        """Return the prompt of a question, preceded by examples: pairs of question and response."""
        system = [] if self.system_prompt is None else [self.system_prompt]
        messages: list[Message] = [{"role": "system", "content": text} for text in system]
        if isinstance(question, list):
            roles = {message.get("role") for message in question if isinstance(message, dict)}
            return question if roles & {"system", "developer"} else [*messages, *question]
        if self.chat not in (True, "on"):
            shown = [f"{q}{'' if q[-1:].isspace() else ' '}{response}" for q, response in turns]
            return "\n\n".join([*system, *shown, question])
        for asked, response in turns:
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": response})
        return [*messages, {"role": "user", "content": question}]


@dataclass(frozen=True, kw_only=True)
class Splits(Rendering, Task):
    """A task whose data set has a training split and an evaluation split."""

    test: ClassVar[str] = "test"
    """Name of the evaluation split."""
    kept: ClassVar[Sequence[str]] = ("answer",)
    """Columns that prompts keep."""
    data: str
    """Hub name, or folder with a file for each split."""
    held_out_data: str | None = None
    """Hub name, folder or file with another held-out split."""
    train_size: Positive | None = None
    """Maximum number of training rows: the first ones; default: all."""
    held_out_size: Count | None = None
    """Maximum number of held-out rows: the first ones; default: all."""

    @abstractmethod
    def read(self, key: str, source: str, split: str) -> Rows:
        """Return the rows of a split; a ValueError names the config key `key`."""

    def prompts(self) -> Sequence[Prompt]:
        table = self.read("task.data", self.data, "train")
        return self.rendered("train", table, table, self.kept, self.train_size)

    def held_out(self) -> Sequence[Prompt]:
        if self.held_out_data is None:
            table = self.read("task.data", self.data, self.test)
        else:
            table = self.read("task.held_out_data", self.held_out_data, self.test)
        training = self.read("task.data", self.data, "train") if self.shots else []
        return self.rendered(self.test, table, training, self.kept, self.held_out_size)


@dataclass(frozen=True, kw_only=True)
class Problems(Splits):
    """The reward is 1 for a right answer, else 0, plus a bonus for a finished one in the format."""

    format_weight: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Added to the reward of a finished answer that has the format, right or not; below 1."""
    pass_reward: float = 1.0
    """Minimum reward of a correct answer."""

    @abstractmethod
    def grade(self, gold: str | None, text: str) -> tuple[bool | None, bool]:
        """Return whether an answer is right (None if unknown), and whether it has the format.

        `gold` is the column `answer`.
        """

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        scores: list[float | None] = []
        for answer in answers:
            right, formatted = self.grade(prompt.columns["answer"], answer.text)
            bonus = self.format_weight * (formatted and answer.finished)
            scores.append(None if right is None else right + bonus)
        return scores

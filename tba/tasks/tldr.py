"""TL;DR: summaries of Reddit posts. One judge provides the reward, another one evaluates."""

import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from tba.config.mistakes import about
from tba.config.tables import PluginTable
from tba.prompt import Answer, Prompt
from tba.tasks import Scorer, Scores
from tba.tasks._data import Rows, rows
from tba.tasks._rendering import Splits, fill
from tba.tasks.custom import Custom, reward_function
from tba.tasks.judges import then

HUB = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
COLUMNS = ("query", "subreddit", "title", "post", "summary")
HEADINGS = {"subreddit": "SUBREDDIT: r/", "title": "TITLE: ", "post": "POST: "}


@dataclass(frozen=True, kw_only=True)
class Tldr(Splits):
    """Summaries of Reddit posts. The judge `proxy` provides the reward; the judge `gold` evaluates.

    A judge is specified like `reward` of `custom`. Its prompt is the post up to `TL;DR:`, and its
    completion is a space, the summary and `eos`. Evaluations report `win_rate`: the fraction of
    summaries that `gold` scores above the reference summary of the post, which is scored in the
    same call. Posts, prompts and penalty are from Asynchronous RLHF (arXiv 2410.18252).
    """

    test: ClassVar[str] = "validation"
    kept: ClassVar[Sequence[str]] = ("query", "summary")
    reports_perplexity: ClassVar[bool] = True
    proxy: str | PluginTable
    """Judge that provides the training reward."""
    gold: str | PluginTable | None = None
    """Judge that measures the win rate in evaluations; default: no win rate."""
    data: str = HUB
    """Hub name, file, or folder with train.jsonl and validation.jsonl. Columns are `summary`, and
    either `query` or `post`, optionally with `subreddit` and `title`."""
    prompt: str = "{query}"
    """Template; {query} is the post up to `TL;DR:`."""
    shot_response: str = "{summary}"
    eos: str = ""
    """Text of the EOS token, for judges trained on summaries that end with it."""
    missing_eos_reward: float = -1.0
    """Reward of a summary truncated at the token limit; `proxy` does not see it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._proxy, self._gold  # raise if a judge does not exist, before anything starts

    def read(self, key: str, source: str, split: str) -> Rows:
        table = rows(key, source, split, required=("summary",), columns=COLUMNS)
        for i, row in enumerate(table):
            for name in COLUMNS:
                if row.get(name) is not None:
                    with about(f"{key} = {source!r}: row {i}"):
                        row[name] = fill(f"{{{name}}}", row)
            if not (row["summary"] and (row.get("query") or row.get("post"))):
                raise ValueError(
                    f"{key} = {source!r}: row {i} needs a 'summary', and a 'post' or a 'query';"
                    " complete it, or remove it"
                )
            row["query"] = row.get("query") or query_of(row)
        return table

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> Scores | Awaitable[Scores]:
        finished = [a for a in answers if a.finished]
        scores = self._proxy.score(*self.shown(prompt, finished)) if finished else []

        def with_penalty(scores: Scores) -> Scores:
            following = iter(scores)
            return [next(following) if a.finished else self.missing_eos_reward for a in answers]

        return then(scores, with_penalty)

    def measures(self) -> Mapping[str, Scorer]:
        return {} if self._gold is None else {"win_rate": _WinRate(self, self._gold)}

    def shown(self, prompt: Prompt, answers: Sequence[Answer]) -> tuple[Prompt, list[Answer]]:
        """Return a post and summaries of it as judges see them."""
        post = Prompt(prompt.id, prompt.columns["query"], prompt.columns)
        summaries = []
        for a in answers:
            text = f" {a.text.strip()}{self.eos if a.finished else ''}"
            summaries.append(replace(a, text=text))
        return post, summaries

    @property
    def dependencies(self) -> list[tuple[str, Any]]:
        judges = {"task.proxy": self._proxy, "task.gold": self._gold}
        return [(key, judge.functions[0]) for key, judge in judges.items() if judge is not None]

    @cached_property
    def _proxy(self) -> Custom:
        return Custom(data="", passed=(reward_function("task.proxy", self.proxy),))

    @cached_property
    def _gold(self) -> Custom | None:
        if self.gold is None:
            return None
        return Custom(data="", passed=(reward_function("task.gold", self.gold),))


@dataclass(frozen=True)
class _WinRate(Scorer):
    """Scores 1 for a summary that the gold judge prefers to the reference, else (or in a tie) 0.

    Summaries without EOS are judged like all others. The score is None or NaN where the judge's is,
    or that of the reference: a rejection, not a loss.
    """

    task: Tldr
    gold: Custom

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> Scores | Awaitable[Scores]:
        reference = Answer(prompt.columns["summary"], finished=True)
        post, summaries = self.task.shown(prompt, [reference, *answers])

        def wins(scores: Scores) -> list[float | None]:
            level, *others = scores
            if level is None:
                return [None] * len(others)
            margins = [None if score is None else score - level for score in others]
            return [m if m is None or math.isnan(m) else float(m > 0) for m in margins]

        return then(self.gold.score(post, summaries), wins)


def query_of(row: Mapping[str, Any]) -> str:
    """Return the post up to `TL;DR:`, in the format of the data set on the Hub."""
    lines = [start + row[name] for name, start in HEADINGS.items() if row.get(name)]
    return "\n\n".join([*lines, "TL;DR:"])

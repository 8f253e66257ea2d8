"""A judge behind an HTTP server, as vLLM serves classifiers and causal guard models."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

import httpx2
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from tba.config.tables import Count, Positive, PositiveFloat
from tba.tasks._tools import within
from tba.tasks.judges import Judge, Text, conversation, fill
from tba.tasks.judges._server import JudgeError, Server

REACHED_WITHIN = 5.0
"""Seconds in which a server must answer before a run starts."""


class Part(BaseModel):
    """A part of an answer. Text and booleans are no numbers."""

    model_config = ConfigDict(strict=True)


class Probs(Part):
    """One text's score for each label."""

    index: int
    probs: list[FiniteFloat]


class Classified(Part):
    """Answer of `/classify`."""

    data: list[Probs]

    def scores(self, label: int | None, count: int) -> list[float]:
        """Return the scores of `count` texts, for the only label, or for this number of one.

        ValueError says what is wrong with the answer.
        """
        rows = {each.index: each.probs for each in self.data}
        if len(self.data) != count or rows.keys() != set(range(count)):
            raise ValueError(
                f"answered {len(self.data)} scores for {count} texts; each text must have one, and"
                " its index from 0 on"
            )
        number = label or 0
        for probs in rows.values():
            if number >= len(probs) or (label is None and len(probs) > 1):
                raise ValueError(
                    f"answered with {len(probs)} labels; set label to the number of one, from 0 on"
                )
        return [rows[index][number] for index in range(count)]


class Token(Part):
    token: str
    logprob: Annotated[FiniteFloat, Field(le=0.0)]


class Step(Token):
    """A token that was generated, and the likeliest tokens in its place."""

    top_logprobs: list[Token]


class Steps(Part):
    content: list[Step]


class Choice(Part):
    index: Literal[0] = 0
    logprobs: Steps


class Completed(Part):
    """Answer of `/v1/chat/completions` with log-probs."""

    choices: list[Choice] = Field(min_length=1, max_length=1)

    def logp(self, positive: str, negative: str) -> float:
        """Return log P(positive) of the two words, by the first token that is not blank.

        A word is as likely as the likeliest token that begins it. If none of the tokens in the
        answer begins it, it is as likely as the last of these, which is an upper bound.
        """
        steps = self.choices[0].logprobs.content
        first = next((step for step in steps if step.token.strip()), None)
        likeliest = [] if first is None else first.top_logprobs
        of_positive = [token.logprob for token in likeliest if _begins(token, positive, negative)]
        of_negative = [token.logprob for token in likeliest if _begins(token, negative, positive)]
        if not of_positive and not of_negative:
            raise ValueError(f"began its answer with neither {positive!r} nor {negative!r}")
        least = min(token.logprob for token in likeliest)
        gap = max(of_negative, default=least) - max(of_positive, default=least)
        return -float(np.logaddexp(0.0, gap))


def _begins(token: Token, word: str, other: str) -> bool:
    """Return whether a token begins a word, and not also the other one."""
    text = token.token.strip()
    return text != "" and word.startswith(text) and not other.startswith(text)


@dataclass(frozen=True)
class Http(Judge):
    """Scores by a model that vLLM, or a server with the same interface, serves at `url`.

    A url that ends with `/classify` leads to a sequence classifier, and one that ends with
    `/chat/completions` to a guard model, which is scored by the first word of its answer: the
    probability of `positive` against `negative` among the 20 likeliest tokens.
    """

    url: str
    """Address that ends with /classify or /chat/completions."""
    model: str
    """Name under which the server serves the model."""
    label: Count | None = None
    """classify: number of the label to score; needed if there are several."""
    positive: str = "unsafe"
    """chat: word whose probability is the score."""
    negative: str = "safe"
    """chat: the other word."""
    value: Literal["probability", "log_probability", "logit"] = "probability"
    """logit: of a classifier only, whose server must know vLLM's `use_activation`."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key. The key is written nowhere."""
    deadline: PositiveFloat = 10.0
    """Seconds for each request."""
    retries: Count = 4
    """Repetitions after 429, 5xx, a lost connection or the deadline, at growing intervals."""
    concurrency: Positive = 32
    """Requests at one time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            url = httpx2.URL(self.url)
        except httpx2.InvalidURL:
            url = httpx2.URL()
        if url.userinfo or url.query:  # the config that a run writes has the url
            raise ValueError(
                "url holds a user name, a password or a query, such as ?key=; use api_key_env for a"
                " key, and no query"
            )
        reachable = url.scheme in ("http", "https") and url.host
        if not (reachable and url.path.endswith(("/classify", "/chat/completions"))):
            raise ValueError(
                f"url = {self.url!r} must begin with http:// or https:// and end with /classify"
                " or /chat/completions, such as http://localhost:8000/classify"
            )
        if self.value == "logit" and not self._classifies:
            raise ValueError("value = 'logit' needs a url that ends with /classify")

    def check(self) -> None:
        """Score a short text; ValueError if the server does not do so within 5 seconds."""
        self._server.key()
        # a copy, because connections belong to the event loop that makes them
        judge = replace(self, retries=0, deadline=min(self.deadline, 0.9 * REACHED_WITHIN))
        # in a thread, because a look-up of a name cannot be cancelled
        (scores,) = within(REACHED_WITHIN, [lambda: asyncio.run(judge(["Hello"], ["Hello"]))])
        if not isinstance(scores, list):  # None, or an error of one of several classes
            why = str(scores or "") or f"{self.url} does not answer"
            raise ValueError(f"{why}. It must answer before a run starts")

    def load(self, device: str) -> None:
        self._server.key()  # it may be missing on this machine

    async def __call__(
        self, prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
    ) -> list[float]:
        items = [self._item(*pair) for pair in zip(prompts, completions, strict=True)]
        try:
            if not self._classifies:
                return await asyncio.gather(*map(self._first_word, items))
            if self.template is not None:
                return await self._classified(items, {"input": items})
            # messages go one by one
            asked = [self._classified([item], {"messages": item}) for item in items]
            return [score for (score,) in await asyncio.gather(*asked)]
        except ValueError as error:
            raise JudgeError(f"{self.url} {error}") from error

    async def _classified(self, items: list[Any], asked: Mapping[str, Any]) -> list[float]:
        """Return the scores of what one request asks for."""
        body = {"model": self.model, **asked}
        if self.value == "logit":
            body["use_activation"] = False
        answer = await self._server.post(body, Classified)
        scores = answer.scores(self.label, len(items))
        if self.value == "logit":
            return scores
        for score in scores:
            if not 0 <= score <= 1:
                raise ValueError(
                    f"answered the probability {score}, which is not from 0 to 1; if it is a"
                    " logit, set value = 'logit'"
                )
        if self.value == "probability":
            return scores
        return [math.log(score) if score > 0 else -math.inf for score in scores]

    async def _first_word(self, item: Any) -> float:
        """Return the score by the first word that a guard model answers."""
        messages = item if self.template is None else [{"role": "user", "content": item}]
        body = {
            "model": self.model,
            "messages": messages,
            "temperature": 0.0,
            "max_tokens": 3,  # Llama Guard may begin with line breaks
            "logprobs": True,
            "top_logprobs": 20,
        }
        answer = await self._server.post(body, Completed)
        logp = answer.logp(self.positive, self.negative)
        return logp if self.value == "log_probability" else math.exp(logp)

    def _item(self, prompt: Text, completion: Text) -> Any:
        """Return what is scored: text, or chat messages for the server's chat template."""
        if self.template is None:
            return conversation(prompt, completion)
        return fill(self.template, prompt, completion)

    @property
    def _classifies(self) -> bool:
        return httpx2.URL(self.url).path.endswith("/classify")

    @cached_property
    def _server(self) -> Server:
        return Server(self.url, self.api_key_env, self.deadline, self.retries, self.concurrency)

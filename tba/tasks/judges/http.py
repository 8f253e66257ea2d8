"""A judge behind an HTTP server, as vLLM serves classifiers and causal guard models."""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal

import httpx2

from tba.config.tables import Count, Positive, PositiveFloat
from tba.tasks._tools import within
from tba.tasks.judges import Judge, Text, conversation, fill
from tba.tasks.judges._answers import Classified, Completed
from tba.tasks.judges._server import JudgeError, Server, tell_proxy

REACHED_WITHIN = 5.0
"""Seconds in which a server must answer before a run starts."""


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
    label: int | None = None
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
    cache_size: Count = 10_000
    """Scores to keep. A completion that comes again is then not sent again."""

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
        tell_proxy(self.url)
        judge = replace(self)  # connections belong to the event loop that makes them
        judge._server.patience = 0.9 * REACHED_WITHIN
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
        keys = [sha256(json.dumps(item).encode()).digest() for item in items]
        scores = {key: self._cache[key] for key in keys if key in self._cache}
        pairs = zip(keys, items, strict=True)
        missing = {key: item for key, item in pairs if key not in scores}
        # a classifier takes a list of texts, but messages one by one
        together = self._classifies and self.template is not None
        batches = [missing] if together else [{key: item} for key, item in missing.items()]
        asked = [self._ask(batch) for batch in batches if batch]
        # all of them end, so that those that succeed are in the cache when the group is repeated
        for answered in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answered, BaseException):
                raise answered
            scores |= answered
        return [scores[key] for key in keys]

    async def _ask(self, items: Mapping[bytes, Any]) -> dict[bytes, float]:
        """Return the scores of what one request holds, by key, and keep them."""
        values = list(items.values())
        try:
            if self._classifies:
                found = await self._classified(values)
            else:
                found = [await self._first_word(values[0])]
        except ValueError as error:
            raise JudgeError(f"{self.url} {error}") from error
        scores = dict(zip(items, found, strict=True))
        self._cache.update(scores)
        while len(self._cache) > self.cache_size:
            self._cache.pop(next(iter(self._cache)))  # the oldest
        return scores

    async def _classified(self, items: list[Any]) -> list[float]:
        body: dict[str, Any] = {"model": self.model}
        body |= {"messages": items[0]} if self.template is None else {"input": items}
        if self.value == "logit":
            body["use_activation"] = False
        answer = await self._server.post(body, Classified)
        scores = answer.scores(self.label, len(items))
        if self.value == "log_probability":
            return [math.log(score) if score > 0 else -math.inf for score in scores]
        return scores

    async def _first_word(self, item: Any) -> float:
        messages = item if self.template is None else [{"role": "user", "content": item}]
        body = {"model": self.model, "messages": messages, "temperature": 0.0}
        # Llama Guard may begin with line breaks
        body |= {"max_tokens": 3, "logprobs": True, "top_logprobs": 20}
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

    @cached_property
    def _cache(self) -> dict[bytes, float]:
        return {}

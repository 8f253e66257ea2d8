"""Classifier behind an HTTP server, as served by vLLM."""

import asyncio
import math
import random
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import httpx2
from pydantic import BaseModel, FiniteFloat, ValidationError

from tba.config.tables import Count
from tba.tasks._calls import within
from tba.tasks.judges import Judge, Text, conversation, filled

REACHED_WITHIN = 5.0
"""Seconds within which a server must answer before a run starts."""
FIRST_WAIT = 0.5
"""Maximum seconds before the first retry."""
LONGEST_WAIT = 60.0
"""Maximum seconds before any retry."""
LONGEST_REQUEST = 60.0
"""Seconds for each request, including its wait for other requests of the group."""
MAX_REPLY_BYTES = 2**22
"""Maximum size of an answer in bytes."""
SHOWN = 300
"""Maximum number of characters of an answer in an error message."""
HIDDEN = "(its reply is not shown, because it may contain the key)"


class JudgeError(RuntimeError):
    """A judge's server did not answer, or its answer is not a score."""


class Probs(BaseModel, strict=True):  # text and booleans are not numbers
    """Scores of one text, one per label."""

    index: int
    probs: list[FiniteFloat]


class ClassifyResponse(BaseModel, strict=True):
    """Answer of `/classify`."""

    data: list[Probs]

    def scores(self, label: int | None, count: int) -> list[float]:
        """Return the scores of `count` texts for the label with this number, or the only label.

        Raises ValueError, which describes the problem, if the answer is invalid.
        """
        rows = {each.index: each.probs for each in self.data}
        if len(self.data) != count or rows.keys() != set(range(count)):
            raise ValueError(
                f"answered with {len(self.data)} scores for {count} texts; each must have one, and"
                " its index, starting at 0"
            )
        number = label or 0
        for probs in rows.values():
            if number >= len(probs) or (label is None and len(probs) > 1):
                raise ValueError(
                    f"answered with {len(probs)} labels; set label to the number of one, from 0"
                )
        return [rows[index][number] for index in range(count)]


@dataclass(frozen=True)
class Http(Judge):
    """Scores with a classifier that vLLM, or a server with the same API, serves at `url`."""

    url: str
    """URL that ends with /classify."""
    model: str
    """Name of the model on the server."""
    label: Count | None = None
    """Number of the label to score; required if the model has several."""
    value: Literal["probability", "log_probability", "logit"] = "probability"
    """Kind of score; `logit` requires a server that supports vLLM's `use_activation`."""
    api_key: str | None = field(default=None, repr=False)
    """API key of the server, as `env:NAME` of the environment variable that contains it."""
    retries: Count = 4
    """Number of retries after 429, 5xx, a lost connection or 60 seconds, with backoff."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            url = httpx2.URL(self.url)
        except httpx2.InvalidURL:
            url = httpx2.URL()
        if url.userinfo or url.query:  # a run writes the URL into its config file
            raise ValueError(
                "url holds a user name, a password or a query, such as ?key=; use api_key for a"
                " key, and no query"
            )
        if not all("!" <= character <= "~" for character in self._key):
            raise ValueError("api_key has invalid characters")
        reachable = url.scheme in ("http", "https") and url.host
        if not (reachable and url.path.endswith("/classify")):
            raise ValueError(
                f"url = {self.url!r} must begin with http:// or https:// and end with /classify,"
                " such as http://localhost:8000/classify"
            )

    def check(self) -> None:
        """Score a short text; ValueError if the server takes longer than 5 seconds or fails."""

        async def tried() -> list[float]:
            async with asyncio.timeout(0.9 * REACHED_WITHIN):
                return await replace(self, retries=0)(["Hello"], ["Hello"])

        # in a thread, because a notebook has an event loop, and DNS look-ups have no deadline
        (scores,) = within(REACHED_WITHIN, [lambda: asyncio.run(tried())])
        if not isinstance(scores, list):  # None, or an error of one of several classes
            why = str(scores or "") or f"{self.url} does not answer"
            raise ValueError(f"{why}. It must answer before a run starts")

    async def __call__(
        self, prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
    ) -> list[float]:
        items: list[Any] = []
        for pair in zip(prompts, completions, strict=True):
            text = self.template
            items.append(conversation(*pair) if text is None else filled(text, *pair))
        headers = {"Accept-Encoding": "identity"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        client = httpx2.AsyncClient(
            headers=headers,
            timeout=None,  # `_post` has a timeout
            verify=_tls(),
        )
        try:
            async with client:
                if self.template is not None:
                    return await self._classified(client, items, {"input": items})
                # the API accepts one conversation per request
                asked = [self._classified(client, [item], {"messages": item}) for item in items]
                return [score for (score,) in await asyncio.gather(*asked)]
        except ValueError as error:
            raise JudgeError(f"{self.url} {error}") from error

    async def _classified(
        self, client: httpx2.AsyncClient, items: list[Any], asked: Mapping[str, Any]
    ) -> list[float]:
        """Return the scores of the items of one request."""
        body = {"model": self.model, **asked}
        if self.value == "logit":
            body["use_activation"] = False
        answer = await self._post(client, body)
        scores = answer.scores(self.label, len(items))
        if self.value == "logit":
            return scores
        for score in scores:
            if not 0 <= score <= 1:
                raise ValueError(
                    f"answered with a probability of {score}, not between 0 and 1; if it is a"
                    " logit, set value = 'logit'"
                )
        if self.value == "probability":
            return scores
        return [math.log(score) if score > 0 else -math.inf for score in scores]

    @property
    def _key(self) -> str:
        return (self.api_key or "").strip()

    async def _post(self, client: httpx2.AsyncClient, body: Mapping[str, Any]) -> ClassifyResponse:
        """Return the server's answer; JudgeError if the last retry fails.

        Retries after 429, 5xx, a lost connection, or `LONGEST_REQUEST`. Raises ValueError for an
        answer that is too large, or malformed.
        """
        for attempt in range(self.retries + 1):
            try:
                request = client.stream("POST", self.url, json=body)
                async with asyncio.timeout(LONGEST_REQUEST), request as response:
                    encoding = response.headers.get("content-encoding", "identity")
                    if encoding != "identity":
                        told = f"answered in {encoding}, though it was asked for plain text"
                        raise ValueError(told)
                    content = bytearray()
                    async for part in response.aiter_raw():  # no more than is kept
                        content += part
                        if len(content) > MAX_REPLY_BYTES:
                            raise ValueError(f"answered with more than {MAX_REPLY_BYTES:,} bytes")
            except (httpx2.RequestError, TimeoutError) as error:
                problem = f"{type(error).__name__} {self._shown(str(error))}".strip()
            else:
                text = self._shown(content.decode("utf-8", "replace"))
                if response.is_success:
                    try:
                        return ClassifyResponse.model_validate_json(content)
                    except ValidationError as error:
                        first = error.errors(include_input=False)[0]
                    # raised here: the cause has the input, which may contain the key
                    place = ".".join(map(str, first["loc"])) or "it"
                    told = f"answered with invalid data ({place}: {first['msg']}): {text}"
                    raise ValueError(told)
                problem = f"status {response.status_code}: {text}"
                if response.status_code != 429 and response.status_code < 500:
                    break
            if attempt < self.retries:
                longest = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt)
                await asyncio.sleep(longest * random.uniform(0.5, 1.0))
        times = f" {attempt + 1} times" if attempt else ""
        raise JudgeError(f"{self.url} failed{times}: {problem}")

    def _shown(self, sent: str) -> str:
        """Return the beginning of a server's reply, hidden if it could contain the API key."""
        return HIDDEN if self._key else sent[:SHOWN]


@cache
def _tls() -> ssl.SSLContext:
    """Return a TLS context shared by all judges of a process: reading certificates is slow."""
    return httpx2.create_ssl_context()

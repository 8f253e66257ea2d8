"""A judge's server: JSON over HTTP with deadlines, retries, a limit on requests, and a key."""

import asyncio
import logging
import math
import os
import random
import re
import time
import unicodedata
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import cache
from ipaddress import ip_address
from typing import Any, NamedTuple, TypeVar
from urllib.request import getproxies, proxy_bypass

import httpx2
from pydantic import BaseModel, ValidationError

log = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=BaseModel)

FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0
"""Seconds before the first retry, and at most before any."""


LARGEST, READ = 2**22, 4_000
"""Most bytes of an answer, decompressed; characters of it that are read for an error."""
PLAIN = {"Accept-Encoding": "identity"}


class JudgeError(RuntimeError):
    """A judge's server did not answer, or its answer is not a score."""


class Connection(NamedTuple):
    """A client and its slots, which belong to an event loop."""

    loop: asyncio.AbstractEventLoop
    client: httpx2.AsyncClient
    slots: asyncio.Semaphore
    closing: asyncio.Task[None]


@dataclass
class Server:
    """One address that takes JSON and answers JSON."""

    url: str
    api_key_env: str | None
    deadline: float
    """Seconds for a request."""
    retries: int
    concurrency: int
    """Requests at one time, of all groups together."""
    patience: float = math.inf
    """Seconds for a request and its retries."""
    _connection: Connection | None = field(default=None, init=False, repr=False)
    _sent: str = field(default="", init=False, repr=False)
    """The key that requests have."""

    def key(self) -> str:
        """Return the key, or "" if there is none; ValueError if its variable is wrong.

        No error quotes the variable or its name, in whose place a user may have written the key.
        """
        if self.api_key_env is None:
            return ""
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise ValueError(
                "api_key_env must be the name of an environment variable that holds the key:"
                " export it where tba is started, and on every machine with searchers"
            )
        if not all("!" <= character <= "~" for character in key):
            raise ValueError("the key that api_key_env names has characters that no key has")
        return key

    async def post(self, body: Mapping[str, Any], answer: type[Answer]) -> Answer:
        """Return the server's answer; JudgeError if there is none after the last retry.

        A request is repeated after 429, 5xx, a lost connection, or its deadline.
        """
        until = time.monotonic() + self.patience
        connection = self._connect()
        for attempt in range(self.retries + 1):
            asked = 0.0
            try:
                request = connection.client.stream("POST", self.url, json=body)
                limit = asyncio.timeout(self._left(until))
                async with connection.slots, limit, request as response:
                    content = await _read(response)
            except (httpx2.RequestError, TimeoutError) as error:
                problem = f"{type(error).__name__} {self._excerpt(str(error))}".strip()
            except ValueError as error:
                raise JudgeError(f"{self.url} {error}") from error
            else:
                if response.is_success:
                    return self._parsed(content, answer)
                told = self._excerpt(content.decode("utf-8", "replace"))
                problem = f"status {response.status_code}: {told}"
                if response.status_code != 429 and response.status_code < 500:
                    break
                asked = _retry_after(response.headers.get("retry-after", ""))
                problem += f" (to be repeated after {asked:g} s)" if asked else ""
            jittered = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1.0)
            last = attempt == self.retries or time.monotonic() + asked + jittered > until
            if last or asked > LONGEST_WAIT:
                break
            await asyncio.sleep(asked + jittered)
        times = f" {attempt + 1} times" if attempt else ""
        raise JudgeError(f"{self.url} failed{times}: {problem}")

    def _parsed(self, content: bytes, answer: type[Answer]) -> Answer:
        try:
            return answer.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            place = ".".join(map(str, first["loc"])) or "it"
            why = f"{place}: {first['msg']}"
        told = self._excerpt(content.decode("utf-8", "replace"))
        raise JudgeError(f"{self.url} answered nonsense ({why}): {told}")

    def _excerpt(self, text: str) -> str:
        """Return the beginning of what a server sent, without the key, which it may repeat."""
        return without_key(text[:READ], self._sent)[:300]

    def _left(self, until: float) -> float:
        return min(self.deadline, until - time.monotonic())

    def _connect(self) -> Connection:
        """Return the connection of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._connection is None or self._connection.loop is not loop:
            self._sent = key = self.key()
            client = httpx2.AsyncClient(
                headers=PLAIN | ({"Authorization": f"Bearer {key}"} if key else {}),
                timeout=None,  # `post` has its own
                trust_env=not is_loopback(self.url),
                limits=httpx2.Limits(max_connections=self.concurrency),
            )
            slots, closing = asyncio.Semaphore(self.concurrency), _close_at_end(client)
            self._connection = Connection(loop, client, slots, loop.create_task(closing))
        return self._connection


async def _read(response: httpx2.Response) -> bytes:
    """Return the body of an answer; ValueError, before more is read, if it is too large."""
    body, encoding = bytearray(), response.headers.get("content-encoding", "identity")
    async for part in response.aiter_raw():
        body += part
        if len(body) > LARGEST:
            break
    if encoding in ("gzip", "deflate"):
        with suppress(zlib.error):  # what is no such stream is refused as nonsense
            body = bytearray(zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(body, LARGEST + 1))
    if len(body) > LARGEST:
        raise ValueError(f"answered with more than {LARGEST:,} bytes")
    return bytes(body)


def is_loopback(url: str) -> bool:
    """Return whether a server is on this machine, so that no proxy leads to it."""
    host = httpx2.URL(url).host
    with suppress(ValueError):
        address = ip_address(host)
        return address.is_loopback or address.is_unspecified
    return host == "localhost" or host.endswith(".localhost")


@cache
def tell_proxy(url: str) -> None:
    """Log once that the environment names a proxy for a server, without the proxy's password."""
    named, to = getproxies(), httpx2.URL(url)
    proxy = named.get(to.scheme) or named.get("all")
    if proxy and not is_loopback(url) and not proxy_bypass(to.host):
        log.warning(
            "%s is asked through a proxy of the environment, %s", url, proxy.rpartition("@")[2]
        )


def without_key(text: str, key: str) -> str:
    """Return what a server sent without the key, in whatever form the server repeats it.

    If there is a key, only words as people write them stay: no digits, no capitals within.
    """
    if not key:
        return text
    text = unicodedata.normalize("NFKC", text)
    text = re.sub(re.escape(key), "***", text, flags=re.IGNORECASE)
    letters, own = (re.sub(r"[\W_]", "", each).casefold() for each in (text, key))
    if own in letters or own[::-1] in letters:
        return "***"
    return re.sub(r"[^\W_]+", _plain, text)


def _plain(word: re.Match[str]) -> str:
    text = word[0]
    is_word = text.islower() or text.istitle() or (text.isupper() and len(text) <= 6)
    return text if is_word and text.isalpha() else "***"


async def _close_at_end(client: httpx2.AsyncClient) -> None:
    """Close the client when the event loop ends, which cancels the tasks that are left."""
    try:
        await asyncio.sleep(math.inf)
    finally:
        await client.aclose()


def _retry_after(value: str) -> float:
    """Return the seconds that a server asks to wait, by a number or a date; 0 if it does not."""
    if value.isdecimal():
        return float(value)
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0

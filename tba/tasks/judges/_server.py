"""A judge's server: JSON over HTTP with deadlines, retries, a limit on requests, and a key."""

import asyncio
import math
import os
import random
import re
import socket
import time
import unicodedata
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from ipaddress import IPv6Address, ip_address
from typing import Any, NamedTuple, TypeVar

import httpx2
from pydantic import BaseModel, ValidationError

Answer = TypeVar("Answer", bound=BaseModel)

FIRST_WAIT = 0.5
"""Seconds before the first retry, at most."""
LONGEST_WAIT = 60.0
"""Most seconds before any retry."""
LARGEST = 2**22
"""Most bytes of an answer."""
READ = 4_000
"""Most characters of an answer that are read for an error."""
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

        A request is repeated after 429, 5xx, a lost connection, or its deadline. ValueError for an
        answer that is too large, or not of the right form.
        """
        connection = self._connect()
        for attempt in range(self.retries + 1):
            asked = 0.0
            try:
                request = connection.client.stream("POST", self.url, json=body)
                async with connection.slots, asyncio.timeout(self.deadline), request as response:
                    content = await _read(response)
            except (httpx2.RequestError, TimeoutError) as error:
                problem = f"{type(error).__name__} {self._excerpt(str(error))}".strip()
            else:
                if response.is_success:
                    return self._parsed(content, answer)
                excerpt = self._excerpt(content.decode("utf-8", "replace"))
                problem = f"status {response.status_code}: {excerpt}"
                if response.status_code != 429 and response.status_code < 500:
                    break
                asked = _retry_after(response.headers.get("retry-after", ""))
                problem += f" (to be repeated after {asked:g} s)" if asked else ""
            if attempt == self.retries or asked > LONGEST_WAIT:
                break
            jittered = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1.0)
            await asyncio.sleep(asked + jittered)
        times = f" {attempt + 1} times" if attempt else ""
        raise JudgeError(f"{self.url} failed{times}: {problem}")

    def _parsed(self, content: bytes, answer: type[Answer]) -> Answer:
        try:
            return answer.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "it"
        excerpt = self._excerpt(content.decode("utf-8", "replace"))
        raise ValueError(f"answered nonsense ({place}: {first['msg']}): {excerpt}")

    def _excerpt(self, text: str) -> str:
        """Return the beginning of what a server sent, without the key, which it may repeat."""
        return without_key(text[:READ], self._sent)[:300]

    def _connect(self) -> Connection:
        """Return the connection of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._connection is None or self._connection.loop is not loop:
            self._sent = self.key()
            authorization = {"Authorization": f"Bearer {self._sent}"} if self._sent else {}
            client = httpx2.AsyncClient(
                headers=PLAIN | authorization,
                timeout=None,  # `post` has its own
                trust_env=not is_loopback(self.url),
                limits=httpx2.Limits(max_connections=self.concurrency),
            )
            self._connection = Connection(
                loop=loop,
                client=client,
                slots=asyncio.Semaphore(self.concurrency),
                closing=loop.create_task(_close_at_end(client)),
            )
        return self._connection


async def _read(response: httpx2.Response) -> bytes:
    """Return the body of an answer; ValueError, before more is read, if it is too large."""
    encoding = response.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ValueError(f"answered in {encoding}, though it was asked for plain text")
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > LARGEST:
            raise ValueError(f"answered with more than {LARGEST:,} bytes")
    return bytes(body)


def is_loopback(url: str) -> bool:
    """Return whether a server is on this machine, so that no proxy leads to it.

    Its address may be written in any way that a system's resolver reads, such as 127.1.
    """
    host = httpx2.URL(url).host.rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    with suppress(OSError):
        host = socket.inet_ntoa(socket.inet_aton(host))
    try:
        address = ip_address(host)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback or address.is_unspecified


def without_key(text: str, key: str) -> str:
    """Return what a server sent without the key, in whatever form the server repeats it.

    If there is a key, only words as people write them stay: no digits, no capitals within.
    """
    if not key:
        return text
    text = unicodedata.normalize("NFKC", text)
    text = re.sub(re.escape(key), "***", text, flags=re.IGNORECASE)
    letters, secret = (re.sub(r"[\W_]", "", each).casefold() for each in (text, key))
    if secret in letters or secret[::-1] in letters:
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

"""Secrets: which texts of a config are secret, and the variables that hold them."""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from tba.config.mistakes import KNOWN

WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
SECRET = re.compile(
    r"[a-z]*(secret|password|passwd|passphrase|passcode|credential|authorization|apikey)s?|pwd"
    r"|(auth|access|private|secret)(key|token)s|o?auth|creds?|bearer|cookies?|jwts?|pats?"
)
KEY = re.compile(
    r"(api|auth|access|private|secret|ssh|gpg|gh|hf|openai)?(key|token)|(db|user)?pass"
)
OF_TEXTS = re.compile(r"(bos|eos|pad|unk|sep|cls|mask|stop)[_-]?token", re.IGNORECASE)
"""Names of options that are a tokenizer's tokens, not secrets."""
DATA = re.compile(
    "bos|eos|pad|mask|stop|special|extra|added|bad|banned|allowed|prompt|answer|label|metric|sort"
    "|max|min|num|total|count|budget|limit|length|size|per|rate|level|step|threshold|at|ids|reward"
)
"""Words in a name that mark its keys and tokens as data, unless a key or token ends the name."""
PLACE = re.compile("files?|paths?|dir|folder|names?|columns?|field|url|uri|type")
"""Last words of names for the place or the name of a secret."""
PASSWORD = re.compile(
    r"\w://[^/\s:@]*:([^/?\s@]+)@|\w://\S+[?&](?:\w*_)?(?:password|pwd|secret|token|key)=([^&\s]+)"
)
"""A URL with a password."""
NAMED = re.compile(r"env:\w+")
"""The name of an environment variable, which stands for its value."""


def is_secret(name: object, value: str = "") -> bool:
    """Return whether a name, such as `apiKey`, or the value itself shows that it is secret."""
    key = str(name).rpartition(".")[2]
    words = [word.lower() for word in WORDS.findall(key)]
    if PASSWORD.search(value) or key == "PWD" or not words or PLACE.fullmatch(words[-1]):
        return PASSWORD.search(value) is not None
    if KEY.fullmatch(words[-1]):
        return not OF_TEXTS.fullmatch(key)
    is_data = words in (["keys"], ["tokens"]) or any(map(DATA.fullmatch, words))
    counts = not is_data or not {"api", "access", "private"}.isdisjoint(words)
    singular = [word.removesuffix("s") for word in words]
    has_key = counts and any(map(KEY.fullmatch, words + singular))
    return has_key or any(map(SECRET.fullmatch, words))


def check_secrets(name: str, value: Any) -> None:
    """Raise ValueError, without quoting it, for a secret that is written into the options."""
    _replaced(name, value, is_secret(name), _check)


def read_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with their secrets filled in; ValueError if a variable is not set."""

    def value_of(place: str, text: str) -> str:
        secret = os.environ.get(variable := _check(place, text).removeprefix("env:"), "")
        if text and not secret:
            raise ValueError(
                f"{place}: the environment variable {variable!r} is not set; export it where tba is"
                " started, and on every machine with searchers"
            )
        passwords = (part for found in PASSWORD.findall(secret) for part in found)
        KNOWN.update(part for part in (secret, *passwords) if len(part) >= 4)  # else it masks words
        return secret

    return _replaced("", options, False, value_of)


def _check(place: str, text: str) -> str:
    if text and not NAMED.fullmatch(text):
        raise ValueError(
            f"{place} is a secret, and the config is written to files; put it into an environment"
            " variable, and give its name instead: env:NAME"
        )
    return text


def _replaced(place: str, value: Any, secret: bool, give: Callable[[str, str], str]) -> Any:
    """Return a value with each secret text in it replaced by `give`."""

    def inner(key: object, each: Any) -> Any:
        own = is_secret(key) or (secret and not PLACE.fullmatch(str(key)))
        return _replaced(f"{place}.{key}".lstrip("."), each, own, give)

    match value:
        case str():
            is_own = secret or NAMED.fullmatch(value) or PASSWORD.search(value)
            return give(place, value) if is_own else value
        case Mapping():
            return {key: inner(key, each) for key, each in value.items()}
        case list() | tuple():
            return type(value)([inner(i, each) for i, each in enumerate(value)])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        changed = {name: inner(name, getattr(value, name)) for name in fields}
        return dataclasses.replace(value, **changed)
    return value

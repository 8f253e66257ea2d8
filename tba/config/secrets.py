"""Secrets in options. A config has `env:NAME` in their place, which names a variable."""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
SECRET = re.compile(r"(api)?key|token|secrets?|password|passwd|credentials?|authorization")
OF_TEXTS = re.compile(r"(bos|eos|pad|unk|sep|cls|mask|stop)[_-]?token", re.IGNORECASE)
"""Names of options that are tokens of a tokenizer, and no secrets."""

KNOWN: set[str] = set()
"""Secrets that this process has read."""


def is_secret(name: object) -> bool:
    """Return whether the last word of a name, such as `apiKey`, says that its value is secret."""
    words = WORDS.findall(str(name))
    named = bool(words) and SECRET.fullmatch(words[-1].lower()) is not None
    return named and not OF_TEXTS.fullmatch(str(name))


def check_secrets(name: str, value: Any) -> None:
    """Raise ValueError, without quoting it, for a secret that stands in options itself."""
    _replaced(name, value, is_secret(name.rpartition(".")[2]), _check)


def read_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with their secrets; ValueError if one's variable is not set."""
    return _replaced("", options, False, _read)


def masked(text: str) -> str:
    """Return text, such as an error of a user's function, without the secrets that were read."""
    for secret in KNOWN:
        text = text.replace(secret, "***")
    return text


def _check(place: str, text: str) -> str:
    if text and not re.fullmatch(r"env:\w+", text):
        raise ValueError(
            f"{place} is a secret, and the config is written to files; put it into an environment"
            " variable, and give its name instead: env:NAME"
        )
    return text


def _read(place: str, text: str) -> str:
    secret = os.environ.get(variable := text.removeprefix("env:"), "")
    if text and not secret:
        raise ValueError(
            f"{place}: the environment variable {variable!r} is not set; export it where tba is"
            " started, and on every machine with searchers"
        )
    KNOWN.update({secret} if len(secret) >= 4 else ())
    return secret


def _replaced(place: str, value: Any, secret: bool, give: Callable[[str, str], str]) -> Any:
    """Return a value in which `give` has replaced each text that is secret."""

    def inner(key: object, each: Any) -> Any:
        own = secret or is_secret(key)
        return _replaced(f"{place}.{key}".lstrip("."), each, own, give)

    match value:
        case str():
            return give(place, value) if secret else value
        case Mapping():
            return {key: inner(key, each) for key, each in value.items()}
        case list() | tuple():
            return type(value)([inner(i, each) for i, each in enumerate(value)])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        changed = {name: inner(name, getattr(value, name)) for name in fields}
        return dataclasses.replace(value, **changed)
    return value

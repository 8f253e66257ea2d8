"""Notes and warnings about the prompts of a run, before it starts."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers.models import Unigram

from tba.config.schema import Config
from tba.models.pretrained import Tokenizer
from tba.prompt import Prompt
from tba.runs.warn import RunWarning

Encoded = tuple[Prompt, np.ndarray]
"""A prompt with its tokens."""
SHOWN = 10
"""Most unknown characters that a warning shows."""
log = logging.getLogger(__name__)


def chat_notes(config: Config, has_template: bool) -> list[str]:
    """Return a note if `chat = "auto"` means plain text; `config` still has "auto"."""
    tables = {"task": config.task.options}
    tables |= {f"eval.sets.{name}": each.options for name, each in config.eval.sets.items()}
    keys = [key for name, options in tables.items() for key in _automatic(name, options)]
    if has_template or not keys:
        return []
    told = "prompts are used as plain text, because the tokenizer has no chat template"
    return [f"{', '.join(keys)} = auto: {told}"]


def _automatic(table: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a task, and of the parts of a mixture, that are `chat = "auto"`."""
    if options.get("chat") == "auto":
        yield f"{table}.chat"
    for name, part in (options.get("parts") or {}).items():
        yield from _automatic(f"{table}.parts.{name}", part)


def log_doubled_bos(text: Tokenizer, encoded: Sequence[Encoded]) -> None:
    """Log how many prompts begin with two BOS tokens, as those do that have one as text."""
    two = [text.tokenizer.bos_token_id] * 2
    if doubled := sum(ids[:2].tolist() == two for _, ids in encoded):
        told = "%d of %d prompts begin with two BOS tokens; remove %s from their text"
        log.warning(told, doubled, len(encoded), text.tokenizer.bos_token)


def unknown_characters(
    limit: float, text: Tokenizer, encoded: Sequence[Encoded]
) -> list[RunWarning]:
    """Return a warning if a larger share of the prompts than `limit` has unknown characters."""
    unknown = _unknown_token(text.tokenizer)
    number = None if unknown is None else text.tokenizer.convert_tokens_to_ids(unknown)
    affected = [] if number is None else [p for p, ids in encoded if number in ids]
    share = len(affected) / len(encoded)
    if share <= limit:
        return []
    written = sorted({c for prompt in affected for c in _written(prompt)})
    encode = text.tokenizer
    missing = [c for c in written if number in encode(c, add_special_tokens=False)["input_ids"]]
    examples = f" ({' '.join(map(repr, missing[:SHOWN]))})" if missing else ""
    told = (
        f"{len(affected):,} of {len(encoded):,} prompts ({share:.1%}) have characters that the"
        f" tokenizer does not know{examples}; more than warn.unknown_characters = {limit:g}: the"
        f" policy reads {unknown!r} in their place; write the prompts without them, or choose"
        " another model"
    )
    return [("unknown_characters", told)]


def _unknown_token(tokenizer: Any) -> str | None:
    """Return the token that stands for what is unknown, None if everything has tokens.

    `tokenizer.unk_token` may name a token that the tokenizer itself never uses, or none.
    """
    if not tokenizer.is_fast:
        return tokenizer.unk_token
    model = tokenizer.backend_tokenizer.model
    return tokenizer.unk_token if isinstance(model, Unigram) else model.unk_token


def _written(prompt: Prompt) -> str:
    """Return everything that is written in a prompt."""
    if isinstance(prompt.text, str):
        return prompt.text
    return "".join(str(message.get("content", "")) for message in prompt.text)

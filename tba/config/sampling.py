"""The table [sampling] of a config."""

from math import isfinite
from typing import Any, Literal

from pydantic import field_validator

from tba.config.keys import (
    Count,
    Positive,
    PositiveFloat,
    PositiveShare,
    Range,
    Table,
    Texts,
    key,
)

OFF = {"top_p": 1.0, "top_k": 0}
"""Settings that change which tokens are chosen, but not the log-probs; the value without effect."""


class SamplingTable(Table):
    samples: Positive = key(20, "S, responses to sample per prompt; at least trainer.group_size")
    temperature: PositiveFloat = key(
        1.0, "sampling temperature; all log-probs are of the distribution at this temperature"
    )
    top_p: PositiveShare = key(
        1.0, "nucleus sampling; below 1, log-probs are still those of the untruncated distribution"
    )
    top_k: Count = key(
        0, "choose from the k most likely tokens only; 0: from all; log-probs as for top_p"
    )
    max_tokens: Positive = key(128, "maximum length of a response, EOS included")
    truncated: Literal["keep", "reject"] | float = key(
        "keep",
        "training responses that max_tokens cuts off; keep: score them like others; reject: do not"
        " train on them, and count them; a number: their reward, without a call of the task",
    )
    stop: Texts = key((), "texts that end a response besides EOS; rewards see the text before them")
    explore: Range | None = key(
        None,
        "range to draw the temperature of a search task from; log-probs stay at `temperature`",
    )
    explore_share: PositiveShare = key(0.5, "share of the search tasks whose temperature is drawn")

    @field_validator("truncated", mode="before")
    @classmethod
    def keep_reject_or_a_reward(cls, value: Any) -> Any:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value in ("keep", "reject") or (number and isfinite(value)):
            return value
        raise ValueError(
            f"sampling.truncated = {value!r}: write keep, reject, or a number, which is the reward"
            " of such a response"
        )

    @property
    def reshaped(self) -> dict[str, Any]:
        """The settings by which tokens are chosen unlike their log-probs say, with their values."""
        given = {name: getattr(self, name) for name in OFF}
        return {name: value for name, value in given.items() if value != OFF[name]}

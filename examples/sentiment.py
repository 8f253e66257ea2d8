"""A reward function in TRL's convention: the sentiment of a text, from -1 to 1.

It needs VADER: pip install -e '.[sentiment]'.
"""

from functools import cache
from typing import Any

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer


@cache
def analyzer() -> SentimentIntensityAnalyzer:
    return SentimentIntensityAnalyzer()


def sentiment(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Return the compound score of each completion, without its prompt."""
    return [analyzer().polarity_scores(text)["compound"] for text in completions]

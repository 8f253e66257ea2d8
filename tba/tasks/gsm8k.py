"""Grade-school math word problems: openai/gsm8k from the hub, or a folder with both splits."""

import re
from dataclasses import dataclass

from tba.tasks._data import Rows, rows
from tba.tasks._numbers import last_number
from tba.tasks._rendering import Problems

LAST_LINE = re.compile(r"^####\s*\S*\d\S*\s*\Z", re.MULTILINE)
"""Last line of a solution of the data set: `#### 72`."""
CALCULATION = re.compile(r"<<.*?>>")
"""A calculator's annotation in a solution of the data set: `48/2 = <<48/2=24>>24`."""


@dataclass(frozen=True, kw_only=True)
class Gsm8k(Problems):
    """Math word problems; the reward is 1 if the answer's last number is right, else 0.

    The right number follows `####` in the solution; without one, the reward is None. An answer has
    the format if its last line is `#### number`. Prompt and grader are those of the paper's GSM8K
    experiment (arXiv 2503.18929, appendix). For instruction-tuned models, set `chat = "on"` and
    `prompt = "{question}"`.
    """

    data: str = "openai/gsm8k"
    prompt: str = "[MATH_TASK] Problem:\n{question}\n\nSolution:"

    def grade(self, gold: str | None, text: str) -> tuple[bool | None, bool]:
        number, found = last_number((gold or "").rpartition("####")[2]), last_number(text)
        if number is None:
            right = None
        elif found is None or (found.quotient and not number.quotient):
            right = False
        else:
            right = number.equals(found)
        return right, LAST_LINE.search(text) is not None

    def read(self, key: str, source: str, split: str) -> Rows:
        table = rows(key, source, split, "main", required=("question", "answer"))
        return [{**row, "answer": CALCULATION.sub("", str(row["answer"]))} for row in table]

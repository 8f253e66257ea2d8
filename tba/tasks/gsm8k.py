"""Grade-school math word problems: openai/gsm8k from the Hub, or a folder with both splits."""

import re
from dataclasses import dataclass

from tba.tasks._data import Rows, rows
from tba.tasks._numbers import Number, last_number, only_number
from tba.tasks._rendering import Problems

LAST_LINE = re.compile(r"^####\s*(?=\S*\d)\S+\s*\Z", re.MULTILINE)
"""Last line of a solution in the data set: `#### 72`."""
CALCULATION = re.compile(r"<<.*?>>")
"""Calculator annotation in a solution of the data set: `48/2 = <<48/2=24>>24`."""


@dataclass(frozen=True, kw_only=True)
class Gsm8k(Problems):
    """Math word problems; the reward is 1 if the answer's last number is right, else 0.

    The right number follows `####` in the solution; rows without one raise ValueError. An answer
    has the format if its last line is `#### number`. Prompt and grader follow the GSM8K experiment
    of the paper (arXiv 2503.18929, appendix). For instruction-tuned models, set `chat = "on"` and
    `prompt = "{question}"`.
    """

    data: str = "openai/gsm8k"
    prompt: str = "[MATH_TASK] Problem:\n{question}\n\nSolution:"

    def grade(self, gold: str | None, text: str) -> tuple[bool | None, bool]:
        has_format = LAST_LINE.search(text) is not None
        right = _right_number(gold)
        given = last_number(text)
        if right is None:
            return None, has_format
        if given is None or (given.calculation and not right.calculation):
            return False, has_format
        return right.equals(given), has_format

    def read(self, key: str, source: str, split: str) -> Rows:
        table = rows(key, source, split, "main", required=("question", "answer"))
        for i, row in enumerate(table):
            row["answer"] = CALCULATION.sub("", str(row["answer"]))
            if _right_number(row["answer"]) is None:
                raise ValueError(
                    f"{key} = {source!r}: row {i} has the answer {row['answer'][-60:]!r}; end it"
                    " with #### and one number"
                )
        return table


def _right_number(solution: str | None) -> Number | None:
    """Return the number after `####`, or the only number if there is no `####`."""
    return only_number((solution or "").rpartition("####")[2])

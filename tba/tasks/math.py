"""Competition problems with boxed answers: MATH from the Hub, or a folder of problems."""

import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

from tba.prompt import Prompt
from tba.tasks._data import Rows, rows
from tba.tasks._numbers import composed, whole_number
from tba.tasks._rendering import Problems

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or a backslash with the character that it escapes."""
UNBRACED = re.compile(r"\\(?:boxed|fbox)\s+([^\s{$].*?)\.?\s*(?:\$|\\[\])]|\n|\Z)")
"""A box without braces, up to the end of the formula, as in some solutions of MATH."""
DECIMAL = re.compile(r"(?<![\d.\\])(\d*)\.(\d+)(?![\d.i])")
REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*\{?(\d+)\}?|\((\d+)\))")
TEXT = re.compile(r"\\(?:text\w*|mbox|mathrm)\s*\{([^{}]*)\}")
WORDS = re.compile(TEXT.pattern + r"(?:\s*\^\s*\{?[+-]?\d+\}?)?")
"""A unit, optionally with a power, or other words."""
MARK = re.compile(r"(?<=\d)_\{?(\d+)\}?|\b([ap])\.?m\b", re.IGNORECASE)
"""The base of a number, or a.m./p.m.: math-verify ignores both."""
NOT_ONE = re.compile(
    r"^\s*(?:none|null|nan|n/?a|\d+ \d\d?)\s*$|\bor\b|\d\.\d*\.\d|^\s*(?:\[\s*\[|\{['\"])",
    re.IGNORECASE,
)
"""An invalid right answer: empty, several, or code; in MATH, such words are within \\text{...}."""
UNIT = r"(?:[kcm]?m|m[Ll]|[km]?g|ft|in|yd|mi|lbs?|oz|hr?s?|min|sec|mph|s|°[CF]|(?<= )[LNJWVAK])"
PROSE = re.compile(
    r"(\\[A-Za-z]+(?:\s*\{[^{}\\]*\})*|minus|negative|infinity|[mb]illion|thousand|per ?cent\w*)|"
    rf"(?<=\d) ?(?:(?:sq\.?|cu\.?|square|cubic) )?{UNIT}(?:/{UNIT})?"
    r"(?:\^?\{?[23]\}?)?(?![\w^])\.?|"
    r"\b(?:[A-Za-z]{4,}|(?i:the|an|and|or|to|of|per|for|is|no|rs|us|[ap]\.?m))\b\.?:?(?![({])|"
    r"\([A-Za-z ]{4,}\)|(?<=\d )[A-Za-z]{3}\b"
)
"""A word or a unit that is not in \\text{...}, or (group 1) what is not to be put there."""
NOTATIONS = tuple(
    (re.compile(pattern), latex)
    for pattern, latex in (
        (r"^\(?[A-Ha-h]\)\s+(?=[\d\\$])|^(?:≈|\\approx|\\sim|#)\s*|(?<!\.)\.$|(?<!\\)\\$|\\!", ""),
        (r"(?<=\d)\s*\^?\{?\\(?:text\w*|mathrm)\s*\{\s*(?:st|nd|rd|th)\s*\}\}?", ""),  # 4th
        (r"(?<=\d)(?:\^?\{(?:st|nd|rd|th)\}|\^?(?:st|nd|rd|th)\b)", ""),
        (r",\s*(?:and\b|or\b|\\text\s*\{\s*(?:and|or)\s*\})", ","),
        (r"(?<![\\A-Za-z])((?:arc)?(?:sin|cos|tan|cot)|exp|ln|log)(?=[ (^_\d])", r"\\\1"),
        (r"√\s*(?:\(([^()]*)\)|(\d+|\w))", r"\\sqrt{\1\2}"),
        (r"∞|(?<![\w\\])oo\b", r"\\infty "),
        (r"∅|\\varnothing", r"\\emptyset "),
        (r"(?<=[\])])\s*U\s*(?=[\[(])", r"\\cup "),
        (r"\\([gl]e)q(?:slant)?\b", r"\\\1 "),
        (r"≥|>=", r"\\ge "),
        (r"≤|<=", r"\\le "),
        (r"·", r"\\cdot "),
        (r"\*\*", "^"),
        (r"^([-+]?[\d.]+\s*[-+]\s*[\d.]*)j$", r"\1i"),
        (r"(?<=[\d}])(?:\s|\\[,; ]|\\cdot\b|\*)*(?:i|\\(?:math|text)\w*\{i\})(?![A-Za-z])", "i"),
        (r"(?<![\d.}])1i(?!\w)", "i"),
        (r"\bC\((\d+),\s*(\d+)\)|\{\}_\{?(\d+)\}?C_\{?(\d+)\}?", r"\\binom{\1\3}{\2\4}"),
        (r"\+/?-", r"\\pm "),
        (r"\.{3}|…", r"\\ldots "),
        (r"(?<=\d)\s*['′]\s*(?=\d\d?(?!\d))", r"\\text{ ft }"),
        (r"^(\d+)\s*(?:[-–—]+|\\text\{\s*(?:[-–]+|to)\s*\})\s*(\d+)$", r"\1\\text{ to }\2"),
    )
)
"""Notations of plain text, and how LaTeX writes them."""
PERCENT = re.compile(r"\\?%\s*$")
SECONDS = 3
"""Time limit of math-verify, an integer, for parsing an expression and for comparing two."""


def last_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{...}; None if it is missing or not closed."""
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    depth = 1
    for brace in BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            inside = text[start : brace.start()].strip()
            return re.sub(r"(?<!\\)\\$", "", inside)  # the rest of `\ `, a space
    return None


@lru_cache(1000)  # answers of a group are often the same
def equal(gold: str, answer: str) -> bool | None:
    """Return whether two LaTeX expressions are equal; None if math-verify ran out of time.

    The order matters: math-verify is not symmetric. It limits its time with SIGALRM, so outside the
    main thread of a process it raises or hangs.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "math-verify only works in the main thread of a process; set reward.isolate=process"
        )
    gold, answer = _as_latex(gold), _as_latex(answer)
    texts = [" ".join(TEXT.sub(r"\1", text).split()) for text in (gold, answer)]
    marks = ["".join(map("".join, MARK.findall(text.lower()))) for text in texts]
    if texts[0] == texts[1] or (all(marks) and marks[0] != marks[1]):
        return texts[0] == texts[1]
    whole = _parts(gold), _parts(answer)
    has_words = [WORDS.search(text) is not None for text in (gold, answer)]
    if len(whole[0]) == len(whole[1]) == 1 and has_words[0] != has_words[1]:
        return equal(whole[0][0], whole[1][0])
    if all((*whole, *has_words)) and not re.search(r"[\d\\]", "".join(whole[0] + whole[1])):
        return False  # `n is even` and `n is prime`
    parts = [[part for part in each if re.search(r"\d", part)] for each in whole]
    if max(map(len, parts)) > 1:
        if len(parts[0]) != len(parts[1]):
            return False
        each = [equal(*pair) for pair in zip(*parts, strict=True)]
        return False not in each and (None not in each or None)
    right = whole_number(gold)
    given = whole_number(answer)
    if right is not None and given is not None:
        return right.equals(given)
    _load_sympy()
    same = _compare(gold, answer, SECONDS)
    if same or not (PERCENT.search(gold) or PERCENT.search(answer)):
        return same
    # to math-verify, 12.5 % is not 12.5
    without = _compare(PERCENT.sub("", gold), PERCENT.sub("", answer), SECONDS)
    return without or (None if same is None else without)


def _as_latex(text: str) -> str:
    """Return an answer as it is written in LaTeX, with its words in \\text{...}."""
    text = composed(text.strip("*`~ "))
    for pattern, latex in NOTATIONS:
        text = pattern.sub(latex, text)
    return PROSE.sub(lambda prose: prose[1] or f"\\text{{{prose[0]}}}", text)


def _parts(text: str) -> list[str]:
    """Return the parts between the words of an answer: 3 and 4 for 3 feet 4 inches.

    math-verify stops at the first unit. The words `and` and `or` become commas for it.
    """
    text = WORDS.sub(lambda words: "," if words[1].strip() in ("and", "or") else "\0", text)
    parts = [part.lstrip(" ~,;:").rstrip(" ~,;\\") for part in text.split("\0")]
    return list(filter(None, parts))


def _compare(gold: str, answer: str, seconds: int) -> bool | None:
    """Return whether two expressions are equal; None if a step timed out before the result.

    math-verify reports timeouts as "not equal". Its comparison of decimals is not exact, so they
    are converted to fractions. If it finds the expressions equal, they are compared again with
    more digits than both texts have.
    """
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException
    from math_verify.utils import timeout

    boxed = [LatexExtractionConfig(boxed_match_priority=0)]
    pair = []
    times = [time.monotonic()]
    for text in (gold, answer):
        exact = DECIMAL.sub(_fraction, REPEATING.sub(_repeated, text))
        pair.append(parse(f"\\boxed{{{exact}}}", boxed, parsing_timeout=seconds))
        times.append(time.monotonic())
    digits = 30 + len(gold) + len(answer)
    same = verify(*pair, numeric_precision=digits, timeout_seconds=seconds)
    times.append(time.monotonic())
    if not same and max(after - before for before, after in pairwise(times)) >= seconds:
        return None
    decimal = whole_number(gold) or whole_number(answer)
    unit = None if decimal is None else decimal.unit
    try:
        return timeout(seconds)(_agree)([each[0] for each in pair if each], digits, unit, same)
    except TimeoutException:
        return None


def _agree(pair: Sequence[Any], digits: int, unit: Fraction | None, same: bool) -> bool:
    """Return whether two numbers agree to `digits` digits; `same` for values that are not finite.

    If not `same`, return whether one is a decimal that the other, irrational one rounds to.
    """
    from sympy import Expr

    numbers = [each.doit() for each in pair if isinstance(each, Expr) and each.is_number]
    values = [number.evalf(digits) for number in numbers if number.is_finite and number != 0]
    if len(values) < 2:
        return same
    a, b = values
    if same:
        width = abs(a) / 10 ** (digits - 10)
    elif unit:
        width = unit / 2
    else:
        return False
    return bool(abs(a - b) <= width) and (same or not all(n.is_rational for n in numbers))


def _fraction(decimal: re.Match[str]) -> str:
    """Return a decimal as a fraction in LaTeX."""
    whole, decimals = decimal.groups()
    return f"\\frac{{{whole}{decimals}}}{{1{'0' * len(decimals)}}}"


def _repeated(decimal: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction in LaTeX."""
    whole, start, *repeated = decimal.groups()
    period = repeated[0] or repeated[1]
    value = int(whole + start + period) - int(whole + start or 0)
    return f"\\frac{{{value}}}{{{'9' * len(period)}{'0' * len(start)}}}"


@cache
def _load_sympy() -> None:
    """Run one comparison with a long time limit: the first one imports much of sympy."""
    _compare("x", "1", seconds=60)


@dataclass(frozen=True, kw_only=True)
class Math(Problems):
    """Problems with an answer in a box; the reward is 1 if the last box is right, else 0.

    math-verify compares the box with the column `answer`, or with the last box in the column
    `solution`. An answer that it cannot compare within seconds gets no reward. An answer with a
    box has the format. Needs `pip install -e '.[math]'`.
    """

    data: str = "DigitalLearningGmbH/MATH-lighteval"
    """Hub name, or folder of train.jsonl and test.jsonl; `problem`, `answer` or `solution`."""
    prompt: str = (
        "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    shot_response: str = "{solution}"

    def __post_init__(self) -> None:
        super().__post_init__()
        if find_spec("math_verify") is None:
            raise ValueError("task.use = 'math' needs math-verify: pip install -e '.[math]'")

    def grade(self, gold: str | None, text: str) -> tuple[bool | None, bool]:
        box = last_boxed(text)
        if gold is None:
            return None, box is not None
        return bool(box) and (box == gold or equal(gold, box)), box is not None

    def right_answer(self, prompt: Prompt) -> str | None:
        answer = super().right_answer(prompt)
        parts = _parts(_as_latex(answer or ""))
        if len(parts) == 1:  # \boxed{5} for `5 dollars`
            answer = parts[0]
        return answer and f"\\boxed{{{answer}}}"

    def read(self, key: str, source: str, split: str) -> Rows:
        table = rows(key, source, split, required=("problem",))
        if not {"answer", "solution"} & table[0].keys():
            raise ValueError(
                f"{key} = {source!r} has neither a column 'answer' nor 'solution'; rename one"
            )
        for i, row in enumerate(table):
            given = row.get("answer")
            if isinstance(given, list):  # the parts of an answer
                given = ", ".join(map(str, given))
            text = str(row.get("solution") or "") if given is None else str(given)
            boxed = [last_boxed(text), *reversed(UNBRACED.findall(text))]
            gold = next((box.strip() for box in boxed if box), None)
            if not gold and given is not None:
                gold = text.rpartition("####")[2].strip()
            row["answer"] = gold or None
            if NOT_ONE.search(TEXT.sub("", row["answer"] or "")):
                raise ValueError(
                    f"{key} = {source!r}: row {i} has the answer {row['answer']!r}; give one"
                    " answer, or write \\text{...} around words that are the answer"
                )
        return table

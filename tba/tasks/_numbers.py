"""Parses numbers in text to exact values, in the notations that people and models use."""

import re
from dataclasses import dataclass
from fractions import Fraction
from unicodedata import normalize

CHARACTERS = {wide: wide - 0xFEE0 for wide in range(0xFF01, 0xFF5F)}  # fullwidth forms of ASCII
CHARACTERS |= str.maketrans("−﹣‐‑٫٬٪", "----.,%")
COMPOSED = re.compile(r"(\d\s*)?([¼-¾⅐-⅞])|([⁺⁻⁰¹²³⁴-⁹]+)|([₀-₉]+)")
"""A single-character fraction, optionally after a whole number, an exponent, or an index."""
NOTATIONS = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"(?<=\d)\s*(?=\\[dtc]?frac)", " "),  # a mixed number
        (r"\\[dtc]?frac\s*\{\s*([+-]?[\d.]+)\s*\}\s*\{\s*([\d.]+)\s*\}", r"\1⁄\2"),
        (r"\\[dtc]?frac\s*(\d)\s*(\d)", r"\1⁄\2"),
        # thousands separators, also Indian ones; a plain space may separate two numbers
        (r"(?<=\d)(?:[,_'’ʼ\u00a0\u2007\u2009\u202f]|\{,\}|\\[,!;: ])(?=\d{3}(?!\d))", ""),
        (r"(?<=\d),(?=\d\d,?\d{3}(?!\d))", ""),
        (r"(?<![\d)] )\b(?:minus|negative) (?=\$?[\d.])|(?<==) - (?=\$?[\d.])", "-"),
        (r"(?<![\w)])–(?=[$\d.])", "-"),  # elsewhere a dash means "to"
        (r"(?<![\d)])([+-])\s?(?:\\?\$|[€£¥₹₽₩₪₺])\s?(?=[\d.])", r"\1"),
        (
            r"(?<=\d)\s*(?:[×✕xX*·⋅∙]|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*[{(]?([+-]?\d+)[})]?",
            r"e\1",
        ),
        (r"(?<=[A-Za-z}])\^\{?[+-]?\d+\}?", ""),  # the power of a unit
        (r"(\d ?(?:[kcdm]?m|ft|in|yd|mi))[23]\b", r"\1"),
    )
)
NUMBER = re.compile(
    r"(?P<sign>[+-])?(?:(?P<whole>\d+) (?=\d+[/⁄]\d))?"
    r"(?P<digits>\d+(?:\.\d*)?|(?<![^\W_])(?<!\.)\.\d+)"  # after a word, a point is a full stop
    r"(?:[eE](?P<power>[+-]?\d+)|(?:\^|\*\*)[{(]?(?P<exponent>[+-]?\d+)[})]?"
    r"|\s?(?P<over>[/⁄])\s?(?P<below>\d+(?:\.\d*)?))?"
    r"(?:\s?\\?(?P<factor>%|(?i:per ?cent|pct|(?:thousand|million|billion)\b)))?"
)
FACTORS = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
"""Factor for a word after a number; all other words mean percent."""
CALCULATION = re.compile(r"(?:(?:[^\W_]|\))[+-]|[\d)] ?[*×·÷] ?)$")
"""End of a text after which a number is part of a calculation, or of a range such as 5-7."""
LONGEST = 1000
"""Maximum number of characters of a number; its value has at most ten times as many digits."""
SIGNIFICANT = 6
"""Minimum digits of a decimal to be accepted as the rounded value of an endless one."""


@dataclass(frozen=True)
class Number:
    """A number as written; `value` is the value of its digits, 18 for 18 %."""

    value: Fraction
    factor: Fraction = Fraction(1)
    """Factor of a percent sign, or of a word such as million."""
    calculation: bool = False
    """Whether it is written as a/b, or after an operator, and may be part of a calculation."""
    unit: Fraction | None = None
    """Unit of the last digit of a decimal with at least six significant digits, else None."""

    def equals(self, other: "Number") -> bool:
        """Return whether two numbers are equal; a factor that only one has may be ignored.

        A decimal with six or more digits equals a fraction without a finite decimal form, such as
        1/3, if it is that fraction rounded. All other numbers are compared exactly.
        """
        ratios = {self.factor / other.factor}
        if 1 in (self.factor, other.factor):
            ratios.add(Fraction(1))
        pairs = [(self.value * ratio, other.value / ratio) for ratio in ratios]
        return any(a == other.value or self.rounds(b) or other.rounds(a) for a, b in pairs)

    def rounds(self, exact: Fraction) -> bool:
        """Return whether this is the rounded decimal of a fraction with no finite decimal form."""
        endless = pow(10, exact.denominator.bit_length(), exact.denominator) != 0
        return self.unit is not None and endless and abs(self.value - exact) <= self.unit / 2


def last_number(text: str) -> Number | None:
    """Return the last number in the text; None if it is missing or too long."""
    matches = list(NUMBER.finditer(_plain(text)))
    return _number(matches[-1]) if matches else None


def only_number(text: str) -> Number | None:
    """Return the only number in the text, which may have a unit; None for zero or several."""
    matches = list(NUMBER.finditer(_plain(text)))
    return _number(matches[0]) if len(matches) == 1 else None


def whole_number(text: str) -> Number | None:
    """Parse the whole text as a number, optionally with a currency; None if it is anything else."""
    text = _plain(text.strip().strip("$").rstrip("."))
    unit = r"\s?(?:[€£¥₹₽₩₪₺°]|\^?\{?\\(?:circ|degree)\}?)"
    text = re.sub(rf"^(?:\\?\$|[€£¥₹₽₩₪₺])\s?|{unit}$", "", text.strip())
    if re.fullmatch(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?", text):
        text = text.replace(" ", "")
    match = NUMBER.fullmatch(text)
    return None if match is None else _number(match)


def composed(text: str) -> str:
    """Replace characters for fractions, exponents and indices: 1⁄2 for ½."""

    def plain(match: re.Match[str]) -> str:
        before, fraction, power, index = match.groups()
        if fraction is None:
            return ("^" if power else "_") + f"{{{normalize('NFKC', power or index)}}}"
        return (f"{before[0]} " if before else "") + normalize("NFKC", fraction)

    return COMPOSED.sub(plain, text)


def _plain(text: str) -> str:
    """Rewrite the numbers in the text in the notation that NUMBER matches."""
    text = composed(text).translate(CHARACTERS)
    for pattern, plain in NOTATIONS:
        text = pattern.sub(plain, text)
    return text


def _number(match: re.Match[str]) -> Number | None:
    """Return the number of a match of NUMBER; None if it has no value or is too long."""
    if len(match[0]) > LONGEST:
        return None
    digits = match["digits"]
    power = int(match["power"] or 0)
    exponent = int(match["exponent"] or 1)
    below = Fraction(match["below"] or 1)
    if max(abs(power), abs(exponent) * len(digits)) > 10 * LONGEST:
        return None
    value = Fraction(digits)
    if below == 0 or (value == 0 and exponent < 0):
        return None
    value = value**exponent * Fraction(10) ** power / below + int(match["whole"] or 0)
    _, point, decimals = digits.partition(".")
    significant = len(digits.replace(".", "").lstrip("0"))
    is_decimal = (
        point and significant >= SIGNIFICANT and not match["over"] and not match["exponent"]
    )
    is_quotient = match["over"] == "/" and match["whole"] is None
    before = match.string[: match.start() + len(match["sign"] or "")][-4:]
    word = (match["factor"] or "").lower()
    return Number(
        value=-value if match["sign"] == "-" else value,
        factor=Fraction(FACTORS.get(word, Fraction(1, 100))) if word else Fraction(1),
        calculation=is_quotient or CALCULATION.search(before) is not None,
        unit=Fraction(10) ** (power - len(decimals)) if is_decimal else None,
    )

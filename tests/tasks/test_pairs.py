"""Pairs of a right answer and a given one, decided by hand: what is right gets 1, nothing else."""

from __future__ import annotations

import pytest

from tba.prompt import Answer, Prompt
from tba.tasks.arithmetic import Arithmetic
from tba.tasks.gsm8k import Gsm8k
from tba.tasks.math import Math

GSM8K: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    "grouping": (
        [
            ("1,234", "so 1234 dollars"),
            ("1234", "1,234"),
            ("1234567", "1,234,567"),
            ("1234", "1'234"),
            ("1234", "1’234"),
            ("1234", "1\u00a0234"),
            ("1234567", "1\u2009234\u2009567"),
            ("1234", "1\u202f234"),
            ("1234", r"\boxed{1{,}234}"),
            ("1234", r"1\,234"),
            ("1234", r"1\ 234"),
            ("100000", "1,00,000"),
            ("1234.5", "1,234.50"),
        ],
        [
            ("1000", "1 000"),  # a plain space may part two numbers
            ("15", "1,5"),
            ("1234", "1,235"),
            ("1234", "12,345"),
            ("1200", "rooms 1, 200"),
        ],
    ),
    "signs": (
        [
            ("-3", "-3"),
            ("-3", "−3"),
            ("-3", "－３"),
            ("-3", "so x = –3."),
            ("3", "+3"),
            ("3", "＋3"),
            ("-3", "-$3.00"),
            ("-3", "−€3"),
            ("-3", r"-\$3"),
            ("0", "-0"),
            ("7", "from 5–7"),
        ],
        [("3", "-3"), ("-3", "3"), ("3", "−3"), ("7", "10-7"), ("7", "10−7"), ("-7", "from 5–7")],
    ),
    "units and text": (
        [
            ("18", "18 apples"),
            ("18", "**18**"),
            ("18", r"\boxed{18}"),
            ("18", "18."),
            ("18", "18th"),
            ("20", "$20.00."),
            ("20", "€20"),
            ("20", "20 €"),
            ("25", "25 m²"),
            ("25", "25 m^2"),
            ("25", "25 cm2"),
            ("25", "25m3"),
            ("25", r"25\text{ cm}^2"),
            ("25", r"25 \mathrm{m}^{3}"),
            ("9", "9 m/s^2"),
            ("90", r"90^\circ"),
            ("2", "x2"),
            ("18", "１８"),
            ("10", "١٠"),
            ("10.5", "١٠٫٥"),
        ],
        [
            ("18", "eighteen"),
            ("18", ""),
            ("5", "5 apples and 0 pears"),
            ("15", "15:00"),
            ("2", "25 m²"),
            ("3", "25 cm^3"),
            ("18", "18.5"),
        ],
    ),
    "percent": (
        [
            ("18", "18%"),
            ("18%", "18"),
            ("18%", "18 %"),
            ("18", r"18\%"),
            ("18", "18 percent"),
            ("0.18", "18%"),
            ("18%", "0.18"),
            ("18", "18％"),
        ],
        [("18", "0.18"), ("0.18", "18"), ("1%", "100%"), ("18", "0.18%")],
    ),
    "powers": (
        [
            ("1000", "1e3"),
            ("1500", "1.5e3"),
            ("1500", "1.5E+3"),
            ("0.02", "2e-2"),
            ("1000", "10^3"),
            ("1000", "10³"),
            ("1000", r"10^{3}"),
            ("1000", "10**3"),
            ("1500", "1.5×10^3"),
            ("1500", "1.5 × 10³"),
            ("1500", "1.5 x 10^3"),
            ("1500", "1.5*10^3"),
            ("1500", r"1.5 \times 10^{3}"),
            ("1500", r"1.5 \cdot 10^3"),
            ("0.015", "1.5·10⁻²"),
            ("1024", "2^10"),
        ],
        [
            ("3", "10^3"),
            ("10", "10²"),
            ("3", "1e3"),
            ("3", "1.5×10^3"),
            ("1500", "1.5×10^4"),
            ("8", "2^8"),
            ("1", "1e-999999999999"),
        ],
    ),
    "nearly": (
        [
            ("72", "72.0"),
            ("0.1", ".10"),
            ("3.14", "3.140"),
            ("123456789012345678", "123,456,789,012,345,678"),
        ],
        [
            ("123456789012345678", "123456789012345679"),
            ("0.1", "0.10000000000000000001"),
            ("3.14", "3.14159"),
            ("3.14", "3.1"),
            ("1000000", "1000000.0000001"),
            ("1e30", "1000000000000000000000000000001"),
            ("0", "1e-400"),
            ("18", "9" * 5000),
        ],
    ),
    "fractions": (
        [
            ("1/2", "1/2"),
            ("1/2", "0.5"),
            ("1/2", r"\frac{1}{2}"),
            ("1/2", "½"),
            ("0.5", "½"),
            ("0.5", r"\boxed{\frac{1}{2}}"),
            ("-0.5", r"-\frac12"),
            ("1.5", "1 1/2"),
            ("1.5", "1½"),
            ("1.5", r"1\frac{1}{2}"),
            ("6", "12 / 2 = 6"),
        ],
        [
            ("0.5", "1/2"),  # a/b may be a calculation: the paper's rule does not carry it out
            ("6", "6 = 12/2"),
            ("2", "1/2"),
            ("1/2", "2"),
            ("1/2", "1/3"),
            ("2", r"\frac{1}{2}"),
            ("2", "1½"),
            ("1/3", "0.33"),
            ("8", "7/8"),
            ("1/2", "1/0"),
        ],
    ),
}
"""By kind: pairs that are right, and pairs that are wrong. The right answer follows `####`."""

MATH: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    "integers": (
        [
            ("1000", "1,000"),
            ("1000", "1 000"),
            ("1000", r"1\,000"),
            ("1234567", "1{,}234{,}567"),
            ("-3", "−3"),
            ("1000", "1e3"),
            ("1000", "10^3"),
            ("1500", r"1.5\times 10^{3}"),
            ("5", "5."),
            ("12", "１２"),
            ("12", r"\$12"),
            ("2^{100}", "1267650600228229401496703205376"),
        ],
        [
            ("123456789012345678", "123456789012345679"),
            ("2^{100}", "2^{100}+1"),
            ("2^{100}", "1267650600228229401496703205377"),
            ("10^{30}", "10^{30}+1"),
            ("1000000", "1000000.0000001"),
            ("3", "-3"),
        ],
    ),
    "small": (
        [("10^{-20}", r"\frac{1}{10^{20}}"), ("0.0000001", "10^{-7}"), ("0.0000001", "1e-7")],
        [
            ("0.0000001", "0.0000002"),
            ("10^{-20}", r"2\cdot 10^{-20}"),
            ("0", "10^{-30}"),
            (r"e^{-3000}", r"2e^{-3000}"),
            (r"\frac{1}{3}+10^{-20}", r"\frac{1}{3}"),
            (r"10^{-9}\pi", r"2\cdot10^{-9}\pi"),
        ],
    ),
    "decimals": (
        [
            (r"\frac{1}{2}", ".50"),
            ("2.5", r"2\frac{1}{2}"),
            ("2.5", "2½"),
            ("1.5", "1 1/2"),
            ("0.1", r"\frac{1}{10}"),
            ("0.75", r"\frac{1.5}{2}"),
            (r"0.1\pi", r"\frac{\pi}{10}"),
            ("(0.1,0.2)", r"(\frac{1}{10},\frac{1}{5})"),
            ("x^2+0.5", r"x^2+\frac{1}{2}"),
            ("[0.5,1)", r"\left[\frac12,1\right)"),
            ("3+4i", "3+4.0i"),
            ("6.02e23", r"6.02\times10^{23}"),
        ],
        [
            ("0.1", "0.1000000001"),
            ("2", "2.0000001"),
            ("1", "0.9999999999999999"),
            ("(0.1,0.2)", "(0.1,0.2000000001)"),
            (r"0.1\pi", r"0.10000001\pi"),
            ("x^2+0.5", "x^2+0.50000001"),
            ("x<0.5", "x<0.500001"),
            ("3.14", "3.14159"),
            ("3.14", "3.1"),
            ("0.3", "0.33"),
        ],
    ),
    "rounded": (  # a number that no decimal equals, with six digits or more
        [
            (r"\frac{1}{3}", "0.333333"),
            (r"\frac{2}{3}", "0.666667"),
            ("0.333333", r"\frac{1}{3}"),
            (r"\frac{1}{7000}", "0.000142857"),
            (r"\frac{1000}{3}", "333.333"),
            (r"\pi", "3.14159265"),
            (r"\pi", "3.14159"),
            ("3.141593", r"\pi"),
            (r"\sqrt{2}", "1.41421356"),
            (r"\frac{9}{4}\pi", "7.0685835"),
        ],
        [
            (r"\frac{1}{3}", "0.333"),
            (r"\frac{1}{3}", "0.3333334"),
            (r"\frac{2}{3}", "0.666666"),
            (r"\frac{1}{3000000}", "0.000000"),
            (r"\frac{1}{8}", "0.1250001"),
            ("120", "120.0001"),
            (r"\pi", "3.14"),
            (r"\pi", "3.14160"),
            (r"\sqrt{2}", "1.414214000001"),
            (r"\pi", r"\frac{355}{113}"),
        ],
    ),
    "units": (
        [
            (r"3.5\text{ cm}", "3.5"),
            ("3.5", r"3.50\text{ cm}"),
            ("3.5", r"\$3.50"),
            (r"90^\circ", "90.0"),
            (r"25\text{ cm}^2", "25"),
        ],
        [("3.5", r"3.50000001\text{ cm}"), ("3.5", r"\$3.51"), (r"90^\circ", "90.00001")],
    ),
    "percent": (
        [(r"50\%", "50"), (r"50\%", "0.5"), ("0.5", r"50\%"), ("50", r"50.0\%"), (r"50\%", "50 %")],
        [(r"12.5\%", r"12.50000001\%"), (r"1\%", r"100\%"), ("50", "0.5"), (r"50\%", "5")],
    ),
}


def pairs(table: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]]) -> list[str]:
    return [f"{kind}: {side}" for kind in table for side in ("right", "wrong")]


def test_there_are_two_hundred_pairs_and_both_kinds_of_each() -> None:
    sizes = [[len(pairs) for pairs in sides] for t in (GSM8K, MATH) for sides in t.values()]
    assert min(map(min, sizes)) >= 3 and sum(map(sum, sizes)) >= 200


@pytest.mark.parametrize("kind", GSM8K)
def test_numbers_are_graded_as_decided(kind: str) -> None:
    grade = Gsm8k().grade
    right, wrong = GSM8K[kind]
    assert [pair for pair in right if not grade(f"It is.\n#### {pair[0]}", pair[1])[0]] == []
    assert [pair for pair in wrong if grade(f"It is.\n#### {pair[0]}", pair[1])[0]] == []


@pytest.mark.parametrize("kind", MATH)
def test_boxes_are_graded_as_decided(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba.tasks.math.SECONDS", 60)  # on a machine however busy
    right, wrong = MATH[kind]

    def score(gold: str, answer: str) -> float | None:
        answers = [Answer(f"So $\\boxed{{{answer}}}$.", finished=True)]
        return Math().score(Prompt("0", "?", {"answer": gold}), answers)[0]

    assert [pair for pair in right if score(*pair) != 1.0] == []
    assert [pair for pair in wrong if score(*pair) != 0.0] == []


def test_sums_are_texts() -> None:
    prompt = Prompt("0", "1+2=", {"answer": "3"})
    texts = ("3", "03", "3.0", "+3", " 3", "3 ", "４", "")
    scores = Arithmetic().score(prompt, [Answer(text, finished=True) for text in texts])
    assert scores == [1.0, *[0.0] * 7]

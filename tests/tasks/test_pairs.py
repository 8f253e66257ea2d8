"""Pairs of a right answer and a given one, decided by hand: what is right gets 1, nothing else."""

from collections.abc import Callable

import pytest

from tba.prompt import Answer, Prompt
from tba.tasks.gsm8k import Gsm8k
from tba.tasks.math import Math

Answers = dict[str, list[str]]
"""Given answers, by the right one."""
GSM8K: dict[str, tuple[Answers, Answers]] = {
    "grouping": (
        {
            "1,234": ["so 1234 dollars"],
            "1234": ["1,234", "1'234", "1’234", "1\u00a0234", "1\u202f234", r"\boxed{1{,}234}",
                r"1\,234", r"1\ 234"],
            "1234567": ["1,234,567", "1\u2009234\u2009567"], "100000": ["1,00,000"],
            "1234.5": ["1,234.50"], "10000": ["10_000"],
        },
        # a plain space may part two numbers
        {"1000": ["1 000"], "15": ["1,5"], "1234": ["1,235", "12,345"], "1200": ["rooms 1, 200"]},
    ),
    "signs": (
        {
            "-3": ["-3", "−3", "－３", "so x = –3.", "-$3.00", "−€3", r"-\$3"], "3": ["+3", "＋3"],
            "0": ["-0"], "7": ["from 5–7"], "-5": ["_-5_", "negative 5", "minus 5", "x = - 5"],
            "18": ["- 18 apples", "Step 1 - 18", "3*6 = 18", "5 **18**"],
        },
        {
            "3": ["-3", "−3", "1+2+3", "4*3", "4 × 3", "12 ÷ 3"], "-3": ["3"], "-5": ["x-5"],
            "7": ["10-7", "10−7"], "-7": ["from 5–7", "10-7", "2024-01-7"],
        },
    ),
    "units and text": (
        {
            "18": ["18 apples", "**18**", r"\boxed{18}", "18.", "18th", "１８"],
            "20": ["$20.00.", "€20", "20 €"],
            "25": ["25 m²", "25 m^2", "25 cm2", "25m3", r"25\text{ cm}^2", r"25 \mathrm{m}^{3}"],
            "7": ["7 ft2", "7in2"],
            "12": ["first 4, then 12 (twelve)"], "9": ["9 m/s^2"], "90": [r"90^\circ"],
            "2": ["x2"], "10": ["١٠"], "10.5": ["١٠٫٥"],
        },
        {
            "4": ["first 4, then 12 (twelve)"], "18": ["eighteen", "", "18.5"],
            "5": ["5 apples and 0 pears"], "15": ["15:00"],
            "2": ["25 m²"], "3": ["25 cm^3"],
        },
    ),
    "percent": (
        {
            "18": ["18%", r"18\%", "18 percent", "18％"], "18%": ["18", "18 %", "0.18"],
            "0.18": ["18%"],
        },
        {"18": ["0.18", "0.18%"], "0.18": ["18"], "1%": ["100%"]},
    ),
    "powers": (
        {
            "1000": ["1e3", "10^3", "10³", "10^{3}", "10**3"],
            "1500": ["1.5e3", "1.5E+3", "1.5×10^3", "1.5 × 10³", "1.5 x 10^3", "1.5*10^3",
                r"1.5 \times 10^{3}", r"1.5 \cdot 10^3"],
            "0.02": ["2e-2"], "0.015": ["1.5·10⁻²"], "1024": ["2^10"],
            "1200000": ["$1.2 million"], "1.2 million": ["1,200,000"], "5": ["5 million"],
        },
        {
            "3": ["10^3", "1e3", "1.5×10^3"], "10": ["10²"], "1500": ["1.5×10^4"], "8": ["2^8"],
            "1": ["1e-999999999999", f".{'7' * 900}^-999"], "2 million": ["2 billion"],
        },
    ),
    "nearly": (
        {
            "72": ["72.0"], "0.1": [".10", "_.10_"], "3.14": ["3.140"], "0.5": ["x=.5", "$.50"],
            "120": ["Rs.120"], "-0.5": ["-.5"],
            "18": ["The answer is...18", "Ans.18", "total.18"],  # a full stop before a number
            "123456789012345678": ["123,456,789,012,345,678"],
        },
        {
            "123456789012345678": ["123456789012345679"], "0.1": ["0.10000000000000000001"],
            "3.14": ["3.14159", "3.1"], "1000000": ["1000000.0000001"],
            "1e30": ["1000000000000000000000000000001"], "0": ["1e-400"], "18": ["9" * 5000],
        },
    ),
    "fractions": (
        {
            "1/2": ["1/2", "0.5", r"\frac{1}{2}", "½"], "0.5": ["½", r"\boxed{\frac{1}{2}}"],
            "-0.5": [r"-\frac12"], "1.5": ["1 1/2", "1½", r"1\frac{1}{2}"], "6": ["12 / 2 = 6"],
        },
        {
            # a/b may be a calculation: the paper's rule does not carry it out
            "0.5": ["1/2"], "6": ["6 = 12/2"], "2": ["1/2", r"\frac{1}{2}", "1½"],
            "1/2": ["2", "1/3", "1/0"], "1/3": ["0.33"], "8": ["7/8"],
        },
    ),
}  # fmt: skip
"""By kind: answers that are right, and answers that are wrong. The right answer follows `####`."""

MATH: dict[str, tuple[Answers, Answers]] = {
    "integers": (
        {
            "1000": ["1,000", "1 000", r"1\,000", "1e3", "10^3"], "1234567": ["1{,}234{,}567"],
            "-3": ["−3"], "1500": [r"1.5\times 10^{3}"], "5": ["5."], "12": ["１２", r"\$12"],
            "2^{100}": ["1267650600228229401496703205376"],
        },
        {
            "123456789012345678": ["123456789012345679"],
            "2^{100}": ["2^{100}+1", "1267650600228229401496703205377"], "10^{30}": ["10^{30}+1"],
            "1000000": ["1000000.0000001"], "3": ["-3"],
        },
    ),
    "small": (
        {"10^{-20}": [r"\frac{1}{10^{20}}"], "0.0000001": ["10^{-7}", "1e-7"]},
        {
            "0.0000001": ["0.0000002"], "10^{-20}": [r"2\cdot 10^{-20}"], "0": ["10^{-30}"],
            "e^{-3000}": ["2e^{-3000}"], r"\frac{1}{3}+10^{-20}": [r"\frac{1}{3}"],
            r"10^{-9}\pi": [r"2\cdot10^{-9}\pi"],
        },
    ),
    "decimals": (
        {
            r"\frac{1}{2}": [".50"], "2.5": [r"2\frac{1}{2}", "2½"], "1.5": ["1 1/2"],
            "0.1": [r"\frac{1}{10}"], "0.75": [r"\frac{1.5}{2}"], r"0.1\pi": [r"\frac{\pi}{10}"],
            "(0.1,0.2)": [r"(\frac{1}{10},\frac{1}{5})"], "x^2+0.5": [r"x^2+\frac{1}{2}"],
            r"0.\overline{3}": [r"\frac{1}{3}"], "0.1(6)": ["1/6"],
            r"\frac{7}{6}": [r"1.1\overline{6}", r"1.1\bar 6"],
            "[0.5,1)": [r"\left[\frac12,1\right)"], "3 + 2j": ["3+2i", "2i+3"],
            "3+4i": ["3+4.0i", "3 + 4 i", r"3+4\,i", r"3+4\cdot i", r"3 + 4 \mathrm{i}"],
            "-i": ["-1 i", "-1i"], "C(5,2)": ["10", r"\binom{5}{2}"],
            "6.02e23": [r"6.02\times10^{23}"],
        },
        {
            "0.1": ["0.1000000001"], "2": ["2.0000001"], "1": ["0.9999999999999999"],
            "(0.1,0.2)": ["(0.1,0.2000000001)"], r"0.1\pi": [r"0.10000001\pi"],
            "x^2+0.5": ["x^2+0.50000001"], "x<0.5": ["x<0.500001"], "3.14": ["3.14159", "3.1"],
            "0.3": ["0.33"], "0.(3)": ["0.3"], "3+2j": ["3-2i", r"3+2\sqrt{i}"], "C(5,2)": ["9"],
        },
    ),
    "rounded": (  # a number that no decimal equals, with six digits or more
        {
            r"\frac{1}{3}": ["0.333333"], r"\frac{2}{3}": ["0.666667"],
            "0.333333": [r"\frac{1}{3}"], r"\frac{1}{7000}": ["0.000142857"],
            r"\frac{1000}{3}": ["333.333"], r"\pi": ["3.14159265", "3.14159"], "3.141593": [r"\pi"],
            r"\sqrt{2}": ["1.41421356"], r"\frac{9}{4}\pi": ["7.0685835"],
        },
        {
            r"\frac{1}{3}": ["0.333", "0.3333334"], r"\frac{2}{3}": ["0.666666"],
            r"\frac{1}{3000000}": ["0.000000"], r"\frac{1}{8}": ["0.1250001"], "120": ["120.0001"],
            r"\pi": ["3.14", "3.14160", r"\frac{355}{113}"], r"\sqrt{2}": ["1.414214000001"],
        },
    ),
    "units": (
        {
            r"3.5\text{ cm}": ["3.5"], "3.5": [r"3.50\text{ cm}", r"\$3.50"], r"90^\circ": ["90.0"],
            "90": ["90°"], "5": ["5 €"], r"25\text{ cm}^2": ["25"], r"15\text{ cm}": ["15"],
            "15": [r"15\text{ cm}"], r"15\mbox{ cm}^2": [r"15\text{ cm}^2"], r"\$18.90": ["18.90"],
            "18.9": [r"\$18.90"], r"3\text{ hours}": [r"3\mathrm{ hours}"],
            "80": [r"80\degree", r"80 \degree"], "42": ["42\\ "],
        },
        {
            "3.5": [r"3.50000001\text{ cm}", r"\$3.51"], r"90^\circ": ["90.00001"],
            r"125\text{ miles}": [r"120\text{ miles}"], r"\$5": [r"\$6"], "80": [r"81\degree"],
        },
    ),
    "several units": (
        {
            r"3\text{ feet }4\text{ inches}": [r"3\ \text{ft}\ 4.0~\text{in}",
                r"3\text{ feet}\text{ and }4\text{ inches}"],
            r"3\text{ red, }2\text{ blue}": [r"3\text{ red}, 2\text{ blue}"],
            r"5\mathrm{kg}\,\mathrm{m}^2": ["5"], r"-2\text{ or }-12": ["-12,-2"],
        },
        {
            r"2\text{ hours }30\text{ minutes}": [r"2\text{ hours }45\text{ minutes}", "2"],
            r"3\text{ feet }4\text{ inches}": [r"3\text{ feet }5\text{ inches}", "34"],
            r"5\text{ dollars and }25\text{ cents}": [r"5\text{ dollars}"],
            r"3\text{ red, }2\text{ blue}": [r"3\text{ red, }4\text{ blue}",
                r"3\text{ red}, 4\text{ blue}"],
            "3": [r"3\text{ feet }4\text{ inches}"],
            r"x=2\text{ m and }y=\sqrt{3}\text{ m}": [r"x=2\text{ m and }y=\sqrt{5}\text{ m}"],
        },
    ),
    "percent": (
        {
            r"\frac{1}{3}": [r"33.3333\%"], r"50\%": ["50", "0.5", "50 %"], "0.5": [r"50\%"],
            "50": [r"50.0\%"], r"28\%": ["28"], "28": [r"28\%"], "12.5": [r"12.5\%"],
            r"12.5\%": ["12.5"], r"10\%": ["10_2"], r"\infty": [r"\infty\%"],
        },
        {
            r"12.5\%": [r"12.50000001\%", r"12\%"], r"1\%": [r"100\%"], "50": ["0.5"],
            r"50\%": ["5"], r"28\%": [r"82\%"], "0.28": ["28"],
        },
    ),
    "fractions": (
        {
            r"\frac{1}{2}": [r"\dfrac{1}{2}", r"\tfrac12", "1/2", r"\frac{2}{4}", "0.5", ".5"],
            r"-\frac{7}{3}": [r"\frac{-7}{3}"], r"\frac{\sqrt{3}}{2}": [r"\frac{3}{2\sqrt{3}}"],
        },
        {
            r"\frac{1}{3}": ["0.33"], r"-\frac{7}{3}": [r"\frac{7}{3}"], r"\frac{22}{7}": [r"\pi"],
            r"\frac{\sqrt{3}}{2}": [r"\frac{\sqrt{2}}{2}"], r"\frac{3}{56}": [r"\frac{3}{65}"],
        },
    ),
    "numbers": (
        {
            "12": ["12.0"], "1000": ["1,000"], "10{,}000": ["10000"], "1024": ["2^{10}"],
            "1.5": [r"\frac32"], "120": ["5!"], r"2\sqrt{3}": [r"\sqrt{12}"],
            r"\frac{9}{4}\pi": [r"2.25\pi"], "3+4i": ["4i+3"],
        },
        {"12": ["-12"], "100": ["1000"], "3.14": [r"\pi"], r"3\sqrt{2}": ["4.2"], "3+4i": ["3-4i"]},
    ),
    "algebra": (
        {
            "x^2+2x+1": ["(x+1)^2"], "x^2-1": ["(x-1)(x+1)"], "2-2p": ["2(1-p)"],
            "y=2x+3": ["y=3+2x"], "5": ["x=5"], "x=5": ["5"], r"\sin^2(x)": [r"1-\cos^2(x)"],
            r"\frac{x+2}{7}": [r"\frac{x}{7}+\frac{2}{7}"],
        },
        {"x^2-1": ["(x+1)^2"], "3x+2": ["3y+2"], "x=5": ["x=6"], "e^{x}": ["e^{-x}"]},
    ),
    "sets": (
        {
            r"\{1,2,3\}": [r"\{3,2,1\}", r"\left\{1, 2, 3\right\}"], "-2,1": ["1,-2"],
            r"\{1\pm\sqrt{5},-2\}": [r"\{-2,1+\sqrt{5},1-\sqrt{5}\}"],
            r"3\pm2\sqrt{2}": [r"3+2\sqrt{2},3-2\sqrt{2}"],
            r"\{-1\}\cup[0,7)": [r"[0,7)\cup\{-1\}"],
        },
        {
            r"\{1,2,3\}": [r"\{1,2\}"], "-2,1": ["-2"], "1,2,3": ["1,2,4"],
            r"3\pm2\sqrt{2}": [r"3+2\sqrt{2}"],
        },
    ),
    "tuples and matrices": (
        {
            r"(1,\frac{9}{2})": ["(1,4.5)"], r"\left(3,\frac{\pi}{2}\right)": [r"(3,\pi/2)"],
            "(6,31,-1)": ["(6, 31, -1)"], r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": [
                r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"],
        },
        {
            "(3,4)": ["(4,3)"], "(6,31,-1)": ["(6,31,1)"],
            r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": [r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"],
            r"\begin{pmatrix}1\\2\end{pmatrix}": [r"\begin{pmatrix}2\\1\end{pmatrix}"],
        },
    ),
    "intervals": (
        {
            "[0,1)": [r"\left[0,1\right)"], r"(-\infty,2)": [r"(-\infty, 2)"],
            r"(-\infty,0)\cup(1,\infty)": [r"(1,\infty)\cup(-\infty,0)"],
            r"[-1,-\frac{1}{2})\cup(0,1)": [r"[-1,-0.5)\cup(0,1)"], r"x\in[1,5]": ["[1,5]"],
            r"1\le x\le 5": ["[1,5]"], "x<3": ["3>x"], r"x\ge 5": [r"x\geq 5"],
        },
        {
            "[0,1)": ["(0,1)", "[0,1]"], "[0,9)": ["[0,1)"], r"(-\infty,2)": [r"(-\infty,2]"],
            r"(-\infty,0)\cup(1,\infty)": ["(0,1)"], "x<3": ["x>3"],
        },
    ),
    "degrees": (
        {r"90^\circ": ["90", r"90^{\circ}"], "90": [r"90^\circ", r"90\text{ degrees}"]},
        {r"90^\circ": [r"45^\circ"]},
    ),
    "text": (
        {
            r"\text{Evelyn}": [r"\text{Evelyn}", "Evelyn"], r"\text{(C)}": ["C"],
            "204_5": ["204_5", "204_{5}", "204"],
            r"\text{June 20}": ["June 20"], r"6\text{ PM}": ["6", r"6\text{ p.m.}"],
        },
        {
            r"\text{Evelyn}": [r"\text{Carla}"], r"\text{even}": [r"\text{odd}"],
            r"\text{Yes}": [r"\text{No}"], "C": ["D"], "204_5": ["203_5", "204_6"],
            r"6\text{ p.m.}": [r"6\text{ a.m.}", "6 AM"],
        },
    ),
    "plain notation": (  # as people type answers, and as models write them
        {
            "the 4th": ["4", r"4^{\text{th}}", "4^{th}", "4th"], "(a) 4": ["4"],
            "2 hours 30 minutes": [r"2\text{ hours and }30\text{ minutes}"],
            "3:45 PM": ["3:45", r"3\!:\!45\text{ p.m.}"], "US$5": ["5", r"\$5"], "5 USD": ["5"],
            "25 cm²": ["25", r"25\text{ cm}^2"], "25 sq. ft": ["25"], "9.8 m/s²": ["9.8"],
            "100 mL": ["100"], "3 L": ["3"], "100°C": ["100"], "Rs. 50": ["50"], "No. 4": ["4"],
            "approximately 3.14": ["3.14"], "~5": ["5"], "5 (five)": ["5"], "**2**": ["2"],
            "Monday.": [r"\text{Monday}"], "A.": ["A"], "x^2.": ["x^2"], "4\\": ["4"],
            "10–20": ["10-20", r"10\text{ to }20"], "+/- 2": [r"\pm2"], "x²": ["x^2"],
            "x**2": ["x^2"], "2√3": [r"2\sqrt{3}"], "(-∞, 2)": [r"(-\infty,2)"],
            "ln(2)": [r"\ln 2"], "exp(2)": ["e^2"], "sin x": [r"\sin(x)"], "x₁": ["x_1"],
            "a·b": ["ab"], "(2,3] U [4,5]": [r"(2,3]\cup[4,5]"], "≥ 4": [r"\geq 4"],
            "1, 2, and 3": ["1,2,3"], "∅": [r"\varnothing"], "3/4 cup": [r"\frac34"],
            "5'6\"": [r"5\text{ ft }6\text{ in}"], "the answer is 4": ["4"],
        },
        {
            "the 4th": ["5", "the 5th"], "(a) 4": ["(a) 5"], "2 hours 30 minutes": ["2", "2.5"],
            "10-20": ["10", "20-10"], "√12": [r"\sqrt{1}2"], "x²": ["2x"], "x₁": ["x_2"],
            "25 cm²": ["625", "26"], "3 n": ["3"], "3x": ["3"], "exp(2)": [r"\exp(3)"],
            "March 5": ["April 5", "March 6"], "n is even": ["n is prime"], "north": ["south"],
            "3 to 1": ["1 to 3", "3"], "US$5": ["6"], "-4 dollars": ["4"], "5'6\"": ["5"],
            "1 in 5": ["5"], "July 4, 1776": ["4", "1776"], "5 out of 6": ["5"],
        },
    ),
}  # fmt: skip


def misjudged(
    kinds: tuple[Answers, Answers], score: Callable[[str, str], float | None]
) -> list[tuple[str, str]]:
    """Return the pairs of a right answer and a given one that are graded in another way."""
    wrongly = []
    for decided, answers in zip((1.0, 0.0), kinds, strict=True):
        for gold, given in answers.items():
            wrongly += [(gold, each) for each in given if score(gold, each) != decided]
    return wrongly


@pytest.mark.parametrize("kind", GSM8K)
def test_numbers_are_graded_as_decided(kind):
    grade = Gsm8k().grade
    assert misjudged(GSM8K[kind], lambda gold, text: grade(f"It is.\n#### {gold}", text)[0]) == []


@pytest.mark.parametrize("kind", MATH)
def test_boxes_are_graded_as_decided(kind, monkeypatch):
    monkeypatch.setattr("tba.tasks.math.SECONDS", 60)  # on a machine however busy

    def score(gold: str, answer: str) -> float | None:
        answers = [Answer(f"So $\\boxed{{{answer}}}$.", finished=True)]
        return Math().score(Prompt("0", "?", {"answer": gold}), answers)[0]

    assert misjudged(MATH[kind], score) == []

"""The grader: rules by kind, real gold answers, and what happens to answers that try to break it."""

import doctest
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ada.reward
import answers.compare
import answers.latex
from ada.reward import GoldError, RewardError, Scorer, grade, last_boxed, read_gold
from answers.compare import is_right
from answers.latex import tidy

DATA = Path(__file__).parent / "data"
PROJECT = Path(__file__).parent.parent
OBEY = "tests.rewards_for_tests:obey"


def read_lines(name):
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def verdicts(scorer, questions, within_sec=60):
    """Submit (response, gold) pairs; the verdicts in their order."""
    for key, (response, gold) in enumerate(questions):
        scorer.submit(key, response, gold)
    answers, deadline = {}, time.monotonic() + within_sec
    while len(answers) < len(questions):
        assert time.monotonic() < deadline, f"{len(questions) - len(answers)} answers missing"
        answers.update(scorer.poll(1.0))
    return [answers[key] for key in range(len(questions))]


@pytest.fixture(scope="module")
def scorer():
    with Scorer() as shared:
        yield shared


# ---- The rules ---------------------------------------------------------------------------------------------------


NOT_READ = {
    "binom-9": "permutations as {}_5P_2",
    "binom-10": "permutations as A_5^2, which may be a variable's name",
    "units-69": "a unit of one letter without a space: 5m^2 may be a formula",
    "fractions-7": "a fraction as ^1/_2",
}


@pytest.mark.parametrize("name, different", [("grading.jsonl", {}), ("grading-2.jsonl", NOT_READ)])
def test_the_cases_given(scorer, name, different):
    """Those that differ are right answers that are refused; no wrong one is paid."""
    cases = read_lines(name)
    got = verdicts(scorer, [(case["response"], case["gold"]) for case in cases])
    wrong = [case for case, verdict in zip(cases, got, strict=True) if verdict != case["correct"]]
    assert [case["id"] for case in wrong] == list(different) and all(case["correct"] for case in wrong)


# kind: gold, answers that are right, answers that are wrong
KINDS = {
    "exact integers": ("1000007", ["1,000,007", r"1\,000\,007", "1000007.0", r"10^6+7"], ["1000008", "1000007.1"]),
    "huge integers": ("2^{1009}", [r"2\cdot2^{1008}", "2^{1008}+2^{1008}"], ["2^{1009}+1", "2^{1008}", "2^{1010}"]),
    "tiny numbers": (r"\frac{1}{2^{99}}", ["2^{-99}"], [r"\frac{1}{2^{98}}", "0", "10^{-30}"]),
    "tiny decimals": ("0.0000001", [r"1\times10^{-7}", "1e-7", r"\frac{1}{10^7}"], ["0.0000002", "0", "0.0000001001"]),
    "zero": ("0", ["0.0", r"\sqrt2-\sqrt2", "-0"], ["e^{-100}", "10^{-30}", "0.0000001", "x"]),
    "decimals for fractions": ("1/3", ["0.333333", r"0.\overline{3}", r"0.\dot3"], ["0.33", "0.3334", "0.3"]),
    "decimals for roots": (r"\sqrt{2}", ["1.414214", "√2", r"\frac{2}{\sqrt2}"], ["1.414", "1.4143", "2"]),
    "pi": (r"\frac{\pi}{2}", ["pi/2", "π/2", r"0.5\pi", r"\frac12\pi", "1.570796"], ["1.57", r"\pi", "11/7"]),
    "decimals beside integers": ("7", ["7.0", "7.", "7.00"], ["7.0000001", "6.9999999"]),
    "e-notation": ("4.5e33", [r"4.5\times10^{33}", r"4.5\cdot 10^{33}\text{ ergs}", "45e32"], ["4.5e32", "4.6e33"]),
    "decimal points": ("-3./2", ["-1.5", "-1.50", r"-\frac32"], ["1.5", "-3"]),
    "percent": (r"50\%", ["50", "0.5", r"\frac12", "50%", r"50\text{ percent}"], [r"5000\%", r"0.5\%", "5"]),
    "percent of a number": ("0.5", [r"50\%", r"0.5\%"], ["50", r"5\%"]),
    "units": ("300", [r"300 \mathrm{~km} / \mathrm{s}", "300 km/s", r"300\text{ km}^2", r"\text{300 cm}"], ["30 km"]),
    "units that are variables": ("3t", ["t+2t"], ["3", "3s", r"3\text{ t}^2"]),
    "units of pi": (r"9\pi", [r"9\pi\text{ cm}^2", r"9 \pi \, \mathrm{m}"], ["9", r"9\pi^2"]),
    "degrees": (r"90^{\circ}", ["90", "90°", r"90\text{ degrees}", "90 degrees"], ["90^2", r"\frac{\pi}{2}"]),
    "money": ("18.90", [r"\$18.9", r"18.90\text{ dollars}"], ["1890", "18.09"]),
    "lists": ("5,6,7", ["7,5,6", r"5, 6 \text{ and } 7", r"\{6,5,7\}", "x=5,6,7", "x=5,x=6,x=7"], ["5,6", "5,6,7,8"]),
    "repeats": ("-2,-2", ["-2.0,-2"], ["-2", "-2,2"]),
    "no lists for one": ("7", ["7", r"\{7\}"], ["5, 6, 7", "6 or 7", "7,7", r"7\text{ and }8", r"7\text{ or eight}"]),
    "plus or minus": (r"1\pm\sqrt2", [r"1-\sqrt2, 1+\sqrt2", r"x=1\pm\sqrt2"], [r"1+\sqrt2", r"1,\sqrt2"]),
    "tuples": ("(5,6,7)", ["(5, 6, 7)", "(5,6,7.0)"], ["(7,5,6)", "(5,6)", r"\{5,6,7\}"]),
    "pairs": ("(3,1)", ["(3,1)", "(x,y)=(3,1)", "3,1"], ["(5,2)", "(1,3)", "[3,1]"]),
    "equal pairs": ("(1,1)", ["(1,1)"], ["(2,2)", "(1,2)", "1"]),
    "lists of pairs": ("(1,2),(3,4)", ["(3,4),(1,2)", r"\{(1,2),(3,4)\}"], ["(2,1),(4,3)", "(1,2)", "(1,2,3,4)"]),
    "intervals": ("[0,1)", [r"\left[0,1\right)", r"x\in[0,1)", "[0,1.0)"], ["(0,1)", "[0,1]", "[0,2)", "0,1"]),
    "open intervals": ("(2,\\infty)", ["x>2", "2<x"], ["[2,\\infty)", "x\\ge2", "(-\\infty,2)"]),
    "unions": (r"(-\infty,0)\cup(1,\infty)", [r"(1,\infty)\cup(-\infty,0)"], [r"(-\infty,0)"]),
    "empty set": (r"\emptyset", [r"\varnothing", r"\{\}", "∅"], ["0", r"\{0\}"]),
    "assignments": ("x=5", ["5", "x=5", "x = 5.0"], ["y=5", "x=6", "-5"]),
    "results": ("113", ["m+n=113", "f(3)=113", r"100+13=113", r"A=\pi r^2=113"], ["2x=113", "x^2=113", r"\log x=113"]),
    "functions": ("f(x)=2x", ["2x", "f(x)=x+x"], ["f(x)=x", "g(x)=2x", "2"]),
    "equations": ("y=2x+3", ["y=3+2x", "2x-y+3=0", "4x+6=2y"], ["y=2x+4", "y=2x", "x=2y+3", r"y\ne2x+3"]),
    "long equations": ("3x-y+13=0", ["y=3x+13", "6x-2y=-26"], ["3x+4y+14=0", r"x^5-\sin(xy)=\ln y"]),
    "inequalities": (r"k \geqslant 2", [r"2\le k", "k≥2", r"-k\le-2", r"3k\ge6"], ["k>2", r"k\le2", "2", r"-k\ge-2"]),
    "primes": ("y'+y=0", [r"y^{\prime}=-y"], ["y+y=0"]),
    "polynomials": ("x^2-1", ["(x-1)(x+1)", "-1+x^2"], ["x^2+1", "x^2", "x^3-1"]),
    "formulas": (r"\frac{1}{\sqrt{2}}c", [r"\frac{c}{\sqrt2}", r"\frac{\sqrt2}{2}c"], ["c", "0.7c"]),
    "signs of roots": (r"\left|x\right|", [r"\sqrt{x^2}"], ["x", "-x"]),
    "upper and lower case": (r"\frac{M}{m}", [r"M/m"], ["1", r"\frac{m}{M}"]),
    "complex numbers": ("3+4i", ["4i+3", r"3+4\mathrm{i}", "(2+i)^2"], ["3-4i", "3+4", "5", "4+3i"]),
    "Euler's formula": ("e^{it}", [r"\cos t+i\sin t"], [r"\cos t-i\sin t", "e^{-it}"]),
    "Euler's number": (r"1-\frac{1}{\mathrm{e}}", [r"1-\frac1e", "1-e^{-1}"], [r"1+\frac{1}{\mathrm{e}}", "1-e"]),
    "energies are no e": ("E_{1}", ["E_1"], ["E_2", "1", "e"]),
    "matrices": (
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        [r"\begin{bmatrix}1&2\\3&4.0\end{bmatrix}"],
        [r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", "(1,2,3,4)"],
    ),
    "missing braces": (r"\frac{\sqrt{3}}{2}", [r"\frac{\sqrt3}2", r"\tfrac{\sqrt 3}{2}", "sqrt(3)/2"], ["3/2"]),
    "malformed roots": ("4", [r"\sqrt{16}", r"\sqrt(16)", r"2\sqrt4"], [r"4\sqrt(2)", r"4\sqrt 2", r"\sqrt 4"]),
    "mixed numbers": (r"2\frac{1}{2}", [r"\frac52", "2.5"], ["1", r"\frac12"]),
    "ellipses": (r"1,2,\ldots,n", [r"1, 2, \dots, n"], [r"1,3,\ldots,n", "1,2,n", r"1,2,\ldots,2n"]),
    "sums with ellipses": ("n+3", ["3+n"], [r"1+2+\ldots+n", r"\ldots"]),
    "letters": ("A", ["(A)", r"\text{A}", r"\textbf{(A)}", "A.", "a"], ["B", "AB", "A,B"]),
    "words": (r"\text{Saturday}", ["Saturday", "saturday", r"\text{ Saturday }"], ["Sunday", "Saturdaty"]),
    "anagrams": (r"\text{silent}", [r"\mathrm{silent}"], ["listen"]),
    "unicode": ("-2π", ["−2π", r"-2\pi", "－2π"], ["2π", "-2"]),
    "trailing marks": ("5", ["5.", "5,", r"5\,", r"5 \quad", "$5$", r"5\\"], ["5!", "5x", "-5"]),
    "double braces": ("{" * 25 + "1" + "}" * 25, ["1", r"\frac{{{2}}}{{2}}"], ["2"]),
    "nothing": ("5", [], [r"\,", "$", ".", r"\text{}"]),
    "columns": (
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        [r"\left[\begin{array}{c}1\\2\end{array}\right]", r"\begin{bmatrix}1\\[4pt] 2\\\end{bmatrix}"],
        [r"\begin{pmatrix}2\\1\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}", "(1,2)"],
    ),
    "sums of matrices": (
        r"\begin{pmatrix}6&8\end{pmatrix}",
        [r"\begin{pmatrix}1&2\end{pmatrix}+\begin{pmatrix}5&6\end{pmatrix}", r"2\begin{pmatrix}3&4\end{pmatrix}"],
        [r"\begin{pmatrix}1&2\end{pmatrix}", r"2\begin{pmatrix}6&8\end{pmatrix}"],
    ),
    "cases": (
        r"\begin{cases}x & x>0\\-x & x\le0\end{cases}",
        [r"\begin{cases}x, & \text{if } x>0,\\-x, & \text{if } 0\ge x\end{cases}"],
        [r"\begin{cases}x & x>0\\x & x\le0\end{cases}", r"\begin{cases}x & x>0\\-x & x<0\end{cases}", "x"],
    ),
    "bases": ("1011_2", ["1011_{2}", "(1011)_2", "1011_{(2)}"], ["1011", "11", "1011_3", "1101_2", "13_8"]),
    "base ten": ("101", ["101_{10}"], ["101_2"]),
    "subscripts and powers": ("x^2_1", ["x_1^2"], ["x_1", "x_1^3", "x_2^2"]),
    "unit vectors": (r"3\mathbf i+4\mathbf j", [r"3\hat i+4\hat j"], [r"3\mathbf i+4\mathbf k", "3j+4i"]),
    "equations without letters": (r"\log_6(216)=3", ["3", "1+2=3"], ["1=2", r"\log_6(216)=2", "2=3-1"]),
    "systems": ("x=2,y=3", ["(2,3)", "y=3,x=2", "2,3"], ["(3,2)", "3,2", "x=3,y=2", "x=2"]),
    "lists of systems": ("p=5,q=2;p=7,q=2", ["(5,2),(7,2)"], ["(2,5),(2,7)", "(5,2)", "5,2,7,2"]),
    "labels": (
        "12",
        [r"\text{Area}=12", "|AB|=12", r"\frac{NO}{BO}=12", "a_1+a_2=12", "a^2+b^2=12", r"\text{The answer is }12"],
        ["2x=12", "x+1=12", "|x|=12", r"\sqrt x=12", "-x=12", r"\text{at least }12", r"12\text{ or more}"],
    ),
    "names": ("f(x)=x", ["y=x", "x"], ["f(y)=x", "g(x)=x", "f(x)=-x"]),
    "ratios": ("S_1:S_2=7:32", ["7:32"], ["32:7", "7:33", "7/32", "14:64.1"]),
    "times": (r"3:30\text{ p.m.}", ["3:30 PM", "3:30"], ["3:03", r"3:30\text{ a.m.}", "0.1", "6:60"]),
    "residues": (r"3\pmod 7", [r"3\bmod 7", r"x\equiv3\ (\mathrm{mod}\ 7)"], ["3", r"4\pmod 7", r"3\pmod 8"]),
    "two units": ("7 hours and 30 minutes", [r"7\text{ h }30\text{ min}"], ["7", "7:30", "7 minutes 30 hours", "7.5"]),
    "large words": (r"5\text{ million}", ["5,000,000"], ["5", "5 thousand", "5 billion"]),
    "numbers side by side": ("6", ["2(3)", r"\frac42 3"], ["2(4)", "(2)4", r"\frac424", "2 4"]),
    "degrees under cos": (r"\frac12", [r"\cos 60^\circ", r"\sin(30°)"], [r"\cos 60", r"\cos 30^\circ"]),
    "inequalities as sets": ("x>2", [r"(2,\infty)", r"\{t\mid t>2\}", "2<x"], ["t>2", "(2,3)"]),
    "two inequalities": ("x<1, x>2", [r"(-\infty,1)\cup(2,\infty)", "x>2 or x<1"], ["x<0,x>5", "x<1", "x<1,y>2"]),
    "holes": (r"x\ne1", ["x!=1", r"\mathbb{R}\setminus\{1\}", r"(-\infty,1)\cup(1,\infty)"], ["x=1", "1", r"y\ne1"]),
    "closed sets": ("x<=2", [r"(-\infty,2]", "2>=x"], [r"(-\infty,2)", r"[-\infty,2]", "x<2"]),
    "kinks": ("|x-3|", ["|3-x|"], ["x-3", "3-x", "|x+3|"]),
    "floors": (r"\lfloor n/2\rfloor", [r"\lfloor\frac{n}{2}\rfloor"], ["n/2", r"\lceil n/2\rceil-1"]),
    "real roots": ("-2", [r"\sqrt[3]{-8}", "(-8)^{1/3}"], ["2", r"\sqrt[3]{8}"]),
    "choices": ("E", [r"(\text{E})", r"E: \text{none of these}", r"\textbf{(E)}\ 12", "E)"], ["(D) E", "D: E", "12"]),
    "conditions": ("f(x)=cx \\text{ for any } c", ["f(x)=cx"], [r"f(x)=cx\text{ for all }x>0", "f(x)=x"]),
    "degrees Celsius": ("5", [r"5^\circ\text{C}", "5°F"], [r"6^\circ\text{C}"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind):
    gold, right, wrong = KINDS[kind]
    assert read_gold(gold)
    assert [answer for answer in [gold, *right] if not is_right(answer, gold)] == [], "should be right"
    assert [answer for answer in wrong if is_right(answer, gold)] == [], "should be wrong"


@given(st.integers(-(10**12), 10**12))
@settings(deadline=None, max_examples=50)
def test_integers_in_other_forms(n):
    for form in (f"{n:,}", f"{n}.0", f"x={n}", rf"{n}\text{{ cm}}", rf"\frac{{{3 * n}}}{{3}}", f"{n - 1}+1"):
        assert is_right(form, n), form
    assert not is_right(str(n + 1), n) and not is_right(f"{n}.5", n) and not is_right(f"{n},{n + 1}", n)


@given(st.integers(1, 10**6), st.integers(-30, 30), st.integers(-3, 3).filter(bool))
@settings(deadline=None, max_examples=50)
def test_e_notation_is_a_power_of_ten(mantissa, exponent, off):
    gold = f"{mantissa / 1000}e{exponent}"
    assert is_right(rf"{mantissa / 1000} \times 10^{{{exponent}}}", gold)
    assert not is_right(rf"{mantissa / 1000} \times 10^{{{exponent + off}}}", gold)


LETTERS = st.sampled_from("abcdkm")  # no e, which is a number
TERMS = st.lists(st.tuples(st.integers(-9, 9).filter(bool), LETTERS), min_size=2, max_size=6)


def linear(terms):
    """Coefficients by letter, and the formula as it was drawn."""
    sums = {letter: sum(number for number, other in terms if other == letter) for _, letter in terms}
    return {letter: total for letter, total in sums.items() if total}, "".join(f"{n:+}{x}" for n, x in terms)


@given(TERMS, TERMS, st.sampled_from("=<>"))
@settings(deadline=None, max_examples=150)
def test_no_linear_formula_equation_or_inequality_is_another_by_accident(one, other, sign):
    (gold, gold_text), (answer, text) = linear(one), linear(other)
    assert is_right(text, gold_text) == (gold == answer)
    assert is_right("-".join(["0", f"({text})"]), gold_text) == (gold == {x: -n for x, n in answer.items()})
    if gold and answer:
        ratios = {answer.get(x, 0) / gold.get(x, 1e-9) for x in gold.keys() | answer.keys()}
        same = len(ratios) == 1 and (sign == "=" or min(ratios) > 0)
        assert is_right(f"{text}{sign}0", f"{gold_text}{sign}0") == same


@given(st.permutations("abc"), st.permutations("abc"))
@settings(deadline=None)
def test_chains_of_inequalities_are_orders(one, other):
    assert is_right("<".join(other), "<".join(one)) == is_right(">".join(other[::-1]), "<".join(one)) == (one == other)


@given(st.text(alphabet=st.sampled_from("0123456789.,eExyi()[]{}\\ +-*/^_%$=<>!'|;~"), max_size=30))
@settings(deadline=None, max_examples=200)
def test_tidying_never_fails(text):
    assert isinstance(tidy(text), str)


COMMANDS = [r"\{", r"\}", r"\frac", r"\sqrt", r"\pm", r"\text{", r"\pi", r"\infty", r"\cup", r"\sum_{k=1}^", r"\int"]
PIECES = st.sampled_from([*"{}()[],=^_17xei.+-%!|< ", *COMMANDS])


@given(st.lists(st.lists(PIECES, max_size=12).map("".join), min_size=20, max_size=20))
@settings(deadline=None, max_examples=6)
def test_any_latex_gets_a_verdict(answers):
    with Scorer(time_limit_sec=2.0) as scorer:
        verdicts(scorer, [(rf"\boxed{{{answer}}}", "7") for answer in answers], within_sec=100)
        assert scorer.failures["crash"] == 0, "math-verify's exceptions are caught"


# ---- Boxes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, content",
    [
        (r"\boxed{3}", "3"),
        (r"\boxed {3}", "3"),
        (r"\fbox{3}", "3"),
        (r"\boxed{2}, no: \boxed{3}", "3"),
        (r"\boxed{3} and \boxed{ }", "3"),
        (r"\boxed{3", None),
        (r"\boxed{2} and \boxed{3", "2"),
        (r"\boxed{1} and \boxed{12\text{ boxes}}", r"1, 12\text{ boxes}"),
        (r"\boxed{1}, so \boxed{\mbox{a}} in a \colorbox{red}{box}", r"\mbox{a}"),
        (r"first \boxed{7}, then $\boxed{1}$, $\boxed{2}$ or \(\boxed{3}\).", "1, 2, 3"),
        (r"\boxed{4}\boxed{4}, and \boxed{4}", "4"),
        ("<think> so \\boxed{3}, or is it", "3"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{x\right.}", r"\left\{x\right."),
        (r"} \boxed{3}", "3"),
        (r"\boxed3", None),
        (r"\boxedx{3}", None),
        ("", None),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


@given(st.text(alphabet="{}\\ab "), st.text(alphabet="ab^_ ", min_size=1).filter(str.strip))
def test_the_last_closed_box_counts_whatever_stands_before(before, content):
    assert last_boxed(before + " \\boxed{" + content + "}") == content.strip()


def test_boxes_are_found_in_linear_time():
    start = time.process_time()
    for text in (r"\boxed{" * 100_000, r"\boxed{}" * 100_000, r"\boxed{" * 100_000 + "}" * 50_000, r"\boxed" * 100_000):
        last_boxed(text)
    assert time.process_time() - start < 2


# ---- Gold answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cell, text",
    [
        (5, "5"), (27.0, "27"), ("27.0", "27"), (0.5, "0.5"), (1e-05, r"1\times 10^{-5}"), (["2"], "2"), ("['2']", "2"),
        ([r"$\frac12$"], r"\frac{1}{2}"), ("$69$,$84$", "69,84"), (r"so $\boxed{4.5e33}$ erg", r"4.5\times 10^{33}"),
        ("025", "025"), ("Evelyn", r"\text{Evelyn}"), (r"\boxed{(A)}", "A"), ("New York", r"\text{New York}"),
        ("9 (apples)", "9"), ("The answer is 5.", "5"), (r"$\boxed{1}$ and $\boxed{2}$", "1,2"),
        ("June 20", r"\text{June} 20"),
    ],
)  # fmt: skip
def test_gold_cells(cell, text):
    assert read_gold(cell) == text
    assert read_gold(text) == text
    assert is_right(text, cell)


@pytest.mark.parametrize(
    "cell",
    [None, True, "", " ", "$$", [], ["1", "2"], {"a": 1}, float("nan"), float("inf"), r"\boxed{}", r"\boxed{3", "3 +",
     "(1,2", r"\frac{1}{", "f(x)=ax, where $a$ is any odd number", "1" * 2000, "(" * 40 + "1" + ")" * 40, "['a", "**",
     "proof", r"\text{Proof.}", "notfound", "unknown", "None", "null", "N/A", "See solution", "at least 3 of 5 cats"],
)  # fmt: skip
def test_gold_cells_that_are_refused_and_pay_nobody(cell):
    with pytest.raises(GoldError, match=".{10}"):
        read_gold(cell)
    assert not is_right("7", cell) and not is_right("", cell)


UNREADABLE = ["where $b$ is an arbitrary integer", "t(0,4]"]  # a sentence; a slip in the data set


@pytest.fixture(scope="module")
def texts():
    """The real golds, as they are read; those that cannot be are known."""
    read, refused = [], []
    for gold in (row["gold"] for row in read_lines("golds.jsonl")):
        try:
            read.append(read_gold(gold))
        except GoldError:
            refused.append(str(gold))
    assert len(refused) == len(UNREADABLE) and all(map(lambda part, gold: part in gold, UNREADABLE, refused))
    return read


def test_real_golds_are_read_once_and_for_all(texts):
    assert [text for text in texts if tidy(text) != text] == []


def other_form(gold: str) -> str:
    """The same answer, written in another way."""
    if gold.replace(".", "", 1).lstrip("-").isdigit():
        value = Fraction(gold)
        if abs(value) >= 1000:
            return f"{gold} = {value:,}" if "." in gold else rf"{int(value):,}\text{{ units}}"
        return rf"x=\frac{{{2 * value.numerator}}}{{{2 * value.denominator}}}\,\mathrm{{cm}}"
    if r"\times 10^" in gold:
        mantissa, exponent = gold.split(r"\times 10^")
        mantissa += "0" if "." in mantissa else ""
        return rf"{mantissa}e{exponent.strip('{}')} \mathrm{{~m}} / \mathrm{{s}}"
    if gold.endswith("%"):
        return rf"\frac{{{gold[:-1]}}}{{100}}"
    kind, parts = answers.compare._structure(gold)
    if kind == ",":
        return r" \text{ and } ".join(reversed([f"{{{part}}}" if "(" not in part else part for part in parts]))
    if kind and kind[0] in "([{":
        return rf"\left{gold[0]} {' , '.join(parts)} \right{gold[-1]}"
    if kind or gold.isalpha() or r"\ldots" in gold:
        return f" {gold} ."
    return rf"\dfrac{{2\left({gold}\right)}}{{2}}"


def test_real_golds_grade_themselves_and_another_form_right(texts):
    """At least 99% are asked for; there are no exceptions."""
    different = dict.fromkeys(texts)
    assert [text for text in different if not (is_right(text, text) and is_right(other_form(text), text))] == []


def test_real_golds_grade_the_next_golds_wrong(texts):
    neighbours = {(a, b) for step in (1, 2, 3) for a, b in zip(texts, texts[step:], strict=False) if a != b}
    assert [pair for pair in neighbours if is_right(pair[1], pair[0])] == []


# ---- Answers that try to break it --------------------------------------------------------------------------------


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def descendants(pid):
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [deeper for child in children for deeper in descendants(child)]


def wait_until_gone(pids, within_sec):
    deadline = time.monotonic() + within_sec
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, f"still alive: {list(filter(is_alive, pids))}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "command, cause",
    [("sleep 60", "timeout"), ("spin", "timeout"), ("hog", "memory"), ("segfault", "crash"), ("raise", "crash"),
     ("exit 3", "crash"), ("x" * 300_000, "too_long")],
)  # fmt: skip
def test_what_breaks_a_worker_is_wrong_and_nothing_else_is_lost(command, cause):
    gold = {"answer": "fine"}
    with Scorer(reward=OBEY, time_limit_sec=1.0) as scorer:
        questions = [
            ("fine", gold),
            ("bad", gold),
            (command, gold),
            *[(f"fine{i}", gold) for i in range(20)],
            ("fine", gold),
        ]
        got = verdicts(scorer, questions, within_sec=30)
        assert got == [True, False, False] + [False] * 20 + [True]
        assert scorer.failures == {cause: 1}
        start = time.monotonic()
        assert verdicts(scorer, [(command, gold), (command, {"answer": command})]) == [False, False]
        assert time.monotonic() - start < 0.5, "remembered by the answer alone"
        assert scorer.failures == {cause: 3}


def test_maths_that_would_take_for_ever():
    bombs = [
        r"\gcd(10^{10^8},6)",
        "9^{9^{9^9}}",
        r"((10!)!)!",
        "{" * 25 + "1" + "}" * 25,
        r"\lfloor10^{10^{10}}/3\rfloor",
    ]
    with Scorer(time_limit_sec=1.0) as scorer:
        got = verdicts(scorer, [(rf"\boxed{{{answer}}}", "7") for answer in [*bombs, "7", "8"]], within_sec=20)
    assert got == [False] * len(bombs) + [True, False]
    assert set(scorer.failures) <= {"timeout"}


def test_equal_pairs_are_graded_once(tmp_path):
    count, gold = tmp_path / "count", {"answer": "7"}
    with Scorer(workers=2, reward=OBEY) as scorer:
        assert verdicts(scorer, [(f"count {count}", gold)] * 100) == [False] * 100
        assert verdicts(scorer, [(f"count {count}", gold)]) == [False]
        assert count.read_text() == "x"
        assert verdicts(scorer, [(f"count {count}", {"answer": "8"})]) == [False]
        assert count.read_text() == "xx"


def test_thousands_submitted_before_the_first_poll(scorer):
    got = verdicts(scorer, [(rf"\boxed{{{i}.5}} " + "pad " * 500, f"{i % 3000}.5") for i in range(4000)])
    assert got == [True] * 3000 + [False] * 1000


def test_submit_and_an_idle_poll_take_microseconds(scorer):
    response = "So we see that $x^2 = 2$ and so on. " * 200 + r"Therefore \boxed{\frac{1}{2}}."
    verdicts(scorer, [(response, "0.5")])
    start = time.process_time()
    for key in range(1000):
        scorer.submit(key, response, "0.5")
    assert (time.process_time() - start) / 1000 < 50e-6
    assert len(scorer.poll()) == 1000
    start = time.perf_counter()
    assert scorer.poll() == [] and scorer.poll(5.0) == [] and scorer.poll(None) == [], "nothing submitted: no waiting"
    assert time.perf_counter() - start < 0.1


def test_poll_waits_for_one_result_or_its_timeout():
    with Scorer(reward=OBEY) as scorer:
        scorer.submit("a", "fine", {"answer": "fine"})
        assert scorer.poll(30) == [("a", True)]
        scorer.submit("b", "sleep 1", {"answer": ""})
        start = time.monotonic()
        assert scorer.poll() == [] and scorer.poll(0.2) == []
        assert 0.2 <= time.monotonic() - start < 0.6
        assert scorer.poll(30) == [("b", False)]


def test_from_any_thread():
    results = []

    def work():
        scorer = Scorer()
        results.append((scorer, verdicts(scorer, [(r"\boxed{2}", 2), (r"\boxed{3}", 2)])))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    scorer, got = results[0]
    with scorer:  # its thread has ended, its workers live on
        assert got == [True, False] and verdicts(scorer, [(r"\boxed{\frac42}", 2)]) == [True]


def test_a_worker_killed_from_outside_is_replaced():
    with Scorer(workers=2, reward=OBEY) as scorer:
        gold = {"answer": "fine"}
        assert verdicts(scorer, [("fine", gold)]) == [True]
        victim = scorer._workers[0].process.pid
        pids = [victim, *descendants(victim)]
        for key in range(41):
            scorer.submit(key, f"sleep 0.0{key}" if key else "fine again", gold)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        answered = []
        while len(answered) < 41:
            answered += scorer.poll(30)
        assert verdicts(scorer, [("fine", gold)]) == [True]
        assert scorer.failures["crash"] <= 1


def test_a_reward_that_cannot_be_imported_is_an_error(capfd):
    for reward, message in (("no_such_module:reward", "No module named"), ("json:nope", "has no attribute 'nope'")):
        with Scorer(reward=reward) as scorer, pytest.raises(RewardError, match=f"--reward {reward}: .*{message}"):
            scorer.wait_until_ready()
    assert capfd.readouterr().err == "", "one line, which is the command's to print"
    with pytest.raises(RewardError, match="MODULE:FUNCTION"):
        Scorer(reward="maths")


def test_close_ends_busy_workers_and_what_they_started(tmp_path):
    started = tmp_path / "pid"
    scorer = Scorer(workers=2, reward=OBEY)
    scorer.submit(0, f"leave {started}", {"answer": ""})
    while not (started.exists() and started.read_text()):
        assert scorer.poll(0.05) == []
    pids = [int(started.read_text())]
    for worker in scorer._workers:
        pids += [worker.process.pid, *descendants(worker.process.pid)]
    assert len(pids) >= 4
    scorer.close()
    scorer.close()
    wait_until_gone(pids, within_sec=1)


@pytest.mark.parametrize("answer", ["sleep 60", "fine"])  # busy and idle workers
def test_killing_the_parent_leaves_no_process(answer):
    script = f"""
        from ada.reward import RewardError, Scorer
        scorer = Scorer(workers=2, reward={OBEY!r}, time_limit_sec=60)
        for key in range(2):
            scorer.submit(key, "fine", {{"answer": str(key)}})
        while key > -1:
            key -= len(scorer.poll(None))
        for key in range(2):
            scorer.submit(key, {answer!r}, {{"answer": str(key + 5)}})
        print("busy", flush=True)
        scorer.poll(None)
        import time; time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
    )
    assert parent.stdout.readline() == b"busy\n"
    pids = descendants(parent.pid)
    assert len(pids) == 4, "two workers, a child each"
    parent.kill()
    parent.wait()
    wait_until_gone(pids, within_sec=3)


def test_a_parent_with_torch_and_threads_is_not_forked():
    script = r"""
        import os, threading, time
        import torch
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        torch.ones(500, 500) @ torch.ones(500, 500)
        os.chdir("/")
        from ada.reward import RewardError, Scorer
        with Scorer() as scorer:
            scorer.submit("key", r"\boxed{2}", 2)
            assert scorer.poll(60) == [("key", True)]
            worker = scorer._workers[0].process.pid
            assert "torch" not in open(f"/proc/{worker}/maps").read()
        print("done")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)


def test_importing_the_grader_is_light():
    code = "import sys, ada.reward; print([m for m in ('torch', 'vllm', 'sympy', 'math_verify') if m in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env).stdout == "[]\n"


def test_a_reward_of_ones_own():
    with Scorer(reward="tests.rewards_for_tests:exact_match") as scorer:
        assert verdicts(scorer, [(" 7 ", 7), ("7", "7"), ("7.0", 7), ("", ""), ("7", [7])]) == [
            True,
            True,
            False,
            True,
            False,
        ]


@pytest.mark.parametrize("response, gold", [("negative", 1), ("part", 1), ("array", 1), ("?", {"a": 1}), ("?", None)])
def test_a_reward_that_returns_no_verdict_is_an_error(response, gold):
    reward = "tests.rewards_for_tests:returns"
    with Scorer(reward=reward) as scorer:
        assert verdicts(scorer, [("numpy", 0), ("one", 0), ("1.0", 0), ("?", False)]) == [True, True, True, False]
        scorer.submit("key", response, gold)
        with pytest.raises(RewardError, match=f"--reward {reward}: returned .*; it must return True or False"):
            scorer.poll(60)


def test_a_reward_that_always_raises_is_an_error_and_one_that_sometimes_does_is_not(capfd):
    reward = "tests.rewards_for_tests:fails_on"
    with (
        Scorer(reward=reward) as scorer,
        pytest.raises(RewardError, match="raised ValueError: no such column"),
    ):
        verdicts(scorer, [(f"{i} of x", "x") for i in range(100)])
    with Scorer(reward=reward) as scorer:
        assert verdicts(scorer, [("fine", "x")] + [(f"{i} of x", "x") for i in range(120)]) == [True] + [False] * 120
        assert scorer.failures == {"crash": 120}
    assert capfd.readouterr().err == "", "no traceback for each response"


def test_the_examples_in_the_docstrings():
    assert grade(r"\boxed{2}", "2") and not grade("2", "2")
    for module in (answers.latex, answers.compare, ada.reward):
        failed, tried = doctest.testmod(module)
        assert tried > 0 and failed == 0


def test_a_worker_whose_scorer_is_gone_ends_quietly():
    """A run that ends while its graders still start must not print their tracebacks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    command = [sys.executable, "-m", "ada.support.worker", "math", "5.0", str(1 << 30)]
    done = subprocess.run(command, stdin=theirs, cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")

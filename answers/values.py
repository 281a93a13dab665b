r"""Are two single expressions equal? math-verify's parser reads them, and their exact values are compared.

Its comparison is not used: it rounds, and solves equations, which can take minutes. Numbers are compared by value,
formulas by their values at some odd points, equations and inequalities by the ratio of theirs.
"""

import functools
import math
import random
import re

MAX_EXPONENT = 10**6  # beyond it no power, factorial or sum is evaluated


@functools.lru_cache(10_000)
def parse(text: str):
    """A sympy object; None if math-verify's parser cannot read the text."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    if re.search(r"\d \d", text):  # it adds: 2 3 would be 5
        return None
    for pattern, replacement in _FOR_THE_PARSER:
        text = pattern.sub(replacement, text)
    if not re.search(r"i\s*=|_\{?i", text):  # then i is no index, and sympy's I is meant
        text = re.sub(
            r"(\\(?:text|begin|end|math[a-z]+)\{[^}]*\}|\\[A-Za-z]+|_\{\w+\})|i", lambda match: match[1] or "(I)", text
        )
    config = ConversionConfig(lowercase_symbols=False)  # M/m isn't 1
    try:
        return latex2sympy(text, is_real=True, normalization_config=None, conversion_config=config)
    except MemoryError:
        raise
    except Exception:  # its parser raises plain Exceptions, sympy nearly anything
        return None


_FOR_THE_PARSER = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\((\d+)\)(?=_)", r"\1"),
        (r"(?<![A-Za-z}\d.])(\d+)_\{10\}", r"\1"),
        (r"(?<![A-Za-z}\d.])(\d+)_\{\(?(\w+)\)?\}", r"\\mathcal{n\1b\2}"),  # it ignores the base of 101_2
        (r"(?<![_^\d.A-Za-z])(\d+(?:\.\d+)?) *(?=\(|\\frac)", r"\1\\cdot "),  # it adds: 2(1/3) is a mixed number to it
        (r"\) *(?=[\d(])", r")\\cdot "),
        (r"\\text\{([A-Za-z]{1,3})\}", r"\1"),
        (r"\\gamma(?![A-Za-z])", r"\\mathcal{gamma}"),
        (r"(?<![A-Za-z\\])([eE])(?=_)", r"\\mathcal{\1}"),
    ]
]  # fmt: skip


_TOWER = re.compile(r"\^\{?(\d+)\^\{?(\d+)")  # the parser itself evaluates \gcd(10^{10^8},6)


def attempt(otherwise):
    """A decorator: sympy and the parser raise nearly anything, and what they can't do is `otherwise`."""

    def decorate(function):
        @functools.wraps(function)
        def guarded(*arguments):
            try:
                return function(*arguments)
            except MemoryError:
                raise
            except Exception:
                return otherwise

        return guarded

    return decorate


@attempt(False)
def equal(gold: str, answer: str) -> bool:
    """Are two single expressions equal?"""
    if any(
        int(power[:9]) * math.log10(int(base) or 1) > math.log10(MAX_EXPONENT) for base, power in _TOWER.findall(answer)
    ):
        return False
    gold, answer = parse(gold), parse(answer)
    if gold is None or answer is None or _huge(answer):
        return False
    return gold == answer or equal_values(gold, answer)


def _huge(expression) -> bool:
    """Is there a power, factorial, sum.. that sympy might write out to millions of digits or terms?"""
    from sympy import Pow, binomial, factorial, postorder_traversal
    from sympy.concrete.expr_with_limits import ExprWithLimits

    for node in postorder_traversal(expression):  # inner ones first: they are small enough to be evaluated
        sizes = []
        if isinstance(node, Pow):
            sizes = [node.exp]
        elif isinstance(node, factorial | binomial):
            sizes = node.args
        elif isinstance(node, ExprWithLimits):
            sizes = [bound for limit in node.limits for bound in limit[1:]]
        if any(size.is_number and size.is_finite and abs(size.evalf(10)) > MAX_EXPONENT for size in sizes):
            return True
    return False


def ready(expression):
    """For evaluation: f(2) as a symbol of its own, odd roots of negative numbers as the real ones."""
    from sympy import Abs, Symbol, sign
    from sympy.core.function import AppliedUndef

    expression = expression.replace(
        lambda part: isinstance(part, AppliedUndef), lambda part: Symbol(str(part.doit()), real=True)
    )
    return expression.replace(
        lambda part: part.is_Pow and part.exp.is_Rational and part.exp.q % 2 and part.exp.q > 1 and part.base.is_real,
        lambda part: sign(part.base) ** part.exp.p * Abs(part.base) ** part.exp,
    )


def _points(*expressions) -> list[dict]:
    """Values for each variable, near and far and of either sign, which fulfil no equation by accident."""
    from sympy import Abs, Max, Min, Rational, ceiling, floor

    symbols = sorted(set().union(*(expression.free_symbols for expression in expressions)), key=str)
    if not symbols:
        return [{}]
    chance = random.Random(1)
    kinks = any(expression.has(Abs, Max, Min, floor, ceiling) for expression in expressions)
    points = [
        {symbol: Rational(scale * chance.randrange(10**12, 9 * 10**12), 5 * 10**12) for symbol in symbols}
        for scale in ((1, -1, 30, -300) if kinks else (1, -1))
    ]
    points.append({symbol: chance.choice((-1, 1)) * value for symbol, value in points[0].items()})
    if kinks:
        points += [{symbol: Rational(chance.randrange(2, 1000)) for symbol in symbols} for _ in range(4)]
    return points


def equal_values(gold, answer) -> bool:
    """Are two sympy expressions equal? Numbers by value, formulas by their values at some odd points."""
    from sympy import Float, MatrixBase, MatrixExpr, simplify

    if isinstance(gold, MatrixBase | MatrixExpr) or isinstance(answer, MatrixBase | MatrixExpr):
        gold, answer = gold.doit(), answer.doit()
        return gold.shape == answer.shape and all(map(equal_values, gold.flat(), answer.flat()))
    gold, answer = ready(gold), ready(answer)
    difference = gold - answer
    exact = not (gold.has(Float) or answer.has(Float))
    for point in _points(gold, answer):
        values = gold.evalf(30, subs=point), answer.evalf(30, subs=point)
        if not all(value.is_number and value.is_finite for value in values):  # f(x), Derivative, 1/0
            return simplify(difference, doit=False) == 0  # integrals stay as they stand: solving one can take minutes
        if not _close(*values, exact=exact):
            return False
        # 30 digits can't tell 2^999 from 2^999 + 1, nor 0 from 10^-40
        if exact and (abs(values[0]) < 1e-10 or (not point and abs(values[0]) > 1e10)):
            rest = difference if point else difference.doit()
            if not (rest == 0 or (not rest.is_Rational and abs(rest.evalf(30, subs=point, maxn=1000)) < 1e-300)):
                return False
    return True


def _close(gold, answer, *, exact: bool) -> bool:
    """Are two numbers of 30 digits equal, or if a decimal is involved near enough, by the rules above?"""
    gap, size = abs(gold - answer), abs(gold)
    if exact:
        return bool(gap <= 1e-20 * size + 1e-25)
    if gap <= 1e-14 * size:
        return True
    if any(number.is_real and number % 1 == 0 for number in (gold, answer)):
        return False
    return bool(gap <= 1e-6 and gap <= 1e-5 * size)


@attempt(False)
def proportional(gold: str, answer: str) -> bool:
    """Are two equations or inequalities the same up to a factor? sympy would solve them, which can take minutes."""
    from sympy import Eq, Ne, Rel

    gold, answer = parse(gold), parse(answer)
    if not isinstance(gold, Rel) or not isinstance(answer, Rel) or _huge(answer):
        return False
    left, right = (ready(relation.lhs - relation.rhs) for relation in (gold, answer))
    if not (left.free_symbols and right.free_symbols):  # 1=2 says nothing
        return False
    ratios = [left.evalf(20, subs=point) / right.evalf(20, subs=point) for point in _points(left, right)]
    if not all(ratio.is_number and ratio.is_finite and ratio for ratio in ratios):
        return False
    if any(abs(ratio - ratios[0]) > 1e-9 * abs(ratios[0]) for ratio in ratios):
        return False
    if isinstance(gold, Eq | Ne):
        return type(gold) is type(answer)
    return ratios[0].is_real and type(gold) is type(answer if ratios[0] > 0 else answer.reversed)


def exact(expression):
    """2.25 as 9/4: sympy compares sets only if all is exact."""
    from sympy import Float, Rational

    return expression.replace(lambda part: isinstance(part, Float), lambda part: Rational(str(part)))

r"""Is this answer that answer? Reads gold answers and boxes, and compares LaTeX with math-verify (sympy).

Nothing here is bounded in time or memory: reward.py runs it in processes that can be killed. The answer is first tidied
(text in, text out), then taken apart (lists, brackets, percents, equations); math-verify gets the single expressions.

The rules, where a choice had to be made:
- Box: the last non-empty, closed \boxed{} or \fbox{} counts; without one the response is wrong.
- Exact answers must be equal exactly, whatever their form. If a decimal is involved, and neither side is an integer,
  they may differ by 1e-6 and by one part in 100,000 (0.333333 is 1/3, 3.14 isn't pi, 0.0000001 isn't 0.0000002).
- 4.5e33 is 4.5\times10^{33}; 27.0 is 27; 1,000,000 (groups of three, no spaces) is one number.
- Percent: with a sign on both sides, or on neither, the numbers must agree. With one on one side only, the other
  side may be the number or its hundredth: 50\% is 50 and 0.5, but 0.5 is not 50.
- A unit, degree or currency sign beside a number is ignored on both sides, and not compared.
- A comma list without brackets has no order but counts repeats, as \{..\} does without; (..) and [..] are ordered, and
  for two elements, which may be an interval, the kind of bracket matters. 1\pm2 is the list 3, -1.
- x=5 is 5, f(x)=2x is 2x, but x^2=6 is not 6. Words are compared as words, case ignored; (A) is A.
- An answer over 1000 characters or 30 brackets deep, or with a number above about 10^{10^6}, is wrong unevaluated.

Known limits:
- 5 cm is paid for 5 m, and \sin 45^\circ is the sine of 45: units and degrees are dropped, not converted.
- 100,200 without a space is a number, though it may be meant as a list. 2,1 is paid for x=1, y=2.
- Formulas are compared for real variables of either sign, under their own names: \sqrt{xy} isn't \sqrt x\sqrt y, and
  f(n)=n isn't f(x)=x. sympy's silence counts as wrong: an equal differential equation may go unrecognised.
- An ellipsis is compared as text, as is a sentence; (A) 5 isn't A.
"""

import ast
import functools
import logging
import math
import re
import unicodedata

MAX_ANSWER_CHARS = 1000  # the longest of 1017 benchmark golds has 232
MAX_DEPTH = 30  # brackets in brackets, at most 5 in the benchmarks; the parser's time can be exponential in it
MAX_EXPONENT = 10**6  # beyond it no power, factorial or sum is evaluated


class GoldError(ValueError):
    """A data set's answer that cannot be read; the message says why."""


# ---- Text: from the cell or the response to plain LaTeX -------------------------------------------------------------


_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # \{ and \} are not braces


def last_boxed(text: str) -> str | None:
    r"""The content of the last closed, non-empty \boxed{} (or \fbox{}), None if there is none.

    >>> last_boxed(r"within \boxed{}. First \boxed{2}, no: \boxed{\frac{1}{2}}, or \boxed{3")
    '\\frac{1}{2}'
    """
    start = end = len(text)
    while (start := text.rfind("box", 0, start)) >= 0:
        opening = _BOX.match(text, max(start - 1, 0)) or _BOX.match(text, max(start - 2, 0))
        depth = 1
        for brace in _BRACE.finditer(text, opening.end(), end) if opening else ():
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                if content := text[opening.end() : brace.start()].strip():
                    return content
                break
        else:
            end = start  # what doesn't close before an unclosed box doesn't close after it: the search stays linear
    return None


_CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "π": r"\pi ", "×": r"\times ", "·": r"\cdot ",
     "°": r"^\circ ", "∞": r"\infty ", "√": r"\sqrt ",
     "∪": r"\cup ", "∩": r"\cap ", "≤": r"\le ", "≥": r"\ge ", "±": r"\pm ", "∅": r"\emptyset ", "∈": r"\in ", "÷": "/",
     "²": "^2", "³": "^3", "∗": "*", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "ω": r"\omega ", "′": "'"}
)  # fmt: skip
_POWER = r"(?:\s*\^\s*(?:\d|\{-?\d\}))?"
_UNIT = (
    r"(?:square |cubic |sq\.? )?(?:[kcmn]?m/s|km/h|mph|[cmkn]m|kg|mg|ml|mL|[kM]?Hz|[kM]?eV|kJ|mol|"
    r"(?:kilo|centi|milli)?(?:meter|metre|gram|liter|litre)|feet|foot|ft|inch|inche|mile|yard|acre|hectare|pound|ounce|"
    r"degree|radian|dollar|cent|second|sec|minute|min|hour|hr|day|week|month|year|unit)s?"
)


def _exact_repeating(match: re.Match) -> str:
    whole, fixed, repeating = match[1] or "0", match[2], match[3]
    value = int(whole + fixed + repeating) - int(whole + fixed)
    return rf"\frac{{{value}}}{{{(10 ** len(repeating) - 1) * 10 ** len(fixed)}}}"


def _mixed_number(match: re.Match) -> str:
    proper = int(match[2]) < int(match[3])
    return rf"({match[1]}+\frac{{{match[2]}}}{{{match[3]}}})" if proper else match[0]


_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        # Layout: \left( is (, spaces of all kinds are spaces, dollars go, dfrac is frac
        (r"\\(?:left|right|[bB]ig{1,2}[lr]?)(?![A-Za-z])\.?", ""),
        (r"\\!", ""),
        (r"\\[,;:> ]|\\(?:q?quad|displaystyle|textstyle|limits)(?![A-Za-z])|~|\s+", " "),
        (r"(?<=[(\[{]) +| +(?=[)\]},;])", ""),
        # Numbers: 1,000,000 = 1{,}000{,}000 = 1\,000\,000, but (1,000) and 10, 100,200 are lists
        (r"(?<![\d.,(\[{])(?<![,;] )\d{1,3}(?:(?:\{,\}|[, ])\d{3})+(?![\d,]|\.\d*\\(?:overline|bar|dot))",
         lambda match: re.sub(r"\D", "", match[0])),
        (r"\\?\$", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\geqslant|\\geq(?![a-z])", r"\\ge "),
        (r"\\leqslant|\\leq(?![a-z])", r"\\le "),
        (r"\\varnothing|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\.\.\.|\\[lc]?dots[a-z]?(?![A-Za-z])", r"\\ldots "),
        (r"\\(?:text(?:bf|rm|it|normal)?|math(?:rm|bf|it)|mbox|operatorname)\s*\{", r"\\text{"),
        (r"\\text\{\s*([eid])\s*\}", r"\1"),
        (r"^\s*\\text\{([^{}]*)\}\s*$", r"\1"),
        (r"\s*,?\s*(?:\\text\{\s*,?\s*(?:and|or)\s*\}|\b(?:and|or)\b)\s*", ","),
        (r"(?:\s|\\\\|(?<!\\)[.,;:])+$", ""),
        # Units: 5\text{ cm}, 12\,\mathrm{cm}^2, 3 \mathrm{~m}/\mathrm{s}, 5 cm, 90^\circ; a percent sign is kept
        (r"\s*(?:\\?%|(?:\\text\{\s*percent\s*\}|\bpercent))$", "%"),
        (r"\s*\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})(?:\s*\\text\{\s*[CF]\s*\}|\s*[CF]$)?", ""),
        (rf"(?:(?<=[\d)}}])|(?<=\\pi))(?:\s*(?:/|\\cdot(?![A-Za-z])|)\s*\\text\{{[^{{}}\d%,]*\}}{_POWER})+$", ""),
        (rf"(?<=\d)\s*{_UNIT}{_POWER}$", ""),
        # Numbers again: 0.\overline{3}, 4.5e33, 27.0, 1./3, .5
        (r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?", _exact_repeating),
        (r"(?<![A-Za-z\d.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?![A-Za-z\d.])",
         lambda match: rf"{match[1]}\times 10^{{{int(match[2])}}}"),
        (r"(?<![\d.])(\d+)\.0*(?!\d)", r"\1"),
        (r"(?<!\d)\.(?=\d)", "0."),
        # Plain writing: pi/2, sqrt(2), np.arcsin(x), y'
        (r"\b(?:np|numpy|math)\.(?=[a-z])", ""),
        (r"(?<![A-Za-z\\])(pi|sqrt|(?:arc)?(?:sin|cos|tan)|ln|log|exp|infty|cup)(?![A-Za-z])", r"\\\1 "),
        (r"'", r"^{\\prime}"),
        # TeX takes one token for a missing pair of braces: \sqrt3, \sqrt(3), \frac12, \frac{1}2
        (r"\\sqrt\s*\(((?:[^()]|\([^()]*\))*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*([0-9A-Za-z])", r"\\sqrt{\1}"),
        (r"\\(frac|binom)\s*([0-9A-Za-z])", r"\\\1{\2}"),
        (r"(\\(?:frac|binom)\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})\s*([0-9A-Za-z])", r"\1{\2}"),
        (r"(?<![\d.])(\d+) *\\frac\{(\d+)\}\{(\d+)\}", _mixed_number),
        (r"^[A-Za-z]\s*\\in(?![A-Za-z])", ""),
        # What the parser can't read or misreads: 2(1/3) as a mixed number, E_1 with Euler's e, \gamma as the
        # function, m_{\max}, (A)
        (r"(?<![_^\d.A-Za-z])(\d+(?:\.\d+)?) *(?=\(|\\frac)", r"\1\\cdot "),
        (r"\) *(?=\()", r")\\cdot "),
        (r"\\gamma(?![A-Za-z])", r"\\mathcal{gamma}"),
        (r"(?<!\\mathcal\{)(?<![A-Za-z\\])(E(?![A-Za-z])|e(?=_))", r"\\mathcal{\1}"),
        (r"_\{\s*(?:\\text\{([A-Za-z]+)\s*\}|\\([A-Za-z]{2,}))\s*\}", r"_{\1\2}"),
        (r"^\(([^(),;]*)\)$", r"\1"),
        (r"^\s+|\s+$|(?<![A-Za-z\d}]) +| +(?![A-Za-z\d\\])", ""),
    ]
]  # fmt: skip


_DOUBLE_BRACES = re.compile(r"(?<!\\)\{(\{[^{}]*\})\}")


def tidy(text: str) -> str:
    r"""LaTeX as people write it, into the LaTeX that math-verify reads rightly; tidying twice changes nothing more.

    >>> tidy(r"$\dfrac12\,\mathrm{cm}^2$."), tidy("1,000,000"), tidy("1.6e-19")
    ('\\frac{1}{2}', '1000000', '1.6\\times 10^{-19}')
    """
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS))
    while (simpler := _DOUBLE_BRACES.sub(r"\1", text)) != text:
        text = simpler  # each pair would double the parser's time
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


_NOT_FINITE = {"nan", "inf", "-inf"}  # an empty cell, as pandas writes it


def _gold_text(cell) -> str:
    """A data set's answer cell as tidy LaTeX; GoldError if it is no text, number, or list of one."""
    listed = isinstance(cell, str) and re.match(r"\s*\[\s*(['\"]).*\1\s*\]\s*$", cell, re.DOTALL)
    if listed:  # "['2']": a list that went through a CSV file
        try:
            cell = ast.literal_eval(cell.strip())
        except (ValueError, SyntaxError) as error:
            raise GoldError(f"not a list: {cell[:80]}") from error
    if isinstance(cell, list | tuple) and len(cell) == 1:
        cell = cell[0]
    if isinstance(cell, bool) or not isinstance(cell, str | int | float) or str(cell) in _NOT_FINITE:
        raise GoldError(f"a gold answer is text or a finite number, not {type(cell).__name__}: {str(cell)[:80]}")
    text = str(cell)
    return tidy(last_boxed(text) or "" if _BOX.search(text) else text)


def read_gold(cell) -> str:
    r"""The gold answer of a data set's cell as one LaTeX string, read once when the data is loaded.

    Takes text (bare LaTeX, $..$, a solution with a \boxed{}), a number, or a list of one of these. Raises GoldError
    if it cannot be read: such a row would pay every response or none for ever.

    >>> read_gold(27.0), read_gold(["$\\frac12$"]), read_gold(r"so $x$ is \boxed{4.5e33} erg")
    ('27', '\\frac{1}{2}', '4.5\\times 10^{33}')
    """
    text = _gold_text(cell)
    if not text:
        raise GoldError(f"no answer in {str(cell)[:80]!r}")
    if too_long(text):
        raise GoldError(f"over {MAX_ANSWER_CHARS} characters or {MAX_DEPTH} brackets deep: {text[:80]}")
    unread = [part for part in _leaves(text) if not _readable(part)]
    if unread:
        raise GoldError(f"not an expression, a list or a word: {unread[0][:80]!r}")
    return text


# ---- Structure: lists, brackets, percents, equations; math-verify gets single expressions ----------------------------

_TOKEN = re.compile(r"\\[{}]|[()\[\]{},;]")
_WORDS = re.compile(r"(?=(?:.*[A-Za-z]){4})[A-Za-z][A-Za-z' -]*")  # abc may be a product, Evelyn isn't
_NAME = (
    r"(?!.*\\(?:sin|cos|tan|ln|log|exp)(?![a-z]))"
    r"(?:[A-Za-z]|\\[A-Za-z]++|_\{?\w++\}?|\([^()=]*+\)|\^\{\\prime\}|[-+ ,])++"
)
_NUMBER = r"(?:[^=A-Za-z\\]|\\(?:frac|sqrt|binom|cdot|times|pi)(?![A-Za-z]))*+"
_ASSIGNMENT = re.compile(rf"(?:{_NAME}|{_NUMBER})=(?:.*=)?([^=]+)")  # x=.., f(x)=.., m+n=..=.., 2+3=5


def too_long(text: str) -> bool:
    """Over the caps on length and nesting that are checked before anything is parsed."""
    deepest = depth = 0
    if len(text) <= MAX_ANSWER_CHARS:
        for character in text:
            depth += (character in "([{") - (character in ")]}")
            deepest = max(deepest, depth)
    return len(text) > MAX_ANSWER_CHARS or deepest > MAX_DEPTH


def _split(text: str) -> list[str] | None:
    """Cut at the commas and semicolons outside brackets; None if the brackets don't balance."""
    parts, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        character = token[0][-1]
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth < 0:
                return None
        elif depth == 0:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    return None if depth else [part for part in [*parts, text[start:].strip()] if part]


def _elements(text: str) -> tuple[str, list[str]]:
    r"""The kind of list, and what is in it: '' is no list, ',' a bare one, otherwise its two brackets.

    >>> _elements("(1,2]"), _elements("1,(2,3)"), _elements(r"1\pm 2"), _elements("5")
    (('(]', ['1', '2']), (',', ['1', '(2,3)']), (',', ['1+ 2', '1- 2']), ('', ['5']))
    """
    parts = _split(text) or [text]
    if len(parts) == 1 and (whole := re.fullmatch(r"(\\\{|[(\[])(.+)(\\\}|[)\]])", text)):
        inside = _split(whole[2])
        if inside is not None and (len(inside) > 1 or whole[1] == r"\{"):
            return whole[1][-1] + whole[3][-1], inside
    signed = []
    for part in parts:
        if r"\pm" in part:
            signed += [part.replace(r"\pm", "+").replace(r"\mp", "-"), part.replace(r"\pm", "-").replace(r"\mp", "+")]
        else:
            signed.append(part)
    return ("," if len(signed) > 1 else ""), signed


def _leaves(text: str) -> list[str]:
    kind, parts = _elements(text)
    return [leaf for part in parts for leaf in _leaves(part)] if kind else [text.removesuffix("%")]


def same(gold: str, answer: str) -> bool:
    """Does a tidy answer equal a tidy gold? See the rules at the top of the file."""
    if gold == answer or (gold.isalpha() and gold.casefold() == answer.casefold()):
        return True  # also (a) for A, Yes for yes
    if _WORDS.fullmatch(gold) or _WORDS.fullmatch(answer):
        return gold.casefold() == answer.casefold()
    (gold_kind, golds), (kind, answers) = _elements(gold), _elements(answer)
    if gold_kind and kind:
        if {gold_kind, kind} <= {",", "{}"}:
            return _same_unordered(golds, answers)
        brackets_agree = gold_kind == kind or {gold_kind, kind} <= {",", "()"}
        may_be_interval = len(golds) == 2
        if "{}" in (gold_kind, kind) or (may_be_interval and not brackets_agree):
            return False
        return len(golds) == len(answers) and all(map(same, golds, answers))
    if "," in (gold_kind, kind) or r"\ldots" in gold + answer:
        return False  # candidates are no answer, and what an ellipsis stands for is not for a program to say
    if gold.endswith("%") != answer.endswith("%"):
        bare_gold, bare = gold.removesuffix("%"), answer.removesuffix("%")
        hundredths = [rf"\frac{{{text}}}{{100}}" if text.endswith("%") else text for text in (gold, answer)]
        return same(bare_gold, bare) or same(*(text.replace("%", "") for text in hundredths))
    gold, answer = gold.removesuffix("%"), answer.removesuffix("%")
    if ("=" in gold) != ("=" in answer):
        value = _ASSIGNMENT.fullmatch(gold if "=" in gold else answer)
        return value is not None and (same(value[1], answer) if "=" in gold else same(gold, value[1]))
    return _verify(gold, answer)


def is_right(answer: str, gold) -> bool:
    """Does the content of a box equal a data set's gold cell? A cell that cannot be read pays nobody."""
    try:
        gold, answer = _gold_text(gold), tidy(answer)
    except GoldError:
        return False
    return answer != "" and not too_long(gold) and not too_long(answer) and same(gold, answer)


def _same_unordered(golds: list[str], answers: list[str]) -> bool:
    if len(golds) != len(answers):
        return False
    left = list(answers)
    for gold in golds:
        match = next((answer for answer in left if same(gold, answer)), None)
        if match is None:
            return False
        left.remove(match)
    return True


# ---- Single expressions: math-verify, with exact numbers -------------------------------------------------------------


@functools.cache
def _math_verify():
    """math-verify, with its comparison of values replaced: rounding, it takes 1/2^99 for 1/2^98."""
    import math_verify.grader

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
    math_verify.grader.sympy_numeric_eq = _equal_values
    math_verify.grader.sympy_symbolic_eq = lambda *_: False
    math_verify.grader.sympy_solve_and_compare = _proportional
    math_verify.grader.sympy_compare_symbols = _equal_values  # it compares 2x/2 and x as text
    return math_verify


@functools.lru_cache(10_000)
def _parse(text: str):
    """A sympy object; None if math-verify's parser cannot read the text."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy, normalize_latex

    # Of its normalisations only the basic ones: the others take 3t for 3 tonnes, and break \frac{\sqrt{3}2}{4}
    text = normalize_latex(text, NormalizationConfig(basic_latex=True, boxed="none"))
    if not re.search(r"i\s*=|_\{?i|\\imath", text):  # then i is no index, and sympy's I is meant
        text = re.sub(r"(\\(?:text|begin|end)\{[^}]*\}|\\[A-Za-z]+|_\{\w+\})|i", lambda match: match[1] or "(I)", text)
    config = ConversionConfig(lowercase_symbols=False)  # M/m isn't 1
    try:
        return latex2sympy(text, is_real=True, normalization_config=None, conversion_config=config)
    except MemoryError:
        raise
    except Exception:  # its parser raises plain Exceptions, sympy nearly anything
        return None


def _readable(text: str) -> bool:
    if _WORDS.fullmatch(text):
        return len(text.split()) <= 5  # more is a sentence, which nobody writes twice
    return r"\ldots" in text or _parse(text) is not None


_TOWER = re.compile(r"\^\{?(\d+)\^\{?(\d+)")  # the parser itself evaluates \gcd(10^{10^8},6)


def _verify(gold: str, answer: str) -> bool:
    if any(
        int(power[:9]) * math.log10(int(base) or 1) > math.log10(MAX_EXPONENT) for base, power in _TOWER.findall(answer)
    ):
        return False
    gold, answer = _parse(gold), _parse(answer)
    if gold is None or answer is None or _huge(answer):
        return False
    try:
        return _math_verify().verify(
            gold, answer, timeout_seconds=None, allow_set_relation_comp=True, raise_on_error=True
        )
    except MemoryError:
        raise
    except Exception:  # sympy raises nearly anything; what it can't compare isn't equal
        return False


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


def _points(*expressions) -> list[dict]:
    """Two odd values for each variable, the second negative at first; one empty point if there is none."""
    from sympy import Rational

    symbols = sorted(set().union(*(expression.free_symbols for expression in expressions)), key=str)
    steps = [(577216, 141421), (-1324718, 223607)] if symbols else [(0, 0)]
    return [{symbol: Rational(start + step * n, 10**6) for n, symbol in enumerate(symbols)} for start, step in steps]


def _proportional(gold, answer, *_precision) -> bool:
    """Are two equations or inequalities the same up to a factor? sympy would solve them, which can take minutes."""
    from sympy import Eq, Ne

    left, right = gold.lhs - gold.rhs, answer.lhs - answer.rhs
    ratios = [left.evalf(15, subs=point) / right.evalf(15, subs=point) for point in _points(left, right)]
    if not all(ratio.is_number and ratio.is_finite and ratio for ratio in ratios):
        return False
    if abs(ratios[0] - ratios[-1]) > 1e-9 * abs(ratios[0]):
        return False
    if isinstance(gold, Eq | Ne):
        return type(gold) is type(answer)
    return type(gold) is type(answer if ratios[0] > 0 else answer.reversed)


def _equal_values(gold, answer, *_precision) -> bool:
    """Are two sympy expressions equal? Numbers by value, formulas by their values at two odd points (one negative)."""
    from sympy import Float, MatrixBase, MatrixExpr, simplify

    if isinstance(gold, MatrixBase | MatrixExpr) or isinstance(answer, MatrixBase | MatrixExpr):
        gold, answer = gold.doit(), answer.doit()
        return gold.shape == answer.shape and all(map(_equal_values, gold.flat(), answer.flat()))
    difference = gold - answer
    exact = not (gold.has(Float) or answer.has(Float))
    for point in _points(gold, answer):
        values = gold.evalf(30, subs=point), answer.evalf(30, subs=point)
        if not all(value.is_number and value.is_finite for value in values):  # f(x), Derivative, 1/0
            return simplify(difference, doit=False) == 0  # integrals stay as they stand: solving one can take minutes
        if not _close(*values, exact=exact):
            return False
        if exact and not 1e-10 < abs(values[0]) < 1e10:  # 30 digits can't tell 2^999 from 2^999 + 1, nor 0 from 10^-40
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

r"""Is this answer that answer? Reads gold answers, and compares LaTeX by structure.

Nothing here is bounded in time or memory: reward.py runs it in processes that can be killed.

    tidy (latex.py): one spelling -> _structure: a list, a set, a matrix.. -> same: part by part -> equal (values.py)

math-verify (0.9.0) is used for its parser, which turns single expressions into sympy; its comparison is replaced. Alone
it fails 16 of the 88 cases in tests/data/grading.jsonl and 173 of the 615 in grading-2.jsonl, and in each pays for 6
wrong answers: it rounds (1/2^99 is 1/2^98 to it), ignores the bases of numbers, doesn't know units and labels, and
solves equations, which can take minutes.

The rules, where a choice had to be made:
- Box: the last non-empty, closed \boxed{} or \fbox{} counts, wherever it stands, also in thinking that was cut off;
  without one the response is wrong. Boxes with only commas, "and", "or" and spacing between them are one list; boxes
  that say the same again are one answer.
- Exact answers must be equal exactly, whatever their form. If a decimal is involved, and neither side is an integer,
  they may differ by 1e-6 and by one part in 100,000 (0.333333 is 1/3, 3.14 isn't pi, 0.0000001 isn't 0.0000002).
- 4.5e33 is 4.5\times10^{33}; 1,000,000 (groups of three, no spaces) is one number; 1,5 is a list; 1 1/4 is mixed.
- 101_2 is the same only as 101_2; 3:2 is 6:4 but not 1.5; 3:30 is a time, equal to itself; 3 mod 7 needs its modulus.
- Percent: with a sign on both sides, or on neither, the numbers must agree. With one on one side only, the other
  side may be the number or its hundredth: 50\% is 50 and 0.5, but 0.5 is not 50.
- A unit, degree or currency sign beside a number is ignored on both sides, and not compared; a single letter is a unit
  only after a space and where the gold answer has no letters (5 m, not 5m). Degrees under sin, cos.. are converted.
- A comma list without brackets has no order but counts repeats, as \{..\} does without; (..) and [..] are ordered, and
  for two elements, which may be an interval, the kind of bracket matters. 1\pm2 is the list 3, -1.
- x=2, y=3 is (2,3) in the order of the letters, but x_1=2, x_2=3 is a list.
- x=5 is 5, and so is |AB|=5 or a^2+b^2=5, if the gold answer is 5; but 2x=10, x^2=25 and y=5 are not x=5. An equation
  without letters stands for its last side. y=2x is f(x)=2x; f(n)=n is not f(x)=x. Of 1/3 \approx 0.33 the first counts.
- An inequality in one letter is a set of numbers: x>2 is (2,\infty) and \{t | t>2\}, but not t>2.
- Words are compared as words, case ignored. A is (A), "A: text" and "(A) 5", which also is 5. "Where x>0" is left out
  of answers, "for all x" of both sides. No solution is \emptyset.
- A placeholder (proof, unknown, see solution..) or a sentence of more than five words is no gold answer.
- An answer over 1000 characters or 30 brackets deep, or with a number above about 10^{10^6}, is wrong unevaluated.

Known limits:
- 5 cm is paid for 5 m, and 5 cm^2 for 5 cm^3. 100,200 without a space is a number, though it may be meant as a list.
- Formulas are compared for real variables of either sign: \sqrt{xy} isn't \sqrt x\sqrt y. sympy's silence counts as
  wrong: an equal differential equation may go unrecognised. An ellipsis is compared as text.
- Not read: a column as a tuple, A_5^2 and {}_5P_2 for permutations, ^1/_2, 5m² without a space, 1,5 for 1.5.
"""

import ast
import functools
import re

from answers.latex import MAX_ANSWER_CHARS, MAX_DEPTH, cut, has_box, is_words, last_boxed, same_text, tidy, too_long
from answers.values import attempt, equal, equal_values, exact, parse, proportional, ready


class GoldError(ValueError):
    """A data set's answer that cannot be read; the message says why."""


# ---- Gold answers ----------------------------------------------------------------------------------------------------

_NOT_FINITE = {"nan", "inf", "-inf"}  # an empty cell, as pandas writes it
_PLACEHOLDERS = set("""proof|prove|proved|notfound|not found|answer not found|unknown|none|null|nil|nan|na|n/a|tbd|?|-|
see solution|see the solution|see proof|see above|see below|see explanation|omitted|no answer|no answer provided|
not provided|not available|not applicable|answer|solution""".replace("\n", "").split("|"))  # fmt: skip


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
    text = last_boxed(text) or "" if has_box(text) else text
    if too_long(text):
        raise GoldError(f"over {MAX_ANSWER_CHARS} characters or {MAX_DEPTH} brackets deep: {text[:80]}")
    if re.sub(r"\\text|[{}$\\.*()\[\]]", "", text).strip().casefold() in _PLACEHOLDERS:
        raise GoldError(f"a placeholder, not an answer: {text[:80]!r}")
    return tidy(text)


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
    unread = [part for part in _leaves(text) if not _readable(part)]
    if unread:
        raise GoldError(f"not an expression, a list or a word: {unread[0][:80]!r}")
    return text


def _readable(text: str) -> bool:
    if is_words(text):  # more of them are a sentence, which nobody writes twice
        return len(re.findall(r"[^\W_]+", text.replace(r"\text", " "))) <= (3 if re.search(r"\d", text) else 5)
    if re.search(r"\\text\{[^{}]{4,}\}", text):
        return False
    return r"\ldots" in text or _as_set(text) is not None or parse(text) is not None


# ---- Structure: lists, sets, matrices, relations ---------------------------------------------------------------------

_RELATION = r"=|[<>]|\\(?:ne|le|ge|approx|equiv|in|notin)(?![A-Za-z]) ?"
_JOINED = r"\\l(?:or|and)(?![A-Za-z]) ?"
_LIST = rf"[,;]|{_JOINED}"


@functools.lru_cache(10_000)
def _structure(text: str) -> tuple[str, list[str]]:
    r"""The kind of a tidy answer, and its parts.

    "," and "{}" lists without order; "()", "[)".. with one; "matrix" (its rows); "=" and "<" sides and signs;
    ":" a ratio; "mod" value and modulus; "set" of numbers, with \cup and the like; "words"; "" a single expression.

    >>> _structure("(1,2]"), _structure("1,(2,3)"), _structure(r"1\pm 2"), _structure("5")
    (('(]', ['1', '2']), (',', ['1', '(2,3)']), (',', ['1+ 2', '1- 2']), ('', ['5']))
    """
    if rows := re.fullmatch(r"\\begin\{(matrix|cases)\}((?:(?!\\end).)*)\\end\{\1\}", text):
        rows, columns = [_cells(row) for row in cut(rows[2], r"\\\\")[0] if row], rows[1]
        if columns == "matrix" and not all(len(row) == 1 and "=" in row[0] for row in rows):
            return "matrix", ["&".join(row) for row in rows]
        items = [
            "".join(row) if row[-1][:1] == "=" else f"({';'.join(row)})" if len(row) > 1 else row[0] for row in rows
        ]
        text = re.sub(r"\\text\{(?:if|for|when|where)?\}", "", ",".join(items))
    parts, signs = cut(text, rf"{_JOINED}|;")
    if ";" in signs:
        parts = [f"({part})" if len(cut(part, ",")[0]) > 1 else part for part in parts]
    else:
        parts = cut(text, _LIST)[0]
    parts = [part for part in parts if part]
    kind = "," if len(parts) > 1 else ""
    if not kind and (whole := re.fullmatch(r"(\\\{|[(\[])(.+)(\\\}|[)\]])", text)):
        inside, signs = cut(whole[2], _LIST)
        if len(cut(whole[2], r"\|")[0]) == 2 or (whole[1] == r"\{" and len(cut(whole[2], ":")[0]) == 2):
            return "set", [text]
        if whole[1] == r"\{" or (signs and len(inside) > 1):
            kind, parts = whole[1][-1] + whole[3][-1], inside
    signed = []
    for part in parts:
        both = [re.sub(r"\\pm(?![a-z])", one, re.sub(r"\\mp(?![a-z])", two, part)) for one, two in ("+-", "-+")]
        signed += dict.fromkeys(both)
    if kind or len(signed) > len(parts):
        return kind or ",", signed
    if is_words(text):
        return "words", [text]
    if modulus := re.fullmatch(r"(.*)\\pmod\{(\w+)\}", text):
        return "mod", [modulus[1].rpartition(r"\equiv")[2].strip(), modulus[2]]
    sides, signs = cut(text, _RELATION)
    if signs:
        kinds = {r"\approx": "~", r"\in": "in", r"\notin": "in", r"\equiv": "in", "=": "="}
        return next((kinds[sign] for sign in kinds if sign in signs), "<"), sides
    if len(cut(text, r"\\cup|\\cap|\\setminus")[0]) > 1 or text in (r"\mathbb{R}", r"\emptyset"):
        return "set", [text]
    ratio = cut(text, ":")[0]
    return (":", ratio) if len(ratio) > 1 else ("", [text])


def _cells(row: str) -> list[str]:
    return [cell.strip(" ,") for cell in cut(row, "&")[0]]


def _leaves(text: str) -> list[str]:
    """The single expressions and words in an answer."""
    if condition := _FOR_ALL.fullmatch(text):
        text = condition[1]
    kind, parts = _structure(text)
    if kind == "matrix":
        parts = [cell for row in parts for cell in _cells(row)]
    if kind in ("", "set", "words"):
        return [text.removesuffix("%")]
    return [leaf for part in parts for leaf in _leaves(part)]


_FOR_ALL = re.compile(r"(.+?)[ ,(]*(?:\\text\{)?((?<![a-z])for (?:all|any|every)(?![a-z]).*)")
_CONDITION = re.compile(
    r"(.+?)[ ,(]*(?:\\text\{)?((?<![a-z])(?:where|since|because|for (?:all|any|every))(?![a-z]).*|,[A-Za-z]\\in .*)"
)
_CHOICE = re.compile(
    r"(?:\((?:\\text\{)?([A-J])\}?\)|(?:\\text\{)?([A-J])\}?[:.)]) *((?:\d|\\(?:text|frac|sqrt|pi)|\$).*)"
)
_CLOCK = re.compile(r"(\d\d?:\d\d)(?:\\text\{([ap]m)\})?")


def same(gold: str, answer: str) -> bool:
    """Does a tidy answer equal a tidy gold? See the rules at the top of the file."""
    if same_text(gold, answer):
        return True
    gold_condition, condition = _FOR_ALL.fullmatch(gold), _CONDITION.fullmatch(answer)
    if gold_condition or condition:
        if gold_condition and condition and not same_text(gold_condition[2], condition[2]):
            return False
        return same(gold_condition[1] if gold_condition else gold, condition[1] if condition else answer)
    for text, other in ((gold, answer), (answer, gold)):
        if choice := _CHOICE.fullmatch(text):
            letter, other_choice = choice[1] or choice[2], _CHOICE.fullmatch(other)
            if other_choice:
                return letter == (other_choice[1] or other_choice[2]) and same(choice[3], other_choice[3])
            return other == letter or same(*((choice[3], other) if text is gold else (other, choice[3])))
    clocks = [_CLOCK.fullmatch(text) for text in (gold, answer)]
    if all(clocks):
        return clocks[0][1] == clocks[1][1] and None in (clocks[0][2], clocks[1][2])
    (kind, golds), (answer_kind, answers) = _structure(gold), _structure(answer)
    kinds = {kind, answer_kind}
    if kinds <= {",", "{}"} and _same_lists(golds, answers):
        return True
    if kinds == {"<"}:
        golds, answers = _links(gold), _links(answer)
        if len(golds) == len(answers) and all(map(proportional, golds, answers)):
            return True
    if _same_sets(gold, answer):
        return True
    if kinds <= {",", "{}"} or kinds == {"<"}:
        return False
    if "words" in kinds or "in" in kinds or r"\ldots" in gold + answer:
        return False  # what an ellipsis stands for is not for a program to say
    if kinds == {"matrix"}:
        rows = [list(map(_cells, parts)) for parts in (golds, answers)]
        cells = [[cell for row in matrix for cell in row] for matrix in rows]
        return [len(row) for row in rows[0]] == [len(row) for row in rows[1]] and all(map(same, *cells))
    if "=" in kinds or "~" in kinds:
        return _same_relations(gold, answer)
    if kinds in ({":"}, {"mod"}):
        if len(golds) != len(answers):
            return False
        if any(map(_CLOCK.fullmatch, (gold, answer))) or kind == "mod":
            return all(map(same, golds, answers))
        return all(equal(f"({g})({answers[0]})", f"({a})({golds[0]})") for g, a in zip(golds, answers, strict=True))
    if kind not in ("", "matrix") or answer_kind not in ("", "matrix"):
        return _same_tuples(gold, answer)
    if gold.endswith("%") != answer.endswith("%"):
        bare_gold, bare = gold.removesuffix("%"), answer.removesuffix("%")
        hundredths = [rf"\frac{{{text}}}{{100}}" if text.endswith("%") else text for text in (gold, answer)]
        return same(bare_gold, bare) or same(*(text.replace("%", "") for text in hundredths))
    if not _letters(gold):
        answer = re.sub(r"(?<=[\d}]) [mgJNLsVWhKCA](?:\^\{\d\})?$", "", answer)
    return equal(gold.removesuffix("%"), answer.removesuffix("%"))


def is_right(answer: str, gold) -> bool:
    """Does the content of a box equal a data set's gold cell? A cell that cannot be read pays nobody."""
    try:
        gold = _gold_text(gold)
    except GoldError:
        return False
    answer = "" if too_long(answer) else tidy(answer)
    return answer != "" and gold != "" and not too_long(gold) and not too_long(answer) and same(gold, answer)


def _same_lists(golds: list[str], answers: list[str]) -> bool:
    """As many, and each the same as one of the others: x_1=2, x_2=3 is 3, 2. But x=2, y=3 isn't 3, 2."""
    if len(golds) != len(answers):
        return False
    systems = [_system(parts) for parts in (golds, answers)]
    if any(systems) and not all(systems):
        return not any("=" in part for part in (answers if systems[0] else golds)) and all(map(same, golds, answers))
    left = list(answers)
    for gold in golds:
        match = next((answer for answer in left if same(gold, answer)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _system(parts: list[str]) -> list[str]:
    """The values of x=2, y=3 (different letters, one value each) in the order of the letters; else an empty list."""
    sides = [_structure(part)[1] if _structure(part)[0] == "=" else [""] for part in parts]
    names = [re.sub(r"_\{.*?\}", "", side[0]) for side in sides]
    distinct = len(set(names)) == len(names) and all(len(side) == 2 for side in sides)
    return [side[1] for _, side in sorted(zip(names, sides, strict=True))] if distinct else []


def _same_tuples(gold: str, answer: str) -> bool:
    """At least one is in brackets: the elements in order; for two, which may be an interval, also the brackets."""
    texts = [re.sub(r"^[A-Z](?=\(.*,.*\)$)", "", text) for text in (gold, answer)]
    (kind, golds), (answer_kind, answers) = map(_structure, texts)
    kinds = {kind, answer_kind}
    if kinds == {"{}", ""}:
        return len(golds) == len(answers) == 1 and same(golds[0], answers[0])
    if kinds == {",", ""}:  # AC is A,C if these are choices
        letters = ["".join(sorted("".join(parts))) for parts in (golds, answers)]
        return letters[0] == letters[1] and re.fullmatch("[A-J]+", letters[0]) is not None
    if not kinds <= {",", "()", "(]", "[)", "[]"}:
        return False
    if kinds == {",", "()"}:
        golds, answers = (_system(parts) or parts for parts in (golds, answers))
        if any(_structure(part)[0] == "=" for part in golds + answers):
            return False
    elif len(kinds) > 1 and (len(golds) == 2 or "," in kinds):
        return False
    return len(golds) == len(answers) and all(map(same, golds, answers))


# ---- Relations and sets of numbers -----------------------------------------------------------------------------------


def _is_label(side: str, *, asked: bool) -> bool:
    r"""Does side = 12 say what 12 is, as x, f(2), |AB| and \angle ABC do, rather than being an equation to solve?

    asked: the side is an answer's, which may be a formula in several letters, such as a^2+b^2.
    """
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc|ln|log|exp|ldots)(?![a-z])", side):
        return False
    side = re.sub(r"\\text\{[^{}]*\}", "AB", side)
    ignored = r"\^\{(?:\\prime ?|-1)\}|(?<=[A-Za-z}])[(\[][^()\[\]]*[)\]]|\\\||\\lcm|\\gcd|\\cdot"
    side = re.sub(ignored, "", side).replace(r"\frac", "/").replace(r"\sqrt", "+")
    side = re.sub(r"\\[A-Za-z]+ ?", "q", side)  # Greek letters, \angle, \max: names
    several = len(set(re.findall(r"[A-Za-z](?:_\{[^{}]*\})?", side))) > 1
    side = re.sub(r"_\{[^{}]*\}", "", side)
    if re.fullmatch(r"[A-Za-z{} ,()\[\]:]*", side):
        return True
    if asked:
        return several and not re.search(r"\d", re.sub(r"\^\{\d+\}", "", side))
    return several and re.fullmatch(r"[A-Za-z{} ,()\[\]:|/]*", side) is not None


def _value(text: str, *, asked: bool) -> tuple[str, str] | None:
    r"""What the answer x = .. = 12 says: a name and a value. Of 1/3 \approx 0.33 it is the exact side."""
    kind, sides = _structure(text)
    if kind not in "=~" or not kind:
        return "", text
    if kind == "~":
        first, _, rounded = (part.strip() for part in text.partition(r"\approx"))
        return ("", rounded) if _is_label(first, asked=asked) else _value(first, asked=asked)
    if _is_label(sides[0], asked=asked) or not re.search(r"(?<![\\a-z])[A-Za-z]", "".join(sides)):
        return sides[0], sides[-1]
    return None


def _same_relations(gold: str, answer: str) -> bool:
    """At least one is an equation."""
    (kind, golds), (answer_kind, answers) = _structure(gold), _structure(answer)
    if kind == answer_kind == "=" and proportional(f"{golds[0]}={golds[-1]}", f"{answers[0]}={answers[-1]}"):
        return True
    gold_value, value = _value(gold, asked=kind != "="), _value(answer, asked=kind != "=")
    if gold_value is None or value is None or (gold_value[1], value[1]) == (gold, answer):
        return False
    names = {name.replace(" ", "") for name in (gold_value[0], value[0])}
    unnamed = any(r"\text" in name or not re.search("[A-Za-z]", name) for name in names)
    return (len(names) == 1 or unnamed or names == {"y", "f(x)"}) and same(gold_value[1], value[1])


def _links(text: str) -> list[str]:
    r"""a<b\le c as a<b, b\le c, in this direction."""
    sides, signs = cut(text, _RELATION)
    links = [f"{left}{sign} {right}" for left, sign, right in zip(sides, signs, sides[1:], strict=False)]
    return links[::-1] if signs and signs[0] in (">", r"\ge") else links


@attempt(False)
def _same_sets(gold: str, answer: str) -> bool:
    r"""Intervals, \cup, \mathbb{R}, \{x | x>2\} and inequalities in one letter are sets of numbers."""
    sets = [_as_set(text) for text in (gold, answer)]
    if None in sets or any(len(_letters(text)) > 1 for text in (gold, answer)):
        return False
    kinds = {_structure(text)[0] for text in (gold, answer)}
    if not kinds & {"set", "<", ","} or (kinds <= {"<", ","} and _letters(gold) != _letters(answer)):
        return False
    pieces = [list(part.args) if part.is_Union else [part] for part in sets]
    if sets[0] == sets[1]:
        return True
    if max(map(len, pieces)) > 1:
        pieces = [sorted(piece, key=lambda part: float(part.inf)) for piece in pieces]
    return len(pieces[0]) == len(pieces[1]) and all(map(_same_piece, *pieces))


def _letters(text: str) -> set[str]:
    return set(re.findall("[A-Za-z]", re.sub(r"\\mathbb\{R\}|\\[A-Za-z]+|\([a-z]\)", "", text)))


def _same_piece(gold, answer) -> bool:
    from sympy import FiniteSet, Interval

    if isinstance(gold, Interval) and isinstance(answer, Interval):
        ends = (gold.start, answer.start), (gold.end, answer.end)
        closed = [(part.left_open, part.right_open) for part in (gold, answer)]
        return closed[0] == closed[1] and all(g == a or equal_values(g, a) for g, a in ends)
    both = isinstance(gold, FiniteSet) and isinstance(answer, FiniteSet) and len(gold) == len(answer)
    return both and all(map(equal_values, gold.args, answer.args))


@functools.lru_cache(10_000)
@attempt(None)
def _as_set(text: str):
    """A sympy Set; None if the text is none, or in more than one letter."""
    from sympy import And, FiniteSet, Intersection, Interval, S, Union

    kind, parts = _structure(text)
    if text in (r"\mathbb{R}", "R"):
        return S.Reals
    if text.strip() == r"\emptyset":
        return S.EmptySet
    if kind == "{}":
        return FiniteSet(*(exact(parse(part).doit()) for part in parts))
    if kind == "set" and (built := re.fullmatch(r"\\\{(.+?)[|:](.+)\\\}", text)):
        return _as_set(built[2].strip())
    if kind == "set":
        parts, signs = cut(text, r"\\cup|\\cap|\\setminus")
        sets = [_as_set(part) for part in parts]
        if None in sets:
            return None
        whole = sets[0]
        for sign, part in zip(signs, sets[1:], strict=True):
            whole = {r"\cup": Union, r"\cap": Intersection}.get(sign, lambda a, b: a - b)(whole, part)
        return whole
    if kind in ("()", "(]", "[)", "[]") and len(parts) == 2:
        start, end = (exact(parse(part).doit()) for part in parts)
        closed_at_infinity = (kind[0] == "[" and start.is_infinite) or (kind[1] == "]" and end.is_infinite)
        no_interval = (start.is_number and end.is_number and not start < end) or not (start - end).is_extended_real
        return None if closed_at_infinity or no_interval else Interval(start, end, kind[0] == "(", kind[1] == ")")
    if kind == ",":
        sets = [_as_set(part) if _structure(part)[0] == "<" else None for part in parts]
        if None in sets:
            return None
        both = Intersection(*sets)
        return Union(*sets) if r"\lor" in text or both.is_empty else both  # x<1, x>2 can only mean "or"
    if kind != "<" or len(_letters(text)) != 1:
        return None
    return And(*(exact(ready(parse(link))) for link in _links(text))).as_set()

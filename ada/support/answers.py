r"""Is this answer that answer? Reads gold answers and boxes, and compares LaTeX by structure and value.

Nothing here is bounded in time or memory: reward.py runs it in processes that can be killed.

    text -> tidy: one spelling -> _structure: a list, a set, a matrix, a relation.. -> same: part by part -> _equal: values

math-verify's parser turns single expressions into sympy; its comparison is not used. It rounds (1/2^99 is 1/2^98 to it),
takes sets for tuples and 0.28 for 28%, and solves what it can't compare, which can take minutes.
"""

import ast
import functools
import itertools
import math
import random
import re
import unicodedata

MAX_ANSWER_CHARS = 1000  # the longest of 1017 benchmark golds has 232
MAX_DEPTH = 30  # brackets in brackets, at most 5 in the benchmarks; the parser's time can be exponential in it
MAX_EXPONENT = 10**6  # beyond it no power, factorial or sum is evaluated


class GoldError(ValueError):
    """A data set's answer that cannot be read; the message says why."""


# ---- Boxes -----------------------------------------------------------------------------------------------------------

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # \{ and \} are not braces
_JOINED = re.compile(r"(?:[\s,;$&~]|\{,\}|\\[,;:!()\[\]\\ ]|\\q?quad\b|\\text\{[\s,]*(?:and|or)[\s,]*\}|and\b|or\b)*+")


def _boxes_from_the_end(text: str):
    """Start, end and content of each closed box, the last one first."""
    start = end = len(text)
    while (start := text.rfind("box", 0, start)) >= 0:
        opening = _BOX.match(text, max(start - 1, 0)) or _BOX.match(text, max(start - 2, 0))
        depth = 1
        for brace in _BRACE.finditer(text, opening.end(), end) if opening else ():
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                yield opening.start(), brace.end(), text[opening.end() : brace.start()].strip()
                break
        else:  # what doesn't close before an unclosed box doesn't close after it: the search stays linear
            end = start if opening else end


def last_boxed(text: str) -> str | None:
    r"""The content of the last closed, non-empty \boxed{} (or \fbox{}), None if there is none.

    Boxes with nothing between them but commas, "and", "or" and spacing are one list.

    >>> last_boxed(r"within \boxed{}. First \boxed{2}, no: \boxed{\frac{1}{2}}, or \boxed{3")
    '\\frac{1}{2}'
    >>> last_boxed(r"The roots are $\boxed{1}$ and $\boxed{2}$.")
    '1, 2'
    """
    contents, follows = [], None
    for start, end, content in _boxes_from_the_end(text):
        if contents and not _JOINED.fullmatch(text, end, follows):
            break
        if content:
            contents.append(content)
            follows = start
    return ", ".join(reversed(contents)) or None


# ---- One spelling: LaTeX as people write it, into LaTeX that is written in one way -----------------------------------

_CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "π": r"\pi ", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
     "∙": r"\cdot ", "°": r"^\circ ", "℃": r"^\circ ", "∞": r"\infty ", "√": r"\sqrt ", "∪": r"\cup ", "∩": r"\cap ",
     "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ",
     "∅": r"\emptyset ", "∈": r"\in ", "∉": r"\notin ", "ℝ": r"\mathbb{R}", "÷": "/", "∕": "/", "⁄": "/", "∗": "*",
     "⟨": "(", "⟩": ")", "′": "'", "’": "'", "、": ",", "。": ".", "€": "", "£": "", "¥": "", "￥": "", "μ": r"\mu ",
     "µ": r"\mu ", "Ω": r"\Omega ", "Ω": r"\Omega ", "θ": r"\theta ", "φ": r"\phi ", "α": r"\alpha ", "β": r"\beta ",
     "γ": r"\gamma ", "δ": r"\delta ", "λ": r"\lambda ", "ω": r"\omega ", "σ": r"\sigma ", "ρ": r"\rho "}
)  # fmt: skip
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_PLAIN = re.compile(r"(?<![A-Za-z\\])(pi|sqrt|(?:arc)?(?:sin|cos|tan)|cot|ln|log|exp|infty|cup)(?![A-Za-z])")
_NUMPY = re.compile(r"\b(?:np|numpy|math)\.(?=[a-z])")
_LATEX_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\s+|[^\\\s]", re.DOTALL)


def _spellings(*lines: str) -> dict[str, str]:
    """name -> what is written for it, from lines like "geq geqslant: \\ge "."""
    return {name: line.partition(": ")[2] for line in lines for name in line.partition(": ")[0].split()}


_COMMANDS = {" ": " ", ":": " ", "\n": " "} | _spellings(
    ", ; > quad qquad nonumber hfill: " + " ",
    "! $ ( ) [ ] left right middle big bigl bigr Big Bigl Bigr bigg biggl biggr Bigg displaystyle textstyle limits: ",
    "large Large LARGE huge small bf rm it sf tt em boldmath nolimits euro pounds: ",
    "lbrace: \\{", "rbrace: \\}", "lvert rvert vert mid: |", "lVert rVert Vert: \\|", "langle: (", "rangle: )",
    "lbrack: [", "rbrack: ]", "geq geqslant: \\ge ", "leq leqslant: \\le ", "neq: \\ne ", "lt: <", "gt: >", "div: /",
    "varnothing: \\emptyset ", "dots cdots dotsc dotsb: \\ldots ", "varphi: \\phi ", "backslash: \\setminus ",
    "vee: \\lor ", "wedge: \\land ", "colon: :", "rightarrow: \\to ", "ast: *", "lg: \\log_{10}", "degree: ^{\\circ}",
)  # fmt: skip
_IGNORED_WITH_ARGUMENT = set("hspace vspace phantom hphantom color label tag".split())
_SHOWN = _spellings(
    "boldsymbol bm pmb underline mathop mathsf mathtt mathbf mathit boxed fbox ensuremath vec: ",
)
_ACCENTS = set("overline bar dot ddot tilde widetilde widehat hat overrightarrow mathbb mathcal".split())
_TEXT = set("text textbf textit textrm textnormal textsf texttt emph mbox hbox mathrm operatorname".split())
_TEXT_RUN = re.compile(r"[^\W\d_](?:[^\W\d_]|[ .'-]+(?=[^\W\d_]))*\.?")
_FUNCTIONS = set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp max min gcd lim det".split())
_MATRICES = re.compile(r"[pbB]?(?:small)?matrix\*?|array")


class _Reader:
    """Reads LaTeX as TeX does: the argument of a command is the next group or, without braces, the next token."""

    def __init__(self, text: str):
        self.tokens = _LATEX_TOKEN.findall(text)
        self.tokens.reverse()

    def read(self, end: str | None = None) -> str:
        """All up to the token that ends it."""
        out: list[str] = []
        while self.tokens:
            token = self.tokens.pop()
            if token == end:
                break
            if token in (r"\over", r"\choose"):
                command = {r"\over": r"\frac", r"\choose": r"\binom"}[token]
                return f"{command}{{{''.join(out)}}}{{{self.read(end)}}}"
            out.append(f"({self.read(end)})" if token == "(" and end == ")" else self.spell(token))
        return re.sub(" +", " ", "".join(out)).strip()

    def peek(self) -> str:
        while self.tokens and self.tokens[-1].isspace():
            self.tokens.pop()
        return self.tokens[-1] if self.tokens else ""

    def argument(self) -> str:
        if self.peek() in ("", "}"):
            return ""
        token = self.tokens.pop()
        return self.read("}") if token == "{" else self.spell(token).strip()

    def spell(self, token: str) -> str:
        if token == "{":  # TeX shows {2}3 as 23, but {a+b}c is meant as a product
            inner = self.read("}")
            return f"{{{inner}}}" if re.search(r"[-+]", inner) and not re.search(r"^{|,", inner) else inner
        if token in "^_":
            argument = self.argument()
            name = re.fullmatch(r"\\(?:text\{(\w+)\}|([a-z]+) ?)", argument) if token == "_" else None
            return f"{token}{{{name[1] or name[2] if name else argument}}}"
        if token[0] != "\\":
            return {"'": r"^{\prime}", "$": "", "~": " "}.get(token, " " if token.isspace() else token)
        name = token[1:]
        if name in _COMMANDS:
            if (name in ("left", "right") and self.peek() == ".") or (name == "!" and self.tokens[-1:] == [" "]):
                self.tokens.pop()
            return _COMMANDS[name]
        if name in _IGNORED_WITH_ARGUMENT:
            self.argument()
            return ""
        if name in ("textcolor", "colorbox"):
            self.argument()
        if name in _SHOWN or name in ("textcolor", "colorbox") or (name == "hat" and self.peek() in "{ijk"):
            return self.argument()
        if name in _ACCENTS:
            return f"{token}{{{self.argument()}}}"
        if name in _TEXT:
            return _as_text(self.argument())
        if name in ("frac", "dfrac", "tfrac", "cfrac", "nicefrac", "sfrac", "binom", "dbinom", "tbinom"):
            pair = f"{{{self.argument()}}}{{{self.argument()}}}"
            product = r"\cdot " if self.peek()[:1].isdigit() or self.peek().endswith("frac") else ""
            return (r"\binom" if "binom" in name else r"\frac") + pair + product  # the parser adds: 4/2 3 would be 5
        if name == "sqrt":
            if self.peek() in ("[", "("):
                bracket = self.tokens.pop()
                inside = self.read("]" if bracket == "[" else ")")
                return rf"\sqrt{{{inside}}}" if bracket == "(" else rf"\sqrt[{inside}]{{{self.argument()}}}"
            return rf"\sqrt{{{self.argument()}}}"
        if name in ("pmod", "mod", "bmod"):
            return rf"\pmod{{{self.argument()}}}"
        if name == "not":
            return {"=": r"\ne ", r"\in": r"\notin "}.get(self.tokens.pop() if self.tokens else "", r"\not ")
        if name in ("begin", "end"):
            kind = self.argument()
            if name == "begin" and kind == "array":
                self.argument()
            kind = "matrix" if _MATRICES.fullmatch(kind) else kind if kind == "vmatrix" else "cases"
            return rf"\{name}{{{kind}}}"
        if token == r"\\" and self.peek() == "[":  # the space between two rows, as in \\[4pt]
            self.tokens.pop()
            self.read("]")
        return token + " " * name.isalpha()


def _as_text(content: str) -> str:
    r"""The content of a \text{}: words become \text{} one by one, what stands between them is mathematics."""
    if content in ("e", "i", "d"):
        return content
    if content in _FUNCTIONS:
        return _COMMANDS.get(content, f"\\{content} ")
    if "\\" in content:
        return content
    return _TEXT_RUN.sub(_words, content)


def _words(match: re.Match) -> str:
    parts = re.split(r"\s*\b(and|or)\b\s*|([或和])", match[0])
    marks = {"and": " and ", "or": " or ", "或": " or ", "和": " and "}
    return "".join(marks.get(part, rf"\text{{{part}}}") for part in parts if part)



_POWER = r"(?:\^\{-?\d+\})?"
_UNIT = (
    r"(?!\\text\{[^{}]*(?<![a-z])(?:or|not|more|less|least|most|if|for|where|since|with|when|thousand|.illion|[ap]\.?m\.?)"
    r"(?![a-z]))(?:\(?\\text\{[^{}]*\}\)?|\\mu ?|\\Omega ?|\\frac\{\\text\{[^{}]*\}\}\{\\text\{[^{}]*\}" + _POWER + r"\})"
)
_SHORT_UNIT = r"[kcmn]?m/s|km/h|[cmkn]m|mph|kg|mg|m[lL]|[kM]?Hz|[kM]?eV|kJ|mol|ft|in|sec|min|hr|sq|rd|st|nd|th|pct"
_MEANINGS = {
    r"\emptyset ": "no solution|no solutions|none|no real solutions|empty set|the empty set",
    r"\mathbb{R}": "all real numbers|all reals|real numbers",
    r"\infty ": "infinity",
}
_MEANING = {words.replace(" ", ""): latex for latex, names in _MEANINGS.items() for words in names.split("|")}
_MAGNITUDES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}


def _bare_words(match: re.Match) -> str:
    """Runs of letters with a word of four or more are text, as are units after a number; abc is a product."""
    words = match[0].strip()
    if match[1] or not any(len(word) >= 4 for word in words.split()):
        return match[0]
    return " " + _words(re.match(".*", words)) + " "


def _repeating(match: re.Match) -> str:
    whole, fixed, repeating = match[1] or "0", match[2], match[3] or match[4]
    value = int(whole + fixed + repeating) - int(whole + fixed)
    return rf"\frac{{{value}}}{{{(10 ** len(repeating) - 1) * 10 ** len(fixed)}}}"


def _mixed_number(match: re.Match) -> str:
    whole, over, under = match[1], match[2] or match[4], match[3] or match[5]
    return rf"({whole}+\frac{{{over}}}{{{under}}})" if int(over) < int(under) else match[0]


def _compound(match: re.Match) -> str:
    """7\text{hours} 30\text{minutes} as (7h,30m): the numbers in their order, with the letter of their unit."""
    pairs = re.findall(r"([\d.]+) *\\text\{([A-Za-z])", match[0])
    return "(" + ",".join(rf"{number}\mathcal{{{unit.lower()}}}" for number, unit in pairs) + ")"


_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        # Numbers: 1,000,000 = 1{,}000{,}000 = 1\,000\,000, but (1,000) and 10, 100,200 are lists
        (r"(?<![\d.,(\[{])(?<![,;] )\d{1,3}(?:[, ]\d{3}|_\{\d\}\d\d)+(?![\d,]|\.\d*(?:\\overline|\\bar|\\dot|\())",
         lambda match: re.sub(r"\D", "", match[0])),
        # Words
        (rf"(?<=\d) ?({_SHORT_UNIT})(?![A-Za-z(])", r"\\text{\1}"),
        (r"(\\[a-z]+\{[A-Za-z. '-]*\}|\\[A-Za-z]+|_\{\w+\})|(?<![A-Za-z])(?:a )?[A-Za-z]{2,}(?:[ '-]+[A-Za-z]{2,})*\.?",
         _bare_words),
        (r" *,? *(?<![A-Za-z])and(?![A-Za-z]) *,? *", r"\\land "),
        (r" *,? *(?<![A-Za-z])or(?![A-Za-z]) *,? *", r"\\lor "),
        (r"(?:[\d.]+ *\\text\{[A-Za-z. ]*\}(?:\\land |,| )*){2,}$", _compound),
        (r"(?<=\d)[^\x00-\x7f]+$|(?:\s|\\\\|(?<!\\)[.,;:])+$", ""),
        (r"(?<=\d)\^?\{?(?:\\text\{)?(?:st|nd|rd|th)\}+$", ""),
        (r" *(?:\\?%|\\text\{(?:percent|percentage|pct)\})", "%"),
        (r"^\\text\{[^{}]*(?<![a-z'])(?:is|are|equals)\} *:?(?=.*\d)|^\\text\{[^{}]{2,}\} *:(?=[^:]*\d)", ""),
        (r"(?<=:\d\d) *\\text\{([ap])\.? ?m\.?\}", lambda match: rf"\text{{{match[1].lower()}m}}"),
        (r"^\\text\{(?:Rs|USD|INR)\.?\} *(?=\d)", ""),
        (r"(?<=\d) *\\text\{(thousand|.illion)\}", lambda match: rf"\times 10^{{{_MAGNITUDES.get(match[1], match[1])}}}"),
        (rf"((?:[\d)}}|]|\\pi )%?)(?: *(?:/|\\cdot |\*)? *{_UNIT}{_POWER})+$", r"\1"),
        (r"\^\{\\circ ?\}(?: *\\text\{[CF]\}| *[CF](?![A-Za-z]))?", r"^{\\circ}"),
        # Numbers again: 0.\overline{3}, 4.5e33, 27.0, 1./3, .5, 2\frac{1}{3}
        (r"\\dot\{(\d)\}(\d*)\\dot\{(\d)\}", r"\\dot{\1\2\3}"),
        (r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\{(\d+)\}|\((\d+)\))", _repeating),
        (r"(?<![A-Za-z\d.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?![A-Za-z\d.])",
         lambda match: rf"{match[1]}\times 10^{{{int(match[2])}}}"),
        (r"(?<![\d.])(\d+)\.0*(?!\d)", r"\1"),
        (r"(?<!\d)\.(?=\d)", "0."),
        (r"(?<![\d.^}])(\d+) *(?:\\frac\{(\d+)\}\{(\d+)\}|(?<= )(\d+)/(\d+))", _mixed_number),
        # Notations with one meaning
        (r"_\{(\w+)\}C_\{(\w+)\}|(?<![A-Za-z])C\((\d+), *(\d+)\)",
         lambda match: rf"\binom{{{match[1] or match[3]}}}{{{match[2] or match[4]}}}"),
        (r"\(? *\\(?:text\{mod\}|pmod\{\}) *(\d+) *\)?|\\pmod\{(\w+)\}", lambda match: rf"\pmod{{{match[1] or match[2]}}}"),
        (r"<=", r"\\le "), (r">=", r"\\ge "), (r"!=", r"\\ne "), (r"\\\{ *\\\}", r"\\emptyset "),
        (r"(\^\{[^{}]*\})(_\{[^{}]*\})", r"\2\1"),
        (r"^\\(?:approx|therefore|implies) ?|^[A-Za-z] *\\in(?![A-Za-z])", ""),
        (r"^\(?(?:\\text\{)?([A-Z])\}?[).]*$", r"\1"),
        (r"^\(([^(),;]*|\\begin.*\\end\{matrix\})\)$|^\[(\\begin.*\\end\{matrix\})\]$", r"\1\2"),
        (r"^\s+|\s+$|(?<![A-Za-z\d}]) +| +(?![A-Za-z\d\\(])", ""),
    ]
]  # fmt: skip


@functools.lru_cache(10_000)
def tidy(text: str) -> str:
    r"""LaTeX as people write it, in one spelling; tidying twice changes nothing more.

    >>> tidy(r"$\dfrac12\,\mathrm{cm}^2$."), tidy("1,000,000"), tidy("1.6e-19")
    ('\\frac{1}{2}', '1000000', '1.6\\times 10^{-19}')
    """
    text = _RAISED.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}", text.translate(_CHARACTERS))
    text = unicodedata.normalize("NFKC", text).translate(_CHARACTERS)
    text = "".join(str(unicodedata.decimal(character, character)) for character in text)
    if r"\\" in text and not re.search(r"(?<!\\)\\[A-Za-z]", text):
        text = text.replace(r"\\", "\\")  # escaped twice on its way through JSON
    text = re.sub(r"^\s*\*\*(.*)\*\*\s*$", r"\1", text, flags=re.DOTALL).replace("**", "^")
    try:
        text = re.sub(r"(?<=\d)'(?=\d{3})", "", _PLAIN.sub(r"\\\1 ", _NUMPY.sub("", text)))
        text = _Reader(text).read()
    except RecursionError:
        return ""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    if r"\circ" in text:  # degrees are a number only as an angle of sin, cos..
        angle = re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])", text)
        text = text.replace(r"^{\circ}", r"\cdot \frac{\pi}{180}" if angle else "")
    return _MEANING.get(_squeezed(text, words=True), text)


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
    text = last_boxed(text) or "" if _BOX.search(text) else text
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


# ---- Structure: lists, sets, matrices, relations ---------------------------------------------------------------------

_BRACKET = r"(?P<open>\\begin\{\w+\}|\\\{|[(\[{])|(?P<close>\\end\{\w+\}|\\\}|[)\]}])"
_RELATION = r"=|[<>]|\\(?:ne|le|ge|approx|equiv|in|notin)(?![A-Za-z]) ?"
_LIST = r"[,;]|\\lor |\\land "


def too_long(text: str) -> bool:
    """Over the caps on length and nesting that are checked before anything is parsed."""
    deepest = depth = 0
    if len(text) <= MAX_ANSWER_CHARS:
        for character in text:
            depth += (character in "([{") - (character in ")]}")
            deepest = max(deepest, depth)
    return len(text) > MAX_ANSWER_CHARS or deepest > MAX_DEPTH


def _cut(text: str, separators: str) -> tuple[list[str], list[str]]:
    """The parts between the separators outside brackets, and the separators; one part if brackets don't balance."""
    parts, found, depth, start = [], [], 0, 0
    for token in re.finditer(rf"{_BRACKET}|{separators}", text):
        if token["open"] or token["close"]:
            depth += 1 if token["open"] else -1
        elif depth == 0:
            parts.append(text[start : token.start()].strip())
            found.append(token[0].strip())
            start = token.end()
        if depth < 0:
            return [text], []
    return ([text], []) if depth else ([*parts, text[start:].strip()], found)


def _is_words(text: str) -> bool:
    return r"\text{" in text and not re.search(r"[\\{}^_=<>+|!%-]", re.sub(r"\\text\{[^{}\\]*\}", "", text))


def _squeezed(text: str, *, words: bool) -> str:
    """For comparing text: without spaces; words also without case, brackets and, if there is no number, marks."""
    bare = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    return re.sub(r"[\s()']" if re.search(r"\d", text) else r"[\W_]", "", bare).casefold() if words else bare.replace(" ", "")


def _same_text(gold: str, answer: str) -> bool:
    words = _is_words(gold) or _is_words(answer) or (gold.isalpha() and answer.isalpha())
    return _squeezed(gold, words=words) == _squeezed(answer, words=words)


@functools.lru_cache(10_000)
def _structure(text: str) -> tuple[str, list[str]]:
    r"""The kind of a tidy answer, and its parts.

    "," and "{}" lists without order; "()", "[)".. with one; "matrix" (its rows); "=" and "<" sides and signs;
    ":" a ratio; "mod" value and modulus; "set" of numbers, with \cup and the like; "words"; "" a single expression.

    >>> _structure("(1,2]"), _structure("1,(2,3)"), _structure(r"1\pm 2"), _structure("5")
    (('(]', ['1', '2']), (',', ['1', '(2,3)']), (',', ['1+ 2', '1- 2']), ('', ['5']))
    """
    if rows := re.fullmatch(r"\\begin\{(matrix|cases)\}((?:(?!\\end).)*)\\end\{\1\}", text):
        rows, columns = [_cut(row, "&")[0] for row in _cut(rows[2], r"\\\\")[0] if row], rows[1]
        if columns == "matrix" and not all(len(row) == 1 and "=" in row[0] for row in rows):
            return "matrix", ["&".join(row) for row in rows]
        items = [re.sub(r"\\text\{(?:if|for|when|where)?\}", "", "".join(row) if row[-1][:1] == "=" else ";".join(row)) for row in rows]
        text = ",".join(f"({item})" if ";" in item else item for item in items)
    parts, signs = _cut(text, r"\\lor |\\land |;")
    if ";" in signs:
        parts = [f"({part})" if len(_cut(part, ",")[0]) > 1 else part for part in parts]
    else:
        parts = _cut(text, _LIST)[0]
    parts = [part for part in parts if part]
    kind = "," if len(parts) > 1 else ""
    if not kind and (whole := re.fullmatch(r"(\\\{|[(\[])(.+)(\\\}|[)\]])", text)):
        inside, signs = _cut(whole[2], _LIST)
        if len(_cut(whole[2], r"\|")[0]) == 2 or (whole[1] == r"\{" and len(_cut(whole[2], ":")[0]) == 2):
            return "set", [text]
        if whole[1] == r"\{" or (signs and len(inside) > 1):
            kind, parts = whole[1][-1] + whole[3][-1], inside
    if kind or r"\pm" in text:
        signed = []
        for part in parts:
            plus, minus = part.replace(r"\pm", "+").replace(r"\mp", "-"), part.replace(r"\pm", "-").replace(r"\mp", "+")
            signed += [part] if plus == part else [plus, minus]
        return kind or ",", signed
    if _is_words(text):
        return "words", [text]
    if modulus := re.fullmatch(r"(.*)\\pmod\{(\w+)\}", text):
        return "mod", [modulus[1].rpartition(r"\equiv")[2].strip(), modulus[2]]
    sides, signs = _cut(text, _RELATION)
    if signs:
        signs = set(signs)
        kind = "=" if signs == {"="} else "~" if r"\approx" in signs else "in" if signs & {r"\in", r"\notin", r"\equiv"} else "<"
        return kind, sides
    if len(_cut(text, r"\\cup|\\cap|\\setminus")[0]) > 1 or text in (r"\mathbb{R}", r"\emptyset"):
        return "set", [text]
    ratio = _cut(text, ":")[0]
    return (":", ratio) if len(ratio) > 1 else ("", [text])


def _leaves(text: str) -> list[str]:
    """The single expressions and words in an answer."""
    if condition := _FOR_ALL.fullmatch(text):
        text = condition[1]
    kind, parts = _structure(text)
    if kind == "matrix":
        parts = [cell for row in parts for cell in _cut(row, "&")[0]]
    return [text.removesuffix("%")] if kind in ("", "set", "words") else [leaf for part in parts for leaf in _leaves(part)]


_FOR_ALL = re.compile(r"(.+?)[ ,(]*(?:\\text\{)?((?<![a-z])for (?:all|any|every)(?![a-z]).*)")
_CONDITION = re.compile(r"(.+?)[ ,(]*(?:\\text\{)?((?<![a-z])(?:where|since|because|for (?:all|any|every))(?![a-z]).*|,[A-Za-z]\\in .*)")
_CHOICE = re.compile(r"(?:\((?:\\text\{)?([A-J])\}?\)|(?:\\text\{)?([A-J])\}?[:.)]) *((?:\d|\\(?:text|frac|sqrt|pi)|\$).*)")
_CLOCK = re.compile(r"(\d\d?:\d\d)(?:\\text\{([ap]m)\})?")


def same(gold: str, answer: str) -> bool:
    """Does a tidy answer equal a tidy gold? See the rules at the top of the file."""
    if _same_text(gold, answer):
        return True
    gold_condition, condition = _FOR_ALL.fullmatch(gold), _CONDITION.fullmatch(answer)
    if gold_condition or condition:
        if gold_condition and condition and not _same_text(gold_condition[2], condition[2]):
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
    if _same_sets(gold, answer):
        return True
    if kinds <= {",", "{}"}:
        return _same_lists(golds, answers)
    if "words" in kinds or "in" in kinds or r"\ldots" in gold + answer:
        return False  # what an ellipsis stands for is not for a program to say
    if kinds == {"matrix"}:
        rows = [[_cut(row, "&")[0] for row in parts] for parts in (golds, answers)]
        cells = [[cell for row in matrix for cell in row] for matrix in rows]
        return [len(row) for row in rows[0]] == [len(row) for row in rows[1]] and all(map(same, *cells))
    if "=" in kinds or "~" in kinds:
        return _same_relations(gold, answer)
    if kinds == {"<"}:
        return _same_chains(gold, answer)
    if kinds in ({":"}, {"mod"}):
        if len(golds) != len(answers):
            return False
        if any(map(_CLOCK.fullmatch, (gold, answer))) or kind == "mod":
            return all(map(same, golds, answers))
        return all(_equal(f"({g})({answers[0]})", f"({a})({golds[0]})") for g, a in zip(golds, answers, strict=True))
    if kind not in ("", "matrix") or answer_kind not in ("", "matrix"):
        return _same_tuples(gold, answer)
    if gold.endswith("%") != answer.endswith("%"):
        bare_gold, bare = gold.removesuffix("%"), answer.removesuffix("%")
        hundredths = [rf"\frac{{{text}}}{{100}}" if text.endswith("%") else text for text in (gold, answer)]
        return same(bare_gold, bare) or same(*(text.replace("%", "") for text in hundredths))
    if unit := re.fullmatch(r"(.*[\d}]) [mgJNLsVWhKCA](?:\^\{\d\})?", answer):
        if not re.search("[A-Za-z]", re.sub(r"\\[a-z]+", "", gold)):
            answer = unit[1]
    return _equal(gold.removesuffix("%"), answer.removesuffix("%"))


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
        names, other = (golds, answers) if systems[0] else (answers, golds)
        return not any("=" in part for part in other) and all(map(same, golds, answers))
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
    """At least one is in brackets: the elements in their order; for two, which may be an interval, also the brackets."""
    texts = [re.sub(r"^[A-Z](?=\(.*,.*\)$)", "", text) for text in (gold, answer)]
    (kind, golds), (answer_kind, answers) = map(_structure, texts)
    kinds = {kind, answer_kind}
    if "{}" in kinds and len(golds) == len(answers) == 1 and kinds == {"{}", ""}:
        return same(golds[0], answers[0])
    if "," in kinds and "" in kinds:
        letters = ["".join(sorted(part for part in parts for part in part)) for parts in (golds, answers)]
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
    side = re.sub(r"_\{[^{}]*\}|\^\{(?:\\prime ?|-1)\}|(?<=[A-Za-z}])[(\[][^()\[\]]*[)\]]|\\\||\\[lg]cm|\\gcd", "", side)
    letters = set(re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", lambda m: "" if m[0] in (r"\frac", r"\sqrt", r"\cdot") else "q", side)))
    if re.fullmatch(r"(?:\\[A-Za-z]+ ?|[A-Za-z{} ,()\[\]:])*", side) and r"\frac" not in side and r"\sqrt" not in side:
        return True
    if asked:
        return len(letters) > 1 and not re.search(r"\d", re.sub(r"\^\{\d+\}", "", side))
    return len(letters) > 1 and re.fullmatch(r"(?:\\(?!sqrt)[A-Za-z]+ ?|[A-Za-z{} ,()\[\]:|])*", side) is not None


def _value(text: str, *, asked: bool) -> tuple[str, str] | None:
    r"""What the answer x = .. = 12 says: a name and a value. Of 1/3 \approx 0.33 it is the exact side."""
    kind, sides = _structure(text)
    if kind not in "=~" or not kind:
        return "", text
    if kind == "~":
        exact, _, rounded = text.partition(r"\approx")
        return _value(exact.strip(), asked=asked) if not _is_label(exact.strip(), asked=asked) else ("", rounded.strip())
    if _is_label(sides[0], asked=asked) or not re.search(r"(?<![\\a-z])[A-Za-z]", "".join(sides)):
        return sides[0], sides[-1]
    return None


def _same_relations(gold: str, answer: str) -> bool:
    """At least one is an equation."""
    (kind, golds), (answer_kind, answers) = _structure(gold), _structure(answer)
    if kind == answer_kind == "=" and _proportional(f"{golds[0]}={golds[-1]}", f"{answers[0]}={answers[-1]}"):
        return True
    gold_value, value = _value(gold, asked=kind != "="), _value(answer, asked=kind != "=")
    if gold_value is None or value is None or (gold_value[1], value[1]) == (gold, answer):
        return False
    names = {name.replace(" ", "") for name in (gold_value[0], value[0])}
    unnamed = any(r"\text" in name or not re.search("[A-Za-z]", name) for name in names)
    return (len(names) == 1 or unnamed or names == {"y", "f(x)"}) and same(gold_value[1], value[1])


def _links(text: str) -> list[str]:
    r"""a<b\le c as a<b, b\le c, in this direction."""
    sides, signs = _cut(text, _RELATION)
    links = [f"{left}{sign} {right}" for left, sign, right in zip(sides, signs, sides[1:], strict=False)]
    return links[::-1] if signs and signs[0] in (">", r"\ge") else links


def _same_chains(gold: str, answer: str) -> bool:
    golds, answers = _links(gold), _links(answer)
    return len(golds) == len(answers) and all(map(_proportional, golds, answers))


def _false_if_it_fails(compare):
    """sympy raises nearly anything; what it can't compare isn't equal."""

    @functools.wraps(compare)
    def guarded(gold, answer) -> bool:
        try:
            return compare(gold, answer)
        except MemoryError:
            raise
        except Exception:
            return False

    return guarded


@_false_if_it_fails
def _proportional(gold: str, answer: str) -> bool:
    """Are two equations or inequalities the same up to a factor? sympy would solve them, which can take minutes."""
    from sympy import Eq, Ne, Rel

    gold, answer = _parse(gold), _parse(answer)
    if not isinstance(gold, Rel) or not isinstance(answer, Rel) or _huge(answer):
        return False
    left, right = (_ready(relation.lhs - relation.rhs) for relation in (gold, answer))
    ratios = [left.evalf(20, subs=point) / right.evalf(20, subs=point) for point in _points(left, right)]
    if not all(ratio.is_number and ratio.is_finite and ratio for ratio in ratios):
        return False
    if any(abs(ratio - ratios[0]) > 1e-9 * abs(ratios[0]) for ratio in ratios):
        return False
    if isinstance(gold, Eq | Ne):
        return type(gold) is type(answer)
    return ratios[0].is_real and type(gold) is type(answer if ratios[0] > 0 else answer.reversed)


def _same_sets(gold: str, answer: str) -> bool:
    r"""Intervals, \cup, \mathbb{R}, \{x | x>2\} and inequalities in one letter are sets of numbers."""
    sets = [_as_set(text) for text in (gold, answer)]
    if None in sets or any(len(_letters(text)) > 1 for text in (gold, answer)):
        return False
    kinds = [_structure(text)[0] for text in (gold, answer)]
    if not {*kinds} & {"set", "<"} and not any("," == kind for kind in kinds):
        return False
    if {*kinds} <= {"<", ","} and _letters(gold) != _letters(answer):
        return False
    pieces = [list(part.args) if part.is_Union else [part] for part in sets]
    if sets[0] == sets[1]:
        return True
    try:
        pieces = [sorted(piece, key=lambda part: float(part.inf)) for piece in pieces]
    except (TypeError, AttributeError, NotImplementedError):
        return False
    return len(pieces[0]) == len(pieces[1]) and all(map(_same_piece, *pieces))


def _letters(text: str) -> set[str]:
    return set(re.findall("[A-Za-z]", re.sub(r"\\mathbb\{R\}|\\[A-Za-z]+|\([a-z]\)", "", text)))


def _same_piece(gold, answer) -> bool:
    from sympy import FiniteSet, Interval

    if isinstance(gold, Interval) and isinstance(answer, Interval):
        ends = (gold.start, answer.start), (gold.end, answer.end)
        closed = [(part.left_open, part.right_open) for part in (gold, answer)]
        return closed[0] == closed[1] and all(g == a or _equal_values(g, a) for g, a in ends)
    both = isinstance(gold, FiniteSet) and isinstance(answer, FiniteSet) and len(gold) == len(answer)
    return both and all(map(_equal_values, gold.args, answer.args))


@functools.lru_cache(10_000)
def _as_set(text: str):
    """A sympy Set; None if the text is none, or in more than one letter."""
    from sympy import S, Union, Intersection, Interval, FiniteSet, And

    kind, parts = _structure(text)
    if text in (r"\mathbb{R}", "R"):
        return S.Reals
    if text.strip() == r"\emptyset":
        return S.EmptySet
    if kind == "set" and (built := re.fullmatch(r"\\\{(.+?)[|:](.+)\\\}", text)):
        return _as_set(built[2].strip())
    if kind == "set":
        parts, signs = _cut(text, r"\\cup|\\cap|\\setminus")
        sets = [_as_set(part) if _structure(part)[0] != "{}" else _finite(_structure(part)[1]) for part in parts]
        if None in sets:
            return None
        whole = sets[0]
        for sign, part in zip(signs, sets[1:], strict=True):
            whole = {r"\cup": Union, r"\cap": Intersection}.get(sign, lambda a, b: a - b)(whole, part)
        return whole
    if kind in ("()", "(]", "[)", "[]") and len(parts) == 2:
        ends = _finite(parts, as_set=False)
        if ends is None or "]" in kind and ends[1].is_infinite or "[" in kind and ends[0].is_infinite or (ends[0].is_number and ends[1].is_number and not ends[0] < ends[1]):
            return None
        return Interval(*ends, kind[0] == "(", kind[1] == ")")
    if kind == ",":
        sets = [_as_set(part) if _structure(part)[0] == "<" else None for part in parts]
        if None in sets:
            return None
        return (Union if r"\lor" in text else Intersection)(*sets)
    if kind != "<":
        return None
    try:
        relations = [_exact(_ready(_parse(link))) for link in _links(text)]
        return And(*relations).as_set() if len(And(*relations).free_symbols) == 1 else None
    except MemoryError:
        raise
    except Exception:  # sympy raises nearly anything
        return None


def _finite(parts: list[str], *, as_set: bool = True):
    from sympy import FiniteSet

    values = [_parse(part) for part in parts]
    if not all(getattr(value, "is_extended_real", False) for value in values):
        return None
    values = [_exact(value.doit()) for value in values]
    return FiniteSet(*values) if as_set else values


def _exact(expression):
    """2.25 as 9/4: sympy compares sets only if all is exact."""
    from sympy import Float, Rational

    return expression.replace(lambda part: isinstance(part, Float), lambda part: Rational(str(part)))


# ---- Single expressions: math-verify's parser, and exact numbers -----------------------------------------------------


@functools.lru_cache(10_000)
def _parse(text: str):
    """A sympy object; None if math-verify's parser cannot read the text."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    for pattern, replacement in _FOR_THE_PARSER:
        text = pattern.sub(replacement, text)
    if not re.search(r"i\s*=|_\{?i", text):  # then i is no index, and sympy's I is meant
        text = re.sub(r"(\\(?:text|begin|end|math[a-z]+)\{[^}]*\}|\\[A-Za-z]+|_\{\w+\})|i", lambda match: match[1] or "(I)", text)
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
        (r"(?<![A-Za-z}\d.])(\d+)_\{(\w+)\}", r"\\mathcal{n\1b\2}"),  # it ignores the base of 101_2
        (r"(?<![_^\d.A-Za-z])(\d+(?:\.\d+)?) *(?=\(|\\frac)", r"\1\\cdot "),  # it adds: 2(1/3) is a mixed number to it
        (r"\) *(?=[\d(])", r")\\cdot "),
        (r"\\text\{([A-Za-z]{1,3})\}", r"\1"),
        (r"\\gamma(?![A-Za-z])", r"\\mathcal{gamma}"),
        (r"(?<![A-Za-z\\])([eE])(?=_)", r"\\mathcal{\1}"),
    ]
]  # fmt: skip


def _readable(text: str) -> bool:
    if _is_words(text):
        return len(re.findall(r"[^\W_]+", text.replace(r"\text", " "))) <= 5  # more is a sentence, which nobody writes twice
    return r"\ldots" in text or _as_set(text) is not None or _parse(text) is not None


_TOWER = re.compile(r"\^\{?(\d+)\^\{?(\d+)")  # the parser itself evaluates \gcd(10^{10^8},6)


@_false_if_it_fails
def _equal(gold: str, answer: str) -> bool:
    """Are two single expressions equal?"""
    if any(
        int(power[:9]) * math.log10(int(base) or 1) > math.log10(MAX_EXPONENT) for base, power in _TOWER.findall(answer)
    ):
        return False
    gold, answer = _parse(gold), _parse(answer)
    if gold is None or answer is None or _huge(answer):
        return False
    return gold == answer or _equal_values(gold, answer)


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


def _ready(expression):
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
    from sympy import Rational, ceiling, floor

    symbols = sorted(set().union(*(expression.free_symbols for expression in expressions)), key=str)
    if not symbols:
        return [{}]
    chance = random.Random(1)
    points = [
        {symbol: Rational(sign * scale * chance.randrange(10**12, 9 * 10**12), 5 * 10**12) for symbol in symbols}
        for sign, scale in ((1, 1), (-1, 1), (1, 30), (-1, 300))
    ]
    points.append({symbol: chance.choice((-1, 1)) * value for symbol, value in points[0].items()})
    if any(expression.has(floor, ceiling) for expression in expressions):
        points += [{symbol: Rational(chance.randrange(2, 1000)) for symbol in symbols} for _ in range(4)]
    return points


def _equal_values(gold, answer) -> bool:
    """Are two sympy expressions equal? Numbers by value, formulas by their values at some odd points."""
    from sympy import Float, MatrixBase, MatrixExpr, simplify

    if isinstance(gold, MatrixBase | MatrixExpr) or isinstance(answer, MatrixBase | MatrixExpr):
        gold, answer = gold.doit(), answer.doit()
        return gold.shape == answer.shape and all(map(_equal_values, gold.flat(), answer.flat()))
    gold, answer = _ready(gold), _ready(answer)
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

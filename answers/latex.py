r"""LaTeX as text: the last box of a response, one spelling for what is written in many, and cutting it apart.

Nothing here knows what an answer means; compare.py compares, values.py computes.
"""

import functools
import re
import unicodedata

MAX_ANSWER_CHARS = 1000  # the longest of 1017 benchmark golds has 232
MAX_DEPTH = 30  # brackets in brackets, at most 5 in the benchmarks; the parser's time can be exponential in it


def too_long(text: str) -> bool:
    """Over the caps on length and nesting that are checked before anything is parsed."""
    deepest = depth = 0
    if len(text) <= MAX_ANSWER_CHARS:
        for character in text:
            depth += (character in "([{") - (character in ")]}")
            deepest = max(deepest, depth)
    return len(text) > MAX_ANSWER_CHARS or deepest > MAX_DEPTH


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


def has_box(text: str) -> bool:
    return _BOX.search(text) is not None


def last_boxed(text: str) -> str | None:
    r"""The content of the last closed, non-empty \boxed{} (or \fbox{}), None if there is none.

    Boxes with nothing between them but commas, "and", "or" and spacing are one list; if all are alike, one answer.

    >>> last_boxed(r"within \boxed{}. First \boxed{2}, no: \boxed{\frac{1}{2}}, or \boxed{3")
    '\\frac{1}{2}'
    >>> last_boxed(r"The roots are $\boxed{1}$ and $\boxed{2}$.")
    '1, 2'
    >>> last_boxed(r"\boxed{4} \boxed{4}")
    '4'
    """
    contents, follows = [], None
    for start, end, content in _boxes_from_the_end(text):
        if contents and not _JOINED.fullmatch(text, end, follows):
            break
        if content:
            contents.append(content)
            follows = start
    return ", ".join(reversed(contents if len(set(contents)) > 1 else contents[:1])) or None


# ---- One spelling: LaTeX as people write it, into LaTeX that is written in one way -----------------------------------

_CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "π": r"\pi ", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
     "∙": r"\cdot ", "°": r"^\circ ", "℃": r"^\circ ", "∞": r"\infty ", "√": r"\sqrt ", "∪": r"\cup ", "∩": r"\cap ",
     "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ",
     "∅": r"\emptyset ", "∈": r"\in ", "∉": r"\notin ", "ℝ": r"\mathbb{R}", "÷": "/", "∕": "/", "⁄": "/", "∗": "*",
     "⟨": "(", "⟩": ")", "′": "'", "’": "'", "、": ",", "。": ".", "€": "", "£": "", "¥": "", "￥": "", "μ": r"\mu ",
     "µ": r"\mu ", "Ω": r"\Omega ", "θ": r"\theta ", "φ": r"\phi ", "α": r"\alpha ", "β": r"\beta ",
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
_FUNCTIONS = set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp gcd lim det".split())
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
            if token == "{" and out and re.search(r"\\[A-Za-z]+ ?$", out[-1]):
                out.append(f"{{{self.read('}')}}}")  # the argument of \exp and the like
            else:
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
            product = re.match(r"[\^_({\w]|\\(?:frac|sqrt|cdot|times)", self.peek()) and not re.search("^{|,", inner)
            return f"{{{inner}}}" if product and re.search("[-+]", inner) else inner
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
    r"(?!\\text\{[^{}]*(?<![a-z])(?:or|not|more|less|least|most|if|for|where|since|with|when|hundred|dozen|thousand|[a-z]*illion|[ap]\.?m\.?)"
    r"(?![a-z]))(?:\(?\\text\{[^{}]*\} ?\)?|\\mu ?|\\Omega ?|\\frac\{\\text\{[^{}]*\}\}\{\\text\{[^{}]*\}"
    + _POWER
    + r"\})"
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
    if len({unit for _, unit in pairs}) < len(pairs):  # 5 cm and 6 cm
        return match[0]
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
        (r"^ +|(?<=\() +| +(?=\))|(?<= ) ", ""),
        (r" *,? *(?<![A-Za-z])and(?![A-Za-z]) *,? *", r"\\land "),
        (r" *,? *(?<![A-Za-z])or(?![A-Za-z]) *,? *", r"\\lor "),
        (r"(?:[\d.]+ *\\text\{[A-Za-z. ]*\}(?:\\land | )*){2,}$", _compound),
        (r"(?<=\d)[^\x00-\x7f]+$|(?:\s|\\\\|(?<!\\)[.,;:])+$", ""),
        (r"(?<=\d)\^?\{?(?:\\text\{)?(?:st|nd|rd|th)\}+$", ""),
        (r" *(?:\\?%|\\text\{(?:percent|percentage|pct)\})", "%"),
        (r"^\\text\{[^{}]*(?<![a-z'])(?:is|are|equals)\} *:?(?=.*\d)|^\\text\{[^{}]{2,}\} *:(?=[^:]*\d)", ""),
        (r"(?<=:\d\d) *\\text\{([ap])\.? ?m\.?\}", lambda match: rf"\text{{{match[1].lower()}m}}"),
        (r"^\\text\{(?:Rs|USD|INR)\.?\} *(?=\d)", ""),
        (r"(?<=\d) *\\text\{(thousand|[mb]illion|trillion)\}",
         lambda match: rf"\times 10^{{{_MAGNITUDES[match[1]]}}}"),
        (r"(?<=\\circ\}) *(?:\\text\{[CF]\}|[CF](?![A-Za-z]))", ""),
        (rf"((?:[\d)|]|(?<![A-Za-z. ])\}}|\\pi )%?)(?: *(?:/|\\cdot |\*)? *{_UNIT}{_POWER})+ *"
         r"(?=[,;)]|\\l(?:and|or) |$)", r"\1"),
        # Numbers again: 0.\overline{3}, 4.5e33, 27.0, 1./3, .5, 2\frac{1}{3}
        (r"\\dot\{(\d)\}(\d*)\\dot\{(\d)\}", r"\\dot{\1\2\3}"),
        (r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\{(\d+)\}|\((\d+)\))", _repeating),
        (r"(?<![A-Za-z\d.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?![A-Za-z\d.])",
         lambda match: rf"{match[1]}\times 10^{{{int(match[2])}}}"),
        (r"(?<![\d.])(\d+)\.0*(?!\d)", r"\1"),
        (r"(?<![\d.^}])(\d+) *(?:\\frac\{(\d+)\}\{(\d+)\}|(?<= )(\d+)/(\d+))", _mixed_number),
        # Notations with one meaning
        (r"_\{(\w+)\}C_\{(\w+)\}|(?<![A-Za-z])C\((\d+), *(\d+)\)",
         lambda match: rf"\binom{{{match[1] or match[3]}}}{{{match[2] or match[4]}}}"),
        (r"\(? *\\(?:text\{mod\}|pmod\{\}) *(\d+) *\)?|\\pmod\{(\w+)\}",
         lambda match: rf"\pmod{{{match[1] or match[2]}}}"),
        (r"<=", r"\\le "), (r">=", r"\\ge "), (r"!=", r"\\ne "),
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


# ---- Cutting and comparing text --------------------------------------------------------------------------------------

_BRACKET = r"(?P<open>\\begin\{\w+\}|\\\{|[(\[{])|(?P<close>\\end\{\w+\}|\\\}|[)\]}])"


def cut(text: str, separators: str) -> tuple[list[str], list[str]]:
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


def is_words(text: str) -> bool:
    return r"\text{" in text and not re.search(r"[\\{}^_=<>+|!%-]", re.sub(r"\\text\{[^{}\\]*\}", "", text))


def _squeezed(text: str, *, words: bool) -> str:
    """For comparing text: without spaces; words also without case, brackets and, if there is no number, marks."""
    bare = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    if not words:
        return re.sub(r"(?<!\d) | (?!\d)", "", bare)
    return re.sub(r"[\s()']" if re.search(r"\d", text) else r"[\W_]", "", bare).casefold()


def same_text(gold: str, answer: str) -> bool:
    words = is_words(gold) or is_words(answer) or (gold.isalpha() and len(gold) > 1) or gold in tuple("ABCDEFGHIJ")
    return _squeezed(gold, words=words) == _squeezed(answer, words=words)

"""Plain text of a Unix manual page: roff with the `man` or the `mdoc` macros.

Not a formatter: fonts, layout and tables' rules are dropped, paragraphs and literal blocks stay, so that a reader sees
the page's prose. Macros as documented in groff_man(7), mdoc(7) and groff_char(7); an unknown one is dropped.
"""

from __future__ import annotations

import re

_ESCAPE = re.compile(
    r"""\\(?:
      [fFmMnY](?:\[[^\]]*\]|\(..|.)          # fonts, colours, registers
    | s[-+]?(?:\(\d\d|\[[^\]]*\]|\d\d?)       # sizes
    | \*(?P<string>\[[^\]]*\]|\(..|.)
    | (?P<drawn>[hvwlLoDbxXNRCkZzHS])'(?P<inner>[^']*)'
    | \[(?P<long>[^\]]*)\] | \((?P<short>..)
    | (?P<one>.)
    )""",
    re.VERBOSE,
)
_ONE = {"-": "-", "e": "\\", "~": "\xa0", "0": "\xa0", " ": "\xa0", "'": "'", "`": "`", ".": ".", "\\": "\\",
        "t": "\t"}  # fmt: skip
"""Escapes of one character; the others of one character print nothing."""
_SPECIAL = {
    "aq": "'", "dq": '"', "lq": '"', "rq": '"', "oq": "'", "cq": "'", "ga": "`", "aa": "'", "ha": "^", "ti": "~",
    "em": "—", "en": "-", "hy": "-", "mi": "-", "pl": "+", "mu": "x", "di": "/", "eq": "=", "bu": "*", "co": "(c)",
    "rg": "(R)", "tm": "(TM)", "rs": "\\", "sl": "/", "ul": "_", "ba": "|", "bv": "|", "or": "|", "at": "@", "sh": "#",
    "Do": "$", "lB": "[", "rB": "]", "lC": "{", "rC": "}", "<=": "<=", ">=": ">=", "!=": "!=", "->": "->", "<-": "<-",
    "+-": "+-", "ua": "^", "da": "v", "Fo": "<<", "Fc": ">>", "mc": "µ", "*m": "µ", "if": "infinity", "12": "1/2",
    "14": "1/4", "34": "3/4", "de": "°", "sc": "§", "ss": "ß", ":a": "ä", ":o": "ö", ":u": "ü", ":A": "Ä", ":O": "Ö",
    ":U": "Ü", "'e": "é", "'a": "á", "'o": "ó", "'i": "í", "`e": "è", "`a": "à", "^e": "ê", "^o": "ô", ",c": "ç",
    "oa": "å", "/o": "ø", "/O": "Ø", "~n": "ñ", "*a": "alpha", "*b": "beta", "*p": "pi", "R": "(R)", "Tm": "(TM)",
    "L": '"', "la": "<", "ra": ">", "Lq": '"', "Rq": '"', "Le": "<=", "Ge": ">=", "Ne": "!=", "Pm": "+-", "Am": "&",
    "Ba": "|", "Pi": "pi", "Na": "NaN", "Px": "POSIX", "Ai": "ANSI", "U": '"', "If": "infinity",
}  # fmt: skip

_ALTERNATING = {"BR", "RB", "BI", "IB", "IR", "RI"}
_ONE_FONT = {"B", "I", "R", "SM", "SB"}
_HEADINGS = {"SH", "SS", "Sh", "Ss"}
_PARAGRAPHS = {"PP", "P", "LP", "HP", "Pp", "sp", "Bd", "Bl", "El", "RS", "RE", "Ed"}
_LITERAL = {"nf": True, "EX": True, "fi": False, "EE": False, "TS": True, "TE": False}
_CONDITIONS = {"if", "ie", "el"}
_SWALLOWED = {"de": "..", "ig": "..", "de1": "..", "am": "..", "EQ": ".EN"}

_SYSTEMS = {"Bx": "BSD", "Fx": "FreeBSD", "Nx": "NetBSD", "Ox": "OpenBSD", "Dx": "DragonFly", "At": "AT&T UNIX",
            "Bsx": "BSD/OS", "Ux": "UNIX"}  # fmt: skip
_PAIRS = {"Dq": '""', "Qq": '""', "Sq": "''", "Ql": "''", "Pq": "()", "Op": "[]", "Bq": "[]", "Brq": "{}", "Aq": "<>"}
_OPENING = {"Do": '"', "Qo": '"', "So": "'", "Po": "(", "Oo": "[", "Bo": "[", "Bro": "{", "Ao": "<", "Fo": "",
            "Xo": ""}  # fmt: skip
_CLOSING = {"Dc": '"', "Qc": '"', "Sc": "'", "Pc": ")", "Oc": "]", "Bc": "]", "Brc": "}", "Ac": ">", "Fc": "",
            "Xc": ""}  # fmt: skip
_FONTS = {"Ar", "Pa", "Va", "Vt", "Dv", "Er", "Em", "Sy", "Cm", "Ic", "Li", "Ft", "Fa", "Ad", "An", "Ev", "Lk", "Mt",
          "Ms", "No", "Sx", "Tn", "Cd", "Fd", "Lb", "Ot", "It", "Dl", "D1", "St", "Me", "Ta", "Fr"}  # fmt: skip
_OTHERS = {"Nm", "Nd", "Xr", "Fn", "Fl", "In", "Ns", "Pf", "Ap"}
_MDOC = _FONTS | _OTHERS | set(_PAIRS) | set(_OPENING) | set(_CLOSING) | set(_SYSTEMS)
_CLOSES = frozenset(".,:;)]?!")
_BARE = _CLOSES | {"(", "["}


def _unescape(text: str) -> str:
    def replace(match: re.Match) -> str:
        if (one := match["one"]) is not None:
            return _ONE.get(one, "")
        name = match["string"] or match["long"] or match["short"] or (match["drawn"] == "C" and match["inner"]) or ""
        name = name.strip("[]").removeprefix("(")
        if re.fullmatch(r"u[0-9A-F]{4,5}", name):
            return chr(int(name[1:], 16))
        return _SPECIAL.get(name, "")

    return _ESCAPE.sub(replace, text) if "\\" in text else text


def _words(text: str) -> list[str]:
    """Split a macro's arguments; ``"a b"`` is one, and ``""`` inside it is a quotation mark."""
    found = re.findall(r'"((?:[^"]|"")*)(?:"|$)|((?:\\ |\S)+)', text)
    return [plain if plain else quoted.replace('""', '"') for quoted, plain in found]


class _Line:
    """The text of one mdoc line, with the spacing rules of its macros."""

    def __init__(self):
        self.text, self._glue = "", True

    def add(self, piece: str, *, glue_before: bool = False, glue_after: bool = False) -> None:
        self.text += piece if self._glue or glue_before or not piece else f" {piece}"
        self._glue = glue_after or (self._glue and not piece)

    def glue(self) -> None:
        self._glue = True


def _mdoc(words: list[str], name: str) -> str:
    """Return the text of a line of mdoc macros; ``name`` is what ``Nm`` alone prints."""
    line, closers, macro = _Line(), [], ""
    while len(words) > 1 and len(words[-1]) == 1 and words[-1] in _CLOSES:
        closers.insert(0, words.pop())  # trailing punctuation goes outside of the line's brackets
    position, ends = 0, []
    while position < len(words):
        word = words[position]
        position += 1
        if word in _MDOC:
            macro = word
            following = words[position : position + 1]
            if word in _PAIRS:
                line.add(_PAIRS[word][0], glue_after=True)
                ends.append(_PAIRS[word][1])
            elif word in _OPENING:
                line.add(_OPENING[word], glue_after=True)
            elif word in _CLOSING:
                line.add(_CLOSING[word], glue_before=True)
            elif word in _SYSTEMS:
                line.add(_SYSTEMS[word])
            elif word == "Nm" and (not following or following[0] in _MDOC or following[0] in _BARE):
                line.add(name)
            elif word == "Nd":
                line.add("-")
            elif word == "Ns":
                line.glue()
            elif word == "Ap":
                line.add("'", glue_before=True, glue_after=True)
            elif word in ("Xr", "Fn") and following:
                rest = []
                position += 1
                while position < len(words) and words[position] not in _MDOC and words[position] not in _CLOSES:
                    rest.append(_unescape(words[position]))
                    position += 1
                line.add(f"{_unescape(following[0])}({', '.join(rest)})")
            elif word == "In" and following:
                line.add(f"<{following[0]}>")
                position += 1
            elif word == "Pf" and following:
                line.add(_unescape(following[0]), glue_after=True)
                position += 1
            elif word == "Fl" and (not following or following[0] in _MDOC):
                line.add("-", glue_after=bool(following) and following[0] == "Ns")
        elif len(word) == 1 and word in _CLOSES:
            line.add(word, glue_before=True)
        elif word in ("(", "["):
            line.add(word, glue_after=True)
        else:
            line.add(("-" if macro == "Fl" and word != "|" else "") + _unescape(word))
    for end in reversed(ends):
        line.add(end, glue_before=True)
    return line.text + "".join(closers)


class _Page:
    """The state of one page while it is read."""

    def __init__(self):
        self.out: list[str] = []
        self.literal = False
        self.tag = False  # the next text is the term of a list
        self.blocks: list[bool] = []
        self.name = ""

    def put(self, text: str) -> None:
        if self.tag and text:
            self.out.append(f"{text}\n")
            self.tag = False
        elif text or self.literal:
            self.out.append(text + ("\n" if self.literal else " "))

    def line(self, macro: str, rest: str) -> None:
        """Take one line that starts with a macro."""
        if macro in _HEADINGS:
            self.out.append(f"\n\n{_unescape(' '.join(_words(rest)))}\n")
        elif macro in ("TP", "TQ"):
            self.out.append("\n\n" if macro == "TP" else "\n")
            self.tag = True
        elif macro == "IP":
            words = _words(rest)
            self.out.append("\n\n")
            if words and (term := _unescape(words[0]).strip()):
                self.out.append(f"{term} " if len(term) == 1 else f"{term}\n")
        elif macro in _LITERAL:
            self.literal = _LITERAL[macro]
            self.out.append("\n")
        elif macro in _PARAGRAPHS:
            if macro == "Bd":
                self.blocks.append(self.literal)
                self.literal = "-literal" in rest or "-unfilled" in rest
            elif macro == "Ed" and self.blocks:
                self.literal = self.blocks.pop()
            self.out.append("\n\n")
        elif macro in _ALTERNATING:
            self.put(_unescape("".join(_words(rest))))
        elif macro in _ONE_FONT:
            self.put(_unescape(" ".join(_words(rest))))
        elif macro in ("br", "Rs"):
            self.out.append("\n")
        elif macro.startswith("%"):
            self.put(f"{_unescape(' '.join(_words(rest)))},")
        elif macro in ("UR", "MT"):
            self.put(f"<{_unescape(rest.strip())}>")
        elif macro in ("It", "Dl", "D1"):
            self.out.append("\n\n" if macro == "It" else "\n")
            text = _mdoc(_words(rest), self.name)
            self.out.append(f"{text}\n" if text else "* ")
        elif macro in ("In", "Cd", "Fd"):
            self.out.append(f"{'#include ' if macro == 'In' else ''}{_mdoc([macro, *_words(rest)], self.name)}\n")
        elif macro in _MDOC and not (macro == "An" and rest.startswith(" -")):
            words = _words(rest)
            if macro == "Nm" and not self.name and words:
                self.name = _unescape(words[0])
            self.put(_mdoc([macro, *words], self.name))


def roff_text(source: str) -> str:
    """Return the text of a manual page; empty for one that only includes another (``.so``)."""
    page, until, options = _Page(), "", False
    for raw in source.splitlines():
        line = re.sub(r'\\["#].*', "", raw)
        if until:
            until = "" if line.startswith(until) else until
            continue
        if options:  # of a table: they end with a line that ends with a full stop
            options = not line.rstrip().endswith(".")
            continue
        match = re.match(r"[.']\s*([A-Za-z%][A-Za-z0-9]*)(.*)", line)
        if match is None:
            if not line.startswith((".", "'")):
                text = _unescape(line)
                page.put(text.strip(" ") if not page.literal else text)
                if not line.strip():
                    page.out.append("\n\n")
            continue
        macro, rest = match.groups()
        if macro in _SWALLOWED:
            until = _SWALLOWED[macro]
        elif macro not in _CONDITIONS:
            options = macro == "TS"
            page.line(macro, rest)
    text = "".join(page.out).replace("T{\n", "").replace("\nT}", "")
    return re.sub(r" *\n[ ]?(?! )", "\n", text)

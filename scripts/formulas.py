"""Formulas of the documentation as MathML, which browsers render without a script: a small part of LaTeX.

Code hosts render the same sources, ```` ```math ```` blocks and `$...$`.
"""

import re
from collections.abc import Iterator
from html import escape

__all__ = ["mathml", "rendered"]

OPERATORS = {"cdot": "⋅", "in": "∈", "langle": "⟨", "rangle": "⟩", "sum": "∑"}
MINUS = "\N{MINUS SIGN}"
SPACES = {",": "0.17em", "quad": "1em", "qquad": "2em"}
TOKEN = re.compile(r"\\(?:mathrm|operatorname|text)\{[^}]*\}|\\(?:[A-Za-z]+|,)|\d+|\S")


def rendered(markdown: str) -> str:
    """The text, outside of code, with its inline formulas as MathML.

    Example:
        >>> rendered("a weight `$x$` of $w$")
        'a weight `$x$` of <span><math><mi>w</mi></math></span>'
    """
    parts = re.split(r"(`[^`]*`)", markdown)
    parts[::2] = [
        re.sub(r"\$([^$\s](?:[^$]*[^$\s])?)\$", lambda found: f"<span>{mathml(found[1])}</span>", part)
        for part in parts[::2]
    ]
    return "".join(parts)


def mathml(formula: str, *, display: bool = False) -> str:
    """One formula.

    Raises:
        ValueError: It has a command that is not listed here.

    Example:
        >>> mathml(r"g_i / N")
        '<math><msub><mi>g</mi><mi>i</mi></msub><mo>/</mo><mi>N</mi></math>'
    """
    tokens = iter([*TOKEN.findall(formula), "}"])
    start = '<math display="block">' if display else "<math>"
    return f"{start}{_row(tokens, display)}</math>"


def _row(tokens: Iterator[str], display: bool) -> str:
    """What comes before the brace that closes, with its subscripts and superscripts."""
    parts: list[str] = []
    limits = False
    for token in tokens:
        if token == "}":
            break
        if token in "^_":
            parts.append(_scripted(parts.pop(), token, _argument(tokens, display), limits))
        else:
            limits = display and token.startswith((r"\sum", r"\operatorname"))
            parts.append(_atom(token, tokens, display))
    return "".join(parts)


def _scripted(base: str, sign: str, script: str, limits: bool) -> str:
    both = re.fullmatch(r"<msub>(.*)</msub>", base)
    if sign == "^" and both and base.count("<msub>") == 1:
        return f"<msubsup>{both[1]}{script}</msubsup>"
    tag = "munder" if limits else "msub" if sign == "_" else "msup"
    return f"<{tag}>{base}{script}</{tag}>"


def _argument(tokens: Iterator[str], display: bool) -> str:
    """A group in braces, or one token, as one element."""
    token = next(tokens)
    return f"<mrow>{_row(tokens, display)}</mrow>" if token == "{" else _atom(token, tokens, display)


def _atom(token: str, tokens: Iterator[str], display: bool) -> str:
    command = token.removeprefix("\\")
    if token == "{":
        return f"<mrow>{_row(tokens, display)}</mrow>"
    if token == command:
        tag = "mn" if token.isdigit() else "mi" if token.isalpha() else "mo"
        stretch = ' stretchy="false"' if token in "|()[]" else ""
        return f"<{tag}{stretch}>{escape(token.replace('-', MINUS))}</{tag}>"
    if command in ("left", "right"):
        return f"<mo>{escape(next(tokens))}</mo>"
    if words := re.fullmatch(r"(\w+)\{(.*)\}", command):
        return f"<mtext>{words[2]}</mtext>" if words[1] == "text" else f'<mi mathvariant="normal">{words[2]}</mi>'
    if command in ("frac", "sqrt"):
        count = 2 if command == "frac" else 1
        return f"<m{command}>{''.join(_argument(tokens, False) for _ in range(count))}</m{command}>"
    if command in OPERATORS:
        return f"<mo>{OPERATORS[command]}</mo>"
    if command in SPACES:
        return f'<mspace width="{SPACES[command]}"/>'
    if command in ("log", "exp"):
        return f"<mi>{command}</mi>"
    raise ValueError(f"a formula has {token}, which scripts/formulas.py doesn't know")

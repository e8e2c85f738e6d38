"""docs/limits.md quotes the library: each quoted sentence is one that the code says today."""

import ast
import collections
import functools
import re

import pytest

from tests.documents import ROOT
from tests.source import TREES

PLACEHOLDER = None
LONGEST_VALUE = 30
GRAM = 9
"""Characters that a sentence and the source have in common, for it to be looked at."""
LEAST = 3
"""Characters that a sentence must share with the source for each such value."""
"""Characters that a placeholder may stand for; what is longer must be another of the library's sentences."""


def quotes(text):
    """The quoted sentences of a page, each as the parts between its ellipses.

    >>> quotes('Says so: "It is, not\\n  `b`." and "a=\"c\" is ... no d", `x="y"`, "short".')
    [['It is, not `b`.'], ['a="c" is', 'no d']]
    """
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`", lambda span: "" if '"' in span[0] else span[0], re.sub(r"\s+", " ", text))
    found = re.findall(r'(?<![=\w])"((?:(?:=|, |install )"[^"]*"|[^"])+)"', text)
    return [[part.strip() for part in quote.split("...") if part.strip()] for quote in found if quote.count(" ") > 1]


def template(node):
    """A string expression as characters and placeholders."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        pieces = re.split(r"%[.\d]*[sdgfr]|\{\w*\}", re.sub(r"\s+", " ", node.value))
        return functools.reduce(lambda a, b: [*a, PLACEHOLDER, *b], pieces[1:], [*pieces[0]])
    if isinstance(node, ast.JoinedStr):
        return [character for value in node.values for character in template(value)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return [PLACEHOLDER]


@functools.cache
def templates():
    """What the source can say, with the text of its literals to look in first."""
    found = []
    for tree in TREES.values():
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and id(node) not in docstrings:
                made = template(node)
                text = "".join(character or "\0" for character in made)
                if len(text) > 8:
                    found.append((made, text))
    return found


@functools.cache
def where():
    """The templates that each few characters are in."""
    found = collections.defaultdict(set)
    for number, (_, text) in enumerate(templates()):
        for start in range(len(text) - GRAM + 1):
            found[text[start : start + GRAM]].add(number)
    return found


def shared(grams):
    """The templates that have any of these characters."""
    return [templates()[number] for number in sorted(set().union(*(where().get(gram, ()) for gram in grams)))]


def aligned(part, made, at):
    """The values of placeholders with which `part` follows the template from `at` on; None if it doesn't."""

    @functools.cache  # which pairs of places fail
    def rest(at, start):
        begin = start
        while start < len(part) and at < len(made) and made[at] == part[start]:
            at, start = at + 1, start + 1
        if start == len(part):
            return ()
        if at == len(made) or made[at] is not PLACEHOLDER or (start == begin and start and made[at - 1] is PLACEHOLDER):
            return None
        for end in range(start, len(part) + 1):
            if end == len(part) or at + 1 == len(made) or made[at + 1] == part[end]:
                values = rest(at + 1, end)
                if values is not None:
                    return (part[start:end], *values)
        return None

    return rest(at, 0)


@functools.cache
def said(part):
    """Whether a sentence, or a part of one, is in the source, with values in the place of placeholders."""
    grams = {part[i : i + GRAM] for i in range(max(1, len(part) - GRAM + 1))}
    for made, text in shared(grams) if len(part) >= GRAM else [one for one in templates() if part in one[1]]:
        for at, character in enumerate(made):
            if character not in (PLACEHOLDER, part[0]):
                continue
            if character is PLACEHOLDER or part.startswith(text[at : at + len(part)].partition("\0")[0]):
                values = aligned(part, made, at)
                if values is None or values == (part,):
                    continue
                if len(part) - sum(map(len, values)) < LEAST * sum(map(bool, values)):
                    continue
                if all(len(value) <= LONGEST_VALUE or said(value.strip()) for value in values):
                    return True
    return False


QUOTES = quotes((ROOT / "docs" / "limits.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("quote", QUOTES, ids=[" ... ".join(quote)[:60] for quote in QUOTES])
def test_the_library_says_what_the_page_quotes(quote):
    for part in quote:
        assert said(part), f"nothing in the source says {part!r}"


def test_a_sentence_that_nothing_says_would_be_seen():
    assert len(QUOTES) > 50
    assert said("torch 2.9.1 has no `grad_dtype`, which autograd needs")
    assert not said("torch 2.9.1 lacks `grad_dtype`, which autograd needs")
    assert not said("The gradients were left in an open window, by clipping perhaps.")
    assert not said("static_graph=True cannot hold back DDP's reduction to the end of a window.")
    assert not said("Fetching the next batch changes the one in use")

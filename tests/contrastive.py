"""Contrastive losses are the same in every shell: what they are compared with, and what is refused in which words."""

import re

import numpy as np
import pytest

ROWS, COLUMNS = 23, 31
OF_A, OF_B = np.arange(ROWS) % 7, np.arange(COLUMNS) % 9  # some have several positives, ids 7 and 8 none
PAIRS = {  # how positives are given, and the same as a matrix
    "row i and row i": (None, np.eye(ROWS, COLUMNS, dtype=bool)),
    "ids of the pairs": (OF_A - 3, OF_A[:, None] == np.concatenate([OF_A, np.full(COLUMNS - ROWS, -1)])),
    "ids of both": ((OF_A, OF_B), OF_A[:, None] == OF_B),
}


def unit_rows(rows=ROWS, columns=COLUMNS, size=6, seed=0):
    random = np.random.default_rng(seed)
    sides = [random.normal(size=(count, size)) for count in (rows, columns)]
    return [side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides]


def info_nce(ops, a, b, temperature, pairs, ignored=None, symmetric=True):
    """Of the whole matrix, by a framework's operations: pairs are a matrix, and what is ignored another one."""
    found = []
    for rows, columns, turned in [(a, b, False), (b, a, True)][: 1 + symmetric]:
        scores = ops.einsum("if,jf->ij", rows, columns) / temperature
        positive, zeros = pairs.T if turned else pairs, 0 * scores
        if ignored is not None:
            scores = ops.where((ignored & ~pairs).T if turned else ignored & ~pairs, zeros - np.inf, scores)
        number = ops.sum(ops.where(positive, zeros + 1, zeros), 1)
        has, ones = number > 0, 0 * number + 1
        mean = ops.sum(ops.where(positive, scores, zeros), 1) / ops.where(has, number, ones)
        losses = ops.where(has, ops.logsumexp(scores, 1) - mean, 0 * number)
        found.append(ops.sum(losses) / ops.sum(ops.where(has, ones, 0 * number)))
    return sum(found) / len(found)


BOTH, IDS = np.zeros((3, 2)), np.zeros(4, int)
REFUSED = {  # what is given in place of three rows of two numbers; `{array}` is the shell's word
    "a list": ({"a": [[1.0]]}, TypeError, "`a` must be {array}"),
    "three dimensions": ({"a": BOTH[..., None]}, ValueError, "`a` must be {array} of floats, of shape (rows, size)"),
    "a vector": ({"b": BOTH[0]}, ValueError, "Received: float64 of shape (2,)"),
    "ints": ({"b": BOTH.astype(int)}, ValueError, "`b` must be {array} of floats"),
    "other sizes": ({"b": np.zeros((3, 4))}, ValueError, "rows of the same size. Received: (3, 2) and (3, 4)"),
    "fewer rows of b": ({"b": BOTH[:2]}, ValueError, "3 rows of a, 2 of b. Swap them, or pass pos"),
    "no tile": ({"tile": 0}, ValueError, "`tile` must be an int >= 1. Received: tile=0"),
    "temperature 0": ({"temperature": 0}, ValueError, "`temperature` must be a positive number"),
    "temperature NaN": ({"temperature": np.nan}, ValueError, "Received: temperature=nan"),
    "a temperature per row": ({"temperature": np.ones(2)}, ValueError, "Received: float64 of shape (2,)"),
    "a word": ({"temperature": "warm"}, TypeError, "Received: temperature='warm' of type str"),
    "float ids": ({"positives": np.zeros(3)}, TypeError, "ids, which are integers. Received: float64 of shape (3,)"),
    "too many ids": ({"positives": IDS}, ValueError, "must have an id for each row, (3,). Received: (4,)"),
    "ids of b alone": ({"positives": (None, IDS[:3])}, TypeError, "a tuple of two"),
    "ids as a list": ({"positives": [1, 2, 3]}, TypeError, "a tuple of two"),
    "ids of pairs of fewer": ({"b": BOTH[:2], "positives": IDS[:3]}, ValueError, "positives=(ids_of_a, ids_of_b)"),
}  # fmt: skip
each_refused = pytest.mark.parametrize("case", REFUSED)


def assert_refused(case, loss, tensor, array):
    changed, error, words = REFUSED[case]
    made = {name: tensor(one) if isinstance(one, np.ndarray) else one for name, one in changed.items()}
    if isinstance(made.get("positives"), tuple):
        made["positives"] = None, tensor(made["positives"][1])
    with pytest.raises(error, match=re.escape(words.format(array=array))):
        loss(**{"a": tensor(BOTH), "b": tensor(BOTH), **made})

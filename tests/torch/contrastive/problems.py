"""The naive oracle: contrastive losses from the whole matrix of pairs."""

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests import contrastive


def rows_of(seed, rows, columns, size=6, dtype=torch.float64):
    sides = contrastive.unit_rows(rows, columns, size, seed)
    return [torch.from_numpy(side).to(dtype).requires_grad_() for side in sides]


def of_pairs(a, b, positives, ignored):
    """`positives` and `ignored` as matrices; row i and row i where nothing is said."""
    positives = torch.eye(len(a), len(b), dtype=torch.bool) if positives is None else positives
    return positives, torch.zeros_like(positives) if ignored is None else ignored & ~positives


def plain_info_nce(a, b, temperature, positives=None, ignored=None, symmetric=True):
    return contrastive.info_nce(torch, a, b, temperature, *of_pairs(a, b, positives, ignored), symmetric)


def plain_sigmoid(a, b, temperature, bias, positives=None, ignored=None):
    positives, ignored = of_pairs(a, b, positives, ignored)
    scores = a @ b.T / temperature + bias
    losses = -F.logsigmoid(torch.where(positives, scores, -scores))
    return losses.masked_fill(ignored, 0.0).sum() / len(a)


def same(of_a, of_b):
    """Pairs of rows with the same id, as a matrix."""
    return of_a[:, None] == of_b


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that is made inside."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        found = [t.numel() for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, torch.Tensor)]
        self.numbers = max(self.numbers, *found, 0)
        return out

"""What the tests of trainers on two ranks share: ragged batches of two ranks, and the truth of one process."""

import os

import torch

from tests.reference import FLOAT64, relative_error, torch_updates
from tests.torch.distributed.problems import whole
from tests.torch.problems import mse, network, regression, sgd

SIZES = [2, 2, 5, 1, 3], [4, 1, 1, 3, 2]
"""Rows of each batch of an epoch, on each rank."""


def of_two(rank):
    """The environment that torchrun makes."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in names.items()})


def batches(rank):
    x, y = (t.double()[20 * rank :][: sum(SIZES[rank])] for t in regression(40))
    return list(zip(x.split(SIZES[rank]), y.split(SIZES[rank]), strict=True))


def windows(steps, count=5, left_out=()):
    """All ranks' rows of each window of an epoch."""
    for start in range(0, count, steps):
        indices = range(start, min(start + steps, count))
        rows = [batches(rank)[index] for rank in (0, 1) for index in indices if (rank, index) not in left_out]
        yield tuple(torch.cat(parts) for parts in zip(*rows, strict=True))


def check(model, large, **keywords):
    """The model has made the updates of these large batches."""
    plain = network(dtype=torch.float64)
    torch_updates(plain, sgd(plain.parameters()), large, mse, **keywords)
    error = relative_error(whole(model), plain.parameters())
    assert error <= FLOAT64

"""What each rank does in the tests of losses by name over several ranks."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradaccum.torch.optim import Optimizer
from tests.reference import relative_error
from tests.torch.distributed.problems import OPTIMIZERS, data, network, windows


def _losses(model, rows):
    """Two losses with denominators of their own: one over rows, one over those whose first entry is positive."""
    x, y = rows
    outputs, kept = model(x), x[:, 0] > 0
    second = outputs[kept].square().mean() if kept.any() else outputs.sum() * 0.0
    return {"rows": (nn.functional.cross_entropy(outputs, y), len(x)), "kept": (second, int(kept.sum()))}


def train(rank: int, sizes: Sequence[Sequence[int]], steps: int, later: bool = False) -> tuple[float, int, list[float]]:
    """Train on ragged rows. Returns (error, updates, the last window's losses on this rank)."""
    model, plain = network(), network()
    plain.load_state_dict(model.state_dict())
    ranks = data(sizes)
    replica = DistributedDataParallel(model)
    optimizer = Optimizer(OPTIMIZERS["sgd"](replica.parameters()), steps=steps, model=replica)
    inner = OPTIMIZERS["sgd"](plain.parameters())
    for epoch in range(2):
        for rows in ranks[rank]:
            optimizer.zero_grad()
            if later and not epoch:
                optimizer.backward(_losses(replica, rows)["rows"][0], weight=len(rows[0]))
            else:
                optimizer.backward(_losses(replica, rows))
            optimizer.step()
        optimizer.flush()
        for window in windows(ranks, steps):
            inner.zero_grad()
            joined = [torch.cat(parts) for parts in zip(*window, strict=True)]
            sum(loss for loss, weight in _losses(plain, joined).values() if weight).backward()
            inner.step()
    error = relative_error(model.parameters(), plain.parameters())
    return error, optimizer.updates, [float(loss) for loss in optimizer.losses.values()]

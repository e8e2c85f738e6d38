"""What each rank does in the tests of the noise scale over several ranks."""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradaccum.core.noise import NoiseScale, NoiseSchedule
from gradaccum.torch import TrainStep
from gradaccum.torch.optim import Optimizer
from tests.torch.distributed.problems import OPTIMIZERS, concatenated, data, loss_of, network, shard

STEPS = 3
SIZES = [[4, 2, 5, 1, 3, 7, 2, 6, 4], [3, 3, 1, 6, 2, 4, 5, 5, 2]]
Found = tuple[float, tuple[float, float], float]


def told(scale: NoiseScale) -> Found:
    return scale.value, scale.interval, scale.batch_size


def several(model: nn.Module, engine: str) -> nn.Module:
    return DistributedDataParallel(model) if engine == "ddp" else shard(model)


def normalised() -> nn.Module:
    """The network behind a layer that normalises."""
    return nn.Sequential(nn.LayerNorm(5, dtype=torch.float64), network())


def wrapped(rank: int, engine: str, scaled: bool, noise_scale: Any = True) -> tuple[Found, Found]:
    """The noise scale of this rank, and of one process whose windows begin with this rank's first micro-batch."""
    ranks, build = data(SIZES), normalised if noise_scale == "layer_norm" else network
    model = build()
    alone = Optimizer(OPTIMIZERS["sgd"](model.parameters()), steps=2 * STEPS, model=model, noise_scale=noise_scale)
    order = [rank, 1 - rank]
    for rows in alone.batches([b for w in range(3) for r in order for b in ranks[r][STEPS * w : STEPS * (w + 1)]]):
        alone.zero_grad()
        loss_of(model, rows).backward()
        alone.step()
    model = several(build(), engine)
    optimizer = Optimizer(OPTIMIZERS["sgd"](model.parameters()), steps=STEPS, model=model, noise_scale=noise_scale)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2, enabled=scaled)
    for rows in optimizer.batches(ranks[rank]):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rows)).backward()
        scaler.step(optimizer)
        scaler.update()
    return told(optimizer.noise_scale), told(alone.noise_scale)


def train_step(rank: int, engine: str) -> tuple[Found, Found]:
    """As above for TrainStep, in micro-batches of 4 rows."""
    batches = data([[12, 8, 16], [10, 7, 15]])  # as many micro-batches on each, the first of 4 rows
    found = []
    for together in (True, False):
        model = several(network(), engine) if together else network()
        arguments: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss(), "micro_batch_size": 4, "noise_scale": True}
        step = TrainStep(model, OPTIMIZERS["sgd"](model.parameters()), **arguments)
        for i in range(3):
            own, other = batches[rank][i], batches[1 - rank][i]
            step(*(own if together else concatenated([own, other])))
        found.append(told(step.noise_scale))
    return found[0], found[1]


def followed(rank: int, engine: str) -> tuple[list[int], float]:
    """The lengths of windows that follow the noise scale, and what the parameters add up to."""
    generator = torch.Generator().manual_seed(rank)
    model = several(network(), engine)
    optimizer = Optimizer(
        OPTIMIZERS["sgd"](model.parameters()), NoiseSchedule(2, 8, every=15, scale_learning_rate="sqrt"), model=model
    )
    lengths, count = [], 0
    for _ in range(240):
        x = torch.randn(2, 5, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        model(x).mul(torch.randn(2, 1, generator=generator, dtype=torch.float64)).mean().backward()
        optimizer.step()
        count += 1
        if optimizer.updated:
            lengths.append(count)
            count = 0
    total = sum(
        p.detach().full_tensor().sum() if hasattr(p, "full_tensor") else p.detach().sum() for p in model.parameters()
    )
    return lengths, float(total)

"""The noise scale over several ranks: what one process finds that sees the same windows."""

from typing import Any

import pytest
import torch
from torch import nn

from gradaccum.core.noise import NoiseScale, NoiseSchedule
from gradaccum.torch.optim import Optimizer
from tests.torch.distributed.problems import concatenated, data, network, sgd, slowly, spread, step_of, train_on, whole
from tests.torch.distributed.processes import Processes, on_ranks

STEPS = 3
SIZES = [[4, 2, 5, 1, 3, 7, 2, 6, 4], [3, 3, 1, 6, 2, 4, 5, 5, 2]]
EXACT = 1e-11
"""The estimates are differences of squared norms, each as exact as a gradient: 1e-12."""


def told(scale: NoiseScale) -> tuple[float, ...]:
    return scale.value, *scale.interval, scale.batch_size


def normalised() -> nn.Module:
    """The network behind a layer that normalises."""
    return nn.Sequential(nn.LayerNorm(5, dtype=torch.float64), network())


def wrapped(rank: int, engine: str, scaled: bool, noise_scale: Any = True) -> tuple[float, ...]:
    """The noise scale of this rank is that of one process whose windows begin with this rank's first micro-batch."""
    ranks, build = data(SIZES), normalised if noise_scale == "layer_norm" else network
    model = build()
    alone = Optimizer(sgd(model), steps=2 * STEPS, model=model, noise_scale=noise_scale)
    order = [rank, 1 - rank]
    rows = [b for w in range(3) for r in order for b in ranks[r][STEPS * w : STEPS * (w + 1)]]
    train_on(model, alone, alone.batches(rows))
    model = spread(engine, build())
    optimizer = Optimizer(sgd(model), steps=STEPS, model=model, noise_scale=noise_scale)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2, enabled=scaled)
    train_on(model, optimizer, optimizer.batches(ranks[rank]), scaler=scaler)
    assert told(optimizer.noise_scale) == pytest.approx(told(alone.noise_scale), rel=EXACT)
    return told(optimizer.noise_scale)


@pytest.mark.parametrize(
    ("engine", "scaled"), slowly([("ddp", True), ("fsdp2", False)], [("ddp", False), ("fsdp2", True)])
)
def test_each_rank_finds_what_one_process_finds_whose_windows_begin_with_its_micro_batch(
    ranks: Processes, engine: str, scaled: bool
) -> None:
    first, second = ranks.run(wrapped, engine, scaled)
    assert first != pytest.approx(second, rel=EXACT)  # each is an estimate of its own


@on_ranks()
def test_normalization_layers_tell_each_rank_what_they_tell_one_process(rank: int) -> None:
    wrapped(rank, "ddp", True, "layer_norm")


@pytest.mark.parametrize("engine", slowly(["fsdp2"], ["ddp"]))
@on_ranks()
def test_train_step_finds_what_one_process_finds(rank: int, engine: str) -> None:
    batches, found = data([[12, 8, 16], [10, 7, 15]]), []  # as many micro-batches on each, the first of 4 rows
    for together in (True, False):
        step = step_of(spread(engine, network()) if together else network(), noise_scale=True)
        for own, other in zip(batches[rank], batches[1 - rank], strict=True):
            step(*(own if together else concatenated([own, other])))
        found.append(told(step.noise_scale))
    assert found[0] == pytest.approx(found[1], rel=EXACT)


def followed(rank: int, engine: str) -> tuple[list[int], float]:
    """The lengths of windows that follow the noise scale, and what the parameters add up to."""
    generator, model = torch.Generator().manual_seed(rank), spread(engine, network())
    schedule = NoiseSchedule(2, 8, every=15, scale_learning_rate="sqrt")
    optimizer, lengths, count = Optimizer(sgd(model), schedule, model=model), [], 0
    for _ in range(240):
        x = torch.randn(2, 5, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        model(x).mul(torch.randn(2, 1, generator=generator, dtype=torch.float64)).mean().backward()
        optimizer.step()
        count += 1
        if optimizer.updated:
            lengths.append(count)
            count = 0
    return lengths, float(sum(p.sum() for p in whole(model)))


@pytest.mark.parametrize("engine", slowly(["ddp"], ["fsdp2"]))
def test_ranks_agree_on_the_length_of_windows_that_follow_it(ranks: Processes, engine: str) -> None:
    """Each measures with its own first micro-batch; a majority decides."""
    first, second = ranks.run(followed, engine)
    assert first == second
    assert max(first[0]) == 8

"""Blocks that live elsewhere come once in the forward pass, whatever the number of micro-batches."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from gradaccum.errors import NotEquivalentError
from gradaccum.torch import TrainStep
from tests.reference import FLOAT64, relative_error, torch_updates
from tests.torch.layers.test_blocks import OPTIMIZERS, Layer, Network, batches, loss_of, network

ROWS = 8  # of which the last micro-batch has fewer


def updated(model: Any, loss: Any = loss_of, count: int = 2, **options: Any) -> tuple[TrainStep, list[int]]:
    """Train the model with blocks elsewhere and a copy by ordinary steps, and compare. Returns the visits, too."""
    reference, data = copy.deepcopy(model), batches(rows=ROWS, count=count)
    trained = [p for p in reference.parameters() if p.requires_grad]
    expected = torch_updates(reference, OPTIMIZERS["sgd"](trained), data, loss)
    options = {"blocks": "layers", "blocks_on": "cpu", "verify": False, "update": "in_backward", **options}
    optimizer = OPTIMIZERS["sgd"]([p for p in model.parameters() if p.requires_grad])
    step = TrainStep(model, optimizer, compute_loss=loss, micro_batch_size=3, **options)
    losses = [step(*batch).item() for batch in data]
    assert losses == pytest.approx(expected, rel=FLOAT64)
    assert relative_error(model.parameters(), reference.parameters()) <= FLOAT64
    visits: Any = step._layers and step._layers.visits
    return step, [visits.count[f"layers.{i}"] // len(data) for i in range(3)]


class Around(Network):
    """Does something between blocks."""

    between: Callable[..., Any] = staticmethod(lambda layer, x, shared, index: layer(x, shared))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        shared = self.position(x)
        for index, layer in enumerate(self.layers):
            x, shared = self.between(layer, x, shared, index)
        return self.head(self.norm(x))


def around(between: Callable[..., Any]) -> Around:
    torch.manual_seed(0)
    model = Around().double()
    model.between = between
    return model


def _residual(layer: nn.Module, x: Tensor, shared: Tensor, index: int) -> Any:
    y, _ = layer(x, shared)
    return x + y, shared


def _changing(layer: nn.Module, x: Tensor, shared: Tensor, index: int) -> Any:
    return layer(x, shared if index != 1 else shared.flip(-1), scale=0.5 + index)[0], shared


def _in_place(layer: nn.Module, x: Tensor, shared: Tensor, index: int) -> Any:
    y, _ = layer(x, shared)
    y.mul_(1.1)
    return y, shared


def _without_a_graph(layer: nn.Module, x: Tensor, shared: Tensor, index: int) -> Any:
    with torch.set_grad_enabled(index > 0):
        return layer(x, shared)


def _by_rows(layer: nn.Module, x: Tensor, shared: Tensor, index: int) -> Any:
    """A micro-batch of another size calls blocks with another kind of number."""
    return layer(x, shared, scale=1 if len(x) == 3 else 1.0)


def test_each_block_comes_once_per_pass_whatever_the_model_does_between_blocks(tmp_path: Path) -> None:
    frozen = network()
    frozen.layers[1].requires_grad_(False)
    below = network()
    for part in (below.embedding, below.position, below.layers[0]):
        part.requires_grad_(False)
    for model, options, visits in (
        (network(), {}, [2, 2, 2]),
        (network(), {"offload": tmp_path}, [2, 2, 2]),
        (network(), {"update": "after_backward"}, [2, 2, 2]),
        (frozen, {}, [2, 2, 2]),
        (below, {}, [1, 2, 2]),
        (around(_residual), {}, [2, 2, 2]),
        (around(_changing), {"offload": tmp_path}, [2, 2, 2]),
        (around(_without_a_graph), {}, [1, 2, 2]),
        (around(_by_rows), {}, [2, 2, 2]),
    ):
        assert updated(model, **options)[1] == visits
        assert list(tmp_path.iterdir()) == []


def test_what_stands_before_the_blocks_runs_once_more_on_all_micro_batches_but_the_first() -> None:
    model, calls = network(), [0]
    model.embedding.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    data = batches(rows=ROWS, count=1)[0]
    step = TrainStep(
        model, OPTIMIZERS["sgd"](model.parameters()), compute_loss=loss_of, micro_batch_size=3, blocks="layers",
        blocks_on="cpu", verify=False,
    )  # fmt: skip
    step(*data)
    assert calls[0] == 2 + 3 + 3  # to see what the first block is called with, in their own passes, and in backward


class Caching(Layer):
    def forward(self, x: Tensor, shared: Any, *, scale: float = 1.0) -> Any:
        shared.seen.append(x.detach())
        return super().forward(x * len(shared.seen), torch.zeros((), dtype=x.dtype))[0], shared


class Remembering(Layer):
    last: Any = None

    def forward(self, x: Tensor, shared: Tensor, *, scale: float = 1.0) -> Any:
        self.last = x.detach()
        return super().forward(x, shared, scale=scale)


class Cache:
    def __init__(self) -> None:
        self.seen: list[Tensor] = []


def _with_cache(layer: nn.Module, x: Tensor, shared: Any, index: int) -> Any:
    return layer(x, Cache() if isinstance(shared, Tensor) else shared)


def test_a_block_that_may_not_run_ahead_of_its_micro_batch_comes_once_for_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "gradaccum")
    cached, remembering, hooked = around(_with_cache), network(), network()
    cached.layers = nn.ModuleList([Caching(6) for _ in range(3)]).double()
    remembering.layers[1] = Remembering(6).double()
    hooked.layers[0].register_forward_hook(lambda *_: None)
    for model, visits, words in (
        (
            cached,
            [4, 4, 4],
            "'layers.0' comes once for each micro-batch in forward passes, for it is called with",
        ),
        (remembering, [2, 4, 4], "'layers.1' comes once for each micro-batch .* moves buffers or attributes"),
        (hooked, [4, 4, 4], "'layers.0' comes once for each micro-batch .* has hooks on its forward pass"),
        (around(_in_place), [2, 2, 2], ""),
    ):
        caplog.clear()
        assert updated(model)[1] == visits
        assert len(caplog.records) == bool(words)
        assert re.search(words, caplog.text)


class Unsteady(Network):
    """Its embeddings are others when rows other than the first ones come for the first time."""

    seen: ClassVar[list[list[int]]] = []

    def forward(self, ids: Tensor) -> Tensor:
        self.seen.append(ids[0].tolist())
        strange = self.seen.count(self.seen[-1]) == 1 and len(self.seen) > 1
        x = self.embedding(ids) * (2.0 if strange else 1.0)
        shared = self.position(x)
        for layer in self.layers:
            x, shared = layer(x, shared)
        return self.head(self.norm(x))


def test_what_could_not_be_foreseen_is_computed_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gradaccum")
    torch.manual_seed(0)
    assert updated(Unsteady().double(), count=1)[1] == [4, 4, 4]  # once more, for each of two micro-batches
    assert "'layers.0' comes once for each micro-batch in forward passes, for it is called" in caplog.text


def by_hand(model: Any, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The loss of micro-batches that go through the blocks together."""
    rows, carried, firsts = sum(len(ids) for ids, _ in parts), [], []
    for ids, _ in parts:
        x = model.dropout(model.embedding(ids))
        firsts.append(x)
        carried.append(model.layers[0](x, model.position(x), scale=0.5))
    for layer in model.layers[1:]:
        carried = [layer(x, shared, scale=0.5) for x, shared in carried]
    losses = []
    for (x, shared), first, (ids, labels) in zip(carried, firsts, parts, strict=True):
        logits = model.head(model.norm(x + first + shared[..., : x.shape[-1]]))
        losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) * len(ids) / rows)
    return torch.stack(losses).sum()


def test_dropout_draws_block_by_block_and_is_replayed(tmp_path: Path) -> None:
    ids, labels = batches(rows=6, count=1)[0]
    reference = network(dropout=0.3)
    optimizer = OPTIMIZERS["sgd"](reference.parameters())
    torch.manual_seed(5)
    expected = by_hand(reference, [(ids[:3], labels[:3]), (ids[3:], labels[3:])])
    expected.backward()
    optimizer.step()
    drawn = torch.get_rng_state()
    for options in ({}, {"update": "in_backward", "clip_grad_norm": 1e3}, {"offload": tmp_path}):
        model = network(dropout=0.3)
        step = TrainStep(
            model, OPTIMIZERS["sgd"](model.parameters()), compute_loss=loss_of, micro_batch_size=3, blocks="layers",
            blocks_on="cpu", verify=False, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        torch.manual_seed(5)
        assert relative_error([step(ids, labels)], [expected.detach()]) <= FLOAT64
        assert relative_error(model.parameters(), reference.parameters()) <= FLOAT64
        assert torch.equal(torch.get_rng_state(), drawn)


def test_noise_between_blocks_is_no_difference_and_hides_none() -> None:
    def noisy(layer: nn.Module, x: Tensor, shared: Tensor, index: int) -> Any:
        return layer(nn.functional.dropout(x, 0.3), shared)[0], shared

    def pairs(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
        return loss_of(model, ids, labels).square()

    for groups in (None, 2):
        for loss in (loss_of, pairs):
            model = around(noisy)
            options = {"micro_batch_size": 4, "blocks": "layers", "blocks_on": "cpu", "groups": groups}
            step = TrainStep(model, OPTIMIZERS["sgd"](model.parameters()), compute_loss=loss, **options)
            with contextlib.nullcontext() if loss is loss_of else pytest.raises(NotEquivalentError, match="differ"):
                step(*batches(rows=8, count=1)[0])
            assert step.updates == (loss is loss_of)

"""Second passes leave nothing behind, and what stops halfway says so."""

from __future__ import annotations

import random
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from gradaccum.errors import NotEquivalentError
from tests.reference import FLOAT64, relative_error
from tests.torch.layers.test_blocks import (
    Layer,
    Network,
    assert_same_updates,
    batches,
    build,
    loss_of,
    network,
    unchanged,
)


def test_hooks_that_a_loss_registers_and_removes_after_its_pass_see_each_pass_once() -> None:
    captured: list[Tensor] = []

    def compute_loss(model: Any, ids: Tensor, labels: Tensor) -> Any:
        captured.clear()
        handles = [layer.register_forward_hook(lambda *call: captured.append(call[2][0])) for layer in model.layers]
        loss = loss_of(model, ids, labels)
        for handle in handles:
            handle.remove()
        assert len(captured) == 3
        return loss + 0.1 * sum(x.square().mean() for x in captured)

    for update in ("after_backward", "in_backward"):
        model = network()
        assert_same_updates(model, batches(), compute_loss, size=3, update=update)
        assert not any(module._forward_hooks for module in model.modules())


class Scaled(Network):
    """With a graph between the blocks, which the loss goes through, too."""

    skips = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        shared, skipped = self.position(x), x
        for layer in self.layers:
            x = torch.tanh(x)
            skipped = skipped + x if self.skips else skipped
            x, shared = layer(x, shared)
        return self.head(self.norm(x + skipped))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by torch.compile
@pytest.mark.parametrize("kind", ["blocks", "between", "skips"])
def test_compiled_blocks_make_the_large_batchs_update(kind: str) -> None:
    torch.manual_seed(0)
    model = (network() if kind == "blocks" else Scaled()).double()
    model.skips = kind == "skips"
    torch.compiler.reset()
    for layer in model.layers if kind != "skips" else ():  # compiled ones refuse to retain what they donate
        layer.compile(backend="aot_eager")
    assert_same_updates(model, batches(count=2), loss_of, size=3)


class Counting(Layer):
    """Counts its calls."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().forward(*args, **kwargs)


def test_second_passes_move_no_attributes() -> None:
    model = network()
    model.layers = nn.ModuleList([Counting(6) for _ in range(3)]).double()
    model.forward = _counted(model)  # type: ignore[method-assign]  # as wrappers of models do
    build(model)(*batches()[0])
    micro_batches = -(-len(batches()[0][0]) // 3)
    assert [layer.calls for layer in model.layers] == [micro_batches] * 3
    assert model.calls == micro_batches


def _counted(model: Any) -> Any:
    model.calls = 0

    def forward(ids: Tensor) -> Tensor:
        model.calls += 1
        return Network.forward(model, ids)

    return forward


class Checkpointed(Layer):
    """Passes no gradient on where its input wants none, as reentrant checkpoints do."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def run(*inner: Any) -> Any:
            return Layer.forward(self, *inner, **kwargs)

        return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_over_a_frozen_stem_have_the_gradients_that_they_have_without_blocks() -> None:
    for shared in (True, False):
        model = network()
        model.layers = nn.ModuleList([Checkpointed(6) for _ in range(3)]).double()
        model.embedding.requires_grad_(False)
        model.position.requires_grad_(shared)
        assert_same_updates(model, batches(), loss_of, size=3, verify=False)
        assert any(p.grad is not None for p in model.layers.parameters()) == shared


class Reading(Layer):
    """Reads the weight of another layer, which is not among its modules."""

    other: list[Layer]

    def forward(self, x: Tensor, shared: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return super().forward(x + 0.1 * self.other[0].norm.weight, shared, scale=scale)


def test_gradients_that_would_come_after_their_update_are_refused_before_it() -> None:
    model = network()
    first = Reading(6).double()
    first.other = [model.layers[2]]
    model.layers[0] = first
    late = r"updated before their gradient is complete: 'layers.2.norm.weight'"
    with unchanged(model), pytest.raises(NotEquivalentError, match=late):
        build(model, blocks="layers", update="in_backward")(*batches()[0])
    assert_same_updates(model, batches(), loss_of, size=3, blocks="layers")


def test_a_folder_without_room_is_an_error_that_names_it_and_nothing_is_updated(tmp_path: Path) -> None:
    model = network()
    step = build(model, blocks="layers", update="in_backward", offload=tmp_path, verify=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
        full = rf"could not be written to the folder of\s+offload='{tmp_path}'"
        with unchanged(model), pytest.raises(OSError, match=full):
            step(*batches()[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    shutil.rmtree(tmp_path)
    with unchanged(model), pytest.raises(OSError, match="it is gone"):
        step(*batches()[0])
    tmp_path.mkdir()
    torch.manual_seed(0)
    assert step(*batches()[0]).isfinite()


def _drawn() -> float:
    return random.random() + np.random.rand()  # noqa: NPY002  # the global one, which is replayed


class Drawing(Layer):
    """Draws from Python's and NumPy's generators, at first or from some update on."""

    begins = 0

    def forward(self, x: Tensor, shared: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        drawn = _drawn() if Drawing.begins <= 0 else 1.0
        return super().forward(x * drawn, shared, scale=scale)


@pytest.mark.parametrize("begins", [0, 2])
def test_what_blocks_draw_from_python_and_numpy_is_replayed_also_where_they_begin_with_it_later(begins: int) -> None:
    updated = []
    for blocks in (None, "layers"):
        model = network()
        model.layers = nn.ModuleList([Drawing(6) for _ in range(3)]).double()
        torch.manual_seed(0)
        for p in model.layers.parameters():
            nn.init.normal_(p, std=0.3)
        step = build(model, blocks=blocks, verify=False)
        random.seed(3)
        np.random.seed(4)  # noqa: NPY002  # as above
        Drawing.begins, losses = begins, []
        for batch in batches():
            losses.append(step(*batch))
            Drawing.begins -= 1
        updated.append([*model.parameters(), *losses, torch.tensor(_drawn(), dtype=torch.float64)])
    assert relative_error(*updated) <= FLOAT64

"""Second passes leave nothing behind; what can't go layer by layer is an error before anything is updated."""

from __future__ import annotations

import functools
import random
import resource
import shutil
import signal
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from gradaccum.errors import NotEquivalentError
from gradaccum.torch import TrainStep
from tests.reference import FLOAT64, relative_error
from tests.torch.layers import test_blocks
from tests.torch.layers.test_blocks import (
    Layer,
    Network,
    as_it_is,
    assert_same_updates,
    batches,
    build,
    doing,
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


def counts(layer: Any, x: Tensor) -> Tensor:
    layer.calls = getattr(layer, "calls", 0) + 1
    return x


def test_second_passes_move_no_attributes() -> None:
    model: Any = doing(counts)

    def forward(ids: Tensor) -> Tensor:  # as wrappers of models do
        counts(model, ids)
        return Network.forward(model, ids)

    model.forward = forward
    build(model)(*batches()[0])
    assert [module.calls for module in (model, *model.layers)] == [-(-len(batches()[0][0]) // 3)] * 4


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


def test_gradients_that_would_come_after_their_update_are_refused_before_it() -> None:
    model = doing(lambda layer, x: x + 0.1 * layer.other[0].norm.weight, places=[0])
    model.layers[0].other = [model.layers[2]]  # which is not among its modules
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


@pytest.mark.parametrize("begins", [0, 2])
def test_what_blocks_draw_from_python_and_numpy_is_replayed_also_where_they_begin_with_it_later(begins: int) -> None:
    updated = []
    for blocks in (None, "layers"):
        left, losses = begins, []

        def draws(layer: Any, x: Tensor) -> Tensor:
            return x * _drawn() if left <= 0 else x  # noqa: B023  # as of now

        model = doing(draws)
        torch.manual_seed(0)
        for p in model.layers.parameters():
            nn.init.normal_(p, std=0.3)
        step = build(model, blocks=blocks, verify=False)
        random.seed(3)
        np.random.seed(4)  # noqa: NPY002  # as above
        for batch in batches():
            losses.append(step(*batch))
            left -= 1
        updated.append([*model.parameters(), *losses, torch.tensor(_drawn(), dtype=torch.float64)])
    assert relative_error(*updated) <= FLOAT64


def in_twos(model: nn.Module, blocks: Any, **options: Any) -> TrainStep:
    return test_blocks.build(model, blocks=blocks, micro_batch_size=2, **options)


def test_blocks_that_are_none() -> None:
    model = network()
    for blocks, error, words in (
        (7, TypeError, "`blocks` must be an nn.ModuleList, its dotted path, a list of modules, or 'auto'. Received: 7"),
        ([model.norm, 3], TypeError, "Received: blocks[1] of type int"),
        ([], ValueError, "at least one module"),
        ([model.norm, Layer(6)], ValueError, "blocks[1], of type Layer, is not a module of the model"),
        ("encoder.layers", ValueError, "Received: blocks='encoder.layers'. Lists of modules are at 'layers'."),
        ([model.norm, model.norm], ValueError, "The block 'norm' is in `blocks` twice"),
        ([model.layers[0], model.layers[0].inner], ValueError, "The blocks 'layers.0' and 'layers.0.inner' have"),
    ):
        with pytest.raises(error) as raised:
            in_twos(model, blocks)
        assert words in str(raised.value)
    with pytest.raises(ValueError, match="blocks='auto' looks for"):
        in_twos(nn.Linear(2, 2), "auto")


class Wrong(Network):
    """Calls its layers as it is told."""

    order: Sequence[int] = (0, 1, 2)
    around: Callable[..., Any] | None = None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        shared = self.position(x)
        for index in self.order:
            layer = self.layers[index]
            x, shared = layer(x, shared) if self.around is None else self.around(layer, x, shared)
        return self.head(self.norm(x))


def refused(model: Network, error: type[Exception], **options: Any) -> str:
    """What is raised; nothing may have changed by then."""
    step = in_twos(model, model.layers, verify=False, **options)
    with unchanged(model), pytest.raises(error) as raised:
        step(*batches()[0])
    assert type(model.layers[0]) is Layer
    assert step.updates == 0
    return str(raised.value)


def wrong(order: Sequence[int], around: Callable[..., Any] | None = None) -> Wrong:
    torch.manual_seed(0)
    model = Wrong().double()
    model.order, model.around = order, around
    return model


@pytest.mark.parametrize("options", [{}, {"update": "in_backward"}, {"update": "in_backward", "on": "cpu"}])
def test_blocks_that_are_not_called_once_each_in_order(options: dict[str, Any]) -> None:
    def short(layer: nn.Module, x: Tensor, shared: Tensor) -> Any:  # in a later micro-batch alone
        return (x, shared) if layer is later.layers[1] and len(x) == 1 else layer(x, shared)

    later = wrong([0, 1, 2], short)
    for model, words in (
        (wrong([0, 1]), "The block 'layers.2' was not called."),
        (wrong([0, 1, 1, 2]), "The block 'layers.1' was called twice."),
        (wrong([0, 2, 1]), "The block 'layers.1' was not called before 'layers.2'."),
        (later, "The block 'layers.1' was not called before 'layers.2'."),
    ):
        assert words in refused(model, ValueError, **options)


def test_a_checkpoint_around_the_blocks_is_told_to_leave() -> None:
    def reentrant(*args: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(*args, use_reentrant=True)

    assert "The block 'layers.1' was called in a backward pass." in refused(wrong([0, 1, 2], reentrant), ValueError)

    def functional(layer: nn.Module, *args: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(layer, *args, use_reentrant=False)

    assert_same_updates(wrong([0, 1, 2], functional), batches(), loss_of)


def test_a_block_that_edits_its_input_in_place() -> None:
    def doubled(layer: nn.Module, args: Any) -> None:
        args[0].mul_(2)

    for place, words in ((1, "an input of shape (2, 5, 6) in place"), (2, "an input in place")):
        model = wrong([0, 1, 2])
        model.layers[place].register_forward_pre_hook(doubled)
        assert f"The block 'layers.{place}' edits {words}" in refused(model, ValueError)


def remembers(layer: Any, x: Tensor) -> Tensor:
    """Keeps a mean from one call to the next."""
    layer.mean = 0.5 * getattr(layer, "mean", 0.0) + 0.5 * x.detach().square().mean()
    return x * (1 + layer.mean)


def leaves_a_loss(layer: Any, x: Tensor) -> None:
    """Where the model's loss finds it."""
    layer.penalty = x.square().mean()


@pytest.mark.parametrize("options", [{}, {"update": "in_backward", "on": "cpu"}])
def test_what_a_block_keeps_across_rows_or_leaves_to_the_loss_in_an_attribute_is_named(options: dict[str, Any]) -> None:
    remembering, aside = doing(remembers, places=[1]), doing(as_it_is, leaves_a_loss, places=[1])

    def penalised(model: Any, *batch: Tensor) -> Tensor:
        return loss_of(model, *batch) + model.layers[1].penalty

    for model, name, loss in ((remembering, "mean", loss_of), (aside, "penalty", penalised)):
        with unchanged(model), pytest.raises(NotEquivalentError, match=rf"the block 'layers\.1' \({name}\)"):
            in_twos(model, model.layers, compute_loss=loss, **options)(*batches()[0])


def test_a_model_that_is_compiled_whole_is_told_to_compile_its_blocks() -> None:
    compiled = torch.compile(network(), backend="eager")
    with pytest.raises(ValueError, match="Compile each block instead"):
        in_twos(compiled, "auto")  # type: ignore[arg-type]  # a module, as it says itself


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


class ReadsAttribute(nn.Module):
    """A block that reads what the model has left in an attribute of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.condition = nn.Linear(6, 6, dtype=torch.float64), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.condition


class LeavesAttributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ReadsAttribute() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.condition = x[:, :1].cos()
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("options", "place"), [({}, 1), ({"update": "in_backward", "on": "cpu"}, 2)])
def test_a_block_that_reads_what_the_model_leaves_in_an_attribute_is_named(options: dict[str, Any], place: int) -> None:
    model, x = LeavesAttributes(), torch.randn(16, 6, dtype=torch.float64)
    step = in_twos(model, model.layers, compute_loss=mse, **options)
    again = rf"the block 'layers\.{place}' failed there.*If it reads what the model"
    with unchanged(model), pytest.raises(NotEquivalentError, match=again):
        step(x, x)


class CallsArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor, given: Any) -> Tensor:
        return given.scale * self.linear(x) if hasattr(given, "scale") else given(self.linear(x))


class WithArgument(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers, self.make = nn.ModuleList(CallsArgument() for _ in range(2)), make

    def forward(self, x: Tensor) -> Tensor:
        given = self.make(x[:, :1].cos())
        for layer in self.layers:
            x = torch.tanh(layer(x, given))
        return x


class Uncopied:
    def __init__(self, scale: Tensor) -> None:
        self.scale = scale

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("neither copied nor pickled")


MAKE: dict[str, Callable[[Tensor], Any]] = {
    "C": lambda c: functools.partial(torch.mul, c),
    "plain": lambda c: types.SimpleNamespace(scale=c),
    "not to be copied": Uncopied,
}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_blocks_may_be_called_with_objects_of_any_class(make: Callable[[Tensor], Any]) -> None:
    x = torch.randn(16, 6, dtype=torch.float64)
    assert_same_updates(WithArgument(make), [(x, x)], mse, size=4)

"""What can't go layer by layer is an error that names the block, before anything is updated."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from gradaccum.errors import NotEquivalentError
from gradaccum.torch import TrainStep
from tests.torch.layers import test_blocks
from tests.torch.layers.test_blocks import Layer, Network, assert_same_updates, batches, loss_of, network, unchanged


def build(model: nn.Module, blocks: Any, **options: Any) -> TrainStep:
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
            build(model, blocks)
        assert words in str(raised.value)
    with pytest.raises(ValueError, match="blocks='auto' looks for"):
        build(nn.Linear(2, 2), "auto")


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
    step = build(model, model.layers, verify=False, **options)
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
    for order, words in (
        ([0, 1], "The block 'layers.2' was not called."),
        ([0, 1, 1, 2], "The block 'layers.1' was called twice."),
        ([0, 2, 1], "The block 'layers.1' was not called before 'layers.2'."),
    ):
        assert words in refused(wrong(order), ValueError, **options)


@pytest.mark.parametrize("on", [None, "cpu"])
def test_a_later_micro_batch_that_leaves_a_block_out_is_refused_before_anything_is_updated(on: Any) -> None:
    def short(layer: nn.Module, x: Tensor, shared: Tensor) -> Any:
        return (x, shared) if layer is model.layers[1] and len(x) == 1 else layer(x, shared)

    model = wrong([0, 1, 2], short)
    options = {"update": "in_backward", "on": on}
    assert "The block 'layers.1' was not called before 'layers.2'." in refused(model, ValueError, **options)


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


class Remembering(Layer):
    """Keeps a mean from one call to the next."""

    mean: Tensor | float = 0.0

    def forward(self, x: Tensor, shared: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().square().mean()
        return super().forward(x * (1 + self.mean), shared, scale=scale)


def test_a_block_that_keeps_state_across_rows_is_named_by_the_proof() -> None:
    model = network()
    for options in ({}, {"update": "in_backward", "on": "cpu"}):
        model.layers[1] = Remembering(6).double()
        with unchanged(model), pytest.raises(NotEquivalentError, match=r"the block 'layers\.1' \(mean\)"):
            build(model, model.layers, **options)(*batches()[0])


class Aside(Layer):
    """Leaves a loss of its own where the model's loss finds it."""

    penalty: Tensor

    def forward(self, x: Tensor, shared: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        outputs = super().forward(x, shared, scale=scale)
        self.penalty = outputs[0].square().mean()
        return outputs


def test_a_loss_that_a_block_leaves_aside_is_no_silent_error() -> None:
    model = network()
    model.layers[1] = Aside(6).double()
    with pytest.raises(NotEquivalentError, match=r"the block 'layers\.1' \(penalty\)"):
        build(model, model.layers, compute_loss=lambda m, *batch: loss_of(m, *batch) + m.layers[1].penalty)(
            *batches()[0]
        )


def test_a_model_that_is_compiled_whole_is_told_to_compile_its_blocks() -> None:
    compiled = torch.compile(network(), backend="eager")
    with pytest.raises(ValueError, match="Compile each block instead"):
        build(compiled, "auto")  # type: ignore[arg-type]  # a module, as it says itself


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
    step = build(model, model.layers, compute_loss=mse, **options)
    again = rf"the block 'layers\.{place}' again.*Does it read what the model"
    with unchanged(model), pytest.raises(NotEquivalentError, match=again):
        step(x, x)


class CallsArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor, given: Any) -> Tensor:
        return given.scale * self.linear(x) if isinstance(given, types.SimpleNamespace) else given(self.linear(x))


class WithArgument(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers, self.make = nn.ModuleList(CallsArgument() for _ in range(2)), make

    def forward(self, x: Tensor) -> Tensor:
        given = self.make(x[:, :1].cos())
        for layer in self.layers:
            x = torch.tanh(layer(x, given))
        return x


@pytest.mark.parametrize(
    "make", [lambda c: functools.partial(torch.mul, c), lambda c: types.SimpleNamespace(scale=c)], ids=["C", "plain"]
)
def test_blocks_may_be_called_with_objects_of_any_class(make: Callable[[Tensor], Any]) -> None:
    x = torch.randn(16, 6, dtype=torch.float64)
    assert_same_updates(WithArgument(make), [(x, x)], mse, size=4)

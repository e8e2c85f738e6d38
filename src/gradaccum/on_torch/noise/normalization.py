"""The noise of rows, as normalization layers see it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradaccum.core.noise import WINDOWS, Norms
from gradaccum.on_torch.batch import map_leaves
from gradaccum.on_torch.noise.meter import Measured, NoiseMeter

__all__ = ["NormalizationMeter"]

logger = logging.getLogger("gradaccum")

_APART = 0.02
"""By which part of their gradient the rows' sum may miss it, in half precision: else something else has added to it."""


class NormalizationMeter(NoiseMeter):
    """The noise of rows, as it shows in normalization layers alone, by the rows of a window's first micro-batch.

    A LayerNorm's or RMSNorm's gradient for each row costs little: that of the output, times the normalised input,
    summed over the row. So the smaller of the two gradients is one row's, and a window of one micro-batch can be
    measured, too. What is found is the noise scale of these layers, which that of a transformer was found to follow.

    Source: Gray, Tiwari, Bergsma and Hestness, "Normalization Layer Per-Example Gradients are Sufficient to Predict
    Gradient Noise Scale in Transformers", 2024 (arXiv 2411.00999).
    """

    def __init__(self, model: nn.Module, keep: int = WINDOWS) -> None:
        self._layers = {
            id(module): module
            for module in model.modules()
            if type(module).__name__.endswith(("LayerNorm", "RMSNorm")) and _weights(module)
        }
        if not self._layers:
            raise ValueError(
                'noise_scale="layer_norm" measures the rows\' gradients of normalization layers, and the model has no '
                "LayerNorm or RMSNorm with trained weights. Use noise_scale=True."
            )
        if any(hasattr(p, "to_local") for module in self._layers.values() for p in _weights(module).values()):
            raise ValueError(
                'noise_scale="layer_norm" looks at whole gradients of normalization layers, and of a sharded model '
                "each rank has a part. Use noise_scale=True."
            )
        self._told = False
        super().__init__(keep)
        listener = _Listener(self)
        handles = [m.register_forward_hook(listener, with_kwargs=True) for m in self._layers.values()]
        weakref.finalize(self, _remove, handles).atexit = False

    def restart(self) -> None:
        super().restart()
        self._rows: dict[Tensor, Tensor] = {}
        """For each weight, the gradient of each row: (rows, *weight.shape)."""
        self._compared: list[Tensor] | None = None
        """Weights whose rows have been measured."""
        self._inside = False

    def called(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A layer has been called: look at the gradient of what it returned, when that comes."""
        wanted = self.waiting and not self._inside and id(module) in self._layers
        if not wanted or not isinstance(output, Tensor) or not output.requires_grad:
            return
        args, kwargs = map_leaves(_detached, args), map_leaves(_detached, kwargs)

        def arrived(gradient: Tensor) -> None:
            if self.waiting:
                self._add(module, args, kwargs, gradient.detach())

        output.register_hook(arrived)

    @torch.no_grad()
    def _add(self, module: nn.Module, args: Any, kwargs: Any, gradient: Tensor) -> None:
        weights = _weights(module)
        dtype = next(iter(weights.values())).dtype  # which autocast gave what came narrower
        args, kwargs = (map_leaves(lambda leaf: _as(leaf, dtype), given) for given in (args, kwargs))
        one, zero = ({name: torch.full_like(p, float(i)) for name, p in weights.items()} for i in (1, 0))
        self._inside = True
        try:  # what is multiplied with the weight, whatever the layer adds to that
            for name in weights.keys() & {"bias"}:
                one[name] = zero[name]
            normalised = functional_call(module, one, args, kwargs) - functional_call(module, zero, args, kwargs)
        finally:
            self._inside = False
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        for name, weight in weights.items():
            rows = wide if name == "bias" else wide * normalised
            between = tuple(range(1, rows.dim() - weight.dim()))
            rows = rows.sum(between) if between else rows
            before = self._rows.get(weight, rows.new_zeros(()))
            fits = not before.dim() or before.shape == rows.shape  # else another pass has left something
            self._rows[weight] = before + rows if fits else torch.full_like(rows, torch.nan)

    @torch.no_grad()
    def micro_batch(self, gradients: Sequence[Tensor], size: float, multiple: float | Tensor) -> None:
        """Measure the rows of the window's first micro-batch of nonzero weight, for weights with these gradients."""
        rows_of, self._rows, own = self._rows, {}, set(map(id, gradients))
        self._compared = [weight for weight in rows_of if id(weight.grad) in own]
        found = [(rows_of[weight], weight.grad) for weight in self._compared if weight.grad is not None]
        if not self.waiting or not found or (isinstance(multiple, float) and multiple == 0.0):
            return
        counts = {len(rows) for rows, _ in found}
        count = counts.pop()
        if counts or (self.counts_rows and count != size):
            others = f"{counts.pop()} in another layer" if counts else f"a micro-batch of {size:g} rows"
            raise ValueError(
                'noise_scale="layer_norm" expects rows in the first dimension of what normalization layers are called '
                f"with. Received: {count} there, and {others}. With packed rows, or rows in another dimension, use "
                "noise_scale=True."
            )
        sums, held = [rows.sum(0) for rows, _ in found], [gradient.to(rows.dtype) for rows, gradient in found]
        told, here = torch.cat([one.flatten() for one in sums]), torch.cat([one.flatten() for one in held])
        factor = told.dot(here) / told.dot(told)  # what the gradient was multiplied with on its way from the layer
        adds_up = torch.linalg.vector_norm(here - factor * told) <= _APART * torch.linalg.vector_norm(here)
        square = torch.stack([rows.square().sum() for rows, _ in found]).sum() * factor.square() * count
        small = torch.where(adds_up, square, torch.nan).double().sqrt().reshape(1)
        self._first = Measured(small, multiple, float(size) / count)

    def window(self, gradients: Sequence[Tensor], size: float, multiple: float | Tensor = 1.0) -> None:
        """Measure the finished gradient of these layers, before clipping."""
        weights, own = self._compared, set(map(id, gradients))
        if weights is None:  # the window's first micro-batch was measured before a checkpoint
            weights = [weight for module in self._layers.values() for weight in _weights(module).values()]
        super().window([w.grad for w in weights if w.grad is not None and id(w.grad) in own], size, multiple)

    def windows(self) -> list[Norms]:
        found = super().windows()
        left_out = sum(not norms.usable for norms in found)
        if left_out and not self._told:
            self._told = True
            logger.warning(
                "%d of %d windows are left out of the noise scale: the rows' gradients of the normalization layers "
                "don't add up to the gradient of their weights, or one isn't finite. Something else has added to "
                "one of them: another backward pass, or a weight that is used elsewhere. noise_scale=True measures "
                "such windows, too.",
                left_out,
                len(found),
            )
        return found


class _Listener:
    """A forward hook. Copies of the model, and what is pickled, tell nobody."""

    def __init__(self, meter: NormalizationMeter | None = None) -> None:
        self._meter = None if meter is None else weakref.ref(meter)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        meter = None if self._meter is None else self._meter()
        if meter is not None:
            meter.called(module, args, kwargs, output)

    def __reduce__(self) -> Any:
        return _Listener, ()


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """A layer's own, that are trained."""
    return {name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad}


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def _as(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf

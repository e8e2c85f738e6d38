"""Measure the gradient noise scale while training: by gradients of two sizes, or by rows in normalization layers."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradaccum.core.noise import WINDOWS, NoiseScale, Norms, estimate
from gradaccum.on_torch.batch import map_leaves
from gradaccum.on_torch.foreach import clip_norm_

logger = logging.getLogger("gradaccum")

NoiseChoice = Literal[False, True, "layer_norm"]
"""Whether the noise scale is measured; by which gradients, if not by all."""


def checked_noise(noise_scale: NoiseChoice, nonfinite: str = "propagate") -> NoiseChoice:
    """Whether the noise scale is measured, and how."""
    if not isinstance(noise_scale, bool) and noise_scale != "layer_norm":
        raise ValueError(f"`noise_scale` must be a bool or 'layer_norm'. Received: noise_scale={noise_scale!r}.")
    if noise_scale == "layer_norm" and nonfinite == "skip_micro_batch":
        raise ValueError(
            'noise_scale="layer_norm" compares rows with `.grad`, but nonfinite="skip_micro_batch" keeps the sum '
            "elsewhere. Use noise_scale=True."
        )
    return noise_scale


def noise_meter(noise_scale: NoiseChoice | None, model: nn.Module | None) -> NoiseMeter | None:
    """What measures the noise scale as it was asked for: nothing, gradients of two sizes, or normalization layers."""
    if noise_scale != "layer_norm":
        return NoiseMeter() if noise_scale else None
    if model is None:
        raise ValueError('noise_scale="layer_norm" looks at the model\'s layers. Pass `model` as well.')
    return NormalizationMeter(model)


@contextlib.contextmanager
def inside_step(optimizer: Any, around: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Have an optimizer's step run inside of a context, and its hooks outside of it: they see its own hyperparameters.

    Example:
        >>> from types import SimpleNamespace
        >>> optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
        >>> handle = optimizer.register_step_post_hook(lambda *_: print("a hook"))
        >>> with inside_step(optimizer, contextlib.closing(SimpleNamespace(close=lambda: print("the end")))):
        ...     optimizer.step()
        the end
        a hook
    """
    if not getattr(type(optimizer).step, "hooked", None):  # no optimizer of torch's kind
        with around:
            yield
        return
    with contextlib.ExitStack() as entered, contextlib.ExitStack() as hooks:
        depth = 0  # torch calls the hooks of a class whose step() calls super().step() once for each of the two

        def begins(*_: Any) -> None:
            nonlocal depth
            depth += 1
            if depth == 1:
                entered.enter_context(around)

        def ends(*_: Any) -> None:
            nonlocal depth
            depth -= 1
            if depth == 0:
                entered.close()

        after = optimizer.register_step_post_hook(ends)
        hooks.callback(after.remove)
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)
        before = optimizer.register_step_pre_hook(begins)
        hooks.callback(before.remove)
        yield


class _Measured(NamedTuple):
    """Norms of gradients, on the device: the arithmetic is done in `estimate`."""

    norms: Tensor
    multiple: float | Tensor
    size: float

    @classmethod
    def read(cls, square: float, size: float) -> _Measured:
        """A squared norm that was read before."""
        return cls(torch.tensor([square], dtype=torch.float64).sqrt(), 1.0, size)

    def square(self) -> Tensor:
        """`|gradients / multiple|^2`."""
        multiple = self.multiple
        if isinstance(multiple, Tensor):
            multiple = multiple.detach().to(self.norms.device)
        return (self.norms.double() / multiple).square().sum()


class NoiseMeter:
    """Two squared norms per window: of its first micro-batch's gradient, and of the finished mean.

    Autograd adds into `p.grad`, so only the first micro-batch's gradient is ever there by itself. Those of the others
    would sharpen `tr(S)`, where the answer hangs on `|G|^2`. The norms stay on the device until `estimate` is called.

    The first micro-batch must be a random sample of the window's rows: where rows are sorted, by length say, the
    spread that the order adds counts as noise.
    """

    def __init__(self, keep: int = WINDOWS) -> None:
        self.unit, self.counts_rows = "rows", False
        """What sizes count, and whether that is certainly rows."""
        self._records: deque[tuple[_Measured, _Measured]] = deque(maxlen=keep)
        self.restart()

    def restart(self) -> None:
        """Begin a window; measurements of an unfinished one are dropped."""
        self._first: _Measured | None = None

    @property
    def waiting(self) -> bool:
        """Whether `micro_batch` is to be called for the next micro-batch."""
        return self._first is None

    def micro_batch(self, gradients: Sequence[Tensor], size: float, multiple: float | Tensor) -> None:
        """Measure the window's first micro-batch of nonzero weight."""
        if self._first is None and gradients and not (isinstance(multiple, float) and multiple == 0.0):
            self._first = _Measured(_norms(gradients), multiple, float(size))

    def window(self, gradients: Sequence[Tensor], size: float, multiple: float | Tensor = 1.0) -> None:
        """Measure the finished gradient, before clipping."""
        # All ranks take part in the norm of a sharded gradient, those that have nothing to compare it with as well.
        sharded = any(hasattr(gradient, "to_local") for gradient in gradients)
        norm = clip_norm_(list(gradients), None).reshape(1) if sharded else None
        if self._first is not None and gradients and size > self._first.size:
            found = _norms(gradients) if norm is None else norm
            self._records.append((self._first, _Measured(found, multiple, float(size))))
        self.restart()

    def estimate(self) -> NoiseScale:
        """The noise scale over the kept windows. Waits for the device."""
        return estimate(self.windows(), unit=self.unit)

    def windows(self) -> list[Norms]:
        """What was measured, as numbers. Waits for the device."""
        found = [one.square() for pair in self._records for one in pair]
        squares = torch.stack([square.to(found[0].device) for square in found]).tolist() if found else []
        sizes = [(small.size, large.size) for small, large in self._records]
        return [Norms(s, n, g, m) for s, g, (n, m) in zip(squares[::2], squares[1::2], sizes)]

    def state_dict(self) -> dict[str, Any]:
        """What was measured, and the first micro-batch of the open window, as numbers."""
        first = None if self._first is None else (self._first.square().item(), self._first.size)
        return {"windows": [tuple(norms) for norms in self.windows()], "first": first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._records.clear()
        for small, small_size, large, large_size in state["windows"]:
            self._records.append((_Measured.read(small, small_size), _Measured.read(large, large_size)))
        self._first = None if state["first"] is None else _Measured.read(*state["first"])


@torch.no_grad()
def _norms(tensors: Iterable[Tensor]) -> Tensor:
    """The 2-norm of each tensor, in one vector on the first one's device; half precision is summed in float32."""
    dense = [t.coalesce().values() if t.is_sparse else t for t in tensors]
    narrow = any(t.dtype in (torch.float16, torch.bfloat16) for t in dense)
    found = torch._foreach_norm(dense, 2, dtype=torch.float32 if narrow else None)
    device = dense[0].device
    return torch.stack([norm if norm.device == device else norm.to(device) for norm in found])


_TOLERANCE = 0.02
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
                'noise_scale="layer_norm" looks at whole gradients of normalization layers, but in a sharded model '
                "each rank has only a part. Use noise_scale=True."
            )
        self._warned = False
        super().__init__(keep)
        listener = _Listener(self)
        for layer in self._layers.values():
            handle = layer.register_forward_hook(listener, with_kwargs=True)
            weakref.finalize(self, handle.remove).atexit = False

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
        args, kwargs = map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (args, kwargs))

        def arrived(gradient: Tensor) -> None:
            if self.waiting:
                self._add(module, args, kwargs, gradient.detach())

        output.register_hook(arrived)

    @torch.no_grad()
    def _add(self, module: nn.Module, args: Any, kwargs: Any, gradient: Tensor) -> None:
        weights = _weights(module)
        dtype = next(iter(weights.values())).dtype  # which autocast gave what came narrower
        args, kwargs = map_leaves(lambda leaf: leaf.to(dtype) if _is_floating(leaf) else leaf, (args, kwargs))
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
        count = self._rows_of([rows for rows, _ in found], size)
        total = torch.cat([rows.sum(0).flatten() for rows, _ in found])
        held = torch.cat([gradient.to(rows.dtype).flatten() for rows, gradient in found])
        factor = total.dot(held) / total.dot(total)  # what it was multiplied with on its way from the layer
        adds_up = torch.linalg.vector_norm(held - factor * total) <= _TOLERANCE * torch.linalg.vector_norm(held)
        square = torch.stack([rows.square().sum() for rows, _ in found]).sum() * factor.square() * count
        small = torch.where(adds_up, square, torch.nan).double().sqrt().reshape(1)
        self._first = _Measured(small, multiple, float(size) / count)

    def _rows_of(self, gradients: Sequence[Tensor], size: float) -> int:
        """How many rows these are of, which is to be the micro-batch's size."""
        counts = {len(rows) for rows in gradients}
        count = counts.pop()
        if counts or (self.counts_rows and count != size):
            others = f"{counts.pop()} in another layer" if counts else f"a micro-batch of {size:g} rows"
            raise ValueError(
                'noise_scale="layer_norm" expects rows in the first dimension of normalization layers\' inputs. '
                f"Received: {count} there, and {others}. With packed rows, or rows in another dimension, use "
                "noise_scale=True."
            )
        return count

    def window(self, gradients: Sequence[Tensor], size: float, multiple: float | Tensor = 1.0) -> None:
        """Measure the finished gradient of these layers, before clipping."""
        weights, own = self._compared, set(map(id, gradients))
        if weights is None:  # the window's first micro-batch was measured before a checkpoint
            weights = [weight for module in self._layers.values() for weight in _weights(module).values()]
        super().window([w.grad for w in weights if w.grad is not None and id(w.grad) in own], size, multiple)

    def windows(self) -> list[Norms]:
        found = super().windows()
        left_out = sum(not norms.usable for norms in found)
        if left_out and not self._warned:
            self._warned = True
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


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()

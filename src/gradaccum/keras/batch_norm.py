"""What BatchNormalization does while a batch runs in micro-batches.

It normalises each micro-batch by that micro-batch's mean and variance, so its gradients differ from the large batch's.
Users choose what becomes of its moving statistics, or that it normalises by these.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import keras
from keras import ops

from gradaccum.keras import private

BatchNorm = Literal["warn", "micro", "pooled", "frozen"]
BatchNormOrExact = Literal["warn", "micro", "pooled", "frozen", "exact"]


def batch_norms_of(model: Any) -> list[Any]:
    """The BatchNormalization layers that normalise by the statistics of what they see in training."""
    return [
        layer
        for layer in private.layers_in(model)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    ]


def checked_batch_norm(batch_norm: Any) -> None:
    """Raise a ValueError for what is no `BatchNormOrExact`."""
    if batch_norm not in (known := get_args(BatchNormOrExact)):
        raise ValueError(f"`batch_norm` must be one of {known}. Received: batch_norm={batch_norm!r}.")


def warn(model: Any, batch_norm: BatchNormOrExact, named: set[str], stacklevel: int = 2) -> None:
    """For `"warn"`, name the BatchNormalization layers that aren't in `named` yet, which then holds them."""
    if batch_norm != "warn":
        return
    advice = (
        'Choose batch_norm="exact" (normalise by the whole batch), "pooled" (move the moving statistics once per '
        'update, by those of the whole batch), "frozen" (normalise by the moving statistics) or "micro" (leave it so), '
        "or use GroupNormalization or LayerNormalization."
    )
    warn_of_layers([layer.name for layer in batch_norms_of(model)], named, advice, stacklevel + 1)


def warn_of_layers(names: Sequence[str], named: set[str], advice: str, stacklevel: int = 2) -> None:
    """The same of these layers, with this advice."""
    names = [name for name in names if name not in named]
    if names:
        named.update(names)
        warnings.warn(
            "BatchNormalization normalises each micro-batch by itself, so updates differ from the large batch's: "
            f"{', '.join(map(repr, names))}. {advice}",
            stacklevel=stacklevel + 1,
        )


@contextlib.contextmanager
def during_micro_batch(layers: list[Any], batch_norm: BatchNormOrExact) -> Iterator[dict[int, Any]]:
    """While this is open, the layers do what `batch_norm` says.

    For `"pooled"`, the moving statistics hold the mean and variance of the latest micro-batch, as these are: pool them
    with `Pool`. Yields of each layer how many values its mask let through (None: no mask), for that.
    """
    valid: dict[int, Any] = {}
    if batch_norm not in ("pooled", "frozen"):
        yield valid
        return

    def replacement(index: int, layer: Any) -> Any:
        call = layer.call

        def frozen(inputs: Any, training: Any = None, mask: Any = None) -> Any:
            return call(inputs, training=False, mask=mask)

        def pooled(inputs: Any, training: Any = None, mask: Any = None) -> Any:
            if training:
                if index in valid:
                    raise ValueError(
                        f'batch_norm="pooled" needs layers that are called once per forward pass. Received: '
                        f'{layer.name!r}, which is called several times. Use batch_norm="micro" or "frozen".'
                    )
                valid[index] = None if mask is None else ops.sum(ops.cast(mask, layer.moving_mean.dtype))
            return call(inputs, training=training, mask=mask)

        return frozen if batch_norm == "frozen" else pooled

    # Without momentum, the moving statistics become those of this micro-batch, exactly.
    more = {"momentum": 0.0} if batch_norm == "pooled" else {}
    with contextlib.ExitStack() as stack:
        for index, layer in enumerate(layers):
            stack.enter_context(private.replaced(layer, call=replacement(index, layer), **more))
        yield valid


class Pool:
    """Mean and variance over all micro-batches, from those of each.

    After micro-batch i of `w_i` values per channel, with mean `m_i` and variance `v_i`:

        mean = sum_i w_i m_i / W        variance = sum_i w_i (v_i + (m_i - mean)^2) / W        W = sum_i w_i

    so that the variance between the micro-batches is in. Both are updated one micro-batch at a time (Chan, Golub and
    LeVeque, 1979), so nothing cancels. The state is a flat list of tensors that rides along in a backend's loop.
    """

    def __init__(self, layers: list[Any]) -> None:
        for layer in layers:
            if getattr(layer, "renorm", False):  # Keras before 3.14 has none
                raise ValueError(f'batch_norm="pooled" does not support renorm=True. Received: layer {layer.name!r}.')
        self.layers = layers

    @property
    def variables(self) -> list[Any]:
        """The moving statistics: mean and variance of each layer in turn."""
        return [variable for layer in self.layers for variable in (layer.moving_mean, layer.moving_variance)]

    def zeros(self) -> list[Any]:
        """The state before the first micro-batch: `W, mean, W * variance` of each layer."""
        means = [layer.moving_mean for layer in self.layers]
        return [ops.zeros(shape, mean.dtype) for mean in means for shape in ((), mean.shape, mean.shape)]

    def add(self, state: list[Any], statistics: list[Any], valid: dict[int, Any], rows: Any) -> list[Any]:
        """The state after a micro-batch of so many rows, whose means and variances `variables` held as `statistics`."""
        after = []
        for index in range(len(self.layers)):
            weight, mean, squares = state[3 * index : 3 * index + 3]
            new_mean, new_variance = statistics[2 * index : 2 * index + 2]
            masked = valid.get(index)
            new = ops.cast(rows if masked is None else masked, mean.dtype)
            total = weight + new
            part = new / ops.where(total > 0, total, ops.ones_like(total))
            difference = new_mean - mean
            after += [
                total,
                mean + difference * part,
                squares + new_variance * new + difference * difference * weight * part,
            ]
        return after

    def moved(self, state: list[Any], before: list[Any]) -> list[Any]:
        """The values of `variables` after the update: one step from `before` towards the pooled statistics."""
        after = []
        for index, layer in enumerate(self.layers):
            weight, mean, squares = state[3 * index : 3 * index + 3]
            variance = squares / ops.where(weight > 0, weight, ops.ones_like(weight))
            for old, new in zip(before[2 * index :], (mean, variance)):
                after.append(old * layer.momentum + new * (1.0 - layer.momentum))
        return after

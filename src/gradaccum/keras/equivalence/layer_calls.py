"""What goes into and comes out of each layer of a model: the search for those in which rows depend on each other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree
from keras.src import backend

from gradaccum.equivalence import Cause

__all__ = ["dotted", "draws", "layer_cause", "recorded", "relative_error", "same_rows", "switched_off"]


def dotted(model: Any, path: str) -> str:
    """The path of a layer or a variable inside a model, in dots as everywhere in reports."""
    return path.removeprefix(f"{model.name}/").replace("/", ".")


def layer_cause(layer: Any, path: str) -> Cause:
    kind = type(layer).__name__
    if isinstance(layer, keras.layers.BatchNormalization):
        return Cause(
            "batch_norm",
            path,
            f"{path!r} is a {kind}: it normalises each micro-batch by itself. Use GroupNormalization or "
            'LayerNormalization, or batch_norm="frozen".',
        )
    return Cause(
        "mixes_rows",
        path,
        f"{path!r} is a {kind} in which a row's output depends on the other rows of its batch: micro-batches can't "
        "give what the whole batch does.",
    )


@contextlib.contextmanager
def replaced(layers: Sequence[Any], replacement: Callable[[Any, Any], Any]) -> Iterator[None]:
    """While this is open, `layer.call` of each is `replacement(layer, call)`."""
    own = [vars(layer).get("call") for layer in layers]
    for layer in layers:
        vars(layer)["call"] = replacement(layer, layer.call)
    try:
        yield
    finally:
        for layer, call in zip(layers, own):
            del vars(layer)["call"]
            if call is not None:
                vars(layer)["call"] = call


def draws(layer: Any) -> bool:
    return layer._call_has_training_arg and any(
        isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values()
    )


def switched_off(layers: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    def off(layer: Any, call: Any) -> Any:
        return lambda *args, **kwargs: call(*args, **{**kwargs, "training": False})

    return replaced(layers, off)


@contextlib.contextmanager
def recorded(model: Any) -> Iterator[dict[str, tuple[Any, Any, Any]]]:
    """While this is open, what goes into and comes out of the first call of each layer is kept, by the layer's path."""
    calls: dict[str, tuple[Any, Any, Any]] = {}

    def keep(layer: Any, call: Any) -> Any:
        def recording(*args: Any, **kwargs: Any) -> Any:
            outputs = call(*args, **kwargs)
            # Inside a loop of the backend there are no numbers: such layers are left out.
            with contextlib.suppress(Exception):
                calls.setdefault(layer.path, (layer, _arrays((args, kwargs)), _arrays(outputs)))
            return outputs

        return recording

    leaves = [layer for layer in model._flatten_layers(include_self=False) if not layer._layers]
    with replaced(leaves, keep):
        yield calls


def _arrays(values: Any) -> list[np.ndarray]:
    return [ops.convert_to_numpy(leaf) for leaf in tree.flatten(values) if backend.is_tensor(leaf) and len(leaf.shape)]


def same_rows(parts: list[list[np.ndarray]], whole: list[np.ndarray], order: np.ndarray, tolerance: float) -> bool:
    for index, expected in enumerate(whole):
        pieces = [part[index] for part in parts]
        if any(piece.shape[1:] != expected.shape[1:] for piece in pieces):
            return False
        found = np.concatenate(pieces)
        if len(found) != len(expected) or len(order) != len(found):
            return all(np.array_equal(piece, expected) for piece in pieces)
        if found.dtype.kind in "fV" and relative_error(found[order], expected) > tolerance:
            return False
        if found.dtype.kind not in "fV" and not np.array_equal(found[order], expected):
            return False
    return True


def relative_error(actual: Any, expected: Any) -> float:
    actual, expected = np.asarray(actual, "float64"), np.asarray(expected, "float64")
    if not np.array_equal(np.isnan(actual), np.isnan(expected)):
        return float("inf")
    scale = np.nanmax(np.abs(expected), initial=0.0)
    difference = np.nanmax(np.abs(actual - expected), initial=0.0)
    return float(difference / scale) if scale else (float("inf") if difference else 0.0)

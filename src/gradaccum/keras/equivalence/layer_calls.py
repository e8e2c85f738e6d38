"""What goes into and comes out of each layer of a model: the search for those in which rows depend on each other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import ops, tree

from gradaccum.keras.private import layers_in, sublayers

__all__ = ["LayerCall", "dotted", "recorded_calls", "same_rows"]


def dotted(model: Any, path: str) -> str:
    """The path of a layer or a variable inside a model, in dots as everywhere in reports."""
    return path.removeprefix(f"{model.name}/").replace("/", ".")


@dataclass
class LayerCall:
    """The first call of a layer, or of an operation of a functional model: its tensors as arrays."""

    layer: Any
    path: str
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]


@contextlib.contextmanager
def recorded_calls(model: Any) -> Iterator[dict[int, LayerCall]]:
    """While this is open, the first call of each layer and operation is kept, the inner ones before the outer ones."""
    calls: dict[int, LayerCall] = {}

    def keep(layer: Any, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recording(*args: Any, **kwargs: Any) -> Any:
            outputs = call(*args, **kwargs)
            # Inside a loop of the backend there are no numbers: such layers are left out.
            with contextlib.suppress(Exception):
                calls.setdefault(id(layer), LayerCall(layer, path, _arrays((args, kwargs)), _arrays(outputs)))
            return outputs

        return recording

    called = list(_operations(model))
    own = [vars(layer).get("call") for layer, _ in called]
    for layer, path in called:  # straight into __dict__: Keras would track what is set as attributes
        vars(layer)["call"] = keep(layer, path, layer.call)
    try:
        yield calls
    finally:
        for (layer, _), call in zip(called, own):
            del vars(layer)["call"]
            if call is not None:
                vars(layer)["call"] = call


def _operations(model: Any) -> Iterator[tuple[Any, str]]:
    """The model, its layers and the operations of functional models, with their paths."""
    seen: set[int] = set()
    parents: dict[int, str] = {id(model): ""}
    for layer in [model, *layers_in(model)]:
        path = parents.get(id(layer), dotted(model, getattr(layer, "path", None) or layer.name))
        inside = [*sublayers(layer), *getattr(layer, "operations", ())]
        for child in inside:
            parents.setdefault(id(child), f"{path}.{child.name}".lstrip("."))
        for one in (layer, *inside):
            if id(one) not in seen and hasattr(one, "call"):
                seen.add(id(one))
                yield one, parents.get(id(one), "") or one.name


def _arrays(values: Any) -> list[np.ndarray]:
    return [ops.convert_to_numpy(leaf) for leaf in tree.flatten(values) if ops.is_tensor(leaf) and len(leaf.shape)]


def same_rows(
    parts: list[list[np.ndarray]],
    whole: list[np.ndarray],
    order: np.ndarray,
    error: Callable[..., float],
    allowed: float,
) -> bool:
    """Whether arrays of the parts, put together, are those of the whole batch."""
    for index, expected in enumerate(whole):
        pieces = [part[index] for part in parts]
        if any(piece.shape[1:] != expected.shape[1:] for piece in pieces):
            return False
        found = np.concatenate(pieces)
        if len(found) != len(expected) or len(order) != len(found):
            return all(_alike(piece, expected, error, allowed) for piece in pieces)
        if not _alike(found[order], expected, error, allowed):
            return False
    return True


def _alike(actual: np.ndarray, expected: np.ndarray, error: Callable[..., float], allowed: float) -> bool:
    if expected.dtype.kind not in "fV":
        return np.array_equal(actual, expected)
    return error(actual, expected) <= allowed

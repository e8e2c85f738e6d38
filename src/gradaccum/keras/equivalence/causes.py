"""What makes micro-batches differ from the large batch, by name: a loss, a layer, a term of the loss, a variable."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from gradaccum.core.causes import innermost, mixing_cause
from gradaccum.core.equivalence import Cause, Difference
from gradaccum.core.numpy_arrays import relative_error
from gradaccum.keras import private
from gradaccum.keras.batch_norm import BatchNorm, batch_norms_of, during_micro_batch
from gradaccum.keras.equivalence.runner import held, take_rows
from gradaccum.keras.loss import Measured, coupled_losses, divisors_of

__all__ = ["find_causes", "mixing_layers", "recorded_calls"]


def find_causes(
    model: Any,
    state: Sequence[Any],
    data: tuple[Any, Any, Any],
    parts: Sequence[np.ndarray],
    differences: Sequence[Difference],
    tolerance: float,
    batch_norm: BatchNorm = "micro",
) -> list[Cause]:
    """Why these micro-batches differ from the whole batch: losses, layers, terms of the loss, variables that move."""
    found: list[Cause] = []
    wrong = [difference for difference in differences if not difference.error <= tolerance]
    rows = np.arange(sum(map(len, parts)))

    @contextlib.contextmanager
    def comparable() -> Iterator[None]:
        with held(), during_micro_batch(batch_norms_of(model), batch_norm):
            yield

    def run(rows: np.ndarray) -> tuple[dict[int, _LayerCall], Measured]:
        with comparable(), recorded_calls(model) as calls:
            return calls, divisors_of(model, state, *take_rows(data, rows))[0]

    def added_terms(rows: np.ndarray) -> np.ndarray:
        kwargs = {"training": True} if private.takes_training(model) else {}
        with comparable():
            *_, losses = model.stateless_call(*state[:2], take_rows(data, rows)[0], return_losses=True, **kwargs)
        return np.array([float(ops.convert_to_numpy(ops.sum(loss))) for loss in losses])

    try:
        (calls, measured), part_calls = run(rows), [run(part)[0] for part in parts]
        losses = coupled_losses(model, measured, parts, tolerance)
        found += [Cause("loss", output, message) for output, message in losses]
        found += mixing_layers(model, calls, part_calls, parts, tolerance)
        if not found and any(difference.part != "buffer" for difference in wrong):
            together = sum(added_terms(part) * (len(part) / len(rows)) for part in parts)
            found += _wrong_terms(added_terms(rows), np.ravel(together), tolerance) or _own_loss(model)
    except Exception as error:  # it can't be run once more, piece by piece
        if not found:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            found.append(Cause("unknown", "loss", f"What makes the difference could not be looked for ({reason})."))
    moving = "moves with every forward pass: once per micro-batch, not once per update."
    unknown = (
        "No loss of `compile`, no term of `add_loss` and no layer was found to look across rows in its values: "
        "what does may be in a gradient, such as a mean over rows inside stop_gradient."
    )
    return (
        found
        or [Cause("buffer", d.name, f"{d.name!r} {moving}") for d in wrong if d.part == "buffer"]
        or [Cause("unknown", "loss", unknown)]
    )


def _wrong_terms(terms: np.ndarray, together: np.ndarray, tolerance: float) -> list[Cause]:
    """Terms of `add_loss` that are no means over rows."""
    return [
        Cause(
            "regulariser",
            f"losses[{index}]",
            f"model.losses[{index}] is no mean over rows: {term:.6g} for the whole batch, {parts:.6g} for its "
            "micro-batches. Give `add_loss` a mean over rows: ops.mean in place of ops.sum.",
        )
        for index, (term, parts) in enumerate(zip(terms, together))
        if not abs(term - parts) <= tolerance * max(abs(term), abs(parts))
    ]


def _own_loss(model: Any) -> list[Cause]:
    """The model's own `compute_loss`, where nothing else is left."""
    if type(model).compute_loss is keras.Model.compute_loss:
        return []
    said = f"`compute_loss` of {type(model).__name__} is no mean over rows: what it adds to the compiled loss must be"
    return [Cause("loss", "compute_loss", f"{said} one.")]


# Layers.


@dataclass
class _LayerCall:
    """The first call of a layer, or of an operation of a functional model: its tensors as arrays."""

    layer: Any
    path: str
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]


@contextlib.contextmanager
def recorded_calls(model: Any) -> Iterator[dict[int, _LayerCall]]:
    """While this is open, the first call of each layer and operation is kept, the inner ones before the outer ones."""
    calls: dict[int, _LayerCall] = {}

    def arrays(values: Any) -> list[np.ndarray]:
        return [ops.convert_to_numpy(leaf) for leaf in tree.flatten(values) if ops.is_tensor(leaf) and len(leaf.shape)]

    def keep(layer: Any, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recording(*args: Any, **kwargs: Any) -> Any:
            outputs = call(*args, **kwargs)
            # Inside a loop of the backend there are no numbers: such layers are left out.
            with contextlib.suppress(Exception):
                calls.setdefault(id(layer), _LayerCall(layer, path, arrays((args, kwargs)), arrays(outputs)))
            return outputs

        return recording

    with contextlib.ExitStack() as stack:
        for layer, path in _operations(model):
            stack.enter_context(private.replaced(layer, call=keep(layer, path, layer.call)))
        yield calls


def _operations(model: Any) -> Iterator[tuple[Any, str]]:
    """The model, its layers and the operations of functional models, with their paths."""
    seen: set[int] = set()
    paths: dict[int, str] = {id(model): ""}
    for layer in [model, *private.layers_in(model)]:
        own = (getattr(layer, "path", None) or layer.name).removeprefix(f"{model.name}/").replace("/", ".")
        path = paths.get(id(layer), own)
        for child in private.inside(layer):
            paths.setdefault(id(child), f"{path}.{child.name}".lstrip("."))
        for one in (layer, *private.inside(layer)):
            if id(one) not in seen and hasattr(one, "call"):
                seen.add(id(one))
                yield one, paths.get(id(one), "") or one.name


def mixing_layers(
    model: Any,
    calls: dict[int, _LayerCall],
    part_calls: Sequence[dict[int, _LayerCall]],
    parts: Sequence[np.ndarray],
    tolerance: float,
) -> Iterator[Cause]:
    """Layers and operations that give other outputs for the same inputs, the innermost of them."""
    order = np.argsort(np.concatenate(list(parts)))
    found = {key: [calls[key] for calls in part_calls if key in calls] for key in calls}

    def inputs_agree(key: int) -> bool:
        inputs = [call.inputs for call in found[key]]
        return len(inputs) == len(parts) and _same_rows(inputs, calls[key].inputs, order, tolerance)

    def outputs_differ(key: int) -> bool:
        return not _same_rows([call.outputs for call in found[key]], calls[key].outputs, order, tolerance)

    for key in innermost(calls, inputs_agree, outputs_differ, lambda a, b: a in _inside(calls[b].layer)):
        yield _layer_cause(calls[key].layer, calls[key].path, calls[key].layer is model)


def _same_rows(parts: list[list[np.ndarray]], whole: list[np.ndarray], order: np.ndarray, allowed: float) -> bool:
    """Whether arrays of the parts, put together, are those of the whole batch."""

    def same(actual: np.ndarray, expected: np.ndarray) -> bool:
        if expected.dtype.kind not in "fV":
            return np.array_equal(actual, expected)
        return relative_error(actual, expected) <= allowed

    for index, expected in enumerate(whole):
        pieces = [part[index] for part in parts]
        if any(piece.shape[1:] != expected.shape[1:] for piece in pieces):
            return False
        found = np.concatenate(pieces)
        by_rows = len(order) == len(found) == len(expected)
        if not (same(found[order], expected) if by_rows else all(same(piece, expected) for piece in pieces)):
            return False
    return True


def _inside(layer: Any) -> set[int]:
    """The ids of all that a layer is made of."""
    found: set[int] = set()
    waiting = [layer]
    while waiting:
        new = [child for child in private.inside(waiting.pop()) if id(child) not in found]
        found.update(map(id, new))
        waiting += new
    return found


def _layer_cause(layer: Any, path: str, is_model: bool) -> Cause:
    kind = type(layer).__name__
    if is_model:
        what = f"`call` of {kind} itself mixes rows, outside of its layers"
        return Cause("mixes_rows", path, f"{what}: micro-batches can't give what the whole batch does.")
    is_batch_norm = isinstance(layer, keras.layers.BatchNormalization)
    return mixing_cause(
        path,
        kind,
        batch_norm='Use GroupNormalization or LayerNormalization, or batch_norm="frozen".' if is_batch_norm else "",
        advice="Compute it per row, or take it out of the model into the loss and use gradaccum.keras.chunked around "
        "what comes before.",
    )

"""What makes the difference between a batch and its micro-batches, by name: losses, layers, terms, variables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops, tree

from gradaccum.core.causes import innermost, mixing_cause
from gradaccum.core.equivalence import Cause, Difference
from gradaccum.core.ways import Way
from gradaccum.keras import private
from gradaccum.keras.backends.base import unpack
from gradaccum.keras.batch_norm import batch_norms_of, during_micro_batch
from gradaccum.keras.loss import Measured, coupled_losses, divisors_of, same_rows, take_rows
from gradaccum.keras.proof.held import held
from gradaccum.keras.proof.runner import StepRunner


def parts_of(way: Way) -> list[np.ndarray]:
    """The rows of each micro-batch."""
    return np.split(np.asarray(way[0]), np.cumsum(way[1])[:-1])


def find_causes(runner: StepRunner, way: Way, differences: Sequence[Difference]) -> list[Cause]:
    """Why these micro-batches differ from the whole batch: losses, layers, terms of the loss, variables that move."""
    model, batch_norm, tolerance = runner.step.model, runner.batch_norm, runner.tolerance
    trained, moving, _, metrics = runner.state or runner.step.state()
    state, data, parts = (trained, moving, metrics), unpack(runner.data), parts_of(way)
    found: list[Cause] = []
    wrong = [difference for difference in differences if not difference.error <= tolerance]
    rows = np.arange(runner.rows)

    def run(rows: np.ndarray) -> tuple[dict[int, _LayerCall], Measured]:
        with held(), during_micro_batch(batch_norms_of(model), batch_norm), recorded_calls(model) as calls:
            return calls, divisors_of(model, state, *take_rows(data, rows))[0]

    def added_terms(rows: np.ndarray) -> np.ndarray:
        kwargs = {"training": True} if private.takes_training(model) else {}
        with held(), during_micro_batch(batch_norms_of(model), batch_norm):
            *_, losses = model.stateless_call(*state[:2], take_rows(data, rows)[0], return_losses=True, **kwargs)
        return np.array([float(ops.convert_to_numpy(ops.sum(loss))) for loss in losses])

    try:
        (calls, measured), part_calls = run(rows), [run(part)[0] for part in parts]
        found += [Cause("loss", *said) for said in coupled_losses(model, measured, parts, tolerance)]
        found += mixing_layers(model, calls, part_calls, parts, tolerance)
        if not found and any(difference.part != "buffer" for difference in wrong):
            together = sum(added_terms(part) * (len(part) / len(rows)) for part in parts)
            found += _wrong_terms(added_terms(rows), np.ravel(together), tolerance) or _own_loss(model)
            found += [] if found else _in_float8(model)
    except Exception as error:  # it can't be run once more, piece by piece
        if not found:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            found.append(Cause("unknown", "loss", f"Looking for the cause failed ({reason})."))
    moving = (
        "moves with every forward pass, so once per micro-batch instead of once per update. Move it in a callback's "
        "on_train_batch_end."
    )
    unknown = (
        "The cause was not found: no compiled loss, no `add_loss` term and no layer has values that depend on other "
        "rows. It may be in a gradient alone, such as that of a mean over rows inside stop_gradient."
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
            f"model.losses[{index}] is no mean over rows: it is {term:.6g} for the whole batch, and {parts:.6g} as the "
            "mean of its micro-batches. Pass `add_loss` a mean over rows, such as ops.mean in place of ops.sum.",
        )
        for index, (term, parts) in enumerate(zip(terms, together))
        if not abs(term - parts) <= tolerance * max(abs(term), abs(parts))
    ]


def _in_float8(model: Any) -> list[Cause]:
    """The layers that round gradients to float8, where nothing else is left."""
    layers = [layer for layer in private.layers_in(model) if getattr(layer, "quantization_mode", None) == "float8"]
    return [
        Cause(
            "rounding",
            layer.name,
            f"{layer.name!r} rounds the gradients of its outputs to float8, by the largest of the rows that it gets, "
            "so those of a micro-batch round otherwise. If that is close enough, pass verify=False.",
        )
        for layer in layers
    ]


def _own_loss(model: Any) -> list[Cause]:
    """The model's own `compute_loss`, where nothing else is left."""
    if type(model).compute_loss is keras.Model.compute_loss:
        return []
    what = f"`compute_loss` of {type(model).__name__} is no mean over rows."
    return [Cause("loss", "compute_loss", f"{what} Let it return one, or add means over rows to the compiled loss.")]


# Layers.


class _LayerCall(NamedTuple):
    """The first call of a layer, or of an operation of a functional model: its tensors as arrays."""

    layer: Any
    path: str
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]


@contextlib.contextmanager
def recorded_calls(model: Any, own_call: Callable[..., Any] | None = None) -> Iterator[dict[int, _LayerCall]]:
    """While this is open, the first call of each layer and operation is kept, the inner ones before the outer ones.

    The model's is `own_call`, if given.
    """
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
            call = own_call if own_call is not None and layer is model else layer.call
            stack.enter_context(private.replaced(layer, call=keep(layer, path, call)))
        yield calls


def _operations(model: Any) -> Iterator[tuple[Any, str]]:
    """The model, its layers and the operations of functional models, with their paths."""
    seen: set[int] = set()
    paths: dict[int, str] = {id(model): ""}
    for layer in [model, *private.layers_in(model)]:
        own = (getattr(layer, "path", None) or layer.name).removeprefix(f"{model.name}/").replace("/", ".")
        path, children = paths.get(id(layer), own), private.inside(layer)
        paths = {**{id(child): f"{path}.{child.name}".lstrip(".") for child in children}, **paths}
        for one in (layer, *children):
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
        return len(inputs) == len(parts) and same_rows(inputs, calls[key].inputs, order, tolerance)

    def outputs_differ(key: int) -> bool:
        return not same_rows([call.outputs for call in found[key]], calls[key].outputs, order, tolerance)

    for key in innermost(calls, inputs_agree, outputs_differ, lambda a, b: a in _inside(calls[b].layer)):
        yield _layer_cause(calls[key].layer, calls[key].path, calls[key].layer is model)


def _inside(layer: Any) -> set[int]:
    """The ids of all that a layer is made of."""
    found, waiting = set[int](), [layer]
    while waiting:
        new = [child for child in private.inside(waiting.pop()) if id(child) not in found]
        found.update(map(id, new))
        waiting += new
    return found


def _layer_cause(layer: Any, path: str, is_model: bool) -> Cause:
    kind = type(layer).__name__
    if is_model:
        what = f"`call` of {kind} itself mixes rows, outside of its layers."
        return Cause("mixes_rows", path, f"{what} Compute per row there, or leave what compares rows to the loss.")
    is_batch_norm = isinstance(layer, keras.layers.BatchNormalization)
    return mixing_cause(
        path,
        kind,
        batch_norm='Use GroupNormalization or LayerNormalization, or batch_norm="frozen".' if is_batch_norm else "",
        advice="Compute it per row; or move it into the loss, and put gradaccum.keras.chunked around the rest.",
    )

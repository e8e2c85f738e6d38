"""The culprit's name, where micro-batches differ from the large batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from gradaccum.core.causes import innermost, mixing_cause
from gradaccum.core.equivalence import Cause, Difference
from gradaccum.core.numpy_arrays import relative_error
from gradaccum.keras import backends
from gradaccum.keras.backends.rows import has_rows
from gradaccum.keras.batch_norm import BatchNorm, batch_norms_of, during_micro_batch
from gradaccum.keras.equivalence.layer_calls import LayerCall, recorded_calls, same_rows
from gradaccum.keras.equivalence.random_numbers import held
from gradaccum.keras.loss import Measured, coupled_losses, divisors_of
from gradaccum.keras.private import sublayers, takes_training

__all__ = ["find_causes", "mixing_layers"]


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
    try:
        search = _Search(model, state, data, parts, tolerance, batch_norm)
        found += search.losses()
        found += search.layers()
        if any(difference.part != "buffer" for difference in wrong):
            found += [] if found else search.terms()
            found += [] if found else search.own_loss()
    except Exception as error:  # it can't be run once more, piece by piece
        if not found:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            found.append(Cause("unknown", "loss", f"What makes the difference could not be looked for ({reason})."))
    if not found:
        found += [_moving(difference) for difference in wrong if difference.part == "buffer"]
    if not found:
        found.append(
            Cause(
                "unknown",
                "loss",
                "No loss of `compile`, no term of `add_loss` and no layer was found to look across rows in its values: "
                "what does may be in a gradient, such as a mean over rows inside stop_gradient.",
            )
        )
    return found


def _moving(difference: Difference) -> Cause:
    return Cause(
        "buffer",
        difference.name,
        f"{difference.name!r} moves with every forward pass: once per micro-batch, not once per update.",
    )


class _Search:
    def __init__(
        self,
        model: Any,
        state: Sequence[Any],
        data: tuple[Any, Any, Any],
        parts: Sequence[np.ndarray],
        tolerance: float,
        batch_norm: BatchNorm,
    ) -> None:
        self.model, self.state, self.data, self.parts = model, state, data, parts
        self.tolerance, self.batch_norm = tolerance, batch_norm
        self.calls, self.measured, self.whole_loss = self._run(np.arange(sum(map(len, parts))))
        self.part_runs = [self._run(part) for part in parts]

    def _take(self, rows: np.ndarray) -> Any:
        take = backends.running().take_rows
        return tree.map_structure(lambda leaf: take(leaf, rows) if has_rows(leaf) else leaf, self.data)

    def _run(self, rows: np.ndarray) -> tuple[dict[int, LayerCall], Measured, float]:
        x, y, sample_weight = self._take(rows)
        frozen = during_micro_batch(batch_norms_of(self.model), self.batch_norm)
        with held(), frozen, recorded_calls(self.model) as calls:
            _, measured, _, loss = divisors_of(self.model, self.state, x, y, sample_weight)
        return calls, measured, _number(ops.sum(loss))

    def losses(self) -> Iterator[Cause]:
        """Losses of `compile` that look across rows."""
        for output, message in coupled_losses(self.model, self.measured, self.parts, self.tolerance):
            yield Cause("loss", output, message)

    def layers(self) -> Iterator[Cause]:
        """Layers and operations that give other outputs for the same inputs, the innermost of them."""
        return mixing_layers(
            self.model, self.calls, [calls for calls, _, _ in self.part_runs], self.parts, self.tolerance
        )

    def terms(self) -> Iterator[Cause]:
        """Terms of `add_loss` that are no means over rows."""

        def terms(rows: np.ndarray) -> np.ndarray:
            kwargs = {"training": True} if takes_training(self.model) else {}
            with held(), during_micro_batch(batch_norms_of(self.model), self.batch_norm):
                x = self._take(rows)[0]
                *_, losses = self.model.stateless_call(*self.state[:2], x, return_losses=True, **kwargs)
            return np.array([_number(ops.sum(loss)) for loss in losses])

        rows = sum(map(len, self.parts))
        whole = terms(np.arange(rows))
        added = sum(terms(part) * (len(part) / rows) for part in self.parts)
        for index, (term, together) in enumerate(zip(whole, np.ravel(added))):
            if not abs(term - together) <= self.tolerance * max(abs(term), abs(together)):
                yield Cause(
                    "regulariser",
                    f"losses[{index}]",
                    f"model.losses[{index}] is no mean over rows: {term:.6g} for the whole batch, {together:.6g} for "
                    "its micro-batches. Give `add_loss` a mean over rows: ops.mean in place of ops.sum.",
                )

    def own_loss(self) -> Iterator[Cause]:
        """The model's own `compute_loss`, where nothing else is left."""
        if type(self.model).compute_loss is not keras.Model.compute_loss:
            yield Cause(
                "loss",
                "compute_loss",
                f"`compute_loss` of {type(self.model).__name__} is no mean over rows: what it adds to the compiled "
                "loss must be one.",
            )


def mixing_layers(
    model: Any,
    calls: dict[int, LayerCall],
    part_calls: Sequence[dict[int, LayerCall]],
    parts: Sequence[np.ndarray],
    tolerance: float,
) -> Iterator[Cause]:
    """Layers and operations that give other outputs for the same inputs, the innermost of them."""
    order = np.argsort(np.concatenate(list(parts)))
    found = {key: [calls[key] for calls in part_calls if key in calls] for key in calls}

    def inputs_agree(key: int) -> bool:
        inputs = [call.inputs for call in found[key]]
        complete = len(inputs) == len(parts)
        return complete and same_rows(inputs, calls[key].inputs, order, relative_error, tolerance)

    def outputs_differ(key: int) -> bool:
        outputs = [call.outputs for call in found[key]]
        return not same_rows(outputs, calls[key].outputs, order, relative_error, tolerance)

    for key in innermost(calls, inputs_agree, outputs_differ, lambda a, b: a in _inside(calls[b].layer)):
        yield _layer_cause(calls[key].layer, calls[key].path, calls[key].layer is model)


def _inside(layer: Any) -> set[int]:
    """The ids of all that a layer is made of."""
    found: set[int] = set()
    waiting = [layer]
    while waiting:
        one = waiting.pop()
        for child in [*sublayers(one), *getattr(one, "operations", ())]:
            if id(child) not in found:
                found.add(id(child))
                waiting.append(child)
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


def _number(tensor: Any) -> float:
    return float(ops.convert_to_numpy(tensor))

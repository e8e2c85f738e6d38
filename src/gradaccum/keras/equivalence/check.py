"""Prove it: the gradient of the large batch against that of micro-batches, and the culprit's name where they differ."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree
from keras.src import backend

from gradaccum.equivalence import Cause, Difference, Equivalence
from gradaccum.keras.batch_norm import BatchNorm, batch_norms_of, during_micro_batch
from gradaccum.keras.equivalence.layer_calls import (
    dotted,
    draws,
    layer_cause,
    recorded,
    relative_error,
    same_rows,
    switched_off,
)
from gradaccum.keras.loss import Measured, denominators_of, not_additive
from gradaccum.keras.train_step import MicroBatchedStep, has_rows, rows_of, value_and_gradients
from gradaccum.schedule import checked_count
from gradaccum.sizes import even_sizes

__all__ = ["check_equivalence"]

_TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-1, "bfloat16": 1e-1}
"""What counts as rounding, by the narrowest dtype that the model computes in."""


def check_equivalence(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    micro_batch_size: int | None = None,
    batch_norm: BatchNorm | None = None,
    tolerance: float | None = None,
) -> Equivalence:
    """Whether micro-batches give the large batch's gradient, and if not, what keeps them from it.

    The gradient of the batch at once is compared with that of several ragged partitions of its rows, as `micro_batched`
    adds it up. The error of a tensor is `max|a - b| / max|b|`. Layers that draw random numbers (dropout) are switched
    off for it. Nothing of the model changes. It is evidence for this model and batch, not a proof; a model in float64
    (`keras.config.set_dtype_policy("float64")`) gives the sharpest.

    Args:
        model: A compiled model.
        x, y, sample_weight: One large batch, as for `model.train_on_batch`; 2 rows or more, better 8.
        micro_batch_size: Rows of the micro-batches in one of the partitions; None: that of `micro_batched`, where the
            model went through it, else ragged ones only.
        batch_norm: As for `micro_batched`. `"frozen"` checks the model with its BatchNormalization frozen.
        tolerance: The largest relative error that counts as rounding; None: by the dtype the model computes in.

    Returns:
        A record with `.ok`, `.max_error`, `.causes`, that prints, `.save()`s and can `.raise_if_different()`.

    Raises:
        TypeError: `model` is no `keras.Model`.
        ValueError: The model is not compiled, its arrays disagree about the rows, there is but one row, or the large
            batch's own loss is not finite.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.layers.BatchNormalization(name="bn"), keras.layers.Dense(1)])
        >>> model.compile(loss="mse")
        >>> x, y = np.random.default_rng(0).normal(size=(16, 3)), np.ones((16, 1))
        >>> result = check_equivalence(model, x, y, micro_batch_size=4)
        >>> result.ok, result.causes[0].where
        (False, 'bn')
        >>> check_equivalence(model, x, y, batch_norm="frozen").ok
        True
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a keras.Model. Received: model={model!r} of type {type(model).__name__}.")
    if not model.compiled:
        raise ValueError("`model` must be compiled: its losses are what is checked. Call model.compile(...) first.")
    step = vars(model).get("train_step")
    if isinstance(step, MicroBatchedStep):
        if micro_batch_size is None and step.micro_batch_size != "auto":
            micro_batch_size = step.micro_batch_size
        batch_norm = batch_norm or step.batch_norm
    if micro_batch_size is not None:
        checked_count(micro_batch_size, "micro_batch_size")
    data = tree.map_structure(_converted, (x, y, sample_weight))
    rows = rows_of(data)
    if rows is None or rows < 2:
        raise ValueError(f"The batch must have at least 2 rows, to be split. Received: {rows}.")
    with _random_state_kept():
        return _Check(model, data, rows, batch_norm or "warn").run(micro_batch_size, tolerance)


class _Check:
    def __init__(self, model: Any, data: Any, rows: int, batch_norm: BatchNorm) -> None:
        self.model, self.data, self.rows, self.batch_norm = model, data, rows, batch_norm
        model._symbolic_build(data_batch=data)
        variables = (model.trainable_variables, model.non_trainable_variables, model.metrics_variables)
        self.state = [[ops.convert_to_tensor(variable.value) for variable in part] for part in variables]
        self.random = [layer for layer in model._flatten_layers(include_self=False) if draws(layer)]
        self._counts: Any = self._counts_of
        self._gradients: Any = self._gradients_of
        if backend.backend() == "jax":  # where every operation on every shape would be compiled by itself
            import jax

            self._counts, self._gradients = jax.jit(self._counts_of), jax.jit(self._gradients_of)
            self.counted = bool(jax.eval_shape(self._counts_of, self.state[0], data))
        else:
            self.counted = bool(self._counts_of(self.state[0], data))

    def run(self, micro_batch_size: int | None, tolerance: float | None) -> Equivalence:
        precision = self._precision()
        if tolerance is None:
            tolerance = _TOLERANCES.get(precision, 1e-4)
        whole = self._outcome([np.arange(self.rows)])
        if not np.isfinite(whole["loss"]).all():
            raise ValueError(f"The large batch's own loss is {whole['loss']}: there is nothing to compare.")
        worst = dict.fromkeys(whole, 0.0)
        partitions = _partitions(self.rows, micro_batch_size)
        failing = partitions[0]
        for partition in partitions:
            before = max(worst.values())
            for name, value in self._outcome(partition).items():
                worst[name] = max(worst[name], relative_error(value, whole[name]))
            failing = partition if max(worst.values()) > before else failing
        causes = () if max(worst.values()) <= tolerance else tuple(self._causes(failing, tolerance))
        return Equivalence(
            tuple(
                Difference(name, error, "loss" if name == "loss" else "gradient", int(np.size(whole[name])))
                for name, error in worst.items()
            ),
            tolerance,
            causes,
            rows=self.rows,
            partitions=tuple(tuple(len(part) for part in partition) for partition in partitions),
            notes=tuple(self._notes()),
            precision=precision,
            device=_device(),
        )

    def _outcome(self, partition: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """The loss and the gradients of a window of these micro-batches."""
        batches = [self._take(part) for part in partition]
        totals: dict[int, Any] | None = None
        if len(partition) > 1 and self.counted:
            totals = {}
            for batch in batches:
                for index, count in self._counts(self.state[0], batch).items():
                    totals[index] = totals.get(index, 0.0) + _number(count)
        sums: dict[str, np.ndarray] = {}
        for part, batch in zip(partition, batches):
            loss, gradients = self._gradients(self.state[0], batch, len(part) / self.rows, totals)
            names = ["loss", *(dotted(self.model, variable.path) for variable in self.model.trainable_variables)]
            for name, value in zip(names, [loss, *gradients]):
                if value is not None:
                    value = ops.convert_to_numpy(ops.cast(value, _at_least_32(value.dtype)))
                    sums[name] = sums.get(name, 0.0) + value
        return sums

    def _counts_of(self, values: Any, batch: Any) -> dict[int, Any]:
        return self._forward(values, batch)[1].counts

    def _gradients_of(self, values: Any, batch: Any, share: Any, totals: dict[int, Any] | None) -> Any:
        return value_and_gradients(lambda v: ops.sum(self._forward(v, batch, share, totals)[3]) * share, values)

    def _take(self, rows: np.ndarray) -> Any:
        return tree.map_structure(lambda leaf: ops.take(leaf, rows, axis=0) if has_rows(leaf) else leaf, self.data)

    def _forward(
        self, values: Any, batch: Any, share: Any = 1.0, totals: dict[int, Any] | None = None
    ) -> tuple[Any, Measured, Any, Any]:
        x, y, sample_weight = batch
        state = (values, *self.state[1:])
        choice: BatchNorm = "frozen" if self.batch_norm == "frozen" else "micro"
        with switched_off(self.random), during_micro_batch(batch_norms_of(self.model), choice):
            return denominators_of(self.model, state, x, y, sample_weight, share, totals)

    def _causes(self, partition: Sequence[np.ndarray], tolerance: float) -> Iterator[Cause]:
        found = False
        everything = self.data
        for output, message in not_additive(self.model, self._forward(self.state[0], everything)[1]):
            found = True
            yield Cause("loss", output, message)
        with recorded(self.model) as calls:
            self._forward(self.state[0], everything)
            whole = dict(calls)
            calls.clear()
            parts = []
            for part in partition:
                self._forward(self.state[0], self._take(part))
                parts.append(dict(calls))
                calls.clear()
        order = np.argsort(np.concatenate(list(partition)))
        for path, (layer, inputs, outputs) in whole.items():
            theirs = [part[path] for part in parts if path in part]
            if len(theirs) != len(parts) or not same_rows([t[1] for t in theirs], inputs, order, tolerance):
                continue
            if not same_rows([t[2] for t in theirs], outputs, order, tolerance):
                found = True
                yield layer_cause(layer, dotted(self.model, path))
        if not found:
            for cause in self._term_causes(partition, tolerance):
                found = True
                yield cause
        if not found:
            yield Cause(
                "unknown",
                "loss",
                "No loss of `compile` and no layer looks across rows by itself. What `compute_loss` adds beside them "
                "must be a mean over rows.",
            )

    def _term_causes(self, partition: Sequence[np.ndarray], tolerance: float) -> Iterator[Cause]:
        """Terms of `add_loss` that are no means over rows."""

        def terms(rows: np.ndarray) -> list[float]:
            batch = self._take(rows)
            kwargs = {"training": True} if self.model._call_has_training_arg else {}
            with switched_off(self.random):
                *_, losses = self.model.stateless_call(*self.state[:2], batch[0], return_losses=True, **kwargs)
            return [_number(ops.sum(loss)) for loss in losses]

        whole = terms(np.arange(self.rows))
        added = sum(np.array(terms(part)) * (len(part) / self.rows) for part in partition)
        for index, (term, parts) in enumerate(zip(whole, np.ravel(added))):
            if abs(term - parts) > tolerance * max(abs(term), abs(parts)):
                yield Cause(
                    "regulariser",
                    f"losses[{index}]",
                    f"model.losses[{index}] is no mean over rows: {term:.6g} for the whole batch, {parts:.6g} for its "
                    "micro-batches. Give `add_loss` a mean over rows: ops.mean in place of ops.sum.",
                )

    def _precision(self) -> str:
        dtypes = {variable.dtype for variable in self.model.trainable_variables}
        dtypes |= {layer.compute_dtype for layer in self.model._flatten_layers() if layer.compute_dtype}
        if self.model._compile_loss is not None:
            dtypes |= {entry.loss.dtype for entry in self.model._compile_loss._flat_losses}
        order = ["float64", "float32", "bfloat16", "float16"]
        if backend.backend() == "torch":
            dtypes.add("float32")  # parts of Keras' losses are, whatever is set
        return max((dtype for dtype in dtypes if dtype in order), key=order.index, default="float32")

    def _notes(self) -> Iterator[str]:
        if self.random:
            names = ", ".join(repr(layer.name) for layer in self.random[:3]) + (" ..." if len(self.random) > 3 else "")
            yield f"Layers that draw random numbers were switched off: {names}."
        if self.rows < 4:
            yield f"{self.rows} rows allow few partitions: a batch of 8 or more says more."
        yield (
            "This is evidence from one batch, not a proof: what happens only with other data, other sizes or at "
            "another time in training can't be excluded."
        )


def _partitions(rows: int, size: int | None) -> list[list[np.ndarray]]:
    """Ways to cut the rows: as `micro_batched` does, and in two ragged parts, in order and shuffled."""
    random = np.random.default_rng(0)
    plans = [] if size is None or size >= rows else [(np.arange(rows), even_sizes(rows, size))]
    first = max(1, min(rows - 1, round(0.62 * rows)))
    # The same sizes again for the shuffled rows: each size is compiled on JAX.
    plans.append((np.arange(rows), [first, rows - first]))
    plans.append((random.permutation(rows), [rows - first, first]))
    return [np.split(order, np.cumsum(sizes)[:-1]) for order, sizes in plans]


def _converted(leaf: Any) -> Any:
    return None if leaf is None else ops.convert_to_tensor(leaf)


def _number(tensor: Any) -> float:
    return float(ops.convert_to_numpy(tensor))


def _at_least_32(dtype: Any) -> str:
    dtype = backend.standardize_dtype(dtype)
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def _device() -> str:
    if backend.backend() == "torch":
        from keras.src.backend.torch.core import get_device

        return str(get_device())
    if backend.backend() == "jax":
        import jax

        return jax.default_backend()
    import tensorflow as tf

    return "gpu" if tf.config.list_logical_devices("GPU") else "cpu"


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """PyTorch's generator is as it was afterwards; elsewhere random numbers come from variables, which stay."""
    if backend.backend() != "torch":
        yield
        return
    import torch

    with torch.random.fork_rng():
        yield

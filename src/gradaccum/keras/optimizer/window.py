"""The open window of a Keras optimizer: what it has seen, the sums of its gradients, and when it closes.

A compiled training step can't keep numbers in Python. So they travel as one vector of integers, and the rules of a
window are written once, in arithmetic that numbers and traced tensors both understand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from gradaccum.core.window import counted, is_full
from gradaccum.errors import WindowError
from gradaccum.keras import backends, private
from gradaccum.keras.backends.base import wide
from gradaccum.keras.batch_norm import warn_of_layers
from gradaccum.schedule import Schedule

logger = logging.getLogger("gradaccum")

COUNTS, TOUCHED, SETTINGS, SUM = "window_counts", "window_touched", "window_settings", "window_sum_"


class Counts(NamedTuple):
    """The integers of the open window; each a number, or a traced scalar.

    Example:
        >>> Counts.opened(steps=4, rows_left=0)
        Counts(micro_batches=0, steps=4, next_steps=4, weight=0, updated=0, rows_left=0, unit=0)
    """

    micro_batches: Any
    steps: Any
    """Micro-batches that close it."""
    next_steps: Any
    """Steps of the window after it."""
    weight: Any
    """Sum of the weights of its micro-batches."""
    updated: Any
    """1 if the last micro-batch made an update, else 0."""
    rows_left: Any
    """Rows of this epoch that are still to come, for an optimizer that knows them; else 0."""
    unit: Any
    """How many rows count 1 in the sums; 0 where rows are not known, and each micro-batch counts 1."""

    @classmethod
    def opened(cls, steps: Any, rows_left: Any, updated: Any = 0) -> Counts:
        """An empty window of so many steps."""
        return cls(0, steps, steps, 0, updated, rows_left, 0)

    @classmethod
    def restored(cls, numbers: Sequence[int], unit: int) -> Counts:
        """From a file: version 0.1 didn't write the last one, which is `unit` if the weights don't tell."""
        counts = cls(*[*numbers, unit][: len(cls._fields)])
        if not counts.micro_batches:
            return counts._replace(unit=0)
        return counts if counts.unit or counts.weight == counts.micro_batches else counts._replace(unit=1)

    @property
    def divisor(self) -> Any:
        """Of weights, in the sums."""
        return at_least_1(self.unit)


class StepsRule:
    """A window closes with the last of its steps; micro-batches weigh as many as their rows, or the same.

    Micro-batches whose rows are not known are taken to be like the others of their window: with rows known later,
    those before count as many as the first that is known; with rows known before, one counts as many as their mean.
    """

    rows_of_epoch = 0
    """Rows of an epoch, for a rule that knows them."""
    fixed = False
    """Whether the steps follow from something else, so that no schedule may change them."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def add(self, counts: Counts, rows: Any) -> tuple[Counts, Any, Any]:
        """The window with one more micro-batch, of so many rows (None: not known); its weight; whether it closes."""
        held, weight, unit = counts.micro_batches, counts.weight, counts.unit
        if rows is None:
            rows = at_least_1((weight + held // 2) // at_least_1(held))
        else:
            first = unit == 0
            unit, weight = where(first, rows, unit), where(first, weight * rows, weight)
        counts = counted(counts._replace(weight=weight), rows, updated=0, unit=unit)
        return counts, rows, is_full(counts)

    def closed(self, counts: Counts, updated: Any) -> Counts:
        """The counts of the window that follows."""
        return Counts.opened(counts.next_steps, counts.rows_left, updated)

    def check_variables(self, variables: Sequence[Any]) -> None:
        """Whether these may be trained."""

    def check_batches(self, batches: int) -> None:
        """Whether an epoch may have so many micro-batches."""

    def check_epoch(self, counts: Counts, batches: int, doubt: int = 0) -> None:
        """Whether an epoch may end with these counts, after so many micro-batches, give or take `doubt`."""

    def settings(self) -> list[list[int]]:
        """What the length of a window follows from, as numbers for a file; nothing for a callable."""
        return [] if self.schedule.largest is None else self.schedule.to_pairs()


class Window:
    """The open window: its variables, which are the optimizer's own, and the rule by which it closes.

    Of each trainable variable (`variables`) there is the sum of its gradients (`sums`), and whether it has had one in
    this window (`touched`, a vector of 0 and 1). `counts` holds the `Counts`.
    """

    def __init__(self, inner: Any, rule: Any, place: Any = None) -> None:
        self.inner, self.rule, self.place = inner, rule, place
        # Of the GradientAccumulation callback: whether it tells of epochs and rows, and that of the latest `fit`;
        # whether it has trained in a `fit` that has not ended; whether an open window was loaded since; the compiled
        # training function that tells of rows, once there is one.
        self.driven = self.in_fit = self.loaded = False
        self.driver: Any = None
        self.counting_function: Any = None
        self.warned: set[str] = set()
        self.variables: list[Any] = []
        self.sums: list[Any] = []
        self.counts: Any = None
        self.touched: Any = None
        self._first_steps: int | None = None
        self._rows: dict[Any, Any] = {}

    @property
    def built(self) -> bool:
        return self.counts is not None

    def build(self, variables: Sequence[Any], add_variable: Callable[..., Any]) -> None:
        self.variables, backend = list(variables), backends.running()
        counts = Counts.opened(self.steps, self.rule.rows_of_epoch)
        with backend.host():
            start = keras.initializers.Constant(np.asarray(counts))
            self.counts = add_variable((len(counts),), start, "int", name="window_counts")
            self.touched = add_variable((len(variables),), "zeros", "int", name="window_touched")
        for variable in variables:
            name = getattr(variable, "path", variable.name).replace("/", "_").replace(":", "_") + "_gradient_sum"
            how = {"layout": private.layout_of(variable), "name": name}
            with backend.beside(self.place, variable):
                self.sums.append(add_variable(variable.shape, "zeros", wide(variable.dtype), **how))

    # Between calls.

    def read(self) -> Counts:
        return Counts(*ops.convert_to_numpy(self.counts.value).tolist())

    def write(self, counts: Counts) -> None:
        self.counts.assign(np.asarray(counts))

    def empty(self) -> None:
        """Forget the open window."""
        counts = self.read()
        self.write(Counts.opened(counts.next_steps, counts.rows_left))
        backends.running().empty([*self.sums, self.touched])

    @property
    def steps(self) -> int:
        """Steps of this window."""
        if self.built:
            return self.read().steps
        return self.rule.schedule() if self._first_steps is None else self._first_steps

    def plan(self, steps: int) -> None:
        """Let the next window, or this one if it is still empty, have so many steps."""
        if not self.built:
            self._first_steps = steps
            return
        counts = self.read()
        self.write(counts._replace(steps=counts.steps if counts.micro_batches else steps, next_steps=steps))

    def begin_epoch(self) -> None:
        """The first micro-batch of an epoch comes next."""
        if self.built and self.rule.rows_of_epoch:
            self.write(self.read()._replace(rows_left=self.rule.rows_of_epoch))

    @contextmanager
    def with_rows(self, replica: Any, rows: Any) -> Iterator[None]:
        """While this is open, the micro-batch of this replica has so many rows."""
        before, self._rows = self._rows, {**self._rows, replica: rows}
        try:
            yield
        finally:
            self._rows = before

    def warn_once(self, message: str, *values: Any) -> None:
        """Log a warning, unless it has been."""
        if message not in self.warned:
            self.warned.add(message)
            logger.warning(message, *values)

    def name_batch_norms(self, names: Sequence[str]) -> None:
        """Warn of these BatchNormalization layers, once each."""
        if self.rule.schedule.largest != 1:
            advice = (
                "Use GroupNormalization or LayerNormalization, freeze it with `layer.trainable = False`, or split "
                'large batches by micro_batched(model, 16, batch_norm="exact").'
            )
            warn_of_layers(names, self.warned, advice)

    # Its file: the entries that the inner optimizer writes by itself, and those of the open window.

    def save(self, store: Any) -> None:
        self.inner.save_own_variables(store)
        if not self.built:
            return
        store[SETTINGS] = self._settings
        store[COUNTS] = ops.convert_to_numpy(self.counts.value)
        store[TOUCHED] = ops.convert_to_numpy(self.touched.value)
        for index, total in enumerate(self.sums):
            store[f"{SUM}{index}"] = ops.convert_to_numpy(backends.running().total(total))

    def load(self, store: Any) -> None:
        """Read what `save` wrote, or what a plain optimizer did; the window is then empty."""
        keys = list(store.keys())
        ours = [key for key in keys if key.startswith("window_")]
        counts = Counts.restored(np.asarray(store[COUNTS]).tolist(), int(self.rule.fixed)) if ours else None
        is_open = self.built and counts is not None and counts.micro_batches > 0
        if is_open:
            self._check_file(counts, store)
        self.inner.load_own_variables({key: store[key] for key in keys if key not in ours})
        if not self.built:
            return
        self.in_fit = False
        if not is_open:
            self.empty()
        if counts is not None and (is_open or _in_effect(store[SETTINGS]) == _in_effect(self._settings)):
            self.write(counts)
        if is_open:
            self._load_open(counts, store)

    def _load_open(self, counts: Any, store: Any) -> None:
        self.loaded = True
        self.touched.assign(np.asarray(store[TOUCHED]))
        for index, total in enumerate(self.sums):
            backends.running().put(total, np.asarray(store[f"{SUM}{index}"]))
        if counts.unit and not (self.rule.fixed or self.driven):
            logger.warning(
                "The open window that was loaded weighs micro-batches by their rows. It stays exact with "
                "callbacks=[gradaccum.keras.callbacks.GradientAccumulation()]. Without the callback, each later "
                "micro-batch of the window weighs the mean of those before, so its update is not the large batch's if "
                "their rows differ."
            )

    def _check_file(self, counts: Any, store: Any) -> None:
        saved, own = _in_effect(store[SETTINGS]), _in_effect(self._settings)
        if saved != own:
            raise WindowError(
                f"The file holds an open window of {counts.micro_batches} of {counts.steps} micro-batches, saved by an "
                f"optimizer with {_words(saved)}. This one has {_words(own)}. Load it with the same ones, or save "
                "between windows: after flush(), or where `updated` is True."
            )
        number = sum(key.startswith(SUM) for key in store.keys())  # noqa: SIM118  # an HDF5 group of Keras' has no `in`
        shapes = [tuple(store[f"{SUM}{index}"].shape) for index in range(number)]
        expected = [tuple(total.shape) for total in self.sums]
        if shapes != expected:
            raise ValueError(
                f"The file's open window is of other variables than this model's. Received: shapes {shapes}; expected: "
                f"{expected}. Load it into a model with the same layers."
            )

    @property
    def _settings(self) -> np.ndarray:
        return np.asarray(self.rule.settings(), dtype="int64")

    # Inside a training step.

    def add(self, gradients: Sequence[Any]) -> None:
        """Add a micro-batch's gradients, and close the window if it is full."""

        def add(gradients: Sequence[Any], rows: Any) -> None:
            counts, weight, closes = self.rule.add(self.read_traced(), backend.rows_of_all(rows))
            backend.add_up(self, gradients, rows, weight, counts.divisor)
            absent = [gradient is None for gradient in gradients]
            with backend.host():
                touched = backend.vector([int(not none) for none in absent], self.touched.dtype)
                self.touched.assign(ops.maximum(self.touched.value, touched) if any(absent) else touched)
            changed = [*self.variables, *self.inner.variables, *self.sums, self.counts, self.touched]
            backend.when(closes, lambda: self.update(counts, absent), lambda: self._write_traced(counts), changed)

        backend = backends.running()
        backend.merged(add, gradients, self._rows.get(backend.replica()))

    def update(self, counts: Counts, absent: list[bool]) -> None:
        """Let the inner optimizer take the means, and begin the next window.

        `absent` are variables without a gradient in this micro-batch, where only the run knows of those before it.
        """
        inner, backend = self.inner, backends.running()
        before = ops.copy(inner.iterations) if isinstance(inner, keras.optimizers.LossScaleOptimizer) else None
        is_known = backend.known([self.touched.value])
        absent = self.untouched() if is_known else absent

        def apply(absent: list[bool]) -> None:
            means = zip(backend.divided(self, counts.weight, counts.divisor), self.variables, absent)
            gradients = [None if none else ops.cast(mean, variable.dtype) for mean, variable, none in means]
            if not all(absent):
                backend.apply(inner, gradients, self.variables)

        def without(absent: list[bool]) -> Callable[[], None]:
            return lambda: backend.in_replicas(lambda: apply(absent))

        if any(absent) and not is_known:
            earlier = ops.any(ops.take(self.touched.value, np.flatnonzero(absent)) > 0)
            every = without([False] * len(absent))
            backend.when(earlier, every, without(absent), [*self.variables, *inner.variables])
        else:
            without(absent)()
        backend.empty([*self.sums, self.touched])
        updated = 1 if before is None else ops.cast(ops.convert_to_tensor(inner.iterations) != before, "int32")
        self._write_traced(self.rule.closed(counts, updated))

    def untouched(self) -> list[bool]:
        """Which variables have had no gradient in this window."""
        return [not touched for touched in ops.convert_to_numpy(self.touched.value).tolist()]

    def read_traced(self) -> Counts:
        """The counts, as numbers or tensors."""
        return Counts(*backends.running().integers(self.counts.value))

    def _write_traced(self, counts: Counts) -> None:
        backend = backends.running()
        with backend.host():
            self.counts.assign(backend.vector(list(counts), self.counts.dtype))


def at_least_1(number: Any) -> Any:
    """`max(number, 1)`, of numbers and of traced scalars."""
    return max(number, 1) if isinstance(number, int) else ops.maximum(number, 1)


def where(condition: Any, then: Any, otherwise: Any) -> Any:
    """`then if condition else otherwise`, of numbers and of traced scalars."""
    if isinstance(condition, bool):
        return then if condition else otherwise
    return ops.where(condition, then, otherwise)


def _in_effect(settings: Any) -> list[list[int]]:
    """What `rule.settings()` says, without the epochs of a schedule at which it stays as it is."""
    found = np.asarray(settings).tolist()
    return [entry for before, entry in zip([[], *found], found) if entry[1:] != before[1:]]


def _words(settings: Any) -> str:
    """What `rule.settings()` says, in the words of an error."""
    if settings and len(settings[0]) == 3:
        return "maximum_batch_size={}, desired_batch_size={}, train_size={}".format(*settings[0])
    if len(settings) == 1:
        return f"steps={settings[0][1]}"
    return f"steps={dict(settings)}" if settings else "a callable `steps`"

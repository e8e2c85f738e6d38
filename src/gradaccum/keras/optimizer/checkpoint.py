"""The files of an `Optimizer`: the entries that the inner optimizer writes by itself, and those of the open window."""

from __future__ import annotations

import logging
from typing import Any

import keras
import numpy as np
from keras import ops

from gradaccum.errors import WindowError
from gradaccum.keras import backends
from gradaccum.keras.optimizer.window import Counts, Window
from gradaccum.schedule import Schedule

__all__ = ["load", "save", "steps_config", "steps_from_config"]

logger = logging.getLogger("gradaccum")

COUNTS, TOUCHED, SETTINGS, SUM = "window_counts", "window_touched", "window_settings", "window_sum_"


def save(window: Window, store: Any) -> None:
    window.inner.save_own_variables(store)
    if not window.built:
        return
    store[SETTINGS] = _settings(window)
    store[COUNTS] = ops.convert_to_numpy(window.counts.value)
    store[TOUCHED] = ops.convert_to_numpy(window.touched.value)
    for index, total in enumerate(window.sums):
        store[f"{SUM}{index}"] = ops.convert_to_numpy(backends.running().total(total))


def load(window: Window, store: Any) -> None:
    """Read what `save` wrote, or what a plain optimizer did; the window is then empty."""
    keys = list(store.keys())
    ours = [key for key in keys if key.startswith("window_")]
    counts = Counts.restored(np.asarray(store[COUNTS]).tolist(), window.rule.fixed) if ours else None
    if window.built and counts is not None and counts.micro_batches:
        _check(window, counts, store)
    window.inner.load_own_variables({key: store[key] for key in keys if key not in ours})
    if not window.built:
        return
    window.in_fit = False
    if counts is not None and counts.micro_batches:
        window.write(counts)
        window.touched.assign(np.asarray(store[TOUCHED]))
        for index, total in enumerate(window.sums):
            backends.running().put(total, np.asarray(store[f"{SUM}{index}"]))
        window.loaded = True
        if counts.by_rows and not (window.rule.fixed or window.driven):
            logger.warning(
                "The open window that was loaded weighs micro-batches by their rows. It goes on exactly with "
                "callbacks=[gradaccum.keras.callbacks.GradientAccumulation()]: without it, each that follows in this "
                "window weighs as much as their mean, and its update is not the large batch's if they differ.",
            )
    else:
        window.empty()
        if counts is not None and np.array_equal(store[SETTINGS], _settings(window)):
            window.write(counts)


def _check(window: Window, counts: Counts, store: Any) -> None:
    saved, own = np.asarray(store[SETTINGS]).tolist(), _settings(window).tolist()
    if saved != own:
        raise WindowError(
            f"The file holds an open window of {counts.micro_batches} of {counts.steps} micro-batches, of an optimizer "
            f"with {_words(saved)}. This one has {_words(own)}. Load it with the same ones, or save between "
            "windows: after flush(), or where `updated` is True."
        )
    number = sum(key.startswith(SUM) for key in store.keys())  # noqa: SIM118  # an HDF5 group of Keras' has no `in`
    shapes = [tuple(store[f"{SUM}{index}"].shape) for index in range(number)]
    expected = [tuple(total.shape) for total in window.sums]
    if shapes != expected:
        raise ValueError(
            f"The file's open window is of other variables than this model's. Received: shapes {shapes}, expected "
            f"{expected}."
        )


def _settings(window: Window) -> np.ndarray:
    return np.asarray(window.rule.settings(), dtype="int64")


def _words(settings: Any) -> str:
    """What `rule.settings()` says, in the words of an error."""
    if settings and len(settings[0]) == 3:
        return "maximum_batch_size={}, desired_batch_size={}, train_size={}".format(*settings[0])
    if len(settings) == 1:
        return f"steps={settings[0][1]}"
    return f"steps={dict(settings)}" if settings else "a callable `steps`"


def steps_config(schedule: Schedule) -> Any:
    """`steps`, as a config can hold it: JSON would turn the epochs of a dict into strings."""
    if schedule.constant is not None:
        return schedule.constant
    if schedule.largest is not None:
        return schedule.to_pairs()
    return keras.saving.serialize_keras_object(schedule.function)


def steps_from_config(steps: Any, custom_objects: dict[str, Any] | None) -> Any:
    if isinstance(steps, list):
        return Schedule.from_pairs(steps)
    return keras.saving.deserialize_keras_object(steps, custom_objects=custom_objects)

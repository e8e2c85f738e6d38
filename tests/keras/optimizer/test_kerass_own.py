"""Keras' own tests of its optimizers, with each of them wrapped: they pass and fail as with the plain ones."""

from __future__ import annotations

import importlib
import unittest
from pathlib import Path

import keras
import pytest

from gradaccum.keras.optimizers import Optimizer

MODULES = sorted(path.stem for path in (Path(keras.__file__).parent / "src" / "optimizers").glob("*_test.py"))


OTHERWISE = {
    # Call private methods of the optimizer, or update_step, past any window.
    "muon_test": {
        "test_adamw_single_step",
        "test_adamw_weight_decay",
        "test_muon_single_step",
        "test_should_use_adamw",
    },
    "nadam_test": {"test_build_with_empty_var_list"},  # looks at a private attribute
    "sgd_test": {"test_single_step"},  # counts the optimizer's variables
}
"""Tests that ask for what a wrapped optimizer has otherwise."""


@keras.saving.register_keras_serializable("tests")
class Twice(Optimizer):
    """Is given each gradient twice: the mean of a window of two is the gradient."""

    def apply(self, grads, trainable_variables=None):
        grads = list(grads)
        for _ in range(2):
            super().apply(grads, trainable_variables)


class Wrapping(type):
    """Of classes that make a wrapped optimizer in place of a plain one."""

    def __call__(cls, *args, **kwargs):
        inner = cls.inner(*args, **kwargs)
        wrapped_once = isinstance(getattr(inner, "inner_optimizer", None), Optimizer)
        accumulates = wrapped_once or getattr(inner, "gradient_accumulation_steps", None)
        return inner if accumulates else cls.wrapper(inner, cls.steps)

    def __getattr__(cls, name):
        return getattr(cls.inner, name)


def outcomes(tests):
    """Of each test of a module, what it raises; None where it passes or is skipped."""
    found = {}
    for case in unittest.TestLoader().loadTestsFromModule(tests):
        for one in case:
            result = unittest.TestResult()
            one.run(result)
            errors = [text.strip().splitlines()[-1] for _, text in [*result.failures, *result.errors]]
            found[one.id().rpartition(".")[2]] = errors[0] if errors else None
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("module", MODULES)
def test_kerass_own_tests_pass_with_wrapped_optimizers(module, steps, monkeypatch):
    monkeypatch.setitem(vars(pytest.mark), "requires_trainable_backend", lambda test: test)  # not one of ours
    tests = importlib.import_module(f"keras.src.optimizers.{module}")
    plain = outcomes(tests)
    for name, kind in list(vars(tests).items()):
        if isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer):
            made = {"inner": kind, "steps": steps, "wrapper": Optimizer if steps == 1 else Twice}
            monkeypatch.setattr(tests, name, Wrapping(name, (), made))
    different = {name: error for name, error in outcomes(tests).items() if (error is None) != (plain[name] is None)}
    assert different.keys() == OTHERWISE.get(module, set()), different

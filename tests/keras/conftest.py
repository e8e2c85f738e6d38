"""What the tests of the Keras shell share. The backend is KERAS_BACKEND."""

from __future__ import annotations

import keras
import pytest

from tests.reference import FLOAT32, FLOAT64

BACKEND = keras.backend.backend()


def pytest_configure(config):
    # Keras' Variable.__array__ predates NumPy 2: every get_weights() would warn.
    config.addinivalue_line("filterwarnings", "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


@pytest.fixture(autouse=True)
def _seeded():
    keras.utils.set_random_seed(0)


@pytest.fixture
def float64():
    """Everything in float64, and the tolerance of the update. On PyTorch, parts of Keras stay in float32 even so."""
    if BACKEND == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield FLOAT32 if BACKEND == "torch" else FLOAT64
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    if BACKEND == "jax":
        jax.config.update("jax_enable_x64", False)

"""Which backend runs which tests: what compiles repeats slowly what PyTorch has shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest

BACKEND = keras.backend.backend()


def slow(*values: Any) -> Any:
    """A case that repeats another's claim: on the backends that compile each one, for `make test-slow` alone."""
    return pytest.param(*values, marks=[] if BACKEND == "torch" else pytest.mark.slow)


def slow_where_compiled(test: Any) -> Any:
    """A test whose claim another one makes on this backend, or that is none about backends: as `slow`, all of it."""
    return test if BACKEND == "torch" else pytest.mark.slow(test)


def compiled_on(backend: str) -> Callable[[Any], Any]:
    """A test that PyTorch runs and one of the two that compile, the cheaper: the other repeats the claim slowly."""
    return lambda test: test if BACKEND in ("torch", backend) else pytest.mark.slow(test)

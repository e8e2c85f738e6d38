"""Optimizers that are wrapped by name show the arguments of the inner one, to people and to type checkers."""

import inspect

import keras
import pytest

import gradaccum.keras
from scripts.stubs import path_of, stub
from tests.keras.problems import BACKEND


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_signature_shows_the_inner_optimizers_arguments_and_steps(name):
    found = inspect.signature(getattr(gradaccum.keras.optimizers, name)).parameters
    inner = inspect.signature(getattr(keras.optimizers, name)).parameters
    assert set(found) == {*inner, "steps"}
    assert found["learning_rate"].default == inner["learning_rate"].default


@pytest.mark.skipif(BACKEND != "torch", reason="once is enough")
def test_the_stubs_are_what_keras_own_signatures_make():
    """Otherwise: `python -m scripts.stubs`."""
    face = "gradaccum.keras.optimizers"
    written = path_of(face).read_text(encoding="utf-8")
    if f"keras {keras.__version__}:" not in written:
        pytest.skip("made from another version")
    assert written == stub(face)

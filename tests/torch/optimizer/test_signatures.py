"""Optimizers that are wrapped by name show the arguments of the inner one, to people and to type checkers."""

import inspect

import pytest
import torch

import gradaccum.torch
from scripts.stubs import path_of, stub


@pytest.mark.parametrize("name", ["SGD", "AdamW", "LBFGS"])
def test_a_signature_shows_the_inner_optimizers_arguments_then_the_wrappers(name):
    found = inspect.signature(getattr(gradaccum.torch.optim, name)).parameters
    inner = inspect.signature(getattr(torch.optim, name)).parameters
    assert list(found)[: len(inner)] == list(inner)
    assert list(found)[len(inner)] == "steps"
    assert {"reduction", "clip_grad_norm", "accumulate_dtype"} <= found.keys()
    assert all(found[name].default == inner[name].default for name in inner)


def test_the_stubs_are_what_torchs_own_signatures_make():
    """Otherwise: `python -m scripts.stubs`."""
    face = "gradaccum.torch.optim"
    written = path_of(face).read_text(encoding="utf-8")
    if f"torch {torch.__version__.partition('+')[0]}:" not in written:
        pytest.skip("made from another version")
    assert written == stub(face)

"""Gradients of a function of tensors, on whichever backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

__all__ = ["value_and_gradients"]


def value_and_gradients(
    function: Callable[[list[Any]], Any], values: list[Any], has_aux: bool = False
) -> tuple[Any, list[Any]]:
    """`function(values)`, a scalar tensor, and its gradients; None for those it doesn't depend on (zeros on JAX)."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.value_and_grad(function, has_aux=has_aux)(values)
    if keras.backend.backend() == "torch":
        import torch

        values = [value.detach().clone().requires_grad_() for value in values]
        found = function(values)
        loss = found[0] if has_aux else found
        # A loss of nothing that has a gradient has none.
        gradients: list[Any] = [None] * len(values)
        if loss.requires_grad:
            gradients = list(torch.autograd.grad(loss, values, allow_unused=True))
        return ((loss.detach(), found[1]) if has_aux else loss.detach()), gradients
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(values)
        found = function(values)
        loss = found[0] if has_aux else found
    gradients = tape.gradient(loss, values)
    return found, [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]

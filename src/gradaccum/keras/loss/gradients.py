"""Gradients of a function of tensors, on whichever backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

__all__ = ["value_and_gradients"]


def value_and_gradients(function: Callable[[list[Any]], Any], values: list[Any]) -> tuple[Any, list[Any]]:
    """`function(values)`, a scalar tensor, and its gradients; None for those it doesn't depend on (zeros on JAX)."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.value_and_grad(function)(values)
    if keras.backend.backend() == "torch":
        import torch

        values = [value.detach().clone().requires_grad_() for value in values]
        loss = function(values)
        return loss.detach(), list(torch.autograd.grad(loss, values, allow_unused=True))
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(values)
        loss = function(values)
    gradients = tape.gradient(loss, values)
    return loss, [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]

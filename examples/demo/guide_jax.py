"""The experiment's JAX side: optax, and `windowed` around it."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from examples.demo.data import Data
from examples.demo.guide import Epoch, Notify, Plan, Run, Setup

from gradaccum.jax import updated, windowed

__all__ = ["train"]


def train(setup: Setup, data: Data, plan: Plan, initial: Sequence[np.ndarray], notify: Notify) -> Run:
    """One run, from the initial parameters on, in a process of its own."""
    if setup.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    x, test_x = (np.asarray(part / data.scale, setup.dtype) for part in (data.train_x, data.test_x))
    params: Any = [jnp.asarray(values, setup.dtype) for values in initial]
    optimizer: Any = optax.sgd(setup.learning_rate)
    if plan.steps > 1:
        optimizer = windowed(optimizer, plan.steps)
    state, step = optimizer.init(params), _step(optimizer, plan.steps > 1)
    gradients = _first_gradients(plan, params, x, data.train_y)

    epochs, seconds = [], 0.0
    for _ in range(setup.epochs):
        start = time.perf_counter()
        total = jnp.zeros((), setup.dtype)
        for rows in _slices(len(x), plan.micro_batch_size):
            params, state, loss = step(params, state, x[rows], data.train_y[rows])
            total = total + loss * len(x[rows])
        if plan.steps > 1:
            updates, state = optimizer.flush(state, params)
            params = optax.apply_updates(params, updates)
        jax.block_until_ready(params)
        seconds += time.perf_counter() - start
        epochs.append(Epoch(float(total) / len(x), *_test(params, test_x, data.test_y)))
        notify(epochs[-1])
    updates_made = setup.epochs * -(-len(x) // (plan.micro_batch_size * plan.steps))
    return Run(plan, epochs, seconds, updates_made, [np.asarray(p) for p in params], gradients)


def _outputs(params: Any, x: Any) -> Any:
    *hidden, (kernel, bias) = zip(params[::2], params[1::2], strict=True)
    for weights, offsets in hidden:
        x = jax.nn.relu(x @ weights + offsets)
    return x @ kernel + bias


def _loss(params: Any, x: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(_outputs(params, x), y).mean()


_gradient = jax.jit(jax.grad(_loss))


def _step(optimizer: Any, weigh: bool) -> Any:
    """The training loop's step, the same for all three runs."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(_loss)(params, x, y)
        weight = {"weight": len(x)} if weigh else {}
        updates, state = optimizer.update(grads, state, params, **weight)
        return optax.apply_updates(params, updates), state, loss

    return step


def _slices(rows: int, size: int) -> Iterator[slice]:
    """The rows in their order, as a loader that does not shuffle has them."""
    return (slice(start, start + size) for start in range(0, rows, size))


@jax.jit
def _tested(params: Any, x: Any, y: Any) -> Any:
    outputs = _outputs(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean(), (outputs.argmax(1) == y).mean()


def _test(params: Any, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    loss, accuracy = _tested(params, x, y)
    return float(loss), float(accuracy)


def _first_gradients(plan: Plan, params: Any, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """The first window's gradient, as the inner optimizer sees it."""
    optimizer = windowed(optax.identity(), plan.steps)
    state, found = optimizer.init(params), params
    for rows in _slices(min(len(x), plan.micro_batch_size * plan.steps), plan.micro_batch_size):
        found, state = optimizer.update(_gradient(params, x[rows], y[rows]), state, params, weight=len(x[rows]))
    if not updated(state):
        found, state = optimizer.flush(state, params)
    return [np.asarray(gradient) for gradient in found]

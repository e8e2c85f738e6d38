"""`gradaccum.jax.windowed` against optax.MultiSteps and a loop written by hand: time, memory, exactness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.harness import arguments, keep_freed_memory, publish, ratios, table
from gradaccum.jax import windowed

STEPS, ROWS, WIDTH, LAYERS = 8, 16, 512, 4


def network() -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]


def loss_fn(params: list[jax.Array], x: jax.Array) -> jax.Array:
    h = x
    for weight in params:
        h = jnp.tanh(h @ weight)
    return jnp.mean(jnp.sum((h - 1) ** 2, axis=1))


def step_of(optimizer: Any) -> Callable[..., Any]:
    """The loop's step on a small batch, compiled once, with its buffers donated."""

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        grads = jax.grad(loss_fn)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


def window_of(optimizer: Any, x: jax.Array) -> Callable[[], object]:
    params = network()
    step, now = step_of(optimizer), [params, optimizer.init(params)]

    def window() -> None:
        for _ in range(STEPS):
            now[:] = step(*now, x)
        jax.block_until_ready(now)

    return window


def by_hand(x: jax.Array) -> tuple[Callable[[], object], Any, Any]:
    """Two programs: add a gradient to the sum; divide it and update."""
    inner = optax.adam(1e-3)

    def add(params: Any, sums: Any, x: jax.Array) -> Any:
        return jax.tree.map(jnp.add, sums, jax.grad(loss_fn)(params, x))

    def update(params: Any, state: Any, sums: Any) -> Any:
        updates, state = inner.update(jax.tree.map(lambda g: g / STEPS, sums), state, params)
        return optax.apply_updates(params, updates), state, jax.tree.map(jnp.zeros_like, sums)

    add, update = jax.jit(add, donate_argnums=1), jax.jit(update, donate_argnums=(0, 1, 2))
    params = network()
    now = [params, inner.init(params), jax.tree.map(jnp.zeros_like, params)]

    def window() -> None:
        for _ in range(STEPS):
            now[2] = add(now[0], now[2], x)
        now[:] = update(*now)
        jax.block_until_ready(now)

    return window, add.lower(now[0], now[2], x), update.lower(*now)


def peak(lowered: Any) -> float:
    """Compiled bytes beside those that stay in place: inputs and outputs that share their memory count once."""
    found = lowered.compile().memory_analysis()
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return (held + found.temp_size_in_bytes) / 2**20


def errors(make: Callable[[int], Any], weigh: bool) -> list[str]:
    """Of the parameters after two windows, relative to plain Adam on the large batches."""
    x = jax.random.normal(jax.random.key(1), (24, WIDTH))
    found = []
    for sizes, flush in (([4] * 6, False), ([6, 2, 4, 1, 8, 3], False), ([4] * 5, True)):
        expected = params = network()
        plain, optimizer = optax.sgd(0.1, momentum=0.9), make(3)
        state, wrapped = plain.init(params), optimizer.init(params)
        parts, start = [], 0
        for size in sizes:
            parts.append(x[start : start + size])
            start += size
        update = jax.jit(optimizer.update)
        for window in (parts[:3], parts[3:]):
            grads = jax.grad(loss_fn)(expected, jnp.concatenate(window))
            updates, state = plain.update(grads, state, expected)
            expected = optax.apply_updates(expected, updates)
            for rows in window:
                extra = {"weight": jnp.asarray(float(len(rows)))} if weigh else {}
                updates, wrapped = update(jax.grad(loss_fn)(params, rows), wrapped, params, **extra)
                params = optax.apply_updates(params, updates)
        if flush and hasattr(optimizer, "flush"):
            updates, wrapped = optimizer.flush(wrapped, params)
            params = optax.apply_updates(params, updates)
        moved = max(float(jnp.abs(a - b).max()) for a, b in zip(expected, network()))
        error = max(float(jnp.abs(a - b).max()) for a, b in zip(params, expected)) / moved
        found.append("exact" if error < 1e-4 else f"{error:.0%} off")
    return found


def main() -> None:
    options = arguments(__doc__)
    keep_freed_memory()
    x = jax.random.normal(jax.random.key(2), (ROWS, WIDTH))
    wrapped, multi = windowed(optax.adam(1e-3), STEPS), optax.MultiSteps(optax.adam(1e-3), STEPS)
    hand, add, update = by_hand(x)
    contenders = {
        "by hand, two programs": hand,
        "windowed": window_of(wrapped, x),
        "optax.MultiSteps": window_of(multi, x),
        "no accumulation: an update each": window_of(optax.adam(1e-3), x),
    }
    time = ratios(contenders, "by hand, two programs", rounds=3 if options.quick else 25, about="a window")
    params = network()
    memory = {
        "by hand, two programs": max(peak(add) + peak_of_state(params), peak(update)),
        "windowed": peak(step_of(wrapped).lower(params, wrapped.init(params), x)),
        "optax.MultiSteps": peak(step_of(multi).lower(params, multi.init(params), x)),
        "no accumulation: an update each": peak(
            step_of(optax.adam(1e-3)).lower(params, optax.adam(1e-3).init(params), x)
        ),
    }
    sgd = lambda: optax.sgd(0.1, momentum=0.9)  # noqa: E731
    exact = {
        "windowed": errors(lambda steps: windowed(sgd(), steps), weigh=True),
        "optax.MultiSteps": errors(lambda steps: optax.MultiSteps(sgd(), steps), weigh=False),
    }
    nothing = ["", "", ""]
    rows = [[name, time[name], f"{memory[name]:.1f}", *exact.get(name, nothing)] for name in contenders]
    head = ["", "time of a window", "memory, MiB", "equal rows", "ragged rows", "short last window"]
    body = (
        f"{LAYERS} layers of {WIDTH} units, Adam, windows of {STEPS} micro-batches of {ROWS} rows, buffers donated. "
        "Time relative to two programs written by hand; memory as XLA states it, with parameters and state. Then the "
        "distance from SGD with momentum on the large batches, relative to the movement, in float32.\n\n"
        + table(head, rows)
    )
    publish("jax_windowed", "JAX: windows of small batches", body, ["jax", "optax"], options, ours=["windowed"])


def peak_of_state(params: Any) -> float:
    """Adam's two moments, which lie there while gradients are added."""
    return 2 * sum(leaf.nbytes for leaf in params) / 2**20


if __name__ == "__main__":
    main()

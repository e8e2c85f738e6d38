"""`gradaccum.jax.chunked` at 2048 rows against the whole batch: compiled memory, and time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.harness import arguments, keep_freed_memory, publish, ratios, table
from gradaccum.jax import chunked

SIZE, PIXELS, WIDTH, OUT, LAYERS = 64, 256, 512, 64, 6


def encode(params: dict[str, Any], x: jax.Array) -> jax.Array:
    h = x @ params["in"]
    for weight in params["layers"]:
        h = h + jax.nn.gelu(h @ weight)
    h = h @ params["out"]
    return h / jnp.linalg.norm(h, axis=1, keepdims=True)


def tower(key: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(key, LAYERS + 2)
    normal = lambda key, *shape: jax.random.normal(key, shape) / shape[0] ** 0.5  # noqa: E731
    layers = [normal(key, WIDTH, WIDTH) for key in keys[2:]]
    return {"in": normal(keys[0], PIXELS, WIDTH), "layers": layers, "out": normal(keys[1], WIDTH, OUT)}


def step_of(encode: Callable[..., Any]) -> Callable[..., Any]:
    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = encode(params["x"], x) @ encode(params["y"], y).T * 10
        labels = jnp.arange(len(x))
        both = [optax.softmax_cross_entropy_with_integer_labels(some, labels).mean() for some in (logits, logits.T)]
        return (both[0] + both[1]) / 2

    return jax.jit(jax.value_and_grad(loss_fn))


def main() -> None:
    options = arguments(__doc__)
    keep_freed_memory()
    params = {"x": tower(jax.random.key(0)), "y": tower(jax.random.key(1))}
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 2**20

    def data(rows: int) -> list[jax.Array]:
        return [jax.random.normal(jax.random.key(seed), (rows, PIXELS)) for seed in (2, 3)]

    def temporary(encode: Callable[..., Any], rows: int) -> float:
        compiled = step_of(encode).lower(params, *data(rows)).compile()
        return compiled.memory_analysis().temp_size_in_bytes / 2**20

    counts = (64, 512) if options.quick else (64, 512, 2048)
    memory = []
    for rows in counts:
        ready = {"x": jnp.ones((rows, OUT)), "y": jnp.ones((rows, OUT))}  # the loss by itself: all pairs
        loss = step_of(lambda outputs, x: outputs).lower(ready, *data(rows)).compile().memory_analysis()
        both = temporary(encode, rows), temporary(chunked(encode, SIZE), rows)
        memory.append([rows, *both, loss.temp_size_in_bytes / 2**20])
    rows = 512
    batch = data(rows)
    contenders = {"whole batch": step_of(encode), "chunked": step_of(chunked(encode, SIZE))}
    contenders |= {f"chunked, keep={k}": step_of(chunked(encode, SIZE, keep=k)) for k in (4, 8)}
    timed = {name: (lambda step=step: jax.block_until_ready(step(params, *batch))) for name, step in contenders.items()}
    time = ratios(timed, "whole batch", rounds=3 if options.quick else 25, about="loss and gradient, 512 rows")
    body = (
        f"Two encoders of {LAYERS} layers with {WIDTH} units and a contrastive loss, {SIZE} rows at a time. MiB "
        f"that XLA needs besides inputs and outputs (the parameters take {weights:.1f}):\n\n"
        + table(["rows", "whole batch", "chunked", "the loss on given outputs"], memory)
        + f"\n\nLoss and gradient at {rows} rows, relative to the whole batch's time: "
        + ", ".join(f"{name} {ratio}" for name, ratio in list(time.items())[1:])
        + "."
    )
    publish(
        "jax_chunked",
        "JAX: chunked encoders",
        body,
        ["jax"],
        options,
        ours=["chunked", "chunked, keep=4", "chunked, keep=8"],
    )


if __name__ == "__main__":
    main()

"""`gradaccum.jax.value_and_grad` compared with a `lax.scan` written by hand, the whole batch, `optax.MultiSteps`
called on each micro-batch inside a `lax.scan`, and `optax.microbatching.microbatch`. Each is one compiled update with
Adam, relative to the loop by hand. XLA states the temporaries.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum.jax
from benchmarks.harness import arguments, keep_freed_memory, publish, ratios, table

ROWS, MICRO = 1024, 64
CONTENDERS = ("by hand", "gradaccum", "whole batch", "optax.MultiSteps", "optax microbatch")
NETWORKS = ("784-512-512-10", "8 layers of 256")
OPTIMIZER = optax.adam(1e-3)


def parameters(kind: str) -> list[tuple[Any, Any]]:
    """Kernels and biases."""
    widths = [784, 512, 512, 10] if kind.startswith("784") else [784, *[256] * 8, 10]
    random = np.random.default_rng(0)
    shapes = itertools.pairwise(widths)
    return [(jnp.asarray(random.normal(0, a**-0.5, (a, b)), "float32"), jnp.zeros(b, "float32")) for a, b in shapes]


def loss_fn(params: Any, batch: Any) -> Any:
    """Mean cross entropy."""
    x, labels = batch
    for kernel, bias in params[:-1]:
        x = jax.nn.relu(x @ kernel + bias)
    kernel, bias = params[-1]
    return optax.softmax_cross_entropy_with_integer_labels(x @ kernel + bias, labels).mean()


def by_hand(params: Any, batch: Any) -> Any:
    """What everybody writes."""

    def body(sums: Any, rows: Any) -> Any:
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss_fn)(params, rows)), None

    micro_batches = jax.tree.map(lambda leaf: leaf.reshape(-1, MICRO, *leaf.shape[1:]), batch)
    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    sums, _ = jax.lax.scan(body, zeros, micro_batches)
    return jax.tree.map(lambda leaf: leaf / (ROWS // MICRO), sums)


def microbatch(params: Any, batch: Any) -> Any:
    """optax' own."""
    from optax import microbatching

    sums = microbatching.microbatch(
        jax.value_and_grad(loss_fn), argnums=1, microbatch_size=MICRO, accumulator=microbatching.AccumulationType.MEAN
    )
    return sums(params, batch)


def update(name: str) -> tuple[Callable[..., Any], Any]:
    """One update, and the optimizer that makes it."""
    if name == "optax.MultiSteps":
        return multi_steps()
    value_and_grad = {
        "by hand": by_hand,
        "gradaccum": gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=MICRO),
        "whole batch": jax.value_and_grad(loss_fn),
        "optax microbatch": microbatch,
    }[name]

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(params, batch)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step, OPTIMIZER


def multi_steps() -> tuple[Callable[..., Any], Any]:
    """Its users call it on every micro-batch."""
    optimizer = optax.MultiSteps(OPTIMIZER, ROWS // MICRO)

    def step(params: Any, state: Any, batch: Any) -> Any:
        def body(carry: Any, rows: Any) -> Any:
            params, state = carry
            loss, grads = jax.value_and_grad(loss_fn)(params, rows)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        micro_batches = jax.tree.map(lambda leaf: leaf.reshape(-1, MICRO, *leaf.shape[1:]), batch)
        (params, state), losses = jax.lax.scan(body, (params, state), micro_batches)
        return params, state, losses.mean()

    return step, optimizer


def lowered(name: str, kind: str) -> Any:
    """The update, traced anew, with its arguments."""
    random = np.random.default_rng(1)
    batch = random.normal(size=(ROWS, 784)).astype("float32"), random.integers(0, 10, ROWS).astype("int32")
    params = parameters(kind)
    step, optimizer = update(name)
    state = optimizer.init(params)
    return jax.jit(step).lower(params, state, batch), (params, state, jax.tree.map(jnp.asarray, batch))


def runner(name: str, kind: str) -> tuple[Callable[[], object], int]:
    """A function that makes one update; and the bytes that XLA states for its temporaries."""
    traced, args = lowered(name, kind)
    program = traced.compile()
    return lambda: jax.block_until_ready(program(*args)), program.memory_analysis().temp_size_in_bytes


def compile_anew(name: str, kind: str) -> None:
    """Trace and compile the update."""
    lowered(name, kind)[0].compile()


def main() -> None:
    """Run it."""
    options = arguments(__doc__)
    keep_freed_memory()
    rows: list[list[object]] = []
    compiled: list[float] = []
    for kind in NETWORKS[:1] if options.quick else NETWORKS:
        runners = {name: runner(name, kind) for name in CONTENDERS}
        rounds = 5 if options.quick else 41
        times = ratios({name: run for name, (run, _) in runners.items()}, "by hand", rounds, about=f"an update, {kind}")
        compiling = {name: functools.partial(compile_anew, name, kind) for name in CONTENDERS}
        rounds = 1 if options.quick else 5
        about = f"compiling, {kind}"
        compile_times = ratios(compiling, "by hand", rounds, time.process_time, about, warm_up=1)
        memory = {name: taken / runners["by hand"][1] for name, (_, taken) in runners.items()}
        rows.append([kind, "time", *(times[name] for name in CONTENDERS)])
        rows.append([kind, "temporaries", *(memory[name] for name in CONTENDERS)])
        compiled.append(compile_times["gradaccum"])
    publish(
        "jax_value_and_grad",
        "JAX: an update at 1024 rows in micro-batches of 64",
        f"{(__doc__ or '').strip()}\n\n{table(['network', '', *CONTENDERS], rows)}\n\n"
        f"Compiling takes {min(compiled):.2f} to {max(compiled):.2f} of the loop's processor time.",
        ["jax", "optax"],
        options,
        ours=["gradaccum"],
    )


if __name__ == "__main__":
    main()

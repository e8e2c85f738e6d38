"""Time and peak memory of loss and gradients of 512 pairs in two towers with a contrastive loss, 32 pairs at a time,
compared with the whole batch and with the same two passes written by hand.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import arguments, in_fresh_process, in_short, publish, ratios, received, send, table

ROWS, MICRO, WIDTH, LAYERS, OUT = 512, 32, 512, 6, 32
CONTENDERS = ("whole batch", "by hand", "chunked", "chunked, keep=8")
BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}
IN_BACKEND = """
import os, sys
os.environ.update(KERAS_BACKEND=sys.argv[1], TF_CPP_MIN_LOG_LEVEL="3")
from benchmarks import keras_chunked
"""


def tower() -> Any:
    from keras import Sequential, layers

    return Sequential([layers.Input((256,)), *(layers.Dense(WIDTH, "gelu") for _ in range(LAYERS)), layers.Dense(OUT)])


def loss_of(a: Any, b: Any) -> Any:
    from keras import ops

    logits = ops.matmul(a, ops.transpose(b))
    return ops.mean(ops.logsumexp(logits, axis=1) + ops.logsumexp(logits, axis=0) - 2 * ops.diagonal(logits))


def gradients_of(function: Callable[..., Any], weights: list[Any], *inputs: Any) -> list[Any]:
    """The gradients of `function(weights, *inputs)`."""
    import keras

    if keras.backend.backend() == "jax":
        import jax

        return jax.grad(function)(weights, *inputs)
    if keras.backend.backend() == "torch":
        import torch

        weights = [weight.detach().requires_grad_() for weight in weights]
        return list(torch.autograd.grad(function(weights, *inputs), weights))
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(weights)
        value = function(weights, *inputs)
    return tape.gradient(value, weights)


def contender(name: str) -> Callable[[], object]:
    """A function that computes the gradients of a batch."""
    import keras
    from keras import ops

    import gradaccum.keras

    keras.utils.set_random_seed(0)
    towers = [tower(), tower()]
    for one in towers if name.startswith("chunked") else ():
        gradaccum.keras.chunked(one, MICRO, keep=8 if "keep" in name else 0)
    values = [[ops.convert_to_tensor(v.value) for v in one.trainable_variables] for one in towers]
    random = np.random.default_rng(0)
    batch = [ops.convert_to_tensor(random.normal(size=(ROWS, 256)).astype("float32")) for _ in towers]
    count = len(values[0])

    def outputs(which: int, weights: list[Any], x: Any) -> Any:
        return towers[which].stateless_call(weights, [], x, training=True)[0]

    def value(weights: list[Any], x: Any, y: Any) -> Any:
        return loss_of(outputs(0, weights[:count], x), outputs(1, weights[count:], y))

    def whole(weights: list[Any], *batch: Any) -> list[Any]:
        return gradients_of(value, weights, *batch)

    compiled = _compiled(whole)
    if name == "by hand":
        return _by_hand(outputs, values, batch)
    return lambda: _done(compiled(values[0] + values[1], *batch))


def _by_hand(outputs: Callable[..., Any], values: list[list[Any]], batch: list[Any]) -> Callable[[], object]:
    from keras import ops

    forward = _compiled(lambda which, weights, x: outputs(which, weights, x), static=True)
    upstream = _compiled(lambda pair: gradients_of(lambda pair: loss_of(*pair), pair))

    def pulled(which: int, weights: list[Any], x: Any, given: Any) -> list[Any]:
        return gradients_of(lambda weights, x: ops.sum(outputs(which, weights, x) * given), weights, x)

    backward = _compiled(pulled, static=True)

    def run() -> None:
        pieces = range(0, ROWS, MICRO)
        pair = []
        for which in (0, 1):
            with _without_graph():
                parts = [forward(which, values[which], batch[which][i : i + MICRO]) for i in pieces]
            pair.append(ops.concatenate(parts))
        given = upstream(pair)
        for which in (0, 1):
            sums: list[Any] = []
            for i in pieces:
                rows = slice(i, i + MICRO)
                found = backward(which, values[which], batch[which][rows], given[which][rows])
                sums = [a + b for a, b in zip(sums, found)] if sums else list(found)
            _done(sums)

    return run


def _compiled(function: Callable[..., Any], static: bool = False) -> Callable[..., Any]:
    import keras

    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function, static_argnums=(0,) if static else ())
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=True, autograph=False)
    return function


def _without_graph() -> Any:
    import contextlib

    import keras

    if keras.backend.backend() != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()


def _done(gradients: list[Any]) -> None:
    import keras

    keras.ops.convert_to_numpy(gradients[0])


def print_times(rounds: int) -> None:
    """In the backend's process: the times, as ratios to the whole batch's."""
    send(ratios({name: contender(name) for name in CONTENDERS}, "whole batch", rounds))


def print_memory(name: str) -> None:
    """In a process of its own: by how many MiB one batch raises the peak."""
    run = contender(name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def main() -> None:
    """Run it."""
    options = arguments(__doc__)
    rows = []
    for backend, title in (in_short(BACKENDS) if options.quick else BACKENDS).items():
        rounds = 1 if options.quick else 9
        line = in_fresh_process(f"{IN_BACKEND}\nkeras_chunked.print_times({rounds})", backend).splitlines()[-1]
        rows.append([title, "time", *received(line, "whole batch", rounds, title).values()])
        memory = []
        for name in CONTENDERS[-1:] if options.quick else CONTENDERS:
            code = f"{IN_BACKEND}\nkeras_chunked.print_memory({name!r})"
            memory.append(f"{float(in_fresh_process(code, backend).splitlines()[-1]):.0f} MiB")
        rows.append([title, "peak", *memory])
    publish(
        "keras_chunked",
        "Keras: chunked towers",
        f"{(__doc__ or '').strip()}\n\n{table(['backend', '', *CONTENDERS], rows)}",
        ["keras", "tensorflow-cpu", "jax", "torch"],
        options,
        ours=["chunked", "chunked, keep=8"],
    )


if __name__ == "__main__":
    main()

"""What the backend that Keras runs on has of its own; the other two are not imported."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops

from gradaccum.keras.chunking.body import Body

__all__ = ["at_once", "compiled", "known", "outer_tensors", "two_passes", "unprovable"]

_QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""For XLA: what runs but twice takes longest to compile."""


def two_passes(body: Body, micro_batch_size: int, keep: int) -> list[Any]:
    """The tensors in the outputs of the whole batch, and their masks.

    Raises:
        ValueError: There are none for this backend.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from gradaccum.keras.chunking import two_passes_tensorflow

        return two_passes_tensorflow.two_passes(body, micro_batch_size, keep)
    if backend == "jax":
        from gradaccum.keras.chunking import two_passes_jax

        return two_passes_jax.two_passes(body, micro_batch_size, keep)
    if backend == "torch":
        from gradaccum.keras.chunking import two_passes_torch

        return two_passes_torch.two_passes(body, micro_batch_size, keep)
    raise ValueError(f"chunked works on TensorFlow, JAX and PyTorch. Received: Keras' {backend} backend.")


def known(tensors: list[Any]) -> bool:
    """Whether these hold numbers: not while a function is traced."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return not any(isinstance(tensor, jax.core.Tracer) for tensor in tensors)
    if backend == "tensorflow":
        import tensorflow as tf

        return all(not ops.is_tensor(tensor) or isinstance(tensor, tf.__internal__.EagerTensor) for tensor in tensors)
    return True


def unprovable() -> str:
    """Where nothing can be evaluated beside what is running; empty where it can."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return "under a strategy of several replicas" if tf.distribute.get_strategy().num_replicas_in_sync > 1 else ""
    if keras.backend.backend() == "torch":
        import torch

        return "inside of torch.compile" if torch.compiler.is_compiling() else ""
    return ""


def outer_tensors(outputs: list[Any], values: list[Any], layer: Any) -> list[tuple[int, ...]]:
    """Shapes of what `outputs` pass gradients to beside `values` and a module's own parameters, on PyTorch.

    TensorFlow's two passes look for such tensors themselves, and on JAX they get their gradients.
    """
    if keras.backend.backend() != "torch":
        return []
    import torch

    own = {id(value) for value in values}
    if isinstance(layer, torch.nn.Module):
        own |= {id(parameter) for parameter in layer.parameters()}
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, found = set(waiting), []
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in own:
            found.append(tuple(leaf.shape))
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)
    return found


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """While this is open, operations run at once, whatever is traced, and PyTorch's generators are left alone."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        with jax.ensure_compile_time_eval():
            yield
    elif backend == "tensorflow":
        import tensorflow as tf

        with tf.init_scope():
            yield
    else:
        import torch

        with torch.random.fork_rng(), torch.enable_grad():
            yield


def compiled(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """`function(values)`, compiled as quickly as possible where running it at once would compile each operation."""
    if keras.backend.backend() != "jax":
        return function
    import jax

    return jax.jit(function, compiler_options=_QUICKLY)

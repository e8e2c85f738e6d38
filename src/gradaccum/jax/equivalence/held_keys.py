"""Keys that draw the same for each row, so that random numbers don't hang on the size of a micro-batch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl, threefry_prng_impl

__all__ = ["held"]


@functools.cache
def _implementation() -> Any:
    """Threefry, whose numbers along the first axis are all the same."""

    def random_bits(key: Any, bit_width: int, shape: tuple[int, ...]) -> Any:
        if not shape:
            return threefry_prng_impl.random_bits(key, bit_width, shape)
        return jnp.broadcast_to(threefry_prng_impl.random_bits(key, bit_width, (1, *shape[1:])), shape)

    return define_prng_impl(
        key_shape=(2,),
        seed=threefry_prng_impl.seed,
        split=threefry_prng_impl.split,
        random_bits=random_bits,
        fold_in=threefry_prng_impl.fold_in,
        name="gradaccum_held",
        tag="held",
    )


def held(key: Any) -> Any:
    """A key in place of this one, typed or not."""
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    return jax.random.wrap_key_data(data[..., :2], impl=_implementation())

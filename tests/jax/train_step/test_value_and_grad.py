"""`value_and_grad` gives what `jax.value_and_grad` gives on the whole batch."""

import jax

import gradaccum.jax
from tests.jax.problems import network, rows, squared_error, tree_error
from tests.reference import FLOAT64


def test_ragged_micro_batches_match_the_large_batch():
    params, batch = network(), rows(11)
    grad_fn = gradaccum.jax.value_and_grad(squared_error, micro_batch_size=4)
    expected = jax.value_and_grad(squared_error)(params, batch)
    assert tree_error(jax.jit(grad_fn)(params, batch), expected) <= FLOAT64

"""A window is saved in the middle and goes on, bit for bit."""

import pickle

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from gradaccum.jax import windowed
from tests.jax.optimizer.test_windowed import micro_step, taken
from tests.jax.problems import network, rows


def through_pickle(tree, folder):
    return pickle.loads(pickle.dumps(tree))


def through_orbax(tree, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", tree)
        checkpointer.wait_until_finished()
        blank = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)
        return checkpointer.restore(folder / "state", blank)


@pytest.mark.parametrize("restored", [pytest.param(through_pickle, marks=pytest.mark.slow), through_orbax])
def test_a_window_saved_in_the_middle_goes_on_bit_for_bit(restored, tmp_path):
    batch, params = rows(14), network()
    optimizer = windowed(optax.adamw(optax.linear_schedule(0.1, 0.01, 3)), {0: 3, 1: 2})
    step, state = micro_step(optimizer), optimizer.init(params)
    ended = {}
    for stop in (False, True):
        now = params, state
        for i in range(7):
            now = step(*now, taken(batch, slice(2 * i, 2 * i + 2)))
            if stop and i == 4:
                assert int(now[1].micro_batches) == 2
                now = restored(now, tmp_path)
        ended[stop] = (now, optimizer.flush(now[1], now[0]))
    a, b = jax.tree.leaves(ended[False]), jax.tree.leaves(ended[True])
    assert all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))

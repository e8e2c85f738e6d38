"""`estimate_size` and `gradaccum size|check` of a JAX loss."""

import json
import textwrap

import jax
import jax.numpy as jnp
import pytest

from gradaccum.core.sizes import DoesNotFit
from gradaccum.jax import value_and_grad
from gradaccum.jax.measure import estimate_size
from tests.cli.results import assert_one_clear_line, invoke

PARAMS = {"a": jnp.zeros((64, 256)), "b": jnp.zeros((256, 1))}
X = jnp.zeros((512, 64))


def loss_fn(params, x):
    return ((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2).mean()


def stated(size):
    found = jax.jit(value_and_grad(loss_fn, micro_batch_size=size)).lower(PARAMS, X).compile().memory_analysis()
    return found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes


def test_the_largest_size_that_fits_is_found_without_a_run():
    adam = 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(PARAMS)) + 4
    limit = stated(128) + adam
    estimate = estimate_size(loss_fn, PARAMS, X, memory_limit=limit, margin=0.0)
    assert 64 < estimate.micro_batch_size <= 170  # 171 would be the next size of even micro-batches
    assert estimate.peak <= limit
    shapes = jax.eval_shape(lambda: X)  # are enough
    assert estimate_size(loss_fn, PARAMS, shapes, memory_limit="1GiB").micro_batch_size == 512
    with pytest.raises(DoesNotFit, match="Not even a micro-batch of one row fits"):
        estimate_size(loss_fn, PARAMS, X, memory_limit=adam)


FILE = """
    import jax.numpy as jnp

    def loss_fn(params, batch):
        print("the user's own line")
        x, y = batch
        return jnp.where(y >= 0, (x @ params["w"] - y) ** 2, 0).sum() / (y >= 0).sum()

    def make():
        x = jnp.arange(24.0).reshape(8, 3) / 10
        return {"w": jnp.ones(3)}, (x, jnp.array([1, -1, -1, 0, 1, -1, 0, 1])), loss_fn

    def right():
        params, batch, loss_fn = make()
        return params, batch, {"loss_fn": loss_fn, "weight": lambda batch: (batch[1] >= 0).sum()}
"""


@pytest.fixture
def command(tmp_path):
    """`gradaccum` with a function of this file."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(FILE), encoding="utf-8")

    return lambda name, function, *arguments: invoke(name, f"{tmp_path / 'mine.py'}:{function}", *arguments)


def test_the_command_checks_a_jax_loss(command):
    done = command("check", "make", "--json")
    assert done.exit_code == 1, done.output
    assert json.loads(done.stdout)["causes"][0]["kind"] == "weight"
    assert command("check", "right", "--framework", "jax", "--micro-batch-size", 4).exit_code == 0
    assert_one_clear_line(command("check", "make", "--device", "cuda"), "--device is for PyTorch")


def test_the_command_says_what_fits(command):
    done = command("size", "right", "--memory", "1MiB")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("micro_batch_size: 8 of 8 rows\n")
    assert command("size", "make", "--framework", "jax", "--memory", 1).exit_code == 1

"""`micro_batch_size="auto"`: the fastest size of those whose memory, as XLA states it, fits."""

import logging

import jax
import jax.numpy as jnp
import pytest

import gradaccum.jax
from gradaccum.jax.train_step.auto_size import Trial, fastest
from tests.jax.problems import at_once, in_micro_batches, network, rows, squared_error, tree_error
from tests.jax.train_step.test_transformations import deep
from tests.reference import FLOAT64

PARAMS = {"in": jax.ShapeDtypeStruct((8, 128), jnp.float64), "mid": jax.ShapeDtypeStruct((128, 128), jnp.float64)}


def stated(function, *kinds):
    analysis = function.lower(*kinds).compile().memory_analysis()
    return analysis.argument_size_in_bytes + analysis.output_size_in_bytes + analysis.temp_size_in_bytes


def chosen(caplog):
    """What the log says: size, rows, bytes, limit."""
    (record,) = [record for record in caplog.records if "'auto'" in record.msg]
    return record.args


def test_the_batch_is_that_of_plain_jax_and_a_line_says_what_was_chosen(caplog):
    params, batch = network(), rows(64)
    grad_fn = in_micro_batches(squared_error, "auto")
    with caplog.at_level(logging.INFO, "gradaccum"):
        assert tree_error(grad_fn(params, batch), at_once(squared_error)(params, batch)) <= FLOAT64
    size, count, *_ = chosen(caplog)
    assert 1 <= size <= count == 64
    assert f"micro_batch_size='auto': {size} of 64 rows. Loss and gradients take " in caplog.text


def test_what_is_chosen_fits_as_xla_states_it_without_any_data(caplog):
    batch = jax.ShapeDtypeStruct((128, 8), jnp.float64)
    limit = (stated(in_micro_batches(deep, 8), PARAMS, batch) + stated(in_micro_batches(deep, 32), PARAMS, batch)) // 2
    grad_fn = gradaccum.jax.value_and_grad(deep, micro_batch_size="auto", memory_limit=limit)
    with caplog.at_level(logging.INFO, "gradaccum"):
        found = stated(jax.jit(grad_fn), PARAMS, batch)
    size, *_ = chosen(caplog)
    assert size < 32
    assert found <= limit
    assert abs(found - stated(in_micro_batches(deep, size), PARAMS, batch)) <= 0.1 * found


def test_the_statement_is_that_of_the_users_program(caplog):
    batch = jax.ShapeDtypeStruct((64, 8), jnp.float64)
    with caplog.at_level(logging.INFO, "gradaccum"):
        found = stated(in_micro_batches(deep, "auto"), PARAMS, batch)
    number, unit = chosen(caplog)[2].split()
    assert abs(float(number) * 1024 ** ["B", "KiB", "MiB"].index(unit) - found) <= 0.1 * found


def test_what_does_not_fit_is_an_error_that_states_the_numbers():
    grad_fn = gradaccum.jax.value_and_grad(squared_error, micro_batch_size="auto", memory_limit=1000)
    with pytest.raises(ValueError, match=r"one row take \d.* the limit is 1000 B. Raise `memory_limit`"):
        grad_fn(network(), rows(2))


def test_a_shape_is_measured_once(monkeypatch):
    measured = []

    def first(count, trial_of, limit):
        measured.append(count)
        return 2, {2: Trial(1.0, lambda: 1.0)}, {2: 1.0}

    monkeypatch.setattr("gradaccum.jax.train_step.auto_size.fastest", first)
    grad_fn = gradaccum.jax.value_and_grad(squared_error, micro_batch_size="auto")
    for count in (6, 6, 4, 6):
        jax.eval_shape(grad_fn, network(), rows(count))
    assert measured == [6, 4]


def test_keys_states_static_arguments_and_values_from_around_are_no_hindrance():
    def loss_fn(params, batch, key, state, kind, *, scale):
        assert kind == "even"
        noise = jax.random.normal(key, batch[0].shape)
        return squared_error(params, (batch[0] + 0 * noise, batch[1])) * scale, state + 1

    @jax.jit
    def update(params, batch, key, scale):
        def around(*args, **kwargs):
            loss, state = loss_fn(*args, **kwargs)
            return loss * scale + 0 * jax.random.uniform(key), state

        grad_fn = gradaccum.jax.value_and_grad(around, micro_batch_size="auto", rng_argnum=2, state_argnum=3)
        return grad_fn(params, batch, key, jnp.asarray(0), "even", scale=2.0)

    params, batch = network(), rows(2)
    (loss, state), grads = update(params, batch, jax.random.key(0), 0.5)
    assert int(state) >= 1
    assert tree_error((loss, grads), at_once(squared_error)(params, batch)) <= FLOAT64


def test_a_loss_that_needs_its_surroundings_is_an_error():
    grad_fn = gradaccum.jax.value_and_grad(lambda w, x: jax.lax.psum((w * x).mean(), "i"), micro_batch_size="auto")
    with pytest.raises(ValueError, match='micro_batch_size="auto" compiles loss_fn alone'):
        jax.vmap(grad_fn, (None, 0), axis_name="i")(1.0, jnp.ones((2, 4)))


def search(rows, cost, memory, limit):
    tried = []

    def trial_of(size):
        tried.append(size)
        return Trial(memory(size), lambda: cost(size))

    return fastest(rows, trial_of, limit)[0], tried


@pytest.mark.parametrize(
    ("cost", "limit", "expected"),
    [
        (lambda size: 1 + 1024 / size, 1e9, 1024),  # larger is faster
        (lambda size: 1 + 1024 / size, 10_000, 100),  # and all that fits
        (lambda size: 1 + 0.1 * size, 1e9, 8),  # smaller is faster: half of the first
        (lambda size: abs(size - 128) + 300, 1e9, 128),  # between two steps
    ],
)
def test_the_fastest_size_that_fits_is_found_in_a_few_compilations(cost, limit, expected):
    size, tried = search(1024, cost, lambda size: 100.0 * size, limit)
    assert size == expected or (expected == 8 and size in (8, 16))
    assert len(tried) <= 6
    assert all(100 * each <= limit for each in tried), "a size is compiled only if it is predicted to fit"


def test_where_the_first_size_does_not_fit_smaller_ones_are_tried():
    size, _ = search(1024, lambda size: 1 / size, lambda size: 100.0 * size, 150)
    assert size == 1
    with pytest.raises(ValueError, match="micro-batches of one row take 100 B"):
        search(1024, lambda size: 1.0, lambda size: 100.0 * size, 50)

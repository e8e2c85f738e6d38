"""`micro_batch_size="auto"`: the fastest size of those whose memory, as XLA states it, fits."""

import logging

import jax
import jax.numpy as jnp
import pytest

import gradaccum.jax
from gradaccum.jax.train_step.auto_size import Trial, fastest
from tests.jax.problems import assert_same, at_once, in_micro_batches, network, rows, squared_error
from tests.jax.train_step.test_transformations import analysis, deep


def stated(function, count):
    found = analysis(function, count)
    return found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes


@pytest.fixture
def chosen(caplog):
    """What the log says: size, rows, bytes, limit."""
    caplog.set_level(logging.INFO, "gradaccum")
    return lambda: next(record.args for record in caplog.records if "'auto'" in record.msg)


def test_the_batch_is_that_of_plain_jax_and_a_line_says_what_was_chosen(chosen, caplog):
    params, batch = network(), rows(64)
    found = in_micro_batches(squared_error, "auto")(params, batch)
    assert_same(found, at_once(squared_error)(params, batch))
    size, count, *_ = chosen()
    assert 1 <= size <= count == 64
    assert f"micro_batch_size='auto': {size} of 64 rows. Loss and gradients take " in caplog.text


def test_what_is_chosen_fits_as_xla_states_it_without_any_data(chosen):
    limit = sum(stated(in_micro_batches(deep, size), 128) for size in (8, 32)) // 2
    found = stated(in_micro_batches(deep, "auto", memory_limit=limit), 128)
    size, _, bytes_, *_ = chosen()
    assert size < 32
    assert found <= limit
    assert abs(found - stated(in_micro_batches(deep, size), 128)) <= 0.1 * found
    number, unit = bytes_.split()
    assert abs(float(number) * 1024 ** ["B", "KiB", "MiB"].index(unit) - found) <= 0.1 * found, "of another program"


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
    assert_same((loss, grads), at_once(squared_error)(params, batch))


def test_a_loss_that_needs_its_surroundings_is_an_error():
    grad_fn = gradaccum.jax.value_and_grad(lambda w, x: jax.lax.psum((w * x).mean(), "i"), micro_batch_size="auto")
    with pytest.raises(ValueError, match='micro_batch_size="auto" compiles loss_fn alone'):
        jax.vmap(grad_fn, (None, 0), axis_name="i")(1.0, jnp.ones((2, 4)))


@pytest.mark.parametrize(
    ("cost", "limit", "expected"),
    [
        (lambda size: 1 + 1024 / size, 1e9, {1024}),  # larger is faster
        (lambda size: 1 + 1024 / size, 10_000, {100}),  # and all that fits
        (lambda size: 1 + 0.1 * size, 1e9, {8, 16}),  # smaller is faster: half of the first
        (lambda size: abs(size - 128) + 300, 1e9, {128}),  # between two steps
        (lambda size: 1 / size, 150, {1}),  # the first size does not fit
        (lambda size: 1.0, 50, None),
    ],
)
def test_the_fastest_size_that_fits_is_found_in_a_few_compilations(cost, limit, expected):
    tried = []

    def trial_of(size):
        tried.append(size)
        return Trial(100.0 * size, lambda: cost(size))

    if expected is None:
        with pytest.raises(ValueError, match="micro-batches of one row take 100 B"):
            fastest(1024, trial_of, limit)
        return
    assert fastest(1024, trial_of, limit)[0] in expected
    if limit > 150:
        assert len(tried) <= 6
        assert all(100 * each <= limit for each in tried), "a size is compiled only if it is predicted to fit"

"""Inside whatever the user transforms; in the memory of one micro-batch; and by the size that fits, with "auto"."""

import logging

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

import gradaccum.jax
from gradaccum.core.sizes import fastest_size
from tests.jax.comparisons import assert_large_batch, assert_same, at_once, in_micro_batches
from tests.jax.problems import PARAMS, counted, masked_error, network, rows, squared_error, stacked


def over_models(value_and_grad):
    """Weights that are 0 for one of them and not for the other, too."""
    batch = (*rows(11), jnp.stack([jnp.arange(11) % 3 == 0, jnp.arange(11) > 7]))
    return jax.vmap(value_and_grad, (0, (None, None, 0)))(stacked(network(0), network(1)), batch)


def over_updates(value_and_grad):
    def update(params, batch):
        loss, grads = value_and_grad(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return jax.lax.scan(update, network(), stacked(*(rows(7, seed) for seed in range(3))))


def second_derivative(value_and_grad):
    def squared(params):
        return sum((leaf**2).sum() for leaf in jax.tree.leaves(value_and_grad(params, rows(7))[1]))

    return jax.grad(squared)(network())


@pytest.mark.parametrize(
    ("program", "loss_fn", "options"),
    [
        (over_models, masked_error, {"weight": counted}),
        (over_updates, squared_error, {}),
        (second_derivative, squared_error, {}),
    ],
    ids=["vmap over models", "scan over updates", "second derivative"],
)
def test_transformed_it_is_what_plain_jax_is(program, loss_fn, options):
    split = gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=4, **options)
    found, expected = (jax.jit(lambda of=of: program(of))() for of in (split, jax.value_and_grad(loss_fn)))
    assert_same(found, expected)


def test_checkify_sees_an_error_in_a_micro_batch():
    def loss_fn(w, x):
        checkify.check(x.min() >= 0, "a row below 0")
        return (w * x).mean()

    step = jax.jit(checkify.checkify(gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=2)))
    error, (loss, _) = step(1.0, jnp.arange(5.0))
    error.throw()
    assert float(loss) == 2.0
    error, _ = step(1.0, jnp.asarray([1.0, 1.0, 1.0, 1.0, -1.0]))
    with pytest.raises(checkify.JaxRuntimeError, match="a row below 0"):
        error.throw()


def test_debug_nans_sees_a_nan_of_the_loss_and_no_other():
    step = in_micro_batches(lambda w, x: jnp.log(w * x).mean(), 2, weight=lambda x: (x > 0).sum(), verify=False)
    with jax.debug_nans(True):
        step(1.0, jnp.arange(1.0, 6.0))
        with pytest.raises(FloatingPointError):
            step(-1.0, jnp.arange(1.0, 6.0))


# Memory.


def deep(params, batch):
    """Activations are what takes the memory: 64 bytes of input, 8 layers of 1 KiB per row."""
    x = batch @ params["in"]
    for _ in range(8):
        x = jnp.sin(x @ params["mid"])
    return (x**2).mean()


DEEP = {"in": jax.ShapeDtypeStruct((8, 128), jnp.float64), "mid": jax.ShapeDtypeStruct((128, 128), jnp.float64)}


def analysis(function, count):
    """What XLA states of the memory of `deep`."""
    batch = jax.ShapeDtypeStruct((count, 8), jnp.float64)
    return function.lower(DEEP, batch).compile().memory_analysis()


def test_the_memory_is_that_of_one_micro_batch_however_many_there_are_and_that_of_a_scan_by_hand():
    def by_hand(params, batch):
        def body(sums, rows):
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(deep)(params, rows)), None

        zeros = (jnp.zeros((), batch.dtype), jax.tree.map(jnp.zeros_like, params))
        sums, _ = jax.lax.scan(body, zeros, batch.reshape(-1, 16, 8))
        return jax.tree.map(lambda leaf: leaf / (len(batch) // 16), sums)

    few, many = (analysis(in_micro_batches(deep, 16), count).temp_size_in_bytes for count in (64, 1024))
    gradients = 8 * (8 * 128 + 128 * 128)
    assert many == few, "temporaries grow with the number of micro-batches"
    assert many <= analysis(at_once(deep), 16).temp_size_in_bytes + 2 * gradients
    assert many <= 1.001 * analysis(jax.jit(by_hand), 1024).temp_size_in_bytes
    assert analysis(at_once(deep), 1024).temp_size_in_bytes > 5 * many


def test_there_are_two_bodies_at_most():
    traced = []

    def loss_fn(w, x):
        traced.append(x.shape)
        return (w * x).mean()

    text = in_micro_batches(loss_fn, 4, verify=False).lower(1.0, jnp.ones(50)).as_text()  # 11 of 4 rows, 2 of 3
    assert set(traced) == {(4,), (3,)}
    assert text.count("stablehlo.while") == 2
    assert in_micro_batches(loss_fn, 4).lower(1.0, jnp.ones(48)).as_text().count("stablehlo.while") == 1


# `micro_batch_size="auto"`: the fastest size of those whose memory, as XLA states it, fits.


def stated(function, count):
    found = analysis(function, count)
    return found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes


@pytest.fixture
def chosen(caplog):
    """What the log says: size, rows, bytes, limit."""
    caplog.set_level(logging.INFO, "gradaccum")
    return lambda: next(record.args for record in caplog.records if "'auto'" in record.msg)


def test_the_batch_is_that_of_plain_jax_and_a_line_says_what_was_chosen(chosen, caplog):
    assert_large_batch(squared_error, "auto", PARAMS, rows(64))
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

    def first(count, trial, limit):
        measured.append(count)
        return 2, {2: 1.0}, {2: 1.0}

    monkeypatch.setattr("gradaccum.jax.train_step.auto_size.fastest_size", first)
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

    def trial(size):
        tried.append(size)
        return 100.0 * size, cost(size) if 100 * size <= limit else None

    if expected is None:
        with pytest.raises(ValueError, match="micro-batches of one row take 100 B"):
            fastest_size(1024, trial, limit)
        return
    assert fastest_size(1024, trial, limit)[0] in expected
    if limit > 150:
        assert len(tried) <= 6
        assert all(100 * each <= limit for each in tried), "a size is compiled only if it is predicted to fit"

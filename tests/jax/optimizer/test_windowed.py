"""`windowed`: small batches through it make the updates of large ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum.jax
from gradaccum.jax import updated, windowed
from tests.jax.problems import network, rows, squared_error, tree_error
from tests.reference import FLOAT64, WINDOWS, ragged, windows_of

OPTIMIZERS = {
    "momentum": optax.sgd(0.05, momentum=0.9),
    "clipped AdamW with a schedule": optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(optax.linear_schedule(0.1, 0.01, 4), weight_decay=0.1)
    ),
}


gradient_of = jax.jit(jax.grad(squared_error))  # compiled once for each number of rows, whatever the test


@functools.cache
def compiled_update(optimizer):
    """Compiled once for each optimizer."""
    return jax.jit(optimizer.update)


def large_batches(optimizer, params, batches):
    """Plain optax, one ordinary step per large batch. Returns parameters and state."""
    state, update = optimizer.init(params), compiled_update(optimizer)
    for batch in batches:
        updates, state = update(gradient_of(params, batch), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def micro_step(optimizer):
    """The user's own step on a small batch, jitted in two parts."""
    update = jax.jit(optimizer.update)

    def step(params, state, batch):
        updates, state = update(gradient_of(params, batch), state, params, weight=len(batch[0]))
        return optax.apply_updates(params, updates), state

    return step


def taken(batch, part):
    """Of NumPy's arrays: a slice of JAX' is a program of its own for each shape."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[part], batch)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ragged everywhere", "clipped AdamW with a schedule"),
        *(pytest.param(name, "momentum", marks=pytest.mark.slow) for name in WINDOWS),
        *(pytest.param(name, "clipped AdamW with a schedule", marks=pytest.mark.slow) for name in WINDOWS),
    ],
)
def test_epochs_of_small_batches_make_the_updates_of_large_ones(name, kind):
    sizes, steps = WINDOWS[name]
    params, batch = network(), rows(sum(sizes))
    parts = ragged(sum(sizes), sizes)
    groups = [slice(window[0].start, window[-1].stop) for window in windows_of(parts, steps)]
    expected, inner_state = large_batches(OPTIMIZERS[kind], params, [taken(batch, part) for part in groups] * 2)

    optimizer = windowed(OPTIMIZERS[kind], steps)
    step, state = micro_step(optimizer), optimizer.init(params)
    for _ in range(2):
        for part in parts:
            params, state = step(params, state, taken(batch, part))
        updates, state = optimizer.flush(state, params)
        params = optax.apply_updates(params, updates)
    assert tree_error(params, expected) <= FLOAT64
    assert tree_error(state.inner_state, inner_state) <= FLOAT64
    assert int(state.updates) == 2 * len(groups)


def gradients_into(optimizer, gradients, params=None, weights=None, flush=False):
    """What the loop on these gradients gives: parameters, state, and `updated` after each."""
    params = jnp.zeros(3) if params is None else params
    state, seen = optimizer.init(params), []
    for i, gradient in enumerate(gradients):
        weight = None if weights is None else weights[i]
        updates, state = optimizer.update(gradient, state, params, weight=weight)
        params = optax.apply_updates(params, updates)
        seen.append(bool(updated(state)))
    if flush:
        updates, state = optimizer.flush(state, params)
        params = optax.apply_updates(params, updates)
    return params, state, seen


ONES = jnp.ones(3)


def test_without_weights_micro_batches_count_the_same():
    params, _, seen = gradients_into(windowed(optax.sgd(1.0), 2), [1 * ONES, 2 * ONES, 5 * ONES], flush=True)
    assert np.allclose(params, -1.5 - 5)
    assert seen == [False, True, False]


def test_the_inner_optimizer_runs_inside_a_branch_only():
    calls = []
    inner = optax.stateless(lambda grads, params: jax.debug.callback(lambda: calls.append(1)) or grads)
    step, params = micro_step(windowed(inner, 4)), network()
    state = windowed(inner, 4).init(params)
    for _ in range(8):
        params, state = step(params, state, rows(2))
    jax.effects_barrier()
    assert len(calls) == 2


@pytest.mark.parametrize("traced", [False, True])
def test_a_micro_batch_of_weight_0_is_left_out_even_if_it_is_nan(traced):
    optimizer = windowed(optax.sgd(1.0), 3)
    weights = [2, 0, 1] if not traced else [jnp.asarray(w) for w in (2.0, 0.0, 1.0)]
    if traced:
        optimizer = optimizer._replace(update=jax.jit(optimizer.update))
    params, _, seen = gradients_into(optimizer, [ONES, jnp.nan * ONES, 4 * ONES], weights=weights)
    assert np.allclose(params, -2, rtol=FLOAT64)
    assert seen == [False, False, True]


def test_a_window_of_weight_0_makes_no_update():
    optimizer = windowed(optax.adam(0.1), 2)
    params, state, seen = gradients_into(optimizer, [jnp.nan * ONES] * 3, weights=[0, 0, 0], flush=True)
    assert seen == [False] * 3
    assert not updated(state)
    assert int(state.updates) == 0
    assert np.array_equal(params, jnp.zeros(3))
    assert int(state.inner_state[0].count) == 0


def test_a_nan_never_reaches_the_next_window():
    bad = [ONES, jnp.nan * ONES, ONES, 3 * ONES]
    params, state, _ = gradients_into(windowed(optax.apply_if_finite(optax.sgd(1.0), 5), 2), bad)
    assert np.allclose(params, -2, rtol=FLOAT64)
    assert int(state.inner_state.total_notfinite) == 1


def test_a_traced_weight_that_is_none_makes_the_update_nan():
    optimizer = windowed(optax.sgd(1.0), 1)
    update = jax.jit(optimizer.update)
    for weight in (-1.0, jnp.nan):
        assert np.isnan(update(ONES, optimizer.init(ONES), ONES, weight)[0]).all()


def test_a_table_of_epochs_is_followed_and_a_window_keeps_its_length():
    optimizer = windowed(optax.sgd(1.0), {0: 3, 1: 2, 3: 1})
    params, update, flush = ONES, jax.jit(optimizer.update), jax.jit(optimizer.flush)
    state, seen = optimizer.init(params), []
    for _ in range(4):
        marks = ""
        for _ in range(4):
            _, state = update(ONES, state, params)
            marks += "u" if updated(state) else "."
        _, state = flush(state, params)
        seen.append(marks + ("f" if updated(state) else "-"))
    assert seen == ["..u.f", ".u.u-", ".u.u-", "uuuu-"]
    assert update._cache_size() == 1


@pytest.mark.parametrize("jit", [False, True])
def test_a_callable_is_asked_for_the_window_that_opens(jit):
    if jit:
        optimizer = windowed(optax.sgd(1.0), lambda epoch, update: jnp.where(update < 2, 1, 3))
        optimizer = optimizer._replace(update=jax.jit(optimizer.update))
    else:
        optimizer = windowed(optax.sgd(1.0), lambda epoch, update: 1 if update < 2 else 3)
    assert gradients_into(optimizer, [ONES] * 6)[2] == [True, True, False, False, True, False]


def test_a_state_from_other_steps_finishes_its_window_first():
    _, state, _ = gradients_into(windowed(optax.sgd(1.0), 4), [ONES])
    optimizer, seen = windowed(optax.sgd(1.0), 2), []
    for _ in range(6):
        _, state = optimizer.update(ONES, state, ONES)
        seen.append(bool(updated(state)))
    assert seen == [False, False, True, False, True, False]


def test_gradients_that_are_none_count_as_zeros():
    params, batch = network(), rows(6)
    frozen = {"hidden": None, "out": network()["out"]}
    optimizer = windowed(optax.adam(0.1), 2)
    state = optimizer.init(frozen)  # as equinox.partition makes it
    grads = jax.grad(squared_error)(params, batch) | {"hidden": None}
    updates, state = optimizer.update(grads, state, frozen)
    updates, state = optimizer.update(grads, state, frozen)
    assert updates["hidden"] is None
    assert float(jnp.abs(updates["out"]["bias"]).min()) > 0.05

    pair = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    one = {"a": jnp.ones(()), "b": None}
    params, _, _ = gradients_into(windowed(optax.sgd(1.0), 2), [one, pair | {"b": jnp.ones(())}], pair)
    assert float(params["a"]) == -0.5
    assert float(params["b"]) == -0.5


INNER = {
    "masked": lambda: optax.masked(optax.adam(0.1), {"hidden": True, "out": False}),
    "multi_transform": lambda: optax.multi_transform(
        {"fast": optax.sgd(0.1, momentum=0.9), "none": optax.set_to_zero()}, {"hidden": "fast", "out": "none"}
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.exponential_decay(0.1, 1, 0.5)
    ),
}


@pytest.mark.parametrize("name", INNER)
def test_optimizers_made_of_others_are_held_unchanged(name):
    params, batch = network(), rows(12)
    expected, inner_state = large_batches(INNER[name](), params, [taken(batch, slice(i, i + 6)) for i in (0, 6)])
    optimizer = windowed(INNER[name](), 3)
    step, state = micro_step(optimizer), optimizer.init(params)
    for i in range(0, 12, 2):
        params, state = step(params, state, taken(batch, slice(i, i + 2)))
    assert tree_error(params, expected) <= FLOAT64
    assert tree_error(state.inner_state, inner_state) <= FLOAT64


def test_a_part_of_the_parameters_may_have_windows_of_its_own():
    optimizer = optax.multi_transform(
        {"slow": windowed(optax.sgd(1.0), 2), "plain": optax.sgd(1.0)}, {"a": "slow", "b": "plain"}
    )
    params = {"a": jnp.zeros(3), "b": jnp.zeros(3)}
    state = optimizer.init(params)
    for value in (1.0, 3.0):
        updates, state = optimizer.update({"a": value * ONES, "b": value * ONES}, state, params)
        params = optax.apply_updates(params, updates)
    assert np.allclose(params["a"], -2)
    assert np.allclose(params["b"], -4)
    assert updated(state)


def test_value_reaches_the_inner_optimizer_as_the_windows_mean():
    def update(grads, state, params=None, *, value, factor, **extra):
        return grads, {"value": value, "factor": factor}

    optimizer = windowed(
        optax.GradientTransformationExtraArgs(lambda params: {"value": jnp.zeros(()), "factor": 0}, update), 2
    )
    state, seen = optimizer.init(ONES), []
    for value, weight, factor in ((1.0, 3, 7), (5.0, 1, 8), (4.0, 2, 9)):
        _, state = jax.jit(optimizer.update, static_argnames="weight")(
            ONES, state, ONES, weight=weight, value=jnp.asarray(value), factor=factor
        )
        seen.append([float(number) for number in state.inner_state.values()])
    _, state = optimizer.flush(state, ONES, factor=10)
    seen.append([float(number) for number in state.inner_state.values()])
    assert seen == [[0, 0], [8, 2.0], [8, 2.0], [10, 4.0]]


def test_a_plateau_is_judged_by_the_windows_loss():
    make = lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))  # noqa: E731
    losses = [3.0, 1.0, 2.0, 2.0, 4.0, 0.0, 1.0, 3.0]
    plain, wrapped = make(), windowed(make(), 2)
    expected, state = plain.init(ONES), wrapped.init(ONES)
    for pair in zip(losses[::2], losses[1::2]):
        _, expected = plain.update(ONES, expected, ONES, value=jnp.asarray(sum(pair) / 2))
        for loss in pair:
            _, state = jax.jit(wrapped.update)(ONES, state, ONES, value=jnp.asarray(loss))
    assert tree_error(state.inner_state, expected) <= FLOAT64
    assert float(expected[1].scale) < 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_summed_in_single(dtype):
    gradients = [jnp.asarray([8.0, 0.5], dtype) * (1 if i == 0 else 2**-9) for i in range(512)]
    params = jnp.zeros(2, dtype)
    optimizer = windowed(optax.sgd(1.0), 512)
    update = jax.jit(optimizer.update)
    updates, _, _ = gradients_into(optimizer._replace(update=update), gradients, params)
    exact = -sum(np.asarray(g, np.float64) for g in gradients) / 512
    assert updates.dtype == dtype
    assert np.abs(np.asarray(updates, np.float64) / exact - 1).max() <= float(jnp.finfo(dtype).eps) / 2


def test_accumulate_dtype_float64_sums_single_precision_in_double():
    optimizer = windowed(optax.sgd(1.0), 2, accumulate_dtype=jnp.float64)
    state = optimizer.init(jnp.zeros(3, jnp.float32))
    assert state.sums.dtype == jnp.float64
    updates, _ = optimizer.update(jnp.ones(3, jnp.float32), state, jnp.zeros(3, jnp.float32))
    assert updates.dtype == jnp.float32


def test_one_step_is_the_plain_optimizer_bit_for_bit():
    params, batches = network(), [rows(4, seed=i) for i in range(3)]
    expected, _ = large_batches(optax.adam(0.1), params, batches)
    optimizer = windowed(optax.adam(0.1), 1)
    step, state = micro_step(optimizer), optimizer.init(params)
    for batch in batches:
        params, state = step(params, state, batch)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected)))


def test_a_loop_with_donated_buffers_is_one_program_and_exact():
    params, batch = network(), rows(12)
    expected, _ = large_batches(optax.adam(0.1), params, [batch])
    optimizer = windowed(optax.adam(0.1), 4)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        updates, state = optimizer.update(jax.grad(squared_error)(params, batch), state, params, weight=len(batch[0]))
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    params = jax.tree.map(jnp.copy, params)
    for i in range(0, 12, 3):
        params, state = step(params, state, taken(batch, slice(i, i + 3)))
    assert tree_error(params, expected) <= FLOAT64
    assert step._cache_size() == 1


def test_inside_scan():
    params, batch = network(), rows(12)
    expected, _ = large_batches(optax.adam(0.1), params, [taken(batch, slice(i, i + 6)) for i in (0, 6)])
    optimizer = windowed(optax.adam(0.1), 2)

    def step(carry, batch):
        params, state = carry
        updates, state = optimizer.update(jax.grad(squared_error)(params, batch), state, params)
        return (optax.apply_updates(params, updates), state), updated(state)

    stacked = jax.tree.map(lambda leaf: leaf.reshape(4, 3, -1), batch)
    (params, _), seen = jax.jit(lambda *carry: jax.lax.scan(step, carry, stacked))(params, optimizer.init(params))
    assert tree_error(params, expected) <= FLOAT64
    assert seen.tolist() == [False, True, False, True]


def test_sums_keep_the_shardings_of_the_parameters():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    params = jax.device_put(jnp.zeros((8, 3)), sharding)
    optimizer = windowed(optax.adam(0.1), 2)
    state = optimizer.init(params)
    assert state.sums.sharding == sharding
    update = jax.jit(optimizer.update)
    for _ in range(2):
        updates, state = update(jax.device_put(jnp.ones((8, 3)), sharding), state, params)
        for leaf in (updates, state.sums, state.inner_state[0].mu):
            assert leaf.sharding.is_equivalent_to(sharding, 2)
    assert updated(state)


def test_the_noise_scale_is_measured_on_the_way():
    optimizer = windowed(optax.sgd(0.0), 4, noise_scale=True)
    draw, params = np.random.default_rng(0), jnp.zeros(10)
    state, update = optimizer.init(params), jax.jit(optimizer.update, static_argnames="weight")
    for _ in range(1200):
        gradient = 1 + draw.normal(size=(2, 10), scale=2).mean(0)
        _, state = update(jnp.asarray(gradient), state, params, weight=2)
    scale = gradaccum.jax.noise_scale(state)
    assert scale.interval[0] < 4 < scale.interval[1] < 10  # 10 * 2**2 / 10 rows
    assert (scale.updates, scale.batch_size, scale.unit) == (300, 8, "rows")
    with pytest.raises(ValueError, match="noise_scale=True"):
        gradaccum.jax.noise_scale(windowed(optax.sgd(0.1), 2).init(params))


def test_inside_shard_map_with_parameters_in_parts():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    optimizer, part = windowed(optax.adam(0.1), 2), jax.sharding.PartitionSpec("data")

    def two_updates(params):
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(params * jax.lax.axis_index("data"), state, params)
        return optax.apply_updates(params, updates)

    params = jnp.arange(1.0, 9.0)
    found = jax.jit(jax.shard_map(two_updates, mesh=mesh, in_specs=part, out_specs=part))(params)
    expected, _ = jax.jit(optax.adam(0.1).update)(params * jnp.repeat(jnp.arange(4), 2), optax.adam(0.1).init(params))
    assert tree_error(found, params + expected) <= FLOAT64


def test_parameters_and_an_inner_state_that_are_pythons_numbers():
    counting = optax.GradientTransformation(lambda params: {"calls": 0}, lambda g, s, p=None: (g, {"calls": 1}))
    optimizer = windowed(optax.chain(counting, optax.sgd(0.5)), 2)
    params = {"w": 1.0}
    state = optimizer.init(params)
    for gradient in (1.0, 3.0):
        updates, state = optimizer.update({"w": gradient}, state, params)
    assert updates["w"] == -1.0
    assert state.inner_state[0]["calls"] == 1


def test_lookahead_gets_the_windows_gradient_for_its_fast_parameters():
    make = lambda: optax.lookahead(optax.adam(0.1), 2, 0.5)  # noqa: E731
    plain, optimizer = make(), windowed(make(), 2)
    params = expected = optax.LookaheadParams.init_synced({"w": ONES})
    state, plain_state = optimizer.init(params), plain.init(expected)
    for n in range(6):
        updates, state = jax.jit(optimizer.update)({"w": ONES * n}, state, params)
        params = optax.apply_updates(params, updates)
        if n % 2:
            updates, plain_state = plain.update({"w": ONES * (n - 0.5)}, plain_state, expected)
            expected = optax.apply_updates(expected, updates)
    updates, state = optimizer.flush(state, params)
    assert tree_error(optax.apply_updates(params, updates), expected) <= FLOAT64

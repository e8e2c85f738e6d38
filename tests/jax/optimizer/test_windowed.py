"""`windowed`: small batches through it make the updates of large ones."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import gradaccum.jax
from gradaccum.jax import updated, windowed
from tests.jax.comparisons import assert_refused, assert_same, mesh_of, placed
from tests.jax.problems import PARAMS, rows, squared_error, taken
from tests.reference import FLOAT64, WINDOWS, ragged, windows_of

ONES = jnp.ones(3)
ADAMW = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(optax.linear_schedule(0.1, 0.01, 4), weight_decay=0.1))
OPTIMIZERS = {
    "clipped AdamW with a schedule": ADAMW,
    "momentum": optax.sgd(0.05, momentum=0.9),
    "masked": optax.masked(optax.adam(0.1), {"hidden": True, "out": False}),
    "multi_transform": optax.multi_transform(
        {"fast": optax.sgd(0.1, momentum=0.9), "none": optax.set_to_zero()}, {"hidden": "fast", "out": "none"}
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=optax.exponential_decay(0.1, 1, 0.5)),
    "adam": optax.adam(0.1),
}
gradient_of = jax.jit(jax.grad(squared_error))  # compiled once for each number of rows, whatever the test


@functools.cache
def compiled_update(kind):
    """Compiled once for each optimizer."""
    return jax.jit(OPTIMIZERS[kind].update)


def numbers(count, seed=1):
    """A batch of NumPy's arrays: a slice of JAX' is a program of its own for each shape."""
    return jax.tree.map(np.asarray, rows(count, seed))


def large_batches(kind, batches):
    """Plain optax, one ordinary step per large batch. Returns parameters and state."""
    params, state = PARAMS, OPTIMIZERS[kind].init(PARAMS)
    for batch in batches:
        updates, state = compiled_update(kind)(gradient_of(params, batch), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def micro_step(optimizer):
    """The user's own step on a small batch, jitted in two parts, whose state's buffers are used again."""
    update = jax.jit(optimizer.update, donate_argnums=1)

    def step(params, state, batch):
        updates, state = update(gradient_of(params, batch), state, params, weight=len(batch[0]))
        return optax.apply_updates(params, updates), state

    return step


CASES = [
    ("ragged everywhere", "clipped AdamW with a schedule"),
    *(("12 rows in micro-batches of 2, 4 steps", kind) for kind in ("masked", "multi_transform", "inject_hyperparams")),
    *(
        pytest.param(name, kind, marks=pytest.mark.slow)
        for name in WINDOWS
        for kind in ("momentum", "clipped AdamW with a schedule")
    ),
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_epochs_of_small_batches_make_the_updates_of_large_ones(name, kind):
    sizes, steps = WINDOWS[name]
    batch, parts = numbers(sum(sizes)), ragged(sum(sizes), sizes)
    groups = [(window[0].start, window[-1].stop) for window in windows_of(parts, steps)]
    expected = large_batches(kind, [taken(batch, *group) for group in groups] * 2)

    optimizer = windowed(OPTIMIZERS[kind], steps)
    step, params, state = micro_step(optimizer), PARAMS, optimizer.init(PARAMS)
    for _ in range(2):
        for part in parts:
            params, state = step(params, state, taken(batch, part.start, part.stop))
        updates, state = optimizer.flush(state, params)
        params = optax.apply_updates(params, updates)
    assert_same((params, state.inner_state), expected)
    assert int(state.updates) == 2 * len(groups)


def test_one_step_is_the_plain_optimizer_bit_for_bit():
    batches, optimizer = [numbers(4, seed=i) for i in range(3)], windowed(OPTIMIZERS["adam"], 1)
    step, params, state = micro_step(optimizer), PARAMS, optimizer.init(PARAMS)
    for batch in batches:
        params, state = step(params, state, batch)
    assert_same(params, large_batches("adam", batches)[0], 0)


def test_inside_scan():
    batch, optimizer = numbers(12), windowed(OPTIMIZERS["adam"], 2)

    def step(carry, batch):
        params, state = carry
        updates, state = optimizer.update(jax.grad(squared_error)(params, batch), state, params)
        return (optax.apply_updates(params, updates), state), updated(state)

    parts = jax.tree.map(lambda leaf: leaf.reshape(4, 3, -1), batch)
    (params, _), seen = jax.jit(lambda *carry: jax.lax.scan(step, carry, parts))(PARAMS, optimizer.init(PARAMS))
    assert_same(params, large_batches("adam", [taken(batch, i, i + 6) for i in (0, 6)])[0])
    assert seen.tolist() == [False, True, False, True]


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
    batch, optimizer = numbers(14), windowed(ADAMW, {0: 3, 1: 2})
    step, ended = micro_step(optimizer), []
    for stop in (False, True):
        now = PARAMS, optimizer.init(PARAMS)
        for i in range(7):
            now = step(*now, taken(batch, 2 * i, 2 * i + 2))
            if stop and i == 4:
                assert int(now[1].micro_batches) == 2
                now = restored(now, tmp_path)
        ended.append((now, optimizer.flush(now[1], now[0])))
    assert_same(*ended, 0)
    assert all(x.dtype == y.dtype for x, y in zip(*map(jax.tree.leaves, ended), strict=True))


# On gradients that are written down.


def gradients_into(optimizer, gradients, params=None, weights=None, jit=False, flush=False, state=None):
    """What the loop on these gradients gives: parameters, state, and `updated` after each."""
    params, update = jnp.zeros(3) if params is None else params, jax.jit(optimizer.update) if jit else optimizer.update
    state, seen = optimizer.init(params) if state is None else state, []
    for gradient, weight in zip(gradients, weights or [None] * len(gradients), strict=True):
        updates, state = update(gradient, state, params, weight=weight)
        params = optax.apply_updates(params, updates)
        seen.append(bool(updated(state)))
    if flush:
        updates, state = optimizer.flush(state, params)
        params = optax.apply_updates(params, updates)
    return params, state, seen


SGD, NAN = optax.sgd(1.0), jnp.nan * ONES
BY_WEIGHT = {  # steps, gradients, weights, the parameters after them and a flush, and when there were updates
    "without weights": (2, [1 * ONES, 2 * ONES, 5 * ONES], None, -1.5 - 5, [False, True, False]),
    "a micro-batch of weight 0 that is NaN": (3, [ONES, NAN, 4 * ONES], [2, 0, 1], -2, [False, False, True]),
    "a window of weight 0": (2, [NAN] * 3, [0, 0, 0], 0, [False] * 3),
    "a weight below 0, traced": (1, [ONES], [-1.0], jnp.nan, [True]),
    "a weight of NaN, traced": (1, [ONES], [jnp.nan], jnp.nan, [True]),
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", BY_WEIGHT)
def test_an_update_is_the_weighted_mean_of_its_window(name, traced):
    steps, gradients, weights, expected, updates = BY_WEIGHT[name]
    optimizer, traced = windowed(optax.sgd(lambda count: 1.0), steps), traced or name.endswith("traced")
    weights = weights and [jnp.asarray(float(w)) if traced else w for w in weights]
    params, state, seen = gradients_into(optimizer, gradients, weights=weights, jit=traced, flush=True)
    assert np.allclose(params, expected, rtol=FLOAT64, equal_nan=True)
    assert seen == updates
    assert int(state.updates) == int(state.inner_state[1].count) == sum(updates) + (name == "without weights")
    assert bool(updated(state)) == (name == "without weights")


def test_a_nan_never_reaches_the_next_window():
    params, state, _ = gradients_into(windowed(optax.apply_if_finite(SGD, 5), 2), [ONES, NAN, ONES, 3 * ONES])
    assert np.allclose(params, -2, rtol=FLOAT64)
    assert int(state.inner_state.total_notfinite) == 1


def test_the_inner_optimizer_runs_inside_a_branch_only():
    calls = []
    inner = optax.stateless(lambda grads, params: jax.debug.callback(lambda: calls.append(1)) or grads)
    gradients_into(windowed(inner, 4), [ONES] * 8, jit=True)
    jax.effects_barrier()
    assert len(calls) == 2


def test_a_table_of_epochs_is_followed_and_a_window_keeps_its_length():
    optimizer = windowed(SGD, {0: 3, 1: 2, 3: 1})
    state, seen, update, flush = optimizer.init(ONES), [], jax.jit(optimizer.update), jax.jit(optimizer.flush)
    for _ in range(4):
        marks = ""
        for _ in range(4):
            _, state = update(ONES, state, ONES)
            marks += "u" if updated(state) else "."
        _, state = flush(state, ONES)
        seen.append(marks + ("f" if updated(state) else "-"))
    assert seen == ["..u.f", ".u.u-", ".u.u-", "uuuu-"]
    assert update._cache_size() == 1


@pytest.mark.parametrize("jit", [False, True])
def test_a_callable_is_asked_for_the_window_that_opens(jit):
    steps = (lambda e, u: jnp.where(u < 2, 1, 3)) if jit else (lambda e, u: 1 if u < 2 else 3)
    seen = gradients_into(windowed(SGD, steps), [ONES] * 6, jit=jit)[2]
    assert seen == [True, True, False, False, True, False]


def test_a_state_from_other_steps_finishes_its_window_first():
    _, opened, _ = gradients_into(windowed(SGD, 4), [ONES])
    _, _, seen = gradients_into(windowed(SGD, 2), [ONES] * 6, state=opened)
    assert seen == [False, False, True, False, True, False]


def test_gradients_that_are_none_count_as_zeros():
    frozen, optimizer = {"hidden": None, "out": PARAMS["out"]}, windowed(optax.adam(0.1), 2)
    grads = gradient_of(PARAMS, rows(6)) | {"hidden": None}  # as equinox.partition makes them
    params, _, _ = gradients_into(optimizer, [grads, grads], frozen)
    assert params["hidden"] is None
    assert float(jnp.abs(params["out"]["bias"] - PARAMS["out"]["bias"]).min()) > 0.05

    pair, one = {"a": jnp.zeros(()), "b": jnp.zeros(())}, {"a": jnp.ones(()), "b": None}
    params, _, _ = gradients_into(windowed(SGD, 2), [one, pair | {"b": jnp.ones(())}], pair)
    assert (float(params["a"]), float(params["b"])) == (-0.5, -0.5)


def test_a_part_of_the_parameters_may_have_windows_of_its_own():
    optimizer = optax.multi_transform({"slow": windowed(SGD, 2), "plain": SGD}, {"a": "slow", "b": "plain"})
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

    inner = optax.GradientTransformationExtraArgs(lambda params: {"value": jnp.zeros(()), "factor": 0}, update)
    optimizer, seen = windowed(inner, 2), []
    step, state = jax.jit(optimizer.update, static_argnames="weight"), optimizer.init(ONES)
    for value, weight, factor in ((1.0, 3, 7), (5.0, 1, 8), (4.0, 2, 9)):
        _, state = step(ONES, state, ONES, weight=weight, value=jnp.asarray(value), factor=factor)
        seen.append([float(number) for number in state.inner_state.values()])
    _, state = optimizer.flush(state, ONES, factor=10)
    seen.append([float(number) for number in state.inner_state.values()])
    assert seen == [[0, 0], [8, 2.0], [8, 2.0], [10, 4.0]]


@pytest.mark.parametrize("jit", [False, True])
def test_a_short_window_is_closed_of_an_optimizer_that_takes_no_value(jit):
    def update(grads, state, params=None, *, grad_fn=None):  # as optax.contrib.sam's
        return grads, state

    optimizer = windowed(optax.chain(optax.GradientTransformationExtraArgs(lambda _: (), update), SGD), 3)
    state = optimizer.init(ONES)
    for number in (1.0, 3.0):
        _, state = optimizer.update(number * ONES, state, ONES)
    updates, state = (jax.jit(optimizer.flush) if jit else optimizer.flush)(state, ONES)
    assert_same(updates, -2 * ONES)
    assert int(state.epoch) == 1
    with pytest.raises(TypeError, match="unexpected keyword argument 'value'"):
        optimizer.flush(state, ONES, value=1.0)


def test_lookahead_gets_the_windows_gradient_for_its_fast_parameters():
    make = lambda: optax.lookahead(optax.adam(0.1), 2, 0.5)  # noqa: E731
    start = optax.LookaheadParams.init_synced({"w": ONES})
    gradients = [{"w": ONES * n} for n in range(6)]
    params, _, _ = gradients_into(windowed(make(), 2), gradients, start, flush=True)
    plain = make()
    expected, state = start, plain.init(start)
    for n in (0.5, 2.5, 4.5):
        updates, state = plain.update({"w": ONES * n}, state, expected)
        expected = optax.apply_updates(expected, updates)
    assert_same(params, expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_summed_in_single(dtype):
    gradients = [jnp.asarray([8.0, 0.5], dtype) * (1 if i == 0 else 2**-9) for i in range(512)]
    updates, _, _ = gradients_into(windowed(SGD, 512), gradients, jnp.zeros(2, dtype), jit=True)
    exact = -sum(np.asarray(g, np.float64) for g in gradients) / 512
    assert updates.dtype == dtype
    assert np.abs(np.asarray(updates, np.float64) / exact - 1).max() <= float(jnp.finfo(dtype).eps) / 2


def test_accumulate_dtype_float64_sums_single_precision_in_double():
    optimizer, single = windowed(SGD, 2, accumulate_dtype=jnp.float64), jnp.ones(3, jnp.float32)
    state = optimizer.init(single)
    assert state.sums.dtype == jnp.float64
    assert optimizer.update(single, state, single)[0].dtype == jnp.float32


def test_parameters_and_an_inner_state_that_are_pythons_numbers():
    counting = optax.GradientTransformation(lambda params: {"calls": 0}, lambda g, s, p=None: (g, {"calls": 1}))
    optimizer = windowed(optax.chain(counting, optax.sgd(0.5)), 2)
    params, state, _ = gradients_into(optimizer, [{"w": 1.0}, {"w": 3.0}], {"w": 1.0})
    assert params["w"] == 0.0
    assert state.inner_state[0]["calls"] == 1


def test_sums_keep_the_shardings_of_the_parameters():
    mesh, optimizer = mesh_of("Auto"), windowed(optax.adam(0.1), 2)
    params = placed(jnp.zeros((8, 3)), mesh)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    assert state.sums.sharding == params.sharding
    for _ in range(2):
        updates, state = update(placed(jnp.ones((8, 3)), mesh), state, params)
        for leaf in (updates, state.sums, state.inner_state[0].mu):
            assert leaf.sharding.is_equivalent_to(params.sharding, 2)
    assert updated(state)


def test_inside_shard_map_with_parameters_in_parts():
    optimizer = windowed(optax.adam(0.1), 2)

    def two_updates(params):
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(params * jax.lax.axis_index("data"), state, params)
        return optax.apply_updates(params, updates)

    params, specs = jnp.arange(1.0, 9.0), {"in_specs": P("data"), "out_specs": P("data")}
    found = jax.jit(jax.shard_map(two_updates, mesh=mesh_of("Auto"), **specs))(params)
    expected, _ = optax.adam(0.1).update(params * jnp.repeat(jnp.arange(4), 2), optax.adam(0.1).init(params))
    assert_same(found, params + expected)


def test_the_noise_scale_is_measured_on_the_way():
    draw, optimizer = np.random.default_rng(0), windowed(optax.sgd(0.0), 4, noise_scale=True)
    draws = [jnp.asarray(1 + draw.normal(size=(2, 10), scale=2).mean(0)) for _ in range(1200)]
    _, state, _ = gradients_into(optimizer, draws, jnp.zeros(10), weights=[2.0] * 1200, jit=True)
    scale = gradaccum.jax.noise_scale(state)
    assert scale.interval[0] < 4 < scale.interval[1] < 10  # 10 * 2**2 / 10 rows
    assert (scale.updates, scale.batch_size, scale.unit) == (300, 8, "rows")
    with pytest.raises(ValueError, match="noise_scale=True"):
        gradaccum.jax.noise_scale(windowed(SGD, 2).init(ONES))


# What cannot be made exact is refused by name.

PAIR = {"a": ONES, "b": None}
STATE, STRUCTURE = "`state` must be what init(params) or the last update()", "must have the structure of the parameters"
STEPS, INT, ITSELF = "`steps` must be an int >= 1", "must return an int >= 1", "accumulates gradients by itself"
OWN, SHORT, NEEDS = "`{}` covers one micro-batch only", "sums in half precision lose", "optimizer needs `value`. Pass"


def update(optimizer, grads=ONES, *more, params=ONES, jit=False, **extra):
    """An update of a fresh state."""
    of = jax.jit(optimizer.update) if jit else optimizer.update
    return of(grads, optimizer.init(params), params, *more, **extra)


def of_pair(grads):
    return lambda: update(windowed(SGD, 2), grads, params=PAIR)


def scheduled(steps):
    return lambda: update(windowed(SGD, steps), jit=True)


def init(inner, params=ONES, **options):
    return lambda: windowed(inner, 2, **options).init(params)


PLATEAU = windowed(optax.chain(SGD, optax.contrib.reduce_on_plateau()), 2)
MONITOR = optax.GradientTransformation(lambda params: {}, lambda g, s, p=None: (g, {"norm": g.sum()}))
ONE = windowed(SGD, 2).init(ONES)
CASES = {
    **{f"steps {steps}": (lambda steps=steps: windowed(SGD, steps), (TypeError, ValueError), STEPS)
       for steps in (0, -1, 2.5, True, "4", {}, {2: 4}, {0: 0})},
    "no optimizer": (lambda: windowed(4, SGD), TypeError, "Received: optimizer=4 of type int"),
    "update without a state": (lambda: windowed(SGD, 2).update(ONES, None), TypeError, STATE),
    "flush without a state": (lambda: windowed(SGD, 2).flush(None, ONES), TypeError, STATE),
    "update of another's state": (lambda: windowed(SGD, 2).update(ONES, SGD.init(ONES)), TypeError, STATE),
    "flush of another's state": (lambda: windowed(SGD, 2).flush(SGD.init(ONES), ONES), TypeError, STATE),
    "MultiSteps": (init(optax.MultiSteps(SGD, 2).gradient_transformation()), ValueError, ITSELF),
    "windowed": (init(optax.chain(optax.clip(1.0), windowed(SGD, 2))), ValueError, ITSELF),
    "apply_every": (init(optax.chain(optax.apply_every(2), SGD)), ValueError, ITSELF),
    "a schedule that needs values inside jit": (
        scheduled(lambda e, u: 1 if u < 2 else 4), TypeError, "gets `epoch` and `update` as traced arrays",
    ),
    "a schedule of 0": (scheduled(lambda e, u: 0), ValueError, STEPS),
    "a schedule of 2.5": (scheduled(lambda e, u: 2.5), TypeError, STEPS),
    "a schedule of traced floats": (scheduled(lambda e, u: u / 2), TypeError, INT),
    "a schedule of traced vectors": (scheduled(lambda e, u: u[None]), TypeError, INT),
    **{f"weight {weight}": (lambda w=weight: update(windowed(SGD, 2), ONES, w), (TypeError, ValueError), "weight")
       for weight in (-1, float("nan"), float("inf"), "3", True, [1, 2], 1e200)},
    "a traced weight that is no scalar": (
        lambda: update(windowed(SGD, 2), ONES, ONES, jit=True), TypeError, "Received: weight=float64[3], traced",
    ),
    "an argument that the inner optimizer needs": (lambda: update(PLATEAU), TypeError, NEEDS),
    "the same, jitted": (lambda: update(PLATEAU, jit=True), TypeError, NEEDS),
    "gradients without a part": (of_pair({"a": ONES}), ValueError, STRUCTURE),
    "gradients of another shape": (
        of_pair(PAIR | {"a": ONES[None]}), ValueError, "Received: grads['a'] of shape (1, 3), not shape (3,)",
    ),
    "gradients of nothing": (of_pair(PAIR | {"b": ONES}), ValueError, "grads['b'] of shape (3,), not None"),
    "gradients of another dtype": (
        of_pair(PAIR | {"a": ONES.astype("f4")}), TypeError, "grads['a'] of float32 for a parameter of float64",
    ),
    "parameters that are integers": (init(SGD, {"n": jnp.arange(3)}), TypeError, "Received: params['n'] of int64"),
    **{f"lbfgs, {name}": (lambda extra=extra: update(windowed(optax.lbfgs(), 2), **extra), ValueError, OWN.format(name))
       for name, extra in {"value_fn": {"value_fn": lambda p: 0.0}, "grad": {"grad": ONES}}.items()},
    "lbfgs": (lambda: update(windowed(optax.lbfgs(), 2)), ValueError, OWN.format("grad")),
    "a value that is no scalar": (
        lambda: update(windowed(SGD, 2), value=ONES), ValueError, "must be the micro-batch's mean loss, a scalar",
    ),
    "float8's own, which gradients replace": (
        init(SGD, {"params": ONES, "_overwrite_with_gradient": {"input_scale": ONES}}), ValueError,
        "Received: params['_overwrite_with_gradient']['input_scale']. Pass params['params'] alone",
    ),
    "sums in half precision": (init(SGD, accumulate_dtype=jnp.bfloat16), ValueError, SHORT),
    "updated of two": (lambda: updated((ONE, ONE)), ValueError, "Received: tuple with 2 of them"),
    "updated of none": (lambda: updated(optax.adam(0.1).init(ONES)), ValueError, "with 0 of them"),
    "an inner state that changes its structure": (
        lambda: update(windowed(optax.chain(MONITOR, SGD), 2), jit=True), ValueError, "another structure",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_named(name):
    assert_refused(*CASES[name])


@pytest.mark.parametrize(("first", "second"), [({"weight": 4}, {}), ({}, {"weight": 4})])
def test_weights_on_some_micro_batches_of_a_window(first, second):
    optimizer = windowed(SGD, 2)
    _, state = optimizer.update(ONES, optimizer.init(ONES), ONES, **first)
    with pytest.raises(ValueError, match=r"must come with a `weight`, or none.*after 1 micro-batches with"):
        optimizer.update(ONES, state, ONES, **second)
    updates, state = jax.jit(lambda state: optimizer.update(ONES, state, ONES, **second))(state)
    assert jnp.isnan(updates).all()
    optimizer.update(ONES, state, ONES, **first)  # the next window may do otherwise


def test_flax_nnx_closes_an_epoch_by_a_flush_of_plain_arrays():
    model, batches = nnx.Linear(3, 2, rngs=nnx.Rngs(0), param_dtype=float), jnp.ones((3, 4, 3))
    expected, inner = nnx.as_pure(nnx.state(model, nnx.Param)), optax.sgd(0.1, momentum=0.9)
    optimizer = nnx.Optimizer(model, windowed(inner, 2), wrt=nnx.Param)
    gradients = nnx.grad(lambda model, x: (model(x) ** 2).mean())
    state = inner.init(expected)
    for x in (batches[:2].reshape(-1, 3), batches[2]):
        updates, state = inner.update(nnx.as_pure(gradients(model, x)), state, expected)
        for each in x.reshape(-1, 4, 3):
            optimizer.update(model, gradients(model, each), weight=len(each))
        expected = optax.apply_updates(expected, updates)
        if len(x) == 4:
            with pytest.raises(TypeError, match=r"flush\(nnx.as_pure\(optimizer.opt_state\)"):
                optimizer.tx.flush(optimizer.opt_state, nnx.state(model, nnx.Param))
            params = nnx.as_pure(nnx.state(model, nnx.Param))
            updates, rest = optimizer.tx.flush(nnx.as_pure(optimizer.opt_state), params)
            nnx.update(model, optax.apply_updates(params, updates))
            nnx.update(optimizer.opt_state, nnx.state(rest))
        assert_same(nnx.as_pure(nnx.state(model, nnx.Param)), expected)
    assert int(optimizer.opt_state.epoch[...]) == 1


def test_a_traced_schedule_below_1():
    optimizer = windowed(SGD, lambda epoch, update: jnp.where(update < 1, 1, 0))
    step = jax.jit(optimizer.update)
    updates, state = step(ONES, optimizer.init(ONES), ONES)
    assert jnp.isfinite(updates).all()
    assert jnp.isnan(step(ONES, state, ONES)[0]).all()

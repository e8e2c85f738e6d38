"""`chunked`: any loss on all outputs gets the large batch's gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradaccum.jax import chunked
from tests.jax.problems import at_once, network, outputs, rows, tree_error
from tests.reference import FLOAT32, FLOAT64


@functools.cache
def contrastive(encode):
    """Every row against every other, with two towers and a temperature that is learned."""

    def loss(params, x, y):
        a, b = encode(params["a"], x), encode(params["b"], y)
        logits = a @ b.T * jnp.exp(params["temperature"])
        return -jnp.diag(jax.nn.log_softmax(logits)).mean() - jnp.diag(jax.nn.log_softmax(logits.T)).mean()

    return loss


def towers(dtype=jnp.float64):
    return {"a": network(0, dtype=dtype), "b": network(1, dtype=dtype), "temperature": jnp.asarray(0.3, dtype)}


def value_and_gradients(loss, *args, argnums=0):
    return at_once(loss, argnums=argnums)(*args)


@pytest.mark.parametrize(
    ("count", "size", "keep"),
    [
        *((11, 4, 0), (3, 8, 0)),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((11, 4, 2), (12, 4, 1), (11, 3, 9), (5, 1, 0))),
    ],
)
def test_a_contrastive_loss_has_the_large_batchs_gradient(count, size, keep):
    x, y = rows(count)[0], rows(count, seed=2)[0]
    expected = value_and_gradients(contrastive(outputs), towers(), x, y, argnums=(0, 1))
    actual = value_and_gradients(contrastive(chunked(outputs, size, keep=keep)), towers(), x, y, argnums=(0, 1))
    assert tree_error(actual, expected) <= FLOAT64


def test_in_single_precision():
    def loss(encode):  # of all pairs, without differences that cancel
        return lambda params, x: jax.nn.logsumexp(encode(params, x) @ encode(params, x).T)

    x, params = rows(11, dtype=jnp.float32)[0], network(dtype=jnp.float32)
    expected = value_and_gradients(loss(outputs), params, x)
    assert tree_error(value_and_gradients(loss(chunked(outputs, 4)), params, x), expected) <= FLOAT32


@pytest.mark.parametrize("keep", [0, 99])
def test_half_precision_is_summed_in_single(keep):
    x = jnp.full((256, 1), 1.0, jnp.bfloat16).at[0].set(256)

    def gradient(encode):
        return jax.jit(jax.grad(lambda w: encode(w, x).astype(jnp.float32).sum()))(jnp.ones((1, 1), jnp.bfloat16))

    found = gradient(chunked(lambda w, x: x @ w, 1, keep=keep))
    assert found.dtype == jnp.bfloat16
    assert float(found[0, 0]) == 512  # in bfloat16 256 + 1 is 256


def test_a_step_on_all_outputs_of_any_pytree():
    def encode(params, batch, *, scale):
        h = outputs(params, batch["x"]) * scale
        return {"h": (h, batch["ids"] * 2, None), "unused": h**2, "mean": h.mean(-1)}

    def loss(encode):
        def of(params, x, scale):
            out = encode(params, {"x": x, "ids": jnp.arange(7)}, scale=scale)
            h, ids, none = out["h"]
            assert none is None
            return jnp.std(h * ids[:, None]) + jax.nn.logsumexp(out["mean"])

        return of

    args = network(), rows(7)[0], jnp.asarray(1.5)
    expected = value_and_gradients(loss(encode), *args, argnums=(0, 1, 2))
    actual = value_and_gradients(loss(chunked(encode, 3)), *args, argnums=(0, 1, 2))
    assert tree_error(actual, expected) <= FLOAT64


def test_rows_in_other_axes_and_leaves_that_all_share():
    def encode(params, columns, extra):
        h = outputs(params, columns.T) + extra["bias"]
        return h * extra["weight"][:, None]

    def loss(encode):
        return lambda params, columns, extra: jnp.std(encode(params, columns, extra))

    args = network(), rows(7)[0].T, {"weight": jnp.arange(7.0), "bias": jnp.ones(3)}
    small = chunked(encode, 3, batch_argnums=(1, 2), in_axes=(1, {"weight": 0, "bias": None}))
    expected = value_and_gradients(loss(encode), *args, argnums=(0, 1, 2))
    assert tree_error(value_and_gradients(loss(small), *args, argnums=(0, 1, 2)), expected) <= FLOAT64


@pytest.mark.parametrize("keep", [0, 1])
def test_what_the_function_closes_over_gets_its_gradient(keep):
    x, table = rows(7)[0], jnp.arange(3)

    def loss(wrap):
        def of(params):
            encode = wrap(lambda _, x: outputs(params, x) * table)
            return jnp.std(encode(None, x)) * params["out"]["bias"].sum()

        return of

    expected = value_and_gradients(loss(lambda fn: fn), network())
    assert tree_error(value_and_gradients(loss(lambda fn: chunked(fn, 3, keep=keep)), network()), expected) <= FLOAT64


def dropout(params, x, key):
    h = outputs(params, x)
    return h * jax.random.bernoulli(key, 0.5, h.shape)


@pytest.mark.parametrize(
    ("make", "keep"),
    [
        (jax.random.key, 0),
        pytest.param(jax.random.PRNGKey, 1, marks=pytest.mark.slow),
        pytest.param(jax.random.key, 1, marks=pytest.mark.slow),
        pytest.param(jax.random.PRNGKey, 0, marks=pytest.mark.slow),
    ],
)
def test_dropout_is_that_of_a_key_split_per_micro_batch(make, keep):
    x, key = rows(8)[0], make(3)

    def naive(params, x, key):
        keys = jax.random.split(key, 3)
        return jnp.concatenate([dropout(params, x[part], k) for part, k in zip(PARTS, keys)])

    def loss(encode):
        return lambda params, x, key: jnp.std(encode(params, x, key)) ** 2

    args = network(), x, key
    small = chunked(dropout, 3, rng_argnum=2, keep=keep)
    expected = value_and_gradients(loss(naive), *args)
    assert tree_error(value_and_gradients(loss(small), *args), expected) <= FLOAT64
    assert np.array_equal(jax.jit(small)(*args), jax.jit(small)(*args))


PARTS = [slice(0, 3), slice(3, 6), slice(6, 8)]


def test_a_key_for_each_row_draws_the_same_at_any_size():
    def encode(params, batch):
        x, keys = batch
        return jax.vmap(lambda x, key: dropout(params, x[None], key)[0])(x, keys)

    batch = rows(8)[0], jax.random.split(jax.random.key(0), 8)
    whole = jax.jit(encode)(network(), batch)
    assert tree_error(jax.jit(chunked(encode, 3))(network(), batch), whole) <= FLOAT64


def test_second_derivatives_are_exact():
    x, y = rows(7)[0], rows(7, seed=2)[0]

    def penalty(encode):
        def of(params):
            gradients = jax.grad(contrastive(encode))(params, x, y)
            return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradients))

        return of

    expected = value_and_gradients(penalty(outputs), towers())
    assert tree_error(value_and_gradients(penalty(chunked(outputs, 3)), towers()), expected) <= FLOAT64


def test_forward_mode_is_jaxs_own_error():
    x = rows(7)[0]
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: chunked(outputs, 3)(network(), x), (x,), (x,))


def test_under_vmap_and_inside_another():
    x = jnp.stack([rows(7, seed=seed)[0] for seed in range(2)])
    loss = lambda encode: lambda params, x: jnp.std(encode(params, x))  # noqa: E731
    expected = jax.jit(jax.vmap(jax.grad(loss(outputs)), (None, 0)))(network(), x)
    nested = chunked(chunked(outputs, 2), 4)
    assert tree_error(jax.jit(jax.vmap(jax.grad(loss(nested)), (None, 0)))(network(), x), expected) <= FLOAT64


def test_frozen_inputs_are_not_differentiated():
    asked = []

    @jax.custom_vjp
    def watched(w):
        return w

    watched.defvjp(lambda w: (w, None), lambda _, g: asked.append(1) or (g,))

    def encode(params, x):
        return outputs({"hidden": params["hidden"], "out": jax.tree.map(watched, params["out"])}, x)

    x = rows(7)[0]

    def loss(hidden, out):
        return jnp.std(chunked(encode, 3)({"hidden": hidden, "out": out}, x))

    jax.grad(loss)(network()["hidden"], network()["out"])
    assert not asked
    jax.grad(loss, 1)(network()["hidden"], network()["out"])
    assert asked


def test_an_equinox_model_is_an_argument_as_it_is():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(5, 3, 8, 1, key=jax.random.key(0), dtype=jnp.float64)
    encode = lambda model, x: jax.vmap(model)(x)  # noqa: E731
    x = rows(7)[0]

    def gradients(encode):
        return eqx.filter_jit(eqx.filter_grad(lambda model: jnp.std(encode(model, x))))(model)

    found = [jax.tree.leaves(gradients(each)) for each in (chunked(encode, 3), encode)]
    assert tree_error(*found) <= FLOAT64


MESH = {"axis_shapes": (4,), "axis_names": ("data",)}


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_rows_over_four_devices(kind):
    mesh = jax.make_mesh(**MESH, axis_types=(jax.sharding.AxisType[kind],))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x = rows(16)[0]
    loss = lambda encode: lambda params, x: jnp.std(encode(params, x))  # noqa: E731
    expected = value_and_gradients(loss(outputs), network(), x)
    with jax.set_mesh(mesh):
        args = jax.device_put(network(), whole), jax.device_put(x, spread)
        actual = value_and_gradients(loss(chunked(outputs, 8)), *args)
    assert tree_error(jax.device_get(actual), jax.device_get(expected)) <= FLOAT64


def test_inside_shard_map():
    mesh = jax.make_mesh(**MESH, axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    x = rows(24)[0]

    def loss(encode):
        def of(params, x):
            h = jax.lax.all_gather(encode(params, x), "data", tiled=True)
            return jax.lax.pmean(jnp.std(h @ h.T), "data")

        return of

    def over_devices(encode):
        grad = jax.value_and_grad(loss(encode))
        return jax.jit(jax.shard_map(grad, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec()))

    expected = over_devices(outputs)(network(), x)
    assert tree_error(over_devices(chunked(outputs, 4))(network(), x), expected) <= FLOAT64


def temporary_bytes(loss, *args):
    return jax.jit(jax.value_and_grad(loss)).lower(*args).compile().memory_analysis().temp_size_in_bytes


def wide(params, x):
    for _ in range(6):
        x = jnp.tanh(x @ params)
    return x.mean(-1)


def test_activations_are_those_of_one_micro_batch():
    params, x = jnp.eye(128), jnp.ones((1024, 128))
    layer = 1024 * 128 * 8
    bytes_of = lambda encode: temporary_bytes(lambda p, x: jnp.std(encode(p, x)), params, x)  # noqa: E731
    assert bytes_of(wide) > 5 * layer
    assert bytes_of(chunked(wide, 64)) < layer


def test_kept_micro_batches_keep_activations_and_no_parameters():
    params, x = jnp.eye(256), jnp.ones((16, 256))
    activations = 16 * 256 * 8 * 2 * 6  # of each tanh its value and its slope
    kept = temporary_bytes(lambda p, x: jnp.std(chunked(wide, 2, keep=8)(p, x)), params, x)
    assert kept < activations + 8 * params.nbytes  # once per micro-batch would be 8 more

"""`chunked`: any loss on all outputs gets the large batch's gradient; what can't be exact is refused when traced."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from gradaccum.jax import chunked
from tests.jax.comparisons import assert_refused, assert_same, at_once, mesh_of, placed
from tests.jax.problems import BATCH, PARAMS, network, outputs, rows
from tests.reference import FLOAT32, FLOAT64

X = rows(7)[0]


@functools.cache
def contrastive(encode):
    """Every row against every other, with two towers and a temperature that is learned."""

    def loss(params, x, y):
        a, b = encode(params["a"], x), encode(params["b"], y)
        logits = a @ b.T * jnp.exp(params["temperature"])
        return -jnp.diag(jax.nn.log_softmax(logits)).mean() - jnp.diag(jax.nn.log_softmax(logits.T)).mean()

    return loss


def spread(encode):
    """A loss of all rows' outputs, whatever else is given."""
    return lambda *args: jnp.std(encode(*args))


TOWERS = {"a": network(0), "b": network(1), "temperature": jnp.asarray(0.3)}


def assert_exact(loss, small, plain, *args, argnums=0, within=FLOAT64):
    """`loss(encode)` has the same value and gradients with both."""
    found, expected = (at_once(loss(encode), argnums=argnums)(*args) for encode in (small, plain))
    assert_same(found, expected, within)


@pytest.mark.parametrize(
    ("count", "size", "keep"),
    [
        *((11, 4, 0), (3, 8, 0)),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((11, 4, 2), (12, 4, 1), (11, 3, 9), (5, 1, 0))),
    ],
)
def test_a_contrastive_loss_has_the_large_batchs_gradient(count, size, keep):
    x, y = rows(count)[0], rows(count, seed=2)[0]
    assert_exact(contrastive, chunked(outputs, size, keep=keep), outputs, TOWERS, x, y, argnums=(0, 1))


def any_pytree(params, batch, scale):
    h = outputs(params, batch["x"]) * scale
    return {"h": (h, batch["ids"] * 2, None), "unused": h**2, "mean": h.mean(-1)}


def of_any_pytree(encode):
    def of(params, x, scale):
        out = encode(params, {"x": x, "ids": jnp.arange(7)}, scale=scale)
        h, ids, none = out["h"]
        assert none is None
        return jnp.std(h * ids[:, None]) + jax.nn.logsumexp(out["mean"])

    return of


def in_columns(params, columns, extra):
    return (outputs(params, columns.T) + extra["bias"]) * extra["weight"][:, None]


def penalty(encode):
    def of(params):
        gradients = jax.grad(contrastive(encode))(params, X, rows(7, seed=2)[0])
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradients))

    return of


COLUMNS = PARAMS, X.T, {"weight": jnp.arange(7.0), "bias": jnp.ones(3)}
AXES = {"batch_argnums": (1, 2), "in_axes": (1, {"weight": 0, "bias": None})}


@pytest.mark.parametrize(
    ("loss", "encode", "args", "argnums", "options"),
    [
        (of_any_pytree, any_pytree, (PARAMS, X, jnp.asarray(1.5)), (0, 1, 2), {}),
        (spread, in_columns, COLUMNS, (0, 1, 2), AXES),
        (penalty, outputs, (TOWERS,), 0, {}),
    ],
    ids=["outputs of any pytree, and keywords", "rows in other axes and leaves that all share", "second derivatives"],
)
def test_gradients_are_exact_with(loss, encode, args, argnums, options):
    assert_exact(loss, chunked(encode, 3, **options), encode, *args, argnums=argnums)


def test_in_single_precision():
    def loss(encode):  # of all pairs, without differences that cancel
        return lambda params, x: jax.nn.logsumexp(encode(params, x) @ encode(params, x).T)

    x, params = rows(11, dtype=jnp.float32)[0], network(dtype=jnp.float32)
    assert_exact(loss, chunked(outputs, 4), outputs, params, x, within=FLOAT32)


@pytest.mark.parametrize("keep", [0, 99])
def test_half_precision_is_summed_in_single(keep):
    x, encode = jnp.full((256, 1), 1.0, jnp.bfloat16).at[0].set(256), chunked(lambda w, x: x @ w, 1, keep=keep)
    gradient = jax.jit(jax.grad(lambda w: encode(w, x).astype(jnp.float32).sum()))(jnp.ones((1, 1), jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16
    assert float(gradient[0, 0]) == 512  # in bfloat16 256 + 1 is 256


@pytest.mark.parametrize("keep", [0, 1])
def test_what_the_function_closes_over_gets_its_gradient(keep):
    def loss(wrap):
        def of(params):
            encode = wrap(lambda _, x: outputs(params, x) * jnp.arange(3))
            return jnp.std(encode(None, X)) * params["out"]["bias"].sum()

        return of

    assert_exact(loss, lambda fn: chunked(fn, 3, keep=keep), lambda fn: fn, PARAMS)


def dropout(params, x, key):
    h = outputs(params, x)
    return h * jax.random.bernoulli(key, 0.5, h.shape)


@pytest.mark.parametrize(
    ("make", "keep"),
    [
        (jax.random.key, 0),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (
            (jax.random.PRNGKey, 1), (jax.random.key, 1), (jax.random.PRNGKey, 0)
        )),
    ],
)  # fmt: skip
def test_dropout_is_that_of_a_key_split_per_micro_batch(make, keep):
    def naive(params, x, key):
        parts = zip((slice(0, 3), slice(3, 6), slice(6, 8)), jax.random.split(key, 3))
        return jnp.concatenate([dropout(params, x[part], k) for part, k in parts])

    args, small = (PARAMS, rows(8)[0], make(3)), chunked(dropout, 3, rng_argnum=2, keep=keep)
    assert_exact(spread, small, naive, *args)
    assert np.array_equal(jax.jit(small)(*args), jax.jit(small)(*args))


def test_a_key_for_each_row_draws_the_same_at_any_size():
    def encode(params, batch):
        return jax.vmap(lambda x, key: dropout(params, x[None], key)[0])(*batch)

    args = PARAMS, (rows(8)[0], jax.random.split(jax.random.key(0), 8))
    assert_same(jax.jit(chunked(encode, 3))(*args), jax.jit(encode)(*args))


def test_forward_mode_is_jaxs_own_error():
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: chunked(outputs, 3)(PARAMS, x), (X,), (X,))


def test_under_vmap_and_inside_another():
    x, nested = jnp.stack([X, rows(7, seed=2)[0]]), chunked(chunked(outputs, 2), 4)
    found, expected = (jax.jit(jax.vmap(jax.grad(spread(of)), (None, 0)))(PARAMS, x) for of in (nested, outputs))
    assert_same(found, expected)


def test_frozen_inputs_are_not_differentiated():
    asked = []
    watched = jax.custom_vjp(lambda w: w)
    watched.defvjp(lambda w: (w, None), lambda _, g: asked.append(1) or (g,))

    def encode(params, x):
        return outputs({"hidden": params["hidden"], "out": jax.tree.map(watched, params["out"])}, x)

    def loss(hidden, out):
        return jnp.std(chunked(encode, 3)({"hidden": hidden, "out": out}, X))

    jax.grad(loss)(PARAMS["hidden"], PARAMS["out"])
    assert not asked
    jax.grad(loss, 1)(PARAMS["hidden"], PARAMS["out"])
    assert asked


def test_an_equinox_model_is_an_argument_as_it_is():
    model = eqx.nn.MLP(5, 3, 8, 1, key=jax.random.key(0), dtype=jnp.float64)

    def encode(model, x):
        return jax.vmap(model)(x)

    found, expected = (
        eqx.filter_jit(eqx.filter_grad(lambda model, of=of: spread(of)(model, X)))(model)
        for of in (chunked(encode, 3), encode)
    )
    assert_same(jax.tree.leaves(found), jax.tree.leaves(expected))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_rows_over_four_devices(kind):
    mesh, x = mesh_of(kind), rows(16)[0]
    with jax.set_mesh(mesh):
        actual = at_once(spread(chunked(outputs, 8)))(placed(PARAMS, mesh, P()), placed(x, mesh))
    assert_same(jax.device_get(actual), jax.device_get(at_once(spread(outputs))(PARAMS, x)))


def test_inside_shard_map():
    def over_devices(encode):
        def loss(params, x):
            h = jax.lax.all_gather(encode(params, x), "data", tiled=True)
            return jax.lax.pmean(jnp.std(h @ h.T), "data")

        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        return jax.jit(jax.shard_map(jax.value_and_grad(loss), mesh=mesh_of("Auto"), **specs))(PARAMS, rows(24)[0])

    assert_same(over_devices(chunked(outputs, 4)), over_devices(outputs))


def temporary_bytes(encode, *args):
    return at_once(spread(encode)).lower(*args).compile().memory_analysis().temp_size_in_bytes


def wide(params, x):
    for _ in range(6):
        x = jnp.tanh(x @ params)
    return x.mean(-1)


def test_activations_are_those_of_one_micro_batch():
    args, layer = (jnp.eye(128), jnp.ones((1024, 128))), 1024 * 128 * 8
    assert temporary_bytes(wide, *args) > 5 * layer
    assert temporary_bytes(chunked(wide, 64), *args) < layer


def test_kept_micro_batches_keep_activations_and_no_parameters():
    params, x = jnp.eye(256), jnp.ones((16, 256))
    activations = 16 * 256 * 8 * 2 * 6  # of each tanh its value and its slope
    kept = temporary_bytes(chunked(wide, 2, keep=8), params, x)
    assert kept < activations + 8 * params.nbytes  # once per micro-batch would be 8 more


# What it refuses.

SIZE = "`micro_batch_size` must be an int >= 1"


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        *(((outputs, size), {}, SIZE) for size in (0, -1, 2.5, True, "4", None)),
        ((PARAMS, 4), {}, "`fn` must be a function"),
        ((outputs, 4), {"keep": -1}, "`keep` must be an int >= 0"),
        ((outputs, 4), {"batch_argnums": "x"}, "`batch_argnums` must be an int >= 0"),
        ((outputs, 4), {"batch_argnums": (1, 2), "rng_argnum": 2}, "can't be in both `batch_argnums` and `rng_argnum`"),
    ],
)
def test_a_wrong_option_is_named(args, options, message):
    assert_refused(lambda: chunked(*args, **options), (TypeError, ValueError), message)


def test_rows_that_are_missing_or_disagree_are_listed_with_their_paths():
    small = chunked(lambda params, batch: batch["x"], 4)
    with pytest.raises(TypeError, match="`batch_argnums` names argument 1, but there are 1 positional ones"):
        small(X)
    with pytest.raises(ValueError, match=r"(?s)batch\['x'\]: 7 rows.*batch\['y'\]: 3 rows"):
        jax.jit(small)(PARAMS, {"x": X, "y": X[:3]})


@pytest.mark.parametrize("count", [8, 7, 4])  # 4: a single micro-batch
@pytest.mark.parametrize(
    ("of", "named"),
    [
        (lambda h: {"h": h, "mean": h.mean()}, r"outputs\['mean'\]: \(\)"),
        (lambda h: (h, h.mean(0)), r"outputs\[1\]: \(3,\)"),
        (lambda h: {"pairs": h @ h.T}, r"outputs\['pairs'\] looks across the rows"),
    ],
)
def test_outputs_without_rows(of, named, count):
    with pytest.raises(ValueError, match=rf"(?s){named}.*reduce over the rows outside"):
        jax.jit(chunked(lambda params, x: of(outputs(params, x)), 4))(PARAMS, rows(count)[0])


def test_an_output_that_has_as_many_entries_as_rows_by_chance():
    small = chunked(lambda params, x: (outputs(params, x), x.mean(0)), 5)  # 5 inputs
    with pytest.raises(ValueError, match=r"outputs\[1\]: \(5,\)"):
        jax.jit(small)(PARAMS, rows(10)[0])


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_key_that_all_micro_batches_share(make):
    with pytest.raises(ValueError, match="from a key that all micro-batches share.*rng_argnum="):
        jax.jit(chunked(dropout, 4))(PARAMS, BATCH[0], make(0))


def test_a_draw_that_all_rows_share_is_none_of_a_row():
    def masked_features(params, x, key):
        return x * jax.random.bernoulli(key, 0.5, x.shape[1:])

    args = PARAMS, X, jax.random.key(0)
    assert jnp.array_equal(jax.jit(chunked(masked_features, 3))(*args), masked_features(*args))

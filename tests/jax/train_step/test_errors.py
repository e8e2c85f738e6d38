"""Bad input is an error when the function is made or traced, and the message names the argument."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradaccum.jax
from tests.jax.problems import network, outputs, rows, squared_error

SIZE = {"micro_batch_size": 4}


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"micro_batch_size": 0}, ValueError, "`micro_batch_size` must be an int >= 1"),
        ({"micro_batch_size": 2.5}, TypeError, "`micro_batch_size` must be an int >= 1"),
        ({"micro_batch_size": True}, TypeError, "`micro_batch_size` must be an int >= 1"),
        ({"micro_batch_size": None}, TypeError, "`micro_batch_size` must be an int >= 1"),
        ({"micro_batch_size": "fast"}, ValueError, '`micro_batch_size` must be an int >= 1 or "auto"'),
        ({**SIZE, "argnums": 1.5}, TypeError, "`argnums` must be an int, or a tuple"),
        ({**SIZE, "argnums": ()}, TypeError, "`argnums` must be an int, or a tuple"),
        ({**SIZE, "argnums": (0, 0)}, ValueError, "`argnums` must be an int, or a tuple of such ints, each once"),
        ({**SIZE, "batch_argnums": -1}, ValueError, "`batch_argnums` must be an int >= 0"),
        ({**SIZE, "rng_argnum": (2,)}, TypeError, "`rng_argnum` must be an int >= 0, or None"),
        ({**SIZE, "rng_argnum": 1}, ValueError, "can't be in both `batch_argnums` and `rng_argnum`"),
        ({**SIZE, "state_argnum": 0}, ValueError, "can't be in both `argnums` and `state_argnum`"),
        ({**SIZE, "rng_argnum": 2, "state_argnum": 2}, ValueError, "in both `rng_argnum` and `state_argnum`"),
        ({**SIZE, "reduction": "max"}, ValueError, '`reduction` must be "mean" or "sum"'),
        ({**SIZE, "weight": 3.0}, TypeError, "`weight` must be a function of the batch arguments"),
        ({**SIZE, "weight": len, "reduction": "sum"}, ValueError, "`weight` is what a mean is over"),
        ({**SIZE, "aux": "rows"}, ValueError, "`aux` must be one of 'concat', 'sum', 'mean', 'last'"),
        ({**SIZE, "accumulate_dtype": jnp.int32}, TypeError, "`accumulate_dtype` must be a floating-point dtype"),
        ({**SIZE, "accumulate_dtype": "wide"}, TypeError, "`accumulate_dtype` must be a floating-point dtype"),
        ({**SIZE, "memory_limit": "1GiB"}, ValueError, '`memory_limit` is for micro_batch_size="auto"'),
        ({"micro_batch_size": "auto", "memory_limit": "much"}, ValueError, "`memory_limit` must be a positive number"),
    ],
)
def test_a_wrong_option_is_named(keywords, error, message):
    with pytest.raises(error) as caught:
        gradaccum.jax.value_and_grad(squared_error, **keywords)
    assert message in str(caught.value)
    with pytest.raises(error):
        gradaccum.jax.grad(squared_error, **keywords)


def test_the_loss_must_be_a_function():
    with pytest.raises(TypeError, match="`loss_fn` must be a function. Received: 3."):
        gradaccum.jax.value_and_grad(3, micro_batch_size=4)


X = np.ones((10, 5))


@pytest.mark.parametrize(
    ("batch", "keywords", "error", "message"),
    [
        (
            {"x": X, "y": {"label": X[:8]}, "z": X[:, 0]},
            {},
            ValueError,
            "The leaves of the batch have different numbers of rows:\n"
            "  batch['x']: 10 rows in axis 0 of (10, 5)\n"
            "  batch['y']['label']: 8 rows in axis 0 of (8, 5)\n"
            "  batch['z']: 10 rows in axis 0 of (10,)\n"
            "Give the axis of the rows of each in `in_axes`",
        ),
        ((X, 3.0), {}, ValueError, "batch[1] has no axis 0 for its rows: its shape is ()"),
        ((X, "text"), {}, TypeError, "batch[1] is not an array, so it has no rows. Received: 'text'"),
        (X, {"in_axes": 2}, ValueError, "batch has no axis 2 for its rows: its shape is (10, 5)"),
        (X, {"in_axes": 0.0}, TypeError, "`in_axes` must hold ints and None, as for jax.vmap"),
        (X, {"in_axes": None}, ValueError, "The batch has no leaf with rows. Check `batch_argnums` and `in_axes`."),
        ((), {}, ValueError, "The batch has no leaf with rows"),
        (X[:0], {}, ValueError, "The batch is empty: it has 0 rows."),
        ({"x": X}, {"in_axes": {"y": 0}}, TypeError, "`in_axes` is not a pytree prefix of batch"),
        ({"x": X}, {"in_axes": (1,)}, TypeError, "it is that argument's own, without a tuple around it: in_axes=1"),
        (X, {"batch_argnums": (1,), "in_axes": (0, 0)}, ValueError, "or one for each of `batch_argnums`"),
        (X, {"batch_argnums": 3}, TypeError, "`batch_argnums` is 3, but loss_fn was called with 2 positional"),
        (X, {"argnums": (0, 2)}, TypeError, "`argnums` is (0, 2), but loss_fn was called with 2 positional"),
        (X, {"argnums": -3}, TypeError, "`argnums` is -3, but loss_fn was called with 2 positional"),
        (X, {"argnums": (0, -2)}, ValueError, "`argnums` must name each argument once"),
    ],
)
def test_a_wrong_batch_is_an_error_that_says_where(batch, keywords, error, message):
    grad_fn = gradaccum.jax.value_and_grad(lambda w, batch: w * 1.0, micro_batch_size=4, **keywords)
    with pytest.raises(error) as caught:
        grad_fn(1.0, batch)
    assert message in str(caught.value)


def test_a_batch_that_is_passed_by_keyword_is_an_error_that_names_it():
    grad_fn = gradaccum.jax.value_and_grad(lambda w, batch: w * 1.0, micro_batch_size=4)
    with pytest.raises(TypeError, match=r"1 positional .* with the keywords batch, .* Pass numbered arguments by pos"):
        grad_fn(1.0, batch=X)


@pytest.mark.parametrize("verify", [True, False])
def test_an_error_of_the_loss_names_what_has_as_many_entries_as_the_batch_has_rows_and_was_not_cut(verify):
    def loss_fn(w, x, y, scale=1.0):
        return ((x * w).sum(-1) - y["label"]).mean() * scale

    grad_fn = gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=4, verify=verify)
    y = {"label": np.arange(10.0), "mask": np.ones(3)}
    for args, kwargs, name in (((1.0, X, y), {}, "argument 2"), ((1.0, X), {"y": y, "scale": 2.0}, "y")):
        with pytest.raises(TypeError, match="incompatible shapes") as caught:
            grad_fn(*args, **kwargs)
        told = [note for note in caught.value.__notes__ if "`batch_argnums`" in note]
        assert len(told) == 1
        assert "as many entries as the batch has rows, 10," in told[0]
        assert f"\n  {name}['label']: float64[10]\nIf they are rows" in told[0]


def test_errors_of_a_loss_with_nothing_of_the_kind_are_left_alone():
    def loss_fn(w, x, y):
        raise ValueError("of the user's own")

    with pytest.raises(ValueError, match="of the user's own") as caught:
        gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=4)(1.0, X, np.ones(3))
    assert not any("batch_argnums" in note for note in getattr(caught.value, "__notes__", ()))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), np.float64("inf")])
def test_a_weight_that_is_none(weight):
    with pytest.raises(ValueError, match="`weight` must be finite and >= 0: .* Received: (-1.0|nan|inf)"):
        jax.jit(gradaccum.jax.grad(lambda w, x: (w * x).mean(), micro_batch_size=4, weight=lambda x: weight))(1.0, X)


def test_a_traced_weight_that_is_none_makes_loss_and_gradients_nan():
    grad_fn = gradaccum.jax.value_and_grad(
        lambda w, x: (w * x).sum() / x.sum(), micro_batch_size=4, weight=lambda x: x.sum()
    )
    loss, gradient = jax.jit(grad_fn)(1.0, jnp.ones(10).at[3].set(-9.0))
    assert jnp.isnan(loss)
    assert jnp.isnan(gradient)


def test_arguments_of_several_batches_are_numbered():
    grad_fn = gradaccum.jax.value_and_grad(lambda w, x, y: w * 1.0, micro_batch_size=4, batch_argnums=(1, 2))
    with pytest.raises(ValueError, match=r"argument 1: 10 rows .*\n  argument 2\['a'\]: 9 rows"):
        grad_fn(1.0, X, {"a": X[:9]})


def returning(value):
    return lambda w, x, *rest: value(w * x, *rest)


@pytest.mark.parametrize(
    ("loss_fn", "keywords", "error", "message"),
    [
        (returning(lambda z: z), {}, TypeError, "`loss_fn` must return a scalar"),
        (returning(lambda z: z), {}, TypeError, "Received: float64[4]. Take the mean over all of its entries."),
        (returning(lambda z: (z.mean(), z)), {}, TypeError, "Received: a tuple of 2. Pass has_aux=True"),
        (returning(lambda z: "low"), {}, TypeError, "`loss_fn` must return a scalar"),
        (returning(lambda z: (z > 0).sum()), {}, TypeError, "a real floating-point number. Received: int64[]"),
        (returning(lambda z: z.mean()), {"has_aux": True}, TypeError, "must return (loss, aux), as `has_aux` says"),
        (returning(lambda z: z.mean() if z.sum() > 0 else z.sum()), {}, TypeError, "`loss_fn` (or `weight`) can't"),
        (returning(lambda z: float(z.mean())), {}, TypeError, "`loss_fn` (or `weight`) can't"),
        (returning(lambda z: np.asarray(z).mean()), {}, TypeError, "`loss_fn` (or `weight`) can't"),
        (returning(lambda z: z.mean()), {"weight": lambda x: float(x.sum())}, TypeError, "can't be traced"),
        (returning(lambda z: z.mean()), {"weight": lambda x: x}, TypeError, "`weight` must return a real number"),
        (returning(lambda z: z.mean()), {"weight": lambda x: None}, TypeError, "`weight` must return a real number"),
        (returning(lambda z: {}), {}, TypeError, "`loss_fn` returned an empty dict of losses"),
        (returning(lambda z: {"a": z.mean()}), {}, TypeError, "`loss_fn` may return {name: (loss, weight)}"),
        (returning(lambda z: {"a": (z, 1)}), {}, TypeError, "`loss_fn`, as the loss 'a', must return a scalar"),
        (returning(lambda z: {"a": (z.mean(), z)}), {}, TypeError, "`loss_fn`, as the weight of 'a', must"),
        (returning(lambda z: {"a": (z.mean(), 1)}), {"weight": len}, TypeError, "weight= is for a single loss"),
        (returning(lambda z: {"a": (z.sum(), 1)}), {"reduction": "sum"}, TypeError, "'sum' is for a single loss"),
        (returning(lambda z: (z.mean(), {"n": z[0]})), {"has_aux": True}, ValueError, "needs a row for each row of"),
        (returning(lambda z: (z.mean(), {"n": z[0]})), {"has_aux": True}, ValueError, "  aux['n']: ()\n"),
        (
            returning(lambda z: (z.mean(), {"n": z})),
            {"has_aux": True, "aux": {"m": "sum"}},
            TypeError,
            "`aux` is not a pytree prefix of the aux of loss_fn",
        ),
        (
            returning(lambda z: ({"a": (z.mean(), 1)}, z.mean())),
            {"has_aux": True, "aux": "mean"},
            ValueError,
            "aux='mean' is weighed as the loss, and `loss_fn` returns several",
        ),
    ],
)  # fmt: skip
def test_a_wrong_return_value_is_an_error_that_names_the_function(loss_fn, keywords, error, message):
    grad_fn = gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=4, **keywords)
    with pytest.raises(error) as caught:
        jax.jit(grad_fn)(2.0, jnp.ones(8))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (lambda state: None, "a new state of the same structure"),
        (lambda state: {"mean": state["mean"], "n": 0.5}, "  state['n']: int64[] -> float64[]"),
        (lambda state: {"mean": state["mean"][:1], "n": state["n"]}, "  state['mean']: float64[3] -> float64[1]"),
    ],
)
def test_a_state_of_another_kind_is_an_error_that_lists_its_leaves(new, message):
    grad_fn = gradaccum.jax.value_and_grad(
        lambda w, x, state: ((w * x).mean(), new(state)), micro_batch_size=4, state_argnum=2
    )
    with pytest.raises(TypeError) as caught:
        grad_fn(1.0, jnp.ones(8), {"mean": jnp.ones(3), "n": 0})
    assert message in str(caught.value)


def test_a_state_without_its_aux_is_an_error():
    grad_fn = gradaccum.jax.value_and_grad(
        lambda w, x, state: ((w * x).mean(), state), micro_batch_size=4, state_argnum=2, has_aux=True
    )
    with pytest.raises(TypeError, match=r"must return \(loss, \(new_state, aux\)\)"):
        grad_fn(1.0, jnp.ones(8), jnp.ones(3))


def test_what_is_no_key_is_an_error():
    grad_fn = gradaccum.jax.value_and_grad(lambda w, x, key: (w * x).mean(), micro_batch_size=4, rng_argnum=2)
    for wrong in (3, 0.5, "seed", jnp.ones(3), jax.random.split(jax.random.key(0), 3)):
        with pytest.raises(TypeError, match="`rng_argnum` must name a key, or a pytree of keys"):
            grad_fn(1.0, jnp.ones(8), wrong)


def test_an_error_of_the_loss_itself_comes_through():
    def loss_fn(params, batch):
        return outputs(params, batch[0].T).mean()

    with pytest.raises(TypeError, match="dot_general"):
        gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=4)(network(), rows(8))


def test_an_aux_with_as_many_entries_as_the_first_micro_batch_has_rows_is_an_error_that_says_where():
    def loss_fn(params, batch):
        return squared_error(params, batch), outputs(params, batch[0])[:, :1] * jnp.ones(4)

    transposed = lambda params, batch: (loss_fn(params, batch)[0], loss_fn(params, batch)[1].T)  # noqa: E731
    for loss, wrong in ((loss_fn, False), (transposed, True)):
        grad_fn = gradaccum.jax.value_and_grad(loss, **SIZE, has_aux=True, verify=False)
        if wrong:
            with pytest.raises(ValueError, match="needs a row for each row of the micro-batch, 3 here"):
                jax.eval_shape(grad_fn, network(), rows(7))
        else:
            assert jax.eval_shape(grad_fn, network(), rows(7))[0][1].shape == (7, 4)

"""Bad input is an error when the function is made or traced, and the message names the argument."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradaccum.jax
from tests.jax.comparisons import assert_refused
from tests.jax.problems import network, outputs, rows, squared_error

AUTO, SIZE, INT = {"micro_batch_size": "auto"}, {"micro_batch_size": 4}, "`micro_batch_size` must be an int >= 1"


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"micro_batch_size": 0}, ValueError, INT),
        ({"micro_batch_size": 2.5}, TypeError, INT),
        ({"micro_batch_size": True}, TypeError, INT),
        ({"micro_batch_size": None}, TypeError, INT),
        ({"micro_batch_size": "fast"}, ValueError, f'{INT} or "auto"'),
        ({**SIZE, "argnums": 1.5}, TypeError, "`argnums` must be an int, or a tuple"),
        ({**SIZE, "argnums": ()}, TypeError, "`argnums` must be an int, or a tuple"),
        ({**SIZE, "argnums": (0, 0)}, ValueError, "`argnums` must be an int, or a tuple of such ints, each once"),
        ({**SIZE, "batch_argnums": -1}, ValueError, "`batch_argnums` must be an int >= 0"),
        ({**SIZE, "rng_argnum": (2,)}, TypeError, "`rng_argnum` must be an int >= 0, or None"),
        ({**SIZE, "rng_argnum": 1}, ValueError, "can't be in both `batch_argnums` and `rng_argnum`"),
        ({**SIZE, "state_argnum": 0}, ValueError, "can't be in both `argnums` and `state_argnum`"),
        ({**SIZE, "rng_argnum": 2, "state_argnum": 2}, ValueError, "in both `rng_argnum` and `state_argnum`"),
        ({**SIZE, "aux": "mean", "state_argnum": 2}, ValueError, "with `state_argnum`, without has_aux=True."),
        ({**SIZE, "reduction": "max"}, ValueError, '`reduction` must be "mean" or "sum"'),
        ({**SIZE, "weight": 3.0}, TypeError, "`weight` must be a function of the batch arguments"),
        ({**SIZE, "weight": len, "reduction": "sum"}, ValueError, "`weight` is what a mean is over"),
        ({**SIZE, "aux": "rows"}, ValueError, "`aux` must be one of 'concat', 'sum', 'mean', 'last'"),
        ({**SIZE, "accumulate_dtype": jnp.int32}, TypeError, "`accumulate_dtype` must be a floating-point dtype"),
        ({**SIZE, "accumulate_dtype": "wide"}, TypeError, "`accumulate_dtype` must be a floating-point dtype"),
        ({**SIZE, "memory_limit": "1GiB"}, ValueError, '`memory_limit` is for micro_batch_size="auto"'),
        ({**AUTO, "memory_limit": "much"}, ValueError, "`memory_limit` must be a positive number"),
        ({**SIZE, "loss_fn": 3}, TypeError, "`loss_fn` must be a function. Received: 3."),
    ],
)
def test_a_wrong_option_is_named(keywords, error, message):
    for of in (gradaccum.jax.value_and_grad, gradaccum.jax.grad):
        assert_refused(lambda of=of: of(**{"loss_fn": squared_error} | keywords), error, message)


X = np.ones((10, 5))
CUT = "The leaves of the batch have different numbers of rows:\n"
NO_ROWS = "The batch has no leaf with rows"


@pytest.mark.parametrize(
    ("batch", "keywords", "error", "message"),
    [
        (
            {"x": X, "y": {"label": X[:8]}, "z": X[:, 0]}, {}, ValueError,
            f"{CUT}  batch['x']: 10 rows in axis 0 of (10, 5)\n  batch['y']['label']: 8 rows in axis 0 of (8, 5)\n"
            "  batch['z']: 10 rows in axis 0 of (10,)\nGive the axis of the rows of each in `in_axes`",
        ),
        ((X, 3.0), {}, ValueError, "batch[1] has no axis 0 for its rows: its shape is ()"),
        ((X, "text"), {}, TypeError, "batch[1] is not an array, so it has no rows. Received: 'text'"),
        (X, {"in_axes": 2}, ValueError, "batch has no axis 2 for its rows: its shape is (10, 5)"),
        (X, {"in_axes": 0.0}, TypeError, "`in_axes` must hold ints and None, as for jax.vmap"),
        (X, {"in_axes": None}, ValueError, f"{NO_ROWS}. Check `batch_argnums` and `in_axes`."),
        ((), {}, ValueError, NO_ROWS),
        (X[:0], {}, ValueError, "The batch is empty: it has 0 rows."),
        ({"x": X}, {"in_axes": {"y": 0}}, TypeError, "`in_axes` is not a pytree prefix of batch"),
        ({"x": X}, {"in_axes": (1,)}, TypeError, "it is that argument's own, without a tuple around it: in_axes=1"),
        (X, {"batch_argnums": (1,), "in_axes": (0, 0)}, ValueError, "or one for each of `batch_argnums`"),
        (X, {"batch_argnums": 3}, TypeError, "`batch_argnums` is 3, but loss_fn was called with 2 positional"),
        (X, {"argnums": (0, 2)}, TypeError, "`argnums` is (0, 2), but loss_fn was called with 2 positional"),
        (X, {"argnums": -3}, TypeError, "`argnums` is -3, but loss_fn was called with 2 positional"),
        (X, {"argnums": (0, -2)}, ValueError, "`argnums` must name each argument once"),
    ],
)  # fmt: skip
def test_a_wrong_batch_is_an_error_that_says_where(batch, keywords, error, message):
    grad_fn = gradaccum.jax.value_and_grad(lambda w, batch: w * 1.0, micro_batch_size=4, **keywords)
    assert_refused(lambda: grad_fn(1.0, batch), error, message)


def test_a_batch_that_is_passed_by_keyword_is_an_error_and_those_of_several_arguments_are_numbered():
    grad_fn = gradaccum.jax.value_and_grad(lambda w, batch: w * 1.0, micro_batch_size=4)
    with pytest.raises(TypeError, match=r"1 positional .* with the keywords batch, .* Pass numbered arguments by pos"):
        grad_fn(1.0, batch=X)
    grad_fn = gradaccum.jax.value_and_grad(lambda w, x, y: w * 1.0, micro_batch_size=4, batch_argnums=(1, 2))
    with pytest.raises(ValueError, match=r"argument 1: 10 rows .*\n  argument 2\['a'\]: 9 rows"):
        grad_fn(1.0, X, {"a": X[:9]})


Y = {"label": np.arange(10.0), "mask": np.ones(3)}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("args", "keywords", "name"), [((1.0, X, Y), {}, "argument 2"), ((1.0, X), {"y": Y, "scale": 2.0}, "y")]
)
def test_an_error_of_the_loss_names_what_has_as_many_entries_as_the_batch_and_was_not_cut(args, keywords, name, verify):
    def loss_fn(w, x, y, scale=1.0):
        return ((x * w).sum(-1) - y["label"]).mean() * scale

    with pytest.raises(TypeError, match="incompatible shapes") as caught:
        gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=4, verify=verify)(*args, **keywords)
    (note,) = [note for note in caught.value.__notes__ if "`batch_argnums`" in note]
    assert "as many entries as the batch has rows, 10," in note
    assert f"\n  {name}['label']: float64[10]\nIf they are rows" in note


def test_other_errors_of_the_loss_are_left_alone():
    def loss_fn(w, x, y):
        raise ValueError("of the user's own")

    with pytest.raises(ValueError, match="of the user's own") as caught:
        gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=4)(1.0, X, np.ones(3))
    assert not any("batch_argnums" in note for note in getattr(caught.value, "__notes__", ()))
    with pytest.raises(TypeError, match="dot_general"):
        gradaccum.jax.value_and_grad(lambda p, b: outputs(p, b[0].T).mean(), micro_batch_size=4)(network(), rows(8))


def test_a_traced_weight_that_is_none_makes_loss_and_gradients_nan():
    loss_fn = lambda w, x: (w * x).sum() / x.sum()  # noqa: E731
    grad_fn = gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=4, weight=lambda x: x.sum())
    assert jnp.isnan(jnp.stack(jax.jit(grad_fn)(1.0, jnp.ones(10).at[3].set(-9.0)))).all()


SCALAR, TRACED = "`loss_fn` must return a scalar", "`loss_fn` (or `weight`) can't"
REAL, NONE, AUX = "`weight` must return a real number", "`weight` must be finite and >= 0: ", {"has_aux": True}


@pytest.mark.parametrize(
    ("value", "keywords", "error", "message"),
    [
        (lambda z: z, {}, TypeError, SCALAR),
        (lambda z: z, {}, TypeError, "Received: float64[4]. Take the mean over all of its entries."),
        (lambda z: (z.mean(), z), {}, TypeError, "Received: a tuple of 2. Pass has_aux=True"),
        (lambda z: "low", {}, TypeError, SCALAR),
        (lambda z: (z > 0).sum(), {}, TypeError, "a real floating-point number. Received: int64[]"),
        (lambda z: z.mean(), AUX, TypeError, "must return (loss, aux), as `has_aux` says"),
        (lambda z: z.mean() if z.sum() > 0 else z.sum(), {}, TypeError, TRACED),
        (lambda z: float(z.mean()), {}, TypeError, TRACED),
        (lambda z: np.asarray(z).mean(), {}, TypeError, TRACED),
        (lambda z: z.mean(), {"weight": lambda x: float(x.sum())}, TypeError, "can't be traced"),
        (lambda z: z.mean(), {"weight": lambda x: x}, TypeError, REAL),
        (lambda z: z.mean(), {"weight": lambda x: None}, TypeError, REAL),
        (lambda z: z.mean(), {"weight": lambda x: -1.0}, ValueError, NONE),
        (lambda z: z.mean(), {"weight": lambda x: float("nan")}, ValueError, NONE),
        (lambda z: z.mean(), {"weight": lambda x: np.float64("inf")}, ValueError, NONE),
        (lambda z: {}, {}, TypeError, "`loss_fn` returned an empty dict of losses"),
        (lambda z: {"a": z.mean()}, {}, TypeError, "`loss_fn` may return {name: (loss, weight)}"),
        (lambda z: {"a": (z, 1)}, {}, TypeError, "`loss_fn`, as the loss 'a', must return a scalar"),
        (lambda z: {"a": (z.mean(), z)}, {}, TypeError, "`loss_fn`, as the weight of 'a', must"),
        (lambda z: {"a": (z.mean(), 1)}, {"weight": len}, TypeError, "weight= is for a single loss"),
        (lambda z: {"a": (z.sum(), 1)}, {"reduction": "sum"}, TypeError, "'sum' is for a single loss"),
        (lambda z: (z.mean(), {"n": z[0]}), AUX, ValueError, "needs a row for each row of"),
        (lambda z: (z.mean(), {"n": z[0]}), AUX, ValueError, "  aux['n']: ()\n"),
        (lambda z: (z.mean(), {"n": z}), AUX | {"aux": {"m": "sum"}}, TypeError, "prefix of the aux of loss_fn"),
        (lambda z: ({"a": (z.mean(), 1)}, z.mean()), AUX | {"aux": "mean"}, ValueError,
         "aux='mean' is weighed as the loss, and `loss_fn` returns several"),
    ],
)  # fmt: skip
def test_a_wrong_return_value_is_an_error_that_names_the_function(value, keywords, error, message):
    grad_fn = gradaccum.jax.value_and_grad(lambda w, x: value(w * x), micro_batch_size=4, **keywords)
    assert_refused(lambda: jax.jit(grad_fn)(2.0, jnp.ones(8)), error, message)


@pytest.mark.parametrize(
    ("new", "keywords", "message"),
    [
        (lambda state: None, {}, "a new state of the same structure"),
        (lambda state: {"mean": state["mean"], "n": 0.5}, {}, "  state['n']: int64[] -> float64[]"),
        (lambda state: {"mean": state["mean"][:1], "n": state["n"]}, {}, "  state['mean']: float64[3] -> float64[1]"),
        (lambda state: state, AUX, "must return (loss, (new_state, aux))"),
    ],
)
def test_a_state_of_another_kind_is_an_error_that_lists_its_leaves(new, keywords, message):
    loss_fn = lambda w, x, state: ((w * x).mean(), new(state))  # noqa: E731
    grad_fn = gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=4, state_argnum=2, **keywords)
    assert_refused(lambda: grad_fn(1.0, jnp.ones(8), {"mean": jnp.ones(3), "n": 0}), TypeError, message)


@pytest.mark.parametrize("wrong", [3, 0.5, "seed", jnp.ones(3), jax.random.split(jax.random.key(0), 3)])
def test_what_is_no_key_is_an_error(wrong):
    grad_fn = gradaccum.jax.value_and_grad(lambda w, x, key: (w * x).mean(), micro_batch_size=4, rng_argnum=2)
    message = "`rng_argnum` must name a key, or a pytree of keys"
    assert_refused(lambda: grad_fn(1.0, jnp.ones(8), wrong), TypeError, message)


@pytest.mark.parametrize("transposed", [False, True])
def test_an_aux_with_as_many_entries_as_the_first_micro_batch_has_rows_is_an_error_that_says_where(transposed):
    def loss_fn(params, batch):
        aux = outputs(params, batch[0])[:, :1] * jnp.ones(4)
        return squared_error(params, batch), aux.T if transposed else aux

    grad_fn = gradaccum.jax.value_and_grad(loss_fn, **SIZE, has_aux=True, verify=False)
    if transposed:
        with pytest.raises(ValueError, match="needs a row for each row of the micro-batch, 3 here"):
            jax.eval_shape(grad_fn, network(), rows(7))
    else:
        assert jax.eval_shape(grad_fn, network(), rows(7))[0][1].shape == (7, 4)

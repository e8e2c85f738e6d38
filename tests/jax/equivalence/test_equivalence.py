"""`check_equivalence` finds what micro-batches change, and names it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradaccum import NotEquivalentError
from gradaccum.jax import check_equivalence, chunked
from tests.jax.comparisons import assert_refused
from tests.jax.problems import PARAMS, network, outputs, rows, squared_error

BATCH = rows(8)
LABELLED = {"x": BATCH[0], "y": jnp.asarray([1, -1, 2, -1, 0, 1, 2, 0])}


def counted(batch):
    return (batch["y"] >= 0).sum()


def token_mean(params, batch):
    return jnp.where(batch["y"] >= 0, outputs(params, batch["x"]).sum(-1) ** 2, 0).sum() / counted(batch)


def row_mean(params, batch):
    return outputs(params, batch["x"]).mean()


def several(weight):
    return lambda p, b: {"a": (token_mean(p, b), weight(b)), "b": (row_mean(p, b), len(b["x"]))}


def contrastive(params, batch):
    h = outputs(params, batch[0])
    return -jnp.diag(jax.nn.log_softmax(h @ h.T)).mean()


def penalty(params):
    return jnp.sum(params["out"]["kernel"] ** 2)


def table(params, batch):  # rows look numbers up in what is no row
    return (outputs(params, batch["x"]) @ batch["table"].sum(0)).mean()


def half_precision(params, batch):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, batch["x"]))
    counts = (batch["y"] >= 0).astype(jnp.bfloat16)
    return (outputs(*half).sum(-1) ** 2 * counts).sum() / counts.sum()


def dropout(params, batch, key):
    x, y = batch
    return squared_error(params, (x * jax.random.bernoulli(key, 0.5, x.shape), y))


# With a state.


def batch_norm(params, batch, mean):
    x, y = batch
    now = x.mean(0)
    return squared_error(params, (x - now, y)), 0.9 * mean + 0.1 * now


def counting(params, batch, state):
    return squared_error(params, batch), {"calls": state["calls"] + 1}


def remembering(params, batch, mean):
    return squared_error(params, batch), batch[0].mean(0)


SLOW, STATE, ZEROS, KEY = pytest.mark.slow, {"state_argnum": 2}, jnp.zeros(5), jax.random.key(0)
TABLE = {"x": BATCH[0], "table": BATCH[1]}
CULPRITS = {  # what is checked, and the first cause: its kind, where it is, and its message
    "a token mean": ((token_mean, LABELLED), {}, "weight", "loss", "lambda batch: (batch['y'] != -1).sum()"),
    "a sum": ((lambda p, b: squared_error(p, b) * len(b[0]), BATCH), {}, "reduction", "loss", 'Pass reduction="sum"'),
    "a mean taken for a sum": (
        (squared_error, BATCH), {"reduction": "sum"}, "weight", "loss", 'Pass reduction="mean"', SLOW,
    ),
    "a sum and a penalty": (
        (lambda p, b: squared_error(p, b) * len(b[0]) + penalty(p), BATCH), {}, "regulariser", "loss",
        "counts once per micro-batch",
    ),
    "a contrastive loss": ((contrastive, BATCH), {}, "loss", "loss", "gradaccum.jax.chunked"),
    "a table": ((table, TABLE), {}, "input", "batch['table']", "every row needs all of it"),
    "a wrong weight": (
        (squared_error, BATCH), {"weight": lambda b: (b[0] > 0).sum()}, "weight", "loss", "Leave `weight` out", SLOW,
    ),
    # What numbers do not tell is seen in the loss.
    "half precision": (
        (half_precision, LABELLED), {}, "weight", "loss", "It divides by what is summed at test_equivalence.py", SLOW,
    ),
    "several losses": (
        (several(lambda b: len(b["x"])), LABELLED), {}, "weight", "loss", "As to the loss 'a': It divides by",
    ),
    "two rows": (
        (lambda p, b: outputs(p, b[0] - b[0].mean(0)).var(), rows(2)), {}, "loss", "loss", "looks across the row", SLOW,
    ),
    "batch norm, by its state": ((batch_norm, BATCH, ZEROS), STATE, "batch_norm", "mean", ""),
    "a state that moves alone": ((counting, BATCH, {"calls": jnp.zeros(())}), STATE, "buffer", "calls", ""),
    "a state that is an array": ((remembering, BATCH, ZEROS), STATE, "buffer", "mean", ""),
    "a shape that is written down": (
        (lambda p, b: squared_error(p, (b[0].reshape(8, 5), b[1])), BATCH), {}, "error", "loss",
        "TypeError: cannot reshape",
    ),
    "a key that isn't named": ((dropout, BATCH, KEY), {}, "randomness", "loss", ""),
}  # fmt: skip
RIGHT = {
    "rows": ((squared_error, BATCH), {"micro_batch_size": 4}, SLOW),
    "tokens": ((token_mean, LABELLED), {"weight": counted}, SLOW),
    "several losses": ((several(counted), LABELLED), {}),
    "a mean and a penalty": ((lambda p, b: squared_error(p, b) + penalty(p), BATCH), {}, SLOW),
    "aux, and gradients of two arguments": (
        (lambda p, b, s: (squared_error(p, b) * s, {"mean": b[0].mean()}), BATCH, jnp.asarray(2.0)),
        {"has_aux": True, "argnums": (0, 2)},
    ),
    "dropout whose key is named": ((dropout, BATCH, KEY), {"rng_argnum": 2}),
    "dropout whose raw key is named": ((dropout, BATCH, jax.random.PRNGKey(0)), {"rng_argnum": 2}, SLOW),
    "the two passes of chunked": (
        (lambda p, b: jnp.std(chunked(outputs, 2)(p, b[0]), axis=-1).mean(), BATCH), {},
    ),
}  # fmt: skip


def each(cases):
    """Compiling takes longest here: some are slow."""
    return [pytest.param(name, marks=[case[-1]] * (case[-1] is SLOW)) for name, case in cases.items()]


def check(case, **options):
    (loss, *args), more = case[:2]
    return check_equivalence(loss, PARAMS, *args, **more, **options)


@pytest.mark.parametrize("name", each(CULPRITS))
def test_the_culprit_is_named_for(name):
    result, (_, _, kind, where, message, *_) = check(CULPRITS[name]), CULPRITS[name]
    (cause,) = result.causes
    assert not result.ok
    assert (cause.kind, cause.where) == (kind, where)
    assert_refused(result.raise_if_different, NotEquivalentError, message)
    if kind == "buffer":
        assert result.max_error < 1e-12


@pytest.mark.parametrize("name", each(RIGHT))
def test_nothing_is_wrong_with(name):
    result = check(RIGHT[name])
    assert result.ok, result
    assert result.max_error < 1e-12
    assert result.precision == "float64"
    assert any("Random numbers, such as those of dropout" in note for note in result.notes) == ("dropout" in name)


def test_a_callback_that_draws_other_numbers_each_time_is_named():
    draw = np.random.default_rng(0)

    def loss(params, batch):
        factor = jax.pure_callback(lambda: draw.normal(), jax.ShapeDtypeStruct((), float))
        return squared_error(params, batch) * jax.lax.stop_gradient(factor)

    (cause,) = check_equivalence(loss, PARAMS, BATCH).causes
    assert cause.kind == "nondeterminism"
    assert "another gradient each time" in cause.message
    assert "callbacks" in cause.message


def test_full_masks_that_hide_a_wrong_weight_are_a_note():
    result = check_equivalence(token_mean, PARAMS, LABELLED | {"y": jnp.zeros(8, int)})
    assert result.ok
    assert any("This batch doesn't show the difference that others will" in note for note in result.notes)


def test_wrong_weights_are_found_where_no_ragged_micro_batches_are_even():
    batch = {"x": rows(12)[0], "y": jnp.asarray([1, -1, 2, -1, 0, 1, -1, 0, -1, -1, 1, -1])}
    assert check_equivalence(token_mean, PARAMS, batch, weight=counted).ok
    result = check_equivalence(token_mean, PARAMS, batch, weight=lambda b: (b["y"] >= 0).any() * len(b["y"]))
    assert result.max_error > 1e-3


@pytest.mark.parametrize("gap", [1e-14, pytest.param(0.05, marks=pytest.mark.slow)])
def test_a_sign_that_rounding_decides_is_no_difference_where_it_decides_at_these_parameters_alone(gap):
    def loss(edge, batch):  # in which kernels of other sizes may differ by rounding
        x, _ = batch
        return (jax.nn.relu(edge - 1.0 + (gap if len(x) > 6 else -gap)) * x).mean()

    result = check_equivalence(loss, jnp.ones(()), BATCH)
    assert result.ok == (gap < 1e-3), result


def test_parameters_in_single_precision_are_checked_in_double():
    params, batch = network(dtype=jnp.float32), rows(8, dtype=jnp.float32)
    with jax.enable_x64(False):
        assert check_equivalence(squared_error, params, batch).max_error < 1e-12


def test_a_loss_that_casts_down_is_allowed_its_rounding():
    result = check_equivalence(lambda p, b: squared_error(p, b).astype(jnp.float32) * 1, PARAMS, BATCH)
    assert result.ok
    assert (result.precision, result.tolerance) == ("float32", 1e-4)


def test_the_record_says_what_was_compared(tmp_path):
    result = check_equivalence(squared_error, PARAMS, BATCH, micro_batch_size=4)
    assert result.partitions[0] == (4, 4)
    names = {"loss", "hidden.bias", "hidden.kernel", "out.bias", "out.kernel"}
    assert {difference.name for difference in result.differences} == names
    assert "The accumulated gradient is the large batch's" in str(result)
    assert result.save(tmp_path / "check.json").exists()


@pytest.mark.parametrize(
    ("loss", "batch", "options", "message"),
    [
        (squared_error, rows(1), {}, "at least 2 rows"),
        (lambda p, b: squared_error(p, b) * jnp.nan, BATCH, {}, "own loss is nan"),
        (squared_error, BATCH, {"micro_batch_size": 0}, "`micro_batch_size` must be an int >= 1"),
    ],
)
def test_bad_input(loss, batch, options, message):
    assert_refused(lambda: check_equivalence(loss, PARAMS, batch, **options), ValueError, message)

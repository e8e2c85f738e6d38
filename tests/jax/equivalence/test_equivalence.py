"""`check_equivalence` finds what micro-batches change, and names it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradaccum import NotEquivalentError
from gradaccum.jax import check_equivalence, chunked
from tests.jax.problems import network, outputs, rows, squared_error

BATCH = rows(8)
LABELS = np.array([1, -1, 2, -1, 0, 1, 2, 0])


def labelled(ignored=LABELS):
    return {"x": BATCH[0], "y": jnp.asarray(ignored)}


def token_mean(params, batch):
    return jnp.where(batch["y"] >= 0, outputs(params, batch["x"]).sum(-1) ** 2, 0).sum() / (batch["y"] >= 0).sum()


def contrastive(params, batch):
    h = outputs(params, batch[0])
    return -jnp.diag(jax.nn.log_softmax(h @ h.T)).mean()


def batch_norm(params, batch, mean):
    x, y = batch
    now = x.mean(0)
    return squared_error(params, (x - now, y)), 0.9 * mean + 0.1 * now


def table(params, batch):  # rows look numbers up in what is no row
    return (outputs(params, batch["x"]) @ batch["table"].sum(0)).mean()


def one_of_each(cases, *others):
    """Compiling takes longest here: the others are slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in others else name for name in cases]


CULPRITS = {
    "a token mean": (token_mean, labelled(), {}, "weight", "loss", r"lambda batch: \(batch\['y'\] != -1\).sum\(\)"),
    "a sum": (
        lambda p, b: squared_error(p, b) * len(b[0]), BATCH, {}, "reduction", "loss", 'Pass reduction="sum"',
    ),
    "a mean taken for a sum": (squared_error, BATCH, {"reduction": "sum"}, "weight", "loss", 'Pass reduction="mean"'),
    "a sum and a penalty": (
        lambda p, b: squared_error(p, b) * len(b[0]) + jnp.sum(p["out"]["kernel"] ** 2), BATCH, {},
        "regulariser", "loss", "counts once per micro-batch",
    ),
    "a contrastive loss": (contrastive, BATCH, {}, "loss", "loss", "gradaccum.jax.chunked"),
    "a table": (table, {"x": BATCH[0], "table": BATCH[1]}, {}, "input", "batch['table']", "every row needs all of it"),
    "a wrong weight": (
        squared_error, BATCH, {"weight": lambda b: (b[0] > 0).sum()}, "weight", "loss", "Leave `weight` out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", one_of_each(CULPRITS, "a mean taken for a sum", "a wrong weight"))
def test_the_culprit_is_named_for(name):
    loss, batch, options, kind, where, message = CULPRITS[name]
    result = check_equivalence(loss, network(), batch, **options)
    assert not result.ok
    assert (result.causes[0].kind, result.causes[0].where) == (kind, where)
    with pytest.raises(NotEquivalentError, match=f"(?s){message}"):
        result.raise_if_different()


def half_precision(params, batch):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, batch["x"]))
    counts = (batch["y"] >= 0).astype(jnp.bfloat16)
    return (outputs(*half).sum(-1) ** 2 * counts).sum() / counts.sum()


@pytest.mark.parametrize(
    ("loss", "batch", "kind", "message"),
    [
        pytest.param(
            half_precision, labelled(), "weight", "It divides by what is summed at test_equivalence.py",
            marks=pytest.mark.slow,
        ),
        (
            lambda p, b: {"a": (token_mean(p, b), len(b["x"])), "b": (outputs(p, b["x"]).mean(), len(b["x"]))},
            labelled(), "weight", "As to the loss 'a': It divides by",
        ),
        pytest.param(
            lambda p, b: outputs(p, b[0] - b[0].mean(0)).var(), rows(2), "loss", "looks across the rows",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["half precision", "several losses", "two rows"],
)  # fmt: skip
def test_a_cause_that_numbers_do_not_tell_is_seen_in_the_loss(loss, batch, kind, message):
    (cause,) = check_equivalence(loss, network(), batch).causes
    assert cause.kind == kind
    assert message in cause.message


def test_full_masks_that_hide_a_wrong_weight_are_a_note():
    result = check_equivalence(token_mean, network(), labelled(np.zeros(8, int)))
    assert result.ok
    assert any("This batch doesn't show the difference that others will" in note for note in result.notes)


def test_batch_norm_is_named_by_its_state():
    result = check_equivalence(batch_norm, network(), BATCH, jnp.zeros(5), state_argnum=2)
    assert [cause.kind for cause in result.causes] == ["batch_norm"]


def test_a_state_that_moves_alone_is_a_buffer():
    def counts(params, batch, state):
        return squared_error(params, batch), {"calls": state["calls"] + 1}

    result = check_equivalence(counts, network(), BATCH, {"calls": jnp.zeros(())}, state_argnum=2)
    assert [(cause.kind, cause.where) for cause in result.causes] == [("buffer", "calls")]
    assert result.max_error < 1e-12


def test_a_state_that_is_an_array_has_its_argument_s_name():
    result = check_equivalence(
        lambda p, b, mean: (squared_error(p, b), b[0].mean(0)), network(), BATCH, jnp.zeros(5), state_argnum=2
    )
    assert [(cause.kind, cause.where) for cause in result.causes] == [("buffer", "mean")]


def test_a_shape_that_is_written_down_is_an_error_by_its_own_words():
    result = check_equivalence(lambda p, b: squared_error(p, (b[0].reshape(8, 5), b[1])), network(), BATCH)
    assert result.causes[0].kind == "error"
    assert "TypeError: cannot reshape" in result.causes[0].message


def dropout(params, batch, key):
    x, y = batch
    return squared_error(params, (x * jax.random.bernoulli(key, 0.5, x.shape), y))


@pytest.mark.parametrize("make", [jax.random.key, pytest.param(jax.random.PRNGKey, marks=pytest.mark.slow)])
def test_dropout_is_no_difference_where_its_key_is_named(make):
    result = check_equivalence(dropout, network(), BATCH, make(0), rng_argnum=2)
    assert result.ok, result
    assert any("Random numbers, such as those of dropout" in note for note in result.notes)
    unnamed = check_equivalence(dropout, network(), BATCH, make(0))
    assert [cause.kind for cause in unnamed.causes] == ["randomness"]


RIGHT = {
    "rows": (squared_error, BATCH, {"micro_batch_size": 4}),
    "tokens": (token_mean, labelled(), {"weight": lambda batch: (batch["y"] >= 0).sum()}),
    "several losses": (
        lambda p, b: {"a": (token_mean(p, b), (b["y"] >= 0).sum()), "b": (outputs(p, b["x"]).mean(), len(b["x"]))},
        labelled(), {},
    ),
    "a mean and a penalty": (lambda p, b: squared_error(p, b) + jnp.sum(p["out"]["kernel"] ** 2), BATCH, {}),
    "aux, and gradients of two arguments": (
        lambda p, b, s: (squared_error(p, b) * s, {"mean": b[0].mean()}), BATCH, {"has_aux": True, "argnums": (0, 2)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", one_of_each(RIGHT, "rows", "tokens", "a mean and a penalty"))
def test_nothing_is_wrong_with(name):
    loss, batch, options = RIGHT[name]
    result = check_equivalence(loss, network(), batch, *([jnp.asarray(2.0)] if "argnums" in options else []), **options)
    assert result.ok, result
    assert result.max_error < 1e-12
    assert result.precision == "float64"


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
    result = check_equivalence(lambda p, b: squared_error(p, b).astype(jnp.float32) * 1, network(), BATCH)
    assert result.ok
    assert (result.precision, result.tolerance) == ("float32", 1e-4)


def test_the_two_passes_of_chunked_are_the_function():
    def loss(encode):
        return lambda params, batch: jnp.std(encode(params, batch[0]), axis=-1).mean()

    assert check_equivalence(loss(chunked(outputs, 2)), network(), BATCH).ok


def test_the_record_says_what_was_compared(tmp_path):
    result = check_equivalence(squared_error, network(), BATCH, micro_batch_size=4)
    assert result.partitions[0] == (4, 4)
    assert {difference.name for difference in result.differences} == {
        "loss", "hidden.bias", "hidden.kernel", "out.bias", "out.kernel",
    }  # fmt: skip
    assert "The accumulated gradient is the large batch's" in str(result)
    assert result.save(tmp_path / "check.json").exists()


def test_bad_input():
    with pytest.raises(ValueError, match="at least 2 rows"):
        check_equivalence(squared_error, network(), rows(1))
    with pytest.raises(ValueError, match="own loss is nan"):
        check_equivalence(lambda p, b: squared_error(p, b) * jnp.nan, network(), BATCH)
    with pytest.raises(ValueError, match="`micro_batch_size` must be an int >= 1"):
        check_equivalence(squared_error, network(), BATCH, micro_batch_size=0)

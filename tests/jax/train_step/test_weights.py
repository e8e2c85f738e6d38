"""Means over something else than rows, and several losses with a denominator each."""

import jax
import jax.numpy as jnp
import optax
import pytest

from tests.jax.problems import at_once, in_micro_batches, network, outputs, rows, tree_error
from tests.reference import FLOAT64


def tokens(count, ignored=(), seed=0):
    """Rows of 4 tokens of which some count; all of `ignored` rows' don't."""
    x, _ = rows(count * 4, seed)
    mask = (jnp.arange(count * 4).reshape(count, 4) * 7 % 5 > 1).at[jnp.asarray(ignored, int)].set(False)
    return {
        "x": x.reshape(count, 4, -1),
        "label": jnp.arange(count * 4).reshape(count, 4) % 3,
        "mask": mask.astype(float),  # a product with booleans XLA makes a select, which hides NaN
    }


def token_losses(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(outputs(params, batch["x"]), batch["label"])


def token_mean(params, batch):
    """0 / 0 where no token counts."""
    return (token_losses(params, batch) * batch["mask"]).sum() / batch["mask"].sum()


def tokens_of(batch):
    return batch["mask"].sum()


TOKENS_AT_ONCE = at_once(token_mean)
TOKENS = in_micro_batches(token_mean, 4, weight=tokens_of)
"""Compiled once: all batches have 11 rows."""


def test_a_mean_over_tokens_matches_the_large_batch():
    params, batch = network(), tokens(11)
    assert tree_error(TOKENS(params, batch), TOKENS_AT_ONCE(params, batch)) <= FLOAT64


@pytest.mark.parametrize("ignored", [(0, 1, 2, 3), (8, 9, 10), (4, 5, 6, 7, 8, 9, 10)])
def test_a_micro_batch_of_weight_0_is_left_out_though_its_loss_is_0_by_0(ignored):
    params, batch = network(), tokens(11, ignored)
    assert tree_error(TOKENS(params, batch), TOKENS_AT_ONCE(params, batch)) <= FLOAT64


def test_without_any_weight_the_loss_has_its_own_answer():
    params, batch = network(), tokens(11, range(11))

    def guarded(params, batch):
        return (token_losses(params, batch) * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1)

    loss, grads = TOKENS(params, batch)
    assert jnp.isnan(loss)
    for leaf, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(TOKENS_AT_ONCE(params, batch)[1])):
        assert (jnp.isnan(leaf) == jnp.isnan(expected)).all()
    split = in_micro_batches(guarded, 4, weight=tokens_of)(params, batch)
    assert tree_error(split, at_once(guarded)(params, batch)) <= FLOAT64


def test_a_nan_in_a_micro_batch_that_counts_is_not_hidden():
    params, batch = network(), tokens(11)
    batch["x"] = batch["x"].at[5].set(jnp.nan)
    loss, grads = TOKENS(params, batch)
    assert jnp.isnan(loss)
    assert jnp.isnan(grads["out"]["kernel"]).all()


def test_class_weights():
    params, (x, _) = network(), rows(11)
    labels, classes = jnp.arange(11) % 3, jnp.asarray([0.1, 1.0, 3.0])

    def loss_fn(params, x, labels):
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs(params, x), labels)
        return (classes[labels] * losses).sum() / classes[labels].sum()

    split = in_micro_batches(loss_fn, 4, batch_argnums=(1, 2), weight=lambda x, labels: classes[labels].sum())
    assert tree_error(split(params, x, labels), at_once(loss_fn)(params, x, labels)) <= FLOAT64


def two_losses(params, batch):
    """A mean over tokens, 0 / 0 where none counts, and a mean over the rows of class 1, guarded."""
    first = batch["label"][:, 0] == 1
    values = (outputs(params, batch["x"][:, 0]) ** 2).sum(-1)
    return {
        "tokens": (token_mean(params, batch), batch["mask"].sum()),
        "first": ((values * first).sum() / jnp.maximum(first.sum(), 1), first.sum()),
    }


def two_means(params, batch):
    means = {name: loss for name, (loss, _) in two_losses(params, batch).items()}
    return sum(means.values()), means


TWO_AT_ONCE, TWO = at_once(two_means, has_aux=True), in_micro_batches(two_losses, 4)


@pytest.mark.parametrize("ignored", [(), (4, 5, 6, 7)], ids=["", "a micro-batch without tokens"])
def test_several_losses_have_a_denominator_each(ignored):
    params, batch = network(), tokens(11, ignored)
    (_, means), expected = TWO_AT_ONCE(params, batch)
    assert tree_error(TWO(params, batch), (means, expected)) <= FLOAT64


def test_one_named_loss_and_a_batch_of_one_micro_batch():
    params, batch = network(), tokens(11)

    def loss_fn(params, batch):
        return {"tokens": (token_mean(params, batch), tokens_of(batch))}

    loss, expected = TOKENS_AT_ONCE(params, batch)
    for size in (4, 11):
        split = in_micro_batches(loss_fn, size)(params, batch)
        assert tree_error(split, ({"tokens": loss}, expected)) <= FLOAT64


def test_weights_that_state_and_random_numbers_decide():
    """A loss over the tokens that were kept at random, with a count in the state."""
    params, batch = network(), tokens(8)

    def loss_fn(params, batch, key, seen):
        kept = jax.random.bernoulli(key, 0.5, batch["label"].shape) & (seen < 2)
        loss = (token_losses(params, batch) * kept).sum() / kept.sum()
        return {"kept": (loss, kept.sum())}, seen + 1

    key = jax.random.key(3)
    split = in_micro_batches(loss_fn, 2, rng_argnum=2, state_argnum=3)
    (losses, seen), grads = split(params, batch, key, jnp.asarray(0))

    kept = jnp.concatenate([jax.random.bernoulli(k, 0.5, (2, 4)) for k in jax.random.split(key, 4)])
    kept = kept.at[4:].set(False)

    def whole(params):
        return (token_losses(params, batch) * kept).sum() / kept.sum()

    loss, expected = at_once(whole)(params)
    assert seen == 4
    assert tree_error((losses["kept"], grads), (loss, expected)) <= FLOAT64


def test_a_weight_that_depends_on_parameters_is_an_error():
    params, batch = network(), tokens(8)

    def loss_fn(params, batch):
        certain = jax.nn.softmax(outputs(params, batch["x"])).max(-1)
        return {"certain": ((certain * token_losses(params, batch)).sum() / certain.sum(), certain.sum())}

    split = in_micro_batches(loss_fn, 4)
    with pytest.raises(ValueError, match="The weight of a loss depends on what is differentiated"):
        split(params, batch)


def test_a_weight_that_depends_on_the_differentiated_batch_is_an_error():
    def loss_fn(w, batch):
        return (w * batch["x"] * batch["s"]).sum() / batch["s"].sum()

    batch = {"x": jnp.arange(4.0), "s": jnp.ones(4)}
    split = in_micro_batches(loss_fn, 2, argnums=1, weight=lambda batch: batch["s"].sum())
    with pytest.raises(ValueError, match="The weight of a loss depends on what is differentiated"):
        split(1.0, batch)


def test_a_weight_that_counts_what_parameters_decide_is_no_error():
    params, batch = network(), tokens(8)

    def loss_fn(params, batch):
        sure = jax.nn.softmax(outputs(params, batch["x"])).max(-1) > 0.5
        loss = (sure * token_losses(params, batch)).sum() / sure.sum()
        held = jax.lax.stop_gradient(outputs(params, batch["x"]).var())
        return {"sure": (loss, sure.sum()), "zero": (0.0 * loss, held)}

    split = in_micro_batches(loss_fn, 4)(params, batch)
    expected = jax.jit(jax.grad(lambda params: loss_fn(params, batch)["sure"][0]))(params)
    assert tree_error(split[1], expected) <= FLOAT64

"""What `chunked` cannot make exact, it refuses by name when it is traced."""

import jax
import jax.numpy as jnp
import pytest

from gradaccum.jax import chunked
from tests.jax.problems import network, outputs, rows

X = rows(8)[0]


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "4", None])
def test_sizes_that_are_none(size):
    with pytest.raises((TypeError, ValueError), match="`micro_batch_size` must be an int >= 1"):
        chunked(outputs, size)


def test_options_that_are_none():
    with pytest.raises(TypeError, match="`fn` must be a function"):
        chunked(network(), 4)
    with pytest.raises(ValueError, match="`keep` must be an int >= 0"):
        chunked(outputs, 4, keep=-1)
    with pytest.raises(TypeError, match="`batch_argnums` must be an int >= 0"):
        chunked(outputs, 4, batch_argnums="x")
    with pytest.raises(ValueError, match="can't be in both `batch_argnums` and `rng_argnum`"):
        chunked(outputs, 4, batch_argnums=(1, 2), rng_argnum=2)
    with pytest.raises(TypeError, match="`batch_argnums` names argument 1, but there are 1 positional ones"):
        chunked(outputs, 4)(X)


def test_rows_that_disagree_are_listed_with_their_paths():
    small = chunked(lambda params, batch: batch["x"], 4)
    with pytest.raises(ValueError, match=r"(?s)batch\['x'\]: 8 rows.*batch\['y'\]: 3 rows"):
        jax.jit(small)(network(), {"x": X, "y": X[:3]})


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
        jax.jit(chunked(lambda params, x: of(outputs(params, x)), 4))(network(), X[:count])


def test_an_output_that_has_as_many_entries_as_rows_by_chance():
    small = chunked(lambda params, x: (outputs(params, x), x.mean(0)), 5)  # 5 inputs
    with pytest.raises(ValueError, match=r"outputs\[1\]: \(5,\)"):
        jax.jit(small)(network(), rows(10)[0])


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_key_that_all_micro_batches_share(make):
    def dropout(params, x, key):
        return x * jax.random.bernoulli(key, 0.5, x.shape)

    with pytest.raises(ValueError, match="from a key that all micro-batches share.*rng_argnum="):
        jax.jit(chunked(dropout, 4))(network(), X, make(0))


def test_a_draw_that_all_rows_share_is_none_of_a_row():
    def masked_features(params, x, key):
        return x * jax.random.bernoulli(key, 0.5, x.shape[1:])

    args = network(), X, jax.random.key(0)
    assert jnp.array_equal(jax.jit(chunked(masked_features, 3))(*args), masked_features(*args))

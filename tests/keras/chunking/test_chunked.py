"""`chunked(encoder, 4)`: the large batch's updates for losses that look across its rows."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
from keras import layers, ops

import gradaccum
from gradaccum.keras import backends, micro_batched
from gradaccum.keras import chunked as proving
from tests.keras.problems import compiled_on, slow
from tests.reference import relative_error

BACKEND = keras.backend.backend()
ROWS, BATCH, MICRO = 22, 11, 4
"""Two batches of one shape, compiled once; micro-batches of 4, 4 and 3 rows."""

chunked = functools.partial(proving, verify=False)
"""What it proves is test_chunked_errors.py's: it costs another program."""

random = np.random.default_rng(0)
X = random.normal(size=(ROWS, 5))
WORDS = random.integers(0, 9, (ROWS, 4))


def encoder(units=3, name="encoder"):
    return keras.Sequential([layers.Input((5,)), layers.Dense(7, activation="relu"), layers.Dense(units)], name=name)


def words(name="words"):
    return keras.Sequential(
        [layers.Input((4,), dtype="int32"), layers.Embedding(9, 6), layers.Flatten(), layers.Dense(3)], name=name
    )


def contrastive(y, outputs):
    """Every row against every other; and something that fixes what that leaves open."""
    a, b = outputs[:, :3], outputs[:, 3:]
    logits = ops.matmul(a, ops.transpose(b))
    rows = ops.logsumexp(logits, axis=1) - ops.sum(a * b, axis=1) + ops.sum(ops.square(outputs - 0.3), axis=1)
    return ops.sum(rows) / ops.cast(ops.shape(rows)[0], rows.dtype)


def towers(wrap=lambda tower: tower):
    keras.utils.set_random_seed(0)
    pictures, texts = layers.Input((5,), name="pictures"), layers.Input((4,), dtype="int32", name="texts")
    outputs = layers.Concatenate()([wrap(encoder())(pictures), wrap(words())(texts)])
    return keras.Model({"pictures": pictures, "texts": texts}, outputs)


INPUTS = {"pictures": X, "texts": WORDS}


def fitted(model, loss=contrastive, x=INPUTS, rows=ROWS, **compiled):
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss, **compiled)
    y = np.zeros((rows, 1))
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return model.get_weights(), history.history["loss"]


@functools.cache
def expected():
    """What plain `fit` gives, in float64."""
    return fitted(towers(), run_eagerly=BACKEND == "tensorflow")


WAYS = {"torch": [{}], "jax": [{}, slow({"jit_compile": False})]}.get(
    BACKEND, [{"jit_compile": False}, slow({"jit_compile": True}), slow({"run_eagerly": True})]
)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_contrastive_loss_in_fit_makes_the_large_batchs_updates(float64, way):
    model = towers(wrap=lambda tower: proving(tower, MICRO))
    weights, losses = fitted(model, **way)
    assert relative_error(weights, expected()[0]) <= float64
    assert relative_error(losses, expected()[1]) <= float64


def test_what_is_saved_is_the_model_it_came_from(tmp_path):
    plain = encoder()
    config = plain.get_config()
    model = chunked(plain, MICRO)
    assert model is plain
    assert model.get_config() == config
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is keras.Sequential
    assert "call" not in vars(loaded)
    assert relative_error(loaded.get_weights(), model.get_weights()) == 0
    assert "call" not in vars(keras.models.clone_model(model))


# One call, and its gradients.


def gradients(layer, x, loss, training=True, wanted=()):
    """Outputs as arrays, and gradients of the layer's weights and of these inputs."""
    variables = layer.trainable_variables
    kept = []

    def value(values):
        given = {**x, **dict(zip(wanted, values[len(variables) :]))}
        with keras.StatelessScope(list(zip(variables, values))):
            outputs = layer(given if len(given) > 1 else next(iter(given.values())), training=training)
        kept[:] = [outputs] if BACKEND != "jax" else []
        return loss(outputs), None

    values = [ops.convert_to_tensor(variable.value) for variable in variables]
    _, found = backends.running().value_and_gradients(value, values + [x[name] for name in wanted])
    return [ops.convert_to_numpy(gradient) for gradient in found]


def tensors(**arrays):
    return {name: ops.convert_to_tensor(array) for name, array in arrays.items()}


def spread(outputs):
    return ops.logsumexp(ops.matmul(outputs, ops.transpose(outputs)))


@keras.saving.register_keras_serializable("tests")
class Pieces(layers.Layer):
    """A dict in, a tuple out, with whole numbers and a scalar that all rows share among it all."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def build(self, shapes):
        self.dense.build((None, 5))

    def call(self, x):
        h = self.dense(x["x"]) * x["scale"]
        return {"h": (h, ops.argmax(h, axis=1)), "none": None, "twice": 2 * x["y"]}


@compiled_on("tensorflow")
@pytest.mark.parametrize("keep", [slow(0), 2, slow(9)])
def test_inputs_and_outputs_of_any_structure_have_the_large_batchs_gradient(float64, keep):
    x = tensors(x=X[:BATCH], y=X[:BATCH, :2], scale=np.float64(1.5))

    def loss(outputs):
        h, best = outputs["h"]
        assert outputs["none"] is None
        return spread(h) + ops.sum(ops.square(outputs["twice"])) + ops.sum(ops.cast(best, "float64"))

    layer = Pieces()
    layer.build(None)
    plain = gradients(layer, x, loss, training=None, wanted=("x", "y", "scale"))
    small = gradients(chunked(layer, MICRO, keep=keep), x, loss, training=None, wanted=("x", "y", "scale"))
    assert len(small) == 5
    assert relative_error(small, plain) <= float64


@compiled_on("tensorflow")
def test_masks_go_in_and_come_out(float64):
    def make():
        keras.utils.set_random_seed(0)
        return keras.Sequential([layers.Input((4,), dtype="int32"), layers.Embedding(9, 3, mask_zero=True)])

    plain, small = make(), chunked(make(), MICRO)
    whole, parts = plain(WORDS), small(WORDS)
    mask = ops.convert_to_numpy(parts._keras_mask)
    assert np.array_equal(mask, WORDS != 0)
    assert relative_error([parts], [whole]) == 0

    class Masked(layers.Layer):
        def __init__(self):
            super().__init__()
            self.supports_masking = True

        def call(self, x, mask=None):
            return ops.where(mask[..., None], x, ops.zeros_like(x))

    assert relative_error([chunked(Masked(), MICRO)(parts)], [Masked()(whole)]) == 0


class Dropping(layers.Layer):
    """Takes no `training`: what is inside finds it around the call. Its output is what dropout leaves of its input."""

    def __init__(self):
        super().__init__()
        self.drop = layers.Dropout(0.5, seed=1)
        self.dense = layers.Dense(5, use_bias=False, kernel_initializer="identity")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(self.drop(x))


@compiled_on("tensorflow")
@pytest.mark.parametrize("keep", [0, slow(1)])
def test_dropout_is_replayed_and_differs_between_micro_batches_and_calls(float64, keep):
    layer = chunked(Dropping(), MICRO, keep=keep)
    layer.build((None, 5))
    x = np.ones((8, 5))
    state = layer.drop.seed_generator.state
    before = ops.convert_to_numpy(state)
    outputs = ops.convert_to_numpy(layer(x, training=True))
    after = ops.convert_to_numpy(state)
    assert not np.array_equal(outputs[:4], outputs[4:])
    assert not np.array_equal(outputs, ops.convert_to_numpy(layer(x, training=True)))
    state.assign(before)
    pull = random.normal(size=(8, 5))

    def loss(outputs):
        return ops.sum(outputs * ops.convert_to_tensor(pull))

    (gradient,) = gradients(layer, tensors(x=x), loss)
    assert relative_error([gradient], [outputs.T @ pull]) <= float64  # of what was dropped in the first pass
    state.assign(before)
    ops.convert_to_numpy(layer(x, training=True))
    assert np.array_equal(ops.convert_to_numpy(state), after)
    assert np.array_equal(ops.convert_to_numpy(layer(x, training=False)), x)


class InBfloat16(layers.Dense):
    """Finds its kernel cast in both passes."""

    def call(self, x):
        assert keras.backend.standardize_dtype(self.kernel.value.dtype) == "bfloat16"
        return super().call(x)


@compiled_on("tensorflow")
def test_mixed_precision_is_that_of_the_first_pass():
    layer = chunked(InBfloat16(3, dtype="mixed_bfloat16"), MICRO)
    layer.build((None, 5))
    found = gradients(layer, tensors(x=X.astype("float32")), lambda h: ops.sum(ops.cast(h, "float32")), training=None)
    assert found[0].dtype == "float32"
    assert relative_error(found[1:], [np.full(3, ROWS)]) < 1e-2


def normalised():
    keras.utils.set_random_seed(0)
    return keras.Sequential([layers.Input((5,)), layers.BatchNormalization(name="bn", momentum=0.9), layers.Dense(3)])


def moving(model):
    return [ops.convert_to_numpy(v) for v in model.get_layer("bn").non_trainable_variables]


@compiled_on("tensorflow")
def test_batch_normalization_goes_by_the_words_of_micro_batched(float64):
    tolerance = max(float64, 1e-6) if BACKEND == "jax" else float64
    x = X * np.arange(1, 6) + np.arange(ROWS)[:, None]  # micro-batches differ in their means
    plain = normalised()
    plain(x, training=True)
    pooled = chunked(normalised(), MICRO, batch_norm="pooled")
    pooled(x, training=True)
    assert relative_error(moving(pooled), moving(plain)) <= tolerance
    frozen = chunked(normalised(), MICRO, batch_norm="frozen")
    outputs = frozen(x, training=True)
    assert relative_error([outputs], [normalised()(x, training=False)]) <= tolerance
    assert relative_error(moving(frozen), moving(normalised())) == 0
    micro = chunked(normalised(), BATCH, batch_norm="micro")
    micro(x, training=True)
    twice = normalised()
    twice(x[:BATCH], training=True)
    twice(x[BATCH:], training=True)
    assert relative_error(moving(micro), moving(twice)) <= tolerance
    with pytest.warns(UserWarning, match="'bn'.*batch_norm="):
        chunked(normalised(), MICRO)


@pytest.mark.skipif(BACKEND != "torch", reason="the message is the same, and others compile for seconds")
def test_micro_batched_names_chunked_where_a_loss_looks_across_rows():
    model = micro_batched(encoder(6), MICRO)
    model.compile(optimizer="sgd", loss=contrastive, run_eagerly=True)
    with pytest.raises(gradaccum.NotEquivalentError, match=r"gradaccum\.keras\.chunked\(model, micro_batch_size\)"):
        model.fit(X[:8].astype("float32"), np.zeros((8, 1)), batch_size=8, verbose=0)


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch's modules are layers there")
def test_modules_of_pytorch_inside_get_their_gradients():
    import torch

    torch.manual_seed(0)
    layer = keras.layers.TorchModuleWrapper(torch.nn.Linear(5, 3).double(), dtype="float64")
    x = torch.from_numpy(X)

    def gradients_of(call):
        layer.module.zero_grad()
        outputs = call(x)
        (outputs @ outputs.T).logsumexp((0, 1)).backward()
        return [p.grad.clone() for p in layer.module.parameters()]

    expected = gradients_of(layer)
    assert relative_error(gradients_of(chunked(layer, MICRO)), expected) <= 1e-12


@pytest.mark.skipif(BACKEND != "torch", reason="gradients of gradients go through loops elsewhere")
def test_second_derivatives_are_the_large_batchs(float64):
    import torch

    def penalty(wrap):
        keras.utils.set_random_seed(0)
        layer = wrap(keras.Sequential([layers.Input((5,)), layers.Dense(7, activation="tanh"), layers.Dense(3)]))
        x = torch.tensor(X, requires_grad=True)
        outputs = layer(x)
        (slope,) = torch.autograd.grad((outputs @ outputs.T).logsumexp((0, 1)), x, create_graph=True)
        weights = [variable.value for variable in layer.trainable_variables]
        found = torch.autograd.grad(slope.square().sum(), [x, *weights], allow_unused=True)
        return [torch.zeros(()) if one is None else one for one in found]

    expected = penalty(lambda layer: layer)
    for keep in (0, 2):
        assert relative_error(penalty(lambda layer, keep=keep: chunked(layer, MICRO, keep=keep)), expected) <= float64

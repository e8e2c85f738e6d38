"""`chunked(encoder, 4)`: the large batch's updates for losses that look across its rows; what it refuses and proves."""

from __future__ import annotations

import contextlib
import functools

import keras
import numpy as np
import pytest
from keras import layers, ops

from gradaccum import NotEquivalentError
from gradaccum.keras import backends
from gradaccum.keras import chunked as proving
from tests.keras.marks import BACKEND, compiled_on, slow, slow_where_compiled
from tests.keras.problems import AddsLoss, Does
from tests.reference import relative_error

ROWS, BATCH, MICRO = 22, 11, 4
"""Two batches of one shape, compiled once; micro-batches of 4, 4 and 3 rows."""

chunked = functools.partial(proving, verify=False)
"""The proof costs another program."""

on_tensorflow = compiled_on("tensorflow")
random = np.random.default_rng(0)
X = random.normal(size=(ROWS, 5))
WORDS = random.integers(0, 9, (ROWS, 4))
x = X.astype("float32")

# One call, and its gradients.


def gradients(layer, x, loss, training=True, wanted=()):
    """Outputs as arrays, and gradients of the layer's weights and of these inputs."""
    variables = layer.trainable_variables

    def value(values):
        given = {**x, **dict(zip(wanted, values[len(variables) :]))}
        with keras.StatelessScope(list(zip(variables, values))):
            outputs = layer(given if len(given) > 1 else next(iter(given.values())), training=training)
        return loss(outputs), None

    values = [ops.convert_to_tensor(variable.value) for variable in variables]
    _, found = backends.running().value_and_gradients(value, values + [x[name] for name in wanted])
    return [ops.convert_to_numpy(gradient) for gradient in found]


def tensors(**arrays):
    return {name: ops.convert_to_tensor(array) for name, array in arrays.items()}


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


@on_tensorflow
@pytest.mark.parametrize("keep", [slow(0), 2, slow(9)])
def test_inputs_and_outputs_of_any_structure_have_the_large_batchs_gradient(float64, keep):
    x = tensors(x=X[:BATCH], y=X[:BATCH, :2], scale=np.float64(1.5))

    def loss(outputs):
        h, best = outputs["h"]
        assert outputs["none"] is None
        spread = ops.logsumexp(ops.matmul(h, ops.transpose(h)))
        return spread + ops.sum(ops.square(outputs["twice"])) + ops.sum(ops.cast(best, "float64"))

    layer = Pieces()
    layer.build(None)
    plain = gradients(layer, x, loss, training=None, wanted=("x", "y", "scale"))
    small = gradients(chunked(layer, MICRO, keep=keep), x, loss, training=None, wanted=("x", "y", "scale"))
    assert len(small) == 5
    assert relative_error(small, plain) <= float64


@on_tensorflow
def test_masks_go_in_and_come_out(float64):
    class Masked(layers.Layer):
        def __init__(self):
            super().__init__()
            self.supports_masking = True

        def call(self, x, mask=None):
            return ops.where(mask[..., None], x, ops.zeros_like(x))

    layer = keras.Sequential([layers.Input((4,), dtype="int32"), layers.Embedding(9, 3, mask_zero=True)])
    whole = layer(WORDS)
    parts = chunked(layer, MICRO)(WORDS)
    assert np.array_equal(ops.convert_to_numpy(parts._keras_mask), WORDS != 0)
    assert relative_error([parts], [whole]) == 0
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


@on_tensorflow
def test_masked_attention_has_more_than_three_inputs_in_batches_of_any_number_of_rows(float64):
    """Of a ragged last batch; masks count as inputs, and TensorFlow doesn't know the rows of any."""

    def trained(wrap):
        keras.utils.set_random_seed(0)
        hidden = layers.Masking()(inputs := layers.Input((4, 5)))
        attended = wrap(layers.MultiHeadAttention(2, 3, use_bias=False))(hidden, hidden)
        model = keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(attended)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        rows = np.random.default_rng(1).normal(size=(ROWS + 3, 4, 5)) * (np.arange(4) < 3)[:, None]
        model.fit(rows, rows[:, 0, :2], batch_size=BATCH, shuffle=False, verbose=0)
        return model.get_weights()

    ours = trained(lambda layer: chunked(layer, MICRO))
    assert relative_error(ours, trained(lambda layer: layer)) <= (1e-12 if BACKEND == "tensorflow" else 1e-6)


@on_tensorflow
@pytest.mark.parametrize("keep", [0, slow(1)])
def test_dropout_is_replayed_and_differs_between_micro_batches_and_calls(float64, keep):
    layer = chunked(Dropping(), MICRO, keep=keep)
    layer.build((None, 5))
    x, pull, state = np.ones((8, 5)), random.normal(size=(8, 5)), layer.drop.seed_generator.state
    before = ops.convert_to_numpy(state)
    outputs = ops.convert_to_numpy(layer(x, training=True))
    after = ops.convert_to_numpy(state)
    assert not np.array_equal(outputs[:4], outputs[4:])
    assert not np.array_equal(outputs, ops.convert_to_numpy(layer(x, training=True)))
    state.assign(before)
    (gradient,) = gradients(layer, tensors(x=x), lambda outputs: ops.sum(outputs * ops.convert_to_tensor(pull)))
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


@on_tensorflow
def test_mixed_precision_is_that_of_the_first_pass():
    layer = chunked(InBfloat16(3, dtype="mixed_bfloat16"), MICRO)
    layer.build((None, 5))
    found = gradients(layer, tensors(x=x), lambda h: ops.sum(ops.cast(h, "float32")), training=None)
    assert found[0].dtype == "float32"
    assert relative_error(found[1:], [np.full(3, ROWS)]) < 1e-2


torch_only = pytest.mark.skipif(BACKEND != "torch", reason="PyTorch's")


@torch_only
def test_modules_of_pytorch_inside_get_their_gradients():
    import torch

    torch.manual_seed(0)
    layer = keras.layers.TorchModuleWrapper(torch.nn.Linear(5, 3).double(), dtype="float64")

    def gradients_of(call):
        layer.module.zero_grad()
        outputs = call(torch.from_numpy(X))
        (outputs @ outputs.T).logsumexp((0, 1)).backward()
        return [p.grad.clone() for p in layer.module.parameters()]

    expected = gradients_of(layer)
    assert relative_error(gradients_of(chunked(layer, MICRO)), expected) <= 1e-12


@torch_only  # gradients of gradients go through loops elsewhere
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


# What is refused by name.


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((lambda x: x, 4), {}, "`layer_or_model` must be a keras.layers.Layer.*gradaccum.torch.chunked"),
        ((layers.Dense(3), 0), {}, "`micro_batch_size`"),
        ((layers.Dense(3), 2.5), {}, "`micro_batch_size`"),
        ((layers.Dense(3), 4), {"keep": -1}, "`keep`"),
        ((layers.Dense(3), 4), {"batch_norm": "exactly"}, "`batch_norm` must be one of"),
        ((layers.BatchNormalization(), 4), {}, "BatchNormalization can't be chunked by itself"),
    ],
)
def test_options_that_are_none_are_refused(arguments, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        chunked(*arguments, **options)


class Assigns(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(), name="scale")

    def call(self, x):
        self.scale.assign(self.scale + 1)
        return x * self.scale


def so_many_rows(rows):
    """They may happen to be those of a micro-batch."""
    return Does(lambda x: ops.zeros((rows, 5), x.dtype) + ops.sum(x))


LAYERS = {
    "mean": (lambda: Does(lambda x: ops.mean(x, axis=0)), "must return a row for each row of its inputs.*(5,)"),
    "products": (lambda: Does(lambda x: ops.matmul(x, ops.transpose(x))), "look across the rows"),
    "three": (lambda: so_many_rows(3), r"row for each row of its inputs.*\(3, 5\) for a micro-batch of [24] rows"),
    "four": (lambda: so_many_rows(4), r"row for each row of its inputs.*\(4, 5\) for a micro-batch of [35] rows"),
    "add_loss": (AddsLoss, "adds losses in its forward pass"),
    "regularizer": (
        lambda: keras.Sequential([layers.Dense(3, activity_regularizer="l2", name="loud")]), "'loud'"),
    "assigns": (Assigns, "assigns trainable variables.*scale"),
    "spectral": (lambda: layers.SpectralNormalization(layers.Dense(3)), "assigns trainable variables.*kernel"),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_no_micro_batches_can_stand_for_are_refused(name):
    make, message = LAYERS[name]
    layer = make()
    layer.build((None, 5))
    with pytest.raises(ValueError, match=message):
        proving(layer, MICRO)(x[:11], training=True)


class Foreign:
    shape, dtype = (11, 5), "float32"


def test_inputs_of_different_rows_are_listed_and_arrays_of_another_kind_named():
    with pytest.raises(ValueError, match=r"\(11, 5\), \(1, 5\)"):
        proving(layers.Add(), MICRO)([ops.convert_to_tensor(x[:11]), ops.convert_to_tensor(x[:1])])
    with pytest.raises(TypeError, match=rf"Keras' {BACKEND} backend.*Foreign of shape \(11, 5\)"):
        proving(Does(lambda x: x), MICRO).call(Foreign())


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's own generators")
def test_random_numbers_of_tensorflows_own_are_refused():
    import tensorflow as tf

    for wrap in (tf.function, lambda layer: layer):
        with pytest.raises(ValueError, match=r"RandomStandardNormal.*keras\.random"):
            wrap(proving(Does(lambda x: x + tf.random.normal(tf.shape(x))), MICRO))(x[:11])


@pytest.mark.skipif(BACKEND == "jax", reason="there it gets its gradient")
def test_tensors_from_outside_that_need_gradients_are_refused():
    class Around(keras.Model):
        def __init__(self):
            super().__init__()
            self.scale = self.add_weight(shape=(5,), initializer="ones", name="scale")
            self.inside = proving(Does(lambda x: x * vars(self)["found"]), MICRO)

        def call(self, x):
            vars(self)["found"] = ops.tanh(self.scale)
            return self.inside(x)

    model = Around()
    model.compile("sgd", "mse")
    said = r"The chunked Does .* neither its inputs nor its variables, of shape \(5,\)"
    with pytest.raises(ValueError, match=said):
        model.fit(x[:11], x[:11], batch_size=11, verbose=0)


# What the first call, and `verify`, prove.


class Evaluated(layers.Layer):
    """Takes the mean over rows off, outside of training."""

    def call(self, x, training=None):
        return x if training else x - ops.mean(x, 0, keepdims=True)


def counting():
    return Does(lambda x: x / ops.cast(ops.shape(x)[0], x.dtype))


def centred():
    return Does(lambda x: x - ops.mean(x, 0, keepdims=True))


def looking_back():
    """Rows that depend on each other in their gradients alone."""

    def call(x):
        mean = ops.mean(x, 0, keepdims=True)
        return x + mean - ops.stop_gradient(mean)

    return keras.Sequential([layers.Input((5,)), layers.Dense(4), Does(call)])


def attending():
    return keras.Sequential([layers.Input((5,)), layers.Dense(4), layers.Softmax(axis=0, name="attend")])


@slow_where_compiled
def test_a_proof_moves_nothing_and_is_made_once():
    inside = [layers.Input((5,)), Dropping(), layers.BatchNormalization()]
    layer = proving(keras.Sequential(inside), MICRO, batch_norm="pooled")
    seeds, states = [v for v in layer.variables if "seed" in v.path], []
    for _ in range(2):
        layer(x, training=True)
        states.append([ops.convert_to_numpy(v) for v in seeds])
    start = ops.convert_to_numpy(keras.random.SeedGenerator(1).state)
    assert [list(once - start) for once in states[0]] == [list(b - a) for a, b in zip(*states)]


class Largest(layers.Layer):
    def build(self, shape):
        self.most = self.add_weight(shape=(), initializer="zeros", trainable=False, name="most")

    def call(self, x):
        self.most.assign(ops.maximum(self.most, ops.max(x)))
        return x


class Balanced(layers.Layer):
    def call(self, x):
        vars(self)["balance"] = ops.mean(x)
        return x


class Eleven(layers.Layer):
    def call(self, x):
        if x.shape[0] not in (None, 3, 4, 11):
            raise ValueError("so many rows?")
        return x


@slow_where_compiled
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Largest, "These variables of the chunked Largest.*'largest.*/most'"),
        (Balanced, "The chunked Balanced .*attributes .*balance.*last one's are left"),
        (Eleven, r"could not be proven.*so many rows\?.*verify"),
    ],
)
def test_what_moves_elsewhere_is_left_behind_or_cannot_be_proven_is_named_once(make, message):
    layer, rising = proving(make(), MICRO), np.arange(55, dtype="float32").reshape(11, 5)
    with pytest.warns(UserWarning, match=message):
        layer(rising)
    layer(rising)


def normalising():
    return keras.Sequential([layers.Input((5,)), layers.BatchNormalization(name="bn")])


def dropping():
    return keras.Sequential([layers.Input((5,)), Dropping(), layers.Dense(3)])


def fit(layer):
    inputs = layers.Input((5,))
    model = keras.Model(inputs, layers.Dense(2)(layer(inputs)))
    model.compile("sgd", "mse")
    model.fit(x[:11], np.zeros((11, 2)), batch_size=11, verbose=0)


def call(layer):
    layer(x, training=True)


def evaluate(layer):
    layer(x, training=True)
    layer(x, training=False)


def verify(layer):
    before = [ops.convert_to_numpy(variable) for variable in layer.variables]
    with pytest.raises(ValueError, match="at least 2 rows"):
        layer.verify(x[:1])
    try:
        layer.verify(x)
    finally:
        assert all(map(np.array_equal, [ops.convert_to_numpy(variable) for variable in layer.variables], before))


PROOFS = [
    slow(fit, counting, {}, "The chunked Does .* other outputs or gradients .*`call` of Does itself mixes rows"),
    (fit, centred, {}, "The chunked Does .* other outputs or gradients .*`call` of Does itself mixes rows"),
    (fit, looking_back, {}, "The chunked Sequential .* other outputs or gradients"),
    (call, attending, {}, "6 rows other.*'attend' .Softmax. mixes rows"),
    (call, centred, {"verify": False}, ""),
    (evaluate, Evaluated, {}, "Evaluated"),
    slow(verify, counting, {}, "`call` of Does itself mixes rows"),
    (verify, attending, {}, "'attend' .Softmax. mixes rows: its output for a row depends on the other"),
    slow(verify, normalising, {"batch_norm": "pooled"}, "'bn' is a BatchNormalization"),
    slow(verify, normalising, {"batch_norm": "frozen"}, ""),
    slow(verify, lambda: layers.Dense(3), {}, ""),
    (verify, dropping, {}, ""),
]


@on_tensorflow
@pytest.mark.parametrize(("way", "make", "options", "message"), PROOFS)
def test_the_first_calls_and_verify_name_the_layer_in_which_rows_depend_on_each_other(way, make, options, message):
    with pytest.raises(NotEquivalentError, match=f"(?s){message}") if message else contextlib.nullcontext():
        way(proving(make(), MICRO, **options))

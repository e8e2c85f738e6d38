"""A wrapped optimizer in `fit`: windows and epochs, what micro-batches weigh, the callback, and BatchOptimizer."""

import contextlib
import itertools
import logging
import re

import keras
import numpy as np
import pytest

import gradaccum
import gradaccum.keras
from gradaccum.keras.callbacks import GradientAccumulation
from gradaccum.keras.optimizers import BatchOptimizer, Optimizer
from tests.keras.loops import assert_updates, callback, ends, error, fit, logged, updated, wrapped
from tests.keras.marks import BACKEND, compiled_on, slow, slow_where_compiled
from tests.keras.problems import Batches, Traced, adam, join, network, regression, sgd, split
from tests.reference import WINDOWS, windows_of

LossScale = keras.optimizers.LossScaleOptimizer
RAGGED = "ragged everywhere"
OFTEN = RAGGED, "4+4+2 rows", "a window longer than the epoch"
EPOCHS = [
    *((name, sgd) if name in OFTEN else slow(name, sgd) for name in WINDOWS),
    *((name, adam) if name == RAGGED else slow(name, adam) for name in WINDOWS),
]
FIVE = split(regression(20), [4] * 5)
TWO = FIVE[:2]
SGD_AND_ADAM = pytest.mark.parametrize("make", [sgd, pytest.param(adam, marks=pytest.mark.slow)])
on_jax = compiled_on("jax")


def compiled_with(optimizer, **how):
    model = network()
    model.compile(optimizer=optimizer, loss="mse", **how)
    return model


def warnings_of(caplog):
    """What is logged from now on."""
    caplog.clear()
    return caplog.at_level(logging.WARNING, "gradaccum")


# Windows and epochs.


@pytest.mark.parametrize(("window", "make"), EPOCHS)
def test_an_epoch_of_windows_matches_the_large_batches(window, make, fit_bound):
    sizes, steps = WINDOWS[window]
    micro_batches = split(regression(sum(sizes)), sizes)
    model = fit(wrapped(make(), steps), micro_batches, epochs=2)
    assert_updates(model, windows_of(micro_batches, steps) * 2, fit_bound, make)


@pytest.mark.parametrize("where", ["callback", "optimizer"])
def test_a_schedule_of_epochs_makes_its_windows_and_compiles_nothing_anew(where, fit_bound):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), Traced(7, activation="tanh"), keras.layers.Dense(3)])
    on_optimizer, schedule = where == "optimizer", {0: 4, 2: 3}
    model.compile(optimizer=Optimizer(sgd(), schedule if on_optimizer else 5), loss="mse", jit_compile=BACKEND == "jax")
    Traced.runs = 0
    fit(model, FIVE, GradientAccumulation(None if on_optimizer else {0: 4}), epochs=1)
    first = Traced.runs
    fit(model, FIVE, GradientAccumulation(None if on_optimizer else schedule), initial_epoch=1, epochs=4)
    # PyTorch compiles nothing, and calls the model on every micro-batch.
    assert first > 0
    assert Traced.runs == first or BACKEND == "torch"
    assert_updates(model, [w for steps in (4, 4, 3, 3) for w in windows_of(FIVE, steps)], fit_bound)
    assert model.optimizer.steps == (3 if on_optimizer else 5), "the callback gives back the optimizer's own steps"
    assert "train_step" not in vars(model)
    assert not model.optimizer.window.driven


def test_a_callable_schedule_is_asked_when_a_window_opens(fit_bound):
    micro_batches, asked = split(regression(28), [4] * 7), []

    def steps(epoch, update):
        asked.append((epoch, update))
        return 1 + update % 3

    model = fit(wrapped(sgd(), 1), micro_batches, GradientAccumulation(steps), epochs=2)
    assert asked == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6), (1, 7)]
    bounds = [0, 1, 3, 6, 7], [0, 2, 5, 6, 7]  # 1, 2, 3 and the one left; then 2, 3, 1, and the one left
    assert_updates(model, [micro_batches[a:b] for one in bounds for a, b in itertools.pairwise(one)], fit_bound)


def is_closed(model, number):
    assert model.optimizer.micro_batches == 0


def from_a_generator(model):
    callbacks = [GradientAccumulation(), callback("on_epoch_end", is_closed)]
    with pytest.warns(UserWarning, match="ran out of data"):  # Keras: the length is not known before
        model.fit((one for one in FIVE), shuffle=False, verbose=0, callbacks=callbacks)


def in_steps_per_epoch(model):
    arguments = {"steps_per_epoch": 3, "epochs": 2, "shuffle": False, "verbose": 0}
    model.fit((one for one in itertools.cycle(FIVE)), callbacks=[GradientAccumulation()], **arguments)


def seen_by_validation_and_callbacks(model):
    looks = [callback("on_test_begin", is_closed), callback("on_epoch_end", is_closed)]
    fit(model, FIVE, *looks, GradientAccumulation(), epochs=2, validation_data=FIVE[0])


def with_validation_in_the_middle(model):
    evaluates = callback("on_train_batch_end", lambda model, batch: model.evaluate(*FIVE[0], verbose=0))
    fit(model, FIVE, evaluates, epochs=2)


def stopped_inside_of_an_epoch(model):
    fit(model, FIVE, callback("on_train_batch_end", lambda m, batch: setattr(m, "stop_training", batch == 2)), epochs=2)


def after_one_that_failed(model):
    with pytest.raises(ZeroDivisionError):
        fit(model, FIVE, callback("on_epoch_begin", lambda model, epoch: 1 / 0))
    fit(model, FIVE)


def longer_than_an_epoch(model):
    fit(model, FIVE[:3], epochs=3)


def with_another_fit_between_epochs(model):
    nested = callback("on_epoch_end", lambda model, epoch: epoch or fit(model, FIVE[2:]))
    fit(model, FIVE, GradientAccumulation(), nested, epochs=2)


def interrupted_and_then_flushed(model):
    for after in (5, 7):  # two micro-batches into the second window, and one into the third
        with pytest.raises(KeyboardInterrupt):
            fit(model, [*SEVEN, SEVEN[0]], GradientAccumulation(), ends(after))
    assert model.optimizer.flush()
    fit(model, SEVEN)


SEVEN = split(regression(26), [4] * 6 + [2])
FITS = {
    # what trains the network: (steps, the windows, what is logged)
    from_a_generator: (3, [FIVE[:3], FIVE[3:]]),
    in_steps_per_epoch: (2, [[FIVE[i] for i in window] for window in ([0, 1], [2], [3, 4], [0])]),
    seen_by_validation_and_callbacks: (3, [FIVE[:3], FIVE[3:]] * 2),
    with_validation_in_the_middle: (3, [FIVE[:3], FIVE[3:]] * 2),
    stopped_inside_of_an_epoch: (2, [FIVE[:2], FIVE[2:3]]),
    after_one_that_failed: (3, [FIVE[:3], FIVE[3:]]),
    longer_than_an_epoch: (
        8, [FIVE[:3]] * 3,
        "A window of 8 micro-batches is longer than an epoch of 3: one update per epoch, of 3 micro-batches",
    ),
    with_another_fit_between_epochs: (3, [FIVE[:3], FIVE[3:], FIVE[2:], FIVE[:3], FIVE[3:]]),
    interrupted_and_then_flushed: (
        3, [SEVEN[:3], *windows_of(SEVEN, 3), *windows_of(SEVEN, 3)],
        "The last fit() was interrupted inside a window, whose 2 micro-batches are discarded. To update with them, "
        "call optimizer.flush() before fit().",
    ),
}  # fmt: skip
SLOW = {with_validation_in_the_middle, after_one_that_failed, with_another_fit_between_epochs}
SLOW = SLOW if BACKEND == "tensorflow" else set()


@pytest.mark.parametrize("train", [slow(train) if train in SLOW else train for train in FITS])
def test_windows_and_epochs_of_a_fit(train, fit_bound, caplog):
    steps, windows, *said = FITS[train]
    with warnings_of(caplog):
        train(model := wrapped(sgd(), steps))
    assert_updates(model, windows, fit_bound)
    assert logged(caplog) == said
    assert "train_step" not in vars(model)


@on_jax
def test_without_the_callback_windows_run_on_and_the_end_is_flushed_with_one_line(caplog, fit_bound):
    model = compiled_with(Optimizer(sgd(), 3))
    with warnings_of(caplog):
        for _ in range(2):
            model.fit(*join(FIVE), batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert_updates(model, windows_of(FIVE * 2, 3) * 2, fit_bound)
    (line,) = logged(caplog)
    assert "closed a window of 1 of 3 micro-batches" in line
    assert "GradientAccumulation()" in line


def test_a_custom_train_step_is_weighed_by_its_rows_too(fit_bound):
    if BACKEND != "tensorflow":
        pytest.skip("written for TensorFlow")
    import tensorflow as tf

    class Custom(keras.Model):
        def train_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            weights = self.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            return {"loss": loss}

    micro_batches, plain = split(regression(10), [4, 4, 2]), network()
    model = Custom(plain.inputs, plain.outputs)
    model.compile(optimizer=Optimizer(sgd(), 3), loss="mse")
    fit(model, micro_batches, epochs=2)
    assert_updates(model, [micro_batches] * 2, fit_bound)


# What Keras does once per update.


def averaging():
    return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)


def swap():
    return keras.callbacks.SwapEMAWeights(swap_on_epoch=True)


def halve():
    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)


@on_jax
@pytest.mark.parametrize(
    ("make", "hidden", "callback"),
    [
        (sgd, {"kernel_constraint": keras.constraints.MinMaxNorm(0.9, 1.0, rate=0.5)}, keras.callbacks.Callback),
        (averaging, {}, swap),
        (lambda: LossScale(averaging(), initial_scale=8.0), {}, swap),
        (sgd, {}, halve),
    ],
    ids=["constraints", "averages", "averages with a loss scale", "a callback that sets the learning rate"],
)
def test_constraints_averages_and_learning_rates_follow_updates(make, hidden, callback, fit_bound):
    (x, y), models, rates = regression(32), [], []
    for optimizer, rows in ((Optimizer(make(), 4), 4), (make(), 16)):
        models.append(model := network(**hidden))
        model.compile(optimizer=optimizer, loss="mse")
        seen = model.fit(x, y, batch_size=rows, epochs=3, shuffle=False, verbose=0, callbacks=[callback()])
        rates.append(seen.history.get("learning_rate", []))
    assert error(*models) <= fit_bound
    np.testing.assert_allclose(*rates)
    expected = 0.0125 if callback is halve else 0.1
    assert keras.ops.convert_to_numpy(models[0].optimizer.inner_optimizer.learning_rate) == pytest.approx(expected)


@on_jax
def test_a_second_fit_goes_on_from_the_averages(fit_bound):
    (x, y), models = regression(32), []
    for way in ("plain", "wrapped", "micro_batched"):
        models.append(model := network())
        if way == "micro_batched":
            gradaccum.keras.micro_batched(model, 6, verify=False)
        model.compile(Optimizer(averaging(), 4) if way == "wrapped" else averaging(), loss="mse")
        for _ in range(2):
            model.fit(x, y, batch_size=4 if way == "wrapped" else 16, shuffle=False, verbose=0)
            if way == "plain":  # on JAX, weights and averages are the same buffers in plain Keras, a second fit fails
                model.set_weights(model.get_weights())
    assert max(error(model, models[0]) for model in models[1:]) <= fit_bound


def test_a_torch_loop_that_calls_backward_matches_the_large_batch(fit_bound):
    if BACKEND != "torch":
        pytest.skip("a loop of PyTorch's")
    model, optimizer = network(), Optimizer(sgd(), steps=3)
    optimizer.build(model.trainable_variables)
    for x, y in (batches := split(regression(24), [4] * 6)):
        model.zero_grad()
        keras.ops.mean(keras.losses.mean_squared_error(y, model(x))).backward()
        optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)
    assert error(model, updated(windows_of(batches, 3))) <= fit_bound


@compiled_on("tensorflow")
def test_sparse_gradients_of_an_embedding_match_the_dense_gradient(fit_bound):
    ids, y = np.random.default_rng(0).integers(0, 6, (24, 4)), np.random.default_rng(1).normal(size=(24, 2))

    def make(first, optimizer):
        model = keras.Sequential([*first, keras.layers.Flatten(), keras.layers.Dense(2)])
        model.compile(optimizer=optimizer, loss="mse")
        return model

    model = make([keras.Input((4,), dtype="int32"), keras.layers.Embedding(6, 3)], Optimizer(sgd(), steps=3))
    # The same layer with a dense gradient: on TensorFlow, plain Keras applies the rows of a sparse one one by one.
    expected = make([keras.Input((4, 6)), keras.layers.Dense(3, use_bias=False)], sgd())
    expected.set_weights(model.get_weights())
    model.fit(ids, y, batch_size=4, shuffle=False, verbose=0)
    expected.fit(np.eye(6)[ids], y, batch_size=12, shuffle=False, verbose=0)
    assert error(model, expected) <= fit_bound


# What micro-batches weigh: rows that are known, that are not, and that become known inside a window.


@on_jax
@pytest.mark.parametrize(
    ("sizes", "make", "flush"),
    [([4] * 7, sgd, False), slow([4] * 7, adam, False), ([4, 4, 2, 4], sgd, False), ([4, 4, 2, 4], sgd, True)],
)
def test_a_window_whose_rows_are_known_too_late_is_named_and_exact_if_all_are_equal_or_it_is_flushed(
    sizes, make, flush, caplog, fit_bound
):
    batches = split(regression(sum(sizes)), sizes)
    first = len(batches) // 2
    # One that has not been in a `fit` with the callback: after that, train_on_batch tells of rows as well.
    model = wrapped(make(), 4) if flush else compiled_with(Optimizer(make(), 4), jit_compile=False)
    for batch in batches[:first]:
        model.train_on_batch(*batch)
    with warnings_of(caplog):
        assert not flush or model.optimizer.flush()
        fit(model, batches[first:])
    windows = [batches[:first], batches[first:]] if flush else windows_of(batches, 4)
    assert (error(model, updated(windows, make)) <= fit_bound) == (flush or len(set(sizes)) == 1)
    assert [line for line in logged(caplog) if "longer than an epoch" not in line] == [
        f"The open window holds {first} micro-batches whose rows are not known. Each counts as if it had the next "
        "one's rows; if not, the update is not the large batch's. To close the window first, call optimizer.flush() "
        "before fit()."
    ] * (not flush)


@on_jax
@pytest.mark.parametrize("first", [False, slow(True)])
def test_a_window_that_a_backup_restores_is_discarded_where_its_epoch_begins_anew(first, tmp_path, caplog, fit_bound):
    batches = split(regression(24), [4] * 6)

    def with_backup(model, *more):
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=5)
        return fit(model, batches, *([backup, GradientAccumulation()][:: 1 if first else -1]), *more)

    with pytest.raises(RuntimeError):
        with_backup(wrapped(sgd(), 3), ends(5, RuntimeError))  # two micro-batches into the second window
    with warnings_of(caplog):
        model = with_backup(wrapped(sgd(), 3))
    assert_updates(model, [batches[:3], batches[:3], batches[3:]], fit_bound)
    assert logged(caplog)[-1] == (
        "An open window was loaded during this fit(), whose epoch starts again: the window's 2 micro-batches "
        "are discarded, because they come again."
    )


@on_jax
@SGD_AND_ADAM
def test_a_window_that_fit_with_the_callback_opened_is_closed_without_it(make, tmp_path, caplog, fit_bound):
    batches, model = split(regression(24), [4] * 6), compiled_with(Optimizer(make(), 3), jit_compile=False)
    with contextlib.suppress(KeyboardInterrupt):
        fit(model, batches, ends(2, path=tmp_path / "model.keras"))
    with warnings_of(caplog):
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert "weighs micro-batches by their rows. It stays exact with callbacks=" in caplog.text
    assert "its update is not the large batch's if their rows differ" in caplog.text
    for batch in batches[2:]:
        loaded.train_on_batch(*batch)
    assert_updates(loaded, windows_of(batches, 3), fit_bound, make)


@on_jax
@SGD_AND_ADAM
def test_large_batches_in_micro_batches_are_weighed_by_their_rows_too(make, fit_bound):
    batches = split(regression(32), [6, 6, 4, 6, 6, 4])[:3]
    model = gradaccum.keras.micro_batched(network(), 2)
    model.compile(optimizer=Optimizer(make(), 3), loss="mse")
    for _ in range(2):
        fit(model, batches)
    assert_updates(model, [batches] * 2, fit_bound, make)


@on_jax
@pytest.mark.parametrize("bad", [[0, 3], pytest.param([0, 1, 4], marks=pytest.mark.slow)])
def test_a_loss_scale_outside_drops_micro_batches_and_keeps_windows_where_they_were(bad, fit_bound):
    batches = split(regression(28), [4] * 7)
    poisoned = [(np.full_like(x, np.inf), y) if index in bad else (x, y) for index, (x, y) in enumerate(batches)]
    model = fit(compiled_with(LossScale(Optimizer(sgd(), 2), initial_scale=8.0), jit_compile=False), poisoned)
    good = [[batches[i] for i in window if i not in bad] for window in ([0, 1], [2, 3], [4, 5], [6])]
    assert_updates(model, [window for window in good if window], fit_bound)


SIZES = [3, 7, 1, 4]
SHARED = np.random.default_rng(3).normal(size=(6, 5)).astype("float32")


class WithoutTargets(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean((x["x"][:, :3] - y_pred) ** 2)


def graph(kind=keras.Model):
    """Reads a matrix that all rows share, which comes before the rows."""
    keras.utils.set_random_seed(0)
    shared, x = keras.Input((5,), name="adjacency"), keras.Input((5,), name="x")
    mixed = keras.ops.matmul(x, keras.ops.matmul(SHARED.T, shared))
    return kind({"adjacency": shared, "x": x}, keras.layers.Dense(3)(mixed))


def with_shared(batch):
    return {"adjacency": SHARED, "x": batch[0]}, *batch[1:]


@on_jax
@pytest.mark.parametrize("sizes", [SIZES, [4, 4, 4, 3]])
def test_rows_are_those_of_the_targets_where_the_first_input_is_shared_by_all_rows(sizes, fit_bound):
    data, model, plain = regression(15), graph(), graph()
    optimizer = Optimizer(sgd(), 4) if sizes is SIZES else BatchOptimizer(sgd(), 4, 16, 15, model)
    model.compile(optimizer=optimizer, loss="mse")
    plain.compile(optimizer=sgd(), loss="mse")
    fit(model, [with_shared(batch) for batch in split(data, sizes)])
    plain.fit(Batches([with_shared(data)]), shuffle=False, verbose=0)
    assert error(model, plain) <= fit_bound


@slow_where_compiled
@pytest.mark.parametrize("jit", [False, slow(True)])
def test_inputs_without_targets_must_have_the_same_number_of_rows(jit):
    model = graph(WithoutTargets)
    model.compile(optimizer=Optimizer(sgd(), 4), jit_compile=jit and BACKEND != "torch")
    # On TensorFlow only the run tells, and its error has no shapes. Compiled by XLA it is one about this operation.
    by_tensorflow = "rows_of_a_micro_batch" if jit else "must have the same number of rows"
    expected = by_tensorflow if BACKEND == "tensorflow" else r"x\['adjacency'\]  shape \(6, 5\)\n +x\['x'\]"
    for rows in (6, 4):
        with contextlib.nullcontext() if rows == 6 else pytest.raises(Exception, match=expected):
            fit(model, [with_shared((np.ones((rows, 5), "float32"),))] * 2)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="where only the run tells")
def test_a_micro_batch_of_no_rows_is_an_error():
    with pytest.raises(Exception, match="must have the same number of rows, 1 or more"):
        fit(compiled_with(Optimizer(sgd(), 2)), [TWO[0], tuple(array[:0] for array in TWO[0])])


# Several fits, and what is named.


def test_a_fit_inside_of_an_epoch_of_another_is_an_error_that_names_it():
    nested = callback("on_train_batch_end", lambda model, batch: batch == 1 and fit(model, TWO))
    with pytest.raises(gradaccum.WindowError, match="Another fit\\(\\) of this model"):
        fit(wrapped(sgd(), 4), TWO * 2, GradientAccumulation(), nested)


def test_two_callbacks_of_one_fit_are_refused_by_name():
    model, two = wrapped(sgd(), 2), [GradientAccumulation({0: 8}), GradientAccumulation(2)]
    with pytest.raises(ValueError, match="two GradientAccumulation callbacks"):
        fit(model, TWO, *two)
    fit(model, TWO, two[0])


@on_jax
def test_a_train_step_that_is_replaced_after_the_callback_began_is_an_error():
    def replace(model, logs):
        del model.train_step
        model.make_train_function(force=True)

    with pytest.raises(gradaccum.WindowError, match="were not weighed by their rows: the model's `train_step`"):
        fit(compiled_with(Optimizer(sgd(), 2), jit_compile=False), TWO, callback("on_train_begin", replace))


def with_another_optimizer(model):
    model.critic_optimizer = Optimizer(sgd(), 4)  # as a GAN has
    model.compile(optimizer=Optimizer(sgd(), 2), loss="mse")


def with_a_loss(reduction, steps=2):
    def compiled(model):
        loss = keras.losses.MeanSquaredError(reduction=reduction, name="squares")
        model.compile(optimizer=Optimizer(sgd(), steps), loss=loss, jit_compile=False)

    return compiled


@pytest.mark.parametrize(
    ("loss", "named"),
    [("dice", True), (keras.losses.Tversky(), True), (keras.losses.Circle(), True), (keras.losses.Dice(axis=1), False)],
)
def test_a_loss_that_looks_across_rows_is_named(loss, named, caplog):
    model = network()
    model.compile(Optimizer(sgd(), 2), loss)
    x, y = regression(8)
    y = np.arange(8) % 2 if isinstance(loss, keras.losses.Circle) else abs(y)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[GradientAccumulation()])
    assert ("looks across the rows of a batch" in caplog.text) == named


@on_jax
def test_variables_that_move_in_the_forward_pass_are_named_once(caplog):
    class Anneals(keras.layers.Layer):
        def build(self, shape):
            self.passes = self.add_weight(shape=(), initializer="zeros", trainable=False, name="passes")

        def call(self, inputs):
            self.passes.assign_add(1.0)
            return inputs / (1.0 + 0.01 * self.passes)

    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3), Anneals()], name="model")
    model.compile(Optimizer(sgd(), 2), "mse")
    with warnings_of(caplog):
        fit(model, FIVE[:4], GradientAccumulation(), epochs=2)
    (line,) = logged(caplog)
    assert "once per micro-batch and not once per update: 'model/anneals/passes'." in line


@on_jax
@pytest.mark.parametrize("ignored", [-1, None])
def test_a_loss_that_ignores_a_class_is_named(ignored, caplog):
    model = network()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=ignored)
    model.compile(Optimizer(sgd(), 2), loss)
    with warnings_of(caplog):
        model.fit(FIVE[0][0], np.array([0, 1, 2, 0]), batch_size=2, verbose=0, callbacks=[GradientAccumulation()])
    assert ("has ignore_class=-1, so it is a mean over the other labels" in caplog.text) == (ignored is not None)


SUM = "The loss 'squares' has reduction='sum', which is no mean over rows.*gradaccum.keras.micro_batched in place"
WEIGHTED = "has reduction='mean_with_sample_weight', which is no mean over rows where rows have sample or class weights"
OTHER = "drives only the optimizer that the model was compiled with. Not driven: model.critic_optimizer"
NAMED = [
    (with_another_optimizer, OTHER),
    (with_a_loss("sum"), SUM),
    slow(with_a_loss("mean_with_sample_weight"), WEIGHTED),
    slow(with_a_loss("sum_over_batch_size"), ""),
    slow(with_a_loss("sum", steps=1), ""),
]


@on_jax
@pytest.mark.parametrize(("compiled", "message"), NAMED)
def test_other_optimizers_and_losses_that_are_no_means_over_rows_are_named_once(compiled, message, caplog):
    compiled(model := network())
    with warnings_of(caplog):
        for callback in [GradientAccumulation()] * 2:
            fit(model, TWO, callback)
    assert len(logged(caplog)) == bool(message)
    assert re.search(message, caplog.text)


def test_what_the_callback_cannot_drive_is_an_error():
    model, (x, y) = network(), regression(8)
    model.compile(optimizer=sgd(), loss="mse")
    with pytest.raises(ValueError, match=r"whose optimizer is wrapped\. Received: SGD"):
        model.fit(x, y, verbose=0, callbacks=[GradientAccumulation(2)])
    for steps in (0, {2: 4}):
        with pytest.raises(ValueError, match="Received: steps="):
            GradientAccumulation(steps)
    if BACKEND == "torch":  # where Keras has no steps_per_execution
        return
    model.compile(optimizer=Optimizer(sgd(), 2), loss="mse", steps_per_execution=2)
    with pytest.raises(ValueError, match=r"steps_per_execution=1\. Received: steps_per_execution=2"):
        model.fit(x, y, verbose=0, callbacks=[GradientAccumulation(lambda epoch, update: 2)])


@on_jax
def test_an_error_in_training_is_not_hidden_and_leaves_the_weights_before_an_update():
    model = compiled_with(Optimizer(keras.optimizers.SGD(0.1, use_ema=True), 2))
    before = model.get_weights()
    with pytest.raises(ZeroDivisionError):
        fit(model, FIVE, ends(1, ZeroDivisionError), GradientAccumulation())
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)  # and not averages of nothing, on JAX


@on_jax
@pytest.mark.parametrize(("after", "named"), [(0, True), (1, False), (2, True)])
def test_weights_that_a_callback_changes_inside_a_window_are_named(after, named, caplog):
    def change(model, batch):
        if batch == after:
            model.set_weights([weight * 0.9 for weight in model.get_weights()])

    with warnings_of(caplog):
        fit(wrapped(sgd(), 2), FIVE[:4], callback("on_train_batch_end", change))
    said = [line for line in logged(caplog) if "changed inside an open window" in line]
    assert len(said) == named
    assert all("kernel" in line for line in said)


# BatchOptimizer without a callback, and what it notices; combinations of sizes are in tests/keras/fuzz.

QUIET = {"shuffle": False, "verbose": 0}


def sized(*sizes, of=None, **compiled):
    """The network, compiled with a BatchOptimizer of these sizes."""
    model = network()
    optimizer = BatchOptimizer(sgd(), *sizes, of or model)
    model.compile(optimizer=optimizer, loss="mse", **{"jit_compile": BACKEND == "jax", **compiled})
    return model


def micro_batches(maximum, train_size):
    sizes = [maximum] * (train_size // maximum) + [train_size % maximum] * (train_size % maximum > 0)
    return split(regression(train_size), sizes)


def source(kind, batches):
    return Batches(batches) if kind == "a dataset" else (batch for batch in batches)


@on_jax
@pytest.mark.parametrize("sizes", [(4, 12, 18), slow((32, 64, 10))])
def test_train_size_alone_tells_a_custom_loop(sizes, fit_bound):
    batches, model = micro_batches(sizes[0], sizes[2]), sized(*sizes)
    for batch in batches * 2:
        model.train_on_batch(*batch)
    assert_updates(model, windows_of(batches, 3) * 2, fit_bound)


def test_callbacks_may_be_given_by_position(fit_bound):
    batches, model = micro_batches(4, 18), sized(4, 12, 18)
    model.fit(*join(batches), 4, 1, 0, [keras.callbacks.TerminateOnNaN()], shuffle=False)
    assert_updates(model, windows_of(batches, 3), fit_bound)


@on_jax
def test_micro_batches_of_other_sizes_weigh_as_many_as_their_rows(fit_bound):
    batches, model = split(regression(18), [6, 3, 3, 2, 4]), sized(4, 12, 18)
    model.fit(Batches(batches), **QUIET)
    assert_updates(model, windows_of(batches, 3), fit_bound)


@on_jax
@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.skipif(BACKEND == "torch", reason="Keras has no steps_per_execution on PyTorch.")
@pytest.mark.parametrize("kind", ["a dataset", slow("a generator")])
def test_steps_per_execution_that_do_not_divide_the_epoch_match_the_desired_batches(kind, fit_bound):
    model, batches = sized(4, 8, 18, jit_compile=False, steps_per_execution=2), micro_batches(4, 18)
    model.fit(source(kind, batches), **QUIET)
    assert_updates(model, windows_of(batches, 2), fit_bound)


@pytest.mark.parametrize(
    ("sizes", "rows", "fit", "message"),
    [
        *(((4, 12, 18), 18, {"batch_size": size}, "has 5 micro-batches.*Received: ") for size in (8, 2, None)),
        ((4, 12, 20), 20, {"batch_size": 4, "validation_split": 0.2}, "has 5 micro-batches.*Received: 4 micro-batches"),
        ((4, 12, 20), 20, {"batch_size": 4, "steps_per_epoch": 3}, "Received: 3 micro-batches"),
        ((4, 8, 16), 16, {"batch_size": 4, "callbacks": [GradientAccumulation(2)]}, "follow from its batch sizes"),
    ],
)
def test_fit_that_breaks_a_promise_is_an_error(sizes, rows, fit, message):
    with pytest.raises(ValueError, match=message):
        sized(*sizes, jit_compile=False).fit(*regression(rows), verbose=0, **fit)


OTHER_BATCHES = [
    ((4, 8, 8), [4] * 6, "a dataset", "train_size=8"),
    *(slow((4, 8, size), [4] * 6, "a dataset", f"train_size={size}") for size in (16, 20, 28)),
    slow((4, 8, 16), [4] * 6, "a generator", "train_size=16"),
    ((4, 8, 28), [4] * 6, "a generator", "train_size=28"),
    ((4, 8, 18), [4] * 5, "a dataset", "train_size=18, but the 5 micro-batches of the epoch add up to another"),
]


@on_jax
@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize(("sizes", "rows", "kind", "message"), OTHER_BATCHES)
def test_other_batches_than_promised_are_an_error_whatever_they_come_from(sizes, rows, kind, message):
    data = source(kind, split(regression(sum(rows)), rows))
    with pytest.raises(ValueError, match=message):
        sized(*sizes, jit_compile=False).fit(data, **QUIET)


@on_jax
def test_without_a_model_a_fit_that_ends_inside_of_an_epoch_is_named(caplog):
    for train_size, named in ((18, False), (24, True)):
        model = compiled_with(BatchOptimizer(sgd(), 4, 8, train_size))
        with warnings_of(caplog):
            model.fit(*regression(18), batch_size=4, verbose=0)
        assert any("inside of an epoch of train_size" in line for line in logged(caplog)) == named


def test_another_model_is_an_error_and_one_that_is_compiled_anew_is_checked_no_more():
    x, y = regression(18)
    with pytest.raises(ValueError, match="made for another model"):
        sized(4, 12, 18, of=network(), jit_compile="auto").fit(x, y, batch_size=4, verbose=0)
    model = sized(4, 12, 18)
    model.compile(optimizer=sgd(), loss="mse")
    model.fit(x, y, batch_size=9, verbose=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(((*sizes, network), r"must be an int >= 1\. Received") for sizes in ((0, 8, 16), (4, -1, 16), (4, 8, 0))),
        ((4.5, 8, 16, network), r"maximum_batch_size=4\.5"),
        ((4, 8, 16, lambda: "model"), r"must be a keras\.Model"),
    ],
)
def test_what_is_no_size_or_model_is_an_error(arguments, message):
    *sizes, make = arguments
    with pytest.raises((TypeError, ValueError), match=message):
        BatchOptimizer(sgd(), *sizes, make())

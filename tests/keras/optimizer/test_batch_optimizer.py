"""BatchOptimizer: exact for every combination of sizes, without a callback; and what it notices."""

import logging

import keras
import numpy as np
import pytest

from gradaccum.keras.callbacks import GradientAccumulation
from gradaccum.keras.optimizers import BatchOptimizer
from tests.keras.problems import (
    BACKEND,
    Batches,
    adam,
    compiled_on,
    error,
    join,
    network,
    plain,
    regression,
    sgd,
    slow,
    slow_where_compiled,
    split,
    updated,
)
from tests.reference import windows_of

SIZES = {
    # maximum, desired, train_size
    "all divide": (4, 16, 48),
    "a ragged last micro-batch": (4, 12, 42),
    "the last micro-batch is a window": (4, 8, 34),
    "desired is no multiple of maximum": (4, 10, 41),
    "desired is greater than the epoch": (4, 100, 18),
    "desired is less than maximum": (8, 3, 20),
    "maximum is greater than the epoch": (32, 64, 10),
    "one row at a time": (1, 3, 7),
}


def sized(*sizes, make=sgd, of=None, **compiled):
    """The network, compiled with a BatchOptimizer of these sizes."""
    model = network()
    optimizer = BatchOptimizer(make(), *sizes, of or model)
    model.compile(optimizer=optimizer, loss="mse", **{"jit_compile": BACKEND == "jax", **compiled})
    return model


def micro_batches(maximum, train_size):
    sizes = [maximum] * (train_size // maximum) + [train_size % maximum] * (train_size % maximum > 0)
    return split(regression(train_size), sizes)


OFTEN = ["a ragged last micro-batch", "desired is no multiple of maximum", "desired is less than maximum"]
CASES = [
    (OFTEN[0], sgd),
    *(slow(name, make) for name, make in [(OFTEN[0], adam), *((name, sgd) for name in OFTEN[1:])]),
    *(pytest.param(name, sgd, marks=pytest.mark.slow) for name in SIZES if name not in OFTEN),
    *(pytest.param(name, adam, marks=pytest.mark.slow) for name in SIZES if name != OFTEN[0]),
]


@pytest.mark.parametrize(("sizes", "make"), CASES)
def test_fit_matches_the_desired_batches(sizes, make, fit_bound):
    maximum, desired, train_size = SIZES[sizes]
    batches = micro_batches(maximum, train_size)
    model = sized(maximum, desired, train_size, make=make)
    model.fit(*join(batches), batch_size=maximum, epochs=2, shuffle=False, verbose=0)
    steps = -(-desired // maximum)
    assert int(model.optimizer.iterations) == 2 * len(windows_of(batches, steps))
    assert error(model, plain(network(), make(), batches, steps, 2)) <= fit_bound


@compiled_on("jax")
def test_train_size_alone_tells_a_custom_loop(fit_bound):
    batches = micro_batches(4, 18)
    model = sized(4, 12, 18)
    for _ in range(2):
        for batch in batches:
            model.train_on_batch(*batch)
    assert int(model.optimizer.iterations) == 4
    assert error(model, plain(network(), sgd(), batches, 3, 2)) <= fit_bound


@slow_where_compiled
def test_a_model_with_batch_normalization_trains_and_is_named():
    keras.utils.set_random_seed(0)
    norm = keras.layers.BatchNormalization(name="b")
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(7), norm, keras.layers.Dense(3)])
    with pytest.warns(UserWarning, match="BatchNormalization normalises each micro-batch by itself.*: 'b'"):
        optimizer = BatchOptimizer(adam(), 4, 8, 16, model)
    model.compile(optimizer=optimizer, loss="mse", jit_compile=BACKEND == "jax")
    x, y = regression(16)
    history = model.fit(x, y, batch_size=4, epochs=5, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert np.isfinite(model.evaluate(x, y, verbose=0))


def test_the_start_up_line_states_the_effective_size_where_it_differs(caplog):
    with caplog.at_level(logging.INFO, "gradaccum"):
        BatchOptimizer(adam(), 16, 256, 1000, network())
        BatchOptimizer(adam(), 48, 100, 1000, network())
        BatchOptimizer(adam(), 16, 256, 100, network())
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "Wrapping" in line] == [
        f"Wrapping 'Adam' Keras optimizer with GA of {steps} steps" for steps in (16, 3, 16)
    ]
    assert [line.split(":")[0] for line in lines if "effective" in line] == [
        "The effective batch size is 144, not the desired 100",
        "The effective batch size is 100, not the desired 256",
    ]


@compiled_on("jax")
def test_an_epoch_that_was_interrupted_leaves_the_next_ones_aligned(fit_bound):
    batches = micro_batches(4, 18)

    class Interrupts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise KeyboardInterrupt

    model = sized(4, 12, 18)
    arguments = {"batch_size": 4, "shuffle": False, "verbose": 0}
    with pytest.raises(KeyboardInterrupt):
        model.fit(*join(batches), **arguments, callbacks=[Interrupts()])
    model.fit(*join(batches), **arguments)
    assert error(model, updated([batches[:3], batches[:3], batches[3:]])) <= fit_bound


# Bad input.


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
    x, y = regression(rows)
    with pytest.raises(ValueError, match=message):
        sized(*sizes, jit_compile=False).fit(x, y, verbose=0, **fit)


OTHER_BATCHES = [
    ((4, 8, 8), [4] * 6, "a dataset", "train_size=8"),
    *(slow((4, 8, size), [4] * 6, "a dataset", f"train_size={size}") for size in (16, 20, 28)),
    slow((4, 8, 16), [4] * 6, "a generator", "train_size=16"),
    ((4, 8, 28), [4] * 6, "a generator", "train_size=28"),
    ((4, 8, 18), [4] * 5, "a dataset", "train_size=18, but the 5 micro-batches of the epoch add up to another"),
]


@compiled_on("jax")
@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize(("sizes", "rows", "kind", "message"), OTHER_BATCHES)
def test_other_batches_than_promised_are_an_error_whatever_they_come_from(sizes, rows, kind, message):
    batches = split(regression(sum(rows)), rows)
    data = Batches(batches) if kind == "a dataset" else (batch for batch in batches)
    with pytest.raises(ValueError, match=message):
        sized(*sizes, jit_compile=False).fit(data, shuffle=False, verbose=0)


@compiled_on("jax")
def test_micro_batches_of_other_sizes_weigh_as_many_as_their_rows(fit_bound):
    batches = split(regression(18), [6, 3, 3, 2, 4])
    model = sized(4, 12, 18)
    model.fit(Batches(batches), shuffle=False, verbose=0)
    assert error(model, updated([batches[:3], batches[3:]])) <= fit_bound


@compiled_on("jax")
@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.skipif(BACKEND == "torch", reason="Keras has no steps_per_execution on PyTorch.")
@pytest.mark.parametrize("kind", ["a dataset", slow("a generator")])
def test_steps_per_execution_that_do_not_divide_the_epoch_match_the_desired_batches(kind, fit_bound):
    model, batches = sized(4, 8, 18, jit_compile=False, steps_per_execution=2), micro_batches(4, 18)
    data = Batches(batches) if kind == "a dataset" else (batch for batch in batches)
    model.fit(data, shuffle=False, verbose=0)
    assert error(model, plain(network(), sgd(), batches, 2, 1)) <= fit_bound


def test_another_model_is_an_error():
    x, y = regression(18)
    with pytest.raises(ValueError, match="made for another model"):
        sized(4, 12, 18, of=network(), jit_compile="auto").fit(x, y, batch_size=4, verbose=0)


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


def test_a_model_that_is_compiled_anew_is_checked_no_more():
    model, (x, y) = network(), regression(18)
    BatchOptimizer(sgd(), 4, 12, 18, model)
    model.compile(optimizer=sgd(), loss="mse")
    model.fit(x, y, batch_size=9, verbose=0)

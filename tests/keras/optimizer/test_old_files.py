"""Files of version 0.1, saved in the middle of a window, load and continue exactly.

Each in tests/keras/data is a Dense layer, 3 -> 2, that was trained with `jit_compile=False` and saved by `model.save`;
the keywords that Keras 3.10 does not know were taken out of its config.
"""

from pathlib import Path

import keras
import numpy as np
import pytest

from gradaccum.keras.callbacks import GradientAccumulation
from tests.keras.problems import error, slow, slow_where_compiled
from tests.reference import keras_updates

DATA = Path(__file__).parents[1] / "data"
GENERATOR = np.random.default_rng(0)
X, Y = (GENERATOR.normal(size=(16, size)).astype("float32") for size in (3, 2))
"""What the files were trained on, in micro-batches of 4 rows."""
FILES = {
    # name: (the plain optimizer, micro-batches in its open window, how many it was trained on, large batches)
    "adam": (lambda: keras.optimizers.Adam(0.01), 1, 1, [slice(0, 12)]),
    "rows": (lambda: keras.optimizers.SGD(0.1, momentum=0.9), 2, 2, [slice(0, 12)]),
    "sizes": (lambda: keras.optimizers.SGD(0.1, momentum=0.9), 1, 3, [slice(0, 8), slice(8, 14)]),
}
"""`Optimizer(Adam(0.01), 3)`; `SGD({0: 3, 2: 4}, ...)` in a fit with the callback; `BatchOptimizer(..., 4, 8, 14)`."""


@slow_where_compiled
@pytest.mark.parametrize("name", ["adam", slow("rows"), slow("sizes")])
def test_a_file_of_version_0_1_continues_in_the_middle_of_its_window(name):
    make, micro_batches, trained, large_batches = FILES[name]
    model = keras.models.load_model(DATA / f"{name}.keras")
    assert model.optimizer.micro_batches == micro_batches
    expected = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    expected.set_weights([np.linspace(-1, 1, 6).reshape(3, 2), np.zeros(2)])
    expected.compile(optimizer=make(), loss="mse")
    keras_updates(expected, [(X[rows], Y[rows]) for rows in large_batches])
    end = large_batches[-1].stop
    for start in range(4 * trained, end, 4):
        rows = slice(start, min(start + 4, end))
        if name == "rows":
            model.fit(X[rows], Y[rows], batch_size=4, verbose=0, callbacks=[GradientAccumulation()])
        else:
            model.train_on_batch(X[rows], Y[rows])
    assert model.optimizer.micro_batches == 0
    assert int(model.optimizer.iterations) == len(large_batches)
    assert error(model, expected) <= 1e-6

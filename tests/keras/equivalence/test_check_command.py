"""`gradaccum check file.py:make` on compiled Keras models."""

import json

from click.testing import CliRunner

from gradaccum.cli import commands
from tests.keras.problems import slow_where_compiled

FILE = """
import keras
import numpy as np

def make(norm=keras.layers.LayerNormalization):
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    model = keras.Sequential([keras.layers.Input((6,)), dense(8), norm(name="norm"), dense(3)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random = np.random.default_rng(0)
    return model, (random.normal(size=(12, 6)).astype("float32"), random.integers(3, size=12)), None

def different():
    return make(keras.layers.BatchNormalization)

def uncompiled():
    return keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(8)]), make()[1], None
"""


def check(folder, *arguments):
    file = folder / "keras_experiment.py"
    file.write_text(FILE, encoding="utf-8")
    name, *options = arguments
    return CliRunner().invoke(commands, ["check", f"{file}:{name}", *options])


@slow_where_compiled
def test_a_model_that_treats_rows_one_by_one_is_exit_code_0(tmp_path):
    result = check(tmp_path, "make", "--micro-batch-size", "4")
    assert result.exit_code == 0, result.output
    assert "The accumulated gradient is the large batch's" in result.stdout


@slow_where_compiled
def test_batch_normalization_is_named_with_exit_code_1(tmp_path):
    result = check(tmp_path, "different", "--json")
    assert result.exit_code == 1, result.output
    (cause,) = json.loads(result.stdout)["causes"]
    assert (cause["kind"], cause["where"].rpartition("/")[2]) == ("batch_norm", "norm")


def test_bad_input_is_one_clear_line(tmp_path):
    for arguments, part in [(["uncompiled"], "compile"), (["make", "--device", "cuda"], "--device is for PyTorch")]:
        result = check(tmp_path, *arguments)
        assert result.exit_code == 2
        (line,) = result.stderr.strip().splitlines()
        assert line.startswith("Error: ")
        assert part in line

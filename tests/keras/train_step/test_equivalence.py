"""`check_equivalence` on compiled Keras models: what it says, and that it names the culprit."""

from __future__ import annotations

import json
import re

import keras
import numpy as np
import pytest
from click.testing import CliRunner
from keras import layers, losses

from gradaccum.cli import commands
from gradaccum.errors import NotEquivalentError
from gradaccum.keras import check_equivalence, micro_batched
from tests.keras.problems import ACTIVITY, compiled_on, slow_where_compiled
from tests.keras.train_step.test_micro_batched import (
    CLASSES,
    ROWS,
    TWO_INPUTS,
    TWO_TARGETS,
    WEIGHTS,
    X,
    classifier,
    crossentropy,
    two_losses,
    two_outputs,
)
from tests.keras.train_step.test_proof import AddsSum, Sampling
from tests.reference import relative_error


def compiled(model, **kwargs):
    model.compile(**{"optimizer": "sgd", **crossentropy(), **kwargs})
    return model


@compiled_on("tensorflow")
def test_equal_models_pass_and_stay_as_they_are(tmp_path):
    model = compiled(classifier(kernel_regularizer="l2", activity_regularizer=ACTIVITY))
    before = model.get_weights()
    result = check_equivalence(model, X, CLASSES, WEIGHTS, micro_batch_size=4)
    assert result.raise_if_different() is result
    assert result.save(tmp_path / "result.json").exists()
    assert result.max_error < 1e-5
    assert relative_error(model.get_weights(), before) == 0
    assert not [name for layer in model.layers for name in vars(layer) if name == "call"]
    assert model.optimizer.iterations == 0


@slow_where_compiled
def test_masks_and_several_outputs_pass():
    assert check_equivalence(compiled(two_outputs(), **two_losses()), TWO_INPUTS, TWO_TARGETS, micro_batch_size=3).ok


@compiled_on("tensorflow")
def test_dropout_is_no_difference():
    model = keras.Sequential([layers.Dense(8), layers.Dropout(0.5), layers.Dense(3, activation="softmax")])
    result = check_equivalence(compiled(model), X, CLASSES)
    assert result.ok
    assert any("dropout" in note for note in result.notes)


@slow_where_compiled
def test_the_micro_batch_size_is_that_of_micro_batched():
    result = check_equivalence(micro_batched(compiled(classifier()), 5), X, CLASSES)
    assert (5, 5, 4, 4, 4) in result.partitions


CAUSES = {
    "BatchNormalization": (lambda: layers.BatchNormalization(name="bn"), {}, CLASSES, ("batch_norm", "bn")),
    # Behind a layer that draws numbers whether it trains or not.
    "a layer": (
        lambda: keras.Sequential([Sampling(keras.random.SeedGenerator(3)), layers.Softmax(axis=0, name="mixing")]),
        {}, CLASSES, ("mixes_rows", "mixing")),
    "a loss": (lambda: layers.Dense(3, "sigmoid"), {"loss": losses.Dice()}, np.eye(3)[CLASSES], ("loss", None)),
    "an added loss": (AddsSum, {}, CLASSES, ("regulariser", "losses[0]")),
}  # fmt: skip


@compiled_on("tensorflow")
@pytest.mark.parametrize("name", CAUSES)
def test_what_is_not_exact_is_named(name):
    make, options, y, (kind, where) = CAUSES[name]
    last = layers.Dense(3, "sigmoid" if options else "softmax")  # with softmax, Dice is a mean over rows
    model = compiled(keras.Sequential([layers.Dense(8), make(), last]), **options)
    result = check_equivalence(model, X, y)
    ((found, place),) = [(cause.kind, cause.where) for cause in result.causes]
    assert found == kind
    assert place.endswith(where or "")
    with pytest.raises(NotEquivalentError, match=(where and re.escape(where)) or "'dice'"):
        result.raise_if_different()
    if kind == "batch_norm":
        assert check_equivalence(model, X, y, batch_norm="frozen").ok


def test_bad_input_is_refused():
    model, plain = compiled(classifier()), classifier()
    for error, said, *arguments in [
        (TypeError, r"keras\.Model", print, X, CLASSES),
        (ValueError, "compiled", plain, X, CLASSES),
        (ValueError, "at least 2 rows", model, X[:1], CLASSES[:1]),
        (ValueError, "same number of rows", model, X, CLASSES[: ROWS - 1]),
    ]:
        with pytest.raises(error, match=said):
            check_equivalence(*arguments)
    with pytest.raises(ValueError, match="micro_batch_size"):
        check_equivalence(model, X, CLASSES, micro_batch_size=0)


# `gradaccum check file.py:make`.

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


def check(folder, name, *options):
    file = folder / "keras_experiment.py"
    file.write_text(FILE, encoding="utf-8")
    return CliRunner().invoke(commands, ["check", f"{file}:{name}", *options])


@slow_where_compiled
def test_the_command_names_batch_normalization_with_exit_code_1_and_passes_other_models_with_0(tmp_path):
    result = check(tmp_path, "make", "--micro-batch-size", "4")
    assert result.exit_code == 0, result.output
    assert "The accumulated gradient is the large batch's" in result.stdout
    result = check(tmp_path, "different", "--json")
    assert result.exit_code == 1, result.output
    (cause,) = json.loads(result.stdout)["causes"]
    assert (cause["kind"], cause["where"].rpartition("/")[2]) == ("batch_norm", "norm")


def test_bad_input_to_the_command_is_one_clear_line(tmp_path):
    for arguments, part in [(["uncompiled"], "compile"), (["make", "--device", "cuda"], "--device is for PyTorch")]:
        result = check(tmp_path, *arguments)
        assert result.exit_code == 2
        (line,) = result.stderr.strip().splitlines()
        assert line.startswith("Error: ")
        assert part in line
